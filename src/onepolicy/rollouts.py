"""`Rollouts`: a columnar, ragged batch of sequences and the named scorings of their tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy import schema
from onepolicy.errors import ContentError
from onepolicy.types import IntArray, Lists, Scoring, Values
from onepolicy.values import column_values

__all__ = ["Rollouts", "column_values", "concat", "concat_scorings", "concat_values", "scoring_extras", "take_lists"]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """S sequences, T tokens. `tokens`: `[T]` columns; `records`: `[S]`; `lists`: CSR columns of either level.

    Column names and meanings: `schema.COLUMNS`. Log-probs, entropies and varentropies live in `scorings`, by the name
    of the side (`sampler`, `old`, `current`, `reference`, or a leg's own). A sequence is never cut.
    """

    offsets: IntArray
    tokens: Mapping[str, Values]
    records: Mapping[str, Values] = field(default_factory=dict[str, Values])
    lists: Mapping[str, Lists] = field(default_factory=dict[str, Lists])
    scorings: Mapping[str, Scoring] = field(default_factory=dict[str, Scoring])

    def __post_init__(self) -> None:
        if "token_ids" not in self.tokens:
            raise ContentError("rollouts have no column 'token_ids'; it is the one column that is required")
        if not len(self.offsets):
            raise ContentError("rollouts have no offsets; no sequences is offsets [0]")
        for name, col in self.tokens.items():
            _require_length(name, len(col.values), self.n_tokens, "tokens")
        for name, col in self.records.items():
            _require_length(name, len(col.values), len(self), "sequences")
        for name, lists in self.lists.items():
            of_tokens = schema.COLUMNS[name].level == "token_list"
            wanted, what = (self.n_tokens, "tokens") if of_tokens else (len(self), "sequences")
            _require_length(name, len(lists.offsets) - 1, wanted, what)
        for name, scoring in self.scorings.items():
            for what, col in (("logprobs", scoring.logprobs), *scoring_extras(scoring)):
                _require_length(f"{name}_{what}", len(col.values), self.n_tokens, "tokens")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> IntArray:
        """`[S]` tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return self.tokens["token_ids"].values

    @property
    def drawn(self) -> NDArray[np.bool_]:
        """`[T]`; all False when nothing is known to be drawn (fixed texts)."""
        col = self.tokens.get("drawn")
        return np.zeros(self.n_tokens, dtype=bool) if col is None else col.values & col.mask()

    @property
    def trained(self) -> NDArray[np.bool_] | None:
        """`[T]` False where the loss mask says 0, None without one: a record that has none is trained on, alone or
        beside others that have."""
        col = self.tokens.get("loss_mask")
        return None if col is None else col.values if col.valid is None else col.values | ~col.valid

    def sequence(self, i: int) -> slice:
        """Where the tokens of sequence i stand in the flat columns."""
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))

    def record(self, name: str, i: int) -> Any:
        """The value of a record column for sequence i, None if null or absent."""
        col = self.records.get(name)
        if col is None or (col.valid is not None and not col.valid[i]):
            return None
        value = col.values[i]
        return value.item() if isinstance(value, np.generic) else value  # pyright: ignore[reportUnknownVariableType]

    def with_scoring(self, name: str, scoring: Scoring) -> Rollouts:
        """The same rollouts with one more named scoring; a name that is taken is replaced."""
        return replace(self, scorings={**self.scorings, name: scoring})

    def take(self, index: Iterable[int]) -> Rollouts:
        """The sequences at `index` (or where a boolean `[S]` is True), in that order, with all columns and scorings."""
        rows = _row_numbers(index, len(self))
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        flat = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(int(offsets[-1]))
        return Rollouts(
            offsets,
            {k: v.take(flat) for k, v in self.tokens.items()},
            {k: v.take(rows) for k, v in self.records.items()},
            {
                k: take_lists(v, flat if schema.COLUMNS[k].level == "token_list" else rows)
                for k, v in self.lists.items()
            },
            {k: v.take(flat) for k, v in self.scorings.items()},
        )

    def content_ids(self) -> list[str]:
        """A name for each sequence: the recorded one, else a hash of its ids and sampler log-probs.

        Equal sequences get equal hashes in any file, order or float width; `record_ids` numbers them.
        """
        recorded = [self.record("record_id", i) for i in range(len(self))]
        if None not in recorded:
            return [str(name) for name in recorded]
        ids = np.ascontiguousarray(self.token_ids)
        lp = _hashable(self.scorings["sampler"].logprobs) if "sampler" in self.scorings else ids[:0]
        spans = zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)
        return [
            _digest(ids[lo:hi], lp[lo:hi]) if name is None else str(name)
            for name, (lo, hi) in zip(recorded, spans, strict=True)
        ]

    def record_ids(self) -> list[str]:
        """Unique names: `content_ids`, with `#2`, `#3`, ... for duplicates."""
        names = self.content_ids()
        taken, seen = set(names), dict[str, int]()
        out: list[str] = []
        for name in names:
            unique, number = name, seen.get(name, 0) + 1
            while number > 1 and (unique := f"{name}#{number}") in taken:
                number += 1  # a recorded id may itself be called "a#2"
            seen[name] = number
            taken.add(unique)
            out.append(unique)
        return out

    def clusters(self) -> tuple[str, list[str]]:
        """The unit and key of each sequence's cluster: (run, step or version, group), else trajectory, else sequence.

        The coarsest unit that *every* sequence has: sequences of one group share a prompt and are not independent.
        """
        for unit, column in (("group", "group_id"), ("trajectory", "trajectory_id")):
            col = self.records.get(column)
            if col is not None and len(self) and bool(col.mask().all()):
                return unit, [self._cluster_key(column, i) for i in range(len(self))]
        return "sequence", self.content_ids()

    def _cluster_key(self, column: str, i: int) -> str:
        step = self.record("step", i)
        # the turns of one trajectory may come from several versions: a version would split what is dependent
        if step is None and column == "group_id" and "policy_version" in self.tokens:
            at, version = self.sequence(i), self.tokens["policy_version"]
            known = np.flatnonzero(version.mask()[at] & self.drawn[at])
            step = f"v{int(version.values[at][known[0]])}" if len(known) else None
        parts = (self.record("run_id", i), step, self.record(column, i))
        return json.dumps([None if p is None else str(p) for p in parts])


def _require_length(name: str, got: int, wanted: int, what: str) -> None:
    if got != wanted:
        raise ContentError(f"column {name!r}: got {got} values, wanted {wanted} (one for each of the {what})")


def take_lists(lists: Lists, rows: NDArray[Any]) -> Lists:
    """The rows at `rows` of a CSR column, in that order."""
    lengths = np.diff(lists.offsets)[rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    flat = np.repeat(lists.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(int(offsets[-1]))
    return Lists(lists.values[flat], offsets, None if lists.valid is None else lists.valid[rows])


def _row_numbers(index: Iterable[int], n_rows: int) -> IntArray:
    rows = np.asarray(index if isinstance(index, np.ndarray) else list(index))
    if rows.dtype == bool:
        _require_length("take", len(rows), n_rows, "sequences")
        return np.flatnonzero(rows)
    return rows.astype(np.int64)


def _digest(ids: NDArray[Any], lp: NDArray[Any]) -> str:
    """A hash of two arrays' bytes, one after the other."""
    digest = hashlib.blake2b(ids.data, digest_size=8)
    digest.update(lp.data)
    return digest.hexdigest()


def _hashable(col: Values) -> NDArray[np.float64]:
    """`[T]` with one bit pattern for every NaN and another for null: what stands under a null is not read."""
    values = col.values.astype(np.float64)
    values[np.isnan(values)] = np.nan
    values.view(np.uint64)[~col.mask()] = 0xFFF8_0000_0000_0001
    return values


def scoring_extras(scoring: Scoring) -> tuple[tuple[str, Values], ...]:
    """The token columns that a scoring has besides its log-probs, with their names."""
    pairs = (("entropy", scoring.entropy), ("varentropy", scoring.varentropy))
    return tuple((what, col) for what, col in pairs if col is not None)


def concat(parts: Sequence[Rollouts]) -> Rollouts:
    """One batch of all sequences, in order. A column that one part lacks is null there."""
    if not parts:
        raise ContentError("no rollouts to join")
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([p.lengths for p in parts])
    n_tok, n_rec = [p.n_tokens for p in parts], [len(p) for p in parts]
    return Rollouts(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        {k: concat_values([p.tokens.get(k) for p in parts], n_tok) for k in _names(p.tokens for p in parts)},
        {k: concat_values([p.records.get(k) for p in parts], n_rec) for k in _names(p.records for p in parts)},
        {k: _concat_lists([p.lists.get(k) for p in parts], k, n_tok, n_rec) for k in _names(p.lists for p in parts)},
        {k: concat_scorings([p.scorings.get(k) for p in parts], n_tok) for k in _names(p.scorings for p in parts)},
    )


def _names(columns: Iterable[Mapping[str, Any]]) -> list[str]:
    """All names, each once, in the order in which they are first seen."""
    return list(dict.fromkeys(name for one in columns for name in one))


def concat_values(parts: Sequence[Values | None], counts: Sequence[int]) -> Values:
    """One column; where a part is None, its `count` places are null."""
    model = next(p for p in parts if p is not None)
    filled = [
        Values(
            np.full(n, None if model.values.dtype == object else 0, dtype=model.values.dtype), np.zeros(n, dtype=bool)
        )
        if p is None
        else p
        for p, n in zip(parts, counts, strict=True)
    ]
    valid = None if all(p.valid is None for p in filled) else np.concatenate([p.mask() for p in filled])
    return Values(np.concatenate([p.values for p in filled]), valid)


def _concat_lists(parts: Sequence[Lists | None], name: str, n_tok: Sequence[int], n_rec: Sequence[int]) -> Lists:
    counts = n_tok if schema.COLUMNS[name].level == "token_list" else n_rec
    full = [
        p or Lists(np.zeros(0, dtype=np.int32), np.zeros(n + 1, dtype=np.int64), np.zeros(n, dtype=bool))
        for p, n in zip(parts, counts, strict=True)
    ]
    lengths = np.concatenate([np.diff(p.offsets) for p in full])
    masks = [np.ones(len(p.offsets) - 1, dtype=bool) if p.valid is None else p.valid for p in full]
    valid = None if all(p.valid is None for p in full) else np.concatenate(masks)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Lists(np.concatenate([p.values for p in full]), offsets, valid)


def concat_scorings(parts: Sequence[Scoring | None], counts: Sequence[int]) -> Scoring:
    """One scoring of all tokens; a part that is None is unscored.

    `semantics` and `dtype` must agree where both are given, and stay undeclared if one part leaves them so. The
    fingerprint keeps what all parts agree on; different scoring ids are joined by `+`.
    """
    given = [p for p in parts if p is not None]
    dist = [p.distributions for p in given if p.distributions is not None]
    routes = [p.routes for p in given if p.routes is not None]
    return Scoring(
        concat_values([None if p is None else p.logprobs for p in parts], counts),
        _concat_optional([None if p is None else p.entropy for p in parts], counts),
        _concat_optional([None if p is None else p.varentropy for p in parts], counts),
        np.concatenate(dist) if len(dist) == len(parts) else None,
        _agreed("semantics", [p.semantics for p in given]),
        _agreed("dtype", [p.dtype for p in given]),
        _common([p.fingerprint for p in given]),
        _joined_ids([p.scoring_id for p in given]),
        np.concatenate(routes) if len(routes) == len(parts) else None,
    )


def _concat_optional(parts: Sequence[Values | None], counts: Sequence[int]) -> Values | None:
    return None if all(p is None for p in parts) else concat_values(parts, counts)


def _agreed(what: str, declared: Sequence[str | None]) -> str | None:
    known = {x for x in declared if x is not None}
    if len(known) > 1:
        raise ContentError(f"scorings differ in {what}: {', '.join(sorted(known))}; they cannot be joined into one")
    return None if None in declared else next(iter(known))


def _common(fingerprints: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = fingerprints
    return {k: v for k, v in first.items() if all(k in o and o[k] == v for o in others)}


def _joined_ids(ids: Sequence[str | None]) -> str | None:
    given = dict.fromkeys(x for x in ids if x is not None)
    if len(given) == 1:  # as it is, whatever characters it has
        return next(iter(given))
    parts = dict.fromkeys(part for x in given for part in x.split("+"))
    return "+".join(sorted(parts)) if parts else None
