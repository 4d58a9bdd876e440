"""Python values to columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onepolicy.errors import ContentError
from onepolicy.values import BadValue, column_values, listed, quoted


def test_floats_keep_null_and_nonfinite_apart() -> None:
    col = column_values(
        "sampler_logprobs", [None, -1, -0.0, "NaN", "-inf", "-Infinity", "Infinity", "inf", float("nan")]
    )
    assert col.values.dtype == np.float64
    assert col.mask().tolist() == [False] + [True] * 8
    inf = float("inf")
    np.testing.assert_array_equal(col.values[1:], [-1, -0.0, np.nan, -inf, -inf, inf, inf, np.nan])
    assert np.signbit(col.values[2])


def test_integers_are_exact() -> None:
    col = column_values("policy_version", [2**62 + 1, None, 3.0, np.int32(4)])
    assert col.values.dtype == np.int64
    assert col.values.tolist() == [2**62 + 1, 0, 3, 4]
    assert col.mask().tolist() == [True, False, True, True]


def test_booleans_come_as_zero_and_one() -> None:
    assert column_values("loss_mask", [True, 0, 1.0, np.bool_(True)]).values.tolist() == [True, False, True, True]


def test_ids_may_be_numbers() -> None:
    assert column_values("group_id", [7, "a", None]).values.tolist() == ["7", "a", None]


def test_json_columns_are_not_read_as_matrices() -> None:
    messages = [[{"role": "user"}, {"role": "assistant"}], [{"role": "user"}, {"role": "tool"}], None]
    col = column_values("prompt_messages", messages)
    assert col.values.shape == (3,)
    assert col.values.tolist() == messages


def test_no_nulls_needs_no_mask() -> None:
    assert column_values("token_ids", [1, 2]).valid is None
    assert column_values("token_ids", []).values.dtype == np.int32


@pytest.mark.parametrize(
    ("name", "items", "index", "got"),
    [
        ("token_ids", [1, 2**31], 1, "2147483648"),
        ("token_ids", [1, True], 1, "True"),
        ("token_ids", [1.5], 0, "1.5"),
        ("token_ids", [0, "a\nb"], 1, r"'a\nb'"),
        ("token_ids", [float("nan")], 0, "nan"),
        ("reward", [10**400], 0, "1000"),
        ("reward", [None, "0.5"], 1, "'0.5'"),
        ("reward", [False], 0, "False"),
        ("loss_mask", [1, 2], 1, "2"),
        ("loss_mask", ["true"], 0, "'true'"),
        ("record_id", [1.5], 0, "1.5"),
        ("record_id", [True], 0, "True"),
        ("sampler_logprobs", [[-1.0]], 0, "[-1.0]"),
    ],
)
def test_what_a_column_cannot_hold(name: str, items: list[Any], index: int, got: str) -> None:
    with pytest.raises(BadValue) as caught:
        column_values(name, items)
    assert caught.value.index == index
    assert got in caught.value.reason
    assert "wanted" in caught.value.reason
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ContentError)


def test_messages_are_short_and_on_one_line() -> None:
    assert len(quoted("x" * 10_000)) < 80
    assert len(quoted([1] * 10_000)) < 80
    assert "\n" not in quoted("a\nb\u2028c") and "\n" not in listed(["a\nb"])
    assert quoted(np.float32(-1)) == "-1.0"
    assert listed(range(20), limit=2) == "0, 1 and 18 more"
