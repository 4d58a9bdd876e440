"""One part of a tokenizer changed at a time: the right code, the right class, and silence about every other part."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy import models
from onepolicy.tokens.base import PARTS, Part
from onepolicy.tokens.directory import Around
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.pair import PairReport, compare_tokenizers
from onepolicy.tokens.pair_texts import compare_texts
from onepolicy.tokens.probes import CLASSES
from onepolicy.types import Outcome, Severity

TINY = Path(models.path("tiny"))
BASE: dict[str, Any] = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
Edit = Callable[[dict[str, Any]], Any]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def edited(*edits: Edit) -> dict[str, Any]:
    content = copy.deepcopy(BASE)
    for edit in edits:
        edit(content)
    return content


def compared(*edits: Edit, texts: list[str] | None = None) -> PairReport:
    """The packaged tokenizer against an edited copy."""
    return compare_tokenizers(FastTokenizer.from_json(BASE), FastTokenizer.from_json(edited(*edits)), texts=texts)


def raised(report: PairReport) -> dict[str, str]:
    """Code -> severity, of findings at warn or above."""
    return {f.code: f.severity.value for f in report.findings if f.severity is not Severity.INFO}


def swapped_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    a, b = list(vocabulary)[400], list(vocabulary)[450]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]


def swapped_merges(i: int, j: int) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        merges = content["model"]["merges"]
        merges[i], merges[j] = merges[j], merges[i]

    return edit


def flag(name: str, value: bool = True, at: int = 2) -> Edit:
    return lambda content: content["added_tokens"][at].update({name: value})


def one_more(token: str) -> Edit:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return lambda content: content["added_tokens"].append({"id": 512, "content": token, **flags})


def part(name: str, value: Any) -> Edit:
    return lambda content: content.update({name: value})


def model(**switches: Any) -> Edit:
    return lambda content: content["model"].update(switches)


def before(*steps: dict[str, Any]) -> Edit:
    """Steps in front of the pre-tokenizer."""
    return lambda content: content.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, content["pre_tokenizer"]]}
    )


def byte_level(**settings: bool) -> Edit:
    return lambda content: content["pre_tokenizer"].update(settings)


BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}

#: fault -> edit, code, severity, class, words that its differences must hold.
FAULTS: dict[str, tuple[Edit, str, str, str | None, str]] = {
    "ids swapped": (swapped_ids, "vocabularies-differ", "fail", "words", "2 tokens have another id"),
    "merges swapped": (swapped_merges(0, 40), "merges-differ", "fail", "white-space", "at rank 0"),
    "first merge missing": (
        lambda c: c["model"]["merges"].pop(0),
        "merges-differ",
        "fail",
        "white-space",
        "sampler 253, scorer 252",
    ),
    "NFC": (part("normalizer", {"type": "NFC"}), "normalizer-differs", "fail", "accents", "scorer only: NFC"),
    "lower case": (
        part("normalizer", {"type": "Lowercase"}),
        "normalizer-differs",
        "fail",
        "capitals",
        "scorer only: Lowercase",
    ),
    "digits one by one": (
        before({"type": "Digits", "individual_digits": True}),
        "pre-tokenizer-differs",
        "fail",
        "digits",
        "digits: sampler all together, scorer one by one",
    ),
    "a space in front": (
        byte_level(add_prefix_space=True),
        "pre-tokenizer-differs",
        "fail",
        "leading space",
        "add_prefix_space of ByteLevel: sampler false, scorer true",
    ),
    "no expression": (
        byte_level(use_regex=False),
        "pre-tokenizer-differs",
        "fail",
        "white-space",
        "contractions: sampler [don] ['t]",
    ),
    "BOS in front": (part("post_processor", BOS), "post-processor-differs", "fail", "tokens around a text", ""),
    "no decoder": (part("decoder", None), "decoder-differs", "warn", "words", "sampler only: ByteLevel"),
    **{
        name: (flag(name), "added-tokens-differ", "fail", "special look-alikes", f"{name}: sampler off, scorer on")
        for name in ("lstrip", "rstrip", "single_word")
    },
    "special": (flag("special", False), "added-tokens-differ", "fail", None, "special: sampler on, scorer off"),
    "one token more": (one_more("<tool>"), "added-tokens-differ", "fail", "special look-alikes", "on scorer only"),
    "dropout": (model(dropout=0.5), "merges-differ", "fail", "words", "dropout: sampler none, scorer 0.5"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_gets_its_own_code_and_no_other(fault: str) -> None:
    edit, code, severity, name, words = FAULTS[fault]
    report = compared(edit)
    assert raised(report) == {code: severity}
    (found,) = [f for f in report.findings if f.code == code]
    assert found.evidence.get("class") == name
    assert any(words in said for said in found.evidence["differences"])
    assert report.outcome is (Outcome.DRIFT if severity == "fail" else Outcome.PASS)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_faulty_one_with_itself_is_silent(fault: str) -> None:
    if fault == "dropout":  # the one that is not itself twice
        assert "merges-differ" not in raised(compare_tokenizers(*[FastTokenizer.from_json(BASE)] * 2))
        return
    both = [FastTokenizer.from_json(edited(FAULTS[fault][0])) for _ in range(2)]
    report = compare_tokenizers(both[0], both[1])
    assert report.findings == []
    assert report.same_ids


@pytest.mark.parametrize("fault", [f for f in FAULTS if f not in ("dropout", "one token more")])
def test_the_digest_of_that_part_alone_differs(fault: str) -> None:
    edit, code, *_ = FAULTS[fault]
    rows = [row for row in compared(edit).parts if row.digests[0] != row.digests[1]]
    assert len(rows) == 1
    assert rows[0].state == "differs"
    assert rows[0].part.split("_")[0][:5] in code.replace("vocabularies", "vocabulary")


def test_several_faults_at_once_are_told_apart_by_trying() -> None:
    report = compared(
        FAULTS["digits one by one"][0], FAULTS["NFC"][0], FAULTS["lstrip"][0], FAULTS["merges swapped"][0]
    )
    by_code = {f.code: f.evidence["class"] for f in report.findings}
    assert by_code == {
        "pre-tokenizer-differs": "digits",
        "normalizer-differs": "accents",
        "added-tokens-differ": "special look-alikes",
        "merges-differ": "white-space",
    }
    normalizer = next(f for f in report.findings if f.code == "normalizer-differs")
    assert set(normalizer.evidence["classes"]) <= {"accents", "scripts"}


# written otherwise, the same in truth


def explicit(content: dict[str, Any]) -> None:
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": GPT2}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }


def as_strings(content: dict[str, Any]) -> None:
    content["model"]["merges"] = [" ".join(m) for m in content["model"]["merges"]]
    for name in ("ignore_merges", "byte_fallback", "dropout"):
        content["model"].pop(name, None)


def as_sequences(content: dict[str, Any]) -> None:
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [content["pre_tokenizer"]]}
    content["pre_tokenizer"]["pretokenizers"][0].pop("use_regex")
    content["normalizer"] = {"type": "Sequence", "normalizers": []}
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"]]}


REWRITTEN: dict[str, Edit] = {
    "merges as strings, defaults absent": as_strings,
    "sequences of one": as_sequences,
    "GPT-2's expression spelled out": explicit,
    "a post-processor that moves offsets": part(
        "post_processor", {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    ),
    "normalized, without a normalizer": flag("normalized"),
    "empty text for none": model(continuing_subword_prefix="", end_of_word_suffix=""),
    "tokens that fill up": one_more("<unused0>"),
}


@pytest.mark.parametrize("how", REWRITTEN)
def test_the_same_tokenizer_written_otherwise_gives_no_finding(how: str) -> None:
    report = compared(REWRITTEN[how])
    assert report.findings == []
    assert all(row.state != "differs" for row in report.parts)


def test_a_difference_that_nothing_shows_is_a_warning() -> None:
    nothing = {"type": "Replace", "pattern": {"String": "\x00\x01zz"}, "content": "q"}
    report = compared(part("normalizer", nothing), texts=["plain"])
    assert raised(report) == {"normalizer-differs": "warn"}
    assert "none of 407 probes and 1 texts shows it" in report.findings[0].message
    assert report.outcome is Outcome.PASS


def test_a_text_of_the_user_makes_it_a_failure() -> None:
    change = {"type": "Replace", "pattern": {"String": "zzyzx"}, "content": "q"}
    report = compared(part("normalizer", change), texts=["to zzyzx", "elsewhere"])
    assert raised(report) == {"normalizer-differs": "fail"}
    assert report.findings[0].place.startswith("text 'to zzyzx'")
    assert [row.same for row in report.texts] == [False, True]


def test_switches_that_no_text_reaches_are_a_note() -> None:
    report = compared(model(unk_token="<|endoftext|>"))
    assert raised(report) == {}
    assert [(f.code, f.severity) for f in report.findings] == [("merges-differ", Severity.INFO)]


def test_merges_that_seldom_compete_are_found_by_texts_made_for_them() -> None:
    """`s e` before `e r`: only a text with `ser` shows it, and it is made from the two."""
    merges = BASE["model"]["merges"]
    pairs = [(i, j) for i, x in enumerate(merges) for j, y in enumerate(merges) if i < j and x[1] == y[0]]
    i, j = pairs[len(pairs) // 2]
    report = compared(swapped_merges(i, j))
    assert raised(report) == {"merges-differ": "fail"}
    assert any(row.group == "differing tokens" and row.differ for row in report.behaviour)


# what stands beside the tokenizer


def beside(**more: Any) -> FastTokenizer:
    known = {"specials_known": True, "templates_known": True, "tokens": {"eos_token": "<|endoftext|>"}}
    return FastTokenizer.from_json(BASE, beside=Around(**{**known, **more}))


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
IDS = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
AROUND: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "other EOS": ({}, {"tokens": {"eos_token": "<|im_end|>"}}, {"special-ids-differ": "fail"}),
    "padding is EOS on one side": (
        {"tokens": IDS},
        {"tokens": {**IDS, "pad_token": "<|im_start|>"}},
        {"special-ids-differ": "warn"},
    ),
    "other stop ids": ({"stop_ids": (0, 2)}, {"stop_ids": (0,)}, {"stop-ids-differ": "fail"}),
    "no stop ids but EOS": ({"stop_ids": (0,)}, {"stop_ids": ()}, {}),
    "no stop ids": ({"stop_ids": (2,)}, {"stop_ids": ()}, {"stop-ids-differ": "warn"}),
    "stop ids not known": ({"stop_ids": (2,)}, {}, {}),
    "other template": (
        {"templates": {"default": TEMPLATE}},
        {"templates": {"default": TEMPLATE.replace("<|im_end|>\n", "<|im_end|>")}},
        {"chat-template-differs": "fail"},
    ),
    "a comment": (
        {"templates": {"default": TEMPLATE}},
        {"templates": {"default": "{# ours #}" + TEMPLATE.replace("for m in", "for  m  in")}},
        {},
    ),
    "other code, the same text": (
        {"templates": {"default": TEMPLATE}},
        {"templates": {"default": TEMPLATE.replace("m.role", "m['role']")}},
        {"chat-template-differs": "warn"},
    ),
    "line ends": (
        {"templates": {"default": TEMPLATE}},
        {"templates": {"default": TEMPLATE.replace("\n", "\r\n") + "\n"}},
        {},
    ),
    "template on one side": ({"templates": {"default": TEMPLATE}}, {}, {"chat-template-differs": "warn"}),
    "a default that is read": (
        {"templates": {"default": TEMPLATE + "{{ eos_token }}"}},
        {"templates": {"default": TEMPLATE + "{{ eos_token }}"}, "tokens": {"eos_token": "<|im_end|>"}},
        {"chat-template-differs": "fail", "special-ids-differ": "fail"},
    ),
    "a default that is not read": (
        {"templates": {"default": TEMPLATE}},
        {"templates": {"default": TEMPLATE}, "tokens": {"eos_token": "<|endoftext|>", "sep_token": "x"}},
        {},
    ),
    "other rows": ({"rows": 512}, {"rows": 576}, {"padded-vocabulary": "warn"}),
    "padded alike": ({"rows": 576}, {"rows": 576}, {}),
}


@pytest.mark.parametrize("case", AROUND)
def test_what_stands_beside(case: str) -> None:
    a, b, codes = AROUND[case]
    assert raised(compare_tokenizers(beside(**a), beside(**b))) == codes


def test_the_first_other_line_of_a_template_is_shown() -> None:
    a, b, _ = AROUND["other template"]
    (found,) = compare_tokenizers(beside(**a), beside(**b), roles=("vllm", "trainer")).findings
    assert found.evidence["differences"] == [
        'first other line 2: vllm "{{ m.content }}<|im_end|>", trainer "{{ m.content }}<|im_end|>{% endfor %}"'
    ]
    assert found.place.startswith("conversation plain, character ")


def test_padding_that_is_eos_on_one_side_is_said() -> None:
    a, b, _ = AROUND["padding is EOS on one side"]
    (found,) = compare_tokenizers(beside(**a), beside(**b)).findings
    assert found.evidence["pad_is_eos"] == ["sampler"]
    assert found.evidence["roles"] == {"pad": [0, 1]}


# parts that are not known


class Mute:
    """A tokenizer of which only ids are known, as a server's."""

    BACKEND = "server"

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.size = inner, "http://host", inner.size
        self.added, self.chat_template, self.asked = {}, None, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def parts(self) -> dict[str, Part]:
        return {name: Part(known=False, why="a server does not say") for name in PARTS}

    def token_bytes(self, token_id: int) -> bytes | None:
        raise AssertionError("several requests for one token")

    def decode(self, ids: Any, *, skip_special: bool = False) -> list[str]:
        self.asked += len(ids)
        return self.inner.decode(ids, skip_special=skip_special)


def test_ids_that_differ_without_a_known_part_name_what_is_in_question() -> None:
    other = Mute(FastTokenizer.from_json(edited(FAULTS["digits one by one"][0])))
    report = compare_tokenizers(FastTokenizer.from_json(BASE), other)
    (found,) = report.findings
    assert (found.code, found.severity) == ("texts-encode-differently", Severity.FAIL)
    assert found.evidence["class"] == "digits"
    assert "pre_tokenizer" in found.rivals
    assert found.ruled_out == ()
    assert {row.state for row in report.parts} == {"not known"}
    assert set(found.evidence["classes"]) == {"digits"}
    assert other.asked < 512 + 256  # texts with the same ids are decoded; each token is asked for once


def test_a_server_that_shows_no_part_of_a_character() -> None:
    """`½` is two tokens here, none of them a character: what they are is taken from the other side."""
    other = Mute(
        FastTokenizer.from_json(
            edited(before({"type": "Split", "pattern": {"String": "½"}, "behavior": "Isolated", "invert": False}))
        )
    )
    report = compare_tokenizers(FastTokenizer.from_json(BASE), other, texts=["a½b", " ½", "00"])
    assert all(row.same or row.kind == "cuts" for row in report.texts)


def test_special_tokens_of_a_server_are_known_by_the_other_side() -> None:
    other = Mute(FastTokenizer.from_json(edited(FAULTS["digits one by one"][0])))
    report = compare_tokenizers(FastTokenizer.from_json(BASE), other, texts=["<|im_start|>00<|im_end|>"])
    assert [(row.kind, row.place) for row in report.texts] == [("cuts", "digits")]


def test_not_known_is_not_different() -> None:
    report = compare_tokenizers(FastTokenizer.from_json(BASE), Mute(FastTokenizer.from_json(BASE)))
    assert report.findings == []
    assert all("scorer: a server does not say" in row.why for row in report.parts)


def test_a_known_difference_is_not_blamed_for_what_it_cannot_do() -> None:
    """The normalizers differ as far as is known; that digits are cut otherwise has another cause."""

    class HalfMute(Mute):
        def parts(self) -> dict[str, Part]:
            return {**super().parts(), "decoder": Part([{"type": "Fuse"}])}

    other = HalfMute(FastTokenizer.from_json(edited(FAULTS["digits one by one"][0])))
    assert set(raised(compare_tokenizers(FastTokenizer.from_json(BASE), other))) == {"texts-encode-differently"}


# the report


def test_the_report_holds_every_part_and_class_and_is_json() -> None:
    report = compared(FAULTS["digits one by one"][0], texts=["in 2024", "words"])
    content = json.loads(json.dumps(report.to_json()))
    assert [row["part"] for row in content["parts"]] == list(PARTS)
    assert content["outcome"] == "drift"
    by_class = {row["class"]: row for row in content["behaviour"]}
    assert by_class["digits"]["differ"] > by_class["words"]["differ"] == 0
    assert by_class["digits"]["first"]["around"] == {"sampler": ["00"], "scorer": ["0", "0"]}
    assert [row["first_diff"] for row in content["texts"]][1] is None


def test_texts_may_be_a_long_stream() -> None:
    change = part("normalizer", {"type": "Replace", "pattern": {"String": "zzyzx"}, "content": "q"})
    report = compared(change, texts=(f"text {i}" + " zzyzx" * (i % 1000 == 0) for i in range(5000)))  # type: ignore[arg-type]
    row = next(row for row in report.behaviour if row.group == "given")
    assert (row.texts, row.differ) == (5000, 5)
    assert len(report.texts) == 1000 + 4
    assert report.findings[0].evidence["given_differ"] == 5


def test_roles_name_the_sides() -> None:
    report = compare_tokenizers(
        FastTokenizer.from_json(BASE), FastTokenizer.from_json(edited(FAULTS["NFC"][0])), roles=("vllm", "hf")
    )
    assert report.findings[0].evidence["differences"] == ["hf only: NFC"]
    assert set(report.findings[0].evidence["digests"]) == {"vllm", "hf"}


def test_two_tokenizers_that_have_little_in_common_are_one_finding() -> None:
    other = edited()
    other["model"]["merges"] = []
    letters = [t for t in BASE["model"]["vocab"] if len(t) == 1]
    other["model"]["vocab"] = {t: i for i, t in enumerate([*reversed(letters), *(f"zq{i}" for i in range(300))])}
    other["added_tokens"] = []
    report = compare_tokenizers(FastTokenizer.from_json(BASE), FastTokenizer.from_json(other))
    assert raised(report) == {"vocabularies-differ": "fail"}
    assert report.findings[0].message.startswith("these are two other tokenizers (46% of the larger")
    assert "merges" in report.findings[0].evidence["other_parts"]


def test_half_of_the_vocabulary_missing_is_found_without_a_sound_from_the_library(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Merges of one side do not fit the vocabulary of the other: that is not tried, for the library would panic."""
    other = edited()
    other["model"]["merges"], kept = other["model"]["merges"][:100], len(BASE["model"]["vocab"]) - 153
    other["model"]["vocab"] = dict(list(BASE["model"]["vocab"].items())[:kept])
    report = compare_tokenizers(FastTokenizer.from_json(BASE), FastTokenizer.from_json(other))
    assert {f.code for f in report.findings} == {"vocabularies-differ", "merges-differ"}
    assert capfd.readouterr().err == ""


# properties

ONE_BY_ONE = FastTokenizer.from_json(edited(before({"type": "Digits", "individual_digits": True})))
NFC = FastTokenizer.from_json(edited(part("normalizer", {"type": "NFC"})))
SAME = FastTokenizer.from_json(BASE)
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from("0 1é\u0301<|im_end|>"), max_size=30)
)


@given(TEXTS)
def test_any_text_on_which_digits_are_cut_otherwise_is_of_that_class(texts: list[str]) -> None:
    rows = list(compare_texts((SAME, ONE_BY_ONE), texts, "given"))
    assert [row.text for row in rows] == texts
    assert all((row.kind, row.place) == ("cuts", "digits") for row in rows if not row.same)


@given(TEXTS)
def test_the_first_place_and_the_counts_are_those_of_the_ids(texts: list[str]) -> None:
    for row in compare_texts((SAME, NFC), texts, "given"):
        a, b = SAME.encode([row.text])[0], NFC.encode([row.text])[0]
        assert row.counts == (len(a), len(b))
        assert row.same == (a == b)
        if row.first_diff is not None:
            assert a[: row.first_diff] == b[: row.first_diff]
            assert a[row.first_diff : row.first_diff + 1] != b[row.first_diff : row.first_diff + 1]
            assert row.kind == "bytes"
            assert row.place in CLASSES


@given(TEXTS)
def test_one_tokenizer_never_differs_from_itself(texts: list[str]) -> None:
    report = compare_tokenizers(SAME, FastTokenizer.from_json(BASE), texts=texts)
    assert report.findings == []
    assert all(row.same for row in report.texts)
