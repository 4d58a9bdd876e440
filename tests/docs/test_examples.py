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

from onepolicy.gates.bounds import parse
from onepolicy.records import from_records

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```", re.M | re.S)
ONEPOLICY = [sys.executable, "-c", "from onepolicy.cli.main import main; main()"]


def blocks(page: Path, language: str) -> list[str]:
    return [body for lang, _, body in BLOCK.findall(page.read_text(encoding="utf-8")) if lang == language]


def files(page: Path) -> dict[str, str]:
    """What the page shows as files: the blocks marked `file=NAME`."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return {info.strip().removeprefix("file="): body for _, info, body in found if info.strip().startswith("file=")}


def run(folder: Path, words: list[str], seconds: int = 120) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [*ONEPOLICY, *words], cwd=folder, capture_output=True, text=True, timeout=seconds, env=env, check=False
    )


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
    for name, body in files(page).items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    lines = [line for body in blocks(page, "console") for line in body.splitlines() if line.startswith("$ ")]
    assert lines
    for line in lines:
        command, _, comment = line[2:].partition("   # exit ")
        words = shlex.split(command)
        assert words[0] == "onepolicy"
        got = run(tmp_path, words[1:])
        assert got.returncode == int(comment or 0), (line, got.stdout, got.stderr)


COMMANDS = [
    (page.name, line.split("#")[0].split("||")[0].strip())
    for page in PAGES
    for body in blocks(page, "sh")
    for line in body.splitlines()
    if line.startswith("onepolicy ")
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_commands_that_need_your_own_engines_have_verbs_and_options_that_exist(page: str, line: str) -> None:
    words = shlex.split(line)
    helped = run(ROOT, [words[1], "--help"])
    assert helped.returncode == 0, page
    options = {word for word in words[2:] if word.startswith("-")}
    assert all(re.search(rf"(?<![\w-]){re.escape(option)}\b", helped.stdout) for option in options), line


def test_own_bounds_as_the_presets_page_shows_them_are_read() -> None:
    body = next(iter(blocks(ROOT / "docs" / "presets.md", "toml")))
    assert [b.min_tokens for b in parse(body, "mine.toml").bounds] == [2000]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "json")], ids=lambda p: p.name)
def test_json_lines_are_records(page: Path) -> None:
    for body in blocks(page, "json"):
        assert len(from_records(json.loads(line) for line in body.splitlines())) == len(body.splitlines())


LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in LINK.findall(text):
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            assert anchor[1:] in anchors(there), target + anchor


def anchors(page: Path) -> set[str]:
    """The headings of a page as they stand in links."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    assert {p.stem for p in (ROOT / "docs").glob("*.md")} - {"index"} <= set(index)


def shape(text: str) -> list[str]:
    """A screen without what changes from run to run: the words of its labels, line by line, up to the worst tokens."""
    lines = re.sub(r"record \S+,", "record N,", text.split("Worst tokens")[0]).splitlines()
    plain = (re.sub(r"[-+×~±]?\d[\d.,e-]*%?", "N", line) for line in lines)
    return [re.sub(r"[\s\[\]]+", " ", re.sub(r"(N[,\s]*)+", "N ", line)).strip() for line in plain]


def screens(page: Path) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [body for lang, info, body in found if (lang, info.strip()) == ("text", "screen")]


@pytest.mark.engines
def test_the_screens_in_the_readme_are_what_the_commands_print(tmp_path: Path) -> None:
    """`make demo` again, and its report under tighter bounds; digits aside, the README shows the same lines."""
    drawn = run(tmp_path, ["record", "--sampler", "vllm:tiny", "-o", "rollouts.parquet"], 280)
    assert drawn.returncode == 0, drawn.stderr
    checked = run(tmp_path, ["check", "rollouts.parquet", "--scorer", "hf:tiny", "-o", "report.json"], 280)
    assert checked.returncode == 0, checked.stderr
    tighter = run(tmp_path, ["judge", "report.json", "--bounds", "strict"])
    assert tighter.returncode == 1, tighter.stderr
    whole, start = screens(ROOT / "README.md")
    assert shape(whole) == shape(checked.stdout)
    assert shape(start) == shape(tighter.stdout)[: len(shape(start))]


def test_the_shape_of_a_screen_sees_a_changed_label() -> None:
    assert shape("mean |d|  0.0145 [0.01, 0.02]") == shape("mean |d| 0.2 [0.1, 0.3]")
    assert shape("mean |d|  0.0145") != shape("p50 |d|  0.0145 x")
    assert shape("at record 240b223f-50-0, position 32") == shape("at record bb5ca201-7-0, position 9")
