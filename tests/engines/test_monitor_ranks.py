"""Four gloo processes: uneven and empty ranks, one that fails: the numbers of one process, no hang, one halt.

Each scenario runs in four spawned processes; what every rank saw comes back as JSON.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180)]

WORLD, STEPS = 4, 8


def batch(step: int, rank: int, gap: float = 0.03) -> tuple[Any, ...]:
    """`[B, T]` of its own size for each rank; rank 2 has no rows in odd steps, and masked ones in even steps."""
    import torch

    g = torch.Generator().manual_seed(1000 * step + rank)
    rows, tokens = (6 + 12 * rank + step % 3, 17 + 11 * rank) if rank != 2 else (4 if step % 2 == 0 else 0, 9)
    sampler = -torch.empty(rows, tokens).exponential_(1, generator=g) - 0.5
    old = sampler + gap * torch.randn(rows, tokens, generator=g)
    length = torch.randint(1, tokens + 1, (rows,), generator=g)
    mask = (torch.arange(tokens)[None] < length[:, None]) & (rank != 2)
    version = torch.randint(step - 1, step + 1, (rows, tokens), generator=g)
    return sampler, old, mask, version, torch.randn(rows, generator=g)


def observe(monitor: Any, step: int, rank: int, gap: float = 0.03, broken: bool = False) -> Any:
    sampler, old, mask, version, advantages = batch(step, rank, gap)
    if broken:
        old = old[:, :-1]
    return monitor.observe(
        sampler, old, mask, advantages=advantages, policy_version=version, scorer_version=step, current_logprobs=None
    )


def seen(out: Any) -> dict[str, Any]:
    numbers = {k: v for k, v in out.numbers.items() if not k.startswith("monitor/")}
    return {"step": out.step, "numbers": numbers, "codes": [f.code for f in out.findings], "weight": float(out.weight)}


# -- scenarios: run in every rank ----------------------------------------------------------------------------------


def numbers(rank: int, folder: str) -> list[Any]:
    """Rank 3 fails in step 3, rank 2 is empty and does not even call observe in step 5."""
    from onepolicy import Monitor

    sink = [f"jsonl:{folder}/rows.jsonl"]
    with Monitor(sinks=sink) as monitor:
        out = []
        for step in range(1, STEPS):
            if rank == 2 and step == 5:
                out.append(seen(monitor.step()))
            else:
                out.append(seen(observe(monitor, step, rank, broken=rank == 3 and step == 3)))
        out.append(seen(monitor.close()))
    return [*out, monitor.warnings]


def micro_batches(rank: int, folder: str) -> list[Any]:
    """Ranks make their step of different numbers of calls."""
    from onepolicy import Monitor

    monitor, out = Monitor(micro_batches=None), []
    for step in range(1, 4):
        for part in range(1 + rank % 2):
            observe(monitor, 10 * step + part, rank)
        out.append(seen(monitor.step()))
    return [*out, seen(monitor.close())]


def halts(rank: int, folder: str) -> list[Any]:
    """One rank's gap explodes from step 5 on, another one's observe fails all the time from step 4 on."""
    from onepolicy import Halted, Monitor

    monitor = Monitor(on_drift="halt")
    for step in range(1, 20):
        try:
            observe(monitor, step, rank, gap=30.0 if rank == 1 and step >= 5 else 0.03, broken=rank == 3 and step >= 4)
        except Halted as err:
            return [step, err.step, err.findings[0].code, str(err)]
    return ["never halted"]


def skips(rank: int, folder: str) -> list[Any]:
    """Weights of every step: the batch in which one rank's gap explodes gets 0 on all ranks."""
    from onepolicy import Monitor

    monitor = Monitor(on_drift="skip_batch")
    return [
        seen(observe(monitor, step, rank, gap=3.0 if rank == 1 and step == 4 else 0.03))["weight"]
        for step in range(1, 8)
    ]


def resumes(rank: int, folder: str) -> list[Any]:
    """State saved on every rank after step 4, loaded into a new monitor: the rest is the same."""
    from onepolicy import Monitor

    first, whole, kept = Monitor(), [], {}
    for step in range(1, STEPS):
        whole.append(seen(observe(first, step, rank)))
        if step == 4:
            kept = json.loads(json.dumps(first.state_dict()))
    second = Monitor()
    second.load_state_dict(kept)
    again = [seen(observe(second, step, rank)) for step in range(5, STEPS)]
    return [whole[4:], again]


def set_up(rank: int, folder: str) -> list[str]:
    """One rank's very first call does not fit; then one rank's sink; then a right one."""
    from onepolicy import Monitor
    from onepolicy.monitor import SetUpError

    out = []
    monitor = Monitor()
    try:
        observe(monitor, 1, rank, broken=rank == 3)
    except SetUpError as err:
        out.append(str(err))
    out.append(str(observe(monitor, 2, rank).step))  # mended, it goes on
    try:
        Monitor(sinks=["jsonl:/no/such/folder/m.jsonl"])
    except SetUpError as err:
        out.append(str(err))
    return out


def some_ranks(rank: int, folder: str) -> list[Any]:
    """Only ranks 0 and 3 hold different data (the others are tensor-parallel copies)."""
    from onepolicy import Monitor
    from onepolicy.errors import UsageError

    if rank not in (0, 3):
        try:
            Monitor(ranks=[0, 3])
        except UsageError as err:
            return [str(err)]
    monitor = Monitor(ranks=[0, 3])
    observe(monitor, 1, rank)
    return [monitor.close().numbers["scored"]]


def a_rank_dies(rank: int, folder: str) -> list[Any]:
    """Rank 3 leaves after step 3: the others' monitors are off after their time limit, and their training goes on."""
    from onepolicy import Monitor

    monitor = Monitor(timeout=5.0)
    for step in range(1, 7):
        if rank == 3 and step == 4:
            return ["left"]
        observe(monitor, step, rank)
    return ["went on", "judge" in monitor.warnings or monitor._off]


# -- the parent's side ---------------------------------------------------------------------------------------------

#: In this order; the last one takes a rank out of the world.
SCENARIOS: tuple[Callable[[int, str], list[Any]], ...] = (
    numbers, micro_batches, halts, skips, resumes, set_up, some_ranks, a_rank_dies
)  # fmt: skip


def member(rank: int, folder: str) -> None:
    """One process of the four: every scenario one after another."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results = {work.__name__: work(rank, folder) for work in SCENARIOS}
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    os._exit(0)  # gloo's threads of a group whose member left must not keep the process


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """What each rank gave, by scenario; all of them run once."""
    import torch.multiprocessing as mp

    folder = tmp_path_factory.mktemp("four")
    mp.spawn(member, args=(str(folder),), nprocs=WORLD)
    kept = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    rows = (folder / "rows.jsonl").read_text().splitlines()
    return lambda scenario: [json.loads(r) for r in rows] if scenario == "rows" else [k[scenario] for k in kept]


def alone(steps: range, broken_at: int = 0) -> list[Any]:
    """The same calls in one process, in rank order."""
    from onepolicy import Monitor

    monitor, out = Monitor(micro_batches=None), []
    for step in steps:
        for rank in range(WORLD):
            observe(monitor, step, rank, broken=rank == 3 and step == broken_at)
        out.append(seen(monitor.step()))
    return [*out, seen(monitor.close())]


def test_the_numbers_of_one_process(four: Callable[[str], list[Any]]) -> None:
    ranks = four("numbers")
    *of_0, warnings_0 = ranks[0]
    for *rows, _ in ranks[1:]:
        assert rows == of_0  # the same bits on every rank
    assert of_0 == alone(range(1, STEPS), broken_at=3)  # and in one process
    assert of_0[-1]["step"] == STEPS - 1
    assert [row["step"] for row in of_0[:3]] == [None, 1, 2]
    assert [i for i, row in enumerate(of_0) if "observe-failed" in row["codes"]] == [3]  # step 3, seen in step 4
    assert warnings_0 == {} and ranks[3][-1] == {"observe": 1}
    written = four("rows")
    assert [r.get("step") for r in written] == [None, *range(1, STEPS)]  # by the first rank alone
    assert written[1]["numbers"]["monitor/ranks"] == 4


def test_uneven_micro_batches(four: Callable[[str], list[Any]]) -> None:
    ranks = four("micro_batches")
    assert all(rows == ranks[0] for rows in ranks)
    from onepolicy import Monitor

    monitor, out = Monitor(micro_batches=None), []
    for step in range(1, 4):
        for rank in range(WORLD):
            for part in range(1 + rank % 2):
                observe(monitor, 10 * step + part, rank)
        out.append(seen(monitor.step()))
    out.append(seen(monitor.close()))
    for mine, theirs in zip(out, ranks[0], strict=True):
        assert mine["codes"] == theirs["codes"]
        for key, value in theirs["numbers"].items():  # another order of addition
            assert value is None or math.isclose(value, mine["numbers"][key], rel_tol=1e-9, abs_tol=1e-12), key


def test_all_halt_at_the_same_step(four: Callable[[str], list[Any]]) -> None:
    ranks = four("halts")
    assert all(r == ranks[0] for r in ranks)
    step, judged, code, message = ranks[0]
    assert (step, judged) == (6, 5)  # wrong in step 5, said in the very next one
    assert code == "gap-above-bound"
    assert message.startswith("step 5: gap-above-bound: abs_log_ratio/mean is ")


def test_a_skipped_batch_is_skipped_by_all(four: Callable[[str], list[Any]]) -> None:
    ranks = four("skips")
    assert all(weights == ranks[0] for weights in ranks)
    assert ranks[0][:4] == [1, 1, 1, 0]  # its own step, not the one after
    assert ranks[0][-1] == 1


def test_resume(four: Callable[[str], list[Any]]) -> None:
    for whole, again in four("resumes"):
        assert whole == again


def test_set_up_fails_on_every_rank(four: Callable[[str], list[Any]]) -> None:
    ranks = four("set_up")
    for rank, (shape, goes_on, sink) in enumerate(ranks):
        if rank == 3:
            assert shape.startswith("old_logprobs has shape ") and "wanted one [B, T]" in shape
        else:
            assert shape == "rank 3: the arrays do not fit together; its own message says what"
        assert goes_on == "None"
        assert sink.startswith("rank 0: sink jsonl: /no/such/folder/m.jsonl cannot be written")


def test_only_ranks_with_their_own_data(four: Callable[[str], list[Any]]) -> None:
    ranks = four("some_ranks")
    scored = sum(float(batch(1, r)[2].sum()) for r in (0, 3))
    assert ranks[0] == ranks[3] == [scored]
    assert ranks[1] == ["ranks are [0, 3], and this is rank 1: build the monitor on those alone"]


def test_a_rank_that_leaves_hangs_nobody(four: Callable[[str], list[Any]]) -> None:
    assert four("a_rank_dies") == [["went on", True]] * 3 + [["left"]]
