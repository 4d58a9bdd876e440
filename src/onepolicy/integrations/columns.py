"""A framework's batch under our names, and what a correction changes in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy import corrections
from onepolicy.arrays import Array
from onepolicy.corrections import Correction
from onepolicy.errors import ContentError, UsageError

#: What a hook may be given: a preset's name (`verl:decoupled_token_is`), a correction, a composition.
Correcting = str | Callable[..., Correction]


@dataclass(frozen=True, slots=True)
class Columns:
    """Padded `[B, T]` columns, nats, one kind of array on one device; the names are those of `Monitor.observe`.

    `old` is None in bypass mode: then `current` stands in its place. `advantages`, `policy_version`: `[B]` or `[B, T]`.
    """

    sampler: Array
    old: Array | None
    mask: Array
    current: Array | None = None
    reference: Array | None = None
    advantages: Array | None = None
    policy_version: Array | None = None
    scorer_version: int | None = None

    def observe(self, monitor: Any, correction: Any = None) -> Any:
        """`monitor.observe` of these columns; `correction`: what the loss is weighted with."""
        return monitor.observe(
            self.sampler,
            self.old,
            self.mask,
            current_logprobs=self.current,
            reference_logprobs=self.reference,
            advantages=self.advantages,
            policy_version=self.policy_version,
            scorer_version=self.scorer_version,
            correction=correction,
        )

    def correct(self, correction: Correcting, **more: Any) -> Correction:
        """The correction of these columns; `more` are further inputs (`rewards=`, `groups=`, `denominator=`).

        A preset says itself whether it corrects old or current against the sampler; a single correction takes old where
        there is one. Errors: `UnknownName`, `UsageError` for a policy that the batch does not have.
        """
        act = chosen(correction)
        given = {"sampler": self.sampler, "old": self.old, "current": self.current, "advantages": self.advantages}
        for name in _without(act, self.old is not None):
            given[name] = None
        return act(mask=self.mask, **{k: x for k, x in given.items() if x is not None}, **more)


def chosen(correction: Correcting) -> Callable[..., Correction]:
    """The correction, or the preset of that name. Errors: `UnknownName`, `UsageError`."""
    if isinstance(correction, str):
        return corrections.preset(correction)
    if not callable(correction):
        what = type(correction).__name__
        raise UsageError(f"correction is a {what}, wanted a preset's name or one of onepolicy.corrections")
    return correction


def _without(act: Any, has_old: bool) -> tuple[str, ...]:
    """The policy that this correction does not look at."""
    if getattr(act, "behind", "sampler") == "old":
        return ("sampler",)
    mode = getattr(act, "mode", "") or ("decoupled" if has_old else "bypass")
    return ("current",) if mode == "decoupled" else ("old",)


def weighted(advantages: Array, correction: Correction) -> Array:
    """`[B, T]` advantages times the weights, 0 where a token is dropped.

    A clipped policy loss is linear in an advantage's size: min(r A, clip(r) A), the dual clip, GSPO and REINFORCE all
    give w times the loss for w times the advantage, w >= 0. So this weights such a loss exactly, after its clip, and
    leaves a KL term that is added to it alone.
    """
    return _by_token(advantages) * correction.weights


def trained(mask: Array, correction: Correction) -> Array:
    """The loss's mask: shrunk to what is kept where the correction counts kept tokens only (`denominator="kept"`).

    Else, and where nothing at all is kept, it stays: what is dropped has the weight 0 and counts in the denominator.
    (An empty mask makes some frameworks divide 0 by 0.)
    """
    if correction.over != "kept":
        return mask
    keep = correction.keep
    return mask * (keep | ~keep.any())


def _by_token(x: Array) -> Array:
    return x.reshape(-1, 1) if x.ndim == 1 else x


def padded(rows: Sequence[Array], value: float = 0.0) -> Array:
    """`[B, T]` of `B` one-dimensional torch tensors, filled up on the right. Errors: `ContentError` for no rows."""
    from torch.nn.utils.rnn import pad_sequence

    if not rows:
        raise ContentError("the batch has no sequences; wanted one or more")

    return pad_sequence(list(rows), batch_first=True, padding_value=value)


def unpadded(x: Array, lengths: Sequence[int]) -> list[Array]:
    """The rows of `[B, T]`, each as long as it was."""
    return [row[:n] for row, n in zip(x, lengths, strict=True)]


def applied(
    columns: Columns, correction: Correcting | None, monitor: Any, **more: Any
) -> tuple[Correction | None, Any]:
    """(the correction, the monitor's observation of the columns with it); None for what is not asked for."""
    c = None if correction is None else columns.correct(correction, **more)
    return c, None if monitor is None else columns.observe(monitor, c)


def same_lengths(where: str, **columns: Sequence[Array]) -> list[int]:
    """The lengths of the rows. Errors: `ContentError` for columns that differ in them."""
    lengths = {name: [int(x.shape[0]) for x in rows] for name, rows in columns.items()}
    first = next(iter(lengths))
    for name, mine in lengths.items():
        if mine != lengths[first]:
            raise ContentError(
                f"{where}: {name} has rows of {mine[:4]} tokens, {first} of {lengths[first][:4]}; wanted the same "
                "(under context parallelism a rank holds parts of rows: gather them first)"
            )
    return lengths[first]


def present(where: str, batch: Any, *keys: str) -> None:
    """Errors: `ContentError` naming what is not there, or None."""
    missing = [key for key in keys if batch.get(key, None) is None]
    if missing:
        raise ContentError(f"{where}: no {', '.join(missing)}; got {', '.join(map(str, batch.keys()))}")


def numbers_of(observation: Any, correction: Correction | None) -> dict[str, float]:
    """What a framework may log: the monitor's last numbers, or else the correction's effects; `onepolicy/NAME`."""
    if observation is not None:
        found = observation.numbers
    else:
        found = {} if correction is None else correction.effects.floats()
    return {f"onepolicy/{name}": x for name, x in found.items() if x is not None}
