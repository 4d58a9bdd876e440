"""`assert_token_fidelity`: whatever users hold, one clear message, silence when all is well."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from onepolicy import models
from onepolicy.errors import ContentError, UnknownName, UsageError
from onepolicy.records import from_records
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.fidelity import TokenFidelityError, assert_token_fidelity
from onepolicy.tokens.objects import as_pair, as_tokenizer
from small_tokenizers import byte_bpe, byte_bpe_json

MERGES = ("h e", "l l", "he ll", "hell o")


@pytest.fixture(scope="module")
def bpe() -> Any:
    return byte_bpe(MERGES, ["<|eos|>"])


def rust(merges: Any = MERGES) -> Any:
    """A tokenizer of the `tokenizers` library, as users have it."""
    import json

    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(byte_bpe_json(merges, ["<|eos|>"])))


def python(merges: Any = MERGES) -> Any:
    """The same as a tokenizer of `transformers`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=rust(merges), eos_token="<|eos|>")


GOOD = {"id": "good", "prompt_ids": [ord(" ")], "response_ids": [259, 257 + 3]}
BAD = {"id": "bad", "prompt_ids": [ord(" ")], "response_ids": [258, ord("o")]}


def test_it_is_silent_and_says_what_it_checked(bpe: Any) -> None:
    result = assert_token_fidelity([GOOD, GOOD], decode_with=bpe)
    assert result.checked == {"prompt": 2, "reply": 2, "join": 2}


def test_one_message_with_count_record_class_and_place(bpe: Any) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_token_fidelity([GOOD, BAD, BAD], decode_with=bpe)
    text = str(caught.value)
    assert text.startswith("2 of 3 replies do not survive decoding and encoding; first: record 2: record bad, reply")
    for part in ("position 0", "(other-segmentation)", "'hell|o' becomes 'hello'", "2 ids become 1", "do not filter"):
        assert part in text
    assert "\n" not in text
    assert isinstance(caught.value, TokenFidelityError)
    assert caught.value.result.differing["reply"] == 2


@pytest.mark.parametrize("held", [rust, python], ids=["tokenizers", "transformers"])
def test_tokenizers_as_users_hold_them(held: Any) -> None:
    tokenizer = held()
    assert_token_fidelity([GOOD], decode_with=tokenizer)
    with pytest.raises(AssertionError, match="other-segmentation"):
        assert_token_fidelity([BAD], decode_with=tokenizer, encode_with=tokenizer)


def test_truncation_and_padding_of_a_users_tokenizer_are_not_used() -> None:
    tokenizer = rust()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    assert_token_fidelity([{"response_ids": list(b"a b c d e")}], decode_with=tokenizer)
    assert tokenizer.truncation is not None and tokenizer.padding is not None


def test_two_tokenizers() -> None:
    with pytest.raises(AssertionError, match=r"1 of 1 replies .*2 ids become 3"):
        assert_token_fidelity([GOOD], decode_with=python(), encode_with=rust(MERGES[:3]))


def test_functions_of_a_pipeline() -> None:
    tokenizer = python()
    calls = {"decode_with": lambda ids: tokenizer.decode(ids), "encode_with": lambda text: tokenizer(text)}
    assert_token_fidelity([GOOD], **calls)
    with pytest.raises(AssertionError, match="other-segmentation"):
        assert_token_fidelity([BAD], **calls)
    dropped = {"decode_with": lambda ids: tokenizer.decode(ids, skip_special_tokens=True), "encode_with": tokenizer}
    with pytest.raises(AssertionError, match="special-token-skipped"):
        assert_token_fidelity([GOOD], **dropped)
    stripped = {"decode_with": tokenizer, "encode_with": lambda text: tokenizer.encode(text.strip())}
    with pytest.raises(AssertionError, match="1 of 1 prompts"):
        assert_token_fidelity([GOOD], **stripped)


def test_functions_that_give_something_else(bpe: Any) -> None:
    with pytest.raises(ContentError, match="wanted a list of ids"):
        assert_token_fidelity([GOOD], decode_with=bpe, encode_with=lambda text: "ids")
    with pytest.raises(ContentError, match="wanted a text"):
        assert_token_fidelity([GOOD], decode_with=lambda ids: None, encode_with=bpe)
    with pytest.raises(UsageError, match="encode_with is needed"):
        assert_token_fidelity([GOOD], decode_with=lambda ids: "")


def test_a_target_by_name() -> None:
    tiny = as_tokenizer("tiny")
    rows = [{"prompt_ids": tiny.encode(["Once upon"])[0], "response_ids": tiny.encode([" a time"])[0]}]
    assert_token_fidelity(rows, decode_with="tiny", encode_with=Path(models.path("tiny")))
    with pytest.raises(UsageError, match="no such file"):
        assert_token_fidelity(rows, decode_with="nowhere/at/all")
    with pytest.raises(UsageError, match="tokenizer: got int"):
        assert_token_fidelity(rows, decode_with=5)


def test_rollouts_records_and_mappings(bpe: Any) -> None:
    rollouts = from_records([{"token_ids": [32, 259, 260], "prompt_length": 1}])
    for given in (rollouts, TokenRecord("a", prompt_ids=[32], reply_ids=[259, 260]), GOOD, [GOOD], iter([GOOD])):
        assert assert_token_fidelity(given, decode_with=bpe).checked["reply"] == 1


def test_what_was_not_checked_does_not_pass(bpe: Any) -> None:
    with pytest.raises(ContentError, match="none of 1 records has token ids: nothing was checked"):
        assert_token_fidelity([{"text": "hello"}], decode_with=bpe)
    with pytest.raises(ContentError, match="record 2: 'response_ids': got"):
        assert_token_fidelity([GOOD, {"response_ids": ["a"]}], decode_with=bpe)
    assert assert_token_fidelity([], decode_with=bpe).n_records == 0


def test_parts_and_classes_that_may_differ(bpe: Any) -> None:
    join = {"prompt_ids": [256], "response_ids": [257, ord("o")]}
    with pytest.raises(AssertionError, match=r"joins of prompt and reply .*merged-across-join"):
        assert_token_fidelity([join], decode_with=bpe)
    assert_token_fidelity([join], decode_with=bpe, parts=("prompt", "reply"))
    assert_token_fidelity([BAD], decode_with=bpe, allow=("other-segmentation",))
    with pytest.raises(UnknownName, match="did you mean 'reply'"):
        assert_token_fidelity([GOOD], decode_with=bpe, parts=("replys",))
    with pytest.raises(UnknownName, match="did you mean 'other-segmentation'"):
        assert_token_fidelity([GOOD], decode_with=bpe, allow=("segmentation",))


def test_an_object_is_converted_once_and_not_kept() -> None:
    tokenizer = rust()
    assert as_tokenizer(tokenizer) is as_tokenizer(tokenizer)
    before = as_tokenizer(tokenizer).size
    tokenizer.add_tokens(["<new>"])
    assert as_tokenizer(tokenizer).size == before + 1
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_one_tokenizer_on_both_sides_is_one(bpe: Any) -> None:
    tokenizer = rust()
    a, b = as_pair(tokenizer, tokenizer)
    assert a is b
    assert as_pair(bpe) == (bpe, bpe)
