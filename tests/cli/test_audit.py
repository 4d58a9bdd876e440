"""`onepolicy audit` and `onepolicy convert` from end to end: dumps, and input that is not sound."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import SCORER, Command

from audit_dumps import sample, split
from onepolicy.formats import base
from onepolicy.storage import read, write
from onepolicy.types import Values

PROMPT = 4


def nemo(n: int = 40, seed: int = 0, gap: float = 0.02) -> list[dict[str, Any]]:
    """NeMo-RL's train data: lists over prompt and reply, index 0 unused, 0.0 where nothing was sampled."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(n):
        size = int(rng.integers(20, 60))
        a = -rng.exponential(0.6, size)
        b = -np.abs(a + gap * rng.normal(size=size) * (1 - np.exp(a)))
        zeros = [0.0] * PROMPT
        rows.append({
            "token_ids": [rng.integers(0, 500, PROMPT + size).tolist()], "input_lengths": [PROMPT + size],
            "token_loss_mask": [[0] * PROMPT + [1] * size], "sample_loss_mask": [1.0], "rewards": [1.0],
            "generation_logprobs": [zeros + a.tolist()], "prev_logprobs": [zeros + b.tolist()],
        })  # fmt: skip
    return rows


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    folder = tmp_path / "dumps"
    folder.mkdir()
    for step in (10, 11):
        lines(folder / f"train_data_step{step}.jsonl", nemo(seed=step))
    return folder


def codes(text: str) -> set[str]:
    return {f["code"] for f in json.loads(text)["findings"]}


def severities(text: str) -> set[str]:
    return {f["severity"] for f in json.loads(text)["findings"]}


def test_a_healthy_dump_has_nothing_to_warn_of(cli: Command, dump: Path, tmp_path: Path):
    out = cli("audit", dump, "--workers", "1", "-o", tmp_path / "report.json", "--json")
    assert out.code == 0, out.out
    assert severities(out.out) <= {"info"}
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["context"]["audit"]["formats"] == {"nemo_rl": 2}
    assert report["context"]["audit"]["counts"]["records"] == 80
    assert {"Gap by sampler's probability", "What every correction would have done"} <= {
        x["title"] for x in report["listings"]
    }


def test_a_saved_audit_is_judged_again(cli: Command, dump: Path, tmp_path: Path):
    assert cli("audit", dump, "-o", tmp_path / "report.json").code == 0
    assert cli("judge", tmp_path / "report.json", "--bounds", "fp32").code == 1


def test_size_alone_is_not_decided_unless_bounds_are_given(cli: Command, tmp_path: Path):
    file = lines(tmp_path / "train_data_step1.jsonl", nemo(n=200, gap=0.5))
    assert cli("audit", file).code == 3
    assert cli("audit", file, "--bounds", "bf16").code == 1


def test_the_screen_names_causes_and_corrections(cli: Command, dump: Path):
    out = cli("audit", dump, "--as", "nemo_rl")
    assert "Causes that were looked for" in out.out
    assert "What every correction would have done" in out.out
    assert "As nemo_rl computes it" in out.out


def test_a_framework_that_is_unknown(cli: Command, dump: Path):
    out = cli("audit", dump, "--as", "nemorl")
    assert out.code == 2 and "did you mean 'nemo_rl'" in out.err


def test_convert_writes_what_every_command_reads(cli: Command, dump: Path, tmp_path: Path):
    out = cli("convert", dump, "-o", tmp_path / "rollouts.parquet")
    assert out.code == 0, out.err
    rollouts = read(tmp_path / "rollouts.parquet")
    assert len(rollouts) == 80 and set(rollouts.scorings) >= {"sampler", "old"}
    compared = cli("compare", tmp_path / "rollouts.parquet", "--bounds", "bf16", "--json")
    assert json.loads(compared.out)["measurements"] == json.loads(cli("audit", dump, "--json").out)["measurements"]


def test_convert_keeps_an_output_that_is_there(cli: Command, dump: Path, tmp_path: Path):
    (tmp_path / "out.parquet").write_text("precious")
    out = cli("convert", dump, "-o", tmp_path / "out.parquet")
    assert out.code == 2 and "--overwrite" in out.err
    assert (tmp_path / "out.parquet").read_text() == "precious"


def test_a_missing_side_is_filled_by_a_scorer(cli: Command, recorded: Path, tmp_path: Path):
    alone = cli("audit", recorded, "--json")
    assert alone.code == 3 and "one-side-only" in codes(alone.out)
    filled = cli("audit", recorded, "--scorer", SCORER, "--json")
    report = json.loads(filled.out)
    assert report["context"]["audit"]["names"] == ["sampler", "scorer"]
    assert report["measurements"]["abs_log_ratio/mean"]["value"] > 0


def test_a_dump_that_says_nothing_of_its_engines_is_filled_too(cli: Command, tmp_path: Path):
    rows = [{"prompt_ids": [20, 21], "response_ids": [i, 30, 31], "logprobs": [-1.0, -2.0, -0.5]} for i in range(24)]
    said = ("--declare", "logprob_semantics=raw", "--declare", "temperature=1")
    out = cli("audit", lines(tmp_path / "mine.jsonl", rows), "--scorer", SCORER, *said, "--json")
    report = json.loads(out.out)
    assert report["context"]["audit"]["names"] == ["sampler", "scorer"]
    assert report["measurements"]["abs_log_ratio/mean"]["n"] == 72


def test_texts_of_worst_tokens_come_from_the_tokenizer(cli: Command, tmp_path: Path):
    rows = nemo()
    rows[3]["prev_logprobs"][0][12] -= 3.0
    rows[3]["token_ids"][0][12] = 104
    out = cli("audit", lines(tmp_path / "train_data_step1.jsonl", rows), "--tokenizer", "tiny", "--json")
    worst = json.loads(out.out)["context"]["tokens"][0]
    from onepolicy.tokens.open import open_tokenizer

    assert worst["token"] == open_tokenizer("tiny").decode([[104]])[0]


def test_a_number_of_the_dashboard_is_made_again(cli: Command, dump: Path, tmp_path: Path):
    report = json.loads(cli("audit", dump, "--json").out)
    k1 = report["measurements"]["kl_sampler_scorer_k1/mean"]["value"]
    (tmp_path / "wandb.json").write_text(json.dumps({"train/kl": -k1, "lr": 1e-6}))
    found = json.loads(cli("audit", dump, "--reported", tmp_path / "wandb.json", "--json").out)["findings"]
    assert any(f["code"] == "reported-metric-explained" and "train/kl" in f["message"] for f in found), found
    (tmp_path / "wandb.json").write_text(json.dumps({"train/kl": k1}))
    found = json.loads(cli("audit", dump, "--reported", tmp_path / "wandb.json", "--json").out)["findings"]
    assert not any(f["code"].startswith("reported-metric") for f in found), "the usual definition needs no word"


@pytest.mark.parametrize(("text", "code"), [("{", 4), ("[]", 4), ('{"a": "b"}', 4), (None, 2)])
def test_reported_numbers_that_are_none(cli: Command, dump: Path, tmp_path: Path, text: str | None, code: int):
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    out = cli("audit", dump, "--reported", tmp_path / "r.json")
    assert out.code == code and out.err.count("\n") == 1


def test_a_sample_that_is_missing_from_its_group(cli: Command, tmp_path: Path):
    draws = [np.random.default_rng(i) for i in range(96)]
    rows: list[dict[str, Any]] = [
        {"id": f"r{i}", "group_id": f"q{i // 8}", "sample_id": i % 8, "prompt_ids": [1, 2],
         "response_ids": list(range(40)), "rollout_logprobs": (-rng.exponential(0.5, 40)).tolist()}
        for i, rng in enumerate(draws)
    ]  # fmt: skip
    for row in rows:
        row["trainer_logprobs"] = [x * 1.01 for x in row["rollout_logprobs"]]
    assert "records-missing" not in codes(cli("audit", lines(tmp_path / "a.jsonl", rows), "--json").out)
    found = json.loads(cli("audit", lines(tmp_path / "b.jsonl", [r for r in rows if r["id"] != "r43"]), "--json").out)
    missing = next(f for f in found["findings"] if f["code"] == "records-missing")
    assert "q5" in missing["message"] + missing["place"]


# -- input that is not sound -------------------------------------------------------------------------------------------


def test_nothing_there(cli: Command, tmp_path: Path):
    out = cli("audit", tmp_path / "nothing")
    assert out.code == 2 and out.err.startswith("error: ") and out.err.count("\n") == 1


def test_files_of_no_known_format(cli: Command, tmp_path: Path):
    lines(tmp_path / "a.jsonl", [{"hello": 1}])
    out = cli("audit", tmp_path)
    assert out.code == 4 and "no known format has these keys: hello" in out.err and out.err.count("\n") == 1


def test_a_pickle_that_would_run_code(cli: Command, dump: Path, tmp_path: Path):
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {canary}",)

    (dump / "global_step_1_training_input.pkl").write_bytes(
        pickle.dumps({"training_batch": Evil(), "of": "TrainingInputBatch"})
    )
    (dump / "unknown.pkl").write_bytes(pickle.dumps({"x": Evil()}))
    out = cli("audit", dump, "--json")
    assert not canary.exists()
    assert out.code == 3 and "files-unreadable" in codes(out.out)
    assert any("posix.system" in f["message"] for f in json.loads(out.out)["findings"])
    skipped = next(f for f in json.loads(out.out)["findings"] if f["code"] == "files-skipped")
    assert skipped["severity"] == "warn" and "unknown.pkl" in skipped["message"]


def test_a_refused_pickle_comes_with_lines_to_copy(cli: Command, dump: Path, tmp_path: Path):
    refused = tmp_path / "global_step_1_training_input.pkl"
    refused.write_bytes(pickle.dumps({"training_batch": os.getenv, "of": "TrainingInputBatch"}))
    alone = cli("audit", refused)
    first, *rest = alone.err.splitlines()
    assert alone.code == 4 and "refused" in first and first.endswith("JSON lines:")
    compile("\n".join(line.removeprefix("    ") for line in rest), "export", "exec")
    beside = cli("audit", dump, refused, "--json")
    told = next(f for f in json.loads(beside.out)["findings"] if f["code"] == "files-unreadable")
    assert "\n" not in told["message"] and rest[0] in told["evidence"]["files"][0]["why"]


def test_half_of_the_files_cannot_be_read(cli: Command, dump: Path):
    (dump / "train_data_step12.jsonl").write_bytes(b'{"token_ids": [[1, 2], "input_le')
    (dump / "broken.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    out = cli("audit", dump, "--json")
    report = json.loads(out.out)
    assert out.code == 3
    assert report["context"]["audit"]["counts"]["records"] >= 80
    assert codes(out.out) & {"files-unreadable", "files-skipped", "records-unreadable"}
    assert "broken.parquet" in out.out and "train_data_step12.jsonl" in out.out


def test_a_truncated_file_keeps_what_came_before(cli: Command, dump: Path):
    file = dump / "train_data_step11.jsonl"
    file.write_bytes(file.read_bytes()[:-300])
    out = cli("audit", dump, "--json")
    assert json.loads(out.out)["context"]["audit"]["counts"]["records"] == 80
    assert out.code == 3 and "records-unreadable" in codes(out.out)
    assert "train_data_step11.jsonl:40" in out.out


def test_a_line_longer_than_the_limit_is_not_read(cli: Command, dump: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "LINE_BYTES", 20_000)
    with (dump / "train_data_step11.jsonl").open("a") as file:
        file.write(json.dumps({"token_ids": [[1] * 30_000]}) + "\n")
    out = cli("audit", dump, "--workers", "1", "--json")
    assert "records-unreadable" in codes(out.out)
    assert json.loads(out.out)["context"]["audit"]["counts"]["records left out"] == 1


def test_a_record_that_does_not_fit_is_named_and_left_out(cli: Command, dump: Path):
    rows = nemo()
    rows[5]["prev_logprobs"][0].pop()
    lines(dump / "train_data_step12.jsonl", rows)
    out = cli("audit", dump, "--json")
    assert "logprob-length-mismatch" in codes(out.out)
    assert "train_data_step12.jsonl:6" in out.out
    assert json.loads(out.out)["measurements"]["abs_log_ratio/mean"]["n"] > 0


def test_mixed_formats_in_one_folder(cli: Command, dump: Path):
    write(sample(), dump / "more.parquet")
    out = cli("audit", dump, "--json")
    report = json.loads(out.out)
    assert report["context"]["audit"]["formats"] == {"canonical": 1, "nemo_rl": 2}
    assert report["context"]["audit"]["counts"]["records"] == 140
    assert report["sums"]["cluster_unit"] == "sequence", "some records have no group"


def test_texts_alone_are_said_to_be_no_tokens(cli: Command, tmp_path: Path):
    row = {"input": "2 + 2 =", "output": "4", "gts": "4", "score": 1.0, "step": 3}
    out = cli("audit", lines(tmp_path / "3.jsonl", [row] * 3), "--json")
    assert out.code == 3 and "text-only" in codes(out.out)


def test_a_side_that_the_dump_does_not_have(cli: Command, dump: Path):
    out = cli("audit", dump, "--b", "current")
    assert out.code == 2 and "it has sampler, old" in out.err


def test_an_output_that_exists_is_not_replaced(cli: Command, dump: Path, tmp_path: Path):
    (tmp_path / "r.json").write_text("precious")
    out = cli("audit", dump, "-o", tmp_path / "r.json")
    assert out.code == 2 and (tmp_path / "r.json").read_text() == "precious"


def test_a_month_of_rollouts_by_a_glob(cli: Command, tmp_path: Path):
    split(sample(), 3, tmp_path / "run7")
    out = cli("audit", f"{tmp_path}/run7/**.parquet", "--json")
    assert json.loads(out.out)["context"]["audit"]["counts"]["files"] == 3


def test_remote_files_are_read_where_they_are(cli: Command, tmp_path: Path):
    import fsspec

    write(sample(), tmp_path / "a.parquet")
    fsspec.filesystem("memory").pipe("/bucket/run7/a.parquet", (tmp_path / "a.parquet").read_bytes())
    out = cli("audit", "memory://bucket/run7/**.parquet", "--workers", "1", "--json")
    here = cli("audit", tmp_path / "a.parquet", "--workers", "1", "--json")
    assert json.loads(out.out)["sums"] == json.loads(here.out)["sums"]


# -- nothing is left out in silence ------------------------------------------------------------------------------------


def canonical(n: int = 40, seed: int = 0, **scorings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the column contract, both sides, with what is declared of them."""
    rng = np.random.default_rng([seed, 1])
    rows: list[dict[str, Any]] = []
    for i in range(n):
        size = int(rng.integers(20, 60))
        a = -rng.exponential(0.6, size)
        b = -np.abs(a + 0.02 * rng.normal(size=size) * (1 - np.exp(a)))
        none = [None] * PROMPT
        rows.append({
            "record_id": f"{seed}-{i}", "token_ids": rng.integers(0, 500, PROMPT + size).tolist(),
            "prompt_length": PROMPT, "sampler_logprobs": none + a.tolist(), "old_logprobs": none + b.tolist(),
            **({"scorings": scorings} if scorings else {}),
        })  # fmt: skip
    return rows


def without(rows: list[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != column} for row in rows]


@pytest.mark.parametrize("first", ["a", "z"])
def test_files_that_lack_a_side_are_told_whichever_comes_first(cli: Command, tmp_path: Path, first: str):
    lines(tmp_path / f"{first}.jsonl", without(canonical(seed=1), "old_logprobs"))
    lines(tmp_path / "m.jsonl", canonical(seed=2))
    out = cli("audit", tmp_path, "--workers", "1", "--json")
    report = json.loads(out.out)
    assert report["context"]["audit"]["names"] == ["sampler", "old"]
    assert report["measurements"]["abs_log_ratio/mean"]["n"] > 0
    found = next(f for f in report["findings"] if f["code"] == "one-side-only")
    assert out.code == 3 and found["evidence"]["lacking"] == 40 and "40 of 80 records" in found["message"]
    assert cli("audit", tmp_path, "--workers", "1", "--b", "old").code == 3


def test_copies_of_records_are_told(cli: Command, tmp_path: Path):
    lines(tmp_path / "rank0.jsonl", canonical())
    lines(tmp_path / "rank1.jsonl", canonical())
    assert "duplicate-records" in codes(cli("audit", tmp_path, "--workers", "1", "--json").out)
    again = [{**row, "step": 1} for row in canonical()]
    lines(tmp_path / "rank0.jsonl", again)
    lines(tmp_path / "rank1.jsonl", [{**r, "step": 2} for r in again])
    assert "duplicate-records" not in codes(cli("audit", tmp_path, "--workers", "1", "--json").out), "trained on twice"


def test_files_that_mean_different_things(cli: Command, tmp_path: Path):
    for name, semantics in (("a", "processed"), ("b", "raw")):
        lines(tmp_path / f"{name}.jsonl", canonical(seed=ord(name), sampler={"semantics": semantics}))
    out = cli("audit", tmp_path, "--workers", "1", "--json")
    found = next(f for f in json.loads(out.out)["findings"] if f["code"] == "semantics-differ")
    assert out.code == 3 and "processed in 40 records, raw in 40 records" in found["message"]


def test_the_coarsest_of_several_dtypes_chooses_the_bounds(cli: Command, tmp_path: Path):
    for name, dtype in (("a", "bfloat16"), ("b", "float32")):
        told = {"dtype": dtype, "semantics": "processed"}
        lines(tmp_path / f"{name}.jsonl", canonical(seed=ord(name), sampler=told, old=told))
    out = cli("audit", tmp_path, "--workers", "1", "--json")
    assert out.code == 0 and json.loads(out.out)["preset"] == "bf16"


def test_a_side_against_itself_is_a_mistake_of_usage(cli: Command, dump: Path):
    out = cli("audit", dump, "--a", "old", "--b", "old")
    assert out.code == 2 and "compared with itself" in out.err


def test_texts_beside_tokens_are_counted(cli: Command, dump: Path):
    row = {"input": "2 + 2 =", "output": "4", "gts": "4", "score": 1.0, "step": 3}
    lines(dump / "3.jsonl", [row] * 3)
    out = cli("audit", dump, "--workers", "1", "--json")
    assert out.code == 0 and "text-only" in codes(out.out)


def test_what_a_scorer_never_saw_is_told(cli: Command, recorded: Path, tmp_path: Path):
    folder = tmp_path / "dump"
    folder.mkdir()
    write(read(recorded), folder / "a.parquet")
    (folder / "b.jsonl").write_text(json.dumps({"token_ids": [1, 2, 3], "sampler_logprobs": [None, -1.0]}) + "\n")
    out = cli("audit", folder, "--scorer", SCORER, "--json")
    assert out.code == 3 and "records-unreadable" in codes(out.out)


# -- one file of many --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_declarations_of_later_files_are_kept_and_contradictions_are_not(cli: Command, tmp_path: Path, suffix: str):
    lines(tmp_path / "a.jsonl", without(canonical(seed=1, sampler={"semantics": "raw"}), "old_logprobs"))
    both: dict[str, Any] = {
        "sampler": {"semantics": "processed"},
        "old": {"dtype": "float32", "semantics": "processed"},
    }
    lines(tmp_path / "b.jsonl", canonical(seed=2, **both))
    out = cli("convert", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "-o", tmp_path / f"out.{suffix}")
    rollouts = read(tmp_path / f"out.{suffix}")
    assert out.code == 0 and "sampler.semantics" in out.out + out.err
    assert rollouts.scorings["sampler"].semantics is None
    assert (rollouts.scorings["old"].dtype, rollouts.scorings["old"].semantics) == ("float32", "processed")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_float32_beside_float64_loses_no_bit(cli: Command, tmp_path: Path, suffix: str):
    wide = sample(8, seed=1)
    single = wide.scorings["old"].logprobs
    narrow = wide.with_scoring("old", replace(wide.scorings["old"], logprobs=Values(
        single.values.astype(np.float32), single.valid)))  # fmt: skip
    write(narrow, tmp_path / "a.parquet")
    write(wide, tmp_path / "b.parquet")
    both = tmp_path / f"out.{suffix}"
    assert cli("convert", tmp_path / "a.parquet", tmp_path / "b.parquet", "-o", both).code == 0
    found = read(both).scorings["old"].logprobs
    assert found.values.dtype == np.float64
    wanted = np.concatenate([single.values.astype(np.float32).astype(np.float64), single.values])
    assert np.array_equal(found.values[found.mask()], wanted[found.mask()])


def test_an_earlier_output_is_no_part_of_the_dump(cli: Command, dump: Path):
    for _ in range(2):
        assert cli("convert", dump, "-o", dump / "all.parquet", "--overwrite").code == 0
    assert len(read(dump / "all.parquet")) == 80
    assert cli("convert", dump / "all.parquet", "-o", dump / "all.parquet", "--overwrite").code == 0
    assert len(read(dump / "all.parquet")) == 80
