"""A report as Markdown, for a comment on a pull request.

Everything from rollouts and files is hostile: words with a character that Markdown or HTML, a mention or a link might
read are put into code spans, where none of them works. Never longer than `LIMIT` characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from onepolicy.report import rows, words
from onepolicy.report.numbers import near_one, number
from onepolicy.report.sentences import ownership, sentences
from onepolicy.report.text import escaped
from onepolicy.types import Finding, Listing, Measurement, Outcome, Ran, Report, Severity, TokenReport

#: GitHub refuses comments above 65,536 characters.
LIMIT = 60_000
#: Rows of each table; the rest are counted.
_ROWS = 40
#: Kinds of findings that are shown whole, and messages of each.
_KINDS, _MESSAGES = 12, 4
_SYMBOL = {Outcome.PASS: "✓", Outcome.DRIFT: "✗", Outcome.INCONCLUSIVE: "?", Outcome.ERROR: "✗"}


def render_markdown(report: Report) -> str:
    """The report as GitHub-flavoured Markdown of at most `LIMIT` characters: what does not fit is left out and said."""
    out = _head(report)
    left_out: list[str] = []
    for name, section in _SECTIONS.items():
        text = "\n".join(section(report))
        if not text:
            continue
        if len(out) + len(text) > LIMIT - 500:
            left_out.append(name)
        else:
            out += f"\n{text}\n"
    more = f"\nLeft out, too long: {', '.join(left_out)}.\n" if left_out else ""
    return f"{out}{more}\n{_next(report)}\n"


def _head(report: Report) -> str:
    verdict = f"## {_SYMBOL[report.outcome]} onepolicy: {report.outcome.value}"
    lines = [f"{verdict}, {said}" if (said := words.headline(report)) else verdict, ""]
    lines += [f"{prose(said)}\n" for said in sentences(report)]
    lines += [f"- {prose(side)}: {prose(engine)}" for side, engine in words.sides(report)[:8]]
    lines.append(f"- bounds: {prose(escaped(report.preset, 80))}")
    if report.floor is not None and report.floor.source != "incomplete":
        lines.append(f"- floor: {prose(words.floor_words(report.floor))}")
    if said := words.suite_words(report):
        lines.append(f"- suite: {prose(said)}")
    if said := words.dump_words(report):
        lines.append(f"- dump: {prose(said)}")
    if report.measurements:
        lines.append(f"- {prose(words.counted(report))}")
    return "\n".join(lines) + "\n"


def _next(report: Report) -> str:
    first = next((f for f in report.findings if not words.is_note(f)), None)
    return "" if first is None else f"Causes and remedies: `onepolicy explain {first.code}`"


# -- sections ----------------------------------------------------------------------------------------------------------


def findings_section(report: Report | TokenReport) -> Iterator[str]:
    """The table of the findings, most suspicious first."""
    groups = [list(g) for _, g in groupby(report.findings, key=lambda f: (f.code, f.outcome))]
    if not groups:
        return
    yield "### Findings"
    yield ""
    yield from table(("", "finding", "what to do"), [_finding(g) for g in groups[:_KINDS]])
    if len(groups) > _KINDS:
        yield f"\nand {len(groups) - _KINDS} more: " + ", ".join(
            dict.fromkeys(f"`{g[0].code}`" for g in groups[_KINDS:])
        )


_WEIGHT = {Severity.FAIL: "**fails**", Severity.WARN: "warns", Severity.INFO: "note"}


def _finding(group: list[Finding]) -> tuple[str, str, str]:
    first = group[0]
    said = [prose(escaped(f.message, 200), cell=True) for f in group[:_MESSAGES]]
    if len(group) > _MESSAGES:
        said.append(f"and {len(group) - _MESSAGES} more")
    if first.place:
        said.append(f"at {prose(escaped(first.place, 160), cell=True)}")
    note = words.is_note(first)
    for label, texts in (("ruled out: ", first.ruled_out), ("or: ", first.rivals)):
        if texts and not note:
            said.append(label + prose(escaped("; ".join(texts), 200), cell=True))
    advice = "" if note else prose(escaped(first.advice, 200), cell=True) + "<br>"
    return _WEIGHT[first.severity], "<br>".join(said), f"{advice}`onepolicy explain {first.code}`"


def _bounds(report: Report) -> Iterator[str]:
    gates = [g for g in report.gates if not words.silent(g)]
    if not gates:
        return
    yield "### Bounds"
    yield ""
    yield from table(
        ("metric", "value:", "99% limit:", "bound:", "outcome"),
        [
            (code(g.metric, cell=True), number(g.value), number(g.limit), number(g.bound), _strong(words.gate_word(g)))
            for g in gates
        ],
    )


def _strong(word: str) -> str:
    return f"**{word}**" if word in ("drift", "inconclusive", "error") else word


def _legs(report: Report) -> Iterator[str]:
    if not report.legs:
        return
    found = [
        (question, code(r.key, cell=True), _compared(r), r.tokens, r.rms, r.largest, r.over_floor, _leg_outcome(r))
        for question, legs in rows.leg_rows(report)
        for r in legs
    ]
    head = ("question", "leg", "what is compared", "tokens:", "RMS, nats:", "max:", "over floor:", "outcome")
    below = [f"- {prose(said)}" for said in rows.found_lines(report) if not said.startswith("contract: ")]
    if said := ownership(report):
        below.append(f"- whose gap: {prose(said)}")
    for ran in (Ran.FAILED, Ran.NOT):
        for why, keys in rows.not_run(report, ran)[:_ROWS]:
            below.append(f"- {ran.value}: {', '.join(code(k) for k in keys[:_ROWS])} ({prose(why)})")
    counted = f"{len(found)} run" + (f", {len(report.legs) - len(found)} not" if len(found) < len(report.legs) else "")
    yield from details(f"Legs: {counted}", [*table(head, found), "", *below])


def _contract(report: Report) -> Iterator[str]:
    found = [(code(name, cell=True), *told) for name, *told in rows.contract_rows(report)]
    if found:
        head = ("setting of the draw", "in the log-probs", "gap if it is:", "gap if not:", "tokens:")
        yield from details("What the sampler's log-probs mean", table(head, found))


def _compared(row: rows.LegRow) -> str:
    return "<br>".join(prose(text, cell=True) for text in (row.compared, row.note) if text)


def _leg_outcome(row: rows.LegRow) -> str:
    return "–" if row.outcome is None else _strong(row.outcome.value)


def _positions(report: Report) -> Iterator[str]:
    found = [
        (r.positions, r.tokens, r.rms, f"{r.over_floor} {r.limits}".strip(), "" if r.outcome is None else _alarm(r))
        for r in rows.position_rows(report)
    ]
    if found:
        head = ("positions", "tokens:", "RMS, nats:", "over floor, 99% limits:", "alarm")
        yield from details("Gap by position", table(head, found))


def _alarm(row: rows.PositionRow) -> str:
    return "**raised**" if row.outcome is Outcome.DRIFT else "no"


_GAP = ("abs_log_ratio/mean", "abs_log_ratio/p50", "abs_log_ratio/p99", "abs_log_ratio/max",
        "kl_sampler_scorer_k3/mean", "ratio/mean")  # fmt: skip


def _gap(report: Report) -> Iterator[str]:
    known = [(key, m) for key in _GAP if (m := report.measurements.get(key)) is not None]
    found = [(f"`{key}`", *_figures(m, near_one if key == "ratio/mean" else number), f"{m.n:,}") for key, m in known]
    if found:
        yield from details("Gap", table(("metric", "value:", "99% limits:", "tokens:"), found))


def _figures(m: Measurement, write: Callable[[float | None], str]) -> tuple[str, str]:
    limits = "" if m.lower is None or m.upper is None else f"[{write(m.lower)}, {write(m.upper)}]"
    return write(m.value), limits


def _fingerprints(report: Report) -> Iterator[str]:
    found = [
        (code(key, cell=True), *(v if v == "–" else code(v, cell=True) for v in values[:4]))
        for key, values in rows.differing(report)
    ]
    if found:
        head = ("key", *(prose(escaped(side, 16), cell=True) for side in list(report.fingerprints)[:4]))
        yield from details("Fingerprints: what differs", table(head, found))


#: In the order of the comment, the most important first: the last ones go when there is no room.
def folded(listing: Listing) -> Iterator[str]:
    """A table as a section that unfolds."""
    cells = [[code(c, cell=True) if c else "" for c in row] for row in listing.rows]
    head = [escaped(name, 60).replace("|", "\\|") for name in listing.columns]
    lines = [*([prose(escaped(listing.note, 300)), ""] if listing.note else []), *table(head, cells)]
    yield from details(escaped(listing.title, 80), lines)


def _listings(report: Report) -> Iterator[str]:
    for listing in report.listings:
        yield from folded(listing)


_SECTIONS: dict[str, Callable[[Report], Iterator[str]]] = {
    "findings": findings_section,
    "bounds": _bounds,
    "legs": _legs,
    "contract": _contract,
    "positions": _positions,
    "gap": _gap,
    "tables": _listings,
    "fingerprints": _fingerprints,
}


# -- Markdown ----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table of cells that are Markdown already; a head that ends in a colon is a column of numbers."""
    yield _row([h.removesuffix(":") for h in head])
    yield _row(["---:" if h.endswith(":") else "---" for h in head])
    for cells in body[:_ROWS]:
        yield _row(cells)
    if len(body) > _ROWS:
        yield _row([f"and {len(body) - _ROWS} more", *([""] * (len(head) - 1))])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def details(summary: str, lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    """A part that is folded; the empty lines let Markdown work inside."""
    yield f"<details><summary>{summary}</summary>"
    yield ""
    yield from lines
    yield ""
    yield "</details>"


#: A word of these alone is plain: nothing in it is read as Markdown, HTML, a mention, a link or an emoji.
_PLAIN = re.compile(r"[^\W_]+(?:['’.,%/×±–+-][^\W_]+)*%?|[±–·×=-]|[0-9.,:%e+-]+")
_LINKS = re.compile(r"\b(?:https?|ftp|mailto|www)\b|\bgh-[0-9]", re.IGNORECASE)
_AROUND = re.compile(r"([(\"']*)(.*?)([.,;:?!)\"']*)", re.DOTALL)


def prose(text: str, cell: bool = False) -> str:
    """Printable text as Markdown that reads the same: suspicious words become code, neighbours as one span."""
    out: list[tuple[bool, str]] = []
    for word in text.split(" "):
        plain = _is_plain(word)
        if not plain and out and not out[-1][0]:
            out[-1] = (False, f"{out[-1][1]} {word}")
        else:
            out.append((plain, word))
    return " ".join(word if plain else _span(word, cell) for plain, word in out)


def _is_plain(word: str) -> bool:
    inner = _AROUND.fullmatch(word)
    if inner is None or not inner[2]:
        return not word
    return _PLAIN.fullmatch(inner[2]) is not None and _LINKS.search(word) is None


def _span(words_: str, cell: bool) -> str:
    """Code, with the punctuation around it outside."""
    inner = _AROUND.fullmatch(words_)
    if inner is None or not inner[2] or "://" in words_:
        return code(words_, cell)
    before, middle, after = inner.groups()
    if middle.count("(") > middle.count(")") and after.startswith(")"):
        middle, after = f"{middle})", after[1:]
    return f"{before}{code(middle, cell)}{after}"


def code(text: str, cell: bool = False) -> str:
    """A code span of any text. In a cell of a table a bar would end it, so it is escaped there."""
    text = escaped(text) or " "
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    room = " " if text[0] in "` " or text[-1] in "` " else ""
    return f"{fence}{room}{text.replace('|', chr(92) + '|') if cell else text}{room}{fence}"
