"""The contract of a loss with a correction: right losses pass, each broken one is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onepolicy import corrections
from onepolicy.errors import UnknownName, UsageError
from onepolicy.testing import CHECKS, CONTRACT, BrokenContract, assert_correction_contract

T = torch.Tensor
Loss = Callable[..., T]


def clipped(current: T, old: T, advantages: T, mask: T) -> T:
    """PPO's loss per token."""
    ratio = corrections.policy_ratio(current=current, old=old, mask=mask)
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def made(correct: Any, denominator: str = "all", per: str = "token") -> Loss:
    def loss(*, current: T, old: T, sampler: T, mask: T, advantages: T) -> T:
        c = correct(sampler=sampler, old=old, mask=mask, advantages=advantages, denominator=denominator)
        return c.loss(clipped(current, old, advantages, mask), per=per)

    return loss


RULES = [
    corrections.truncate,
    corrections.sequence_truncate,
    corrections.geometric_truncate,
    corrections.segment_truncate,
    corrections.icepop,
    corrections.token_mask,
    corrections.sequence_reject,
    corrections.geometric_reject,
    corrections.divergence_reject,
    corrections.veto,
    corrections.error_reject,
    corrections.kpop,
    corrections.compose(corrections.geometric_reject, corrections.truncate),
    corrections.preset("verl:decoupled_k3_rs_token_tis"),
    corrections.preset("trl:sequence_mask"),
]


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("per", ["token", "sequence"])
@pytest.mark.parametrize("correct", RULES, ids=[getattr(r, "__name__", str(r)) for r in RULES])
def test_losses_made_of_our_corrections_pass(correct: Any, denominator: str, per: str) -> None:
    assert_correction_contract(made(correct, denominator, per), denominator=denominator, per=per)


def plain(*, current: T, old: T, sampler: T, mask: T, advantages: T) -> T:
    """Written by hand, without onepolicy."""
    d = torch.where(mask, old - sampler, 0.0).detach()
    weights = d.clamp(max=20).exp().clamp(max=2.0)
    ratio = torch.where(mask, current - old, 0.0).clamp(-20, 20).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (torch.where(mask, weights * loss, 0.0)).sum() / mask.sum()


def with_kl(*, current: T, old: T, sampler: T, mask: T, advantages: T, reference: T, denominator: float) -> T:
    c = corrections.truncate(sampler=sampler, old=old, mask=mask, denominator=denominator)
    kl = corrections.reference_kl(current=current, reference=reference, old=old, mask=mask)
    return c.loss(clipped(current, old, advantages, mask)) + 0.1 * kl.sum() / denominator


def reinforce(*, current: T, sampler: T, mask: T, advantages: T) -> T:
    c = corrections.sequence_truncate(sampler=sampler, current=current, mask=mask)
    return c.loss(-advantages * current)


def through_the_ratio(*, current: T, sampler: T, mask: T, advantages: T) -> T:
    """prime-rl: the importance ratio is the policy gradient."""
    c = corrections.tv_mask(
        sampler=sampler, current=current, mask=mask, advantages=advantages, weight="token", grad=True
    )
    return c.loss(-advantages)


def test_other_right_losses_pass() -> None:
    assert_correction_contract(plain)
    assert_correction_contract(with_kl)
    assert_correction_contract(reinforce, mode="bypass")
    assert_correction_contract(through_the_ratio, mode="bypass")


def broken(**change: Any) -> Loss:
    """`plain` with a KL term, and one thing wrong."""

    def loss(*, current: T, old: T, sampler: T, mask: T, advantages: T, reference: T) -> T:
        d = change.get("d", lambda c, o, s: o - s)(current, old, sampler)
        if change.get("mask_late"):
            weights = d.detach().exp().clamp(max=2.0) * mask
        else:
            d = torch.where(mask, d, 0.0)
            d = d if change.get("attached") else d.detach()
            weights = change.get("weights", lambda d, m: d.clamp(max=20).exp().clamp(max=2.0))(d, mask)
        gap = current - old
        ratio = (gap if change.get("unmasked") else torch.where(mask, gap, 0.0)).clamp(-20, 20).exp()
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        x = torch.where(mask, reference - current, 0.0)
        kl = 0.1 * (x.exp() - 1 - x)
        terms = weights * (policy + kl) if change.get("kl_inside") else weights * policy + kl
        if change.get("unmasked"):
            return terms.sum() / mask.sum()
        return change.get("reduce", lambda t, m, w: t[m].sum() / m.sum())(terms, mask, weights)

    return loss


BROKEN: list[tuple[str, Loss]] = [
    ("weights-not-detached", broken(attached=True)),
    ("not-masked-before-exp", broken(mask_late=True, reduce=lambda t, m, w: (t * m).sum() / m.sum())),
    ("mask-ignored", broken(unmasked=True)),
    ("overflow", broken(weights=lambda d, m: d.exp() * (d.abs() < 5))),
    ("wrong-denominator", broken(
        weights=lambda d, m: torch.where(d.abs() < 1.5, d.clamp(-2, 2).exp(), 0.0),
        reduce=lambda t, m, w: t[m].sum() / ((w > 0) & m).sum(),
    )),
    ("wrong-policy", broken(d=lambda c, o, s: c - s)),
    ("inverted-ratio", broken(d=lambda c, o, s: s - o)),
    ("no-correction", broken(d=lambda c, o, s: o - o)),
    ("kl-weighted", broken(kl_inside=True)),
    ("depends-on-padding", broken(reduce=lambda t, m, w: torch.where(m, t, 0.0).mean())),
    ("depends-on-micro-batches", broken(weights=lambda d, m: d.clamp(max=5).exp() / d.clamp(max=5).exp()[m].mean())),
]  # fmt: skip


@pytest.mark.parametrize(("name", "loss"), BROKEN, ids=[n for n, _ in BROKEN])
def test_each_broken_loss_is_caught_by_name(name: str, loss: Loss) -> None:
    with pytest.raises(BrokenContract, match=name) as e:
        assert_correction_contract(loss)
    assert name in e.value.broken and CONTRACT[name] in str(e.value)


def test_the_loss_that_is_changed_is_right_itself() -> None:
    assert_correction_contract(broken())


def test_every_rule_has_a_broken_loss() -> None:
    assert [n for n, _ in BROKEN] == list(CONTRACT) and len(CHECKS) == 9


#: What else such a loss breaks, inevitably.
ALONE = {"weights-not-detached", "overflow", "wrong-policy", "inverted-ratio", "kl-weighted"}


@pytest.mark.parametrize(("name", "loss"), [b for b in BROKEN if b[0] in ALONE])
def test_and_by_no_other_name(name: str, loss: Loss) -> None:
    with pytest.raises(BrokenContract) as e:
        assert_correction_contract(loss)
    assert set(e.value.broken) == {name}


@pytest.mark.parametrize("said", ["all", "kept"])
def test_the_denominator_that_is_said_is_the_one_that_is_meant(said: str) -> None:
    real = "kept" if said == "all" else "all"
    with pytest.raises(BrokenContract, match="wrong-denominator"):
        assert_correction_contract(made(corrections.icepop, real), denominator=said)


def test_the_global_count_is_used() -> None:
    """`denominator=` is taken and ignored: the parts do not add up."""

    def loss(*, current: T, old: T, sampler: T, mask: T, advantages: T, denominator: float) -> T:
        return plain(current=current, old=old, sampler=sampler, mask=mask, advantages=advantages)

    with pytest.raises(BrokenContract, match="depends-on-micro-batches"):
        assert_correction_contract(loss)


def test_bypass_must_not_hang_on_old() -> None:
    def loss(*, current: T, old: T, sampler: T, mask: T, advantages: T) -> T:
        c = corrections.truncate(sampler=sampler, old=old, mask=mask)
        return c.loss(-advantages * current)

    with pytest.raises(BrokenContract, match=r"wrong-policy|no-correction"):
        assert_correction_contract(loss, mode="bypass")


def test_what_is_meant_can_be_skipped() -> None:
    def kl_to_the_sampler(*, current: T, old: T, sampler: T, mask: T, advantages: T, reference: T) -> T:
        c = corrections.truncate(sampler=sampler, old=old, mask=mask)
        kl = corrections.reference_kl(current=current, reference=reference, sampler=sampler, mask=mask)
        return c.loss(clipped(current, old, advantages, mask)) + 0.1 * kl.sum() / c.denominator

    with pytest.raises(BrokenContract, match="kl-weighted"):
        assert_correction_contract(kl_to_the_sampler)
    assert_correction_contract(kl_to_the_sampler, skip=("kl-weighted", "overflow"))


def test_refused() -> None:
    with pytest.raises(UnknownName, match=r"mode 'decouple'.*did you mean 'decoupled'"):
        assert_correction_contract(plain, mode="decouple")
    with pytest.raises(UnknownName, match="denominator"):
        assert_correction_contract(plain, denominator="tokens")
    with pytest.raises(UnknownName, match="per"):
        assert_correction_contract(plain, per="row")
    with pytest.raises(UnknownName, match="did you mean 'kl-weighted'"):
        assert_correction_contract(plain, skip=("kl-weight",))
    with pytest.raises(UsageError, match="the loss takes logp, sampler"):
        assert_correction_contract(lambda logp, sampler: logp)
    with pytest.raises(UsageError, match="no gradient"):
        assert_correction_contract(lambda current, sampler: current.detach().sum())
