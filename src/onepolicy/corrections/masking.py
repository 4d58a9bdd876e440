"""Single tokens get weight 0 and leave `keep`: by their ratio, their probability difference, their divergence.

Numbers 5, 6, 13, 14 and 15, and the token forms of 9. d, rho, p as in `truncation`; p and q are the sampler's and the
policy's probability of the token drawn, A its advantage. `weight`: what kept tokens weigh: "one", or the raw ratio of
the "token", its "sequence" (product) or the "geometric" mean.
"""

from __future__ import annotations

import math
from typing import Any

from onepolicy.arrays import Array
from onepolicy.corrections.correction import correction
from onepolicy.corrections.divergences import DIVERGENCES, binary_kl
from onepolicy.corrections.ratio import Ratio
from onepolicy.corrections.rule import State, Verdict, band, choice, log, number, raw_weights


def _in_band(ratio: Ratio, low: float | None, high: float | None) -> tuple[Array, Array, Array]:
    """(inside, below, above) of each token's ratio."""
    least, most = band(low, high)
    below, above = ratio.log_ratio < log(least), ratio.log_ratio > log(most)
    return ~(below | above), below, above


@correction
def icepop(ratio: Ratio, state: State, *, low: float | None = 0.5, high: float | None = 5.0) -> Verdict:
    """IcePop: w = rho where low <= rho <= high, else 0. The token's weight is kept, so tails neither pull nor push.

    Paper: Ling team 2025, "Every Step Evolves" (arXiv 2510.18855). Default 0.5 to 5.0: verl `decoupled_token_icepop`,
    NeMo-RL's reference bounds, OpenRLHF (`token`, `mask`). None is no bound on that side. The origins leave the loss
    mask alone, which is `denominator="all"` here.
    """
    inside, below, above = _in_band(ratio, low, high)
    return Verdict(ratio.exp(ratio.log_ratio), inside, below, above)


@correction
def token_mask(
    ratio: Ratio, state: State, *, low: float | None = 0.5, high: float | None = 2.0, weight: str = "one"
) -> Verdict:
    """Token mask (MIS at token level): keep where low <= rho <= high; kept tokens weigh 1 unless `weight` says else.

    slime mis.py `tis_mode=mask` (raw weights: `weight="token"`), SkyRL `token_mask_is_threshold_low/high` 0.5 / 2.0,
    the defaults here. verl's `token_k1` means this and does the reverse: see the presets.
    """
    inside, below, above = _in_band(ratio, low, high)
    return Verdict(raw_weights(weight, ratio, state), inside, below, above)


@correction
def divergence_mask(
    ratio: Ratio, state: State, *, at_most: float, estimator: str = "k3", weight: str = "one"
) -> Verdict:
    """Keep tokens whose own divergence is at most `at_most`: estimator "k2", "k3", ... of `DIVERGENCES`.

    verl `rollout_rs=token_k2`, `token_k3`; AReaL `rejection_sampling` level token, metric kl_k2, kl_k3 (its k3 is
    "k3_reversed" here). No default bound: k3 of a token is about d^2 / 2.
    """
    choice("estimator", estimator, tuple(DIVERGENCES))
    above = DIVERGENCES[estimator](ratio) > number("at_most", at_most)
    return Verdict(raw_weights(weight, ratio, state), ~above, None, above)


@correction
def tv_mask(
    ratio: Ratio, state: State, *, up: float = 0.2, down: float = 0.2, directed: bool = True, weight: str = "one"
) -> Verdict:
    """DPPO with total variation: drop where the update would push the probability further out.

    directed: q - p > up while A > 0, or q - p < -down while A <= 0. Not directed: q - p outside [-down, up]. Paper: Qi
    et al. 2026 (arXiv 2602.04879), "DPPO", Eq. 13. Default 0.2: prime-rl `dppo_mask_low/high`, SkyRL
    `dppo.delta_low/high`, verl `dppo_tv` (`clip_ratio`). prime-rl's `ipo` is `directed=False`, 0.1. SkyRL wants A < 0,
    which differs only where A is 0 and the policy loss with it.
    """
    p, q = ratio.probabilities()
    return _trust_region(ratio, state, q - p, (number("up", up), number("down", down)), directed, weight)


@correction
def binary_kl_mask(
    ratio: Ratio, state: State, *, up: float = 0.05, down: float = 0.05, directed: bool = True, weight: str = "one"
) -> Verdict:
    """DPPO with the KL of two events, this token or another: KL(p || q) of Bernoulli p and q.

    directed: drop where it is above `up` while A > 0 and q > p, or above `down` while A <= 0 and q < p. Not directed:
    above `up` where q > p, above `down` where q < p. Paper: arXiv 2602.04879, Eq. 14. Default 0.05: SkyRL's
    recommendation for `dppo_type: binary_kl`. OpenRLHF `is_correction_gating binary_kl` is not directed. Probabilities
    are clamped to [1e-6, 1 - 1e-6] first (OpenRLHF; verl and SkyRL add 1e-8 instead).
    """
    p, q = ratio.probabilities()
    size = binary_kl(ratio.ops, p, q)
    signed = ratio.ops.where(q > p, size, -size)
    return _trust_region(ratio, state, signed, (number("up", up), number("down", down)), directed, weight)


def _trust_region(
    ratio: Ratio, state: State, moved: Array, bounds: tuple[float, float], directed: bool, weight: str
) -> Verdict:
    above, below = moved > bounds[0], moved < -bounds[1]
    if directed:
        positive = ratio.signs("a directed mask") > 0
        above, below = above & positive, below & ~positive
    return Verdict(raw_weights(weight, ratio, state), ~(above | below), below, above)


@correction
def vaco_mask(ratio: Ratio, state: State, *, at_most: float, weight: str = "one") -> Verdict:
    """VACO's mask: in sequences whose mean |rho - 1| is above `at_most`, drop the tokens with A d > 0.

    These are the tokens that the update would push further out; the rest of such a sequence stays. Paper: arXiv
    2603.01365. open-instruct `rho_mask_tv_divergence` with `rho_mask_upper_bound` (off by default; its tests use 2.0).
    Later versions of open-instruct bound |q - p| instead: another scale.
    """
    most = number("at_most", at_most)
    d = ratio.log_ratio
    spread = ratio.per_row(ratio.ops.abs(ratio.ops.expm1(d)), state.seen) / ratio.length(state.seen)
    above = ratio.spread(spread > most) & (ratio.signs("vaco_mask") * d > 0)
    return Verdict(raw_weights(weight, ratio, state), ~above, None, above)


@correction
def kpop(ratio: Ratio, state: State, *, at_most: float = 0.1, weight: str = "token") -> Verdict:
    """KPop: keep where max(KL(p || q), KL(q || p)) <= at_most, both of Bernoulli p and q; kept tokens weigh rho.

    Wide in ratio for rare tokens, tight for likely ones, where IcePop's band is the same for all. Source:
    ringtech.notion.site/kpop (Ant Group 2026); verl #6800, AReaL #1405, prime-rl #3283, whose default 0.1 this is.
    Probabilities are clamped to [1e-6, 1 - 1e-6].
    """
    ops = ratio.ops
    p, q = ratio.probabilities()
    most = number("at_most", at_most)
    above = (binary_kl(ops, p, q) > most) | (binary_kl(ops, q, p) > most)
    return Verdict(raw_weights(weight, ratio, state), ~above, None, above)


@correction
def m2po(ratio: Ratio, state: State, *, at_most: float = 0.04, weight: str = "one") -> Verdict:
    """M2PO: drop the tokens of the largest d^2, as few as can be, until the mean d^2 of the rest is at most `at_most`.

    Over the whole batch of this rank. Equal d^2 go or stay together, so the order of tokens does not matter. Paper:
    Zheng et al. 2025, "Prosperity before Collapse" (arXiv 2510.01161), whose bound 0.04 is the default; AReaL
    `m2_threshold` (no default) wants the mean below the bound and always leaves one token.
    """
    ops = ratio.ops
    squares = ops.where(state.seen, ratio.log_ratio * ratio.log_ratio, math.inf)
    cutoff = _cutoff(ops, ops.sort(ops.detach(squares).reshape(-1)), number("at_most", at_most))
    above = squares >= ops.as_like(cutoff, squares)
    above = above & state.seen
    return Verdict(raw_weights(weight, ratio, state), ~above, None, above)


def _cutoff(ops: Any, ordered: Array, most: float) -> Array:
    """The first value of rising `ordered` with which the running mean is above `most`; inf if there is none."""
    running = ops.cumsum(ordered) / (ops.arange(ordered.shape[0], ordered) + 1)
    return ops.least(ops.where(running > most, ordered, math.inf))
