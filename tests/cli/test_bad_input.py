"""Bad input: one clear line on stderr, the right exit code, no traceback, and nothing started for nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import SAMPLER, SCORER, Command

# {f} rollouts, {s} rollouts with two scorings, {r} a saved report, {d} a folder with the files below
FILES = {
    "text.parquet": b"not parquet",
    "broken.jsonl": b'{"token_ids": [1, 2\n',
    "empty.jsonl": b"",
    "not-a-report.json": b'{"a": 1}',
    "broken.json": b"{",
    "binary.json": b"\xff\xfe\x00",
    "no-bounds.toml": b'about = "none"\n',
    "broken.toml": b"[[bound]\n",
    "unknown-metric.toml": b"""
[[bound]]
metric = "kl_k4"
at_most = 1
when = "required"
source = "x"
date = 2026-11-30
""",
    "table.csv": b"1,2",
    "unknown-key.toml": b'[[bound]]\nmetrik = "kl_k3"\n',
    "bad.prompts.jsonl": b'{"text": "no"}\n',
    "there.json": b"old",
    "there.parquet": b"old",
}

TABLE = {
    # the command line itself
    "unknown verb": ("chekc {f}", 2, "Did you mean 'check'"),
    "unknown option": ("check {f} --scorer x: --bonds strict", 2, "No such option: --bonds"),
    "missing option": ("check {f}", 2, "Missing option '--scorer'"),
    "missing argument": ("judge", 2, "Missing argument"),
    "not a number": ("record --sampler fake: -o {d}/x.parquet --max-tokens many", 2, "--max-tokens"),
    "out of range": ("record --sampler fake: -o {d}/x.parquet --top-p 1.5", 2, "--top-p"),
    "not finite": ("record --sampler fake: -o {d}/x.parquet --temperature nan", 2, "--temperature"),
    "one file twice": ("compare {s} {s} --a sampler --b sampler --bounds bf16", 4, "compared with itself"),
    "too many files": ("compare {f} {s} {f}", 2, "unexpected extra argument"),
    "reply length": ("check {f} --scorer fake: --reply-length 0", 2, "--reply-length"),
    # names
    "engine": ("check {f} --scorer fak:", 2, "unknown engine 'fak'; did you mean 'fake'?"),
    "engine without colon": ("check {f} --scorer fake", 2, "wanted name:target?key=value"),
    "switch": ("check {f} --scorer fake:?sed=1", 2, "did you mean 'seed'?"),
    "choice": ("check {f} --scorer fake:?dtype=bfloat61", 2, "did you mean 'bfloat16'?"),
    "preset": ("check {f} --scorer fake: --bounds strct", 2, "unknown preset 'strct'; did you mean 'strict'?"),
    "preset of judge": ("judge {r} --bounds bf61", 2, "unknown preset 'bf61'; did you mean 'bf16'?"),
    "view": ("check {f} --scorer fake: --view drwan", 2, "unknown view 'drwan'; did you mean 'drawn'?"),
    "explain": ("explain kl-above-bond", 2, "did you mean 'kl-above-bound'?"),
    "metric in bounds": ("judge {r} --bounds {d}/unknown-metric.toml", 2, "unknown metric 'kl_k4'; did you mean 'kl_k"),
    "key in bounds": ("judge {r} --bounds {d}/unknown-key.toml", 2, "did you mean 'metric'?"),
    "no bounds in bounds": ("judge {r} --bounds {d}/no-bounds.toml", 2, "hold no [[bound]]"),
    "bounds not TOML": ("judge {r} --bounds {d}/broken.toml", 2, "are not TOML"),
    "bounds not there": ("judge {r} --bounds {d}/gone.toml", 2, "cannot be read"),
    "declare": ("check {f} --scorer fake: --declare temperature", 2, "wanted key=value"),
    "declare twice": ("check {f} --scorer fake: --declare top_p=1 --declare top_p=1", 2, "each key once"),
    "declare a key": ("check {f} --scorer fake: --declare heat=1", 2, "wanted one of"),
    "declare otherwise": ("check {f} --scorer fake: --declare temperature=0.5", 2, "the rollouts themselves say"),
    # engines and models
    "no model directory": ("check {f} --scorer hf:{d}/gone", 2, "wanted a model directory"),
    "not a model directory": ("check {f} --scorer hf:{d}", 2, "holds no config.json"),
    "a scorer that cannot sample": ("record --sampler recorded:{s}?side=scorer -o {d}/x.parquet", 2, "tokenizer"),
    "vocabulary": ("check {f} --scorer fake:?vocab=8", 4, "wanted 0 to 7"),
    "callable not there": ("check {f} --scorer callable:no_such_module:fn", 2, "no_such_module"),
    # files
    "no such file": ("check {d}/gone.parquet --scorer fake:", 2, "no such file"),
    "unknown suffix": ("check {d}/table.csv --scorer fake:", 2, "wanted one of .parquet"),
    "a folder": ("check {d} --scorer fake:", 2, "folder"),
    "foreign parquet": ("check {d}/text.parquet --scorer fake:", 4, "text.parquet"),
    "broken JSON lines": ("check {d}/broken.jsonl --scorer fake:", 4, "broken.jsonl"),
    "empty file": ("check {d}/empty.jsonl --scorer fake:", 4, "empty"),
    "no such side": ("check {f} --scorer fake: --sampler-side old", 4, "no 'old_logprobs'"),
    "nothing to compare with": ("compare {f}", 4, "no column 'old_logprobs'"),
    "with itself": ("compare {f} --b sampler", 4, "compared with itself"),
    "prompts not there": ("record --sampler fake: -o {d}/x.parquet --prompts {d}/gone.txt", 2, "cannot be read"),
    "no prompts": ("record --sampler fake: -o {d}/x.parquet --prompts {d}/bad.prompts.jsonl", 4, "bad.prompts.jsonl:1"),
    "not a report": ("judge {d}/not-a-report.json", 4, "not a saved report"),
    "broken report": ("judge {d}/broken.json", 4, "not JSON"),
    "binary report": ("judge {d}/binary.json", 4, "not UTF-8"),
    "report not there": ("judge {d}/gone.json", 2, "cannot be read"),
    # outputs, asked for before any engine starts (no engine is called nowhere:)
    "output there": ("record --sampler nowhere: -o {d}/there.parquet", 2, "exists; --overwrite replaces it"),
    "report there": ("check {f} --scorer nowhere: -o {d}/there.json", 2, "exists; --overwrite replaces it"),
    "scores there": ("check {f} --scorer nowhere: --scores {d}/there.parquet", 2, "exists; --overwrite replaces it"),
    "output suffix": ("record --sampler nowhere: -o {d}/x.csv", 2, "wanted one of .parquet"),
    "report suffix": ("check {f} --scorer nowhere: -o {d}/x.txt", 2, "wanted one of .json"),
    "output folder": ("record --sampler nowhere: -o {d}/gone/x.parquet", 2, "not a folder that can be written to"),
    "output is a folder": ("judge {r} -o {d}/folder.json", 2, "is a folder"),
    "bounds before engines": ("check {f} --scorer nowhere: --bounds strct", 2, "unknown preset"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.json").mkdir()
    return tmp_path


@pytest.mark.parametrize("what", TABLE)
def test_one_line_and_the_right_code(what: str, cli: Command, folder: Path, recorded: Path, scores: Path, report: Path):
    line, code, said = TABLE[what]
    ran = cli(*line.format(f=recorded, s=scores, r=report, d=folder).split())
    assert ran.code == code, ran.err
    assert said in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err and ran.out == ""
    assert (folder / "there.json").read_bytes() == b"old" and not (folder / "x.parquet").exists()


@pytest.mark.parametrize(
    ("package", "argv"),
    [
        ("typer", ["explain", "strict"]),
        ("rich.console", ["judge", "{r}"]),
        ("pyarrow", ["check", "{f}", "--scorer", SCORER]),
        ("torch", ["check", "{f}", "--scorer", "hf:tiny"]),
        ("vllm", ["record", "--sampler", "vllm:tiny", "-o", "{d}/x.parquet"]),
    ],
)
def test_a_missing_package_names_the_extra(
    package: str, argv: list[str], cli: Command, folder: Path, recorded: Path, report: Path, hidden: Path
):
    line = [a.format(f=recorded, r=report, d=folder) for a in argv]
    ran = without(package, line, hidden)
    assert ran[0] == 2, ran
    assert ran[1].count("\n") == 1
    assert "pip install 'onepolicy[" in ran[1]


@pytest.fixture
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hidden")


def without(package: str, argv: list[str], folder: Path) -> tuple[int, str]:
    """A process, and its children, in which `package` cannot be imported."""
    import os
    import subprocess

    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n", encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", "from onepolicy.cli.main import main; main()", *argv],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
        timeout=120,
        check=False,
    )
    return ran.returncode, ran.stderr


def test_a_report_with_a_tampered_number_is_refused(cli: Command, report: Path, tmp_path: Path):
    data = json.loads(report.read_text(encoding="utf-8"))
    data["measurements"]["abs_log_ratio/mean"]["value"] = "small"
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(data), encoding="utf-8")
    ran = cli("judge", bad)
    assert ran.code == 4
    assert "measurements.abs_log_ratio/mean.value is a str, wanted a number" in ran.err


def test_a_name_with_a_line_break_is_still_one_line(cli: Command):
    ran = cli("judge", "a\nb\x1b[2J.json")
    assert ran.code == 2
    assert ran.err == "error: report a\\nb\\x1b[2J.json cannot be read: No such file or directory\n"


def test_a_dead_sampler_leaves_no_output(cli: Command, tmp_path: Path):
    ran = cli("record", "--sampler", SAMPLER + "&vocab=8", "-o", tmp_path / "x.parquet")
    assert ran.code == 4
    assert list(tmp_path.iterdir()) == []
