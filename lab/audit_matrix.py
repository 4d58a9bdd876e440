"""The audit's signatures against every injected fault and healthy data: what fires, what is named, what stays silent.

    python lab/audit_matrix.py --lines matrix.jsonl --out docs/detection.md
    python lab/audit_matrix.py --lines part.jsonl --part 3/40       # every 40th cell, from the third on

Resumable: a cell (data, tokens) is one JSON line, appended when it is done; those in the file are skipped. Faults and
healthy batches are those of `tests/audit_batches.py`, each trial with draws of its own.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import audit_batches as batches  # pyright: ignore[reportMissingImports]
from onepolicy.rollouts import Rollouts
from onepolicy.signatures.weigh import weigh
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Finding, Outcome

#: Tokens -> trials of a fault, of healthy data.
TRIALS = {500: (20, 120), 5_000: (10, 50), 50_000: (2, 4)}
#: Codes that name no cause: what is left after all causes are none.
NO_CAUSE = ("bf16-noise", "rounding-noise", "larger-than-rounding", "coarser-than-declared", "cause-unclear")
OUTCOMES = ("named", "undecided", "abstains", "wrong")
HEALTHY = {
    f"{kind} {dtype}": functools.partial(make, dtype)
    for kind, make in (("healthy", batches.healthy), ("fake engine", batches.fake))
    for dtype in batches.LEVELS
}


def cells() -> list[tuple[str, int]]:
    """(data, tokens) in the order in which they are run: small ones first."""
    return [(data, tokens) for tokens in TRIALS for data in (*HEALTHY, *batches.FAULTS)]


def made(data: str, tokens: int, trial: int) -> Rollouts:
    """The batch of one trial."""
    if data in HEALTHY:
        return HEALTHY[data](tokens, trial)
    healthy = batches.healthy("bfloat16", tokens, 10_000 + trial)
    return batches.FAULTS[data](healthy, np.random.default_rng([trial, 0xFA017]))


def findings(rollouts: Rollouts) -> list[Finding]:
    return weigh(evidence_of(survey_of(rollouts, ("sampler", "old"))))


def outcome(data: str, found: Iterable[Finding]) -> str:
    """`named`: the fault's code, decided. `undecided`: its code, from too few sequences. `wrong`: another cause is
    decided. `abstains`: no cause is decided (silent, on healthy data)."""
    code, also = batches.NAMED.get(data, ("bf16-noise", ()))
    by_code = {f.code: f for f in found}
    decided = {c for c, f in by_code.items() if c not in NO_CAUSE and f.outcome is not Outcome.INCONCLUSIVE}
    if decided - {code, *also}:
        return "wrong"
    if data in HEALTHY or code not in by_code:
        return "abstains"
    return "named" if code in decided or code in NO_CAUSE or "suspected" in code else "undecided"


def run_cell(data: str, tokens: int, trials: int | None = None) -> dict[str, Any]:
    """One line of the file."""
    n = trials or TRIALS[tokens][data in HEALTHY]
    counts, codes = Counter[str](), Counter[str]()
    for trial in range(n):
        found = findings(made(data, tokens, trial))
        counts[outcome(data, found)] += 1
        codes.update({f.code for f in found})
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"data": data, "tokens": tokens, "trials": n, **counts, "codes": dict(codes.most_common()), "date": date}


def read_lines(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Finished cells; a line that was cut off while it was written is left out."""
    out: dict[tuple[str, int], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        out[row["data"], row["tokens"]] = row
    return out


def run(path: Path, part: tuple[int, int] = (1, 1), say: Callable[[str], None] = print) -> None:
    """Every cell of the part that the file does not have yet."""
    done = read_lines(path)
    for data, tokens in cells()[part[0] - 1 :: part[1]]:
        if (data, tokens) not in done:
            row = run_cell(data, tokens)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            say(f"{data}, {tokens} tokens: { {k: row.get(k, 0) for k in OUTCOMES} } {row['codes']}")


# -- the page ----------------------------------------------------------------------------------------------------------

HEAD = """# Detection: what the audit names, and what it does not

Every cause that the audit reads from the shape of a dump, against faults put into simulated dumps and against healthy
ones. Written by `python lab/audit_matrix.py --lines FILE --out docs/detection.md`; CI runs a part of it again.

- **named**: the fault's own code, decided; codes that decide nothing by themselves (size alone, a suspicion) count
  when they are there. **undecided**: its code, said to be seen in too few sequences. **abstains**: no cause is decided.
  **wrong**: a cause is decided that is neither the fault's nor true of it besides (`NAMED` in the batches' file).
- Faults are put into bf16 batches. `temperature-*` and `top-*` are faults of meaning, which other signatures name.
- Replies have 40 to 160 tokens, so 500 tokens are about 5 sequences and 5,000 about 50.
- A size of gap without a shape names no cause: a dump has no legs, so its floor is assumed.

"""


def page(rows: dict[tuple[str, int], dict[str, Any]]) -> str:
    """The tables, from the finished cells."""
    dates = sorted({row["date"] for row in rows.values()})
    lines = [HEAD + f"Run: {dates[0] if dates else 'never'} to {dates[-1] if dates else 'never'}.\n", "## Faults\n"]
    lines += ["| fault | named by | tokens | trials | named | undecided | abstains | wrong |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for fault in batches.FAULTS:
        for row in (rows[fault, t] for t in TRIALS if (fault, t) in rows):
            cell = " | ".join(str(row.get(k, 0)) for k in OUTCOMES)
            lines.append(f"| {fault} | `{batches.NAMED[fault][0]}` | {row['tokens']:,} | {row['trials']} | {cell} |")
    lines += ["", "## Healthy data\n", "| data | tokens | trials | silent | false alarms | consistent with rounding |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for data in HEALTHY:
        for row in (rows[data, t] for t in TRIALS if (data, t) in rows):
            rounding = row["codes"].get("bf16-noise", 0) + row["codes"].get("rounding-noise", 0)
            cell = f"{row['trials']} | {row.get('abstains', 0)} | {row.get('wrong', 0)} | {rounding}"
            lines.append(f"| {data} | {row['tokens']:,} | {cell} |")
    healthy = [row for (data, _), row in rows.items() if data in HEALTHY]
    trials, wrong = sum(r["trials"] for r in healthy), sum(r.get("wrong", 0) for r in healthy)
    return "\n".join([*lines, "", f"All healthy dumps together: {wrong} false alarms in {trials}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=Path, required=True, help="one JSON line a finished cell")
    parser.add_argument("--part", default="1/1", help="k/n: every n-th cell, from the k-th on")
    parser.add_argument("--out", type=Path, help="the page to write from what is finished")
    given = parser.parse_args()
    k, n = map(int, given.part.split("/"))
    run(given.lines, (k, n))
    if given.out:
        given.out.write_text(page(read_lines(given.lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
