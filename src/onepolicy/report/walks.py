"""Eight answers' walks with their envelope, drawn for a terminal and as SVG. The numbers come from `metrics.walks`.

`walks`: `tokens` `[P]`, `log_ratio` `[W, P]`, `drift`, `lower`, `upper` `[P]` (nats), `reading`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import escape

from onepolicy.report.numbers import number

#: Rows of the terminal drawing; columns of the labels at its left and right.
_ROWS, _LEFT, _RIGHT = 17, 8, 10
#: Braille: the bit of each dot of a cell, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_NUMERALS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")


def caption(walks: Mapping[str, Any], label: str) -> str:
    n = len(walks["log_ratio"])
    return f"{_NUMERALS[n]} answer{'' if n == 1 else 's'}, {label}"


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values within low .. high, `most` at most, a step of 1, 2 or 5 times a power of ten apart."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(m for m in (1, 2, 5, 10, 20) if (high - low) / (step * m) < most)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def extent(walks: Mapping[str, Any]) -> tuple[float, float]:
    """Lowest and highest log-ratio of the drawing, a little air included."""
    values = [y for row in (*walks["log_ratio"], walks["lower"], walks["upper"]) for y in row]
    low, high = min(values), max(values)
    air = 0.04 * (high - low) or 1.0
    return low - air, high + air


def ratio_label(log_ratio: float) -> str:
    """e^y as people say it: ×2.7, 1/2.7, ×1.0002, 1/2.2e4; far beyond floats too. At most ten characters."""
    size = abs(log_ratio)
    if size < 1e-6 or size > 2e6:
        return "×1" if size < 1e-6 else ""
    factor = _power(size) if size > math.log(9999) else number(math.exp(size), _digits(size))
    return f"×{factor}" if log_ratio > 0 else f"1/{factor}"


def _digits(size: float) -> int:
    """Significant digits of e^size, more the nearer it is to 1, so that neighbouring labels differ."""
    return 2 if 0.5 < size < 4.6 else max(3, 2 + math.ceil(-math.log10(size)))


def _power(size: float) -> str:
    """e^size as 2.2e4, by its logarithm; without the 2.2 where only the exponent says anything."""
    exponent, fraction = divmod(size / math.log(10), 1.0)
    digits = f"{10**fraction:.{1 if exponent < 1000 else 0}f}"
    return f"1e{exponent + 1:.0f}" if digits.startswith("10") else f"{digits.removesuffix('.0')}e{exponent:.0f}"


def _token_ticks(last: int, most: int) -> list[float]:
    """There is no half of a token."""
    return [t for t in ticks(0, last, most) if t == round(t)]


# -- terminal ----------------------------------------------------------------------------------------------------------


def terminal(walks: Mapping[str, Any], width: int = 100) -> str:
    """The drawing as lines of text, 60 to 100 columns wide."""
    columns = max(60, min(width, 100)) - _LEFT - _RIGHT - 2
    low, high = extent(walks)
    cells = _curve("·", walks["tokens"], walks["drift"], columns, low, high)
    cells |= {cell: chr(0x2800 + bits) for cell, bits in _braille(walks, columns, low, high).items()}
    for edge in ("lower", "upper"):
        curve = _curve("━", walks["tokens"], walks[edge], columns, low, high)
        cells |= {cell: mark for cell, mark in curve.items() if cell[1] % 4 < 2}  # dashes, in front of the walks
    at = {_row(y, low, high): y for y in ticks(low, high, 9)}
    lines = [f"{'nats':>{_LEFT}} {'':{columns + 1}} {'ratio'}"]
    for row in range(_ROWS):
        body = "".join(cells.get((row, c), " ") for c in range(columns))
        y = at.get(row)
        left, right = ("", "") if y is None else (number(round(y, 12)), ratio_label(y))
        lines.append(f"{left:>{_LEFT}} {'│' if y is None else '┤'}{body} {right}".rstrip())
    return "\n".join([*lines, *_token_axis(walks["tokens"][-1], columns)])


def _row(y: float, low: float, high: float) -> int:
    return min(_ROWS - 1, max(0, int((high - y) / (high - low) * _ROWS)))


def _curve(
    mark: str, tokens: Sequence[int], values: Sequence[float], columns: int, low: float, high: float
) -> dict[tuple[int, int], str]:
    """One mark a column."""
    at = (((c + 0.5) / columns * tokens[-1], c) for c in range(columns))
    return {(_row(_between(tokens, values, x), low, high), c): mark for x, c in at}


def _between(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """The curve at `at`, straight between its points."""
    i = next((i for i, edge in enumerate(x) if edge >= at), len(x) - 1)
    if i == 0 or x[i] == x[i - 1]:
        return y[i]
    return y[i - 1] + (y[i] - y[i - 1]) * (at - x[i - 1]) / (x[i] - x[i - 1])


def _braille(walks: Mapping[str, Any], columns: int, low: float, high: float) -> dict[tuple[int, int], int]:
    """Cell -> bits of its dots. Each walk is a connected line: the dots from one column's height to the next one's."""
    cells: dict[tuple[int, int], int] = {}
    dots = 4 * _ROWS
    for walk in walks["log_ratio"]:
        before = None
        for x in range(2 * columns):
            value = _between(walks["tokens"], walk, x / (2 * columns - 1) * walks["tokens"][-1])
            y = min(dots - 1, max(0, int((high - value) / (high - low) * dots)))
            for dot in _steps(before, y):
                cell = dot // 4, x // 2
                cells[cell] = cells.get(cell, 0) | _DOTS[dot % 4][x % 2]
            before = y
    return cells


def _steps(before: int | None, y: int) -> range:
    """The dots of one column: from beside the last one's to this one's."""
    if before is None or abs(y - before) <= 1:
        return range(y, y + 1)
    return range(before + 1, y + 1) if y > before else range(y, before)


def _token_axis(last: int, columns: int) -> Iterator[str]:
    marks, labels = ["─"] * columns, [" "] * (columns + _RIGHT)
    for t in _token_ticks(last, 6):
        c = min(columns - 1, round(t / last * (columns - 1)))
        text = number(t)
        start = max(0, min(c - len(text) // 2, columns + _RIGHT - len(text)))
        marks[c], labels[start : start + len(text)] = "┴", list(text)
    yield f"{'':>{_LEFT}} └{''.join(marks)}"
    yield f"{'tokens':>{_LEFT}}  {''.join(labels)}".rstrip()


# -- SVG ---------------------------------------------------------------------------------------------------------------

_WIDE, _TALL = 750, 400
_BOX = (84, 48, 650, 350)  # left, top, right, bottom of the plot
#: Eight hues that stand out from white and from near-black, at least 3 to 1.
_HUES = ("#2f7dc4", "#c8591b", "#2a9160", "#b5478a", "#7a67d0", "#8f7a14", "#178fa0", "#d0453f")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-weight:600;font-size:14px}.n{fill:#555}"
    ".bg{fill:#fff}.ax{stroke:#777;fill:none}.gr{stroke:#8884;fill:none}.w{fill:none;stroke-width:1.2}"
    ".en{fill:none;stroke:#222;stroke-width:1.6;stroke-dasharray:7 5}.dr{fill:none;stroke:#222;stroke-dasharray:1 4}"
    "@media(prefers-color-scheme:dark){text{fill:#e6e6e6}.n{fill:#aaa}.bg{fill:#14161a}.ax{stroke:#999}"
    ".en,.dr{stroke:#e6e6e6}}"
)


def svg(walks: Mapping[str, Any], title: str, note: str) -> str:
    """One self-contained SVG, readable on light and on dark, with a title and a description for screen readers."""
    low, high = extent(walks)
    last = walks["tokens"][-1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_TALL}" width="{_WIDE}" height="{_TALL}" '
        'role="img" aria-labelledby="walks-title walks-desc">',
        f'<title id="walks-title">{escape(title)}</title>',
        f'<desc id="walks-desc">{escape(_described(walks, note))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="bg" width="{_WIDE}" height="{_TALL}"/>',
        f'<text class="t" x="{_BOX[0]}" y="20">{escape(title)}</text>',
        f'<text class="n" x="{_BOX[0]}" y="37">{escape(note)}</text>',
        *_axes(low, high, last),
    ]
    for hue, walk in zip(_HUES, walks["log_ratio"], strict=False):
        parts.append(f'<path class="w" stroke="{hue}" d="{_path(walks["tokens"], walk, low, high)}"/>')
    for name, curve in (("dr", walks["drift"]), ("en", walks["lower"]), ("en", walks["upper"])):
        parts.append(f'<path class="{name}" d="{_path(walks["tokens"], curve, low, high)}"/>')
    return "\n".join([*parts, "</svg>"])


def _described(walks: Mapping[str, Any], note: str) -> str:
    ends = ", ".join(number(walk[-1], 2) for walk in walks["log_ratio"])
    lower, upper = (walks[k][-1] for k in ("lower", "upper"))
    return (
        f"{note}. Log-ratio in nats against tokens. After {walks['tokens'][-1]:,} tokens the walks are at {ends}; "
        f"the dashed envelope is from {number(lower, 2)} to {number(upper, 2)} around a drift of "
        f"{number(walks['drift'][-1], 2)}."
    )


def _x(tokens: float, last: int) -> float:
    return _BOX[0] + tokens / last * (_BOX[2] - _BOX[0])


def _y(value: float, low: float, high: float) -> float:
    return _BOX[1] + (high - value) / (high - low) * (_BOX[3] - _BOX[1])


def _path(tokens: Sequence[int], values: Sequence[float], low: float, high: float) -> str:
    """Steps between points, in tenths of a unit: half the size of absolute points, and no rounding adds up."""
    points = [
        (round(10 * _x(t, tokens[-1])), round(10 * _y(v, low, high))) for t, v in zip(tokens, values, strict=True)
    ]
    steps = ((b[0] - a[0], b[1] - a[1]) for a, b in pairwise(points))
    start = f"M{points[0][0] / 10:g} {points[0][1] / 10:g}"
    return start + "l" + re.sub(r"\b0\.", ".", " ".join(f"{dx / 10:g} {dy / 10:g}" for dx, dy in steps))


def _axes(low: float, high: float, last: int) -> Iterator[str]:
    left, top, right, bottom = _BOX
    for y in ticks(low, high, 9):
        at = f"{_y(y, low, high):.1f}"
        yield f'<path class="gr" d="M{left} {at}H{right}"/>'
        yield f'<text x="{left - 6}" y="{at}" dy=".35em" text-anchor="end">{number(round(y, 12))}</text>'
        yield f'<text class="n" x="{right + 6}" y="{at}" dy=".35em">{ratio_label(y)}</text>'
    for t in _token_ticks(last, 7):
        at = f"{_x(t, last):.1f}"
        yield f'<path class="ax" d="M{at} {bottom}v5"/>'
        yield f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{number(t)}</text>'
    yield f'<path class="ax" d="M{left} {top}V{bottom}H{right}"/>'
    yield f'<text class="n" x="{(left + right) / 2:.0f}" y="{_TALL - 10}" text-anchor="middle">tokens</text>'
    middle = (top + bottom) // 2
    yield f'<text class="n" transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">log-ratio, nats</text>'
    yield (
        f'<text class="n" transform="translate({_WIDE - 8} {middle}) rotate(-90)" text-anchor="middle">'
        "ratio of the answer</text>"
    )
