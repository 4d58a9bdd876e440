"""The what-if table against the same numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from build import rollouts_of
from onepolicy import corrections, replays, whatif
from onepolicy.align import align
from onepolicy.audit import Choices, audit
from onepolicy.corrections import compose
from onepolicy.grid import grid_integers
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


def seen_of(r: Rollouts) -> Seen:
    pairs = align(r, "sampler", "old")
    return Seen(r, pairs, both_finite(pairs, view_mask(pairs, "drawn")))


def replayed(r: Rollouts, clusters: np.ndarray = CLUSTERS) -> whatif.WhatIf:
    return whatif.replay(seen_of(r), clusters)


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
    row = whatif.m2po_row(sizes, batch_tokens=50)
    assert row.kept == pytest.approx(0.9)
    # weights of 1 on 90 tokens and 0 on 10: their effective share, the mass moved, the largest share
    assert (row.ess, row.moved, row.largest) == pytest.approx((0.9, 0.1, 1 / 90))
    # mean |w - r|: 90 tokens at e^0.1 - 1, 10 at e; a bin stands for its values within 0.4%
    bias = 0.9 * (np.exp(0.1) - 1) + 0.1 * np.e
    assert row.bias == pytest.approx(bias, rel=0.004)
    assert row.error == pytest.approx(row.bias**2 + 0.9 / 50)


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


# -- against the corrections as users call them ------------------------------------------------------------------------

#: Corrections besides the replayed ones: weights of several stages, beyond what a float holds too; one that sees what
#: another dropped; weights of sequences.
UNCAPPED = (corrections.truncate, {"cap": None})
MORE = {
    "two weights": compose(corrections.sequence_truncate, corrections.icepop, corrections.geometric_truncate),
    "weights beyond floats": compose(UNCAPPED, UNCAPPED),
    "sees all": compose(corrections.token_mask, (corrections.geometric_reject, {"low": 0.9, "high": 1.1}), sees="all"),
    "sees kept": compose(corrections.token_mask, (corrections.geometric_reject, {"low": 0.9, "high": 1.1})),
    "sequence weights": compose((corrections.token_mask, {"weight": "sequence"})),
}


def wild(seed: int, masked: bool, advantages: str, odd: bool = False) -> Rollouts:
    """Sequences of every size of gap, a few far tokens, some empty or without compared tokens. `odd`: a difference of
    two finite log-probs that is not finite."""
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([rng.integers(0, 4, 12), rng.integers(20, 90, 60)])
    rng.shuffle(lengths)
    n = int(lengths.sum())
    scale = np.repeat(rng.choice([1e-4, 1e-3, 0.05, 0.3], len(lengths)), lengths)
    a = -rng.exponential(0.6, n)
    b = a + rng.normal(0, 1, n) * scale + np.repeat(rng.choice([0.0, 0.05, -0.05], len(lengths)), lengths)
    far = rng.random(n) < 0.004
    b[far] += rng.choice([3.0, -3.0, -12.0, 90.0, 400.0, -800.0], int(far.sum()))
    b[rng.random(n) < 0.02] = -np.inf
    scored = rng.random(n) > np.repeat(rng.choice([0.0, 0.1, 1.0], len(lengths), p=[0.5, 0.4, 0.1]), lengths)
    if odd:
        a[n // 2], b[n // 2], scored[n // 2] = -1.7e308, 1.7e308, True
    reward = Values(rng.choice([-1.0, 0.0, 1.0], len(lengths)), rng.random(len(lengths)) < 0.9)
    out = rollouts_of(a, b, lengths, valid_b=scored, drawn=np.ones(n, bool), valid_a=np.ones(n, bool),
                      records={"reward": reward})  # fmt: skip
    trained = np.ones(n, dtype=bool)
    if masked:
        trained = rng.random(n) > np.repeat(rng.choice([0.0, 0.3, 1.0], len(lengths)), lengths)
        told = rng.random(n) < 0.98
        trained[n // 2], told[n // 2] = odd or trained[n // 2], odd or told[n // 2]
        out = with_tokens(out, loss_mask=Values(trained, told))
        trained = trained | ~told
    if advantages == "none":
        return out
    signs = rng.choice([-0.9, -0.2, 0.0, 0.7], len(lengths))
    value = np.repeat(signs, lengths) if advantages == "sequence" else rng.choice(signs, n)
    if advantages == "mixed":
        value = np.where(np.repeat(rng.random(len(lengths)) < 0.5, lengths), np.repeat(signs, lengths), value)
    return with_tokens(out, advantages=Values(value, trained if advantages == "token" else None))


def expected(seen: Seen, clusters: np.ndarray) -> whatif.WhatIf:
    """What `replay` means: each correction called on the batch, its weights added up sequence by sequence."""
    out = whatif.WhatIf()
    columns, at = seen.rollouts.tokens, seen.at
    mask, told = columns.get("loss_mask"), columns.get("advantages")
    trained = np.ones(len(at), bool) if mask is None else (mask.values | ~mask.mask())[at]
    advantages = None if told is None else np.where(told.mask(), told.values, 0.0)[at]
    of = [trained & (seen.sequence == i) for i in range(len(seen.rollouts))]
    mark(out, len(whatif.REPLAYS), trained, of, clusters)
    for bit, (name, (run, _)) in enumerate(whatif.REPLAYS.items()):
        if name in whatif.SIGNED and advantages is None:
            out.why_not[name] = "needs advantages"
            continue
        policy = "current" if name == "off_policy_reject" else "old"
        offsets = np.concatenate([[0], np.cumsum(seen.counts)])
        inputs = {"sampler": seen.a, policy: seen.b, "mask": trained, "offsets": offsets, "advantages": advantages}
        c = run(**inputs, effects=False, **whatif.OPTIONS.get(name, {}))
        add(out, name, np.where(c.keep, c.weights, 0.0), seen, of, advantages)
        count(out, name, c.keep, seen, of)
        mark(out, bit, c.keep, of, clusters)
    return out


def add(out: whatif.WhatIf, name: str, w: np.ndarray, seen: Seen, of: list[np.ndarray], advantages: np.ndarray | None):
    with np.errstate(over="ignore"):
        r = np.exp(np.minimum(seen.d, 80.0))
        terms = {"w": w, "w2": w * w, "moved": abs(w - 1), "off": abs(w - r)}
    if advantages is not None:
        terms["gradient"] = w * abs(advantages)
        out.totals.greatest(f"{name}:largest gradient", max(terms["gradient"][m].max(initial=0.0) for m in of))
    out.totals.greatest(f"{name}:largest", max(w[m].max(initial=0.0) for m in of))
    for what, x in terms.items():
        with np.errstate(over="ignore"):
            sums = np.array([np.minimum(x[m].sum(), 2.0**60) for m in of])
        out.totals.sums[f"{name}:{what}"] = sum(grid_integers(sums))


def count(out: whatif.WhatIf, name: str, keep: np.ndarray, seen: Seen, of: list[np.ndarray]):
    reward = seen.rollouts.records["reward"]
    for i, m in enumerate(of):
        sign = "unknown" if not reward.mask()[i] else "positive" if reward.values[i] > 0 else "other"
        kept, trained = int((keep & m).sum()), int(m.sum())
        for part in ("", f":octave {trained.bit_length()}", f":reward {sign}"):
            out.totals.count(f"{name}:kept{part}", kept)
            out.totals.count(f"{name}:trained{part}", trained)
        out.totals.count(f"{name}:sequences", trained > 0)
        out.totals.count(f"{name}:emptied", trained > 0 and not kept)


def mark(out: whatif.WhatIf, bit: int, keep: np.ndarray, of: list[np.ndarray], clusters: np.ndarray):
    for m, group in zip(of, clusters.tolist(), strict=True):
        if (keep & m).any():
            out.groups[group] = out.groups.get(group, 0) | 1 << bit


def same(got: whatif.WhatIf, wanted: whatif.WhatIf):
    assert got.totals.counts == wanted.totals.counts
    assert got.groups == wanted.groups and got.why_not == wanted.why_not
    for mine, theirs in ((got.totals.sums, wanted.totals.sums), (got.totals.most, wanted.totals.most)):
        assert mine.keys() == theirs.keys()
        for key, x in theirs.items():
            assert abs(mine[key] - x) <= 1e-12 * x, key


def groups_of(r: Rollouts) -> np.ndarray:
    return np.arange(len(r), dtype=np.uint64) // 3 + np.uint64(2**63)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("advantages", ["none", "sequence", "token"])
def test_every_replay_is_the_correction_as_users_call_it(
    seed: int, masked: bool, advantages: str, monkeypatch: pytest.MonkeyPatch
):
    for name, run in MORE.items():
        monkeypatch.setitem(whatif.REPLAYS, name, (run, ""))
    r = wild(seed, masked, advantages)
    seen, clusters = seen_of(r), groups_of(r)
    found = whatif.replay(seen, clusters)
    same(found, expected(seen, clusters))
    t = found.totals
    for name in set(whatif.REPLAYS) - set(found.why_not) - {"none"}:  # the batch lets each of them act
        assert t.counts[f"{name}:kept"] > 0
        assert t.counts[f"{name}:kept"] < t.counts[f"{name}:trained"] or t.sums[f"{name}:moved"] > 0


def test_values_that_no_log_prob_has_give_numbers():
    """Finite ones whose difference, square or sum would overflow."""
    r = wild(0, False, "sequence", odd=True)
    with np.errstate(over="ignore"):
        seen, clusters = seen_of(r), groups_of(r)
    found = whatif.replay(seen, clusters)
    same(found, expected(seen, clusters))
    assert found.totals.counts["none:kept"] == found.totals.counts["none:trained"]
    assert all(abs(total) < 2**61 * 2**63 * len(r) for total in found.totals.sums.values())


def test_a_batch_without_trained_tokens():
    r = wild(0, False, "token")
    r = with_tokens(r, loss_mask=Values(np.zeros(r.n_tokens, dtype=bool)))
    seen, clusters = seen_of(r), groups_of(r)
    same(whatif.replay(seen, clusters), expected(seen, clusters))


@pytest.mark.parametrize("size", [1, 200])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("advantages", ["none", "mixed"])
def test_tokens_worked_on_at_a_time_change_no_bit(
    size: int, masked: bool, advantages: str, monkeypatch: pytest.MonkeyPatch
):
    for name, run in MORE.items():
        monkeypatch.setitem(whatif.REPLAYS, name, (run, ""))
    r = wild(1, masked, advantages, odd=True)
    with np.errstate(over="ignore"):
        seen, clusters = seen_of(r), groups_of(r)
    whole = whatif.replay(seen, clusters)
    assert whole.totals.counts["none:kept"] == whole.totals.counts["none:trained"]
    monkeypatch.setattr(replays, "CHUNK", size)
    assert whatif.replay(seen, clusters) == whole


def test_totals_are_exact_integers_of_the_grid():
    rng = np.random.default_rng(0)
    x = rng.random((3, 400)) * 2.0 ** rng.integers(-70, 62, (3, 400))
    x[:, :4] = np.array([0.5, 1.5, 2.5, 0.0]) * 2.0**-61
    x[2] = 2.0**62
    assert whatif._totals(x) == [sum(grid_integers(np.minimum(row, 2.0**60))) for row in x]


def test_a_value_per_sequence_stays_one_until_it_meets_tokens():
    lengths = np.array([2, 1])
    x = replays.PerSequence(np.array([1.0, -2.0]), lengths)
    far = ~(abs(x) > 1.5) & (x < 3)
    assert isinstance(far, replays.PerSequence) and far.values.tolist() == [True, False]
    assert (x * np.array([1.0, 2.0, 3.0])).tolist() == [1.0, 2.0, -6.0]
    assert np.where(far, 1, 0).tolist() == [1, 1, 0]
    assert np.add.reduce(x) == 0.0
