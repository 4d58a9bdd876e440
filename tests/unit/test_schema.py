"""The column table and the page that is generated from it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from onepolicy import schema

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_columns_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "_generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    written = (DOCS / "columns.md").read_text(encoding="utf-8")
    assert written == generate.columns_markdown(), "run: python docs/_generate.py"


def test_every_column_is_on_the_page_once() -> None:
    page = (DOCS / "columns.md").read_text(encoding="utf-8")
    for name in schema.COLUMNS:
        assert page.count(f"| `{name}` |") == 1


def test_one_column_is_required() -> None:
    assert [name for name, spec in schema.COLUMNS.items() if spec.required] == ["token_ids"]


@pytest.mark.parametrize("side", [*schema.SCORINGS, "fp32", "leg_2"])
@pytest.mark.parametrize("field", ["logprobs", "entropy", "varentropy"])
def test_scoring_columns(side: str, field: str) -> None:
    name = f"{side}_{field}"
    assert schema.scoring_column(name) == (side, field)
    spec = schema.column(name)
    assert spec is not None
    assert (spec.level, spec.dtype) == ("token", "float")


@pytest.mark.parametrize(
    "name", ["logprobs", "_logprobs", "a b_logprobs", "sampler_logprob", "token_idx", "x_a_logprobs", ""]
)
def test_names_outside_the_contract(name: str) -> None:
    assert schema.column(name) is None


def test_names_of_scorings() -> None:
    assert all(schema.is_scoring_name(name) for name in (*schema.SCORINGS, "fp32", "leg_2"))
    assert not any(schema.is_scoring_name(name) for name in ("", "a b", "hf:tiny", "x", "x_a", "a\n"))


def test_of_level_splits_the_table() -> None:
    levels: list[schema.Level] = ["token", "record", "token_list", "record_list"]
    assert sorted(name for level in levels for name in schema.of_level(level)) == sorted(schema.COLUMNS)
