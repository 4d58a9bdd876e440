"""`python -m benchmarks` runs all; `python -m benchmarks core disk` some."""

from __future__ import annotations

import os
import sys

# one core, before numpy starts its threads: the figures are per core
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

from benchmarks import audit, check, core, disk, monitor, tokens, whole  # noqa: E402

BENCHMARKS = {
    "core": core.main,
    "disk": disk.main,
    "monitor": monitor.main,
    "audit": audit.main,
    "check": check.main,
    "tokens": tokens.main,
    "whole": whole.main,
}


def main(names: list[str]) -> int:
    unknown = [n for n in names if n not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names or list(BENCHMARKS):
        BENCHMARKS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
