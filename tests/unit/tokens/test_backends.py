"""Every backend against the library it stands on, on the texts of the suite and on random ids; and its parts."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.errors import ContentError
from onepolicy.tokens.base import PARTS
from tokenizer_families import (
    BYTES,
    FAMILIES,
    PIECES,
    TEKKEN,
    V3,
    built,
    mistral_file,
    opened,
    random_ids,
    texts,
    tiny_json,
)

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
Encode = Callable[[list[str]], list[list[int]]]
Decode = Callable[[list[list[int]]], list[str]]


@cache
def hf(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def by_transformers(family: str) -> tuple[Encode, Decode]:
    tokenizer = hf(str(built(family)))
    return (
        lambda given: tokenizer(given, add_special_tokens=False)["input_ids"],
        lambda ids: [tokenizer.decode(i, clean_up_tokenization_spaces=False) for i in ids],
    )


def by_tokenizers() -> tuple[Encode, Decode]:
    from tokenizers import Tokenizer

    rust = Tokenizer.from_file(str(tiny_json()))
    return (
        lambda given: [rust.encode(text, add_special_tokens=False).ids for text in given],
        lambda ids: [rust.decode(i, skip_special_tokens=False) for i in ids],
    )


def by_tiktoken() -> tuple[Encode, Decode]:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
    ranks = load_tiktoken_bpe(str(built("qwen") / "qwen.tiktoken"))
    special = {name: 151643 + i for i, name in enumerate(names)}
    library = tiktoken.Encoding("qwen", pat_str=QWEN, mergeable_ranks=ranks, special_tokens=special)
    return (
        lambda given: [library.encode(unicodedata.normalize("NFC", t), allowed_special="all") for t in given],
        lambda ids: [library.decode(i) for i in ids],
    )


def by_tekken() -> tuple[Encode, Decode]:
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    library = Tekkenizer.from_file(mistral_file(TEKKEN))
    return (
        lambda given: [library.encode(text, bos=False, eos=False) for text in given],
        lambda ids: [library.decode(i, special_token_policy=SpecialTokenPolicy.KEEP) for i in ids],
    )


def by_sentencepiece() -> tuple[Encode, Decode]:
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    library = SentencePieceTokenizer(mistral_file(V3))
    return (
        lambda given: [library.encode(text, bos=False, eos=False) for text in given],
        lambda ids: [library.decode(i) for i in ids],
    )


#: family -> its library, and whether that library reads special tokens from texts.
REFERENCES: dict[str, tuple[Callable[[], tuple[Encode, Decode]], bool]] = {
    "tiny": (by_tokenizers, True),
    "smollm2": (lambda: by_transformers("smollm2"), True),
    "smollm2-gguf": (lambda: by_transformers("smollm2"), True),
    "mistral-v3": (by_sentencepiece, False),
    "sentencepiece": (by_sentencepiece, False),
    "tekken": (by_tekken, False),
    "deepseek": (lambda: by_transformers("deepseek"), True),
    "deepseek-transformers": (lambda: by_transformers("deepseek"), True),
    "qwen": (by_tiktoken, True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_texts_are_the_librarys(family: str) -> None:
    reference, parses = REFERENCES[family]
    encode, _ = reference()
    got = opened(family).encode(texts(), parse_special=parses)
    assert got == encode(texts()) and sum(map(len, got)) > 5000


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_random_ids_are_the_librarys(family: str) -> None:
    _, decode = REFERENCES[family][0]()
    tokenizer = opened(family)
    lists = random_ids(tokenizer)
    if family in PIECES:  # with special tokens that library writes pieces, not text
        lists = [[i for i in ids if i not in tokenizer.added] for ids in lists]
    assert tokenizer.decode(lists) == decode(lists)


def kept(family: str, text: str) -> str:
    """What a family keeps of a text: Qwen's code composes accents, sentencepiece takes its sign for a space as one, and
    SmolLM2's vocabulary lacks six control bytes."""
    if family in PIECES:
        return text.replace("▁", " ")
    text = unicodedata.normalize("NFC", text) if family == "qwen" else text
    return text.translate(dict.fromkeys(b"\4\6\x13\x14\x16\x1d")) if family.startswith("smollm2") else text


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_encoded_comes_back(family: str) -> None:
    tokenizer = opened(family)
    wanted = [kept(family, text) for text in texts()]
    assert tokenizer.decode(tokenizer.encode(texts(), parse_special=False)) == wanted
    assert tokenizer.decode(tokenizer.encode(texts())) == wanted


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(), min_size=1, max_size=5))
def test_any_unicode_comes_back_from_tokens_that_are_bytes(given_texts: list[str]) -> None:
    for family in ("tiny", "deepseek", "qwen", "tekken"):
        tokenizer = opened(family)
        wanted = [kept(family, text) for text in given_texts]
        for parse in (True, False):
            ids = tokenizer.encode(given_texts, parse_special=parse)
            assert tokenizer.decode(ids) == wanted
            assert [b"".join(tokenizer.token_bytes(i) for i in one).decode() for one in ids] == wanted


@pytest.mark.parametrize("family", BYTES)
def test_the_bytes_of_tokens_make_the_text(family: str) -> None:
    tokenizer = opened(family)
    lists = random_ids(tokenizer, 60, seed=7)
    joined = [b"".join(tokenizer.token_bytes(i) for i in ids) for ids in lists]
    if family == "tekken":  # it decodes what stands between special tokens by itself
        lists = [[i for i in ids if i not in tokenizer.added] for ids in lists]
        joined = [b"".join(tokenizer.token_bytes(i) for i in ids) for ids in lists]
    assert [one.decode("utf-8", "replace") for one in joined] == tokenizer.decode(lists)


@pytest.mark.parametrize("family", PIECES)
def test_the_bytes_of_pieces_make_the_text_but_for_the_space_in_front(family: str) -> None:
    tokenizer = opened(family)
    ids = tokenizer.encode(texts(), parse_special=False)
    joined = [b"".join(tokenizer.token_bytes(i) for i in one).decode() for one in ids]
    assert joined == [" " + kept(family, text) if text else "" for text in texts()]
    assert tokenizer.token_bytes(tokenizer.special_ids()["unk"]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_that_exist_and_ids_that_do_not(family: str) -> None:
    tokenizer = opened(family)
    assert tokenizer.exists(0) and tokenizer.exists(tokenizer.size - 1)
    assert not any(tokenizer.exists(i) for i in (-1, tokenizer.size, 2**32, 2**70, 1.0, "1", True, None))
    assert tokenizer.token_bytes(tokenizer.size) is None and tokenizer.token_bytes(-1) is None
    assert all(tokenizer.exists(i) and token.id == i for i, token in tokenizer.added.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_special_token_is_read_skipped_and_left_as_text(family: str) -> None:
    tokenizer = opened(family)
    eos = tokenizer.special_ids()["eos"]
    text = tokenizer.added[eos].content
    assert tokenizer.added[eos].special
    [ids] = tokenizer.encode([f"ab{text}cd"])
    assert ids.count(eos) == 1 and tokenizer.decode([ids]) == [f"ab{text}cd"]
    assert tokenizer.decode([ids], skip_special=True) == ["ab cd" if family in PIECES else "abcd"]
    [plain] = tokenizer.encode([f"ab{text}cd"], parse_special=False)
    assert eos not in plain and tokenizer.decode([plain], skip_special=True) == [f"ab{text}cd"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[5], [-1]], "ids 1, position 0: got -1"),
        ([[5, 2**40]], "position 1: got 1099511627776"),
        ([[5, "6"]], "position 1: got '6'"),
        ([[5, 1.5]], "1.5|float"),
        ([5], "got int, wanted a list of ids"),
        (["56"], "got str, wanted a list of ids"),
    ],
)
def test_what_is_no_id_is_refused_in_one_line(family: str, ids: Any, says: str) -> None:
    with pytest.raises(ContentError, match=says) as caught:
        opened(family).decode(ids)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_text_is_refused_in_one_line(family: str) -> None:
    tokenizer = opened(family)
    with pytest.raises(ContentError, match="text 1: got NoneType, wanted str"):
        tokenizer.encode(["a", None])
    with pytest.raises(ContentError, match=r"text 0: half of a surrogate pair \(U\+D83D at character 1\)"):
        tokenizer.encode(["a\ud83d"])
    assert tokenizer.encode([]) == [] and tokenizer.decode([]) == [] and tokenizer.decode([[]]) == [""]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_is_given_or_says_why_not(family: str) -> None:
    parts = opened(family).parts()
    assert sorted(parts) == sorted(PARTS)
    assert all(part.known or part.why for part in parts.values())
    vocabulary = parts["vocabulary"].content
    assert sorted(vocabulary.values()) == [i for i in range(opened(family).size) if opened(family).exists(i)]
    assert all(vocabulary[token.content] == i for i, token in opened(family).added.items())
    assert all(len(part.digest) == 12 or part.digest in ("none", "unknown") for part in parts.values())


def different(a: str, b: str) -> set[str]:
    one, other = opened(a).parts(), opened(b).parts()
    return {name for name in PARTS if one[name].digest != other[name].digest}


def test_the_same_tokenizer_by_two_backends_has_the_same_parts() -> None:
    assert different("smollm2", "smollm2-gguf") == set()
    assert different("deepseek", "deepseek-transformers") == set()
    assert different("mistral-v3", "sentencepiece") == {"post_processor", "template_defaults"}


def test_two_tokenizers_differ_where_they_differ() -> None:
    assert different("tiny", "smollm2") == set(PARTS) - {"model", "normalizer", "decoder", "post_processor"}
