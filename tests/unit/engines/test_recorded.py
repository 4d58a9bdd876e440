"""`recorded:FILE?side=old`: replayed for the same tokens only."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from onepolicy import storage
from onepolicy.check import check_file
from onepolicy.engines.open import open_engine
from onepolicy.errors import AlignmentError, UsageError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Scoring, Values


def rollouts(names: list[str] | None = None, ids: tuple[int, ...] = (8, 4, 2, 1, 2)) -> Rollouts:
    records = {"logprob_semantics": column_values("logprob_semantics", ["raw", "raw"])}
    if names:
        records["record_id"] = column_values("record_id", names)
    return Rollouts(np.array([0, 3, 5]), {"token_ids": Values(np.array(ids, dtype=np.int32))}, records)


@pytest.fixture
def file(tmp_path: Path) -> str:
    valid = np.array([False, True, True, False, True])
    logprobs = Values(np.array([0, -1, -2, 0, -3], dtype=np.float32), valid)
    old = Scoring(logprobs, semantics="raw", dtype="float32", fingerprint={"engine": "x"}, scoring_id="s1")
    path = str(tmp_path / "scored.parquet")
    storage.write(rollouts(["a", "b"]).with_scoring("old", old), path)
    return path


def test_it_replays_by_record_id_in_any_order_and_by_tokens_where_there_is_no_id(file: str) -> None:
    with open_engine(f"recorded:{file}") as engine:
        by_id = engine.score(rollouts(["a", "b"]).take([1, 0]))
        by_tokens = engine.score(rollouts().take([1, 0]))
        assert engine.fingerprint()["engine"] == "x" and engine.fingerprint()["dtype"] == "float32"
    for out in (by_id, by_tokens):
        assert out.logprobs.values[out.logprobs.mask()].tolist() == [-3.0, -1.0, -2.0]
        assert out.logprobs.mask().tolist() == [False, True, False, True, True]
        assert (out.semantics, out.dtype, out.scoring_id) == ("raw", "float32", "s1")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (rollouts(["a", "c"]), r"record 'c': .* holds no record of that id"),
        (rollouts(["a", "b"], (8, 4, 2, 1, 9)), r"record 'b': tokens differ at position 1: got 9 here, 2 in"),
        (rollouts(["b", "a"]), r"record 'b': tokens differ at position 0: got 8 here, 1 in"),
        (rollouts(None, (8, 4, 2, 1, 9)), r"holds no sequence of the same tokens"),
    ],
)
def test_other_tokens_are_refused_with_their_place(file: str, asked: Rollouts, says: str) -> None:
    with open_engine(f"recorded:{file}") as engine, pytest.raises(AlignmentError, match=says):
        engine.score(asked)


def test_another_length_and_another_side_are_refused(file: str) -> None:
    with open_engine(f"recorded:{file}") as engine:
        shorter = rollouts(["a", "b"])
        short = Rollouts(np.array([0, 2]), {"token_ids": Values(shorter.token_ids[:2])}, shorter.take([0]).records)
        with pytest.raises(AlignmentError, match=r"record 'a': 2 tokens here, 3 in .*; nothing is cut"):
            engine.score(short)
        with pytest.raises(UsageError, match="holds no full distributions"):
            engine.score(rollouts(["a", "b"]), distributions=True)
    with (
        pytest.raises(UsageError, match="no 'current_logprobs'; its scorings: old"),
        open_engine(f"recorded:{file}?side=current"),
    ):
        pass


def test_a_file_is_not_replayed_against_itself(tmp_path: Path) -> None:
    """A hand-written file has no scoring id: the file and the side tell that it is one scoring seen twice."""
    path = tmp_path / "mine.jsonl"
    record = {"token_ids": [1, 2, 3], "prompt_length": 1, "logprob_semantics": "raw"}
    path.write_text(json.dumps({**record, "sampler_logprobs": [None, -1.0, -2.0], "old_logprobs": [None, -1.0, -2.0]}))
    with pytest.raises(AlignmentError, match="itself"):
        check_file(path, f"recorded:{path}?side=sampler", bounds="bitwise")
    twin = tmp_path / "twin.jsonl"
    twin.write_text(path.read_text())
    assert (
        check_file(path, f"recorded:{twin}?side=sampler", bounds="bitwise").measurements["abs_log_ratio/max"].value == 0
    )
    assert check_file(path, f"recorded:{path}?side=old", bounds="bitwise").measurements["abs_log_ratio/max"].value == 0
