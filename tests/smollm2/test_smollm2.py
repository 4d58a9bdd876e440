"""SmolLM2-135M, vLLM on the CPU against transformers: what the presets say of a real pair. `make smollm2` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from near import near
from onepolicy import audit
from onepolicy.check import Choices, check, rejudge
from onepolicy.engines.base import SamplingParams
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts
from onepolicy.storage import write
from onepolicy.types import Outcome, Report, Severity

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(900)]

MODEL = Path(__file__).resolve().parents[2] / "build" / "models" / "smollm2"
PARAMS = SamplingParams(max_tokens=48, seed=1)


@pytest.fixture(scope="module")
def checked() -> dict[str, tuple[Report, Rollouts]]:
    """dtype -> the check of one recording, and its tokens scored: one start of each engine a dtype."""
    assert MODEL.is_dir(), "run: make models"
    out: dict[str, tuple[Report, Rollouts]] = {}
    for dtype in ("float32", "bfloat16", "float16"):
        rollouts = record_rollouts(f"vllm:{MODEL}?dtype={dtype}", params=PARAMS)
        # the pair alone: the legs have a file of their own
        with near():
            out[dtype] = check(rollouts, f"hf:{MODEL}?dtype={dtype}", choices=Choices(legs=()))
    return out


@pytest.fixture(scope="module")
def reports(checked: dict[str, tuple[Report, Rollouts]]) -> dict[str, Report]:
    return {dtype: report for dtype, (report, _) in checked.items()}


def value(report: Report, key: str) -> float:
    got = report.measurements[key].value
    assert got is not None
    return got


def test_enough_tokens_were_drawn(reports: dict[str, Report]) -> None:
    for report in reports.values():
        assert report.measurements["abs_log_ratio/mean"].n > 2000
        assert report.measurements["abs_log_ratio/mean"].effective_clusters > 40


@pytest.mark.parametrize("preset", ["strict", "fp32"])
def test_fp32_passes(reports: dict[str, Report], preset: str) -> None:
    report = rejudge(reports["float32"], preset)
    assert report.outcome is Outcome.PASS
    assert [f.code for f in report.findings if f.severity is not Severity.INFO] == []


def test_bf16_drifts_under_strict_and_passes_bf16(reports: dict[str, Report]) -> None:
    assert rejudge(reports["bfloat16"], "strict").outcome is Outcome.DRIFT
    assert rejudge(reports["bfloat16"], "bf16").outcome is Outcome.PASS


def test_fp16_passes_fp16(reports: dict[str, Report]) -> None:
    assert rejudge(reports["float16"], "fp16").outcome is Outcome.PASS


def test_fp16_has_ten_times_less_kl_than_bf16(reports: dict[str, Report]) -> None:
    bf16, fp16 = (value(reports[d], "kl_sampler_scorer_k3/mean") for d in ("bfloat16", "float16"))
    assert fp16 * 10 <= bf16


def test_the_default_preset_is_that_of_the_dtype(reports: dict[str, Report]) -> None:
    assert {d: r.preset for d, r in reports.items()} == {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def test_both_sides_loaded_the_same_weights(reports: dict[str, Report]) -> None:
    for report in reports.values():
        digests = {f.get("weights_digest") for f in report.fingerprints.values()}
        assert len(digests) == 1
        assert None not in digests


@pytest.mark.parametrize(("dtype", "code"), [("bfloat16", "bf16-noise"), ("float32", "rounding-noise")])
def test_a_saved_dump_is_called_consistent_with_its_precision(
    checked: dict[str, tuple[Report, Rollouts]], tmp_path: Path, dtype: str, code: str
) -> None:
    write(checked[dtype][1], tmp_path / "dump.parquet")
    report = audit.audit([tmp_path], audit.Choices(workers=1))
    assert report.outcome is Outcome.PASS
    assert [f.code for f in report.findings if f.severity is not Severity.INFO] == []
    assert code in {f.code for f in report.findings}
