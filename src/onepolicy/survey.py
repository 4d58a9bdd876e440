"""What is added up from a dump, batch by batch: Sums, profiles, counts of the record checks, one row a sequence.

`survey_of` looks at one batch, `Survey.add` merges: in any order, over any split, to the same integers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from onepolicy import integrity, rows, signatures, whatif
from onepolicy.align import align
from onepolicy.counted import Counted
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.dialects.view import views
from onepolicy.errors import ContentError
from onepolicy.estimate import measure
from onepolicy.formats.settle import Settled, ids_known
from onepolicy.grid import selected_segments
from onepolicy.integrity.base import Batch
from onepolicy.metrics import METRICS
from onepolicy.profiles import PROFILES, Bins, Profile, Seen, profiled
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts
from onepolicy.rows import Rows
from onepolicy.sums import Place, Sums, merge
from onepolicy.types import IntArray, LogprobPairs
from onepolicy.views import both_finite, view_mask

#: Record columns whose values are gathered as facts of the dump, and how many different ones are kept.
FACTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
FACTS += ("logprob_semantics", "scorer_version", "step", "run_id", "finish_reason")
MOST_VALUES = 64
#: Settings of an engine, by their names in fingerprints and model configurations.
SETTINGS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "sliding_window")
SETTINGS += ("quantization", "kv_cache_dtype", "weight_norm")
#: Tokens kept before a worst token; half as many after it.
AROUND = 8
#: Names of groups that are kept for messages.
LABELS = 1 << 14
#: Names of records that are kept for messages about copies.
NAMED = 1 << 12


@dataclass(slots=True)
class Survey:
    """`names`: the main pair, either may be None. `facts`: values
    seen, by column. `dump`: records and tokens by what became of them."""

    names: tuple[str | None, str | None]
    sums: Sums | None = None
    profiles: dict[str, Bins] = field(default_factory=dict[str, Bins])
    checks: dict[str, Counted] = field(default_factory=dict[str, Counted])
    extra: dict[str, Counted] = field(default_factory=dict[str, Counted])
    dump: Counted = field(default_factory=Counted)
    facts: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    replays: whatif.WhatIf = field(default_factory=whatif.WhatIf)
    rows: list[Rows] = field(default_factory=list[Rows])
    #: state of a `dialects.accumulate.Accumulator`
    numbers: dict[str, Any] | None = None
    #: 64-bit id of a group -> its name, of the first `LABELS` ids
    labels: dict[int, str] = field(default_factory=dict[int, str])
    #: 64-bit id of a record -> its name, of the first `NAMED` ids
    record_names: dict[int, str] = field(default_factory=dict[int, str])
    #: files that hold rows instead
    spilled: list[str] = field(default_factory=list[str])
    #: of a worst token the ids around it and its index among them; of a worst sequence the first ids of its reply and 0
    around: dict[Place, tuple[list[int], int]] = field(default_factory=dict[Place, tuple[list[int], int]])

    def add(self, other: Survey) -> None:
        """Merges `other` into this one. Errors: `MergeError` where they speak of other pairs."""
        self.sums = _added(self.sums, other.sums)
        for key, bins in other.profiles.items():
            mine = self.profiles.setdefault(key, Bins())
            mine.add(bins)
            self.profiles[key] = mine.cut(PROFILES[key].most if key in PROFILES else 0)
        for mine, theirs in ((self.checks, other.checks), (self.extra, other.extra)):
            for key, counted in theirs.items():
                mine.setdefault(key, Counted()).add(counted)
        self.dump.add(other.dump)
        self.replays.add(other.replays)
        _keep_labels(self.labels, other.labels)
        _keep_labels(self.record_names, other.record_names, NAMED)
        self.numbers = _added_numbers(self.numbers, other.numbers)
        for name, values in other.facts.items():
            _count_values(self.facts.setdefault(name, {}), values)
        self.rows += other.rows
        self.spilled += other.spilled
        for place, ids in other.around.items():
            self.around[place] = min(ids, self.around.get(place, ids))  # two records may be alike but for other tokens
        self.around = {place: self.around[place] for place in _worst(self.sums) if place in self.around}

    def fact_values(self) -> dict[str, list[Any]]:
        """Column -> values seen, sorted."""
        return {name: sorted(values) for name, values in sorted(self.facts.items())}


def _added(mine: Sums | None, theirs: Sums | None) -> Sums | None:
    if mine is None or theirs is None:
        return mine if theirs is None else merge([theirs])  # a Sums of our own, to be added to
    mine.add(theirs)
    return mine


def _added_numbers(mine: dict[str, Any] | None, theirs: dict[str, Any] | None) -> dict[str, Any] | None:
    if mine is None or theirs is None:
        return theirs if mine is None else mine
    both = Accumulator.from_dict(mine)
    both.merge(Accumulator.from_dict(theirs))
    return both.to_dict()


def _keep_labels(into: dict[int, str], more: Mapping[int, str], most: int = LABELS) -> None:
    into |= more
    if len(into) > most:
        for key in sorted(into)[most:]:
            del into[key]


def _count_values(into: dict[str, int], values: Mapping[str, int]) -> None:
    for value, n in values.items():
        into[value] = into.get(value, 0) + n
    if len(into) > MOST_VALUES:  # the first ones in order: the same for any split
        for value in sorted(into)[MOST_VALUES:]:
            del into[value]


def survey_of(
    rollouts: Rollouts | None,
    names: tuple[str | None, str | None],
    *,
    settled: Settled | None = None,
    places: Sequence[str] | None = None,
    view: str = "drawn",
    profiles: Iterable[Profile] = tuple(PROFILES.values()),
    replays: bool = False,
    dialect: tuple[str, Mapping[str, Any]] | None = None,
    order: IntArray | None = None,
) -> Survey:
    """One batch. `rollouts` None: nothing of it fits its tokens, only `settled` speaks. `replays`: with corrections.
    `dialect`: a framework's name and options: its metrics too. `order`: `[S]` where each stands in the dump."""
    out = Survey(names)
    count_records(out, rollouts, settled, names)
    if rollouts is None:
        empty = Rollouts(np.zeros(1, np.int64), {"token_ids": _no_ids()})
        out.checks = integrity.look_all(Batch(empty, (), (), None, None, settled, asked=names))
        return out
    at = tuple(places) if places is not None else ("",) * len(rollouts)
    a, b = (n if n in rollouts.scorings else None for n in names)
    pairs = align(rollouts, a, b) if a is not None and b is not None and rollouts.n_tokens else None
    ids = tuple(rollouts.content_ids()) if pairs is None else pairs.record_ids  # hashed once: they are the same names
    out.checks = integrity.look_all(Batch(rollouts, ids, at, a, b, settled, order=order, asked=names))
    _gather_facts(out, rollouts)
    if pairs is not None:
        _compared(out, rollouts, pairs, view, profiles, replays)
    if dialect is not None:
        out.numbers = numbers_of([rollouts], dialect)
    return out


def numbers_of(parts: Iterable[Rollouts], dialect: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A framework's metrics of some batches; it is told in how many of them a column is missing."""
    numbers = Accumulator(*dialect)
    for rollouts in parts:
        for step, part in views(rollouts):
            numbers.add(part, step)
    return numbers.to_dict()


def _no_ids() -> Any:
    from onepolicy.types import Values

    return Values(np.zeros(0, dtype=np.int32))


def _compared(
    out: Survey, rollouts: Rollouts, pairs: LogprobPairs, view: str, profiles: Iterable[Profile], replays: bool
) -> None:
    positions = np.arange(rollouts.n_tokens) - np.repeat(rollouts.offsets[:-1], rollouts.lengths)
    pairs = replace(pairs, positions=positions)
    out.sums = reduce(pairs, METRICS.values(), view)
    seen = Seen(rollouts, pairs, both_finite(pairs, view_mask(pairs, view)))
    for profile in profiles:
        bins = profiled(seen, profile)
        if bins is not None:
            out.profiles[profile.key] = bins
    for key, signature in signatures.SIGNATURES.items():
        if signature.look is not None:
            out.extra[key] = signature.look(seen)
    out.around = _around(seen, _worst(out.sums))
    contents = pairs.record_ids
    if "record_id" in rollouts.records:
        contents = replace(rollouts, records=_unnamed(rollouts)).content_ids()
    out.rows = [rows.rows_of(seen, contents, pairs.record_ids, pairs.cluster_keys)]
    _keep_labels(out.record_names, dict(zip(out.rows[0]["id"].tolist(), pairs.record_ids, strict=True)), NAMED)
    groups = rollouts.records.get("group_id")
    if groups is not None:
        named = zip(out.rows[0]["group"].tolist(), groups.values.tolist(), strict=True)
        _keep_labels(out.labels, {key: str(name) for key, name in named if key})
    if replays and pairs.drawn_by == "a":
        out.replays = whatif.replay(seen, out.rows[0]["cluster"])


def _worst(sums: Sums | None) -> list[Place]:
    """The places whose tokens are shown: a sequence's has no token."""
    return [] if sums is None else [*sums.worst.get("tokens", []), *sums.worst.get("sequences", [])]


def _around(seen: Seen, places: Sequence[Place]) -> dict[Place, tuple[list[int], int]]:
    """The ids around each worst token, the first ones of each worst sequence."""
    named: dict[str, list[int]] = {place.record: [] for place in places}
    known = ids_known(seen.rollouts)  # stand-ins say nothing
    for i, name in enumerate(seen.pairs.record_ids):
        if name in named and known[i]:
            named[name].append(i)
    out: dict[Place, tuple[list[int], int]] = {}
    for place in places:
        found = [_beside(seen.pairs, place, i) for i in _holding(seen, place, named[place.record])]
        if found:
            out[place] = min(found)
    return out


def _holding(seen: Seen, place: Place, rows: Sequence[int]) -> list[int]:
    """Of records that are named alike, those that the place is of."""
    pairs = seen.pairs
    if len(rows) < 2:
        return list(rows)
    if place.token >= 0:
        values = lambda k: (int(pairs.token_ids[k]), repr(float(pairs.a[k])), repr(float(pairs.b[k])))
        at = [(i, int(pairs.offsets[i]) + place.position) for i in rows]
        told = (place.token, place.a, place.b)
        return [i for i, k in at if k < pairs.offsets[i + 1] and values(k) == told]
    tokens = {i: slice(int(seen.starts[i]), int(seen.starts[i] + seen.counts[i])) for i in rows}
    sums = [
        (float(seen.a[t].sum()), float(seen.b[t].sum()), i)
        for i, t in tokens.items()
        if seen.counts[i] == place.position
    ]
    off = [abs(a - float(place.a)) + abs(b - float(place.b)) for a, b, _ in sums]  # added up in another order
    return [i for (_, _, i), x in zip(sums, off, strict=True) if x == min(off)]


def _beside(pairs: LogprobPairs, place: Place, i: int) -> tuple[list[int], int]:
    """The ids around a token of sequence i, and its index among them; of a sequence, the first ids of its reply (of all
    of it, where nothing is drawn)."""
    lo, hi = int(pairs.offsets[i]), int(pairs.offsets[i + 1])
    if place.token < 0:
        ids, drawn = pairs.token_ids[lo:hi], pairs.drawn[lo:hi]
        return (ids[drawn] if drawn.any() else ids)[: 2 * AROUND].tolist(), 0
    at = lo + place.position
    return pairs.token_ids[max(lo, at - AROUND) : min(hi, at + AROUND // 2 + 1)].tolist(), min(AROUND, at - lo)


def _unnamed(rollouts: Rollouts) -> dict[str, Any]:
    return {k: v for k, v in rollouts.records.items() if k != "record_id"}


def count_records(
    out: Survey, rollouts: Rollouts | None, settled: Settled | None, names: tuple[str | None, str | None]
) -> None:
    """Adds up what became of the records of one batch, into `out.dump`."""
    n = 0 if rollouts is None else len(rollouts)
    aside = 0 if settled is None else len(settled.aside)
    out.dump.count("records", n + aside)
    out.dump.count("records left out", aside)
    if rollouts is not None:
        out.dump.count("tokens", rollouts.n_tokens)
        out.dump.count("drawn tokens", int(rollouts.drawn.sum()))
        _count_scored(out, rollouts, names)


def _count_scored(out: Survey, rollouts: Rollouts, names: tuple[str | None, str | None]) -> None:
    """Records with drawn tokens, and how many of them each scoring has said something about: a record that a side does
    not speak of is in no number, and must be told."""
    some = lambda mask: selected_segments(rollouts.offsets, mask)[1] > 0
    drawn = some(rollouts.drawn)
    out.dump.count("records with drawn tokens", int(drawn.sum()))
    has = {name: some(rollouts.drawn & s.logprobs.mask()) for name, s in rollouts.scorings.items()}
    for name, records in has.items():
        out.dump.count(f"records with {name}", int(records.sum()))
    if None not in names:
        both = [has.get(str(name), np.zeros(len(rollouts), dtype=bool)) for name in names]
        out.dump.count("records with both sides", int((both[0] & both[1]).sum()))


def _gather_facts(out: Survey, rollouts: Rollouts) -> None:
    for name in FACTS:
        col = rollouts.records.get(name)
        values = {"null": len(rollouts)}
        if col is not None:
            found, n = np.unique([str(x) for x in col.values[col.mask()].tolist()], return_counts=True)
            values = dict(zip(found.tolist(), n.tolist(), strict=True))
            if not col.mask().all():
                values["null"] = int((~col.mask()).sum())
        out.facts[name] = {}
        _count_values(out.facts[name], values)
    for name, scoring in rollouts.scorings.items():
        for what in ("dtype", "semantics"):
            out.facts.setdefault(f"{name}_{what}", {})[str(getattr(scoring, what))] = len(rollouts)
        for what, value in settings(scoring.fingerprint).items():
            out.facts[f"{name}_{what}"] = {json.dumps(value, sort_keys=True): len(rollouts)}


def settings(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """What a fingerprint, or the model configuration in it, says of the settings that leave a mark in the gap."""
    config = fingerprint.get("config")
    both = {**(config if isinstance(config, Mapping) else {}), **fingerprint}
    return {name: both[name] for name in SETTINGS if name in both}


def evidence_of(survey: Survey, above: Sequence[str] = ()) -> signatures.Evidence:
    """What signatures read. Errors: `ContentError` where the dump has no pair of scorings."""
    if survey.sums is None:
        raise ContentError(f"no record has both scorings {survey.names[0]!r} and {survey.names[1]!r}")
    return signatures.Evidence(
        survey.sums.names,
        survey.sums,
        measure(survey.sums),
        survey.profiles,
        rows.joined(survey.rows),
        survey.extra,
        survey.fact_values(),
        tuple(above),
    )
