"""Bypass, decoupled, on-policy ratios and the reference KL: values, gradients, what is refused. Compositions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from onepolicy import corrections
from onepolicy.errors import ContentError, UnknownName, UsageError

CURRENT, OLD = [[-1.0, -2.3, -0.7]], [[-1.1, -2.0, -0.7]]


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    current = torch.tensor(CURRENT, dtype=torch.float64, requires_grad=True)
    return current, torch.tensor(OLD, dtype=torch.float64), torch.ones(1, 3)


def test_three_modes() -> None:
    current, old, mask = tensors()
    decoupled = corrections.policy_ratio(current=current, old=old, mask=mask)
    bypass = corrections.policy_ratio(current=current, sampler=old, mask=mask)
    on = corrections.policy_ratio(current=current, mask=mask)
    ratio = [math.exp(c - o) for c, o in zip(CURRENT[0], OLD[0], strict=True)]
    assert decoupled.tolist()[0] == pytest.approx(ratio) == bypass.tolist()[0]
    assert on.tolist() == [[1.0, 1.0, 1.0]]
    for x, gradient in ((decoupled, ratio), (on, [1.0, 1.0, 1.0])):
        (got,) = torch.autograd.grad(x.sum(), current, retain_graph=True)
        assert got.tolist()[0] == pytest.approx(gradient), "d ratio / d log p = ratio"
    with pytest.raises(UsageError, match="not both"):
        corrections.policy_ratio(current=current, old=old, sampler=old, mask=mask)


def test_policy_ratio_masks_before_exp() -> None:
    current = torch.tensor([[-1.0, math.nan, -1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.5, -1.0, -900.0, math.inf]])
    ratio = corrections.policy_ratio(current=current, old=old, mask=torch.tensor([[1, 0, 1, 1]]))
    assert torch.isfinite(ratio).all() and ratio[0, 1] == ratio[0, 3] == 1
    (got,) = torch.autograd.grad((ratio * 0).sum(), current)
    assert torch.isfinite(got).all()


def test_policy_ratio_is_1_where_nothing_is_trained() -> None:
    current, old, _ = tensors()
    ratio = corrections.policy_ratio(current=current, old=old - 3, mask=torch.tensor([[0, 1, 0]]))
    assert ratio.tolist()[0] == [1.0, pytest.approx(math.exp(-0.3 + 3)), 1.0]
    (got,) = torch.autograd.grad(ratio.sum(), current)
    assert got[0, 0] == got[0, 2] == 0 != got[0, 1]


def test_the_old_side_gets_no_gradient() -> None:
    current, old, mask = tensors()
    old.requires_grad_()
    for x in (
        corrections.policy_ratio(current=current, old=old, mask=mask),
        corrections.reference_kl(current=current, reference=old, old=old, mask=mask),
    ):
        (got,) = torch.autograd.grad(x.sum(), old, allow_unused=True)
        assert got is None or not got.any()


def test_reference_kl_gradient_flows_through_the_ratio() -> None:
    """d/dx of (e^(r - x) - 1 - (r - x)) e^(x - o), by differences."""
    current, old, mask = tensors()
    reference = torch.tensor([[-0.8, -1.2, -0.9]], dtype=torch.float64)

    def total(x: torch.Tensor) -> torch.Tensor:
        return corrections.reference_kl(current=x, reference=reference, old=old, mask=mask).sum()

    (got,) = torch.autograd.grad(total(current), current)
    for t in range(3):
        h = torch.zeros(1, 3, dtype=torch.float64)
        h[0, t] = 1e-6
        assert float(got[0, t]) == pytest.approx(
            float((total(current + h) - total(current - h)).detach() / 2e-6), rel=1e-6
        )


def test_reference_kl_is_finite_whatever_comes() -> None:
    current = torch.tensor([[-1.0, -1e3, -1.0, math.nan, -1e3]], requires_grad=True)
    reference = torch.tensor([[-1e3, -1.0, math.nan, -1.0, -1.0]])
    old = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -2e3]])
    kl = corrections.reference_kl(current=current, reference=reference, old=old, mask=torch.ones(1, 5))
    assert torch.isfinite(kl).all() and kl[0, 2] == kl[0, 3] == 0
    (got,) = torch.autograd.grad(kl.sum(), current)
    assert torch.isfinite(got).all()


def test_reference_kl_refuses() -> None:
    x = np.zeros((1, 2))
    with pytest.raises(UnknownName, match="estimator 'k4'"):
        corrections.reference_kl(current=x, reference=x, mask=x, old=x, estimator="k4")
    with pytest.raises(UsageError, match="exactly one of old= and sampler="):
        corrections.reference_kl(current=x, reference=x, mask=x)
    with pytest.raises(ContentError, match="shapes differ"):
        corrections.reference_kl(current=x, reference=np.zeros((1, 3)), mask=x, old=x)
    assert not corrections.reference_kl(current=x, reference=x, mask=x == 0, unbiased=False).any()


def test_combine_multiplies_weights_and_ands_keep() -> None:
    """TRL's pair: old against sampler, and the off-policy mask of current against sampler."""
    sampler, old = np.full((2, 2), -1.0), np.array([[-0.5, -1.0], [-1.0, -3.0]])
    current = np.array([[-1.0, -1.0], [-2.0, -2.0]])
    mask = old == old
    weights = corrections.icepop(sampler=sampler, old=old, mask=mask, denominator="kept")
    stale = corrections.off_policy_reject(sampler=sampler, current=current, mask=mask, advantages=[-1, -1], delta=0.5)
    c = corrections.combine(weights, stale)
    assert c.keep.tolist() == [[True, True], [False, False]]
    assert c.weights.tolist() == [[pytest.approx(math.exp(0.5)), 1.0], [0.0, 0.0]]
    assert c.denominator == 2 and corrections.combine(stale, weights).denominator == 4
    assert c.stages == (*weights.stages, *stale.stages)
    assert c.effects.floats()["2/kept/share"] == 0.5 and c.effects.floats()["1/kept/share"] == 0.75
    with pytest.raises(ContentError, match="combine: shapes"):
        corrections.combine(c, corrections.truncate(sampler=sampler[:1], old=old[:1], mask=mask[:1]))
    with pytest.raises(UsageError, match="one correction or more"):
        corrections.combine()


def test_compose_refuses_when_made() -> None:
    with pytest.raises(UsageError, match="is no correction"):
        corrections.compose(len)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="did you mean 'cap'"):
        corrections.compose((corrections.truncate, {"capp": 1.0}))
    with pytest.raises(UsageError, match=r"low=3\.0 is above high=2\.0"):
        corrections.compose((corrections.token_mask, {"low": 3.0}))
    with pytest.raises(UnknownName, match="sees"):
        corrections.compose(corrections.truncate, sees="left")
    with pytest.raises(UnknownName, match="estimator"):
        corrections.compose((corrections.divergence_reject, {"estimator": "k1"}))
    with pytest.raises(UnknownName, match="weight"):
        corrections.compose((corrections.token_mask, {"weight": "tokens"}))


def test_the_order_of_stages_is_seen() -> None:
    """A bad token first: with it the sequence is out, without it in."""
    old = np.log(np.array([[1.0, 1.0, 1.0, 5.0]]))
    given = {"sampler": old * 0, "old": old, "mask": old == old}
    mask, reject = (corrections.token_mask, {"high": 2.0}), (corrections.geometric_reject, {"low": 0.9, "high": 1.1})
    assert corrections.compose(mask, reject)(**given).keep.sum() == 3
    assert corrections.compose(reject, mask)(**given).keep.sum() == 0
    assert corrections.compose(mask, reject, sees="all")(**given).keep.sum() == 0
    assert str(corrections.compose(mask, reject)) == (
        "token_mask(low=0.5, high=2.0, weight=one) -> geometric_reject(low=0.9, high=1.1, weight=one)"
    )
