"""The one screen: it fits, it hides nothing that was withheld, and hostile text stays text."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache

import pytest
from rich.cells import cell_len
from scenarios import SCENARIOS, batch, judged

from onepolicy.errors import MissingExtra
from onepolicy.report import RENDERERS
from onepolicy.report.text import escaped, render
from onepolicy.types import Finding, Outcome, Report, Severity


@cache
def scenario(code: str) -> Report:
    return SCENARIOS[code]()


@cache
def healthy() -> Report:
    return judged(batch())


@pytest.mark.parametrize("code", SCENARIOS)
@pytest.mark.parametrize("width", [78, 100])
def test_it_is_one_screen_and_fits_the_width(code: str, width: int):
    lines = render(scenario(code), width=width).splitlines()
    assert len(lines) <= (58 if width < 80 else 52)
    assert max(map(cell_len, lines)) <= width
    assert lines[0].split()[0] == scenario(code).outcome.value.upper()


def test_a_pass_is_at_most_forty_lines():
    lines = render(healthy()).splitlines()
    assert 24 <= len(lines) <= 40
    assert lines[0] == " PASS  the two sides agree within every bound"
    assert "judge REPORT --bounds strict" in lines[-1]


def test_every_part_is_there():
    text = render(healthy())
    for part in (
        "bounds   bf16",
        "2,560 drawn tokens · 64 sequences",
        "Bounds",
        "reply of 40 tokens",
        "Gap",
        "Worst tokens",
    ):
        assert part in text
    for key in ("kl_sampler_scorer_k3/mean", "abs_log_ratio/mean", "ratio_bias/mean"):
        assert key in text
    for label in ("p50  |d|", "p95  |d|", "p99  |d|", "max  |d|", "KL k3", "mean ratio", "bit-equal", "(normalised)"):
        assert label in text


def test_numbers_below_a_withholding_finding_are_unjudged():
    text = render(scenario("semantics-differ"))
    assert text.count("unjudged") >= 5  # three gates, two sections
    assert "pass" not in text.split("Bounds")[1].split("What the gap")[0].replace("to pass", "")


def test_without_colours_there_is_no_escape_character():
    for code in SCENARIOS:
        assert "\x1b" not in render(scenario(code))
    assert "\x1b[" in render(healthy(), color=True)


HOSTILE = {
    "terminal codes": "\x1b[2J\x1b]0;owned\x07",
    "markup": "[red]x[/red] [link=http://e]y[/link]",
    "newlines": "a\nb\r\nc\td",
    "other direction": "abc\u202edef\u2066x",
    "invisible": "a\u200bb\ufeffc",
    "half a character": "\ud800",
    "wide": "漢字" * 200,
    "long": "x" * 10_000,
    "combining": "e" + "\u0301" * 500,
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("color", [False, True])
def test_hostile_rollout_text_stays_text(what: str, color: bool):
    bad = HOSTILE[what]
    token = {
        "record": bad, "position": 3, "before": bad, "token": bad, "after": bad, "sampler": -1.0, "scorer": -2.0
    }  # fmt: skip
    found = Finding("undecided", Severity.INFO, Outcome.INCONCLUSIVE, bad, place=bad, rivals=(bad,), advice=bad)
    report = replace(
        healthy(),
        findings=(found,),
        fingerprints={bad: {"engine": bad, "model": bad, "versions": {bad: bad}}},
        context={**healthy().context, "tokens": [token], "scores": bad},
        preset=bad,
    )
    text = render(report, width=100, color=color)
    plain = text
    if color:
        assert "\x1b]" not in text and "\x1b[2J" not in text
        plain = "".join(part.partition("m")[2] if i else part for i, part in enumerate(text.split("\x1b[")))
    assert all(c == "\n" or c.isprintable() for c in plain)
    assert max(map(cell_len, plain.splitlines())) <= 100
    assert len(plain.splitlines()) <= 90
    if what == "markup":
        assert "[red]x[/red]" in text


def test_escaped_is_one_printable_line():
    assert escaped("a\nb\x1b\u202e\ud800") == "a\\nb\\x1b\\u202e\\ud800"
    assert escaped("x" * 10, 5) == "xxxx…"
    assert escaped("é漢") == "é漢"


def test_many_kinds_of_findings_are_named_and_not_shown_whole():
    codes = ["kl-above-bound", "gap-above-bound", "token-above-bound", "above-bound", "ratio-biased", "undecided"]
    codes += ["too-few-tokens", "not-measured"]
    found = tuple(Finding(c, Severity.FAIL, Outcome.DRIFT, c) for c in codes)
    text = render(replace(healthy(), findings=found, outcome=Outcome.DRIFT))
    assert "and 3 more: undecided, too-few-tokens, not-measured" in text


def test_next_points_at_the_most_suspicious_finding():
    assert render(scenario("weights-differ")).splitlines()[-1].endswith("onepolicy explain weights-differ")
    assert "--bounds bitwise" in render(replace(healthy(), preset="strict")).splitlines()[-1]
    assert "explain bitwise" in render(replace(healthy(), preset="bitwise")).splitlines()[-1]


def test_both_engines_are_told_apart():
    told = {
        "sampler": {
            "engine": "vllm", "versions": {"vllm": "0.32.0"}, "model": "tiny", "dtype": "bfloat16",
            "kv_cache_dtype": "fp8", "device": "cuda",
        },
        "scorer": {"engine": "hf", "versions": {"transformers": "5.19.0"}, "model": "tiny"},
    }  # fmt: skip
    lines = render(replace(healthy(), fingerprints=told, context={})).splitlines()
    assert lines[1] == "  sampler  vllm 0.32.0 · tiny · bfloat16 · KV cache fp8 · cuda"
    assert lines[2] == "  scorer   hf (transformers 5.19.0) · tiny · dtype not declared"


def test_a_report_without_context_still_renders():
    bare = replace(healthy(), context={}, gates=(), fingerprints={}, measurements={})
    assert render(bare).splitlines()[0].startswith(" PASS")


def test_without_rich_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    for name in [n for n in sys.modules if n.startswith(("rich", "onepolicy.report.screen"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(MissingExtra, match=r"pip install 'onepolicy\[cli\]'"):
        render(healthy())


def test_the_table_of_renderers_gives_text():
    for name, renderer in RENDERERS.items():
        assert isinstance(renderer(healthy()), str), name
