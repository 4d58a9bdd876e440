"""The audit of a dump: tokens a second against one read of its columns, memory against the dump's length, quantiles
against numpy, and the rival (martingale 0.2.0) on the same dump in the same run.

Sizes: ONEPOLICY_BENCH_TOKENS (default 32 million); C55 at 100 million tokens with ONEPOLICY_BENCH_C55=1 (10 minutes).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TOKENS = int(os.environ.get("ONEPOLICY_BENCH_TOKENS", 32_000_000))
FILES = 8
RIVAL = ROOT / "build" / "martingale"
#: Tokens that the rival is given: it keeps about a kilobyte of each.
RIVAL_TOKENS = 60_000

#: A process's own peak in MiB: `ru_maxrss` would begin with that of the process which started it.
_PEAK = """
import re
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
"""

_MEMORY = """
import sys
from onepolicy.audit import Choices, audit
report = audit([sys.argv[1]], Choices(workers=1))
print(report.sums.counts["scored"], peak())
"""

_RIVAL = """
import json, sys, time
from martingale.record import Recorder, SamplerConfig
data = json.load(open(sys.argv[1]))
began = time.perf_counter()
r = Recorder(sys.argv[2])
rev = r.publish_revision("0" * 64, "1" * 64, SamplerConfig(**json.loads(sys.argv[3])), 0)
digests = []
for i, (ids, a) in enumerate(zip(data["ids"], data["a"])):
    with r.sequence(0, str(i), [1, 2]) as s:
        for t, x in zip(ids, a):
            s.token(rev.digest, t, x)
    digests.append(s.record.digest)
for digest, b in zip(digests, data["b"]):
    r.score(digest, rev.digest, b)
print(time.perf_counter() - began, peak())
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dump = made(Path(folder) / "dump", TOKENS, FILES)
        _speed(dump, Path(folder))
        _small(Path(folder) / "small")
        _memory(Path(folder))
        _quantiles(dump)
        _rival(Path(folder))
        if os.environ.get("ONEPOLICY_BENCH_C55"):
            _c55(Path(folder) / "c55")


def made(folder: Path, tokens: int, files: int, noise: Callable[[Any, Any], Any] | None = None) -> Path:
    """A dump of about `tokens` tokens: replies of 100 to 4,000, groups of eight, gaps of the shape that bf16 gives."""
    from onepolicy.rollouts import Rollouts
    from onepolicy.storage import write
    from onepolicy.types import Scoring, Values

    folder.mkdir()
    for k in range(files):
        rng = np.random.default_rng(k)
        lengths = rng.integers(100, 4000, max(1, round(tokens / files / 2050)))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        n = int(offsets[-1])
        a = -rng.exponential(0.5, n)
        d = rng.normal(0, 0.05, n) * (1 - np.exp(a)) if noise is None else noise(rng, a)
        scored = np.ones(n, dtype=bool)
        scored[offsets[:-1]] = False
        write(
            Rollouts(
                offsets,
                {"token_ids": Values(rng.integers(0, 32000, n).astype(np.int32)), "drawn": Values(scored)},
                {
                    "group_id": Values(np.array([f"{k}-{i // 8}" for i in range(len(lengths))], dtype=object)),
                    "step": Values(np.full(len(lengths), k, dtype=np.int64)),
                },
                {},
                {
                    "sampler": Scoring(Values(a.astype(np.float32), scored), dtype="bfloat16", scoring_id="a"),
                    "old": Scoring(Values((a + d).astype(np.float32), scored), dtype="bfloat16", scoring_id="b"),
                },
            ),
            folder / f"{k:03d}.parquet",
        )
    return folder


def _timed(work: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def _speed(dump: Path, folder: Path) -> None:
    from onepolicy import pool, storage
    from onepolicy.audit import Choices, audit
    from onepolicy.convert import convert
    from onepolicy.metrics import METRICS

    files = sorted(dump.glob("*.parquet"))
    tokens = {f: storage.read(f).n_tokens for f in files}
    few = files[: len(files) // 2]
    n, m = sum(tokens.values()), sum(tokens[f] for f in few)

    def sums(keys: tuple[str, ...]) -> Callable[[list[Path]], Any]:
        return lambda part: list(pool.over(sums_of, [(str(f), keys) for f in part], 2))

    print(
        f"audit: {n:,} tokens in {len(files)} Parquet files, two workers, warm cache; behind the bar: what each further"
    )
    print("  token costs, from half of the files and all of them: the starts of processes are in both")
    bare = 0.0
    for name, work in (
        ("one read of the columns (pyarrow)", lambda part: list(pool.over(read_columns, [(str(f),) for f in part], 2))),
        ("core metrics (a verdict's, quantiles)", sums(_verdict_metrics())),
        ("every metric", sums(tuple(METRICS))),
        ("audit, no what-if", lambda part: audit(part, Choices(workers=2, what_if=False))),
        ("whole audit", lambda part: audit(part, Choices(workers=2))),
    ):  # fmt: skip
        half, took = (min(_timed(work, part) for _ in range(2)) for part in (few, files))
        bare = bare or took
        print(f"  {name:38s} {n / took / 1e6:6.2f} M tokens/s   {took / bare:6.1f} x one read"
              f"  | {(n - m) / (took - half) / 1e6:6.2f} M tokens/s")  # fmt: skip
    lines = folder / "lines.jsonl"
    convert([files[0]], lines)
    jsonl = _timed(lambda: audit([lines], Choices(workers=1)))
    print(f"  {'whole audit, JSON lines, one worker':38s} {tokens[files[0]] / jsonl / 1e6:6.2f} M tokens/s")


def _small(folder: Path) -> None:
    """400 JSON lines files of eight replies of 20 to 120 tokens, against the same records in one file."""
    from onepolicy.audit import Choices, audit

    rng = np.random.default_rng(0)
    lines: list[str] = []
    for i in range(3200):
        n = int(rng.integers(20, 120))
        a = -rng.exponential(0.5, n)
        b = a + rng.normal(0, 0.03, n) * (1 - np.exp(a))
        ids = rng.integers(0, 32000, n + 1).tolist()
        line = {"token_ids": ids, "prompt_length": 1, "group_id": str(i // 8)}
        lines.append(json.dumps({**line, "sampler_logprobs": [None, *a.tolist()], "old_logprobs": [None, *b.tolist()]}))
    many, one = folder / "many", folder / "one"
    for place in (many, one):
        place.mkdir(parents=True)
    for k in range(400):
        (many / f"{k:04d}.jsonl").write_text("\n".join(lines[8 * k : 8 * k + 8]) + "\n")
    (one / "all.jsonl").write_text("\n".join(lines) + "\n")
    took, alone = (_timed(audit, [place], Choices(workers=1)) for place in (many, one))
    print(f"  400 files of eight short replies, one worker: {took:.1f} s, the same records in one file {alone:.1f} s")


def read_columns(path: str) -> int:
    """The three columns that a comparison needs, nothing else."""
    import pyarrow.parquet as pq

    table: Any = pq.read_table(path, columns=["token_ids", "sampler_logprobs", "old_logprobs"])
    return table.num_rows


def _verdict_metrics() -> tuple[str, ...]:
    """The metrics that presets bound, and the quantiles of |d|."""
    from onepolicy.gates.bounds import load

    names = {b.metric for preset in ("fp32", "fp16", "bf16") for b in load(preset).bounds}
    return tuple(sorted(names | {f"abs_log_ratio/p{q}" for q in ("50", "95", "99", "99.9")}))


def sums_of(path: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """These metrics of one file, no profiles."""
    from onepolicy.align import align
    from onepolicy.metrics import METRICS
    from onepolicy.reduce import reduce
    from onepolicy.storage import iter_shards

    total = None
    for part in iter_shards(path, 1 << 19):
        sums = reduce(align(part, "sampler", "old"), [METRICS[k] for k in keys])
        total = sums if total is None else total.merge(sums)
    assert total is not None
    return total.to_dict()


def _memory(folder: Path) -> None:
    found: list[tuple[int, float]] = []
    for tokens in (TOKENS // 4, TOKENS):
        dump = made(folder / f"memory-{tokens}", tokens, 1)
        said = subprocess.run(
            [sys.executable, "-c", _PEAK + _MEMORY, str(dump)], capture_output=True, text=True, check=True
        )
        n, peak = said.stdout.split()
        found.append((int(n), float(peak)))
    (n, small), (m, large) = found
    print(f"  peak memory, one file: {small:.0f} MiB at {n:,} tokens, {large:.0f} MiB at {m:,}: {large / small:.2f} x")


def _quantiles(dump: Path) -> None:
    from onepolicy import storage
    from onepolicy.audit import Choices, audit

    report = audit([dump], Choices(workers=2, what_if=False))
    gaps = []
    for file in sorted(dump.glob("*.parquet")):
        r = storage.read(file)
        d = [r.scorings[s].logprobs.values.astype(np.float64) for s in ("sampler", "old")]
        gaps.append(np.abs(d[1] - d[0])[r.drawn])
    size = np.concatenate(gaps)
    off: list[str] = []
    for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999)):
        m = report.measurements.get(f"abs_log_ratio/{name}")
        if m is not None and m.value is not None:
            true = float(np.quantile(size, q, method="inverted_cdf"))
            off.append(f"{name} {m.value / true - 1:+.2%}")
    print(f"  quantiles of |d| against numpy: {', '.join(off)} (0.4% is the promise)")


def _rival(folder: Path) -> None:
    """Both on one dump: uniform noise of sd 0.5 on every token, which no rounding makes."""
    python = RIVAL / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(RIVAL)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "martingale==0.2.0"], check=True)
    for sd in (0.1, 0.5):
        dump = made(
            folder / f"rival-{sd}", RIVAL_TOKENS, 1, lambda rng, a, sd=sd: rng.normal(0, sd, len(a)) - sd**2 / 2
        )
        _both(dump, folder, sd, python)


def _both(dump: Path, folder: Path, sd: float, python: Path) -> None:
    from onepolicy import storage
    from onepolicy.audit import Choices, audit

    r = storage.read(dump / "000.parquet")
    lists = {"ids": r.token_ids, "a": r.scorings["sampler"].logprobs.values, "b": r.scorings["old"].logprobs.values}
    cut = [r.sequence(i) for i in range(len(r))]
    data = {k: [v[s][1:].tolist() for s in cut] for k, v in lists.items()}
    source, workspace = folder / f"rival-{sd}.json", folder / f"ledger-{sd}"
    source.write_text(json.dumps(data))
    config = json.dumps(_sampler_config(python))
    said = subprocess.run(
        [str(python), "-c", _PEAK + _RIVAL, str(source), str(workspace), config], capture_output=True, text=True
    )
    if said.returncode:
        print(f"  martingale could not be run: {said.stderr.strip().splitlines()[-1]}")
        return
    recorded, peak = map(float, said.stdout.split())
    began = time.perf_counter()
    doctor = subprocess.run(
        [str(python), "-m", "martingale.cli", "doctor", "--dir", str(workspace)], capture_output=True, text=True
    )
    doctored = time.perf_counter() - began
    size = sum(f.stat().st_size for f in workspace.rglob("*"))
    ours = _timed(lambda: audit([dump], Choices(workers=1)))
    report = audit([dump], Choices(workers=1))
    n = r.n_tokens
    print(f"  noise of sd {sd} on every token, {n:,} tokens:")
    print(f"    martingale  record {recorded:.1f} s, doctor {doctored:.1f} s, {size / n:,.0f} bytes a token, "
          f"{peak:.0f} MiB, exit {doctor.returncode}")  # fmt: skip
    for line in doctor.stdout.splitlines()[-6:]:
        print(f"      | {line}")
    file = (dump / "000.parquet").stat().st_size
    print(f"    onepolicy   audit {ours:.1f} s, {file / n:.1f} bytes a token, exit {report.outcome.exit_code}")
    for f in report.findings[:4]:
        print(f"      | {f.code}: {f.message[:140]}")
    k3 = report.measurements["kl_sampler_scorer_k3/mean"]
    print(f"      | k3 {k3.value:.4f} [{k3.lower:.4f}, {k3.upper:.4f}], true {sd**2 / 2:.4f}")


def _sampler_config(python: Path) -> dict[str, Any]:
    """The rival's sampler settings: temperature 1, nothing cut."""
    probe = "import dataclasses, json; from martingale.record import SamplerConfig as S; " \
        "print(json.dumps([f.name for f in dataclasses.fields(S)]))"  # fmt: skip
    names = json.loads(subprocess.run([str(python), "-c", probe], capture_output=True, text=True, check=True).stdout)
    known = {"temperature": "1", "top_p": "1", "top_k": -1, "engine": "vllm", "dtype": "bfloat16", "max_tokens": 4096}
    return {k: v for k, v in known.items() if k in names}


def _c55(folder: Path) -> None:
    """Quantiles and the place of one outlier among 100 million normal gaps."""
    from onepolicy.audit import Choices, audit

    made(folder, 100_000_000, 64, lambda rng, a: rng.normal(0, 0.05, len(a)))
    began = time.perf_counter()
    report = audit([folder], Choices(workers=2, what_if=False))
    took = time.perf_counter() - began
    m = report.measurements
    n = report.sums.counts["scored"]
    off = [f"{k} {m[f'abs_log_ratio/{k}'].value / t - 1:+.2%}" for k, t in (("p50", 0.0337245), ("p95", 0.0979982))]  # pyright: ignore[reportOptionalOperand]
    peak = max(resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
    print(f"  C55: {n:,} tokens in {took:.0f} s, {', '.join(off)}, peak of one process {peak:.0f} MiB")
