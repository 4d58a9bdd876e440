"""The pull-request comment: what it says, that it parses as meant, and that hostile text stays text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from full import HOSTILE, REPORTS, checked, other_leg, poisoned
from markdown_it import MarkdownIt
from markdown_it.token import Token
from scenarios import batch, judged

from onepolicy.report.markdown import LIMIT, code, prose, render_markdown, table
from onepolicy.report.text import escaped
from onepolicy.types import Finding, Gate, Outcome, Ran, Report, Severity

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
#: What may be HTML: the folded parts, and line breaks in cells.
OURS = re.compile(r"<details><summary>[^<>&]*</summary>|</details>|<br>")


def inline(text: str) -> list[Token]:
    return [child for token in PARSER.parse(text) for child in token.children or []]


def tables(text: str) -> list[list[int]]:
    """Of each table, the number of cells of its rows."""
    out: list[list[int]] = []
    for token in PARSER.parse(text):
        if token.type == "table_open":
            out.append([])
        elif token.type == "tr_open":
            out[-1].append(0)
        elif token.type in ("td_open", "th_open"):
            out[-1][-1] += 1
    return out


def shown(text: str) -> str:
    """What a reader sees of one paragraph."""
    return "".join(token.content for token in inline(text))


@pytest.mark.parametrize("what", REPORTS)
def test_the_verdict_comes_first_and_every_part_is_there(what: str):
    report = REPORTS[what]()
    text = render_markdown(report)
    assert text.splitlines()[0].split()[3].rstrip(",") == report.outcome.value
    for part in ("### Findings", "### Bounds", "Legs: ", "Gap by position", "Fingerprints: what differs"):
        assert part in text
    assert len(text) < 10_000
    assert not [t for t in tables(text) if len(set(t)) != 1]
    assert len(tables(text)) == 7


def test_a_plain_report_has_no_empty_parts():
    text = render_markdown(judged(batch()))
    assert text.startswith("## ✓ onepolicy: pass, the two sides agree within every bound\n")
    assert "Legs" not in text and "Fingerprints" not in text and "### Findings" not in text


def test_sentences_findings_and_the_command():
    text = render_markdown(REPORTS["another function"]())
    assert text.startswith("## ✗ onepolicy: drift, in float32 the two engines compute different functions\n")
    assert "Same function: no, in float32 the gap stays" in text
    assert "| **fails** | both engines in float32, on drawn tokens: RMS 0.0021" in text
    assert text.endswith("Causes and remedies: `onepolicy explain different-function`\n")
    assert text.count("onepolicy explain not-covered") == 1


def test_only_alarms_that_were_raised_are_bounds():
    assert "_from_" not in render_markdown(checked()).split("### Bounds")[1].split("<details>")[0]
    late = render_markdown(REPORTS["a late fault"]())
    assert re.search(r"`gap_over_floor_from_64/rms` \| 7\.\d+ .*\*\*drift\*\*", late)
    assert re.search(r"\| 64 to 127 \| 4,096 \| 0\.1\d+ \| 7\.\d+ \[.*\] \| \*\*raised\*\* \|", late)


def test_only_keys_that_differ_are_shown_and_shared_ones_first():
    text = render_markdown(checked()).split("Fingerprints")[1]
    keys = re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
    assert keys == ["engine", "versions.torch", "attention", "versions.vllm", "prefix_cache", "versions.transformers"]
    assert "| `versions.vllm` | `0.32.0` | – |" in text


def test_legs_that_were_not_run_are_listed_with_their_reason():
    text = render_markdown(REPORTS["float32 failed"]())
    assert "Legs: 10 run, 6 not" in text
    assert "- failed: `same-function` (out of memory: float32 needs 3.1 GiB, 2.0 GiB are free)" in text
    assert "- not run: `reference-sampler`, `reference-scorer` (no `--reference` was named)" in text


def test_a_leg_that_drifts_names_its_place():
    report = other_leg(
        checked(), "sampler-cache", outcome=Outcome.DRIFT, place="first bad token: record a_b, position 3"
    )
    assert "cold against cached prefix<br>first bad token: record `a_b`, position 3" in render_markdown(report)


def test_what_the_contract_leg_found():
    text = render_markdown(checked())
    assert "| `temperature=0.7` | applied | 0.03 | 0.41 | 180 |" in text
    assert "| `min_p` | not told apart | – | – | – |" in text


# -- hostile text ------------------------------------------------------------------------------------------------------


def assert_harmless(text: str) -> None:
    """No markup but ours, and outside of code nothing that GitHub or GitLab would make a link or a mention of."""
    assert all(c == "\n" or c.isprintable() for c in text)
    assert all(len(set(t)) == 1 for t in tables(text))
    for token in PARSER.parse(text):
        if token.type == "html_block":
            assert all(OURS.fullmatch(line) for line in token.content.splitlines()), token.content
        assert token.type not in ("fence", "code_block", "blockquote_open", "hr")
    for token in inline(text):
        assert token.type in ("text", "code_inline", "html_inline", "strong_open", "strong_close", "softbreak"), token
        if token.type == "html_inline":
            assert OURS.fullmatch(token.content)
        if token.type == "text":
            assert not re.search(r"[@#`<>&$~\\*_|]|://|www\.|gh-\d|:\w+:", token.content, re.IGNORECASE), token.content


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_text_stays_text(what: str):
    text = render_markdown(poisoned(HOSTILE[what]))
    assert_harmless(text)
    assert len(text) < LIMIT
    lines = text.splitlines()
    assert lines.count("</details>") == sum(line.startswith("<details>") for line in lines) >= 3
    assert "### Findings" in text and "Left out" not in text


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("cell", [False, True])
def test_prose_and_code_read_as_the_text_itself(what: str, cell: bool):
    line = escaped(HOSTILE[what])
    for write in (prose, code):
        text = write(line, cell=cell)
        if cell:
            rows = "\n".join(table(("head", "second"), [(text, "x")]))
            assert tables(rows) == [[2, 2]]
            cells = [t for t in PARSER.parse(rows) if t.type == "inline"]
            seen = "".join(c.content for c in cells[2].children or [])
        else:
            seen = shown(f"start {text} end").removeprefix("start ").removesuffix(" end")
        assert seen.split() == line.split()


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("gap_over_floor/rms is 1.62, bound 1.25", "`gap_over_floor/rms` is 1.62, bound 1.25"),
        ("sqrt(2) times (its_own) error", "`sqrt(2)` times (`its_own`) error"),
        ("the scorer's 4,096-token replies: 53%, -9.5 ± 4.4", "the scorer's 4,096-token replies: 53%, -9.5 ± 4.4"),
        ("--skip a_b, c_d.", "`--skip a_b, c_d`."),
        ("", ""),
    ],
)
def test_prose_is_readable(text: str, written: str):
    assert prose(text) == written


def crowded(n: int) -> Report:
    """Many findings, bounds and legs, with long texts that need escapes."""
    long = "| ` " * 200
    found = tuple(
        Finding(c, Severity.FAIL, Outcome.DRIFT, f"{i} {long}", long, {}, (long,), (long,), long)
        for i in range(n)
        for c in ("kl-above-bound", "gap-above-bound", "token-above-bound")
    )
    gates = tuple(Gate(f"{long}{i}", 1.0, "required", Outcome.DRIFT, 2.0, 2.0, 9, 9.0) for i in range(n))
    legs = tuple(replace(checked().legs[3], key=f"{i}{long}", factor=long) for i in range(n))
    out = tuple(replace(x, ran=Ran.NOT, why=f"{x.key}{long}") for x in legs)
    prints = {side: {f"{i}{long}": f"{side}{long}" for i in range(n)} for side in ("sampler", "scorer")}
    late = tuple(Gate(f"gap_over_floor_from_{i}/rms", 1.0, "alarm", Outcome.DRIFT, 2.0, 2.0, 9, 9.0) for i in range(n))
    return replace(
        checked(), outcome=Outcome.DRIFT, findings=found, gates=gates + late, legs=legs + out, fingerprints=prints
    )


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_it_is_never_longer_than_a_comment_may_be(n: int):
    text = render_markdown(crowded(n))
    assert len(text) <= LIMIT
    assert_harmless(text)
    assert "### Findings" in text and "`onepolicy explain kl-above-bound`" in text
    assert n == 10 or ("more" in text and "\nLeft out, too long: " in text)


def test_a_report_without_context_still_renders():
    bare = replace(checked(), context={}, gates=(), fingerprints={}, measurements={}, legs=(), floor=None, findings=())
    assert render_markdown(bare).startswith("## ✓ onepolicy: pass")
