"""SmolLM2-135M, vLLM on CPU against transformers: fp32 passes `strict`, bf16 drifts there, fp16 is far nearer."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from onepolicy.check import rejudge
from onepolicy.types import Outcome, Report

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(1200)]  # each first use of a dtype starts two engines

Checked = Callable[[str], Report]
K3 = "kl_sampler_scorer_k3/mean"


def interval(report: Report, metric: str = K3) -> tuple[float, float]:
    """The 99% limits below and above a mean that is judged on the log scale."""
    m = report.measurements[metric]
    assert m.value is not None and m.std_error is not None and m.scale == "log"
    wide = math.exp(2.4 * m.std_error)
    return m.value / wide, m.value * wide


def failed(report: Report) -> set[str]:
    """The metrics whose bounds do not hold."""
    return {g.metric for g in report.gates if g.outcome is not Outcome.PASS}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_both_engines_hold_the_same_model(checked: Checked, dtype: str) -> None:
    report = checked(dtype)
    a, b = report.fingerprints["sampler"], report.fingerprints["scorer"]
    for what in ("dtype", "kv_cache_dtype"):
        assert a[what] == dtype
    for what in ("weights_digest", "tokenizer_digest", "config_digest", "vocab_size"):
        assert a[what] == b[what]
    assert b["dtype"] == dtype
    assert report.measurements[K3].n >= 1000
    assert not {"weights-differ", "vocabulary-differs", "tokenizer-differs"} & {f.code for f in report.findings}


def test_fp32_passes_strict(checked: Checked) -> None:
    report = checked("float32")
    assert (report.outcome, failed(report)) == (Outcome.PASS, set())
    assert report.measurements["abs_log_ratio/mean"].value < 2e-5
    assert rejudge(report, "fp32").outcome is Outcome.PASS


def test_bf16_drifts_under_strict_and_passes_its_own_bounds(checked: Checked) -> None:
    report = checked("bfloat16")
    assert (report.outcome, failed(report)) == (Outcome.DRIFT, {K3, "abs_log_ratio/max"})
    assert {"kl-above-bound", "token-above-bound"} <= {f.code for f in report.findings}
    own = rejudge(report, "bf16")
    assert (own.outcome, failed(own)) == (Outcome.PASS, set())


def test_fp16_passes_its_own_bounds(checked: Checked) -> None:
    own = rejudge(checked("float16"), "fp16")
    assert (own.outcome, failed(own)) == (Outcome.PASS, set())


def test_fp16_has_a_tenth_of_the_kl_of_bf16_or_less(checked: Checked) -> None:
    least_of_bf16, most_of_fp16 = interval(checked("bfloat16"))[0], interval(checked("float16"))[1]
    assert least_of_bf16 >= 10 * most_of_fp16
