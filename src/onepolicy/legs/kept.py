"""Finished scorings on disk, so that a check that was interrupted goes on where it was.

One `.npz` a scoring, named by a digest of what was asked, of the tokens with what they are declared to mean, and of the
engine's files (name, size, time): numpy arrays and JSON text, no pickle. Engines that were given running are not kept:
nothing names them, and the same object may hold other weights the next time.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.engines.base import EngineSpec
from onepolicy.engines.open import named
from onepolicy.errors import UsageError
from onepolicy.legs.plan import Task
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

_COLUMNS = ("entropy", "varentropy")


class Kept:
    """The directory of one check. Errors: `UsageError` for a path that is no directory and cannot be one."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        #: Why something could not be kept; empty while all is well.
        self.trouble = ""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise UsageError(f"--resume {self.directory}: not a directory that can be written: {err}") from None

    def get(self, task: Task, rollouts: Rollouts) -> Scoring | None:
        """The stored scoring of this task over these tokens, None if there is none or it cannot be read."""
        try:
            with np.load(self._path(task, rollouts), allow_pickle=False) as stored:
                found = _read(dict(stored))
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
            return None  # not there, or cut off by the interruption: it is scored again
        whole = len(found.logprobs.values) == rollouts.n_tokens == len(found.logprobs.mask())
        return found if whole and not _running(task) else None

    def put(self, task: Task, rollouts: Rollouts, scoring: Scoring) -> None:
        """Written beside and moved into place: a file is whole or not there. Distributions are not kept."""
        if task.distributions or _running(task):
            return
        arrays = _arrays(scoring)
        self._replaced(self._path(task, rollouts).name, lambda path: np.savez(path, **arrays))

    def grounds(self, asked: Mapping[str, Any]) -> tuple[dict[str, Rollouts], dict[str, Any]] | None:
        """The tokens that an earlier run of the same check drew and encoded, and what it noted; None if there are none.

        Errors: `UsageError` where the directory belongs to another check.
        """
        from onepolicy.storage import read

        note = self.directory / "check.json"
        if not note.exists():
            return None
        told = _note(note)
        for name, value in asked.items():
            was = told["asked"].get(name)
            if was != value:
                what = f"it holds another check ({name} {was!r}, now {value!r})"
                raise UsageError(f"--resume {self.directory}: {what}; name another directory")
        return {name: read(self.directory / f"{name}.parquet") for name in told["grounds"]}, told["noted"]

    def put_grounds(self, asked: Mapping[str, Any], grounds: Mapping[str, Rollouts], noted: Mapping[str, Any]) -> None:
        """The note is written last: without it nothing of this counts."""
        from onepolicy.storage import write

        for name, rollouts in grounds.items():
            self._replaced(f"{name}.parquet", lambda path, r=rollouts: write(r, path))
        text = json.dumps({"asked": asked, "grounds": list(grounds), "noted": noted})
        self._replaced("check.json", lambda path: path.write_text(text, encoding="utf-8"))

    def _replaced(self, name: str, write: Callable[[Path], Any]) -> None:
        """A disk that is full costs what would have been kept, not the check."""
        beside = self.directory / f".{secrets.token_hex(4)}{Path(name).suffix}"
        try:
            write(beside)
            os.replace(beside, self.directory / name)
        except OSError as err:
            self.trouble = self.trouble or f"{self.directory} cannot be written ({err}): not everything is kept"
            beside.unlink(missing_ok=True)

    def _path(self, task: Task, rollouts: Rollouts) -> Path:
        digest = hashlib.sha256(repr(task).encode())
        digest.update(np.ascontiguousarray(rollouts.token_ids).tobytes() + rollouts.offsets.tobytes())
        digest.update(repr([[rollouts.record(k, i) for k in _DECLARED] for i in range(len(rollouts))]).encode())
        digest.update(files_digest(task.config).encode())
        return self.directory / f"{digest.hexdigest()[:20]}.npz"


#: What a scorer reads of the records: other values of these are another scoring.
_DECLARED = ("logprob_semantics", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
             "frequency_penalty")  # fmt: skip


def _running(task: Task) -> bool:
    return ":running-" in task.config


def files_digest(config: str) -> str:
    """Of names, sizes and times of the files that an engine's spec points at: after an update of the weights they are
    other ones. Empty for a target that is no path."""
    target = Path(named(EngineSpec.parse(config)).target).expanduser()
    if target == Path() or not target.exists():
        return ""
    found = sorted(p for p in target.iterdir() if p.is_file()) if target.is_dir() else [target]
    said = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in found]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def _note(path: Path) -> dict[str, Any]:
    """Errors: `UsageError` for a file that no check wrote."""
    try:
        told: Any = json.loads(path.read_text(encoding="utf-8"))
        if {"asked", "grounds", "noted"} <= set(told) and isinstance(told["asked"], dict):
            return told
    except (OSError, ValueError, TypeError):
        pass
    raise UsageError(f"--resume {path.parent}: its {path.name} was written by no check; name another directory")


def _plain(value: Any) -> Any:
    """What an engine put into its fingerprint, as JSON has it."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _arrays(scoring: Scoring) -> dict[str, Any]:
    said = {k: getattr(scoring, k) for k in ("semantics", "dtype", "fingerprint", "scoring_id")}
    out: dict[str, Any] = {"said": np.frombuffer(json.dumps(said, default=_plain).encode(), dtype=np.uint8)}
    for name in ("logprobs", *_COLUMNS):
        column: Values | None = getattr(scoring, name)
        if column is not None:
            out[name], out[f"{name}_valid"] = column.values, column.mask()
    if scoring.routes is not None:
        out["routes"] = scoring.routes
    return out


def _read(stored: dict[str, Any]) -> Scoring:
    said = json.loads(bytes(stored["said"]))
    columns = {k: Values(stored[k], stored[f"{k}_valid"]) for k in ("logprobs", *_COLUMNS) if k in stored}
    return Scoring(**columns, **said, routes=stored.get("routes"))
