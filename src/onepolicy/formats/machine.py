"""The pickle machine: its stack, its memo, and what each instruction does to them. It can run nothing.

Names go through `names.find`; what a pickle "calls" is a constructor of that table. State is set on our own inert
objects only. Numbers in a row, which a dump of lists is made of, are read together.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from onepolicy.formats.inert import Context, Known, Opaque, hashable
from onepolicy.formats.names import find
from onepolicy.formats.storages import Array, DType

#: Lists, dicts, sets and tuples of one pickle: one byte of a file makes one, which needs 50 to 200 bytes.
_CONTAINERS = 20_000_000
#: Numbers that are read at once; `pickle` writes lists in pieces of 1000.
_RUN = 1000


class Stop(Exception):
    """The pickle is at its end; the value is on the stack."""


class Machine:
    """Reads one pickle of `data` from `start`. `persistent` gives the object of a persistent id, if the file has any.

    After `instructions.run`, `pos` is the first byte behind the pickle.
    """

    def __init__(
        self, data: bytes, context: Context, start: int = 0, persistent: Callable[[Any], Any] | None = None
    ) -> None:
        self.data, self.pos, self.context, self.persistent = data, start, context, persistent
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.containers = 0

    # reading

    def take(self, n: int) -> bytes:
        piece = self.data[self.pos : self.pos + n]
        if n < 0 or len(piece) != n:
            raise self.context.fail(f"damaged pickle: {n} bytes are announced at byte {self.pos}, the file ends before")
        self.pos += n
        return piece

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.pos)
        self.pos += struct.calcsize(form)
        return value

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.pos)
        text = self.data[self.pos : end]
        self.pos = end + 1
        return text

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def container(self, value: Any) -> None:
        self.containers += 1
        if self.containers > _CONTAINERS:
            raise self.context.fail(f"more than {_CONTAINERS} lists, dicts and tuples in one pickle; not read on")
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marked.pop()
        return items

    # numbers

    def small_ints(self) -> None:
        """BININT1, BININT2, BININT, as many as stand behind each other."""
        if self.data[self.pos - 1 : self.pos + 2 : 2] == b"KK":
            self.pos += len(self.run_of(0x4B, 2, "u1")) * 2 - 1
            return
        data, pos, push, unpack = self.data, self.pos - 1, self.stack.append, struct.Struct("<i").unpack_from
        while True:
            op = data[pos]
            if op == 0x4B:
                push(data[pos + 1])
                pos += 2
            elif op == 0x4D:
                push(data[pos + 1] | data[pos + 2] << 8)
                pos += 3
            elif op == 0x4A:
                push(unpack(data, pos + 1)[0])
                pos += 5
            else:
                break
        self.pos = pos

    def floats(self) -> None:
        """BINFLOAT, as many as stand behind each other."""
        self.pos += len(self.run_of(0x47, 9, ">f8")) * 9 - 1

    def run_of(self, op: int, width: int, kind: str) -> list[Any]:
        """Pushes the numbers of one instruction that stand behind each other, each `width` bytes with it."""
        start = self.pos - 1
        count = min(_RUN, (len(self.data) - start) // width)
        if count < 1:
            raise self.context.fail("damaged pickle: the file ends in a number")
        pairs = np.frombuffer(self.data, dtype=np.uint8, count=width * count, offset=start).reshape(count, width)
        other = np.flatnonzero(pairs[:, 0] != op)
        n = int(other[0]) if len(other) else count
        found = np.ascontiguousarray(pairs[:n, 1:]).view(kind).reshape(-1).tolist()
        self.stack.extend(found)
        return found

    def text_int(self) -> None:
        text = self.line()
        self.push({b"00": False, b"01": True}[text] if text in (b"00", b"01") else int(text))

    def text_long(self) -> None:
        self.push(int(self.line().rstrip(b"L")))

    def text_float(self) -> None:
        self.push(float(self.line()))

    def long1(self) -> None:
        self.push(int.from_bytes(self.take(self.number("<B")), "little", signed=True))

    def long4(self) -> None:
        self.push(int.from_bytes(self.take(self.number("<i")), "little", signed=True))

    # text and bytes

    def text(self) -> None:
        self.push(self.line().decode("raw-unicode-escape"))

    def string(self) -> None:
        quoted = self.line()
        if len(quoted) < 2 or quoted[:1] != quoted[-1:] or quoted[:1] not in (b"'", b'"'):
            raise self.context.fail("damaged pickle: a text without its quotes")
        self.push(codecs.escape_decode(quoted[1:-1])[0].decode("latin-1"))  # type: ignore[attr-defined,union-attr]

    def unicode(self, form: str) -> None:
        self.push(self.take(self.number(form)).decode("utf-8", "surrogatepass"))

    def old_bytes(self, form: str) -> None:
        """Python 2's text: names, and the bytes of arrays. Latin-1 loses nothing of either."""
        self.push(self.take(self.number(form)).decode("latin-1"))

    def binary(self, form: str) -> None:
        self.push(self.take(self.number(form)))

    # containers

    def mark(self) -> None:
        self.containers += 1
        self.marked.append(self.stack)
        self.stack = []

    def made_tuple(self) -> None:
        items = self.since_mark()
        self.container(tuple(items))

    def short_tuple(self, n: int) -> None:
        items = tuple(self.stack[-n:])
        if len(items) != n:
            raise IndexError("stack")
        del self.stack[-n:]
        self.container(items)

    def made_list(self) -> None:
        items = self.since_mark()
        self.container(items)

    def made_dict(self) -> None:
        items = self.since_mark()
        self.container({})
        self.put_items(items)

    def made_frozenset(self) -> None:
        items = self.since_mark()
        self.container(frozenset(self.keys(items)))

    def append(self) -> None:
        value = self.stack.pop()
        self.extend([value])

    def appends(self) -> None:
        self.extend(self.since_mark())

    def extend(self, items: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) is list:
            into.extend(items)
        elif type(into) is Opaque:
            into.entries.extend(items)
        else:
            raise self.context.fail("damaged pickle: elements are added to something that is no list")

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.put_items([key, value])

    def set_items(self) -> None:
        self.put_items(self.since_mark())

    def put_items(self, items: list[Any]) -> None:
        into = self.stack[-1]
        target = into if type(into) is dict else into.items if type(into) is Opaque else None
        if target is None or len(items) % 2:
            raise self.context.fail("damaged pickle: keys are set on something that is no dict")
        target.update(zip(self.keys(items[::2]), items[1::2], strict=True))

    def add_items(self) -> None:
        items = self.since_mark()
        into = self.stack[-1]
        if type(into) is not set:
            raise self.context.fail("damaged pickle: elements are added to something that is no set")
        into.update(self.keys(items))

    def keys(self, items: list[Any]) -> list[Any]:
        for key in items:
            if not hashable(key):
                raise self.context.fail(f"a key of the kind {type(key).__name__} that no dump has; not read")
        return items

    # memo and stack

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        self.push(self.memo[index])

    def pop(self) -> None:
        if self.stack:
            del self.stack[-1]
        else:
            self.since_mark()

    def pop_mark(self) -> None:
        self.since_mark()

    def frame(self) -> None:
        if self.number("<Q") > len(self.data) - self.pos:
            raise self.context.fail("damaged pickle: the file ends in a frame")

    def protocol(self) -> None:
        if self.data[self.pos] > 5:
            raise self.context.fail(f"pickle protocol {self.data[self.pos]}, wanted 0 to 5")
        self.pos += 1

    def stop(self) -> None:
        raise Stop

    # names and objects

    def name(self) -> None:
        module, name = self.line().decode("utf-8"), self.line().decode("utf-8")
        self.push(find(self.context, module, name))

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise self.context.fail("damaged pickle: a name that is no text")
        self.push(find(self.context, module, name))

    def call(self) -> None:
        args, what = self.stack.pop(), self.stack.pop()
        self.make(what, args)

    def make(self, what: Any, args: Any) -> None:
        if type(what) is not Known or type(args) is not tuple:
            raise self.context.refuse("the pickle calls something that is no name of the list")
        self.container(what.make(self.context, args))

    def new_with_names(self) -> None:
        names, args, what = self.stack.pop(), self.stack.pop(), self.stack.pop()
        if names:
            raise self.context.refuse("the pickle makes an object with named arguments")
        self.make(what, args)

    def instance(self) -> None:
        module, name = self.line().decode("utf-8"), self.line().decode("utf-8")
        args = tuple(self.since_mark())
        self.make(find(self.context, module, name), args)

    def object(self) -> None:
        what, *args = self.since_mark()
        self.make(what, tuple(args))

    def build(self) -> None:
        state, into = self.stack.pop(), self.stack[-1]
        if type(into) is Opaque:
            into.state = state
        elif type(into) is Array:
            into.build(state)
        elif type(into) is DType:
            into.build(self.context.place, state)
        else:
            raise self.context.refuse(f"the pickle sets the state of a {type(into).__name__}")

    def outside(self, pid: Any) -> None:
        if self.persistent is None:
            raise self.context.refuse("the pickle asks for an object from outside of it (persistent id)")
        self.push(self.persistent(pid))

    def refused(self, what: str) -> None:
        raise self.context.refuse(f"the pickle uses {what}")
