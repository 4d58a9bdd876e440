"""The trainer's values of slime's samples, and their join with the rollout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import ContentError
from onepolicy.formats.base import BrokenRecord, RawColumn, RawRecord, flags
from onepolicy.formats.batches import step_of
from onepolicy.formats.slime_samples import checked, column, facts, ids_of, numbers, put_sampler, sample_of

#: The trainer's name -> ours. All of them cover the reply.
_COLUMNS = {
    "log_probs": "old_logprobs",
    "ref_log_probs": "reference_logprobs",
    "teacher_log_probs": "teacher_logprobs",
    "advantages": "advantages",
    "entropy": "old_entropy",
}
#: Columns of a rank's file that hold one value a sample; every other list is of the whole rollout.
_A_SAMPLE = ("sample_indices", "response_lengths", "total_lengths", "tokens", "loss_masks", "rollout_log_probs")


@dataclass(slots=True)
class Trained:
    """One sample as the trainer has it. `rank`: where it was trained."""

    place: str
    index: Any
    position: Any
    rank: Any
    ids: NDArray[Any]
    columns: dict[str, RawColumn]
    reply: int | None
    claims: dict[str, int] = field(default_factory=dict[str, int])
    used: bool = False


Step = int | None


def trained_of(path: str, value: Any, size: int) -> tuple[Step, list[Trained | BrokenRecord]]:
    """The samples of a train file. Errors: `ContentError` for a file that is none."""
    step = step_of(value.get("rollout_id")) if isinstance(value, dict) else None
    samples: Any = value.get("samples") if isinstance(value, dict) else None
    if isinstance(value, dict) and isinstance(value.get("rollout_data"), dict):
        samples = _of_rank(path, value["rollout_data"], value.get("rank"))
    if not isinstance(samples, list):
        raise ContentError(f"{path}: no list of samples in it")
    checked(path, samples, size)
    found: list[Trained | BrokenRecord] = []
    for i, raw in enumerate(samples):
        place = f"{path}[{i}]"
        try:
            found.append(_trained(place, sample_of(raw)))
        except (ContentError, ValueError, TypeError, KeyError, IndexError, OverflowError) as err:
            found.append(BrokenRecord(place, str(err).removeprefix(f"{path}: ")[:300]))
    return step, found


def _of_rank(path: str, data: Mapping[str, Any], rank: Any) -> list[dict[str, Any]]:
    """Columns of a rank as samples. A column of another length is of the whole rollout, or of another kind."""
    tokens = data.get("tokens")
    if not isinstance(tokens, list):
        raise ContentError(f"{path}: rollout_data without a list of tokens")
    n = len(tokens)
    wanted = (*_A_SAMPLE, *_COLUMNS)
    whole = {k: v for k, v in data.items() if k in wanted and isinstance(v, list) and len(v) == n}
    short = [k for k in wanted if isinstance(data.get(k), list) and len(data[k]) != n and k != "total_lengths"]
    if short:
        raise ContentError(f"{path}: {short[0]} has {len(data[short[0]])} samples, tokens have {n}")
    return [{"data_parallel_rank": rank, **{k: v[i] for k, v in whole.items()}} for i in range(n)]


def _trained(place: str, sample: Mapping[str, Any]) -> Trained:
    columns = {ours: column(sample[theirs]) for theirs, ours in _COLUMNS.items() if sample.get(theirs) is not None}
    mask = next((numbers(sample[k]) for k in ("loss_masks", "loss_mask") if sample.get(k) is not None), None)
    if mask is not None:
        columns["loss_mask"] = flags(mask, "reply")
    if sample.get("rollout_log_probs") is not None:
        put_sampler(columns, column(sample["rollout_log_probs"]), mask)
    lengths = [sample.get(k) for k in ("response_lengths", "response_length")]
    told = next((x for x in lengths if type(x) is int), None)
    if told is None:
        shown = (columns.get(k) for k in ("loss_mask", "old_logprobs", "sampler_logprobs"))
        told = next((len(c.values) for c in shown if c is not None), None)
    index = next((sample[k] for k in ("sample_index", "sample_indices") if sample.get(k) is not None), None)
    if not isinstance(index, (int, str, type(None))):
        raise ValueError(f"sample_index: got {index!r:.40}, wanted a number")
    total = sample.get("total_lengths")
    return Trained(
        place,
        index,
        sample.get("rollout_position"),
        sample.get("data_parallel_rank"),
        ids_of(sample.get("tokens")),
        columns,
        told,
        {"token_ids": total} if type(total) is int else {},
    )


class Joined:
    """Trainer samples by rollout, to be taken by the rollout's samples, each once."""

    def __init__(self) -> None:
        self._by_step: dict[Step, dict[Any, list[Trained]]] = {}
        self._broken: list[BrokenRecord] = []

    def any(self, step: Step) -> bool:
        """Whether there are trainer values of this rollout at all."""
        return bool(self._of(step))

    def _of(self, step: Step) -> dict[Any, list[Trained]]:
        """A file that does not tell its rollout is of the one beside it."""
        if step is None and len(self._by_step) == 1:
            return next(iter(self._by_step.values()))
        return self._by_step.get(step) or self._by_step.get(None) or {}

    def add(self, step: Step, samples: list[Trained | BrokenRecord]) -> None:
        """Files of one rollout: ranks that hold the same sample (tensor or pipeline parallel) must agree."""
        known = self._by_step.setdefault(step, {})
        for one in samples:
            if isinstance(one, BrokenRecord):
                self._broken.append(one)
                continue
            key = one.ids.tobytes() if one.index is None else one.index
            same = [t for t in known.setdefault(key, []) if _same_sample(t, one)]
            if not same:
                known[key].append(one)
            else:
                self._merge(same[0], one)

    def _merge(self, first: Trained, again: Trained) -> None:
        for name, col in again.columns.items():
            kept = first.columns.setdefault(name, col)
            if not _equal(kept, col):
                why = f"sample {again.index}: {name} is not that of {first.place}: two ranks hold different values"
                why += " (parts of a sequence under context parallelism are not put together)"
                self._broken.append(BrokenRecord(again.place, why, _name(again.index)))
                return

    def take(
        self, place: str, position: int, step: Step, sample: Mapping[str, Any], record: RawRecord
    ) -> RawRecord | BrokenRecord:
        """The rollout's record with the trainer's columns; broken when the trainer has none, or of other tokens."""
        index = sample.get("index")
        found = self._find(step, index, position, record.token_ids)
        if found is None:
            why = f"missing: sample {index} of rollout {step} has no values of the trainer"
            return BrokenRecord(place, why, _name(index))
        found.used = True
        if not np.array_equal(found.ids, record.token_ids):
            why = f"sample {index}: its tokens are not those of {found.place} ({_first_difference(found.ids, record)})"
            return BrokenRecord(place, why, _name(index))
        merged = {**found.columns, **{k: v for k, v in record.columns.items() if k != "loss_mask"}}
        merged.update({k: v for k, v in record.columns.items() if k not in merged})
        claims = dict(found.claims) if found.reply is None else {**found.claims, "reply": found.reply}
        return dataclasses.replace(record, columns=merged, claims=claims)

    def _find(self, step: Step, index: Any, position: int, ids: NDArray[Any]) -> Trained | None:
        known = self._of(step)
        fresh = [t for t in known.get(index, []) + known.get(ids.tobytes(), []) if not t.used]
        exact = [t for t in fresh if t.position == position and type(t.position) is int]
        alike = [t for t in fresh if np.array_equal(t.ids, ids)]
        return next(iter(exact or alike or fresh), None)

    def left(self, missing: bool) -> Iterator[RawRecord | BrokenRecord]:
        """What no sample of a rollout took: missing there, or all there is when the dump has no rollout file."""
        yield from self._broken
        for step, known in self._by_step.items():
            for one in (t for found in known.values() for t in found if not t.used):
                if missing:
                    why = f"missing: sample {one.index} of rollout {step} is in no rollout file"
                    yield BrokenRecord(one.place, why, _name(one.index))
                else:
                    yield _alone(one, step)


def _alone(one: Trained, step: Step) -> RawRecord:
    prompt = None if one.reply is None else len(one.ids) - one.reply
    return RawRecord(one.place, one.ids, prompt, one.columns, facts({"index": one.index}, step), claims=one.claims)


def _same_sample(a: Trained, b: Trained) -> bool:
    """Two files hold it; two samples of one file are two samples."""
    apart = a.place.rpartition("[")[0] != b.place.rpartition("[")[0]
    return apart and a.position == b.position and np.array_equal(a.ids, b.ids)


def _equal(a: RawColumn, b: RawColumn) -> bool:
    return np.array_equal(a.values, b.values, equal_nan=a.values.dtype.kind == "f" and b.values.dtype.kind == "f")


def _name(index: Any) -> str | None:
    return None if index is None else str(index)[:80]


def _first_difference(ids: NDArray[Any], record: RawRecord) -> str:
    n = min(len(ids), len(record.token_ids))
    other = np.flatnonzero(ids[:n] != record.token_ids[:n])
    if len(other):
        at = int(other[0])
        return f"position {at}: {int(ids[at])} and {int(record.token_ids[at])}"
    return f"{len(ids)} and {len(record.token_ids)} tokens"
