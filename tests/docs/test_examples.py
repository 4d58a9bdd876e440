"""Every example in the README and the docs runs: Python blocks in order, `$ onepolicy ...` lines by exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from onepolicy.records import from_records

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```", re.M | re.S)
ONEPOLICY = [sys.executable, "-c", "from onepolicy.cli.main import main; main()"]


def blocks(page: Path, language: str) -> list[str]:
    return [body for lang, _, body in BLOCK.findall(page.read_text(encoding="utf-8")) if lang == language]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {"__name__": "example"}
    for body in blocks(page, "python"):
        exec(compile(body, str(page), "exec"), scope)
    if page.name == "README.md":
        assert capsys.readouterr().out.startswith("pass ")


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "console")], ids=lambda p: p.name)
def test_console(page: Path, tmp_path: Path) -> None:
    """One folder a page, so that what one command writes the next one reads."""
    lines = [line for body in blocks(page, "console") for line in body.splitlines() if line.startswith("$ ")]
    assert lines
    for line in lines:
        command, _, comment = line[2:].partition("   # exit ")
        words = shlex.split(command)
        assert words[0] == "onepolicy"
        got = subprocess.run([*ONEPOLICY, *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert got.returncode == int(comment or 0), (line, got.stdout, got.stderr)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "json")], ids=lambda p: p.name)
def test_json_lines_are_records(page: Path) -> None:
    for body in blocks(page, "json"):
        assert len(from_records(json.loads(line) for line in body.splitlines())) == len(body.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def shape(text: str) -> list[str]:
    """A screen without what changes from run to run: the words of its labels, line by line, up to the worst tokens."""
    lines = text.split("Worst tokens")[0].splitlines()
    plain = (re.sub(r"[-+×~±]?\d[\d.,e-]*%?", "N", line) for line in lines)
    return [re.sub(r"[\s\[\]]+", " ", re.sub(r"(N[,\s]*)+", "N ", line)).strip() for line in plain]


@pytest.mark.engines
def test_the_screen_in_the_readme_is_what_the_command_prints(tmp_path: Path) -> None:
    """`make demo` again; digits aside, the README shows the same lines."""
    for words in (
        ["record", "--sampler", "vllm:tiny", "-o", "rollouts.parquet"],
        ["check", "rollouts.parquet", "--scorer", "hf:tiny", "-o", "report.json"],
    ):
        env = {**os.environ, "COLUMNS": "100"}
        got = subprocess.run([*ONEPOLICY, *words], cwd=tmp_path, capture_output=True, text=True, timeout=280, env=env)
        assert got.returncode == 0, got.stderr
    screen = next(body for lang, _, body in BLOCK.findall(PAGES[0].read_text(encoding="utf-8")) if lang == "text")
    assert shape(screen) == shape(got.stdout)


def test_the_shape_of_a_screen_sees_a_changed_label() -> None:
    assert shape("mean |d|  0.0145 [0.01, 0.02]") == shape("mean |d| 0.2 [0.1, 0.3]")
    assert shape("mean |d|  0.0145") != shape("p50 |d|  0.0145 x")
