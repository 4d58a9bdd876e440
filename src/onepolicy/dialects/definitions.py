"""Which definition reproduces a number that a dump or a dashboard reports.

Under one name frameworks log k1 of either sign, k3 of either direction, means over tokens, over sequences or over
padding, before and after truncation, of old or of current. All of these are computed of the same data, and those that
come to the reported number are named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onepolicy.dialects import key_of
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.dialects.key import Dialect, Key, Part, Term, dialect
from onepolicy.dialects.means import WIDTH, N, S, by_sequence, divide, greatest, k3, pearson, sequence_mean, spread
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.view import MASKS, View
from onepolicy.errors import ContentError, UsageError
from onepolicy.rollouts import Rollouts

#: Relative difference up to which a number is reproduced. A dashboard's float32 sums are within 1e-5.
TOLERANCE = 1e-4
#: A number of this size says nothing about its definition: with equal engines every divergence is 0.
NOTHING = 1e-12
#: A number that was rounded for print is met to half a unit of its last digit, but never more loosely than this.
ROUNDED = 0.01
#: Caps of the ratio that frameworks have as defaults or presets.
CAPS = (1.2, 2.0, 3.0, 5.0, 8.0, 10.0)
BANDS = ((0.5, 2.0), (0.5, 5.0), (0.8, 1.2))


def _cap(c: float) -> Term:
    return lambda v, o: np.minimum(v.r, c)


def _band(low: float, high: float) -> Term:
    def term(v: View, o: Any) -> Any:
        r = v.r
        return np.where((r >= low) & (r <= high), r, 0.0)

    return term


#: name -> (what a token's value is, our metric of its token mean, the value): averaged in each of `AVERAGES`
TERMS: dict[str, tuple[str, str, Term]] = {
    "k1": ("k1, -d", "kl_sampler_scorer_k1/mean", lambda v, o: -v.d),
    "k1_opposite": ("d, the opposite sign of k1", "log_ratio/mean", lambda v, o: v.d),
    "k2": ("k2, d^2 / 2", "kl_sampler_scorer_k2/mean", lambda v, o: v.d**2 / 2),
    "k3": ("k3, e^d - 1 - d", "kl_sampler_scorer_k3/mean", lambda v, o: k3(v.d)),
    "k3_swapped": ("k3 the other way round, e^-d - 1 + d, without a weight", "", lambda v, o: k3(-v.d)),
    "k3_weighted": (
        "the other direction with its weight, 1 - r + r d",
        "kl_scorer_sampler_weighted/mean",
        lambda v, o: 1 - v.r + v.r * v.d,
    ),
    "k3_clamped": ("k3 clamped to at most 10", "", lambda v, o: np.minimum(k3(v.d), 10.0)),
    "k3_input_clamped": ("k3 of d clamped to +-20", "", lambda v, o: k3(np.clip(v.d, -20, 20))),
    "k1_weighted_by_p": ("-d weighted by p_sampler", "", lambda v, o: -v.d * v.p),
    "k1_absolute": ("|d|, k1 without its sign", "", lambda v, o: np.abs(v.d)),
    "k1_clamped": ("-d, each token's clamped to 0 from below", "", lambda v, o: np.maximum(-v.d, 0)),
    "abs": ("|d|", "abs_log_ratio/mean", lambda v, o: np.abs(v.d)),
    "mult_error": ("e^|d|", "mult_prob_error/mean", lambda v, o: exp(np.abs(v.d))),
    "prob_abs": ("|p_scorer - p_sampler|", "prob_abs_diff/mean", lambda v, o: np.abs(v.q - v.p)),
    "prob_diff": ("p_scorer - p_sampler", "prob_diff/mean", lambda v, o: v.q - v.p),
    "prob_opposite": ("p_sampler - p_scorer", "", lambda v, o: v.p - v.q),
    "ratio": ("the ratio r", "ratio/mean", lambda v, o: v.r),
    "ratio_inverse": ("1 / r, sampler over scorer", "", lambda v, o: exp(-v.d)),
    "ratio_gap": ("|r - 1|", "", lambda v, o: np.abs(v.r - 1)),
    "chi2": ("r^2 - 1", "chi2_token/mean", lambda v, o: exp(2 * v.d) - 1),
    **{f"ratio_capped_{c:g}": (f"r after truncation at {c:g}", "", _cap(c)) for c in CAPS},
    **{f"ratio_band_{a:g}_{b:g}": (f"r, 0 outside {a:g} to {b:g}", "", _band(a, b)) for a, b in BANDS},
    "surprisal_sampler": ("-log p_sampler", "", lambda v, o: -v.sampler),
    "surprisal_scorer": ("-log p_scorer", "", lambda v, o: -v.scorer),
}
AVERAGES = {
    "token": "mean over tokens",
    "sequence": "mean over sequences of the sequence's mean",
    "padded": "mean over the padded batch, zeros included",
}
#: Of these terms also: sums that are not divided by the tokens.
SUMMED = ("k1", "k1_opposite", "k2", "k3", "k3_swapped", "abs")


def _of_term(name: str, average: str, says: str, term: Term, ours: str) -> Key:
    """A term's mean; those over tokens and over the padded batch share their sum."""
    full = f"{name}/{average}"
    if average == "sequence":
        return by_sequence(full, says, term)
    total = Part(f"sum {name}", "sum", term)
    if average == "token":
        return Key(full, says, (total, N), lambda o, x, n: divide(x, n), ours=ours)
    return Key(full, says, (total, S, WIDTH), lambda o, x, s, width: divide(x, s * width))


def _sums(name: str, what: str, term: Term) -> Iterator[Key]:
    total = Part(f"sum {name}", "sum", term)
    says = f"{what}; mean over sequences of the sequence's sum"
    yield Key(f"{name}/sequence_sum", says, (total, S), lambda o, x, s: divide(x, s))
    yield Key(f"{name}/sum", f"{what}; sum over all tokens", (total, N), lambda o, x, n: x if n else None)


def _share(o: Any, w: float, ww: float, n: float) -> float | None:
    """(sum w)^2 / (n sum w^2)."""
    return w * w / (n * ww) if n and ww else None


def _of_weights() -> Iterator[Key]:
    """Effective sample sizes and spreads of the ratio, and functions of a mean where others have means of it."""
    sequences: dict[str, tuple[str, Term]] = {
        "sequence_product": ("sequence products e^D", lambda v, o: exp(v.sums(v.d))),
        "sequence_geometric": ("sequence means e^(D / T)", lambda v, o: exp(v.means(v.d))),
    }
    tokens: dict[str, tuple[str, Term]] = {"token": ("token ratios", lambda v, o: v.r)}
    tokens |= {f"token_capped_{c:g}": (f"token ratios after truncation at {c:g}", _cap(c)) for c in CAPS}
    for name, (what, term) in {**tokens, **sequences}.items():
        parts = (
            Part(f"sum ess {name}", "sum", term),
            Part(f"sum2 ess {name}", "sum", lambda v, o, term=term: term(v, o) ** 2),
            N if name in tokens else S,
        )
        ours = {"token": "ess_token/share"}.get(name, "")
        yield Key(f"ess/{name}", f"(sum w)^2 / (n sum w^2) of {what}", parts, _share, ours=ours)
        if "capped" not in name:
            says = f"(sum w)^2 / sum w^2 of {what}, a number of them"
            yield Key(f"ess_count/{name}", says, parts[:2], lambda o, w, ww: w * w / ww if ww else None)
    total, n = Part("sum ratio", "sum", TERMS["ratio"][2]), N
    says = "-log of the mean ratio; over tokens"
    yield Key("k1_log_of_mean/token", says, (total, n), lambda o, x, n: -math.log(x / n) if n and x > 0 else None)
    says = "log of the mean ratio, the opposite sign; over tokens"
    yield Key(
        "k1_opposite_log_of_mean/token", says, (total, n), lambda o, x, n: math.log(x / n) if n and x > 0 else None
    )
    gaps = Part("sum gaps of sequences", "sum", lambda v, o: -v.means(v.d))
    says = "e to the mean of -D / T over sequences, as verl's docs have it"
    yield Key("ratio_of_ppl/exp_of_mean", says, (gaps, S), lambda o, x, s: math.exp(min(x / s, 700.0)) if s else None)
    yield spread("ratio_std/token", "standard deviation of the ratio over tokens, n - 1", TERMS["ratio"][2], about=1.0)


def _keys() -> Iterator[Key]:
    for name, (what, ours, term) in TERMS.items():
        for average, how in AVERAGES.items():
            yield _of_term(name, average, f"{what}; {how}", term, ours)
        if name in SUMMED:
            yield from _sums(name, what, term)
    yield from _of_weights()
    whole: dict[str, tuple[str, str, Term]] = {
        "ratio/product": ("e^D, the product of a sequence's ratios", "", lambda v, o: exp(v.sums(v.d))),
        "ratio/geometric": ("e^(D / T)", "geometric_ratio/mean", lambda v, o: exp(v.means(v.d))),
        "ratio_inverse/geometric": ("e^(-D / T)", "ppl_ratio/mean", lambda v, o: exp(-v.means(v.d))),
        "chi2/product": ("e^(2 D) - 1", "chi2_sequence_product/mean", lambda v, o: exp(2 * v.sums(v.d)) - 1),
        "chi2/geometric": ("e^(2 D / T) - 1", "chi2_sequence_geometric/mean", lambda v, o: exp(2 * v.means(v.d)) - 1),
        "ppl_sampler/sequence": ("exp(-mean log p_sampler)", "ppl_sampler/mean", lambda v, o: exp(-v.means(v.sampler))),
        "ppl_scorer/sequence": ("exp(-mean log p_scorer)", "ppl_scorer/mean", lambda v, o: exp(-v.means(v.scorer))),
    }
    for name, (what, ours, term) in whole.items():
        yield sequence_mean(name, f"{what}; mean over sequences", term, ours=ours)
    yield greatest("abs/max", "the greatest |d|", lambda v, o: np.abs(v.d), ours="abs_log_ratio/max")
    yield greatest("ratio/max", "the greatest r", lambda v, o: v.r, ours="ratio/max")
    yield greatest(
        "prob_abs/max", "the greatest |p - q| of probabilities", TERMS["prob_abs"][2], ours="prob_abs_diff/max"
    )
    yield pearson("prob_pearson/r", "Pearson correlation of the probabilities", ours="prob_pearson/r")


DEFINITIONS: Dialect = dialect(
    "definitions", "definitions", scorer="old", read="", checked="tests/unit/dialects", keys=list(_keys())
)


@dataclass(frozen=True, slots=True)
class Match:
    """A definition that comes to a reported number. `as_named`: it is the one that the key's name stands for.

    `mask`: one of `view.MASKS`, the tokens it is of; `policy`: the scorer, old or current; `relative`: by how much
    `value` differs from `reported`.
    """

    key: str
    reported: float
    value: float
    definition: str
    says: str
    mask: str
    policy: str
    as_named: bool

    @property
    def relative(self) -> float:
        return _relative(self.value, self.reported)


@dataclass
class Meanings:
    """Every definition of a dump's data, shard by shard. `dialect`: whose keys are reported, if that is known."""

    dialect: str | None = None
    options: Mapping[str, Any] | None = None
    _sums: dict[tuple[str, str], Accumulator] = field(default_factory=dict[tuple[str, str], Accumulator])
    _named: Accumulator | None = None

    def add(self, views: View | Mapping[str, View], step: int | None = None) -> None:
        """A batch: the tokens that are trained on, or views by the name of their mask, `trained` among them."""
        named = {"trained": views} if isinstance(views, View) else views
        for mask, view in named.items():
            for policy in ("old", "current"):
                if view.has(policy):
                    self._of(mask, policy).add(view, step)
        if self.dialect is not None:
            self._named = self._named or Accumulator(self.dialect, self.options)
            self._named.add(named["trained"], step)

    def _of(self, mask: str, policy: str) -> Accumulator:
        if (mask, policy) not in self._sums:
            self._sums[mask, policy] = Accumulator(DEFINITIONS, {"scorer": policy, "precision": "float64"})
        return self._sums[mask, policy]

    def merge(self, other: Meanings) -> None:
        """Add the other's sums. Errors: `MergeError`."""
        for (mask, policy), sums in other._sums.items():
            self._of(mask, policy).merge(sums)
        if other._named is not None:
            self._named = self._named or Accumulator(other._named.dialect, other._named.options)
            self._named.merge(other._named)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; see `Accumulator.to_dict`."""
        return {
            "sums": {f"{mask} {policy}": sums.to_dict() for (mask, policy), sums in sorted(self._sums.items())},
            "named": None if self._named is None else self._named.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Meanings:
        """The inverse of `to_dict`. Errors: `ContentError` for anything else."""
        try:
            named, pairs = data["named"], [(*name.split(" "), sums) for name, sums in data["sums"].items()]
            out = cls(_named=None if named is None else Accumulator.from_dict(named))
            out._sums = {(mask, policy): Accumulator.from_dict(x, DEFINITIONS) for mask, policy, x in pairs}
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            if isinstance(err, ContentError):
                raise
            raise ContentError(f"these are not saved definitions: {type(err).__name__} {err}") from err
        if out._named is not None:
            out.dialect, out.options = out._named.dialect.name, out._named.options
        return out

    def matches(
        self, reported: Mapping[str, float | None], step: int | None = None, tolerance: float = TOLERANCE
    ) -> dict[str, list[Match]]:
        """key -> the definitions that come to its number, the one it is named for first; of `step`, else of all steps.

        `tolerance` is relative; a number of two digits or more is met to half a unit of its last digit besides.

        A key without a number, or whose number is 0, has only the definition it is named for, if that fits.
        Errors: `UsageError` for a tolerance below 0.
        """
        if not tolerance >= 0:
            raise UsageError(f"tolerance {tolerance}: wanted 0 or more")
        values = list(self._values(step))
        named = {} if self._named is None else _at(self._named, step)
        return {
            k: self._match(k, x, values, named, max(tolerance, _rounding(x)))
            for k, x in reported.items()
            if x is not None
        }

    def _values(self, step: int | None) -> Iterator[tuple[Key, str, str, float]]:
        for (mask, policy), sums in self._sums.items():
            for key, value in _at(sums, step).items():
                if value is not None and np.isfinite(value):
                    yield DEFINITIONS.keys[key], mask, policy, value

    def _match(
        self,
        name: str,
        reported: float,
        values: list[tuple[Key, str, str, float]],
        named: Mapping[str, float | None],
        tolerance: float,
    ) -> list[Match]:
        mine, ours = self._meant(name)
        out: list[Match] = []
        meant = None if mine is None else named.get(mine.name)
        if mine is not None and meant is not None and _relative(meant, reported) <= tolerance:
            policy = self._named.options["scorer"] if self._named is not None else ""
            out.append(Match(name, reported, meant, mine.name, mine.says, "trained", policy, True))
        for key, mask, policy, value in values:
            is_meant = mine is None and bool(ours) and key.ours == ours and (mask, policy) == ("trained", "old")
            if _relative(value, reported) <= tolerance and (is_meant or abs(reported) > NOTHING):
                out.append(Match(name, reported, value, key.name, key.says, mask, policy, is_meant))
        # of those that fit alike, trained tokens and old first, then as the table has them: the plain ones
        return sorted(out, key=lambda m: (not m.as_named, m.relative > TOLERANCE and m.relative, *_unusual(m)))

    def _meant(self, name: str) -> tuple[Key | None, str]:
        """(the dialect's key, or none; our metric's key) that the name stands for."""
        whose, _, bare = name.partition(":")
        if self._named is not None:
            bare = bare if whose == self._named.dialect.name and bare else name
            if bare in self._named.dialect.names:
                return self._named.dialect.key(bare), ""
        found = key_of(name)
        return None, found[1].ours if found is not None and found[1].same else name


def _unusual(m: Match) -> tuple[bool, bool]:
    return m.mask != "trained", m.policy != "old"


def masked(rollouts: Rollouts, **names: str) -> dict[str, View]:
    """A view by each of `MASKS`, those left out that select what one before them does; `names`: as of `View.of`."""
    out: dict[str, View] = {}
    for mask in MASKS:
        view = View.of(rollouts, mask, **names)
        if not any(np.array_equal(view.lengths, v.lengths) and _equal(view, v) for v in out.values()):
            out[mask] = view
    return out


def _equal(x: View, y: View) -> bool:
    return all(
        np.array_equal(a, b, equal_nan=True) for a, b in ((x.sampler, y.sampler), (x.old, y.old)) if a is not None
    )


def definition_matches(
    reported: Mapping[str, float | None],
    views: View | Mapping[str, View],
    *,
    dialect: str | None = None,
    options: Mapping[str, Any] | None = None,
    tolerance: float = TOLERANCE,
) -> dict[str, list[Match]]:
    """For each reported number the definitions that reproduce it to `tolerance`, relative; see `Meanings.matches`.

    `views`: the tokens that are trained on, or `masked(rollouts)`, which can tell a mask that was forgotten. `dialect`,
    `options`: as which framework's keys the names are read; without one, that of the first key with a `dialect:` before
    it. Our own metrics' keys are read as such.
    """
    if dialect is None:
        dialect = next((found[0].name for found in map(key_of, reported) if found is not None), None)
    meanings = Meanings(dialect, options)
    meanings.add(views)
    return meanings.matches(reported, tolerance=tolerance)


def _rounding(x: float) -> float:
    """Half a unit of the last of a number's digits, relative; 0 for one digit, and for as many as a float has."""
    mantissa, _, _ = f"{x!r}".lower().lstrip("-").partition("e")
    digits = len(mantissa.replace(".", "").strip("0")) if math.isfinite(x) and x else 0
    if not 2 <= digits <= 7:
        return 0.0
    return min(0.5 * 10.0 ** (math.floor(math.log10(abs(x))) - digits + 1) / abs(x), ROUNDED)


def _at(sums: Accumulator, step: int | None) -> dict[str, float | None]:
    return {row.key.name: row.whole if step is None else row.steps.get(step) for row in sums.rows()}


def _relative(x: float, y: float) -> float:
    """|x - y| over the greater of the two sizes; 0 for equal numbers."""
    return abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0
