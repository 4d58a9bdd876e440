"""From the survey of a dump to its report: the record first, then the meaning, then the shape of the gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from onepolicy import integrity, rows, whatif
from onepolicy.auditing import Unreadable, load
from onepolicy.codes import CODES, by_rank, finding
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.gates.bounds import DTYPES, default_preset
from onepolicy.gates.bounds import load as load_preset
from onepolicy.gates.judge import worst
from onepolicy.integrity.base import Told
from onepolicy.integrity.records import duplicate_findings, missing_findings
from onepolicy.profiles import PROFILES, Profile
from onepolicy.reduce import numeric_identity
from onepolicy.signatures import Evidence
from onepolicy.signatures.weigh import Weighed, weighed
from onepolicy.sums import Sums
from onepolicy.survey import Survey, evidence_of
from onepolicy.types import Finding, Listing, Outcome, Report, Severity
from onepolicy.verdict import judged

#: Profiles that are always shown when the dump has them; the others where their bins differ (see `_worth_showing`).
SHOWN = ("probability", "position", "lag", "kind")
#: Files that hold Python objects.
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".dp", ".bin")
#: Bins of a profile in a table.
BINS = 24


@dataclass(frozen=True, slots=True)
class Dump:
    """What was read, beside its numbers. `formats`: name -> files; `skipped`: (file, why) that nobody claims."""

    uris: tuple[str, ...]
    formats: Mapping[str, int]
    skipped: Sequence[tuple[str, str]] = ()
    unreadable: Sequence[Unreadable] = ()
    vocab_size: int | None = None
    decode: Any = None
    more: Sequence[Finding] = field(default_factory=tuple)


def report_of(survey: Survey, dump: Dump, bounds: str | None = None, reply_length: int | None = None) -> Report:
    """The report of an audit. Size alone is at most inconclusive unless `bounds` are given: a dump has no legs, so the
    floor that its default bounds stand for is assumed."""
    survey = replace(survey, rows=[rows.joined([*survey.rows, *(load(p) for p in survey.spilled)])], spilled=[])
    told = Told(survey.names, dump.vocab_size, survey.fact_values())
    seen = [*_about_files(survey, dump), *integrity.judge_all(survey.checks, told), *dump.more]
    if survey.sums is None:
        return _without_numbers(survey, dump, seen)
    evidence = evidence_of(survey, [f.code for f in seen])
    assert survey.sums is not None
    seen += [*_about_copies(evidence, survey.record_names), *_about_missing(evidence, survey.labels)]
    seen += _about_meaning(survey)
    preset, note = _preset(survey, bounds)
    seen += note
    report = judged(
        survey.sums, load_preset(preset), reply_length or _median(evidence), seen, {}, _context(survey, dump)
    )
    weight = weighed(replace(evidence, above=tuple(f.code for f in seen)))
    causes = [replace(f, origin="run") for f in weight.findings]  # kept when judged again
    found = [*(_assumed(f) if bounds is None else f for f in report.findings), *causes]
    report = replace(report, findings=tuple(by_rank(_each_once(found))), outcome=worst([f.outcome for f in found]))
    tables = (
        *_profiles(evidence),
        *_sequences(evidence, survey, dump),
        *_causes(weight),
        *_what_if(survey, evidence, report),
    )
    tables += _dashboard(survey)
    return replace(report, listings=tables)


def _each_once(found: Sequence[Finding]) -> list[Finding]:
    """The checks of the record and the Sums' own counts may see the same fault: the first one tells more."""
    out: dict[tuple[str, str], Finding] = {}
    told = {f.code for f in found if f.origin == "run"}
    for f in found:
        if f.origin == "sums" and f.code in told and f.code in _OF_STATES:
            continue
        out.setdefault((f.code, f.message), f)
    return list(out.values())


#: Findings that the Sums make of their counts of values.
_OF_STATES = ("positive-logprob", "nonfinite-logprob", "missing-logprobs", "nothing-scored")


# -- files and records -----------------------------------------------------------------------------------------------


def _about_files(survey: Survey, dump: Dump) -> list[Finding]:
    out: list[Finding] = []
    counts = survey.dump.counts
    if dump.unreadable:
        paths = [p for u in dump.unreadable for p in u.paths]
        all_files = len(paths) + counts.get("files", 0)
        message = f"{len(paths)} of {all_files} files cannot be read: {_one_line(dump.unreadable[0].why)}"
        evidence = {"files": [{"paths": list(u.paths), "why": u.why} for u in dump.unreadable[:20]]}
        out.append(finding("files-unreadable", message, origin="run", evidence=evidence, place=paths[0]))
    if counts.get("files cut short"):
        spots = survey.dump.spots.get("cut short", [])
        cut = _of(counts["files cut short"], "file")
        message = f"{cut} that end in the middle of a record: {spots[0].what if spots else ''}"
        places = [s.place for s in spots]
        out.append(finding("files-unreadable", message, origin="run", evidence={"files": places}, place=places[0]))
    out += _about_records(survey)
    if dump.skipped:
        path, why = dump.skipped[0]
        message = f"{_of(len(dump.skipped), 'file')} of no format that is known, as {path}: {why}"
        evidence = {"files": [list(x) for x in dump.skipped[:20]], "count": len(dump.skipped)}
        pickles = [path for path, _ in dump.skipped if path.endswith(PICKLES)]
        if pickles:  # that may well be what should have been audited
            message = (
                f"{_of(len(pickles), 'pickled file')} of no format that is known, as {pickles[0]}; nothing was run"
            )
            weight = {"severity": Severity.WARN, "outcome": Outcome.INCONCLUSIVE}
            out.append(finding("files-skipped", message, origin="run", evidence=evidence, **weight))
        else:
            out.append(finding("files-skipped", message, origin="run", evidence=evidence))
    return out


def _of(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _one_line(why: str) -> str:
    """A refusal of a pickle has lines to copy below it; they are in the evidence."""
    line, colon, _ = why.partition(":\n")
    return f"{line}, as the JSON report shows" if colon else line


def _about_records(survey: Survey) -> list[Finding]:
    """Records that are in no number because one side does not speak of them, or because they are text."""
    counts, (a, b) = survey.dump.counts, survey.names
    out: list[Finding] = []
    texts, records = counts.get("records of text only", 0), counts.get("records", 0)
    if 0 < texts < records:  # a log for people beside the dump: nothing is wrong with it
        message = f"{texts:,} of {records:,} records hold text only and are in no number"
        out.append(finding("text-only", message, origin="run", severity=Severity.INFO, outcome=Outcome.PASS))
    drawn = counts.get("records with drawn tokens", 0)
    lacking = drawn - counts.get("records with both sides", 0)
    if survey.sums is None or survey.sums.view == "fixed" or not 0 < lacking < drawn:
        return out
    head = "records with "
    names = sorted(n.removesuffix("_dtype") for n in survey.facts if n.endswith("_dtype"))
    have = {name: counts.get(head + name, 0) for name in names}
    said = ", ".join(f"{name} {n:,}" for name, n in have.items())
    message = f"{lacking:,} of {drawn:,} records lack log-probs of {a} or {b} and are in no number; there are: {said}"
    out.append(finding("one-side-only", message, origin="run", evidence={"records": drawn, "lacking": lacking, **have}))
    return out


def _about_meaning(survey: Survey) -> list[Finding]:
    """A side whose log-probs are declared to mean one thing in some files and another in others: no number is of
    both."""
    out: list[Finding] = []
    for name in survey.names:
        said = {k: n for k, n in survey.facts.get(f"{name}_semantics", {}).items() if k != "None"}
        if len(said) > 1:
            each = ", ".join(f"{what} in {n:,} records" for what, n in sorted(said.items()))
            message = f"{name}: the files do not agree on what its log-probs are: {each}; audit them apart"
            weight = {"severity": Severity.WARN, "outcome": Outcome.INCONCLUSIVE}
            out.append(finding("semantics-differ", message, origin="run", evidence={"side": name, **said}, **weight))
    undeclared = survey.facts.get("logprob_semantics", {}).get("null", 0)
    if undeclared:
        message = f"logprob_semantics is not recorded in {undeclared:,} records: taken as what was sampled"
        out.append(finding("semantics-undeclared", message, origin="run"))
    return out


def _about_copies(evidence: Evidence, names: Mapping[int, str]) -> list[Finding]:
    """Sequences that are in the dump twice, of one step: a later step may well train on a reply again."""
    found = evidence.rows[evidence.rows["n"] > 0]
    with np.errstate(over="ignore"):
        step = found["step"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    named = bool((found["id"] != found["content"]).any())
    content, record = found["content"] ^ step, found["id"] ^ step
    told = [f"record {names[i]}" if i in names else "" for i in found["id"].tolist()]
    return duplicate_findings(content, record, told, surprisal=found["surprisal"], named=named)


def _about_missing(evidence: Evidence, labels: Mapping[int, str]) -> list[Finding]:
    """Holes in the numbering of samples, and groups that are smaller than the others, within each step."""
    found, out = evidence.rows, list[Finding]()
    for step in np.unique(found["step"]).tolist():
        part = found[found["step"] == step]
        groups = [labels.get(g, f"{g:016x}") if g else None for g in part["group"].tolist()]
        samples = [None if s == rows.MISSING else s for s in part["sample"].tolist()]
        out += missing_findings(groups, samples)
    return out[:1]


def _without_numbers(survey: Survey, dump: Dump, seen: Sequence[Finding]) -> Report:
    """No record has both sides: what the record shows, and what is missing."""
    counts = survey.dump.counts
    texts, records = counts.get("records of text only", 0), counts.get("records", 0)
    have = ", ".join(sorted(n.removesuffix("_dtype") for n in survey.facts if n.endswith("_dtype"))) or "none"
    if texts and texts == records:
        message = f"{_of(texts, 'record')} of text only, no token-level data: token ids and log-probs were not saved"
        missing = finding("text-only", message, origin="run")
    else:
        message = f"no record has log-probs of two sides; scorings in this dump: {have}"
        missing = finding("one-side-only", message, origin="run", evidence={"scorings": have, "records": records})
    found = by_rank([*seen, missing])
    sums = Sums("drawn", (survey.names[0] or "sampler", survey.names[1] or "old"), "sequence", numeric_identity(), ())
    sums.counts = {"tokens": counts.get("tokens", 0), "viewed_sequences": records}
    return Report(
        worst([f.outcome for f in found]), "none", tuple(found), {}, sums, {}, context=_context(survey, dump),
    )  # fmt: skip


def _context(survey: Survey, dump: Dump) -> dict[str, Any]:
    audit = {"uris": list(dump.uris), "formats": dict(dump.formats), "counts": dict(sorted(survey.dump.counts.items()))}
    audit |= {"names": list(survey.names), "facts": survey.fact_values()}
    audit["profiles"] = {k: bins.to_dict() for k, bins in sorted(survey.profiles.items()) if bins.table}
    return {"audit": audit, "tokens": _worst_tokens(survey, dump)}


def _worst_tokens(survey: Survey, dump: Dump, limit: int = 5) -> list[dict[str, Any]]:
    places = [] if survey.sums is None else survey.sums.worst.get("tokens", [])
    out: list[dict[str, Any]] = []
    for place in places[:limit]:
        ids, k = survey.around.get(place, ([place.token], 0))
        texts: list[str] = [f"[{i}]" for i in ids] if dump.decode is None else dump.decode(ids)
        out.append({
            "record": place.record, "position": place.position, "before": "".join(texts[:k]), "token": texts[k],
            "after": "".join(texts[k + 1 :]), "sampler": float(place.a), "scorer": float(place.b),
        })  # fmt: skip
    return out


# -- bounds ----------------------------------------------------------------------------------------------------------


def _preset(survey: Survey, bounds: str | None) -> tuple[str, list[Finding]]:
    """The bounds, and a note where a dtype that nobody declares was assumed."""
    if bounds is not None:
        return bounds, []
    said = [survey.facts.get(f"{name}_dtype", {}) for name in survey.names]
    dtypes = [next((d for d in reversed(DTYPES) if d in values), None) for values in said]  # the coarsest of a side's
    if None not in dtypes:
        return default_preset(list(dtypes)), []
    message = "the dump does not tell the engines' dtypes: held against the bounds of bf16"
    return "bf16", [finding("dtype-assumed", message, origin="run")]


def _assumed(f: Finding) -> Finding:
    """A bound that is passed by a dump's gap, without a leg to say what rounding does here: not decided."""
    if f.outcome is not Outcome.DRIFT or "bound" not in f.evidence:
        return f
    message = f"{f.message}; the floor is assumed: a dump has no legs (--bounds decides)"
    return replace(f, outcome=Outcome.INCONCLUSIVE, severity=Severity.WARN, message=message)


def _median(evidence: Evidence) -> int:
    n = evidence.rows["n"]
    return max(1, int(np.median(n[n > 0]))) if (n > 0).any() else 1


# -- tables ----------------------------------------------------------------------------------------------------------


def _profiles(evidence: Evidence) -> list[Listing]:
    """The profiles that are worth a look, first those that always are."""
    keys = [k for k in SHOWN if k in evidence.profiles]
    keys += [k for k in PROFILES if k in evidence.profiles and k not in keys and _worth_showing(evidence, k)]
    keys += [k for k in sorted(evidence.profiles) if k not in PROFILES and _worth_showing(evidence, k)]
    return [_profile(evidence, key) for key in keys]


def _worth_showing(evidence: Evidence, key: str) -> bool:
    """Whether some bin's mean |d| is away from the others' by more than 4 standard errors and a quarter."""
    bins = evidence.profiles[key]
    labels = [x for x in bins.labels() if bins.n(x) >= 50]
    if len(labels) < 2:
        return False
    n = sum(bins.n(x) for x in labels)
    mean = sum(bins.mean(x) * bins.n(x) for x in labels) / n
    return any(abs(bins.mean(x) - mean) > max(4 * bins.std_error(x), 0.25 * mean) for x in labels)


def _profile(evidence: Evidence, key: str) -> Listing:
    bins = evidence.profiles[key]
    profile = PROFILES.get(key) or Profile(key, f"{key} of token", lambda seen: None)
    cells = lambda x: (
        x, f"{bins.n(x):,}", _short(bins.mean(x)), _short(bins.mean(x, "d")), _short(bins.std_error(x, "d")),
        _short(bins.quantile(x, 0.99)), f"{100 * bins.above(x):.0f}%",
    )  # fmt: skip
    labels = sorted(bins.labels(), key=profile.place_of)
    rows_shown = tuple(cells(x) for x in labels[:BINS])
    note = f"{len(labels) - BINS} more bins are in the JSON report" if len(labels) > BINS else ""
    head = (profile.title, "tokens:", "mean |d|:", "mean d:", "± s.e.:", "p99 |d|:", "d > 0:")
    return Listing(f"Gap by {profile.title}", head, rows_shown, note)


def _what_if(survey: Survey, evidence: Evidence, report: Report) -> list[Listing]:
    """The corrections replayed; none is recommended while a finding above numerics, or a named cause, is open."""
    if not survey.replays.groups:
        return []
    quiet = lambda f: f.outcome is Outcome.PASS and f.severity is Severity.INFO
    mended = lambda f: CODES[f.code].rank <= 4 or f.severity is Severity.FAIL  # at its source, not in the loss
    above = next((f.code for f in report.findings if mended(f) and not quiet(f)), None)
    steps = max(1, len(np.unique(evidence.rows["step"])))
    return [whatif.listing(survey.replays, max(1, evidence.n // steps), evidence.sums.histograms["log_ratio"], above)]


_ORDER = ("fits", "unclear", "no", "lacks")
_WORDS = {"fits": "fits", "unclear": "not decided", "no": "ruled out", "lacks": "cannot be asked"}


def _causes(weight: Weighed) -> list[Listing]:
    """What every signature answered."""
    answers = sorted(weight.answers.items(), key=lambda x: (_ORDER.index(x[1].verdict), -x[1].strength, x[0]))
    shown: dict[tuple[str, str, str], list[str]] = {}  # causes that lack the same column share a row
    for key, a in answers:
        why = a.why or (a.finding.message if a.finding else "")
        shown.setdefault((_WORDS[a.verdict], why, "" if a.verdict == "lacks" else key), []).append(key)
    body = tuple((", ".join(keys), word, why) for (word, why, _), keys in shown.items())
    return [Listing("Causes that were looked for", ("cause", "answer", "why"), body)] if body else []


#: Steps of a dashboard that are shown beside the whole dump.
STEPS = 4


def _dashboard(survey: Survey) -> tuple[Listing, ...]:
    """The dump's numbers under a framework's names, computed its way."""
    if survey.numbers is None:
        return ()
    numbers = Accumulator.from_dict(survey.numbers)
    found = numbers.rows()
    steps = sorted({s for row in found for s in row.steps if s is not None})[:STEPS]
    body = tuple((row.key.name, _digits(row.whole), *(_digits(row.steps.get(s)) for s in steps)) for row in found)
    head = ("key", "whole dump:", *(f"step {s}:" for s in steps))
    said = ", ".join(f"{k}={v}" for k, v in numbers.options.items())
    out = [Listing(f"As {numbers.dialect.name} computes it", head, body, said)]
    quirks = tuple((row.key.name, row.why or row.key.quirks) for row in found if row.why or row.key.quirks)
    if quirks:
        out.append(Listing(f"What {numbers.dialect.name}'s names do not say", ("key", "quirk"), quirks))
    return tuple(out)


def _digits(x: float | None) -> str:
    return "–" if x is None or x != x else f"{x:.9g}"


def _sequences(evidence: Evidence, survey: Survey, dump: Dump) -> list[Listing]:
    """The sequences with the largest summed gap, and how their replies begin."""
    places = evidence.sums.worst.get("sequences", [])[:5]
    if not places:
        return []
    gap = lambda p: float(p.b) - float(p.a)
    begins = lambda p: _text(survey.around.get(p, ([], 0))[0], dump)
    body = tuple((p.record, f"{p.position:,}", _short(gap(p)), _short(gap(p) / p.position), begins(p)) for p in places)
    return [Listing("Worst sequences", ("record", "tokens:", "sum of d:", "mean d:", "the reply begins"), body)]


def _text(ids: Sequence[int], dump: Dump) -> str:
    """Decoded, or the ids where there is no tokenizer."""
    return "".join(f"[{i}]" for i in ids[:8]) if dump.decode is None else "".join(dump.decode(list(ids)))


def _short(x: float) -> str:
    return "–" if x != x else f"{x:.3g}"
