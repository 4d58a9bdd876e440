"""SmolLM2-135M, vLLM on the CPU against transformers: the whole check, and faults of the scorer (`make smollm2`).

The sampler is started once for each setting; what it gave is kept, and so is the floor of the sound scorer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faults import faults, model_with
from near import near
from onepolicy.check import Choices, check_engines
from onepolicy.engines.base import SamplingParams
from onepolicy.suite import Suite, load
from onepolicy.types import LegResult, Outcome, Report, Severity

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(1800)]

MODEL = Path(__file__).resolve().parents[2] / "build" / "models" / "smollm2"
# the adapter, another layer count and temperature: `tests/engines/test_faults_on_real_engines.py`
FAULTS = {
    name: fault
    for name, fault in faults(50000.0, "model.layers.15.mlp.down_proj.weight", 29).items()
    if name not in ("adapter merged twice", "one layer fewer")
}
FUNCTION = ("same-function", "same-function-settings")
FLOOR = ("gap_over_floor/rms", "gap_over_floor/p50", "gap_over_floor/p95")


def some(texts: int = 0) -> Suite:
    """30 written prompts; short texts."""
    suite = load("default")
    short = [t for t in suite.texts if t.made is None and t.reply and len(t.reply) < 400][:texts]
    prompts = tuple(p for p in suite.prompts if p.prompt)[:30]
    return replace(suite, version=f"{suite.version}-some-{texts}", prompts=prompts, texts=tuple(short))


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    assert MODEL.is_dir(), "run: make models"
    root = tmp_path_factory.mktemp("kept")
    done: dict[str, Report] = {}

    def run(
        scorer: str, sampler: str = "", legs: Any = FUNCTION, texts: int = 0, bounds: str | None = None, **more: Any
    ) -> Report:
        sampling = {"max_tokens": 48, "seed": 7, **{k: more.pop(k) for k in ("temperature", "top_p") if k in more}}
        sampler = sampler or f"vllm:{MODEL}"
        key = repr((scorer, sampler, legs, texts, bounds, sampling, more))
        if key not in done:
            keep = root / f"{abs(hash((sampler, str(sampling), texts))):x}"
            params = SamplingParams(**sampling)
            choices = Choices(legs, suite=some(texts), params=params, keep=keep, timeout=1800.0, **more)
            with near():
                done[key] = check_engines(sampler, scorer, bounds=bounds, choices=choices)[0]
        return done[key]

    return run


def leg(report: Report, key: str) -> LegResult:
    return next(x for x in report.legs if x.key == key)


def failing(report: Report) -> set[str]:
    return {f.code for f in report.findings if f.severity is Severity.FAIL}


def drifted(report: Report) -> set[str]:
    return {g.metric for g in report.gates if g.outcome is Outcome.DRIFT}


def test_default_bounds_pass_and_the_gap_is_rounding(checked: Callable[..., Report]) -> None:
    report = checked(f"hf:{MODEL}", legs=["same-function", "same-function-texts", "fixed-texts", "contract"], texts=24)
    assert report.outcome is Outcome.PASS
    assert report.preset == "floor + bf16"
    ratio = report.measurements["gap_over_floor/rms"]
    assert ratio.value == pytest.approx(1.02, abs=0.12)
    assert ratio.upper is not None and ratio.upper <= 1.25
    assert {leg(report, k).outcome for k in ("same-function", "same-function-texts", "fixed-texts")} == {Outcome.PASS}
    assert leg(report, "same-function").measurements["abs_log_ratio/mean"].value < 1e-4
    assert report.floor is not None and report.floor.rms == pytest.approx(0.07, abs=0.02)
    assert 0 < report.context["floor_fault"] < 2 * report.floor.rms
    assert leg(report, "contract").facts["meaning"] == "processed"


def test_a_scorer_in_float32_is_never_called_beyond_rounding(checked: Callable[..., Report]) -> None:
    report = checked(f"hf:{MODEL}?dtype=float32")
    assert not failing(report) & {"beyond-rounding", "beyond-rounding-late"}
    if report.floor is not None and report.floor.source == "measured":
        assert report.outcome is Outcome.PASS
        assert all(v.b == "full forward in float32" for v in report.floor.variants)
    else:
        assert "floor-incomplete" in {f.code for f in report.findings}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_drifts_in_float32_and_in_production_if_it_is_large(
    checked: Callable[..., Report], tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    fault, folder = FAULTS[name], tmp_path_factory.getbasetemp()
    model = model_with(fault, MODEL, folder / name.replace(" ", "-"))
    # the floor of the sound model, so that it is measured once
    report = checked(f"hf:{model}" + (f"?{fault.options}" if fault.options else ""), floor=f"hf:{MODEL}")
    assert report.outcome is Outcome.DRIFT
    assert "different-function" in failing(report)
    assert leg(report, "same-function").outcome is Outcome.DRIFT
    if fault.large:
        assert drifted(report) & set(FLOOR)
    else:
        assert not drifted(report)
        assert report.context["floor_fault"] > 0


def test_a_nucleus_that_the_scorer_ignores(checked: Callable[..., Report]) -> None:
    """Drift by the mean ratio, about the kept mass, and the contract leg names it. (With the floor, a wider nucleus and
    the float32 values, which agree without the nucleus and not with it: on the packaged model.)"""
    report = checked(f"hf:{MODEL}?semantics=raw", legs=["contract"], bounds="bf16", top_p=0.8)
    found = next(f for f in report.findings if f.code == "logprob-contract")
    assert found.severity is Severity.FAIL
    assert "semantics=declared" in found.advice
    assert "ratio_bias/mean" in drifted(report)
    assert "ratio-biased" in failing(report)
    ratio = report.measurements["ratio/mean"]
    # of a nucleus of 0.8 between 0.8 and 1 is kept; rounding moves the mean by thousandths
    assert ratio.lower is not None and ratio.upper is not None
    assert 0.8 < ratio.lower < ratio.upper < 0.9
