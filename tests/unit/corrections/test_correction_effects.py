"""Side effects against scalar formulas, their names, and what is missing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from correction_batches import Batch, random_batch
from onepolicy import corrections
from onepolicy.corrections import EFFECTS
from onepolicy.errors import ContentError


def ess(values: list[float]) -> float:
    top = max(values, default=0.0)
    scaled = [v - top for v in values]  # of logs
    s1, s2 = math.fsum(math.exp(x) for x in scaled), math.fsum(math.exp(2 * x) for x in scaled)
    return s1 * s1 / (len(values) * s2)


def plain_ess(values: list[float]) -> float | None:
    s2 = math.fsum(v * v for v in values)
    return math.fsum(values) ** 2 / (len(values) * s2) if s2 else None


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def big(x: float) -> float:
    return math.exp(x) if x < 709.7 else math.inf


def wanted(batch: Batch, c: corrections.Correction, low: float, high: float) -> dict[str, float | None]:
    """Every effect of `icepop`, by loops."""
    mask, keep = batch.mask, c.keep
    places = [(i, t) for i, t in np.ndindex(mask.shape) if mask[i, t]]
    a, b = batch.sampler, batch.policy
    bad = [p for p in places if math.isnan(a[p]) or math.isnan(b[p])]
    used = [p for p in places if math.isfinite(a[p]) and math.isfinite(b[p])]
    d = {p: float(b[p] - a[p]) for p in used}
    w = [float(c.weights[p]) if keep[p] else 0.0 for p in used]
    kept = [float(c.weights[p]) for p in used if keep[p]]
    rows = sorted({i for i, _ in used})
    D = [math.fsum(d[p] for p in used if p[0] == i) for i in rows]
    means = [math.fsum(float(c.weights[p]) for p in used if p[0] == i) / sum(p[0] == i for p in used) for i in rows]
    n, A = (
        len(used),
        np.broadcast_to(batch.advantages if batch.advantages.ndim == 2 else batch.advantages[:, None], mask.shape),
    )
    out: dict[str, float | None] = {
        "tokens/trained": len(places),
        "tokens/missing": len(bad),
        "tokens/infinite": len(places) - len(bad) - n,
        "tokens/overflow": sum(x > 88.72 for x in d.values()),
        "changed_low/share": share(sum(x < math.log(low) for x in d.values()), len(places)),
        "changed_high/share": share(sum(x > math.log(high) for x in d.values()), len(places)),
        "kept/share": share(int(keep.sum()), len(places)),
        "sequences/trained": sum(bool(m.any()) for m in mask),
        "sequences/emptied": sum(bool(m.any() and not k.any()) for m, k in zip(mask, keep, strict=True)),
        "weight/min": min(kept, default=None),
        "weight/max": max(kept, default=None),
        "ess_token/corrected": plain_ess(w) if w else None,
        "ess_sequence/corrected": plain_ess(means) if means else None,
    }
    stats = ("log_ratio/mean", "kl_sampler_scorer_k1/mean", "kl_sampler_scorer_k3/mean", "ratio/mean", "ratio/min")
    out |= dict.fromkeys((*stats, "ratio/max", "ess_token/raw", "ess_sequence/raw", "weight/mean"))
    if n:
        mean = math.fsum(d.values()) / n
        ratios = [big(x) for x in d.values()]
        out |= {"log_ratio/mean": mean, "kl_sampler_scorer_k1/mean": -mean}
        out["kl_sampler_scorer_k3/mean"] = math.fsum(math.expm1(x) - x for x in d.values()) / n
        out |= {"ratio/mean": math.fsum(ratios) / n, "ratio/min": min(ratios), "ratio/max": max(ratios)}
        out |= {"ess_token/raw": ess(list(d.values())), "ess_sequence/raw": ess(D), "weight/mean": math.fsum(w) / n}
    for name, side in (("positive_advantage", A > 0), ("negative_advantage", A < 0)):
        out[f"kept_{name}/share"] = share(int((keep & side).sum()), int((mask & side).sum()))
    length = mask.sum(1)
    typical = length.sum() / max(1, (length > 0).sum())
    sets = {"short": length <= typical, "long": length > typical}
    sets |= {"positive_reward": batch.rewards > 0, "other_reward": batch.rewards <= 0}
    for name, chosen in sets.items():
        out[f"kept_{name}/share"] = share(int(keep[chosen].sum()), int(mask[chosen].sum()))
    groups = {int(g) for g, m in zip(batch.groups, mask, strict=True) if m.any()}
    out["groups/trained"] = len(groups)
    out["groups/emptied"] = sum(not keep[batch.groups == g].any() for g in groups)
    return out


def test_every_effect_against_loops() -> None:
    seen_emptied = 0
    for seed in range(600):
        batch = random_batch(seed)
        c = corrections.icepop(**batch.everything(), low=0.8, high=1.2)
        got, want = c.effects.floats(), wanted(batch, c, 0.8, 1.2)
        assert set(got) == set(want)
        for key, value in want.items():
            assert (got[key] is None) == (value is None), (seed, key)
            if value is not None:
                assert got[key] == pytest.approx(value, rel=1e-9, abs=1e-12), (seed, key)
        seen_emptied += int(want["groups/emptied"] or 0)
    assert seen_emptied > 50


def test_the_table_names_every_effect() -> None:
    batch = random_batch(3)
    assert set(corrections.icepop(**batch.everything()).effects) == set(EFFECTS)


def test_stages_of_a_composition_show_what_each_left() -> None:
    d = np.log(np.array([[1.0, 3.0, 1.0, 1.0], [1.4, 1.4, 1.4, 1.4]]))
    run = corrections.compose((corrections.token_mask, {"high": 2.0}), (corrections.geometric_reject, {"high": 1.1}))
    c = run(sampler=d * 0, old=d, mask=d == d)
    got = c.effects.floats()
    assert got["kept_after_1_token_mask/share"] == 7 / 8
    assert got["kept_after_2_geometric_reject/share"] == got["kept/share"] == 3 / 8
    assert c.stages == (
        "token_mask(low=0.5, high=2.0, weight=one)",
        "geometric_reject(low=0.999, high=1.1, weight=one)",
    )


def test_raw_and_corrected_stand_side_by_side() -> None:
    """The maximum under a cap of 2 is 2, the raw one is not clamped."""
    d = np.array([[0.0, 5.0, -1.0]])
    got = corrections.truncate(sampler=d * 0, old=d, mask=d == d).effects.floats()
    assert got["ratio/max"] == pytest.approx(math.exp(5)) and got["weight/max"] == 2.0
    assert got["ratio/mean"] == pytest.approx((1 + math.exp(5) + math.exp(-1)) / 3)
    assert got["weight/mean"] == pytest.approx((1 + 2 + math.exp(-1)) / 3)
    assert got["ess_token/raw"] < got["ess_token/corrected"]
    assert got["changed_high/share"] == pytest.approx(1 / 3) and got["changed_low/share"] == 0


def test_nothing_trained_is_not_a_number() -> None:
    x = np.zeros((2, 3))
    c = corrections.truncate(sampler=x, old=x, mask=x, advantages=x, rewards=[1, 0], groups=[0, 1])
    got = c.effects.floats()
    assert got["ratio/mean"] is None and got["kept/share"] is None and got["weight/max"] is None
    assert got["tokens/trained"] == got["sequences/trained"] == got["groups/trained"] == 0
    assert c.denominator == 1 and not c.weights.any() and c.loss(x) == 0


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_an_empty_rank(shape: tuple[int, int]) -> None:
    import torch

    for x in (np.zeros(shape), torch.zeros(shape)):
        for name, f in corrections.CORRECTIONS.items():
            options: dict[str, Any] = {"at_most": 1.0} if name in ("divergence_mask", "vaco_mask") else {}
            policy = {"current": x} if name == "off_policy_reject" else {"old": x}
            c = f(sampler=x, **policy, mask=x, advantages=x, **options)
            assert tuple(c.weights.shape) == shape and float(c.denominator) == 1 and float(c.loss(x)) == 0
            assert c.effects.floats()["tokens/trained"] == 0


def test_effects_can_be_left_out() -> None:
    x = np.zeros((1, 2))
    c = corrections.truncate(sampler=x, old=x, mask=x == 0, effects=False)
    assert dict(c.effects) == {} and c.effects.floats() == {} and "0 values" in repr(c.effects)


@pytest.mark.parametrize("name", ["rewards", "groups"])
def test_one_value_a_sequence(name: str) -> None:
    x = np.zeros((2, 3))
    with pytest.raises(ContentError, match=rf"{name}: got shape \(3,\), wanted \(2,\)"):
        corrections.truncate(sampler=x, old=x, mask=x, **{name: np.zeros(3)})


DROPPING: list[tuple[str, dict[str, Any]]] = [
    ("icepop", {}),
    ("token_mask", {}),
    ("sequence_reject", {"low": 0.5}),
    ("geometric_reject", {"low": 0.98, "high": 1.02}),
    ("divergence_reject", {}),
    ("divergence_mask", {"at_most": 0.02}),
    ("error_reject", {"at_most": 1.1}),
    ("off_policy_reject", {"delta": 0.01}),
    ("tv_mask", {"up": 0.02, "down": 0.02}),
    ("binary_kl_mask", {"up": 0.01, "down": 0.01}),
    ("vaco_mask", {"at_most": 0.1}),
    ("kpop", {"at_most": 0.01}),
    ("m2po", {}),
]
CAPPING: list[tuple[str, dict[str, Any]]] = [
    (name, {"cap": 1.1, "floor": floor})
    for name in ("truncate", "sequence_truncate", "geometric_truncate", "segment_truncate")
    for floor in (0.9, 0.0)
]


@pytest.mark.parametrize(("name", "options"), [*DROPPING, *CAPPING])
def test_what_was_changed_low_and_high(name: str, options: dict[str, Any]) -> None:
    """Low and high together are the tokens that were dropped, or whose weight is not the raw one, each on its side."""
    sides = [0.0, 0.0]
    for seed in range(150):
        batch = random_batch(seed, odd=False)
        policy = "current" if name == "off_policy_reject" else "old"
        f = corrections.CORRECTIONS[name]
        c = f(**batch.inputs(policy, advantages=batch.advantages), **options)
        got = [c.effects.floats()[f"changed_{side}/share"] for side in ("low", "high")]
        trained = int(batch.mask.sum())
        if not trained:
            assert got == [None, None]
            continue
        if (name, options) in DROPPING:
            assert sum(got) == pytest.approx(1 - c.keep.sum() / trained)
        else:
            raw = f(**batch.inputs(policy), cap=None).weights
            low, high = batch.mask & (raw < options["floor"]), batch.mask & (raw > options["cap"])
            assert got == pytest.approx([low.sum() / trained, high.sum() / trained])
        sides = [a + b for a, b in zip(sides, got, strict=True)]
    one_sided = {"divergence_reject", "divergence_mask", "error_reject", "vaco_mask", "kpop", "m2po"}
    assert (sides[0] == 0) == (name in one_sided or options.get("floor") == 0.0)
    assert (sides[1] == 0) == (name == "off_policy_reject")


def test_a_veto_names_both_sides() -> None:
    old = np.log(np.array([[1e-5, 1.0, 1.0], [1.0, 1.0, 200.0], [1e-5, 1.0, 200.0], [1.0, 1.0, 1.0]]))
    c = corrections.veto(sampler=old * 0, old=old, mask=old == old, high=100.0)
    got = c.effects.floats()
    assert (got["changed_low/share"], got["changed_high/share"], got["kept/share"]) == (0.5, 0.5, 0.25)
