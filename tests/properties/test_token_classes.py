"""Random text and random ids: the class is right by slow rules of their own, nothing crashes, no false alarm."""

from __future__ import annotations

import codecs
import contextlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from onepolicy.errors import ContentError
from onepolicy.tokens.classes import CLASSES, Facts
from onepolicy.tokens.explain_difference import broken_spans, stretches
from onepolicy.tokens.reading import RecordStream
from onepolicy.tokens.roundtrip import round_trip
from small_tokenizers import byte_bpe, pieces, words

SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
EOS, MASK = "<|e|>", "<m>"
BPE = byte_bpe(["a b", "ab a", "b b", "Ġ a", "Ã ©", "æ Ĺ", "ð Ł", "1 2", "Ċ Ċ"], [EOS, MASK])
OTHER = byte_bpe(["b a", "a b", "1 2", "12 3", "Ġ b"], [EOS])
NORMAL = byte_bpe(["a b"], normalizer={"type": "NFC"})
PIECES = pieces(["▁ab", "▁a", "ba", "é"])
WORDS = words(["a", "ab", "日"])
ALL = {"bytes": BPE, "other": OTHER, "normal": NORMAL, "pieces": PIECES, "words": WORDS}

TEXT = st.text(st.sampled_from("ab é日😊12\n<|e|>m' .\u0301\ufffd"), max_size=14) | st.text(
    st.characters(codec="utf-8"), max_size=14
)
#: Bytes of the alphabet, broken ones, merged tokens, special tokens.
IDS = st.lists(
    st.sampled_from([*"ab é日😊12\n<|e|>m".encode(), 0xC3, 0xF0, 0x9F, 0xFF, *range(256, BPE.size)]), max_size=12
)


def one(ids: list[int], a: Any, b: Any = None) -> dict[str, Any] | None:
    """What is found of one reply; None if it survives."""
    found = round_trip([{"response_ids": ids}], a, b)
    groups = [group.examples[0] for (part, _, _), group in found.groups.items() if part == "reply"]
    return groups[0] if groups else None


@pytest.mark.parametrize("name", ["bytes", "other", "normal"])
@SETTINGS
@given(prompt=TEXT, reply=TEXT)
def test_no_false_alarm_on_what_encode_gave(name: str, prompt: str, reply: str) -> None:
    """Every part alone survives; the join does unless one encoding of both really is another one."""
    tokenizer = ALL[name]
    p, r = tokenizer.encode([prompt, reply])
    found = round_trip([{"prompt_ids": p, "response_ids": r}], tokenizer)
    differing = found.differing
    assert differing["prompt"] == differing["reply"] == 0
    texts = tokenizer.decode([p, r])
    joined = tokenizer.encode(["".join(texts)])[0]
    assert differing.get("join", 0) == (bool(p and r) and joined != p + r)


def slow_class(ids: list[int], again: list[int], tokenizer: Any) -> set[str]:
    """What the first difference may be called, from its bytes alone, one token after another."""
    data = [tokenizer.token_bytes(i) for i in ids]
    at = next(k for k in range(len(ids) + 1) if ids[: k + 1] != again[: k + 1])
    rest = b"".join(data[at:])
    spelled = [t.content.encode() for t in tokenizer.added.values()]
    allowed: set[str] = set()
    if any(s in rest for s in spelled):
        allowed.add("special-token-look-alike")
    if not is_utf8(rest) and not is_utf8(b"".join(data)):
        allowed |= {"incomplete-utf8-at-end", "incomplete-utf8-inside"}
    after = b"".join(tokenizer.token_bytes(i) for i in again)
    if after[: sum(map(len, data[: at + 1]))] == b"".join(data[: at + 1]):
        allowed.add("other-segmentation")
    return allowed


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def pending(ids: list[int], tokenizer: Any) -> int:
    """Tokens that hold the beginning of a character that never ends, by an incremental decoder; special tokens at the
    end aside."""
    text = [*ids]
    while text and text[-1] in tokenizer.added:
        text.pop()
    data = [tokenizer.token_bytes(i) for i in text]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(data))
    left = len(decoder.getstate()[0])
    n = 0
    while left > 0:
        n += 1
        left -= len(data[-n])
    return n


@settings(SETTINGS, max_examples=500)
@given(ids=IDS)
def test_random_ids_have_the_right_class_and_place(ids: list[int]) -> None:
    again = BPE.encode(BPE.decode([ids]))[0]
    got = one(ids, BPE)
    assert (got is None) == (ids == again)
    if got is None:
        return
    at = next(k for k in range(len(ids) + 1) if ids[: k + 1] != again[: k + 1])
    assert (got["first_diff"], got["sampled_len"], got["reencoded_len"]) == (at, len(ids), len(again))
    assert got["class"] in slow_class(ids, again, BPE)
    assert got["dangling_tokens"] == pending(ids, BPE)
    assert list(got.get("reencoded_ids", ())) == again
    data = b"".join(BPE.token_bytes(i) for i in ids)
    assert any("utf8" in cls for cls in got["classes"]) == (not is_utf8(data))
    assert got["text_equal"] == (BPE.decode([again]) == BPE.decode([ids]))


@settings(SETTINGS, max_examples=300)
@given(ids=IDS.map(lambda ids: [i for i in ids if i < OTHER.size - 1 or i == BPE.size - 2]))
def test_two_tokenizers_never_crash_and_agree_with_plain_comparison(ids: list[int]) -> None:
    again = OTHER.encode(BPE.decode([ids]))[0]
    got = one(ids, BPE, OTHER)
    assert (got is None) == (ids == again)
    assert got is None or got["class"] in CLASSES


@pytest.mark.parametrize("name", ALL)
@SETTINGS
@given(data=st.data())
def test_any_ids_of_any_tokenizer(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]
    inside = st.integers(0, tokenizer.size - 1)
    ids = data.draw(st.lists(inside | st.integers(-(2**70), 2**70), max_size=10))
    exist = all(0 <= i < tokenizer.size and tokenizer.exists(i) for i in ids)
    found = round_trip([{"id": "a", "prompt_ids": ids, "response_ids": ids}], tokenizer)
    classes = {cls for part, cls, _ in found.groups if part == "reply"}
    assert ("outside-vocabulary" in classes) == (not exist)
    assert json.dumps(found.as_json()) and all(f.message for f in found.findings(True))
    if exist and tokenizer.encode(tokenizer.decode([ids]))[0] == ids:
        assert not classes


@SETTINGS
@given(a=IDS, b=IDS)
def test_stretches_turn_one_list_into_the_other(a: list[int], b: list[int]) -> None:
    assume(a != b)
    side = Facts(BPE)
    built: list[int] = []
    at = 0
    for i, i_end, j, j_end in stretches(a, b, side, side):
        assert i >= at and (i_end, j_end) != (i, j)
        built += a[at:i] + b[j:j_end]
        at = i_end
    assert built + a[at:] == b


@SETTINGS
@given(data=st.binary(max_size=24))
def test_broken_spans_are_what_a_decoder_replaces(data: bytes) -> None:
    spans = broken_spans(data)
    parts: list[str] = []
    at = 0
    for start, stop, _ in spans:
        parts += [data[at:start].decode(), "\ufffd"]
        at = stop
    assert "".join(parts) + data[at:].decode() == data.decode("utf-8", "replace")
    assert all(where == "inside" for _, _, where in spans[:-1])


NAMES = """id prompt_ids response_ids token_ids prompt completion text logprobs loss_mask drawn turns usage spans
finish_reason stop_token_ids tokens token_bytes prompt_length trainer_ids eos_token_id x"""
KEYS = st.sampled_from(NAMES.split())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=4), x, max_size=3),
    max_leaves=6,
)


@settings(SETTINGS, max_examples=400)
@given(rows=st.lists(st.dictionaries(KEYS, JSON | st.lists(st.integers(0, 300), max_size=4), max_size=5) | JSON))
def test_any_rows_are_read_or_named(rows: list[Any]) -> None:
    """Whatever stands in a file: a record, or a place that was left out, and the round trip takes what was read."""
    stream = RecordStream(rows)
    found = None
    with contextlib.suppress(ContentError):  # none of the rows can be read
        found = round_trip(stream, BPE)
    assert (found.n_records if found else 0) == stream.n_records
    assert stream.n_records + stream.n_skipped == len(rows)
    assert all(place.startswith("record ") for place in stream.skipped)
