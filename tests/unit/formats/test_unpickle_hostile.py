"""The restricted unpickler: nothing that a file can do to us. Canaries, bombs, damage."""

from __future__ import annotations

import collections
import copyreg
import functools
import importlib
import operator
import os
import pickle
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pickle_bytes import WRITERS, Reduces, archive, global_, read, saved, text

from onepolicy.errors import ContentError
from onepolicy.formats.inert import Known
from onepolicy.formats.storages import DType, StorageType
from onepolicy.formats.unpickle import Opaque, array, loads


def canaries(canary: Path) -> dict[str, bytes]:
    touch = f"touch {canary}"
    code = f"open({str(canary)!r}, 'w').close()"
    shell = Reduces(os.system, (touch,))
    system = global_("posix", "system")
    call = text(touch) + b"\x85R"
    made = {
        "os.system": shell,
        "eval": Reduces(eval, (code,)),
        "exec": Reduces(exec, (code,)),
        "subprocess": Reduces(subprocess.Popen, (["touch", str(canary)],)),
        "import_module": Reduces(importlib.import_module, ("antigravity",)),
        "attrgetter": Reduces(operator.attrgetter, ("system",)),
        "getattr": Reduces(getattr, (str, "join")),
        "partial": Reduces(functools.partial, (os.system, touch)),
        "open": Reduces(open, (str(canary), "w")),
        "in a list": [1, [shell]],
        "as a key's value": {"a": shell},
        "in an array": np.array([shell], dtype=object),
        "ordered dict of it": collections.OrderedDict(a=shell),
        "default factory": collections.defaultdict(os.system),
        "state": Reduces(collections.OrderedDict, (), {"a": shell}),
        "tensor of no storage": Reduces(torch._utils._rebuild_tensor_v2, (shell, 0, (1,), (1,), False, {})),
        "rebuild by os.system": Reduces(torch._tensor._rebuild_from_type_v2, (os.system, torch.Tensor, (touch,), {})),
        "bytes in bytes": Reduces(torch.storage._load_from_bytes, (pickle.dumps(shell),)),
        "torch.load": Reduces(torch.load, (str(canary),)),
        "array of another class": Reduces(np._core.multiarray._reconstruct, (subprocess.Popen, (0,), b"b")),  # type: ignore[attr-defined]
    }
    out = {f"{k} {p}": pickle.dumps(v, p) for k, v in made.items() for p in (2, 5)}
    out |= {f"torch.save {k}": saved(v, zipped) for k, v in made.items() for zipped in (True, False)}
    return out | {
        "posix.system": system + call + b".",
        "inst": b"(" + text(touch) + b"iposix\nsystem\n.",
        "obj": b"(" + system + text(touch) + b"o.",
        "newobj": system + text(touch) + b"\x85\x81.",
        "newobj_ex": b"\x80\x04" + system + text(touch) + b"\x85}\x92.",
        "stack_global": b"\x80\x04" + text("posix") + text("system") + b"\x93" + call + b".",
        "python 2": global_("__builtin__", "eval") + text(code) + b"\x85R.",
        "dotted": b"\x80\x04" + text("verl.protocol") + text("DataProto.__init__.__globals__") + b"\x93.",
        "dotted from a listed class": global_("__builtin__", "getattr")
        + (b"(" + global_("slime.utils.types", "Sample") + text("__init__") + b"tR."),
        "attribute of a module": global_("__builtin__", "getattr") + b"(" + text("os") + text("system") + b"tR.",
        "call of an object": global_("slime.utils.types", "Sample") + b")R" + text(touch) + b"\x85R.",
        "call of a list": b"]" + text(touch) + b"\x85R.",
        "state of a list": b"]}b.",
        "state of a class": global_("collections", "OrderedDict") + b"}" + text("a") + b"Nsb.",
        "state of a type of torch": global_("torch", "FloatStorage") + b"Nb.",
        "reconstructor": global_("copy_reg", "_reconstructor")
        + b"("
        + system
        + global_("__builtin__", "object")
        + b"NtR.",
        "persistent id": text("x") + b"Q.",
        "persistent id in text": b"Pos.system\n.",
        "buffer beside the file": b"\x80\x05\x97.",
        "read-only buffer": b"\x80\x05N\x98.",
        "a name with control characters": global_("os\x1b[2J", "sys\x07tem") + b".",
    }


def test_nothing_is_run(tmp_path: Path) -> None:
    """Every one of these makes the file, or hands on what would, when `pickle` reads it."""
    canary = tmp_path / "canary"
    for name, data in canaries(canary).items():
        with pytest.raises(ContentError) as refused:
            read(data)
        message = str(refused.value)
        assert message.startswith("f.pt: ") and message.isprintable(), (name, message)
        assert not canary.exists(), name
    pickle.loads(canaries(canary)["posix.system"])
    assert canary.exists(), "the canary itself works"


def test_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_on_import.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    for data in (global_("evil_on_import", "x") + b".", b"\x80\x04" + text("evil_on_import") + text("x") + b"\x93."):
        with pytest.raises(
            ContentError, match=r"f.pt: refused: the pickle names evil_on_import.x, which is on no list"
        ):
            read(data)
    read(global_("verl.protocol", "DataProto") + b")\x81.")
    assert not (tmp_path / "canary").exists()
    assert not {"evil_on_import", "verl"} & set(sys.modules)


def test_the_extension_registry_is_not_asked() -> None:
    copyreg.add_extension("posix", "system", 77)
    try:
        for data in (b"\x80\x02\x82\x4d.", b"\x80\x02\x83\x4d\x00.", b"\x80\x02\x84\x4d\x00\x00\x00."):
            with pytest.raises(ContentError, match="refused: the pickle uses the extension registry"):
                read(data)
    finally:
        copyreg.remove_extension("posix", "system", 77)


def test_no_name_of_torch_is_changed_by_a_pickle() -> None:
    """A byte order that is set on `torch.float32` is of this pickle alone."""
    state = b"(K\x03" + text(">") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
    assert read(global_("torch", "float32") + state + b"b.").order == ">"
    assert read(global_("torch", "float32") + b".").order == "<"


def test_a_refusal_says_how_to_export() -> None:
    with pytest.raises(ContentError) as refused:
        loads(global_("os", "system") + b".", "a.dp", export="    import json\n    print(1)\n")
    first, *rest = str(refused.value).splitlines()
    assert first == (
        "a.dp: refused: the pickle names os.system, which is on no list of inert types; nothing of it was run. "
        "Where the framework runs, write it as JSON lines:"
    )
    assert rest == ["    import json", "    print(1)"]


def tensor_call(storage: bytes, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    body = pickle.dumps(offset, 2)[2:-1] + plain(size) + plain(stride) + b"\x89" + b"}"
    return global_("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + body + b"tR."


def plain(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(pickle.dumps(n, 2)[2:-1] for n in numbers) + b"t"


def stored(numel: int, kind: str = "FloatStorage") -> bytes:
    about = text("storage") + global_("torch", kind) + text("0") + text("cpu")
    return b"(" + about + pickle.dumps(numel, 2)[2:-1] + b"tQ"


VIEWS = {
    "size beyond the storage": (16, 0, (17,), (1,)),
    "offset beyond it": (16, 16, (1,), (1,)),
    "stride beyond it": (16, 0, (4,), (6,)),
    "far beyond": (16, 0, (2**62,), (1,)),
    "huge stride": (16, 0, (2,), (2**62,)),
    "repeated without end": (16, 0, (2**40, 4), (0, 1)),
    "a storage larger than its record": (17, 0, (1,), (1,)),
    "a storage of 2**60": (2**60, 0, (1,), (1,)),
    "negative stride": (16, 8, (4,), (-1,)),
    "negative offset": (16, -1, (1,), (1,)),
    "negative size": (16, 0, (-1,), (1,)),
    "negative storage": (-1, 0, (0,), (1,)),
    "more sizes than strides": (16, 0, (2, 2), (1,)),
}


@pytest.mark.parametrize("case", VIEWS)
def test_views_stay_inside_their_storage(case: str) -> None:
    numel, offset, size, stride = VIEWS[case]
    pkl = b"\x80\x02" + tensor_call(stored(numel), offset, size, stride)
    with pytest.raises(ContentError, match=r"^f.pt: "):
        read(archive({"a/data.pkl": pkl, "a/data/0": bytes(64)}))


def test_the_same_view_inside_is_read() -> None:
    pkl = b"\x80\x02" + tensor_call(stored(16), 1, (3, 2), (4, 1))
    got = read(archive({"a/data.pkl": pkl, "a/data/0": np.arange(16, dtype="f4").tobytes()}))
    assert array(got).tolist() == [[1, 2], [5, 6], [9, 10]]


def chained_tuples(n: int) -> bytes:
    """t = (t, t), n times: 2**n elements for whoever walks it, as a dict's key does."""
    return b")" + b"q\x00h\x00\x86" * n


def again(first: bytes, call: bytes, n: int = 2000) -> bytes:
    """A value, and the same copy of it n times over: `call` of memo 0, dropped."""
    return first + b"q\x000" + (call + b"h\x00\x85R0") * n + b"N."


COLLIDING = b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(1, 99))


ARRAY_STATE = b"(K\x01\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x10\x85" + global_("numpy", "dtype") + text("f8")


BOMBS: dict[str, bytes] = {
    "a key of 2**300 elements": b"}" + chained_tuples(300) + b"Ns.",
    "a set of it": b"\x80\x04\x8f(" + chained_tuples(300) + b"\x90.",
    "a frozenset of it": b"\x80\x04(" + chained_tuples(300) + b"\x91.",
    "a key 50,000 tuples deep": b"}" + b")" + b"\x85" * 50_000 + b"Ns.",
    "colliding keys": b"}(" + COLLIDING + b"u.",
    "text of 2**63 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"x.",
    "bytes of 2**63 bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**63) + b"x.",
    "bytes of -1 bytes": b"T\xff\xff\xff\xff.",
    "an int of 2**31 - 1 bytes": b"\x8b\xff\xff\xff\x7f.",
    "a frame of 2**63 bytes": b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"N.",
    "a number of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "bytearray of 2**40": global_("__builtin__", "bytearray") + b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85R.",
    "one list, copied": again(b"](" + b"N" * 100_000 + b"e", global_("__builtin__", "list")),
    "one text, encoded": again(text("x" * 1_000_000), global_("_codecs", "encode")),
    "one archive, opened": again(
        b"B" + struct.pack("<I", 1 << 20) + b"N." * (1 << 19), global_("torch.storage", "_load_from_bytes"), 100
    ),
    "an array of 2**60 elements": global_("numpy.core.multiarray", "_reconstruct")
    + (b"(" + global_("numpy", "ndarray") + b"K\x00\x85C\x01btR" + ARRAY_STATE + b"\x85R\x89C\x00tb."),
    "protocol 6": b"\x80\x06N.",
    "a pop below the stack": b"0.",
    "no value": b".",
    "no end": b"N",
    "nothing": b"",
    "an unset memo": b"h\x05.",
    "a mark that is not there": b"t.",
    "no instruction": b"\xff.",
    "zip without a pickle": archive({"a/x": b""}),
    "zip without a directory": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_small_and_quick(name: str) -> None:
    tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(ContentError, match=r"^f.pt: "):
            read(BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 20


def test_memo_numbers_cost_nothing() -> None:
    """`pickle` would make a table of four billion places."""
    tracemalloc.start()
    try:
        assert read(b"]r\xff\xff\xff\xff0j\xff\xff\xff\xff.") == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_records_that_overlap_or_grow() -> None:
    pkl = b"\x80\x02" + tensor_call(stored(16), 0, (1,), (1,))
    small = archive({"a/data.pkl": pkl, "a/data/0": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ContentError, match="not unpacked"):
        read(small)
    data = bytearray(archive({"a/data.pkl": pkl, "a/data/0": bytes(64)}))
    at = data.rindex(b"a/data/0") - 46
    data[at + 20 : at + 28] = struct.pack("<II", 1 << 20, 1 << 20)
    with pytest.raises(ContentError, match="larger than the file"):
        read(bytes(data))


def test_archives_in_archives_end() -> None:
    data = pickle.dumps(1)
    for _ in range(3):
        data = pickle.dumps(Reduces(torch.storage._load_from_bytes, (data,)))
    assert read(data) == 1
    for _ in range(3):
        data = pickle.dumps(Reduces(torch.storage._load_from_bytes, (data,)))
    with pytest.raises(ContentError, match="archives in archives"):
        read(data)


def test_deep_values_are_read_and_freed() -> None:
    deep = read(b"]" * 200_000 + b"a" * 199_999 + b".")
    assert len(deep) == 1
    del deep


def seeds() -> list[bytes]:
    value = {
        "rollout_id": 3,
        "samples": [{"tokens": [1, 2, 70000], "rollout_log_probs": [-0.5, -1.5], "status": "completed"}],
        "x": torch.arange(6.0).reshape(2, 3).t(),
        "b": torch.ones(3).bfloat16(),
        "n": np.arange(4),
        "o": np.array([{"a": 1}, None], dtype=object),
    }
    return [write(value) for write in WRITERS.values()]


def damaged(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(out))
        if kind == 1:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            out[at] = rng.randrange(256)
        else:
            out[at:at] = out[rng.randrange(len(out)) :][: rng.randrange(20)]
    return bytes(out)


def walked(value: Any) -> None:
    """Whatever was read can be asked for its numbers."""
    seen: set[int] = set()
    rest = [value]
    while rest:
        x = rest.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            rest += x.values()
        elif isinstance(x, (list, tuple)):
            rest += x
        elif isinstance(x, Opaque):
            rest += [x.state, x.args, x.items, x.entries]
        elif hasattr(x, "numpy") and not hasattr(x, "itemsize"):
            try:
                array(x)
            except ContentError:
                continue


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_give_a_value_or_one_error() -> None:
    rng = random.Random(0)
    errors: list[str] = []
    for data in seeds():
        for _ in range(350):
            broken = damaged(data, rng)
            try:
                walked(read(broken))
            except ContentError as err:
                errors.append(str(err))
    assert len(errors) > 1500
    assert all(e.startswith("f.pt: ") and e.isprintable() for e in errors)


def test_random_instructions_give_a_value_or_one_error() -> None:
    """Bytes that are mostly instructions reach further than damaged files."""
    from onepolicy.formats.instructions import STEPS
    from onepolicy.formats.names import NAMES

    rng = random.Random(1)
    names = [global_(*pair) for pair in NAMES]
    pieces = [
        *STEPS,
        *names,
        b"K\x02",
        b"]",
        b"}",
        b")",
        text("a"),
        b"\x85",
        b"\x86",
        b"R",
        b"b",
        b"\x81",
        b"h\x00",
        b"q\x00",
    ]
    values, errors = 0, []
    for _ in range(4000):
        program = b"\x80\x04]q\x00" + b"".join(rng.choices(pieces, k=rng.randrange(1, 25))) + b"."
        try:
            walked(read(program))
            values += 1
        except ContentError as err:
            errors.append(str(err))
    assert values > 50 and all(e.startswith("f.pt: ") for e in errors)


def test_every_name_stands_for_something_of_ours() -> None:
    """No entry of the table is what the pickle names."""
    from onepolicy.formats.names import NAMES

    for (module, name), stands in NAMES.items():
        if isinstance(stands, (DType, StorageType)):
            continue
        assert type(stands) is Known and (stands.module, stands.name) == (module, name)
        assert stands.make.__module__ in ("onepolicy.formats.constructors", "onepolicy.formats.names")
