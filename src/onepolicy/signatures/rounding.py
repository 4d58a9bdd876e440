"""What rounding looks like, and what only looks like it: noise of its shape but too large, and noise on every token.

Sizes: |d| / (1 - p + 0.003), 75% quantile. Between healthy sides bf16 gives 0.03 to 0.24, fp16 0.005 to 0.015, fp32
1e-6 to 1e-5 (the packaged tiny model in bf16 and fp16 against float32: 0.03 and 0.005; the fake engine in two orders;
public cases of bf16 runs: 0.07 and 0.1). A dump has no legs, so limits are assumed, with room above these: they decide
whether a gap is *of a shape and size that rounding gives*, never that it is rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.codes.kind import DRIFT, FAIL
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.scale import Level, level, look

#: dtype -> the largest 75% quantile of |d| / (1 - p) that its rounding is taken for.
MOST = {"float32": 1e-3, "float16": 0.025, "bfloat16": 0.4}
#: Where a dtype is declared, a gap down to this share of its limit is still called by it.
FINER = 40.0
#: Tokens that are nearly certain (p 0.9 to 0.999), and those that are open (0.1 to 0.9), by number of `scale.EDGES`.
SURE_TOKENS, OPEN_TOKENS, EVERY = (3, 4), (1, 2), (0, 1, 2, 3, 4, 5)
#: Below p = 0.999: above it the scale ends, so that a gap of rounding is small on it. Where nearly all tokens are
#: there, as in a collapsed policy's replies, the others are no tail.
BELOW_CERTAIN = (0, 1, 2, 3, 4)
#: The two are of one size within this factor when the logits were rounded. Healthy pairs: 0.6 to 2.2.
SAME_SIZE = 5.0
#: Tokens of each kind that are needed to see the shape.
LEAST = 12
#: Quantiles of |d| / (1 - p) against the 75% one, and the tokens from which they count: healthy sides reach 4 and 8.
TAILS = (("p95", 6.0, 60), ("p99", 12.0, 200))
#: A gap of no more than this (nats) at any token is in what two sides stored to three decimals: it makes no tail.
STORED = 1e-3
#: Logits that are this many times as far off as the limit are of no rounding, whatever shape the gap has.
FAR_BEYOND = 1.5
#: A reply with so many times the median reply's gap stands apart; together they hold this share of it. From so many on.
APART, HELD, FEWEST_REPLIES = 4.0, 0.6, 8
#: Above this, at the 75% quantile, bf16 is taken for possible and said to be unusual.
UNUSUAL = 0.25
#: Noise that was added to log-probs has both signs at certain tokens (35 to 78% are above 0, since the larger p tells
#: which are certain), one size (its 99% quantile is up to 6 times the 75% one), and the size that it has elsewhere.
NOISE_ABOVE, NOISE_TAIL, NOISE_SIZE = (0.3, 0.85), 8.0, 1.6
#: Shares of d above 0 between which a gap counts as two-sided, with the mean ratio within 2% or 5 standard errors of 1.
TWO_SIDED = (0.35, 0.65)


def noise(e: Evidence) -> Answer:
    """The gap has the shape and size of rounding, and nothing else was found."""
    shape = _shape(e)
    if shape is not None:
        return shape
    limit, size = _limit(e), _all(e).q75
    if size > _allowed(e):
        return Answer("no", f"|d| / (1 - p) is {size:.2g} at its 75% quantile, {limit} gives up to {MOST[limit]:g}")
    tail = _tail(e)
    if tail:
        return Answer("no", f"{tail}: some tokens are computed otherwise")
    size = min(_usual(e), max(size, MOST[limit]))
    told_so = all(e.facts.get(f"{name}_dtype", ["None"]) != ["None"] for name in e.names)
    name = limit if told_so and size > MOST[limit] / FINER else _finest(size, limit)
    code = "bf16-noise" if name == "bfloat16" else "rounding-noise"
    numbers = describe(e)
    message = (
        f"consistent with {name} rounding in shape and size: d has sd {numbers['sd']:.2g} and mean "
        f"{numbers['mean']:.1g}, 95% of |d| are below {numbers['p95_abs']:.2g}, the largest is "
        f"{numbers['max_abs']:.2g}, {numbers['fraction_outside_0.9_1.1']:.1%} of ratios are outside 0.9 to 1.1"
    )
    if size > UNUSUAL:
        message += f"; {size:.2g} a logit is more than healthy pairs were seen to have ({UNUSUAL:g})"
    out = finding(code, message, evidence=numbers, rivals=_all_older(e))
    return Answer("fits", "the shape and size of rounding", out, 1.0)


def _all_older(e: Evidence) -> tuple[str, ...]:
    """What else is in a gap whose tokens were all drawn by other weights than scored them."""
    lags = e.profiles["lag"].labels() if "lag" in e.profiles else []
    older = bool(lags) and all(int(k) >= 1 for k in lags)
    return ("staleness: every token is of older weights than scored it, so the two are not split",) if older else ()


def beyond(e: Evidence) -> Answer:
    """The shape of rounding, but larger than it: size alone decides nothing without a floor."""
    other = _other_function(e)
    if other is not None:
        return other
    shape = _shape(e)
    if shape is None or shape.verdict == "no":
        beside = _beside(e, shape)
        if beside is not None:
            return beside
    if shape is not None:
        return shape
    size, kinds = _all(e).q75, _quantised(e)
    limit = _limit(e)
    if size <= _allowed(e):
        return Answer("no", f"|d| / (1 - p) is {size:.2g} at its 75% quantile, within what {limit} gives")
    numbers = describe(e) | {"limit": MOST[limit]}
    if kinds:
        return _quantisation(kinds, size, numbers)
    if size <= MOST["bfloat16"]:
        message = f"{limit} is declared on both sides, but the gap has the size that coarser rounding gives"
        rivals = ("an operation in bf16 on one side (LM head, autocast, KV cache)", "other weights", "other kernels")
        out = finding("coarser-than-declared", message, evidence=numbers, rivals=rivals)
    else:
        message = f"the gap has the shape of rounding, but {size / MOST[limit]:.1f} times the size that {limit} gives"
        rivals = ("quantised weights or KV cache", "other weights on the two sides", "a setting that differs")
        out = finding("larger-than-rounding", message, evidence=numbers, rivals=rivals)
    return Answer("fits", "the shape of rounding, and too large for it", out, 1 - MOST[limit] / size)


def _other_function(e: Evidence) -> Answer | None:
    """Certain tokens are off by as much as others, on one side or by any size: no rounding, and no noise either."""
    found = _at_certain(e)
    if found is None or not found.large or found.like_noise:
        return None
    message = (
        f"at tokens of which one side is all but certain |d| is {found.sure:.2g}, elsewhere {found.rest:.2g}: no "
        "rounding of logits does that, at any precision. The two sides compute different functions, or score other "
        "tokens than each other"
    )
    more = {"abs_q75_certain": found.sure, "abs_median_open": found.rest, "share_above_at_certain": found.above}
    numbers = describe(e) | more
    out = finding(
        "larger-than-rounding", message, severity=FAIL, outcome=DRIFT, evidence=numbers, rivals=_FUNCTIONS,
        ruled_out=("rounding at any precision",),
    )  # fmt: skip
    return Answer("fits", "certain tokens are off as far as others", out, 1.0)


_FUNCTIONS = (
    "a setting of the model (rope, soft-cap, window, norm, a head that is not tied)",
    "other weights on the two sides (a sync or an adapter that did not arrive)",
    "other tokens or positions (a template, padding, a prefix)",
)


def _beside(e: Evidence, shape: Answer | None) -> Answer | None:
    """What is far beyond rounding though it does not have its shape: a tail over a rounded rest, or all of it."""
    limit, every = _limit(e), _all(e)
    tail = _tail(e)
    if every.q75 <= _allowed(e) and tail:
        finest = _finest(_usual(e), limit)
        message = (
            f"most tokens are off by no more than {finest} rounding gives, but {tail}: they are computed otherwise"
        )
        message += _in_replies(e)
        rivals = (
            "other experts in a mixture model",
            "some replicas, turns or requests with other weights or another cache",
            "tokens that one side biases, masks or drafts",
        )
    elif shape is not None and every.q75 > FAR_BEYOND * MOST[limit]:
        message = (
            f"|d| / (1 - p) is {every.q75:.2g} at its 75% quantile, {every.q75 / MOST[limit]:.1f} times what {limit} "
            f"gives, and has not the shape of rounding: {shape.why}"
        )
        rivals = _FUNCTIONS
    else:
        return None
    kinds = _quantised(e)
    if kinds:
        rivals = (f"what is declared: {', '.join(f'{k} {v}' for k, v in kinds.items())}", *rivals)
    out = finding("larger-than-rounding", message, evidence=describe(e) | {"limit": MOST[limit]}, rivals=rivals)
    return Answer("fits", "beyond what rounding gives", out, max(0.1, 1 - MOST[limit] / every.p99))


def _in_replies(e: Evidence) -> str:
    """How few replies hold most of the gap, where few do."""
    rows = e.rows[e.rows["n"] > 0]
    if len(rows) < FEWEST_REPLIES:
        return ""
    gap, total = rows["scaled"] / rows["n"], float(rows["abs"].sum())
    apart = gap > APART * np.median(gap)
    held = float(rows["abs"][apart].sum()) / total if total else 0.0
    return f"; {int(apart.sum())} of {len(rows)} replies hold {held:.0%} of the gap" if held >= HELD else ""


def _tail(e: Evidence) -> str:
    """What says that tokens lie far outside of the rest; empty where none do. Steps of stored float32 are no tail."""
    every, usual = _all(e), _usual(e)
    most = e.measurements.get("abs_log_ratio/max")
    if most is not None and most.value is not None and most.value <= STORED:
        return ""
    for name, times, least in TAILS:
        far = getattr(every, name)
        if every.n >= least and far > max(times * usual, MOST["float32"]):
            return (
                f"{100 - int(name[1:])}% of them are off by {far:.2g} or more on the scale of a logit, "
                f"{far / usual:.2g} times the 75% quantile"
            )
    return ""


def _usual(e: Evidence) -> float:
    """The 75% quantile of |d| / (1 - p): of all tokens, or of those below p = 0.999 where that is more."""
    open_ = level(e.extra["rounding"], BELOW_CERTAIN)
    return max(_all(e).q75, open_.q75 if open_.n >= TAILS[0][2] else 0.0)


def _quantisation(kinds: dict[str, str], size: float, numbers: dict[str, Any]) -> Answer:
    declared = ", ".join(f"{k} {v}" for k, v in kinds.items())
    message = f"the gap has the shape of rounding at {size:.2g} a logit; declared is {declared}, which would do that"
    rivals = ("other weights on the two sides", "a setting that differs")
    out = finding("quantisation-suspected", message, evidence={**numbers, "declared": kinds}, rivals=rivals)
    return Answer("fits", "broad noise, and quantisation is declared", out, 0.8)


def broad(e: Evidence) -> Answer:
    """As large at certain tokens as at open ones: no rounding of logits does that, however coarse."""
    if e.extra.get("rounding") is None or e.profiles.get("probability") is None:
        return Answer("lacks", "needs the gap by probability")
    found = _at_certain(e)
    if found is None:
        return Answer("unclear", f"needs {LEAST} tokens with p > 0.99, and as many between 0.1 and 0.9")
    sure, rest = found.sure, found.rest
    if not found.large:
        return Answer("no", f"the gap shrinks where a token is certain ({sure:.2g} nats there, {rest:.2g} elsewhere)")
    if not found.like_noise:
        return Answer(
            "no",
            f"at certain tokens {found.above:.0%} of the gaps are above 0, 1% are {found.tail:.2g} times the 75% "
            f"quantile, which is {sure / max(rest, 1e-12):.2g} times that elsewhere: noise has two sides and one size",
        )
    more = {"abs_q75_certain": sure, "abs_median_open": rest, "logit_error_at_certain": found.q75}
    numbers = describe(e) | more
    message = (
        f"at tokens that are all but certain |d| is {sure:.2g}, as large as elsewhere ({rest:.2g}): rounding of logits "
        "shrinks there like 1 - p, so this noise was added to log-probs or comes from other tokens"
    )
    out = finding("noise-on-every-token", message, evidence=numbers, ruled_out=("rounding at any precision",))
    return Answer("fits", "as large at certain tokens as elsewhere", out, 1.0)


@dataclass(frozen=True, slots=True)
class _Certain:
    """The gap at certain tokens. `sure`: 75% quantile of |d| there, `rest`: median of |d| at open ones, nats; `q75`: on
    the token's scale; `above`: share of d above 0; `tail`: 99% quantile of |d| in times of the 75% one."""

    sure: float
    rest: float
    q75: float
    above: float
    tail: float
    large: bool

    @property
    def like_noise(self) -> bool:
        two_sided = NOISE_ABOVE[0] <= self.above <= NOISE_ABOVE[1]
        return two_sided and self.tail <= NOISE_TAIL and self.sure <= NOISE_SIZE * self.rest


def _at_certain(e: Evidence) -> _Certain | None:
    """None where too few tokens are certain, or open."""
    counted, bins = e.extra.get("rounding"), e.profiles.get("probability")
    if counted is None or bins is None:
        return None
    certain, open_ = level(counted, (4, 5)), level(counted, OPEN_TOKENS)
    if certain.n < LEAST or open_.n < LEAST:
        return None
    at_certain = bins.merged(("0.99 - 0.999", "p > 0.999"), "x")
    sure = at_certain.quantile("x", 0.75)
    rest = bins.merged(("0.1 - 0.5", "0.5 - 0.9"), "x").quantile("x", 0.5)
    large = not (certain.q75 < 1.0 or certain.q75 < 4 * open_.q75 or sure < max(0.02, 0.5 * rest))
    above = counted.counts.get("certain above", 0) / max(1, counted.counts.get("certain", 0))
    return _Certain(sure, rest, certain.q75, above, at_certain.quantile("x", 0.99) / max(sure, 1e-12), large)


def describe(e: Evidence) -> dict[str, Any]:
    """The numbers of a gap that a mean does not show."""
    value = lambda key: m.value if (m := e.measurements.get(key)) is not None and m.value is not None else math.nan
    counted, mean = e.extra["rounding"], value("log_ratio/mean")
    outside = counted.counts.get("below", 0) + counted.counts.get("over", 0)
    numbers = {
        "mean": mean, "sd": math.sqrt(max(0.0, value("log_ratio/rms") ** 2 - mean * mean)),
        "p50_abs": value("abs_log_ratio/p50"), "p95_abs": value("abs_log_ratio/p95"),
        "p99_abs": value("abs_log_ratio/p99"), "max_abs": value("abs_log_ratio/max"),
        "fraction_outside_0.9_1.1": outside / max(1, counted.counts.get("tokens", 0)),
        "mean_ratio": value("ratio/mean"), "tokens": e.n,
    }  # fmt: skip
    sizes = {"p_0.1_0.9": level(counted, OPEN_TOKENS), "p_0.9_0.999": level(counted, SURE_TOKENS)}
    return numbers | {f"on_token_scale_{k}": s.median for k, s in sizes.items() if s.n}


def _all(e: Evidence) -> Level:
    return level(e.extra["rounding"], EVERY)


def _shape(e: Evidence) -> Answer | None:
    """None where the gap has the shape of rounding; else what speaks against it, or what is missing."""
    counted = e.extra.get("rounding")
    if counted is None:
        return Answer("lacks", "needs the gap by probability")
    sure, open_ = level(counted, SURE_TOKENS), level(counted, OPEN_TOKENS)
    if sure.n < LEAST or open_.n < LEAST:
        return Answer("unclear", f"the shape shows from {LEAST} tokens each with p in 0.1 to 0.9 and in 0.9 to 0.999")
    if counted.counts.get("zero gap", 0) == e.n:
        return Answer("no", "there is no gap at all")
    off, least = sure.median / open_.median, MOST["float32"]
    # what is stored as float32 has steps of its own, and sure tokens then often have no gap at all
    apart = off < 1 / SAME_SIZE and open_.median > least
    if apart or (off > SAME_SIZE and sure.median > least) or sure.q75 > SAME_SIZE * max(open_.q75, least):
        return Answer("no", f"on the scale 1 - p, likely tokens are off {off:.2g} times as far as open ones")
    return _balance(e)


def _balance(e: Evidence) -> Answer | None:
    bins = e.profiles["position"]
    total = bins.merged(bins.labels(), "x")
    moved = max(1, total.n("x") - e.extra["rounding"].counts.get("zero gap", 0))
    above = total.get("x", "above") / moved
    ratio = e.measurements.get("ratio/mean")
    bias = abs(ratio.value - 1) if ratio is not None and ratio.value is not None else 0.0
    error = ratio.std_error if ratio is not None and ratio.std_error else 0.0
    if moved >= 100 and not TWO_SIDED[0] <= above <= TWO_SIDED[1]:
        return Answer("no", f"{above:.0%} of the gaps are above 0: rounding has no side")
    if bias > 0.02 and bias > 5 * error:
        return Answer("no", f"the mean ratio is off 1 by {bias:.2g}, which rounding keeps at 1")
    return None


def _limit(e: Evidence) -> str:
    """The coarser of the declared dtypes; bf16 where one is not declared."""
    declared = [d for name in e.names for d in e.facts.get(f"{name}_dtype", ["None"])]
    known = list(MOST)
    return known[max((known.index(d) if d in known else len(known) - 1 for d in declared), default=len(known) - 1)]


def _allowed(e: Evidence) -> float:
    """The declared limit, with room for the error of a quantile of so few tokens."""
    return MOST[_limit(e)] * (1 + 2 / math.sqrt(max(1, e.n)))


def _finest(size: float, limit: str) -> str:
    """The finest dtype whose rounding is as large; `limit` where none is."""
    return next((d for d in MOST if size <= MOST[d]), limit)


def _quantised(e: Evidence) -> dict[str, str]:
    """Declared quantisation of weights or KV cache, by setting."""
    out: dict[str, str] = {}
    for name in e.names:
        for what in ("quantization", "kv_cache_dtype"):
            values = [v.strip('"') for v in e.facts.get(f"{name}_{what}", [])]
            coarse = [v for v in values if v not in ("null", "auto", "bfloat16", "float16", "float32")]
            if coarse:
                out[f"{name} {what}"] = ", ".join(coarse)
    return out


SIGNATURES = (
    Signature("rounding", "bf16-noise", "the shape and size of rounding", noise, ("log-probs of both sides",),
              look=look, last=2),
    Signature("beyond_rounding", "larger-than-rounding", "the shape of rounding, but larger", beyond,
              ("log-probs of both sides",), last=1),
    Signature("every_token", "noise-on-every-token", "as large at certain tokens as elsewhere", broad,
              ("log-probs of both sides",)),
)  # fmt: skip
