"""The whole default check, every leg, against the bare work: one generate of the same prompts, one forward of them.

SmolLM2-135M if `make models` made it, else the packaged model. CPU and wall seconds of all processes, GiB of the
largest process of each.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SMOLLM2 = Path(__file__).resolve().parents[1] / "build" / "models" / "smollm2"

_BARE = """
import sys
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.suite import encoded_prompts, load
model, max_tokens = sys.argv[1], int(sys.argv[2])
params = SamplingParams(max_tokens=max_tokens)
with open_engine(f"vllm:{model}", timeout=3600) as engine:
    _, ids, _ = encoded_prompts(load("default"), engine, engine.fingerprint()["max_model_len"], max_tokens)
    rollouts = engine.sample(ids, params)
with open_engine(f"hf:{model}", timeout=3600) as engine:
    engine.score(rollouts)
print(rollouts.n_tokens, int(rollouts.drawn.sum()))
"""


def measured(command: list[str]) -> dict[str, Any]:
    """Seconds of wall clock and CPU, GiB of the largest process, of a command and all that it starts."""
    with tempfile.TemporaryFile() as out:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        ran = subprocess.run(command, stdout=out, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
        out.seek(0)
        text = out.read().decode()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "cpu": cpu, "gib": after.ru_maxrss / 2**20, "code": ran.returncode, "text": text}


def main(max_tokens: int = 64) -> None:
    model = str(SMOLLM2) if SMOLLM2.is_dir() else "tiny"
    bare = measured([sys.executable, "-c", _BARE, model, str(max_tokens)])
    report = Path(tempfile.mkdtemp()) / "report.json"
    command = [sys.executable, "-m", "onepolicy", "check", "--sampler", f"vllm:{model}", "--scorer", f"hf:{model}"]
    whole = measured([*command, "--max-tokens", str(max_tokens), "-o", str(report), "--timeout", "3600"])
    pair = measured([*command, "--max-tokens", str(max_tokens), "--legs", "pair", "--timeout", "3600"])
    outcome = json.loads(report.read_text())["outcome"] if report.exists() else f"exit {whole['code']}"
    tokens = bare["text"].split()[0]
    print(f"default check of {Path(model).name}: {outcome}; bare: generate and forward of {tokens} tokens")
    for name, run in (("bare", bare), ("pair alone", pair), ("every leg", whole)):
        times = f"{run['wall'] / bare['wall']:5.1f} x wall, {run['cpu'] / bare['cpu']:5.1f} x CPU"
        # the largest process so far: only a growth is the command's own
        print(f"  {name:10s} {run['wall']:7.1f} s wall {run['cpu']:7.1f} s CPU  {times}, at most {run['gib']:.2f} GiB")
