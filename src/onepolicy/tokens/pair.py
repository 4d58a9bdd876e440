"""Two tokenizers: which parts differ, and what that does to texts.

    report = compare_tokenizers(open_tokenizer(A), open_tokenizer(B), texts=my_texts)

A part that differs is a failure where it changes the ids of a probe or of the user's texts; a warning where it is
written otherwise and nothing shows it; a note where the two sides come from other backends, whose words for the same
thing differ. What a backend cannot tell is neither the same nor different.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onepolicy.codes import by_rank, finding
from onepolicy.tokens import pair_around
from onepolicy.tokens.base import PARTS, Tokenizer
from onepolicy.tokens.pair_texts import Pair, Pieces, TextRow, compare_texts
from onepolicy.tokens.part_differences import PartRow, compare_parts, overlap
from onepolicy.tokens.part_probes import made_for
from onepolicy.tokens.part_swap import CANDIDATES, explain
from onepolicy.tokens.part_words import Roles, vocabulary_change
from onepolicy.tokens.probes import probes
from onepolicy.tokens.prompt_sides import compare_prompts
from onepolicy.types import Finding, Outcome, Severity

__all__ = ["ClassRow", "PairReport", "compare_prompts", "compare_tokenizers"]

#: Parts that make ids of a text -> the code of their difference.
ENCODING: dict[str, str] = {
    "vocabulary": "vocabularies-differ",
    "merges": "merges-differ",
    "model": "merges-differ",
    "normalizer": "normalizer-differs",
    "pre_tokenizer": "pre-tokenizer-differs",
    "added_tokens": "added-tokens-differ",
}
#: Below these shares of the larger and of the smaller vocabulary they are two tokenizers, not two copies of one.
UNRELATED = (0.5, 0.8)
MADE = "differing tokens"  # the class of texts made for what differs
GIVEN = "given"  # the class of the user's texts
_KEPT = 512  # differing texts that are kept, a class
_ROWS = 1000  # rows of the user's texts that are kept
_EXAMPLES = 5  # texts that a finding shows
_SAID = 3  # differences in a message


@dataclass(frozen=True, slots=True)
class ClassRow:
    """How many texts of one class give other ids, and the first of them."""

    group: str
    texts: int
    differ: int
    first: TextRow | None = None

    def to_json(self, roles: Roles) -> dict[str, Any]:
        first = None if self.first is None else self.first.to_json(roles)
        return {"class": self.group, "texts": self.texts, "differ": self.differ, "first": first}


@dataclass(frozen=True, slots=True)
class PairReport:
    """What two tokenizers have in common. `names`, `backends`: of a and b, which are called by `roles`.

    `parts`: a row for each of `base.PARTS`. `behaviour`: a row for each class of probes, and `given` for the user's
    texts. `texts`: the user's texts one by one, at most 1,000, those that differ always.
    """

    names: tuple[str, str]
    backends: tuple[str, str]
    roles: Roles
    findings: list[Finding]
    parts: list[PartRow]
    behaviour: list[ClassRow]
    texts: list[TextRow] = field(default_factory=list[TextRow])

    @property
    def outcome(self) -> Outcome:
        """`drift` where a finding fails, else `pass`."""
        failed = any(f.severity is Severity.FAIL for f in self.findings)
        return Outcome.DRIFT if failed else Outcome.PASS

    @property
    def same_ids(self) -> bool:
        """Whether every text gave the same ids on both sides."""
        return not any(row.differ for row in self.behaviour)

    def to_json(self) -> dict[str, Any]:
        """Names, parts with digests, behaviour by class, the user's texts; findings as the report writes them."""
        return {
            "roles": list(self.roles),
            "tokenizers": list(self.names),
            "backends": list(self.backends),
            "outcome": self.outcome.value,
            "parts": [row.to_json() for row in self.parts],
            "behaviour": [row.to_json(self.roles) for row in self.behaviour],
            "texts": [row.to_json(self.roles) for row in self.texts],
        }


def compare_tokenizers(
    a: Tokenizer, b: Tokenizer, *, texts: Iterable[str] | None = None, roles: Roles = ("sampler", "scorer")
) -> PairReport:
    """Parts, behaviour on the probe set and on `texts`, and what is wrong with the pair.

    `texts` may be a stream: only what differs is kept, and the first rows. Errors: those of the backends
    (`ContentError` for a text that is none).
    """
    pair, parts = (a, b), compare_parts(a, b, roles)
    seen, pieces = _Seen(), Pieces(pair)
    for group, strings in [*probes().items(), (MADE, made_for(pair, parts)), (GIVEN, texts or ())]:
        seen.add(group, compare_texts(pair, strings, group, pieces))
    judged = [*_encoding(pair, parts, seen, roles), *pair_around.judge(pair, parts, seen.same, roles)]
    rows = list(seen.rows.values())
    return PairReport(
        (a.name, b.name), (a.BACKEND, b.BACKEND), roles, by_rank(judged), [parts[p] for p in PARTS], rows, seen.given
    )


@dataclass(slots=True)
class _Seen:
    """What the texts showed: a row a class, the differing ones, a few texts with the same ids."""

    rows: dict[str, ClassRow] = field(default_factory=dict[str, ClassRow])
    differing: list[TextRow] = field(default_factory=list[TextRow])
    given: list[TextRow] = field(default_factory=list[TextRow])
    same: list[str] = field(default_factory=list[str])

    def add(self, group: str, found: Iterable[TextRow]) -> None:
        n = differ = 0
        first: TextRow | None = None
        for row in found:
            n += 1
            if row.same and len(self.same) < _KEPT:
                self.same.append(row.text)
            if not row.same:
                differ, first = differ + 1, first or row
                self.differing += [row] if differ <= _KEPT else []
            if group == GIVEN and (n <= _ROWS or (not row.same and len(self.given) < 2 * _ROWS)):
                self.given.append(row)
        if n:
            self.rows[group] = ClassRow(group, n, differ, first)

    def counts(self) -> dict[str, int]:
        """Texts and differing ones, of ours and of the user's."""
        own = [row for group, row in self.rows.items() if group != GIVEN]
        given = self.rows.get(GIVEN, ClassRow(GIVEN, 0, 0))
        return {
            "probes": sum(row.texts for row in own),
            "probes_differ": sum(row.differ for row in own),
            "given": given.texts,
            "given_differ": given.differ,
        }


def _encoding(pair: Pair, parts: Mapping[str, PartRow], seen: _Seen, roles: Roles) -> list[Finding]:
    """The parts that make ids, each judged by what it does to texts."""
    if any(share < least for share, least in zip(overlap(parts["vocabulary"]), UNRELATED, strict=True)):
        return [_unrelated(parts, seen, roles)]
    why = _with_added(explain(pair, parts, seen.differing), parts)
    out = [
        _of_part(pair, parts, row, why.get(name, []), seen, roles)
        for name, row in ((name, parts[name]) for name in ENCODING)
        if row.differs and not _said_elsewhere(name, parts, why)
    ]
    return out + ([_unexplained(parts, why[""], seen, roles)] if "" in why else [])


def _with_added(why: dict[str, list[TextRow]], parts: Mapping[str, PartRow]) -> dict[str, list[TextRow]]:
    """Texts that an added token's other id explains belong to the added tokens, not to the vocabulary around them."""
    if why.get("vocabulary") and _said_elsewhere("vocabulary", parts, why):
        moved = why["vocabulary"]
        known = {row.text for row in why.get("added_tokens", [])}
        why["added_tokens"] = [*why.get("added_tokens", []), *(row for row in moved if row.text not in known)]
    return why


def _said_elsewhere(name: str, parts: Mapping[str, PartRow], why: Mapping[str, list[TextRow]]) -> bool:
    """A vocabulary that differs in its added tokens alone; merges that differ only by tokens that one side lacks."""
    vocabulary, added = parts["vocabulary"].contents, parts["added_tokens"].contents[0]
    if not parts["vocabulary"].differs:
        return False
    if name == "vocabulary":
        return isinstance(added, Mapping) and all(t in added for ts in vocabulary_change(*vocabulary) for t in ts)
    if name == "merges" and not why.get("merges"):
        kept = [[m for m in rows if _is_common(m, vocabulary)] for rows in parts["merges"].contents]
        return kept[0] == kept[1]
    return False


def _is_common(merge: Any, vocabularies: Sequence[Mapping[str, int]]) -> bool:
    """Whether both sides have what a merge makes, or the piece that a score is of."""
    made = "".join(x for x in merge if isinstance(x, str)) if isinstance(merge, list) else merge
    return all(made in vocabulary for vocabulary in vocabularies)


def _of_part(
    pair: Pair, parts: Mapping[str, PartRow], row: PartRow, texts: list[TextRow], seen: _Seen, roles: Roles
) -> Finding:
    said = "; ".join(row.words[:_SAID])
    sure = not texts and _sure(row, roles)
    evidence = _evidence(parts, row, texts, seen, roles) | ({"shown_by": sure} if sure else {})
    if texts or sure:
        told = _told(texts, seen) if texts else sure
        return finding(ENCODING[row.part], f"{_title(row)}: {said}; {told}", place=_place(texts), evidence=evidence)
    heavy = pair[0].BACKEND == pair[1].BACKEND and not _idle(row)
    return finding(
        ENCODING[row.part],
        f"{_title(row)}: {said}; none of {_tried(seen)} shows it",
        evidence=evidence,
        severity=Severity.WARN if heavy else Severity.INFO,
        outcome=Outcome.PASS,
    )


#: Part -> what is said of it.
_TITLES: dict[str, str] = {
    "vocabulary": "the vocabularies differ",
    "merges": "the merges differ",
    "model": "the models' switches differ",
    "normalizer": "text is normalised otherwise",
    "pre_tokenizer": "text is split otherwise before merging",
    "added_tokens": "the added tokens differ",
}


def _title(row: PartRow) -> str:
    return _TITLES[row.part]


def _sure(row: PartRow, roles: Roles) -> str:
    """What no text has to show: an id that means another token, a token that is special on one side only."""
    a, b = row.contents
    if row.part == "vocabulary" and isinstance(a, Mapping) and isinstance(b, Mapping):
        only_a, only_b, moved = vocabulary_change(a, b)
        if moved:
            return f"{len(moved)} ids mean another token on the other side"
        at = [{side[t] for t in only} for side, only in ((a, only_a), (b, only_b))]
        return f"{len(at[0] & at[1])} ids mean another token on the other side" if at[0] & at[1] else ""
    if row.part == "added_tokens" and isinstance(a, Mapping):
        others = b if isinstance(b, Mapping) else {}
        moved = [token for token, what in a.items() if token in others and what.get("id") != others[token].get("id")]
        if moved:
            return f"{len(moved)} added tokens have another id on the other side"
        lost = [token for token, what in a.items() if "special" in what]
        return f"{len(lost)} tokens are left out of the text on one side only (skip_special_tokens)" if lost else ""
    return ""


def _idle(row: PartRow) -> bool:
    """A model's switch that only unusual input reaches, and no probe did: not worth a warning."""
    a, b = row.contents
    return row.part == "model" and all(a.get(key) == b.get(key) for key in ("type", "dropout"))


def _tried(seen: _Seen) -> str:
    counts = seen.counts()
    return f"{counts['probes']} probes" + (f" and {counts['given']} texts" if counts["given"] else "")


def _told(texts: Sequence[TextRow], seen: _Seen) -> str:
    """How many texts differ by it, and of which class."""
    given = sum(row.group == GIVEN for row in texts)
    counts = seen.counts()
    of_given = f" and {given} of {counts['given']} texts" if counts["given"] else ""
    return f"{len(texts) - given} of {counts['probes']} probes{of_given} get other ids ({_class(texts)})"


def _class(texts: Sequence[TextRow]) -> str:
    """The class in which most of the differing places fall."""
    return Counter(row.place for row in texts).most_common(1)[0][0] if texts else ""


def _first(texts: Sequence[TextRow]) -> TextRow | None:
    """A text of the user's, if one differs, else a probe."""
    return next((row for row in texts if row.group == GIVEN), texts[0] if texts else None)


def _place(texts: Sequence[TextRow]) -> str:
    row = _first(texts)
    if row is None:
        return ""
    text = row.text if len(row.text) <= 40 else row.text[:39] + "…"
    return f"text {text!r}, token {row.first_diff}"


def _evidence(
    parts: Mapping[str, PartRow], row: PartRow | None, texts: Sequence[TextRow], seen: _Seen, roles: Roles
) -> dict[str, Any]:
    """What a reader needs to see it for himself: classes, counts, first places, tokens around them."""
    out: dict[str, Any] = {}
    if row is not None:
        out = {"part": row.part, "differences": list(row.words), "digests": dict(zip(roles, row.digests, strict=True))}
    if texts:
        given = [t for t in texts if t.group == GIVEN]
        shown = [*given, *(t for t in texts if t.group != GIVEN)][:_EXAMPLES]
        out |= {"class": _class(texts), "classes": dict(Counter(t.place for t in texts).most_common())}
        out |= {"examples": [t.to_json(roles) for t in shown]}
    if seen.given:
        out |= {"counts": {t.text: list(t.counts) for t in seen.given[:_KEPT]}}
        out |= {"first_diff": {t.text: t.first_diff for t in seen.given[:_KEPT]}}
    return out | {"vocab_equal": _equal(parts["vocabulary"]), "merges_equal": _equal(parts["merges"]), **seen.counts()}


def _equal(row: PartRow) -> bool | None:
    """None: not known."""
    return None if row.state == "not known" else row.state == "same"


def _unrelated(parts: Mapping[str, PartRow], seen: _Seen, roles: Roles) -> Finding:
    """One finding for two tokenizers that have little in common: their other parts follow from that."""
    row, (share, _) = parts["vocabulary"], overlap(parts["vocabulary"])
    others = {name: list(parts[name].words) for name in ENCODING if name != "vocabulary" and parts[name].differs}
    said = f"these are two other tokenizers ({share:.0%} of the larger vocabulary is in both): {row.words[0]}"
    evidence = _evidence(parts, row, seen.differing, seen, roles) | {"common_share": share, "other_parts": others}
    place = _place(seen.differing)
    return finding(ENCODING[row.part], f"{said}; {_told(seen.differing, seen)}", place=place, evidence=evidence)


def _unexplained(parts: Mapping[str, PartRow], texts: list[TextRow], seen: _Seen, roles: Roles) -> Finding:
    """Texts that differ although no part is known to: what is not known is named."""
    wanted = {part for text in texts for part in CANDIDATES[text.kind]}
    rivals = [name for name in CANDIDATES["cuts"] if name in wanted and parts[name].state == "not known"]
    said = f"not known, and so in question: {', '.join(rivals)}" if rivals else "no known part differs that explains it"
    ruled_out = tuple(name for name in CANDIDATES["cuts"] if name in wanted and parts[name].state == "same")
    return finding(
        "texts-encode-differently",
        f"{_told(texts, seen)}; {said}",
        place=_place(texts),
        evidence=_evidence(parts, None, texts, seen, roles),
        rivals=tuple(rivals),
        ruled_out=ruled_out,
    )
