"""The instructions of a pickle, protocols 0 to 5, and what runs them.

They are those of `pickletools`; the ones that reach outside of the file (extension registry, buffers beside it) are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onepolicy.formats.machine import Machine, Stop

#: instruction -> what it does, in the order of the pickle documentation.
STEPS: dict[bytes, Callable[[Machine], None]] = {
    b"(": Machine.mark,
    b".": Machine.stop,
    b"0": Machine.pop,
    b"1": Machine.pop_mark,
    b"2": lambda m: m.push(m.stack[-1]),
    # numbers
    b"F": Machine.text_float,
    b"I": Machine.text_int,
    b"L": Machine.text_long,
    b"J": Machine.small_ints,
    b"K": Machine.small_ints,
    b"M": Machine.small_ints,
    b"G": Machine.floats,
    b"\x8a": Machine.long1,
    b"\x8b": Machine.long4,
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    # text and bytes
    b"S": Machine.string,
    b"T": lambda m: m.old_bytes("<i"),
    b"U": lambda m: m.old_bytes("<B"),
    b"V": Machine.text,
    b"X": lambda m: m.unicode("<I"),
    b"\x8c": lambda m: m.unicode("<B"),
    b"\x8d": lambda m: m.unicode("<Q"),
    b"B": lambda m: m.binary("<I"),
    b"C": lambda m: m.binary("<B"),
    b"\x8e": lambda m: m.binary("<Q"),
    b"\x96": lambda m: m.binary("<Q"),
    # containers
    b")": lambda m: m.push(()),
    b"\x85": lambda m: m.short_tuple(1),
    b"\x86": lambda m: m.short_tuple(2),
    b"\x87": lambda m: m.short_tuple(3),
    b"t": Machine.made_tuple,
    b"]": lambda m: m.container([]),
    b"l": Machine.made_list,
    b"a": Machine.append,
    b"e": Machine.appends,
    b"}": lambda m: m.container({}),
    b"d": Machine.made_dict,
    b"s": Machine.set_item,
    b"u": Machine.set_items,
    b"\x8f": lambda m: m.container(set()),
    b"\x90": Machine.add_items,
    b"\x91": Machine.made_frozenset,
    # memo
    b"p": lambda m: m.put(int(m.line())),
    b"q": lambda m: m.put(m.number("<B")),
    b"r": lambda m: m.put(m.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"g": lambda m: m.get(int(m.line())),
    b"h": lambda m: m.get(m.number("<B")),
    b"j": lambda m: m.get(m.number("<I")),
    # names and objects
    b"c": Machine.name,
    b"\x93": Machine.stack_name,
    b"R": Machine.call,
    b"\x81": Machine.call,
    b"\x92": Machine.new_with_names,
    b"i": Machine.instance,
    b"o": Machine.object,
    b"b": Machine.build,
    b"P": lambda m: m.outside(m.line().decode("ascii")),
    b"Q": lambda m: m.outside(m.stack.pop()),
    # framing
    b"\x80": Machine.protocol,
    b"\x95": Machine.frame,
    # reach outside of the pickle
    b"\x82": lambda m: m.refused("the extension registry (EXT1)"),
    b"\x83": lambda m: m.refused("the extension registry (EXT2)"),
    b"\x84": lambda m: m.refused("the extension registry (EXT4)"),
    b"\x97": lambda m: m.refused("buffers that are not in the file (protocol 5)"),
    b"\x98": lambda m: m.refused("buffers that are not in the file (protocol 5)"),
}
_TABLE = [STEPS.get(bytes([op])) for op in range(256)]


def run(machine: Machine) -> Any:
    """The value of one pickle; `machine.pos` is behind it then.

    Errors: `ContentError` for what is refused; other exceptions (`IndexError`, `ValueError`, `struct.error`, ...) mean
    a damaged pickle, and are named by the caller.
    """
    data = machine.data
    try:
        while True:
            op = data[machine.pos]
            machine.pos += 1
            step = _TABLE[op]
            if step is None:
                raise machine.context.fail(f"damaged pickle: byte {machine.pos - 1} is no instruction")
            step(machine)
    except Stop:
        return machine.stack.pop()
