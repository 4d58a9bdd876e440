"""What the round trip found: counts by part and class, examples of each, and what they mean for a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onepolicy import codes
from onepolicy.codes.kind import DRIFT, FAIL, INFO, PASS, WARN
from onepolicy.tokens.classes import CLASSES
from onepolicy.tokens.explain_difference import Difference
from onepolicy.types import Finding, Severity

#: Examples that are kept of one part and class.
EXAMPLES = 8
#: part -> what one is called.
PARTS = {
    "prompt": "prompts",
    "reply": "replies",
    "join": "joins of prompt and reply",
    "text": "replies with text and ids",
    "reply text": "replies without ids",
    "prompt text": "prompts without ids",
    "token strings": "replies with token strings and no ids",
}
#: Why a group is apart from others of its class.
RECORD_SAYS, TOKENIZERS = "record", "tokenizers"

Judgement = tuple[str, Severity]
_NOTE: Judgement = ("noncanonical-ids", INFO)
_DRIFT: Judgement = ("retokenization-drift", FAIL)
_CHANGED: Judgement = ("text-not-kept", WARN)
#: class -> finding where nothing is known of the pipeline (None: none), and where it encodes text again.
RULES: dict[str, tuple[Judgement | None, Judgement]] = {
    "other-segmentation": (_NOTE, _DRIFT),
    "byte-fallback": (_NOTE, _DRIFT),
    "same-tokens-other-ids": (_NOTE, _DRIFT),
    "merged-across-join": (_NOTE, _DRIFT),
    "prefix-space": (_NOTE, _DRIFT),
    "special-token-added": (_NOTE, _DRIFT),
    "added-token-white-space": (_CHANGED, _DRIFT),
    "normalizer": (_CHANGED, _DRIFT),
    "unknown-token": (_CHANGED, _DRIFT),
    "other-text": (_CHANGED, _DRIFT),
    "special-token-look-alike": (("special-token-look-alike", WARN), ("special-token-look-alike", FAIL)),
    "special-token-spelled-out": (("special-tokens-lost", WARN), ("special-tokens-lost", FAIL)),
    "special-token-skipped": (("special-tokens-lost", WARN), ("special-tokens-lost", FAIL)),
    "special-token-doubled": (("double-bos", WARN), ("double-bos", FAIL)),
    "incomplete-utf8-at-end": (("incomplete-utf8", WARN), ("incomplete-utf8", FAIL)),
    "incomplete-utf8-inside": (("incomplete-utf8", WARN), ("incomplete-utf8", FAIL)),
    "outside-vocabulary": (("unknown-ids", FAIL), ("unknown-ids", FAIL)),
    "text-of-other-ids": (("text-of-other-ids", WARN), ("text-of-other-ids", FAIL)),
    "stop-token-not-in-text": (None, ("special-tokens-lost", WARN)),
    "text-normalised": (("text-of-other-ids", WARN), ("text-of-other-ids", FAIL)),
    "text-cleaned-up": (("text-of-other-ids", WARN), ("text-of-other-ids", FAIL)),
    "text-stripped": (None, ("text-of-other-ids", WARN)),
    "part-of-text": (None, ("text-of-other-ids", WARN)),
    "end-not-decoded": (None, ("text-of-other-ids", WARN)),
    "characters-lost-in-strings": (("incomplete-utf8", FAIL), ("incomplete-utf8", FAIL)),
    "characters-in-bytes": (("incomplete-utf8", INFO), ("incomplete-utf8", WARN)),
}
#: What the round trip cannot tell, and what is wrongly concluded from it.
_RULED_OUT = {"noncanonical-ids": ("a fault of the sampler", "two different tokenizers")}


@dataclass(slots=True)
class Group:
    """Differences of one part, class and reason: how many, and the first of them as JSON."""

    n: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def add(self, example: dict[str, Any], n: int = 1) -> None:
        self.n += n
        if len(self.examples) < EXAMPLES:
            self.examples.append(example)


Key = tuple[str, str, str]


@dataclass(slots=True)
class RoundTrip:
    """Counts of what was read, of what was sent through ids -> text -> ids, and of what did not survive.

    `checked`: part -> sequences. `groups`: (part, class, reason) -> `Group`. `directions`: how many fail in
    `ids->text->ids` and in `text->ids->text`. `texts`: what the replies' own texts are to the text of their ids
    (`TEXT_CLASSES`). `+=` merges two; the examples of the left one come first.
    """

    n_records: int = 0
    n_tokens: int = 0
    n_without_ids: int = 0
    checked: dict[str, int] = field(default_factory=dict[str, int])
    directions: dict[str, int] = field(default_factory=dict[str, int])
    texts: dict[str, int] = field(default_factory=dict[str, int])
    groups: dict[Key, Group] = field(default_factory=dict[Key, Group])

    def __iadd__(self, other: RoundTrip) -> RoundTrip:
        self.n_records += other.n_records
        self.n_tokens += other.n_tokens
        self.n_without_ids += other.n_without_ids
        for mine, theirs in (
            (self.checked, other.checked),
            (self.directions, other.directions),
            (self.texts, other.texts),
        ):
            for name, n in theirs.items():
                mine[name] = mine.get(name, 0) + n
        for key, group in other.groups.items():
            own = self.groups.setdefault(key, Group())
            own.n += group.n
            own.examples.extend(group.examples[: EXAMPLES - len(own.examples)])
        return self

    def add(self, part: str, cls: str, example: dict[str, Any], why: str = "") -> None:
        self.groups.setdefault((part, cls, why), Group()).add({"class": cls, **example})

    def add_difference(self, found: Difference, text_equal: bool | None, why: str = "") -> None:
        """Like `add`; its JSON is made only while examples are wanted."""
        group = self.groups.setdefault((found.part, found.cls, why), Group())
        group.n += 1
        if len(group.examples) < EXAMPLES:
            group.examples.append(replace(found, text_equal=text_equal).as_json())

    def fails(self, direction: str) -> None:
        self.directions[direction] = self.directions.get(direction, 0) + 1

    @property
    def differing(self) -> dict[str, int]:
        """part -> sequences that did not come back the same, whatever the reason."""
        out = dict.fromkeys(self.checked, 0)
        for (part, _, why), group in self.groups.items():
            if why != TOKENIZERS:
                out[part] = out.get(part, 0) + group.n
        return out

    def as_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _COUNTS}
        rows = [
            {"part": part, "class": cls, "why": why, "n": g.n, "examples": g.examples}
            for (part, cls, why), g in self.groups.items()
        ]
        return plain | {"groups": rows}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RoundTrip:
        self = cls(**{name: content[name] for name in _COUNTS})
        for row in content["groups"]:
            self.groups[row["part"], row["class"], row["why"]] = Group(row["n"], list(row["examples"]))
        return self

    def findings(self, reencodes: bool | None = None) -> list[Finding]:
        """One finding for each part, class and reason, in the order of suspicion.

        `reencodes`: whether the pipeline encodes the replies' text again: True makes what does not survive a failure,
        False a note; None judges what the records themselves say.
        """
        found = [_finding(key, group, self.checked, reencodes) for key, group in self.groups.items()]
        return codes.by_rank([f for f in found if f is not None])


_COUNTS = ("n_records", "n_tokens", "n_without_ids", "checked", "directions", "texts")


def _judgement(cls: str, why: str, reencodes: bool | None) -> Judgement | None:
    if why == TOKENIZERS:
        return "texts-encode-differently", FAIL
    unknown, again = RULES[cls]
    if reencodes or (why == RECORD_SAYS and reencodes is None):
        return again
    if unknown is not None and unknown[1] is WARN and reencodes is False:
        return unknown[0], INFO
    return unknown


def _finding(key: Key, group: Group, checked: Mapping[str, int], reencodes: bool | None) -> Finding | None:
    part, cls, why = key
    judgement = _judgement(cls, why, reencodes)
    if judgement is None:
        return None
    code, severity = judgement
    first = group.examples[0]
    of = checked.get(part, group.n)
    evidence = {**first, "part": part, "records": group.n, "of": of, "examples": group.examples}
    return codes.finding(
        code,
        f"{group.n} of {of} {PARTS.get(part, part)}: {CLASSES[cls]}{first_in_words(first)}",
        severity=severity,
        outcome=DRIFT if severity is FAIL else PASS,
        place=f"record {first['record_id']}, {part}, position {first['first_diff']}",
        evidence=evidence,
        ruled_out=_RULED_OUT.get(code, ()),
    )


def first_in_words(example: Mapping[str, Any]) -> str:
    """What stood there and what it became."""
    sampled, again = (_pieces(example.get(name, ())) for name in ("sampled_around", "reencoded_around"))
    text = f": '{sampled}' becomes '{again}'" if sampled and again else ""
    return f"{text}, {example['detail']}" if example.get("detail") else text


def _pieces(tokens: Any) -> str:
    """The tokens around, as text between bars."""
    return "|".join(repr(t["text"])[1:-1] for t in tokens)[:60]
