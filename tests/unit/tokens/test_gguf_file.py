"""GGUF files that are written here from known tokenizers: the same ids come out; what cannot be built is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onepolicy.errors import ContentError, UnknownName
from onepolicy.tokens import patterns
from onepolicy.tokens.components import canonical
from onepolicy.tokens.gguf_file import GgufTokenizer
from onepolicy.tokens.open import open_tokenizer
from tokenizer_families import TEKKEN, V3, built, mistral_file, opened, random_ids, texts, tiny_json

CONTROL = 3


def write(path: Path, kind: str | None, arrays: dict[str, Any], **values: Any) -> str:
    """A GGUF file without tensors. `arrays`: tokens, merges, scores, token_type; `values`: other records."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    if kind is not None:
        writer.add_tokenizer_model(kind)
    for name, value in arrays.items():
        writer.add_array(f"tokenizer.ggml.{name}", value)
    for name, value in values.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(name.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def tiny_arrays() -> dict[str, Any]:
    content = json.loads(tiny_json().read_text())
    vocabulary = content["model"]["vocab"]
    special = {t["id"] for t in content["added_tokens"]}
    return {
        "tokens": sorted(vocabulary, key=vocabulary.__getitem__),
        "merges": [" ".join(m) if isinstance(m, list) else m for m in content["model"]["merges"]],
        "token_type": [CONTROL if i in special else 1 for i in range(len(vocabulary))],
    }


def pieces(file: str) -> dict[str, Any]:
    """A sentencepiece file's pieces as a GGUF file holds them."""
    from sentencepiece import sentencepiece_model_pb2 as pb  # pyright: ignore

    message = pb.ModelProto()  # pyright: ignore
    message.ParseFromString(Path(file).read_bytes())
    return {
        "tokens": [p.piece for p in message.pieces],
        "scores": [p.score for p in message.pieces],
        "token_type": [p.type for p in message.pieces],
        "precompiled_charsmap": list(message.normalizer_spec.precompiled_charsmap),
    }


def test_smollm2_splits_digits_as_its_pre_tokenizer_says(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    told = AutoTokenizer.from_pretrained(str(built("smollm2")), local_files_only=True)
    gguf = opened("smollm2-gguf")
    assert gguf.pre == "smollm" and gguf.parts()["pre_tokenizer"].why == "tokenizer.ggml.pre is 'smollm'"
    assert gguf.encode(["in 1984"]) == told(["in 1984"])["input_ids"] == [[254, 216, 33, 41, 40, 36]]
    assert gguf.encode(texts()) == told(texts(), add_special_tokens=False)["input_ids"]
    other = GgufTokenizer(f"{built('smollm2-gguf')}/SmolLM2-135M-Instruct.Q4_1.gguf?pre=gpt-2")
    assert gguf.encode(["a  1"]) == told(["a  1"])["input_ids"] != other.encode(["a  1"])


def test_byte_level_bpe_comes_back_from_its_records(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "gpt2", tiny_arrays(), tokenizer__ggml__pre="gpt-2")
    tokenizer, tiny = open_tokenizer(path), opened("tiny")
    assert tokenizer.encode(texts()) == tiny.encode(texts())
    ids = random_ids(tiny)
    assert tokenizer.decode(ids) == tiny.decode(ids)
    same = ("model", "vocabulary", "merges", "normalizer", "pre_tokenizer", "decoder", "added_tokens")
    assert all(tokenizer.parts()[name].digest == tiny.parts()[name].digest for name in same)
    assert not tokenizer.parts()["padded_vocabulary"].known


def test_bos_and_eos_are_added_as_the_records_or_the_name_say(tmp_path: Path) -> None:
    ids = {"tokenizer__ggml__bos_token_id": 1, "tokenizer__ggml__eos_token_id": 2}
    cases = [
        ({"tokenizer__ggml__pre": "llama-bpe"}, [1], []),
        ({"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": False}, [], []),
        ({"tokenizer__ggml__pre": "gpt-2", "tokenizer__ggml__add_eos_token": True}, [], [2]),
    ]
    for n, (records, before, after) in enumerate(cases):
        tokenizer = open_tokenizer(write(tmp_path / f"{n}.gguf", "gpt2", tiny_arrays(), **ids, **records))
        [plain] = tokenizer.encode(["abc"])
        assert tokenizer.encode(["abc"], add_special=True) == [[*before, *plain, *after]]
        sides = {side: [tokenizer.added[i].content for i in of] for side, of in (("before", before), ("after", after))}
        assert tokenizer.parts()["post_processor"].content == (sides if before or after else None)
        assert tokenizer.special_ids() == {"bos": 1, "eos": 2, "pad": None, "unk": None}
        assert tokenizer.parts()["stop_ids"].content == [2]


def test_templates_and_what_they_get(tmp_path: Path) -> None:
    arrays = {**tiny_arrays()}
    path = write(
        tmp_path / "a.gguf",
        "gpt2",
        arrays,
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__eot_token_id=0,
        tokenizer__chat_template="{{ messages }}",
        llama__vocab_size=640,
    )
    tokenizer = GgufTokenizer(path)
    parts = tokenizer.parts()
    assert tokenizer.pre == "default" and tokenizer.chat_template == parts["chat_template"].content == "{{ messages }}"
    assert parts["template_defaults"].content["eos_token"] == "<|im_end|>"
    assert parts["stop_ids"].content == [0, 2] and parts["padded_vocabulary"].content == 640


def test_pieces_with_scores_are_the_sentencepiece_librarys(tmp_path: Path) -> None:
    arrays = {k: v for k, v in pieces(mistral_file(V3)).items() if k != "precompiled_charsmap"}
    tokenizer, library = open_tokenizer(write(tmp_path / "a.gguf", "llama", arrays)), opened("sentencepiece")
    assert tokenizer.encode(texts(), parse_special=False) == library.encode(texts(), parse_special=False)
    some = [t for t in texts() if "<unk>" not in t]
    assert tokenizer.encode(some) == library.encode(some)
    assert tokenizer.encode(["a<unk>b"])[0].count(0) == 1  # llama.cpp reads the unknown token, and shows it
    assert tokenizer.decode([[0]]) == ["<unk>"] and tokenizer.token_bytes(0) == b"<unk>"
    assert tokenizer.encode(["a"], add_special=True)[0][0] == 1
    assert tokenizer.special_ids() == {"bos": 1, "eos": 2, "pad": None, "unk": 0}
    same = ("model", "vocabulary", "merges", "normalizer", "pre_tokenizer", "decoder")
    assert all(tokenizer.parts()[name].digest == library.parts()[name].digest for name in same)


def test_no_space_in_front_where_the_record_says_so(tmp_path: Path) -> None:
    arrays = {k: v for k, v in pieces(mistral_file(V3)).items() if k != "precompiled_charsmap"}
    path = write(tmp_path / "a.gguf", "llama", arrays, tokenizer__ggml__add_space_prefix=False)
    tokenizer = open_tokenizer(path)
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode(["Hello"])[0]] == [b"Hello"]


def test_unigram_is_the_sentencepiece_librarys(tmp_path: Path) -> None:
    import sentencepiece

    source = tmp_path / "text"
    source.write_text("\n".join(t.replace("\n", " ") for t in texts() if t.isprintable()))
    sentencepiece.SentencePieceTrainer.Train(
        f"--input={source} --model_prefix={tmp_path / 'u'} --model_type=unigram --vocab_size=1200 "
        "--character_coverage=0.98 --hard_vocab_limit=false --byte_fallback=true --pad_id=3 --minloglevel=2"
    )
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "u.model"))
    ids = {
        f"tokenizer__ggml__{role}_token_id": i for role, i in (("bos", 1), ("eos", 2), ("padding", 3), ("unknown", 0))
    }
    values = {**ids, "tokenizer__ggml__remove_extra_whitespaces": True}
    tokenizer = open_tokenizer(write(tmp_path / "a.gguf", "t5", pieces(str(tmp_path / "u.model")), **values))
    plain = [t for t in texts() if "<" not in t]
    assert tokenizer.encode(plain) == library.encode(plain) and len(plain) > 50
    assert tokenizer.encode(["a"], add_special=True) == [[*library.encode("a"), 2]]
    assert open_tokenizer(str(tmp_path / "u.model")).encode(plain) == library.encode(plain)


def test_every_named_pre_tokenizer_builds_and_keeps_texts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    content = json.loads(tiny_json().read_text())
    tiny = opened("tiny")
    for pre in set(patterns.PRE.values()):
        built_one = Tokenizer.from_str(json.dumps({**content, "pre_tokenizer": patterns.pre_tokenizer(pre)}))
        ids = [e.ids for e in built_one.encode_batch(texts(), add_special_tokens=False)]
        assert tiny.decode(ids) == texts()


def test_named_pre_tokenizers_are_those_of_the_models_files() -> None:
    deepseek = json.loads((built("deepseek") / "tokenizer.json").read_text())["pre_tokenizer"]
    assert canonical(deepseek) == canonical(patterns.pre_tokenizer(patterns.PRE["deepseek-v3"]))
    tekken = json.loads(Path(mistral_file(TEKKEN)).read_text())["config"]["pattern"]
    assert patterns.PRE["tekken"].steps == (tekken,)
    smollm2 = opened("smollm2").parts()["pre_tokenizer"].content
    assert canonical(patterns.pre_tokenizer(patterns.PRE["smollm"])) == smollm2


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "gpt2", tiny_arrays(), tokenizer__ggml__pre="smolm")
    with pytest.raises(UnknownName, match=r"pre-tokenizer of .*a\.gguf .* 'smolm'; did you mean 'smollm'"):
        open_tokenizer(path)


def doubled() -> dict[str, Any]:
    arrays = tiny_arrays()
    return {**arrays, "tokens": [*arrays["tokens"][:-1], "a"]}


@pytest.mark.parametrize(
    ("kind", "arrays", "says"),
    [
        (None, {}, r"holds no tokenizer \(no record tokenizer.ggml.model\)"),
        ("rwkv", {}, "holds a tokenizer of the kind 'rwkv'; onepolicy builds gpt2"),
        ("gpt2", {}, "holds no vocabulary"),
        ("gpt2", {"tokens": ["a", "b"]}, "holds no merges"),
        ("gpt2", {"tokens": ["a", "b"], "merges": ["ab"]}, "merge 0 is 'ab', wanted two tokens"),
        ("gpt2", {"tokens": ["a", "b"], "merges": ["a b"]}, "merge 'a b' makes a token that is not in the vocabulary"),
        ("gpt2", doubled, "token 'a' has two ids"),
        ("gpt2", {"tokens": ["a", "b", "ab"], "merges": ["a b"], "token_type": [1, 1]}, "2 token types for 3 tokens"),
        ("llama", {"tokens": ["a", "b"], "scores": [0.5]}, "1 scores for 2 tokens"),
    ],
)
def test_what_cannot_be_built_is_an_error_of_one_line(tmp_path: Path, kind: Any, arrays: Any, says: str) -> None:
    made: dict[str, Any] = arrays() if callable(arrays) else arrays  # pyright: ignore
    path = write(tmp_path / "a.gguf", kind, made)
    with pytest.raises(ContentError, match=says) as caught:
        open_tokenizer(path)
    assert "a.gguf" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [4, 20, 5000])
def test_half_a_file_is_an_error_of_one_line(tmp_path: Path, keep: int) -> None:
    whole = Path(write(tmp_path / "a.gguf", "gpt2", tiny_arrays())).read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[:keep])
    with pytest.raises(ContentError, match=r"half\.gguf: not a whole GGUF file") as caught:
        open_tokenizer(str(tmp_path / "half.gguf"))
    assert "\n" not in str(caught.value)
