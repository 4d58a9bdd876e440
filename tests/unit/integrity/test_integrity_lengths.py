"""Why a list has another length: each explanation on values worked by hand, and none where the values say nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from integrity_dumps import codes, found, reply, settled
from onepolicy.formats.base import BrokenRecord

Y = [-4.4, -0.01, -1.3, -0.6, -0.5, -2.7, -0.04, -3.1, -0.4, -0.02, -1.9, -0.9]
#: the same by the other engine
X = [round(y * 1.01, 4) for y in Y]


def case(x: list[Any], y: list[float] | None = Y, **more: Any) -> dict[str, Any]:
    """The evidence of the one record that does not fit."""
    n = len(y) if y is not None else more.pop("n")
    (finding,) = found(settled(reply("r", x, y, n, **more)))
    assert finding.code == "logprob-length-mismatch"
    assert finding.place == "record r (dump.jsonl:r)"
    return finding.evidence["places"][0]


def test_a_surplus_at_the_end() -> None:
    told = case([*X, -0.0003])
    assert (told["kind"], told["extra"], told["usable"]) == ("tail", 1, True)
    assert told["max_abs_after_drop_tail"] == pytest.approx(0.044)
    assert case([*X, -0.2, -3.0, -1.1])["kind"] == "tail"


def test_a_surplus_at_the_start() -> None:
    told = case([-0.7, *X])
    assert (told["kind"], told["max_abs_after_drop_head"]) == ("head", pytest.approx(0.044))


@pytest.mark.parametrize("k", [0, 1, 5, 10, 11])
def test_two_sampled_tokens_became_one_id(k: int) -> None:
    """The values of both stand in the list; id k has one value of its own on the other side."""
    told = case([*X[:k], -2.2, -6.0, *X[k + 1 :]])
    assert (told["kind"], told["usable"]) == ("re-encoded", False)
    assert told["explanation"] == f"ids were re-encoded: two sampled tokens became id {k}"
    assert told["lag1_fits_from_id"] == k + 1
    assert told[f"max_abs_first_{k}"] <= 0.044 and told[f"max_abs_with_lag1_from_id_{k + 1}"] <= 0.044
    if k < 10:
        assert told["max_abs_if_cut_to_12"] > 1


def test_three_became_one_and_one_became_two() -> None:
    told = case([*X[:4], -2.2, -3.3, -1.1, *X[5:]])
    assert told["explanation"] == "ids were re-encoded: three sampled tokens became id 4"
    assert told["lag2_fits_from_id"] == 5
    told = case([*X[:4], -2.2, *X[6:]])
    assert told["explanation"] == "ids were re-encoded: one sampled token became two ids from 4"
    assert (told["usable"], told["lag1_fits_from_value"]) == (False, 5)


def test_the_first_or_the_last_token_has_no_value() -> None:
    assert case(X[1:])["explanation"] == "token 0 has no value"
    assert case(X[:-1])["explanation"] == "the last token has no value"
    assert case(X[2:])["explanation"] == "the first 2 tokens have no value"


@pytest.mark.parametrize("x", [[*X, *X], [*X, -0.5, *X], [v for v in X for _ in (0, 1)]])
def test_two_lists_in_one(x: list[float]) -> None:
    assert case(x)["kind"] == "doubled"


def test_counts_explain_where_values_cannot() -> None:
    assert case([], n=12, y=None)["kind"] == "empty"
    assert case(X, n=6, y=None)["explanation"] == "twice as many: two lists in one"
    assert case([*X, -1.0], n=6, y=None)["explanation"] == "twice as many and one: two lists in one"
    told = case(X[:7], y=None, n=9)
    assert told["explanation"] is None and told["usable"] is False
    assert told["extra"] == -2


def test_log_probs_of_the_prompt_too_and_of_trained_tokens_only() -> None:
    record = reply("r", [-1.0, -2.0, -0.3, *X], Y, 15, prompt=3)
    (finding,) = found(settled(record))
    assert finding.evidence["places"][0]["kind"] == "prompt"
    mask = [0, 0, *[1] * 10]
    told = case(X[2:], mask=mask)
    assert told["kind"] in ("trained", "no head") and told["usable"]
    scattered = [1, 0] * 6
    told = case([x for x, m in zip(X, scattered, strict=True) if m], mask=scattered)
    assert (told["kind"], told["max_abs_at_trained"]) == ("trained", pytest.approx(0.044))


def test_flat_and_foreign_values_are_not_explained() -> None:
    assert case([-0.5] * 13, [-0.5] * 12)["explanation"] is None
    rng = np.random.default_rng(0)
    told = case((-rng.exponential(2.0, 13)).tolist())
    assert told["explanation"] is None and told["max_abs_if_cut_to_12"] > 0.5


def test_the_other_column_may_be_the_wrong_one_and_masks_too() -> None:
    (finding,) = found(settled(reply("r", X, [*Y, -0.1], 12)))
    assert finding.evidence["kinds"] == {"old_logprobs": {"tail": 1}}
    (finding,) = found(settled(reply("r", X, Y, 12, mask=[1] * 11)))
    assert finding.evidence["kinds"] == {"loss_mask": {"other column": 1}}


def test_whole_columns_are_explained_in_their_own_places() -> None:
    """A column for prompt and reply: index 0 has no value on either side."""
    a, b = [None, *X, -0.2], [None, *Y]
    (finding,) = found(settled(reply("r", a, b, 13, prompt=2, layout="whole")))
    assert finding.evidence["places"][0]["kind"] == "tail"


def test_records_that_fit_are_counted_and_not_named() -> None:
    good = [reply(f"g{i}", X, Y, 12) for i in range(3)]
    (finding,) = found(settled(*good, reply("bad", [*X, -1.0], Y, 12)))
    assert (finding.evidence["wrong"], finding.evidence["records"]) == (1, 4)
    assert finding.message.startswith("1 of 4 records have columns of another length")
    assert found(settled(*good)) == []


def test_unreadable_records_and_wrong_claims() -> None:
    good = reply("g", X, Y, 12)
    broken = BrokenRecord("step.jsonl:3", "not a list", None)
    (finding,) = found(settled(good, broken))
    assert (finding.code, finding.outcome.value, finding.place) == (
        "records-unreadable", "inconclusive", "step.jsonl:3",
    )  # fmt: skip
    (finding,) = found(settled(good, reply("c", X, Y, 12, claims={"reply": 13, "token_ids": 12})))
    assert (finding.code, finding.evidence["counts"]) == ("record-contradicts-itself", {"reply": 1})
    assert "says 13 for reply and holds 12" in finding.message
    both = found(settled(reply("c", [*X, -1.0], Y, 12, claims={"reply": 13}), broken, good))
    assert codes(both) == ["records-unreadable", "record-contradicts-itself", "logprob-length-mismatch"]
