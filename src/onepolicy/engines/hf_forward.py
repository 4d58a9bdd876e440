"""The forward passes of the transformers engine: padded batches, packed rows, or token by token by the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines.base import SamplingParams
from onepolicy.engines.hf_routes import Watch
from onepolicy.engines.processing import Context, process
from onepolicy.engines.semantics import GREEDY, Rules
from onepolicy.errors import EngineError, UsageError

Ids = NDArray[np.int32]

ROW_TOKENS = 4096  # of a packed row; a longer sequence has a row of its own
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


def packs(lengths: NDArray[np.int64], batch_size: int) -> Iterator[list[int]]:
    """Indices of sequences that share a row, in order: at most `batch_size` of them and `ROW_TOKENS` tokens."""
    row: list[int] = []
    for i in (int(i) for i in np.flatnonzero(lengths > 1)):
        if row and (len(row) == batch_size or lengths[[*row, i]].sum() > ROW_TOKENS):
            yield row
            row = []
        row.append(i)
    if row:
        yield row


@dataclass(frozen=True, slots=True)
class Pass:
    """A model, and the watch over its routers if there is one; called as the model is."""

    model: Any
    watch: Watch | None = None

    def __call__(self, **inputs: Any) -> tuple[Any, Any, Any]:
        """`[B, T, V]` logits, `[B, T, L * K]` experts or None, and the cache."""
        out = self.model(**inputs)
        return out.logits, self.watch and self.watch.taken(*inputs["input_ids"].shape), out.past_key_values

    def tensor(self, array: NDArray[np.int64]) -> Any:
        import torch

        return torch.from_numpy(array).to(self.model.device)


#: Of one sequence: `[T, V]` logits in the model's dtype (or the head's), and `[T, L * K]` experts or None.
Row = tuple[Any, Any]


def prefill(run: Pass, rows: Sequence[Ids], padding_side: str) -> Iterator[Row]:
    """Each row from one full forward of the padded batch. `left_unpositioned`: a fault, see `hf.PADDING`."""
    longest = max(len(r) for r in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    left = padding_side != "right"
    places = [slice(longest - len(r), longest) if left else slice(0, len(r)) for r in rows]
    for i, (row, at) in enumerate(zip(rows, places, strict=True)):
        ids[i, at], mask[i, at] = row, 1
    inputs: dict[str, Any] = {"input_ids": run.tensor(ids)}
    if padding_side != "left_unpositioned":
        inputs["attention_mask"] = run.tensor(mask)
    if padding_side == "left":
        inputs["position_ids"] = run.tensor(np.maximum(mask.cumsum(1) - 1, 0))
    logits, routes, _ = run(**inputs, use_cache=False)
    for i, at in enumerate(places):
        yield logits[i, at], None if routes is None else routes[i, at]


def packed(run: Pass, rows: Sequence[Ids], masked: bool) -> Iterator[Row]:
    """Each row from one forward of all of them in a single row; positions restart with each sequence.

    `masked` False: a fault, see `hf.PACKING`. Errors: `EngineError` for a model that cannot be packed.
    """
    lengths = [len(r) for r in rows]
    inputs: dict[str, Any] = {"input_ids": run.tensor(np.concatenate(rows).astype(np.int64)[None])}
    if len(rows) > 1:
        inputs["position_ids"] = run.tensor(np.concatenate([np.arange(n) for n in lengths])[None])
        inputs["attention_mask"] = _row_mask(run.model, lengths, masked)
    logits, routes, _ = run(**inputs, use_cache=False)
    ends = np.cumsum(lengths)
    for start, end in zip(ends - lengths, ends, strict=True):
        yield logits[0, start:end], None if routes is None else routes[0, start:end]


def _row_mask(model: Any, lengths: Sequence[int], masked: bool) -> Any:
    """The attention mask of a packed row; None where the kernel itself separates restarting positions."""
    import torch

    kernel, config = model.config._attn_implementation, model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or layers & {"linear_attention", "mamba", "conv", "recurrent"}:
        raise EngineError(f"packing: {type(model).__name__} carries a state from token to token, which no mask stops")
    if not masked:
        if kernel == "flash_attention_2":
            raise UsageError("packing=unmasked: flash_attention_2 separates restarting positions; use sdpa or eager")
        return torch.ones(1, sum(lengths), dtype=torch.long, device=model.device)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if kernel in ("sdpa", "eager") and not (window and max(lengths) > window):
        return document_mask(lengths, model.dtype).to(model.device)
    if not _separates_documents():
        raise EngineError(
            f"packing: attention={kernel} needs transformers 5 to keep sequences of a row apart; use sdpa"
        )
    return None


def document_mask(lengths: Sequence[int], dtype: Any) -> Any:
    """`[1, 1, N, N]`, added to attention scores: 0 for earlier tokens of the same sequence, else the least number."""
    import torch

    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (document[:, None] == document[None]).tril()
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def _separates_documents() -> bool:
    """Whether transformers itself masks by restarting positions, sliding windows included."""
    from transformers import masking_utils

    return hasattr(masking_utils, "find_packed_sequence_indices")


def decode(run: Pass, rows: Sequence[Ids], prompts: Sequence[int]) -> Iterator[Row]:
    """The same as an engine that draws computes it: the shortest prompt at once, then one forced id a step."""
    import torch

    longest = max(len(r) for r in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    feed = run.tensor(ids)
    first = min(max(1, min(prompts)), longest)
    logits, routes, past = run(input_ids=feed[:, :first], use_cache=True)
    steps, chosen = [logits], [routes]
    for t in range(first, longest - 1):  # the last id predicts nothing that is asked for
        logits, routes, past = run(input_ids=feed[:, t : t + 1], past_key_values=past, use_cache=True)
        steps.append(logits)
        chosen.append(routes)
    whole, experts = torch.cat(steps, dim=1), None if run.watch is None else torch.cat(chosen, dim=1)
    for i, row in enumerate(rows):
        yield whole[i, : len(row)], None if experts is None else experts[i, : len(row)]


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
