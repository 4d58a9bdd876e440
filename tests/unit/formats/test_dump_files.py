"""Files of a dump: what is expanded, opened, unpacked, cut, and what is said of those that cannot be."""

from __future__ import annotations

import bz2
import gzip
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pytest
from fsspec.spec import AbstractBufferedFile

from dump_samples import ROWS, broken, canonical_row, lines, loose_row, nemo_rl_row, prime_rl_row, read_dump
from onepolicy import storage
from onepolicy.errors import ContentError, UsageError
from onepolicy.formats import base, canonical, jsonl_lines, sniff
from onepolicy.formats.base import BrokenRecord, RawRecord, Shard
from onepolicy.formats.detect import detect, format_of
from onepolicy.formats.files import Files
from onepolicy.records import from_records


def test_folders_globs_and_files_are_expanded_once_and_sorted(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "a/1.jsonl", "a/deep/3.jsonl", "c.txt"):
        lines(tmp_path / name, [1])
    files = Files()
    everything = files.expand([tmp_path])
    assert [Path(p).name for p in everything] == ["1.jsonl", "3.jsonl", "2.jsonl", "c.txt"]
    assert files.expand([f"{tmp_path}/**/*.jsonl", tmp_path / "a" / "1.jsonl"]) == everything[:3]
    assert files.expand([f"{tmp_path}/**.jsonl"]) == everything[:3]
    assert files.expand([f"{tmp_path}/a/**3.jsonl"]) == everything[1:2]
    with pytest.raises(UsageError, match=r"no such file or folder, and no file matches: .*/none"):
        files.expand([tmp_path / "none"])


def test_a_name_with_brackets_is_a_name(tmp_path: Path) -> None:
    path = lines(tmp_path / "run[1].jsonl", [loose_row()])
    assert Files().expand([path]) == [str(path)]


def test_urls_through_fsspec() -> None:
    system: Any = fsspec.filesystem("memory")
    for step in (1, 2):
        system.pipe(f"/dump/train_data_step{step}.jsonl", (json.dumps(nemo_rl_row()) + "\n").encode())
    try:
        found, items = read_dump("memory://dump/*.jsonl")
        assert [x.facts["step"] for x in items if isinstance(x, RawRecord)] == [1, 2] and not found.unclaimed
        assert len(read_dump("memory://dump")[1]) == len(read_dump("memory://**step*.jsonl")[1]) == 2
        assert Files().size("memory://dump/train_data_step1.jsonl") == len(json.dumps(nemo_rl_row())) + 1
        with pytest.raises(UsageError, match="no such file"):
            Files().expand(["memory://dump/none"])
        with pytest.raises(UsageError, match="nosuch"):
            Files().expand(["nosuch://x"])
    finally:
        system.rm("/dump", recursive=True)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_packed_lines(tmp_path: Path, suffix: str) -> None:
    plain = (json.dumps(nemo_rl_row()) + "\n").encode() * 3
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": lambda x: pa.compress(x, "zstd", asbytes=True)}
    path = tmp_path / f"train_data_step5.jsonl{suffix}"
    path.write_bytes(pack[suffix](plain))
    _, items = read_dump(path)
    assert [x.facts["step"] for x in items if isinstance(x, RawRecord)] == [5, 5, 5]


def test_a_packed_file_that_is_cut(tmp_path: Path) -> None:
    plain = b"".join((json.dumps(nemo_rl_row(content=os.urandom(30000).hex())) + "\n").encode() for _ in range(9))
    path = tmp_path / "train_data_step5.jsonl.gz"
    path.write_bytes(gzip.compress(plain)[:-90000])
    shard = Shard("nemo_rl", (str(path),))
    items = format_of("nemo_rl").read(shard, Files())
    assert isinstance(next(items), RawRecord)
    with pytest.raises(ContentError, match=r"train_data_step5.jsonl.gz: cannot be read: Compressed file ended"):
        list(items)


def test_a_file_that_disappears(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [loose_row()])
    (shard,) = detect([path]).shards
    path.unlink()
    with pytest.raises(ContentError, match=r"a\.jsonl: no such file; it was removed"):
        list(format_of(shard.format).read(shard, Files()))


def test_a_file_open_for_writing(tmp_path: Path) -> None:
    path = lines(tmp_path / "rank_0.jsonl", [prime_rl_row()])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:90])
    _, items = read_dump(path)
    assert isinstance(items[0], RawRecord) and isinstance(items[1], BrokenRecord)
    assert items[1].place == f"{path}:2" and items[1].why.endswith("the file is truncated or still being written")
    path.write_bytes(whole + whole.rstrip(b"\n"))  # whole, its newline not written yet
    assert all(isinstance(x, RawRecord) for x in read_dump(path)[1])


def test_a_line_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LINE_BYTES", 2000)
    monkeypatch.setattr(jsonl_lines, "_BLOCK", 512)
    path = lines(tmp_path / "rank_0.jsonl", [prime_rl_row(), prime_rl_row(x="y" * 9000), prime_rl_row()])
    asked: list[int] = []
    opened = Files.open

    def watched(self: Files, name: str) -> Any:
        file = opened(self, name)
        read = file.readline
        return _Watched(file, lambda n: asked.append(n) or read(n))

    monkeypatch.setattr(Files, "open", watched)
    _, items = read_dump(path)
    assert [type(x).__name__ for x in items] == ["RawRecord", "BrokenRecord", "RawRecord"]
    assert items[1].place == f"{path}:2" and "more than 2000 bytes" in items[1].why  # type: ignore[union-attr]
    assert max(asked) <= 2001


def test_a_first_line_over_the_limit_does_not_hide_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LINE_BYTES", 100_000)
    path = lines(tmp_path / "a.jsonl", [{"x": "y" * 300_000}, loose_row()])
    _, items = read_dump(path)
    assert [type(x).__name__ for x in items] == ["BrokenRecord", "RawRecord"]


class _Watched:
    def __init__(self, file: Any, readline: Any) -> None:
        self._file, self.readline = file, readline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def test_nan_and_infinity_as_python_writes_them(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [loose_row(rollout_logprobs=[float("nan"), -float("inf"), None, -1.0])])
    _, (record,) = read_dump(path)
    assert isinstance(record, RawRecord)
    column = record.columns["sampler_logprobs"]
    assert str(column.values.tolist()) == "[nan, -inf, nan, -1.0]" and column.valid is not None
    assert column.valid.tolist() == [True, True, False, True]  # NaN is a value, null is none


@pytest.mark.parametrize("remote", [False, True])
def test_a_big_file_is_cut_at_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
    monkeypatch.setattr(jsonl_lines, "SHARD_BYTES", 1000)
    monkeypatch.setattr(jsonl_lines, "_BLOCK", 300)
    rows = [loose_row(id=str(i), note="n" * (i * 37 % 400)) for i in range(30)]
    path = str(lines(tmp_path / "big.jsonl", rows))
    url = f"file://{path}" if remote else path
    found, items = read_dump(url)
    assert len(found.shards) > 5 and not broken(url)
    assert [x.facts["record_id"] for x in items if isinstance(x, RawRecord)] == [str(i) for i in range(30)]
    if not remote:
        assert [x.place for x in items] == [f"{path}:{i}" for i in range(1, 31)]
    assert detect([url]) == found  # the cuts depend on the file alone


def test_parts_of_a_big_canonical_file_know_what_its_first_line_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_lines, "SHARD_BYTES", 600)
    head = {"scorings": {"sampler": {"semantics": "raw"}}, "float32": ["sampler_logprobs"]}
    path = lines(tmp_path / "big.jsonl", [canonical_row(**(head if i == 0 else {})) for i in range(12)])
    found, items = read_dump(path)
    assert len(found.shards) > 3
    for record in items:
        assert isinstance(record, RawRecord) and record.scorings["sampler"]["semantics"] == "raw"
        assert record.columns["sampler_logprobs"].values.dtype == "float32"


def test_a_folder_with_many_schemas_and_half_of_it_unreadable(tmp_path: Path) -> None:
    for name, (file, row) in ROWS.items():
        lines(tmp_path / name / file, [row])
    (tmp_path / "token_exports").mkdir()
    (tmp_path / "token_exports" / "STABLE").touch()
    (tmp_path / "meta.json").write_text("{}")
    (tmp_path / ".hidden.jsonl").write_text("x")
    (tmp_path / "rank_9.jsonl.tmp").write_text("x")
    (tmp_path / "run_metadata.jsonl").write_text("{}")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "other.jsonl").write_text('{"loss": 1.0, "lr": 0.1}\n')
    (tmp_path / "noise.jsonl").write_bytes(b"\x00\xff\x17nothing")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 not really")
    os.symlink(tmp_path / "gone", tmp_path / "dangling.jsonl")
    found, items = read_dump(tmp_path)
    assert set(found.formats) == set(ROWS) and not any(isinstance(x, BrokenRecord) for x in items)
    why = {Path(path).name: reason for path, reason in found.unclaimed}
    assert why == {
        "STABLE": "a marker that a writer is done",
        "meta.json": "about the run, no sequences",
        "run_metadata.jsonl": "about the run, no sequences",
        ".hidden.jsonl": "a hidden file",
        "rank_9.jsonl.tmp": "a temporary file of a writer",
        "empty.jsonl": "an empty file",
        "other.jsonl": "no known format has these keys: loss, lr",
        "noise.jsonl": "not a dump that is known: noise.jsonl begins with b'\\x00\\xff\\x17nothing'",
        "cut.parquet": why["cut.parquet"],
        "dangling.jsonl": "no such file; it was removed or renamed since the folder was listed",
    }
    assert "not a whole Parquet file" in why["cut.parquet"] and "still being written" in why["cut.parquet"]


def test_keys_behind_a_long_list_and_in_a_cut_line_are_seen() -> None:
    cut = (
        b'{"schema_version":1,"micro_sequence_idx":0,"a":{"no":[1,{"nor":2}]},"export_sequence_idx":2,"token_ids":[1,2'
    )
    assert list(sniff.keys_of(cut)) == [
        "schema_version",
        "micro_sequence_idx",
        "a",
        "export_sequence_idx",
        "token_ids",
    ]


def test_a_format_is_known_although_its_first_keys_are_long(tmp_path: Path) -> None:
    n = 40_000
    row = {
        **{k: v for k, v in loose_row().items() if k == "id"},
        "response_ids": list(range(n)),
        "rollout_logprobs": [-0.5] * n,
    }
    found, (record,) = read_dump(lines(tmp_path / "a.jsonl", [row]))
    assert found.formats == ("loose",) and isinstance(record, RawRecord) and len(record.token_ids) == n


def test_a_broken_first_line_does_not_hide_the_rest(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [loose_row(), loose_row()])
    path.write_bytes(b'{"id": broken\n' + path.read_bytes())
    _, items = read_dump(path)
    assert [type(x).__name__ for x in items] == ["BrokenRecord", "RawRecord", "RawRecord"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert detect([tmp_path]).unclaimed == ((f"{tmp_path}/a.jsonl", "not a file: a folder, pipe or device"),)


class _Store(fsspec.AbstractFileSystem):
    """A remote store in small: its files are fsspec's own, whose `readline` knows no limit."""

    protocol = "store"
    cachable = False
    content: ClassVar[dict[str, bytes]] = {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in self.content:
            return {"name": path, "size": len(self.content[path]), "type": "file"}
        raise FileNotFoundError(path)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return _Fetched(self, path, mode, block_size=64, cache_type="readahead")


class _Fetched(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return _Store.content[self.path][start:end]


def test_a_remote_store_with_lines_over_the_limit_and_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("store", _Store, clobber=True)
    path = lines(tmp_path / "a.jsonl", [loose_row(), loose_row(note="n" * 5000), loose_row()])
    storage.write(from_records([canonical_row()]), tmp_path / "b.parquet")
    _Store.content.update({"a.jsonl": path.read_bytes(), "b.parquet": (tmp_path / "b.parquet").read_bytes()})
    monkeypatch.setattr(base, "LINE_BYTES", 1000)
    found, items = read_dump("store://a.jsonl", "store://b.parquet")
    assert found.formats == ("canonical", "loose") and not found.unclaimed
    assert [type(x).__name__ for x in items] == ["RawRecord", "RawRecord", "BrokenRecord", "RawRecord"]
    (part,) = canonical.rollouts(found.shards[0], Files(), 100)
    assert part.n_tokens == 7
    del _Store.content["a.jsonl"]
    with pytest.raises(ContentError, match=r"store://a\.jsonl: no such file"):
        list(format_of("loose").read(found.shards[1], Files()))
