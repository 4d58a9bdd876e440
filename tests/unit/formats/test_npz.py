"""numpy's .npz: padded either way, flat, and what is refused."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dump_samples import OLD, PROMPT, REPLY, SAMPLER, read_dump, scored, settled
from onepolicy.audit import audit
from onepolicy.errors import ContentError
from onepolicy.formats.base import BrokenRecord, RawRecord
from onepolicy.formats.detect import detect, format_of
from onepolicy.formats.files import Files

#: Two sequences: the one of all samples, and a shorter one.
SHORT = ([31], [41, 42], [-0.25, -1.5], [-0.5, -1.0])
PROMPTS, REPLIES = [PROMPT, SHORT[0]], [REPLY, SHORT[1]]
A, B = [SAMPLER, SHORT[2]], [OLD, SHORT[3]]
WHOLE = [p + r for p, r in zip(PROMPTS, REPLIES, strict=True)]


def padded(rows: Any, width: int, left: bool = False, fill: Any = 0, dtype: Any = None) -> Any:
    """`[B, width]`."""
    pads = [[fill] * (width - len(row)) for row in rows]
    return np.array([[*(p if left else []), *r, *([] if left else p)] for p, r in zip(pads, rows, strict=True)], dtype)


def ones(rows: Any) -> list[list[int]]:
    return [[1] * len(row) for row in rows]


def over(values: Any, fill: float = 0.0) -> list[list[float]]:
    """Values of the reply over the whole text."""
    return [[fill] * len(p) + list(v) for p, v in zip(PROMPTS, values, strict=True)]


def flat(rows: Any) -> Any:
    return np.array([x for row in rows for x in row])


def written(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


RIGHT = {
    "token_ids": padded(WHOLE, 9),
    "attention_mask": padded(ones(WHOLE), 9),
    "prompt_length": np.array([3, 1]),
    "rollout_logprobs": padded(over(A), 9),
    "old_logprobs": padded([x[1:] for x in over(B)], 8),  # one less, as logits are
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "right": RIGHT,
    "lengths": {**RIGHT, "attention_mask": None, "lengths": np.array([7, 3])},
    "left": {
        "input_ids": padded(WHOLE, 9, left=True),
        "attention_mask": padded(ones(WHOLE), 9, left=True),
        "response_length": np.array([4, 2], dtype=np.int32),
        "rollout_logprobs": padded(over(A), 9, left=True),
        "old_logprobs": padded([x[1:] for x in over(B)], 8, left=True),
    },
    "prompt on the left, reply on the right": {
        "prompt_ids": padded(PROMPTS, 5, left=True),
        "response_ids": padded(REPLIES, 6),
        "attention_mask": np.hstack([padded(ones(PROMPTS), 5, left=True), padded(ones(REPLIES), 6)]),
        "rollout_logprobs": padded(A, 6),
        "old_log_probs": padded(B, 6),
    },
    "the same in one array": {
        "input_ids": np.hstack([padded(PROMPTS, 5, left=True), padded(REPLIES, 6)]),
        "responses": padded(REPLIES, 6),
        "attention_mask": np.hstack([padded(ones(PROMPTS), 5, left=True), padded(ones(REPLIES), 6)]),
        "rollout_logprobs": padded(A, 6),
        "old_log_probs": padded(B, 6),
    },
    "masks of each": {
        "prompt_ids": padded(PROMPTS, 5, left=True),
        "prompt_mask": padded(ones(PROMPTS), 5, left=True),
        "completion_ids": padded(REPLIES, 6),
        "completion_mask": padded(ones(REPLIES), 6),
        "sampling_per_token_logps": padded(A, 6),
        "old_per_token_logps": padded(B, 6),
    },
    "flat": {
        "token_ids": flat(WHOLE),
        "cu_seqlens": np.array([0, 7, 10], dtype=np.int32),
        "prompt_lengths": np.array([3, 1]),
        "rollout_logprobs": flat(A),  # of the replies alone
        "old_logprobs": flat(over(B)),
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path: Path, name: str) -> None:
    arrays = {key: x for key, x in LAYOUTS[name].items() if x is not None}
    found, items = read_dump(written(tmp_path / "r.npz", step=np.array(7), uid=np.array(["a", "b"]), **arrays))
    result = settled(items)
    assert found.formats == ("npz",) and not result.aside and not result.kept_faults
    rollouts = result.rollouts
    assert rollouts is not None and rollouts.token_ids.tolist() == WHOLE[0] + WHOLE[1]
    for i in range(2):
        drawn = rollouts.drawn[rollouts.sequence(i)].tolist()
        assert drawn == [False] * len(PROMPTS[i]) + [True] * len(REPLIES[i])
        for side, values in (("sampler", A), ("old", B)):
            assert [x for x, d in zip(scored(result, side, i), drawn, strict=True) if d] == values[i]
        assert (rollouts.record("step", i), rollouts.record("record_id", i)) == (7, "ab"[i])


def test_single_and_half_precision_stay_what_they_are(tmp_path: Path) -> None:
    arrays = {**RIGHT, "rollout_logprobs": RIGHT["rollout_logprobs"].astype(np.float16)}
    arrays["old_logprobs"] = RIGHT["old_logprobs"].astype(np.float32)
    _, items = read_dump(written(tmp_path / "r.npz", **arrays))
    record = items[0]
    assert isinstance(record, RawRecord)
    assert {record.columns[f"{side}_logprobs"].values.dtype for side in ("sampler", "old")} == {np.dtype(np.float32)}


def test_compressed_and_lists_and_an_audit(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "r.npz", routed_experts=np.zeros((2, 9, 2, 1), dtype=np.int16), **RIGHT)
    _, items = read_dump(tmp_path)
    record = items[0]
    assert isinstance(record, RawRecord) and len(record.lists["routed_experts"][0]) == 7
    report = audit([tmp_path])
    assert report.sums is not None and report.sums.names == ("sampler", "old")
    assert not {"length-mismatch", "files-unreadable", "records-unreadable"} & {f.code for f in report.findings}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rollout_logprobs": np.array([[None] * 9] * 2)}, "an .npy of Python objects (2, 9), which are pickles"),
        (
            {"attention_mask": None},
            "nothing tells which of 9 places of a row of 'token_ids' are tokens; wanted attention",
        ),
        ({"rollout_logprobs": np.zeros((2, 5))}, "'rollout_logprobs': got [2, 5], wanted a width of 9 or 8"),
        ({"rollout_logprobs": np.zeros((3, 9))}, "'rollout_logprobs': got 3 rows, wanted 2, one for each row"),
        ({"token_ids": np.zeros(9, dtype=int)}, "wanted ids [B, T], or flat ones with cu_seqlens"),
        ({"attention_mask": None, "lengths": np.array([7, 30])}, "got a length of 30, but a row has 9 places"),
        ({"attention_mask": None, "lengths": np.array([7.5, 3])}, "'lengths': got float64 [2], wanted 2 whole numbers"),
        ({"cu_seqlens": np.array([0, 7, 10])}, "stands beside no flat ids"),
        ({"rollout_logprobs": np.zeros((2, 9), dtype="V2")}, "bfloat16 has to be saved as float32"),
        (
            {"token_ids": padded(WHOLE, 9, left=True), "attention_mask": None, "lengths": np.array([7, 3])},
            "'token_ids', row 0: ids stand behind its 7 tokens; padded on the left?",
        ),
        (
            {"responses": padded([REPLY, [41, 43]], 6), "response_length": np.array([4, 2])},
            "row 1: its 2 tokens are not",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    path = written(tmp_path / "r.npz", **{k: x for k, x in (RIGHT | changed).items() if x is not None})
    (shard,) = detect([path]).shards
    with pytest.raises(ContentError) as err:
        list(format_of(shard.format).read(shard, Files()))
    assert says in str(err.value) and str(path) in str(err.value) and "\n" not in str(err.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"cu_seqlens": np.array([0, 7, 9])}, "'cu_seqlens': wanted whole numbers from 0 to 10 that never fall"),
        ({"cu_seqlens": np.array([0, 12, 10])}, "'cu_seqlens': wanted whole numbers from 0 to 10"),
        (
            {"rollout_logprobs": np.zeros(9)},
            "got 9 values, wanted 10, one for each of 'token_ids', or 6 of the replies",
        ),
    ],
)
def test_flat_that_is_refused(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    (shard,) = detect([written(tmp_path / "r.npz", **(LAYOUTS["flat"] | changed))]).shards
    with pytest.raises(ContentError, match=r".*") as err:
        list(format_of(shard.format).read(shard, Files()))
    assert says in str(err.value)


def test_a_hole_in_one_rows_mask(tmp_path: Path) -> None:
    mask = RIGHT["attention_mask"].copy()
    mask[1, 1] = 0
    (shard,) = detect([written(tmp_path / "r.npz", **(RIGHT | {"attention_mask": mask}))]).shards
    with pytest.raises(ContentError, match="attention_mask has a hole at position 1"):
        list(format_of(shard.format).read(shard, Files()))


def test_an_npy_and_an_npz_of_something_else(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    np.savez(tmp_path / "b.npz", weights=np.zeros(3), bias=np.zeros(1))
    said = {Path(path).name: why for path, why in detect([tmp_path]).unclaimed}
    assert "an .npy is one array without a name; wanted .npz" in said["a.npy"]
    assert said["b.npz"] == "no known format has these arrays: weights, bias"


def test_a_header_that_claims_more_than_there_is(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "r.npz", "w") as archive:
        archive.writestr("token_ids.npy", file.getvalue())
        archive.writestr("logprobs.npy", file.getvalue())
    (shard,) = detect([tmp_path]).shards
    with pytest.raises(ContentError, match=r"an \.npy of int64 \(1099511627776,\) in 0 bytes"):
        list(format_of(shard.format).read(shard, Files()))


def test_damaged_at_random(tmp_path: Path) -> None:
    """No exception but `ContentError`, one line each; every record is one or says why not."""
    path = written(tmp_path / "r.npz", **RIGHT)
    whole, said = path.read_bytes(), list[str]()
    for seed in range(120):
        rng = random.Random(seed)
        text = bytearray(whole)
        for _ in range(rng.choice((1, 4, 40))):
            text[rng.randrange(len(text))] = rng.randrange(256)
        path.write_bytes(text[: rng.randrange(len(text))] if seed % 3 == 0 else text)
        for shard in detect([path]).shards:
            try:
                items = list(format_of(shard.format).read(shard, Files()))
            except ContentError as err:
                said.append(str(err))
                continue
            assert all(isinstance(x, (RawRecord, BrokenRecord)) for x in items)
            settled(items)
    assert said and all("\n" not in text and str(path) in text for text in said)


ODD = [np.zeros(0), np.array(1), np.array("x"), np.array([True, False]), np.full((2, 9), np.nan), np.zeros((0, 9))]
ODD += [
    np.full((2, 9), -1),
    np.full((2, 9), 2**40),
    np.zeros((2, 9, 3)),
    np.array([["a"] * 9] * 2),
    np.zeros((2, 0), int),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_odd_kinds(tmp_path: Path, layout: str) -> None:
    arrays = {key: x for key, x in LAYOUTS[layout].items() if x is not None}
    said: list[str] = []
    for key in arrays:
        for odd in ODD:
            path = written(tmp_path / "r.npz", **{**arrays, key: odd})
            for shard in detect([path]).shards:
                try:
                    settled(list(format_of(shard.format).read(shard, Files())))
                except ContentError as err:
                    said.append(str(err))
    assert said and all("\n" not in text and "r.npz" in text for text in said)
