"""A command line that runs in this process, and the files that several tests start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import SAMPLER, SCORER, Command, Ran

from onepolicy.cli.main import run


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Command:
    def ran(*argv: object) -> Ran:
        capfd.readouterr()
        code = run([str(a) for a in argv])
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return ran


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of the fake engine."""
    path = tmp_path_factory.mktemp("recorded") / "rollouts.parquet"
    assert run(["record", "--sampler", SAMPLER, "-o", str(path), "--max-tokens", "32"]) == 0
    return path


@pytest.fixture(scope="session")
def report(recorded: Path) -> Path:
    """A saved report that passes `bf16`, and the scores beside it."""
    path = recorded.with_name("report.json")
    scores = recorded.with_name("scores.parquet")
    argv = ["check", str(recorded), "--scorer", SCORER, "-o", str(path), "--scores", str(scores)]
    assert run(argv) == 0
    return path


@pytest.fixture(scope="session")
def scores(report: Path) -> Path:
    """Rollouts with the scorings `sampler` and `scorer`."""
    return report.with_name("scores.parquet")
