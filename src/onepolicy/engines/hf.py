"""`hf:DIR`: a transformers model, as a scorer and (slowly) as a sampler.

Logits are what the model gives in its dtype; they are taken to float32 and log-softmaxed there, as trainers do.
dtype is bfloat16 unless it is said, because that is what production computes in; `dtype=float32` asks the other
question (same function?). No code of the model directory is run.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import onepolicy
from onepolicy.engines import hf_forward, model_files
from onepolicy.engines.base import SamplingParams, Switch, declared
from onepolicy.engines.processing import Context, context_of, process, summarise
from onepolicy.engines.replies import Reply, rollouts_of
from onepolicy.engines.semantics import Rules, common_semantics
from onepolicy.engines.texts import OFFLINE, PATIENT_THREADS, Texts, stop_ids
from onepolicy.errors import ContentError, EngineError, MissingExtra, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

DTYPES = ("float32", "bfloat16", "float16")
_CHUNK_BYTES = 2**26  # of float32 logits; about six such arrays live at once
_DISTRIBUTION_BYTES = 2**31


class HfEngine:
    """A causal language model in the Hugging Face format, safetensors weights.

    Errors: `MissingExtra` without torch or transformers; `UsageError` for a target that is no model; `EngineError`
    for one that cannot be loaded completely.
    """

    NAME: ClassVar[str] = "hf"
    SAMPLES: ClassVar[bool] = True
    SCORES: ClassVar[bool] = True
    HEAVY: ClassVar[bool] = True
    ENVIRONMENT: ClassVar[Mapping[str, str]] = OFFLINE | PATIENT_THREADS
    SWITCHES: ClassVar[Mapping[str, Switch]] = {
        "dtype": Switch(str, "bfloat16", "precision of weights and activations", DTYPES),
        "batch_size": Switch(int, 8, "sequences in one forward (fewer when their logits would pass 4 GiB)"),
        "padding_side": Switch(str, "right", "where shorter sequences of a batch are filled up", ("right", "left")),
        "attention": Switch(str, "sdpa", "kernel", ("sdpa", "eager", "flash_attention_2", "flex_attention")),
        "path": Switch(str, "prefill", "whole sequences, or forced through the KV cache", ("prefill", "decode")),
        "threads": Switch(int, 0, "CPU threads; 0 leaves torch's own number"),
        "device": Switch(str, "auto", "torch device; auto is cuda where there is one, else cpu"),
    }

    def __init__(self, target: str, **options: Any) -> None:
        self._options = {**{k: s.default for k, s in self.SWITCHES.items()}, **options}
        if self._options["batch_size"] < 1 or self._options["threads"] < 0:
            raise UsageError(f"engine hf:{target}: batch_size must be at least 1 and threads at least 0")
        self._directory = model_files.model_directory(target, self.NAME)
        self._model: Any
        self._torch, self._model = _load(self._directory, self._options)
        self._texts, self._stops = Texts(self._directory), stop_ids(self._directory)
        self._facts = model_files.model_facts(self._directory)
        config = self._model.config.get_text_config()
        self._vocab = int(self._model.get_input_embeddings().weight.shape[0])
        self._max_length = getattr(config, "max_position_embeddings", None)

    # the methods of an engine

    def fingerprint(self) -> Mapping[str, Any]:
        """Versions, kernels, switches and digests. JSON-able."""
        import transformers

        switches = {k: v for k, v in self._options.items() if k not in ("threads", "device")}
        return {
            "engine": self.NAME,
            **switches,
            **self._facts,
            "vocab_size": self._vocab,
            "attention": self._model.config._attn_implementation,
            "device": str(self._model.device),
            "threads": self._torch.get_num_threads(),
            "kernels": _kernels(self._torch),
            "versions": {
                "onepolicy": onepolicy.__version__,
                "torch": self._torch.__version__,
                "transformers": transformers.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        return self._texts.encode(prompts)

    def decode(self, ids: Sequence[int]) -> list[str]:
        return self._texts.decode(ids)

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rollouts:
        """Batch 1 through the KV cache. Reply k of all is drawn with seed `params.seed + k`; semantics `processed`.

        Errors: `EngineError` for a prompt that is empty, too long, or outside the vocabulary.
        """
        replies: list[Reply] = []
        for i, prompt in enumerate(prompts):
            self._check(f"prompt {i}", np.asarray(prompt), len(prompt) + params.max_tokens)
            for k in range(params.samples):
                seed = params.seed + i * params.samples + k
                with self._torch.inference_mode():
                    drawn = hf_forward.draw(self._model, prompt, params, seed, self._stops)
                replies.append(Reply(prompt, drawn.ids, drawn.logprobs, drawn.finish_reason, 0))
        return rollouts_of(
            replies,
            params,
            semantics="processed",
            dtype=self._options["dtype"],
            stop_ids=self._stops,
            fingerprint=self.fingerprint(),
            scoring_id=uuid.uuid4().hex,
        )

    def score(self, rollouts: Rollouts, *, distributions: bool = False) -> Scoring:
        """`[T]` log-probs, entropy and varentropy of the given ids at their declared semantics; index 0 is null.

        `distributions`: also `[T, V]` log-probs, float64, renormalised; the row of an index 0 is NaN.

        Errors: `ContentError` for an id outside the vocabulary; `EngineError` for a sequence that is too long, and for
        distributions above 2 GiB; `UsageError` when the semantics are not declared.
        """
        rows = declared(rollouts, "hf")
        for i, name in enumerate(rollouts.record_ids()):
            self._check(f"record {name!r}", rollouts.token_ids[rollouts.sequence(i)], int(rollouts.lengths[i]))
        out = _Columns(rollouts, self._vocab if distributions else None)
        with self._torch.inference_mode():
            for i, logits in self._logits(rollouts):
                self._fill(out, rollouts.sequence(i).start, logits, Rules.of(rows[i]), context_of(rollouts, i))
        return Scoring(
            Values(out.logprobs, out.valid),
            Values(out.entropy, out.valid),
            Values(out.varentropy, out.valid),
            out.distributions,
            common_semantics(rows),
            self._options["dtype"],
            self.fingerprint(),
            uuid.uuid4().hex,
        )

    def close(self) -> None:
        self._model = None

    # inside

    def _check(self, what: str, ids: NDArray[Any], length: int) -> None:
        bad = np.flatnonzero((ids < 0) | (ids >= self._vocab))
        if len(bad):
            raise ContentError(
                f"{what}: token id {int(ids[bad[0]])} at position {int(bad[0])} is outside the vocabulary of "
                f"{self._vocab} of {self._directory.name}; the ids were made by another tokenizer or model"
            )
        if len(ids) == 0 and what.startswith("prompt"):
            raise EngineError(f"{what}: it is empty; a model needs at least one id to continue")
        if self._max_length is not None and length > self._max_length:
            raise EngineError(
                f"{what}: {length} tokens, but {self._directory.name} has positions for {self._max_length}; "
                "leave it out or use the model that drew it"
            )

    def _logits(self, rollouts: Rollouts) -> Iterator[tuple[int, Any]]:
        """(sequence, its `[T, V]` logits in the model's dtype), in the order of the batches."""
        per_token = self._vocab * self._model.dtype.itemsize
        for batch in hf_forward.batches(rollouts.lengths, self._options["batch_size"], per_token):
            rows = [rollouts.token_ids[rollouts.sequence(i)] for i in batch]
            if self._options["path"] == "decode":
                prompts = [rollouts.record("prompt_length", i) or 1 for i in batch]
                yield from zip(batch, hf_forward.decode(self._model, rows, prompts), strict=True)
            else:
                yield from zip(batch, hf_forward.prefill(self._model, rows, self._options["padding_side"]), strict=True)

    def _fill(self, out: _Columns, start: int, logits: Any, rules: Rules, context: Context) -> None:
        """Token t of the sequence is judged by the logits of t - 1; in chunks, so that float32 copies stay small."""
        torch, n = self._torch, len(context.ids)
        size = max(1, _CHUNK_BYTES // (4 * logits.shape[-1]))
        for first in range(1, n, size):
            last = min(n, first + size)
            targets = torch.from_numpy(context.ids[first:last].astype(np.int64)).to(logits.device)
            # a copy, because the rules work in place and float() of float32 is no copy
            part = process(logits[first - 1 : last - 1].to(torch.float32, copy=True), rules, context, first)
            at = slice(start + first, start + last)
            lp, entropy, varentropy = summarise(part, targets)
            out.logprobs[at], out.entropy[at], out.varentropy[at] = (x.cpu().numpy() for x in (lp, entropy, varentropy))
            if out.distributions is not None:
                out.distributions[at] = torch.log_softmax(part.double(), -1).cpu().numpy()


class _Columns:
    """The result columns of one scoring, filled sequence by sequence."""

    def __init__(self, rollouts: Rollouts, vocab: int | None) -> None:
        n = rollouts.n_tokens
        if vocab is not None and n * vocab * 8 > _DISTRIBUTION_BYTES:
            raise EngineError(
                f"full distributions of {n} tokens x {vocab} ids take {n * vocab * 8 / 2**30:.1f} GiB, the limit is "
                f"{_DISTRIBUTION_BYTES / 2**30:.0f} GiB; ask for at most "
                f"{_DISTRIBUTION_BYTES // (vocab * 8)} tokens at once"
            )
        self.logprobs, self.entropy, self.varentropy = (np.zeros(n, dtype=np.float32) for _ in range(3))
        self.valid = np.ones(n, dtype=bool)
        self.valid[rollouts.offsets[:-1][rollouts.lengths > 0]] = False
        self.distributions = None if vocab is None else np.full((n, vocab), np.nan)


def _load(directory: Path, options: Mapping[str, Any]) -> tuple[Any, Any]:
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as err:
        raise MissingExtra(err.name or "transformers", "hf", "the engine 'hf'") from err
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    device = options["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=getattr(torch, options["dtype"]),
            attn_implementation=options["attention"],
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, info = loaded
        model = model.eval().to(device)
    except Exception as err:
        first = (str(err).strip().splitlines() or ["no message"])[0]
        raise EngineError(f"hf:{directory}: the model cannot be loaded: {type(err).__name__}: {first[:300]}") from err
    missing = sorted(info.get("missing_keys") or [])
    if missing:
        raise EngineError(
            f"hf:{directory}: {len(missing)} tensors are not in the files and would be random, {missing[0]!r} first; "
            "the checkpoint does not fit its config.json"
        )
    return torch, model


def _kernels(torch: Any) -> dict[str, Any]:
    """What is known about the kernels that a run will use."""
    known: dict[str, Any] = {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if torch.cuda.is_available():
        matmul = torch.backends.cuda.matmul
        known |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "allow_tf32": matmul.allow_tf32,
            "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        }
    return known
