"""Rollouts for the audit's signatures: healthy ones at three precisions, and one named fault at a time.

`healthy` draws from seeded logits and gives each side rounding of its own; everything that a framework may record is
there (steps, versions, cached prefixes, padding, experts), so that every signature has something to look at.
A fault changes the numbers and leaves the declarations alone, unless the declaration is the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onepolicy.engines.base import SamplingParams
from onepolicy.engines.fake import FakeEngine
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Lists, Scoring, Values

PROMPT, VOCAB, STEPS, LAYERS, TOP, EXPERTS = 8, 96, 8, 3, 2, 16
#: Rounding of a logit, one side's, at tokens whose logits spread by 1; it grows with the root of the spread.
LEVELS = {"float32": 1e-6, "float16": 0.003, "bfloat16": 0.025}
#: The batches' logits, by the sampler's scoring id; faults that need more than the drawn token's log-prob look here.
_LOGITS: dict[str, Hidden] = {}


@dataclass(frozen=True)
class Hidden:
    """`z` `[N, V]` logits of the N drawn tokens, `gain` `[N]` their spread, `noise` one side's rounding at gain 1."""

    z: np.ndarray
    gain: np.ndarray
    noise: float


def healthy(dtype: str = "bfloat16", tokens: int = 5000, seed: int = 0) -> Rollouts:
    """About `tokens` drawn tokens in replies of 40 to 160, both sides at `dtype`."""
    rng = np.random.default_rng([seed, tokens, 0xA0D1])
    lengths = rng.integers(40, 161, max(2, tokens // 100))
    hidden = _hidden(int(lengths.sum()), LEVELS[dtype], rng)
    a, b = (_log_softmax(_rounded(hidden, rng)) for _ in range(2))
    ids = _draw(a, rng)
    at = np.arange(len(ids))
    name = f"{dtype} {tokens} {seed}"
    _LOGITS[name] = hidden
    while len(_LOGITS) > 6:
        del _LOGITS[next(iter(_LOGITS))]
    return _rollouts(lengths, ids, a[at, ids], b[at, ids], dtype, name, rng)


def fake(dtype: str = "bfloat16", tokens: int = 5000, seed: int = 0) -> Rollouts:
    """The fake engine's: rounding in two reduction orders, nothing recorded besides."""
    rng = np.random.default_rng([seed, 0xFA4E])
    prompts = rng.integers(0, 255, (max(2, tokens // 90), 8)).tolist()
    sampler = FakeEngine(seed=seed % 16, dtype=dtype)
    rollouts = sampler.sample(prompts, SamplingParams(max_tokens=128, seed=seed))
    return rollouts.with_scoring("old", FakeEngine(seed=seed % 16, dtype=dtype, order="reversed").score(rollouts))


def _hidden(n: int, noise: float, rng: np.random.Generator) -> Hidden:
    """Some tokens almost certain, some wide open, as in real replies."""
    gain = np.exp(rng.normal(1.5, 0.8, n)).clip(0.4, 16)
    return Hidden((gain[:, None] * rng.standard_normal((n, VOCAB), dtype=np.float32)).astype(np.float64), gain, noise)


def _rounded(hidden: Hidden, rng: np.random.Generator, times: float = 1.0) -> np.ndarray:
    """`[N, V]` logits with one side's rounding; how coarse it is differs from token to token."""
    scale = times * hidden.noise * np.sqrt(hidden.gain) * np.exp(rng.normal(0, 0.4, len(hidden.gain)))
    return hidden.z + scale[:, None] * rng.standard_normal(hidden.z.shape, dtype=np.float32)


def _log_softmax(z: np.ndarray) -> np.ndarray:
    top = z.max(axis=1, keepdims=True)
    return z - top - np.log(np.exp(z - top).sum(axis=1, keepdims=True))


def _draw(logp: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    cumulative = np.cumsum(np.exp(logp), axis=1)
    at = (cumulative < rng.random(len(logp))[:, None] * cumulative[:, -1:]).sum(axis=1)
    return np.minimum(at, logp.shape[1] - 1)


def _rollouts(
    lengths: np.ndarray,
    ids: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    dtype: str,
    name: str,
    rng: np.random.Generator,
) -> Rollouts:
    size = len(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths + PROMPT)]).astype(np.int64)
    place = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], lengths + PROMPT)
    drawn = place >= PROMPT
    token_ids = rng.integers(0, VOCAB, len(drawn)).astype(np.int32)
    token_ids[drawn] = ids
    step = np.arange(size) * STEPS // size + 10
    lag = rng.integers(0, 2, size)

    def spread(x: np.ndarray) -> np.ndarray:
        out = np.zeros(len(drawn))
        out[drawn] = x
        return out

    records: dict[str, Any] = {
        "group_id": [str(i) for i in range(size)], "step": step.tolist(), "scorer_version": step.tolist(),
        "prompt_length": [PROMPT] * size, 
        "padding_length": (rng.integers(0, 2, size) * (int(lengths.max()) - lengths)).tolist(),
        "cached_prefix_length": (4 * rng.integers(0, 2, size)).tolist(), "temperature": [1.0] * size,
        "top_p": [1.0] * size, "top_k": [-1] * size, "min_p": [0.0] * size, "repetition_penalty": [1.0] * size,
        "logprob_semantics": ["processed"] * size,
    }  # fmt: skip
    version = np.repeat(step - lag, lengths + PROMPT)
    ours, theirs = _routes(len(drawn), rng)
    return Rollouts(
        offsets,
        {"token_ids": Values(token_ids), "drawn": Values(drawn), "policy_version": Values(version)},
        {k: column_values(k, v) for k, v in records.items()},
        {"routed_experts": ours, "scorer_routed_experts": theirs},
        {
            "sampler": Scoring(Values(spread(a), drawn), semantics="processed", dtype=dtype, scoring_id=name),
            "old": Scoring(Values(spread(b), drawn), semantics="processed", dtype=dtype, scoring_id="old"),
        },
    )


def _routes(n: int, rng: np.random.Generator) -> tuple[Lists, Lists]:
    """Two experts of 16 in three layers; 2% of the tokens have another one in one layer, with no gap of their own."""
    first = rng.integers(0, EXPERTS, (n, LAYERS))
    ours = np.stack([first, (first + rng.integers(1, EXPERTS - 1, (n, LAYERS))) % EXPERTS], axis=2)
    theirs = ours.copy()
    flip = np.flatnonzero(rng.random(n) < 0.02)
    theirs[flip, rng.integers(0, LAYERS, len(flip)), 1] = (ours[flip, 0, 0] + EXPERTS - 1) % EXPERTS
    offsets = (np.arange(n + 1) * LAYERS * TOP).astype(np.int64)
    return Lists(ours.reshape(-1).astype(np.int32), offsets), Lists(theirs.reshape(-1).astype(np.int32), offsets)


# -- what faults are made of -------------------------------------------------------------------------------------------

Fault = Callable[[Rollouts, np.random.Generator], Rollouts]
#: (dtype, tokens, seed) -> healthy rollouts.
Make = Callable[[str, int, int], Rollouts]


def logits_of(r: Rollouts) -> Hidden:
    """The logits that a healthy batch was drawn from. Errors: `KeyError` for other rollouts."""
    return _LOGITS[str(r.scorings["sampler"].scoring_id)]


def both(r: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """`[N]` log-probs of the drawn tokens, sampler's and scorer's."""
    return tuple(r.scorings[k].logprobs.values[r.drawn].astype(np.float64) for k in ("sampler", "old"))  # type: ignore[return-value]


def with_side(r: Rollouts, name: str, x: np.ndarray) -> Rollouts:
    """The same rollouts with other log-probs `[N]` of the drawn tokens."""
    values = r.scorings[name].logprobs.values.astype(np.float64).copy()
    values[r.drawn] = np.minimum(x, 0.0)
    scoring = r.scorings[name]
    return r.with_scoring(name, replace(scoring, logprobs=replace(scoring.logprobs, values=values)))


def index_of(r: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """`[N]` sequence of each drawn token and its place in the reply."""
    sequence = np.repeat(np.arange(len(r)), r.lengths)[r.drawn]
    counts = np.bincount(sequence, minlength=len(r))
    return sequence, np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]


def other_logits(r: Rollouts, scale: Any, rng: np.random.Generator) -> np.ndarray:
    """`[N]` scorer's log-probs after its logits moved by `scale` (a number or `[N]`) times their spread."""
    hidden = logits_of(r)
    move = np.broadcast_to(np.asarray(scale, dtype=np.float64), hidden.gain.shape) * np.sqrt(hidden.gain)
    z = _rounded(hidden, rng) + move[:, None] * rng.standard_normal(hidden.z.shape)
    return _log_softmax(z)[np.arange(len(z)), r.token_ids[r.drawn]]


def moved(where: Callable[[Rollouts, np.random.Generator], np.ndarray]) -> Fault:
    """The scorer computes with other logits, as far off as `where` says of each token (0: only rounding)."""

    def fault(r: Rollouts, rng: np.random.Generator) -> Rollouts:
        off = where(r, rng)
        b = both(r)[1]
        return with_side(r, "old", np.where(off > 0, other_logits(r, off, rng), b))

    return fault


def record(r: Rollouts, name: str) -> np.ndarray:
    """`[N]` the record's value at each drawn token."""
    return r.records[name].values[index_of(r)[0]]


def drawn_from(process: Callable[[np.ndarray], np.ndarray], **declared: Any) -> Fault:
    """The sampler draws from and reports `process(log-probs [N, V])`, the scorer the whole softmax."""

    def fault(r: Rollouts, rng: np.random.Generator) -> Rollouts:
        hidden = logits_of(r)
        a, b = process(_log_softmax(_rounded(hidden, rng))), _log_softmax(_rounded(hidden, rng))
        ids = _draw(a, rng)
        at = np.arange(len(ids))
        tokens = r.token_ids.copy()
        tokens[r.drawn] = ids
        out = replace(r, tokens={**r.tokens, "token_ids": Values(tokens)})
        return declare(with_side(with_side(out, "sampler", a[at, ids]), "old", b[at, ids]), **declared)

    return fault


def declare(r: Rollouts, **declared: Any) -> Rollouts:
    """The same rollouts with other declarations; None leaves a column out."""
    records = {k: v for k, v in r.records.items() if k not in declared}
    given = {k: column_values(k, [v] * len(r)) for k, v in declared.items() if v is not None}
    return replace(r, records={**records, **given})


def top_p(mass: float) -> Callable[[np.ndarray], np.ndarray]:
    def process(logp: np.ndarray) -> np.ndarray:
        order = np.argsort(-logp, axis=1)
        ranked = np.exp(np.take_along_axis(logp, order, axis=1))
        keep = np.zeros(logp.shape, dtype=bool)
        np.put_along_axis(keep, order, np.cumsum(ranked, axis=1) - ranked < mass, axis=1)
        return _log_softmax(np.where(keep, logp, -1e3))

    return process


def top_k(k: int) -> Callable[[np.ndarray], np.ndarray]:
    def process(logp: np.ndarray) -> np.ndarray:
        least = np.sort(logp, axis=1)[:, -k][:, None]
        return _log_softmax(np.where(logp >= least, logp, -1e3))

    return process


# -- faults of shape ---------------------------------------------------------------------------------------------------


def _part(r: Rollouts) -> np.ndarray:
    """`[N]` 0 at the first token of a reply, 1 at its last."""
    sequence, index = index_of(r)
    return index / np.maximum(np.bincount(sequence, minlength=len(r))[sequence] - 1, 1)


def _mixed_versions(r: Rollouts, rng: np.random.Generator, off: float = 0.15) -> Rollouts:
    """The weights change inside every third reply, and a version per token says where."""
    sequence, index = index_of(r)
    at = rng.integers(10, 34, len(r))
    old = (sequence % 3 == 0) & (index < at[sequence])
    out = with_side(r, "old", np.where(old, other_logits(r, off, rng), both(r)[1]))
    version = np.repeat(r.records["scorer_version"].values, r.lengths)
    version[r.drawn] -= old
    return replace(out, tokens={**out.tokens, "policy_version": Values(version)})


def _hidden_update(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    """The same, weights further apart, with one label a reply: the last one."""
    out = _mixed_versions(r, rng, 0.5)
    version = np.repeat(r.records["scorer_version"].values, r.lengths)
    return replace(out, tokens={**out.tokens, "policy_version": Values(version)})


def _chunk(r: Rollouts, rng: np.random.Generator) -> np.ndarray:
    return 0.25 * (index_of(r)[1] >= 32)


def _speculative_tail(r: Rollouts, rng: np.random.Generator) -> np.ndarray:
    sequence, index = index_of(r)
    return 0.3 * (index >= np.bincount(sequence, minlength=len(r))[sequence] - 16)


def _stale(r: Rollouts, rng: np.random.Generator) -> np.ndarray:
    return 0.12 * (record(r, "scorer_version") > r.tokens["policy_version"].values[r.drawn])


def _stale_cache(r: Rollouts, rng: np.random.Generator) -> np.ndarray:
    """Cached prefixes hold what the first weights computed: the gap comes with them, and with later versions only."""
    return 0.25 * (record(r, "cached_prefix_length") > 0) * (record(r, "step") > 11)


def _never_updated(r: Rollouts, rng: np.random.Generator) -> np.ndarray:
    return 0.06 * (record(r, "step") - 10)


def _jumped(r: Rollouts, rng: np.random.Generator) -> np.ndarray:
    step = record(r, "step") - 10
    return np.where(step >= 2, 0.2 + 0.04 * step, 0.0)


def _padded_rows(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    """The scorer's softmax holds 40 more rows whose logits are about 0."""
    hidden = logits_of(r)
    z = np.concatenate([_rounded(hidden, rng), 0.01 * rng.standard_normal((len(hidden.gain), 40))], axis=1)
    return with_side(r, "old", _log_softmax(z)[np.arange(len(z)), r.token_ids[r.drawn]])


def _experts(r: Rollouts, rng: np.random.Generator) -> np.ndarray:
    ours, theirs = (r.lists[k].values.reshape(-1, LAYERS * TOP) for k in ("routed_experts", "scorer_routed_experts"))
    return 0.5 * (ours != theirs).any(axis=1)[r.drawn]


def _outlier(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    a, b = both(r)
    at = np.flatnonzero((a > -2) & (a < -0.05))[3]
    b[at] = a[at] - 11.4
    return with_side(r, "old", b)


def _broad(sd: float) -> Fault:
    def fault(r: Rollouts, rng: np.random.Generator) -> Rollouts:
        a, _ = both(r)
        return with_side(r, "old", a + sd * rng.standard_normal(len(a)))

    return fault


def _tail_rises(r: Rollouts, rng: np.random.Generator) -> np.ndarray:
    """From the middle of the run on, 1% of the tokens go far off; the mean moves by a tenth."""
    return 0.8 * (record(r, "step") >= 14) * (rng.random(int(r.drawn.sum())) < 0.01)


def _quantised(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    out = with_side(r, "old", other_logits(r, 0.3, rng))
    sampler = replace(out.scorings["sampler"], fingerprint={"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"})
    return out.with_scoring("sampler", sampler)


SHAPE: dict[str, Fault] = {
    "grows-with-position": moved(lambda r, rng: 0.3 * _part(r)),
    "mixed-versions": _mixed_versions,
    "hidden-update": _hidden_update,
    "chunk-boundary": moved(_chunk),
    "speculative-tail": moved(_speculative_tail),
    "cached-prefix": moved(lambda r, rng: 0.25 * (record(r, "cached_prefix_length") > 0)),
    "padding": moved(lambda r, rng: 0.3 * (record(r, "padding_length") > 0)),
    "stale-lag-1": moved(_stale),
    "stale-cache": moved(_stale_cache),
    "never-updated": moved(_never_updated),
    "never-updated-jump": moved(_jumped),
    "padded-rows": _padded_rows,
    "experts": moved(_experts),
    "quantised": _quantised,
    "other-weights": moved(lambda r, rng: np.full(int(r.drawn.sum()), 0.3)),
    "outlier": _outlier,
    "broad-0.1": _broad(0.1),
    "broad-0.5": _broad(0.5),
    "tail-rises": moved(_tail_rises),
}

# -- faults of meaning -------------------------------------------------------------------------------------------------

MEANING: dict[str, Fault] = {
    "temperature-0.7": drawn_from(lambda logp: _log_softmax(logp / 0.7), temperature=0.7),
    "temperature-undeclared": drawn_from(lambda logp: _log_softmax(logp / 0.7), temperature=None),
    "top-p-0.9": drawn_from(top_p(0.9), top_p=0.9),
    "top-p-undeclared": drawn_from(top_p(0.9), top_p=None, top_k=None, min_p=None),
    "top-k-20": drawn_from(top_k(20), top_k=20),
}

FAULTS: dict[str, Fault] = {**SHAPE, **MEANING}

#: fault -> the code that names it, and codes that say something true of it besides.
NAMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "grows-with-position": ("grows-with-position", ()),
    "mixed-versions": ("mixed-weight-versions", ("staleness",)),
    "hidden-update": ("changes-inside-reply", ()),
    "chunk-boundary": ("changes-at-one-place", ()),
    "speculative-tail": ("changes-at-one-place", ()),
    "cached-prefix": ("depends-on-cache", ()),
    "padding": ("depends-on-padding", ()),
    "stale-lag-1": ("staleness", ()),
    "stale-cache": ("stale-prefix-cache", ("depends-on-cache",)),
    "never-updated": ("engine-never-updated", ()),
    "never-updated-jump": ("engine-never-updated", ("gap-jumped",)),
    "padded-rows": ("padded-rows-in-softmax", ()),
    "experts": ("expert-routing-mismatch", ("single-outlier",)),
    "quantised": ("quantisation-suspected", ()),
    "other-weights": ("larger-than-rounding", ()),
    "outlier": ("single-outlier", ()),
    "broad-0.1": ("noise-on-every-token", ()),
    "broad-0.5": ("noise-on-every-token", ()),
    "tail-rises": ("tail-rises", ("single-outlier",)),
    "temperature-0.7": ("temperature-suspected", ("temperature-mismatch",)),
    "temperature-undeclared": ("temperature-suspected", ("temperature-mismatch",)),
    "top-p-0.9": ("truncated-support-mismatch", ()),
    "top-p-undeclared": ("truncated-support-mismatch", ()),
    "top-k-20": ("truncated-support-mismatch", ("one-sided-gap",)),
}


def declared_dtype(r: Rollouts, dtype: str) -> Rollouts:
    """The same numbers, said to be of another precision on both sides."""
    for name in ("sampler", "old"):
        r = r.with_scoring(name, replace(r.scorings[name], dtype=dtype))
    return r


def configured(r: Rollouts, sampler: dict[str, Any], scorer: dict[str, Any]) -> Rollouts:
    """The same rollouts with each side's model configuration in its fingerprint."""
    for name, config in (("sampler", sampler), ("old", scorer)):
        r = r.with_scoring(name, replace(r.scorings[name], fingerprint={"config": config}))
    return r


def on_replicas(r: Rollouts, n: int) -> Rollouts:
    """The same rollouts, drawn by replicas `dp0`, `dp1`, ... in turns."""
    return replace(
        r, records={**r.records, "replica_id": column_values("replica_id", [f"dp{i % n}" for i in range(len(r))])}
    )


def with_replica_off(r: Rollouts, name: str, rng: np.random.Generator, off: float = 0.2) -> Rollouts:
    """The replies of one replica were drawn with other weights than scored them."""
    there = record(r, "replica_id") == name
    return with_side(r, "old", np.where(there, other_logits(r, off, rng), both(r)[1]))
