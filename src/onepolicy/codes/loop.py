"""Findings of the monitor: what goes wrong while a run goes on."""

from __future__ import annotations

from onepolicy.codes.kind import DRIFT, FAIL, PASS, WARN, Code

LOOP: dict[str, Code] = {
    "observe-failed": Code(
        1,
        WARN,
        PASS,
        "the monitor could not read what it was given",
        "See the message in the log of that rank; the step's numbers are those of the other calls.",
    ),
    "uncorrected-off-policy": Code(
        4,
        WARN,
        PASS,
        "the loss cannot see the gap to the sampler",
        "Old equals current, so the ratio starts at 1: weight the loss (onepolicy.corrections), or say corrected=True.",
    ),
    "nonfinite-weight": Code(
        3,
        WARN,
        PASS,
        "the loss is multiplied by weights that are no numbers",
        "Take the mask before the exponential, and cap the weight: onepolicy.corrections does both.",
    ),
    "engine-never-updated": Code(
        4,
        FAIL,
        DRIFT,
        "the sampler still runs old weights",
        "Look at the weight transfer: did it reach every replica, and was the prefix cache reset after it?",
    ),
    "mixed-weight-versions": Code(
        4,
        WARN,
        PASS,
        "one reply, more than one weight version",
        "Keep a version per token: one label covers only a part of the reply. Correct each token with its own draw.",
    ),
    "version-ahead": Code(
        4,
        WARN,
        PASS,
        "tokens carry a version that the scorer has not reached",
        "Label tokens with the optimiser step whose weights drew them; until then lag and staleness are not measured.",
    ),
    "gap-jumped": Code(
        5,
        FAIL,
        DRIFT,
        "the gap jumped",
        "What changed at that step: a restart, another replica, a new length, a weight transfer that failed half way?",
    ),
    "gap-grows": Code(
        5,
        FAIL,
        DRIFT,
        "the gap grows over the run",
        "Check the live weights of both sides (monitor.every); a version label is no proof that weights arrived.",
    ),
    "tail-rises": Code(
        5,
        FAIL,
        DRIFT,
        "a few tokens go far off while the mean stays",
        "See the worst tokens: cache blocks, special tokens, one language, one length; the mean will not show them.",
    ),
    "ess-collapse": Code(
        5,
        FAIL,
        DRIFT,
        "few tokens carry the weight of the batch",
        "Truncate or mask the weights (onepolicy.corrections), and look for the tokens with the largest ratios.",
    ),
    "ratios-over-two": Code(
        5,
        FAIL,
        DRIFT,
        "too many ratios are above 2",
        "The scorer finds many drawn tokens twice as likely: check temperature and truncation, then staleness.",
    ),
    "recheck-drifted": Code(
        5,
        FAIL,
        DRIFT,
        "the live engines were checked again and drifted",
        "Read that check's report: it names what differs now.",
    ),
}
