"""A check that is interrupted names what it kept, and goes on from there."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SIDES = ["--sampler", "fake:?dtype=bfloat16", "--scorer", "fake:?dtype=bfloat16&order=pairwise"]
CHECK = ["check", *SIDES, "--max-tokens", "48"]
MAIN = [sys.executable, "-c", "from onepolicy.cli.main import main; main()"]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_goes_on(tmp_path: Path, end: signal.Signals) -> None:
    kept = tmp_path / "kept"
    words = [*MAIN, *CHECK, "--resume", str(kept)]
    # whoever started the tests may ignore interrupts, and children inherit that
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, preexec_fn=heed
    )
    deadline = time.monotonic() + 120
    while len(list(kept.glob("*.npz"))) < 2 and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.02)
    os.kill(running.pid, end)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert f"--resume {kept} goes on from there" in said
    before = {p.name: p.stat().st_mtime_ns for p in kept.glob("*.npz")}
    assert len(before) >= 2
    again = subprocess.run(
        [*words, "-o", "report.json"], capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False
    )
    assert again.returncode == 0, again.stderr
    assert {n: (kept / n).stat().st_mtime_ns for n in before} == before
    assert json.loads((tmp_path / "report.json").read_text())["outcome"] == "pass"
