"""Running a plan: every configuration is started once, one at a time in memory, and does all that is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from onepolicy.engines.base import Engine, Progress
from onepolicy.engines.open import open_engine
from onepolicy.engines.shards import score_shards
from onepolicy.errors import ContentError, EngineDied, EngineError, EngineTimeout, OnepolicyError, UsageError
from onepolicy.legs.plan import Party, Plan, Task
from onepolicy.rollouts import Rollouts, column_values, concat_scorings
from onepolicy.types import Scoring


class Kept(Protocol):
    """Where finished scorings are stored and found again (`kept.Kept`)."""

    def get(self, task: Task, rollouts: Rollouts) -> Scoring | None: ...

    def put(self, task: Task, rollouts: Rollouts, scoring: Scoring) -> None: ...


#: Says in words what is being done now.
Told = Callable[[str], None]


@dataclass(slots=True)
class Grounds:
    """The tokens by name (`drawn`, `some`, `texts`, `probes`), and which sequences of `drawn` are in `some`."""

    rollouts: dict[str, Rollouts]
    some: list[int] = field(default_factory=list[int])

    def of(self, task: Task) -> Rollouts:
        rollouts = self.rollouts[task.on]
        return as_raw(rollouts) if task.raw else rollouts


@dataclass(slots=True)
class Done:
    """What came of the tasks. `partial`: sequences scored before an engine failed, for tasks that did not finish."""

    scorings: dict[Task, Scoring] = field(default_factory=dict[Task, Scoring])
    failures: dict[Task, OnepolicyError] = field(default_factory=dict[Task, OnepolicyError])
    partial: dict[Task, tuple[Scoring, int]] = field(default_factory=dict[Task, tuple[Scoring, int]])
    fingerprints: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


def as_raw(rollouts: Rollouts) -> Rollouts:
    """The same tokens, to be scored at temperature 1 without truncation."""
    raw = column_values("logprob_semantics", ["raw"] * len(rollouts))
    return replace(rollouts, records={**rollouts.records, "logprob_semantics": raw})


@contextmanager
def opened(party: Party, timeout: float) -> Iterator[Engine]:
    """A running engine of the party. One that was given running is not closed."""
    if party.engine is not None:
        yield party.engine
    else:
        with open_engine(party.spec, timeout=timeout) as engine:
            yield engine


def run(
    plan: Plan,
    grounds: Grounds,
    done: Done,
    *,
    vital: Task | None = None,
    timeout: float = 600.0,
    keep: Kept | None = None,
    told: Told | None = None,
    progress: Progress | None = None,
) -> Done:
    """Every task of the plan that is not done yet, configuration by configuration.

    A configuration that cannot start fails its own tasks and no others; one whose engine dies is started once more for
    the tasks that are left. `vital`: the task without which the rest says nothing; when it fails nothing else is run,
    and its error is raised unless something of it was scored. `keep`: where finished scorings are stored and found.
    """
    if vital in done.failures and vital not in done.partial:  # one engine on both sides, and it is gone
        raise done.failures[vital]
    for config, party in plan.configs.items():
        err: OnepolicyError | None = None
        for _ in range(_STARTS):
            tasks = [t for t in _open(plan, config, done) if not _found(t, grounds, done, keep)]
            if not tasks:
                break
            if told:
                told(f"{config}: {len(tasks)} scoring{'s' * (len(tasks) > 1)}")
            err = _session(party, tasks, grounds, done, vital, timeout, keep, progress)
            if vital in done.failures:
                return done
        if err is not None:  # it died twice: what is left is not tried again
            done.failures |= dict.fromkeys(_open(plan, config, done), err)
    return done


def _open(plan: Plan, config: str, done: Done) -> list[Task]:
    """The tasks of a configuration that neither are done nor have failed."""
    return [t for t in plan.tasks.get(config, []) if t not in done.scorings and t not in done.failures]


#: A configuration is started once, and once more after its engine died.
_STARTS = 2
#: After these the engine answers no more.
GONE = (EngineDied, EngineTimeout)


def _session(
    party: Party, tasks: list[Task], grounds: Grounds, done: Done, vital: Task | None, timeout: float,
    keep: Kept | None, progress: Progress | None,
) -> OnepolicyError | None:  # fmt: skip
    """One start of an engine; why it ended early, None if it did not."""
    try:
        with opened(party, timeout) as engine:
            done.fingerprints[party.config] = engine.fingerprint()
            run_tasks(engine, tasks, grounds, done, vital=vital, keep=keep, progress=progress)
    except (EngineError, UsageError) as err:
        if vital in tasks and vital not in done.scorings and vital not in done.partial:
            raise
        if not any(t in done.failures or t in done.scorings for t in tasks):  # it did not even start
            done.failures |= dict.fromkeys(tasks, err)
        return err
    return None


def run_tasks(
    engine: Engine, tasks: list[Task], grounds: Grounds, done: Done, *, vital: Task | None = None,
    keep: Kept | None = None, progress: Progress | None = None,
) -> None:  # fmt: skip
    """The tasks of one running engine, those over all drawn tokens first: others may be parts of them.

    Errors: `EngineDied` when the engine is gone; what the vital task raises; any other failure is that task's own.
    """
    order = {"drawn": 0, "texts": 1, "probes": 2, "some": 3}
    for task in sorted(tasks, key=lambda t: (t != vital, order[t.on], t.call, len(t.using))):
        if task in done.scorings or _derived(task, grounds, done):
            continue
        try:
            done.scorings[task] = _scored(engine, task, grounds, done, progress)
        except (EngineError, UsageError, ContentError) as err:
            done.failures[task] = err
            if isinstance(err, GONE) or (task == vital and task not in done.partial):
                raise
            continue
        if keep is not None:
            keep.put(task, grounds.of(task), done.scorings[task])


def _scored(engine: Engine, task: Task, grounds: Grounds, done: Done, progress: Progress | None) -> Scoring:
    rollouts = grounds.of(task)
    parts: list[Scoring] = []
    cached: list[int] = []
    at = slice(0, 0)
    try:
        for at, part in score_shards(  # noqa: B007
            engine, rollouts, distributions=task.distributions, using=dict(task.using), progress=progress
        ):
            parts.append(part)
            cached += [part.fingerprint["cached_tokens"]] if "cached_tokens" in part.fingerprint else []
    except (RuntimeError, ValueError, MemoryError) as err:  # EngineError and ContentError are among them
        if parts:
            done.partial[task] = (_joined(parts, rollouts), at.stop)
        if isinstance(err, OnepolicyError):
            raise
        # an engine in this process, out of memory for instance: its failure, and not the end of the check
        raise EngineError(f"engine {engine.NAME!r} raised {type(err).__name__}: {str(err)[:300]}") from err
    scoring = _joined(parts, rollouts)
    if not cached:
        return scoring
    return replace(scoring, fingerprint={**scoring.fingerprint, "cached_tokens": sum(cached)})


def _joined(parts: list[Scoring], rollouts: Rollouts) -> Scoring:
    """One scoring; sequences that were not reached are null."""
    counts = [p.logprobs.values.shape[0] for p in parts]
    rest = rollouts.n_tokens - sum(counts)
    return concat_scorings([*parts, *([None] if rest else [])], [*counts, *([rest] if rest else [])])


def _found(task: Task, grounds: Grounds, done: Done, keep: Kept | None) -> bool:
    """Whether the task need not be run: it is part of one that is done, or was kept by an earlier run."""
    if _derived(task, grounds, done):
        return True
    kept = keep.get(task, grounds.of(task)) if keep is not None else None
    if kept is None:
        return False
    done.scorings[task] = kept
    done.fingerprints.setdefault(task.config, kept.fingerprint)
    return True


def _derived(task: Task, grounds: Grounds, done: Done) -> bool:
    """`some` of what was scored whole; a second call is never taken from the first."""
    if task.on != "some":
        return False
    whole = done.scorings.get(replace(task, on="drawn"))
    if whole is None:
        return False
    done.scorings[task] = whole.take(flat_index(grounds.rollouts["drawn"], grounds.some))
    return True


def flat_index(rollouts: Rollouts, rows: list[int]) -> Any:
    """`[n]` places of the tokens of some sequences in the flat columns."""
    pieces = [np.arange(int(rollouts.offsets[i]), int(rollouts.offsets[i + 1])) for i in rows]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
