"""The probe set: short strings by class, for what tokenizers are known to treat differently; and the class of a place.

The strings stand in `data/probes.json`. A class names what the strings have in common, so that a difference can be
said in one word: two tokenizers differ on "digits". `class_of` gives the same words for a place in any text.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from functools import cache
from importlib import resources

#: Class -> what its strings hold. `class_of` also says `leading space` (one side puts a space before the text).
CLASSES: dict[str, str] = {
    "empty": "the empty string",
    "words": "plain words and sentences",
    "digits": "numbers of every length and grouping, dates, decimals, other scripts' digits",
    "accents": "letters with marks, composed and decomposed",
    "compatibility": "characters that compatibility normalization (NFKC) replaces",
    "capitals": "capital letters inside words",
    "white-space": "runs of spaces, tabs, line ends; spaces at both ends",
    "emoji": "emoji with joiners, tones, flags",
    "scripts": "every script of the suite and more",
    "code": "program text and punctuation",
    "contractions": "apostrophes beside letters",
    "controls": "control, zero-width, private and unassigned characters",
    "special look-alikes": "text that spells a special token, or nearly",
    "repeats": "long repeats of one string",
}


@cache
def probes() -> dict[str, tuple[str, ...]]:
    """Class -> its strings, in the order of `CLASSES`."""
    text = (resources.files("onepolicy.tokens") / "data" / "probes.json").read_text(encoding="utf-8")
    return {name: tuple(strings) for name, strings in json.loads(text).items()}


#: What looks like a special token: `<|x|>`, `<x>`, `[X]`, and the same in full width.
LOOK_ALIKE = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</?[a-z_]{1,16}>|\[/?[A-Z]{2,8}\]|<0x[0-9A-F]{2}>")


def _has(categories: str) -> Callable[[str], bool]:
    """Whether a character is of one of the Unicode categories, given as `Nd No` or as their first letter."""
    wanted = tuple(categories.split())
    return lambda text: any(unicodedata.category(c).startswith(wanted) for c in text)


def _is_accent(text: str) -> bool:
    """Marks on Latin, Greek or Cyrillic letters; other scripts' marks are a matter of the script."""
    return any("\u0300" <= c <= "\u036f" or _is_composed(c) for c in text)


def _is_composed(c: str) -> bool:
    return (c < "\u0590" or "\u1e00" <= c <= "\u1fff") and unicodedata.decomposition(c)[:1] not in "<"


def _is_emoji(text: str) -> bool:
    return any(
        c in "\ufe0e\ufe0f\u20e3" or (c >= "\U0001f000" and unicodedata.category(c) in ("So", "Sk")) for c in text
    )


def _is_space(text: str) -> bool:
    return not text.strip() or re.search(r"\s\s|[^\S ]", text) is not None


def _is_control(text: str) -> bool:
    return (
        any(unicodedata.category(c) in ("Cf", "Co", "Cn", "Cc") and not c.isspace() for c in text) or "\ufffd" in text
    )


#: Class -> whether a stretch of text belongs to it. The first that holds.
_RULES: list[tuple[str, Callable[[str], bool]]] = [
    ("digits", _has("N")),
    ("emoji", _is_emoji),
    ("controls", _is_control),
    ("accents", _is_accent),
    ("contractions", lambda t: re.search(r"[^\W\d_]['’]|['’][^\W\d_]", t) is not None),
    ("white-space", _is_space),
    ("scripts", lambda t: any(c.isalpha() and c > "\u024f" for c in t)),
    ("capitals", lambda t: re.search(r"[a-z][A-Z]|[A-Z]{2}", t) is not None),
    ("code", lambda t: not any(c.isalpha() for c in t)),
]


def class_of(stretch: str) -> str:
    """The class of a stretch of text on which two tokenizers differ, one of `CLASSES`.

    >>> class_of(" 2024"), class_of("don't"), class_of("\\n\\n"), class_of("the")
    ('digits', 'contractions', 'white-space', 'words')
    """
    if not stretch:
        return "empty"
    return next((name for name, holds in _RULES if holds(stretch)), "words")


def class_of_change(a: str, b: str) -> str:
    """The class where two sides make other text of one: `a` and `b` are what they make of the same place."""
    forms: list[tuple[str, Callable[[str], str]]] = [
        ("leading space", lambda t: t.removeprefix(" ")),
        ("white-space", lambda t: "".join(t.split())),
        ("accents", lambda t: unicodedata.normalize("NFC", t)),
        ("capitals", str.lower),
        ("accents", lambda t: "".join(c for c in unicodedata.normalize("NFD", t) if not unicodedata.combining(c))),
        ("compatibility", lambda t: unicodedata.normalize("NFKC", t)),
    ]
    return next((name for name, form in forms if form(a) == form(b)), class_of(a + b))
