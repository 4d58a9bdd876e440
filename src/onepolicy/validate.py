"""Breaks of the column contract that make data unusable. What can be judged instead is a finding, not an error.

Nulls at drawn tokens, NaN, infinities and positive log-probs pass here: the integrity checks report them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onepolicy import schema
from onepolicy.errors import ContentError
from onepolicy.records import FIRST_IS_NULL
from onepolicy.rollouts import Rollouts
from onepolicy.types import BoolArray
from onepolicy.values import quoted

#: An entropy is at least 0; rounding of a nearly certain distribution may go below by about this much (nats).
ENTROPY_SLACK = 1e-6


def validate(rollouts: Rollouts) -> None:
    """Errors: `ContentError`, one line with record, position, got, wanted, for the first break found."""
    if len(rollouts) == 0 or rollouts.n_tokens == 0:
        raise ContentError(f"the rollouts are empty: {max(len(rollouts), 0)} sequences, 0 tokens; nothing to compare")
    validate_columns(rollouts)


def validate_columns(rollouts: Rollouts, first: int = 0) -> None:
    """`validate`, but a batch without tokens is fine: it may be one of many. `first`: records before it in its file."""
    for check in CHECKS:
        check(rollouts, first)


def _refuse(
    rollouts: Rollouts, first: int, bad: BoolArray, column: str, wanted: str, got: Callable[[int], object]
) -> None:
    """Raises for the first True of `bad`, `[T]`."""
    if not bad.any():
        return
    at = int(bad.argmax())
    i = int(np.searchsorted(rollouts.offsets, at, side="right")) - 1
    place = f"record {_name(rollouts, i, first)}, column {column!r}, position {at - int(rollouts.offsets[i])}"
    more = f" ({int(bad.sum()) - 1} more like it)" if bad.sum() > 1 else ""
    raise ContentError(f"{place}: got {quoted(got(at))}, wanted {wanted}{more}")


def _name(rollouts: Rollouts, i: int, first: int) -> str:
    recorded = rollouts.record("record_id", i)
    return str(first + i + 1) if recorded is None else f"{first + i + 1} ({quoted(recorded)})"


def _offsets(rollouts: Rollouts, first: int) -> None:
    steps = rollouts.lengths
    if rollouts.offsets[0] != 0 or bool((steps < 0).any()):
        at = int((steps < 0).argmax()) + 1 if rollouts.offsets[0] == 0 else 0
        got = int(rollouts.offsets[at])
        wanted = "0" if at == 0 else f"at least {int(rollouts.offsets[at - 1])}"
        raise ContentError(f"offsets[{at}]: got {got}, wanted {wanted}; offsets start at 0 and never decrease")


def _lists(rollouts: Rollouts, first: int) -> None:
    for name, lists in rollouts.lists.items():
        steps, end = np.diff(lists.offsets), int(lists.offsets[-1])
        if lists.offsets[0] != 0 or bool((steps < 0).any()) or end != len(lists.values):
            raise ContentError(
                f"column {name!r}: its offsets go from {int(lists.offsets[0])} to {end}, wanted 0 to "
                f"{len(lists.values)} (its number of values) without decreasing"
            )


def _token_ids(rollouts: Rollouts, first: int) -> None:
    col = rollouts.tokens["token_ids"]
    _refuse(rollouts, first, ~col.mask(), "token_ids", "an id at every token", lambda at: None)
    negative, wanted = col.values < 0, "an id of at least 0 (padding is left out)"
    _refuse(rollouts, first, negative, "token_ids", wanted, lambda at: col.values[at])


def _prompt_length(rollouts: Rollouts, first: int) -> None:
    col = rollouts.records.get("prompt_length")
    if col is None:
        return
    bad = np.flatnonzero(col.mask() & ((col.values < 0) | (col.values > rollouts.lengths)))
    if len(bad):
        i = int(bad[0])
        raise ContentError(
            f"record {_name(rollouts, i, first)}, column 'prompt_length': got {int(col.values[i])}, wanted 0 to "
            f"{int(rollouts.lengths[i])}, the length of the sequence"
        )


def _drawn_in_prompt(rollouts: Rollouts, first: int) -> None:
    col = rollouts.records.get("prompt_length")
    if col is None:
        return
    prompt = np.where(col.mask(), col.values, 0)
    position = np.arange(rollouts.n_tokens) - np.repeat(rollouts.offsets[:-1], rollouts.lengths)
    bad = rollouts.drawn & (position < np.repeat(prompt, rollouts.lengths))
    wanted = "false inside the prompt (see 'prompt_length'): the sampler draws replies only"
    _refuse(rollouts, first, bad, "drawn", wanted, lambda at: True)


def _semantics(rollouts: Rollouts, first: int) -> None:
    known = ", ".join(schema.SEMANTICS)
    col = rollouts.records.get("logprob_semantics")
    for i in () if col is None else np.flatnonzero(col.mask()):
        if col is not None and col.values[i] not in schema.SEMANTICS:
            place = f"record {_name(rollouts, int(i), first)}, column 'logprob_semantics'"
            raise ContentError(f"{place}: got {quoted(col.values[i])}, wanted one of {known}")
    for name, scoring in rollouts.scorings.items():
        if scoring.semantics not in (None, *schema.SEMANTICS):
            raise ContentError(f"scoring {name!r}: semantics: got {quoted(scoring.semantics)}, wanted one of {known}")


def _scorings(rollouts: Rollouts, first: int) -> None:
    no_context = np.zeros(rollouts.n_tokens, dtype=bool)
    no_context[rollouts.offsets[:-1][rollouts.lengths > 0]] = True
    for name, scoring in rollouts.scorings.items():
        for what in ("logprobs", "entropy", "varentropy"):
            col = getattr(scoring, what)
            if col is None:
                continue
            column, values, valid = f"{name}_{what}", col.values, col.mask()
            _refuse(rollouts, first, no_context & valid, column, f"null; {FIRST_IS_NULL}", values.__getitem__)
            if what == "entropy":
                negative = valid & (values < -ENTROPY_SLACK)
                _refuse(rollouts, first, negative, column, "at least 0 (nats)", values.__getitem__)


#: In this order: later ones index by offsets and lengths that earlier ones have proven.
CHECKS = (_offsets, _lists, _token_ids, _prompt_length, _drawn_in_prompt, _semantics, _scorings)
