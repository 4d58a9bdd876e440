"""Every leg both ways: it fires on its own fault, and stays silent on healthy engines and on the faults of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onepolicy.engines.base import SamplingParams
from onepolicy.types import LegResult, Outcome, Ran, Report, Severity

Checked = Callable[..., Report]


def leg(report: Report, key: str) -> LegResult:
    return next(x for x in report.legs if x.key == key)


def failing(report: Report) -> set[str]:
    return {f.code for f in report.findings if f.severity is Severity.FAIL}


def test_a_healthy_pair_passes_every_leg(checked: Checked) -> None:
    report = checked()
    assert report.outcome is Outcome.PASS
    assert failing(report) == set()
    ran = [x for x in report.legs if x.ran is Ran.DONE]
    assert len(ran) >= 15
    assert {x.outcome for x in ran} == {Outcome.PASS}


def test_what_cannot_be_run_is_listed_with_the_reason(checked: Checked) -> None:
    report = checked()
    assert leg(report, "sampler-cache").ran is Ran.NOT
    assert "no switch 'cache'" in leg(report, "sampler-cache").why
    assert "--reference" in leg(report, "reference-scorer").why


#: options of the scorer -> the finding that names the fault
FAULTS = {
    "&fault=leaks_neighbours": "depends-on-batch",
    "&fault=leaks_neighbours&batch_size=1": "depends-on-packing",
    "&fault=left_padding": "depends-on-padding",
    "&fault=decode_cache": "depends-on-path",
    "&fault=unstable": "not-repeatable",
    "&fault=eps_norm": "different-function",
}
#: faults that act on the scorer's own path only: the pair itself is sound
SILENT: dict[str, set[str]] = {
    "&fault=left_padding": {"depends-on-padding"},
    "&fault=decode_cache": {"depends-on-path"},
    "&fault=leaks_neighbours&batch_size=1": {"depends-on-packing", "depends-on-batch"},
}


@pytest.mark.parametrize(("fault", "code"), FAULTS.items())
def test_a_fault_is_named_by_its_leg(checked: Checked, fault: str, code: str) -> None:
    report = checked(scorer=fault)
    assert report.outcome is Outcome.DRIFT
    assert code in failing(report)


@pytest.mark.parametrize(("fault", "only"), SILENT.items())
def test_other_legs_stay_silent(checked: Checked, fault: str, only: set[str]) -> None:
    assert failing(checked(scorer=fault)) == only


def test_a_broken_kernel_does_not_raise_the_floor(checked: Checked) -> None:
    healthy, broken = checked().floor, checked(scorer="&fault=decode_cache").floor
    assert healthy is not None and broken is not None and healthy.rms and broken.rms
    assert "KV decode" in broken.why
    assert broken.rms < 1.2 * healthy.rms


def test_rounding_at_the_edge_of_the_nucleus_is_a_warning(checked: Checked) -> None:
    """Two sound kernels keep other tokens at the edge of a top-p set; a scorer that cuts deeper is no rounding."""
    params = SamplingParams(max_tokens=48, seed=3, top_p=0.9)
    report = checked(params=params, legs=["scorer-path", "contract"])
    found = [f for f in report.findings if f.code == "support-violation"]
    assert found and all(f.severity is Severity.WARN and "own kernels" in f.message for f in found)
    assert failing(report) == set()
    assert leg(report, "scorer-path").outcome is not Outcome.DRIFT
    assert report.fingerprints["sampler"]["logprob_contract"]["meaning"] == "processed"


def test_a_token_that_the_scorer_excludes_is_still_a_failure(checked: Checked) -> None:
    assert "support-violation" in failing(checked(sampler="&fault=support"))
