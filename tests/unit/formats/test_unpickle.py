"""The restricted unpickler: the same values as torch and pickle give."""

from __future__ import annotations

import collections
import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pickle_bytes import PROTOCOLS, WRITERS, Reduces, archive, read, records_of, saved

from onepolicy.errors import ContentError
from onepolicy.formats.files import Files
from onepolicy.formats.unpickle import Opaque, array, load, opened, rows

TENSORS = {
    "float32": torch.tensor([1.5, -0.0, float("nan"), float("-inf"), 1e-45]),
    "float64": torch.tensor([0.1, -1e300], dtype=torch.float64),
    "float16": torch.tensor([0.1, 65504.0, -6e-8], dtype=torch.float16),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "int32": torch.tensor([1, -2], dtype=torch.int32),
    "int16": torch.tensor([1, -2], dtype=torch.int16),
    "int8": torch.tensor([1, -2], dtype=torch.int8),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "empty": torch.zeros(3, 0, 2),
    "scalar": torch.tensor(3.25),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "sliced": torch.arange(40.0).reshape(4, 10)[1:3, 2:9:3],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "parameter": torch.nn.Parameter(torch.tensor([1.0, 2.0])),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_tensors_as_torch_wrote_them(writer: str) -> None:
    got = read(WRITERS[writer](TENSORS))
    for name, tensor in TENSORS.items():
        values = array(got[name])
        wanted = tensor.detach().numpy()
        assert values.dtype == wanted.dtype and values.shape == wanted.shape, name
        assert values.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("writer", WRITERS)
def test_every_bfloat16_becomes_the_float32_of_the_same_value(writer: str) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    got = array(read(WRITERS[writer](bits)))
    assert got.dtype == np.float32
    assert np.array_equal(got.view(np.uint32), bits.float().numpy().view(np.uint32))


def test_views_share_their_storage_in_the_file() -> None:
    whole = torch.arange(12.0)
    got = read(saved({"whole": whole, "part": whole[3:9:2], "back": whole.reshape(3, 4).t()[1:]}))
    assert array(got["part"]).tolist() == [3.0, 5.0, 7.0]
    assert array(got["back"]).tolist() == whole.reshape(3, 4).t()[1:].tolist()
    assert got["part"].storage is got["whole"].storage


PLAIN: dict[str, Any] = {
    "ints": [0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**70, -(2**70)],
    "floats": [0.1 * i for i in range(2500)] + [float("inf"), -0.0],
    "mixed": [1, 2.5, None, True, False, "x", 3, 4.5, 300, 70000],
    "masks": [1] * 3000,
    "text": "naïve \U0001f642 \ud800 \n\x00",
    "long text": "é" * 70000,
    "bytes": b"\x00\xff" * 40000,
    "short bytes": b"\x00\xff",
    "bytearray": bytearray(b"abc"),
    "nested": {"a": [{"b": (1, (2, 3), ())}], "c": {1: None, None: 2, (("x"), "y"): 3, 2.5: 4}},
    "sets": {1, "a"},
    "frozen": frozenset([1, 2]),
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "counted": collections.Counter("aab"),
    "complex": 1 + 2j,
    "range": range(3, 9, 2),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_plain_values(writer: str) -> None:
    value = dict(PLAIN)
    got = read(WRITERS[writer](value))
    assert got == {**PLAIN, "bytearray": b"abc"}
    assert [type(x) for x in got["mixed"]] == [type(x) for x in PLAIN["mixed"]]


def test_a_value_that_stands_twice_is_one_value() -> None:
    shared = [1, 2]
    ring: list[Any] = [shared, shared]
    ring.append(ring)
    got = read(pickle.dumps(ring))
    assert got[0] is got[1] and got[2] is got


ARRAYS = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "big endian": np.arange(4, dtype=">i4"),
    "bool": np.array([True, False]),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bc"]),
    "objects": np.array([{"uid": 1}, None, [1, 2]], dtype=object),
    "empty": np.zeros((0, 3)),
    "no dimension": np.array(2.5),
    "float16": np.array([0.1, 2], dtype=np.float16),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_as_numpy_wrote_them(protocol: int) -> None:
    data = pickle.dumps({**ARRAYS, "number": np.float32(0.1), "flag": np.bool_(True)}, protocol)
    got = read(data)
    for name, wanted in ARRAYS.items():
        values = array(got[name])
        assert values.shape == wanted.shape and values.dtype == wanted.dtype.newbyteorder("="), name
        assert values.tolist() == wanted.tolist(), name
    assert got["number"] == float(np.float32(0.1)) and got["flag"] is True


def test_arrays_of_older_numpy() -> None:
    """numpy before 2 names its modules without the underscore."""
    data = pickle.dumps(ARRAYS["float32"], 2)
    assert b"numpy._core" in data
    assert array(read(data.replace(b"numpy._core", b"numpy.core"))).tolist() == ARRAYS["float32"].tolist()


def test_python_2_text_and_arrays() -> None:
    """A list of two strings and a flag, as Python 2 writes them; protocol 0 quotes its text."""
    assert read(b"\x80\x02]q\x00(U\x03abcT\x02\x00\x00\x00\xe9xI01\ne.") == ["abc", "éx", True]
    assert read(b"(lp0\nS'a\\x41\\n'\np1\naL12345678901L\naF1.5\na.") == ["aA\n", 12345678901, 1.5]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_of_nested_tensors() -> None:
    parts = [torch.arange(3.0), torch.arange(5.0) * 2, torch.arange(0.0)]
    about = {"values": torch.cat(parts), "offsets": torch.tensor([0, 3, 8, 8]), "lengths": None, "_ragged_idx": 1}
    rebuild = torch.nested._internal.nested_tensor._rebuild_njt  # type: ignore[attr-defined]
    jagged = Reduces(torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, (about,), {"note": 1}))
    for value in (jagged, torch.nested.as_nested_tensor(parts[:2], layout=torch.strided)):
        got = rows(read(saved({"x": value}))["x"])
        assert [r.tolist() for r in got] == [p.tolist() for p in parts][: len(got)] and len(got) >= 2
    with pytest.raises(ContentError, match="more than one dimension"):
        rows(read(saved(torch.nested.as_nested_tensor([torch.ones(2, 2)], layout=torch.strided))))


def test_a_tensor_with_attributes_is_its_tensor() -> None:
    tensor = torch.arange(3.0)
    tensor.note = "x"  # type: ignore[attr-defined]
    assert array(read(saved(tensor))).tolist() == [0, 1, 2]


def test_the_byte_order_of_the_archive() -> None:
    """The same archive, written on a big-endian machine."""
    tensor = torch.tensor([1.5, -2.25])
    found = records_of(saved({"x": tensor, "b": tensor.bfloat16(), "i": torch.tensor([1, 2])}))
    assert found["archive/byteorder"] == b"little"
    for name, width in (("archive/data/0", 4), ("archive/data/1", 2), ("archive/data/2", 8)):
        found[name] = np.frombuffer(found[name], f"u{width}").byteswap().tobytes()
    got = read(archive({**found, "archive/byteorder": b"big"}))
    assert [array(got[k]).tolist() for k in "xbi"] == [[1.5, -2.25], [1.5, -2.25], [1, 2]]


def test_a_repacked_archive_is_unpacked() -> None:
    found = records_of(saved({"x": torch.zeros(1000)}))
    assert array(read(archive(found, zipfile.ZIP_DEFLATED))["x"]).tolist() == [0.0] * 1000
    with pytest.raises(ContentError, match="packed by method 14"):
        read(archive(found, zipfile.ZIP_LZMA))


def test_storages_are_read_where_they_lie(tmp_path: Path) -> None:
    """Of two large tensors the one that is not asked for is never read."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1 << 18), "b": torch.zeros(1 << 18)}, path)

    class Counted(io.BufferedReader):
        seen = 0

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            Counted.seen += len(data)
            return data

    with Counted(io.FileIO(path)) as file:
        got = load(file, path.stat().st_size, str(path))
        assert Counted.seen < 1 << 17
        assert array(got["a"]).sum() == 1 << 18
        assert (1 << 20) <= Counted.seen < (1 << 20) + (1 << 17)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_of_a_dump(tmp_path: Path, suffix: str) -> None:
    import gzip

    path = tmp_path / f"x.pt{suffix}"
    data = saved({"a": torch.arange(3)})
    path.write_bytes(gzip.compress(data) if suffix else data)
    with opened(str(path), Files()) as value:
        assert array(value["a"]).tolist() == [0, 1, 2]


def test_a_packed_bomb(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "x.pkl.gz"
    path.write_bytes(gzip.compress(b"\x80\x02" + b"]0" * (1 << 24)))
    with pytest.raises(ContentError, match="unpacks to more than 16 times"), opened(str(path), Files()):
        pass


def test_objects_of_listed_classes_are_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of the same module and name, whose making and loading would fail the test."""
    module = stand_in(monkeypatch, "slime.utils.types")

    class Sample:
        def __init__(self, **values: Any) -> None:
            self.__dict__.update(values)

        def __setstate__(self, state: Any) -> None:
            raise AssertionError("ran")

    Sample.__module__, Sample.__qualname__ = "slime.utils.types", "Sample"
    module.Sample = Sample  # type: ignore[attr-defined]
    for protocol in PROTOCOLS:
        got = read(pickle.dumps([Sample(tokens=[1, 2], status="x")], protocol))[0]
        assert isinstance(got, Opaque) and repr(got) == "<slime.utils.types.Sample>"
        assert got.get("tokens") == [1, 2] and got.get("nothing") is None


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    import types

    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    return sys.modules[name]
