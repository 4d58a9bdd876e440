"""The same function over a list of shards: in this process, in a local pool, on Ray. The order of answers is theirs."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from onepolicy.errors import EngineDied, UsageError

_T = TypeVar("_T")
#: A worker that is killed takes its shard along; the shard is tried again this often.
TRIES = 3
#: `mallopt` options of glibc's malloc.h, and their new values in bytes: the first one is the most that older ones take.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 1 << 25), (-1, 1 << 29)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_memory() -> None:
    """Freed memory stays with this process, for a process that is ours alone: arrays of some megabytes come and go, and
    glibc would give each back and ask for fresh pages again, which costs more than the arithmetic. No-op elsewhere."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        # where the first is refused, the second alone would make it worse: it ends glibc's own adjusting
        if mallopt(*_MMAP_THRESHOLD):
            mallopt(*_TRIM_THRESHOLD)


def over(work: Callable[..., _T], items: Sequence[tuple[Any, ...]], workers: int) -> Iterator[tuple[int, _T]]:
    """`(i, work(*items[i]))` as they are done. With one worker: here, in order.

    Errors: `EngineDied` for an item whose worker was killed `TRIES` times; whatever `work` raises.
    """
    if workers < 1:
        raise UsageError(f"--workers: got {workers}, wanted at least 1")
    if workers == 1 or len(items) == 1:
        for i, item in enumerate(items):
            yield i, work(*item)
        return
    left = dict.fromkeys(range(len(items)), 0)
    while left:
        yield from _one_pool(work, items, left, min(workers, len(left)))


def _one_pool(
    work: Callable[..., _T], items: Sequence[tuple[Any, ...]], left: dict[int, int], workers: int
) -> Iterator[tuple[int, _T]]:
    """Answers until all are there or the pool breaks; `left` loses what is done and counts the tries of the rest."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=keep_memory) as pool:
        waiting: dict[Future[_T], int] = {}
        todo = iter(list(left))
        while True:
            for i in itertools.islice(todo, 2 * workers - len(waiting)):  # answers do not pile up
                try:
                    waiting[pool.submit(work, *items[i])] = i
                except BrokenProcessPool:  # a worker died since the last answer
                    _count_try(left, [i, *waiting.values()], items)
                    return
            if not waiting:
                return
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                i = waiting.pop(future)
                try:
                    answer = future.result()
                except BrokenProcessPool:
                    _count_try(left, [i, *waiting.values()], items)
                    return
                del left[i]
                yield i, answer


def _count_try(left: dict[int, int], struck: Sequence[int], items: Sequence[tuple[Any, ...]]) -> None:
    for i in struck:
        left[i] += 1
        if left[i] >= TRIES:
            first, *more = getattr(items[i][0], "paths", items[i][:1])
            what = f"{first} and {len(more):,} more files" if more else first
            raise EngineDied(
                f"a worker died {TRIES} times on {what}; is there enough memory? does a script that calls this do it "
                "under `if __name__ == '__main__':`? try --workers 1"
            )
