"""Reports of a check with legs and a floor, made by hand on a small numpy model of two rounding engines."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from build import rollouts_of
from onepolicy.align import align
from onepolicy.codes import by_rank, finding
from onepolicy.floor import Variant, assumed, measured
from onepolicy.gates.bounds import load
from onepolicy.gates.judge import judge, worst
from onepolicy.metrics import METRICS
from onepolicy.metrics.horizon import answer_from
from onepolicy.reduce import reduce
from onepolicy.types import (
    Finding,
    Floor,
    FloorColumns,
    FloorVariant,
    LegResult,
    LogprobPairs,
    Outcome,
    Question,
    Ran,
    Report,
    Severity,
)  # fmt: skip

SEQUENCES, TOKENS = 64, 160
KERNELS = ("full forward", "KV decode", "another attention")


class World:
    """True log-probs `[T]` of `SEQUENCES` replies, and scorings of them that round by about 0.05 nats."""

    def __init__(self, seed: int = 0, rounding: float = 0.05) -> None:
        self.rng = np.random.default_rng(seed)
        n = SEQUENCES * TOKENS
        self.true = -self.rng.exponential(1.0, n) - 0.05
        self._scale = rounding * (1.02 - np.exp(self.true))
        self._shared = self.rng.standard_normal(n)
        self.groups = [str(i // 2) for i in range(SEQUENCES)]

    def scoring(self, fault: float = 0.0, rounds: float = 1.0) -> np.ndarray:
        """`[T]`: the truth, rounded; `fault`: nats of noise besides."""
        noise = self._shared * 0.6 + self.rng.standard_normal(len(self.true)) * 0.8
        shift = fault * self.rng.standard_normal(len(self.true))
        return np.minimum(self.true + rounds * self._scale * noise + shift, 0.0)

    def pairs(self, a: np.ndarray, b: np.ndarray) -> LogprobPairs:
        offsets = [TOKENS] * SEQUENCES
        pairs = align(rollouts_of(a, b, offsets, groups=self.groups))
        return replace(pairs, positions=np.arange(len(a)) % TOKENS)

    def floor(self, pairs: LogprobPairs, one_kernel: bool = False) -> tuple[Floor, FloorColumns]:
        if one_kernel:
            return assumed(self.scoring() - self.true, self.true, pairs.drawn, "bfloat16")
        variants = [Variant(k, self.scoring()) for k in KERNELS]
        floor, columns = measured(variants, self.true, pairs.drawn, "bfloat16")
        assert columns is not None
        return floor, columns


PRINTS = {
    "sampler": {
        "engine": "vllm", "versions": {"vllm": "0.32.0", "torch": "2.10.0"}, "model": "SmolLM2-135M",
        "dtype": "bfloat16", "device": "cpu", "attention": "CPU_ATTN", "prefix_cache": True, "vocab_size": 49152,
    },
    "scorer": {
        "engine": "hf", "versions": {"transformers": "5.19.0", "torch": "2.11.0"}, "model": "SmolLM2-135M",
        "dtype": "bfloat16", "device": "cpu", "attention": "sdpa", "vocab_size": 49152,
    },
}  # fmt: skip
SUITE = {"size": "default", "version": 1, "prompts": 64, "texts": 40, "left_out": ["long-32k", "long-64k"]}
OWNERSHIP = {
    "sampler": 0.0412, "scorer": 0.0388, "gap": 0.0551, "correlation": 0.05, "sampler_share": 0.53,
    "scorer_share": 0.47, "against": "the scorer in float32",
}  # fmt: skip

#: key, question, factor, rounding of the changed side.
RUN: tuple[tuple[str, Question, str, float], ...] = (
    ("same-function", Question.FUNCTION, "both engines in float32, on drawn tokens", 2e-4),
    ("same-function-texts", Question.FUNCTION, "both engines in float32, on the suite's fixed texts", 2e-4),
    ("sampler-batch", Question.ROUNDING, "the sampler: each reply alone against in a batch", 1.0),
    ("sampler-path", Question.ROUNDING, "the sampler: prefill against decode by forced ids", 1.0),
    ("sampler-cache", Question.ROUNDING, "the sampler: cold against cached prefix", 0.4),
    ("scorer-batch", Question.ROUNDING, "the scorer: micro-batch 1 against N", 0.0),
    ("scorer-padding", Question.ROUNDING, "the scorer: right against left padding", 0.7),
    ("scorer-path", Question.ROUNDING, "the scorer: full forward against KV decode", 1.0),
    ("scorer-precision", Question.ROUNDING, "the scorer against its own float32, same rounded weights", 0.7),
    ("across-prefill", Question.ROUNDING, "the scorer against the sampler's prefill", 1.0),
    ("fixed-texts", Question.ROUNDING, "the scorer against the sampler on the suite's fixed texts", 1.0),
)
KERNELS_OF_LEG = {"sampler": "CPU_ATTN, oneDNN float32", "scorer": "sdpa, mkl float32; TF32 off"}


def leg(world: World, key: str, question: Question, factor: str, rounds: float) -> LegResult:
    """A leg that was run: judged by the floor, or by the bounds of float32."""
    small = question is Question.FUNCTION
    a = world.scoring(rounds=rounds)
    b = world.scoring(rounds=rounds) if rounds else a.copy()
    pairs = world.pairs(a, b)
    preset = load("fp32" if small else "leg")
    floor = None if small else world.floor(pairs)[1]
    sums = reduce(replace(pairs, floor=floor), [METRICS[k] for k in LEG_METRICS])
    report = judge(sums, preset)
    facts: dict[str, Any] = {"findings": [], **({"kernels": KERNELS_OF_LEG} if small else {})}
    return LegResult(
        key, question, factor, "first scoring", "second scoring", Ran.DONE, "", Outcome.PASS, report.measurements,
        report.gates, "", facts, sums.to_dict(),
    )  # fmt: skip


LEG_METRICS = ("abs_log_ratio/mean", "abs_log_ratio/max", "log_ratio/rms", "gap_over_floor/rms")


def without(key: str, question: Question, why: str, ran: Ran = Ran.NOT) -> LegResult:
    """A leg that was not run, or failed."""
    return LegResult(key, question, "one factor", "", "", ran, why)


NOT_RUN = (
    without("sampler-load", Question.ROUNDING, "engine 'vllm' is no server"),
    without("scorer-packing", Question.ROUNDING, "engine 'hf' has no switch 'packing'"),
    without("reference-sampler", Question.ROUNDING, "no --reference was named"),
    without("reference-scorer", Question.ROUNDING, "no --reference was named"),
)
CONTRACT = LegResult(
    "contract", Question.MEANING, "what the sampler's log-probs mean, by probing", "as declared", "as probed",
    Ran.DONE, "", Outcome.PASS, facts={
        "meaning": "processed",
        "settings": [
            {"setting": "temperature=0.7", "name": "temperature", "gap_if_applied": 0.03, "gap_if_not": 0.41,
             "tokens": 180, "applied": True},
            {"setting": "top_p=0.8", "name": "top_p", "gap_if_applied": 0.028, "gap_if_not": 0.19, "tokens": 150,
             "applied": True},
            {"setting": "min_p", "applied": None, "why": "not supported by the sampler"},
        ],
        "prompt_logprobs": None,
    },
)  # fmt: skip


@cache
def checked(
    fault: float = 0.0, late: float = 0.0, one_kernel: bool = False, preset: str = "floor + bf16", seed: int = 3
) -> Report:
    """A check with every leg: `fault` nats of noise in the scorer, `late` nats from position 64 on."""
    world = World(seed)
    a, b = world.scoring(), world.scoring(fault)
    far = np.arange(len(b)) % TOKENS >= 64
    b = np.minimum(b + late * far * world.rng.standard_normal(len(b)), 0.0)
    pairs = world.pairs(a, b)
    floor, columns = world.floor(pairs, one_kernel)
    sums = reduce(replace(pairs, floor=columns, names=("sampler", "scorer")), METRICS.values())
    legs = (CONTRACT, *(leg(world, *row) for row in RUN), *NOT_RUN)
    context = {
        "tokens": [], "suite": SUITE, "ownership": OWNERSHIP, "floor_fault": 0.0234,
        "dtypes": {"sampler": "bfloat16", "scorer": "bfloat16"},
    }  # fmt: skip
    report = judge(sums, load(preset), fingerprints=PRINTS, reply_length=4096, context=context)
    words = {"answer": answer_from(report.measurements, 4096), "tokens": worst_tokens(report)}
    return replace(report, legs=legs, floor=floor, context={**report.context, **words})


def worst_tokens(report: Report) -> list[dict[str, Any]]:
    places = report.sums.worst["tokens"][:5]
    return [
        {
            "record": f"prompt-{p.record}", "position": p.position, "before": "the quick brown fox jumps ",
            "token": "over", "after": " the lazy dog", "sampler": float(p.a), "scorer": float(p.b),
        }
        for p in places
    ]  # fmt: skip


def with_findings(report: Report, *found: Finding) -> Report:
    """The report with more findings, and the outcome that they make."""
    findings = tuple(by_rank([*report.findings, *found]))
    return replace(report, findings=findings, outcome=worst([f.outcome for f in findings]))


def other_leg(report: Report, key: str, **changes: Any) -> Report:
    """The report with fields of one leg set."""
    return replace(report, legs=tuple(replace(x, **changes) if x.key == key else x for x in report.legs))


@cache
def other_function() -> Report:
    """Production passes, float32 does not: a fault below what rounding hides."""
    place = "first bad token: record prompt-7, position 12"
    message = "both engines in float32, on drawn tokens: RMS 0.0021 and max 0.044 nats over 10,176 tokens"
    found = finding("different-function", message, origin="run", place=place)
    legs = other_leg(checked(), "same-function", outcome=Outcome.DRIFT, place=place)
    return with_findings(legs, found)


@cache
def failed_leg() -> Report:
    """The float32 leg ran out of memory: the question has no answer."""
    why = "out of memory: float32 needs 3.1 GiB, 2.0 GiB are free"
    report = other_leg(checked(), "same-function", ran=Ran.FAILED, why=why, outcome=None, measurements={}, gates=())
    report = other_leg(report, "same-function-texts", ran=Ran.NOT, why=why, outcome=None, measurements={}, gates=())
    return with_findings(report, finding("same-function-open", f"same-function: {why}", origin="run"))


@cache
def incomplete() -> Report:
    """No floor: the sampler's KV cache cannot be emulated."""
    why = "the sampler keeps its KV cache in fp8, which cannot be emulated"
    plain = judge(checked().sums, load("bf16"), fingerprints=PRINTS, reply_length=4096, context=checked().context)
    report = replace(plain, legs=checked().legs, floor=Floor("incomplete", why, "bfloat16"))
    return with_findings(report, finding("floor-incomplete", why, origin="run"))


@cache
def withheld() -> Report:
    """A finding of the record withholds every number."""
    message = "log-probs above 0 (sampler positive: 2); the first: 0.0007 and -0.0011"
    gates = tuple(
        replace(g, outcome=Outcome.PASS, why="unjudged: a finding above withholds it") for g in checked().gates
    )
    return with_findings(replace(checked(), gates=gates), finding("positive-logprob", message))


REPORTS = {
    "healthy": checked,
    "a fault": lambda: checked(fault=0.08),
    "a late fault": lambda: checked(late=0.12),
    "one kernel": lambda: checked(one_kernel=True),
    "another function": other_function,
    "float32 failed": failed_leg,
    "no floor": incomplete,
    "withheld": withheld,
    "plain bounds": lambda: checked(preset="bf16"),
}


HOSTILE = {
    "terminal codes": "\x1b[2J\x1b]0;owned\x07",
    "markup": "[red]x[/red] [link=http://e]y[/link]",
    "newlines": "a\nb\r\nc\td\n\n# head\n- item\n| a | b |\n|---|---|",
    "other direction": "abc\u202edef\u2066x",
    "invisible": "a\u200bb\ufeffc",
    "half a character": "\ud800",
    "no character of XML": "a\x00b\x0bc\ufffe\uffff",
    "wide": "漢字" * 200,
    "long": "x" * 10_000,
    "combining": "e" + "\u0301" * 500,
    "html": "<img src=x onerror=alert(1)> </details></summary> <!-- c --> &lt; &#60; ]]> <![CDATA[",
    "bars and ticks": "a | b || \\| ` `` ``` | end\\",
    "ticks": "`" * 300,
    "bars": "|" * 300,
    "one in two": "a ` " * 200,
    "links": "[x](javascript:alert(1)) ![i](http://e.example/x.png) [a]: b <http://e.example> a@b.example",
    "mentions": "@octocat (@org/team) #123 GH-1 (gh-22) https://e.example/?a=1. WWW.e.example, ftp://e x#1",
    "emphasis": "*a* _b_ __c__ ~~d~~ $x$ :smile: **e** \\*f\\*",
    "empty": "",
    "spaces": "   ",
}


def poisoned(bad: str) -> Report:
    """The healthy report with `bad` wherever a file or an engine may put text."""
    report = checked()
    gate = replace(report.gates[0], metric=bad, why=bad, source=bad, outcome=Outcome.INCONCLUSIVE)
    found = Finding("undecided", Severity.INFO, Outcome.INCONCLUSIVE, bad, bad, {}, (bad,), (bad,), bad)
    one = replace(report.legs[4], key=bad, factor=bad, a=bad, b=bad, place=bad, outcome=Outcome.DRIFT)
    kernels = {bad: bad, "more": [bad]}
    setting = {"setting": bad, "applied": [bad], "gap_if_applied": bad, "tokens": bad}
    contract = replace(report.legs[0], facts={"settings": [setting, bad]})
    step = replace(contract, key="step-0", facts={bad: {bad: bad, "ratio": 1.0}})
    function = replace(report.legs[1], facts={"kernels": kernels, "production_kernels": bad})
    out = replace(one, ran=Ran.FAILED, why=bad)
    assert report.floor is not None
    variants = (FloorVariant(bad, bad, 0.03, 1), FloorVariant(bad, "other", 0.04, 1))
    floor = replace(report.floor, why=bad, dtype=bad, source="baseline", variants=variants)
    token = {"record": bad, "position": 3, "before": bad, "token": bad, "after": bad, "sampler": -1.0, "scorer": -2.0}
    context = {
        **report.context, "tokens": [token], "scores": bad, "ownership": {**OWNERSHIP, "against": bad},
        "suite": {"size": bad, "version": bad, "prompts": bad, "left_out": [bad] * 5}, "dtypes": {bad: bad},
    }  # fmt: skip
    prints = {bad: {"engine": bad, "model": bad, bad: {bad: bad}}, "scorer": {"versions": {bad: 1}, "device": bad}}
    return replace(
        report, outcome=Outcome.INCONCLUSIVE, preset=bad, gates=(gate, *report.gates), findings=(found, found),
        legs=(contract, step, function, one, out, replace(one, ran=Ran.NOT, why=bad)), floor=floor, context=context,
        fingerprints=prints, sums=replace(report.sums, cluster_unit=bad),
    )  # fmt: skip
