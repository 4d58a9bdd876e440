"""Template questions in ids: the first id that differs, ids that merge over a seam, a doubled BOS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from template_faults import FAULTS
from template_texts import CLEAN, chatml

from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.templates import TemplateReport, check_template
from onepolicy.types import Severity

BOS, EOS = "<s>", "</s>"


@pytest.fixture(scope="module", params=["adds BOS", "adds nothing"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Tokenizer]:
    """A byte-level tokenizer with one merge, of two newlines, whose post-processor adds BOS or does not."""
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(letters)} | {"ĊĊ": 256}
    inner = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    names = [BOS, EOS, "<|im_start|>", "<|im_end|>"]
    inner.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    adds = request.param == "adds BOS"
    if adds:
        inner.post_processor = processors.TemplateProcessing(
            f"{BOS} $A", special_tokens=[(BOS, inner.token_to_id(BOS))]
        )
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    return adds, open_tokenizer(str(folder))


def codes(report: TemplateReport) -> dict[str, Any]:
    return {f.code: f for f in report.findings}


def test_a_bos_from_the_template_and_from_the_encoder(tokenizer: tuple[bool, Tokenizer]) -> None:
    adds, inner = tokenizer
    found = codes(check_template("{{ bos_token }}" + CLEAN, tokenizer=inner))
    assert ("double-bos" in found) == adds
    if adds:
        one = found["double-bos"]
        assert one.severity is Severity.WARN and one.evidence["class"] == "template and encode"
        assert one.evidence["bos_count"] == {"in_text": 1, "plain": 1, "add_special_tokens": 2}
        assert "add_special_tokens=False" in one.advice


def test_a_template_without_bos_is_no_double(tokenizer: tuple[bool, Tokenizer]) -> None:
    assert "double-bos" not in codes(check_template(CLEAN, tokenizer=tokenizer[1]))


def test_two_bos_by_the_template_alone(tokenizer: tuple[bool, Tokenizer]) -> None:
    found = codes(check_template(FAULTS["two BOS"][0], tokenizer=tokenizer[1]))
    assert found["double-bos"].severity is Severity.FAIL and found["double-bos"].evidence["bos_count"] == {"in_text": 2}


def test_ids_that_merge_over_the_seam_are_a_note(tokenizer: tuple[bool, Tokenizer]) -> None:
    """The generation prompt ends with a newline and a reply begins with two."""
    report = check_template(CLEAN, tokenizer=tokenizer[1])
    note = codes(report)["retokenization-drift"]
    assert note.severity is Severity.INFO and report.safe and note.evidence["class"] == "ids-merge-over-a-seam"
    assert all(place.startswith("edges") for place in note.evidence["places"])
    assert 256 in note.evidence["ids_rendered"] and note.evidence["ids_rendered"] != note.evidence["ids_in_context"]


def test_a_rewritten_history_names_its_first_id(tokenizer: tuple[bool, Tokenizer]) -> None:
    _, inner = tokenizer
    report = check_template(FAULTS["thinking dropped"][0], tokenizer=inner)
    one = codes(report)["history-rewritten-by-template"]
    ids, at = one.evidence["ids"], one.evidence["first_diff_char"]
    assert 0 < ids["first_diff_id"] < at and ids["ids_in_context"] != ids["ids_rendered"]
    # the newline that ends the prompt merges with those that the dropped thinking leaves behind
    assert ids["first_diff_id"] == ids["prompt_ids"] - 1
    assert inner.decode([ids["ids_rendered"]])[0].count("\n") >= 3


def test_the_stop_token_is_known_by_the_vocabulary(tokenizer: tuple[bool, Tokenizer]) -> None:
    report = check_template(chatml("{{ m.content }}"), tokenizer=tokenizer[1])
    assert (report.stop.stop, report.stop.how, report.stop.suffix) == ("<|im_end|>", "special token", "\n")
    assert codes(report)["special-token-look-alike"].severity is Severity.INFO
