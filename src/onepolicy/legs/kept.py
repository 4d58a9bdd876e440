"""Finished scorings on disk, so that a check that was interrupted goes on where it was.

One `.npz` a scoring, named by a digest of what was asked and of the tokens: numpy arrays and JSON text, no pickle.
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

from onepolicy.errors import UsageError
from onepolicy.legs.plan import Task
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

_COLUMNS = ("entropy", "varentropy")


class Kept:
    """The directory of one check. Errors: `UsageError` for a path that is no directory and cannot be one."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise UsageError(f"--resume {self.directory}: not a directory that can be written: {err}") from None

    def get(self, task: Task, rollouts: Rollouts) -> Scoring | None:
        """The stored scoring of this task over these tokens, None if there is none or it cannot be read."""
        try:
            with np.load(self._path(task, rollouts), allow_pickle=False) as stored:
                return _read(dict(stored))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None  # not there, or cut off by the interruption: it is scored again

    def put(self, task: Task, rollouts: Rollouts, scoring: Scoring) -> None:
        """Written beside and moved into place: a file is whole or not there. Distributions are not kept."""
        if task.distributions:
            return
        path = self._path(task, rollouts)
        beside = path.with_name(f".{secrets.token_hex(4)}.npz")
        np.savez(beside, **_arrays(scoring))
        os.replace(beside, path)

    def grounds(self, asked: Mapping[str, Any]) -> tuple[dict[str, Rollouts], dict[str, Any]] | None:
        """The tokens that an earlier run of the same check drew and encoded, and what it noted; None if there are none.

        Errors: `UsageError` where the directory belongs to another check.
        """
        from onepolicy.storage import read

        note = self.directory / "check.json"
        if not note.exists():
            return None
        told: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
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
        beside = self.directory / f".{secrets.token_hex(4)}{Path(name).suffix}"
        write(beside)
        os.replace(beside, self.directory / name)

    def _path(self, task: Task, rollouts: Rollouts) -> Path:
        digest = hashlib.sha256(repr(task).encode())
        digest.update(np.ascontiguousarray(rollouts.token_ids).tobytes() + rollouts.offsets.tobytes())
        return self.directory / f"{digest.hexdigest()[:20]}.npz"


def _arrays(scoring: Scoring) -> dict[str, Any]:
    said = {k: getattr(scoring, k) for k in ("semantics", "dtype", "fingerprint", "scoring_id")}
    out: dict[str, Any] = {"said": np.frombuffer(json.dumps(said, default=dict).encode(), dtype=np.uint8)}
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
