"""Fill values at tokens that count: each is found with its places; honest zeros and other faults are not fills."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from integrity_dumps import NAMES, batch, changed, codes, drawn, found, reply, settled, shaped
from onepolicy.engines.fake_rounding import round_to
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Finding


def fill(findings: list[Finding]) -> Finding:
    (only,) = findings
    assert only.code == "filled-logprob"
    return only


def some(r: Rollouts, share: float, seed: int = 4) -> Any:
    return r.drawn & (np.random.default_rng(seed).random(r.n_tokens) < share)


def filled(r: Rollouts, side: str, value: float, at: Any) -> Rollouts:
    return changed(r, side, lambda x: np.where(at, value, x))


@pytest.mark.parametrize("value", [1.0, -100.0, -999.0, -9999.0, -1e4, -1e9, -3.4028234663852886e38, -1e30])
@pytest.mark.parametrize("side", NAMES)
@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
def test_numbers_that_no_engine_computes(value: float, side: str, share: float) -> None:
    r = drawn("bfloat16")
    at = some(r, share)
    f = fill([x for x in found(batch(filled(r, side, value, at))) if x.code == "filled-logprob"])
    assert (f.evidence["side"], f.evidence["filled"]) == (side, at.sum())
    first = f.evidence["places"][0]
    flat = int(r.offsets[int(first["record"][1:])]) + first["position"]
    assert at[flat] and first["reply_position"] == first["position"] - 4


@pytest.mark.parametrize("side", NAMES)
@pytest.mark.parametrize("share", [0.02, 0.3])
@pytest.mark.parametrize("noise", [0.001, 0.02, 0.2])
def test_zeros_where_the_other_side_is_not_certain(side: str, share: float, noise: float) -> None:
    r = shaped(noise)
    at = some(r, share)
    f = fill(found(batch(filled(r, side, 0.0, at))))
    other = r.scorings["old" if side == "sampler" else "sampler"].logprobs.values
    far = int((at & (other < -2.0)).sum())
    assert far * 0.9 <= f.evidence["filled"] <= int((at & (other < -0.1)).sum())
    assert f.evidence["values"] == {"0.0": f.evidence["filled"]}
    assert f.evidence["worst_factor"] == pytest.approx(math.exp(min(-float(other[at].min()), 700)), rel=1e-4)


def test_an_appended_stop_token_is_told_by_its_place() -> None:
    r = shaped()
    ends = r.offsets[1:] - 1
    at = np.zeros(r.n_tokens, dtype=bool)
    at[ends] = True
    r = changed(r, "old", lambda x: np.where(at, -3.0 + 0.01 * np.arange(len(x)) / len(x), x))
    f = fill(found(batch(filled(r, "sampler", 0.0, at))))
    assert f.evidence["at_the_end"] == f.evidence["filled"] >= 50
    assert f.message.endswith("one that was appended, not drawn")


def test_honest_zeros_pass() -> None:
    """A confident model: float32 has no number between 1 - 6e-8 and 1; the other side is as near."""
    r = shaped()
    sure = some(r, 0.4)
    rng = np.random.default_rng(5)
    both = filled(r, "sampler", 0.0, sure)
    both = changed(both, "old", lambda x: np.where(sure, -rng.exponential(1e-4, len(x)), x))
    assert found(batch(both)) == []
    assert found(batch(r, ("sampler", None))) == found(batch(both, ("sampler", None))) == []


@pytest.mark.parametrize("declared", [{"top_p": 0.6}, {"top_k": 1}, {"min_p": 0.2}, {"temperature": 0.05}])
def test_a_token_that_was_kept_alone_has_an_honest_zero(declared: dict[str, float]) -> None:
    r = shaped()
    alone = some(r, 0.2)
    low = -0.5 if "top_p" in declared else -1.6
    r = changed(filled(r, "sampler", 0.0, alone), "old", lambda x: np.where(alone, low, x))
    columns = {k: column_values(k, [v] * len(r)) for k, v in declared.items()}
    assert found(batch(replace(r, records={**r.records, **columns}))) == []
    assert codes(found(batch(r))) == (["filled-logprob"] if low < -0.7 else [])


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_noise_that_is_cut_at_zero_is_no_fill(noise: float) -> None:
    """min(a + noise, 0) makes many zeros where the other side is near."""
    for seed in range(5):
        r = shaped(0.0, 200, seed)
        rng = np.random.default_rng(seed)
        r = changed(r, "old", lambda x, g=rng: np.minimum(x + noise * g.standard_normal(len(x)), 0.0))
        assert found(batch(r)) == []


def test_zeros_among_tokens_that_do_not_belong_together_are_no_fill() -> None:
    r = shaped()
    sure = some(r, 0.3)
    r = filled(filled(r, "sampler", 0.0, sure), "old", 0.0, sure)
    rng = np.random.default_rng(6)
    assert "filled-logprob" not in codes(found(batch(changed(r, "old", lambda x: rng.permutation(x)))))


@pytest.mark.parametrize("names", [NAMES, ("sampler", None), (None, "sampler")])
def test_every_value_zero(names: tuple[str | None, str | None]) -> None:
    r = drawn("float32")
    f = fill(found(batch(changed(r, "sampler", np.zeros_like), names)))
    assert f.evidence["share"] == 1.0 and f.evidence["all_zero_records"] == len(r)
    assert "in 24 records every value is 0.0" in f.message


def test_greedy_and_short_replies_of_one_side_say_nothing() -> None:
    r = changed(drawn("float32"), "sampler", np.zeros_like)
    greedy = replace(r, records={**r.records, "temperature": column_values("temperature", [0.0] * len(r))})
    assert found(batch(greedy, ("sampler", None))) == []
    assert found(settled(reply("s", [0.0] * 5, None, 5))) == []


@pytest.mark.parametrize("value", [-1.5, -0.25, -2.0])
def test_one_number_again_and_again(value: float) -> None:
    r = drawn("bfloat16")
    f = fill(found(batch(filled(r, "sampler", value, some(r, 0.4)))))
    assert f.evidence["filled"] > 0.35 * f.evidence["tokens"]
    f = fill(found(batch(filled(r, "sampler", value, r.drawn))))
    assert f.evidence["share"] == 1.0


def test_whole_numbers_that_are_far_off() -> None:
    r = drawn("float32")
    at = some(r, 0.03)
    f = fill(found(batch(filled(r, "sampler", -1.0, at))))
    assert set(f.evidence["values"]) == {"-1"} and 3 <= f.evidence["filled"] <= at.sum()
    rounded = changed(r, "sampler", lambda x: np.round(x, 1))
    assert codes(found(batch(rounded))) == ["stored-rounded"]


def test_stored_in_bf16_repeats_numbers_and_is_no_fill() -> None:
    for noise in (0.02, 0.2, 1.0):
        r = changed(shaped(noise, 200), "sampler", lambda x: round_to(x, "bfloat16").astype(np.float64))
        assert codes(found(batch(r))) == ["stored-as-bf16"]


def test_probabilities_and_their_ones_are_not_fills() -> None:
    r = changed(drawn("float32"), "sampler", np.exp)
    assert codes(found(batch(filled(r, "sampler", 1.0, some(r, 0.1))))) == ["positive-logprob"]


def test_masked_tokens_may_hold_fillers() -> None:
    a, b = [-0.5, 0.0, 0.0, -1.2, -0.3], [-0.5, -4.0, -6.0, -1.2, -0.3]
    assert found(settled(reply("r", a, b, 5, mask=[1, 0, 0, 1, 1]))) == []
    assert codes(found(settled(reply("r", a, b, 5, mask=[1, 1, 1, 1, 1])))) == ["filled-logprob"]
