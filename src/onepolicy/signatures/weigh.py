"""Every signature is asked, and the answers are held against each other: one cause is named, or rivals abstain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onepolicy.codes import CODES, finding
from onepolicy.signatures import SIGNATURES
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.types import Finding

#: Of two rivals that both fit, the one that explains this many times as much of the gap is named; else neither.
CLEARLY = 1.5
#: So many of the causes that are none are named with the one that is; `Weighed.answers` has all.
SHOWN = 4
#: A cause that explains this share of the gap leaves no room for signatures that describe what is left, by `last`.
ROOM = {0: 2.0, 1: 0.2, 2: 0.02}
#: The rank of findings about what log-probs mean.
MEANING = 3
#: A suspicion that explains this share of the gap holds back what only describes it.
LIKELY = 0.5


@dataclass(frozen=True, slots=True)
class Weighed:
    """`findings`: causes by how much of the gap they explain. `answers`: what every signature said, by its key; one
    that was not asked, since another cause fits already, has none."""

    findings: tuple[Finding, ...]
    answers: Mapping[str, Answer]


def weigh(evidence: Evidence, signatures: Mapping[str, Signature] = SIGNATURES) -> list[Finding]:
    """The causes that the data names, each with what was ruled out; rivals that fit alike as one `cause-unclear`."""
    return list(weighed(evidence, signatures).findings)


def weighed(evidence: Evidence, signatures: Mapping[str, Signature] = SIGNATURES) -> Weighed:
    """`weigh`, with what each signature said. Numbers below a finding that withholds them name no cause."""
    if any(CODES[code].withholds for code in evidence.above if code in CODES):
        return Weighed((), {})
    answers: dict[str, Answer] = {}
    for last in sorted({s.last for s in signatures.values()}):
        if any(a.finding is not None and a.strength >= ROOM[last] for a in answers.values()):
            break
        answers |= {key: s.judge(evidence) for key, s in signatures.items() if s.last == last}
    return Weighed(tuple(_named(signatures, answers)), answers)


def _named(signatures: Mapping[str, Signature], answers: Mapping[str, Answer]) -> list[Finding]:
    told = {k: a for k, a in answers.items() if a.finding is not None}
    fits = _without_shapes(signatures, {k: a for k, a in told.items() if a.verdict == "fits"}, told)
    order = sorted(fits, key=lambda k: -fits[k].strength)
    out: list[Finding] = []
    done: set[str] = set()
    for key in order:
        if key in done:
            continue
        rivals = [k for k in order if k not in done and k != key and _rival(signatures, key, k)]
        alike = [k for k in rivals if fits[key].strength < CLEARLY * fits[k].strength]
        done |= {key, *rivals}
        out.append(unclear([key, *alike], fits) if alike else _with_ruled_out(fits[key], signatures, answers, rivals))
    if not any(a.strength > 0 for a in fits.values()):  # nothing is named for the gap: what is suspected is told
        suspected = [k for k, a in answers.items() if a.verdict == "unclear" and a.finding is not None]
        out += [_with_ruled_out(answers[k], signatures, answers, []) for k in suspected]
    return out


def _without_shapes(
    signatures: Mapping[str, Signature], fits: dict[str, Answer], told: Mapping[str, Answer]
) -> dict[str, Answer]:
    """Where the log-probs mean different things the gap has shapes too (it grows with the reply as repeats do): of what
    explains the gap, only what stands highest in the order of suspicion is named then. A suspicion that explains most
    of it holds them back as well, but for its rivals."""
    rank = {k: CODES[a.finding.code].rank for k, a in told.items() if a.finding is not None and a.strength > 0}
    meaning = [k for k, r in rank.items() if r == MEANING]
    named = any(k in fits and fits[k].strength >= ROOM[1] / 2 for k in meaning)
    likely = [k for k in meaning if k not in fits and told[k].strength >= LIKELY]
    keep = lambda k: not (named or any(not _rival(signatures, k, other) for other in likely))
    return {k: a for k, a in fits.items() if rank.get(k, MEANING) <= MEANING or keep(k)}


def _rival(signatures: Mapping[str, Signature], x: str, y: str) -> bool:
    return y in signatures[x].rivals or x in signatures[y].rivals


def unclear(keys: list[str], fits: Mapping[str, Answer]) -> Finding:
    found = [f for k in keys if (f := fits[k].finding) is not None]
    codes = ", ".join(f.code for f in found)
    evidence = {f.code: {"message": f.message, "explains": fits[k].strength} for k, f in zip(keys, found, strict=True)}
    return finding(
        "cause-unclear",
        f"the gap fits {codes} alike, and this dump does not tell them apart",
        evidence=evidence,
        rivals=tuple(f"{f.code}: {CODES[f.code].title}" for f in found),
    )


def _with_ruled_out(
    answer: Answer, signatures: Mapping[str, Signature], answers: Mapping[str, Answer], beaten: list[str]
) -> Finding:
    """The finding, with those that fit less well and why others are none."""
    assert answer.finding is not None
    rivals = _rivals_of(answer, signatures)
    order = sorted(answers, key=lambda k: k not in rivals)  # its rivals first, else in the order of the table
    gone = tuple(f"{signatures[k].code}: {a.why}" for k in order if (a := answers[k]).verdict == "no" and a.why)
    less = tuple(f"{signatures[k].code}: it explains {answers[k].strength:.0%} of the gap" for k in beaten)
    kept = tuple(g for g in answer.finding.ruled_out if g not in gone)
    return replace(answer.finding, ruled_out=(*kept, *less, *gone[:SHOWN]))


def _rivals_of(answer: Answer, signatures: Mapping[str, Signature]) -> set[str]:
    """Signatures that leave the same mark as the one that answered."""
    assert answer.finding is not None
    own = {k for k, s in signatures.items() if s.code == answer.finding.code}
    return {y for x in own for y in signatures if y != x and _rival(signatures, x, y)}
