"""The probe set covers what it promises, and places get the class that a person would give them."""

from __future__ import annotations

import unicodedata

import pytest

from onepolicy.suite.load import load
from onepolicy.tokens.probes import CLASSES, class_of, class_of_change, probes


def all_text() -> str:
    return "".join(text for texts in probes().values() for text in texts)


def scripts(text: str) -> set[str]:
    """The first word of each letter's name: LATIN, CYRILLIC, CJK, ..."""
    return {unicodedata.name(c, "?").split()[0] for c in set(text) if unicodedata.category(c).startswith("L")}


def test_classes_are_those_of_the_table_and_hold_no_text_twice() -> None:
    assert list(probes()) == list(CLASSES)
    assert all(len(set(texts)) == len(texts) > 0 for texts in probes().values())


def test_every_script_of_the_suite_is_probed() -> None:
    suite = load("full")
    texts = [t.reply for t in suite.texts] + [p.prompt for p in (*suite.texts, *suite.prompts) if type(p.prompt) is str]
    missing = scripts("".join(texts)) - scripts(all_text())
    assert missing == set()


def test_digits_of_every_length_and_several_scripts() -> None:
    digits = probes()["digits"]
    assert {n for n in range(1, 13) if any(t.isascii() and t.isdigit() and len(t) == n for t in digits)} == {
        *range(1, 13)
    }
    kinds = {unicodedata.name(c).split()[0] for t in digits for c in t if unicodedata.category(c) == "Nd"}
    assert {"DIGIT", "ARABIC-INDIC", "DEVANAGARI", "FULLWIDTH", "MATHEMATICAL", "THAI"} <= kinds


def test_accents_stand_composed_and_decomposed() -> None:
    accents = probes()["accents"]
    assert any(unicodedata.is_normalized("NFC", t) and not unicodedata.is_normalized("NFD", t) for t in accents)
    assert sum(not unicodedata.is_normalized("NFC", t) for t in accents) >= 10


def test_white_space_probes_hold_each_kind() -> None:
    texts = probes()["white-space"]
    for kind in ("  ", "\t", "\n\n", "\r\n", "\r", "\u00a0", "\u3000", "\x0b", "\u2028"):
        assert any(kind in t for t in texts), repr(kind)
    assert any(t != t.lstrip() and t.strip() for t in texts)
    assert any(t != t.rstrip() and t.strip() for t in texts)


def test_probes_are_texts_that_every_encoder_takes() -> None:
    assert all_text().encode("utf-8").decode("utf-8") == all_text()


@pytest.mark.parametrize(
    ("stretch", "name"),
    [
        ("", "empty"),
        ("the", "words"),
        (" 2024", "digits"),
        ("x٣", "digits"),
        ("½", "digits"),
        ("don't", "contractions"),
        ("l’é", "accents"),
        ("e\u0301", "accents"),
        ("phố", "accents"),
        ("  ", "white-space"),
        ("a\n", "white-space"),
        ("\u3000", "white-space"),
        ("漢字", "scripts"),
        ("привет", "scripts"),
        ("क़", "scripts"),
        ("camelCase", "capitals"),
        ("HTTP", "capitals"),
        (");", "code"),
        ("👍🏽", "emoji"),
        ("a\u200bb", "controls"),
        ("\ufffd", "controls"),
    ],
)
def test_class_of_a_stretch(stretch: str, name: str) -> None:
    assert class_of(stretch) == name
    assert name in CLASSES


@pytest.mark.parametrize(
    ("a", "b", "name"),
    [
        (" a", "a", "leading space"),
        ("a b", "ab", "white-space"),
        ("é", "e\u0301", "accents"),
        ("é", "e", "accents"),
        ("A", "a", "capitals"),
        ("ﬁ", "fi", "compatibility"),
        ("1", "2", "digits"),
    ],
)
def test_class_of_a_changed_text(a: str, b: str, name: str) -> None:
    assert class_of_change(a, b) == class_of_change(b, a) == name
