"""Findings about the files of a dump: what could not be read, what is missing from it."""

from __future__ import annotations

from onepolicy.codes.kind import INFO, OPEN, PASS, WARN, Code

DUMP: dict[str, Code] = {
    "files-unreadable": Code(
        1,
        WARN,
        OPEN,
        "files that cannot be read",
        "The others are audited; the message says what is wrong with the first one, and how to save it so that it can.",
    ),
    "files-skipped": Code(
        7,
        INFO,
        PASS,
        "files of no format that is known",
        "Nothing to do if they are not rollouts; else write them as the column contract has it (docs/columns.md).",
    ),
    "text-only": Code(
        1,
        WARN,
        OPEN,
        "the dump holds text only: no token ids, no log-probs",
        "Save token ids and log-probs; until then `onepolicy tokens` can check templates and re-encoding.",
    ),
    "one-side-only": Code(
        1,
        WARN,
        OPEN,
        "records have log-probs of one side only",
        "Give a scorer (--scorer ENGINE) to compute the other side, or save the trainer's log-probs too.",
    ),
    "dtype-assumed": Code(
        7,
        INFO,
        PASS,
        "the dump does not tell in which precision the engines compute",
        "Give bounds of your own (--bounds) if they are not bf16.",
    ),
}
