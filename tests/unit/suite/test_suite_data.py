"""The data is what it claims: every category holds what its name says, and nothing is in the suite twice."""

from __future__ import annotations

import ast
import calendar
import csv
import json
import re
import shutil
import string
import subprocess
import sys
import unicodedata
import zlib
from pathlib import Path

import pytest

import onepolicy
from onepolicy.suite import CATEGORIES, SIZES, VERSION, Suite, SuitePrompt, SuiteText, load, makers

FULL, DEFAULT, SMOKE = load("full"), load("default"), load("smoke")
ITEMS = (*FULL.prompts, *FULL.texts)
DATA = Path(onepolicy.__file__).parent / "suite" / "data"


def words(x: SuitePrompt | SuiteText) -> str:
    """Everything that is written in an item."""
    prompt = x.prompt if isinstance(x.prompt, str) else "\n".join(turn["content"] for turn in x.prompt)
    made = makers.text(x.made.maker, x.made.seed, 3000) if x.made else ""
    return prompt + (x.reply if isinstance(x, SuiteText) else "") + made


def of(category: str, suite: Suite = DEFAULT) -> str:
    """All words of a category, prompts and texts."""
    return "\n".join(words(x) for x in (*suite.prompts, *suite.texts) if x.category == category)


# sizes and names


def test_the_data_is_pinned():
    """Changed on purpose? Raise VERSION and pin the new digests: numbers of two versions are not of the same texts."""
    assert VERSION == "2026.11.30"
    assert [load(size).version.rpartition("-")[2] for size in SIZES] == PINNED


PINNED = ["4eb104e049c1", "b72b1efe8aa9", "e1e2def15985"]


def test_sizes_are_nested():
    for small, large in ((SMOKE, DEFAULT), (DEFAULT, FULL)):
        for kind in ("prompts", "texts"):
            a, b = ([x.id for x in getattr(suite, kind)] for suite in (small, large))
            assert len(a) < len(b)
            assert [x for x in b if x in set(a)] == a


def test_sizes_are_as_large_as_they_say():
    assert (len(SMOKE.prompts), len(SMOKE.texts)) == (8, 8)
    for kind in (DEFAULT.prompts, DEFAULT.texts):
        assert len(kind) >= 64
        assert len({x.group for x in kind}) >= 64


def test_every_category_is_in_both_kinds_of_default():
    for kind in (DEFAULT.prompts, DEFAULT.texts):
        assert {x.category for x in kind} == set(CATEGORIES)
    assert {x.category for x in ITEMS} == set(CATEGORIES)


def test_ids_and_words_are_taken_once():
    assert len({x.id for x in ITEMS}) == len(ITEMS)
    assert len({(x.made.maker, x.made.seed) for x in ITEMS if x.made}) == sum(x.made is not None for x in ITEMS)
    written = [words(x) for x in ITEMS if not x.made]
    assert len(set(written)) == len(written)


def test_no_prompt_is_the_beginning_of_a_text():
    """What is drawn from is not what is scored."""
    drawn = {json.dumps(x.prompt) for x in FULL.prompts if not x.made}
    assert not drawn & {json.dumps(x.prompt) for x in FULL.texts}
    long = [words(x) for x in FULL.prompts if not x.made and len(words(x)) > 30]
    scored = "\n".join(words(x) for x in FULL.texts)
    assert [x for x in long if x in scored] == []


def test_texts_of_one_group_are_forms_of_one_text():
    groups: dict[str, list[str]] = {}
    for x in FULL.texts:
        groups.setdefault(x.group, []).append(words(x))
    several = [forms for forms in groups.values() if len(forms) > 1]
    assert len(several) == 1
    for forms in several:
        assert len(set(forms)) > 1
        assert len({unicodedata.normalize("NFC", f) for f in forms}) == 1


def test_the_files_are_small_and_can_be_read():
    files = sorted(DATA.iterdir())
    assert sum(f.stat().st_size for f in files) < 400_000
    for f in files:
        text = f.read_bytes().decode("utf-8")
        assert text.endswith("\n") and not text.endswith("\n\n")
        hidden = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Co", "Cn") and c != "\n"}
        assert hidden == set(), f"{f.name}: write what cannot be seen as an escape"


def test_the_docs_name_every_category():
    page = (Path(__file__).parents[3] / "docs" / "suite.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", page.partition("## Categories")[2], re.M)) == CATEGORIES
    assert VERSION in page


# what the categories claim

SCRIPTS = {
    "chinese": ("CJK UNIFIED",),
    "japanese": ("HIRAGANA", "KATAKANA", "CJK UNIFIED"),
    "korean": ("HANGUL",),
    "arabic": ("ARABIC",),
    "hindi": ("DEVANAGARI",),
}


def script(c: str) -> str:
    name = unicodedata.name(c, "")
    known = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "ARABIC", "DEVANAGARI", "LATIN", "CYRILLIC", "GREEK", "HEBREW")
    return next((k for k in known if name.startswith(k)), name.partition(" ")[0])


def share(text: str, beginnings: tuple[str, ...]) -> float:
    letters = [c for c in text if c.isalpha()]
    return sum(unicodedata.name(c, "").startswith(beginnings) for c in letters) / max(1, len(letters))


@pytest.mark.parametrize("category", SCRIPTS)
def test_a_language_is_written_in_its_script(category: str):
    items = [x for x in ITEMS if x.category == category]
    assert len(items) >= 5
    assert [x.id for x in items if share(words(x), SCRIPTS[category]) < 0.95] == []
    assert share(of("prose"), SCRIPTS[category]) == 0


def test_japanese_has_both_kana_and_kanji():
    for beginning, least in (("HIRAGANA", 0.3), ("KATAKANA", 0.001), ("CJK UNIFIED", 0.2)):
        assert share(of("japanese", FULL), (beginning,)) > least


def test_arabic_with_and_without_vowel_signs():
    vowels = [sum("\u064b" <= c <= "\u0652" for c in words(x)) / len(words(x)) for x in FULL.texts if "arabic" in x.id]
    assert max(vowels) > 0.2
    assert min(vowels) < 0.02


def test_mixed_has_several_scripts_in_each_item():
    seen = {x.id: {script(c) for c in words(x) if c.isalpha()} for x in ITEMS if x.category == "mixed"}
    assert [name for name, scripts in seen.items() if len(scripts) < 3] == []
    assert len(set().union(*seen.values())) >= 8
    directions = {unicodedata.bidirectional(c) for c in of("mixed")}
    assert {"L", "AL"} <= directions


HOLDS: dict[str, tuple[str, ...]] = {
    "emoji": (
        "\u200d",  # joiner
        "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",  # a family of four
        "\U0001f44b\U0001f3fb",  # skin tone
        "\U0001f469\U0001f3ff\u200d\U0001f33e",  # skin tone, joined
        "\U0001f1f8\U0001f1ea",  # flag of two letters
        "\U0001f3f4\U000e0067\U000e0062",  # flag of tags
        "\u2764\ufe0f",  # picture variation
    ),
    "combining": ("e\u0302\u0301", "\u1ebf", "\u1112\u1161\u11ab", "\u0489"),
    "control": (
        *("\x00", "\x1b[", "\x07", "\x08", "\r\n", "\x7f", "\x85", "\u2028"),
        *("\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u202e", "\u2066"),
    ),
    "runs": (" " * 200, "\t" * 40, "\n" * 60, "0" * 64, "9" * 50, "." * 120, "=" * 80),
    "rare": (" the" * 120, "ha" * 80, "\u16a0", "\U0001202d", "\U00013080", "\ufdfd", "\ua66e"),
    "specials": ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "</s>", "<s>", "[INST]", "<<SYS>>", "<bos>", "[MASK]"),
    "latex": ("\\begin{theorem}", "\\begin{align}", "\\begin{tabular}", "\\frac{", "\\sum_{", "$"),
    "code": ("def ", "struct ring", "pub fn", "async function", "SELECT", "#!/usr/bin/env bash", "data Tree a"),
    "tools": ('{"tool": "tide_table"', '<call name="stock">', "<result>", '"arguments"', "run_tests"),
    "certain": ("11\n12\n13\n", "h i j k l m", "April, May, June"),
}


@pytest.mark.parametrize("category", HOLDS)
def test_a_category_holds_what_it_names(category: str):
    assert [x for x in HOLDS[category] if x not in of(category)] == []
    missing = [x for x in HOLDS[category] if x not in of("prose")]
    assert len(missing) >= len(HOLDS[category]) - 1, "what is in any prose names no category"


def test_keycaps_and_variations_are_in_full():
    assert all(x in of("emoji", FULL) for x in ("1\ufe0f\u20e3", "\u260e\ufe0e", "\u260e\ufe0f"))


def longest(pattern: str, text: str) -> int:
    return max((len(m[0]) for m in re.finditer(pattern, text)), default=0)


def test_marks_are_stacked():
    assert longest("[\u0300-\u036f\u0489]+", of("combining")) >= 14
    assert longest("[\u0300-\u036f\u0489]+", of("prose")) == 0


def test_both_normal_forms_are_there():
    texts = [words(x) for x in FULL.texts if x.category == "combining"]
    for form, other in (("NFC", "NFD"), ("NFD", "NFC")):
        assert any(unicodedata.is_normalized(form, t) and not unicodedata.is_normalized(other, t) for t in texts)
    assert any(not unicodedata.is_normalized("NFC", t) and not unicodedata.is_normalized("NFD", t) for t in texts)


def test_control_holds_every_kind_of_what_cannot_be_seen():
    kinds = {unicodedata.category(c) for c in of("control", FULL)}
    assert {"Cc", "Cf", "Zs", "Zl", "Zp", "Co", "Cn"} <= kinds
    spaces = {c for c in of("control", FULL) if unicodedata.category(c) == "Zs"}
    assert len(spaces) >= 15


def test_rare_holds_scripts_that_are_nowhere_else():
    scripts = {unicodedata.name(c, "").partition(" ")[0] for c in of("rare") if c.isalpha()}
    assert {"RUNIC", "CUNEIFORM", "EGYPTIAN", "CHEROKEE", "CANADIAN", "JAVANESE", "ETHIOPIC", "MONGOLIAN"} <= scripts


def texts(category: str) -> dict[str, SuiteText]:
    return {x.id: x for x in FULL.texts if x.category == category}


def test_code_and_data_are_what_they_look_like():
    ast.parse(words(texts("code")["code-python-runs"]))
    ast.parse(makers.text("program", 5, 20_000))
    for name in ("json-order", "json-schema"):
        assert json.loads(words(texts("json")[name]))
    for line in makers.text("records", 5, 20_000).split("\n"):
        assert json.loads(line)["seq"] >= 1
    table = list(csv.reader(words(texts("json")["json-csv"]).splitlines()))
    assert {len(row) for row in table} == {6}
    assert json.loads(texts("tools")["tools-weather"].reply)["tool"] == "tide_table"


def squeezed(prompt: str, reply: str) -> float:
    """Bytes of the reply that its prompt does not foretell, a byte."""
    alone, both = (len(zlib.compress(t.encode(), 9)) for t in (prompt, prompt + reply))
    return (both - alone) / len(reply.encode())


def test_certain_replies_follow_from_their_prompts():
    found = texts("certain")
    assert squeezed(str(found["certain-copy"].prompt), found["certain-copy"].reply) < 0.1
    assert found["certain-counting"].reply == "".join(f"{i}\n" for i in range(11, 61))
    letters = words(found["certain-alphabet"]).split()
    assert "".join(letters) == string.ascii_lowercase + string.ascii_uppercase
    months = re.findall(r"\b[A-Z]\w+", words(found["certain-calendar"]).split("order: ")[1])
    assert months == [*calendar.month_name[1:], "Days"]
    sums = re.findall(r"(\d+) x (\d+) = (\d+)", words(found["certain-tables"]))
    assert len(sums) > 30
    assert all(int(a) * int(b) == int(c) for a, b, c in sums)


def test_random_replies_do_not():
    ratios = {x.id: squeezed(str(x.prompt), x.reply) for x in FULL.texts if x.category == "entropy"}
    assert len(ratios) >= 5
    assert min(ratios.values()) > 0.4


def test_brief_replies_are_a_token_or_none():
    replies = [x.reply for x in DEFAULT.texts if x.category == "brief"]
    assert replies.count("") == 2
    assert sorted(r.strip() for r in replies if r) == ["", "8", "B", "down"]


def test_chats_have_turns():
    chats = [x.prompt for x in ITEMS if x.category == "chat" and isinstance(x.prompt, list)]
    turns = [[turn["role"] for turn in c] for c in chats]
    assert max(map(len, turns)) >= 10
    assert sum("assistant" in t for t in turns) >= 8
    assert sum(t[0] == "system" for t in turns) >= 3
    own = [x.prompt for x in DEFAULT.texts if x.category == "chat"]
    assert all(isinstance(p, list) and sum(t["role"] == "user" for t in p) >= 2 for p in own)


def test_long_ones_go_from_1k_to_the_limit():
    replies = {x.made.reply_tokens for x in FULL.texts if x.category == "long-reply" and x.made}
    contexts = {x.made.tokens for x in FULL.texts if x.category == "long-context" and x.made}
    prompts = {x.made.tokens for x in FULL.prompts if x.category == "long-context" and x.made}
    assert replies == {1024, 4096, 16_384, 32_768}
    assert {1024, 4096, 16_384, 32_768, "limit"} <= contexts
    assert {1024, 4096, 16_384, 32_768, "limit"} <= prompts
    assert max(x.made.reply_tokens for x in DEFAULT.texts if x.made) >= 4096


# where it stands after an install

LOADS = "from onepolicy.suite import load, own_prompts; s = load('full'); print(s.version, len(own_prompts()))"


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_the_data_travels_with_the_package(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch):
    """A copy of the package alone finds its data, even where it is no file on disk."""
    package = Path(onepolicy.__file__).parent
    shutil.copytree(package, tmp_path / "site" / "onepolicy", ignore=shutil.ignore_patterns("__pycache__", "models"))
    place = str(tmp_path / "site")
    if form == "zip":
        place = shutil.make_archive(str(tmp_path / "packed"), "zip", place)
    code = f"import sys; sys.path.insert(0, {place!r}); {LOADS}"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout.split() == [FULL.version, "64"], ran.stderr
