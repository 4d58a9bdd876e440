"""The one screen: it fits, it hides nothing that was withheld, and hostile text stays text."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import cache

import pytest
from full import HOSTILE, REPORTS, checked, other_leg, poisoned
from rich.cells import cell_len
from scenarios import OF_NUMBERS, SCENARIOS, batch, judged

from onepolicy.errors import MissingExtra
from onepolicy.report import RENDERERS
from onepolicy.report.text import escaped, render
from onepolicy.types import Finding, Gate, Outcome, Question, Report, Severity


@cache
def scenario(code: str) -> Report:
    return SCENARIOS[code]()


@cache
def healthy() -> Report:
    return judged(batch())


@pytest.mark.parametrize("code", OF_NUMBERS)
@pytest.mark.parametrize("width", [78, 100])
def test_it_is_one_screen_and_fits_the_width(code: str, width: int):
    lines = render(scenario(code), width=width).splitlines()
    room = 28 if scenario(code).legs else 0
    assert len(lines) <= (58 if width < 80 else 53) + room
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
    for code in OF_NUMBERS:
        assert "\x1b" not in render(scenario(code))
    assert "\x1b[" in render(healthy(), color=True)


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("color", [False, True])
def test_hostile_text_stays_text(what: str, color: bool):
    text = render(poisoned(HOSTILE[what]), width=100, color=color)
    plain = text
    if color:
        assert "\x1b]" not in text and "\x1b[2J" not in text
        plain = "".join(part.partition("m")[2] if i else part for i, part in enumerate(text.split("\x1b[")))
    assert all(c == "\n" or c.isprintable() for c in plain)
    assert max(map(cell_len, plain.splitlines())) <= 100
    assert len(plain.splitlines()) <= 150
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


# -- a check with legs and a floor -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", REPORTS)
@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_whole_check_fits_the_width(what: str, width: int):
    lines = render(REPORTS[what](), width=width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= (135 if width < 80 else 105)
    assert lines[0].split()[0] == REPORTS[what]().outcome.value.upper()


def test_a_healthy_check_stays_readable():
    assert len(render(checked()).splitlines()) <= 76


def section(text: str, title: str) -> str:
    """The lines of one section of the screen."""
    return text.split(f"\n{title}  ")[1].split("\n\n")[0]


def test_the_order_of_the_sections():
    text = render(checked())
    titles = ["Findings", "Bounds", "What the gap does", "Legs", "Gap by position", "Gap ", "Worst tokens", "Next"]
    places = [text.index(f"\n{t}") for t in titles]
    assert places == sorted(places)


def test_the_legs_stand_by_question():
    lines = section(render(checked()), "Legs").splitlines()
    told = [line.split()[0] for line in lines if line.startswith("    ")]
    assert told == [x.key for x in checked().legs if x.ran == "run" and x.key != "contract"] + ["contract"]
    assert [line.strip() for line in lines if line.strip() in list(Question)] == [
        "same function",
        "rounding",
        "meaning",
    ]
    path = next(line for line in lines if "sampler-path" in line)
    assert re.search(r"prefill against decode by forced ids +10,176 +0\.0\d+ +0\.\d+ +1\.?\d* +pass", path)


def test_legs_that_were_not_run_stand_by_reason():
    text = " ".join(section(render(checked()), "Legs").split())
    assert "not run: sampler-load (engine 'vllm' is no server);" in text
    assert "reference-sampler, reference-scorer (no --reference was named)" in text
    failed = " ".join(section(render(REPORTS["float32 failed"]()), "Legs").split())
    assert "failed: same-function (out of memory: float32 needs 3.1 GiB, 2.0 GiB are free)" in failed


def test_a_leg_that_is_open_says_why():
    gate = Gate(
        "gap_over_floor/rms", 1.5, "required", Outcome.INCONCLUSIVE, 1.0, None, 150, 9.0, why="150 tokens of 200"
    )
    text = render(other_leg(checked(), "sampler-batch", outcome=Outcome.INCONCLUSIVE, gates=(gate,)))
    assert "sampler-batch: gap_over_floor/rms 150 tokens of 200" in text


def test_only_alarms_that_were_raised_are_bounds():
    assert "_from_" not in section(render(checked()), "Bounds")
    late = section(render(REPORTS["a late fault"]()), "Bounds")
    assert re.findall(r"gap_over_floor_from_(\d+)/rms", late) == ["64", "128"]
    everywhere = section(render(REPORTS["a fault"]()), "Bounds")
    assert "alarms at 2 more stretches of positions: see below" in everywhere


def test_positions_have_only_stretches_with_tokens():
    text = section(render(checked()), "Gap by position")
    assert re.findall(r"[\d,]+ to [\d,]+", text) == ["0 to 15", "64 to 127", "16 to 31", "128 to 255", "32 to 63"]
    assert re.search(r"0 to 15 +960 0\.03\d+ +1?0?\.\d+ \[0\.\d+, 1\.\d+\]", text)
    plain = section(render(healthy()), "Gap")
    assert re.search(r"RMS at positions 0 to 15: 0\.0\d+ · 16 to 31: 0\.0\d+", plain)


def test_limits_from_few_clusters_are_not_shown():
    key = "gap_over_floor_from_16/rms"
    few = replace(checked().measurements[key], effective_clusters=3.0, lower=1e-300, upper=1e300)
    text = section(render(replace(checked(), measurements={**checked().measurements, key: few})), "Gap by position")
    assert re.search(r"16 to 31 +1,024 +0\.03\d* +[\d.]+ few clusters", text) and "e+300" not in text


def test_what_the_contract_leg_found():
    said = "contract: applied: temperature=0.7, top_p=0.8; not told apart: min_p"
    assert said in render(checked())
    found = {"old and current": {"tokens": 10, "ratio": 1.0}}
    step = replace(checked().legs[0], key="step-0", facts=found)
    assert "step-0, old and current: tokens 10, ratio 1" in render(replace(checked(), legs=(step,)))


def test_whose_gap_it_is():
    text = " ".join(render(checked()).split())
    assert "whose gap: of the squared gap sampler 53%, scorer 47%; their errors 0.0412 and 0.0388 nats RMS" in text
    assert "against the scorer in float32, correlation 0.05" in text
    none = replace(checked(), context={k: v for k, v in checked().context.items() if k != "ownership"})
    assert "whose gap" not in render(none)


def test_the_suite_and_the_floor_are_named():
    text = render(checked())
    assert "suite    default 1 · 64 prompts · 40 texts · 2 left out" in text
    assert re.search(r"floor    measured 0\.03\d+ nats RMS \(0\.03\d+ to 0\.03\d+\) · full forward, KV decode,", text)
    assert "floor    " not in render(REPORTS["no floor"]())


def test_a_report_with_legs_alone_renders():
    text = render(replace(healthy(), legs=checked().legs))
    assert "Same function: yes" in text and "Legs" in text
