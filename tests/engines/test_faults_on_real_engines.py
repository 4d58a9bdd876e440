"""Real vLLM against real transformers on the packaged models: a sound pair passes every leg, each fault drifts where it
should. The sampler is started once for each setting; what it gave is kept and taken by every check."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fault_scorers
import onepolicy
from faults import ONE_LORA, Fault, faults, model_with
from near import near
from onepolicy.check import Choices, check_engines, rejudge
from onepolicy.engines.base import SamplingParams
from onepolicy.errors import ContentError
from onepolicy.suite import Suite, load
from onepolicy.types import LegResult, Outcome, Ran, Report, Severity

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

MODELS = Path(onepolicy.__file__).parent / "models"
TINY = MODELS / "tiny"
FAULTS = faults(5000.0, "model.layers.2.mlp.down_proj.weight", 3)
FUNCTION = ("same-function", "same-function-settings")


def small() -> Suite:
    """Written prompts, and no texts."""
    suite = load("default")
    return replace(
        suite, version=f"{suite.version}-written", prompts=tuple(p for p in suite.prompts if p.prompt), texts=()
    )


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Report]:
    """`checked(scorer, sampler=..., legs=..., **sampling)`: one start of the sampler for each setting. Scorers of
    transformers are in this process, unless every leg is asked for."""
    root = tmp_path_factory.mktemp("kept")

    def run(scorer: str, sampler: str = "vllm:tiny", legs: Any = FUNCTION, suite: Any = None, **more: Any) -> Report:
        named = ("temperature", "top_p", "max_tokens")
        sampling = {"max_tokens": 32, "seed": 4, **{k: more.pop(k) for k in named if k in more}}
        name = f"{abs(hash((sampler, str(sampling), suite is None))):x}"
        choices = Choices(legs, suite=suite or small(), params=SamplingParams(**sampling), keep=root / name, **more)
        with nullcontext() if legs is None else near():
            return check_engines(sampler, scorer, choices=choices)[0]

    return run


def leg(report: Report, key: str) -> LegResult:
    return next(x for x in report.legs if x.key == key)


def failing(report: Report) -> set[str]:
    return {f.code for f in report.findings if f.severity is Severity.FAIL}


def gates_that_drift(report: Report) -> set[str]:
    return {g.metric for g in report.gates if g.outcome is Outcome.DRIFT}


@pytest.fixture(scope="module")
def healthy(checked: Callable[..., Report]) -> Report:
    return checked("hf:tiny", legs=None)


def test_a_sound_pair_passes_every_leg(healthy: Report) -> None:
    assert failing(healthy) == set()
    assert healthy.outcome is Outcome.PASS
    ran = {x.key for x in healthy.legs if x.ran is Ran.DONE}
    # few tokens may differ at all where only the batch does: such a leg is undecided, and far below its bound
    undecided = [g for x in healthy.legs if x.outcome is Outcome.INCONCLUSIVE for g in x.gates if g.why]
    assert all(g.value is not None and g.value < g.bound / 2 for g in undecided)
    wanted = {"same-function", "contract", "sampler-again", "sampler-batch", "sampler-path", "sampler-cache"}
    wanted |= {"scorer-again", "scorer-batch", "scorer-padding", "scorer-packing", "scorer-path", "scorer-attention"}
    assert wanted <= ran
    assert not {x.key for x in healthy.legs if x.outcome is Outcome.DRIFT or x.ran is Ran.FAILED}


def test_its_gap_is_what_rounding_predicts(healthy: Report) -> None:
    ratio = healthy.measurements["gap_over_floor/rms"]
    assert healthy.floor is not None and healthy.floor.source == "measured"
    assert len(healthy.floor.variants) == 3
    assert ratio.value == pytest.approx(1.0, abs=0.12)
    assert ratio.upper is not None and ratio.upper < 1.25
    assert 0 < healthy.context["floor_fault"] < 2 * healthy.floor.rms


def test_a_warm_cache_was_really_hit(healthy: Report) -> None:
    facts = leg(healthy, "sampler-cache").facts
    assert facts["cached_tokens_a"] == 0


def test_the_contract_of_vllm_is_found(healthy: Report) -> None:
    facts = leg(healthy, "contract").facts
    assert facts["meaning"] == "processed"
    assert facts["prompt_logprobs"]["gap_to_raw"] < 0.05


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_drifts_in_float32_and_in_production_if_it_is_large(
    checked: Callable[..., Report], tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    fault = FAULTS[name]
    folder = tmp_path_factory.getbasetemp()
    model = model_with(fault, TINY, folder / name.replace(" ", "-"))
    sampler = "vllm:tiny"
    if name == "adapter merged twice":
        sampler = f"vllm:{model_with(Fault(edit=ONE_LORA), TINY, folder / 'adapter-merged-once')}"
    report = checked(f"hf:{model}?{fault.options}" if fault.options else f"hf:{model}", sampler)
    assert report.outcome is Outcome.DRIFT
    assert leg(report, "same-function").outcome is Outcome.DRIFT
    assert "different-function" in failing(report)
    assert leg(report, "same-function").place.startswith("first bad token: record ")
    if fault.large:
        assert "gap_over_floor/rms" in gates_that_drift(report)
    else:
        assert gates_that_drift(report) == set()
        assert report.context["floor_fault"] > 0


@pytest.mark.parametrize(("setting", "value"), [("temperature", 0.7), ("top_p", 0.95)])
def test_a_scorer_that_ignores_the_settings_of_the_draw(
    checked: Callable[..., Report], setting: str, value: float
) -> None:
    sound = checked("hf:tiny", legs=[*FUNCTION, "contract"], **{setting: value})
    assert leg(sound, "same-function-settings").outcome is Outcome.PASS
    assert not failing(sound) & {"logprob-contract", "different-function", "ratio-biased"}
    report = checked("hf:tiny?semantics=raw", legs=[*FUNCTION, "contract"], **{setting: value})
    assert leg(report, "same-function").outcome is Outcome.PASS
    assert leg(report, "same-function-settings").outcome is Outcome.DRIFT
    found = next(f for f in report.findings if f.code == "logprob-contract")
    assert "semantics=declared" in found.advice
    assert "gap_over_floor/rms" in gates_that_drift(report)
    if setting == "top_p":  # about the kept mass; at another temperature the mean ratio stays 1
        assert report.measurements["ratio/mean"].value == pytest.approx(0.958, abs=0.01)
        assert "ratio_bias/mean" in gates_that_drift(report)
        # the mean ratio alone sees so wide a nucleus: held against fixed bounds, KL and the mean gap pass
        fixed = rejudge(report, "bf16")
        outcomes = {g.metric: g.outcome for g in fixed.gates}
        assert outcomes["kl_sampler_scorer_k3/mean"] is outcomes["abs_log_ratio/mean"] is Outcome.PASS
        assert outcomes["ratio_bias/mean"] is Outcome.DRIFT
        assert {"logprob-contract", "ratio-biased"} <= failing(fixed)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setenv("FAULTY_MODEL", str(TINY))
    monkeypatch.setenv("PYTHONPATH", str(Path(fault_scorers.__file__).parent))
    return lambda dtype: monkeypatch.setenv("FAULTY_DTYPE", dtype)


@pytest.mark.parametrize("name", ["shifted", "doubled_bos"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_users_scorer_with_a_fault(
    checked: Callable[..., Report], faulty: Callable[[str], None], name: str, dtype: str
) -> None:
    faulty(dtype)
    legs = FUNCTION if dtype == "float32" else ["scorer-again"]
    report = checked(f"callable:fault_scorers:{name}?dtype={dtype}", f"vllm:tiny?dtype={dtype}", legs, floor="hf:tiny")
    assert report.outcome is Outcome.DRIFT
    if dtype == "float32":
        assert "different-function" in failing(report)
    else:
        assert "gap_over_floor/rms" in gates_that_drift(report)


def test_a_document_mask_that_is_missing_is_told_from_rounding(
    checked: Callable[..., Report], faulty: Callable[[str], None]
) -> None:
    faulty("bfloat16")
    legs = ["scorer-batch", "scorer-order", "scorer-again"]
    sound = checked("callable:fault_scorers:sound?dtype=bfloat16", legs=legs, floor="hf:tiny")
    assert sound.outcome is Outcome.PASS
    report = checked("callable:fault_scorers:unmasked?dtype=bfloat16", legs=legs, floor="hf:tiny")
    assert {"depends-on-batch", "depends-on-order"} <= failing(report)
    assert leg(report, "scorer-again").outcome is Outcome.PASS
    place = leg(report, "scorer-batch").place
    # the first sequence of a row has nothing before it; the second is wrong from its first scored token on
    assert place.startswith("first bad token: record ") and place.endswith("position 1")


def test_a_scorer_that_does_not_sort_back(checked: Callable[..., Report], faulty: Callable[[str], None]) -> None:
    """Its values belong to sequences of other lengths: one line, and no number."""
    faulty("bfloat16")
    with pytest.raises(ContentError, match=r"record '.*': got \d+ values for \d+ tokens"):
        checked("callable:fault_scorers:sorted_by_length?dtype=bfloat16", legs=["scorer-order"], floor="hf:tiny")


def test_rope_scaling_that_acts_late_is_caught_by_position(checked: Callable[..., Report]) -> None:
    """Token by token, the long factors are taken from position 128 on and what came before stays right."""
    ones, fours = json.dumps([1.0] * 16), json.dumps([4.0] * 16)
    scaling = (
        f'{{"rope_type": "longrope", "factor": 4, "attention_factor": 1.0, "short_factor": {ones}, '
        f'"long_factor": {fours}, "original_max_position_embeddings": 128}}'
    )
    fault = f'hf:tiny?path=decode&batch_size=1&overrides={{"rope_scaling": {scaling}}}'
    report = checked(fault, max_tokens=96)
    assert report.outcome is Outcome.DRIFT
    early = {f"gap_over_floor_from_{low}/rms" for low in (0, 16, 32, 64)}
    assert "gap_over_floor_from_128/rms" in gates_that_drift(report)
    assert not gates_that_drift(report) & early
    found = next(f for f in report.findings if f.code == "beyond-rounding-late")
    assert "from position 128" in found.message
    assert leg(report, "same-function").outcome is Outcome.DRIFT
    place = leg(report, "same-function").place
    assert int(place.rpartition(" ")[2]) >= 128


def test_mixture_models_are_held_against_rounding_where_the_experts_are_equal(checked: Callable[..., Report]) -> None:
    report = checked("hf:tiny-moe", "vllm:tiny-moe", legs=["same-function", "routes", "scorer-path"])
    assert failing(report) == set()
    assert leg(report, "same-function").outcome is Outcome.PASS
    facts = leg(report, "routes").facts
    assert 0 < facts["flipped"] < 0.1
    assert facts["ratio"] < 1.5
    assert report.measurements["gap_over_floor/rms"].n < report.measurements["abs_log_ratio/mean"].n


@pytest.mark.parametrize("name", ["rope base", "norm epsilon", "1% noise on one matrix"])
def test_faults_of_the_mixture_model(checked: Callable[..., Report], name: str) -> None:
    fault = faults(5000.0, "model.layers.2.self_attn.o_proj.weight", 3)[name]
    report = checked(f"hf:tiny-moe?{fault.options}", "vllm:tiny-moe")
    assert leg(report, "same-function").outcome is Outcome.DRIFT
    assert bool(gates_that_drift(report)) is fault.large
