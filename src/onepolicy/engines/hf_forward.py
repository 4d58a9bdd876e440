"""The forward passes of the transformers engine: whole sequences at once, or token by token through the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines.base import SamplingParams
from onepolicy.engines.processing import Context, process
from onepolicy.engines.semantics import GREEDY, Rules

_LOGITS_BYTES = 2**32  # of one batch, in the model's dtype; above it a batch gets fewer rows


def batches(lengths: NDArray[np.int64], batch_size: int, bytes_per_token: int) -> Iterator[list[int]]:
    """Indices of sequences that run together: the longest first, so that padding is short and memory fails early."""
    order = np.argsort(-lengths, kind="stable")
    order = [int(i) for i in order if lengths[i] > 1]
    while order:
        fit = _LOGITS_BYTES // (int(lengths[order[0]]) * bytes_per_token)
        rows = max(1, min(batch_size, fit))
        yield order[:rows]
        order = order[rows:]


def prefill(model: Any, rows: Sequence[NDArray[np.int32]], padding_side: str) -> Iterator[Any]:
    """`[T_i, V]` logits of each row from one full forward of the padded batch."""
    import torch

    longest = max(len(r) for r in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    places = [slice(longest - len(r), longest) if padding_side == "left" else slice(0, len(r)) for r in rows]
    for i, (row, at) in enumerate(zip(rows, places, strict=True)):
        ids[i, at], mask[i, at] = row, 1
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if padding_side == "left":
        inputs["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)
    tensors = {k: torch.from_numpy(v).to(model.device) for k, v in inputs.items()}
    logits = model(**tensors, use_cache=False).logits
    for i, at in enumerate(places):
        yield logits[i, at]


def decode(model: Any, rows: Sequence[NDArray[np.int32]], prompts: Sequence[int]) -> Iterator[Any]:
    """The same logits as an engine that draws computes them: the shortest prompt at once, then one forced id a step."""
    import torch

    longest = max(len(r) for r in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    feed = torch.from_numpy(ids).to(model.device)
    first = min(max(1, min(prompts)), longest)
    out = model(input_ids=feed[:, :first], use_cache=True)
    steps = [out.logits]
    for t in range(first, longest - 1):  # the last id predicts nothing that is asked for
        out = model(input_ids=feed[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        steps.append(out.logits)
    logits = torch.cat(steps, dim=1)
    for i, row in enumerate(rows):
        yield logits[i, : len(row)]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One reply: ids (a stop token included), log-probs of the distribution they were drawn from, why it ended."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str


def draw(model: Any, prompt: Sequence[int], params: SamplingParams, seed: int, stops: Sequence[int]) -> Drawn:
    """Draws one reply with the KV cache, batch 1: for small models and tests, not for speed."""
    import torch

    rules = Rules.of_params(params)
    random = torch.Generator(device=model.device).manual_seed(seed)
    ids, logprobs = list(prompt), []
    feed, past = torch.tensor([ids], device=model.device), None
    for _ in range(params.max_tokens):
        out = model(input_ids=feed, past_key_values=past, use_cache=True)
        past = out.past_key_values
        context = Context(np.asarray([*ids, 0], dtype=np.int32), np.full(len(ids) + 1, len(prompt)))
        row = torch.log_softmax(process(out.logits[0, -1:].float(), rules, context, len(ids)), -1)[0]
        greedy = params.temperature < GREEDY
        token = int(row.argmax()) if greedy else int(torch.multinomial(row.exp(), 1, generator=random))
        ids.append(token)
        logprobs.append(float(row[token]))
        if token in stops and not params.ignore_eos:
            return Drawn(ids[len(prompt) :], logprobs, "stop")
        feed = torch.tensor([[token]], device=model.device)
    return Drawn(ids[len(prompt) :], logprobs, "length")
