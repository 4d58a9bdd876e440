"""`fake:?seed=1&drift=0.5`: a small seeded numpy model that samples and scores, for docs, tests and power studies.

It behaves as two real engines do: each rounds at its dtype in its own reduction order (`order`), so two healthy ones
differ by rounding and by nothing else. Same seed, order and path give the same bits, drawn or scored, in any batch.
`drift` moves the model by a known RMS, `fault` breaks it in a named way (`fake_faults.FAULTS`).
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import onepolicy
from onepolicy.arrays import numeric_identity
from onepolicy.engines import fake_faults
from onepolicy.engines.base import SamplingParams, Switch, declared, digest_arrays, using_of
from onepolicy.engines.fake_batches import neighbours, padding
from onepolicy.engines.fake_draw import Softmax, require_supported
from onepolicy.engines.fake_faults import FAULTS
from onepolicy.engines.fake_model import Model, weights
from onepolicy.engines.fake_replies import Replies, chunks, contexts, draw_replies, drift_factor, uniforms
from onepolicy.engines.fake_rounding import DTYPES, ORDERS, WIDTHS, kernel_name, round_to
from onepolicy.engines.semantics import GREEDY, Rules, common_semantics
from onepolicy.errors import ContentError, EngineError, UnknownName, UsageError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.schema import SEMANTICS
from onepolicy.types import IntArray, Lists, Scoring, Values

_DECLARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprob_semantics",
)


class FakeEngine:
    """A sampler and scorer in numpy. Ids are the bytes of the text; the last id of the vocabulary ends a reply."""

    NAME: ClassVar[str] = "fake"
    SAMPLES: ClassVar[bool] = True
    SCORES: ClassVar[bool] = True
    HEAVY: ClassVar[bool] = False
    RULES: ClassVar[bool] = True
    SWITCHES: ClassVar[Mapping[str, Switch]] = {
        "seed": Switch(int, 0, "which model: the seed of its weights"),
        "dtype": Switch(str, "float32", "the precision it rounds to", tuple(DTYPES)),
        "order": Switch(str, "forward", "the order in which partial sums are added", tuple(ORDERS), live=True),
        "path": Switch(str, "prefill", "decode adds in blocks of another width", tuple(WIDTHS), live=True),
        "batch_size": Switch(int, 0, "sequences that are scored together; 0 is all of a call", live=True),
        "padding_side": Switch(str, "right", "where shorter sequences are filled up", ("right", "left"), live=True),
        "packing": Switch(str, "alone", "packed: sequences share a row", ("alone", "packed"), live=True),
        "rounded_to": Switch(str, "none", "weights are rounded to this first", ("none", "bfloat16", "float16")),
        "vocab": Switch(int, 256, "vocabulary size; texts need 256"),
        "hidden": Switch(int, 64, "width of the model"),
        "drift": Switch(float, 0.0, "how far the model is moved: RMS of the log-ratio on drawn tokens, nats"),
        "fault": Switch(str, "none", "a named fault", tuple(FAULTS)),
        "logprobs": Switch(str, "processed", "what the log-probs of its own draws mean", SEMANTICS),
    }

    def __init__(self, target: str = "", **options: Any) -> None:
        """Options are the switches, parsed; those not given have their defaults. Errors: `UsageError`."""
        if target:
            raise UsageError(f"engine fake: got target {target!r}, wanted none, as fake:?seed=1")
        self.options = {name: switch.default for name, switch in self.SWITCHES.items()} | _checked(options)
        seed, vocab, hidden, drift = (self.options[name] for name in ("seed", "vocab", "hidden", "drift"))
        self._fault: str = self.options["fault"]
        self._dtype: str = self.options["dtype"]
        self._vocab: int = vocab
        fake_faults.fail(self._fault, self._dtype)
        checkpoint = fake_faults.moved(weights(seed, vocab, hidden), self._fault, seed)
        self._digest = digest_arrays(checkpoint)
        self._checkpoint, self._rounding_changed = _rounded(checkpoint, self.options["rounded_to"])
        self._drift = drift_factor(seed, vocab, hidden, drift) if drift else 0.0
        self._models: dict[tuple[str, str], Model] = {}
        self._model(self.options)

    @property
    def stop_id(self) -> int:
        """The id that ends a reply."""
        return self._vocab - 1

    def _model(self, live: Mapping[str, Any]) -> Model:
        """The model at the live switches; one is kept for each order and path."""
        key = (live["order"], live["path"])
        if key not in self._models:
            tampering = fake_faults.tampering(self._fault, live["path"])
            self._models[key] = Model(self._checkpoint, self._dtype, key[0], self._drift, tampering, key[1])
        return self._models[key]

    def fingerprint(self) -> Mapping[str, Any]:
        """JSON-able: engine, versions, every switch, kernels, digests."""
        return self._fingerprint(self.options)

    def _fingerprint(self, live: Mapping[str, Any]) -> dict[str, Any]:
        kernel = kernel_name(live["order"], live["path"])
        return {
            "engine": self.NAME,
            "versions": {"onepolicy": onepolicy.__version__, "numpy": np.__version__},
            **self.options,
            **live,
            "rounding_changed_weights": self._rounding_changed,
            "kernels": {"matmul": kernel, "numeric": numeric_identity()},
            "weights_digest": self._digest,
            "tokenizer_digest": hashlib.sha256(f"bytes, stop {self.stop_id}".encode()).hexdigest()[:16],
            "vocab_size": self._vocab,
        }

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        """UTF-8 bytes; of chat messages `<role>`, newline, content, newline each, then `<assistant>` and a newline.

        Errors: `EngineError` for a byte that the vocabulary does not have.
        """
        return [self._bytes(p if isinstance(p, str) else _chat(p)) for p in prompts]

    def _bytes(self, text: str) -> list[int]:
        ids = list(text.encode())
        if ids and max(ids) >= self.stop_id:
            raise EngineError(
                f"fake engine: byte {max(ids)} is outside a vocabulary of {self._vocab}; wanted vocab=256"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> list[str]:
        """ASCII as it is, other bytes as `<0xE4>`, the stop token as `<stop>`."""
        names = {self.stop_id: "<stop>"}
        return [names.get(i) or (chr(i) if 0 <= i < 128 else f"<0x{i:02X}>") for i in map(int, ids)]

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rollouts:
        """Draws `params.samples` replies to each prompt; the scoring `sampler` covers the drawn tokens only.

        At temperature 0 the likeliest token is taken and the log-probs are those of temperature 1, as vLLM has it.

        Errors: `EngineError` for empty prompts and penalties; `ContentError` for ids outside the vocabulary.
        """
        given = asdict(params) | {"logprob_semantics": self.options["logprobs"]}
        drawn = fake_faults.drawing(require_supported(Rules.of_params(params)), self._fault)
        if not prompts or params.max_tokens < 1 or params.samples < 1 or params.temperature < 0:
            raise EngineError("fake engine: wanted a prompt, max_tokens >= 1, samples >= 1 and temperature >= 0")
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise EngineError(f"fake engine: prompt {i} is empty; wanted at least one token")
            self._require_known(np.asarray(prompt), f"prompt {i}")
        rows = [list(map(int, p)) for p in prompts for _ in range(params.samples)]
        replies = draw_replies(
            self._model(self.options),
            rows,
            drawn if params.temperature >= GREEDY else None,
            fake_faults.reporting(Rules.of(given), self._fault),
            uniforms(rows, params.seed, params.max_tokens),
            -1 if params.ignore_eos else self.stop_id,
        )
        return self._rollouts(rows, replies, given)

    def _rollouts(self, rows: list[list[int]], replies: Replies, given: Mapping[str, Any]) -> Rollouts:
        """Prompts and replies one after another, with everything that is known of them."""
        n, samples = len(rows), given["samples"]
        prompt_length = np.array([len(p) for p in rows], dtype=np.int32)
        offsets = np.concatenate([[0], np.cumsum(prompt_length + replies.lengths)]).astype(np.int64)
        place = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], np.diff(offsets))
        drawn = place >= np.repeat(prompt_length, np.diff(offsets))
        told = np.arange(replies.ids.shape[1]) < replies.lengths[:, None]
        token_ids = np.empty(len(place), dtype=np.int32)
        token_ids[~drawn] = np.concatenate([np.asarray(p, dtype=np.int32) for p in rows])
        token_ids[drawn] = replies.ids[told]
        columns = [_spread(part[told], drawn) for part in (replies.logprobs, replies.entropy, replies.varentropy)]
        records: dict[str, Sequence[Any]] = {
            "group_id": [str(i // samples) for i in range(n)],
            "sample_id": [str(i % samples) for i in range(n)],
            **{name: [given[name]] * n for name in _DECLARED},
            "finish_reason": ["stop" if s else "length" for s in replies.stopped],
        }
        return Rollouts(
            offsets,
            {"token_ids": Values(token_ids), "drawn": Values(drawn), "loss_mask": Values(drawn.copy())},
            {"prompt_length": Values(prompt_length)} | {k: column_values(k, v) for k, v in records.items()},
            {"stop_token_ids": Lists(np.full(n, self.stop_id, dtype=np.int32), np.arange(n + 1, dtype=np.int64))},
            {"sampler": self._scoring(columns, drawn, drawn, self.options["logprobs"], self.options)},
        )

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        """Log-probs of the given ids at the declared semantics; index 0 null (NaN in `distributions` `[T, V]`).

        Truncation keeps this engine's own set: a drawn token outside it has log-prob -inf.

        Errors: `UsageError` if semantics are not declared; `ContentError` for ids outside the vocabulary;
        `EngineError` for penalties.
        """
        live = self.options | _checked(using_of(self, using))
        fake_faults.hang(self._fault)
        self._require_known(rollouts.token_ids, "rollouts")
        context, position = contexts(rollouts.token_ids, rollouts.offsets, self._vocab)
        seen, leak = position, None
        if self._fault == "left_padding":
            seen = position + padding(rollouts.offsets, live)
        if self._fault == "leaks_neighbours":
            leak = neighbours(rollouts.token_ids, rollouts.offsets, live)
        kind = np.float64 if self._dtype == "float64" else np.float32
        columns = [np.zeros(rollouts.n_tokens, dtype=kind) for _ in range(3)]
        whole = np.full((rollouts.n_tokens, self._vocab), np.nan) if distributions else None
        ways, model = declared(rollouts, self.NAME), self._model(live)
        for rules, places in _by_rules(ways, rollouts, position > 0):
            rules = fake_faults.reporting(rules, self._fault)
            for part in chunks(len(places)):
                at = places[part]
                softmax = Softmax(model.logits(context[at], seen[at], None if leak is None else leak[at]), rules)
                columns[0][at] = softmax.logprobs(rollouts.token_ids[at])
                columns[1][at], columns[2][at] = softmax.entropies()
                if whole is not None:
                    whole[at] = softmax.all_logprobs()
        return self._scoring(columns, position > 0, rollouts.drawn, common_semantics(ways), live, whole)

    def _scoring(
        self,
        columns: Sequence[NDArray[Any]],
        valid: NDArray[np.bool_],
        drawn: NDArray[np.bool_],
        semantics: str | None,
        live: Mapping[str, Any],
        distributions: NDArray[Any] | None = None,
    ) -> Scoring:
        logprobs, told = fake_faults.spoil(self._fault, columns[0], valid, drawn)
        return Scoring(
            Values(logprobs, told),
            Values(columns[1], valid),
            Values(columns[2], valid),
            distributions,
            semantics,
            self._dtype,
            self._fingerprint(live),
            uuid.uuid4().hex,
        )

    def _require_known(self, ids: NDArray[Any], what: str) -> None:
        bad = (ids < 0) | (ids >= self._vocab)
        if bad.any():
            raise ContentError(f"fake engine: {what} holds token id {ids[bad][0]}; wanted 0 to {self._vocab - 1}")

    def close(self) -> None:
        """Nothing is held."""


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as given. Errors: `UnknownName` for an unknown name or choice, `UsageError` for a bad number."""
    for name, value in options.items():
        if name not in FakeEngine.SWITCHES:
            raise UnknownName("switch of engine 'fake'", name, FakeEngine.SWITCHES)
        choices = FakeEngine.SWITCHES[name].choices
        if choices and value not in choices:
            raise UnknownName(f"value of switch {name!r}", str(value), choices)
    for name, least in (("seed", 0), ("vocab", 4), ("hidden", 8), ("drift", 0.0), ("batch_size", 0)):
        if name in options and not least <= options[name] < np.inf:
            raise UsageError(f"engine fake: {name}={options[name]}, wanted a number of at least {least}")
    return dict(options)


def _rounded(checkpoint: dict[str, NDArray[np.float32]], dtype: str) -> tuple[dict[str, NDArray[np.float32]], bool]:
    """The weights after rounding, and whether that changed any."""
    if dtype == "none":
        return checkpoint, False
    out = {name: round_to(w, dtype) for name, w in checkpoint.items()}
    return out, any(not np.array_equal(out[name], w) for name, w in checkpoint.items())


def _chat(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{m['role']}>\n{m['content']}\n" for m in messages) + "<assistant>\n"


def _spread(values: NDArray[Any], where: NDArray[np.bool_]) -> NDArray[Any]:
    """`[T]` with `values` at the True places, 0 elsewhere (null: nothing reads it)."""
    out = np.zeros(len(where), dtype=values.dtype)
    out[where] = values
    return out


def _by_rules(
    ways: Sequence[Mapping[str, Any]], rollouts: Rollouts, scored: NDArray[np.bool_]
) -> list[tuple[Rules, IntArray]]:
    """The flat places to score, grouped by what is done to their logits."""
    groups: dict[Rules, list[int]] = {}
    for i, way in enumerate(ways):
        groups.setdefault(require_supported(Rules.of(way)), []).append(i)
    owner = np.repeat(np.arange(len(ways)), rollouts.lengths)
    return [(rules, np.flatnonzero(np.isin(owner, rows) & scored)) for rules, rows in groups.items()]
