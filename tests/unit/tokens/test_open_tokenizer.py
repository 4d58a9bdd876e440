"""What a target is taken for: by content, by name, by the backend in front; and what is refused, in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onepolicy import models
from onepolicy.errors import ContentError, OnepolicyError, UnknownName, UsageError
from onepolicy.tokens import BACKENDS
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.open import backend_class, open_tokenizer, recognise
from tokenizer_families import TEKKEN, V3, built, mistral_file, opened, texts, tiny_json


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the packaged model's tokenizer files, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(Path(models.path("tiny")) / name, tmp_path / name)
    return tmp_path


def change(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({k: v for k, v in {**content, **values}.items() if v is not ...}))


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_is_a_class_that_knows_its_name(name: str) -> None:
    assert name == backend_class(name).BACKEND


@pytest.mark.parametrize(
    ("target", "backend"),
    [
        (lambda: "tiny", "tokenizers"),
        (lambda: "tiny-moe", "tokenizers"),
        (lambda: models.path("tiny"), "tokenizers"),
        (lambda: str(tiny_json()), "tokenizers"),
        (lambda: str(built("qwen")), "tiktoken"),
        (lambda: str(built("qwen") / "qwen.tiktoken"), "tiktoken"),
        (lambda: str(built("smollm2-gguf")), "gguf"),
        (lambda: str(next(built("smollm2-gguf").glob("*.gguf"))), "gguf"),
        (lambda: mistral_file(TEKKEN), "mistral"),
        (lambda: mistral_file(V3), "mistral"),
        (lambda: mistral_file("mistral_instruct_tokenizer_241114.model.v7m1"), "mistral"),
    ],
)
def test_a_target_is_known_by_what_it_is(target: Any, backend: str) -> None:
    assert recognise(target()) == backend


@pytest.mark.parametrize(
    ("source", "backend"),
    [
        (lambda: tiny_json(), "tokenizers"),
        (lambda: built("qwen") / "qwen.tiktoken", "tiktoken"),
        (lambda: next(built("smollm2-gguf").glob("*.gguf")), "gguf"),
        (lambda: Path(mistral_file(V3)), "sentencepiece"),
        (lambda: Path(mistral_file(TEKKEN)), "mistral"),
    ],
)
def test_a_file_under_another_name_is_known_by_its_content(tmp_path: Path, source: Any, backend: str) -> None:
    odd = tmp_path / "blob"
    odd.symlink_to(source())
    assert recognise(str(odd)) == backend


def test_a_tiktoken_file_called_tokenizer_model_is_no_sentencepiece_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").symlink_to(built("qwen") / "qwen.tiktoken")
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.BACKEND == "tiktoken"
    assert tokenizer.encode(texts()) == opened("qwen").encode(texts())


def test_the_backend_in_front_decides_and_the_name_stays_as_it_was_given() -> None:
    tokenizer = open_tokenizer("transformers:tiny")
    assert tokenizer.BACKEND == "transformers" and tokenizer.name == "transformers:tiny"
    assert tokenizer.encode(texts()) == opened("tiny").encode(texts())
    assert open_tokenizer(f"sentencepiece:{mistral_file(V3)}").BACKEND == "sentencepiece"


def test_a_path_with_a_colon_or_a_question_mark_is_a_path(tmp_path: Path) -> None:
    odd = tmp_path / "a:b?c=d"
    odd.mkdir()
    shutil.copy(tiny_json(), odd)
    assert open_tokenizer(str(odd)).size == 512
    assert open_tokenizer(f"tokenizers:{odd}").size == 512


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        ("", UsageError, "got an empty name"),
        ("nothing/here", UsageError, "no such file, directory or packaged model; wanted a tokenizer.json"),
        ("tokeniser:tiny", UnknownName, "unknown tokenizer backend 'tokeniser'; did you mean 'tokenizers'"),
        ("gguf:", UsageError, "nothing after the backend; wanted gguf:PATH"),
        ("gguf:nothing", UsageError, "no such file or directory; wanted .*gguf"),
        ("tokenizers:nothing", UsageError, "no such file or directory; wanted a tokenizer.json"),
        ("transformers:nothing", UsageError, "no such directory or packaged model"),
        ("tiny?speed=1", UnknownName, "option of the tokenizer backend 'tokenizers' 'speed'"),
        ("transformers:tiny?use_fast=maybe", UsageError, "use_fast: got 'maybe'"),
        ("transformers:tiny?use_fast", UsageError, "options are key=value"),
    ],
)
def test_a_target_that_is_none_is_a_usage_error_of_one_line(target: str, error: type, says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        open_tokenizer(target)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b"\x89PNG\r\n\x1a\n", "got an image"),
        (b"PK\x03\x04abc", "got a zip file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
        (b"# A readme\n", "got a text file that begins '# A readme'"),
        (b"\x00\x01\x02\xff", "got a binary file that begins 00 01 02 ff"),
        (b'{"architectures": ["x"], "vocab_size": 3}', r"no tokenizer \(keys: architectures, vocab_size\)"),
        (b'{"model": 3', "begins like JSON and is none"),
        (b"IQ== zero\nIg== 1\n", "got a text file that begins"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named_as_what_it_is(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ContentError, match=says) as caught:
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("tokenizers", "not a tokenizer.json"),
        ("sentencepiece", "not a sentencepiece file"),
        ("tiktoken", "line 1 is .* wanted a token in base64"),
        ("mistral", "not a file of mistral-common"),
        ("gguf", "not a whole GGUF file"),
    ],
)
def test_a_backend_that_is_given_a_wrong_file_says_so(tmp_path: Path, backend: str, says: str) -> None:
    (tmp_path / "file.model").write_text("these are words")
    with pytest.raises(ContentError, match=says) as caught:
        open_tokenizer(f"{backend}:{tmp_path / 'file.model'}")
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_tokenizer_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no tokenizer, but nothing"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"holds no tokenizer, but model\.safetensors; wanted"):
        open_tokenizer(str(tmp_path))
    with pytest.raises(UsageError, match=r"holds no tokenizer\.json"):
        open_tokenizer(f"tokenizers:{tmp_path}")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"holds a\.gguf, b\.gguf; name the one that is meant"):
        open_tokenizer(f"gguf:{tmp_path}")


@pytest.mark.parametrize("backend", ["", "transformers:"])
@pytest.mark.parametrize(
    ("file", "asked"),
    [
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_x.X", None]}),
        ("tokenizer_config.json", ["tokenization_x.X", None]),
        ("config.json", {"AutoTokenizer": "tokenization_x.X", "AutoModel": "m.M"}),
    ],
)
def test_code_of_the_model_is_never_run(model: Path, backend: str, file: str, asked: Any) -> None:
    trap = model / "was_run"
    (model / "tokenization_x.py").write_text(f"open({str(trap)!r}, 'w')\nclass X: pass\n")
    change(model / file, auto_map=asked)
    with pytest.raises(UsageError, match=rf"{file} asks to run code from the model \(tokenization_x.X\)") as caught:
        open_tokenizer(f"{backend}{model}")
    assert "\n" not in str(caught.value) and not trap.exists()
    assert open_tokenizer(str(model / "tokenizer.json")).size == 512


def test_a_model_with_code_but_a_plain_tokenizer_is_opened(model: Path) -> None:
    change(model / "config.json", auto_map={"AutoModelForCausalLM": "m.M"})
    assert open_tokenizer(str(model)).size == 512


def test_templates_are_found_where_transformers_finds_them(model: Path) -> None:
    from transformers import AutoTokenizer

    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    for config, files in [
        ("C", {}),
        (named, {}),
        ("C", {"chat_template.jinja": "J"}),
        (..., {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "A"}),
        (..., {"additional_chat_templates/rag.jinja": "R"}),
        (..., {}),
    ]:
        change(model / "tokenizer_config.json", chat_template=config)
        shutil.rmtree(model / "additional_chat_templates", ignore_errors=True)
        (model / "chat_template.jinja").unlink(missing_ok=True)
        for name, text in files.items():
            (model / name).parent.mkdir(exist_ok=True)
            (model / name).write_text(text)
        wanted: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True).chat_template
        tokenizer = open_tokenizer(str(model))
        got = tokenizer.parts()["chat_template"].content
        assert got == wanted, (config, files)
        assert tokenizer.chat_template == (wanted.get("default") if isinstance(wanted, dict) else wanted)


def test_what_stands_around_is_read_from_its_files(model: Path) -> None:
    change(model / "tokenizer_config.json", bos_token={"content": "<|im_start|>"}, unk_token=None)
    change(model / "generation_config.json", eos_token_id=[2, 0, 1])
    change(model / "config.json", vocab_size=..., text_config={"vocab_size": 640})
    tokenizer = open_tokenizer(str(model))
    parts = tokenizer.parts()
    assert tokenizer.special_ids() == {"bos": 1, "eos": 0, "pad": 0, "unk": None}
    assert parts["stop_ids"].content == [0, 1, 2] and parts["padded_vocabulary"].content == 640
    assert parts["template_defaults"].content["bos_token"] == "<|im_start|>"
    (model / "generation_config.json").unlink()
    change(model / "config.json", eos_token_id=2)
    assert open_tokenizer(str(model)).parts()["stop_ids"].content == [2]
    (model / "config.json").unlink()
    unknown = open_tokenizer(str(model)).parts()
    assert not unknown["stop_ids"].known and not unknown["padded_vocabulary"].known


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_broken_file_beside_it_is_named(model: Path, name: str, text: str) -> None:
    (model / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ContentError, match=name) as caught:
        open_tokenizer(str(model))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_in_python_from_its_json() -> None:
    content = json.loads(tiny_json().read_text())
    for given in (content, json.dumps(content)):
        tokenizer = FastTokenizer.from_json(given, name="mine")
        assert tokenizer.name == "mine" and tokenizer.encode(texts()) == opened("tiny").encode(texts())
        assert not tokenizer.parts()["special_ids"].known and tokenizer.chat_template is None


def test_truncation_and_padding_of_a_file_do_not_cut_texts(tmp_path: Path) -> None:
    content = json.loads(tiny_json().read_text())
    content["truncation"] = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    content["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None} | {
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    assert FastTokenizer.from_json(content).encode(texts()) == opened("tiny").encode(texts())


def test_a_panic_of_the_library_is_an_error_of_one_line(tmp_path: Path) -> None:
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]},
    }
    with pytest.raises(OnepolicyError) as caught:
        FastTokenizer.from_json(content, name="odd")
    assert "odd" in str(caught.value) and "\n" not in str(caught.value)


def test_unigram_and_wordpiece_and_what_they_put_around_a_text() -> None:
    around = {"type": "TemplateProcessing", "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}} | {
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    }
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 1, "content": "<s>", "special": True, **flags}]
    vocabulary = [["<unk>", 0.0], ["<s>", 0.0], ["▁ab", -1.0], ["c", -2.0], ["▁", -3.0]]
    unigram = FastTokenizer.from_json(
        {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": metaspace,
            "post_processor": around,
            "decoder": metaspace,
            "model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False},
        }
    )
    assert unigram.encode(["abc"]) == [[2, 3]] and unigram.encode(["abc"], add_special=True) == [[1, 2, 3]]
    assert unigram.token_bytes(2) == b" ab" and unigram.special_ids()["unk"] == 0
    parts = unigram.parts()
    assert parts["merges"].content == vocabulary and "vocab" not in parts["model"].content
    assert parts["post_processor"].content == {"before": ["<s>"], "after": []}
    pieces = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
        | {"max_input_chars_per_word": 9, "vocab": {"[UNK]": 0, "ab": 1, "##c": 2}},
    }
    wordpiece = FastTokenizer.from_json(pieces)
    assert wordpiece.encode(["abc"]) == [[1, 2]]
    assert [wordpiece.token_bytes(i) for i in (1, 2, 3)] == [b" ab", b"c", None]


def test_a_tokenizer_of_transformers_in_python(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer.BACKEND == "transformers"
    some = [t for t in texts() if "<" not in t]
    ids = tokenizer.encode(some)
    assert ids == [[b + 3 for b in t.encode()] for t in some] and tokenizer.decode(ids) == some
    assert b"".join(tokenizer.token_bytes(i) or b"" for i in ids[5]).decode() == some[5]
    parts = tokenizer.parts()
    assert parts["post_processor"].content == {"before": [], "after": ["</s>"]}
    assert not parts["normalizer"].known and "ByT5Tokenizer" in parts["normalizer"].why
    assert tokenizer.encode(["a</s>"], parse_special=True)[0][-1] == 1
    with pytest.raises(ContentError, match="the vocabulary has no id 100000"):
        tokenizer.decode([[100000]])


def test_what_transformers_cannot_load_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "NoSuchTokenizer"}))
    with pytest.raises(ContentError, match="transformers cannot load it") as caught:
        open_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
