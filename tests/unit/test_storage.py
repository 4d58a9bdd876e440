"""Files: what is kept, what is refused, and how."""

from __future__ import annotations

import builtins
import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onepolicy import storage
from onepolicy.errors import ContentError, MissingExtra, OnepolicyError, UsageError
from onepolicy.records import from_records, to_records
from onepolicy.rollouts import Rollouts, concat
from onepolicy.types import Lists, Scoring, Values

RECORDS: list[dict[str, Any]] = [
    {
        "record_id": "a",
        "group_id": "g",
        "step": 3,
        "token_ids": [1, 2, 3],
        "prompt_length": 1,
        "loss_mask": [0, None, 1],
        "sampler_logprobs": [None, "NaN", "-Infinity"],
        "old_logprobs": [None, -0.1, None],
        "sampling_mask": [None, [2, 4], []],
        "routed_experts": [[0, 1], [1, 2], [2, 3]],
        "stop_token_ids": [3, 7],
        "prompt_messages": [{"role": "user", "content": "é\n\u2028"}],
        "reward": "Infinity",
    },
    {"record_id": None, "token_ids": [9, 8], "prompt_length": 0, "stop_token_ids": []},
    {"record_id": "c", "token_ids": [], "policy_version": []},
    {"record_id": "d", "token_ids": [5], "prompt_length": 1, "policy_version": [2**40]},
]
SUFFIXES = (".parquet", ".jsonl")


@pytest.fixture
def rollouts() -> Rollouts:
    r = from_records(RECORDS)
    single = Values(np.array([0, -0.1, -0.2, 0, -0.3, 0], dtype=np.float32), np.array([0, 1, 1, 0, 1, 0], dtype=bool))
    declared = Scoring(single, semantics="raw", dtype="bfloat16", fingerprint={"torch": "2.6"}, scoring_id="id")
    return r.with_scoring("leg_1", declared)


def _plain(r: Rollouts) -> list[dict[str, Any]]:
    return list(to_records(r))


def _refused(path: Path | str, kind: type[OnepolicyError] = ContentError) -> str:
    """The message of reading `path`, checked to be one line that names it."""
    with pytest.raises(kind) as caught:
        storage.read(path)
    assert caught.value.exit_code == (2 if kind is UsageError else 4)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert str(path) in message
    return message.replace(str(path), "FILE")


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".json"])
def test_everything_is_kept(tmp_path: Path, rollouts: Rollouts, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    storage.write(rollouts, path)
    again = storage.read(path)
    assert _plain(again) == _plain(rollouts)
    leg = again.scorings["leg_1"]
    assert leg.logprobs.values.dtype == np.float32
    assert again.scorings["old"].logprobs.values.dtype == np.float64
    assert (leg.semantics, leg.dtype, leg.fingerprint, leg.scoring_id) == ("raw", "bfloat16", {"torch": "2.6"}, "id")
    assert again.token_ids.flags.writeable


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 100])
def test_shards_are_the_file_in_pieces(tmp_path: Path, rollouts: Rollouts, suffix: str, max_tokens: int) -> None:
    path = tmp_path / f"x{suffix}"
    storage.write(rollouts, path)
    shards = list(storage.iter_shards(path, max_tokens))
    assert all(s.n_tokens <= max_tokens or len(s) == 1 for s in shards)
    assert all(set(s.scorings) == set(rollouts.scorings) for s in shards)
    assert _plain(concat(shards)) == _plain(rollouts)


def test_shards_hold_a_part_of_the_file(tmp_path: Path) -> None:
    """Even where another writer put everything into one row group."""
    n, length = 2_000_000, 500
    ids = np.random.default_rng(0).integers(0, 150_000, n, dtype=np.int32)
    offsets = pa.array(np.arange(0, n + 1, length, dtype=np.int32))
    pq.write_table(pa.table({"token_ids": pa.ListArray.from_arrays(offsets, pa.array(ids))}), tmp_path / "x.parquet")
    before, most, total = pa.total_allocated_bytes(), 0, 0
    del offsets
    for shard in storage.iter_shards(tmp_path / "x.parquet", 50_000):
        most, total = max(most, pa.total_allocated_bytes() - before), total + shard.n_tokens
    assert total == n
    assert most < ids.nbytes / 2


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_is_replaced_only_if_allowed(tmp_path: Path, rollouts: Rollouts, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    storage.write(rollouts, path)
    with pytest.raises(UsageError, match="exists already; --overwrite"):
        storage.write(rollouts.take([0]), path)
    assert len(storage.read(path)) == 4
    storage.write(rollouts.take([0]), path, overwrite=True)
    assert len(storage.read(path)) == 1
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_stands_under_a_null_list_is_not_read(tmp_path: Path, suffix: str) -> None:
    values, offsets = np.arange(1, 7, dtype=np.int32), np.array([0, 2, 5, 6, 6])
    ids = {"token_ids": Values(np.array([1, 2, 3, 4], dtype=np.int32))}
    for name, at in (("sampling_mask", [0, 2, 4]), ("stop_token_ids", [0, 1, 2, 3, 4])):
        lists = {name: Lists(values, offsets, np.array([True, False, True, True]))}
        storage.write(Rollouts(np.array(at), ids, lists=lists), tmp_path / f"x{suffix}", overwrite=True)
        again = storage.read(tmp_path / f"x{suffix}").lists[name]
        assert again.valid is not None and again.valid.tolist() == [True, False, True, True]
        assert [again.row(i).tolist() for i in (0, 2, 3)] == [[1, 2], [6], []]


def _with_free_json(value: Any, where: str) -> Rollouts:
    """Two tokens, with `value` in the fingerprint of a scoring or in the messages."""
    ids = {"token_ids": Values(np.array([1, 2], dtype=np.int32))}
    if where == "fingerprint":
        unscored = Values(np.zeros(2), np.zeros(2, dtype=bool))
        return Rollouts(np.array([0, 2]), ids, scorings={"old": Scoring(unscored, fingerprint={"it": value})})
    return Rollouts(np.array([0, 2]), ids, {"prompt_messages": Values(np.array([{"it": value}], dtype=object))})


@pytest.mark.parametrize("where", ["fingerprint", "messages"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_free_json_keeps_what_is_not_finite(tmp_path: Path, suffix: str, where: str) -> None:
    path = tmp_path / f"x{suffix}"
    storage.write(_with_free_json([float("nan"), float("-inf"), 0.1, "NaN", None], where), path)
    r = storage.read(path)
    found = r.scorings["old"].fingerprint if where == "fingerprint" else r.record("prompt_messages", 0)
    assert repr(found["it"]) == "[nan, -inf, 0.1, 'NaN', None]"


@pytest.mark.parametrize("where", ["fingerprint", "messages"])
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("value", [date(2026, 1, 1), Path("x"), np.float32(1), b"x", {1}])
def test_what_is_not_json_is_refused(tmp_path: Path, value: Any, suffix: str, where: str) -> None:
    with pytest.raises(ContentError, match="cannot be stored as JSON: Object of type") as caught:
        storage.write(_with_free_json(value, where), tmp_path / f"x{suffix}")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["", "a b", "hf:tiny", "x", "x_mine", "a\nb"])
def test_a_scoring_that_no_column_can_be_named_after(
    tmp_path: Path, rollouts: Rollouts, suffix: str, name: str
) -> None:
    with pytest.raises(ContentError, match=r"scoring '.*': wanted a name of letters, digits and '_'") as caught:
        storage.write(rollouts.with_scoring(name, rollouts.scorings["old"]), tmp_path / f"x{suffix}")
    assert "\n" not in str(caught.value)


def test_a_damaged_byte_is_noticed(tmp_path: Path, rollouts: Rollouts) -> None:
    """A bit of a stored log-prob makes another log-prob, unless the page's checksum is looked at."""
    path = tmp_path / "x.parquet"
    storage.write(rollouts, path)
    data = path.read_bytes()
    chunk = pq.ParquetFile(path).metadata.row_group(0)
    column = next(chunk.column(i) for i in range(chunk.num_columns) if "old_lo" in chunk.column(i).path_in_schema)
    last = column.data_page_offset + column.total_compressed_size - 1
    path.write_bytes(data[:last] + bytes([data[last] ^ 1]) + data[last + 1 :])
    assert "checksum" in _refused(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, rollouts: Rollouts, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    storage.write(rollouts, path)
    before = path.read_bytes()
    odd = Values(np.array([object(), None, None, None], dtype=object), np.array([True, False, False, False]))
    bad = Rollouts(rollouts.offsets, rollouts.tokens, {"prompt_messages": odd})
    with pytest.raises(ContentError):
        storage.write(bad, path, overwrite=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_where_nothing_can_be_written(tmp_path: Path, rollouts: Rollouts) -> None:
    for path in (tmp_path / "no" / "x.parquet", tmp_path / "no" / "x.jsonl", tmp_path / "x.csv", tmp_path):
        with pytest.raises(UsageError):
            storage.write(rollouts, path)
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        storage.write(rollouts, tmp_path / "d.jsonl", overwrite=True)


def test_bytes_a_token(tmp_path: Path) -> None:
    """Random ids of a large vocabulary and independent log-probs: nothing to compress but the masks."""
    rng, n, length = np.random.default_rng(0), 200, 500
    total = n * length
    position = np.arange(total) % length
    drawn = Values(position >= 100)
    log_probs = [Values(-rng.exponential(0.7, total).astype(np.float32), position > 0) for _ in range(2)]
    r = Rollouts(
        np.arange(n + 1) * length,
        {"token_ids": Values(rng.integers(0, 150_000, total, dtype=np.int32)), "drawn": drawn, "loss_mask": drawn},
        scorings={"sampler": Scoring(log_probs[0]), "old": Scoring(log_probs[1])},
    )
    storage.write(r, tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_size / total < 12


def test_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollouts: Rollouts) -> None:
    monkeypatch.setattr(storage.parquet, "_GROUP_VALUES", 8)
    storage.write(rollouts, tmp_path / "x.parquet")
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups >= 2
    assert _plain(storage.read(tmp_path / "x.parquet")) == _plain(rollouts)


def test_metadata_of_the_file(tmp_path: Path, rollouts: Rollouts) -> None:
    storage.write(rollouts, tmp_path / "x.parquet")
    metadata = pq.read_schema(tmp_path / "x.parquet").metadata
    assert metadata[b"onepolicy.schema"] == b"1"
    assert json.loads(metadata[b"onepolicy.scorings"])["leg_1"] == {
        "semantics": "raw",
        "dtype": "bfloat16",
        "fingerprint": {"torch": "2.6"},
        "scoring_id": "id",
    }


@pytest.mark.parametrize("package", ["pyarrow", "orjson"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    path = tmp_path / ("x.parquet" if package == "pyarrow" else "x.jsonl")
    path.write_bytes(b"{}")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=f"'{package}': pip install 'onepolicy\\[cli\\]'"):
        storage.read(path)


# paths


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_paths_that_are_no_files(tmp_path: Path, suffix: str) -> None:
    missing, folder, other = tmp_path / f"no{suffix}", tmp_path / f"d{suffix}", tmp_path / "x.csv"
    folder.mkdir()
    other.write_text("a")
    assert _refused(missing, UsageError) == "no such file: FILE"
    assert "is a folder" in _refused(folder, UsageError)
    assert "got the suffix '.csv', wanted one of .parquet, .jsonl, .json" in _refused(other, UsageError)


def test_max_tokens_is_at_least_one(tmp_path: Path, rollouts: Rollouts) -> None:
    storage.write(rollouts, tmp_path / "x.jsonl")
    with pytest.raises(UsageError, match="max_tokens: got 0"):
        list(storage.iter_shards(tmp_path / "x.jsonl", 0))
