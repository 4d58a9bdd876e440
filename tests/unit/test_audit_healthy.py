"""Healthy dumps that an audit must not cry wolf over: real bfloat16 log-probs and a little model's, as they are stored.

Each dump is of two engines that compute one policy. What differs is how it was drawn, cut, masked, labelled, printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import little_model as little
from audit_batches import top_k, top_p
from onepolicy.audit import Choices, audit
from onepolicy.codes.kind import INFO
from onepolicy.types import Finding

RECORDED = Path(__file__).resolve().parents[2] / "lab" / "data" / "healthy_smollm2.npz"
SIDES = ("sampler_logprobs", "old_logprobs")
PROMPT = 8
Row = dict[str, Any]


def recorded() -> list[Row]:
    """Replies of SmolLM2-135M in bfloat16: what vLLM drew and said, and what transformers said; the ids are made up."""
    rng = np.random.default_rng(0)
    with np.load(RECORDED) as z:
        of, prompt, a, b = z["sequence"], z["prompt"], z["sampler"], z["full"]
    rows: list[Row] = []
    for i in np.unique(of).tolist():
        at = np.flatnonzero(of == i)
        ids = rng.integers(0, 49_152, PROMPT + len(at))
        rows.append(row(ids, a[at], b[at], record_id=f"r{i}", group_id=str(prompt[at[0]])))
    return rows


def row(ids: Any, a: Any, b: Any, **more: Any) -> Row:
    values = {side: [None] * PROMPT + [float(v) for v in x] for side, x in zip(SIDES, (a, b), strict=True)}
    return {"token_ids": [int(t) for t in ids], "prompt_length": PROMPT, **values, **more}


def little_rows(
    groups: int = 12,
    each: int = 4,
    seed: int = 0,
    dtype: str = "bfloat16",
    process: little.Process | None = None,
    gain: float = 5.0,
    raw: bool = False,
    temperature: float = 1.0,
    size: float = 0.0,
    **declared: Any,
) -> list[Row]:
    """Replies of 20 to 80 tokens, drawn and scored by two kernels. `size`: how far the scorer's weights are."""
    w = little.weights(seed)
    start = np.repeat(little.prompts(groups, seed, PROMPT), each, axis=0)
    drew = little.generate(w, little.Engine(dtype=dtype, fused=True, gain=gain), start, 80, seed, process)
    other = little.moved(w, 1, size) if size else w
    scored = little.score(other, little.Engine(dtype=dtype, gain=gain), start, drew.ids, temperature)
    said = little.log_softmax(drew.logits) if raw else None
    a = drew.logp if said is None else np.take_along_axis(said, drew.ids[:, :, None], axis=2)[:, :, 0]
    lengths = np.random.default_rng(seed).integers(20, 81, len(start))
    rows: list[Row] = []
    for i, n in enumerate(lengths.tolist()):
        told = {"record_id": f"r{i}", "group_id": str(i // each), **declared}
        rows.append(row([*start[i], *drew.ids[i, :n]], a[i, :n], scored.logp[i, :n], **told))
    return rows


# -- how dumps store it ------------------------------------------------------------------------------------------------


def stored(rows: list[Row], change: Callable[[Any], Any], sides: tuple[str, ...] = SIDES) -> list[Row]:
    """With the values of these sides changed."""
    of = lambda x: [None if v is None else float(change(np.float64(v))) for v in x]
    return [{**r, **{side: of(r[side]) for side in sides}} for r in rows]


def decimals(n: int) -> Callable[[Any], Any]:
    return lambda x: np.round(x, n)


def cut(r: Row, n: int) -> Row:
    """The first `n` tokens of the reply."""
    return {k: v[: PROMPT + n] if isinstance(v, list) else v for k, v in r.items()}


def certain(rows: list[Row], where: Callable[[int], slice], per: int = 1) -> list[Row]:
    """Each `per`-th record with tokens of p = 1 to float32: a forced head, a template, a loop. `where`: of a reply of
    so many tokens."""
    rng = np.random.default_rng(1)
    out: list[Row] = []
    for i, r in enumerate(rows):
        values = {side: np.array(r[side][PROMPT:], dtype=np.float64) for side in SIDES}
        for x in values.values() if i % per == 0 else ():
            at = where(len(x))
            x[at] = -(2.0**-23) * rng.integers(0, 5, len(x[at]))
        out.append({**r, **{side: [None] * PROMPT + x.tolist() for side, x in values.items()}})
    return out


def loose(rows: list[Row], filler: float | None, padded: bool = False) -> list[Row]:
    """Prompt and reply apart, tool output in the reply and padding behind it: masked, with `filler` for a log-prob."""
    rng = np.random.default_rng(2)
    most = max(len(r["token_ids"]) for r in rows) - PROMPT
    out: list[Row] = []
    for r in rows:
        n = len(r["token_ids"]) - PROMPT
        own = np.ones(n, dtype=bool)
        own[n // 4 : n // 4 + int(rng.integers(0, 1 + n // 3))] = False
        pads = (most - n) * padded
        values = {side: [v if k else filler for v, k in zip(r[side][PROMPT:], own, strict=True)] for side in SIDES}
        out.append(
            {
                "prompt_ids": r["token_ids"][:PROMPT], "response_ids": r["token_ids"][PROMPT:] + [2] * pads,
                "rollout_log_probs": values[SIDES[0]] + [0.0] * pads, "response_mask": [*own.tolist(), *[False] * pads],
                "old_log_probs": values[SIDES[1]] + [0.0] * pads, "group_id": r["group_id"],
            }
        )  # fmt: skip
    return out


def labelled(rows: list[Row]) -> list[Row]:
    """Labels that mean nothing, some shared by a few records, one of each record's own."""
    rng = np.random.default_rng(3)
    pick = lambda n: int(rng.integers(n))
    return [
        {
            **r, "replica_id": f"dp{pick(3)}", "env_id": f"env{pick(4)}", "trajectory_id": f"t{i}", "step": i // 48,
            "scorer_version": i // 48, "reward": float(pick(2)), "padding_length": pick(200),
            "cached_prefix_length": 4 * pick(2), "finish_reason": ("stop", "length", "abort")[pick(3)],
        }
        for i, r in enumerate(rows)
    ]  # fmt: skip


def greedy(z: Any, _: Any) -> Any:
    return np.where(z == z.max(axis=1, keepdims=True), 0.0, -1e3)


def lagged() -> list[Row]:
    """Weights of two versions ago, moved by far less than rounding is."""
    rows: list[Row] = []
    for lag, size in enumerate((0.0, 0.002, 0.004)):
        for r in little_rows(seed=lag, size=size):
            told = {"record_id": f"{lag} {r['record_id']}", "group_id": f"{lag} {r['group_id']}", "scorer_version": 9}
            rows.append({**r, **told, "policy_version": [9 - lag] * len(r["token_ids"])})
    return rows


DUMPS: dict[str, Callable[[], list[Row]]] = {
    "recorded": recorded,
    "recorded, 3 decimals": lambda: stored(recorded(), decimals(3)),
    "recorded, sampler to 4 decimals": lambda: stored(recorded(), decimals(4), SIDES[:1]),
    "recorded, float32": lambda: stored(recorded(), np.float32),
    "one record": lambda: recorded()[:1],
    "replies of 0 to 3 tokens": lambda: [cut(r, i % 4) for i, r in enumerate(recorded())],
    "labels": lambda: labelled(recorded()),
    "tool output null, padding 0.0": lambda: loose(recorded(), None, padded=True),
    "tool output 0.0, padding 0.0": lambda: loose(recorded(), 0.0, padded=True),
    "a forced head of 10": lambda: certain(recorded(), lambda n: slice(0, 10)),
    "a forced head, 4 decimals": lambda: stored(certain(recorded(), lambda n: slice(0, 25)), decimals(4)),
    "a loop at the end of half of them": lambda: certain(recorded(), lambda n: slice(n - n // 3, n), per=2),
    "nearly all tokens certain": lambda: certain(recorded(), lambda n: slice(n // 20, n)),
    "one prompt": lambda: little_rows(1, 32, seed=10),
    "two prompts": lambda: little_rows(2, 16, seed=7),
    "four prompts": lambda: little_rows(4, 16, seed=10),
    "float32 engines, sampler to 4 decimals": lambda: stored(little_rows(dtype="float32"), decimals(4), SIDES[:1]),
    "float32 engines, 3 decimals": lambda: stored(little_rows(dtype="float32"), decimals(3)),
    "float16 engines, 4 decimals": lambda: stored(little_rows(dtype="float16"), decimals(4)),
    "greedy": lambda: little_rows(process=greedy, raw=True, temperature=1.0, logprob_semantics="raw"),
    "temperature": lambda: little_rows(
        process=lambda z, _: little.log_softmax(z / 0.7), temperature=0.7, logprob_semantics="temperature"
    ),
    "top-p, raw": lambda: little_rows(
        process=lambda z, _: top_p(0.95)(little.log_softmax(z)), raw=True, top_p=0.95, logprob_semantics="raw"
    ),
    "top-k, raw": lambda: little_rows(
        process=lambda z, _: top_k(20)(little.log_softmax(z)), raw=True, top_k=20, logprob_semantics="raw"
    ),
    "nearly uniform": lambda: little_rows(gain=0.2),
    "stale by almost nothing": lagged,
}


def said(rows: list[Row], folder: Path) -> list[Finding]:
    path = folder / "dump.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return list(audit([path], Choices(workers=1, what_if=False)).findings)


@pytest.mark.parametrize("name", DUMPS)
def test_a_healthy_dump_raises_no_warning(name: str, tmp_path: Path) -> None:
    found = said(DUMPS[name](), tmp_path)
    assert found, "what a dump does not tell is said at least"
    assert [f"{f.code}: {f.message}" for f in found if f.severity is not INFO] == []


def _first_token_off(rows: list[Row]) -> list[Row]:
    """One side or the other is 1 to 2 nats lower there."""
    rng = np.random.default_rng(4)
    out: list[Row] = []
    for i, r in enumerate(rows):
        x = list(r[SIDES[i % 2]])
        x[PROMPT] -= 1.0 + float(rng.random())
        out.append({**r, SIDES[i % 2]: x})
    return out


def _loud_behind_a_forced_head(rows: list[Row]) -> list[Row]:
    """From token 40 on the scorer computes with other logits, as its gap on the scale 1 - p shows."""
    rng = np.random.default_rng(5)
    out: list[Row] = []
    for r in certain(rows, lambda n: slice(0, 10)):
        b = np.array(r["old_logprobs"][PROMPT:])
        b[40:] += rng.normal(0.0, 0.6, len(b[40:])) * (1.0 - np.exp(b[40:]))
        out.append({**r, "old_logprobs": [None] * PROMPT + np.minimum(b, 0.0).tolist()})
    return out


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("changes-at-one-place", lambda: _first_token_off(recorded())),
        ("changes-at-one-place", lambda: _loud_behind_a_forced_head(recorded())),
        ("one-source", lambda: [{**r, "old_logprobs": r["sampler_logprobs"]} for r in stored(recorded(), decimals(3))]),
    ],
    ids=["the first token", "behind a forced head", "a copy of decimals"],
)
def test_the_faults_that_these_resemble_are_told(code: str, make: Callable[[], list[Row]], tmp_path: Path) -> None:
    assert code in {f.code for f in said(make(), tmp_path) if f.severity is not INFO}
