"""Inside vLLM's sampler: ids are forced through its decode, and the entropy of what it draws from is read.

The drawn id of a row is replaced after the sampling and before its log-prob is looked up. No logit is touched, so raw
and processed log-probs are those that the engine reports when it draws these ids itself. `ForcedIds` is a logits
processor of the V1 interface: that is how one learns which request stands in which row. The V2 model runner has trace
replay instead, which does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: For `LLM(logits_processors=[...])`; a name, because workers of a parallel engine import it themselves.
PROCESSOR = "onepolicy.engines.vllm_forced:ForcedIds"
_FORCED, _KEY = "onepolicy_forced", "onepolicy_key"

#: Entropy and varentropy by request and by place in its reply.
Entropies = dict[int, dict[int, tuple[float, float]]]


def forced_args(ids: Sequence[int]) -> dict[str, Any]:
    """`SamplingParams.extra_args`: these ids come out, one a step."""
    return {_FORCED: list(ids)}


def kept_args(key: int) -> dict[str, Any]:
    """`SamplingParams.extra_args`: the entropies of this request are kept under `key`."""
    return {_KEY: key}


def take_entropies(worker: Any) -> Entropies:
    """For `LLM.collective_rpc`: what was kept since the last call."""
    processor = _mine(worker.model_runner.input_batch)
    assert processor is not None  # it is always loaded
    taken, processor.entropies = processor.entropies, {}
    return taken


@dataclass(slots=True)
class _Row:
    """A request in the batch. `drawn` is vLLM's own list, which grows with each step."""

    forced: Sequence[int]
    key: int | None
    drawn: list[int]


def _row(params: Any, prompt: Any, drawn: list[int]) -> _Row | None:
    given: Mapping[str, Any] = params.extra_args or {}
    if _FORCED not in given and _KEY not in given:
        return None
    return _Row(given.get(_FORCED) or (), given.get(_KEY), drawn)


def __getattr__(name: str) -> Any:
    if name == "ForcedIds":
        return _processor_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _processor_class() -> type[Any]:
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class ForcedIds(LogitsProcessor):
        """Knows the row of each request; changes no logit."""

        def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
            self.rows: dict[int, _Row] = {}
            self.entropies: Entropies = {}
            _wrap_sampler()

        def is_argmax_invariant(self) -> bool:
            return True

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(self.rows, batch_update, _row)

        def apply(self, logits: Any) -> Any:
            return logits

        def replace(self, sampled: Any) -> None:
            for at, row in self.rows.items():
                if len(row.drawn) < len(row.forced) and at < len(sampled):
                    sampled[at] = row.forced[len(row.drawn)]

        def keep(self, logits: Any) -> None:
            """A prompt that is prefilled in parts passes here for each: the last one stands."""
            rows = {at: r for at, r in self.rows.items() if r.key is not None and at < len(logits)}
            if not rows:
                return
            for row, (entropy, varentropy) in zip(rows.values(), _moments(logits[list(rows)]), strict=True):
                self.entropies.setdefault(row.key or 0, {})[len(row.drawn)] = (entropy, varentropy)

    return ForcedIds


def _moments(logits: Any) -> list[list[float]]:
    import torch

    from onepolicy.engines.processing import summarise

    _, entropy, varentropy = summarise(logits.float(), torch.zeros(len(logits), dtype=torch.long, device=logits.device))
    return torch.stack([entropy, varentropy], 1).tolist()


@functools.cache
def _wrap_sampler() -> None:
    """Once a process: `forward` sees the raw logits, `sample` the processed log-probs and the drawn ids."""
    from vllm.v1.sample.sampler import Sampler

    Sampler.forward = _seeing_raw(Sampler.forward)
    Sampler.sample = _replacing(Sampler.sample)


def _seeing_raw(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def forward(self: Any, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        mine = _mine(sampling_metadata)
        if mine is not None and self.logprobs_mode.startswith("raw"):
            mine.keep(logits)
        return inner(self, logits, sampling_metadata, *args, **kwargs)

    return forward


def _replacing(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def sample(self: Any, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        sampled, logprobs = inner(self, logits, sampling_metadata, *args, **kwargs)
        mine = _mine(sampling_metadata)
        if mine is not None:
            if logprobs is not None:
                mine.keep(logprobs)
            mine.replace(sampled)
        return sampled, logprobs

    return sample


def _mine(batch: Any) -> Any | None:
    """Our processor among those of a batch or of its metadata."""
    wanted = _processor_class()
    return next((p for p in batch.logitsprocs.argmax_invariant if isinstance(p, wanted)), None)
