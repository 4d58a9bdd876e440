"""What is refused, in one line; the policy for missing values and overflow; dtypes."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from onepolicy import corrections
from onepolicy.corrections import CORRECTIONS
from onepolicy.errors import ContentError, OnepolicyError, UsageError

X = np.zeros((2, 3))
LP = {"sampler": X, "old": X, "mask": X == 0}

PACKED = {"sampler": torch.zeros(3), "old": torch.zeros(3), "mask": torch.ones(3)}
REFUSED: list[tuple[dict[str, Any], type[OnepolicyError], str]] = [
    ({"sampler": X, "mask": X}, UsageError, "neither of old= and current="),
    ({**LP, "current": X}, UsageError, "both of old= and current="),
    ({"old": X, "mask": X}, UsageError, "truncate needs sampler="),
    ({"sampler": X, "old": X}, UsageError, "truncate needs mask="),
    ({**LP, "capp": 2.0}, UsageError, "did you mean 'cap'"),
    ({**LP, "cap": 0.0}, UsageError, "cap above 0"),
    ({**LP, "cap": math.nan}, UsageError, "cap is nan"),
    ({**LP, "cap": "2"}, UsageError, "cap is '2', wanted a number"),
    ({**LP, "floor": 3.0}, UsageError, "floor <= cap"),
    ({**LP, "denominator": "tokens"}, UsageError, "wanted 'all', 'kept'"),
    ({**LP, "denominator": np.ones(3)}, UsageError, "wanted 'all', 'kept'"),
    ({**LP, "denominator": -1}, UsageError, "denominator is -1, wanted .* 0 or more"),
    ({**LP, "denominator": math.nan}, UsageError, "denominator is nan"),
    ({**LP, "denominator": True}, UsageError, "denominator is True"),
    ({**LP, "mask": np.ones((2, 4))}, ContentError, r"sampler \(2, 3\), .* mask \(2, 4\); wanted one"),
    ({**LP, "old": np.zeros((3, 2))}, ContentError, r"old or current \(3, 2\)"),
    (dict.fromkeys(("sampler", "old", "mask"), np.zeros((1, 2, 3))), ContentError, "wanted one"),
    ({**LP, "advantages": np.zeros(3)}, ContentError, r"advantages: got shape \(3,\)"),
    ({**LP, "old": torch.zeros(2, 3)}, ContentError, "sampler= is no torch tensor, old= is one"),
    ({**LP, "old": np.zeros((2, 3), dtype=np.int64)}, ContentError, "old= has dtype int64"),
    ({**LP, "offsets": np.array([0, 3])}, UsageError, "are for packed"),
    ({"sampler": X[0], "old": X[0], "mask": X[0]}, UsageError, "need one of offsets="),
    ({"sampler": X[0], "old": X[0], "mask": X[0], "offsets": np.array([0, 2])}, ContentError, "3 last"),
    ({"sampler": X[0], "old": X[0], "mask": X[0], "offsets": np.array([0])}, ContentError, r"wanted \[S \+ 1\]"),
    ({"sampler": X[0], "old": X[0], "mask": X[0], "sequence_ids": np.array([0, 1])}, ContentError, r"wanted \(3,\)"),
    (
        {"sampler": X[0], "old": X[0], "mask": X[0], "sequence_ids": np.array([0, 1, 2]), "n_sequences": 2},
        ContentError,
        "wanted 0 to 1",
    ),
    (
        {"sampler": X[0], "old": X[0], "mask": X[0], "sequence_ids": [0, 1, 2], "n_sequences": 2},
        ContentError,
        "wanted 0 to 1",
    ),
    ({**PACKED, "offsets": torch.tensor([0, 2])}, ContentError, "offsets: wanted 0 first, 3 last"),
    ({**PACKED, "offsets": torch.tensor([0, 2, 1, 3])}, ContentError, "none smaller than the one before"),
    ({**PACKED, "sequence_ids": torch.tensor([0, 1, 2]), "n_sequences": 2}, ContentError, "got 0 to 2, wanted 0 to 1"),
    ({**PACKED, "offsets": [0, 3], "denominator": torch.ones(2)}, UsageError, r"denominator is of shape \(2,\)"),
    (
        {"sampler": torch.zeros(2, 3, requires_grad=True), "old": torch.zeros(2, 3), "mask": torch.ones(2, 3)},
        UsageError,
        "are two policies swapped",
    ),
    (
        {"sampler": torch.zeros(2, 3), "old": torch.zeros(2, 3, device="meta"), "mask": torch.ones(2, 3)},
        ContentError,
        "several devices: sampler= cpu, old= meta",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "says"), REFUSED, ids=[s[:24] for *_, s in REFUSED])
def test_refused_in_one_line(given: dict[str, Any], error: type[OnepolicyError], says: str) -> None:
    with pytest.raises(error, match=says) as e:
        corrections.truncate(**given)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["tv_mask", "binary_kl_mask", "vaco_mask"])
def test_directed_masks_want_advantages(name: str) -> None:
    options = {"at_most": 1.0} if name == "vaco_mask" else {}
    with pytest.raises(UsageError, match="needs advantages="):
        CORRECTIONS[name](**LP, **options)
    with pytest.raises(UsageError, match="needs at_most="):
        corrections.vaco_mask(**LP, advantages=X)


def test_off_policy_reject_names_its_policies() -> None:
    mask, A = X == 0, X - 1
    old = np.full((2, 3), -1.0)
    current = np.array([[-1.0] * 3, [-1.5] * 3])
    for behind in ("sampler", "old"):
        c = corrections.off_policy_reject(**{behind: old}, current=current, mask=mask, advantages=A, delta=0.4)
        assert c.keep.tolist() == [[True] * 3, [False] * 3]
    with pytest.raises(UsageError, match="needs current="):
        corrections.off_policy_reject(sampler=old, old=old, mask=mask, advantages=A)
    with pytest.raises(UsageError, match="exactly one of sampler= and old="):
        corrections.off_policy_reject(sampler=old, old=old, current=current, mask=mask, advantages=A)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_what_is_no_ratio_is_dropped_and_counted(kind: str) -> None:
    """NaN, null, +-inf: weight 0, kept false, out of the sequence's mean; the denominator "all" still counts them."""
    nan, inf = math.nan, math.inf
    sampler = [[-1.0, None, -1.0, -inf, -1.0, inf, -inf], [-1.0, nan, nan, nan, nan, nan, nan]]
    old = [[-1.5, -1.0, nan, -1.0, -inf, -1.0, -inf], [-1.5, nan, nan, nan, nan, nan, nan]]
    mask = [[1] * 7, [1, 0, 0, 0, 0, 0, 0]]
    if kind == "torch":
        clean = [[nan if x is None else x for x in row] for row in sampler]
        given = {"sampler": torch.tensor(clean), "old": torch.tensor(old), "mask": torch.tensor(mask)}
    else:
        given = {"sampler": sampler, "old": old, "mask": mask}
    for name in ("truncate", "geometric_truncate", "segment_truncate"):
        c = CORRECTIONS[name](**given)
        first = pytest.approx(math.exp(-0.5), rel=1e-6)
        assert c.weights.tolist() == [[first, 0, 0, 0, 0, 0, 0], [first, 0, 0, 0, 0, 0, 0]]
        assert c.keep.tolist() == [[True] + [False] * 6] * 2
        got = c.effects.floats()
        assert (got["tokens/missing"], got["tokens/infinite"], got["tokens/trained"]) == (2, 4, 8)
        assert float(c.denominator) == 8
        assert float(CORRECTIONS[name](**given, denominator="kept").denominator) == 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_overflow_is_a_ratio_above_every_bound(dtype: str) -> None:
    sampler = np.array([[-92.4, -0.6, -1101.0, -0.3]], dtype=dtype)
    old = np.array([[-1.7, -0.5, -1.0, -0.3]], dtype=dtype)
    for x, y in ((sampler, old), (torch.from_numpy(sampler), torch.from_numpy(old))):
        given = {"sampler": x, "old": y, "mask": x == x}
        assert corrections.truncate(**given).weights.tolist()[0][::2] == [2.0, 2.0]
        c = corrections.icepop(**given)
        assert c.weights.tolist()[0][::2] == [0.0, 0.0] and c.keep.tolist() == [[False, True, False, True]]
        assert c.effects.floats()["tokens/overflow"] == 2
        for f in (corrections.sequence_reject, corrections.error_reject, corrections.divergence_reject):
            assert not f(**given).keep.any()
        for weight in ("token", "sequence", "geometric"):
            w = corrections.token_mask(**given, low=None, high=None, weight=weight).weights
            assert np.isfinite(np.asarray(w)).all(), "saturates under what the dtype holds"
        both = corrections.compose((corrections.truncate, {"cap": None}), (corrections.truncate, {"cap": None}))
        assert np.isfinite(np.asarray(both(**given).weights)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_the_difference(dtype: torch.dtype) -> None:
    sampler, old = torch.tensor([[-1.0078125, -9.0]], dtype=dtype), torch.tensor([[-1.0, -9.0625]], dtype=dtype)
    c = corrections.truncate(sampler=sampler, old=old, mask=torch.ones(1, 2))
    assert c.weights.dtype == torch.float32
    assert c.weights.tolist()[0] == pytest.approx([math.exp(0.0078125), math.exp(-0.0625)], rel=1e-6)
    mixed = corrections.truncate(sampler=sampler, old=old.float(), mask=torch.ones(1, 2))
    assert torch.equal(mixed.weights, c.weights)
    if dtype == torch.float16:
        as_numpy = corrections.truncate(sampler=sampler.numpy(), old=old.numpy(), mask=np.ones((1, 2)))
        assert as_numpy.weights.dtype == np.float32
        np.testing.assert_allclose(as_numpy.weights, c.weights.numpy(), rtol=1e-6)


def test_masks_of_any_dtype() -> None:
    old = np.array([[0.1, 0.2, 0.3]])
    for mask in ([[True, False, True]], [[1, 0, 1]], [[1.0, 0.0, 1.0]]):
        a = corrections.truncate(sampler=old * 0, old=old, mask=np.array(mask))
        b = corrections.truncate(sampler=torch.zeros(1, 3), old=torch.tensor(old).float(), mask=torch.tensor(mask))
        assert a.keep.tolist() == b.keep.tolist() == [[True, False, True]]


def test_the_inputs_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    given = {k: torch.from_numpy(rng.normal(size=(3, 5)) - 1) for k in ("sampler", "old")}
    copies = {k: v.clone() for k, v in given.items()}
    for name, f in CORRECTIONS.items():
        options: dict[str, Any] = {"at_most": 1.0} if name in ("divergence_mask", "vaco_mask") else {}
        policies = {"sampler": given["sampler"], "current" if name == "off_policy_reject" else "old": given["old"]}
        f(**policies, mask=torch.ones(3, 5), advantages=torch.ones(3), **options)
        assert all(torch.equal(given[k], copies[k]) for k in given)


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_signature_and_docs(name: str) -> None:
    f = CORRECTIONS[name]
    names = list(inspect.signature(f).parameters)
    assert names[:2] == ["sampler", "mask"] and {"old", "current", "denominator", "grad"} < set(names)
    assert f.__name__ == name and getattr(corrections, name) is f
    assert f.__doc__ and ("efault" in f.__doc__ or name in ("normalise", "vaco_mask"))
    assert set(f.options) < set(names)


def test_imports_with_numpy_alone() -> None:
    code = "import sys, onepolicy.corrections as c; c.preset('trl:token_mask'); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_loss_refuses_another_shape() -> None:
    c = corrections.truncate(**LP)
    with pytest.raises(ContentError, match=r"got shape \(3, 2\), wanted \(2, 3\)"):
        c.loss(np.zeros((3, 2)))
    with pytest.raises(UsageError, match="wanted 'token' or 'sequence'"):
        c.loss(X, per="row")


@pytest.mark.parametrize("zero", [0, 0.0, np.int64(0), torch.tensor(0)])
def test_a_count_of_no_tokens_is_no_division_by_zero(zero: Any) -> None:
    """The global count of a batch in which nothing is trained: the loss is 0, not NaN."""
    c = corrections.truncate(**{k: torch.from_numpy(x * 1.0) for k, x in {**LP, "mask": X}.items()}, denominator=zero)
    assert float(c.denominator) == 1.0 and float(c.loss(torch.ones(2, 3))) == 0.0


def test_numbers_as_numpy_has_them() -> None:
    """As configuration files and numpy hand them over."""
    old = np.array([[0.1, 0.9, -0.3]])
    given = {"sampler": old * 0, "old": old, "mask": old == old}
    plain = corrections.truncate(**given, cap=2.0, denominator=3)
    for cap, n in ((np.float32(2), np.int64(3)), (np.int32(2), np.float64(3))):
        c = corrections.truncate(**given, cap=cap, denominator=n)
        assert c.weights.tolist() == plain.weights.tolist() and float(c.denominator) == 3.0


def test_a_mask_where_every_token_is_alone() -> None:
    """One-token replies: sequence, geometric and token levels are the same."""
    rng = np.random.default_rng(1)
    old = rng.normal(size=(40, 1))
    given = {"sampler": old * 0, "old": old, "mask": old == old}
    token = corrections.truncate(**given).weights
    for f in (corrections.sequence_truncate, corrections.geometric_truncate):
        np.testing.assert_allclose(f(**given).weights, token, rtol=1e-12)
    np.testing.assert_allclose(corrections.segment_truncate(**given, cap=2.0).weights, token, rtol=1e-12)
