"""Default bounds of quantised sides, and what digests of quantised files are worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onepolicy.engines.model_files import weight_quantization
from onepolicy.errors import UsageError
from onepolicy.types import Scoring, Values
from onepolicy.verdict import fingerprint_findings, quantised_preset


def side(**fingerprint: Any) -> Scoring:
    return Scoring(Values(np.zeros(1)), fingerprint=fingerprint)


@pytest.mark.parametrize(
    ("a", "b", "preset"),
    [
        ({}, {}, None),
        ({"kv_cache_dtype": "bfloat16"}, {"quantization": None}, None),
        ({"kv_cache_dtype": "fp8"}, {}, "fp8"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "fp8"),
        ({}, {"weight_quantization": "fp8"}, "fp8"),
        ({"quantization": "compressed-tensors", "weight_quantization": "int8"}, {}, "int8"),
        ({"kv_cache_dtype": "fp8"}, {"weight_quantization": "int8"}, "int8"),
        ({"quantization": "q8_0"}, {}, "int8"),
    ],
)
def test_which_preset(a: dict[str, Any], b: dict[str, Any], preset: str | None) -> None:
    assert quantised_preset(side(**a), side(**b)) == preset
    assert quantised_preset(side(**b), side(**a)) == preset


@pytest.mark.parametrize("words", ["int4", "q4_1", "nf4"])
def test_fewer_bits_have_no_default(words: str) -> None:
    with pytest.raises(UsageError, match="--bounds"):
        quantised_preset(side(weight_quantization=words), side())


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8}}},
                }
            },
            "int8",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}},
                }
            },
            "fp8",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "int4"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "int4"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "mxfp4"),
    ],
)
def test_what_a_config_says(config: dict[str, Any], found: str | None) -> None:
    assert weight_quantization(config) == found


def test_other_bytes_of_a_quantised_file_are_no_finding() -> None:
    a, b = {"weights_digest": "1"}, {"weights_digest": "2"}
    assert [f.code for f in fingerprint_findings(a, b)] == ["weights-differ"]
    assert fingerprint_findings(a, {**b, "weight_quantization": "int8"}) == []
