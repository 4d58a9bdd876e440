"""Logits to log-probs by declared rules, in torch, in vLLM's order and by its definitions (`vllm/v1/sample`).

Logits in float32: penalties, temperature, min_p, top_k, top_p, log-softmax. A token that the rules drop is -inf.
NaN stays NaN: what cannot be judged is judged by nobody here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines.semantics import Rules
from onepolicy.rollouts import Rollouts


@dataclass(frozen=True, slots=True)
class Context:
    """What a sequence's rules depend on besides the logits.

    `ids`: `[T]`. `starts`: `[T]`, where the reply that token t belongs to begins (t itself when it was not drawn):
    presence and frequency penalties count from there. `kept`: for each token the recorded kept set, or None.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    kept: list[NDArray[np.int32] | None] | None = None


def context_of(rollouts: Rollouts, i: int) -> Context:
    """The context of sequence i, from the columns `drawn`, `prompt_length` and `sampling_mask`."""
    at = rollouts.sequence(i)
    ids = rollouts.token_ids[at]
    place = np.arange(len(ids))
    prompt = rollouts.record("prompt_length", i)
    drawn = rollouts.drawn[at] if "drawn" in rollouts.tokens else place >= (len(ids) if prompt is None else prompt)
    begins = drawn & ~np.concatenate([[False], drawn[:-1]])
    starts = np.where(drawn, np.maximum.accumulate(np.where(begins, place, 0)), place)
    masks = rollouts.lists.get("sampling_mask")
    if masks is None:
        return Context(ids, starts)
    rows = [masks.row(t) if masks.valid is None or masks.valid[t] else None for t in range(at.start, at.stop)]
    return Context(ids, starts, [row if row is not None and len(row) else None for row in rows])


def process(logits: Any, rules: Rules, context: Context, first: int) -> Any:
    """`[n, V]` float32 logits after the rules; row r is the distribution of token `first + r`. Input is changed."""
    if rules.penalised:
        for row in range(len(logits)):
            _penalise(logits[row], rules, context, first + row)
    if rules.temperature != 1.0:
        logits = logits.div_(rules.temperature)
    if not rules.truncated:
        return logits
    kept = [None] * len(logits) if context.kept is None else context.kept[first : first + len(logits)]
    own = [row for row, ids in enumerate(kept) if ids is None]
    if own:
        logits[own] = truncate(logits[own], rules)
    for row, ids in enumerate(kept):
        if ids is not None:
            _keep(logits[row], ids)
    return logits


def _penalise(logits: Any, rules: Rules, context: Context, t: int) -> None:
    """Repetition: all tokens before t, positive logits divided, others multiplied; the other two: drawn tokens."""
    import torch

    seen = torch.from_numpy(np.unique(context.ids[:t]).astype(np.int64)).to(logits.device)
    values = logits[seen]
    logits[seen] = torch.where(values > 0, values / rules.repetition_penalty, values * rules.repetition_penalty)
    drawn, counts = np.unique(context.ids[context.starts[t] : t], return_counts=True)
    if len(drawn):
        at = torch.from_numpy(drawn.astype(np.int64)).to(logits.device)
        logits[at] -= rules.frequency_penalty * torch.from_numpy(counts).to(logits)
        logits[at] -= rules.presence_penalty


def truncate(logits: Any, rules: Rules) -> Any:
    """min_p, then top_k, then top_p, each row by its own logits. Ties at the k-th place are all kept."""
    if rules.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < probs.amax(-1, keepdim=True) * rules.min_p, float("-inf"))
    if rules.top_k <= 0 and rules.top_p >= 1:
        return logits
    ordered, index = logits.sort(dim=-1)
    if 0 < rules.top_k < logits.shape[-1]:
        ordered = ordered.masked_fill(ordered < ordered[:, -rules.top_k, None], float("-inf"))
    if rules.top_p < 1:
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - rules.top_p
        dropped[:, -1] = False  # at least one token is kept
        ordered = ordered.masked_fill(dropped, float("-inf"))
    return logits.scatter(-1, index, ordered)


def _keep(logits: Any, ids: NDArray[np.int32]) -> None:
    import torch

    at = torch.from_numpy(ids.astype(np.int64)).to(logits.device)
    values = logits[at].clone()
    logits.fill_(float("-inf"))
    logits[at] = values


def summarise(logits: Any, targets: Any) -> tuple[Any, Any, Any]:
    """`[n]` each: log-prob of the target, entropy, varentropy, from `[n, V]` float32 logits.

    The log-softmax is float32, as trainers compute it; the sums over the vocabulary are float64.
    """
    import torch

    logprobs = torch.log_softmax(logits, -1)
    probs = logprobs.exp()
    gone = probs == 0  # 0 * -inf would be NaN; a NaN probability is not 0 and stays
    surprisal = (-logprobs).masked_fill(gone, 0.0)
    entropy = (probs * surprisal).sum(-1, dtype=torch.float64)
    spread = (surprisal - entropy[:, None].float()).square()
    varentropy = (probs * spread).sum(-1, dtype=torch.float64)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy, varentropy
