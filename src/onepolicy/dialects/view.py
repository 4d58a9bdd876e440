"""What a framework's metric sees of a batch: the tokens it masks in, sequence after sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from onepolicy.dialects.rounding import exp
from onepolicy.errors import ContentError, UnknownName
from onepolicy.rollouts import Rollouts
from onepolicy.types import BoolArray, FloatArray, IntArray, Values

#: Which tokens are in: those that are trained on; those the sampler drew; all of the reply, masked or not; all that the
#: sampler has a value for, the prompt's too.
MASKS = ("trained", "drawn", "reply", "all")


@dataclass(frozen=True, eq=False)
class View:
    """N tokens of S sequences, nats, in float64 (or in float32, as `prepared`).

    `sampler`, and of the scorer `old` (before the update) and `current` (inside it): log-probs `[N]`, NaN where one is
    missing, None for a policy that is not there. `entropy` (the scorer's) and `advantages`: `[N]` or None. `lengths`:
    `[S]`, how many tokens of each sequence are in; 0 is allowed, and some frameworks count such a sequence. `width`:
    tokens of the longest reply, masked or not, which is what a batch is padded to. `runs`: lengths of the unbroken
    runs of tokens inside the sequences, in order.
    """

    sampler: FloatArray
    lengths: IntArray
    old: Any = None
    current: Any = None
    entropy: Any = None
    advantages: Any = None
    width: int = 0
    runs: IntArray | None = None
    scorer: Any = None  # one of the two, see `prepared`

    def __post_init__(self) -> None:
        n = len(self.sampler)
        for name in ("old", "current", "entropy", "advantages", "scorer"):
            column = getattr(self, name)
            if column is not None and len(column) != n:
                raise ContentError(f"view: {name} has {len(column)} values, the sampler {n}; wanted one a token")
        if int(self.lengths.sum()) != n:
            raise ContentError(f"view: lengths add up to {int(self.lengths.sum())}, the sampler has {n} tokens")

    def prepared(self, scorer: str, single: bool) -> View:
        """The same with `scorer` being `old` or `current`, all columns in float32 if `single`."""
        chosen = replace(self, scorer=getattr(self, scorer))
        if not single:
            return chosen
        names = ("sampler", "old", "current", "entropy", "advantages", "scorer")
        columns = {k: None if getattr(chosen, k) is None else getattr(chosen, k).astype(np.float32) for k in names}
        return replace(chosen, **columns)

    def has(self, name: str) -> bool:
        """Whether the column is there."""
        return getattr(self, name) is not None

    # -- what most formulas start from ---------------------------------------------------------------------------------

    @cached_property
    def d(self) -> Any:
        """`[N]` log p_scorer - log p_sampler."""
        return self.scorer - self.sampler

    @cached_property
    def r(self) -> Any:
        """`[N]` the ratio e^d."""
        return exp(self.d)

    @cached_property
    def p(self) -> Any:
        """`[N]` the sampler's probability of the token."""
        return exp(self.sampler)

    @cached_property
    def q(self) -> Any:
        """`[N]` the scorer's."""
        return exp(self.scorer)

    @cached_property
    def update(self) -> Any:
        """`[N]` log p_current - log p_old."""
        return self.current - self.old

    @cached_property
    def filled(self) -> BoolArray:
        """`[S]`: the sequence has tokens."""
        return self.lengths > 0

    def sums(self, x: Any) -> Any:
        """`[S]` sums of `[N]` over each sequence, 0 where it has no tokens."""
        return _segment_sums(x, self.lengths)

    def means(self, x: Any) -> Any:
        """`[S]` means of `[N]` over each sequence, 0 where it has no tokens."""
        return self.sums(x) / np.maximum(self.lengths, 1).astype(x.dtype)

    def spread(self, x: Any) -> Any:
        """`[N]`: a sequence's value `[S]` at each of its tokens."""
        return np.repeat(x, self.lengths)

    def run_means(self, x: Any) -> Any:
        """`[N]`: the mean of `[N]` over the run that a token is in."""
        runs = self.lengths[self.filled] if self.runs is None else self.runs
        return np.repeat(_segment_sums(x, runs) / runs.astype(x.dtype), runs)

    def any(self, x: Any) -> Any:
        """`[S]`: whether one of its tokens is so."""
        return self.sums(x.astype(np.float64)) > 0

    def greatest(self, x: Any) -> Any:
        """`[F]`: the greatest of `[N]` in each of the sequences that have tokens."""
        starts = (np.cumsum(self.lengths) - self.lengths)[self.filled]
        return np.maximum.reduceat(x, starts) if len(starts) else np.zeros(0)

    def memo(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for a key."""
        kept: dict[tuple[Any, ...], Any] = self.__dict__.setdefault("_kept", {})
        if key not in kept:
            kept[key] = make()
        return kept[key]

    # -- from rollouts -------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, rollouts: Rollouts, mask: str = "trained", *, old: str = "old", current: str = "current") -> View:
        """The rollouts' tokens under `mask`; `old`, `current`: the names of the scorings that stand for them.

        A token whose log-prob is null stays in, as NaN: what a framework makes of it is its own affair.
        Errors: `UnknownName` for a mask; `ContentError` without the sampler's log-probs.
        """
        if "sampler" not in rollouts.scorings:
            raise ContentError("no column 'sampler_logprobs': a framework's metric compares the sampler with a scorer")
        keep = _mask(rollouts, mask)
        before = np.concatenate([[0], np.cumsum(keep, dtype=np.int64)])
        column = lambda x: None if x is None else _values(x)[keep]
        side = [rollouts.scorings.get(name) for name in (old, current)]
        policies = [None if s is None else column(s.logprobs) for s in side]
        entropies = [s.entropy for s in side if s is not None and s.entropy is not None]
        return cls(
            _values(rollouts.scorings["sampler"].logprobs)[keep],
            np.diff(before[rollouts.offsets]),
            old=policies[0],
            current=policies[1],
            entropy=column(next(iter(entropies), None)),
            advantages=column(rollouts.tokens.get("advantages")),
            width=int(_reply_lengths(rollouts).max(initial=0)),
            runs=_runs(keep, rollouts.offsets),
        )


def views(rollouts: Rollouts, mask: str = "trained", **names: str) -> Iterator[tuple[int | None, View]]:
    """(step, view) of each step of the rollouts, in order; None for sequences of no known step."""
    col = rollouts.records.get("step")
    if col is None or not col.mask().any():
        yield None, View.of(rollouts, mask, **names)
        return
    known, steps = col.mask(), col.values
    if not known.all():
        yield None, View.of(rollouts.take(~known), mask, **names)
    for step in np.unique(steps[known]).tolist():
        yield int(step), View.of(rollouts.take(known & (steps == step)), mask, **names)


def _mask(rollouts: Rollouts, mask: str) -> BoolArray:
    if mask not in MASKS:
        raise UnknownName("mask", mask, MASKS)
    if mask == "all":
        return rollouts.scorings["sampler"].logprobs.mask()
    if mask == "reply":
        return _positions(rollouts) >= np.repeat(_prompts(rollouts), rollouts.lengths)
    drawn, trained = rollouts.drawn, rollouts.trained
    return drawn if mask == "drawn" or trained is None else drawn & trained


def _positions(rollouts: Rollouts) -> IntArray:
    return np.arange(rollouts.n_tokens) - np.repeat(rollouts.offsets[:-1], rollouts.lengths)


def _prompts(rollouts: Rollouts) -> IntArray:
    """`[S]` prompt lengths: the recorded ones, else up to the first drawn token; at least the token without context."""
    drawn = _segment_sums((~_seen(rollouts.drawn, rollouts.offsets)).astype(np.float64), rollouts.lengths)
    out = np.minimum(drawn.astype(np.int64), rollouts.lengths)
    col = rollouts.records.get("prompt_length")
    if col is not None:
        out = np.where(col.mask(), col.values, out)
    return np.maximum(out, 1)


def _seen(x: BoolArray, offsets: IntArray) -> BoolArray:
    """`[T]`: this token of the sequence or one before it is True."""
    upto = np.cumsum(x, dtype=np.int64)
    before = np.concatenate([[0], upto])[offsets[:-1]]
    return upto > np.repeat(before, np.diff(offsets))


def _reply_lengths(rollouts: Rollouts) -> IntArray:
    return np.maximum(rollouts.lengths - _prompts(rollouts), 0)


def _values(col: Values) -> FloatArray:
    out = np.array(col.values, dtype=np.float64)
    if col.valid is not None:
        out[~col.valid] = np.nan
    return out


def _runs(keep: BoolArray, offsets: IntArray) -> IntArray:
    """Lengths of the unbroken runs of True inside sequences."""
    starts = keep.copy()
    starts[1:] &= ~keep[:-1]
    first = offsets[:-1][np.diff(offsets) > 0]
    starts[first] = keep[first]
    edges = np.concatenate([np.cumsum(keep)[starts] - 1, [int(keep.sum())]]) if len(keep) else np.zeros(1)
    return np.diff(edges).astype(np.int64)


def _segment_sums(x: Any, lengths: IntArray) -> Any:
    out = np.zeros(len(lengths), dtype=x.dtype)
    full = lengths > 0
    if full.any():
        out[full] = np.add.reduceat(x, (np.cumsum(lengths) - lengths)[full])
    return out
