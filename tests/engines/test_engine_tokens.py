"""The tokens of two real engines: the ids of one suite, and tokenizers that differ in their directories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onepolicy.check import check_engines
from onepolicy.checking import Choices
from onepolicy.engine_tokens import check_engine_tokens
from onepolicy.engines.base import SamplingParams
from onepolicy.models import path as packaged
from onepolicy.report.words import withheld
from onepolicy.suite import load
from onepolicy.tokens.open import open_tokenizer
from onepolicy.types import Outcome, TokenReport

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def copied(where: Path, **change: Any) -> str:
    """The packaged model with parts of its tokenizer.json replaced."""
    shutil.copytree(packaged("tiny"), where)
    file = where / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    return str(where)


def beginning_with(token: str) -> dict[str, Any]:
    """A post-processor that puts a special token before every text."""
    ids = {t.content: t.id for t in open_tokenizer("tiny").added.values()}
    text, mark = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, text],
        "pair": [mark, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]}},
    }


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A copy whose tokenizer begins every text with BOS."""
    return copied(tmp_path_factory.mktemp("models") / "bos", post_processor=beginning_with("<|endoftext|>"))


@pytest.fixture(scope="module")
def against_vllm(other: str) -> TokenReport:
    return check_engine_tokens("vllm:tiny?dtype=float32", f"hf:{other}?dtype=float32", load("smoke"))


def test_vllm_and_a_scorer_that_adds_bos(against_vllm: TokenReport):
    codes = {f.code for f in against_vllm.findings}
    assert against_vllm.outcome is Outcome.DRIFT
    assert "post-processor-differs" in codes
    assert codes & {"prompt-ids-differ", "double-bos"}
    assert against_vllm.counts["with the same ids"] < against_vllm.counts["prompts"]


def test_two_engines_of_one_directory_read_the_same_ids():
    report = check_engine_tokens("openvino:tiny", "hf:tiny", load("smoke"))
    assert (report.outcome, report.findings) == (Outcome.PASS, ())
    assert report.counts["with the same ids"] == report.counts["prompts"] == len(load("smoke").prompts)


def test_an_engine_that_reads_no_text_leaves_the_question_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "no_text.py"
    module.write_text("def score(ids):\n    return [[0.0] * len(x) for x in ids]\n", encoding="utf-8")
    report = check_engine_tokens("hf:tiny", "callable:no_text:score", load("smoke"))
    assert (report.outcome, [f.code for f in report.findings]) == (Outcome.INCONCLUSIVE, ["nothing-checked"])


def checked(scorer: str) -> Any:
    choices = Choices(legs=[], suite="smoke", params=SamplingParams(max_tokens=16, samples=4))
    return check_engines("openvino:tiny?dtype=bfloat16", f"hf:{scorer}?dtype=bfloat16", choices=choices)[0]


def test_a_check_looks_at_the_tokens_before_the_numbers(tmp_path: Path):
    digits = {"type": "Digits", "individual_digits": True}
    before = json.loads((Path(packaged("tiny")) / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    parts = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    other = copied(tmp_path / "digits", pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, *parts]})
    report = checked(other)
    found = {f.code: f for f in report.findings}
    assert report.outcome is Outcome.DRIFT and withheld(report)
    assert found["pre-tokenizer-differs"].evidence["class"] == "digits"
    assert all(g.outcome is not Outcome.DRIFT for g in report.gates)


def test_a_check_of_one_directory_says_nothing_of_tokens(tmp_path: Path):
    same = copied(tmp_path / "same")
    codes = {f.code for f in checked(same).findings}
    assert not codes & {"pre-tokenizer-differs", "texts-encode-differently", "tokenizer-differs", "nothing-checked"}
