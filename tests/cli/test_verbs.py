"""Every verb from end to end, and every exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SAMPLER, SCORER, Command

import onepolicy
from onepolicy.cli.main import run
from onepolicy.report.json import from_json
from onepolicy.storage import read, write


def test_record_writes_what_it_says(cli: Command, tmp_path: Path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n", encoding="utf-8")
    out = tmp_path / "r.jsonl"
    more = ["--max-tokens", 8, "--temperature", 0.7, "--top-k", 50, "--samples", 2, "--seed", 3, "--prompts", prompts]
    ran = cli("record", "--sampler", SAMPLER, "-o", out, *more)
    assert ran.code == 0
    assert ran.err == ""
    rollouts = read(out)
    assert len(rollouts) == 4
    assert rollouts.record("temperature", 0) == pytest.approx(0.7)
    assert rollouts.record("top_k", 0) == 50
    assert f"{out}: {int(rollouts.drawn.sum())} drawn tokens in 4 replies" in ran.out


def test_check_passes_and_saves(cli: Command, recorded: Path, tmp_path: Path):
    out, scores = tmp_path / "r.json", tmp_path / "s.parquet"
    ran = cli("check", recorded, "--scorer", SCORER, "-o", out, "--scores", scores, "--reply-length", 4096)
    assert ran.code == 0
    assert ran.out.startswith(" PASS ")
    assert "a reply of 4,096 tokens" in ran.out
    saved = from_json(out.read_text(encoding="utf-8"))
    assert saved.outcome == "pass"
    assert saved.reply_length == 4096
    assert saved.context["scores"] == str(scores)
    assert set(read(scores).scorings) == {"sampler", "scorer"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "s.parquet"]  # no temporary file is left


def test_check_prints_json_that_judge_reads(cli: Command, recorded: Path, tmp_path: Path):
    ran = cli("check", recorded, "--scorer", SCORER, "--json")
    assert ran.code == 0
    out = tmp_path / "r.json"
    out.write_text(ran.out, encoding="utf-8")
    assert cli("judge", out, "--bounds", "bf16").code == 0


def test_drift_is_one(cli: Command, recorded: Path):
    ran = cli("check", recorded, "--scorer", SCORER + "&fault=stale", "--bounds", "strict")
    assert ran.code == 1
    assert ran.out.startswith(" DRIFT ")


def test_inconclusive_is_three(cli: Command, tmp_path: Path):
    out = tmp_path / "few.parquet"
    assert cli("record", "--sampler", SAMPLER, "-o", out, "--max-tokens", 2).code == 0
    assert cli("check", out, "--scorer", SCORER).code == 3


def test_error_is_four(cli: Command, recorded: Path):
    ran = cli("check", recorded, "--scorer", SCORER + "&fault=nan")
    assert ran.code == 4
    assert ran.out.startswith(" ERROR ")


def test_exact_compares_distributions(cli: Command, recorded: Path):
    assert "surprisal" in cli("check", recorded, "--scorer", SCORER, "--exact").out


def test_declare_says_what_the_file_does_not(cli: Command, recorded: Path, tmp_path: Path):
    silent = tmp_path / "silent.parquet"
    rollouts = read(recorded)
    records = {k: v for k, v in rollouts.records.items() if k != "logprob_semantics"}
    write(type(rollouts)(rollouts.offsets, rollouts.tokens, records, rollouts.lists, rollouts.scorings), silent)
    refused = cli("check", silent, "--scorer", SCORER)
    assert refused.code == 2
    assert "--declare logprob_semantics=raw" in refused.err
    assert cli("check", silent, "--scorer", SCORER, "--declare", "logprob_semantics=processed").code == 0


def test_compare_of_one_file_and_of_two(cli: Command, recorded: Path, scores: Path):
    assert cli("compare", scores, "--b", "scorer").code == 0
    assert cli("compare", recorded, scores, "--b", "scorer", "--bounds", "strict").code == 1


def test_judge_judges_again(cli: Command, report: Path, tmp_path: Path):
    assert cli("judge", report).code == 0
    ran = cli("judge", report, "--bounds", "strict", "-o", tmp_path / "again.json")
    assert ran.code == 1
    assert json.loads((tmp_path / "again.json").read_text(encoding="utf-8"))["preset"] == "strict"


def test_own_bounds(cli: Command, report: Path, tmp_path: Path):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '[[bound]]\nmetric = "logp_abs_diff"\nat_most = 0.5\nwhen = "required"\nsource = "us"\ndate = 2026-11-30\n',
        encoding="utf-8",
    )
    ran = cli("judge", report, "--bounds", mine)
    assert ran.code == 0
    assert "abs_log_ratio/mean" in cli("explain", mine).out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kl-above-bound", "COMMON CAUSES"),
        ("kl_sampler_scorer_k3/mean", "expm1(d) - d"),
        ("kl_k3", "kl_k3 is kl_sampler_scorer_k3/mean"),
        ("verl:rollout_corr/chi2_token", "not the same number; verl clamps"),
        ("strict", "abs_log_ratio/max <= 0.2  required, from 1,000 tokens"),
        (None, "Finding codes, in the order of suspicion"),
    ],
)
def test_explain(cli: Command, name: str | None, said: str):
    ran = cli("explain", *([name] if name else []))
    assert ran.code == 0
    assert said in ran.out
    assert ran.err == ""


def test_every_name_can_be_explained(cli: Command):
    from onepolicy.codes import CODES
    from onepolicy.gates import PRESETS
    from onepolicy.metrics import ALIASES, METRICS

    for name in [*CODES, *PRESETS, *METRICS, *ALIASES]:
        assert cli("explain", name).code == 0, name


def test_overwrite_replaces_only_when_asked(cli: Command, recorded: Path, tmp_path: Path):
    out, scores = tmp_path / "r.json", tmp_path / "s.parquet"
    argv = ["check", recorded, "--scorer", SCORER, "-o", out, "--scores", scores]
    assert cli(*argv).code == 0
    before = scores.read_bytes()
    refused = cli(*argv)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == f"error: output {out} exists; --overwrite replaces it\n"
    assert scores.read_bytes() == before
    assert cli(*argv, "--overwrite").code == 0


def test_an_old_file_survives_a_check_that_fails(cli: Command, recorded: Path, tmp_path: Path):
    scores = tmp_path / "s.parquet"
    scores.write_bytes(b"precious")
    argv = ["check", recorded, "--scorer", "fake:?vocab=8", "--scores", scores, "--overwrite"]
    assert cli(*argv).code == 4
    assert scores.read_bytes() == b"precious"
    assert [p.name for p in tmp_path.iterdir()] == ["s.parquet"]


def test_version(cli: Command):
    assert cli("--version").out == f"onepolicy {onepolicy.__version__}\n"


def test_no_verb_is_usage_and_shows_help(cli: Command):
    ran = cli()
    assert ran.code == 2
    assert "Commands:" in ran.out


@pytest.mark.parametrize("verb", ["record", "check", "compare", "judge", "explain"])
def test_every_help_has_an_example(cli: Command, verb: str):
    ran = cli(verb, "--help")
    assert ran.code == 0
    assert f"Example:\n    onepolicy {verb} " in ran.out
    assert max(map(len, ran.out.splitlines())) <= 90


def test_run_never_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    ends = ((KeyboardInterrupt(), 130), (ValueError("odd\nthing"), 4), (SystemExit(0), 4), (SystemExit(1), 4))
    for error, code in ends:

        def explode(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr("onepolicy.cli.outputs.say", explode)
        assert run(["explain", "strict"]) == code
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert err.startswith("error: ")
    assert run(["--debug", "explain", "strict"]) == 4
    assert "Traceback" in capsys.readouterr().err
