"""Alignment: two scorings of the same tokens, proven the same. It refuses; it never guesses, cuts or re-encodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import AlignmentError
from onepolicy.rollouts import Rollouts
from onepolicy.types import BoolArray, FloatArray, LogprobPairs, Scoring, Values

#: Below this temperature engines take the argmax.
GREEDY = 1e-5
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}


def align(
    rollouts: Rollouts,
    a: str = "sampler",
    b: str = "old",
    *,
    other: Rollouts | None = None,
    drawn_by: Literal["a", "b", "none", "auto"] = "auto",
) -> LogprobPairs:
    """Pairs scoring `a` of `rollouts` with scoring `b` of the same rollouts, or of `other` (another file).

    `drawn_by`: which of the two drew the tokens that are marked `drawn`; "auto": the one named `sampler`.
    `other` is matched by recorded record id where both files have them, else by order.

    Errors: `AlignmentError` for a scoring that is not there, a scoring aligned with itself, sequences missing on one
    side, unequal lengths, unequal tokens (with the place of the first difference), nothing drawn.
    """
    side_b = rollouts if other is None else matched(rollouts, other)
    left, right = _scoring(rollouts, a, "first"), _scoring(side_b, b, "second")
    _refuse_itself(left, right, a, b, same=other is None)
    if len(rollouts) == 0 or rollouts.n_tokens == 0:
        raise AlignmentError("no tokens to compare: the rollouts are empty")
    unit, keys = rollouts.clusters()
    told = {
        f"{side}_{what}": _optional(getattr(scoring, what))
        for side, scoring in (("a", left), ("b", right))
        for what in ("entropy", "varentropy")
    }
    entropies: dict[str, Any] = _without_greedy(told, rollouts)
    return LogprobPairs(
        names=(a, b),
        offsets=rollouts.offsets,
        token_ids=rollouts.token_ids,
        a=_values(left.logprobs),
        b=_values(right.logprobs),
        a_valid=left.logprobs.mask(),
        b_valid=right.logprobs.mask(),
        drawn=rollouts.drawn,
        trained=rollouts.trained,
        drawn_by=_who_drew(a, b, drawn_by),
        estimable=estimable(rollouts),
        record_ids=tuple(rollouts.content_ids()),
        cluster_keys=tuple(keys),
        cluster_unit=unit,
        a_distributions=left.distributions,
        b_distributions=right.distributions,
        **entropies,
    )


def _without_greedy(entropies: dict[str, FloatArray | None], rollouts: Rollouts) -> dict[str, FloatArray | None]:
    """Where the argmax was taken nothing was drawn, and surprisal says nothing."""
    heat = [rollouts.record("temperature", i) for i in range(len(rollouts))]
    greedy = np.array([x is not None and x < GREEDY for x in heat], dtype=bool)
    if not greedy.any():
        return entropies
    mask = np.repeat(greedy, rollouts.lengths)
    return {k: None if v is None else np.where(mask, np.nan, v) for k, v in entropies.items()}


def _scoring(rollouts: Rollouts, name: str, which: str) -> Scoring:
    if name not in rollouts.scorings:
        have = ", ".join(f"{k}_logprobs" for k in rollouts.scorings) or "no log-probs at all"
        raise AlignmentError(f"the {which} side has no column '{name}_logprobs'; it has {have}")
    return rollouts.scorings[name]


def _refuse_itself(left: Scoring, right: Scoring, a: str, b: str, same: bool) -> None:
    """Equal values from two engines are fine; one scoring seen twice proves nothing."""
    if same and a == b:
        raise AlignmentError(f"scoring {a!r} would be compared with itself; name two different scorings")
    shared = np.shares_memory(left.logprobs.values, right.logprobs.values) and len(left.logprobs.values)
    copied = left.scoring_id is not None and left.scoring_id == right.scoring_id
    if left is right or shared or copied:
        raise AlignmentError(
            f"{a!r} and {b!r} are one and the same scoring (id {left.scoring_id}); "
            "a comparison needs two engines or two runs"
        )


def _who_drew(a: str, b: str, drawn_by: str) -> Literal["a", "b"] | None:
    if drawn_by == "auto":
        return "a" if a == "sampler" else "b" if b == "sampler" else None
    return {"a": "a", "b": "b", "none": None}[drawn_by]  # type: ignore[return-value]


def _values(col: Values) -> FloatArray:
    out = np.array(col.values, dtype=np.float64)
    if col.valid is not None:
        out[~col.valid] = np.nan
    return out


def _optional(col: Values | None) -> FloatArray | None:
    return None if col is None else _values(col)


def estimable(rollouts: Rollouts) -> BoolArray:
    """`[S]`: the sampler's reported distribution is the one it drew from, as far as that is declared.

    `processed` is; `temperature` with no truncation or penalties; `raw` at temperature 1 besides; greedy replies never.
    Undeclared counts as yes (and is noted by `check`): nothing contradicts it.
    """
    out = np.ones(len(rollouts), dtype=bool)
    for i in range(len(rollouts)):
        semantics, temperature = (rollouts.record(n, i) for n in ("logprob_semantics", "temperature"))
        if temperature is not None and temperature < GREEDY:
            out[i] = False  # the argmax was taken: nothing was drawn
            continue
        if semantics in (None, "processed"):
            continue
        changed = [n for n, neutral in _NEUTRAL.items() if rollouts.record(n, i) not in (None, *neutral)]
        hot = semantics == "raw" and temperature not in (None, 1.0)
        out[i] = not (changed or hot)
    return out


def matched(rollouts: Rollouts, other: Rollouts) -> Rollouts:
    """The sequences of `other` in the order of `rollouts`, tokens proven equal.

    Errors: `AlignmentError` naming the first record and position that differ.
    """
    index = _pairing(rollouts, other)
    picked = other if index is None else other.take(index)
    ids = rollouts.record_ids()
    differing = np.flatnonzero(rollouts.lengths != picked.lengths)
    same_prefix = _first_difference(rollouts, picked)
    if same_prefix is not None:
        i, at, left, right = same_prefix
        raise AlignmentError(
            f"record {ids[i]!r}: tokens differ at position {at}: got {left} on the first side, {right} on the second; "
            "log-probs of different tokens are never compared"
        )
    if len(differing):
        i = int(differing[0])
        raise AlignmentError(
            f"record {ids[i]!r}: {int(rollouts.lengths[i])} tokens on the first side, {int(picked.lengths[i])} on the "
            f"second ({len(differing)} such records); nothing is cut to fit"
        )
    return picked


def _pairing(rollouts: Rollouts, other: Rollouts) -> list[int] | None:
    """Rows of `other` for each sequence, by recorded id; None when the order itself is the pairing."""
    if len(rollouts) != len(other):
        hint = "the sides hold different sequences"
        raise AlignmentError(f"{len(rollouts)} sequences on the first side, {len(other)} on the second; {hint}")
    if not (_all_named(rollouts) and _all_named(other)):
        return None
    where: Mapping[str, int] = {name: i for i, name in enumerate(other.record_ids())}
    missing = [name for name in rollouts.record_ids() if name not in where]
    if missing:
        raise AlignmentError(f"record {missing[0]!r} is missing on the second side ({len(missing)} such records)")
    return [where[name] for name in rollouts.record_ids()]


def _all_named(rollouts: Rollouts) -> bool:
    col = rollouts.records.get("record_id")
    return col is not None and bool(col.mask().all())


def _first_difference(x: Rollouts, y: Rollouts) -> tuple[int, int, int, int] | None:
    """(sequence, position, id on the first side, id on the second) of the first unequal token of common prefixes."""
    if bool(np.array_equal(x.lengths, y.lengths)):
        bad: NDArray[np.int64] = np.flatnonzero(x.token_ids != y.token_ids)
        if not len(bad):
            return None
        first = int(bad[0])
        i = int(np.searchsorted(x.offsets, first, side="right")) - 1
        return i, first - int(x.offsets[i]), int(x.token_ids[first]), int(y.token_ids[first])
    for i in range(len(x)):
        left, right = x.token_ids[x.sequence(i)], y.token_ids[y.sequence(i)]
        n = min(len(left), len(right))
        bad = np.flatnonzero(left[:n] != right[:n])
        if len(bad):
            return i, int(bad[0]), int(left[bad[0]]), int(right[bad[0]])
    return None
