"""Which policy a column holds: two columns that are equal to the bit are one policy, whatever they are called.

- `old` and `current` equal at every token: the loss starts at a ratio of 1, and where nothing weights it, nothing sees
  the gap to the sampler; or `current` was stored for `old`.
- `old` and `sampler` equal although other weights should have scored than drew: a copy.
- `reference` and `old` equal after updates: the reference moves along, and its KL is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.profiles.base import Seen
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.declared import numbers
from onepolicy.types import BoolArray

#: Pairs that are held against each other.
PAIRS = (("old", "current"), ("sampler", "old"), ("sampler", "current"), ("old", "reference"), ("current", "reference"))
#: Equal values below this many tokens may be chance: certain tokens are 0 on both sides.
FEWEST = 8


def look(seen: Seen) -> Counted:
    """How many tokens have both values, how many of these are equal, how many of the equal ones are not certain."""
    out = Counted()
    scorings = seen.rollouts.scorings
    stale = _stale(seen)
    for x, y in PAIRS:
        if x not in scorings or y not in scorings:
            continue
        a, b = scorings[x].logprobs, scorings[y].logprobs
        values = a.values[seen.at]
        both = (values < -1e-6) & a.mask()[seen.at] & b.mask()[seen.at]
        same = both & _equal(values, b.values[seen.at])
        for name, mask in (("", both), (" stale", both & stale)):
            out.count(f"{x}/{y}{name}:both", int(np.count_nonzero(mask)))
            out.count(f"{x}/{y}{name}:same", int(np.count_nonzero(same & mask)))
    return out


def _equal(a: NDArray[Any], b: NDArray[Any]) -> BoolArray:
    """Equal in the coarser of the two stored precisions."""
    kind = np.float32 if np.float32 in (a.dtype, b.dtype) else np.float64
    return a.astype(kind, copy=False) == b.astype(kind, copy=False)


def _stale(seen: Seen) -> BoolArray:
    """`[N]`: drawn by other weights than scored it, as far as versions are recorded."""
    drew, scored = seen.rollouts.tokens.get("policy_version"), seen.rollouts.records.get("scorer_version")
    if drew is None or scored is None:
        return np.zeros(len(seen), dtype=bool)
    known = drew.mask()[seen.at] & scored.mask()[seen.sequence]
    return known & (drew.values[seen.at] != scored.values[seen.sequence])


def _pair(evidence: Evidence, name: str) -> tuple[int, int]:
    seen = evidence.extra.get("stored_policy")
    return (0, 0) if seen is None else (seen.counts.get(f"{name}:both", 0), seen.counts.get(f"{name}:same", 0))


def uncorrected(evidence: Evidence) -> Answer:
    both, same = _pair(evidence, "old/current")
    drawn, copied = _pair(evidence, "sampler/old")
    if both < FEWEST or drawn < FEWEST:
        return Answer("lacks", "needs sampler, old and current log-probs")
    if same < both:
        return Answer("no", f"old and current differ at {both - same} of {both} tokens")
    if copied == drawn:
        return Answer("no", "old is the sampler's own: the ratio starts at what the loss should weight")
    message = (
        f"old and current are equal to the bit at all {both} tokens, while {drawn - copied} of {drawn} differ from the "
        "sampler's: the policy ratio is 1 before any correction, and the dump holds no weights against the sampler"
    )
    facts = {"old_equals_current": same, "tokens": both, "old_differs_from_sampler": drawn - copied}
    rivals = (
        "current stored for old",
        "the dump is of the first minibatch of a step, before any update, and the loss is weighted elsewhere",
    )
    return Answer("fits", "", finding("uncorrected-off-policy", message, evidence=facts, rivals=rivals))


def copied_old(evidence: Evidence) -> Answer:
    both, same = _pair(evidence, "sampler/old stale")
    if both < FEWEST:
        return Answer("lacks", "needs tokens that other weights scored than drew (policy_version, scorer_version)")
    if same < both:
        return Answer("no", f"sampler and old differ at {both - same} of {both} tokens of other versions")
    message = (
        f"at all {both} tokens whose weights changed between draw and scoring (policy_version is not scorer_version) "
        "old equals the sampler's log-prob to the bit: it was copied, not computed"
    )
    found = finding("old-copied-from-sampler", message, evidence={"tokens": both, "equal": same})
    return Answer("fits", "", found)


def follows(evidence: Evidence) -> Answer:
    found = {name: _pair(evidence, f"{name}/reference") for name in ("old", "current")}
    name = next((k for k, (both, same) in found.items() if both >= FEWEST and same == both), None)
    if all(both < FEWEST for both, _ in found.values()):
        return Answer("lacks", "needs reference and old log-probs")
    if name is None:
        return Answer("no", "the reference differs from the policy")
    steps, versions = numbers(evidence, "step"), numbers(evidence, "scorer_version")
    updated = len(steps) > 1 or max([*steps, 0]) > 1 or len(versions) > 1 or max([*versions, 0]) > 0
    if not updated:
        return Answer("lacks", "the reference equals the policy, as before any update; no step says that there was one")
    both = found[name][0]
    at = f"step {max(steps):g}" if steps else f"version {max(versions):g}"
    message = (
        f"at {at} the reference equals {name} to the bit at all {both} tokens: the KL to it is 0 and holds nothing"
    )
    facts = {"policy": name, "tokens": both, "steps": steps, "scorer_versions": versions}
    return Answer("fits", "", finding("reference-follows-policy", message, evidence=facts))


def _signature(key: str, code: str, says: str, judge: Callable[[Evidence], Answer], *needs: str) -> Signature:
    return Signature(key, code, says, judge, needs=needs, look=look if key == "stored_policy" else None)


SIGNATURES = (
    _signature(
        "stored_policy",
        "uncorrected-off-policy",
        "old equals current to the bit, and the sampler differs",
        uncorrected,
        "old_logprobs and current_logprobs",
    ),
    _signature(
        "copied_old",
        "old-copied-from-sampler",
        "old equals the sampler although other weights scored",
        copied_old,
        "policy_version and scorer_version",
    ),
    _signature(
        "reference",
        "reference-follows-policy",
        "the reference equals the policy after updates",
        follows,
        "reference_logprobs",
    ),
)
