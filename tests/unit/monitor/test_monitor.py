"""The loop: set-up is loud, later faults are counted, actions, micro-batches, state, rechecks."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_data import batch, healthy, torch_of, weights

import onepolicy
from onepolicy.errors import UnknownName, UsageError
from onepolicy.monitor import Halted, Monitor, SetUpError, kinds
from onepolicy.types import Outcome, Severity


def run(monitor: Monitor, steps: range, **more: Any) -> list[Any]:
    return [monitor.observe(**healthy(seed, **more)) for seed in steps]


def codes(out: Any) -> list[str]:
    return [f.code for f in out.findings]


# -- one step late -------------------------------------------------------------------------------------------------


def test_two_lines_in_a_loop() -> None:
    monitor = onepolicy.Monitor(bounds="bf16", on_drift="warn")
    outs = run(monitor, range(1, 6))
    assert [o.step for o in outs] == [None, 1, 2, 3, 4]
    assert outs[0].numbers == {} and outs[4].numbers["abs_log_ratio/mean"] == pytest.approx(0.024, rel=0.1)
    assert monitor.close().step == 5
    assert all(not o.findings and o.weight == 1.0 and not o.skip for o in outs)


def test_micro_batches_add_up_to_one_batch() -> None:
    made = batch(3, rows=30)
    parts = [{n: x[i : i + 10] for n, x in made.items()} for i in (0, 10, 20)]
    whole, by_count, by_hand = (
        Monitor(step_zero=False),
        Monitor(step_zero=False, micro_batches=3),
        Monitor(step_zero=False, micro_batches=None),
    )
    whole.observe(**made, scorer_version=5)
    steps = [by_count.observe(**part, scorer_version=5).step for part in parts]
    for part in parts:
        by_hand.observe(**part, scorer_version=5)
    by_hand.step()
    assert steps == [None] * 3
    wanted = whole.close().numbers
    for monitor in (by_count, by_hand):
        got = monitor.close().numbers
        assert set(got) == set(wanted)
        for key, value in wanted.items():
            assert got[key] == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), key


def test_torch_tensors_give_torch_weights() -> None:
    tensors = torch_of(healthy(1), torch.float32)
    out = Monitor().observe(**tensors)
    assert isinstance(out.weight, torch.Tensor) and out.weight.dtype is torch.float32 and out.weight.ndim == 0
    assert not out.weight.requires_grad


def test_no_batch_is_kept_alive() -> None:
    monitor = Monitor()
    tensors = torch_of(healthy(1), torch.float32)
    kept = [weakref.ref(x) for x in tensors.values()]
    monitor.observe(**tensors)
    del tensors
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


@pytest.mark.parametrize("path", ["numpy", "device"])
def test_inference_mode_and_training_mix(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Observed where rollouts are scored, its weight used where the loss is made."""
    from onepolicy.monitor import kinds, observe

    tensors = torch_of(healthy(1), torch.float32)
    if path == "device":
        device = kinds.TorchKind(tensors["mask"])
        monkeypatch.setattr(observe, "kind_of", lambda _: device)
    monitor = Monitor(micro_batches=2, on_drift="skip_batch")
    with torch.inference_mode():
        monitor.observe(**{n: x.clone() for n, x in tensors.items()})
    out = monitor.observe(**tensors)
    with torch.inference_mode():
        monitor.observe(**tensors)
        out = monitor.observe(**tensors)
    loss = torch.ones(3, requires_grad=True)
    (out.weight * loss).sum().backward()
    assert loss.grad is not None and monitor.warnings == {}


def test_bypass_mode() -> None:
    made = healthy(1)
    monitor = Monitor()
    monitor.observe(made["sampler_logprobs"], None, made["mask"], current_logprobs=made["old_logprobs"])
    other = Monitor()
    other.observe(**made)
    assert monitor.close().numbers["kl_sampler_scorer_k3/mean"] == other.close().numbers["kl_sampler_scorer_k3/mean"]


def test_bypass_mode_with_grad() -> None:
    """The current policy's own values stand in old's place; the monitor takes them without their graph."""
    tensors = torch_of(healthy(1), torch.float32)
    current = tensors["old_logprobs"].clone().requires_grad_()
    monitor = Monitor()
    out = monitor.observe(tensors["sampler_logprobs"], None, tensors["mask"], current_logprobs=current)
    (out.weight * current[tensors["mask"]].sum()).backward()
    assert current.grad is not None and monitor.warnings == {}
    plain = Monitor()
    plain.observe(**tensors)
    assert monitor.close().numbers["log_ratio/mean"] == plain.close().numbers["log_ratio/mean"]
    swapped = {**tensors, "old_logprobs": current}
    with pytest.raises(SetUpError, match="old_logprobs requires grad"):
        Monitor().observe(**swapped)


def test_a_current_policy_with_grad_is_normal() -> None:
    tensors = torch_of(healthy(1), torch.float32)
    current = tensors["old_logprobs"].clone().requires_grad_()
    monitor = Monitor()
    out = monitor.observe(**tensors, current_logprobs=current)
    (out.weight * current[tensors["mask"]].sum()).backward()
    assert current.grad is not None and monitor.close().numbers["update.bit_equal/share"] == 1.0


# -- loud at set-up ------------------------------------------------------------------------------------------------


def _with(**change: Any) -> dict[str, Any]:
    return {**healthy(1, rows=8, tokens=6), **change}


ONES = np.ones((8, 6))
BAD: list[tuple[dict[str, Any], str]] = [
    (
        _with(old_logprobs=-ONES[:, :5]),
        r"old_logprobs has shape \(8, 5\), sampler_logprobs \(8, 6\); wanted one \[B, T\]",
    ),
    (_with(mask=ONES[:4] > 0), r"mask has shape \(4, 6\)"),
    (_with(mask=ONES.astype(int).astype(str)), r"mask has dtype <U\d+, wanted bool"),  # "0" would be true
    (_with(sampler_logprobs=-ONES[0]), r"sampler_logprobs has shape \(6,\), wanted padded \[B, T\]"),
    (_with(sampler_logprobs=-ONES.astype(int)), "sampler_logprobs has dtype int64, wanted floating point"),
    (_with(old_logprobs=None), "old_logprobs is None: wanted them, or current_logprobs"),
    (_with(old_logprobs=torch.zeros(8, 6)), "old_logprobs is a Tensor, sampler_logprobs a ndarray; wanted one kind"),
    (_with(sampler_logprobs=[[1.0]]), r"sampler_logprobs is a list, wanted a torch tensor or numpy array"),
    (_with(mask=ONES * 0), "the mask of the first step selects no token"),
    (_with(sampler_logprobs=ONES * np.nan), "100% of the sampler log-probs under the mask are NaN"),
    (_with(old_logprobs=ONES * 0.4), "100% of the old log-probs are above 0 in the first step; .*probabilities"),
    (_with(advantages=np.ones(5)), r"advantages has shape \(5,\), wanted \[B\] = \(8,\) or \[B, T\] = \(8, 6\)"),
    (_with(policy_version=np.ones((6, 8))), "policy_version has shape"),
    (_with(correction=object()), "correction is a object, wanted .weights and .keep"),
]


@pytest.mark.parametrize(("given", "says"), BAD, ids=range(len(BAD)))
def test_the_first_call_is_loud(given: dict[str, Any], says: str) -> None:
    monitor = Monitor()
    with pytest.raises(SetUpError, match=says):
        monitor.observe(**given)
    assert monitor.observe(**healthy(2)).step is None  # and once it is mended, it goes on
    assert monitor.observe(**healthy(3)).step == 1


def test_grad_on_the_samplers_side() -> None:
    tensors = torch_of(healthy(1), torch.float32)
    tensors["sampler_logprobs"].requires_grad_()
    with pytest.raises(SetUpError, match=r"sampler_logprobs requires grad: .*were the columns swapped"):
        Monitor().observe(**tensors)


def test_one_tensor_for_two() -> None:
    tensors = torch_of(healthy(1), torch.float32)
    for other in (tensors["sampler_logprobs"], tensors["sampler_logprobs"].detach()):
        with pytest.raises(SetUpError, match="are one array, so there is nothing to compare"):
            Monitor().observe(tensors["sampler_logprobs"], other, tensors["mask"])


def test_another_device() -> None:
    tensors = torch_of(healthy(1), torch.float32)
    with pytest.raises(SetUpError, match="mask is on meta, sampler_logprobs on cpu; wanted one device"):
        Monitor().observe(tensors["sampler_logprobs"], tensors["old_logprobs"], tensors["mask"].to("meta"))


@pytest.mark.parametrize(
    ("choices", "error", "says"),
    [
        ({"bounds": "bf61"}, UnknownName, "did you mean"),
        ({"on_drift": "stop"}, UsageError, "wanted one of warn, skip_batch, halt, or a function"),
        ({"bounds": 3}, UsageError, "wanted a preset's name, a TOML file, or a Preset"),
        ({"micro_batches": 0}, UsageError, "micro_batches is 0, wanted a whole number from 1 up"),
        ({"micro_batches": 1.5}, UsageError, "micro_batches is 1.5"),
        ({"clip": -0.2}, UsageError, "clip is -0.2, wanted one number or two"),
        ({"clip": (0.2,)}, UsageError, "wanted one number or two"),
        ({"clip": float("nan")}, UsageError, "clip is nan"),
        ({"clip": "0.2"}, UsageError, "clip is '0.2'"),
        ({"max_lag": None}, UsageError, "max_lag is None, wanted a whole number from 0 up"),
        ({"step_zero": None}, UsageError, "step_zero is None, wanted True, False"),
        ({"step_zero": -1.0}, UsageError, "step_zero is -1.0"),
        ({"timeout": 0}, UsageError, "timeout is 0, wanted a number above 0"),
        ({"sinks": 5}, UsageError, "sinks is 5, wanted a list"),
        ({"ranks": "some"}, UsageError, "wanted 'all', 'alone' or a list"),
        ({"ranks": [0, 1]}, UsageError, "torch.distributed is not initialised"),
        ({"sinks": "jsonl:/no/such/folder/m.jsonl"}, UsageError, "cannot be written"),
    ],
)
def test_choices_that_cannot_be(choices: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Monitor(**choices)


def test_choices_as_configuration_files_have_them() -> None:
    monitor = Monitor(clip=[0.2, 0.28], micro_batches=np.int64(1), sinks=None, step_zero=np.float32(0.5))  # pyright: ignore[reportArgumentType]
    assert monitor.clip == (0.2, 0.28) and monitor.micro_batches == 1
    monitor.observe(**healthy(1), advantages=np.ones(32))
    assert monitor.close().numbers["clipped/positive"] == 0.0 and monitor.warnings == {}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_version_as_one_number(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, a numpy scalar, an array of no dimension; in more than one block."""
    monkeypatch.setattr(kinds, "BLOCK_CPU", 100)
    made = healthy(1)
    made = made if kind == "numpy" else torch_of(made)
    forms: list[Any] = [
        7,
        7.0,
        np.array(7) if kind == "numpy" else torch.tensor(7),
        *([np.int64(7)] * (kind == "numpy")),
    ]
    for version in forms:
        monitor = Monitor()
        monitor.observe(**made, policy_version=version, scorer_version=9)
        assert monitor.close().numbers["lag/mean"] == 2.0


def test_a_version_that_is_not_told() -> None:
    """NaN is no version; the newest in the batch stands for it."""
    monitor = Monitor()
    monitor.observe(**healthy(1), policy_version=np.r_[np.full(16, 3), np.full(16, 4)], scorer_version=float("nan"))  # pyright: ignore[reportArgumentType]
    got = monitor.close().numbers
    assert got["lag/max"] == 1.0 and 0 < (got["lag/mean"] or 0) < 1
    with pytest.raises(SetUpError, match="scorer_version is a Tensor, wanted a plain number"):
        Monitor().observe(**torch_of(healthy(1)), policy_version=3, scorer_version=torch.tensor(3))  # pyright: ignore[reportArgumentType]


def test_a_bound_on_what_the_loop_cannot_measure(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    bound = '[[bound]]\nmetric = "{}"\nat_most = 1.0\nwhen = "{}"\nsource = "x"\ndate = "2026-12-01"\n'
    path.write_text(bound.format("sequence_log_ratio/p95", "required"))
    with pytest.raises(UsageError, match="sequence_log_ratio/p95 is required, and cannot be measured in the loop"):
        Monitor(bounds=str(path))
    path.write_text(bound.format("surprisal_sampler/excess", "if_measured"))
    with pytest.raises(UsageError, match="hold nothing that can be measured in the loop"):
        Monitor(bounds=str(path))
    path.write_text(bound.format("abs_log_ratio/p99", "required"))
    assert Monitor(bounds=str(path)).judge.bounds[0].metric == "abs_log_ratio/p99"
    with pytest.raises(UsageError, match="gap_over_floor"):
        Monitor(bounds="floor")


# -- step-0 identities ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["current_logprobs", "reference_logprobs"])
def test_one_policy_is_one_policy_before_the_first_update(column: str) -> None:
    made = healthy(1)
    same = {column: made["old_logprobs"].copy()}
    other = {column: made["old_logprobs"] - 0.2}
    Monitor().observe(**made, **same)
    words = "old and current" if column[0] == "c" else "old and reference"
    with pytest.raises(
        SetUpError, match=f"not-at-step-zero: {words} differ before the first update: mean ratio 0.8187"
    ):
        Monitor().observe(**made, **other)
    Monitor(step_zero=False).observe(**made, **other)
    Monitor(step_zero=0.3).observe(**made, **other)
    with pytest.raises(SetUpError, match="wanted at most 0"):
        Monitor(step_zero=0.0).observe(**made, **{column: made["old_logprobs"] + 1e-9})


def test_only_the_very_first_batch_is_held_to_it() -> None:
    made = healthy(1)
    monitor = Monitor(micro_batches=2)
    monitor.observe(**made, current_logprobs=made["old_logprobs"].copy())
    monitor.observe(**made, current_logprobs=made["old_logprobs"] - 0.2)  # after an update within the step
    resumed = Monitor()
    resumed.load_state_dict(monitor.state_dict())
    resumed.micro_batches = 1
    resumed.observe(**made, current_logprobs=made["old_logprobs"] - 0.2)


# -- in the loop: counted, said, nothing breaks --------------------------------------------------------------------


def test_faults_in_the_loop_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor()
    run(monitor, range(1, 3))
    with caplog.at_level(logging.WARNING, "onepolicy.monitor"):
        for given, _ in BAD:
            monitor.observe(**given)
    broken = sum("selects" not in says and "NaN" not in says and "above 0" not in says for _, says in BAD)
    assert monitor.warnings == {"observe": broken}
    said = [r.message for r in caplog.records if "observe failed, its batch is left out" in r.message]
    assert len(said) == broken.bit_length()  # at 1, 2, 4, 8, ... times
    out = run(monitor, range(3, 5))[-1]
    assert out.step == 2 + len(BAD) + 1 and out.numbers["abs_log_ratio/mean"] is not None
    assert out.numbers["monitor/faults"] == 0 and out.numbers["monitor/warnings"] == broken


def test_a_failed_call_is_a_finding_and_leaves_the_rest() -> None:
    monitor = Monitor(micro_batches=2)
    for _ in range(2):
        monitor.observe(**healthy(1))
    monitor.observe(**BAD[0][0])
    monitor.observe(**healthy(2))
    out = monitor.close()
    assert codes(out) == ["observe-failed"] and out.numbers["monitor/faults"] == 1
    assert out.findings[0].severity is Severity.WARN
    assert out.numbers["scored"] == healthy(2)["mask"].sum()


def test_a_step_of_masked_tokens_is_empty_and_harmless() -> None:
    monitor = Monitor()
    run(monitor, range(1, 12))
    empty = healthy(1)
    empty["mask"] = empty["mask"] & False
    monitor.observe(**empty)
    out = monitor.observe(**healthy(12))
    assert out.numbers["tokens"] == 0 and out.numbers["abs_log_ratio/mean"] is None and not out.findings
    assert monitor.close().numbers["abs_log_ratio/mean"] is not None


def test_judging_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor()
    run(monitor, range(1, 3))
    monkeypatch.setattr(monitor.judge, "judge", lambda merged: 1 / 0)
    run(monitor, range(3, 5))
    assert monitor.warnings == {"judge": 2}


def test_a_sink_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def write(self, row: Any) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    monitor = Monitor(sinks=[Full()])
    out = run(monitor, range(1, 7))[-1]
    assert monitor.warnings == {"sink": 5} and out.step == 5
    assert "No space left on device" in caplog.text


# -- actions -------------------------------------------------------------------------------------------------------


def drifting(monitor: Monitor, at: int = 4, steps: int = 9) -> list[Any]:
    return [monitor.observe(**healthy(s, gap=0.5 if s >= at else 0.03)) for s in range(1, steps)]


def test_warn_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "onepolicy.monitor"):
        outs = drifting(Monitor(on_drift="warn"))
    first = next(o for o in outs if "kl-above-bound" in codes(o))
    assert first.step == 5  # two steps of it are enough
    assert sum("kl-above-bound" in r.message for r in caplog.records) == 1
    assert all(float(o.weight) == 1.0 for o in outs)


def test_halt_names_the_finding() -> None:
    monitor = Monitor(on_drift="halt")
    with pytest.raises(
        Halted, match=r"^step 5: kl-above-bound: kl_sampler_scorer_k3/mean is 0\.\d+, bound 0\.01"
    ) as err:
        drifting(monitor)
    assert err.value.step == 5 and err.value.exit_code == 1
    assert err.value.findings[0].outcome is Outcome.DRIFT
    assert isinstance(err.value, onepolicy.Halted)


def test_a_warning_does_not_halt() -> None:
    made = healthy(1)
    made["old_logprobs"][np.argwhere(made["mask"])[0][0], 0] = np.nan
    monitor = Monitor(on_drift="halt")
    monitor.observe(**made)
    out = monitor.observe(**made)
    assert codes(out) == ["missing-logprobs"] and out.findings[0].severity is Severity.WARN


def test_skip_batch_gives_the_bad_batch_no_weight() -> None:
    outs = drifting(Monitor(on_drift="skip_batch"), at=4, steps=7)
    assert [float(o.weight) for o in outs] == [1, 1, 1, 0, 0, 0]
    tensors = [torch_of(healthy(s, gap=0.5 if s == 3 else 0.03), torch.float32) for s in range(1, 6)]
    monitor = Monitor(on_drift="skip_batch")
    outs = [monitor.observe(**t) for t in tensors]
    grown = [o.weight for o in outs]
    assert [o.numbers.get("monitor/skipped") for o in [*outs[1:], monitor.close()]] == [0, 0, 1, 0, 0]
    assert [float(w) for w in grown] == [1, 1, 0, 1, 1] and all(w.dtype is torch.float32 for w in grown)


def test_a_function_decides() -> None:
    seen: list[tuple[list[str], float]] = []

    def on_drift(findings: Any, numbers: Any) -> str | None:
        seen.append(([f.code for f in findings], numbers["kl_sampler_scorer_k3/mean"]))
        return "halt" if len(seen) == 3 else None

    with pytest.raises(Halted):
        drifting(Monitor(on_drift=on_drift))
    assert len(seen) == 3 and seen[0][0][0] == "kl-above-bound" and seen[0][1] > 0.01


def test_a_function_that_fails_is_counted_and_one_that_halts_halts() -> None:
    monitor = Monitor(on_drift=lambda findings, numbers: 1 / 0)
    drifting(monitor)
    assert monitor.warnings["on_drift"] == 3

    def stop(findings: Any, numbers: Any) -> None:
        raise Halted(findings, 7)

    with pytest.raises(Halted, match="step 7"):
        drifting(Monitor(on_drift=stop))


# -- what only a loop sees -----------------------------------------------------------------------------------------


def test_the_ratio_starts_at_one_trap() -> None:
    made = healthy(1)
    current = made["old_logprobs"].copy()
    trapped = Monitor()
    trapped.observe(**made, current_logprobs=current)
    (finding,) = trapped.close().findings
    assert finding.code == "uncorrected-off-policy" and finding.severity is Severity.WARN
    for escape in (
        {"correction": weights(made)},  # the loss is weighted
        {"current_logprobs": np.minimum(made["old_logprobs"] - 0.01, 0)},  # the ratio is another
        {"sampler_logprobs": made["old_logprobs"].copy()},  # nothing to correct
    ):
        monitor = Monitor(step_zero=False)
        monitor.observe(**{**made, "current_logprobs": current, **escape})
        assert codes(monitor.close()) == []
    said = Monitor(corrected=True)
    said.observe(**made, current_logprobs=current)
    assert codes(said.close()) == []


def test_the_trap_with_several_updates_a_step() -> None:
    """Only the first micro-batch is before the update: that is enough."""
    made, monitor = healthy(1), Monitor(micro_batches=2)
    monitor.observe(**made, current_logprobs=made["old_logprobs"].copy())
    monitor.observe(**made, current_logprobs=np.minimum(made["old_logprobs"] - 0.01, 0))
    assert codes(monitor.close()) == ["uncorrected-off-policy"]


def versions(monitor: Monitor, newest: Any, steps: range) -> list[list[str]]:
    return [codes(monitor.observe(**healthy(s), policy_version=newest(s), scorer_version=s)) for s in steps]


def test_an_engine_that_is_never_updated() -> None:
    monitor = Monitor(max_lag=4)
    found = versions(monitor, lambda s: 1, range(1, 12))
    first = next(i for i, c in enumerate(found) if c)
    assert found[first] == ["engine-never-updated"] and first == 6  # version 1 stood still for 5 of the scorer's
    assert versions(Monitor(max_lag=4), lambda s: s, range(1, 12)) == [[]] * 11
    assert versions(Monitor(max_lag=4), lambda s: max(0, s - 3), range(1, 12)) == [[]] * 11  # stale, and moving
    assert versions(Monitor(max_lag=4), lambda s: s // 4 * 4, range(1, 30)) == [[]] * 29  # synced every fourth step


@pytest.mark.parametrize(("bad", "counted"), [(np.nan, True), (np.inf, True), (0.0, False), (1e30, False)])
def test_weights_that_are_no_numbers(bad: float, counted: bool) -> None:
    """On a scored token; what stands where nothing is trained is never looked at."""
    made = healthy(1)
    weights = np.where(made["mask"], 1.0, np.nan)
    row, token = np.argwhere(made["mask"])[50]
    weights[row, token] = bad
    monitor = Monitor()
    monitor.observe(**made, correction=weights)
    last = monitor.close()
    assert ("nonfinite-weight" in codes(last)) is counted
    assert last.numbers["corrected.nonfinite/count"] == float(counted)


def test_a_trainer_that_goes_back_is_no_engine_that_stands_still() -> None:
    """After a loss spike the run is taken up from an older checkpoint, in the same process: versions count up anew."""
    monitor = Monitor(max_lag=4)
    for i, version in enumerate([*range(30, 40), *range(20, 32)]):
        out = monitor.observe(**healthy(i), policy_version=version, scorer_version=version)
        assert "engine-never-updated" not in codes(out)


def test_values_that_are_missing() -> None:
    def at(step: int) -> dict[str, Any]:
        made = healthy(step)
        if step >= 3:
            made["sampler_logprobs"][:, ::20] = np.nan
        return made

    monitor = Monitor(on_drift="warn")
    outs = [monitor.observe(**at(step)) for step in range(1, 8)]
    by_step = {o.step: [(f.code, str(f.severity)) for f in o.findings] for o in outs}
    assert by_step[2] == [] and by_step[3] == [("missing-logprobs", "warn")]
    assert by_step[4] == [("missing-logprobs", "fail")]


# -- state ---------------------------------------------------------------------------------------------------------


def test_resumed_is_equal(tmp_path: Path) -> None:
    """Saved at any step, as JSON: numbers, findings and alarms go on as if nothing had happened."""

    def at(step: int) -> dict[str, Any]:
        return healthy(step, gap=0.03 if step < 45 else 0.075)

    whole = Monitor(on_drift="warn")
    outs, saved = [], {}
    for step in range(1, 61):
        outs.append(whole.observe(**at(step)))
        if step in (5, 33, 46):
            saved[step] = json.dumps(whole.state_dict())
    assert "gap-grows" in codes(outs[-1])
    for step, state in saved.items():
        again = Monitor(on_drift="warn")
        again.load_state_dict(json.loads(state))
        for s in range(step + 1, 61):
            out = again.observe(**at(s))
            assert (out.step, out.numbers, out.findings) == (
                outs[s - 1].step,
                outs[s - 1].numbers,
                outs[s - 1].findings,
            )


def test_states_that_do_not_fit() -> None:
    monitor = Monitor()
    run(monitor, range(1, 3))
    state = monitor.state_dict()
    with pytest.raises(UsageError, match="state is of bounds 'bf16', this monitor has 'fp32'"):
        Monitor(bounds="fp32").load_state_dict(state)
    with pytest.raises(UsageError, match="format 9"):
        Monitor().load_state_dict({**state, "format": 9})
    for broken in (None, {}, {"format": 1}):
        with pytest.raises(UsageError, match="this version reads"):
            Monitor().load_state_dict(broken)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("change", [{"judge": {}}, {"judge": None}, {"pending": [2, [[0.0] * 5]]}, {"step": None}])
def test_a_state_that_is_not_whole_changes_nothing(change: dict[str, Any]) -> None:
    monitor = Monitor()
    run(monitor, range(1, 4))
    before = json.dumps(monitor.state_dict())
    with pytest.raises(UsageError, match="state is not whole, or of other bounds"):
        monitor.load_state_dict({**monitor.state_dict(), **change})
    assert json.dumps(monitor.state_dict()) == before


def test_a_state_of_other_bounds_under_one_name(tmp_path: Path) -> None:
    """A file of bounds that was edited: a limit may move, what is judged may not."""
    path = tmp_path / "mine.toml"
    bound = '[[bound]]\nmetric = "{}"\nat_most = {}\nwhen = "required"\nsource = "x"\ndate = "2026-12-01"\n'
    path.write_text(bound.format("abs_log_ratio/mean", 0.1))
    monitor = Monitor(str(path))
    run(monitor, range(1, 4))
    state = monitor.state_dict()
    path.write_text(bound.format("abs_log_ratio/mean", 0.2))
    Monitor(str(path)).load_state_dict(state)
    path.write_text(bound.format("abs_log_ratio/p99", 0.2))
    with pytest.raises(UsageError, match="it judged abs_log_ratio/mean, this one abs_log_ratio/p99"):
        Monitor(str(path)).load_state_dict(state)


def test_state_in_the_middle_of_a_step_says_so() -> None:
    monitor = Monitor(micro_batches=2)
    monitor.observe(**healthy(1))
    monitor.state_dict()
    assert monitor.warnings == {"state": 1}


# -- rechecks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [False, Outcome.DRIFT, "drift", pytest.param(None, id="none"), True, "raises"])
def test_a_check_every_few_steps(answer: Any) -> None:
    asked: list[int] = []

    def check() -> Any:
        asked.append(1)
        return 1 / 0 if answer == "raises" else answer

    monitor = Monitor()
    monitor.every(3, check)
    outs = [*run(monitor, range(1, 8)), monitor.close()]
    assert len(asked) == 2
    bad = answer is False or answer == "drift"
    found = [o.step for o in outs if "recheck-drifted" in codes(o)]
    assert found == ([4, 7] if bad else [])  # asked after steps 3 and 6, in the vector of the next one
    assert monitor.warnings == ({"recheck": 2} if answer == "raises" else {})


def test_two_engines_are_checked_again() -> None:
    monitor = Monitor()
    sampler = "fake:?seed=1&dtype=bfloat16"
    monitor.every(2, (sampler, sampler + "&order=pairwise&fault=stale"), name="live")
    outs = [*run(monitor, range(1, 4)), monitor.close()]
    assert [codes(o) for o in outs] == [[], [], [], ["recheck-drifted"]]


def test_a_check_that_is_none() -> None:
    with pytest.raises(UsageError, match="wanted a function, or two engines"):
        Monitor().every(3, "vllm:tiny")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="steps is 0"):
        Monitor().every(0, lambda: True)


# -- imports -------------------------------------------------------------------------------------------------------

ONLY_NUMPY = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first not in sys.stdlib_module_names and first not in ("numpy", "onepolicy"):
            raise ImportError(f"refused {name}")

sys.meta_path.insert(0, Refuse())
import onepolicy
assert "numpy" not in sys.modules
import numpy as np
monitor = onepolicy.Monitor(sinks=[sys.argv[1]])
a = -np.ones((4, 8))
for _ in range(3):
    out = monitor.observe(a, a - 0.01, a < 0)
print(out.step, out.numbers["abs_log_ratio/mean"])
assert "torch" not in sys.modules
"""


def test_numpy_alone_is_enough(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ONLY_NUMPY, f"jsonl:{tmp_path}/m.jsonl"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    step, mean = ran.stdout.split()
    assert step == "2" and float(mean) == pytest.approx(0.01)


def test_the_package_gives_its_lazy_names() -> None:
    assert {"Monitor", "Halted", "corrections"} <= set(dir(onepolicy))
    with pytest.raises(AttributeError, match="no attribute 'Moniter'"):
        _ = onepolicy.Moniter  # pyright: ignore[reportAttributeAccessIssue]
