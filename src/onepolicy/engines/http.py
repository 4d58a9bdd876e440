"""`http://host:8000`: a running server as sampler and scorer, on token ids: vLLM, SGLang, and what speaks like OpenAI.

Nothing of a model is loaded here, so a server on other machines can be checked. Ids come from the server and are never
made from its texts. What a server does not say (dtype, weights) is null in the fingerprint; `dtype=` declares it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

import onepolicy
from onepolicy.engines.base import SamplingParams, Switch, using_of
from onepolicy.engines.http_answers import Dialect
from onepolicy.engines.http_client import Client, split
from onepolicy.engines.http_load import busy
from onepolicy.engines.model_files import tokenizer_digest
from onepolicy.engines.replies import Reply, rollouts_of
from onepolicy.engines.semantics import require_same_meaning
from onepolicy.engines.texts import Texts, stop_ids
from onepolicy.errors import EngineError, OnepolicyError, UnknownName, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

#: dialect -> "module:class"
DIALECTS: dict[str, str] = {
    "vllm": "onepolicy.engines.http_vllm:VllmDialect",
    "sglang": "onepolicy.engines.http_sglang:SglangDialect",
    "openai": "onepolicy.engines.http_openai:OpenaiDialect",
}
_LOAD_PROMPT, _LOAD_TOKENS = 32, 256
DTYPES = ("float32", "bfloat16", "float16")
#: What a fingerprint has where the weights are at hand.
_UNSAID = {"dtype": None, "kv_cache_dtype": None, "quantization": None, "weights_digest": None}

Item = TypeVar("Item")
Out = TypeVar("Out")


_MEANINGS = ("auto", "raw", "temperature", "processed", "unknown")


class HttpEngine:
    """A server at an address. Errors: `UsageError` for an address, model name or switch that is wrong; `EngineError`
    for a server that cannot be reached or is none."""

    NAME: ClassVar[str] = "http"
    SAMPLES: ClassVar[bool] = True
    SCORES: ClassVar[bool] = True
    HEAVY: ClassVar[bool] = False
    SWITCHES: ClassVar[Mapping[str, Switch]] = {
        "model": Switch(str, "", "served name; empty is the only one that is served"),
        "dialect": Switch(str, "auto", "which server it is; auto asks it", ("auto", *DIALECTS)),
        "dtype": Switch(str, "", "what it computes in, as you know it", ("", *DTYPES), declared=True),
        "logprobs": Switch(
            str, "auto", "what its drawn log-probs mean; auto: as such a server comes", _MEANINGS, declared=True
        ),
        "tokenizer": Switch(str, "", "directory of the model's tokenizer, for a server without /tokenize"),
        "stop_token_ids": Switch(str, "", "ids that end a reply besides the server's own, as 2,5"),
        "api_key_env": Switch(str, "", "environment variable that holds the API key"),
        "concurrency": Switch(int, 16, "requests at once"),
        "timeout": Switch(float, 300.0, "seconds for a whole answer"),
        "connect_timeout": Switch(float, 5.0, "seconds to reach the host"),
        "retries": Switch(int, 5, "how often a busy server (HTTP 429, 503) is asked again"),
        "batch_size": Switch(int, 0, "sequences scored at once; 1: each alone; 0: concurrency", live=True),
        "load": Switch(str, "idle", "loaded: other requests run while it scores", ("idle", "loaded"), live=True),
        "load_requests": Switch(int, 8, "how many those are", live=True),
    }

    def __init__(self, target: str, **options: Any) -> None:
        self._options = {**{k: s.default for k, s in self.SWITCHES.items()}, **options}
        url = split(self.NAME, target)
        self._what = f"{url.scheme}://{url.netloc}{url.path}"
        _check(self._what, self._options)
        self._stops = _ids(self._what, self._options["stop_token_ids"])
        self._tokenizer = _directory(self._what, self._options["tokenizer"])
        self._texts = Texts(self._tokenizer) if self._tokenizer else None
        self._client = Client(
            url,
            self._options["connect_timeout"],
            self._options["timeout"],
            self._options["retries"],
            _key(self._what, self._options["api_key_env"]),
        )
        with self._named():
            self._dialect_name, cards = _detect(self._client, self._options["dialect"])
            card = _card(cards, self._options["model"])
            module, _, attribute = DIALECTS[self._dialect_name].partition(":")
            self._dialect: Dialect = getattr(import_module(module), attribute)(self._client, card)
            self._facts = self._dialect.facts()
        self._model = str(card["id"])

    # the methods of an engine

    def fingerprint(self) -> Mapping[str, Any]:
        """What the server says of itself, what was declared, and null for what is not known. JSON-able."""
        live = {name: self._options[name] for name, switch in self.SWITCHES.items() if switch.live}
        facts = {**_UNSAID, **self._facts}
        return {
            "engine": self.NAME,
            "host": self._what,
            "dialect": self._dialect_name,
            "model": self._model,
            **facts,
            "dtype": self._options["dtype"] or facts["dtype"],
            "tokenizer_digest": tokenizer_digest(self._tokenizer) if self._tokenizer else None,
            "logprobs": self._options["logprobs"],
            "concurrency": self._options["concurrency"],
            **live,
            "versions": {
                "onepolicy": onepolicy.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        if self._texts is not None:
            return self._texts.encode(prompts)
        return self._each(lambda i: f"prompt {i}", self._dialect.tokenize, prompts, self._options["concurrency"])

    def decode(self, ids: Sequence[int]) -> list[str]:
        if self._texts is not None:
            return self._texts.decode(ids)
        different = sorted({int(i) for i in ids})
        texts = self._each(lambda i: f"id {different[i]}", self._dialect.detokenize, different, 4)
        text_of = dict(zip(different, texts, strict=True))
        return [text_of[int(i)] for i in ids]

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rollouts:
        """Draws `params.samples` replies to each prompt; reply k of all is asked for with seed `params.seed + k`.

        Errors: `EngineError` for an empty or too long prompt and for whatever the server refuses, `ContentError` for
        ids that it does not know.
        """
        for i, prompt in enumerate(prompts):
            self._fits(f"prompt {i}", len(prompt), len(prompt) + params.max_tokens)
        asked = [[int(x) for x in p] for p in prompts for _ in range(params.samples)]
        stops = self._all_stops()

        def draw(k: int) -> Reply:
            return self._dialect.draw(asked[k], params, params.seed + k, stops)

        each = params.samples
        replies = self._each(lambda k: f"prompt {k // each}", draw, range(len(asked)), self._options["concurrency"])
        fingerprint = self.fingerprint()
        rollouts = rollouts_of(
            replies,
            params,
            # both may be unknown, which is null
            semantics=cast(str, self._meaning(params)),
            dtype=fingerprint["dtype"],
            stop_ids=stops,
            fingerprint=fingerprint,
            scoring_id=uuid.uuid4().hex,
        )
        # without a declaration the server alone knows what ends a reply
        return rollouts if stops else replace(rollouts, lists={})

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        """`[T]` log-probs of the given ids by the server's prefill; index 0 null; no entropy.

        `using`: `batch_size`, `load`, `load_requests`.

        Errors: `UsageError` where the rollouts declare something else than the server gives; as `sample` besides.
        """
        if distributions:
            raise UsageError(f"{self._what}: a server gives no full distributions; use hf")
        live = {**self._options, **using_of(self, using)}
        _check(self._what, live)
        semantics = self._scores_mean()
        require_same_meaning(rollouts, semantics, self._what)
        names = [f"record {name!r}" for name in rollouts.record_ids()]
        rows = [rollouts.token_ids[rollouts.sequence(i)].tolist() for i in range(len(rollouts))]
        for name, row in zip(names, rows, strict=True):
            self._fits(name, len(row) or 1, len(row) + 1)  # a server draws one token behind it
        at_once = live["batch_size"] or live["concurrency"]
        with self._loaded(live, rows):
            columns = self._each(lambda i: names[i], self._one, rows, at_once)
        return Scoring(
            _column(rollouts, columns),
            semantics=semantics,
            dtype=self.fingerprint()["dtype"],
            fingerprint={**self.fingerprint(), **{k: live[k] for k, s in self.SWITCHES.items() if s.live}},
            scoring_id=uuid.uuid4().hex,
        )

    def close(self) -> None:
        self._client.abort()

    # inside

    def _one(self, row: list[int]) -> list[float]:
        return self._dialect.score(row) if len(row) > 1 else []

    def _meaning(self, params: SamplingParams) -> str | None:
        said = self._options["logprobs"]
        return self._dialect.meaning(params) if said == "auto" else None if said == "unknown" else said

    def _scores_mean(self) -> str:
        said = self._options["logprobs"]
        if self._dialect.SCORES_MEAN is not None:
            return self._dialect.SCORES_MEAN
        if said in ("auto", "unknown"):
            raise UsageError(
                f"{self._what}: what this kind of server means by the log-prob of a given token is not known; "
                "say it: logprobs=raw (or temperature, processed)"
            )
        return said

    def _all_stops(self) -> list[int]:
        own = stop_ids(self._tokenizer) if self._tokenizer else []
        return sorted({*self._stops, *own})

    def _fits(self, what: str, n: int, length: int) -> None:
        if not n:
            raise EngineError(f"{self._what}: {what}: it is empty; a server needs at least one id")
        limit = self._facts.get("max_model_len")
        if limit and length > limit:
            raise EngineError(
                f"{self._what}: {what}: {length} tokens with the reply, but the server's max_model_len is {limit}; "
                "shorten the reply (max_tokens), leave it out, or start the server with a larger one"
            )

    def _each(
        self, name: Callable[[int], str], fn: Callable[[Item], Out], items: Sequence[Item], at_once: int
    ) -> list[Out]:
        def one(numbered: tuple[int, Item]) -> Out:
            with self._named(name(numbered[0])):
                return fn(numbered[1])

        return self._client.together(one, list(enumerate(items)), at_once)

    @contextlib.contextmanager
    def _named(self, item: str = "") -> Iterator[None]:
        """Errors say which server, and which item."""
        try:
            yield
        except UnknownName:  # it says all by itself
            raise
        except OnepolicyError as err:
            raise type(err)(": ".join(part for part in (self._what, item, str(err)) if part)) from err

    @contextlib.contextmanager
    def _loaded(self, live: Mapping[str, Any], rows: list[list[int]]) -> Iterator[None]:
        if live["load"] == "idle" or not rows:
            yield
            return
        # the last ones first: ids that the server knows, and beginnings that it does not score at this moment
        starts = [row[:_LOAD_PROMPT] for row in reversed(rows) if row]
        limit = self._facts.get("max_model_len") or _LOAD_PROMPT + _LOAD_TOKENS
        tokens = max(1, min(_LOAD_TOKENS, limit - _LOAD_PROMPT - 1))
        make = lambda k: self._dialect.load(starts[k % len(starts)], tokens)
        entered = contextlib.ExitStack()
        with self._named():
            entered.enter_context(busy(self._client, make, live["load_requests"]))
        with entered:
            yield


class HttpsEngine(HttpEngine):
    """The same with TLS; certificates are checked (SSL_CERT_FILE names those of your own)."""

    NAME: ClassVar[str] = "https"


def _detect(client: Client, dialect: str) -> tuple[str, list[Mapping[str, Any]]]:
    """(dialect, models that are served). Errors: `EngineError` when nothing there looks like an inference server."""
    listed = client.get("/v1/models")
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list) or not all(isinstance(c, dict) and "id" in c for c in cards) or not cards:
        raise EngineError("it lists no models at /v1/models; is it an inference server, and still loading?")
    if dialect != "auto":
        return dialect, cards
    owner = cards[0].get("owned_by")
    if owner in DIALECTS:
        return str(owner), cards
    if any(_has(client, path) for path in ("/model_info", "/get_model_info")):
        return "sglang", cards
    return ("vllm" if _has(client, "/version") else "openai"), cards


def _has(client: Client, path: str) -> bool:
    try:
        return client.get(path) is not None
    except OnepolicyError:
        return False


def _card(cards: list[Mapping[str, Any]], wanted: str) -> Mapping[str, Any]:
    names = {str(card["id"]): card for card in cards}
    if wanted and wanted not in names:
        raise UnknownName("model of the server", wanted, names)
    if not wanted and len(names) > 1:
        raise UsageError(f"it serves {len(names)} models; choose one: model= {', '.join(names)}")
    return names[wanted] if wanted else cards[0]


def _check(what: str, options: Mapping[str, Any]) -> None:
    least = {"concurrency": 1, "batch_size": 0, "load_requests": 1, "retries": 0}
    for name, low in least.items():
        if options[name] < low:
            raise UsageError(f"{what}: {name}: got {options[name]}, wanted at least {low}")
    for name in ("timeout", "connect_timeout"):
        if not 0 < options[name] < 1e6:
            raise UsageError(f"{what}: {name}: got {options[name]}, wanted seconds above 0")


def _directory(what: str, target: str) -> Path | None:
    if target and not Path(target).is_dir():
        raise UsageError(f"{what}: tokenizer: {target!r} is no directory; wanted one with the model's tokenizer")
    return Path(target) if target else None


def _ids(what: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"{what}: stop_token_ids: got {text!r}, wanted ids with commas, as 2,5") from None


def _key(what: str, variable: str) -> str | None:
    if not variable:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise UsageError(f"{what}: api_key_env: the environment variable {variable!r} holds no key")
    return key


def _column(rollouts: Rollouts, columns: Sequence[Sequence[float]]) -> Values:
    values, valid = np.zeros(rollouts.n_tokens, dtype=np.float32), np.zeros(rollouts.n_tokens, dtype=bool)
    for i, column in enumerate(columns):
        at = slice(rollouts.sequence(i).start + 1, rollouts.sequence(i).stop)
        if column:
            values[at], valid[at] = column, True
    return Values(values, valid)
