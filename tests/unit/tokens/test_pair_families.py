"""Real tokenizers in pairs: one tokenizer through two backends is silent; a fault of a converter is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from onepolicy import models
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.pair import PairReport, compare_tokenizers
from onepolicy.types import Severity

TINY = Path(models.path("tiny"))
SMOLLM2 = Path(__file__).resolve().parents[3] / "build" / "models" / "smollm2"
MISTRAL = str(resources.files("mistral_common") / "data")
V3, TEKKEN = f"{MISTRAL}/mistral_instruct_tokenizer_240323.model.v3", f"{MISTRAL}/tekken_240911.json"


def raised(report: PairReport) -> dict[str, str]:
    return {f.code: f.severity.value for f in report.findings if f.severity is not Severity.INFO}


def write_gguf(path: Path, pre: str, *, tokens: Sequence[str] = ()) -> Path:
    """The packaged tokenizer as a GGUF file, with a pre-tokenizer by name and more tokens at the end."""
    from gguf import GGUFWriter, TokenType

    content = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    names = [*sorted(vocabulary, key=vocabulary.__getitem__), *tokens]
    kinds = [
        TokenType.CONTROL if t in special else TokenType.UNUSED if t in tokens else TokenType.NORMAL for t in names
    ]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template((TINY / "chat_template.jinja").read_text(encoding="utf-8"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_of_the_same_tokenizer_gives_no_finding(tmp_path: Path) -> None:
    report = compare_tokenizers(open_tokenizer("tiny"), open_tokenizer(str(write_gguf(tmp_path / "t.gguf", "gpt-2"))))
    # the file knows one stop id; the directory's generation config knows two
    assert raised(report) in ({}, {"stop-ids-differ": "fail"})
    assert report.same_ids
    assert {row.part for row in report.parts if row.state == "differs"} <= {
        "stop_ids",
        "special_ids",
        "template_defaults",
    }


def test_tokens_that_fill_up_a_gguf_file_are_no_difference(tmp_path: Path) -> None:
    filled = write_gguf(tmp_path / "t.gguf", "gpt-2", tokens=[f"[PAD{i}]" for i in range(512, 520)])
    report = compare_tokenizers(open_tokenizer("tiny"), open_tokenizer(str(filled)))
    assert not {"vocabularies-differ", "added-tokens-differ"} & {f.code for f in report.findings}
    vocabulary = next(row for row in report.parts if row.part == "vocabulary")
    assert vocabulary.why == "but for tokens that only fill up the vocabulary: sampler 0, scorer 8"


def test_a_gguf_file_with_another_pre_tokenizer_is_found(tmp_path: Path) -> None:
    """A converter that writes `default` where the model splits digits."""
    files = [open_tokenizer(str(write_gguf(tmp_path / f"{pre}.gguf", pre))) for pre in ("smollm", "gpt-2")]
    report = compare_tokenizers(files[0], files[1])
    assert raised(report) == {"pre-tokenizer-differs": "fail"}
    assert report.findings[0].evidence["class"] == "digits"


@pytest.mark.engines
def test_the_gguf_reader_of_transformers_leaves_out_the_splitting_of_digits(tmp_path: Path) -> None:
    """It reads every byte-level file as GPT-2's, whatever `tokenizer.ggml.pre` says (transformers 5.19)."""
    from transformers import AutoTokenizer

    file = write_gguf(tmp_path / "t.gguf", "smollm")
    read: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    other = FastTokenizer.from_json(read.backend_tokenizer.to_str(), "transformers")
    report = compare_tokenizers(open_tokenizer(str(file)), other, texts=["in 2007", "no digits"])
    assert raised(report) == {"pre-tokenizer-differs": "fail"}
    (found,) = report.findings
    assert (found.evidence["class"], found.evidence["vocab_equal"]) == ("digits", True)
    assert "digits: sampler one by one, scorer all together" in found.evidence["differences"]


@pytest.mark.smollm2
def test_smollm2_through_two_backends_and_without_its_splitting_of_digits() -> None:
    own, other = open_tokenizer(str(SMOLLM2)), open_tokenizer(f"transformers:{SMOLLM2}")
    assert raised(compare_tokenizers(own, other)) == {}
    content = json.loads((SMOLLM2 / "tokenizer.json").read_text(encoding="utf-8"))
    content["pre_tokenizer"] = content["pre_tokenizer"]["pretokenizers"][1]
    report = compare_tokenizers(own, FastTokenizer.from_json(content))
    assert raised(report) == {"pre-tokenizer-differs": "fail"}
    # its vocabulary has no token of two digits: what differs is a space before digits of other scripts
    assert report.findings[0].evidence["class"] == "digits"


@pytest.fixture(scope="module")
def tekken() -> Any:
    return open_tokenizer(TEKKEN)


def test_sentencepiece_and_tekken_are_two_tokenizers(tekken: Any) -> None:
    report = compare_tokenizers(open_tokenizer(V3), tekken)
    (first, *_) = report.findings
    assert (first.code, first.severity) == ("vocabularies-differ", Severity.FAIL)
    assert "two other tokenizers" in first.message
    assert not {"merges-differ", "normalizer-differs", "pre-tokenizer-differs"} & {f.code for f in report.findings}
    states = {row.part: row.state for row in report.parts}
    assert states["pre_tokenizer"] == states["merges"] == "not known"  # in other terms


def test_two_releases_of_tekken_are_one_tokenizer(tekken: Any) -> None:
    report = compare_tokenizers(open_tokenizer(f"{MISTRAL}/tekken_240718.json"), tekken)
    assert report.findings == []
    assert report.same_ids


def test_one_sentencepiece_file_through_two_libraries() -> None:
    """mistral-common puts BOS in front; the sentencepiece library puts nothing around a text."""
    report = compare_tokenizers(open_tokenizer(V3), open_tokenizer(f"sentencepiece:{V3}"))
    assert raised(report) == {"post-processor-differs": "fail"}
    assert report.findings[0].evidence["sampler"] == {"before": [1], "after": []}
    assert report.same_ids


@pytest.mark.engines
def test_a_sentencepiece_file_against_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Other terms for the same rules: what differs is found by texts, and no part is blamed unheard."""
    (tmp_path / "tokenizer.model").write_bytes(Path(f"{MISTRAL}/tokenizer.model.v1").read_bytes())
    named = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    report = compare_tokenizers(open_tokenizer(f"sentencepiece:{tmp_path}"), open_tokenizer(f"transformers:{tmp_path}"))
    states = {row.part: row.state for row in report.parts}
    assert states["vocabulary"] == states["special_ids"] == "same"
    assert states["normalizer"] == states["pre_tokenizer"] == states["merges"] == "not known"
    found = next(f for f in report.findings if f.code == "texts-encode-differently")
    assert found.evidence["class"] == "leading space"
    assert {"normalizer", "pre_tokenizer"} <= set(found.rivals)
    assert not {"normalizer-differs", "merges-differ", "pre-tokenizer-differs"} & raised(report).keys()


def test_two_versions_of_mistrals_control_tokens() -> None:
    v2 = open_tokenizer(f"{MISTRAL}/mistral_instruct_tokenizer_240216.model.v2")
    report = compare_tokenizers(v2, open_tokenizer(V3))
    assert raised(report) == {"added-tokens-differ": "fail"}
    assert report.findings[0].evidence["class"] == "special look-alikes"


@pytest.mark.engines
def test_the_packaged_tokenizer_by_transformers_gives_no_finding() -> None:
    report = compare_tokenizers(open_tokenizer("tiny"), open_tokenizer("transformers:tiny"))
    assert report.backends == ("tokenizers", "transformers")
    assert report.findings == []
    assert report.same_ids
