"""What only a process shows: what is imported, pipes that close, terminals; and that the flags stay as they are."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import SCORER

from onepolicy.cli import progress
from onepolicy.cli.main import command

HEAVY = {"torch", "pyarrow", "vllm", "transformers"}
FLAGS = Path(__file__).parent / "flags.txt"
MAIN = "from onepolicy.cli.main import main; main()"


def heavy_after(code: str) -> set[str]:
    """The heavy packages that are imported after `code`."""
    tell = "import sys; print('LOADED', *sorted({n.partition('.')[0] for n in sys.modules}))"
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}\n{tell}"], capture_output=True, text=True, timeout=60, check=True
    )
    return HEAVY & set(ran.stdout.splitlines()[-1].split())


VERBS = ("record", "check", "compare", "judge", "horizon", "watch", "suite", "explain")
LINES = [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS), ["explain", "kl-above-bound"]]
LIGHT = ["import onepolicy", *(f"from onepolicy.cli.main import run; run({argv})" for argv in LINES)]


@pytest.mark.parametrize("code", LIGHT)
def test_help_loads_nothing_heavy(code: str):
    assert heavy_after(code) == set()


def test_the_test_above_can_fail():
    assert heavy_after("import pyarrow") == {"pyarrow"}


def flags() -> list[str]:
    """Every option and argument: verb, names, whether it is required."""
    root: Any = command()
    out: list[str] = []
    for verb, cmd in [("onepolicy", root), *sorted(root.commands.items())]:
        for p in cmd.params:
            names = "/".join([*p.opts, *p.secondary_opts]) if p.param_type_name == "option" else p.name.upper()
            out.append(f"{verb} {names}{' required' if p.required else ''}")
    return out


def test_the_flags_are_frozen():
    """A new flag is a decision: ONEPOLICY_UPDATE=1 writes the list anew."""
    if os.environ.get("ONEPOLICY_UPDATE"):
        FLAGS.write_text("\n".join(flags()) + "\n", encoding="utf-8")
    assert flags() == FLAGS.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("bounds", "code"), [("bf16", 0), ("strict", 1)])
def test_a_reader_that_has_gone_changes_no_verdict(report: Path, bounds: str, code: int):
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-c", MAIN, "judge", str(report), "--bounds", bounds],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (ran.returncode, ran.stderr) == (code, "")


def on_a_terminal(argv: list[str], **more: str) -> str:
    """What a process writes whose stdout and stderr are a terminal."""
    leader, follower = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM", "COLUMNS")}
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, *argv], stdout=follower, stderr=follower, env={**env, "TERM": "xterm", **more}
    )
    os.close(follower)
    out = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        out += part
    child.wait(60)
    os.close(leader)
    return out.decode()


def test_a_terminal_gets_colours_and_a_bar(recorded: Path):
    out = on_a_terminal(["check", str(recorded), "--scorer", SCORER])
    assert "\x1b[1;7;32m PASS " in out
    assert "scoring" in out


def test_colours_can_be_declined(report: Path):
    for more in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b[" not in on_a_terminal(["judge", str(report)], **more)


def test_a_pipe_gets_neither(recorded: Path):
    ran = subprocess.run(
        [sys.executable, "-c", MAIN, "check", str(recorded), "--scorer", SCORER],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "\x1b" not in ran.stdout + ran.stderr
    assert ran.stderr == ""


def test_a_long_run_without_a_terminal_says_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now = iter([0.0, 1.0, 11.0, 11.0, 12.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.progress("scoring", "sequences") as told:
        for done in (1, 2, 3):
            told(done, 9)
    assert capsys.readouterr().err == "scoring: 2 of 9 sequences\n"


def test_output_that_the_terminal_cannot_write_is_escaped(report: Path):
    ran = subprocess.run(
        [sys.executable, "-c", MAIN, "judge", str(report)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0
    assert b"\\xb7" in ran.stdout
