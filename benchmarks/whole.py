"""The whole check, every leg, against the bare work: one generate of the same prompts, one forward of them.

SmolLM2-135M if `make models` made it, else the packaged model. Seconds of wall clock and CPU and GiB of the largest
process of each, as ratios; and how often the check started an engine, by configuration. The engines take the threads
that they take elsewhere. `python -m benchmarks.whole --suite smoke` is the short one; `--skip` leaves legs out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SMOLLM2 = Path(__file__).resolve().parents[1] / "build" / "models" / "smollm2"
#: `python -m benchmarks` holds these at 1 for the figures by core.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_BARE = """
import sys
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.suite import encoded_prompts, load
model, suite, max_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
params = SamplingParams(max_tokens=max_tokens)
with open_engine(f"vllm:{model}", timeout=3600) as engine:
    _, ids, _ = encoded_prompts(load(suite), engine, engine.fingerprint()["max_model_len"], max_tokens)
    rollouts = engine.sample(ids, params)
with open_engine(f"hf:{model}", timeout=3600) as engine:
    engine.score(rollouts)
print(rollouts.n_tokens, int(rollouts.drawn.sum()))
"""
#: `onepolicy check ...`, with every start of an engine written to the file named first, one a line.
_CHECK = """
import sys
from onepolicy.cli.main import main
from onepolicy.engines.worker import WorkerEngine
path, begin = sys.argv.pop(1), WorkerEngine.__init__
def counted(self, engine, target, options, **more):
    changed = {k: v for k, v in options.items() if v != engine.SWITCHES[k].default}
    with open(path, "a") as file:
        print(" ".join([engine.NAME, *(f"{k}={v}" for k, v in sorted(changed.items()))]), file=file)
    begin(self, engine, target, options, **more)
WorkerEngine.__init__ = counted
main()
"""


@dataclass(frozen=True)
class Run:
    """Seconds of wall clock and CPU, GiB of the largest process, of a command and all that it starts."""

    wall: float
    cpu: float
    gib: float
    code: int
    text: str

    def beside(self, name: str, bare: Run) -> str:
        wall, cpu, gib = self.wall / bare.wall, self.cpu / bare.cpu, self.gib / bare.gib
        sizes = f"{self.wall:7.1f} s wall {self.cpu:7.1f} s CPU {self.gib:5.2f} GiB"
        return f"  {name:10s} {sizes}  {wall:5.1f} x wall {cpu:5.1f} x CPU {gib:4.2f} x memory"


def measured(command: list[str]) -> Run:
    env = {k: v for k, v in os.environ.items() if k not in _THREADS} | {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as out:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, env=env)
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read().decode()
    return Run(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, child.returncode, text)


def check(model: str, folder: Path, name: str, *options: str) -> tuple[Run, list[str], str]:
    """(run, the configurations in the order in which they were started, outcome) of a check."""
    starts, report = folder / f"{name}.starts", folder / f"{name}.json"
    starts.touch()
    engines = ["--sampler", f"vllm:{model}", "--scorer", f"hf:{model}", "--timeout", "3600"]
    run = measured([sys.executable, "-c", _CHECK, str(starts), "check", *engines, *options, "-o", str(report)])
    outcome = json.loads(report.read_text())["outcome"] if report.exists() else f"exit {run.code}"
    return run, starts.read_text().splitlines(), outcome


def main(max_tokens: int = 64, suite: str = "default", skip: str = "") -> None:
    model = str(SMOLLM2) if SMOLLM2.is_dir() else "tiny"
    asked = ["--suite", suite, "--max-tokens", str(max_tokens)]
    bare = measured([sys.executable, "-c", _BARE, model, suite, str(max_tokens)])
    with tempfile.TemporaryDirectory() as folder:
        pair, pair_starts, _ = check(model, Path(folder), "pair", *asked, "--legs", "pair")
        legs = ["--skip", skip] if skip else []
        whole, starts, outcome = check(model, Path(folder), "whole", *asked, *legs)
    tokens, drawn = bare.text.split()
    left_out = f" without {skip}" if skip else ""
    print(f"check of {Path(model).name}, suite {suite}{left_out}: {outcome}")
    print(f"bare: generate and forward of {tokens} tokens, {drawn} of them drawn")
    print(bare.beside("bare", bare))
    print(pair.beside("pair alone", bare) + f", {len(pair_starts)} starts")
    print(whole.beside("every leg", bare) + f", {len(starts)} starts of {len(set(starts))} configurations")
    for config in starts:
        print(f"    {config}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", default="default")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--skip", default="", help="names of legs, joined by commas")
    given = parser.parse_args()
    main(given.max_tokens, given.suite, given.skip)
