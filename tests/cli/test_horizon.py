"""`onepolicy horizon` from end to end: numbers, a report, a drawing, JSON, and input that cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from commands import Command

from onepolicy.report.json import from_json


def test_the_textbook_example(cli: Command):
    ran = cli("horizon", "--gap", 0.01, "--length", 10000, "--answers", 200)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("A gap of 0.01 nats a token over answers of 10,000 tokens\n")
    for said in (
        "textbook walk",
        "normalised",
        "48.8%",
        "54%",
        "10,561",
        "8,560",
        "×2.72",
        "200 answers token by token",
    ):
        assert said in ran.out
    assert "Eight answers, normalised" in ran.out
    # lines may break behind the hyphen
    assert "sequence-level weights are costly" in " ".join(ran.out.split()).replace("- level", "-level")


def test_json_has_every_number(cli: Command):
    ran = cli("horizon", "--gap", 0.068, "--length", 4096, "--answers", 50, "--json")
    data = json.loads(ran.out)
    assert (ran.code, data["onepolicy_horizon"], data["use"]) == (0, 1, "unusable")
    row = data["readings"]["normalised"]
    assert row["drift"] == pytest.approx(-9.47, abs=0.005) and row["spread"] == pytest.approx(4.352)
    assert row.keys() - {"label", "meaning", "simulated"} == row["simulated"].keys()
    assert len(data["walks"]["log_ratio"]) == 8


def test_every_option_reaches_its_number(cli: Command):
    argv = ["--gap", 0.05, "--length", 500, "--bias", -0.001, "--autocorrelation", 0.5, "--tail", "mixture:0.01,10"]
    argv += ["--clip", 0.1, "--clip-high", 0.3, "--sequence-clip", 0.002, 0.003, "--answers", 0, "--json"]
    data = json.loads(cli("horizon", *argv).out)
    assert data["gap"] == {
        "sd": 0.05,
        "mean": -0.001,
        "autocorrelation": 0.5,
        "law": "mixture, 1% of the tokens 10 times as far off",
    }
    assert (data["clip"], data["sequence_clip"]) == ([0.9, 1.3], [0.998, 1.003])
    assert data["readings"]["given"]["drift"] == pytest.approx(-0.5)
    assert data["readings"]["given"]["spread"] == pytest.approx(0.05 * (500 * 3) ** 0.5, rel=0.01)
    assert "walks" not in data


def test_a_report_gives_the_numbers(cli: Command, report: Path):
    saved = from_json(report.read_text(encoding="utf-8"))
    ran = cli("horizon", "--from", report, "--answers", 20, "--json")
    assert (ran.code, ran.err) == (0, "")
    data = json.loads(ran.out)
    rms, mean = (saved.measurements[k].value or 0.0 for k in ("log_ratio/rms", "log_ratio/mean"))
    assert data["length"] == saved.reply_length
    assert data["gap"]["sd"] == pytest.approx((rms**2 - mean**2) ** 0.5)
    assert data["readings"]["measured"]["drift"] == pytest.approx(mean * data["length"])
    assert data["gap"]["law"].startswith("as measured on ")
    assert any("Var(D) / T" in note for note in data["notes"])


def test_the_command_line_goes_before_the_report(cli: Command, report: Path):
    more = ["--length", 77, "--bias", 0, "--autocorrelation", 0.1, "--tail", "normal", "--answers", 0]
    data = json.loads(cli("horizon", "--from", report, *more, "--json").out)
    assert data["length"] == 77
    assert (data["gap"]["mean"], data["gap"]["autocorrelation"], data["gap"]["law"]) == (0, 0.1, "normal")
    assert list(data["readings"]) == ["walk", "normalised", "given"]
    assert not any("Var(D)" in note for note in data["notes"])


def test_the_drawing_is_saved(cli: Command, tmp_path: Path):
    out = tmp_path / "walks.svg"
    argv = ["horizon", "--gap", 0.02, "--length", 300, "--answers", 8, "--svg", out]
    assert cli(*argv).code == 0
    assert ET.fromstring(out.read_text(encoding="utf-8")).tag.endswith("svg")
    refused = cli(*argv)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"error: output {out} exists; --overwrite replaces it\n"
    assert cli(*argv, "--overwrite").code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["walks.svg"]


BAD = {
    "nothing": ("", 2, "wanted either --gap SD or --from REPORT.json"),
    "both": ("--gap 0.1 --from {r}", 2, "wanted either --gap SD or --from"),
    "no length": ("--gap 0.1", 2, "--length: wanted"),
    "length 0": ("--gap 0.1 --length 0", 2, "--length"),
    "length too long": ("--gap 0.1 --length 1000000001", 2, "wanted 1 to 1,000,000,000 tokens"),
    "negative": ("--gap -0.1 --length 10", 2, "gap -0.1: wanted"),
    "NaN": ("--gap nan --length 10", 2, "gap nan: wanted"),
    "infinite": ("--gap inf --length 10", 2, "gap inf: wanted"),
    "not a number": ("--gap small --length 10", 2, "--gap"),
    "rho 1": ("--gap 0.1 --length 10 --autocorrelation 1", 2, "autocorrelation 1: wanted"),
    "rho -1.5": ("--gap 0.1 --length 10 --autocorrelation -1.5", 2, "autocorrelation -1.5: wanted"),
    "rho NaN": ("--gap 0.1 --length 10 --autocorrelation nan", 2, "autocorrelation nan: wanted"),
    "bias NaN": ("--gap 0.1 --length 10 --bias nan", 2, "bias nan: wanted"),
    "tail": ("--gap 0.1 --length 10 --tail mixtre:0.1,2", 2, "unknown tail 'mixtre'; did you mean 'mixture'?"),
    "degrees": ("--gap 0.1 --length 10 --tail t:2", 2, "wanted more than 2 degrees of freedom"),
    "clip": ("--gap 0.1 --length 10 --clip 1.5", 2, "clip 1.5, 1.5: wanted"),
    "sequence clip": ("--gap 0.1 --length 10 --sequence-clip 0 1", 2, "sequence clip 0, 1: wanted"),
    "answers": ("--gap 0.1 --length 10 --answers -1", 2, "--answers"),
    "too many": ("--gap 0.1 --length 1000000 --answers 100000", 2, "ask for fewer answers"),
    "suffix": ("--gap 0.1 --length 10 --svg {d}/x.png", 2, "wanted one of .svg"),
    "nothing to draw": ("--gap 0.1 --length 10 --answers 0 --svg {d}/x.svg", 2, "wanted --answers 1 or more"),
    "no file": ("--from {d}/gone.json", 2, "cannot be read"),
    "no report": ("--from {d}/other.json", 4, "not a saved report"),
    "no numbers": ("--from {d}/empty.json", 4, "empty.json: this report has no log_ratio/rms: nothing was scored"),
    "no reply length": ("--from {d}/short.json", 2, "short.json has no reply length: wanted --length N"),
}


@pytest.fixture
def folder(tmp_path: Path, report: Path) -> Path:
    (tmp_path / "other.json").write_text('{"a": 1}', encoding="utf-8")
    data = json.loads(report.read_text(encoding="utf-8"))
    (tmp_path / "short.json").write_text(json.dumps({**data, "reply_length": None}), encoding="utf-8")
    (tmp_path / "empty.json").write_text(json.dumps({**data, "measurements": {}}), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("what", BAD)
def test_one_line_and_the_right_code(what: str, cli: Command, folder: Path, report: Path):
    line, code, said = BAD[what]
    ran = cli("horizon", *line.format(r=report, d=folder).split())
    assert ran.code == code, ran.err
    assert said in ran.err
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1
    assert ran.out == "" and not (folder / "x.svg").exists()


def test_help_has_an_example(cli: Command):
    ran = cli("horizon", "--help")
    assert ran.code == 0
    assert "Example:\n    onepolicy horizon --gap 0.01 --length 10000" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 90


def test_it_needs_numpy_and_typer_alone():
    argv = ["horizon", "--gap", "0.01", "--length", "100", "--answers", "8"]
    code = f"import sys; from onepolicy.cli.main import run; assert run({argv}) == 0; print(*sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(ran.stdout.splitlines()[-1].split())
    assert "numpy" in loaded and "onepolicy.metrics.walks" in loaded
    assert not {"torch", "pyarrow", "scipy", "transformers", "rich"} & loaded


def test_the_table_of_the_docs_is_what_is_printed(cli: Command):
    """Labels and closed form, letter by letter; simulated digits may move with numpy's generator."""
    page = Path(__file__).resolve().parents[2] / "docs" / "horizon.md"
    block = page.read_text(encoding="utf-8").split("```console\n")[1].split("```")[0]
    shown = block.splitlines()[1:]
    printed = cli("horizon", "--gap", 0.01, "--length", 10000).out.splitlines()[: len(shown)]
    assert len(shown) == 16 and shown[:5] == printed[:5]
    for line, real in zip(shown[5:], printed[5:], strict=True):
        assert (line[:45], line[56:67]) == (real[:45], real[56:67])
        assert len(line) == len(real)
