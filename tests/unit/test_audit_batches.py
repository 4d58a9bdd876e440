"""A dump of odd records gives the report, to the byte, that it gives one record at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy import auditing
from onepolicy.audit import Choices, audit
from onepolicy.report.json import to_json
from onepolicy.types import Report

Record = dict[str, Any]


def healthy(n: int = 40, seed: int = 0, sd: float = 0.02) -> list[Record]:
    """`n` canonical records of a prompt of two and 20 to 60 drawn tokens, in groups of four."""
    rng = np.random.default_rng(seed)
    out: list[Record] = []
    for i in range(n):
        length = int(rng.integers(20, 60))
        a = -rng.exponential(0.6, length)
        b = a + rng.normal(0, sd, length) * (1 - np.exp(a))
        ids = rng.integers(5, 900, length + 2).tolist()
        row = {"record_id": f"{i:03d}", "token_ids": ids, "prompt_length": 2, "group_id": str(i // 4)}
        sides = {"sampler_logprobs": a, "old_logprobs": b}
        out.append({**row, **{k: [None, None, *x.tolist()] for k, x in sides.items()}})
    return out


def half_grouped() -> list[Record]:
    """The first half is clustered by group, and has a third scoring besides; the others have neither."""
    rows = healthy(80)
    for row in rows[40:]:
        del row["group_id"]
    return [{**row, "reference_logprobs": row["old_logprobs"]} if i < 40 else row for i, row in enumerate(rows)]


def heated(logp: float, temperature: float) -> float:
    """Of one of two tokens: the logits times `temperature`."""
    logits = np.array([logp, np.log(-np.expm1(min(logp, -1e-12)))]) * temperature
    return float(logits[0] - np.logaddexp(*logits))


def many_temperatures() -> list[Record]:
    """More declared temperatures than are told apart; the scorer has one for all, at which half of them lie above."""
    rows = healthy(120, sd=0.0)
    for i, row in enumerate(rows):
        row["temperature"] = 0.5 + (i // 2) / 60
        row["old_logprobs"] = [None if x is None else heated(x, row["temperature"]) for x in row["old_logprobs"]]
    return rows


def masks_of_some() -> list[Record]:
    rows = healthy()
    return [
        {**row, "loss_mask": [False] * 2 + [k % 3 > 0 for k in range(len(row["token_ids"]) - 2)]} if i % 2 else row
        for i, row in enumerate(rows)
    ]


def nothing_trained_without_advantages() -> list[Record]:
    rows = healthy()
    none = {"loss_mask": [False] * len(rows[0]["token_ids"])}
    others = [{**r, "advantages": [None, None, *[(-1.0) ** i] * (len(r["token_ids"]) - 2)]} for i, r in enumerate(rows)]
    return [{**rows[0], **none}, *others[1:]]


def constant_copies() -> list[Record]:
    """Six records whose two lists are one number again and again."""
    rows = healthy(20)
    for row in rows[4:10]:
        row["sampler_logprobs"] = row["old_logprobs"] = [None, None, *[-0.5] * (len(row["token_ids"]) - 2)]
    return rows


def zeros_at_the_end() -> list[Record]:
    """The last value of each reply is 0.0, and the next record begins with nulls."""
    rows = healthy(24)
    for row in rows:
        row["prompt_length"] = 4
        row["sampler_logprobs"][2:4] = row["old_logprobs"][2:4] = [None, None]
        row["sampler_logprobs"][-1] = 0.0
    return rows


def labelled() -> list[Record]:
    """Turns and environments that are told of some records only."""
    rows = healthy()
    told = ({"env_id": "math"}, {"turn": 1}, {"env_id": "code", "turn": 2}, {})
    return [{**row, **told[i // 10]} for i, row in enumerate(rows)]


def huge() -> list[Record]:
    """Values whose squares pass a float."""
    rows = healthy(8)
    for k, x in ((1, -1e160), (2, -1e308), (3, 1e100)):
        rows[k]["sampler_logprobs"][5] = x
    return rows


MADE: tuple[Callable[[], list[Record]], ...] = (
    half_grouped, many_temperatures, masks_of_some, nothing_trained_without_advantages, constant_copies,
    zeros_at_the_end, labelled, huge,
)  # fmt: skip


def report(rows: list[Record], path: Path) -> Report:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return audit([path], Choices(workers=1))


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_one_record_at_a_time_gives_the_same_report(
    made: Callable[[], list[Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows, path = made(), tmp_path / "dump.jsonl"
    whole = report(rows, path)
    monkeypatch.setattr(auditing, "BATCH_RECORDS", 1)
    assert to_json(report(rows, path)) == to_json(whole)
    assert whole.context["audit"]["counts"]["records"] == len(rows)


def test_records_of_other_clusters_are_all_read(tmp_path: Path):
    """A change of what records are clustered by is no damage: every record is a cluster then."""
    found = report(half_grouped(), tmp_path / "dump.jsonl")
    assert found.sums.cluster_unit == "sequence" and found.sums.n_clusters() == 80
    assert "files cut short" not in found.context["audit"]["counts"]


def test_a_record_without_a_mask_is_trained_on_beside_others_that_have_one(tmp_path: Path):
    rows = masks_of_some()
    reply = sum(len(r["token_ids"]) - 2 for r in rows)
    masked = sum((len(r["token_ids"]) - 2 + 2) // 3 for r in rows if "loss_mask" in r)
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert audit([path], Choices(workers=1, view="loss")).sums.counts["scored"] == reply - masked


def test_pairs_of_files_that_changed_places_are_told_as_pairs(tmp_path: Path):
    rows = healthy(24, sd=0.005)
    swapped = [r["old_logprobs"] for r in rows]
    for i, row in enumerate(rows):
        other, n = swapped[i ^ 1], len(row["token_ids"])
        row["old_logprobs"] = (other + [-0.1] * n)[:n]
        (tmp_path / f"{i:03d}.jsonl").write_text(json.dumps(row) + "\n")
    found = {f.code: f for f in audit([tmp_path], Choices(workers=1)).findings}
    assert found["exchanged-logprobs"].evidence["pattern"] == "neighbours are swapped in pairs, each within its group"
