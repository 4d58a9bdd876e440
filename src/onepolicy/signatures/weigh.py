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
#: A cause that explains this share of the gap leaves no room for signatures that describe what is left, by `last`.
ROOM = {0: 2.0, 1: 0.2, 2: 0.02}


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
        if any(a.verdict == "fits" and a.strength >= ROOM[last] for a in answers.values()):
            break
        answers |= {key: s.judge(evidence) for key, s in signatures.items() if s.last == last}
    return Weighed(tuple(_named(signatures, answers)), answers)


def _named(signatures: Mapping[str, Signature], answers: Mapping[str, Answer]) -> list[Finding]:
    fits = {k: a for k, a in answers.items() if a.verdict == "fits" and a.finding is not None}
    order = sorted(fits, key=lambda k: -fits[k].strength)
    out: list[Finding] = []
    done: set[str] = set()
    for key in order:
        if key in done:
            continue
        rivals = [k for k in order if k not in done and k != key and _rival(signatures, key, k)]
        alike = [k for k in rivals if fits[key].strength < CLEARLY * fits[k].strength]
        done |= {key, *rivals}
        out.append(_unclear([key, *alike], fits) if alike else _with_ruled_out(fits[key], signatures, answers, rivals))
    return out


def _rival(signatures: Mapping[str, Signature], x: str, y: str) -> bool:
    return y in signatures[x].rivals or x in signatures[y].rivals


def _unclear(keys: list[str], fits: Mapping[str, Answer]) -> Finding:
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
    """The finding, with why the other causes are none, and those that fit less well."""
    assert answer.finding is not None
    gone = tuple(f"{signatures[k].code}: {a.why}" for k, a in answers.items() if a.verdict == "no" and a.why)
    less = tuple(f"{signatures[k].code}: it explains {answers[k].strength:.0%} of the gap" for k in beaten)
    kept = tuple(g for g in answer.finding.ruled_out if g not in gone)
    return replace(answer.finding, ruled_out=(*kept, *less, *gone))
