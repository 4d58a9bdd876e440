"""slime and miles: `rollout_data/{id}.pt` joined with `train_data/{id}*.pt`, and miles' `policy_loss_debug/*.pt`.

A rollout file holds samples as the sampler left them (`tokens`, `rollout_log_probs`, `loss_mask` over the reply), a
train file the trainer's values of the same samples: one file of all (`format_version: 2`) or one a rank (columns in
`rollout_data`). They are joined on the sample's index; where several samples share one, on `rollout_position`, then on
the token ids. `slime/utils/train_dump_utils.py`, `slime/ray/rollout.py`, https://github.com/THUDM/slime;
`miles/backends/training_utils/debug_dump.py`, https://github.com/radixark/miles.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from onepolicy.errors import ContentError
from onepolicy.formats.base import HEAD_BYTES, BrokenRecord, Files, RawRecord, Shard
from onepolicy.formats.batches import step_of
from onepolicy.formats.files import guarded
from onepolicy.formats.slime_join import Joined, trained_of
from onepolicy.formats.slime_samples import checked, debug_record, rollout_record, sample_of
from onepolicy.formats.unpickle import opened

name = "slime"
says = "slime, miles: rollout_data/*.pt with train_data/*.pt (all columns), policy_loss_debug/*.pt (log-probs, no ids)"

#: In the framework's own environment: the same samples in onepolicy's JSON lines.
EXPORT = """\
    import json, torch
    with open("rollout.jsonl", "w") as out:
        for s in torch.load("rollout_data/0.pt", weights_only=False)["samples"]:
            n = len(s["tokens"]) - s["response_length"]
            row = {"token_ids": list(s["tokens"]), "prompt_length": n, "sample_id": str(s["index"])}
            row["sampler_logprobs"] = [None] * n + list(s["rollout_log_probs"])
            if s["loss_mask"] is not None:
                row["loss_mask"] = [False] * n + [bool(m) for m in s["loss_mask"]]
            print(json.dumps(row), file=out)
"""

#: Folders of one dump; what stands above them is the dump.
_FOLDERS = ("rollout_data", "train_data", "policy_loss_debug", "debug_rollout_data", "debug_train_data")
_NOT_THE_ID = re.compile(r"(?:rank|dp|tp|pp|cp|call)[_-]?\d+", re.IGNORECASE)


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    """A file of torch whose first keys are those of a rollout, of trainer values, or of a policy loss."""
    return _kind(head) is not None


def _kind(head: bytes) -> str | None:
    if not head.startswith((b"PK\x03\x04", b"\x80\x02\x8a\x0al\xfc\x9cF\xf9")):
        return None
    if _has(head, "train_log_probs") and _has(head, "old_log_probs"):
        return "debug"
    if _has(head, "rollout_id") and _has(head, "rollout_data"):
        return "train"
    if _has(head, "format_version") and (_has(head, "samples") or _has(head, "dp_shards")):
        return "train"
    return "rollout" if _has(head, "rollout_id") and _has(head, "samples") else None


def _has(head: bytes, key: str) -> bool:
    """Whether the pickle writes this text, as protocol 2 or 4 does; the archive's own file names do not count."""
    text = key.encode()
    return b"X" + len(text).to_bytes(4, "little") + text in head or b"\x8c" + bytes([len(text)]) + text in head


def shards(paths: Sequence[str]) -> list[Shard]:
    """Files of one rollout together: those of one dump whose names have one number (`3.pt`, `3_rank0.pt`), or none.

    What they hold decides in the end: values of two rollouts in one shard are not joined.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        groups.setdefault(_group(path), []).append(path)
    return [Shard(name, tuple(sorted(found))) for _, found in sorted(groups.items(), key=lambda x: _order(x[0]))]


def _group(path: str) -> tuple[str, str]:
    folder, file = os.path.split(path)
    above, last = os.path.split(folder)
    root = above if last in _FOLDERS else folder
    if last == "policy_loss_debug":
        return root, path
    stem = os.path.splitext(file)[0]
    numbers = re.findall(r"\d+", _NOT_THE_ID.sub(" ", stem))
    kind = "eval" if "eval" in stem else ""
    return root, f"{kind} {numbers[0]}" if numbers else kind


def _order(group: tuple[str, str]) -> tuple[str, int, str]:
    number = re.search(r" (\d{1,18})$", group[1])
    return group[0], int(number.group(1)) if number else -1, group[1]


def read(shard: Shard, files: Files) -> Iterator[RawRecord | BrokenRecord]:
    """The rollout's samples in their order, then what only the trainer has. Trainer values are held in memory, rollout
    files are read one at a time. A file of several that cannot be read is a broken record, and the others are read.

    Errors: `ContentError` when no file of the shard can be read.
    """
    failed: dict[str, ContentError] = {}
    kinds = {path: _attempt(path, failed, lambda path=path: _kind_of(path, files)) for path in shard.paths}
    of_kind = lambda wanted: [path for path, kind in kinds.items() if kind == wanted]
    joined = Joined()
    for path in of_kind("train"):
        _attempt(path, failed, lambda path=path: _train(path, files, joined))
    for path in of_kind("debug"):
        yield from _until_broken(path, failed, _debug(path, files))
    for path in of_kind("rollout"):
        yield from _until_broken(path, failed, _rollout(path, files, joined))
    yield from joined.left(missing=any(path not in failed for path in of_kind("rollout")))
    if len(failed) == len(shard.paths):
        raise next(iter(failed.values()))
    for path, err in failed.items():
        yield BrokenRecord(path, str(err).splitlines()[0].removeprefix(f"{path}: "))


def _attempt(path: str, failed: dict[str, ContentError], do: Callable[[], str | None]) -> str | None:
    try:
        return do()
    except ContentError as err:
        failed[path] = err
        return None


def _until_broken(
    path: str, failed: dict[str, ContentError], records: Iterator[RawRecord | BrokenRecord]
) -> Iterator[RawRecord | BrokenRecord]:
    try:
        yield from records
    except ContentError as err:
        failed[path] = err


def _train(path: str, files: Files, joined: Joined) -> None:
    with opened(path, files, EXPORT) as value:
        joined.add(*trained_of(path, value, files.size(path)))


def _kind_of(path: str, files: Files) -> str:
    with files.open(path) as file:
        kind = _kind(guarded(path, lambda: file.read(HEAD_BYTES)))
    if kind is None:
        raise ContentError(f"{path}: not a rollout, trainer or policy loss file of slime or miles")
    return kind


def _rollout(path: str, files: Files, joined: Joined) -> Iterator[RawRecord | BrokenRecord]:
    with opened(path, files, EXPORT) as value:
        step, samples = _samples(path, value, files.size(path))
        for i, raw in enumerate(samples):
            place = f"{path}[{i}]"
            try:
                sample = sample_of(raw)
                record = rollout_record(place, sample, step)
                found = joined.take(place, i, step, sample, record) if joined.any(step) else record
            except (ContentError, ValueError, TypeError, KeyError, IndexError, OverflowError) as err:
                found = BrokenRecord(place, str(err).removeprefix(f"{path}: ")[:300])
            yield found


def _debug(path: str, files: Files) -> Iterator[RawRecord | BrokenRecord]:
    with opened(path, files, EXPORT) as value:
        about: Mapping[str, Any] = value if isinstance(value, dict) else {}
        _, samples = _samples(path, value, files.size(path))
        for i, raw in enumerate(samples):
            place = f"{path}[{i}]"
            try:
                yield debug_record(place, sample_of(raw), about)
            except (ContentError, ValueError, TypeError, KeyError, IndexError, OverflowError) as err:
                yield BrokenRecord(place, str(err).removeprefix(f"{path}: ")[:300])


def _samples(path: str, value: Any, size: int) -> tuple[int | None, list[Any]]:
    samples: Any = value.get("samples") if isinstance(value, dict) else None
    if not isinstance(samples, list):
        raise ContentError(f"{path}: no list of samples in it")
    if len({id(s) for s in samples}) != len(samples):
        raise ContentError(f"{path}: damaged or made up: the same sample stands in it twice")
    checked(path, samples, size)
    return step_of(value.get("rollout_id")), samples
