"""Each sink for real: what was written is read back by the tool's own reader."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from onepolicy.errors import MissingExtra, UnknownName, UsageError
from onepolicy.gates.bounds import load
from onepolicy.monitor import SINKS
from onepolicy.monitor.judge import said
from onepolicy.monitor.sinks import Sinks, open_sink

PRESET = load("bf16")
NAMES = {"abs_log_ratio/mean": 0.02, "abs_log_ratio/p99.9": 0.4, "lag_0.kl_k3/mean": 1e-3, "clipped/positive": None}


def row(step: int, *codes: str, **numbers: float | None) -> dict:
    findings = [said(code, f"{code} happened", evidence={"times": 3.0, "bad": float("nan")}) for code in codes]
    return {"step": step, "time": 1_700_000_000.0 + step, "numbers": {**NAMES, **numbers}, "findings": findings}


def three(sink) -> None:
    """Three rows, a finding in the middle."""
    for r in (row(1), row(2, "gap-jumped"), row(3)):
        sink.write(r)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    sink = open_sink(f"jsonl:{path}", PRESET)
    three(sink)
    sink.close()
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["onepolicy_monitor"] == 1 and header["preset"] == "bf16"
    judged = {"kl_sampler_scorer_k3/mean", "abs_log_ratio/mean", "ratio_bias/mean"}
    assert {b["metric"] for b in header["bounds"]} == judged
    assert judged | set(header["not_covered"]) == {b.metric for b in PRESET.bounds}
    assert [r["step"] for r in rows] == [1, 2, 3]
    assert rows[0]["numbers"] == NAMES
    assert rows[1]["findings"][0]["code"] == "gap-jumped"
    assert rows[1]["findings"][0]["evidence"] == {"times": 3.0, "bad": None}
    again = open_sink(f"jsonl:{path}", PRESET)  # a resumed run goes on in the same file
    again.write(row(4))
    again.close()
    assert len(path.read_text().splitlines()) == 6


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = open_sink(f"tensorboard:{tmp_path}", PRESET)
    three(sink)
    sink.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    tags = read.Tags()["scalars"]
    assert set(tags) == {*(f"onepolicy/{n}" for n, x in NAMES.items() if x), "onepolicy/finding/gap-jumped"}
    mean = read.Scalars("onepolicy/abs_log_ratio/mean")
    assert [(e.step, round(e.value, 6)) for e in mean] == [(1, 0.02), (2, 0.02), (3, 0.02)]
    assert [(e.step, e.value) for e in read.Scalars("onepolicy/finding/gap-jumped")] == [(2, 1.0), (3, 0.0)]
    assert "gap-jumped happened" in str(read.Tensors("onepolicy/gap-jumped/text_summary")[0])


WANDB = """
import sys
from onepolicy.gates.bounds import load
from onepolicy.monitor.sinks import open_sink
sys.path.insert(0, {here!r})
from test_sinks import three
import wandb
sink = open_sink("wandb:proj", load("bf16"))
assert wandb.run is not None
three(sink)
print(wandb.run.summary["onepolicy/abs_log_ratio/mean"], wandb.run.summary["onepolicy/step"], wandb.run.offline)
sink.close()
assert wandb.run is None
with wandb.init(project="trainer") as run:  # into the trainer's own run, whose step is left alone
    sink = open_sink("wandb:", load("bf16"))
    three(sink)
    sink.close()
    run.log({{"loss": 1.0}})
    print(wandb.run is run, run.summary["onepolicy/step"], run.step)
"""


def test_weights_and_biases_offline(tmp_path: Path) -> None:
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    code = WANDB.format(here=str(Path(__file__).parent))
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-2:] == ["0.02 3 True", "True 3 1"]
    kept = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(kept) == 2
    assert b"onepolicy/abs_log_ratio/mean" in max(kept, key=lambda p: p.stat().st_size).read_bytes()


def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    store = str(tmp_path / "runs")
    sink = open_sink(f"mlflow:{store}", PRESET)
    three(sink)
    sink.close()
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("onepolicy")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["onepolicy/abs_log_ratio/p99.9"] == 0.4
    history = client.get_metric_history(run.info.run_id, "onepolicy/lag_0.kl_k3/mean")
    assert sorted(m.step for m in history) == [1, 2, 3]


def test_prometheus_on_loopback() -> None:
    sink = open_sink("prometheus:0", PRESET)
    try:
        assert sink._server.server_address[0] == "127.0.0.1"
        sink.write({**row(0), "numbers": {"lag/mean": 2.0}})  # no versions are told after that
        three(sink)
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        sink.close()
    assert 'onepolicy_number{name="abs_log_ratio/mean"} 0.02' in text
    assert 'onepolicy_number{name="clipped/positive"} NaN' in text
    assert 'onepolicy_number{name="lag/mean"} NaN' in text
    assert 'onepolicy_finding{code="gap-jumped"} 0.0' in text
    assert "onepolicy_step 3.0" in text


def test_two_on_one_port_is_loud() -> None:
    sink = open_sink("prometheus:0", PRESET)
    try:
        with pytest.raises(UsageError, match="cannot listen"):
            open_sink(f"prometheus:{sink.port}", PRESET)
    finally:
        sink.close()


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("tensorbord:x", UnknownName, "did you mean 'tensorboard'"),
        ("jsonl:", UsageError, "wanted jsonl:PATH"),
        ("jsonl:/no/such/folder/m.jsonl", UsageError, "cannot be written"),
        ("prometheus:abc", UsageError, "wanted prometheus:PORT"),
        (3, UsageError, "wanted write"),
    ],
)
def test_loud_when_opened(what, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        open_sink(what, PRESET)


@pytest.mark.parametrize("name", [n for n in SINKS if n != "jsonl"])
def test_what_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"tensorboard": "torch.utils.tensorboard", "prometheus": "prometheus_client"}
    monkeypatch.setitem(sys.modules, packages.get(name, name), None)
    with pytest.raises(MissingExtra, match=rf"pip install 'onepolicy\[{name}\]'"):
        open_sink(f"{name}:0", PRESET)


class Bad:
    """A sink that fails every other time."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def write(self, row) -> None:
        if row["step"] % 2:
            raise ConnectionError("gone")
        self.rows.append(row["step"])

    def close(self) -> None:
        raise OSError("never mind")


def test_a_failing_sink_is_counted_and_asked_again(tmp_path: Path) -> None:
    bad = Bad()
    sinks = Sinks.of([bad, f"jsonl:{tmp_path / 'm.jsonl'}"], PRESET)
    said_each = [sinks.write(row(step)) for step in range(1, 6)]
    assert [len(x) for x in said_each] == [1, 0, 1, 0, 1]
    assert said_each[0] == ["sink Bad failed: ConnectionError: gone"]
    assert sinks.failures == 3 and bad.rows == [2, 4]
    assert len(sinks.close()) == 1
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 6


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the write stops in the middle of a line."""
    path = tmp_path / "m.jsonl"
    sinks = Sinks.of([f"jsonl:{path}"], PRESET)
    sinks.write(row(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, before[1]))
        (problem,) = sinks.write(row(2))
        assert "is the disk full?" in problem
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert sinks.write(row(3)) == []  # there is room again
    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == [None, 1, 3]
    assert sinks.failures == 1
