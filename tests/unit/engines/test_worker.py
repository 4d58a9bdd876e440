"""The worker with real child processes: nothing is lost, nothing is left behind, every failure is one clear line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from odd_engines import OddEngine

import onepolicy
from onepolicy.engines import wire
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.engines.shards import sample_shards, score_shards
from onepolicy.engines.worker import WorkerEngine
from onepolicy.errors import ContentError, EngineDied, EngineError, EngineTimeout, UnknownName, UsageError
from onepolicy.rollouts import Rollouts, column_values, concat
from onepolicy.types import Lists, Scoring, Values


def rollouts_of(*rows: list[int]) -> Rollouts:
    ids = np.array([x for row in rows for x in row], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    return Rollouts(offsets, {"token_ids": Values(ids)})


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody reaps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


@pytest.fixture
def started() -> Iterator[list[WorkerEngine]]:
    engines: list[WorkerEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def start(started: list[WorkerEngine], mode: str = "good", **options: object) -> WorkerEngine:
    started.append(WorkerEngine(OddEngine, "here", {"mode": mode}, timeout=60, **options))  # type: ignore[arg-type]
    return started[-1]


def test_an_engine_in_a_worker_gives_the_same_bits_through_noise_and_shards() -> None:
    params = SamplingParams(max_tokens=8, samples=2, seed=3)
    prompts = [[1, 2, 3], [4], [5, 6]]
    with open_engine("fake:?seed=1", worker=True) as far, open_engine("fake:?seed=1") as near:
        a = concat(list(sample_shards(far, prompts, params, max_sequences=2)))
        b = concat(list(sample_shards(near, prompts, params, max_sequences=2)))
        assert np.array_equal(a.token_ids, b.token_ids)
        assert [a.record("group_id", i) for i in range(6)] == list("001122")
        assert a.scorings["sampler"].scoring_id is not None and "+" not in a.scorings["sampler"].scoring_id
        left, right = far.score(a, distributions=True), near.score(a, distributions=True)
        assert np.array_equal(left.logprobs.values, right.logprobs.values)
        assert np.array_equal(left.distributions, right.distributions, equal_nan=True)
        assert far.fingerprint() == {**near.fingerprint(), "worker": True}


def test_noise_on_stdout_goes_to_the_log_and_not_into_the_protocol(started: list[WorkerEngine], tmp_path: Path) -> None:
    engine = start(started, log=tmp_path / "log")
    scoring = engine.score(rollouts_of([1, 2], [3]))
    assert scoring.logprobs.values.tolist() == [-1.0, -2.0, -3.0]
    assert engine.fingerprint() == {"child": None, "env": "set", "inf": float("inf"), "worker": True}
    engine.close()
    assert b"noise on stdout" in engine.log.read_bytes()


def test_shards_that_arrived_are_kept_when_the_child_is_killed_and_no_process_is_left(
    started: list[WorkerEngine],
) -> None:
    engine = start(started, "slow")
    child, grandchild = engine.pid, engine.fingerprint()["child"]
    assert child is not None and alive(grandchild)
    arrived: list[tuple[slice, Scoring]] = []
    threading.Timer(0.5, os.kill, (child, signal.SIGKILL)).start()
    with pytest.raises(EngineDied, match=r"signal 9, SIGKILL.* during score") as caught:
        keep(arrived, score_shards(engine, rollouts_of([1, 2], [3], [4, 5]), max_sequences=1))
    assert [(at, s.logprobs.values.tolist()) for at, s in arrived] == [(slice(0, 1), [-1.0, -2.0])]
    assert "\n" not in str(caught.value) and engine.log.exists()
    engine.log.unlink()
    assert gone(child) and gone(grandchild)
    with pytest.raises(EngineError, match="it is closed"):
        engine.fingerprint()


def keep(kept: list[tuple[slice, Scoring]], shards: Iterator[tuple[slice, Scoring]]) -> None:
    for shard in shards:
        kept.append(shard)  # one by one: an error later must not lose it


def test_a_child_that_does_not_answer_is_killed_at_its_time_limit(started: list[WorkerEngine], tmp_path: Path) -> None:
    engine = start(started, "slow", log=tmp_path / "log")
    grandchild = engine.fingerprint()["child"]
    engine.score(rollouts_of([1]))
    engine.timeout = 0.5
    with pytest.raises(EngineTimeout, match=r"no answer to score within 0\.5 s, so it was killed"):
        engine.score(rollouts_of([1]))
    assert engine.pid is None and gone(grandchild)


def test_an_exit_is_reported_with_its_code_and_the_last_log_line(started: list[WorkerEngine], tmp_path: Path) -> None:
    engine = start(started, "exit", log=tmp_path / "log")
    with pytest.raises(EngineDied, match=r"exit code 3 during score.*'fatal: the weights are cursed'"):
        engine.score(rollouts_of([1]))


def test_errors_keep_their_class_and_unexpected_ones_become_one_line(started: list[WorkerEngine]) -> None:
    engine = start(started)
    with pytest.raises(UnknownName, match="did you mean 'green'") as caught:
        engine.encode(["x"])
    assert caught.value.suggestion == "green" and caught.value.exit_code == 2
    with pytest.raises(EngineError, match="ZeroDivisionError: first line; see ") as unexpected:
        engine.decode([1])
    assert "second line" not in str(unexpected.value) and "second line" in engine.log.read_text()
    assert engine.score(rollouts_of([7])).logprobs.values.tolist() == [-7.0]  # it still works
    engine.close()
    engine.log.unlink()


def test_an_engine_that_refuses_to_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ContentError, match="this engine never starts"):
        WorkerEngine(OddEngine, "here", {"mode": "no-start"})
    assert list(tmp_path.iterdir()) == []


def test_a_worker_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onepolicy, "__version__", "9.9")
    with pytest.raises(EngineError, match=r"runs onepolicy .* \(protocol 2\), this one 9\.9"):
        WorkerEngine(OddEngine, "here", {})


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        ("No module named 'numpy'", r"has no numpy; install it there: .*/python -m pip install numpy"),
        ("/usr/bin/python: No module named onepolicy", r"has no onepolicy; .*/python -m pip install onepolicy==\d"),
        ("No module named onepolicy.engines.worker_main", r"has no onepolicy with this worker \(another version\); "),
        ("Unknown option: -P", r"/python is older than Python 3\.11; make an environment with a newer one"),
    ],
)
def test_an_environment_that_lacks_something_says_what_to_install(
    printed: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{printed}"\nexit 1\n')
    python.chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with pytest.raises(UsageError, match=says) as caught:
        WorkerEngine(OddEngine, "here", {}, python=str(python))
    assert "\n" not in str(caught.value) and list(scratch.iterdir()) == []


def test_an_interpreter_that_says_nothing_known_shows_its_last_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Killed by policy'\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(EngineDied, match=r"exit code 1 during start.*'Killed by policy'"):
        WorkerEngine(OddEngine, "here", {}, python=str(python), log=tmp_path / "log")


def test_an_interpreter_that_is_not_there_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UsageError, match=r"its interpreter .*/no/python cannot be started"):
        WorkerEngine(OddEngine, "here", {}, python="/no/python")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_request_closes_the_worker() -> None:
    """Ctrl-C in a process of its own: this one may hold libraries that do not bear a signal."""
    code = (
        "import signal, sys; sys.path[:0] = sys.argv[1:]\n"
        "from odd_engines import OddEngine; from test_worker import rollouts_of\n"
        "from onepolicy.engines.worker import WorkerEngine; from onepolicy.errors import EngineError\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where this is started\n"
        "e = WorkerEngine(OddEngine, 'here', {'mode': 'slow'}, timeout=60)\n"
        "e.score(rollouts_of([1])); print(e.pid, flush=True)\n"
        "try:\n"
        "    e.score(rollouts_of([2]))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "try:\n"
        "    e.fingerprint()\n"
        "except EngineError as err:\n"
        "    print(err, e.pid)\n"
    )
    path = [str(Path(onepolicy.__file__).parents[1]), str(Path(__file__).parent), str(Path(__file__).parents[2])]
    with subprocess.Popen([sys.executable, "-c", code, *path], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        worker = int(child.stdout.readline())
        time.sleep(0.5)  # it waits for its answer now
        child.send_signal(signal.SIGINT)
        said = child.stdout.read()
    assert said.startswith("interrupted\n") and "its last request was interrupted" in said and said.endswith("None\n")
    assert child.returncode == 0 and gone(worker)


def test_an_answer_that_no_frame_can_hold_is_an_error_and_not_a_hang(started: list[WorkerEngine]) -> None:
    with pytest.raises(EngineError, match="cannot carry a value of type object"):
        start(started, "unpackable").encode([])


def test_everything_dies_with_the_parent() -> None:
    code = (
        "import sys, time; sys.path[:0] = sys.argv[1:]\n"
        "from odd_engines import OddEngine; from onepolicy.engines.worker import WorkerEngine\n"
        "e = WorkerEngine(OddEngine, 'here', {'mode': 'parent'})\n"
        "print(e.pid, e.fingerprint()['child'], e.log, e._scratch, flush=True); time.sleep(600)"
    )
    path = [str(Path(onepolicy.__file__).parents[1]), str(Path(__file__).parent)]
    with subprocess.Popen([sys.executable, "-c", code, *path], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, grandchild, log, scratch = parent.stdout.readline().split()
        assert alive(int(child)) and alive(int(grandchild))
        parent.kill()
    assert gone(int(child)) and gone(int(grandchild))
    Path(log).unlink()
    assert not Path(scratch).exists()


def test_an_exception_in_the_block_ends_the_worker() -> None:
    pids: list[int] = []

    def body() -> None:
        with open_engine("fake:?", worker=True) as engine:
            pids.append(engine.pid)  # type: ignore[attr-defined]
            raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        body()
    assert gone(pids[0])


def test_frames_carry_every_kind_of_column_and_marks_in_data_stay_data() -> None:
    rollouts = Rollouts(
        np.array([0, 2], dtype=np.int64),
        {"token_ids": Values(np.array([1, 2], dtype=np.int32), np.array([True, False]))},
        {"prompt_messages": column_values("prompt_messages", [{"$array": 0, "role": ["a", None]}])},
        {"sampling_mask": Lists(np.array([5], dtype=np.int32), np.array([0, 0, 1], dtype=np.int64))},
        {"old": Scoring(Values(np.array([np.nan, -np.inf], dtype=np.float16)), fingerprint={"$type": "Rollouts"})},
    )
    stream = b"".join(bytes(part) for part in wire.pack({"r": rollouts, "empty": np.zeros((0, 3)), "n": np.int64(3)}))
    at = [0]

    def read(n: int) -> bytearray:
        at[0] += n
        return bytearray(stream[at[0] - n : at[0]])

    out = wire.unpack(read)
    assert at[0] == len(stream) and out["n"] == 3 and out["empty"].shape == (0, 3)
    back = out["r"]
    assert back.record("prompt_messages", 0) == {"$array": 0, "role": ["a", None]}
    assert back.tokens["token_ids"].valid.tolist() == [True, False]
    assert back.lists["sampling_mask"].row(1).tolist() == [5] and back.lists["sampling_mask"].valid is None
    assert back.scorings["old"].fingerprint == {"$type": "Rollouts"}
    assert back.scorings["old"].logprobs.values.dtype == np.float16
    assert np.array_equal(back.scorings["old"].logprobs.values, [np.nan, -np.inf], equal_nan=True)


def test_a_frame_with_an_object_array_is_refused() -> None:
    body = b'{"body": {"$array": 0}, "arrays": [["|O", [1]]]}'
    stream = bytearray(wire._PREFIX.pack(len(body), 8) + body + bytes(8))

    def read(n: int) -> bytearray:
        out = stream[:n]
        del stream[:n]
        return out

    with pytest.raises(EngineError, match="malformed frame"):
        wire.unpack(read)
