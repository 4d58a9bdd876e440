"""Every finding code has a page, every page a code, and what a page shows is what the program prints.

ONEPOLICY_UPDATE=1 writes the excerpts anew.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest
from scenarios import SCENARIOS

import onepolicy
from onepolicy.cli.explain import plain_text
from onepolicy.codes import CODES, page
from onepolicy.report import fidelity
from onepolicy.report.text import render
from onepolicy.types import TokenReport

PAGES = Path(onepolicy.__file__).parent / "pages"
WIDTH = 78
SECTIONS = ["What it says", "Why it matters", "How it looks", "Common causes", "What to do", "See also"]
_BLOCK = re.compile(r"```text excerpt\n(.*?)```\n", re.DOTALL)


def excerpt(code: str) -> str:
    """The verdict line and the finding, as they stand on the screen."""
    report = SCENARIOS[code]()
    screen = fidelity.render(report, WIDTH) if isinstance(report, TokenReport) else render(report, WIDTH)
    lines = screen.splitlines()
    start = next((i for i, line in enumerate(lines) if re.match(rf" [✗!·] {code}  ", line)), None)
    assert start is not None, "\n".join(lines)
    rest = itertools.takewhile(lambda line: line.startswith("   "), lines[start + 1 :])
    head = [lines[0], *itertools.takewhile(lambda line: line and not line.startswith(" "), lines[1:])]
    return "\n".join([*head, lines[start], *rest]) + "\n"


def test_every_code_has_a_page_and_every_page_a_code():
    assert {p.stem for p in PAGES.glob("*.md")} == set(CODES)
    assert set(SCENARIOS) == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_the_excerpt_is_what_the_program_prints(code: str):
    path = PAGES / f"{code}.md"
    fresh = excerpt(code)
    if os.environ.get("ONEPOLICY_UPDATE"):
        text = path.read_text(encoding="utf-8")
        path.write_text(_BLOCK.sub(lambda _: f"```text excerpt\n{fresh}```\n", text), encoding="utf-8")
    blocks = _BLOCK.findall(path.read_text(encoding="utf-8"))
    assert blocks == [fresh], f"ONEPOLICY_UPDATE=1 pytest {__file__} writes it anew"


@pytest.mark.parametrize("code", CODES)
def test_a_page_has_its_sections_and_fits_a_terminal(code: str):
    text = page(code)
    assert text.startswith(f"# {code}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert all(len(line) <= 80 for line in text.splitlines() if "https://" not in line)
    assert 18 <= len(text.splitlines()) <= 50


@pytest.mark.parametrize("code", CODES)
def test_pages_name_only_codes_that_exist(code: str):
    named = re.findall(r"^- `([a-z-]+)`", page(code).split("## See also")[1], re.MULTILINE)
    assert named and set(named) <= set(CODES) - {code}


def test_links_are_public_and_whole():
    for path in PAGES.glob("*.md"):
        for url in re.findall(r"\(([^)\s]*://[^)\s]*)\)", path.read_text(encoding="utf-8")):
            assert re.fullmatch(
                r"https://(github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|arxiv\.org/abs/[\d.]+)", url
            ), url


def test_pages_read_as_plain_text():
    text = plain_text("# a\n\n## See\n\nsee [x #1](https://e.org/1) and `b`\n\n```text excerpt\n `kept`\n```\n")
    assert text == "a\n\nSEE\n\nsee x #1 (https://e.org/1) and b\n\n     `kept`"
