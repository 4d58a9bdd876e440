"""Which bin a token is in: by place, by probability, by what kind of token it is, by who drew it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onepolicy.profiles.base import Binned, Seen
from onepolicy.types import BoolArray, FloatArray, IntArray, Lists

#: Upper edges of the sampler's probability, from the unlikely on, and the bins' names.
PROBABILITIES: tuple[tuple[float, str], ...] = (
    (1e-4, "p < 0.0001"), (1e-3, "0.0001 - 0.001"), (1e-2, "0.001 - 0.01"), (0.1, "0.01 - 0.1"), (0.5, "0.1 - 0.5"),
    (0.9, "0.5 - 0.9"), (0.99, "0.9 - 0.99"), (0.999, "0.99 - 0.999"), (float("inf"), "p > 0.999"),
)  # fmt: skip
#: Upper edges of the entropy, nats.
ENTROPIES = ((0.01, "H < 0.01"), (0.1, "0.01 - 0.1"), (0.5, "0.1 - 0.5"), (1.0, "0.5 - 1"), (2.0, "1 - 2"),
             (4.0, "2 - 4"), (float("inf"), "H > 4"))  # fmt: skip
#: Padding as a share of the padded row.
PADDINGS = ("none", "up to 1/4", "up to 1/2", "up to 3/4", "more")
#: The reply is cut into so many equal parts.
PARTS = 16


def position(seen: Seen) -> Binned:
    """Octaves of the token's place in the reply: 0, 1, 2, 4, 8, ..."""
    octave = np.frexp(np.arange(seen.counts.max(initial=0), dtype=np.float64))[1].astype(np.int64)
    return octave[seen.index], ["0", *(str(1 << k) for k in range(30))]


def part(seen: Seen) -> Binned:
    """Sixteenths of the reply, replies shorter than that left out."""
    # part k is of the tokens whose place times 16 is from k * n on, below (k + 1) * n
    edges = -(-seen.counts[:, None] * np.arange(PARTS + 1) // PARTS)
    part = np.where(seen.counts >= PARTS, np.arange(PARTS)[:, None], -1).T
    return np.repeat(part.reshape(-1), np.diff(edges, axis=1).reshape(-1)), [str(k) for k in range(PARTS)]


def probability(seen: Seen) -> Binned:
    edges = np.log([p for p, _ in PROBABILITIES[:-1]])
    return steps(seen.a, edges), [name for _, name in PROBABILITIES]


def entropy(seen: Seen) -> Binned:
    """By the scorer's entropy where it tells it, else the sampler's."""
    told = seen.pairs.b_entropy if seen.pairs.b_entropy is not None else seen.pairs.a_entropy
    if told is None:
        return None
    x: FloatArray = told[seen.at]
    edges = [e for e, _ in ENTROPIES[:-1]]
    return np.where(np.isnan(x), -1, steps(x, edges)), [name for _, name in ENTROPIES]


def steps(x: FloatArray, edges: Sequence[float] | FloatArray, passes: np.ufunc = np.greater_equal) -> IntArray:
    """`[N]` how many edges x `passes`: for a few of them several times as fast as `searchsorted`."""
    out = np.zeros(len(x), dtype=np.int8)
    for edge in edges:
        out += passes(x, edge)
    return out.astype(np.int64)


def place(seen: Seen) -> Binned:
    """First token, last token, the rest."""
    out, some = np.ones(len(seen), dtype=np.int64), seen.counts > 0
    out[seen.starts[some]] = 0
    out[(seen.starts + seen.counts - 1)[some]] = 2
    return out, ["first", "inner", "last"]


def repeated(seen: Seen) -> Binned:
    """Whether the token has been drawn before in this reply, has stood in the prompt, or is new."""
    times, in_prompt = seen.repeats
    return np.maximum((times > 0) * 2, in_prompt), ["new", "in the prompt", "in the reply"]


def kept(seen: Seen) -> Binned:
    """Octaves of how many tokens survived top-p, top-k or min-p."""
    lists = seen.rollouts.lists.get("sampling_mask")
    if lists is None:
        return None
    size = np.diff(lists.offsets)[seen.at]
    known = True if lists.valid is None else lists.valid[seen.at]
    octave = np.frexp(size.astype(np.float64))[1].astype(np.int64)
    return np.where(known, octave, -1), ["none", *(str(1 << k) for k in range(24))]


def routes(before: int = 0) -> Callable[[Seen], Binned]:
    """Whether both sides took the same experts in every layer, at the token itself or at the one `before` it.

    Which of the two rows belongs to a log-prob is the dump's own convention: engines store experts at the token that
    was routed, which is the one before the token that is scored; frameworks often shift them.
    """

    def bins(seen: Seen) -> Binned:
        rows = expert_rows(seen, before)
        if rows is None:
            return None
        known = (rows[0] >= 0).any(axis=1) & (rows[1] >= 0).any(axis=1)
        same = (np.sort(rows[0], axis=1) == np.sort(rows[1], axis=1)).all(axis=1)
        return np.where(known, np.where(same, 0, 1), -1), ["same experts", "other experts"]

    return bins


def expert_rows(seen: Seen, before: int = 0) -> tuple[IntArray, IntArray] | None:
    """`[N, L * K]` experts of the sampler and the scorer at each token (or `before` it), layer by layer, -1 where not
    known."""
    ours, theirs = (seen.rollouts.lists.get(n) for n in ("routed_experts", "scorer_routed_experts"))
    if ours is None or theirs is None:
        return None
    width = int(max(np.diff(ours.offsets).max(initial=0), np.diff(theirs.offsets).max(initial=0)))
    inside = seen.at - before >= seen.rollouts.offsets[:-1][seen.sequence]
    at = np.where(inside, seen.at - before, 0)
    first, second = (np.where(inside[:, None], _padded_rows(x, width)[at], -1) for x in (ours, theirs))
    return first, second


def _padded_rows(lists: Lists, width: int) -> IntArray:
    lengths = np.diff(lists.offsets)
    if lists.valid is not None:
        lengths = np.where(lists.valid, lengths, 0)
    out = np.full((len(lengths), width), -1, dtype=np.int64)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    cols = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    out[rows, cols] = lists.values[np.repeat(lists.offsets[:-1], lengths) + cols]
    return out


def lag(seen: Seen) -> Binned:
    """Versions between the weights that drew a token and those that scored it."""
    drew, scored = seen.rollouts.tokens.get("policy_version"), seen.rollouts.records.get("scorer_version")
    if drew is None or scored is None:
        return None
    known = drew.mask()[seen.at] & scored.mask()[seen.sequence]
    gap = np.where(known, scored.values[seen.sequence] - drew.values[seen.at], 0)
    labels = ["-1", *(str(k) for k in range(33))]  # -1: drawn by newer weights than scored it
    return np.where(known, np.clip(gap, -1, 32) + 1, -1), labels


def version(seen: Seen) -> Binned:
    """By the version of the weights that drew the token."""
    drew = seen.rollouts.tokens.get("policy_version")
    if drew is None:
        return None
    values = drew.values[seen.at]
    found, code = np.unique(values, return_inverse=True)
    return np.where(drew.mask()[seen.at], code, -1), [str(int(v)) for v in found]


def span(seen: Seen) -> Binned:
    """Of replies that more than one version drew: the tokens before the first change, and from it on."""
    drew = seen.rollouts.tokens.get("policy_version")
    if drew is None:
        return None
    known = drew.mask()[seen.at]
    values = drew.values[seen.at]
    other = (values != np.repeat(values[seen.starts[seen.counts > 0]], seen.counts[seen.counts > 0])) & known
    changed = np.repeat(seen.per_sequence(other.astype(np.float64)) > 0, seen.counts)
    # from the first token of another version on, whatever comes after it
    after = np.minimum(_running(other, seen.index), 1)
    return np.where(changed & known, after, -1), ["before", "after"]


def _running(marks: BoolArray, index: IntArray) -> IntArray:
    """`[N]` how many marks stand in the sequence up to each token; `index` is the token's place in it."""
    total = np.cumsum(marks)
    first = np.arange(len(marks)) - index
    before = np.where(first > 0, total[np.maximum(first - 1, 0)], 0) if len(marks) else total
    return (total - before).astype(np.int64)


def reused(seen: Seen) -> Binned:
    """Of sequences with a cached prefix: the tokens that stand in it, and those after it."""
    col = seen.rollouts.records.get("cached_prefix_length")
    if col is None:
        return None
    place = seen.at - seen.rollouts.offsets[:-1][seen.sequence]
    length = np.where(col.mask(), col.values, 0)[seen.sequence]
    return np.where(length > 0, np.where(place < length, 0, 1), 2), ["in it", "after it", "no cached prefix"]


def of_record(name: str) -> Callable[[Seen], Binned]:
    """By the value of a record column."""
    return lambda seen: seen.record(name)


def length(seen: Seen) -> Binned:
    """Octaves of the reply's length."""
    return np.frexp(seen.counts.astype(np.float64))[1].astype(np.int64), ["0", *(str(1 << k) for k in range(30))]


def cached(seen: Seen) -> Binned:
    """Whether part of the prompt came from a prefix cache."""
    col = seen.rollouts.records.get("cached_prefix_length")
    if col is None:
        return None
    return np.where(col.mask(), (col.values > 0).astype(np.int64), -1), ["not cached", "cached prefix"]


def padding(seen: Seen) -> Binned:
    """Padding as a share of the padded row: none, up to 1/4, 1/2, 3/4, more."""
    col = seen.rollouts.records.get("padding_length")
    if col is None:
        return None
    share = col.values / np.maximum(col.values + seen.rollouts.lengths, 1)
    code = np.where(col.values == 0, 0, 1 + np.minimum((share * 4).astype(np.int64), 3))
    return np.where(col.mask(), code, -1), PADDINGS


def kinds(table: Sequence[int] | IntArray, names: Sequence[str]) -> Callable[[Seen], Binned]:
    """By the kind of the token's text. `table` `[V]`: the kind of each id, an index into `names`."""
    kind = np.asarray(table, dtype=np.int64)

    def bins(seen: Seen) -> Binned:
        ids = seen.pairs.token_ids[seen.at]
        known = ids < len(kind)
        return np.where(known, kind[np.minimum(ids, len(kind) - 1)], -1), names

    return bins
