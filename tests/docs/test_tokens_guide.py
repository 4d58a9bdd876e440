"""The guide to `onepolicy tokens` names everything that the program reads and says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onepolicy.tokens.classes import CLASSES
from onepolicy.tokens.others import NOT_SAMPLED, ROLES
from onepolicy.tokens.probes import probes
from onepolicy.tokens.roundtrip_result import RULES
from onepolicy.tokens.spellings import SPELLINGS
from onepolicy.tokens.templates.conversations import built_in
from onepolicy.tokens.templates.process import Limits

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "tokens.md").read_text(encoding="utf-8")
WORDS = {"info": "note", "warn": "warning", "fail": "drift"}


def test_every_key_that_is_read_is_in_the_guide() -> None:
    table = GUIDE.split("## Keys that are read")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert {*SPELLINGS, *NOT_SAMPLED, *ROLES} <= named


@pytest.mark.parametrize("cls", CLASSES)
def test_a_class_is_in_the_guide_with_its_weight(cls: str) -> None:
    row = next(line for line in GUIDE.splitlines() if line.startswith(f"| `{cls}` |"))
    unknown, again = [cell.strip().split(":")[0] for cell in row.strip("| ").split(" | ")[-2:]]
    said = [None if judged is None else judged[1].value for judged in RULES[cls]]
    assert [unknown, again] == ["nothing" if s is None else WORDS[s] for s in said]


def test_numbers_in_the_guide_are_the_program_s() -> None:
    limits, groups = Limits(), probes()
    n = sum(map(len, groups.values()))
    assert f"a probe set of {n} short texts in {len(groups)}\nclasses" in GUIDE
    assert f"on {len(built_in())} built-in conversations" in GUIDE
    assert (
        f"{limits.cpu_seconds:g} s of CPU time, {limits.wall_seconds:g} s in all, {limits.memory_mb} MB of memory and "
        f"{limits.output_chars // 10**6} million characters"
    ) in GUIDE.replace("\n", " ")


def test_the_table_of_families_has_the_texts_of_the_probe_set() -> None:
    rows = [line for line in GUIDE.split("## What six tokenizer families")[1].splitlines() if line.startswith("| ")]
    assert len(rows) == 7
    assert f"none of {sum(map(len, probes().values()))}" in rows[1]
