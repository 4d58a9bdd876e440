"""A file of ranks: what is assumed of it is said, what is given wins, and its merges are those of a tokenizer.json."""

from __future__ import annotations

import base64
import inspect
import json
import unicodedata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from onepolicy.errors import ContentError, UnknownName, UsageError
from onepolicy.tokens import patterns
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.ranks import last_parts, merges_of
from onepolicy.tokens.tiktoken_file import FAMILIES, TiktokenTokenizer
from tokenizer_families import TEKKEN, built, mistral_file, opened, texts


def ranks_file(path: Path, tokens: list[bytes]) -> Path:
    """The 256 bytes and these tokens, in this order."""
    ranks = [bytes([b]) for b in range(256)] + tokens
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(ranks)))
    return path


def as_json(vocabulary: dict[str, int], parts: Any, steps: list[Any]) -> Any:
    """A tokenizer.json of the same rules, run by another library."""
    normalizer = parts["normalizer"].content
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": parts["merges"].content, "ignore_merges": True}
    return FastTokenizer.from_json(
        {
            "version": "1.0",
            "added_tokens": parts["added_tokens"].content,
            "normalizer": normalizer and normalizer[0],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, letters]},
            "decoder": letters,
            "model": model,
        }
    )


@pytest.mark.parametrize("family", ["qwen", "tekken"])
def test_its_parts_make_the_same_tokenizer_in_another_library(family: str) -> None:
    tokenizer = opened(family)
    parts = tokenizer.parts()
    steps = parts["pre_tokenizer"].content[:-1]
    other = as_json(parts["vocabulary"].content, parts, steps)
    assert other.encode(texts(), parse_special=False) == tokenizer.encode(texts(), parse_special=False)
    ours = {name: part.digest for name, part in parts.items()}
    same = ("model", "vocabulary", "merges", "normalizer", "pre_tokenizer", "decoder", "added_tokens")
    assert {name: other.parts()[name].digest for name in same} == {name: ours[name] for name in same}


def test_the_last_merge_of_a_token() -> None:
    ranks = {bytes([b]): b for b in range(256)} | {b"ab": 256, b"abc": 257, b"bc": 258, b"xyz": 259, b"cd": 260}
    assert last_parts(ranks, b"abc") == [b"ab", b"c"] and last_parts(ranks, b"xyz") == [b"x", b"y", b"z"]
    assert merges_of(ranks) == [["a", "b"], ["ab", "c"], ["b", "c"], ["c", "d"]]


def test_what_is_assumed_is_said() -> None:
    tokenizer = TiktokenTokenizer(str(built("qwen")))
    assert (
        tokenizer.assumed == "assumed from its 151643 ranks, as in the family qwen: pattern, special tokens, normaliser"
    )
    assert tokenizer.parts()["pre_tokenizer"].why == tokenizer.assumed
    assert tokenizer.size == 151851 and len(tokenizer.added) == 208
    assert tokenizer.special_ids() == {"bos": None, "eos": 151643, "pad": None, "unk": None}


def test_what_is_given_wins(tmp_path: Path) -> None:
    (tmp_path / "specials.json").write_text(json.dumps({"<|end|>": 151700}))
    target = f"{built('qwen')}?normalizer=none&specials=@{tmp_path / 'specials.json'}&pattern={quote(patterns.LLAMA3)}"
    tokenizer = TiktokenTokenizer(target)
    assert tokenizer.assumed == "" and list(tokenizer.added) == [151700] and tokenizer.size == 151701
    assert not tokenizer.exists(151650) and tokenizer.exists(151700)
    assert tokenizer.decode(tokenizer.encode(texts())) == texts()
    decomposed = unicodedata.normalize("NFD", "naïve")
    assert opened("qwen").decode(opened("qwen").encode([decomposed])) == ["naïve"] != [decomposed]
    assert [len(i) for i in tokenizer.encode(["a1234"])] != [len(i) for i in opened("qwen").encode(["a1234"])] or (
        tokenizer.parts()["pre_tokenizer"].digest != opened("qwen").parts()["pre_tokenizer"].digest
    )


def test_a_family_by_name_gives_its_pattern_and_special_tokens(tmp_path: Path) -> None:
    file = ranks_file(tmp_path / "small.tiktoken", [b"12", b"123", b"ab"])
    tokenizer = TiktokenTokenizer(f"{file}?pattern=llama3&specials=" + quote('{"<|x|>": 300}'))
    assert tokenizer.encode(["1234ab<|x|>"]) == [[257, 52, 258, 300]]
    assert [tokenizer.exists(i) for i in (258, 259, 299, 300, 301)] == [True, False, False, True, False]
    assert TiktokenTokenizer(f"{file}?pattern=qwen").encode(["1234"]) == [[49, 50, 51, 52]]


def test_patterns_are_those_of_the_library_itself() -> None:
    import tiktoken_ext.openai_public as known

    source = inspect.getsource(known)
    assert FAMILIES["cl100k"].pattern in source
    pieces = FAMILIES["o200k"].pattern.split(r"|\p{N}{1,3}")[0].split(r"|[^\r\n\p{L}\p{N}]?[\p{Lu}", 1)
    assert pieces[0] in source and r"[^\r\n\p{L}\p{N}]?[\p{Lu}" + pieces[1] in source
    assert json.loads(Path(mistral_file(TEKKEN)).read_text())["config"]["pattern"] == patterns.TEKKEN


@pytest.mark.parametrize(
    ("query", "error", "says"),
    [
        ("", UsageError, r"259 ranks are of no family that onepolicy knows \(qwen 151643, .*add \?pattern=REGEX"),
        ("?pattern=%5B", UsageError, "tiktoken refuses the pattern"),
        ("?pattern=qwen&specials=3", UsageError, "specials: wanted a JSON object"),
        ("?pattern=qwen&specials={%22<x>%22:5}", UsageError, r"special tokens with ids of ordinary ones: \[5\]"),
        ("?pattern=@nowhere", UsageError, "@nowhere: cannot be read"),
        ("?pattern=qwen&normalizer=nfd", UsageError, "normalizer: got 'nfd', wanted one of nfc, none"),
        ("?pattern=qwen&pattern=qwen", UsageError, "each once"),
        ("?patern=qwen", UnknownName, "did you mean 'pattern'"),
    ],
)
def test_options_that_make_no_tokenizer(tmp_path: Path, query: str, error: type, says: str) -> None:
    file = ranks_file(tmp_path / "small.tiktoken", [b"12", b"123", b"ab"])
    with pytest.raises(error, match=says) as caught:
        TiktokenTokenizer(f"{file}{query}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b + b"%%% 300\n", "line 260 is b'%%% 300'"),
        (lambda b: b + b"YWI= x\n", "line 260"),
        (lambda b: b.replace(b"AA== 0\n", b""), "1 of the 256 single bytes have no rank"),
    ],
)
def test_a_broken_file_names_its_line(tmp_path: Path, change: Any, says: str) -> None:
    file = ranks_file(tmp_path / "small.tiktoken", [b"12", b"123", b"ab"])
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ContentError, match=says):
        open_tokenizer(f"{file}?pattern=qwen")


@pytest.mark.parametrize("family", ["qwen", "tekken"])
def test_a_text_that_the_library_cannot_split_is_an_error_of_one_line(family: str) -> None:
    with pytest.raises(ContentError, match="its library breaks when it encodes a text: Regex error") as caught:
        opened(family).encode(["fine", " " * 2_000_000 + "a"])
    assert "\n" not in str(caught.value)
    [ids] = opened(family).encode(["^" * 50_000])
    assert opened(family).decode([ids]) == ["^" * 50_000]
