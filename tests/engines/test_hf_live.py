"""Live switches of the transformers engine: what must not change a number in fp32, and the known faults that do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hf_reference import chosen, expected, plain_logits, texts

from onepolicy import models
from onepolicy.engines.base import Engine
from onepolicy.engines.hf_forward import packs
from onepolicy.engines.open import open_engine
from onepolicy.errors import EngineError, UnknownName, UsageError
from onepolicy.rollouts import Rollouts

pytestmark = pytest.mark.engines

HEALTHY = [
    {"batch_size": 1},
    {"padding_side": "left"},
    {"padding_side": "left", "attention": "eager", "batch_size": 3},
    {"packing": "packed"},
    {"packing": "packed", "attention": "eager"},
    {"packing": "packed", "attention": "flex_attention"},
    {"packing": "packed", "batch_size": 2},
    {"attention": "eager"},
    {"path": "decode"},
    {"path": "decode", "batch_size": 1, "attention": "eager"},
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine("hf:tiny?dtype=float32", in_process=True) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    """`[T]` log-probs by plain torch."""
    rollouts = texts("raw")
    return chosen(rollouts, expected(rollouts, plain_logits(models.path("tiny")), lambda z, before, n, t: z))


def gaps(engine: Engine, rollouts: Rollouts, reference: np.ndarray, using: dict[str, Any]) -> np.ndarray:
    """`[T]` absolute gap to the reference, 0 at each index 0."""
    out = engine.score(rollouts, using=using)
    assert np.array_equal(np.flatnonzero(~out.logprobs.mask()), rollouts.offsets[:-1])
    for name, value in using.items():
        assert out.fingerprint[name] == value
    return np.where(out.logprobs.mask(), np.abs(out.logprobs.values - reference), 0.0)


@pytest.mark.parametrize("using", HEALTHY, ids=str)
def test_in_fp32_no_layout_kernel_or_path_changes_a_number(
    using: dict[str, Any], engine: Engine, reference: np.ndarray
) -> None:
    gap = gaps(engine, texts("raw"), reference, using)
    assert 0 < gap.max() < 2e-5


def first_bad(rollouts: Rollouts, gap: np.ndarray) -> list[int | None]:
    """For each sequence the first position with a gap that no rounding in fp32 makes."""
    bad = [np.flatnonzero(gap[rollouts.sequence(i)] > 1e-3) for i in range(len(rollouts))]
    return [int(at[0]) if len(at) else None for at in bad]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_its_document_mask_a_row_is_wrong_from_its_second_sequence_on(
    attention: str, engine: Engine, reference: np.ndarray
) -> None:
    rollouts = texts("raw")
    gap = gaps(engine, rollouts, reference, {"packing": "unmasked", "attention": attention})
    assert first_bad(rollouts, gap) == [None, 1, None, 1, 1, 1]  # the third has one token only
    assert np.sqrt(np.mean(gap**2)) > 0.5
    gap = gaps(engine, rollouts, reference, {"packing": "unmasked", "attention": attention, "batch_size": 2})
    assert first_bad(rollouts, gap) == [None, 1, None, None, 1, None]


def test_left_padding_without_positions_spares_the_longest_alone(engine: Engine, reference: np.ndarray) -> None:
    rollouts = texts("raw")
    gap = gaps(engine, rollouts, reference, {"padding_side": "left_unpositioned"})
    assert first_bad(rollouts, gap) == [1, 1, None, None, 1, 1]
    assert np.sqrt(np.mean(gap**2)) > 0.5
    assert gaps(engine, rollouts, reference, {"padding_side": "left_unpositioned", "batch_size": 1}).max() < 2e-5


def test_what_was_used_is_said_and_then_put_back(engine: Engine) -> None:
    rollouts = texts("raw")
    out = engine.score(rollouts, using={"attention": "eager", "packing": "packed", "batch_size": 2})
    used = {k: out.fingerprint[k] for k in ("attention", "packing", "batch_size", "padding_side", "path")}
    # a packed row and a forced reply have no padding
    assert used == {"attention": "eager", "packing": "packed", "batch_size": 2, "padding_side": None, "path": "prefill"}
    assert engine.score(rollouts, using={"path": "decode"}).fingerprint["padding_side"] is None
    again = engine.score(rollouts).fingerprint
    assert [again[k] for k in used] == ["sdpa", "alone", 8, "right", "prefill"]


def test_kernels_differ_in_production_precision() -> None:
    """Legs call these distinct kernels: none may be another one under a second name."""
    rollouts = texts("raw")
    ways = [{}, {"attention": "eager"}, {"path": "decode"}, {"packing": "packed", "attention": "flex_attention"}]
    with open_engine("hf:tiny", in_process=True) as engine:
        out = [engine.score(rollouts, using=using).logprobs.values for using in ways]
        same = engine.score(rollouts).logprobs.values
    assert np.array_equal(out[0], same)
    assert all(1e-3 < np.abs(a - b).mean() < 0.1 for i, a in enumerate(out[:3]) for b in out[:i])


def test_what_cannot_be_is_one_line_and_it_works_on(engine: Engine, reference: np.ndarray) -> None:
    rollouts = texts("raw")
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"dtype": "bfloat16"}, UsageError, "'dtype' cannot change while it runs; live switches: batch_size"),
        ({"packing": "paced"}, UnknownName, "did you mean 'packed'"),
        ({"batch_size": 0}, UsageError, "batch_size=0, wanted at least 1"),
        ({"path": "decode", "packing": "packed"}, UsageError, "path=decode goes with packing=alone only"),
        ({"attention": "flash_attention_2"}, EngineError, "attention=flash_attention_2 cannot be used here"),
    ]
    for using, error, says in wrong:
        with pytest.raises(error, match=says) as caught:
            engine.score(rollouts, using=using)
        assert "\n" not in str(caught.value)
    assert gaps(engine, rollouts, reference, {"batch_size": 8}).max() < 2e-5


def test_rows_are_filled_in_order_up_to_either_limit() -> None:
    lengths = np.array([3000, 900, 1, 300, 5000, 2, 2, 2, 0])
    assert list(packs(lengths, 8)) == [[0, 1], [3], [4], [5, 6, 7]]
    assert list(packs(lengths, 2)) == [[0, 1], [3], [4], [5, 6], [7]]
    assert list(packs(lengths[:0], 2)) == []
