"""From pairs to Sums: every metric's terms, evaluated once and added as integers."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onepolicy.arrays import NUMPY, numeric_identity
from onepolicy.exact import exact_divergences
from onepolicy.grid import SegmentSums, group_sums, segment_sums, selected_segments
from onepolicy.histogram import GROUPS, Histogram
from onepolicy.sums import MAX_ROWS, WORST_SEQUENCES, WORST_TOKENS, Metric, Place, Sums, Term, Total, keep_worst
from onepolicy.types import BoolArray, FloatArray, IntArray, LogprobPairs
from onepolicy.views import SEQUENCE_TERMS, Sequences, Tokens, Within, select_tokens, uses_masks, view_mask
from onepolicy.windows import window_sums

#: Tokens worked on at a time: a chunk's columns and temporaries stay in the cache.
CHUNK = 1 << 16
#: A log-prob above this is impossible; a certain token's may round up to a few float32 steps above 0.
POSITIVE_ABOVE = 1e-6


@dataclass(frozen=True, slots=True)
class _Clusters:
    ids: list[int]  # 64-bit, one a cluster
    of_sequence: IntArray  # [S] index into ids
    group: IntArray  # [S] 0..31


def reduce(pairs: LogprobPairs, metrics: Iterable[Metric], view: str = "drawn") -> Sums:
    """Sums of `metrics` over the tokens of `view`: `drawn`, `loss` (drawn and trained) or `fixed` (not drawn).

    Metrics that the pair cannot serve (no entropy, nothing drawn by side a) are left without totals: not measured.
    """
    table = tuple(metrics)
    out = Sums(view, pairs.names, pairs.cluster_unit, numeric_identity(), tuple(sorted(m.key for m in table)))
    base = view_mask(pairs, view)
    masks = uses_masks(pairs, view)
    odd = states(pairs, base, masks["scored"])
    out.counts = _counts(pairs, base, masks["scored"], odd)
    clusters = _clusters(pairs)
    parts: dict[str, SegmentSums] = {}
    for mask, uses in _equal_masks(masks).values():
        chosen = [m for m in table if m.uses in uses]
        if chosen:
            parts |= _reduce_tokens(out, pairs, mask, chosen, clusters)
    _add_rows(out, parts, clusters)
    out.counts["estimable"] = int(masks["estimator"].sum()) if "estimator" in masks else 0
    _add_histograms(out, pairs, masks["scored"], clusters)
    if "floor" in masks:
        _add_floor(out, pairs, masks["floor"], clusters)
    out.worst |= _places(pairs, masks["scored"], odd)
    return out


def cluster_id(unit: str, key: str) -> int:
    """64-bit id of a cluster, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{unit}\0{key}".encode(), digest_size=8).digest(), "big")


def _clusters(pairs: LogprobPairs) -> _Clusters:
    index: dict[str, int] = {}
    of_sequence = np.array([index.setdefault(k, len(index)) for k in pairs.cluster_keys], dtype=np.int64)
    ids = [cluster_id(pairs.cluster_unit, k) for k in index]
    group = np.array([i % GROUPS for i in ids], dtype=np.int64)
    return _Clusters(ids, of_sequence, group[of_sequence] if len(ids) else of_sequence)


def _equal_masks(masks: dict[str, BoolArray]) -> dict[bytes, tuple[BoolArray, list[str]]]:
    """Masks that are equal are one: most often all of them are, and the same tokens are looked at once."""
    out: dict[bytes, tuple[BoolArray, list[str]]] = {}
    for uses, mask in masks.items():
        key = hashlib.blake2b(np.packbits(mask).tobytes(), digest_size=16).digest()
        out.setdefault(key, (mask, []))[1].append(uses)
    return out


def _reduce_tokens(
    out: Sums, pairs: LogprobPairs, mask: BoolArray, metrics: list[Metric], clusters: _Clusters
) -> dict[str, SegmentSums]:
    """Sums by sequence, for the keys of metrics that all look at the tokens of one mask."""
    uses = {m.uses for m in metrics}
    exact = exact_divergences(pairs.a_distributions, pairs.b_distributions) if "exact" in uses else None
    tokens = select_tokens(pairs, uses, mask, exact)
    starts, lengths = selected_segments(pairs.offsets, mask)
    token_terms = _terms(metrics, "token")
    wants_sequences = any(m.level == "sequence" for m in metrics)
    if wants_sequences:
        token_terms |= {f"{_PART}{k}": (fn, frozenset({"part"})) for k, fn in SEQUENCE_TERMS.items()}
    parts = _token_sums(out, tokens, starts, lengths, token_terms)
    if wants_sequences:
        rows = np.flatnonzero(lengths > 0)
        sums = {k: _sequence_column(parts.pop(f"{_PART}{k}"), rows) for k in SEQUENCE_TERMS}
        view = Sequences(lengths[rows].astype(np.float64), sums)
        parts |= _sequence_sums(out, view, rows, len(lengths), _terms(metrics, "sequence"))
        if any(m.uses == "scored" and m.level == "sequence" for m in metrics):
            _sequence_histograms(out, view, clusters.group[rows])
            out.worst["sequences"] = _worst_sequences(pairs, view, rows)
    return parts


#: Keys of the token sums that sequences are made of.
_PART = "sequence-part:"


def _sequence_column(part: SegmentSums, rows: IntArray) -> FloatArray:
    """`[len(rows)]` sums of a token term; NaN where a token's term is not finite: the sequence has no such number."""
    return np.where(part.nonfinite > 0, np.nan, part.to_float())[rows]


def _terms(metrics: list[Metric], level: str) -> dict[str, tuple[Term, frozenset[str]]]:
    """key -> (term, reducers that want it)."""
    out: dict[str, tuple[Term, frozenset[str]]] = {}
    for m in metrics:
        if m.level == level:
            for name, key in m.term_keys().items():
                reducers = {m.reducer} | (out[key][1] if key in out else set())
                out[key] = (m.terms[name], frozenset(reducers))
    return out


def _token_sums(
    out: Sums, tokens: Tokens, starts: IntArray, lengths: IntArray, terms: dict[str, tuple[Term, frozenset[str]]]
) -> dict[str, SegmentSums]:
    """Integer-exact per-sequence sums of every token term, a chunk of whole sequences at a time. A term that several
    keys name is evaluated and added once."""
    added = {key: term for key, (term, reducers) in terms.items() if reducers & {"sum", "part"}}
    ends = {key: term for key, (term, reducers) in terms.items() if reducers & {"max", "min"}}
    within = {id(t): t for t in added.values() if isinstance(t, Within)}
    plain = {id(t): t for t in added.values() if id(t) not in within} | {id(t): t for t in ends.values()}
    summed = {id(term) for term in added.values()}
    pieces: dict[int, list[SegmentSums]] = {i: [] for i in summed}
    edges = _chunk_edges(lengths)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for lo, hi in itertools.pairwise(edges):
            first, last = int(starts[lo]), int(starts[hi - 1] + lengths[hi - 1])
            chunk = _slice(tokens, first, last)
            where = (starts[lo:hi] - first, lengths[lo:hi])
            for i, term in plain.items():
                x = term(NUMPY, chunk)
                if i in summed and i not in within:
                    pieces[i].append(segment_sums(x, *where))
                for key in [k for k, t in ends.items() if t is term]:
                    _add_extremes(out, key, x)
            for i, sums in window_sums(chunk, within, *where).items():
                pieces[i].append(sums)
    joined = {i: _join(found, len(lengths)) for i, found in pieces.items()}
    return {key: joined[id(term)] for key, term in added.items()}


def _chunk_edges(lengths: IntArray) -> list[int]:
    """Sequence indices where chunks of about `CHUNK` tokens begin and end; a sequence is never cut."""
    ends = np.cumsum(lengths)
    edges = [0]
    while edges[-1] < len(lengths):
        begun = int(ends[edges[-1] - 1]) if edges[-1] else 0
        nxt = int(np.searchsorted(ends, begun + CHUNK, side="left")) + 1
        edges.append(min(max(nxt, edges[-1] + 1), len(lengths)))
    return edges


_COLUMNS = ("a_entropy", "a_varentropy", "b_entropy", "b_varentropy")
_COLUMNS += ("position", "gap_z2", "gap_n", "floor_z2", "floor_n")


def _slice(tokens: Tokens, lo: int, hi: int) -> Tokens:
    more: dict[str, Any] = {}
    for name in _COLUMNS:
        if name in tokens.__dict__:
            more[name] = getattr(tokens, name)[lo:hi]
    if "exact" in tokens.__dict__:
        more["exact"] = {k: v[lo:hi] for k, v in tokens.exact.items()}
    return Tokens(tokens.a[lo:hi], tokens.b[lo:hi], **more)


def _join(pieces: list[SegmentSums], n: int) -> SegmentSums:
    if not pieces:
        return SegmentSums(np.zeros((2, n)), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64))
    large: dict[int, int] = {}
    begun = 0
    for piece in pieces:
        large |= {i + begun: v for i, v in piece.large.items()}
        begun += len(piece.n)
    levels = np.concatenate([p.levels for p in pieces], axis=1)
    return SegmentSums(
        levels, np.concatenate([p.n for p in pieces]), np.concatenate([p.nonfinite for p in pieces]), large
    )


def _sequence_sums(out: Sums, view: Sequences, rows: IntArray, n: int, terms: dict[str, Any]) -> dict[str, SegmentSums]:
    """Each sequence is a segment of one term, so that sequences and tokens are added into clusters alike."""
    found: dict[str, SegmentSums] = {}
    lengths = np.zeros(n, dtype=np.int64)
    lengths[rows] = 1
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if n else lengths
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for key, (term, reducers) in terms.items():
            x = np.ascontiguousarray(term(NUMPY, view), dtype=np.float64)
            if "sum" in reducers:
                found[key] = segment_sums(x, starts, lengths)
            if reducers & {"max", "min"}:
                _add_extremes(out, key, x)
    return found


def _add_extremes(out: Sums, key: str, x: FloatArray) -> None:
    good = x[np.isfinite(x)]
    total = Total(n=len(good), nonfinite=len(x) - len(good))
    if len(good):
        total.greatest, total.least = float(good.max()) + 0.0, float(good.min()) + 0.0
    out.totals.setdefault(f"extremes:{key}", Total()).add(total)


def _add_rows(out: Sums, parts: dict[str, SegmentSums], clusters: _Clusters) -> None:
    """Totals and cluster rows by key; sums that several keys share are added into clusters once."""
    unlike = {id(sums): sums for sums in parts.values()}
    ids, of_sequence = clusters.ids, clusters.of_sequence
    there = np.zeros(len(ids), dtype=bool)
    for sums in unlike.values():
        there[of_sequence[sums.n > 0]] = True
    if int(there.sum()) > MAX_ROWS:
        out.bucketed = True
        buckets, number = np.unique([i % MAX_ROWS for i in ids], return_inverse=True)
        ids, of_sequence = buckets.tolist(), number.ravel()[of_sequence]
    done: dict[int, tuple[Total, dict[int, tuple[int, int]]]] = {}
    for at, sums in unlike.items():
        totals, counts = group_sums(sums, of_sequence, len(ids))
        rows = {i: (total, n) for i, total, n in zip(ids, totals, counts, strict=True) if n}
        done[at] = Total(sum(totals), sum(counts), int(sums.nonfinite.sum())), rows
    for key, sums in parts.items():
        total, rows = done[id(sums)]
        out.totals[key], out.rows[key] = replace(total), dict(rows)


# -- counts of states, histograms, places ------------------------------------------------------------------------------


def _counts(pairs: LogprobPairs, base: BoolArray, scored: BoolArray, odd: Mapping[str, BoolArray]) -> dict[str, int]:
    """How many tokens there are, and in which state each side's values are: nothing is left out uncounted."""
    n = lambda mask: int(np.count_nonzero(mask))
    counts = {
        "tokens": len(pairs.token_ids),
        "sequences": len(pairs),
        "viewed": n(base),
        "scored": n(scored),
        "support_violations": n(odd["support"]) if "support" in odd else 0,
        "both_neg_inf": 0,
        "drawn": n(pairs.drawn),
        "drawn_by_a": n(base & pairs.drawn) if pairs.drawn_by == "a" else 0,
        "viewed_sequences": n(selected_segments(pairs.offsets, base)[1]),
        "not_estimable": n(base & ~np.repeat(pairs.estimable, np.diff(pairs.offsets))),
    }
    sides = (("a", pairs.a, pairs.a_valid), ("b", pairs.b, pairs.b_valid))
    for side, _, _ in sides:
        counts |= {f"{side}_{state}": 0 for state in ("null", "nan", "neg_inf", "pos_inf", "positive")}
    for side, x, valid in sides if odd else ():
        seen = base & valid
        counts |= {
            f"{side}_null": n(base & ~valid),
            f"{side}_nan": n(seen & np.isnan(x)),
            f"{side}_neg_inf": n(seen & np.isneginf(x)),
            f"{side}_pos_inf": n(seen & np.isposinf(x)),
            f"{side}_positive": n(seen & (x > POSITIVE_ABOVE) & np.isfinite(x)),
        }
    if odd:
        both = base & pairs.a_valid & pairs.b_valid
        counts["both_neg_inf"] = n(both & np.isneginf(pairs.a) & np.isneginf(pairs.b))
    return counts


def states(pairs: LogprobPairs, base: BoolArray, scored: BoolArray) -> dict[str, BoolArray]:
    """Masks of the states that a finding names by place; none where every token in `base` is in order."""
    positive = pairs.a > POSITIVE_ABOVE
    positive |= pairs.b > POSITIVE_ABOVE
    if not positive.any() and np.count_nonzero(base) == np.count_nonzero(scored):
        return {}
    both = base & pairs.a_valid & pairs.b_valid
    a_inf, b_inf = np.isneginf(pairs.a), np.isneginf(pairs.b)
    nan = (pairs.a_valid & (np.isnan(pairs.a) | np.isposinf(pairs.a))) | (
        pairs.b_valid & (np.isnan(pairs.b) | np.isposinf(pairs.b))
    )
    positive = np.zeros(len(base), dtype=bool)
    for x in (pairs.a, pairs.b):
        positive |= (x > POSITIVE_ABOVE) & np.isfinite(x)
    return {
        "support": both & (a_inf != b_inf),
        "nonfinite": base & nan,
        "positive": base & positive,
        "null_a": base & ~pairs.a_valid,
        "null_b": base & ~pairs.b_valid,
    }


def _places(pairs: LogprobPairs, scored: BoolArray, odd: Mapping[str, BoolArray]) -> dict[str, list[Place]]:
    size = np.abs(pairs.log_ratio, where=scored, out=np.zeros(len(scored)))
    found = {"tokens": _worst_tokens(pairs, size)}
    for name, mask in odd.items():
        at = np.flatnonzero(mask)
        if len(at):
            found[name] = keep_worst(name, (_place(pairs, int(i), 0.0) for i in _smallest(pairs, at)))
    return found


def _smallest(pairs: LogprobPairs, at: IntArray) -> IntArray:
    """All candidates that could be among the first by record id and position, without building every Place."""
    sequence = np.searchsorted(pairs.offsets, at, side="right") - 1
    if len(at) <= 64:
        return at
    ids = sorted({pairs.record_ids[i] for i in np.unique(sequence).tolist()})[:WORST_TOKENS]
    kept = [i for i, name in enumerate(pairs.record_ids) if name in set(ids)]
    return at[np.isin(sequence, kept)]


def _worst_tokens(pairs: LogprobPairs, size: FloatArray) -> list[Place]:
    if not len(size) or not size.any():
        return []
    k = min(WORST_TOKENS, len(size))
    # the k-th largest of the blocks' maxima bounds the k-th largest from below: few tokens are left to sort
    tops = np.maximum.reduceat(size, np.arange(0, len(size), max(1, len(size) // 4096)))
    at = np.flatnonzero(size >= np.partition(tops, -k)[-k]) if len(tops) >= k else np.arange(len(size))
    least = max(float(np.partition(size[at], -k)[-k]), np.nextafter(0, 1))
    at = at[size[at] >= least]
    if len(at) > 64 * WORST_TOKENS:  # many equal values: keep all above, then the first of the ties
        at = np.concatenate([np.flatnonzero(size > least), _smallest(pairs, np.flatnonzero(size == least))])
    return keep_worst("tokens", (_place(pairs, int(i), -float(size[i])) for i in at))


def _place(pairs: LogprobPairs, i: int, key: float) -> Place:
    s = int(np.searchsorted(pairs.offsets, i, side="right")) - 1
    text = lambda x, valid: repr(float(x[i])) if valid[i] else "null"
    return Place(
        key,
        pairs.record_ids[s],
        i - int(pairs.offsets[s]),
        int(pairs.token_ids[i]),
        text(pairs.a, pairs.a_valid),
        text(pairs.b, pairs.b_valid),
    )


def _worst_sequences(pairs: LogprobPairs, view: Sequences, rows: IntArray) -> list[Place]:
    """`position` holds the sequence's token count; a and b its summed log-probs."""
    size = np.nan_to_num(np.abs(view.log_ratio), nan=0.0, posinf=np.inf)
    order = np.argsort(-size, kind="stable")[: 8 * WORST_SEQUENCES]
    if len(order) < len(size):
        order = np.flatnonzero(size >= size[order[-1]])
    places = [
        Place(
            -float(size[j]),
            pairs.record_ids[int(rows[j])],
            int(view.tokens[j]),
            -1,
            repr(float(view.a[j])),
            repr(float(view.b[j])),
        )
        for j in order.tolist()
        if size[j] > 0
    ]
    return keep_worst("sequences", places)


def _add_histograms(out: Sums, pairs: LogprobPairs, scored: BoolArray, clusters: _Clusters) -> None:
    group = np.repeat(clusters.group, np.diff(pairs.offsets))[scored]
    out.histograms["log_ratio"] = Histogram.of(pairs.log_ratio[scored], group)


def _sequence_histograms(out: Sums, view: Sequences, group: IntArray) -> None:
    for name, x in (("sequence_log_ratio", view.log_ratio), ("mean_log_ratio", view.mean_log_ratio)):
        good = np.isfinite(x)
        out.histograms[name] = Histogram.of(x[good], group[good])


def _add_floor(out: Sums, pairs: LogprobPairs, mask: BoolArray, clusters: _Clusters) -> None:
    """Histograms of the standardised gap and of the variants' own; sums over another scale must not be added to it."""
    floor = pairs.floor
    assert floor is not None
    out.metrics = tuple(sorted({*out.metrics, f"scale:{floor.digest}"}))
    group = np.repeat(clusters.group, np.diff(pairs.offsets))
    with np.errstate(invalid="ignore", over="ignore"):
        gap, variants = pairs.log_ratio / floor.scale, floor.gaps / floor.scale
    on = mask & floor.counted & np.isfinite(gap)
    out.histograms["standardised_gap"] = Histogram.of(gap[on], group[on])
    found = mask & floor.counted & np.isfinite(variants)
    each = np.broadcast_to(group, variants.shape)
    out.histograms["standardised_floor"] = Histogram.of(variants[found], each[found])
