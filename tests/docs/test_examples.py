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

from onepolicy.cli.explain import SPECIAL_ROWS
from onepolicy.gates.bounds import parse
from onepolicy.legs import LEGS, SPECIAL
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
    (page.name, line.split("   #")[0].split("||")[0].strip())
    for page in PAGES
    for body in blocks(page, "sh")
    for line in body.splitlines()
    if line.startswith("onepolicy ")
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_commands_that_need_your_own_engines_have_verbs_and_options_that_exist(page: str, line: str) -> None:
    words = shlex.split(line)
    verb = words[1:3] if words[1] == "suite" else words[1:2]
    helped = run(ROOT, [*verb, "--help"])
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


def shape(text: str) -> str:
    """A screen without what changes from run to run and from machine to machine: its words, numbers as N, the places of
    line breaks and column gaps as spaces."""
    text = "\n".join(map(uncut, text.splitlines()))
    text = re.sub(r"record \S+,", "record N,", text)
    text = re.sub(r"cpu_capability \w+", "cpu_capability N", text)
    text = re.sub(r"[-+×~±]?\d[\d.,e-]*%?", "N", text)
    return re.sub(r"[\s\[\]]+", " ", re.sub(r"(N[,\s\[\]]*)+", "N ", text)).strip()


def uncut(line: str) -> str:
    """A row of the table of legs without what is compared, which is cut to the width that the numbers leave."""
    words = line.split()
    return f"{words[0]} {' '.join(words[-5:])}" if words and words[0] in {*LEGS, *SPECIAL} else line


def pieces(screen: str) -> list[str]:
    """The parts of a screen between the lines of three dots, where something is left out."""
    return [shape(part) for part in re.split(r"^ *\.\.\.\n", screen, flags=re.M) if part.strip()]


def shown(screen: str, printed: str) -> bool:
    """Whether every piece of the screen stands in what was printed, in that order."""
    rest = shape(printed)
    for piece in pieces(screen):
        at = rest.find(piece)
        if at < 0:
            return False
        rest = rest[at + len(piece) :]
    return True


def screens(page: Path) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [body for lang, info, body in found if (lang, info.strip()) == ("text", "screen")]


def demo() -> list[str]:
    """The words of the command that `make demo` runs, without the program's own name."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return next(shlex.split(line)[1:] for line in lines if line.startswith("\t$(BIN)/onepolicy check "))


@pytest.mark.engines
@pytest.mark.timeout(1300)
def test_the_screens_in_the_readme_are_what_the_commands_print(tmp_path: Path) -> None:
    """`make demo` again, then the drift that the README shows; digits aside, the README shows the same words."""
    readme = ROOT / "README.md"
    whole, drift = screens(readme)
    (tmp_path / "build" / "demo").mkdir(parents=True)
    sound = run(tmp_path, demo(), 600)
    assert sound.returncode == 0, sound.stderr
    assert shown(whole, sound.stdout), sound.stdout
    line = next(line for page, line in COMMANDS if page == readme.name and " build/demo/" in line and "check" in line)
    faulty = run(tmp_path, shlex.split(line)[1:], 600)
    assert faulty.returncode == 1, faulty.stderr
    assert shown(drift, faulty.stdout), faulty.stdout


def test_the_shape_of_a_screen_sees_a_changed_label() -> None:
    assert shape("mean |d|  0.0145 [0.01, 0.02]") == shape("mean |d| 0.2 [0.1, 0.3]")
    assert shape("mean |d|  0.0145") != shape("p50 |d|  0.0145 x")
    assert shape("at record 240b223f-50-0, position 32") == shape("at record bb5ca201-7-0, position 9")
    assert shape("predicted 0.0234, measured 0.02 nats\n  RMS") == shape("predicted 0.02,\n  measured 0.0 nats RMS")


def test_what_a_screen_leaves_out_is_marked() -> None:
    printed = " PASS  all is well\n\nBounds\n  kl 0.1 pass\nLegs\n  again 0 pass\n"
    assert shown(" PASS  all is well\n  ...\nLegs\n  again 3 pass\n", printed)
    assert not shown(" PASS  all is well\n\nLegs\n  again 0 pass\n", printed)
    assert not shown("Legs\n  again 0 pass\n  ...\n PASS  all is well\n", printed)


LEG_ROW = re.compile(r"^\| `([\w-]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)


def test_the_page_of_the_check_has_every_leg_with_its_factor_its_bounds_and_its_finding() -> None:
    text = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    rows = {key: cells for key, *cells in LEG_ROW.findall(text)}
    assert set(rows) == {*LEGS, *SPECIAL}
    for key, (factor, bounds, means) in rows.items():
        leg = LEGS.get(key)
        assert factor.strip() == (leg.factor if leg else SPECIAL[key]), key
        code = leg.code if leg else SPECIAL_ROWS[key]["finds"]
        assert re.findall(r"codes\.md#([\w-]+)", means) == ([code] if code else []), key
        if leg:
            own = leg.bounds or ("floor" if leg.code else "none")
            assert bounds.strip() == own, key
    under = {key: text[: text.index(f"| `{key}` |")].rpartition("\n### ")[2].partition("\n")[0] for key in LEGS}
    assert {key: under[key].lower() for key in LEGS} == {key: leg.question.value for key, leg in LEGS.items()}
