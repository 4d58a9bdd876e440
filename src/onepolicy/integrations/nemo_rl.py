"""NeMo-RL: `train_data`, between the advantages and `policy.train`.

    train_data = nemo_rl.apply(train_data, "nemo_rl:icepop", monitor)

All columns are `[B, S]` over prompt and response; position i holds the log-prob of token i, and index 0 is not used.
Leave `use_importance_sampling_correction` off, so that nothing is weighted twice.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from onepolicy.errors import ContentError
from onepolicy.integrations.columns import Columns, Correcting, applied, present, trained, weighted


def columns(train_data: MutableMapping[str, Any]) -> Columns:
    """The columns of `train_data` (a `BatchedDataDict`), without index 0: `[B, S - 1]`.

    Errors: `ContentError`; also where `force_on_policy_ratio` left zeros for `prev_logprobs`.
    """
    present("NeMo-RL train_data", train_data, "generation_logprobs", "prev_logprobs", "token_mask", "sample_mask")
    if not train_data["prev_logprobs"].any():
        raise ContentError(
            "NeMo-RL train_data: prev_logprobs are all 0, as with force_on_policy_ratio; wanted the scorer's, so set "
            "force_on_policy_ratio=false, or skip_prev_logprobs off"
        )
    reference = train_data.get("reference_policy_logprobs", None)
    advantages = train_data.get("advantages", None)
    return Columns(
        sampler=train_data["generation_logprobs"][:, 1:],
        old=train_data["prev_logprobs"][:, 1:],
        mask=train_data["token_mask"][:, 1:] * train_data["sample_mask"].reshape(-1, 1),
        reference=reference[:, 1:] if reference is not None and reference.any() else None,
        advantages=advantages if advantages is None or advantages.ndim == 1 else advantages[:, 1:],
    )


def apply(train_data: Any, correction: Correcting | None = None, monitor: Any = None) -> Any:
    """`train_data`, observed, with weighted `advantages` `[B, S]`, and `token_mask` where kept tokens alone count.

    NeMo-RL's losses are linear in the advantages (`columns.weighted`). Returns it, changed in place.
    """
    seen = columns(train_data)
    c, _ = applied(seen, correction, monitor)
    if c is not None:
        train_data["advantages"] = _with_index_0(weighted(seen.advantages, c))
        train_data["token_mask"] = _with_index_0(trained(train_data["token_mask"][:, 1:], c))
    return train_data


def _with_index_0(x: Any) -> Any:
    """`[B, S]`: a column of zeros before `[B, S - 1]`."""
    import torch

    return torch.cat([x.new_zeros(x.shape[0], 1), x], 1)
