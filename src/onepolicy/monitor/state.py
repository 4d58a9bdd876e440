"""`Monitor`: observes a run, judges each step one step late, and never hurts the run.

Every step: the vector of this rank is complete, the collective starts, then the step before is judged. What can fail
comes after the collective; what fails is counted and said, and joins as zeros with a flag.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onepolicy.arrays import Array, is_torch
from onepolicy.errors import UsageError
from onepolicy.gates.bounds import Preset
from onepolicy.monitor import choices, vector
from onepolicy.monitor.actions import Action, Halted, Observation, OnDrift, SetUpError, checked, within
from onepolicy.monitor.batch import batch_of
from onepolicy.monitor.identities import set_up_problems
from onepolicy.monitor.judge import MAX_LAG, RECHECKED, Judge, Judged
from onepolicy.monitor.kinds import plain_tensors
from onepolicy.monitor.observe import observed
from onepolicy.monitor.ranks import Kept, Pending, ProcessGroup, ranks_of, rows_of
from onepolicy.monitor.recheck import Recheck, outcome_of
from onepolicy.monitor.sinks import Sink, Sinks
from onepolicy.monitor.vector import Merged
from onepolicy.types import Finding, Severity

LOG = logging.getLogger("onepolicy.monitor")
FORMAT = 2
#: What can go wrong in a call, as other ranks are told.
FAULTS: tuple[str, ...] = ("the arrays do not fit together", "out of memory", "an unexpected error")


class Monitor:
    """The numbers of `onepolicy check` inside a training loop, with alarms.

    bounds: a preset's name, a TOML file of your own bounds, or a `Preset`; what the loop cannot measure is refused.
    on_drift: what a failing finding does: "warn", "skip_batch", "halt", or a function of (findings, numbers), whose
        result may name one of these.
    clip: the loss's clip range, as 0.2 or (0.2, 0.28): below and above 1.
    sinks: where each step's row goes, as "jsonl:PATH" or "tensorboard:DIR", or anything with write(row) and close().
        Only the first rank writes.
    micro_batches: calls of `observe` that make a step; None: the step ends where `step` is called.
    ranks: "all" ranks of torch.distributed where it is initialised (then every one must build a monitor, at the same
        place), a list of those that hold different data, or "alone".
    max_lag: versions of the scorer without a newer one of the sampler, before the engine is said to stand still.
    step_zero: in the very first batch of a run, old is current and the reference is the policy; else that is an error.
        False where the first batch comes after an update; a number in nats is the largest mean |d| allowed.
    corrected: the loss weights the gap to the sampler in a way that is not passed as `correction=`.

    Errors: `UsageError` for choices that cannot be, `SetUpError` in the first step, `Halted` if asked for."""

    def __init__(
        self,
        bounds: str | Preset = "bf16",
        on_drift: OnDrift = "warn",
        *,
        clip: float | tuple[float, float] = 0.2,
        sinks: Sequence[str | Sink] | str | Sink | None = (),
        micro_batches: int | None = 1,
        ranks: str | Sequence[int] = "all",
        max_lag: int = MAX_LAG,
        step_zero: bool | float = True,
        corrected: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        self.preset = choices.preset_of(bounds)
        self.on_drift = checked(on_drift)
        self.clip = choices.clip_of(clip)
        self.micro_batches = None if micro_batches is None else choices.whole("micro_batches", micro_batches, 1)
        self.step_zero, self.corrected = choices.step_zero_of(step_zero), corrected
        self.judge = Judge(self.preset, choices.whole("max_lag", max_lag, 0))
        self.ranks = ranks_of(ranks, choices.positive("timeout", timeout))
        self.sinks = self._opened(sinks)
        #: kind -> how often it happened on this rank; each is said in the log at 1, 2, 4, 8, ...
        self.warnings: dict[str, int] = {}
        self._rechecks: list[Recheck] = []
        self._step, self._ready, self._resumed, self._off = 0, False, False, False
        self._pending: tuple[int, Pending] | None = None
        self._last = Observation()
        self._active: frozenset[str] = frozenset()
        self._skip, self._recheck = False, 0
        self._like: Any = None
        self._clear()

    # -- the loop --------------------------------------------------------------------------------------------------

    def observe(
        self,
        sampler_logprobs: Array,
        old_logprobs: Array | None,
        mask: Array,
        *,
        current_logprobs: Array | None = None,
        reference_logprobs: Array | None = None,
        advantages: Array | None = None,
        policy_version: Array | int | None = None,
        scorer_version: int | None = None,
        correction: Any = None,
    ) -> Observation:
        """One micro-batch, padded `[B, T]`, torch on any device or numpy. Ends the step if `micro_batches` are full.

        sampler_logprobs, old_logprobs: nats, of the sampler and of the scorer before the update; NaN: missing. In
            bypass mode `old_logprobs` is None and `current_logprobs` takes its place.
        mask: tokens that the sampler drew and that are trained on. What stands elsewhere is never read.
        current_logprobs, reference_logprobs: `[B, T]`. advantages: `[B]` or `[B, T]`.
        policy_version: `[B]` or `[B, T]` versions that drew the tokens (below 0: unknown), with `scorer_version` the
            trainer's own; without that the newest one in the batch stands for it.
        correction: `onepolicy.corrections`' result, or anything with `weights` and `keep`, or weights `[B, T]`.

        Errors: `SetUpError` in the first step; later a call that fails is counted, said in the log, and leaves nothing.
        """
        if self._off:
            return self._last
        try:
            batch = batch_of(
                sampler_logprobs,
                old_logprobs,
                mask,
                current=current_logprobs,
                reference=reference_logprobs,
                advantages=advantages,
                versions=policy_version,
                version=scorer_version,
                correction=correction,
                corrected=self.corrected,
            )
            with plain_tensors():
                # not the batch itself, which would stay alive
                self._like = sampler_logprobs.new_empty(0) if is_torch(sampler_logprobs) else None
                self._add(observed(batch, self.clip, first=self._looks_at_step_zero), batch.version)
        except Exception as err:
            self._failed(err)
        self._calls += 1
        if self.micro_batches is not None and self._calls >= self.micro_batches:
            return self.step()
        return self._out()

    def step(self) -> Observation:
        """Ends the step: every rank calls it once a step, also one that observed nothing. See `Observation`."""
        if self._off:
            return self._last
        self._step += 1
        try:
            with plain_tensors():
                pending: Pending = self.ranks.start(self._vector())
        except Exception as err:  # the collective itself: nobody can be told any more
            return self._give_up(err)
        before, self._pending = self._pending, (self._step, pending)
        error = self._error
        self._clear()
        if not self._ready:
            self._set_up(pending, error)
        if before is not None:
            self._judge_step(*before)
        self._run_rechecks()
        out = self._out(pending)
        if self._acting == "halt":
            raise Halted(self._failing, self._last.step or 0)
        return out

    def every(self, steps: int, check: Callable[[], Any] | tuple[str, str], *, name: str = "recheck") -> None:
        """Checks the live engines again after every `steps` steps.

        check: a function, called on every rank at the same step, whose result is a report, an outcome, a list of
            findings or True / False; or two engine specs, checked by the first rank with the smoke suite. What it finds
            is judged one step later, on all ranks.

        Errors: `UsageError`.
        """
        if steps < 1:
            raise UsageError(f"steps is {steps}, wanted 1 or more")
        self._rechecks.append(Recheck.of(steps, check, name))

    def close(self) -> Observation:
        """Judges the last step and closes the sinks. Nothing is raised for what it finds."""
        before, self._pending = self._pending, None
        if before is not None and not self._off:
            self._judge_step(*before)
        self._count_sinks(self.sinks.close())
        return self._last

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists. Waits for the last step's collective; starts none, so one rank may call it alone.
        What was observed since the last `step` is not in it."""
        if self._calls:
            self._warn("state", f"state_dict in the middle of a step: {self._calls} calls of observe are not in it")
        pending = None if self._pending is None else (self._pending[0], self._pending[1].read().tolist())
        return {
            "format": FORMAT,
            "bounds": self.preset.name,
            "step": self._step,
            "pending": pending,
            "judge": self.judge.to_dict(),
            "active": sorted(self._active),
            "skip": self._skip,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Errors: `UsageError` for another format, other bounds, or what is no whole state; the
        monitor is then as it was."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            got = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise UsageError(f"state of format {got!r}, this version reads {FORMAT}; start without a state")
        if state.get("bounds") != self.preset.name:
            raise UsageError(f"state is of bounds {state.get('bounds')!r}, this monitor has {self.preset.name!r}")
        fresh = Judge(self.preset, self.judge.max_lag)
        try:
            fresh.load(state["judge"])
            pending = state["pending"] and (state["pending"][0], Kept(rows_of(state["pending"][1])))
            step, active, skip = int(state["step"]), frozenset(state["active"]), bool(state["skip"])
        except (KeyError, TypeError, ValueError, IndexError) as err:
            raise UsageError(f"state is not whole, or of other bounds: {type(err).__name__}: {err}") from None
        self.judge = fresh
        self._step, self._active, self._skip, self._pending = step, active, skip, pending or None
        self._resumed = True

    # -- inside ----------------------------------------------------------------------------------------------------

    def _opened(self, sinks: Any) -> Sinks:
        """Opened on the first rank; if that fails, every rank says so."""
        problem, out = "", Sinks([])
        try:
            if self.ranks.rank == 0:
                out = Sinks.of(choices.sinks_of(sinks), self.preset)
        except Exception as err:
            if not isinstance(self.ranks, ProcessGroup):
                raise
            problem = str(err) or type(err).__name__
        if isinstance(self.ranks, ProcessGroup):
            self.ranks.agree(problem)
        return out

    @property
    def _looks_at_step_zero(self) -> bool:
        return not self._ready and not self._resumed and self._step == 0 and self._calls == 0

    def _clear(self) -> None:
        self._sum: Array | None = None
        self._calls, self._faults, self._fault, self._version = 0, 0, 0, float("nan")
        self._error: Exception | None = None

    def _add(self, vec: Array, version: float | None) -> None:
        if self._sum is None:
            self._sum = vec
        else:
            at = vector.GREATEST_AT
            self._sum[: at.start] += vec[: at.start]
            mine = self._sum[at]
            self._sum[at] = mine.maximum(vec[at]) if is_torch(vec) else np.maximum(mine, vec[at])
        self._version = self._version if version is None else version

    def _vector(self) -> Array:
        """This rank's part of the step; zeros and a flag where it has none."""
        told = {
            "step": self._step,
            "observes": self._calls - self._faults,
            "faults": self._faults,
            "fault": self._fault,
            "version": self._version,
            "recheck": self._recheck,
            "sink_failures": self.sinks.failures,
        }
        self._recheck = 0
        try:
            vec = vector.empty() if self._sum is None else self._sum
            for i, x in enumerate(vector.own(told)):
                vec[vector.OWN_AT.start + i] = x
        except Exception as err:
            self._failed(err)
            vec = vector.empty()
            vec[vector.OWN_AT] = vector.own({**told, "observes": 0, "faults": self._faults, "fault": self._fault})
        return vec

    def _failed(self, err: Exception) -> None:
        """A call that failed: loud while the monitor is set up, counted after."""
        if not self._ready and self.ranks.world == 1:
            raise SetUpError(str(err)) if isinstance(err, ValueError) else err
        self._faults += 1
        self._error = err
        memory = "memory" in str(err).lower() or isinstance(err, MemoryError)
        self._fault = 1 + (0 if isinstance(err, ValueError) else 1 if memory else 2)
        if self._ready:
            self._warn("observe", f"observe failed, its batch is left out: {type(err).__name__}: {err}")

    def _set_up(self, pending: Pending, error: Exception | None) -> None:
        """The first step is looked at at once, on every rank alike; `error`: this rank's own. Errors: `SetUpError`."""
        merged = Merged(pending.read())
        faults = [(rank, int(f)) for rank, f in enumerate(merged.own("fault")) if f]
        problems = [f"rank {rank}: {FAULTS[f - 1]}; its own message says what" for rank, f in faults]
        if not problems:
            problems = set_up_problems(merged, self.preset, self.step_zero)
        if problems:
            self._pending, self._step = None, 0
            raise SetUpError(str(error or problems[0])) from error
        self._ready = True

    def _judge_step(self, step: int, pending: Pending) -> None:
        self._acting = None
        try:
            merged = Merged(pending.read())
            judged = self.judge.judge(merged)
        except Exception as err:
            self._warn("judge", f"step {step} could not be judged: {type(err).__name__}: {err}")
            return
        steps = set(merged.own("step"))
        if len(steps) > 1:
            self._warn("steps", f"ranks disagree on the step: {sorted(steps)}; every rank must call step once a step")
        judged.numbers["monitor/warnings"] = float(sum(self.warnings.values()))
        if self.on_drift == "skip_batch":  # `_skip` is still what that step's weight was made of
            kept = not self._skip and bool(within(merged.rows, self.judge.bounds))
            judged.numbers["monitor/skipped"] = float(not kept)
        self._say(step, judged)
        row = {"step": step, "time": time.time(), "numbers": judged.numbers, "findings": judged.findings}
        self._count_sinks(self.sinks.write(row))
        self._last = Observation(step, judged.numbers, tuple(judged.findings))
        self._failing = [f for f in judged.findings if f.severity is Severity.FAIL]
        self._acting = self._decided(self._failing, judged) if self._failing else None
        self._skip = self._acting == "skip_batch"

    def _decided(self, failing: list[Finding], judged: Judged) -> Action | None:
        if not callable(self.on_drift):
            return self.on_drift  # pyright: ignore[reportReturnType]
        try:
            answer = self.on_drift(failing, judged.numbers)
            return answer if answer in ("halt", "skip_batch") else None
        except Halted:
            raise
        except Exception as err:
            self._warn("on_drift", f"on_drift failed: {type(err).__name__}: {err}")
            return None

    def _say(self, step: int, judged: Judged) -> None:
        """In the log of the first rank, once when a finding begins and once when it ends."""
        now = frozenset(f.code for f in judged.findings)
        if self.ranks.rank == 0:
            for f in judged.findings:
                if f.code not in self._active:
                    LOG.warning("step %d: %s: %s; %s", step, f.code, f.message, f.advice)
            for code in sorted(self._active - now):
                LOG.info("step %d: %s: over", step, code)
        self._active = now

    def _out(self, pending: Pending | None = None) -> Observation:
        """The last judged step, with the weight of the batch at hand."""
        good: Any = 0.0 if self._skip else 1.0
        with plain_tensors():
            if pending is not None and self.on_drift == "skip_batch":
                good = good * within(pending.on_device(), self.judge.bounds)
            weight = self._as_weight(good)
        last = self._last
        return Observation(last.step, last.numbers, last.findings, weight, self._skip)

    def _as_weight(self, good: Any) -> Any:
        like = self._like
        if is_torch(good):  # not read: it may lie on a device
            return good if like is None else good.to(device=like.device, dtype=like.dtype, non_blocking=True)
        return float(good) if like is None else like.new_full((), float(good))

    def _run_rechecks(self) -> None:
        for recheck in self._rechecks:
            if self._step % recheck.steps:
                continue
            try:
                outcome = recheck.run(self.ranks.rank)
            except Exception as err:
                self._warn("recheck", f"{recheck.name} failed: {type(err).__name__}: {err}")
                continue
            self._recheck = max(self._recheck, RECHECKED.index(outcome_of(outcome)))

    def _give_up(self, err: Exception) -> Observation:
        self._off = True
        LOG.error("the monitor's collective failed, it is off from here on: %s: %s", type(err).__name__, err)
        return self._last

    def _count_sinks(self, problems: list[str]) -> None:
        for problem in problems:
            self._warn("sink", problem)

    def _warn(self, kind: str, message: str) -> None:
        """Counted always, said at 1, 2, 4, 8, ... times."""
        n = self.warnings[kind] = self.warnings.get(kind, 0) + 1
        if n & (n - 1) == 0:
            LOG.warning("%s (%d times)", message, n) if n > 1 else LOG.warning("%s", message)

    _acting: Action | None = None
    _failing: Sequence[Finding] = ()
