"""Outputs by suffix: several at once, never replaced unasked."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from onepolicy.cli.outputs import SUFFIXES, require_free, show
from onepolicy.errors import UsageError
from onepolicy.report import RENDERERS
from onepolicy.report.json import from_json
from onepolicy.types import Report

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))


@pytest.fixture(scope="module")
def report() -> Report:
    from scenarios import SCENARIOS

    return SCENARIOS["undecided"]()


def test_every_suffix_has_a_renderer():
    assert set(SUFFIXES.values()) == set(RENDERERS) - {"text"}


def test_each_output_is_in_the_format_of_its_suffix(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = [tmp_path / name for name in ("r.json", "r.MD", "r.xml")]
    require_free(paths, overwrite=False)
    assert show(report, paths, as_json=False) == 3
    assert from_json(paths[0].read_text(encoding="utf-8")).outcome == report.outcome
    assert paths[1].read_text(encoding="utf-8").startswith("## ? onepolicy: inconclusive")
    assert ET.fromstring(paths[2].read_text(encoding="utf-8")).tag == "testsuites"
    assert capsys.readouterr().out.startswith(" INCONCLUSIVE ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.MD", "r.json", "r.xml"]
    assert all(p.read_text(encoding="utf-8").endswith("\n") for p in paths)
    assert not any(p.read_text(encoding="utf-8").endswith("\n\n") for p in paths)


def test_one_path_or_none(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = tmp_path / "r.json"
    require_free(one, overwrite=False)
    require_free(None, overwrite=False)
    assert show(report, one, as_json=True) == 3
    assert json.loads(capsys.readouterr().out) == json.loads(one.read_text(encoding="utf-8"))
    assert show(report, None, as_json=True) == 3
    assert list(tmp_path.iterdir()) == [one]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["r.json", "r.txt"], "got the suffix '.txt', wanted one of .json, .md, .xml"),
        (["r.json", "r.json"], "r.json is named twice"),
        (["r.json", "sub/../r.json"], "is named twice"),
        (["r.md", "there.xml"], "there.xml exists; --overwrite replaces it"),
        (["folder.md"], "is a folder"),
        (["gone/r.json"], "is not a folder that can be written to"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(names: list[str], said: str, tmp_path: Path):
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "there.xml").write_text("old")
    with pytest.raises(UsageError) as err:
        require_free([tmp_path / name for name in names], overwrite=False)
    assert said in str(err.value) and "\n" not in str(err.value)
    assert (tmp_path / "there.xml").read_text() == "old"


def test_overwrite_replaces(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "there.xml"
    path.write_text("old")
    require_free([path], overwrite=True)
    show(report, [path], as_json=False)
    assert path.read_text(encoding="utf-8").startswith("<?xml")
    assert capsys.readouterr().out
