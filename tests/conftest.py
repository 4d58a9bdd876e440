"""Makes `tests/build.py` importable from every test; the longest files begin first where processes share the tests.

Where processes share them, a failure is printed when it happens (a run that is cut off has said what failed), and a
process that hangs where no signal reaches it is ended.
"""

import faulthandler
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))

#: Files of more than about 20 seconds, the longest first. xdist would begin with those of the most tests, and the
#: longest ones have few: at the end one process would work through them alone.
LONGEST = (
    "engines/test_faults_on_real_engines.py",
    "power/test_false_alarms.py",
    "integrations/test_trl.py",
    "engines/test_vllm_switches.py",
    "engines/test_vllm_paths.py",
    "engines/test_vllm.py",
    "engines/test_http_server.py",
    "engines/test_openvino_models.py",
    "engines/test_openvino.py",
    "engines/test_hf_load.py",
    "engines/test_hf_live.py",
    "engines/test_hf.py",
    "engines/test_engine_tokens.py",
    "engines/test_check_survives.py",
    "engines/test_monitor_ranks.py",
    "engines/test_tokenizer_server_live.py",
    "power/test_monitor_alarms.py",
    "power/test_floor_real.py",
    "test_bare.py",
    "docs/test_examples.py",
    "docs/test_pages.py",
    "cli/test_verbs.py",
    "cli/test_process.py",
    "cli/test_elsewhere.py",
    "cli/test_resume.py",
    "properties/test_corrections_properties.py",
    "reference/test_corrections.py",
    "reference/test_corrections_verl_trl.py",
    "reference/test_corrections_wheels.py",
    "integrations/test_loop_examples.py",
    "integrations/test_framework_code.py",
    "power/test_coverage.py",
)
ORDER = {TESTS / name: place for place, name in enumerate(LONGEST)}


#: Seconds beyond a test's own limit after which its process is ended: pytest-timeout needs a signal that arrives.
HANGS = 120


#: Where a process that ends by a signal, or is ended, says where its threads stood: `make test` shows it.
FATAL = pytest.StashKey[TextIO]()


def pytest_configure(config: pytest.Config) -> None:
    """The order of collection is kept by xdist, where it is installed."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Failures(config))
    if hasattr(config, "workerinput"):
        build = config.rootpath / "build"
        build.mkdir(exist_ok=True)
        config.stash[FATAL] = (build / f"fatal-{config.workerinput['workerid']}.txt").open("w")


class Failures:
    """Prints each failure at once, in the process that gathers the reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nfailed: {report.nodeid} ({report.when})\n{report.longreprtext[-1500:]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not hasattr(item.config, "workerinput"):
        return (yield)
    own = item.get_closest_marker("timeout")
    limit = own.args[0] if own and own.args else float(item.config.getini("timeout") or 300)
    fatal = item.config.stash[FATAL]
    faulthandler.enable(fatal)  # the engines' libraries set handlers of their own
    faulthandler.dump_traceback_later(limit + HANGS, exit=True, file=fatal)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a process of xdist: files in the order of `LONGEST`, all others behind them as they were found."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: ORDER.get(item.path, len(ORDER)))
