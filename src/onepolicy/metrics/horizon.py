"""What a per-token gap does to a whole answer.

With independent errors of sd s and E[ratio] = 1, the log-ratio of an answer of n tokens is normal with mean -s^2 n / 2
and standard deviation s sqrt(n); sequence weights e^D then have an effective share of e^(-s^2 n). The textbook walk
leaves the drift out and gives a typical factor of e^(s sqrt(n)) either way. `horizon` adds bias, correlation and
tails, and simulates the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.errors import UsageError
from onepolicy.metrics.walks import default_answers, drawn, how_far, simulate, simulated
from onepolicy.metrics.whole_answer import Answers, Gap, closed, readings
from onepolicy.types import Measurement

#: PPO's clip of a token's ratio, below and above 1 (Schulman et al. 2017).
TOKEN_CLIP = (0.2, 0.2)
#: GSPO's clip of an answer's geometric mean ratio (arXiv:2507.18071, section 5.1).
SEQUENCE_CLIP = (3e-4, 4e-4)


def answer(sd: float, length: int) -> dict[str, float]:
    """The answer of `length` tokens at a per-token sd of `sd` nats: `drift`, `spread` (nats), `median_ratio`,
    `ess_share`, and `walk_factor` of the textbook walk without the drift."""
    variance = sd * sd * length
    return {
        "length": length,
        "sd": sd,
        "drift": -variance / 2,
        "spread": math.sqrt(variance),
        "median_ratio": math.exp(-variance / 2) if variance < 1400 else 0.0,
        "ess_share": math.exp(-variance) if variance < 700 else 0.0,
        "walk_factor": math.exp(min(math.sqrt(variance), 700)),
    }


def answer_from(measurements: Mapping[str, Measurement], length: int) -> dict[str, float]:
    """`answer` at the measured per-token sd, with the measured share of ratios outside 1 +- 0.2 and Var(D) / T.

    Empty when there is nothing to compute it from.
    """
    rms, mean = (measurements.get(key) for key in ("log_ratio/rms", "log_ratio/mean"))
    if rms is None or mean is None or rms.value is None or mean.value is None:
        return {}
    high, low = rms.value + mean.value, rms.value - mean.value  # their squares may pass a float
    out = answer(math.sqrt(max(high, 0.0)) * math.sqrt(max(low, 0.0)), length)
    for name, key in (
        ("outside_clip_share", "outside_clip/share"),
        ("variance_per_token", "length_scaling/variance_per_token"),
    ):
        m = measurements.get(key)
        if m is not None and m.value is not None:
            out[name] = m.value
    return out


# -- can sequence weights be used --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Use:
    """What sequence-level weights are good for, while fewer than `below` of the answers count."""

    word: str
    below: float
    why: str


#: From the worst up; the first whose limit the effective share is under. The limits are ours (2026-11-30).
USES = (
    Use(
        "unusable", 0.01, "under 1%, a batch of 1,024 answers counts as 10 or fewer: a few answers make the whole step"
    ),
    Use("costly", 0.5, "under 50%, the weighted batch is as noisy as one of less than half its size"),
    Use("usable", math.inf, "at least half of the answers count"),
)


def usable(ess_share: float) -> Use:
    """The row of `USES` for an effective share of sequence weights; NaN is unusable."""
    return next((use for use in USES if ess_share < use.below), USES[0])


# -- everything --------------------------------------------------------------------------------------------------------


def horizon(
    gap: Gap,
    length: int,
    *,
    clip: tuple[float, float] = TOKEN_CLIP,
    sequence_clip: tuple[float, float] = SEQUENCE_CLIP,
    answers: int | None = None,
    seed: int = 0,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """What `gap` does to answers of `length` tokens, JSON-able; `answers` 0 simulates nothing, None picks a number.

    `readings`: name -> `drift`, `spread` (nats), `median_ratio`, `typical_factor` e^spread, `off_by` (factor -> share
    of answers off by it or more, either way), `ess_share` of sequence weights, `tokens_outside_clip` (share of token
    ratios), `answers_outside_clip` (share of geometric mean ratios), `half_off_by_2` (tokens, None for never), and the
    same under `simulated`. `walks`: eight of them (`walks.drawn`). `use`: see `USES`, by the normalised reading, or
    the one of the gap's own mean where that is known. `clip`, `sequence_clip`: how far below and above 1 the ratio of
    a token, and the geometric mean ratio of an answer, may be. `notes`: what to say beside the numbers.

    Errors: `UsageError` for numbers that cannot be.
    """
    _refuse(length, clip, sequence_clip, answers)
    table: dict[str, Any] = {k: closed(gap, k, length, clip, sequence_clip) for k in readings(gap)}
    until = how_far(length, [row["half_off_by_2"] for row in table.values()])
    answers = default_answers(until) if answers is None else answers
    judged = list(table)[-1]
    out: dict[str, Any] = {
        "length": length,
        "gap": {"sd": gap.sd, "mean": gap.mean, "autocorrelation": gap.autocorrelation, "law": gap.law.about},
        "clip": [1 - clip[0], 1 + clip[1]],
        "sequence_clip": [1 - sequence_clip[0], 1 + sequence_clip[1]],
        "answers": answers,
        "seed": seed,
        "exact": Answers(gap, length).exact(),
        "simulated_error": 0.5 / math.sqrt(answers) if answers else None,
        "simulated_until": until,
        "reading": judged,
        "use": usable(table[judged]["ess_share"]).word,
        "readings": table,
        "notes": [*_notes(gap, length, table, answers), *notes],
    }
    if answers:
        walks = simulate(gap, length, until, answers, seed, clip)
        for name, row in table.items():
            row["simulated"] = simulated(walks, name, sequence_clip)
        out["walks"] = drawn(walks, judged)
    return out


def _refuse(length: int, clip: tuple[float, float], sequence_clip: tuple[float, float], answers: int | None) -> None:
    if not 1 <= length <= 10**9:
        raise UsageError(f"length {length:,}: wanted 1 to 1,000,000,000 tokens")
    for name, (low, high) in (("clip", clip), ("sequence clip", sequence_clip)):
        if not (0 < low < 1 and 0 < high < math.inf):
            raise UsageError(f"{name} {low:g}, {high:g}: wanted more than 0, and less than 1 below")
    if answers is not None and answers < 0:
        raise UsageError(f"answers {answers}: wanted 0 or more")


def _notes(gap: Gap, length: int, table: Mapping[str, Any], answers: int) -> Iterator[str]:
    row = table["normalised"]
    if not Answers(gap, length).exact():
        yield "closed ≈: the shares are those of a normal log-ratio with the exact drift and spread"
    if not math.isfinite(Answers(gap, length).log_mgf(1.0)):
        yield "this law's mean ratio is infinite: no effective share is left, and normalised means half the variance"
    elif row["ess_share"] * answers < 10 <= answers:
        yield f"{answers:,} answers cannot show an effective share below 1 / {answers:,}, and overstate a small one"
