"""One small folder for each finding about the files of a dump."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np

from audit_dumps import sample
from onepolicy.audit import Choices, audit
from onepolicy.rollouts import Rollouts
from onepolicy.storage import write
from onepolicy.types import Report


def audited(make: Callable[[Path], None]) -> Report:
    """The audit of a folder `dumps/`, from beside it: messages name no folder of this machine."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("dumps").mkdir()
        make(Path("dumps"))
        return audit(["dumps"], Choices(workers=1, what_if=False))


def _healthy(seed: int = 0) -> Rollouts:
    """Gaps of the size and shape that bf16 gives."""
    rollouts = sample(200, seed)
    a = rollouts.scorings["sampler"].logprobs.values.astype(np.float64)
    gap = np.random.default_rng(seed).normal(size=len(a)) * 0.03 * (1 - np.exp(a))
    old = rollouts.scorings["old"]
    return rollouts.with_scoring("old", replace(old, logprobs=replace(old.logprobs, values=-np.abs(a + gap))))


def _cut(folder: Path) -> None:
    write(_healthy(), folder / "step_1.parquet")
    write(_healthy(1), folder / "step_2.parquet")
    whole = (folder / "step_2.parquet").read_bytes()
    (folder / "step_2.parquet").write_bytes(whole[:-2000])


def _foreign(folder: Path) -> None:
    write(_healthy(), folder / "step_1.parquet")
    (folder / "optimizer.pkl").write_bytes(pickle.dumps({"lr": 1e-6, "step": 3}))


def _texts(folder: Path) -> None:
    row = {"input": "2 + 2 =", "output": "4", "gts": "4", "score": 1.0, "step": 3}
    (folder / "3.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))


def _one_side(folder: Path) -> None:
    rollouts = _healthy()
    write(replace(rollouts, scorings={"sampler": rollouts.scorings["sampler"]}), folder / "step_1.parquet")


def _no_dtype(folder: Path) -> None:
    rollouts = _healthy()
    undeclared = {k: replace(v, dtype=None) for k, v in rollouts.scorings.items()}
    write(replace(rollouts, scorings=undeclared), folder / "step_1.parquet")


SCENARIOS: dict[str, Callable[[], Report]] = {
    "files-unreadable": lambda: audited(_cut),
    "files-skipped": lambda: audited(_foreign),
    "text-only": lambda: audited(_texts),
    "one-side-only": lambda: audited(_one_side),
    "dtype-assumed": lambda: audited(_no_dtype),
}
