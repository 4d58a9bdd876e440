"""The nouns: what the rooms hand to each other. Data only; nothing here computes a number.

Shapes: T tokens of all sequences one after another, S sequences, V vocabulary. Units: nats.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onepolicy.sums import Sums

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


class Outcome(enum.StrEnum):
    """What a judged statement or a whole report says. Precedence: error > drift > inconclusive > pass."""

    PASS = "pass"
    INCONCLUSIVE = "inconclusive"
    DRIFT = "drift"
    ERROR = "error"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 drift, 3 inconclusive, 4 error (2 is usage)."""
        return {"pass": 0, "drift": 1, "inconclusive": 3, "error": 4}[self.value]


class Severity(enum.StrEnum):
    """How a finding weighs: `fail` makes drift, `warn` is shown and exits 0, `info` is a note."""

    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Values:
    """Flat values with validity. `valid` is None when nothing is missing; what stands under a False is not read."""

    values: NDArray[Any]
    valid: BoolArray | None = None

    def mask(self) -> BoolArray:
        """Validity `[N]` as an array."""
        return np.ones(len(self.values), dtype=bool) if self.valid is None else self.valid

    def take(self, index: NDArray[Any]) -> Values:
        return Values(self.values[index], None if self.valid is None else self.valid[index])


@dataclass(frozen=True, slots=True)
class Lists:
    """A list a row (CSR): row i is `values[offsets[i]:offsets[i + 1]]`; `valid` False means the row is null."""

    values: NDArray[Any]
    offsets: IntArray
    valid: BoolArray | None = None

    def row(self, i: int) -> NDArray[Any]:
        return self.values[self.offsets[i] : self.offsets[i + 1]]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What one engine said about given tokens.

    `logprobs`, `entropy`, `varentropy`: `[T]`, nats. `distributions`: `[T, V]` log-probs, only from engines asked for
    them. `routes`: `[T, L * K]` experts, layer by layer, from mixture models asked for them, -1 where not known.
    `semantics`: one of `schema.SEMANTICS`, None if undeclared. `dtype`: the precision the engine computes in.
    `scoring_id` tells two scorings with equal values from one scoring seen twice.
    """

    logprobs: Values
    entropy: Values | None = None
    varentropy: Values | None = None
    distributions: NDArray[Any] | None = None
    semantics: str | None = None
    dtype: str | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scoring_id: str | None = None
    routes: NDArray[Any] | None = None

    def take(self, index: NDArray[Any]) -> Scoring:
        """The scoring of the tokens at `index`."""

        def pick(column: Values | None) -> Values | None:
            return None if column is None else column.take(index)

        dist = None if self.distributions is None else self.distributions[index]
        return Scoring(
            self.logprobs.take(index),
            pick(self.entropy),
            pick(self.varentropy),
            dist,
            self.semantics,
            self.dtype,
            self.fingerprint,
            self.scoring_id,
            None if self.routes is None else self.routes[index],
        )

    def without_entropy(self) -> Scoring:
        """The same scoring as an engine gives it that reports log-probs alone."""
        return replace(self, entropy=None, varentropy=None)


@dataclass(frozen=True, slots=True)
class FloorColumns:
    """What rounding alone does at each token of a pair, from the trusted side's own variants.

    `scale`: `[T]` nats, the predicted RMS gap at this token, NaN where there is none. `gaps`: `[P, T]` log-ratios
    between two variants each, NaN where they were not scored. `counted`: `[T]`, False where the gap must not be held
    against it (the two sides of a mixture model took other experts). `digest`: names the table behind `scale`.
    """

    scale: FloatArray
    gaps: FloatArray
    counted: BoolArray
    digest: str


@dataclass(frozen=True, slots=True)
class LogprobPairs:
    """Two scorings of the same tokens, proven the same by `align`. Side a is the sampler's role, b the scorer's.

    `a`, `b`: `[T]` float64, NaN where null. `drawn_by`: which side drew the drawn tokens, None for neither.
    `estimable`: `[S]`, the reported distribution of side a is the one its tokens were drawn from, as far as declared.
    """

    names: tuple[str, str]
    offsets: IntArray
    token_ids: NDArray[np.int32]
    a: FloatArray
    b: FloatArray
    a_valid: BoolArray
    b_valid: BoolArray
    drawn: BoolArray
    trained: BoolArray | None
    drawn_by: Literal["a", "b"] | None
    estimable: BoolArray
    record_ids: tuple[str, ...]
    cluster_keys: tuple[str, ...]
    cluster_unit: str
    a_entropy: FloatArray | None = None
    a_varentropy: FloatArray | None = None
    b_entropy: FloatArray | None = None
    b_varentropy: FloatArray | None = None
    a_distributions: NDArray[Any] | None = None
    b_distributions: NDArray[Any] | None = None
    floor: FloorColumns | None = None
    #: `[T]` place of each token in its sequence; given where the gap is to be looked at by position
    positions: IntArray | None = None

    @property
    def log_ratio(self) -> FloatArray:
        """`[T]`, scorer minus sampler, NaN where either is null."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.b - self.a

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """A number that knows what it is: definition, count, clusters, uncertainty, and what was left out.

    `value` None: not measured, and `why` says why. `std_error` on the metric's own scale (`log` or `linear`); None
    when it has none (a maximum, a withheld interval). `lower`, `upper`: one-sided 99% limits each.
    """

    metric: str
    value: float | None
    n: int
    n_nonfinite: int = 0
    clusters: int = 0
    effective_clusters: float = 0.0
    std_error: float | None = None
    lower: float | None = None
    upper: float | None = None
    scale: Literal["linear", "log"] = "linear"
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A judged statement: code (see `codes.CODES`), outcome and severity, place, evidence, what to do."""

    code: str
    severity: Severity
    outcome: Outcome
    message: str
    place: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ruled_out: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    advice: str = ""
    #: `sums`: follows from the Sums, judged again with them; `run`: seen while running, kept when judged again
    origin: Literal["sums", "run"] = "sums"


@dataclass(frozen=True, slots=True)
class Gate:
    """One bound, judged. `limit` is the one-sided 99% limit of the value on the side of the bound.

    `smallest_seen`: the smallest true value that this data would have called drift nine times in ten. `would_decide`:
    (tokens, clusters) at which the interval would fall on one side of the bound, were the value to stay.
    """

    metric: str
    bound: float
    when: str
    outcome: Outcome
    value: float | None
    limit: float | None
    n: int
    effective_clusters: float
    p_value: float | None = None
    smallest_seen: float | None = None
    would_decide: tuple[int, int] | None = None
    why: str = ""
    source: str = ""


class Question(enum.StrEnum):
    """What a leg asks. The first two are never mixed: a bug stays in float32, rounding does not."""

    FUNCTION = "same function"
    ROUNDING = "rounding"
    MEANING = "meaning"
    STALENESS = "staleness"


class Ran(enum.StrEnum):
    """Whether a leg was run. `not run`: an engine cannot, or nobody asked; `failed`: it was tried."""

    DONE = "run"
    NOT = "not run"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LegResult:
    """One controlled comparison: two scorings of the same ids, one changed factor, one question.

    `a`, `b`: the two scorings in words. `outcome` is the leg's own (None unless run): what it makes of the verdict are
    findings. `sums` let it be judged again. `place`: the first bad token, where there is one. `facts`: what a leg
    found besides numbers (cached tokens, the contract's rows), JSON-able.
    """

    key: str
    question: Question
    factor: str
    a: str
    b: str
    ran: Ran
    why: str = ""
    outcome: Outcome | None = None
    measurements: Mapping[str, Measurement] = field(default_factory=dict[str, Measurement])
    gates: tuple[Gate, ...] = ()
    place: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sums: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FloorVariant:
    """The RMS gap, in nats, between two variants of the trusted side, over `n` tokens."""

    a: str
    b: str
    rms: float
    n: int


@dataclass(frozen=True, slots=True)
class Floor:
    """The gap that rounding alone predicts. RMS in nats over the tokens that it was held against.

    `source`: `measured` from variants with distinct kernels; `assumed`: sqrt(2) times the trusted side's own error;
    `baseline`: from a saved report; `incomplete`: what the sampler declares cannot be emulated, so nothing is
    predicted (`why` says what). `scale`: rows (lower edge, upper edge, level, n) of the token scale; `scale_by` names
    the quantity that it is binned by, and how a level becomes nats.
    """

    source: Literal["measured", "assumed", "baseline", "incomplete"]
    why: str = ""
    dtype: str = ""
    rms: float | None = None
    variants: tuple[FloorVariant, ...] = ()
    scale_by: str = ""
    scale: tuple[tuple[float, float, float, int], ...] = ()
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """A table for people: a title, the names of its columns (one that ends in a colon holds numbers), rows of cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Findings, measurements, the Sums they came from, both sides' fingerprints. Judged again without a rerun.

    `legs`: every leg that was asked for, in the order of the table, the ones that were not run too. `listings`: tables
    of an audit (profiles, causes, corrections).
    """

    outcome: Outcome
    preset: str
    findings: tuple[Finding, ...]
    measurements: Mapping[str, Measurement]
    sums: Sums
    fingerprints: Mapping[str, Mapping[str, Any]]
    gates: tuple[Gate, ...] = ()
    reply_length: int | None = None
    context: Mapping[str, Any] = field(default_factory=dict[str, Any])
    legs: tuple[LegResult, ...] = ()
    floor: Floor | None = None
    listings: tuple[Listing, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenReport:
    """What the token checks found: before any probability.

    `subject`: what was looked at, name -> words. `counts`: of records, tokens, and each class of difference.
    `listings`: for people. `details`: what each check saw, JSON-able, by the name of the check.
    """

    outcome: Outcome
    findings: tuple[Finding, ...]
    subject: Mapping[str, str]
    counts: Mapping[str, int]
    listings: tuple[Listing, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    headline: str = ""
