"""Bins of a profile against the same numbers computed apart, and each kind of bin on examples made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from build import rollouts_of
from onepolicy.align import align
from onepolicy.profiles import PROFILES, Bins, Profile, Seen, profiled
from onepolicy.profiles.base import OTHERS
from onepolicy.profiles.blocks import blocks, sums_in_order
from onepolicy.profiles.repeats import repeats
from onepolicy.rollouts import Rollouts
from onepolicy.types import Lists, Values
from onepolicy.views import both_finite, view_mask


def seen_of(rollouts: Rollouts) -> Seen:
    pairs = align(rollouts, "sampler", "old")
    return Seen(rollouts, pairs, both_finite(pairs, view_mask(pairs, "drawn")))


def random_rollouts(n: int = 40, seed: int = 0, **records: Any) -> Rollouts:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 60, n)
    a = -rng.exponential(0.6, int(lengths.sum()))
    b = -np.abs(a + rng.standard_t(3, len(a)) * 0.05)
    return rollouts_of(a, b, lengths, records=records, seed=seed)


def by_token(label_of: Any) -> Profile:
    return Profile("test", "test", label_of)


def bins_of(rollouts: Rollouts, key: str) -> dict[str, int]:
    found = profiled(seen_of(rollouts), PROFILES[key])
    assert found is not None
    return {label: found.n(label) for label in sorted(found.table)}


@pytest.mark.parametrize("width", [3, 70, 5000])
def test_means_and_errors_are_those_of_a_cluster_formula(width: int):
    """Standard error of a ratio of sums with the sequence as the cluster; many labels take the sparse way."""
    seen = seen_of(random_rollouts())
    code = (np.arange(len(seen)) * 7) % 3
    bins = profiled(seen, by_token(lambda s: (code, [str(k) for k in range(width)])))
    assert bins is not None
    for k in range(3):
        inside = code == k
        d, sequence = seen.d[inside], seen.sequence[inside]
        assert bins.n(str(k)) == inside.sum()
        for name, x in (("d", d), ("abs", np.abs(d)), ("ratio", np.expm1(d))):
            assert bins.mean(str(k), name) == pytest.approx(x.mean(), abs=1e-9)
        m, s = d.mean(), len(np.unique(sequence))
        residual = np.array([(d[sequence == i] - m).sum() for i in np.unique(sequence)])
        wanted = np.sqrt((residual**2).sum() * s / (s - 1)) / len(d)
        assert bins.std_error(str(k), "d") == pytest.approx(wanted, rel=1e-6)
        assert bins.sd(str(k)) == pytest.approx(d.std(), rel=1e-6)
        for q in (0.5, 0.9, 0.99):
            rank = np.sort(np.abs(d))[max(1, int(np.ceil(q * len(d) - 1e-9))) - 1]
            assert bins.quantile(str(k), q) == pytest.approx(rank, rel=0.065)


def test_a_bin_of_nothing_has_no_numbers():
    bins = Bins()
    assert np.isnan(bins.mean("x")) and np.isnan(bins.quantile("x", 0.5)) and bins.n("x") == 0


def test_dense_and_sparse_bins_are_the_same_integers():
    seen = seen_of(random_rollouts())
    code = np.arange(len(seen)) % 5
    few = profiled(seen, by_token(lambda s: (code, [str(k) for k in range(5)])))
    many = profiled(seen, by_token(lambda s: (code, [str(k) for k in range(9000)])))
    assert few is not None and many is not None and few.to_dict() == many.to_dict()


def test_names_without_end_are_one_bin_the_same_for_any_split():
    names = Values(np.array([f"e{i % 20:02d}" for i in range(40)], dtype=object))
    rollouts = random_rollouts(env_id=names)
    profile = replace(PROFILES["env"], most=6)
    whole = profiled(seen_of(rollouts), profile)
    assert whole is not None and len(whole.table) == 7 and OTHERS in whole.table
    parts = Bins()
    for start in (0, 10, 25):
        part = profiled(seen_of(rollouts.take(range(start, {0: 10, 10: 25, 25: 40}[start]))), profile)
        assert part is not None
        parts.add(part)
        parts = parts.cut(6)
    assert parts.to_dict() == whole.to_dict()
    assert sum(whole.n(x) for x in whole.table) == len(seen_of(rollouts))


def small(ids: list[int], prompt: int, **more: Any) -> Rollouts:
    """One sequence; the prompt is not drawn."""
    n = len(ids)
    r = rollouts_of(np.full(n, -1.0), np.full(n, -1.25), np.array([n]), records=more)
    drawn = np.arange(r.n_tokens) >= prompt
    return replace(r, tokens={**r.tokens, "token_ids": Values(np.array(ids, np.int32)), "drawn": Values(drawn)})


def test_tokens_that_stood_before():
    # prompt 5 6; reply 5 (in the prompt), 7 (new), 7 (in the reply), 5 (in the reply), 8 (new)
    assert bins_of(small([5, 6, 5, 7, 7, 5, 8], 2), "repeated") == {"new": 2, "in the prompt": 1, "in the reply": 2}


def test_first_inner_and_last_tokens():
    assert bins_of(small([5, 6, 5, 7, 7, 5, 8], 2), "place") == {"first": 1, "inner": 3, "last": 1}
    assert bins_of(small([5, 6, 5, 7, 7, 5, 8], 2), "position") == {"0": 1, "1": 1, "2": 2, "4": 1}


def test_lag_is_scorer_minus_sampler():
    r = small([1, 2, 3, 4, 5], 1, scorer_version=Values(np.array([7])))
    versions = Values(np.array([0, 7, 6, 4, 9]), np.array([False, True, True, True, True]))
    assert bins_of(replace(r, tokens={**r.tokens, "policy_version": versions}), "lag") == {
        "0": 1, "1": 1, "3": 1, "-1": 1,
    }  # fmt: skip


def lists(rows: list[list[int] | None]) -> Lists:
    offsets = np.cumsum([0, *(len(x or []) for x in rows)]).astype(np.int64)
    return Lists(
        np.array([v for x in rows for v in x or []], np.int32), offsets, np.array([x is not None for x in rows])
    )


def test_tokens_kept_by_truncation():
    r = small([1, 2, 3, 4, 5], 1)
    kept = lists([None, [1], [1, 2, 3], [1, 2, 3, 4], None])
    assert bins_of(replace(r, lists={"sampling_mask": kept}), "kept") == {"1": 1, "2": 1, "4": 1}


def test_experts_in_any_order_are_the_same():
    r = small([1, 2, 3, 4], 1)
    told = {"routed_experts": lists([None, [1, 2], [1, 2], [3, 4]]),
            "scorer_routed_experts": lists([None, [2, 1], [1, 3], None])}  # fmt: skip
    assert bins_of(replace(r, lists=told), "routes") == {"same experts": 1, "other experts": 1}
    assert bins_of(replace(r, lists=told), "routes before") == {"same experts": 1, "other experts": 1}


def test_cached_prefixes_and_padding():
    records = {"cached_prefix_length": Values(np.array([0, 3, 0]), np.array([True, True, False])),
               "padding_length": Values(np.array([0, 6, 600]))}  # fmt: skip
    r = rollouts_of(np.full(12, -1.0), np.full(12, -1.5), np.array([4, 5, 3]), records=records)
    assert bins_of(r, "cached") == {"not cached": 3, "cached prefix": 4}
    assert bins_of(r, "padding") == {"none": 3, "up to 3/4": 4, "more": 2}


def plain_repeats(rollouts: Rollouts) -> list[tuple[int, bool]]:
    out: list[tuple[int, bool]] = []
    for i in range(len(rollouts)):
        at, times, undrawn = rollouts.sequence(i), dict[int, int](), set[int]()
        for token, drawn in zip(rollouts.token_ids[at].tolist(), rollouts.drawn[at].tolist(), strict=True):
            out.append((times.get(token, 0), token in undrawn))
            times[token] = times.get(token, 0) + drawn
            undrawn |= set() if drawn else {token}
    return out


@pytest.mark.parametrize("most", [9, 2**31 - 1])
@pytest.mark.parametrize("lengths", [(3, 60), (300, 900), (70_000, 70_001)])
def test_repeats_are_those_of_a_plain_loop(lengths: tuple[int, int], most: int):
    """Short and long sequences, small and large ids are sorted in ways of their own."""
    rng = np.random.default_rng(2)
    each = np.append(rng.integers(*lengths, 3), 0)
    ids = rng.choice(rng.integers(0, most, 40), int(each.sum()))
    rollouts = rollouts_of(ids * -1e-12, ids * -2e-12, each)
    tokens = {"token_ids": Values(ids.astype(np.int32)), "drawn": Values(rng.random(len(ids)) < 0.8)}
    rollouts = replace(rollouts, tokens={**rollouts.tokens, **tokens})
    times, undrawn = repeats(rollouts.offsets, rollouts.token_ids, rollouts.drawn)
    assert list(zip(times.tolist(), undrawn.tolist(), strict=True)) == plain_repeats(rollouts)


@pytest.mark.parametrize("lengths", [[5, 0, 7], [0, 900, 0, 0, 3000, 40_000, 20, 30_000, 0], [70_000, 1]])
def test_sums_in_order_are_those_of_a_plain_loop_to_the_bit(lengths: list[int]):
    x = np.random.default_rng(3).normal(size=sum(lengths))
    each = np.split(x, np.cumsum(lengths)[:-1])
    parts = blocks(np.array(lengths))
    assert [p.sequences.start for p in parts[1:]] == [p.sequences.stop for p in parts[:-1]]
    got = sums_in_order(parts, len(lengths), lambda at: {"x": x[at]})["x"]
    assert got.tolist() == [float(np.add.accumulate(np.append(0.0, part))[-1]) for part in each]


@pytest.mark.parametrize("key", ["position", "part", "probability", "place", "repeated", "length"])
def test_sums_too_large_to_be_exact_are_the_same_for_any_split(key: str):
    rollouts = random_rollouts(30)
    b = rollouts.scorings["old"].logprobs.values.copy()
    b[::3] += 12.7
    rollouts = rollouts.with_scoring("old", replace(rollouts.scorings["old"], logprobs=Values(b)))
    assert not seen_of(rollouts).exact
    whole, parts = profiled(seen_of(rollouts), PROFILES[key]), Bins()
    for i in range(0, 30, 2):
        part = profiled(seen_of(rollouts.take([i, i + 1])), PROFILES[key])
        assert part is not None
        parts.add(part)
    assert whole is not None and whole.to_dict() == parts.to_dict()
