"""`hf:DIR`: a transformers model, as a scorer and (slowly) as a sampler.

Logits are what the model gives in its dtype; they are taken to float32 and log-softmaxed there, as trainers do.
dtype is bfloat16 unless it is said, because that is what production computes in; `dtype=float32` asks the other
question (same function?), without TF32. No code of the model directory is run.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import onepolicy
from onepolicy.engines import hf_forward, hf_load, model_files
from onepolicy.engines.base import SamplingParams, Switch, declared, using_of
from onepolicy.engines.hf_routes import Watch
from onepolicy.engines.processing import Context, context_of, process, summarise
from onepolicy.engines.replies import Reply, rollouts_of
from onepolicy.engines.semantics import Rules, common_semantics
from onepolicy.engines.texts import OFFLINE, PATIENT_THREADS, Texts, stop_ids
from onepolicy.errors import ContentError, EngineError, UnknownName, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

DTYPES = ("float32", "bfloat16", "float16")
#: `left_unpositioned` is a known fault, to be reproduced: filled up on the left, with neither mask nor positions.
PADDING = ("right", "left", "left_unpositioned")
#: `unmasked` is a known fault, to be reproduced: positions restart with each sequence, but each sees those before it.
PACKING = ("alone", "packed", "unmasked")
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
    RULES: ClassVar[bool] = True  # applies whatever temperature, truncation and penalties are declared
    ENVIRONMENT: ClassVar[Mapping[str, str]] = OFFLINE | PATIENT_THREADS
    SWITCHES: ClassVar[Mapping[str, Switch]] = {
        "dtype": Switch(str, "bfloat16", "precision of weights and activations", DTYPES),
        "head_dtype": Switch(str, "auto", "precision of the head's product; auto is dtype", ("auto", "float32")),
        "rounded_to": Switch(str, "none", "weights are rounded to this first", ("none", "bfloat16", "float16")),
        "batch_size": Switch(int, 8, "sequences in one forward (fewer when logits would pass 4 GiB)", live=True),
        "padding_side": Switch(
            str,
            "right",
            "where shorter sequences are filled up; left_unpositioned is a known fault",
            PADDING,
            live=True,
        ),
        "packing": Switch(
            str,
            "alone",
            "batch_size sequences share a row of 4096 tokens; unmasked is a known fault",
            PACKING,
            live=True,
        ),
        "attention": Switch(str, "sdpa", "kernel", ("sdpa", "eager", "flash_attention_2", "flex_attention"), live=True),
        "path": Switch(
            str, "prefill", "whole sequences, or forced through the KV cache", ("prefill", "decode"), live=True
        ),
        "semantics": Switch(
            str,
            "declared",
            "what log-probs mean; the other two ignore declared rules",
            ("declared", "raw", "temperature"),
        ),
        "routes": Switch(bool, False, "experts of mixture models for each token"),
        "overrides": Switch(str, "", "JSON object that is merged into the model's config"),
        "edit": Switch(str, "", "JSON object: a staged fault of the weights, as noise on one tensor"),
        "threads": Switch(int, 0, "CPU threads; 0 leaves torch's own number"),
        "device": Switch(str, "auto", "torch device; auto is cuda where there is one, else cpu"),
    }

    def __init__(self, target: str, **options: Any) -> None:
        self._options = {**{k: s.default for k, s in self.SWITCHES.items()}, **options}
        self._what = f"engine hf:{target}"
        self._now(None)
        if self._options["threads"] < 0:
            raise UsageError(f"{self._what}: threads={self._options['threads']}, wanted at least 0")
        overrides, edit = (hf_load.json_object(self._options[k], f"{self._what}: {k}") for k in ("overrides", "edit"))
        self._directory = model_files.model_directory(target, self.NAME)
        loaded = hf_load.load(self._directory, self._options, overrides, edit)
        self._torch, self._notes = loaded.torch, loaded.notes
        self._model: Any = loaded.model
        self._run: Any = hf_forward.Pass(
            loaded.model, Watch(loaded.model, self._what) if self._options["routes"] else None
        )
        self._texts, self._stops = Texts(self._directory), stop_ids(self._directory)
        self._facts = model_files.model_facts(self._directory, overrides)
        config = self._model.config.get_text_config()
        self._vocab = int(self._model.get_input_embeddings().weight.shape[0])
        self._max_length = getattr(config, "max_position_embeddings", None)

    # the methods of an engine

    def fingerprint(self) -> Mapping[str, Any]:
        """Versions, kernels, switches and digests. JSON-able."""
        return self._fingerprint(self._options)

    def _fingerprint(self, now: Mapping[str, Any]) -> dict[str, Any]:
        import transformers

        switches = {k: v for k, v in now.items() if k not in ("threads", "device")}
        if now["path"] == "decode" or now["packing"] != "alone":
            switches["padding_side"] = None  # nothing is filled up there
        return {
            "engine": self.NAME,
            **switches,
            **self._facts,
            **self._notes,
            "vocab_size": self._vocab,
            "attention": self._model.config._attn_implementation,
            "device": str(self._model.device),
            "threads": self._torch.get_num_threads(),
            "kernels": hf_load.kernels(self._torch),
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
                with hf_load.out_of_memory(f"{self._what}: prompt {i}"), self._torch.inference_mode():
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

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        """`[T]` log-probs, entropy and varentropy of the given ids at their declared semantics; index 0 is null.

        `distributions`: also `[T, V]` log-probs, float64, renormalised; the row of an index 0 is NaN. With the switch
        `routes`, `[T, L * K]` experts; row t is of token t as it was read, -1 where it was not.

        Errors: `ContentError` for an id outside the vocabulary; `EngineError` for a sequence that is too long, for
        distributions above 2 GiB, for memory that is not enough, and for a kernel or layout that the model cannot
        have; `UsageError` when the semantics are not declared, and for live switches that exclude each other.
        """
        now = self._now(using)
        rows = self._meaning(rollouts)
        for i, name in enumerate(rollouts.record_ids()):
            self._check(f"record {name!r}", rollouts.token_ids[rollouts.sequence(i)], int(rollouts.lengths[i]))
        out = _Columns(rollouts, self._vocab if distributions else None)
        memory = hf_load.out_of_memory(f"{self._what}: batch_size={now['batch_size']}")
        with memory, hf_load.attention(self._model, now["attention"]), self._torch.inference_mode():
            for i, (logits, routes) in self._forward(rollouts, now):
                start = rollouts.sequence(i).start
                self._fill(out, start, logits, Rules.of(rows[i]), context_of(rollouts, i))
                out.keep_routes(start, routes)
            fingerprint = self._fingerprint(now)
        return Scoring(
            Values(out.logprobs, out.valid),
            Values(out.entropy, out.valid),
            Values(out.varentropy, out.valid),
            out.distributions,
            common_semantics(rows),
            self._options["dtype"],
            fingerprint,
            uuid.uuid4().hex,
            out.routes,
        )

    def close(self) -> None:
        self._model = self._run = None

    # inside

    def _now(self, using: Mapping[str, Any] | None) -> dict[str, Any]:
        """The switches of one call. Errors: `UsageError`."""
        now = self._options | using_of(self, using)
        for name, value in (using or {}).items():
            choices = self.SWITCHES[name].choices
            if choices and value not in choices:
                raise UnknownName(f"value of switch {name!r}", str(value), choices)
        if now["batch_size"] < 1:
            raise UsageError(f"{self._what}: batch_size={now['batch_size']}, wanted at least 1")
        if now["path"] == "decode" and now["packing"] != "alone":
            raise UsageError(f"{self._what}: path=decode goes with packing=alone only; got packing={now['packing']}")
        return now

    def _meaning(self, rollouts: Rollouts) -> list[dict[str, Any]]:
        """For each sequence what its log-probs shall mean: as declared, or as the switch `semantics` has it."""
        rows, mine = declared(rollouts, "hf"), self._options["semantics"]
        if mine == "declared":
            return rows
        for i, row in enumerate(rows):
            if mine == "temperature" and row["temperature"] is None:
                raise UsageError(f"record {i}: temperature not declared, so hf cannot score at semantics=temperature")
        return [{**row, "logprob_semantics": mine} for row in rows]

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

    def _forward(self, rollouts: Rollouts, now: Mapping[str, Any]) -> Iterator[tuple[int, hf_forward.Row]]:
        """(sequence, its logits and experts), in the order of the batches."""
        size, run = now["batch_size"], self._run
        per_token = self._vocab * (4 if self._options["head_dtype"] == "float32" else self._model.dtype.itemsize)
        if now["packing"] == "alone":
            batches = hf_forward.batches(rollouts.lengths, size, per_token)
        else:
            batches = hf_forward.packs(rollouts.lengths, size)
        for batch in batches:
            rows = [rollouts.token_ids[rollouts.sequence(i)] for i in batch]
            if now["path"] == "decode":
                out = hf_forward.decode(run, rows, [rollouts.record("prompt_length", i) or 1 for i in batch])
            elif now["packing"] == "alone":
                out = hf_forward.prefill(run, rows, now["padding_side"])
            else:
                out = hf_forward.packed(run, rows, now["packing"] == "packed")
            yield from zip(batch, out, strict=True)

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
        self.routes: NDArray[np.int16] | None = None

    def keep_routes(self, start: int, routes: Any) -> None:
        """`routes`: `[n, L * K]` of the first n tokens of the sequence that begins at `start`."""
        if routes is None:
            return
        if self.routes is None:
            self.routes = np.full((len(self.valid), routes.shape[-1]), -1, dtype=np.int16)
        self.routes[start : start + len(routes)] = routes.cpu().numpy()
