"""What holds for every correction: numpy = torch, padded = packed, order, identity, gradients, no device read."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from correction_batches import SMALL, Batch, as_torch, packed, random_batch, some
from onepolicy import corrections
from onepolicy.corrections import CORRECTIONS, Correction

#: Options that have no default, or that make small test batches interesting.
OPTIONS: dict[str, dict[str, Any]] = {
    "divergence_mask": {"at_most": 0.05},
    "vaco_mask": {"at_most": 0.1},
    "geometric_reject": {"low": 0.97, "high": 1.03, "weight": "token"},
    "sequence_reject": {"low": 0.3},
    "off_policy_reject": {"delta": 0.02},
    "normalise": {"per": "sequence"},
}
NAMES = sorted(CORRECTIONS)
KINDS = [*NAMES, "two stages"]


def run(name: str, inputs: dict[str, Any], **more: Any) -> Correction:
    inputs = {**inputs, **more}
    if name == "off_policy_reject" and "old" in inputs:
        inputs["current"] = inputs.pop("old")
    if name == "two stages":
        return corrections.compose(
            (corrections.geometric_reject, {"low": 0.9, "high": 1.1}), (corrections.truncate, {"cap": 1.5})
        )(**inputs)
    return CORRECTIONS[name](**inputs, **OPTIONS.get(name, {}))


def floats(c: Correction) -> dict[str, Any]:
    return {k: np.nan if v is None else v for k, v in c.effects.floats().items()}


def same_effects(a: Correction, b: Correction, rel: float = 1e-9, least: float = 1e-12) -> None:
    x, y = floats(a), floats(b)
    assert set(x) == set(y)
    for key in x:
        assert x[key] == pytest.approx(y[key], rel=rel, abs=least, nan_ok=True), key


@pytest.mark.parametrize("n", [20, 24])
def test_the_batches_hold_every_kind(n: int) -> None:
    """What the comparisons below are for occurs in the batches that they share."""
    seen = dict.fromkeys(("nothing trained", "one sequence", "an empty sequence", "[B]", "[B, T]", *ODD), 0)
    for batch in some(n):
        a, b = batch.sampler[batch.mask], batch.policy[batch.mask]
        seen["nothing trained"] += not batch.mask.any()
        seen["one sequence"] += len(batch.mask) == 1
        seen["an empty sequence"] += bool((batch.lengths == 0).any())
        seen["[B]" if batch.advantages.ndim == 1 else "[B, T]"] += 1
        with np.errstate(invalid="ignore"):
            for kind, holds in ODD.items():
                seen[kind] += bool(holds(a, b).any())
    assert min(seen.values()) >= 1, seen
    assert len(some(n)) == n > SMALL


#: Of trained tokens, by the sampler's and the policy's log-probs.
ODD = {
    "nan": lambda a, b: np.isnan(a) ^ np.isnan(b),
    "policy at -inf": lambda a, b: np.isneginf(b) & np.isfinite(a),
    "sampler at -inf": lambda a, b: np.isneginf(a) & np.isfinite(b),
    "+inf": lambda a, b: np.isposinf(a) | np.isposinf(b),
    "capped exponent": lambda a, b: (b - a > 20) & (b - a < 80),
    "overflow of float32": lambda a, b: (b - a > 88) & np.isfinite(b - a),
    "underflow": lambda a, b: (b - a < -20) & np.isfinite(b - a),
    "just above and below": lambda a, b: np.abs(b - a) < 0.1,
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_numpy_is_torch(name: str, dtype: str) -> None:
    rel = 1e-9 if dtype == "float64" else 2e-5
    for batch in some(24, dtype):
        inputs = batch.everything()
        a, b = run(name, inputs), run(name, as_torch(inputs))
        assert isinstance(b.weights, torch.Tensor) and str(b.weights.dtype) == f"torch.{dtype}"
        assert a.weights.dtype == dtype and a.keep.dtype == bool and b.keep.dtype == torch.bool
        np.testing.assert_array_equal(a.keep, b.keep.numpy())
        np.testing.assert_allclose(a.weights, b.weights.numpy(), rtol=rel)
        assert float(a.denominator) == float(b.denominator)
        same_effects(a, b, rel, 1e-12 if dtype == "float64" else 1e-8)  # k3 of float32: 6e-8 |d| a token


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", ["offsets", "ids", "ids and count"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_padded_is_packed(name: str, form: str, kind: str) -> None:
    for seed, batch in enumerate(some(20)):
        inside = np.arange(batch.mask.shape[1]) < batch.lengths[:, None]
        inputs = packed(batch)
        if form != "offsets":
            inputs.pop("offsets")
            inputs["sequence_ids"] = np.repeat(np.arange(len(batch.mask)), batch.lengths)
            if form == "ids and count":
                inputs["n_sequences"] = len(batch.mask)
            else:
                inputs = {k: v for k, v in inputs.items() if k not in ("rewards", "groups")}
        a = run(name, batch.everything())
        b = run(name, as_torch(inputs) if kind == "torch" else inputs)
        np.testing.assert_array_equal(a.keep[inside], np.asarray(b.keep))
        np.testing.assert_allclose(a.weights[inside], np.asarray(b.weights), rtol=1e-10)
        assert float(a.denominator) == float(b.denominator)
        x, y = floats(a), floats(b)
        for key in y:
            assert x[key] == pytest.approx(y[key], rel=1e-9, abs=1e-12, nan_ok=True), key
        loss = np.random.default_rng(seed).normal(size=batch.mask.shape)
        flat = torch.from_numpy(loss[inside]) if kind == "torch" else loss[inside]
        for per in ("token", "sequence"):
            assert float(a.loss(loss, per=per)) == pytest.approx(float(b.loss(flat, per=per)), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_the_order_of_rows_and_more_padding_do_not_matter(name: str) -> None:
    for seed, batch in enumerate(some(24)):
        order = np.random.default_rng(seed).permutation(len(batch.mask))
        a = run(name, batch.everything())
        b = run(name, {k: v[order] for k, v in batch.everything().items()})
        np.testing.assert_allclose(a.weights[order], b.weights, rtol=1e-12)
        np.testing.assert_array_equal(a.keep[order], b.keep)
        same_effects(a, b)
        wide = {k: wider(v, batch) for k, v in batch.everything().items()}
        c = run(name, wide)
        t = batch.mask.shape[1]
        np.testing.assert_allclose(c.weights[:, 2 : t + 2], a.weights, rtol=1e-12)
        assert c.weights.sum() == pytest.approx(a.weights.sum(), rel=1e-9)
        same_effects(a, c)


def wider(x: np.ndarray, batch: Batch) -> np.ndarray:
    """Two columns of garbage before, three after."""
    if x.ndim == 1:
        return x
    fill = False if x.dtype == bool else np.nan
    b = len(batch.mask)
    return np.concatenate([np.full((b, 2), fill), x, np.full((b, 3), fill)], axis=1).astype(x.dtype)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_masked_may_be_anything(name: str) -> None:
    for batch in some(24):
        a = run(name, batch.everything())
        clean = {**batch.everything()}
        for key in ("sampler", "old"):
            clean[key] = np.where(batch.mask, clean[key], -1.0)
        b = run(name, clean)
        np.testing.assert_array_equal(a.weights, b.weights)
        np.testing.assert_array_equal(a.keep, b.keep)
        assert not a.weights[~batch.mask].any() and not a.keep[~batch.mask].any()


@pytest.mark.parametrize("name", [*KINDS, *corrections.presets()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_identity_at_zero_mismatch(name: str, dtype: torch.dtype) -> None:
    """Weights are exactly 1 and everything is kept, whatever the log-probs and advantages are."""
    for seed in range(6):
        batch = random_batch(seed, odd=False, extreme=False)
        lp = torch.from_numpy(np.where(batch.mask, batch.sampler, np.nan)).to(dtype)
        mask, advantages = torch.from_numpy(batch.mask), torch.from_numpy(batch.advantages)
        if ":" in name:
            p = corrections.preset(name)
            behind = {"old": lp} if p.behind == "old" else {"sampler": lp}
            policy = {"current": lp} if p.mode == "bypass" else {"old": lp}
            c = p(**behind, **policy, mask=mask, advantages=advantages)
        else:
            c = run(name, {"sampler": lp, "old": lp, "mask": mask, "advantages": advantages})
        assert torch.equal(c.keep, mask)
        assert torch.equal(c.weights, mask.to(c.weights.dtype))
        assert float(c.denominator) == max(1, batch.mask.sum())
        effects = floats(c)
        if batch.mask.any():
            assert effects["changed_low/share"] == effects["changed_high/share"] == 0
            assert effects["ratio/mean"] == effects["weight/mean"] == effects["kept/share"] == 1
            assert effects["ess_token/raw"] == effects["ess_token/corrected"] == 1


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_detached_unless_asked(name: str) -> None:
    for batch in some(20):
        inputs = as_torch(batch.everything("current"))
        inputs["current"].requires_grad_()
        if name == "off_policy_reject":
            c = run(name, inputs)
            assert not c.weights.requires_grad
            continue
        assert not run(name, inputs).weights.requires_grad
        c = run(name, inputs, grad=True)
        assert not any(x.requires_grad for x in c.effects.values()) and not c.keep.is_floating_point()
        plain = run(name, inputs)
        assert torch.equal(c.weights.detach(), plain.weights) and torch.equal(c.keep, plain.keep)
        if c.weights.requires_grad:
            (got,) = torch.autograd.grad(c.weights.sum(), inputs["current"])
            assert torch.isfinite(got).all(), "no NaN from masked, missing or overflowing tokens"
            assert not got[~inputs["mask"]].any()


WITH_GRADIENT = [
    "truncate",
    "sequence_truncate",
    "geometric_truncate",
    "segment_truncate",
    "icepop",
    "kpop",
    "normalise",
]


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_the_gradient_is_that_of_the_weights(name: str) -> None:
    """Against central differences, where nothing is at a bound."""
    reached = 0
    for seed in range(60):
        batch = random_batch(seed, odd=False, extreme=False, rows=3, columns=5)
        inputs = as_torch(batch.inputs("current"))
        inputs["current"].requires_grad_()
        c = run(name, inputs, grad=True)
        coefficient = torch.from_numpy(np.random.default_rng(seed).normal(size=batch.mask.shape))
        (got,) = torch.autograd.grad((c.weights * coefficient).sum(), inputs["current"])
        for i, t in np.argwhere(batch.mask)[:4]:
            shifted = []
            for h in (1e-6, -1e-6):
                moved = batch.policy.copy()
                moved[i, t] += h
                w = run(name, {**batch.inputs("current"), "current": moved}).weights
                shifted.append(float((w * coefficient.numpy()).sum()))
            wanted = (shifted[0] - shifted[1]) / 2e-6
            if abs(wanted) < 1e3:  # a jump of a mask has no derivative
                assert float(got[i, t]) == pytest.approx(wanted, rel=1e-4, abs=1e-6)
                reached += wanted != 0
    assert reached > 40


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for the device."""

    WORDS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        indices = args[1] if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
        boolean = any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in indices)
        if name in self.WORDS or boolean:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["padded", "offsets", "ids"])
@pytest.mark.parametrize("name", KINDS)
def test_the_device_is_not_read(name: str, form: str) -> None:
    batch = random_batch(11)
    inputs = batch.everything() if form == "padded" else packed(batch)
    if form == "ids":
        inputs.pop("offsets")
        inputs["sequence_ids"] = np.repeat(np.arange(len(batch.mask)), batch.lengths)
        inputs["n_sequences"] = len(batch.mask)
    inputs = as_torch(inputs)
    loss = torch.ones_like(inputs["sampler"])
    with Reads() as reads:
        for denominator in ("all", "kept"):
            c = run(name, inputs, denominator=denominator)
            c.loss(loss)
            c.loss(loss, per="sequence")
        corrections.combine(c, c)
        assert reads.seen == []
        c.effects.floats()
        bool(c.denominator > 0)
    assert reads.seen, "the probe itself must be able to see a read"


@pytest.mark.parametrize("name", corrections.presets())
def test_presets_do_not_read_the_device(name: str) -> None:
    batch = random_batch(12)
    p = corrections.preset(name)
    lp, policy = torch.from_numpy(batch.sampler), torch.from_numpy(batch.policy)
    behind = {"old": lp} if p.behind == "old" else {"sampler": lp}
    named = {"current": policy} if p.mode == "bypass" else {"old": policy}
    with Reads() as reads:
        c = p(**behind, **named, mask=torch.from_numpy(batch.mask), advantages=torch.from_numpy(batch.advantages))
    assert reads.seen == [] and torch.isfinite(c.weights).all()


def test_a_shard_of_the_batch_with_a_reduce_function_is_the_whole() -> None:
    """Self-normalised weights over four ranks, one of them empty."""
    batch = random_batch(5, rows=8)
    batch = random_batch(next(s for s in range(99) if len(random_batch(s, rows=8).mask) >= 6), rows=8)
    whole = run("normalise", batch.inputs())
    cuts = [slice(0, 2), slice(2, 2), slice(2, 3), slice(3, None)]
    sums: list[np.ndarray] = []

    def record(x: np.ndarray) -> np.ndarray:
        sums.append(np.array(x))
        return x

    for cut in cuts:
        run("normalise", {k: v[cut] for k, v in batch.inputs().items()}, reduce=record)
    total = np.sum(sums, axis=0)

    def in_place(x: np.ndarray) -> None:
        x[:] = total

    for function in (lambda x: total, in_place):
        parts = [run("normalise", {k: v[c] for k, v in batch.inputs().items()}, reduce=function).weights for c in cuts]
        np.testing.assert_allclose(np.concatenate(parts), whole.weights, rtol=1e-12)


def peak_of_torch(run_it: Any) -> int:
    """The most bytes that torch held at once, by the profiler's memory events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run_it()
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert kept is not None
    return peak


@pytest.mark.parametrize(("name", "most"), [("truncate", 3), ("icepop", 3), ("geometric_reject", 3)])
def test_temporaries(name: str, most: int) -> None:
    """At most three [B, T] arrays of float32 at once besides weights and keep, statistics included."""
    shape = (64, 8192)
    sampler = torch.randn(shape) - 3
    inputs = {"sampler": sampler, "old": sampler + torch.randn(shape) * 0.05, "mask": torch.rand(shape) < 0.8}
    run(name, inputs)
    unit = sampler.numel() * 4
    assert peak_of_torch(lambda: run(name, inputs)) <= (most + 1.25) * unit
    arrays = {k: v.numpy() for k, v in inputs.items()}
    tracemalloc.start()
    try:
        run(name, arrays)
        assert tracemalloc.get_traced_memory()[1] <= (most + 1 + 1.25) * unit  # np.where widens a scalar's side
    finally:
        tracemalloc.stop()
