"""The what-if table against the same numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from build import rollouts_of
from onepolicy import whatif
from onepolicy.align import align
from onepolicy.audit import Choices, audit
from onepolicy.metrics import METRICS
from onepolicy.profiles import Seen
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts
from onepolicy.storage import write
from onepolicy.types import Values
from onepolicy.views import both_finite, view_mask

D = np.array([0.1, -0.2, 1.5, 0.0, -2.0, 0.3, 0.05, 2.5])
LENGTHS = [4, 3, 4]  # index 0 of each is not scored: 3, 2 and 3 tokens
CLUSTERS = np.array([1, 1, 2], dtype=np.uint64)


def batch(d: np.ndarray = D, lengths: list[int] = LENGTHS, rewards: list[float] | None = None) -> Rollouts:
    flat, at = np.zeros(sum(lengths)), 0
    for start, n in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        flat[start + 1 : start + n], at = d[at : at + n - 1], at + n - 1
    a = np.full(len(flat), -3.0)
    records = {"reward": Values(np.array(rewards or [1.0, 0.0, 0.0]))}
    return rollouts_of(a, a + flat, lengths, records=records)


def with_tokens(r: Rollouts, **columns: Values) -> Rollouts:
    return replace(r, tokens={**r.tokens, **columns})


def replayed(r: Rollouts, clusters: np.ndarray = CLUSTERS) -> whatif.WhatIf:
    pairs = align(r, "sampler", "old")
    return whatif.replay(Seen(r, pairs, both_finite(pairs, view_mask(pairs, "drawn"))), clusters)


def row(found: whatif.WhatIf, name: str, tokens: int = 8) -> whatif.Row:
    return next(r for r in whatif.rows(found, tokens) if r.name == name)


def test_a_capped_weight_by_hand():
    r, ratio = row(replayed(batch()), "truncate"), np.exp(D)
    w = np.minimum(ratio, 2.0)
    assert (r.kept, r.groups_emptied, r.sequences_emptied) == (1.0, 0.0, 0.0)
    assert r.ess == pytest.approx(w.sum() ** 2 / (8 * (w**2).sum()))
    assert r.moved == pytest.approx(np.abs(w - 1).mean())
    assert r.largest == pytest.approx(w.max() / w.sum())
    assert r.bias == pytest.approx(np.abs(w - ratio).mean())
    assert r.error == pytest.approx(np.abs(w - ratio).mean() ** 2 + (w**2).mean() / 8)


def test_a_token_mask_by_hand():
    """0.5 <= ratio <= 2 keeps five of eight: 1.5, -2.0 and 2.5 are out."""
    r, ratio = row(replayed(batch()), "token_mask"), np.exp(D)
    keep = (ratio >= 0.5) & (ratio <= 2.0)
    assert keep.sum() == 5
    assert r.kept == pytest.approx(5 / 8)
    assert r.positive == pytest.approx(2 / 3) and r.other == pytest.approx(3 / 5)
    assert r.ess == pytest.approx(5 / 8) and r.largest == pytest.approx(1 / 5)
    assert r.bias == pytest.approx(np.abs(keep - ratio).mean())


def test_no_correction_by_hand():
    r = row(replayed(batch()), "none")
    assert (r.kept, r.ess, r.moved) == (1.0, 1.0, 0.0)
    assert r.error == pytest.approx(np.abs(np.exp(D) - 1).mean() ** 2 + 1 / 8)


def test_emptied_sequences_and_groups():
    """The product of ratios of the third sequence is e^2.85 > 3: it is its group's only one."""
    r = row(replayed(batch()), "sequence_reject")
    # sums 1.4, -2.0 and 2.85 against log 3 = 1.0986
    assert r.sequences_emptied == pytest.approx(2 / 3) and r.groups_emptied == pytest.approx(1 / 2)
    assert r.kept == pytest.approx(2 / 8)


def test_tokens_that_are_not_trained_count_for_nothing():
    mask = np.ones(11, dtype=bool)
    mask[3] = False  # d = 1.5
    r = row(replayed(with_tokens(batch(), loss_mask=Values(mask))), "truncate")
    w = np.minimum(np.exp(np.delete(D, 2)), 2.0)
    assert r.moved == pytest.approx(np.abs(w - 1).mean()) and r.largest == pytest.approx(w.max() / w.sum())


def test_the_largest_gradient_is_of_weight_times_advantage():
    advantages = np.repeat([1.0, -3.0, 0.5], LENGTHS)
    found = replayed(with_tokens(batch(), advantages=Values(advantages)))
    w = np.minimum(np.exp(D), 2.0) * np.repeat([1.0, 3.0, 0.5], [3, 2, 3])
    assert row(found, "truncate").largest == pytest.approx(w.max() / w.sum())
    assert not found.why_not and row(found, "tv_mask").kept > 0


def test_advantages_of_some_records_are_those_of_none_however_they_are_split():
    have = with_tokens(batch(), advantages=Values(np.repeat([1.0, -3.0, 0.5], LENGTHS)))
    split, other = replayed(have), replayed(batch())
    split.add(other)
    assert "tv_mask" in split.why_not
    w = np.minimum(np.exp(D), 2.0)
    assert row(split, "truncate").largest == pytest.approx(w.max() / (2 * w.sum()))


def test_m2po_drops_the_largest_squares_until_their_mean_is_small():
    d = np.array([0.1] * 90 + [1.0] * 10)
    r = batch(d, [101], [1.0])
    pairs = align(r, "sampler", "old")
    sizes = reduce(pairs, METRICS.values(), "drawn").histograms["log_ratio"]
    # 90 * 0.01 + k * 1 <= 0.04 * (90 + k): k = 2.8, but a bin of equal sizes is kept or dropped whole
    assert whatif.m2po_row(sizes).kept == pytest.approx(0.9)


def test_the_least_error_comes_first_and_what_empties_the_batch_last():
    ranked = whatif.rows(replayed(batch()), 8)
    bad = [r.groups_emptied > 0.05 or r.kept < 0.5 for r in ranked]
    assert bad == sorted(bad) and True in bad
    for group in (False, True):
        errors = [r.error for r, b in zip(ranked, bad, strict=True) if b is group]
        assert errors == sorted(errors)


def table(rollouts: Rollouts, folder: Path) -> str:
    write(rollouts, folder / "a.parquet")
    listings = audit([folder], Choices(workers=1)).listings
    return next(x for x in listings if x.title.startswith("What every correction")).note


def test_nothing_is_recommended_while_a_higher_finding_is_open(tmp_path: Path):
    rng = np.random.default_rng(0)
    lengths = [41] * 30
    flat = -rng.exponential(1.0, 41 * 30)
    b = np.minimum(flat + 0.01 * rng.normal(size=len(flat)), 0.0)
    healthy = rollouts_of(flat, b, lengths)
    for name in ("healthy", "twice"):
        (tmp_path / name).mkdir()
    assert "none is recommended" not in table(healthy, tmp_path / "healthy")
    twice = healthy.take(np.concatenate([np.arange(30), np.arange(30)]))
    assert "none is recommended while duplicate-records is open" in table(twice, tmp_path / "twice")
