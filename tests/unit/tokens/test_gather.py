"""Findings of many records, one a kind: counted, with the first of them, in constant memory."""

from __future__ import annotations

from onepolicy.codes import finding
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.counts import check_counts
from onepolicy.tokens.gather import PLACES, Gathered
from onepolicy.types import Outcome, Severity


def test_one_alone_stays_as_it_is() -> None:
    one = finding("unknown-ids", "a: one", place="file:1", evidence={"class": "negative"})
    gathered = Gathered()
    gathered.add([one])
    assert gathered.findings() == [one]


def test_many_are_counted_and_the_first_of_them_kept_whole() -> None:
    gathered = Gathered()
    gathered.add(
        finding("unknown-ids", f"r{i}: id {i}", place=f"file:{i}", evidence={"class": "negative", "ids": [i]})
        for i in range(1000)
    )
    (found,) = gathered.findings()
    assert found.message == "1,000 times, the first: r0: id 0" and found.place == "file:0"
    assert (found.evidence["records"], len(found.evidence["places"])) == (1000, PLACES)
    assert found.evidence["examples"][3] == {"place": "file:3", "message": "r3: id 3", "class": "negative", "ids": [3]}


def test_classes_and_severities_are_kinds_of_their_own_and_notes_are_not_counted() -> None:
    gathered = Gathered()
    note = {"severity": Severity.INFO, "outcome": Outcome.PASS}
    for evidence, more in (({"class": "a"}, {}), ({"class": "b"}, {}), ({"class": "a"}, note)):
        gathered.add([finding("wrong-stop-id", "x", evidence=evidence, **more)])
    assert len(gathered.findings()) == 3 and gathered.counts() == {"wrong-stop-id": 2}


def test_one_cause_at_many_positions_is_one_kind() -> None:
    """An explanation that names a position would make as many kinds as there are positions."""
    values = [-0.3 * (k % 7) - 0.1 * (k % 3) for k in range(40)]  # the first is 0: no placeholder here
    gathered = Gathered()
    for at in range(5, 35):
        ours = [*values[:at], -5.0, *values[at:]]
        record = TokenRecord(f"r{at}", reply_ids=[*range(40)], logprobs=ours, scorer_logprobs=values)
        gathered.add(check_counts(record))
    (found,) = gathered.findings()
    assert found.evidence["records"] == 30 and found.evidence["class"] == "logprobs: re-encoded"
    assert len({e["explanation"] for e in found.evidence["examples"]}) == PLACES
