"""The same terms on padded torch float64 agree with the packed integer sums within the contract's tolerance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from build import random_rollouts
from onepolicy.align import align
from onepolicy.errors import ContentError
from onepolicy.estimate import measure
from onepolicy.grid import to_float
from onepolicy.metrics import METRICS
from onepolicy.padded import padded_metrics
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts
from onepolicy.sums import Metric
from onepolicy.types import Values

OFFLINE = ("exact", "position", "floor")
SUMS = [m for m in METRICS.values() if m.reducer == "sum" and m.uses not in OFFLINE]


def with_entropies(rollouts: Rollouts) -> Rollouts:
    rng = np.random.default_rng(8)
    new = {
        k: replace(
            v,
            entropy=Values(rng.exponential(1, rollouts.n_tokens)),
            varentropy=Values(rng.exponential(1, rollouts.n_tokens)),
        )
        for k, v in rollouts.scorings.items()
    }
    return replace(rollouts, scorings=new)


def padded(rollouts: Rollouts, x: np.ndarray, fill: float) -> np.ndarray:
    out = np.full((len(rollouts), int(rollouts.lengths.max())), fill, dtype=x.dtype)
    for i in range(len(rollouts)):
        out[i, : rollouts.lengths[i]] = x[rollouts.sequence(i)]
    return out


def batch(rollouts: Rollouts, fill: float = np.nan):
    s, o = rollouts.scorings["sampler"], rollouts.scorings["old"]
    columns = [padded(rollouts, v, fill) for v in (s.logprobs.values, o.logprobs.values)]
    names = {
        f"{side}_{what}": padded(rollouts, getattr(v, what).values, fill)
        for side, v in (("a", s), ("b", o))
        for what in ("entropy", "varentropy")
    }
    return [*columns, padded(rollouts, rollouts.drawn, False)], names


@pytest.mark.parametrize("fill", [np.nan, np.inf, -9999.0, 0.0])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_every_summed_metric(kind: str, fill: float) -> None:
    rollouts = with_entropies(random_rollouts(4))
    sums = reduce(align(rollouts), METRICS.values())
    wanted = measure(sums)
    columns, entropies = batch(rollouts, fill)
    if kind == "torch":
        columns, entropies = [torch.tensor(x) for x in columns], {k: torch.tensor(v) for k, v in entropies.items()}
    got = padded_metrics(*columns, SUMS, **entropies)
    assert set(got) == {m.key for m in SUMS}
    for key, value in got.items():
        assert value == pytest.approx(wanted[key].value, rel=1e-9, abs=1e-15), key


@pytest.mark.parametrize("m", [m for m in SUMS if m.level == "token"], ids=lambda m: m.key)
def test_means_of_terms_within_the_tolerance(m: Metric) -> None:
    """|difference| <= 1e-12 mean|term| + 2^-62, term by term."""
    rollouts = with_entropies(random_rollouts(5))
    columns, entropies = batch(rollouts)
    for name, term in m.terms.items():
        alone = replace(m, terms={name: term}, compute=lambda t, name=name: t.mean(name))
        size = replace(m, terms={name: lambda xp, x, term=term: xp.abs(term(xp, x))}, compute=alone.compute)
        got = padded_metrics(
            *(torch.tensor(x) for x in columns), [alone], **{k: torch.tensor(v) for k, v in entropies.items()}
        )
        exact, scale = (reduce(align(rollouts), [x]).totals[x.term_keys()[name]] for x in (alone, size))
        bound = 1e-12 * to_float(scale.total) / scale.n + 2.0**-62
        assert abs(got[m.key] - to_float(exact.total) / exact.n) <= bound


def test_the_device_is_read_once() -> None:
    """No host sync before the end: a tensor subclass counts reads."""
    reads: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"):
                reads.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    rollouts = with_entropies(random_rollouts(6))
    columns, _ = batch(rollouts)
    tensors = [torch.tensor(x) for x in columns]
    plain = [m for m in SUMS if not m.uses.startswith("surprisal")]
    with Mode():
        padded_metrics(*tensors, plain)
        assert reads == []
        tensors[0][0, 1].item()
    assert reads, "the probe itself must be able to see a read"


def test_shapes_that_differ() -> None:
    with pytest.raises(ContentError, match=r"\[B, T\]"):
        padded_metrics(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 4), dtype=bool), SUMS)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_far_apart_values_and_missing_entropies_agree_too(kind: str) -> None:
    """Overflowing terms, NaN entropies, -inf log-probs, a row without tokens: left out alike, nothing raises."""
    rollouts = with_entropies(random_rollouts(5))
    s, o = rollouts.scorings["sampler"], rollouts.scorings["old"]
    a, h = s.logprobs.values.copy(), s.entropy.values.copy()
    at = np.flatnonzero(rollouts.drawn)
    a[at[[3, 50, 90]]] = [-900.0, -np.inf, -400.0]
    h[at[[7, 60]]] = np.nan
    sampler = replace(s, logprobs=Values(a, rollouts.drawn), entropy=Values(h))
    drawn = rollouts.drawn.copy()
    drawn[rollouts.sequence(2)] = False
    rollouts = replace(
        rollouts, scorings={"sampler": sampler, "old": o}, tokens={**rollouts.tokens, "drawn": Values(drawn)}
    )
    wanted = measure(reduce(align(rollouts), METRICS.values()))
    columns, entropies = batch(rollouts)
    if kind == "torch":
        columns, entropies = [torch.tensor(x) for x in columns], {k: torch.tensor(v) for k, v in entropies.items()}
    got = padded_metrics(*columns, SUMS, **entropies)
    for key, value in got.items():
        if wanted[key].value is None:
            assert not np.isfinite(value), key
        else:
            assert value == pytest.approx(wanted[key].value, rel=1e-9, abs=1e-15), key


def test_nothing_selected_is_not_a_number() -> None:
    zeros = torch.zeros((2, 3), dtype=torch.float64)
    got = padded_metrics(zeros, zeros, zeros.bool(), SUMS)
    assert all(np.isnan(x) for x in got.values())
