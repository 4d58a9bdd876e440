"""A repetition, presence or frequency penalty is in one side's log-probs: the gap is at repeated tokens.

A penalty lowers the logits of tokens that stood before, so at repeats the penalised side lies lower, and elsewhere a
little higher (what the repeats lost is shared out). Presence and frequency count the reply alone, frequency grows with
the count, repetition takes in the prompt. Repeats are likely tokens, so that anything that depends on the probability
differs at them too: tokens are compared with new ones of the same probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.intervals import t_quantile
from onepolicy.profiles.base import Seen
from onepolicy.profiles.bins import steps
from onepolicy.signatures.adding import cell_sums, read
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.declared import switched_off, switched_on, told
from onepolicy.types import FloatArray, IntArray

#: Upper edges of the probability strata.
STRATA = (0.003, 0.03, 0.15, 0.4, 0.7, 0.9, 0.97, 0.995)
CLASSES = ("new", "prompt", "reply 1", "reply 2", "reply 3")
_CELLS = [f"{k}:{name}" for k in range(len(STRATA) + 1) for name in CLASSES]
#: z of the difference within strata, and the share of the mean square gap that repeats explain beyond the strata.
CLEAR, SHARE = 6.0, 0.1
#: The chance that few tokens pass by themselves; and (z, chance) where the records declare a penalty.
CHANCE, DECLARED = 1e-7, (4.0, 1e-4)
#: What rounding to float32 and printing to three decimals may do to a log-prob, nats.
ROUNDING = 2e-3
#: Where noise is small, repeats lie on one side and new tokens, likely ones too, on the other: this share of each, and
#: so many of them; the chance of such a split.
SPLIT, FEWEST_SPLIT, SPLIT_CHANCE = 0.9, 8, 1e-7
#: Repeats and new tokens that must be there.
FEWEST = 5
#: A token with more repeats before it counts as so many.
_MOST = 3
_PARAMETERS = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def look(seen: Seen) -> Counted:
    """n, sum of d and of d squared by probability and by how often the token stood before."""
    out = Counted()
    n, sums = cell_sums(seen, len(_CELLS), lambda at: _columns(seen, at))
    for k in np.flatnonzero(n).tolist():
        out.count(_CELLS[k], int(n[k]))
        for what, totals in sums.items():
            out.sums[f"{_CELLS[k]}:{what}"] = totals[k]
    _signs(out, seen)
    return out


def _signs(out: Counted, seen: Seen) -> None:
    """d above and below 0, by more than rounding, at repeats and at new tokens, and at new ones that are likely."""
    times, in_prompt = seen.repeats
    likely = np.maximum(seen.a, seen.b) >= math.log(0.5)
    kinds = {"again": times > 0, "new": (times == 0) & ~in_prompt}
    kinds["likely new"] = kinds["new"] & likely
    for name, here in kinds.items():
        out.count(f"{name}:above", int(np.count_nonzero(here & (seen.d > ROUNDING))))
        out.count(f"{name}:lower", int(np.count_nonzero(here & (seen.d < -ROUNDING))))


def _columns(seen: Seen, at: slice) -> tuple[IntArray, dict[str, FloatArray]]:
    """The cells of some tokens, and what is added up there."""
    times, in_prompt = (x[at] for x in seen.repeats)
    group = np.minimum(times, _MOST)
    group += (group > 0) | in_prompt
    # the other side is the less penalised one where the sampler is penalised: neither side alone says how likely it was
    cell = steps(np.maximum(seen.a[at], seen.b[at]), np.log(STRATA), np.greater) * len(CLASSES)
    cell += group
    d = seen.clipped[at]
    return cell, {"d": d, "dd": d * d}


@dataclass(frozen=True, slots=True)
class Contrast:
    """Repeats against new tokens of the same probability: mean difference of d, its standard error, tokens; and the
    degrees of freedom of that error (Welch): it is made of the spread in few cells where there are few tokens."""

    mean: float
    error: float
    n: int
    df: float = math.inf

    @property
    def z(self) -> float:
        return abs(self.mean) / self.error if self.error > 0 else math.inf if self.mean else 0.0

    def clear(self, least: float, chance: float) -> bool:
        """Beyond chance, for an error from so few tokens as well."""
        return self.z >= (least if self.df > 1e3 else max(least, t_quantile(1 - chance, max(1.0, self.df))))


def judge(evidence: Evidence) -> Answer:
    seen = evidence.extra.get("penalties")
    if seen is None:
        return Answer("lacks", "nothing was looked at")
    groups = {name: contrast(seen, (name,)) for name in CLASSES[1:]}
    reply, whole = contrast(seen, CLASSES[2:]), contrast(seen, CLASSES[1:])
    share, on = explained(seen), switched_on(evidence, *_PARAMETERS)
    best = reply if abs(reply.mean) * math.sqrt(reply.n) > abs(whole.mean) * math.sqrt(whole.n) else whole
    why = f"repeats differ from new tokens of the same probability by {best.mean:+.3g} nats and explain {share:.0%}"
    if best.n < FEWEST or (best.error == 0 and not best.mean):
        return Answer("no", "too few repeats to carry the gap" if best.n < FEWEST else why)
    split = _split(seen)
    if split and best.mean * split > 0:
        share = max(share, SHARE)
    elif not best.clear(*(DECLARED if on and best.mean > 0 else (CLEAR, CHANCE))) or share < SHARE:
        return Answer("no", why)
    if switched_off(evidence, *_PARAMETERS):
        why += "; penalties are declared off"
    who = evidence.names[0] if best.mean > 0 else evidence.names[1]
    kind = next(iter(on)).removesuffix("_penalty") if len(on) == 1 else _kind(groups)
    message = (
        f"{who} holds a {kind} penalty: at repeated tokens the log-ratio differs from that of new tokens of the same "
        f"probability by {best.mean:+.3g} nats, which explains {share:.0%} of the gap"
        + (f"; declared is {told(on)}" if on else "; none is declared")
    )
    facts = {
        "side": who,
        "kind": kind,
        "explained": round(share, 4),
        "difference_at": {name: round(c.mean, 4) for name, c in groups.items() if c.n},
        "tokens_at": {name: c.n for name, c in groups.items()},
        "mean_at_new": _mean_new(seen),
        "declared": on,
    }
    return Answer("fits", why, finding("penalty-mismatch", message, evidence=facts), share)


def _split(seen: Counted) -> int:
    """1 where repeats are above 0 and new tokens below, -1 the other way round, 0 for neither.

    A penalty takes from repeats and what it took goes to the others, so the signs tell where nothing else moves d; a
    temperature, which raises likely tokens, raises likely new ones with them."""
    c = lambda name: (seen.counts.get(f"{name}:above", 0), seen.counts.get(f"{name}:lower", 0))
    for way in (1, -1):
        again, new, likely = (c(name)[::way] for name in ("again", "new", "likely new"))
        if min(sum(again), sum(new)) < FEWEST_SPLIT or sum(likely) < FEWEST:
            continue
        if again[0] < SPLIT * sum(again) or new[1] < SPLIT * sum(new) or likely[1] < SPLIT * sum(likely):
            continue
        # as many new tokens among those of the lower side, were all of one kind
        n, k = sum(again) + sum(new), again[1] + new[1]
        chance = math.exp(_choose(sum(new), new[1]) + _choose(sum(again), again[1]) - _choose(n, k))
        if chance < SPLIT_CHANCE:
            return way
    return 0


def _choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _cells(seen: Counted, names: tuple[str, ...]) -> list[tuple[float, float, float]]:
    """(n, sum of d, sum of d squared) in each stratum."""
    out: list[tuple[float, float, float]] = []
    for k in range(len(STRATA) + 1):
        n = sum(seen.counts.get(f"{k}:{name}", 0) for name in names)
        d, dd = (sum(read(seen, f"{k}:{name}:{what}") for name in names) for what in ("d", "dd"))
        out.append((float(n), d, dd))
    return out


def contrast(seen: Counted, names: tuple[str, ...]) -> Contrast:
    """These classes against new tokens, stratum by stratum, weighted by the repeats; where a stratum has too few new
    tokens its repeats are held against all new ones."""
    new = _cells(seen, ("new",))
    pool = (sum(x[0] for x in new), sum(x[1] for x in new), sum(x[2] for x in new))
    if pool[0] < FEWEST:
        return Contrast(0.0, 0.0, 0)
    total, mean, variance, spread = 0.0, 0.0, 0.0, 0.0
    for cell, of_new in zip(_cells(seen, names), new, strict=True):
        if not cell[0]:
            continue
        base = of_new if of_new[0] >= FEWEST else pool
        total += cell[0]
        mean += cell[0] * (cell[1] / cell[0] - base[1] / base[0])
        parts = [(cell[0] ** 2 * _variance(x) / x[0], x[0]) for x in (cell, base)]
        variance += sum(part for part, _ in parts)
        spread += sum(part * part / max(1.0, n - 1) for part, n in parts)
    if not total:
        return Contrast(0.0, 0.0, 0)
    df = variance * variance / spread if spread > 0 else math.inf
    return Contrast(mean / total, math.sqrt(variance) / total, int(total), df)


def _variance(cell: tuple[float, float, float]) -> float:
    n, d, dd = cell
    return max(0.0, dd / n - (d / n) ** 2) * n / max(1.0, n - 1)


def explained(seen: Counted) -> float:
    """Share of the sum of d squared that the classes take off beyond what the strata do."""
    each = {name: _cells(seen, (name,)) for name in CLASSES}
    square = sum(cell[2] for cells in each.values() for cell in cells)
    if square <= 0:
        return 0.0
    within = lambda cell: max(0.0, cell[2] - cell[1] ** 2 / cell[0]) if cell[0] else 0.0
    fine = sum(within(cell) for cells in each.values() for cell in cells)
    coarse = sum(within(tuple(map(sum, zip(*cells, strict=True)))) for cells in zip(*each.values(), strict=True))
    return max(0.0, (coarse - fine) / square)


def _kind(groups: dict[str, Contrast]) -> str:
    """repetition (the prompt too), frequency (grows with the count) or presence."""
    prompt, once, often = groups["prompt"], groups["reply 1"], groups["reply 3"]
    level = max(abs(once.mean), abs(groups["reply 2"].mean))
    if prompt.n >= FEWEST and prompt.z >= 4 and abs(prompt.mean) > 0.4 * level:
        return "repetition"
    if often.n >= FEWEST and once.n >= FEWEST and abs(often.mean) > 1.5 * abs(once.mean):
        return "frequency"
    if often.n < FEWEST:
        return "presence or frequency" if prompt.n >= FEWEST else "presence, frequency or repetition"
    return "presence" if prompt.n >= FEWEST else "presence or repetition"


def _mean_new(seen: Counted) -> float:
    cells = _cells(seen, ("new",))
    return round(sum(c[1] for c in cells) / max(1.0, sum(c[0] for c in cells)), 5)


SIGNATURE = Signature(
    "penalties",
    "penalty-mismatch",
    "one side's log-probs hold a repetition, presence or frequency penalty",
    judge,
    look=look,
)
