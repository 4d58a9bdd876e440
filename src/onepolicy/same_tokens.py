"""Tokens first: rollouts, two tokenizers, two engines or a chat template, looked at before any probability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from onepolicy.codes import CODES, by_rank, finding
from onepolicy.engine_tokens import pair_listings
from onepolicy.gates.judge import worst
from onepolicy.tokens.base import Tokenizer, TokenRecord
from onepolicy.tokens.counts import check_counts
from onepolicy.tokens.gather import Gathered
from onepolicy.tokens.look_alikes import check_look_alikes
from onepolicy.tokens.masks import check_masks
from onepolicy.tokens.pair import PairReport, compare_tokenizers
from onepolicy.tokens.probes import probes
from onepolicy.tokens.prompt_sides import compare_prompts
from onepolicy.tokens.reading import RecordStream
from onepolicy.tokens.roundtrip import Way, check_chunk, way
from onepolicy.tokens.roundtrip_result import RULES, RoundTrip
from onepolicy.tokens.spans import prove_turns
from onepolicy.tokens.spellings import is_ids
from onepolicy.tokens.stops import check_stops
from onepolicy.tokens.suffixes import check_suffixes
from onepolicy.tokens.templates.check import TemplateReport, bind, check_template
from onepolicy.tokens.templates.compare import compare_templates
from onepolicy.tokens.templates.conversations import built_in
from onepolicy.types import Finding, Listing, Outcome, Severity, TokenReport

Told = Callable[[int, int], None]


def check_rollouts(
    source: str | Path | RecordStream | Iterable[Any],
    tokenizer: Tokenizer | None = None,
    scorer_tokenizer: Tokenizer | None = None,
    *,
    reencodes: bool | None = None,
    stop_ids: Sequence[int] = (),
    strict: bool = False,
    progress: Told | None = None,
) -> TokenReport:
    """Every check that the records allow: counts, stop tokens, masks, turns, prompts of two sides, and with a tokenizer
    the round trip of the sampled ids. Constant memory on a file of any size.

    `tokenizer` decodes, `scorer_tokenizer` (default: the same) encodes again. `reencodes`: whether the pipeline does so
    (None: not known). `stop_ids`: the sampler's, besides each record's own.
    Errors: those of `RecordStream` and of the tokenizers.
    """
    stream = source if isinstance(source, RecordStream) else RecordStream(source, strict=strict)
    going = _Rollouts(tokenizer, scorer_tokenizer, tuple(stop_ids))
    for chunk in stream:
        going.add(chunk)
        if progress:
            progress(stream.n_records, 0)
    pair = going.pair()
    findings = [*stream.findings(), *going.findings(reencodes), *(pair.findings if pair else [])]
    return _report(
        _open(findings, stream, tokenizer),
        _subject(stream, going, reencodes),
        going.counts(stream),
        [*going.listings(reencodes), *(pair_listings(pair) if pair else [])],
        {"round_trip": going.trip.as_json() if tokenizer else None, "pair": pair.to_json() if pair else None},
        going.said(),
    )


class _Rollouts:
    """What is gathered over the chunks of a stream."""

    def __init__(self, a: Tokenizer | None, b: Tokenizer | None, stop_ids: tuple[int, ...]) -> None:
        self.a, self.b = a, a if b is None else b
        self.there: Way | None = None if a is None else way(a, b)
        special: Mapping[str, int | None] = {} if a is None else a.special_ids()
        self.bos, self.eos, self.pad = special.get("bos"), special.get("eos"), special.get("pad")
        stops = _stop_ids(a) or (() if self.eos is None else (self.eos,))
        self.names = {} if a is None else {i: token.content for i, token in a.added.items()}
        self.stop_ids = (*stop_ids, *(i for i in stops if i not in stop_ids))
        self.trip, self.gathered = RoundTrip(), Gathered()

    def add(self, chunk: Sequence[TokenRecord]) -> None:
        for record in chunk:
            self.gathered.add(self._ids(record))
        sides = [r for r in chunk if len(r.sides) > 1 and min(map(min, filter(None, r.sides.values())), default=0) >= 0]
        if sides:
            self.gathered.add(compare_prompts(sides, self.bos, eos=self.eos, pad=self.pad, tokenizer=self.a))
        if self.there is not None:
            self.trip += check_chunk(chunk, self.there)

    def _ids(self, record: TokenRecord) -> Iterable[Finding]:
        yield from _negative(record, sides_only=self.there is not None)  # the round trip names the others
        yield from check_counts(record, stop_ids=self.stop_ids)
        if self.a is not None and record.messages:
            yield from check_look_alikes(record, self.a)
        yield from _rendered(record, self.stop_ids, self.names)
        proof = prove_turns(record, tokenizer=self.a)
        if proof is not None:
            yield from proof.findings(record.record_id, record.place)
            record = record if record.spans or not proof.spans else replace(record, spans=proof.spans)
        known: dict[str, Any] = {"stop_ids": self.stop_ids, "pad": self.pad, "names": self.names}
        yield from check_stops(record, **known)
        if proof is None or not proof.mask_is_judged:
            yield from check_masks(record, **known)

    def pair(self) -> PairReport | None:
        """The two tokenizers themselves, where there are two."""
        return None if self.a is None or self.b is None or self.a is self.b else compare_tokenizers(self.a, self.b)

    def findings(self, reencodes: bool | None) -> list[Finding]:
        return [*self.gathered.findings(), *self.trip.findings(reencodes)]

    def counts(self, stream: RecordStream) -> dict[str, int]:
        seen = {"records": stream.n_records, "tokens": stream.n_tokens, "left out": stream.n_skipped}
        return {name: n for name, n in seen.items() if n or name != "left out"} | self.gathered.counts()

    def listings(self, reencodes: bool | None) -> list[Listing]:
        rows = [
            (part, f"{n:,}", f"{self._lost(part, reencodes):,}", _classes(self.trip, part))
            for part, n in self.trip.checked.items()
        ]
        columns = ("part", "checked:", "do not survive:", "as what")
        return [Listing("Round trip", columns, tuple(rows), "ids, decoded and encoded again")] if rows else []

    def _lost(self, part: str, reencodes: bool | None) -> int:
        """How many do not survive. A text without its stop token, as engines give it, is lost where it is encoded."""
        fine = sum(g.n for (p, cls, _), g in self.trip.groups.items() if p == part and RULES[cls][0] is None)
        return self.trip.differing.get(part, 0) - (0 if reencodes else fine)

    def said(self) -> str:
        if self.there is None:
            return "counts, stop tokens and masks agree"
        lost, of = (sum(found.get(part, 0) for part in _IDS) for found in (self.trip.differing, self.trip.checked))
        if not lost:
            return "the sampled ids survive decoding and encoding"
        return f"nothing fails; {lost:,} of {of:,} sequences would get other ids if their text were encoded again"


#: Parts of the round trip that are of ids.
_IDS = ("prompt", "reply", "join")
_LARGEST = 1 << 31


def _rendered(record: TokenRecord, stop_ids: Sequence[int], names: Mapping[int, str]) -> Iterable[Finding]:
    """A record that says what the template renders for its conversation (`rendered_ids`)."""
    rendered, own = record.extra.get("rendered_ids"), record.extra.get("names")
    if not isinstance(rendered, list) or not is_ids(cast(list[Any], rendered)):
        return
    ids = [*(record.prompt_ids or ()), *(record.reply_ids or ())]
    named = {int(k): str(v) for k, v in own.items() if str(k).isdigit()} if isinstance(own, Mapping) else {}
    stops = (*record.stop_ids, *stop_ids)
    known: dict[str, Any] = {"stop_ids": stops, "spans": record.spans or (), "names": {**names, **named}}
    yield from check_suffixes(ids, rendered, record_id=record.record_id, place=record.place, **known)


def _negative(record: TokenRecord, *, sides_only: bool) -> Iterable[Finding]:
    """Ids that no vocabulary has. `sides_only`: those of prompt and reply are named elsewhere."""
    own = {} if sides_only else {"prompt": record.prompt_ids, "reply": record.reply_ids}
    for part, ids in {**own, **record.sides}.items():
        if ids and not (min(ids) >= 0 and max(ids) < _LARGEST):
            at = [i for i, x in enumerate(ids) if not 0 <= x < _LARGEST]
            found = [ids[i] for i in at[:8]]
            message = f"{record.record_id}: {len(at)} ids that are none, {found[0]} at position {at[0]} of the {part}"
            evidence = {"class": "impossible", "part": part, "positions": at[:8], "ids": found}
            yield finding("unknown-ids", message, place=record.place, evidence=evidence)


def _classes(trip: RoundTrip, part: str) -> str:
    found: dict[str, int] = {}
    for (where, cls, _), group in trip.groups.items():
        if where == part:
            found[cls] = found.get(cls, 0) + group.n
    return ", ".join(f"{cls} {n:,}" for cls, n in sorted(found.items(), key=lambda item: -item[1]))


def _stop_ids(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    part = None if tokenizer is None else tokenizer.parts().get("stop_ids")
    content = part.content if part is not None and part.known else None
    return tuple(int(i) for i in content) if isinstance(content, list | tuple) else ()


def _open(findings: list[Finding], stream: RecordStream, tokenizer: Tokenizer | None) -> list[Finding]:
    """What was not looked at is no pass: a file without ids, and no tokenizer to make any."""
    if stream.n_without_ids < stream.n_records:
        return findings
    what = "no record has token ids"
    if tokenizer is not None:
        message = f"{what}: only the texts were checked, not what was sampled"
        return [*findings, finding("nothing-checked", message, evidence={"records": stream.n_records})]
    return [*findings, finding("nothing-checked", f"{what}, and no tokenizer was given: nothing was checked")]


def _subject(stream: RecordStream, going: _Rollouts, reencodes: bool | None) -> dict[str, str]:
    source = stream.source
    named = str(source) if isinstance(source, str | Path) else "records in memory"
    out = {"rollouts": named}
    if going.a is not None and going.b is not None:
        out["decoded by"], out["encoded by"] = (
            f"{going.a.name} ({going.a.BACKEND})",
            f"{going.b.name} ({going.b.BACKEND})",
        )
        known = {
            True: "encodes text again",
            False: "keeps the ids",
            None: "not known; --reencodes says it encodes again",
        }
        out["pipeline"] = known[reencodes]
    if going.stop_ids:
        out["stop ids"] = ", ".join(map(str, going.stop_ids))
    return out


def _named(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.name} ({tokenizer.BACKEND})"


# -- two tokenizers ----------------------------------------------------------------------------------------------------


def check_tokenizers(a: Tokenizer, b: Tokenizer, *, texts: Iterable[str] | None = None) -> TokenReport:
    """Parts and behaviour of two tokenizers, and their chat templates on the same conversations."""
    pair = compare_tokenizers(a, b, texts=texts)
    subject = {"sampler": _named(a), "scorer": _named(b)}
    counts = {"parts compared": len(pair.parts), "texts compared": sum(row.texts for row in pair.behaviour)}
    said = "the two tokenizers give the same ids"
    return _report(pair.findings, subject, counts, pair_listings(pair), {"pair": pair.to_json()}, said)


# -- a chat template ---------------------------------------------------------------------------------------------------


def check_chat_template(
    template: str | None = None, tokenizer: Tokenizer | None = None, *, seen: Sequence[Finding] = (), **more: Any
) -> TokenReport:
    """Whether a template (None: the tokenizer's) is safe for multi-turn RL, and what the tokenizer does not keep of a
    text. `more`: as `templates.check.check_template`; `seen`: findings made before, on the way to the conversations.

    Errors: `UsageError` for neither a template nor a tokenizer; `ContentError` for conversations that are none.
    """
    findings, listings = [*seen], []
    subject, counts, details = {"template": "none"}, {}, {}
    said = "the tokenizer keeps every text of the probe set"
    if template is not None or tokenizer is None or tokenizer.chat_template is not None:
        found = check_template(template, tokenizer=tokenizer, **more)
        findings += found.findings
        subject, counts, details = (
            {"template": found.digest},
            {"conversations": len(found.conversations)},
            found.to_json(),
        )
        listings += _template_listings(found)
        said = "the template keeps history, and the sampled tokens with it"
    if tokenizer is not None:
        subject["tokenizer"] = _named(tokenizer)
        trips = {group: _probed(tokenizer, texts) for group, texts in probes().items()}
        whole = RoundTrip()
        for trip in trips.values():
            whole += trip
        findings += [_of_probes(f) for f in whole.findings()]
        listings.append(_kept(trips))
        counts["probes"] = whole.n_records
    return _report(findings, subject, counts, listings, {"template": details or None}, said)


def check_two_templates(
    a: str | None,
    b: str | None,
    tokenizer: Tokenizer | None = None,
    *,
    conversations: Sequence[Any] = (),
    seen: Sequence[Finding] = (),
) -> TokenReport:
    """The sampler's template against the scorer's, on the same conversations. None: the tokenizer's own."""
    sides = [bind(text, tokenizer) for text in (a, b)]
    chats = [*built_in(), *conversations]
    found = compare_templates(sides[0], sides[1], chats, tokenizers=(tokenizer, tokenizer))
    subject = {"sampler": sides[0].digest, "scorer": sides[1].digest}
    said = "both templates render the same text"
    return _report([*seen, *found.findings], subject, {"renders compared": len(found.views)}, [], {}, said)


def _template_listings(found: TemplateReport) -> list[Listing]:
    """The questions with their answers; what the template does not support at all in one row."""
    rows = [(row.question, row.answer, row.detail) for row in found.rows if row.answer != "not supported"]
    left = [row.question for row in found.rows if row.answer == "not supported"]
    rows += [("all others", "not supported", "; ".join(left))] if left else []
    columns = ("question", "answer", "detail")
    return [Listing("Is it safe for multi-turn RL?", columns, tuple(rows))] if rows else []


def _probed(tokenizer: Tokenizer, texts: Sequence[str]) -> RoundTrip:
    """Text -> ids -> text. A probe's name is its text."""
    return check_chunk([TokenRecord(repr(text), reply_text=text) for text in texts], way(tokenizer))


def _of_probes(found: Finding) -> Finding:
    """The texts are ours: nobody replied."""
    place = f"probe {found.evidence['record_id']}, position {found.evidence['first_diff']}"
    return replace(found, message=found.message.replace("replies without ids", "probes"), place=place)


def _kept(trips: Mapping[str, RoundTrip]) -> Listing:
    """Which texts of the probe set do not come back from their ids, by class of text."""
    rows: list[tuple[str, ...]] = []
    for group, trip in trips.items():
        changed = {cls: found for (_, cls, _), found in trip.groups.items()}
        first = next((found.examples[0]["record_id"] for found in changed.values()), "")
        n = sum(found.n for found in changed.values())
        rows += [(group, f"{trip.n_records:,}", f"{n:,}", ", ".join(changed), first[:40])] if n else []
    same = {group: trip.n_records for group, trip in trips.items() if not trip.groups}
    rows.append(("all others" if rows else "all", f"{sum(same.values()):,}", "0", "", ", ".join(same)))
    columns = ("class of texts", "texts:", "changed:", "as what", "first")
    return Listing("Text to ids to text", columns, tuple(rows), "what the tokenizer does not keep")


# -- all ---------------------------------------------------------------------------------------------------------------


def _report(
    findings: Sequence[Finding],
    subject: Mapping[str, str],
    counts: Mapping[str, int],
    listings: Sequence[Listing],
    details: Mapping[str, Any],
    said: str,
) -> TokenReport:
    """`said`: the headline where everything is well."""
    kept = {name: value for name, value in details.items() if value is not None}
    outcome = worst([f.outcome for f in findings])
    warned = next((f for f in by_rank(list(findings)) if f.severity is Severity.WARN), None)
    if outcome is Outcome.PASS and warned is not None:
        said = f"nothing fails, but {CODES[warned.code].title}"
    elif outcome is not Outcome.PASS:
        said = next(CODES[f.code].title for f in by_rank(list(findings)) if f.outcome is outcome)
    return TokenReport(outcome, tuple(by_rank(list(findings))), subject, counts, tuple(listings), kept, said)
