"""`onepolicy watch`: a file that grows, what it shows, and the exit code of the worst alarm."""

from __future__ import annotations

import functools
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from onepolicy.cli.watch import Followed, trend
from onepolicy.gates.bounds import load
from onepolicy.monitor.judge import said
from onepolicy.monitor.sinks import open_sink
from onepolicy.types import Outcome


def write(path: Path, steps: range, *codes: str, mean: float = 0.02, **evidence: Any) -> None:
    sink = open_sink(f"jsonl:{path}", load("bf16"))
    for step in steps:
        findings = [said(code, f"{code} \x1b[31m happened") for code in codes]
        numbers = {
            "abs_log_ratio/mean": mean,
            "tokens": 5e5,
            "monitor/ranks": 8.0,
            "lag/mean": None,
            "missing/share": 0.0,
        }
        sink.write({"step": step, "time": time.time(), "numbers": numbers, "findings": findings})
    sink.close()


def test_a_healthy_run(cli: Command, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 30))
    ran = cli("watch", path, "--once")
    assert ran.code == 0 and ran.err == ""
    assert ran.out.startswith(" PASS   m.jsonl, bounds bf16: step 29, 500,000 tokens, 8 ranks\n")
    row = next(line for line in ran.out.splitlines() if line.startswith("mean |d|, nats"))
    assert row.split()[3:6] == ["0.02", "0.1", "0.02"]
    assert "versions behind" not in ran.out  # not measured is not shown as 0


@pytest.mark.parametrize(
    ("code", "exit_code", "word"),
    [("gap-jumped", 1, "DRIFT"), ("uncorrected-off-policy", 0, "PASS"), ("positive-logprob", 4, "ERROR")],
)
def test_the_exit_code_is_that_of_the_worst_alarm(
    cli: Command, tmp_path: Path, code: str, exit_code: int, word: str
) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 5))
    write(path, range(5, 9), code, mean=0.3)
    write(path, range(9, 12))  # it is over, and was there
    ran = cli("watch", path, "--once")
    assert ran.code == exit_code and ran.out.startswith(f" {word} ")
    assert f"{code}  4 steps from 5 to 8, over: {code} \\x1b[31m happened" in " ".join(ran.out.split()).replace(
        f"{code} 4", f"{code}  4"
    )
    assert "\x1b[31m" not in ran.out


def test_a_second_run_in_one_file(cli: Command, tmp_path: Path) -> None:
    """Its steps count anew; what was on at the first run's step 3 is not on at its own."""
    path = tmp_path / "m.jsonl"
    write(path, range(1, 4), "gap-jumped")
    write(path, range(1, 4))
    ran = cli("watch", path, "--once")
    assert "gap-jumped  3 steps from 1 to 3, over:" in ran.out and "→" not in ran.out


def test_what_a_loop_cannot_cover_is_said(cli: Command, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 3))
    said = "not covered in a loop: surprisal_sampler/excess, surprisal_scorer/excess"
    assert said in cli("watch", path, "--once").out


def test_an_alarm_that_is_on_gives_its_advice(cli: Command, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 5), "gap-grows")
    out = " ".join(cli("watch", path, "--once").out.split())
    assert "✗ gap-grows 4 steps from 1 on:" in out and "→ Check the live weights of both sides" in out


def test_before_the_first_step(cli: Command, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(0))
    ran = cli("watch", path, "--once")
    assert ran.code == 3 and "no step is judged yet" in ran.out


def test_what_is_no_such_file(cli: Command, tmp_path: Path) -> None:
    ran = cli("watch", tmp_path / "none.jsonl", "--once")
    assert ran.code == 2 and ran.err.count("\n") == 1 and "cannot be read: No such file" in ran.err
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1}\n[]\nx\n')
    ran = cli("watch", other, "--once")
    assert ran.code == 4 and "not a monitor's rows" in ran.err


def test_lines_that_are_broken_are_counted(cli: Command, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 4))
    with path.open("a") as f:
        f.write('{"step": 4, "numbers": 3}\n{"half": \n[1]\n' + '{"step": 5, "numbers": {}, "findings": [{}]}\n')
    ran = cli("watch", path, "--once")
    assert ran.code == 0 and "4 lines could not be read" in ran.out


def test_it_follows_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 3))
    followed = Followed(path)
    assert followed.read() and followed.judged == 2 and not followed.read()
    line = json.dumps({"step": 3, "time": 0, "numbers": {"tokens": 1.0}, "findings": []})
    with path.open("a") as f:
        f.write(line[:20])
        f.flush()
        assert not followed.read()  # half a line is not read
        f.write(line[20:] + "\n")
    assert followed.read() and followed.last["step"] == 3
    path.unlink()
    write(path, range(1, 2), "gap-jumped")  # a new run took the place
    assert followed.read() and followed.judged == 1 and followed.outcome is Outcome.DRIFT


def test_it_lives_in_a_terminal(tmp_path: Path) -> None:
    """A real terminal: it starts, shows a row that comes later, and ends on Ctrl-C with the alarm's exit code."""
    path = tmp_path / "m.jsonl"
    write(path, range(1, 3))
    parent, child = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    code = "from onepolicy.cli.main import main; main()"
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # it may be ignored where tests are started
    words = [sys.executable, "-c", code, "watch", str(path)]
    ran = subprocess.Popen(words, stdout=child, stderr=child, env=env, preexec_fn=heed)
    os.close(child)
    seen = b""
    try:
        seen = _until(parent, b"step 2", seen)
        write(path, range(3, 5), "gap-jumped")
        seen = _until(parent, b"gap-jumped", seen)
        ran.send_signal(signal.SIGINT)
        assert ran.wait(timeout=30) == 1
    finally:
        ran.kill()
        os.close(parent)
    assert b"DRIFT" in seen


def _until(terminal: int, words: bytes, seen: bytes) -> bytes:
    end = time.monotonic() + 60
    while words not in seen:
        assert time.monotonic() < end, seen[-2000:]
        seen += os.read(terminal, 65536)
    return seen


def test_trends() -> None:
    assert trend([0.0, 1.0]) == "▁█" and trend([2.0] * 3) == "▁▁▁"
    assert len(trend([float(i) for i in range(1000)])) == 40
    assert trend([0.0] * 99 + [1.0]) == "▁" * 39 + "█"
