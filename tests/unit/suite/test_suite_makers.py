"""Made texts: the same for everyone, at any length."""

from __future__ import annotations

import hashlib
import re

import pytest

from onepolicy.suite.makers import makers, text

LONG = 60_000


def digest(maker: str) -> str:
    return hashlib.sha256(text(maker, 1, LONG).encode()).hexdigest()[:12]


def test_texts_are_pinned():
    """The code that makes them is no part of the suite's digest, so its output is pinned here."""
    assert {name: digest(name) for name in makers()} == PINNED


PINNED = {
    "chronicle": "7630ccd501a1",
    "log": "216c32beb6fd",
    "ledger": "b9b1f89ee538",
    "records": "ade6d26d535b",
    "program": "48adb05fb875",
    "lecture": "deb69ff43b0b",
    "dialogue": "e1ef08b17219",
    "chinese": "47cfc3fa5438",
    "japanese": "00d5c477112c",
    "korean": "0fefd3353655",
    "arabic": "174e1fccbce0",
    "hindi": "5580288f1511",
}


@pytest.mark.parametrize("maker", makers())
def test_a_shorter_text_begins_a_longer_one(maker: str):
    long = text(maker, 3, LONG)
    for n in (1, 500, 20_000):
        short = text(maker, 3, n)
        assert n <= len(short) < n + 1200
        assert long.startswith(short)


@pytest.mark.parametrize("maker", makers())
def test_every_slot_is_filled_and_every_line_is_used(maker: str):
    parts, long = makers()[maker], text(maker, 3, LONG)
    assert "‹" not in long and "›" not in long
    for line in parts["lines"]:
        plain = re.split("‹[^›]*›", line)
        assert re.search("(?s:.*?)".join(map(re.escape, plain)), long), line


@pytest.mark.parametrize("maker", makers())
def test_other_seeds_give_other_texts(maker: str):
    a, b = (set(re.split(r"[\n.。।]", text(maker, seed, 20_000))) for seed in (1, 2))
    assert len(a & b) < 0.8 * len(a)


def test_a_slot_is_filled_alike_in_a_line_and_its_numbered_forms_are_not():
    talk = re.findall(r"Have you seen (.*)\?\n.*You mean (.*)\? I left", text("dialogue", 1, LONG))
    assert len(talk) > 50
    assert all(a == b for a, b in talk)
    weddings = re.findall(r"(\w+ \w+) married (\w+ \w+) at", text("chronicle", 1, LONG))
    assert len(weddings) > 5
    assert all(a != b for a, b in weddings)


def test_a_line_does_not_come_again_at_once():
    lines = [re.sub(r"\d+", "", x) for x in text("chronicle", 1, LONG).split(". ")]
    assert not any(lines[i] == lines[i + 1] for i in range(len(lines) - 1))


def test_constants_stay():
    assert len(set(re.findall(r"quay-0\d|mill-07|lamp-11|weir-03", text("log", 1, LONG)))) == 1
