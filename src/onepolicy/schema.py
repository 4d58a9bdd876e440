"""The column contract: every column that rollouts can carry, written once.

Validation, storage (Parquet, JSONL) and the docs are generated from `COLUMNS`. Levels:

- `token`: one value a token, flat `[T]` with offsets `[S + 1]`;
- `record`: one value a sequence, `[S]`;
- `token_list`: a list a token (CSR: values, offsets `[T + 1]`);
- `record_list`: a list a sequence (CSR: values, offsets `[S + 1]`).

Position i of a token column belongs to token i, given the tokens before it. Index 0 has no context, so no
log-prob: it is null. Missing is null, never 0.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["token", "record", "token_list", "record_list"]
Dtype = Literal["int32", "int64", "bool", "float32", "float64", "float", "string", "json"]

#: The scorings that have columns of their own; any other name (a leg's) gets the same three columns.
SCORINGS = ("sampler", "old", "current", "reference")

#: What a reported log-prob means. `raw`: before temperature, penalties and truncation. `temperature`: logits divided
#: by the temperature, whole vocabulary. `processed`: after temperature, penalties and top-k / top-p / min-p,
#: renormalised over the kept set (vLLM's `processed_logprobs`).
SEMANTICS = ("raw", "temperature", "processed")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the contract."""

    level: Level
    dtype: Dtype
    null: str
    meaning: str
    required: bool = False


def _scoring_columns(name: str, who: str) -> dict[str, Column]:
    null = "index 0, and every token this side did not score"
    return {
        f"{name}_logprobs": Column(
            "token", "float", null, f"Log-prob of the token given those before it, in nats, by {who}. At most 0."
        ),
        f"{name}_entropy": Column(
            "token", "float", null, f"Entropy of the distribution at this position, in nats, by {who}."
        ),
        f"{name}_varentropy": Column(
            "token", "float", null, f"Variance of the surprisal -log p under the distribution here, by {who}."
        ),
    }


_WHO = {
    "sampler": "the engine that drew the tokens",
    "old": "the scorer before the update (the policy that is being corrected)",
    "current": "the scorer inside the update",
    "reference": "a reference policy (for the KL penalty) or a third, trusted scorer",
}

#: name -> Column, in the order of the documentation.
COLUMNS: dict[str, Column] = {
    # identity
    "record_id": Column("record", "string", "named by a hash of ids and log-probs", "Unique name of the sequence."),
    "run_id": Column("record", "string", "unknown", "The training run."),
    "step": Column("record", "int64", "unknown", "The training step that used the sequence."),
    "group_id": Column("record", "string", "unknown", "Sequences of one prompt share it (the GRPO group)."),
    "sample_id": Column("record", "string", "unknown", "The sequence within its group."),
    "trajectory_id": Column("record", "string", "unknown", "Turns or segments of one episode share it."),
    "turn": Column("record", "int32", "unknown", "Turn of a multi-turn trajectory, from 0."),
    "env_id": Column("record", "string", "unknown", "Environment or data source."),
    "replica_id": Column("record", "string", "unknown", "The sampler's replica (server) that drew the reply."),
    # tokens
    "token_ids": Column("token", "int32", "never", "Prompt and reply, as the sampler saw them.", required=True),
    "prompt_length": Column("record", "int32", "unknown", "The first tokens of the sequence that are the prompt."),
    "drawn": Column("token", "bool", "never", "The sampler drew this token (not prompt, tool output, forced text)."),
    "loss_mask": Column("token", "bool", "unknown: counted as trained", "The token is trained on."),
    "policy_version": Column("token", "int64", "unknown", "Version of the weights that drew the token."),
    "scorer_version": Column("record", "int64", "unknown", "Version of the weights that scored `old`."),
    # scorings
    **{k: v for name, who in _WHO.items() for k, v in _scoring_columns(name, who).items()},
    # learning signal
    "advantages": Column("token", "float", "unknown", "Advantage of the token."),
    "reward": Column("record", "float64", "unknown", "Reward of the sequence."),
    # how it was drawn
    "temperature": Column("record", "float64", "undeclared", "Sampling temperature."),
    "top_p": Column("record", "float64", "undeclared", "Nucleus mass; 1 keeps everything."),
    "top_k": Column("record", "int32", "undeclared", "Kept tokens; 0 or -1 keeps everything."),
    "min_p": Column("record", "float64", "undeclared", "Least share of the top token's probability; 0 is off."),
    "repetition_penalty": Column("record", "float64", "undeclared", "Multiplicative penalty; 1 is off."),
    "presence_penalty": Column("record", "float64", "undeclared", "Additive penalty for seen tokens; 0 is off."),
    "frequency_penalty": Column("record", "float64", "undeclared", "Additive penalty for each occurrence; 0 is off."),
    "logprob_semantics": Column(
        "record",
        "string",
        "undeclared (a scorer refuses to guess)",
        "What the sampler's log-probs mean: raw, temperature or processed.",
    ),
    "sampling_mask": Column("token_list", "int32", "unknown", "Token ids that survived top-k / top-p / min-p here."),
    "routed_experts": Column(
        "token_list", "int32", "unknown", "Experts the sampler chose: layers x top-k ids, layer by layer."
    ),
    "scorer_routed_experts": Column(
        "token_list", "int32", "unknown", "Experts the scorer (`old`) chose, in the same layout."
    ),
    "padding_length": Column("record", "int32", "unknown", "Padding beside the sequence in the batch that scored it."),
    "cached_prefix_length": Column("record", "int32", "unknown", "Prompt tokens served from a prefix cache."),
    "finish_reason": Column("record", "string", "unknown", "stop, length, abort, ..., in the engine's word."),
    "stop_token_ids": Column("record_list", "int32", "unknown", "Ids that end a reply."),
    # text
    "prompt_text": Column("record", "string", "unknown", "The prompt as text."),
    "prompt_messages": Column("record", "json", "unknown", "The prompt as chat messages."),
    # who made it
    "sampler_fingerprint": Column("record", "json", "unknown", "Versions, dtypes, kernels, flags, digests."),
}


def scoring_column(name: str) -> tuple[str, str] | None:
    """`("old", "logprobs")` for `old_logprobs`; None for a name that is no scoring column, `x_...` (the user's) too."""
    for field in ("logprobs", "entropy", "varentropy"):
        if name.endswith("_" + field) and name[: -len(field) - 1].replace("_", "").isalnum():
            return None if name.startswith("x_") else (name[: -len(field) - 1], field)
    return None


def is_scoring_name(name: str) -> bool:
    """Whether a scoring can be called so: letters, digits and `_`, and its columns are not the user's own (`x_...`)."""
    return scoring_column(f"{name}_logprobs") == (name, "logprobs")


def column(name: str) -> Column | None:
    """The column of that name, a leg's scoring columns included; None if the contract has no such name."""
    if name in COLUMNS:
        return COLUMNS[name]
    parts = scoring_column(name)
    return _scoring_columns(parts[0], f"the scoring {parts[0]!r}")[name] if parts else None


def of_level(level: Level) -> Iterator[str]:
    """Names of the contract's columns at one level, in order."""
    return (name for name, spec in COLUMNS.items() if spec.level == level)
