"""Round trip of sampled ids: what survives, and the class and place of what does not."""

from __future__ import annotations

from typing import Any

import pytest

from onepolicy.codes import CODES
from onepolicy.tokens.classes import CLASSES
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.patterns import DIGITS, Pre, pre_tokenizer
from onepolicy.tokens.roundtrip import round_trip
from onepolicy.tokens.roundtrip_result import RULES, TOKENIZERS
from onepolicy.types import Outcome, Severity
from small_tokenizers import BYTE_LEVEL, byte_bpe, pieces, words

MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "! !")
EOS, MASK = "<|eos|>", "<mask>"


@pytest.fixture(scope="module")
def bpe() -> Any:
    return byte_bpe(MERGES, [EOS, (MASK, {"lstrip": True})])


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode([text])[0]


def plain(text: str) -> list[int]:
    """Every byte its own id."""
    return list(text.encode())


def one(tokenizer: Any, reply: list[int], other: Any = None, **more: Any) -> dict[str, Any]:
    """The only difference of one reply, with its part and reason."""
    found = round_trip([{"response_ids": reply, **more}], tokenizer, other)
    assert len(found.groups) == 1, found.groups
    ((part, cls, why), group) = next(iter(found.groups.items()))
    assert (part, cls) in {("reply", group.examples[0]["class"]), ("text", group.examples[0]["class"])}
    return group.examples[0] | {"why": why}


def test_what_encode_gives_survives(bpe: Any) -> None:
    texts = ["hello hello", " world 123 !!", f"hello{EOS}", "日本語 😊 é", "\n\n  x\t", ""]
    rows = [{"prompt_ids": ids(bpe, "say: "), "response_ids": ids(bpe, text)} for text in texts]
    found = round_trip(rows, bpe)
    assert not found.groups
    assert found.checked == {"prompt": 6, "reply": 6, "join": 5}  # an empty reply has no join
    assert found.n_tokens == sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rows)
    assert found.findings() == []


def test_other_segmentation_is_told_by_position_lengths_and_pieces(bpe: Any) -> None:
    reply = [*ids(bpe, "hello 12"), *plain("hello"), *ids(bpe, "!!")]
    at = len(ids(bpe, "hello 12"))
    assert bpe.encode(["hello 12hello!!"])[0] != reply
    got = one(bpe, reply)
    assert (got["class"], got["first_diff"], got["text_equal"]) == ("other-segmentation", at, True)
    assert got["sampled_len"] == len(reply)
    assert got["reencoded_ids"] == tuple(ids(bpe, "hello 12hello!!"))
    assert got["text"] == "hello"
    around = {t["position"]: (t["text"], t["bytes"]) for t in got["sampled_around"]}
    assert around[at] == ("h", "68")
    assert [t["text"] for t in got["reencoded_around"]][-2:] == ["hello", "!!"]


def test_each_stretch_that_differs_is_told_apart(bpe: Any) -> None:
    reply = [*plain("hello"), *ids(bpe, " and so on "), *plain("123"), ord("."), 0xF0, 0x9F]
    got = one(bpe, reply)
    assert got["stretches"] == 3
    assert got["classes"] == ("other-segmentation", "incomplete-utf8-at-end")


@pytest.mark.parametrize(
    ("tail", "cls", "dangling", "bad"),
    [
        ([0xF0, 0x9F], "incomplete-utf8-at-end", 2, ()),
        ([0xE2], "incomplete-utf8-at-end", 1, ()),
        ([0xF0, 0x9F, 0x98, ord("!"), ord("?")], "incomplete-utf8-inside", 0, (2, 3, 4)),
        ([0xFF, ord("a")], "incomplete-utf8-inside", 0, (2,)),
        ([0x8A, 0xE2], "incomplete-utf8-inside", 1, (2,)),
    ],
)
def test_bytes_that_are_no_utf8(bpe: Any, tail: list[int], cls: str, dangling: int, bad: tuple[int, ...]) -> None:
    got = one(bpe, [*plain("ok"), *tail])
    assert (got["class"], got["first_diff"], got["dangling_tokens"]) == (cls, 2, dangling)
    assert tuple(got.get("bad_positions", ())) == bad


def test_a_replacement_character_that_was_sampled_is_no_fault(bpe: Any) -> None:
    assert not round_trip([{"response_ids": ids(bpe, "a \ufffd b")}], bpe).groups


def test_tokens_that_cut_inside_a_character_are_only_another_segmentation() -> None:
    joined = byte_bpe(["ð Ł", "Ł ĺ", "ðŁ ĺ", "ĺ Ĭ"])
    whole = joined.encode(["😊"])[0]
    other = [0xF0, *[i for i in range(joined.size) if joined.token_bytes(i) == b"\x9f\x98"], 0x8A]
    assert joined.decode([other]) == ["😊"] and other != whole
    assert one(joined, other)["class"] == "other-segmentation"


def test_plain_text_that_spells_a_special_token(bpe: Any) -> None:
    got = one(bpe, [*ids(bpe, "hello "), *plain(EOS), ord("x")])
    assert (got["class"], got["first_diff"]) == ("special-token-look-alike", len(ids(bpe, "hello ")))
    (finding,) = round_trip([{"response_ids": plain(EOS)}], bpe).findings()
    assert (finding.code, finding.severity) == ("special-token-look-alike", Severity.WARN)


def test_a_special_token_that_the_other_side_does_not_have(bpe: Any) -> None:
    other = byte_bpe(MERGES)
    got = one(bpe, ids(bpe, f"hello{EOS}"), other)
    assert (got["class"], got["why"], got["first_diff"]) == ("special-token-spelled-out", TOKENIZERS, 1)


@pytest.mark.parametrize("text", ["hello  <mask>x", "hello\n<mask>"])
def test_an_added_token_that_eats_white_space(bpe: Any, text: str) -> None:
    mask = next(i for i, token in bpe.added.items() if token.content == MASK)
    before, _, after = text.partition(MASK)
    got = one(bpe, [*ids(bpe, before), mask, *ids(bpe, after)])
    assert (got["class"], got["text_equal"]) == ("added-token-white-space", False)
    assert got["first_diff"] == 1


def test_a_beginning_that_is_added_once_more() -> None:
    bos = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, SEQUENCE]}
    bos |= {"pair": [SEQUENCE, SEQUENCE], "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}}
    tokenizer = byte_bpe((), ["<s>"], post_processor=bos)
    rows = [{"response_ids": [256, *plain("hi")]}, {"response_ids": plain("hi")}]
    found = round_trip(rows, tokenizer, add_special=True)
    assert [cls for _, cls, _ in found.groups] == ["special-token-doubled", "special-token-added"]
    assert {f.code for f in found.findings(True)} == {"double-bos", "retokenization-drift"}


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


def test_a_normalizer_that_composes() -> None:
    tokenizer = byte_bpe(normalizer={"type": "NFC"})
    got = one(tokenizer, plain("cafe\u0301 au lait"))
    assert (got["class"], got["detail"], got["first_diff"], got["text_equal"]) == ("normalizer", "NFC", 3, False)
    (finding,) = round_trip([{"response_ids": plain("cafe\u0301")}], tokenizer).findings()
    assert (finding.code, finding.severity) == ("text-not-kept", Severity.WARN)


def test_lower_case_is_a_normalizer_too() -> None:
    got = one(byte_bpe(normalizer={"type": "Lowercase"}), plain("so HTTPServer"))
    assert (got["class"], got["detail"], got["first_diff"]) == ("normalizer", "lower case", 3)


def test_an_unknown_word() -> None:
    a, b = words(["one", "two", "three"]), words(["one", "three"])
    got = one(a, a.encode(["one two three"])[0], b)
    assert (got["class"], got["first_diff"], got["why"]) == ("unknown-token", 1, TOKENIZERS)


def test_byte_fallback_and_the_space_in_front() -> None:
    tokenizer = pieces(["▁hello", "▁é"])
    sampled = [*ids(tokenizer, "hello"), *ids(tokenizer, "x")[:1], 1 + 0xC3, 1 + 0xA9]
    assert tokenizer.decode([sampled]) == ["hello é"]
    assert one(tokenizer, sampled)["class"] == "byte-fallback"
    without = [i for i in range(tokenizer.size) if tokenizer.token_bytes(i) == b"h"]
    got = one(tokenizer, without)
    assert (got["class"], got["detail"], got["text_equal"]) == ("prefix-space", "added", True)
    assert round_trip([{"response_ids": without}], tokenizer).findings()[0].code == "noncanonical-ids"


@pytest.mark.parametrize("bad", [-100, 100_000, 2**70])
def test_ids_outside_the_vocabulary(bpe: Any, bad: int) -> None:
    got = one(bpe, [*plain("ab"), bad, *plain("c")])
    assert (got["class"], got["first_diff"], tuple(got["bad_positions"])) == ("outside-vocabulary", 2, (2,))
    (finding,) = round_trip([{"response_ids": [bad]}], bpe).findings()
    assert (finding.code, finding.outcome) == ("unknown-ids", Outcome.DRIFT)


def test_a_hole_in_the_vocabulary() -> None:
    content = byte_bpe().description
    tokenizer = byte_bpe((), ["<a>"], added_tokens=[{**TOKEN, "id": 300}])
    assert content["model"]["type"] == "BPE" and not tokenizer.exists(280)
    assert one(tokenizer, [*plain("ab"), 280, 300])["class"] == "outside-vocabulary"


TOKEN = {"content": "<a>", "special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


def test_a_token_that_merges_across_the_join(bpe: Any) -> None:
    row = {"prompt_ids": ids(bpe, "say he"), "response_ids": ids(bpe, "llo there")}
    found = round_trip([row], bpe)
    ((part, cls, _), group) = next(iter(found.groups.items()))
    assert (part, cls) == ("join", "merged-across-join")
    example = group.examples[0]
    assert example["first_diff"] == len(row["prompt_ids"]) - 1
    assert example["text"] == "hello"
    assert found.differing == {"prompt": 0, "reply": 0, "join": 1}
    assert {f.code for f in found.findings()} == {"noncanonical-ids"}
    assert {f.code for f in found.findings(True)} == {"retokenization-drift"}


def test_a_join_far_from_what_is_not_canonical_is_no_fault(bpe: Any) -> None:
    row = {"prompt_ids": plain("hello") * 9, "response_ids": [*ids(bpe, " so"), *plain("hello")]}
    found = round_trip([row], bpe)
    assert found.differing == {"prompt": 1, "reply": 1, "join": 0}


def test_a_reply_that_is_not_canonical_beside_the_join_is_not_a_join(bpe: Any) -> None:
    found = round_trip([{"prompt_ids": ids(bpe, "say "), "response_ids": plain("hello")}], bpe)
    assert found.differing == {"prompt": 0, "reply": 1, "join": 0}


def digits(*steps: str) -> Any:
    merges = ["1 2", "12 3", "4 5"]
    return byte_bpe(merges, pre_tokenizer=pre_tokenizer(Pre((*steps, r"\p{L}+| ?[^\s\p{L}]+|\s+"))))


def test_two_tokenizers_that_split_digits_otherwise() -> None:
    a, b = digits(r"\p{N}{1,3}"), digits(DIGITS)
    got = one(a, ids(a, "x=12345"), b)
    assert (got["class"], got["kind"], got["first_diff"], got["why"]) == ("other-segmentation", "digits", 2, TOKENIZERS)
    assert (got["sampled_len"], got["reencoded_len"]) == (4, 7)
    (finding,) = round_trip([{"response_ids": ids(a, "x=12345")}], a, b).findings()
    assert (finding.code, finding.outcome) == ("texts-encode-differently", Outcome.DRIFT)


def test_sampled_ids_and_tokenizers_are_told_apart() -> None:
    """What the first tokenizer itself would not have made is a note, whatever the second one is."""
    a, b = digits(r"\p{N}{1,3}"), digits(DIGITS)
    assert not round_trip([{"response_ids": ids(a, "no digits")}], a, b).groups
    same = digits(r"\p{N}{1,3}")
    found = round_trip([{"response_ids": plain("123")}], a, same)
    assert [f.code for f in found.findings()] == ["noncanonical-ids"]
    assert not round_trip([{"response_ids": plain("123")}], a, b).groups  # so would the second one read it
    both = round_trip([{"response_ids": [*ids(a, "123"), *plain("45")]}], a, b)
    assert {f.code for f in both.findings()} == {"noncanonical-ids", "texts-encode-differently"}


def test_the_same_pieces_under_other_ids() -> None:
    a, b = byte_bpe(["a b", "c d"]), byte_bpe(["c d", "a b"])
    got = one(a, ids(a, "x ab"), b)
    assert (got["class"], got["why"]) == ("same-tokens-other-ids", TOKENIZERS)


def test_the_finding_depends_on_the_pipeline(bpe: Any) -> None:
    found = round_trip([{"id": "a", "response_ids": plain("hello")}], bpe)
    (unknown,), (again,), (keeps,) = found.findings(), found.findings(True), found.findings(False)
    assert (unknown.code, unknown.severity, unknown.outcome) == ("noncanonical-ids", Severity.INFO, Outcome.PASS)
    assert (again.code, again.severity, again.outcome) == ("retokenization-drift", Severity.FAIL, Outcome.DRIFT)
    assert keeps.severity is Severity.INFO
    assert "filter" not in unknown.advice.lower() and "do not filter" in again.advice
    assert again.place == "record a, reply, position 0"


@pytest.mark.parametrize(
    "said",
    [{"trainer_ids": [104, 101, 259]}, {"trainer_logprobs": [-1.0, -2.0]}, {"loss_mask": [1, 1]}],
    ids=["ids", "log-probs", "mask"],
)
def test_a_record_whose_trainer_read_the_re_encoded_ids(said: dict[str, Any]) -> None:
    tokenizer = byte_bpe(["h e", "l l", "o !"])
    row = {"response_ids": [256, 108, 108], **said}
    if "trainer_ids" in said:
        row["trainer_ids"] = ids(tokenizer, "hell")
    assert len(ids(tokenizer, "hell")) == 2
    got = one(tokenizer, row.pop("response_ids"), **row)
    assert got["reencodes"]
    (finding,) = round_trip([{"response_ids": [256, 108, 108], **row}], tokenizer).findings()
    assert (finding.code, finding.outcome) == ("retokenization-drift", Outcome.DRIFT)


def test_columns_that_count_the_sampled_ids_say_nothing(bpe: Any) -> None:
    row = {"response_ids": plain("hello"), "loss_mask": [1] * 5, "trainer_logprobs": [-1.0] * 5}
    assert "reencodes" not in one(bpe, row["response_ids"], **{k: v for k, v in row.items() if k != "response_ids"})


def test_no_rule_tells_anybody_to_filter() -> None:
    for unknown, again in RULES.values():
        for judgement in (unknown, again):
            if judgement is not None:
                advice = CODES[judgement[0]].advice.lower()
                assert "filter" not in advice or "do not filter" in advice
    assert set(RULES) == set(CLASSES)


def test_prompts_of_one_group_are_counted_each(bpe: Any) -> None:
    rows = [{"prompt_ids": plain("hello"), "response_ids": ids(bpe, f" {k}")} for k in range(5)]
    found = round_trip(rows, bpe)
    assert found.checked["prompt"] == 5
    assert found.differing["prompt"] == 5


def test_sentencepiece_habits_survive_where_the_library_gives_them_back() -> None:
    tokenizer = pieces(["▁hello", "▁world"])
    assert isinstance(tokenizer, FastTokenizer)
    rows = [{"response_ids": ids(tokenizer, text)} for text in ("hello world", "world hello", "hello")]
    assert not round_trip(rows, tokenizer).groups
    assert BYTE_LEVEL["add_prefix_space"] is False
