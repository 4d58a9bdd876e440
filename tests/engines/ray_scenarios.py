"""What `test_audit_ray.py` asks of a real local Ray, in a process of its own: prints one JSON object.

`PYTHONPATH` names both folders of tests, for Ray's workers too. Exit code 0: every scenario has an answer; `BROKEN`:
Ray itself could not start or died.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from audit_dumps import bits
from onepolicy.audit import Choices, audit
from onepolicy.auditing import Work, audit_shard
from onepolicy.errors import EngineError
from onepolicy.formats.base import Shard
from onepolicy.formats.detect import detect
from onepolicy.on_ray import over_ray, started
from onepolicy.survey import Survey

#: Exit code where Ray is to blame.
BROKEN = 75


def dies_once(shard: Shard, work: Work, number: int) -> Survey:
    """`audit_shard`, but the worker of shard 2 is killed the first time, after its work and before its answer."""
    out = audit_shard(shard, work, number)
    assert isinstance(out, Survey)
    mark = Path(str(work.spill)) / "died"
    if number == 2 and not mark.exists():
        mark.write_text("once")
        os.kill(os.getpid(), signal.SIGKILL)
    return out


def fails(item: int) -> int:
    raise ValueError(f"item {item}")


def survived(dump: Path, spill: Path) -> dict[str, Any]:
    """The surveys of shards through a worker that is killed half way, and whether it was."""
    spill.mkdir()
    work = Work(("sampler", "old"), spill=str(spill))
    items = [(shard, work, i) for i, shard in enumerate(detect([str(dump)]).shards)]
    found = dict(over_ray(dies_once, items, "ray"))
    here = {i: audit_shard(*item) for i, item in enumerate(items)}
    return {"died": (spill / "died").exists(), "ray": numbers(found), "here": numbers(here)}


def numbers(surveys: dict[int, Any]) -> list[Any]:
    return [[s.sums.to_json(), s.replays.totals.to_dict()] for _, s in sorted(surveys.items())]


def message(item: int) -> str:
    try:
        list(over_ray(fails, [(item,)], "ray"))
    except EngineError as err:
        return str(err)
    return ""


def mixed_clusters(folder: Path) -> dict[str, int]:
    """Scored tokens where half of the records have a group: a task's own error is told apart from a breakdown."""
    folder.mkdir()
    for k, part in enumerate(({"group_id": "g"}, {})):
        reply = {"token_ids": [1, 2, 3], "prompt_length": 1, "sampler_logprobs": [None, -1.0, -0.5]}
        rows = [{**reply, "old_logprobs": [None, -1.01, -0.5], **(part if i < 5 else {})} for i in range(10)]
        (folder / f"{k}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {on: audit([folder], Choices(on=on, workers=1)).sums.counts["scored"] for on in ("local", "ray")}


def main(dump: Path, scratch: Path) -> dict[str, Any]:
    # the first audit starts a Ray of its own and ends it
    alone = audit([dump], Choices(on="ray")).sums.to_json()
    import ray  # not before: the audit says how it is started

    left_running = ray.is_initialized()
    with started():
        return {
            "address": ray.util.get_node_ip_address(),
            "alone": alone,
            "left_running": left_running,
            "bits": bits(dump, on="ray"),
            "kept_running": ray.is_initialized(),
            "survived": survived(dump, scratch / "spill"),
            "message": message(7),
            "mixed": mixed_clusters(scratch / "mixed"),
        }


if __name__ == "__main__":
    try:
        found = main(Path(sys.argv[1]), Path(sys.argv[2]))
    except EngineError as err:
        print(err, file=sys.stderr)
        sys.exit(BROKEN)
    (Path(sys.argv[2]) / "found.json").write_text(json.dumps(found))
