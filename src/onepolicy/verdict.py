"""From two scorings of the same tokens to a report: aligned, added up, measured, judged; what the pair itself shows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onepolicy.align import align
from onepolicy.codes import finding
from onepolicy.engines.base import Engine
from onepolicy.errors import EngineError, UsageError
from onepolicy.gates.bounds import Preset, default_preset, joined, load
from onepolicy.gates.judge import judge
from onepolicy.metrics import METRICS
from onepolicy.metrics.horizon import answer_from
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.sums import Sums
from onepolicy.types import Finding, FloorColumns, LogprobPairs, Report, Scoring

#: Tokens shown on each side of a worst token.
_AROUND = 8


def compare_rollouts(
    a: Rollouts,
    b: Rollouts | None = None,
    names: tuple[str, str] = ("sampler", "old"),
    *,
    bounds: str | None = None,
    view: str = "drawn",
    reply_length: int | None = None,
) -> Report:
    """Two recorded scorings, of one file or of two. Errors: `AlignmentError` where the tokens are not the same."""
    preset = load(bounds) if bounds else None
    left, right = a.scorings.get(names[0]), (b or a).scorings.get(names[1])
    seen = fingerprint_findings(left.fingerprint if left else {}, right.fingerprint if right else {})
    report, pairs = compare(a, b, names, preset, view, reply_length, seen)
    return replace(report, context={**report.context, "tokens": worst_in_context(report.sums, pairs, None)})


def compare(
    a: Rollouts,
    b: Rollouts | None,
    names: tuple[str, str],
    preset: Preset | None,
    view: str,
    reply_length: int | None,
    seen: Sequence[Finding] = (),
    floor: FloorColumns | None = None,
) -> tuple[Report, LogprobPairs]:
    """align -> reduce -> judge, with everything the report carries. `floor`: what rounding predicts at each token; the
    default bounds are then the floor and the absolute ones."""
    positions = np.arange(a.n_tokens) - np.repeat(a.offsets[:-1], a.lengths)
    pairs = replace(align(a, names[0], names[1], other=b), floor=floor, positions=positions)
    left, right = a.scorings[names[0]], (b or a).scorings[names[1]]
    if preset is None:
        preset = load(quantised_preset(left, right) or default_preset([left.dtype, right.dtype]))
        preset = joined(load("floor"), preset) if floor is not None else preset
    sums = reduce(pairs, METRICS.values(), view)
    length = reply_length or median_reply(pairs)
    # two files may call their sides alike: a name stands for one engine in the report
    x, y = names if names[0] != names[1] else (names[0], f"{names[1]} (second)")
    return judged(
        sums,
        preset,
        length,
        [*seen, *_unnamed(seen, meaning_findings(a, left, right))],
        {x: left.fingerprint, y: right.fingerprint},
        {"dtypes": {x: left.dtype, y: right.dtype}},
    ), pairs


def _unnamed(seen: Sequence[Finding], found: Sequence[Finding]) -> list[Finding]:
    """Without what the contract leg has named: it withholds nothing, so that the size of the gap is judged too."""
    named = any(f.code == "logprob-contract" for f in seen)
    return [f for f in found if not (named and f.code == "semantics-differ")]


def quantised_preset(left: Scoring, right: Scoring) -> str | None:
    """The absolute preset where a side declares 8-bit weights or KV cache: the looser of the two. None for neither.

    Errors: `UsageError` for fewer bits: no default bounds exist.
    """
    found: set[str] = set()
    for said in (left.fingerprint, right.fingerprint):
        if str(said.get("kv_cache_dtype") or "").startswith("fp8"):
            found.add("fp8")
        words = str(said.get("weight_quantization") or said.get("quantization") or "").lower()
        found |= {preset for mark, preset in _EIGHT_BITS if mark in words}
        if any(mark in words for mark in _FEWER_BITS):
            raise UsageError(f"no default bounds for weights in {words}: pass --bounds (fp8, int8, or your own file)")
    return "int8" if "int8" in found else "fp8" if found else None


_EIGHT_BITS = (("fp8", "fp8"), ("f8e", "fp8"), ("int8", "int8"), ("i8", "int8"), ("u8", "int8"), ("q8_0", "int8"))
_FEWER_BITS = ("int4", "int3", "int2", "q4_", "q5_", "q6_", "q3_", "q2_", "u4", "i4", "nf4", "fp4", "mxfp4")


def judged(
    sums: Sums,
    preset: Preset,
    length: int,
    seen: Sequence[Finding],
    fingerprints: Mapping[str, Mapping[str, Any]],
    context: Mapping[str, Any],
) -> Report:
    """`judge` plus what the gap does at the reply length."""
    report = judge(sums, preset, fingerprints=fingerprints, run_findings=seen, reply_length=length, context=context)
    return replace(report, context={**report.context, "answer": answer_from(report.measurements, length)})


def rejudge(report: Report, bounds: str) -> Report:
    """A saved report under other bounds, from its Sums; what was seen while running is kept."""
    kept = [f for f in report.findings if f.origin == "run"]
    fresh = judged(report.sums, load(bounds), report.reply_length or 1, kept, report.fingerprints, report.context)
    return replace(fresh, legs=report.legs, floor=report.floor, listings=report.listings)


def median_reply(pairs: LogprobPairs) -> int:
    """The median number of drawn tokens of the sequences that have any; of all tokens for fixed texts."""
    mask = pairs.drawn if pairs.drawn.any() else np.ones(len(pairs.drawn), dtype=bool)
    before = np.concatenate([[0], np.cumsum(mask)])
    lengths = np.diff(before[pairs.offsets])
    return max(1, int(statistics.median(lengths[lengths > 0].tolist() or [1])))


def declared_as(rollouts: Rollouts, declare: Mapping[str, str]) -> Rollouts:
    """The rollouts with record columns set that were not. Errors: `UsageError` for what is declared otherwise."""
    names = ("logprob_semantics", "temperature", "top_p", "top_k", "min_p")
    names += ("repetition_penalty", "presence_penalty", "frequency_penalty")
    columns = dict(rollouts.records)
    for name, text in declare.items():
        if name not in names:
            raise UsageError(f"--declare {name}: wanted one of {', '.join(names)}")
        value = text if name == "logprob_semantics" else _number(name, text)
        already = {rollouts.record(name, i) for i in range(len(rollouts))} - {None}
        if already - {value}:
            raise UsageError(f"--declare {name}={text}: the rollouts themselves say {sorted(map(str, already))}")
        columns[name] = column_values(name, [value] * len(rollouts))
    return replace(rollouts, records=columns)


def _number(name: str, text: str) -> float | int:
    try:
        return int(text) if name == "top_k" else float(text)
    except ValueError:
        raise UsageError(f"--declare {name}={text}: wanted a number") from None


# -- findings about the pair itself ------------------------------------------------------------------------------------


def fingerprint_findings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Finding]:
    """What the two fingerprints alone show: other vocabularies, tokenizers, weights. Unknown is not different."""
    checks = (
        ("vocab_size", "vocabulary-differs"),
        ("tokenizer_digest", "tokenizer-differs"),
        ("weights_digest", "weights-differ"),
    )
    out: list[Finding] = []
    for key, code in checks:
        x, y = a.get(key), b.get(key)
        if key == "weights_digest" and any(s.get("weight_quantization") or s.get("quantization") for s in (a, b)):
            continue  # a quantised file is never the original's bytes
        if x is not None and y is not None and x != y:
            out.append(finding(code, f"{key}: {x} and {y}", origin="run", evidence={"a": x, "b": y}))
    return out


def meaning_findings(rollouts: Rollouts, left: Scoring, right: Scoring) -> list[Finding]:
    """Declared semantics that differ in effect, or are not declared at all."""
    rows = {_meaning(rollouts, i) for i in range(len(rollouts))}
    out: list[Finding] = []
    if any(semantics is None for semantics, _, _ in rows):
        out.append(finding("semantics-undeclared", "logprob_semantics is null in some records", origin="run"))
    differ = left.semantics and right.semantics and left.semantics != right.semantics
    if differ and any(hot or cut for _, hot, cut in rows):
        message = f"the first side is {left.semantics!r}, the second {right.semantics!r}"
        out.append(finding("semantics-differ", message, origin="run"))
    return out


def _meaning(rollouts: Rollouts, i: int) -> tuple[str | None, bool, bool]:
    """(semantics, temperature other than 1, truncated) of one record."""
    hot = rollouts.record("temperature", i) not in (None, 1.0)
    cut = rollouts.record("top_p", i) not in (None, 1.0) or rollouts.record("top_k", i) not in (None, 0, -1)
    return rollouts.record("logprob_semantics", i), hot, cut or rollouts.record("min_p", i) not in (None, 0.0)


def worst_in_context(sums: Sums, pairs: LogprobPairs, engine: Engine | None, limit: int = 5) -> list[dict[str, Any]]:
    """The worst tokens with the text around them; ids stand for text where no engine can decode."""
    where = {name: i for i, name in reversed(list(enumerate(pairs.record_ids)))}
    out: list[dict[str, Any]] = []
    for place in sums.worst.get("tokens", [])[:limit]:
        lo, hi = (int(x) for x in pairs.offsets[where[place.record] : where[place.record] + 2])
        at = lo + place.position
        ids = pairs.token_ids[max(lo, at - _AROUND) : min(hi, at + _AROUND // 2 + 1)].tolist()
        texts = _decoded(engine, ids)
        k = min(_AROUND, at - lo)
        out.append(
            {
                "record": place.record,
                "position": place.position,
                "before": "".join(texts[:k]),
                "token": texts[k],
                "after": "".join(texts[k + 1 :]),
                "sampler": float(place.a),
                "scorer": float(place.b),
            }
        )
    return out


def _decoded(engine: Engine | None, ids: list[int]) -> list[str]:
    plain = [f"[{i}]" for i in ids]
    if engine is None:
        return plain
    try:
        return engine.decode(ids)
    except (EngineError, UsageError, NotImplementedError):
        return plain  # text is for the eye only: a verdict does not depend on it
