"""JSON as dumps have it: orjson where it is installed, NaN and Infinity as Python writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def _fast() -> Callable[[bytes], Any] | None:
    """orjson's reader; without it the same is read slower."""
    try:
        import orjson
    except ImportError:
        return None
    return orjson.loads


def parsed(text: bytes) -> Any:
    """One JSON value. Errors: `ValueError`, one line that says where and why."""
    fast = _fast()
    if fast is not None:
        try:
            return fast(text)
        except ValueError:
            pass  # NaN, 4300 digits, surrogates: or broken; the standard library says which
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as err:
        raise ValueError(f"not UTF-8 at byte {err.start}") from None
    except json.JSONDecodeError as err:
        raise ValueError(f"not JSON at character {err.pos}: {' '.join(err.msg.split())}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: thousands of brackets inside each other") from None
