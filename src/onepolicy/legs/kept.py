"""Finished scorings on disk, so that a check that was interrupted goes on where it was.

One `.npz` a scoring, named by a digest of what was asked and of the tokens: numpy arrays and JSON text, no pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
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
        except (OSError, ValueError, KeyError):
            return None  # not there, or cut off by the interruption: it is scored again

    def put(self, task: Task, rollouts: Rollouts, scoring: Scoring) -> None:
        """Written beside and moved into place: a file is whole or not there. Distributions are not kept."""
        if task.distributions:
            return
        path = self._path(task, rollouts)
        beside = path.with_name(f".{secrets.token_hex(4)}.npz")
        np.savez(beside, **_arrays(scoring))
        os.replace(beside, path)

    def rollouts(self) -> Rollouts | None:
        """The drawn tokens of the interrupted check."""
        from onepolicy.storage import read

        path = self.directory / "rollouts.parquet"
        return read(path) if path.exists() else None

    def put_rollouts(self, rollouts: Rollouts) -> None:
        from onepolicy.storage import write

        beside = self.directory / f".{secrets.token_hex(4)}.parquet"
        write(rollouts, beside)
        os.replace(beside, self.directory / "rollouts.parquet")

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
