"""A real local Ray over the same shards: the same bits as here, with a worker that is killed half way too.

Ray runs in a child process with a time limit: its C++ parts may end or block the process that they are in.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray_scenarios import BROKEN

from audit_dumps import bits, sample, split
from onepolicy.audit import Choices, audit
from onepolicy.errors import UsageError

pytestmark = pytest.mark.engines

#: Seconds for all scenarios (15 on an idle machine), and how often a Ray that breaks down is started anew.
LIMIT, TRIES = 150, 2


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(sample(), 4, tmp_path_factory.mktemp("ray") / "dump")


@pytest.fixture(scope="module")
def found(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scenarios saw. Only a breakdown of Ray itself is tried again."""
    said = []
    for _ in range(TRIES):
        scratch = tmp_path_factory.mktemp("scratch")
        code, log = run(dump, scratch)
        if code == 0:
            return json.loads((scratch / "found.json").read_text())
        said.append(f"exit code {code}: {log[-1500:]}")
        if code not in (None, BROKEN):
            break
    raise RuntimeError("\n---\n".join([*said, *logs_of_ray()]))


def run(dump: Path, scratch: Path) -> tuple[int | None, str]:
    """(exit code, None if it was killed at `LIMIT`; what it printed)."""
    command = [sys.executable, str(Path(__file__).with_name("ray_scenarios.py")), str(dump), str(scratch)]
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    log = scratch / "log"
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )  # its own session: everything of it is killed with it
        try:
            code: int | None = child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return code, log.read_text(errors="replace")


def logs_of_ray() -> list[str]:
    """The ends of what Ray's own processes wrote: why it broke down."""
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp/ray")) / "session_latest" / "logs"
    names = ("raylet.out", "raylet.err", "gcs_server.out", "dashboard_agent.log", "runtime_env_agent.log")
    return [f"{n}: {(folder / n).read_text(errors='replace')[-800:]}" for n in names if (folder / n).exists()]


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_ray_adds_up_the_same_bits(dump: Path, found: dict[str, Any]):
    assert found["bits"] == bits(dump, workers=1)
    assert found["kept_running"], "a Ray that was running before must not be shut down"


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_worker_killed_half_way_changes_nothing(found: dict[str, Any]):
    survived = found["survived"]
    assert survived["died"] and len(survived["here"]) == 4
    assert survived["ray"] == survived["here"]


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_the_verb_starts_a_ray_of_its_own_and_ends_it(dump: Path, found: dict[str, Any]):
    assert found["alone"] == audit([dump], Choices(workers=1)).sums.to_json()
    assert not found["left_running"]
    assert found["address"] == "127.0.0.1", "nothing of it may hang on the machine's other addresses"


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_task_that_fails_is_one_line(found: dict[str, Any]):
    assert "--on ray: " in found["message"] and "item 7" in found["message"] and "\n" not in found["message"]


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_records_of_other_clusters_are_all_read_there_too(found: dict[str, Any]):
    assert found["mixed"] == {"local": 40, "ray": 40}


@pytest.mark.parametrize("on", ["rayy", "ray:/x", "ray://", "slurm"])
def test_another_place_is_refused(on: str):
    with pytest.raises(UsageError, match="wanted local, ray or ray://HOST:PORT"):
        audit(["nothing-is-read"], Choices(on=on))
