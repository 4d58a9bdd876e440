"""One short pass over what a GPU changes: `make gpu`. Deselected everywhere else; written for a CUDA build of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from build import random_rollouts
from onepolicy.align import align
from onepolicy.check import check
from onepolicy.engines.base import SamplingParams
from onepolicy.estimate import measure
from onepolicy.metrics import METRICS
from onepolicy.padded import padded_metrics
from onepolicy.record import record_rollouts
from onepolicy.reduce import reduce
from onepolicy.types import Outcome

pytestmark = pytest.mark.gpu

PLAIN = [m for m in METRICS.values() if m.reducer == "sum" and m.uses in ("scored", "estimator")]


def test_the_terms_on_the_device() -> None:
    rollouts = random_rollouts(4, sequences=16)
    wanted = measure(reduce(align(rollouts), METRICS.values()))
    width = int(rollouts.lengths.max())
    columns = []
    for x in (rollouts.scorings["sampler"].logprobs.values, rollouts.scorings["old"].logprobs.values, rollouts.drawn):
        out = np.zeros((len(rollouts), width), dtype=x.dtype)
        for i in range(len(rollouts)):
            out[i, : rollouts.lengths[i]] = x[rollouts.sequence(i)]
        columns.append(torch.tensor(out, device="cuda"))
    for key, value in padded_metrics(*columns, PLAIN).items():
        assert value == pytest.approx(wanted[key].value, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("dtype", "preset"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_hf_on_the_device_against_hf_on_the_cpu(dtype: str, preset: str) -> None:
    drawn = record_rollouts(f"hf:tiny?dtype={dtype}&device=cpu", params=SamplingParams(max_tokens=32))
    report, _ = check(drawn, f"hf:tiny?dtype={dtype}&device=cuda", bounds=preset)
    assert report.outcome is Outcome.PASS


@pytest.mark.parametrize(("dtype", "preset"), [("float32", "strict"), ("bfloat16", "bf16")])
def test_vllm_against_hf_on_the_device(dtype: str, preset: str) -> None:
    drawn = record_rollouts(f"vllm:tiny?dtype={dtype}", params=SamplingParams(max_tokens=64))
    report, _ = check(drawn, f"hf:tiny?dtype={dtype}&device=cuda", bounds=preset)
    assert report.outcome is Outcome.PASS
