"""What `settle` keeps and does not make up: lists of a record, ids that are not known, where the prompt ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dump_samples import OLD, PROMPT, REPLY, SAMPLER, canonical_row, lines, loose_row, read_dump, settled
from onepolicy import storage
from onepolicy.audit import audit
from onepolicy.convert import convert
from onepolicy.errors import ContentError
from onepolicy.formats.base import RawColumn, RawRecord
from onepolicy.formats.settle import ids_known, rollouts_of
from onepolicy.records import from_records, to_records
from onepolicy.rollouts import Rollouts

NO_IDS = {"rollout_logprobs": SAMPLER, "trainer_logprobs": OLD}


def rollouts(path: Path) -> Rollouts:
    found = settled(read_dump(path)[1]).rollouts
    assert found is not None
    return found


def test_lists_of_a_record_are_kept(tmp_path: Path) -> None:
    rows = [canonical_row(stop_token_ids=[2, 7]), canonical_row(), canonical_row(stop_token_ids=[])]
    found = rollouts(lines(tmp_path / "r.jsonl", rows)).lists["stop_token_ids"]
    assert [found.row(i).tolist() for i in range(3)] == [[2, 7], [], []]
    assert found.valid is not None and found.valid.tolist() == [True, False, True]
    assert "stop_token_ids" not in rollouts(lines(tmp_path / "n.jsonl", rows[1:2])).lists


def test_stop_ids_that_are_none(tmp_path: Path) -> None:
    _, (found,) = read_dump(lines(tmp_path / "r.jsonl", [canonical_row(stop_token_ids=[2, None])]))
    assert "'stop_token_ids': position 1: got None, wanted a token id" in found.why  # type: ignore[union-attr]


#: Records as the contract reads them, without what another reader would make up.
CONTRACT: list[dict[str, Any]] = [
    {"drawn": [False] * 2 + [True] * 5, "prompt_length": None},
    {"prompt_length": None, "loss_mask": None},  # nothing is drawn then
    {"prompt_length": None},
    {"stop_token_ids": [3]},
    {},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("changed", CONTRACT)
def test_one_of_our_records_is_the_same_read_by_line_converted_and_by_the_contract(
    tmp_path: Path, changed: dict[str, Any], suffix: str
) -> None:
    row = {key: x for key, x in canonical_row(**changed).items() if x is not None}
    source = lines(tmp_path / "r.jsonl", [row])
    wanted = list(to_records(from_records([row])))
    assert list(to_records(rollouts(source))) == wanted
    convert([source], tmp_path / f"out{suffix}")
    assert list(to_records(storage.read(tmp_path / f"out{suffix}"))) == wanted
    assert ("prompt_length" in wanted[0]) == ("prompt_length" in row)


def test_records_with_and_without_drawn_in_one_batch(tmp_path: Path) -> None:
    """The one that does not tell has its whole reply drawn, whoever stands beside it."""
    drawn = [False] * 3 + [True, True, False, True]
    both = rollouts(lines(tmp_path / "r.jsonl", [canonical_row(), canonical_row(drawn=drawn)]))
    assert both.drawn[both.sequence(0)].tolist() == [False] * 3 + [True] * 4
    assert both.drawn[both.sequence(1)].tolist() == drawn
    assert both.record("prompt_length", 1) == 3


def test_where_a_mask_tells_the_prompt_it_is_written(tmp_path: Path) -> None:
    """Without `drawn`, what is drawn hangs on it."""
    columns = {"loss_mask": RawColumn(np.array([False, False, True]), "whole")}
    found = rollouts_of([RawRecord("a", np.array([1, 2, 3]), None, columns)])
    assert found.record("prompt_length", 0) == 2 and found.drawn.tolist() == [False, False, True]


def test_a_place_in_a_reply_is_counted_from_its_first_drawn_token(tmp_path: Path) -> None:
    """Where `drawn` tells and `prompt_length` does not."""
    drawn = [False] * 3 + [True] * 4
    rows = [canonical_row(drawn=drawn, prompt_length=None, old_logprobs=[None, -3.0, -4.0, -0.75, 0.5, -0.25, -2.5])]
    found = {f.code: f for f in audit([lines(tmp_path / "r.jsonl", rows)]).findings}
    assert "reply position 1" in str(found["positive-logprob"].place) + str(found["positive-logprob"].evidence)


# log-probs without ids


def test_ids_that_are_not_known_are_null(tmp_path: Path) -> None:
    found = rollouts(lines(tmp_path / "r.jsonl", [NO_IDS, loose_row()]))
    assert ids_known(found).tolist() == [False, True]
    assert found.tokens["token_ids"].mask().tolist() == [False] * 5 + [True] * 7


def test_convert_writes_no_stand_ins(tmp_path: Path) -> None:
    path = lines(tmp_path / "r.jsonl", [NO_IDS, loose_row()])
    done = convert([path], tmp_path / "out.jsonl")
    assert (done.records, done.left_out) == (1, 1)
    assert done.reasons == [f"{path}:1: log-probs without token ids, which one of our files needs; audit reads them"]
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["token_ids"] == PROMPT + REPLY
    with pytest.raises(ContentError, match=r"nothing to write: .*log-probs without token ids"):
        convert([lines(tmp_path / "n.jsonl", [NO_IDS])], tmp_path / "none.parquet")


def test_an_audit_compares_them_and_shows_no_ids(tmp_path: Path) -> None:
    rows = [{"rollout_logprobs": SAMPLER, "trainer_logprobs": [x - 0.001 * i for x in SAMPLER]} for i in range(8)]
    report = audit([lines(tmp_path / "r.jsonl", rows)])
    assert report.sums is not None and not {"unknown-ids", "files-unreadable"} & {f.code for f in report.findings}
    (worst,) = [x for x in report.listings if x.title == "Worst sequences"]
    assert {row[-1] for row in worst.rows} == {""}
