"""Bytes a token on disk for ids, two masks and two float32 log-probs; time to write and read them."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.data import rollouts
from onepolicy import storage


def main() -> None:
    data = rollouts(1_000_000)
    print(f"on disk, {data.n_tokens:,} tokens: ids, drawn, loss mask, two float32 log-probs")
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("parquet", "jsonl"):
            path = Path(folder) / f"rollouts.{suffix}"
            began = time.perf_counter()
            storage.write(data, path)
            wrote = time.perf_counter() - began
            began = time.perf_counter()
            storage.read(path)
            took = time.perf_counter() - began
            size = path.stat().st_size / data.n_tokens
            print(
                f"  {suffix:8s} {size:6.2f} bytes/token   write {data.n_tokens / wrote / 1e6:6.2f} M tokens/s"
                f"   read {data.n_tokens / took / 1e6:6.2f} M tokens/s"
            )
