"""What every correction would have done to a dump: one table, in one pass, the same for any split of it.

Each correction is replayed on the recorded log-probs at its usual options. Rules that look at one sequence alone are
replayed exactly. Two look at a whole batch: `normalise` only scales the weights of what comes before it, and `m2po` is
read off the histogram of the log-ratios.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onepolicy import corrections
from onepolicy.corrections.composition import Composition, compose
from onepolicy.corrections.correction import Correct
from onepolicy.corrections.rule import stage_of
from onepolicy.counted import Counted
from onepolicy.grid import GRID_BITS, to_float
from onepolicy.histogram import Histogram, bin_values
from onepolicy.profiles.base import Seen
from onepolicy.replays import COLUMNS, Replay, Sequences, Tokens, replayed
from onepolicy.types import BoolArray, FloatArray, IntArray, Listing

#: name -> (what is replayed, the same as a call). Options: the corrections' defaults, sources in their docstrings.
REPLAYS: dict[str, tuple[Correct | Composition, str]] = {
    "none": (corrections.token_mask, "token_mask(low=None, high=None)"),
    "truncate": (corrections.truncate, "truncate(cap=2.0)"),
    "truncate 0.5-5": (corrections.truncate, "truncate(floor=0.5, cap=5.0)"),
    "sequence_truncate": (corrections.sequence_truncate, "sequence_truncate(cap=2.0)"),
    "geometric_truncate": (corrections.geometric_truncate, "geometric_truncate(cap=2.0)"),
    "segment_truncate": (corrections.segment_truncate, "segment_truncate(cap=1.2)"),
    "icepop": (corrections.icepop, "icepop(low=0.5, high=5.0)"),
    "token_mask": (corrections.token_mask, "token_mask(low=0.5, high=2.0)"),
    "sequence_reject": (corrections.sequence_reject, "sequence_reject(high=3.0)"),
    "geometric_reject": (corrections.geometric_reject, "geometric_reject(low=0.999, high=1.001)"),
    "divergence_reject": (corrections.divergence_reject, "divergence_reject(at_most=0.01)"),
    "divergence_mask": (corrections.divergence_mask, "divergence_mask(at_most=0.01)"),
    "veto": (corrections.veto, "veto(low=1e-4)"),
    "error_reject": (corrections.error_reject, "error_reject(at_most=2.0)"),
    "off_policy_reject": (corrections.off_policy_reject, "off_policy_reject(delta=1e-4)"),
    "tv_mask": (corrections.tv_mask, "tv_mask(up=0.2, down=0.2)"),
    "binary_kl_mask": (corrections.binary_kl_mask, "binary_kl_mask(up=0.05, down=0.05)"),
    "vaco_mask": (corrections.vaco_mask, "vaco_mask(at_most=0.2)"),
    "kpop": (corrections.kpop, "kpop(at_most=0.1)"),
    "geometric_reject + truncate": (
        compose(corrections.geometric_reject, corrections.truncate), "compose(geometric_reject, truncate)",
    ),
    "divergence_reject + truncate": (
        compose(corrections.divergence_reject, corrections.truncate), "compose(divergence_reject, truncate)",
    ),
}  # fmt: skip
#: Options that a replay is called with where they are not the correction's own defaults.
OPTIONS: dict[str, Mapping[str, Any]] = {
    "none": {"low": None, "high": None},
    "truncate 0.5-5": {"floor": 0.5, "cap": 5.0},
    "divergence_mask": {"at_most": 0.01},
    "vaco_mask": {"at_most": 0.2},
}
#: Corrections that ask for the sign of an advantage; without advantages they are not replayed.
SIGNED = ("off_policy_reject", "tv_mask", "binary_kl_mask", "vaco_mask")
#: What is added up for each, over trained tokens. `off`: |w - r|, how far the weight is from the ratio. Where every
#: token has an advantage A, `gradient` besides: w |A|.
SUMS = ("w", "w2", "moved", "off")
#: `m2po` drops the largest d^2 until their mean is at most this.
M2PO = 0.04


@dataclass(slots=True)
class WhatIf:
    """`totals`: exact integers, by "correction:what". `groups`: cluster id -> bit i: correction i kept something of it,
    the highest bit: it has trained tokens."""

    totals: Counted = field(default_factory=Counted)
    groups: dict[int, int] = field(default_factory=dict[int, int])
    why_not: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, other: WhatIf) -> None:
        self.totals.add(other.totals)
        for group, bits in other.groups.items():
            self.groups[group] = self.groups.get(group, 0) | bits
        self.why_not |= other.why_not


def replay(seen: Seen, clusters: FloatArray | Any) -> WhatIf:
    """One batch. `clusters` `[S]`: 64-bit ids of the groups that the sequences belong to."""
    out = WhatIf()
    if not len(seen):
        return out
    tokens = _tokens(seen)
    out.why_not = {name: "needs advantages" for name in SIGNED if tokens.advantages is None}
    names = [name for name in REPLAYS if name not in out.why_not]
    some = seen.counts > 0
    made = np.zeros((len(names), len(COLUMNS), len(some)))
    made[:, :, some] = replayed(tokens, [_replay_of(name) for name in names])
    trained = np.zeros(len(some), dtype=np.int64)
    trained[some] = Sequences(tokens.lengths).total(tokens.trained)
    columns = dict(zip(COLUMNS, made.swapaxes(0, 1), strict=True))
    _add_sums(out, names, columns, tokens.advantages is not None)
    kept = columns["kept"].astype(np.int64)
    _count(out, names, kept, trained, seen)
    bits = [*(list(REPLAYS).index(name) for name in names), len(REPLAYS)]
    _mark_groups(out, bits, np.concatenate([kept, trained[None]]) > 0, np.asarray(clusters))
    return out


def _replay_of(name: str) -> Replay:
    """The rules of a replay. The dump's scorer stands for the current policy too: one ratio serves all of them."""
    run, _ = REPLAYS[name]
    if isinstance(run, Composition):
        return run.stages, run.sees
    return [stage_of(run.__name__, run.rule, run.options, OPTIONS.get(name, {}))], "kept"


def _tokens(seen: Seen) -> Tokens:
    """The compared tokens, packed, of the sequences that have some; advantages where all trained ones have one."""
    mask = seen.rollouts.trained
    trained = np.ones(len(seen), dtype=bool) if mask is None else mask[seen.at]
    told = seen.rollouts.tokens.get("advantages")
    advantages: FloatArray | None = None
    if told is not None and told.mask()[seen.at][trained].all():
        advantages = np.where(told.mask(), told.values, 0.0)[seen.at].astype(np.float64)
    elif told is None and not trained.any():  # nothing that needs one: as beside records that have some
        advantages = np.zeros(len(seen))
    return Tokens(seen.a, seen.b, trained, advantages, seen.counts[seen.counts > 0])


def _add_sums(out: WhatIf, names: list[str], columns: Mapping[str, FloatArray], signed: bool) -> None:
    for what in (*SUMS, "gradient") if signed else SUMS:
        for name, total in zip(names, _totals(columns[what]), strict=True):
            out.totals.sums[f"{name}:{what}"] = total
    for what in ("largest", "largest gradient") if signed else ("largest",):
        for name, most in zip(names, columns[what].max(axis=1).tolist(), strict=True):
            out.totals.greatest(f"{name}:{what}", most)


def _totals(x: FloatArray) -> list[int]:
    """`[K, S]`, 0 or more: K exact sums in grid units; each term is rounded once, half-even, and held under 2^60.

    In units of the grid a term is below 2^122. It is cut into parts of 32 bits, whose sums int64 holds.
    """
    rest = np.rint(np.minimum(x, 2.0**60) * 2.0**GRID_BITS)
    out = [0] * len(x)
    for bits in (96, 64, 32, 0):
        part = np.floor(rest * 2.0**-bits)
        rest -= part * 2.0**bits
        out = [total + (n << bits) for total, n in zip(out, part.astype(np.int64).sum(axis=1).tolist(), strict=True)]
    return out


def _count(out: WhatIf, names: list[str], kept: IntArray, trained: IntArray, seen: Seen) -> None:
    """Tokens by reward and by octave of the length, of `kept` `[K, S]` and `trained` `[S]`, and emptied sequences."""
    reward = seen.rollouts.records.get("reward")
    told = np.full(len(trained), np.nan) if reward is None else np.where(reward.mask(), reward.values, np.nan)
    sign = np.where(np.isnan(told), "unknown", np.where(told > 0, "positive", "other"))
    octave = np.frexp(trained.astype(np.float64))[1]
    chosen: dict[str, BoolArray] = {"": np.ones(len(trained), dtype=bool)}
    chosen |= {f":octave {k}": octave == k for k in np.unique(octave)}
    chosen |= {f":reward {s}": sign == s for s in np.unique(sign)}
    emptied = ((trained > 0) & (kept == 0)).sum(axis=1).tolist()
    for part, mask in chosen.items():
        n = int(trained[mask].sum())
        for name, m in zip(names, kept[:, mask].sum(axis=1).tolist(), strict=True):
            out.totals.count(f"{name}:kept{part}", m)
            out.totals.count(f"{name}:trained{part}", n)
    for name, n in zip(names, emptied, strict=True):
        out.totals.count(f"{name}:sequences", int((trained > 0).sum()))
        out.totals.count(f"{name}:emptied", n)


def _mark_groups(out: WhatIf, bits: list[int], some: BoolArray, clusters: Any) -> None:
    """`some` `[bits, S]`: whether something of the sequence is kept, for each bit."""
    groups, at = np.unique(clusters, return_inverse=True)
    marks = np.zeros(len(groups), dtype=np.int64)
    np.bitwise_or.at(marks, at, np.bitwise_or.reduce(some.astype(np.int64) << np.array(bits)[:, None], axis=0))
    out.groups = {group: mark for group, mark in zip(groups.tolist(), marks.tolist(), strict=True) if mark}


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One correction on the dump. Shares are of trained tokens; `error`: the ranking's squared error."""

    name: str
    call: str
    kept: float
    short: float | None
    long: float | None
    positive: float | None
    other: float | None
    ess: float
    moved: float
    largest: float
    sequences_emptied: float
    groups_emptied: float
    bias: float
    error: float


def rows(found: WhatIf, batch_tokens: int, sizes: Histogram | None = None) -> list[Row]:
    """Best first. The criterion: the squared error of a mean over `batch_tokens` tokens under the scorer's policy,
    (mean |w - r|)^2 + mean w^2 / batch_tokens: what the weights leave of the bias, and what they add of noise. A
    correction that empties more than one group in twenty, or drops half of the tokens, comes after all others."""
    made = [_row(found, bit, name, batch_tokens) for bit, name in enumerate(REPLAYS) if name not in found.why_not]
    if sizes:
        made.append(m2po_row(sizes, batch_tokens, not found.why_not))
    return sorted((r for r in made if r is not None), key=lambda r: (r.groups_emptied > 0.05 or r.kept < 0.5, r.error))


def m2po_row(sizes: Histogram, batch_tokens: int = 1, signed: bool = False) -> Row:
    """M2PO drops the largest d^2 of a batch until their mean is at most `M2PO`: here the dump is the batch, and d
    stands for its bin of the histogram of log-ratios (within 0.4%), so weights, ratios and their distance are sums over
    bins. Who is dropped, by length, reward and group, asks for the tokens themselves; so does the peak with advantages
    (`signed`)."""
    codes, counts = sizes.table()
    d, n = bin_values(codes), counts.sum(axis=0)
    order = np.argsort(d**2)
    d, n, total = d[order], n[order], max(1, int(n.sum()))
    keep = np.cumsum(d**2 * n) / np.maximum(np.cumsum(n), 1) <= M2PO
    kept, none = float(n[keep].sum()) / total, math.nan
    bias = float((np.abs(keep - np.exp(np.minimum(d, 80.0))) * n).sum()) / total
    peak = 1 / (kept * total) if kept and not signed else none
    error = bias**2 + kept / max(1, batch_tokens)
    call = f"m2po(at_most={M2PO})"
    return Row("m2po", call, kept, None, None, None, None, kept, 1 - kept, peak, none, none, bias, error)


def _row(found: WhatIf, bit: int, name: str, batch_tokens: int) -> Row | None:
    t = found.totals
    n = t.counts.get(f"{name}:trained", 0)
    if not n:
        return None
    total = {what: to_float(t.sums[f"{name}:{what}"]) for what in SUMS}
    of = lambda what: _share(t.counts, f"{name}:kept:{what}", f"{name}:trained:{what}")
    short, long = _by_length(t.counts, name)
    mine = [bits for bits in found.groups.values() if bits >> len(REPLAYS) & 1]
    bias = total["off"] / n
    return Row(
        name, REPLAYS[name][1], t.counts[f"{name}:kept"] / n, short, long, of("reward positive"), of("reward other"),
        total["w"] ** 2 / (n * total["w2"]) if total["w2"] else 0.0, total["moved"] / n,
        _largest(found, name, total["w"]),
        t.counts[f"{name}:emptied"] / max(1, t.counts[f"{name}:sequences"]),
        sum(not bits >> bit & 1 for bits in mine) / max(1, len(mine)), bias,
        bias**2 + total["w2"] / n / max(1, batch_tokens),
    )  # fmt: skip


def _largest(found: WhatIf, name: str, weights: float) -> float:
    """The largest token's share of the gradient: of w |A| where the whole dump has advantages, else of w."""
    t, key = found.totals, f"{name}:gradient"
    if found.why_not or key not in t.sums:
        return t.most[f"{name}:largest"] / weights if weights else math.nan
    total = to_float(t.sums[key])
    return t.most[f"{name}:largest gradient"] / total if total else math.nan


def _share(counts: Mapping[str, int], part: str, whole: str) -> float | None:
    return counts[part] / counts[whole] if counts.get(whole) else None


def _by_length(counts: Mapping[str, int], name: str) -> tuple[float | None, float | None]:
    """Kept share of the shorter and the longer replies, cut at the octave that holds the middle token."""
    head = f"{name}:trained:octave "
    octaves = sorted(int(k.removeprefix(head)) for k in counts if k.startswith(head))
    sizes = [counts[f"{head}{k}"] for k in octaves]
    before = np.cumsum([0, *sizes])
    half = [k for k, b in zip(octaves, before, strict=False) if 2 * b < before[-1]]
    cut = half[-1] if half else 0
    sides: list[float | None] = []
    for chosen in ([k for k in octaves if k < cut], [k for k in octaves if k >= cut]):
        n = sum(counts[f"{head}{k}"] for k in chosen)
        sides.append(sum(counts[f"{name}:kept:octave {k}"] for k in chosen) / n if n else None)
    return sides[0], sides[1]


def _number(x: float) -> str:
    return "–" if x != x else f"{x:.2g}"


def listing(found: WhatIf, batch_tokens: int, sizes: Histogram, open_finding: str | None) -> Listing:
    """The table for people. `sizes`: the histogram of log-ratios. `open_finding`: a higher finding: then nothing is
    recommended."""
    percent = lambda x: "–" if x is None or x != x else f"{100 * x:.{2 if x < 0.995 else 3}g}%"
    ranked = rows(found, batch_tokens, sizes)
    body = tuple(
        (r.name, percent(r.kept), percent(r.short), percent(r.long), percent(r.positive), percent(r.other),
         percent(r.ess), _number(r.moved), percent(r.largest), percent(r.groups_emptied), _number(r.error))
        for r in ranked
    )  # fmt: skip
    head = ("correction", "kept:", "short:", "long:", "reward > 0:", "other:", "ESS:", "moved:", "peak:")
    head += ("empty groups:", "error:")
    note = f"error: (mean distance of w from r)² + mean w² / {batch_tokens:,} tokens, smallest first"
    if open_finding is not None:
        note = f"none is recommended while {open_finding} is open; {note}"
    elif ranked:
        first = next(r.name for r in ranked if not math.isnan(r.groups_emptied))  # m2po is not known by group
        note = ("none is needed" if first == "none" else f"recommended: {first}") + f"; {note}"
    told = [i for i in range(len(head)) if any(cells[i] != "–" for cells in body)]  # without rewards: no such columns
    shown = tuple(tuple(cells[i] for i in told) for cells in body)
    return Listing("What every correction would have done", tuple(head[i] for i in told), shown, note)
