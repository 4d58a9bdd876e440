"""Values at another record's tokens: found with their order, silent on everything else that sets two sides apart."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import audit_batches
from exchanged_dumps import exchanged, replies
from integrity_dumps import NAMES, PROMPT, batch, changed, codes, drawn, found, reply, rolled, settled, totals
from onepolicy.audit import Choices, audit
from onepolicy.counted import LIMITS, Counted
from onepolicy.integrity import exchanged as check
from onepolicy.integrity import judge_all
from onepolicy.integrity.base import Batch, Told
from onepolicy.integrity.exchange_order import pattern
from onepolicy.rollouts import Rollouts, concat
from onepolicy.storage import write
from onepolicy.types import Finding, IntArray, Outcome

N = 64
ALL = np.arange(N)


def ordered(rollouts: Rollouts, first: int = 0, **more: Any) -> Batch:
    return batch(rollouts, order=first + np.arange(len(rollouts)), **more)


def only(findings: Sequence[Finding]) -> Finding:
    """Nulls may be there besides, where shorter lists ended."""
    assert [c for c in codes(findings) if c != "missing-logprobs"] == ["exchanged-logprobs"]
    return next(f for f in findings if f.code == "exchanged-logprobs")


ORDERS: dict[str, tuple[IntArray, str]] = {
    "roll": (np.roll(ALL, 1), "rolled by one record"),
    "roll by 8": (np.roll(ALL, 8), "rolled by 8 records"),
    "in each batch": (np.concatenate([np.roll(x, 1) for x in np.split(ALL, 4)]), "rolled by one record"),
    "reversed": (ALL[::-1], "their order is reversed"),
    "reversed in each batch": (np.concatenate([x[::-1] for x in np.split(ALL, 4)]), "their order is reversed"),
    "pairs": (ALL ^ 1, "neighbours are swapped in pairs"),
    "blocks": (ALL ^ 16, "blocks of 16 records are swapped"),
    "gathered": (ALL.reshape(4, -1).T.ravel(), "neighbours of one side stand 4 apart"),
    "dealt out": (ALL.reshape(-1, 4).T.ravel(), "neighbours of one side stand 4 apart"),
    "shuffled": (np.random.default_rng(3).permutation(N), "in no simple order"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("side", NAMES)
@pytest.mark.parametrize("lengths", [(96, 96), (40, 200)])
def test_each_order_on_each_side(order: str, side: str, lengths: tuple[int, int]) -> None:
    source, words = ORDERS[order]
    f = only(found(ordered(exchanged(replies(N, lengths), source, side))))
    assert f.evidence["pattern"].startswith(words)
    assert f.evidence["records"] >= 0.95 * (source != ALL).sum()
    assert f.evidence["open_which"] == 0
    assert abs(f.evidence["corr_own"]) < 0.2 and f.evidence["corr_fits"] > 0.99
    back = source if side == "sampler" else np.argsort(source)  # whose second side fits a record's first
    for case in f.evidence["places"]:
        assert case["fits"]["record"] == f"r{back[int(case['record'][1:])]:03}"


@pytest.mark.parametrize("side", NAMES)
@pytest.mark.parametrize("padding", [None, 0.0])
def test_sorted_by_length(side: str, padding: float | None) -> None:
    r = replies(N)
    for source in (np.argsort(r.lengths, kind="stable"), np.argsort(-r.lengths, kind="stable")):
        f = only(found(ordered(exchanged(r, source, side, padding))))
        assert f.evidence["pattern"] == "one side is sorted by length"
    same = replies(N, (80, 80))
    shuffled = np.random.default_rng(1).permutation(N)
    assert only(found(ordered(exchanged(same, shuffled)))).evidence["pattern"] == "in no simple order"


@pytest.mark.parametrize(
    ("some", "words"),
    [
        ([1, 0], "two records changed places"),
        ([1, 2, 3, 0], "too few to show an order"),
        ([3, 4, 5, 6, 7, 0, 1, 2], "rolled by 3"),
    ],
)
def test_one_micro_batch_of_many_records(some: list[int], words: str) -> None:
    source = ALL.copy()
    source[24 : 24 + len(some)] = 24 + np.array(some)
    f = only(found(ordered(exchanged(replies(N), source))))
    assert f.evidence["records"] == len(some) and f.evidence["of"] == N and f.evidence["apart"] == len(some)
    assert f.evidence["pattern"].startswith(words)
    assert {p["record"] for p in f.evidence["places"]} == {f"r{24 + i:03}" for i in range(len(some))}


def test_a_shuffle_within_groups_says_so() -> None:
    rng = np.random.default_rng(5)
    source = np.concatenate([rng.permutation(x) for x in np.split(ALL, 8)])
    f = only(found(ordered(exchanged(replies(N, group=8), source))))
    assert f.evidence["pattern"] == "in no simple order, each within its group"
    beyond = exchanged(replies(N, group=8), rng.permutation(N))
    assert "group" not in only(found(ordered(beyond))).evidence["pattern"]


def test_replies_that_begin_alike_are_told_apart_by_what_follows() -> None:
    r = replies(N, (120, 200), group=8, shared=40)
    f = only(found(ordered(exchanged(r, np.roll(ALL, 1)))))
    assert f.evidence["pattern"] == "rolled by one record" and f.evidence["records"] > 50


def test_mostly_certain_tokens() -> None:
    f = only(found(ordered(exchanged(replies(N, (150, 300), certain=0.85), np.roll(ALL, 1)))))
    assert f.evidence["records"] > 50


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_rounding(dtype: str) -> None:
    r = drawn(dtype)
    f = only(found(ordered(exchanged(r, np.roll(np.arange(len(r)), 1)))))
    assert f.evidence["pattern"] == "rolled by one record"


@pytest.mark.parametrize("fault", ["other weights", "temperature"])
def test_with_another_fault_besides(fault: str) -> None:
    """Long replies are found again although they have changed."""
    if fault == "temperature":
        r = changed(replies(N, (100, 200)), "old", lambda x: x * 1.2)
    else:
        healthy = audit_batches.healthy("bfloat16", 6000, 9)
        r = audit_batches.with_side(healthy, "old", audit_batches.other_logits(healthy, 0.25, np.random.default_rng(1)))
    f = only(found(ordered(exchanged(r, np.roll(np.arange(len(r)), 1)))))
    assert f.evidence["pattern"] == "rolled by one record" and f.evidence["records"] > 0.9 * len(r)


# -- lists of another length -----------------------------------------------------------------------------------------


def _raw(lengths: Sequence[int], source: Sequence[int]) -> Batch:
    """Whole lists changed places: a record has as many values as another record has tokens."""
    rng = np.random.default_rng(9)
    a = [-rng.exponential(0.8, n) for n in lengths]
    b = [x * np.exp(0.01 * rng.standard_normal(len(x))) for x in a]
    made = [reply(f"r{i:02}", a[i].tolist(), b[j].tolist(), len(a[i])) for i, j in enumerate(source)]
    return replace(settled(*made), asked=NAMES)


def test_whole_lists_that_changed_places_have_another_length_too() -> None:
    lengths = list(range(40, 64))
    findings = found(_raw(lengths, np.roll(np.arange(24), 1).tolist()))
    assert codes(findings) == ["logprob-length-mismatch", "exchanged-logprobs"]
    assert findings[1].evidence["records"] == findings[1].evidence["of"] == 24
    assert findings[1].evidence["pattern"] == "rolled by one record"
    assert codes(found(_raw(lengths, range(24)))) == []


def test_a_list_of_another_length_that_is_its_own_is_not_exchanged() -> None:
    rng = np.random.default_rng(2)
    records = []
    for i in range(20):
        a = -rng.exponential(0.8, 60)
        b = np.concatenate([[0.0], a * 1.001]) if i % 2 else a[:-3]
        records.append(reply(f"r{i:02}", a.tolist(), b.tolist(), 60))
    assert codes(found(replace(settled(*records), asked=NAMES))) == ["logprob-length-mismatch"]


# -- silent ----------------------------------------------------------------------------------------------------------


def _garbage(rng: np.random.Generator) -> Callable[[Rollouts], Rollouts]:
    return lambda r: changed(r, "old", lambda x: -rng.exponential(0.8, len(x)))


def _noise(sd: float) -> Callable[[Rollouts], Rollouts]:
    rng = np.random.default_rng(6)
    return lambda r: changed(r, "old", lambda x: np.minimum(x + sd * rng.standard_normal(len(x)), 0.0))


OTHER_FAULTS: dict[str, Callable[[Rollouts], Rollouts]] = {
    "healthy": lambda r: r,
    "noise 0.5": _noise(0.5),
    "noise 2": _noise(2.0),
    "noise 5": _noise(5.0),
    "other values": _garbage(np.random.default_rng(7)),
    "one late": lambda r: rolled(r, "old", 1),
    "two early": lambda r: rolled(r, "sampler", -2),
    "three late": lambda r: rolled(r, "old", 3),
    "temperature": lambda r: changed(r, "old", lambda x: x * 2.5),
    "constant": lambda r: changed(r, "old", lambda x: np.full(len(x), -1.3)),
    "both constant": lambda r: changed(changed(r, "old", lambda x: x * 0 - 1.3), "sampler", lambda x: x * 0 - 3),
    "fills": lambda r: changed(r, "sampler", lambda x: np.where(np.arange(len(x)) % 3 == 0, -9999.0, x)),
    "zeros": lambda r: changed(r, "old", lambda x: x * 0.0),
    "backwards": lambda r: changed(r, "old", lambda x: x[::-1].copy()),
    "shuffled tokens": lambda r: changed(r, "old", lambda x: np.random.default_rng(1).permutation(x)),
}  # fmt: skip


@pytest.mark.parametrize("fault", OTHER_FAULTS)
@pytest.mark.parametrize("lengths", [(16, 40), (40, 200)])
def test_silent_on_everything_else(fault: str, lengths: tuple[int, int]) -> None:
    for seed in range(3):
        one = ordered(OTHER_FAULTS[fault](replies(N, lengths, seed=seed)))
        assert "exchanged-logprobs" not in codes(found(one))


@pytest.mark.parametrize(("lengths", "certain"), [((16, 24), 0.0), ((60, 70), 0.0), ((60, 70), 0.85)])
def test_two_thousand_records_without_any_likeness_match_by_chance_a_few_times_at_most(
    lengths: tuple[int, int], certain: float
) -> None:
    """Far from the share of records that a finding takes."""
    mine, other = (replies(2000, lengths, certain=certain, seed=seed) for seed in (1, 2))
    y = other.scorings["old"].logprobs.values
    r = changed(mine, "old", lambda x: np.resize(y, len(x)))
    seen = check._read(check.look(ordered(r)).spots["exchanged:sketches"])
    assert len(seen.a) > 1200
    assert len(check.matched(seen).rows) < 0.05 * len(seen.a)
    assert "exchanged-logprobs" not in codes(found(ordered(r)))


def test_equal_replies_are_no_evidence() -> None:
    """Every reply is there four times, and one of the four was scored with something else: it fits its twins' values,
    which are its own tokens'."""
    r = replies(16)
    four = concat([r] * 4)
    assert codes(found(ordered(four))) == []
    other = np.random.default_rng(4)
    wrong = np.repeat(np.arange(N) < 16, four.lengths)
    bad = changed(four, "old", lambda x: np.where(wrong, -other.exponential(0.8, len(x)), x))
    assert "exchanged-logprobs" not in codes(found(ordered(bad)))


def test_equal_replies_that_were_exchanged_leave_open_which_one_it_is() -> None:
    r = replies(32)
    f = only(found(ordered(exchanged(concat([r, r]), np.roll(ALL, 5)))))
    assert f.evidence["records"] == f.evidence["open_which"] == N
    assert f.evidence["pattern"] == "too few to show an order"


@pytest.mark.parametrize("n", [1, 4, 8, 15])
def test_short_replies_decide_nothing(n: int) -> None:
    assert "exchanged-logprobs" not in codes(found(ordered(exchanged(replies(N, (n, n)), np.roll(ALL, 1)))))


@pytest.mark.parametrize("fault", audit_batches.FAULTS)
def test_silent_on_the_faults_of_the_detection_matrix(fault: str) -> None:
    healthy = audit_batches.healthy("bfloat16", 3000, 11)
    r = audit_batches.FAULTS[fault](healthy, np.random.default_rng(3))
    total = check.look(Batch(r, tuple(r.content_ids()), ("",) * len(r), "sampler", "old"))
    assert check.judge(total, Told(NAMES)) == []


# -- as a whole ------------------------------------------------------------------------------------------------------


def _json(parts: dict[str, Counted]) -> str:
    return json.dumps({k: v.to_dict() for k, v in sorted(parts.items())})


def test_any_split_gives_the_same_totals_and_finds_partners_in_other_batches() -> None:
    r = exchanged(replies(N), np.roll(ALL, 20))
    whole = totals(ordered(r))
    rng = np.random.default_rng(0)
    for pieces in (2, 7, N):
        rows = np.array_split(rng.permutation(N), pieces)
        parts = [batch(r.take(x), order=x) for x in rows]
        assert _json(totals(*parts)) == _json(whole)
    again = {k: Counted.from_dict(json.loads(json.dumps(v.to_dict()))) for k, v in whole.items()}
    assert judge_all(again, Told(NAMES)) == judge_all(whole, Told(NAMES))
    json.dumps(dict(judge_all(whole, Told(NAMES))[0].evidence), allow_nan=False)


def test_of_too_many_records_the_first_of_the_dump_are_compared() -> None:
    size = LIMITS["exchanged:sketches"] + 500
    r = replies(size, (30, 60))
    f = only(found(ordered(exchanged(r, np.roll(np.arange(size), 1)))))
    assert f.evidence["looked_at"] == LIMITS["exchanged:sketches"] < f.evidence["apart"]
    assert f.evidence["records"] > 0.9 * f.evidence["looked_at"]
    assert f"the first {LIMITS['exchanged:sketches']:,} were looked at" in f.message


def test_tool_output_inside_a_reply_ends_what_is_compared() -> None:
    """The mask takes out tokens at other places of each record: what stands before them is enough."""
    r = exchanged(replies(N, (120, 200)), np.roll(ALL, 1))
    at = np.arange(r.n_tokens) - np.repeat(r.offsets[:-1], r.lengths)
    first = np.repeat(PROMPT + 50 + ALL % 20, r.lengths)
    keep = r.drawn & ((at < first) | (at > first + 5))
    masked = replace(r, tokens={**r.tokens, "loss_mask": replace(r.tokens["drawn"], values=keep)})
    assert only(found(ordered(masked))).evidence["pattern"] == "rolled by one record"


@pytest.mark.parametrize("side", NAMES)
def test_the_audit_names_it_and_no_cause_below(side: str) -> None:
    """Over three files, which nothing reads together: no temperature, no outlier, no noise is named."""
    r = audit_batches.healthy("bfloat16", 5000, 2)
    size = len(r)
    moved = exchanged(r, np.roll(np.arange(size), 1), side, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for k, rows in enumerate(np.array_split(np.arange(size), 3)):
            write(moved.take(rows), Path(folder) / f"step_{k}.parquet")
        report = audit([folder], Choices(workers=1, what_if=False))
    assert report.outcome is Outcome.DRIFT
    first, *more = report.findings
    assert first.code == "exchanged-logprobs" and first.evidence["records"] >= 0.95 * size
    assert first.evidence["pattern"] == "rolled by one record"
    assert {f.code for f in more} <= {"heavy-ratio-tail", "not-covered"}


def test_orders_by_hand() -> None:
    sure = np.ones(8, dtype=bool)
    rows, none = np.arange(8), ("",) * 8
    lengths = np.array([5, 3, 8, 1, 7, 2, 6, 4])
    words = lambda other: pattern(rows, np.array(other), rows, lengths, none, sure)
    assert words([7, 6, 5, 4, 3, 2, 1, 0]) == "their order is reversed"
    assert words([2, 3, 4, 5, 6, 7, 0, 1]) == "rolled by 2 records"
    assert words([4, 5, 6, 7, 0, 1, 2, 3]) == "blocks of 4 records are swapped"
    assert words([3, 5, 1, 7, 0, 6, 4, 2]) == "one side is sorted by length"
    assert words([5, 0, 3, 7, 1, 4, 6, 2]) == "in no simple order"
    assert pattern(rows[:3], rows[[1, 2, 0]], rows, lengths, none, sure[:3]) == "too few to show an order"
    assert pattern(rows[:0], rows[:0], rows, lengths, none, sure[:0]) == "too few to show an order"
