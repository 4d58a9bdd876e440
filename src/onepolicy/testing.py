"""Assertions for users' own tests. `assert_correction_contract` holds a loss with a correction to the rules of one.

It needs torch, which the loss brings. `assert_token_fidelity` and `TokenFidelityError` are those of `tokens.fidelity`,
loaded when they are asked for.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onepolicy.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from onepolicy.tokens.fidelity import TokenFidelityError, assert_token_fidelity

__all__ = ["CONTRACT", "BrokenContract", "TokenFidelityError", "assert_correction_contract", "assert_token_fidelity"]

#: name of the broken rule -> what it says
CONTRACT: dict[str, str] = {
    "weights-not-detached": "the sampler's log-probs get a gradient: weights are not detached",
    "not-masked-before-exp": "what stands where the mask is false changes the loss, or makes it NaN or infinite",
    "mask-ignored": "a token that is not trained gets a gradient",
    "overflow": "a ratio that overflows makes the loss or its gradient NaN or infinite",
    "wrong-denominator": "dropping tokens changes the others' share otherwise than the denominator says",
    "wrong-policy": "the weights hang on another policy than the one to be corrected",
    "inverted-ratio": "weights fall as the ratio rises: sampler and policy are swapped",
    "no-correction": "the sampler's log-probs do not matter: nothing is corrected",
    "kl-weighted": "the sampler's log-probs change the KL term: weights are multiplied onto it",
    "depends-on-padding": "padding changes the loss",
    "depends-on-micro-batches": "the loss of a batch is not the sum of its micro-batches' shares",
}
LENGTHS = (7, 3, 9, 1, 5)
COLUMNS = 10
LOG_RATIOS = (-2.5, -1.0, -0.3, -0.05, 0.05, 0.3, 1.0, 2.5)
NAMES = ("current", "old", "sampler", "mask", "advantages", "reference", "denominator")


def __getattr__(name: str) -> Any:
    if name in ("TokenFidelityError", "assert_token_fidelity"):
        from onepolicy.tokens import fidelity

        return getattr(fidelity, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class BrokenContract(AssertionError):
    """A loss that breaks rules of the contract. `broken`: name -> where and how much."""

    def __init__(self, broken: dict[str, str]) -> None:
        lines = [f"  {name}: {CONTRACT[name]} ({where})" for name, where in broken.items()]
        super().__init__("the loss breaks the contract of a correction:\n" + "\n".join(lines))
        self.broken = broken


@dataclass
class Subject:
    """The loss under test and what its author says of it."""

    loss: Callable[..., Any]
    mode: str
    denominator: str
    per: str
    rtol: float
    torch: Any
    names: tuple[str, ...] = ()
    broken: dict[str, str] = field(default_factory=dict)

    def __call__(self, batch: dict[str, Any]) -> tuple[Any, Any]:
        """(loss, its gradient at current), detached; asks for exactly the names that the loss takes."""
        current = batch["current"].detach().clone().requires_grad_()
        given = {k: v for k, v in {**batch, "current": current}.items() if k in self.names}
        value = self.loss(**given)
        if not getattr(value, "requires_grad", False):
            raise UsageError("the loss has no gradient: it must be made of `current`, and must not detach it")
        (gradient,) = self.torch.autograd.grad(value, current)
        return value.detach(), gradient

    def gradient(self, batch: dict[str, Any]) -> Any:
        return self(batch)[1]

    def policy_gradient(self, batch: dict[str, Any]) -> Any:
        """The gradient without that of a KL term, which does not hang on the advantages."""
        whole = self.gradient(batch)
        if "reference" not in self.names:
            return whole
        return whole - self.gradient({**batch, "advantages": batch["advantages"] * 0})

    def far(self, a: Any, b: Any) -> float:
        """The largest relative difference of two gradients or losses; inf for NaN."""
        scale = b.abs().max().clamp_min(1e-12)
        worst = float(((a - b).abs() / scale).max()) if a.numel() else 0.0
        return worst if math.isfinite(worst) else math.inf

    def note(self, name: str, where: str) -> None:
        self.broken.setdefault(name, where)


def assert_correction_contract(
    loss_fn: Callable[..., Any],
    *,
    mode: str = "decoupled",
    denominator: str = "all",
    per: str = "token",
    skip: tuple[str, ...] = (),
    rtol: float = 1e-5,
) -> None:
    """Hold your own loss with a correction to the contract. Errors: `BrokenContract` naming every rule that is broken.

    loss_fn: called by keyword with those of these names that it takes, tensors `[B, T]` of float64 (float32 for
        overflow): current (with gradient), old, sampler, mask (bool), advantages, reference (log-probs of a reference
        policy, for a KL term), denominator (the global count of trained tokens, a float). Returns the loss, 0-dim.
    mode: "decoupled": weights correct old against sampler. "bypass": they correct current against sampler.
    denominator: "all" or "kept", what your loss means to divide by. per: "token" for a mean over tokens, "sequence" for
        the mean of the sequences' means.
    skip: rules of `CONTRACT` that you break on purpose, for example "weights-not-detached" for a policy gradient
        through the ratio, "kl-weighted" for a KL with the ratio to the sampler in front, "wrong-policy" for a mask on
        current against sampler, "wrong-denominator" for self-normalised weights.

    What a black box cannot show: weights that are never capped or masked are the same function of current and of old
    up to scale, so "wrong-policy" is found where a bound is reached (log ratios up to 2.5 are tried).
    """
    import torch

    for name, value, known in (("mode", mode, ("decoupled", "bypass")), ("denominator", denominator, ("all", "kept"))):
        if value not in known:
            raise UnknownName(name, value, known)
    if per not in ("token", "sequence"):
        raise UnknownName("per", per, ("token", "sequence"))
    for name in skip:
        if name not in CONTRACT:
            raise UnknownName("rule of the contract", name, CONTRACT)
    subject = Subject(loss_fn, mode, denominator, per, rtol, torch, _names(loss_fn))
    with torch.enable_grad():
        for check in CHECKS:
            check(subject)
    broken = {k: v for k, v in subject.broken.items() if k not in skip}
    if broken:
        raise BrokenContract(broken)


def _names(loss_fn: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(loss_fn).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return NAMES
    names = tuple(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
    unknown = [p.name for p in parameters if p.name not in NAMES and p.default is p.empty]
    if unknown or "sampler" not in names or "current" not in names:
        raise UsageError(
            f"the loss takes {', '.join(names)}; wanted names of {', '.join(NAMES)}, with current, sampler"
        )
    return names


def batch_of(subject: Subject, seed: int = 0, dtype: str = "float64") -> dict[str, Any]:
    """A ragged batch `[5, 10]` at zero mismatch: the sampler is the policy that is corrected."""
    torch = subject.torch
    g = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), COLUMNS)

    def random(scale: float) -> Any:
        return torch.randn(shape, generator=g, dtype=torch.float64) * scale

    mask = torch.arange(COLUMNS) < torch.tensor(LENGTHS)[:, None]
    mask[0, 3] = mask[2, 4] = False  # a tool's tokens
    old = -random(1.0).abs() - 0.5
    current = old + random(1.0).clamp(-1, 1) * 0.05
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    batch = {"current": current, "old": old, "reference": old + random(0.3)}
    batch["advantages"] = (random(0.2).abs() + 0.5) * signs
    batch["sampler"] = batch[_corrected(subject)].clone()
    batch = {k: v.to(getattr(torch, dtype)) for k, v in batch.items()}
    return {**batch, "mask": mask, "denominator": float(mask.sum())}


def _corrected(subject: Subject) -> str:
    return "old" if subject.mode == "decoupled" else "current"


def _with_gap(subject: Subject, batch: dict[str, Any], gap: Any) -> dict[str, Any]:
    """The batch with log ratios of `gap`: the sampler moves, the policy stays."""
    return {**batch, "sampler": batch[_corrected(subject)] - gap}


def _gaps(subject: Subject, trials: int = 12) -> Iterator[Any]:
    """Log ratios per token from `LOG_RATIOS`; then one for all tokens of a sequence."""
    torch = subject.torch
    g = torch.Generator().manual_seed(9)
    values = torch.tensor(LOG_RATIOS, dtype=torch.float64)
    for i in range(trials):
        shape = (len(LENGTHS), COLUMNS if i % 2 else 1)
        yield values[torch.randint(len(LOG_RATIOS), shape, generator=g)].expand(len(LENGTHS), COLUMNS)


def _detached(s: Subject) -> None:
    batch = _with_gap(s, batch_of(s), 0.01)
    s(batch)  # has a gradient at all
    sampler = batch["sampler"].clone().requires_grad_()
    try:
        given = {k: v for k, v in {**batch, "sampler": sampler}.items() if k in s.names}
        given["current"] = batch["current"].clone().requires_grad_()
        value = s.loss(**given)
    except UsageError:
        return  # onepolicy's corrections refuse a sampler that requires grad
    (gradient,) = s.torch.autograd.grad(value, sampler, allow_unused=True)
    if gradient is not None and bool((gradient != 0).any()):
        s.note("weights-not-detached", f"gradient up to {float(gradient.abs().max()):.2g}")


def _masked(s: Subject) -> None:
    batch = _with_gap(s, batch_of(s), 0.1)
    value, gradient = s(batch)
    outside = ~batch["mask"]
    if bool((gradient[outside] != 0).any()):
        s.note("mask-ignored", f"gradient up to {float(gradient[outside].abs().max()):.2g}")
    for fill in (math.nan, math.inf, -math.inf, -1e4, 1e4):
        for name in ("sampler", "old"):
            filled = {**batch, name: batch[name].masked_fill(outside, fill)}
            if name in s.names:
                other, slope = s(filled)
                if max(s.far(other, value), s.far(slope, gradient)) > s.rtol:
                    s.note("not-masked-before-exp", f"{name} = {fill:g} where the mask is false")


def _overflow(s: Subject) -> None:
    for shift in (200.0, -200.0):
        batch = batch_of(s, dtype="float32")
        gap = s.torch.zeros_like(batch["sampler"])
        gap[0, 1] = shift
        value, gradient = s(_with_gap(s, batch, gap))
        if not bool(s.torch.isfinite(value)) or not bool(s.torch.isfinite(gradient).all()):
            s.note("overflow", f"one log ratio of {shift:g} in float32")


def _denominator(s: Subject) -> None:
    """Push one sequence, or one of its tokens, out of every band and look at the other sequences."""
    batch = batch_of(s)
    mask, base = batch["mask"], s.policy_gradient(batch)
    for tokens in (slice(1, 2), slice(None)):
        for shift in (30.0, -30.0):
            gap = s.torch.zeros_like(batch["sampler"])
            gap[0, tokens] = shift
            gradient = s.policy_gradient(_with_gap(s, batch, gap))
            gone = mask & (gradient == 0) & (base != 0)
            wanted = 1.0
            if s.denominator == "kept" and s.per == "token":
                wanted = float(mask.sum() / (mask.sum() - gone.sum()).clamp_min(1))
            elif s.denominator == "kept":
                emptied = (gone.sum(1) == mask.sum(1)).sum()
                wanted = len(LENGTHS) / max(1, len(LENGTHS) - int(emptied))
            if s.far(gradient[1:], base[1:] * wanted) > s.rtol:
                got = float(gradient[1:].abs().sum() / base[1:].abs().sum())
                s.note("wrong-denominator", f"{int(gone.sum())} of {int(mask.sum())} tokens dropped: the others "
                       f"weigh {got:.4g} times as much, wanted {wanted:.4g} for {s.denominator!r}")  # fmt: skip


def _policy(s: Subject) -> None:
    """How a gap to the sampler scales the gradient must not hang on the policy that is not corrected."""
    batch = batch_of(s)
    g = s.torch.Generator().manual_seed(4)
    other = "current" if s.mode == "decoupled" else "old"
    noise = s.torch.randn(batch["old"].shape, generator=g, dtype=s.torch.float64).clamp(-1, 1) * 0.1
    same = {**batch, other: batch[_corrected(s)].clone()}
    shifted = {**batch, other: batch[_corrected(s)] + noise}
    base, slope = s.policy_gradient(same), s.policy_gradient(shifted)
    seen = (base != 0) & (slope != 0)
    moves = any(s.far(s.policy_gradient(_with_gap(s, same, gap)), base) > s.rtol for gap in (30.0, -30.0))
    for gap in _gaps(s):
        one, two = (s.policy_gradient(_with_gap(s, x, gap)) for x in (same, shifted))
        factors = [s.torch.where(seen, x / y, 1.0) for x, y in ((one, base), (two, slope))]
        moves = moves or s.far(one, base) > s.rtol
        if s.far(factors[1], factors[0]) > s.rtol:
            s.note("wrong-policy", f"moving {other} by 0.1 nats changes the weights of {_corrected(s)} against sampler")
    if not moves:
        s.note("no-correction", "log ratios up to +-30 change nothing")


def _direction(s: Subject) -> None:
    batch = batch_of(s)
    base = s.policy_gradient(batch)
    up, down = (s.policy_gradient(_with_gap(s, batch, gap)) for gap in (0.01, -0.01))
    seen = base != 0
    factors = [s.torch.where(seen, x / base, 1.0) for x in (up, down)]
    if bool(((factors[0] < factors[1] * (1 - 1e-3)) & (factors[0] != 0)).any()):
        s.note("inverted-ratio", "a log ratio of +0.01 weighs less than one of -0.01")


def _kl(s: Subject) -> None:
    if "reference" not in s.names:
        return
    batch = batch_of(s)
    batch["advantages"] = batch["advantages"] * 0
    base = s.gradient(batch)
    for gap in _gaps(s):
        gradient = s.gradient(_with_gap(s, batch, gap))
        if s.denominator == "kept":  # the mean may be over fewer tokens, but each counts the same
            seen = (gradient != 0) & (base != 0)
            ratio = s.torch.where(seen, gradient / base, 0.0)
            gradient = s.torch.where(seen, gradient / ratio.max().clamp_min(1e-12), base)
        if s.far(gradient, base) > s.rtol:
            s.note("kl-weighted", "with advantages of 0, other log-probs of the sampler change the gradient")


def _padding(s: Subject) -> None:
    batch = _with_gap(s, batch_of(s), next(_gaps(s)) * 1e-3)
    value, gradient = s(batch)
    wide = {k: v if k == "denominator" else s.torch.nn.functional.pad(v, (2, 3)) for k, v in batch.items()}
    other, slope = s(wide)
    if max(s.far(other, value), s.far(slope[:, 2 : 2 + COLUMNS], gradient)) > s.rtol:
        s.note("depends-on-padding", f"5 more columns: {float(other):.6g} instead of {float(value):.6g}")


def _micro_batches(s: Subject) -> None:
    """With `denominator=` the parts add up; without it, each is weighted by what its own denominator counts."""
    for scale in (1e-3, 0.2):
        _parts_add_up(s, _with_gap(s, batch_of(s), next(_gaps(s)) * scale))


def _parts_add_up(s: Subject, batch: dict[str, Any]) -> None:
    whole = s.gradient(batch)
    parts, sizes = [], []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 5)):
        part = {k: v if k == "denominator" else v[rows] for k, v in batch.items()}
        parts.append(s.gradient(part))
        counted = part["mask"] if s.denominator == "all" else part["mask"] & (parts[-1] != 0)
        sizes.append(int(counted.sum() if s.per == "token" else counted.any(1).sum()))
    total = max(1, sum(sizes))
    shares = [1.0] * 3 if "denominator" in s.names else [n / total for n in sizes]
    joined = s.torch.cat([p * share for p, share in zip(parts, shares, strict=True)])
    if s.far(joined, whole) > s.rtol:
        s.note("depends-on-micro-batches", f"gradients differ by {s.far(joined, whole):.2g} of the largest")


CHECKS = (_detached, _masked, _overflow, _denominator, _policy, _direction, _kl, _padding, _micro_batches)
