"""`worker:`: any engine in a worker, also in another Python environment, which here holds numpy and nothing else."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from http_stand_ins import logprobs_of, serve, vllm_routes
from test_worker import gone, keep, rollouts_of

import onepolicy
from onepolicy.engines.base import EngineSpec, SamplingParams, options_of
from onepolicy.engines.open import engine_class, named, open_engine
from onepolicy.engines.shards import score_shards
from onepolicy.errors import EngineDied, EngineError, EngineTimeout, MissingExtra, UnknownName, UsageError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Scoring


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment. numpy is linked into it, so nothing is downloaded."""
    home = tmp_path_factory.mktemp("elsewhere")
    venv.create(home, with_pip=False, symlinks=True)
    site = next((home / "lib").glob("python*/site-packages"))
    installed = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (installed / name).exists():
            (site / name).symlink_to(installed / name)
    return home / "bin" / "python"


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """onepolicy and the scorers on the path of every interpreter; the file in which a scorer says who it was."""
    roots = [str(Path(onepolicy.__file__).parents[1]), str(Path(__file__).parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(roots))
    monkeypatch.setenv("ELSEWHERE", str(tmp_path / "who"))
    return tmp_path / "who"


def raw(*rows: list[int]) -> Rollouts:
    rollouts = rollouts_of(*rows)
    meaning = column_values("logprob_semantics", ["raw"] * len(rollouts))
    return Rollouts(rollouts.offsets, rollouts.tokens, {"logprob_semantics": meaning})


def scorer(name: str, python: Path, **options: object) -> str:
    more = "".join(f"&{k}={v}" for k, v in options.items())
    return f"worker:callable:elsewhere_scorers:{name}?python={python}{more}"


def who(known: Path) -> tuple[str, int, str]:
    prefix, pid, torch = known.read_text().split()
    return prefix, int(pid), torch


def test_a_scorer_runs_in_the_other_environment(python: Path, known: Path) -> None:
    with open_engine(scorer("tell", python, dtype="bfloat16")) as engine:
        out = engine.score(raw([4, 2], [7, 1]))
        prefix, pid, torch = who(known)
        assert Path(prefix).samefile(python.parents[1]) and prefix != sys.prefix
        assert torch == "None" and pid != os.getpid()
        assert engine.NAME == "callable" and engine.fingerprint()["worker"] is True
    assert out.logprobs.values[[1, 3]].tolist() == [-2.0, -1.0] and out.dtype == "bfloat16"
    assert gone(pid)


def test_without_python_it_is_this_environment_and_a_light_engine_runs_in_a_worker_too() -> None:
    params = SamplingParams(max_tokens=4)
    with open_engine("worker:fake:?seed=3&timeout=60") as far, open_engine("fake:?seed=3") as near:
        assert np.array_equal(far.sample([[1]], params).token_ids, near.sample([[1]], params).token_ids)
        assert far.fingerprint() == {**near.fingerprint(), "worker": True}
        assert (far.timeout, far.pid is not None) == (60.0, True)  # type: ignore[attr-defined]


def test_a_server_is_asked_from_an_environment_with_numpy_alone(python: Path) -> None:
    with (
        serve(vllm_routes()) as server,
        open_engine(f"worker:http://127.0.0.1:{server.port}?python={python}&concurrency=2") as engine,
    ):
        out = engine.score(raw([1, 2, 3]), using={"batch_size": 1})
    assert out.logprobs.values[1:].tolist() == logprobs_of([1, 2, 3])[1:]
    assert out.fingerprint["batch_size"] == 1


def test_sigkill_half_way_is_one_line_and_leaves_nothing(python: Path, known: Path) -> None:
    arrived: list[tuple[slice, Scoring]] = []
    with open_engine(scorer("die", python)) as engine:
        with pytest.raises(EngineDied, match=r"signal 9, SIGKILL.* during score") as caught:
            keep(arrived, score_shards(engine, raw([1, 2], [3, 4]), max_sequences=1))
        engine.log.unlink()  # type: ignore[attr-defined]
    assert len(arrived) == 1 and "\n" not in str(caught.value)
    assert gone(who(known)[1])


def test_a_hang_is_ended_at_the_time_limit_of_the_spec(python: Path, known: Path) -> None:
    with open_engine(scorer("hang", python, timeout=8)) as engine:
        engine.score(raw([1, 2]))
        with pytest.raises(EngineTimeout, match=r"no answer to score within 8 s, so it was killed") as caught:
            engine.score(raw([1, 2]))
        engine.log.unlink()  # type: ignore[attr-defined]
    assert "\n" not in str(caught.value) and gone(who(known)[1])


def test_what_the_scorer_needs_and_its_environment_lacks_is_named(python: Path) -> None:
    with pytest.raises(EngineError, match="No module named 'torch'"), open_engine(scorer("needs_torch", python)) as far:
        far.score(raw([1, 2]))
    with pytest.raises(MissingExtra, match=rf"pip install 'onepolicy\[hf\]', with {python} -m pip"):
        open_engine(f"worker:hf:tiny?python={python}").__enter__()


def test_an_environment_without_onepolicy(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    wanted = f"the environment of {python} has no onepolicy; install it there: {python} -m pip install onepolicy=="
    with pytest.raises(UsageError) as caught:
        open_engine(scorer("tell", python)).__enter__()
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("worker:", UsageError, "wanted worker:ENGINE:TARGET?python=PATH"),
        ("worker:hf", UsageError, "wanted worker:ENGINE:TARGET"),
        ("worker:worker:hf:tiny", UsageError, "wanted worker:ENGINE:TARGET"),
        ("worker:hff:tiny", UnknownName, "unknown engine 'hff'; did you mean 'hf'"),
        ("wroker:hf:tiny", UnknownName, "did you mean 'worker'"),
        ("worker:hf:tiny?dtyp=float32", UnknownName, "did you mean 'dtype'"),
        ("worker:hf:tiny?pyton=x", UnknownName, "did you mean 'python'"),
        ("worker:fake:?timeout=-1", UsageError, "timeout: got -1.0, wanted seconds"),
        ("worker:fake:?timeout=nan", UsageError, "timeout: got nan, wanted seconds"),
        ("worker:fake:?python=/no/python", UsageError, "/no/python cannot be started: No such file or directory; pyt"),
        ("hf:tiny?python=/bin/true", UnknownName, "unknown switch of engine 'hf' 'python'"),
    ],
)
def test_a_wrong_worker_is_one_line(spec: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught, open_engine(spec):
        pass
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_worker_declares_the_switches_of_its_engine_and_its_own() -> None:
    spec = named(EngineSpec.parse("worker:hf:/models/x?dtype=float32&python=~/env/bin/python"))
    assert (spec.name, spec.target) == ("worker:hf", "/models/x")
    cls = engine_class(spec.name)
    options = options_of(cls, spec)
    assert (options["dtype"], options["python"], options["timeout"]) == ("float32", "~/env/bin/python", 0.0)
    assert named(EngineSpec.parse(str(spec))) == spec
    assert named(EngineSpec.parse("hf:tiny")).name == "hf"
    with pytest.raises(UsageError, match="is a prefix"):
        engine_class("worker")
