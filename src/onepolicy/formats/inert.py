"""What lies on a pickle machine's stack beside plain values: names of the table, and objects of listed classes.

Nothing here runs code of another package, and nothing here can be changed by a pickle but an `Opaque`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from onepolicy.errors import ContentError
from onepolicy.formats.storages import Tensor

#: An archive in an archive (`torch.save` into bytes, pickled): at most so many around each other.
MAX_DEPTH = 4


@dataclass(slots=True)
class Context:
    """Where a pickle stands. `place`: the file, for messages. `size`: bytes of the file, which bound what its values
    may claim. `export`: lines that write the same data as JSON lines where the framework runs, for refusals."""

    place: str
    size: int
    export: str = ""
    depth: int = 0
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    spent: int = 0
    load_bytes: Callable[[bytes], Any] | None = None

    def spend(self, n: int) -> None:
        """Counts elements that are copied: a pickle can ask for the same copy again in three bytes.

        Errors: `ContentError` beyond a few times the file.
        """
        self.spent += n
        if self.spent > 4 * self.size + (1 << 20):
            raise self.fail("it makes copies of its own values, far more than it has bytes; not read on")

    def fail(self, why: str) -> ContentError:
        return ContentError(f"{self.place}: {why}")

    def refuse(self, what: str) -> ContentError:
        """The one line, and below it how to get the data without a pickle."""
        text = f"{self.place}: refused: {what}; nothing of it was run"
        if self.export:
            text += f". Where the framework runs, write it as JSON lines:\n{self.export.rstrip()}"
        return ContentError(text)


Make = Callable[[Context, tuple[Any, ...]], Any]


class Known:
    """A name of the table, as it lies on the stack. Identity hash; it has no attributes that a pickle could set."""

    __slots__ = ("make", "module", "name")

    def __init__(self, module: str, name: str, make: Make) -> None:
        self.module, self.name, self.make = module, name, make

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"


class Opaque:
    """An object of a listed class: its arguments, its state, and what it holds as a dict or a list.

    `state` is whatever `__getstate__` gave: a dict of attributes, a tuple, None.
    """

    __slots__ = ("args", "entries", "items", "module", "name", "state")

    def __init__(self, module: str, name: str, args: tuple[Any, ...]) -> None:
        self.module, self.name, self.args = module, name, args
        self.state: Any = None
        self.items: dict[Any, Any] = {}
        self.entries: list[Any] = []

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute of that name in its state."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}>"


def shown(text: str) -> str:
    """Names come from the file: no control characters reach the terminal."""
    return ascii(text[:80])[1:-1]


def hashable(key: Any) -> bool:
    """Keys whose hash is cheap and that cannot be made to collide: no nested tuples, no integers beyond the hash's own
    range (a pickle of such keys can hang a dict for hours, or end the process)."""
    kind = type(key)
    if kind is int:
        return -(2**61) + 1 < key < 2**61 - 1
    if kind is tuple:
        return len(key) <= 16 and all(type(x) is str for x in key)
    return kind in _PLAIN_KEYS


_PLAIN_KEYS = (str, bytes, float, bool, type(None), Known, Opaque)
