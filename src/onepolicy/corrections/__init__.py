"""Corrections of the loss for the gap between sampler and scorer, in one table: name -> function.

    c = corrections.truncate(sampler=sampler_logprobs, old=old_logprobs, mask=mask, cap=2.0)
    loss = (c.weights * c.keep * per_token_loss).sum() / c.denominator

Arrays are torch (any device) or numpy, padded `[B, T]` or packed `[T]`; see `Inputs`. What a NaN, an infinity and an
overflow become is one policy, stated in `ratio`. Weights are 1 at zero mismatch, and detached unless `grad=True`.

To add one: a rule in the file of its act (formula, paper, defaults with their source in the docstring), a test against
an independent formula, a line here. A preset is a TOML table in `presets/`.
"""

from __future__ import annotations

from typing import Any

from onepolicy.corrections.composition import Composition, combine, compose
from onepolicy.corrections.correction import Correct, Correction, Effects
from onepolicy.corrections.effects import EFFECTS
from onepolicy.corrections.frameworks import build, tables
from onepolicy.corrections.masking import (
    binary_kl_mask,
    divergence_mask,
    icepop,
    kpop,
    m2po,
    token_mask,
    tv_mask,
    vaco_mask,
)
from onepolicy.corrections.policies import policy_ratio, reference_kl
from onepolicy.corrections.ratio import Inputs
from onepolicy.corrections.rejection import (
    divergence_reject,
    error_reject,
    geometric_reject,
    off_policy_reject,
    sequence_reject,
    veto,
)
from onepolicy.corrections.truncation import (
    geometric_truncate,
    normalise,
    segment_truncate,
    sequence_truncate,
    truncate,
)

#: The numbers are those of the survey of corrections in the docs.
CORRECTIONS: dict[str, Correct] = {
    "truncate": truncate,  # 1
    "sequence_truncate": sequence_truncate,  # 2
    "geometric_truncate": geometric_truncate,  # 3
    "segment_truncate": segment_truncate,  # 4
    "icepop": icepop,  # 5
    "token_mask": token_mask,  # 6
    "sequence_reject": sequence_reject,  # 7
    "geometric_reject": geometric_reject,  # 8
    "divergence_reject": divergence_reject,  # 9
    "divergence_mask": divergence_mask,  # 9
    "veto": veto,  # 10
    "error_reject": error_reject,  # 11
    "off_policy_reject": off_policy_reject,  # 12
    "tv_mask": tv_mask,  # 13
    "binary_kl_mask": binary_kl_mask,  # 13
    "vaco_mask": vaco_mask,  # 13
    "kpop": kpop,  # 14
    "m2po": m2po,  # 15
    "normalise": normalise,  # 16
}  # 17 is `compose` and `combine`, 18 `policy_ratio`, 19 `reference_kl`


def preset(name: str, *, like_origin: bool = False, **options: Any) -> Composition:
    """What a framework applies, by `framework:name` and its own option names, as a composition to call.

        tis = preset("verl:decoupled_k3_rs_token_tis", rollout_is_threshold=3.0)
        c = tis(sampler=sampler_logprobs, old=old_logprobs, mask=mask)

    like_origin: True copies the known bugs that `note` tells of (verl's inverted k1 bounds). Errors: `UnknownName`
    (did you mean), `UsageError` for options that it does not have.
    """
    return build(name, options, CORRECTIONS, like_origin)


def presets() -> list[str]:
    """The names of all presets."""
    return list(tables())


__all__ = [
    "CORRECTIONS",
    "EFFECTS",
    "Composition",
    "Correct",
    "Correction",
    "Effects",
    "Inputs",
    "binary_kl_mask",
    "combine",
    "compose",
    "divergence_mask",
    "divergence_reject",
    "error_reject",
    "geometric_reject",
    "geometric_truncate",
    "icepop",
    "kpop",
    "m2po",
    "normalise",
    "off_policy_reject",
    "policy_ratio",
    "preset",
    "presets",
    "reference_kl",
    "segment_truncate",
    "sequence_reject",
    "sequence_truncate",
    "token_mask",
    "truncate",
    "tv_mask",
    "vaco_mask",
    "veto",
]
