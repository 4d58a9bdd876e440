"""How numbers are written for people. Formatting only."""

from __future__ import annotations

import math
import re


def number(x: float | None, digits: int = 3) -> str:
    """`digits` significant digits; a dash for what is not there, or is no number in a file."""
    if not isinstance(x, (int, float)):
        return "–"
    if not math.isfinite(x) or x == 0:
        return f"{x + 0:g}"  # + 0: no minus zero
    return f"{x:,.0f}" if 1000 <= abs(x) < 1e9 else _short_power(f"{x:.{digits}g}")


def _short_power(text: str) -> str:
    """1.5e-06 as 1.5e-6."""
    return re.sub(r"e([+-])0", r"e\1", text)


def count(n: int) -> str:
    """A count; from 100,000 up in thousands, from a million up in millions."""
    return f"{n:,}" if n < 100_000 else f"{n / 1e3:,.0f}k" if n < 1_000_000 else f"{n / 1e6:,.1f}M"


def interval(lower: float | None, upper: float | None) -> str:
    """`[lower, upper]`, empty where there is none."""
    return "" if lower is None or upper is None else f"[{number(lower)}, {number(upper)}]"


def near_one(x: float | None) -> str:
    """Five decimals: for means of ratios, whose distance to 1 is what matters."""
    return f"{x:.5f}" if x is not None and abs(x) < 100 else number(x)


def share(x: float | None) -> str:
    """A share as percent; very small ones as a power of ten."""
    if x is None or not math.isfinite(x):
        return number(x)
    return f"{100 * x:.3g}%" if x == 0 or abs(x) >= 1e-5 else _short_power(f"{x:.0e}")


def factor(x: float | None) -> str:
    """A ratio; far below 1 as `1 / n`."""
    if x is not None and 0 < x < 0.01:
        return f"1 / {number(1 / x)}"
    return number(x)
