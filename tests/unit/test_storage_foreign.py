"""Files that others wrote: the spellings that are read, and what is refused, each with one clear line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onepolicy import storage
from onepolicy.errors import ContentError
from onepolicy.records import from_records


def _refused(path: Path) -> str:
    """The message of reading `path`, checked to be one line that names it."""
    with pytest.raises(ContentError) as caught:
        storage.read(path)
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert str(path) in message
    return message.replace(str(path), "FILE")


# other writers' Parquet


def _parquet(tmp_path: Path, columns: dict[str, Any], metadata: dict[str, str] | None = None) -> Path:
    path = tmp_path / "x.parquet"
    table = pa.table(columns)
    pq.write_table(table.replace_schema_metadata(metadata) if metadata else table, path)
    return path


IDS = pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.int64()))


def _half(rows: list[list[float | None]]) -> Any:
    flat = [None if x is None else np.float16(x) for row in rows for x in row]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, pa.float16()))


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (pa.array([[None, -0.5, None], [None, -1]], pa.large_list(pa.float32())), [None, -0.5, None, None, -1.0]),
        (_half([[None, -0.5, -2], [None, -1]]), [None, -0.5, -2.0, None, -1.0]),
        (pa.array([[None, -0.5, None], None], pa.list_(pa.float64())), [None, -0.5, None, None, None]),
        (pa.array([[None] * 3, [None] * 2]), [None] * 5),
        (pa.nulls(2), [None] * 5),
        (pa.array([[None, -1, -2], [None, 0]], pa.list_(pa.int8())), [None, -1.0, -2.0, None, 0.0]),
    ],
)
def test_spellings_of_a_float_column(tmp_path: Path, column: Any, wanted: list[float | None]) -> None:
    lp = storage.read(_parquet(tmp_path, {"token_ids": IDS, "old_logprobs": column})).scorings["old"].logprobs
    assert [x if ok else None for x, ok in zip(lp.values.tolist(), lp.mask(), strict=True)] == wanted
    assert lp.values.dtype in (np.float32, np.float64)


@pytest.mark.parametrize("kind", [pa.uint8(), pa.int16(), pa.uint32(), pa.uint64()])
def test_ids_are_narrowed(tmp_path: Path, kind: Any) -> None:
    r = storage.read(_parquet(tmp_path, {"token_ids": IDS.cast(pa.list_(kind))}))
    assert r.token_ids.dtype == np.int32
    assert r.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_other_spellings(tmp_path: Path) -> None:
    fixed = pa.array([[[1, 2], [0, 0], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.int32(), 2)))
    messages = [[{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], None]
    path = _parquet(
        tmp_path,
        {
            "token_ids": IDS,
            "group_id": pa.array(["g", None]).dictionary_encode(),
            "sample_id": pa.array([1, 2]),
            "run_id": pa.array(["r", "r"], pa.large_string()),
            "loss_mask": pa.array([[0, 1, 1], [0.0, 1.0]]),
            "drawn": pa.array([[0, 1, 1], None], pa.list_(pa.uint8())),
            "prompt_length": pa.array([1.0, None]).cast(pa.int64()),
            "sampling_mask": fixed,
            "prompt_messages": messages,
            "x_anything": [1, 2],
            "x_my_logprobs": ["so", "so"],
        },
    )
    r = storage.read(path)
    assert [r.record("group_id", i) for i in range(2)] == ["g", None]
    assert [r.record("sample_id", i) for i in range(2)] == ["1", "2"]
    assert r.tokens["loss_mask"].values.tolist() == [False, True, True, False, True]
    assert r.drawn.tolist() == [False, True, True, False, False]
    assert r.lists["sampling_mask"].row(4).tolist() == [7, 8]
    assert r.lists["sampling_mask"].valid is None
    assert not r.scorings
    assert [r.record("prompt_messages", i) for i in range(2)] == messages


def test_drawn_follows_prompt_length(tmp_path: Path) -> None:
    assert storage.read(_parquet(tmp_path, {"token_ids": IDS, "prompt_length": [1, 2]})).drawn.tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]


FLOATS = pa.list_(pa.float32())


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"prompt": ["a"], "response_ids": [[1]]},
            "FILE: no column 'token_ids' in this Parquet; it has prompt, response_ids",
        ),
        ({}, "FILE: no column 'token_ids' in this Parquet; it has no columns"),
        ({"token_ids": [1, 2]}, "FILE: column 'token_ids' is int64, wanted a list of whole numbers of 32 bits"),
        ({"token_ids": [["a"]]}, "column 'token_ids' is string, wanted whole numbers of 32 bits"),
        ({"token_ids": [[1.0]]}, "column 'token_ids' holds float64 values, wanted whole numbers of 32 bits"),
        ({"token_ids": [[1], [2, 2**31]]}, "record 2: column 'token_ids', position 1: got 2147483648, wanted"),
        ({"token_ids": [[1], None]}, "record 2: column 'token_ids' is null"),
        ({"token_ids": [[1, None]]}, "record 1: column 'token_ids', position 1: got null, which it never is"),
        (
            {"token_ids": [[1, -1]]},
            "FILE: record 1, column 'token_ids', position 1: got -1, wanted an id of at least 0",
        ),
        ({"token_ids": IDS, "old_logprob": [1, 2]}, "unknown column 'old_logprob'; did you mean 'old_logprobs'?"),
        ({"token_ids": IDS, "old_logprobs": [["a"], ["b"]]}, "record 1: column 'old_logprobs': too few values: got 1"),
        (
            {"token_ids": IDS, "old_logprobs": [list("abc"), list("de")]},
            "column 'old_logprobs' is string, wanted floats",
        ),
        ({"token_ids": IDS, "old_logprobs": [-1.0, -2.0]}, "column 'old_logprobs' is double, wanted a list of floats"),
        (
            {"token_ids": IDS, "record_id": ["p", "q"], "old_logprobs": [[None, -1, -1], [-1.0]]},
            "FILE: record 2 ('q'): column 'old_logprobs': too few values: got 1, wanted 2; the value of token 0 seems",
        ),
        (
            {"token_ids": [[1, 2, 3, 4]], "prompt_length": [2], "old_logprobs": [[-1.0, -2.0]]},
            "got 2, wanted 4; 2 tokens are drawn",
        ),
        ({"token_ids": IDS, "loss_mask": [[1, 1, 1, 1], [1]]}, "record 1: column 'loss_mask': too many values: got 4"),
        (
            {"token_ids": IDS, "loss_mask": [[1, 1, 2], [1, 1]]},
            "record 1: column 'loss_mask', position 2: got 2, wanted",
        ),
        ({"token_ids": IDS, "drawn": [[0, None, 1], [0, 1]]}, "record 1: column 'drawn', position 1: got null"),
        ({"token_ids": IDS, "sampling_mask": [[[1]] * 3, [[2]]]}, "record 2: column 'sampling_mask': too few values"),
        ({"token_ids": IDS, "sampling_mask": [[1, 2, 3], [4, 5]]}, "column 'sampling_mask' is int64, wanted a list of"),
        (
            {"token_ids": IDS, "stop_token_ids": [[1], [None]]},
            "record 2: column 'stop_token_ids', position 0: got null",
        ),
        ({"token_ids": IDS, "prompt_length": ["a", "b"]}, "column 'prompt_length' is string, wanted whole numbers"),
        ({"token_ids": IDS, "prompt_length": [1, 9]}, "FILE: record 2, column 'prompt_length': got 9, wanted 0 to 2"),
        ({"token_ids": IDS, "group_id": [1.5, 2]}, "column 'group_id' is double, wanted text"),
        (
            {"token_ids": IDS, "prompt_messages": ["{", None]},
            "record 1: column 'prompt_messages': got '{', wanted JSON",
        ),
        ({"token_ids": IDS, "reward": [True, False]}, "column 'reward' holds booleans, wanted floats"),
        ({"token_ids": pa.array([], pa.list_(pa.int32()))}, "FILE: the file is empty: 0 sequences, 0 tokens"),
        ({"token_ids": pa.array([[]], pa.list_(pa.int32()))}, "FILE: the file is empty: 1 sequences, 0 tokens"),
    ],
)
def test_parquet_that_is_refused(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    assert said in _refused(_parquet(tmp_path, columns))


def test_records_are_counted_through_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_READ_TOKENS", 4)
    path = _parquet(tmp_path, {"token_ids": [[1, 2]] * 9 + [[3, -4]]})
    assert "record 10, column 'token_ids', position 1: got -4" in _refused(path)
    path = _parquet(tmp_path, {"token_ids": [[1, 2]] * 10, "loss_mask": [[1, 1]] * 9 + [[1]]})
    assert "record 10: column 'loss_mask'" in _refused(path)


def test_metadata_that_is_refused(tmp_path: Path) -> None:
    columns = {"token_ids": IDS}
    assert "got '2', wanted '1'" in _refused(_parquet(tmp_path, columns, {"onepolicy.schema": "2"}))
    for text in ("{", "[]", '{"old": 1}', '{"old": {"dtype": 3}}', "[" * 100_000):
        assert "metadata 'onepolicy.scorings': " in _refused(_parquet(tmp_path, columns, {"onepolicy.scorings": text}))


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _scratched(data: bytes) -> bytes:
    return data[:4] + b"\xff" * (len(data) // 2) + data[4 + len(data) // 2 :]


@pytest.mark.parametrize("harm", [_cut, _scratched, lambda data: b"", lambda data: b"not a parquet file at all"])
def test_a_parquet_file_that_is_not_whole(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "x.parquet"
    storage.write(from_records([{"token_ids": [1, 2, 3], "old_logprobs": [None, -0.1, "NaN"]}] * 9), path)
    path.write_bytes(harm(path.read_bytes()))
    assert _refused(path).startswith("FILE: cannot be read as Parquet: ")


# other writers' JSON lines


def _lines(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


GOOD = b'{"token_ids": [1, 2], "old_logprobs": [null, -0.5]}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"token_ids": [1, 2', "FILE:2: not JSON at character"),
        (b'{"token_ids": [1, 2', "; the line does not end, so the file may be cut off"),
        (b"[1, 2]", "FILE:2: got [1, 2], wanted an object with the columns of one sequence"),
        (b"null", "FILE:2: got None, wanted an object"),
        (b'{"token_ids": [1], "record_id": "\xff"}', "FILE:2: not UTF-8 at byte 33"),
        (b'{"tokens": [1]}', "FILE:2: unknown column 'tokens'; did you mean 'token_ids'?"),
        (b'{"record_id": "q"}', "FILE:2: record 'q': no 'token_ids'"),
        (
            b'{"record_id": "q", "token_ids": [1, 2], "old_logprobs": [-0.5]}',
            "FILE:2: record 'q': column 'old_logprobs'",
        ),
        (
            b'{"token_ids": [1], "old_logprobs": [0.0]}',
            "FILE:2: column 'old_logprobs', position 0: got 0.0, wanted null",
        ),
        (b'{"token_ids": [' + b"9" * 5000 + b"]}", "FILE:2: "),
        (b'{"prompt_messages": ' + b"[" * 100_000, "FILE:2: not JSON that can be read"),
        (b'{"token_ids": [-5]}', "FILE: record 2, column 'token_ids', position 0: got -5"),
    ],
)
def test_json_lines_that_are_refused(tmp_path: Path, line: bytes, said: str) -> None:
    assert said in _refused(_lines(tmp_path, GOOD, line))


def test_lines_are_counted_with_blank_ones(tmp_path: Path) -> None:
    assert _refused(_lines(tmp_path, GOOD, b"", b"  ", b"{]", GOOD)).startswith("FILE:4: not JSON at character 1")


def test_what_json_does_not_have_is_read(tmp_path: Path) -> None:
    values = b'"token_ids": [1, 2, 3, 4], "old_logprobs": [null, NaN, -Infinity, "-inf"], "prompt_text": "\\ud800"'
    line = b"\xef\xbb\xbf{" + values + b"}"
    r = storage.read(_lines(tmp_path, line + b"\r", b""))
    assert r.scorings["old"].logprobs.values[1:].tolist()[1:] == [-np.inf, -np.inf]
    assert r.record("prompt_text", 0) == "\ud800"
    storage.write(r, tmp_path / "y.jsonl")
    assert storage.read(tmp_path / "y.jsonl").record("prompt_text", 0) == "\ud800"
    with pytest.raises(ContentError, match="column 'prompt_text': not string that can be stored"):
        storage.write(r, tmp_path / "y.parquet")
    assert sorted(os.listdir(tmp_path)) == ["x.jsonl", "y.jsonl"]


def test_a_declaration_on_a_later_line_holds_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_READ_TOKENS", 2)
    late = b'{"token_ids": [1, 2], "scorings": {"old": {"semantics": "raw"}, "new": {"dtype": "float32"}}}'
    r = storage.read(_lines(tmp_path, GOOD, late))
    assert r.scorings["old"].semantics == "raw"
    assert r.scorings["old"].logprobs.mask().tolist() == [False, True, False, False]
    assert r.scorings["new"].dtype == "float32"


def test_a_line_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.jsonl, "MAX_LINE", 80)
    assert "FILE:2: the line has more than" in _refused(
        _lines(tmp_path, GOOD, b'{"prompt_text": "' + b"x" * 100 + b'"}')
    )


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_json_lines(tmp_path: Path, content: bytes) -> None:
    assert _refused(_lines(tmp_path, content)) == "FILE: the file is empty: 0 sequences, 0 tokens; nothing to compare"
