"""One small dump for each finding of the audit: healthy values, and one fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import scenarios_meaning

from exchanged_dumps import exchanged, replies
from integrity_dumps import batch, changed, found, only_drawn, reply, rolled, settled, shaped
from onepolicy.engines.fake_rounding import round_to
from onepolicy.formats.base import BrokenRecord
from onepolicy.gates.judge import worst
from onepolicy.integrity.base import Batch
from onepolicy.integrity.records import duplicate_findings, missing_findings
from onepolicy.rollouts import Rollouts
from onepolicy.types import Finding, Outcome, TokenReport, Values


def told(findings: list[Finding], records: int, tokens: int) -> TokenReport:
    """As the audit's screen tells it."""
    outcome = worst([f.outcome for f in findings])
    said = "nothing here makes the numbers meaningless" if outcome is Outcome.PASS else ""
    return TokenReport(outcome, tuple(findings), {}, {"records": records, "tokens": tokens}, headline=said)


def audited(one: Batch, **more: Any) -> TokenReport:
    aside = len(one.settled.aside) if one.settled is not None else 0
    return told(found(one, **more), len(one.rollouts) + aside, one.rollouts.n_tokens)


def of(change: Callable[[Any], Any], side: str = "sampler", **more: Any) -> TokenReport:
    return audited(batch(changed(shaped(), side, change)), **more)


def _unreadable() -> TokenReport:
    good = reply("r1", [-0.5, -1.2, -0.1], [-0.5, -1.2, -0.1], 3)
    return audited(settled(good, BrokenRecord("step_3.jsonl:7", "the line ends inside a string", "r7")))


def _contradicts() -> TokenReport:
    values = [-0.5, -1.2, -0.1, -2.25]
    return audited(settled(reply("r1", values, values[::-1], 4, claims={"reply": 5})))


def _lengths() -> TokenReport:
    """Two sampled tokens became one id when the text was encoded again."""
    a = [-4.37, -0.01, -1.27, -0.63, -0.47, -2.74, -1.93, -0.37, -3.05, -0.04]
    b = [-4.38, -0.01, -1.28, -0.62, -0.47, -2.74, -2.81, -3.01, -0.04]
    return audited(settled(reply("r1", a, b, len(b))))


def _zeros(x: Any) -> None:
    x[np.flatnonzero(shaped().drawn & (x < -0.5))[::40]] = 0.0


def _exchanged() -> TokenReport:
    """The trainer sorted its batch by length and did not undo it."""
    r = replies(64)
    return audited(batch(exchanged(r, np.argsort(r.lengths, kind="stable")), order=np.arange(len(r))))


def _masked() -> TokenReport:
    """Tool output inside a reply, marked with -9999 and taken out by the mask."""
    r = shaped()
    out = r.drawn & (np.arange(r.n_tokens) % 9 == 0)
    tokens = {**r.tokens, "loss_mask": Values(r.drawn & ~out)}

    def fill(x: Any) -> None:
        x[out] = -9999.0

    return audited(batch(changed(replace(r, tokens=tokens), "sampler", fill)))


def _nothing_trained() -> TokenReport:
    r = shaped()
    mask = np.repeat(np.arange(len(r)) % 3 == 0, r.lengths) & r.drawn
    return audited(batch(replace(r, tokens={**r.tokens, "loss_mask": Values(mask)})))


def _duplicates(same_content: bool) -> TokenReport:
    ids = np.arange(40, dtype=np.uint64)
    names, content = ids.copy(), ids.copy()
    names[20:24] = names[:4]
    if same_content:
        content[20:24] = content[:4]
    places = [f"rank_{i // 20}.jsonl:{i % 20 + 1}" for i in range(40)]
    return told(duplicate_findings(content, names, places), 40, 40 * 64)


def top_of(records: int = 20, seed: int = 0) -> Rollouts:
    """Tokens drawn from small random distributions; the sampler side stores the likeliest one's value."""
    r = shaped(sequences=records)
    rng = np.random.default_rng(seed)
    logits = rng.uniform(0.5, 6.0, (r.n_tokens, 1)) * rng.standard_normal((r.n_tokens, 24))
    lp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    drawn = (lp + rng.gumbel(size=lp.shape)).argmax(axis=1)
    noise = np.exp(0.01 * rng.standard_normal(r.n_tokens))
    r = changed(r, "old", lambda x: lp[np.arange(len(x)), drawn] * noise)
    r = changed(r, "sampler", lambda x: lp.max(axis=1))
    return replace(r, scorings={side: only_drawn(r, side) for side in r.scorings})


def _summed() -> TokenReport:
    """Each reply's summed log-prob at all of its tokens."""
    r = shaped()

    def sums(x: Any) -> Any:
        x = np.where(r.drawn, x, 0.0)
        return np.repeat(np.add.reduceat(x, r.offsets[:-1]), r.lengths)

    return audited(batch(changed(r, "sampler", sums)))


def _eight_bits(x: Any) -> Any:
    """Rounded to three bits of mantissa, as e4m3 has them."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 16) / 16, exponent)


def _uniform() -> TokenReport:
    return of(lambda x: np.full(len(x), -np.log(151936.0)), "sampler", vocab_size=151936)


def _copied() -> TokenReport:
    r = shaped()
    return audited(batch(r.with_scoring("old", r.scorings["sampler"])))


SCENARIOS: dict[str, Callable[[], TokenReport]] = {
    "records-unreadable": _unreadable,
    "record-contradicts-itself": _contradicts,
    "logprob-length-mismatch": _lengths,
    "shift-by-one": lambda: audited(batch(rolled(shaped(), "old", 1))),
    "exchanged-logprobs": _exchanged,
    "filled-logprob": lambda: of(_zeros),
    "rescaled-logprob": lambda: of(lambda x: x / np.log(2.0)),
    "sequence-logprob-stored": _summed,
    "clamped-logprob": lambda: of(lambda x: np.maximum(x, -2.0)),
    "uniform-vocabulary": _uniform,
    "values-at-masked-places": _masked,
    "duplicate-records": lambda: _duplicates(same_content=True),
    "record-id-repeated": lambda: _duplicates(same_content=False),
    "records-missing": lambda: told(missing_findings(["g"] * 62, [i for i in range(64) if i not in (7, 40)]), 62, 3968),
    "nothing-trained": _nothing_trained,
    "one-source": _copied,
    "stored-as-bf16": lambda: of(lambda x: round_to(x, "bfloat16").astype(np.float64)),
    "stored-as-fp16": lambda: of(lambda x: round_to(x, "float16").astype(np.float64)),
    "stored-as-fp8": lambda: of(_eight_bits),
    "stored-rounded": lambda: of(np.trunc),
    "top-token-stored": lambda: audited(batch(top_of())),
    **scenarios_meaning.MEANING,
}
