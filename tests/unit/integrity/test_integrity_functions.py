"""One side's list is a function of the other's: scaled, summed, clamped, rounded, far shifted; and masks that are off.

Each is found at its place, whatever the split, and no other cause of a gap is taken for one of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from integrity_dumps import NAMES, PROMPT, batch, changed, codes, found, reply, settled, shaped, totals
from onepolicy.integrity import judge_all
from onepolicy.integrity.base import Told
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Finding, Values

NEW = {"rescaled-logprob", "sequence-logprob-stored", "clamped-logprob", "stored-rounded", "stored-as-fp8"}


def by_reply(r: Rollouts, change: Callable[[Any], Any], side: str = "sampler") -> Rollouts:
    """With each reply's values changed on their own."""

    def put(x: Any) -> None:
        for i in range(len(r)):
            at = slice(r.sequence(i).start + PROMPT, r.sequence(i).stop)
            x[at] = change(x[at])

    return changed(r, side, put)


def eight_bits(x: Any) -> Any:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 16) / 16, exponent)


FAULTS: dict[str, tuple[str, dict[str, Any], Callable[[Rollouts], Rollouts]]] = {
    "base 2": ("rescaled-logprob", {"what": "base 2"}, lambda r: changed(r, "sampler", lambda x: x / math.log(2))),
    "base 10": ("rescaled-logprob", {"what": "base 10"}, lambda r: changed(r, "sampler", lambda x: x / math.log(10))),
    "length": ("rescaled-logprob", {"what": "length"}, lambda r: by_reply(r, lambda x: x / len(x))),
    "times 3": ("rescaled-logprob", {"what": "other"}, lambda r: changed(r, "sampler", lambda x: 3 * x)),
    "sum": ("sequence-logprob-stored", {"what": "sum"}, lambda r: by_reply(r, lambda x: np.full(len(x), x.sum()))),
    "mean": ("sequence-logprob-stored", {"what": "mean"}, lambda r: by_reply(r, lambda x: np.full(len(x), x.mean()))),
    "so far": ("sequence-logprob-stored", {"what": "so far"}, lambda r: by_reply(r, np.cumsum)),
    "to come": (
        "sequence-logprob-stored",
        {"what": "to come"},
        lambda r: by_reply(r, lambda x: x[::-1].cumsum()[::-1]),
    ),
    "least": ("clamped-logprob", {"value": -2.5}, lambda r: changed(r, "sampler", lambda x: np.maximum(x, -2.5))),
    "greatest": ("clamped-logprob", {"value": -0.25}, lambda r: changed(r, "sampler", lambda x: np.minimum(x, -0.25))),
    "whole": ("stored-rounded", {"decimals": 0}, lambda r: changed(r, "sampler", np.trunc)),
    "one decimal": ("stored-rounded", {"decimals": 1}, lambda r: changed(r, "sampler", lambda x: np.round(x, 1))),
    "eight bits": ("stored-as-fp8", {"format": "e4m3"}, lambda r: changed(r, "sampler", eight_bits)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("noise", [1e-4, 0.01])
def test_each_function_is_named_and_nothing_else(fault: str, noise: float) -> None:
    code, evidence, make = FAULTS[fault]
    (f,) = found(batch(make(shaped(noise))))
    assert f.code == code and f.evidence["side"] == "sampler"
    assert {k: f.evidence[k] for k in evidence} == evidence


def test_a_number_that_is_a_mean_by_chance_is_no_place() -> None:
    """One number in six records, in one of them the reply's mean; running sums in all others."""
    r, at = shaped(1e-4), iter(range(60))

    def change(x: Any) -> Any:
        i = next(at)
        return np.full(len(x), x.mean() if i == 0 else -0.77) if i < 6 else np.cumsum(x)

    (f,) = [f for f in found(batch(by_reply(r, change))) if f.code == "sequence-logprob-stored"]
    assert f.evidence["what"] == "so far" and set(f.evidence["by_kind"]) == {"so far"}
    assert "r000" not in {p["record"] for p in f.evidence["places"]}


@pytest.mark.parametrize("fault", [*FAULTS, "healthy"])
def test_any_split_gives_the_same_totals(fault: str) -> None:
    r = shaped() if fault == "healthy" else FAULTS[fault][2](shaped())
    told = lambda parts: json.dumps({k: v.to_dict() for k, v in sorted(parts.items())})
    whole = totals(batch(r))
    order = np.random.default_rng(1).permutation(len(r))
    parts = totals(*(batch(r.take(x)) for x in np.array_split(order, 7)))
    assert told(parts) == told(whole)
    assert judge_all(parts, Told(NAMES)) == judge_all(whole, Told(NAMES))


def test_a_few_records_of_many_are_named() -> None:
    r = shaped()
    few = np.repeat(np.isin(np.arange(len(r)), (3, 7, 20)), r.lengths)
    (f,) = found(batch(changed(r, "old", lambda x: np.where(few, x / math.log(2), x))))
    assert (f.code, f.evidence["side"], f.evidence["records"]) == ("rescaled-logprob", "old", 3)
    assert [p["record"] for p in f.evidence["places"]] == ["r003", "r007", "r020"]


# -- what is none of them --


def _softmax(z: Any) -> Any:
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def _topp(lp: Any, top_p: float) -> Any:
    order = np.sort(np.exp(lp), axis=1)[:, ::-1]
    kept = (np.cumsum(order, axis=1) - order) < top_p
    least = np.where(kept, order, 1.0).min(axis=1, keepdims=True)
    return _softmax(np.where(np.exp(lp) >= least, lp, -np.inf))


OTHER: dict[str, Callable[[Any, np.random.Generator], Any]] = {
    "temperature 0.5": lambda z, rng: _softmax(z / 0.5),
    "temperature 1.4": lambda z, rng: _softmax(z / 1.4),
    "top_p": lambda z, rng: _topp(_softmax(z), 0.7),
    "soft-cap": lambda z, rng: _softmax(4 * np.tanh(z / 4)),
    "other weights": lambda z, rng: _softmax(z + rng.standard_normal(z.shape)),
    "another model": lambda z, rng: _softmax(4 * rng.standard_normal(z.shape)),
    "some experts": lambda z, rng: _softmax(z + 3 * (rng.random((len(z), 1)) < 0.2) * rng.standard_normal(z.shape)),
}


@pytest.mark.parametrize("cause", OTHER)
@pytest.mark.parametrize("records", [1, 30])
def test_other_causes_are_none_of_them(cause: str, records: int) -> None:
    for seed in range(8 if records == 1 else 2):
        rng = np.random.default_rng(seed)
        raw: list[Any] = []
        for i in range(records):
            n = int(rng.integers(12, 80))
            z = np.exp(rng.normal(0.8, 0.8, (n, 1))) * rng.standard_normal((n, 48))
            drew, scored = OTHER[cause](z, rng), _softmax(z)
            ids = (drew + rng.gumbel(size=z.shape)).argmax(axis=1)
            a, b = (np.round(x[np.arange(n), ids], 5).tolist() for x in (drew, scored))
            raw.append(reply(f"r{i:02}", a, b, n))
        said = set(codes(found(settled(*raw))))
        assert not said & (NEW | {"shift-by-one", "top-token-stored"}), (seed, said)


def test_one_number_in_every_reply_is_not_its_mean() -> None:
    """Some replies' means are near it by chance."""
    (f,) = found(batch(changed(shaped(), "sampler", lambda x: np.full(len(x), -1.5))))
    assert f.code == "filled-logprob"


def test_one_side_alone_with_one_number_in_each_reply() -> None:
    fine = (-np.exp(np.random.default_rng(0).normal(-1.0, 1.5, 12))).tolist()
    records = [reply(f"r{i}", [-3.0 - 0.37 * i] * 12, None, 12) for i in range(4)]
    (f,) = found(settled(*records, reply("ok", fine, None, 12)))
    assert (f.code, f.evidence["filled"], f.evidence["values"]) == ("filled-logprob", 48, {"repeated": 48})
    assert "record r0" in f.place and "ok" not in f.place
    assert codes(found(settled(*(reply(f"r{i}", [-9.21] * 12, None, 12) for i in range(4))))) == ["uniform-vocabulary"]
    assert found(settled(reply("ok", fine, None, 12), reply("few", [-0.5] * 5, None, 5))) == []


def test_a_negative_zero_is_a_small_number_that_was_rounded() -> None:
    a = [-0.4, -1.2, -0.03, -0.8, -0.0, -2.2, -0.3]
    b = [-0.41, -1.19, -0.03, -0.81, -2.4, -2.21, -0.3]
    assert found(settled(reply("r", a, b, 7))) == []
    (f,) = found(settled(reply("r", [abs(x) * -1 if x else 0.0 for x in a], b, 7)))
    assert f.code == "filled-logprob"


# -- far shifts --


def test_a_list_that_begins_with_the_prompt_and_one_that_lost_four() -> None:
    r = shaped()
    cut = lambda x: np.concatenate([[-2.3, -0.4, -5.1, -0.9], x])[: len(x)]
    (f,) = found(batch(by_reply(r, cut)))
    assert (f.code, f.evidence["best_lag"]) == ("shift-by-one", -PROMPT) and "as the prompt has" in f.message
    lost = lambda x: np.concatenate([x[6:], np.zeros(6)])[: len(x)]
    (f,) = [f for f in found(batch(by_reply(r, lost))) if f.code == "shift-by-one"]
    assert f.evidence["best_lag"] == 6 and "old is late against sampler by 6 tokens" in f.message


def turns(lags: list[int], size: int = 16, tool: int = 4, records: int = 6) -> list[Any]:
    """Replies of several turns with tool output between, the sampler's list of each turn late by its lag."""
    rng = np.random.default_rng(4)
    out: list[Any] = []
    for i in range(records):
        a: list[float] = []
        b: list[float] = []
        mask: list[int] = []
        for k, lag in enumerate(lags):
            x = -np.exp(rng.normal(-1.0, 1.5, size))
            late = np.concatenate([np.zeros(max(lag, 0)), x, np.zeros(max(-lag, 0))])
            gap = tool if k else 0
            a += [0.0] * gap + late[max(-lag, 0) :][:size].tolist()
            b += [-3.0] * gap + (x * 1.01).tolist()
            mask += [0] * gap + [1] * size
        out.append(reply(f"r{i}", a, b, len(a), mask=mask))
    return out


@pytest.mark.parametrize("lags", [[0, 1, 2], [0, 1, 0], [0, -1, -2], [0, 1]])
def test_turns_with_lags_of_their_own(lags: list[int]) -> None:
    (f,) = found(settled(*turns(lags)))
    assert f.code == "shift-by-one" and f.evidence["records"] == 6
    places = {(p["position"], p["best_lag"]) for p in f.evidence["places"]}
    assert {k for _, k in places} == {-k for k in lags if k}
    assert found(settled(*turns([0] * len(lags)))) == []


def test_a_list_without_the_tool_output_is_early_behind_it() -> None:
    rng = np.random.default_rng(2)
    x = -np.exp(rng.normal(-1.0, 1.5, 50))
    mask = [1] * 24 + [0] * 6 + [1] * 20
    (f,) = found(settled(reply("r", [*x[:24], *x[30:], *[0.0] * 6], (x * 1.01).tolist(), 50, mask=mask)))
    assert (f.code, f.evidence["best_lag"]) == ("shift-by-one", 6) and "old is 6 tokens late" in f.message
    short = settled(reply("r", [*x[:24], *x[30:]], (x * 1.01).tolist(), 50, mask=mask))
    (f,) = found(short)
    assert f.code == "logprob-length-mismatch" and f.evidence["places"][0]["kind"] == "trained"


# -- masks --


def masked(r: Rollouts, mask: Any, **facts: Any) -> Rollouts:
    records = {k: column_values(k, [v] * len(r)) for k, v in facts.items()}
    return replace(r, tokens={**r.tokens, "loss_mask": Values(mask)}, records={**r.records, **records})


def only(findings: list[Finding], *left: str) -> Finding:
    (f,) = [f for f in findings if f.code not in left]
    return f


def test_the_stop_token_alone_is_left_out() -> None:
    r = shaped()
    last = np.zeros(r.n_tokens, dtype=bool)
    last[r.offsets[1:] - 1] = True
    f = only(found(batch(masked(r, r.drawn & ~last, finish_reason="stop"))))
    assert (f.code, f.severity.value, f.evidence["replies"]) == ("stop-token-not-trained", "warn", len(r))
    assert found(batch(masked(r, r.drawn & ~last, finish_reason="length"))) == []
    with_tokenizer = found(batch(masked(r, r.drawn & ~last, finish_reason="stop")), vocab_size=1000)
    assert with_tokenizer == [], "the token checks tell it"


def test_a_mask_that_begins_late_everywhere() -> None:
    r = shaped()
    first = np.zeros(r.n_tokens, dtype=bool)
    first[r.offsets[:-1] + PROMPT] = True
    f = only(found(batch(masked(r, r.drawn & ~first))))
    assert (f.code, f.severity.value, f.evidence["replies"]) == ("sampled-not-trained", "warn", len(r))
    some = first & np.repeat(np.arange(len(r)) < 20, r.lengths)
    assert found(batch(masked(r, r.drawn & ~some))) == []
    half = r.drawn & (
        np.arange(r.n_tokens) - np.repeat(r.offsets[:-1], r.lengths) > 0.5 * np.repeat(r.lengths, r.lengths)
    )
    assert "sampled-not-trained" not in codes(found(batch(masked(r, half)))), "the last turn alone is a choice"
