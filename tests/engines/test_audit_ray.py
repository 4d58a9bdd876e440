"""A real local Ray over the same shards: the same bits as here, with a worker that is killed half way too."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from audit_dumps import bits, sample, split
from onepolicy.audit import Choices, audit
from onepolicy.auditing import Work, audit_shard
from onepolicy.errors import EngineError, UsageError
from onepolicy.formats.base import Shard
from onepolicy.on_ray import over_ray
from onepolicy.survey import Survey

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all tests; `over_ray` leaves a running one alone."""
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(sample(), 4, tmp_path_factory.mktemp("ray") / "dump")


def test_ray_adds_up_the_same_bits(dump: Path):
    assert bits(dump, on="ray") == bits(dump, workers=1)
    assert ray.is_initialized(), "a Ray that was running before must not be shut down"


def _dies_once(shard: Shard, work: Work, number: int) -> Survey:
    """`audit_shard`, but the worker of shard 2 is killed the first time, after half of its work."""
    out = audit_shard(shard, work, number)
    assert isinstance(out, Survey)
    mark = Path(str(work.spill)) / "died"
    if number == 2 and not mark.exists():
        mark.write_text("once")
        os.kill(os.getpid(), signal.SIGKILL)
    return out


def test_a_worker_killed_half_way_changes_nothing(dump: Path, tmp_path: Path):
    from onepolicy.formats.detect import detect

    work = Work(("sampler", "old"), spill=str(tmp_path))
    items = [(shard, work, i) for i, shard in enumerate(detect([str(dump)]).shards)]
    found = dict(over_ray(_dies_once, items, "ray"))
    assert (tmp_path / "died").exists()
    here = {i: audit_shard(*item) for i, item in enumerate(items)}
    for i, survey in here.items():
        assert isinstance(survey, Survey) and survey.sums is not None and found[i].sums is not None
        assert found[i].sums.to_json() == survey.sums.to_json()
        assert json.dumps(found[i].replays.totals.to_dict()) == json.dumps(survey.replays.totals.to_dict())


def test_the_verb_runs_on_ray(dump: Path):
    report = audit([dump], Choices(on="ray"))
    assert report.sums.to_json() == audit([dump], Choices(workers=1)).sums.to_json()


def _fails(item: int) -> int:
    raise ValueError(f"item {item}")


def test_a_task_that_fails_is_one_line():
    with pytest.raises(EngineError, match=r"--on ray: .*item 1"):
        list(over_ray(_fails, [(1,)], "ray"))


@pytest.mark.parametrize("on", ["rayy", "ray:/x", "ray://", "slurm"])
def test_another_place_is_refused(on: str):
    with pytest.raises(UsageError, match="wanted local, ray or ray://HOST:PORT"):
        audit(["nothing-is-read"], Choices(on=on))
