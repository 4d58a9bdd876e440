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

_NUMPY = {
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
    "float32": np.float32,
    "float64": np.float64,
    "float": np.float32,
    "string": object,
    "json": object,
}


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
        n_tokens = int(self.offsets[-1]) if len(self.offsets) else 0
        for name, col in self.tokens.items():
            _require_length(name, len(col.values), n_tokens, "tokens")
        for name, col in self.records.items():
            _require_length(name, len(col.values), len(self), "sequences")
        for name, scoring in self.scorings.items():
            _require_length(f"{name}_logprobs", len(scoring.logprobs.values), n_tokens, "tokens")

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

    def sequence(self, i: int) -> slice:
        """Where the tokens of sequence i stand in the flat columns."""
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))

    def record(self, name: str, i: int) -> Any:
        """The value of a record column for sequence i, None if null or absent."""
        col = self.records.get(name)
        if col is None or (col.valid is not None and not col.valid[i]):
            return None
        value = col.values[i]
        return value.item() if isinstance(value, np.generic) else value

    def with_scoring(self, name: str, scoring: Scoring) -> Rollouts:
        """The same rollouts with one more named scoring; a name that is taken is replaced."""
        return replace(self, scorings={**self.scorings, name: scoring})

    def take(self, index: Iterable[int]) -> Rollouts:
        """The sequences at `index`, in that order, with all their columns and scorings."""
        rows = np.asarray(list(index), dtype=np.int64)
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        flat = np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths) + np.arange(int(offsets[-1]))
        return Rollouts(
            offsets,
            {k: v.take(flat) for k, v in self.tokens.items()},
            {k: v.take(rows) for k, v in self.records.items()},
            {k: take_lists(v, flat if schema.COLUMNS[k].level == "token_list" else rows) for k, v in self.lists.items()},
            {k: v.take(flat) for k, v in self.scorings.items()},
        )

    def content_ids(self) -> list[str]:
        """A name for each sequence: the recorded one, else a hash of its ids and sampler log-probs.

        Equal sequences get equal hashes in any file or order; `record_ids` numbers them.
        """
        lp = self.scorings["sampler"].logprobs.values if "sampler" in self.scorings else None
        names: list[str] = []
        for i in range(len(self)):
            recorded = self.record("record_id", i)
            if recorded is None:
                at = self.sequence(i)
                digest = hashlib.blake2b(np.ascontiguousarray(self.token_ids[at]).tobytes(), digest_size=8)
                digest.update(b"" if lp is None else np.ascontiguousarray(lp[at], dtype=np.float64).tobytes())
                recorded = digest.hexdigest()
            names.append(str(recorded))
        return names

    def record_ids(self) -> list[str]:
        """Unique names: `content_ids`, with `#2`, `#3`, ... for duplicates."""
        seen: dict[str, int] = {}
        out: list[str] = []
        for name in self.content_ids():
            seen[name] = seen.get(name, 0) + 1
            out.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
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
        if step is None and "policy_version" in self.tokens:
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


def column_values(name: str, items: Sequence[Any]) -> Values:
    """A flat column from Python values (None is null), in the contract's dtype."""
    spec = schema.column(name)
    assert spec is not None, name
    valid = np.fromiter((x is not None for x in items), dtype=bool, count=len(items))
    empty: Any = {"bool": False, "string": "", "json": None}.get(spec.dtype, 0)
    filled = [empty if x is None else x for x in items]
    if spec.dtype in ("string", "json"):
        values = np.empty(len(items), dtype=object)
        values[:] = filled
    else:
        values = _numeric(name, filled, spec.dtype)
    return Values(values, None if bool(valid.all()) else valid)


def _numeric(name: str, filled: Sequence[Any], dtype: str) -> NDArray[Any]:
    try:
        if dtype.startswith("int") and any(isinstance(x, float) and not x.is_integer() for x in filled):
            raise ValueError("a fraction where whole numbers are wanted")
        # JSON carries doubles: float columns are read at full precision, storage keeps what it is given
        return np.asarray(filled, dtype=np.float64 if dtype == "float" else _NUMPY[dtype])
    except (TypeError, ValueError, OverflowError) as err:
        raise ContentError(f"column {name!r}: cannot be read as {dtype}: {err}") from err


def concat(parts: Sequence[Rollouts]) -> Rollouts:
    """One batch of all sequences, in order. A column that one part lacks is null there."""
    if not parts:
        raise ContentError("no rollouts to join")
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([p.lengths for p in parts])
    n_tok, n_rec = [p.n_tokens for p in parts], [len(p) for p in parts]
    names = lambda get: dict.fromkeys(k for p in parts for k in get(p))  # noqa: E731
    scorings = names(lambda p: p.scorings)
    return Rollouts(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        {k: concat_values([p.tokens.get(k) for p in parts], n_tok, k) for k in names(lambda p: p.tokens)},
        {k: concat_values([p.records.get(k) for p in parts], n_rec, k) for k in names(lambda p: p.records)},
        {k: _concat_lists([p.lists.get(k) for p in parts], k, n_tok, n_rec) for k in names(lambda p: p.lists)},
        {k: concat_scorings([p.scorings.get(k) for p in parts], n_tok) for k in scorings},
    )


def concat_values(parts: Sequence[Values | None], counts: Sequence[int], name: str = "") -> Values:
    """One column; where a part is None, its `count` places are null."""
    model = next(p for p in parts if p is not None)
    filled = [
        Values(np.full(n, None if model.values.dtype == object else 0, dtype=model.values.dtype), np.zeros(n, dtype=bool))
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
    """One scoring of all tokens. Declarations must agree where both are given; a part that is None is unscored."""
    given = [p for p in parts if p is not None]

    def joined(pick: Any) -> Values | None:
        cols = [None if p is None else pick(p) for p in parts]
        return None if all(c is None for c in cols) else concat_values(cols, counts)

    def agreed(what: str) -> Any:
        seen = {getattr(p, what) for p in given}
        if len(seen) > 1 and what != "scoring_id":
            raise ContentError(f"scorings differ in {what}: {sorted(map(str, seen))}; they cannot be joined into one")
        return next(iter(seen)) if len(seen) == 1 else "+".join(sorted(map(str, seen)))

    dist = [p.distributions for p in given]
    whole = len(given) == len(parts) and all(d is not None for d in dist)
    logprobs = joined(lambda p: p.logprobs)
    assert logprobs is not None
    return Scoring(
        logprobs,
        joined(lambda p: p.entropy),
        joined(lambda p: p.varentropy),
        np.concatenate([d for d in dist if d is not None]) if whole else None,
        agreed("semantics"),
        agreed("dtype"),
        given[0].fingerprint,
        agreed("scoring_id"),
    )
