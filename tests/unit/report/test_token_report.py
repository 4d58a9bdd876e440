"""Screen, Markdown, JUnit and JSON of a token report: they fit, they say what was found, hostile text stays text."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from functools import cache

import pytest
import scenarios_tokens
from rich.cells import cell_len

from onepolicy.report import fidelity
from onepolicy.same_tokens import check_rollouts
from onepolicy.types import Severity, TokenReport

HOSTILE = "r\x1b[31m|`<b>\u202e</testcase>"


@cache
def scenario(code: str) -> TokenReport:
    return scenarios_tokens.SCENARIOS[code]()


@pytest.mark.parametrize("code", scenarios_tokens.SCENARIOS)
@pytest.mark.parametrize("width", [78, 100])
def test_the_screen_fits_and_begins_with_the_verdict(code: str, width: int):
    lines = fidelity.render(scenario(code), width=width).splitlines()
    assert max(map(cell_len, lines)) <= width and len(lines) <= 70
    assert lines[0].split()[0] == scenario(code).outcome.value.upper()
    assert any(code in line for line in lines)


@pytest.mark.parametrize("code", scenarios_tokens.SCENARIOS)
def test_a_headline_never_says_that_all_is_well_beside_a_warning(code: str):
    report = scenario(code)
    loud = [f for f in report.findings if f.severity is not Severity.INFO]
    said = fidelity.headline(report)
    assert not loud or said.startswith("nothing fails, but ") or report.outcome.value != "pass"


def test_counts_of_findings_stand_with_the_findings_alone():
    report = scenario("stop-token-not-trained")
    assert report.counts["stop-token-not-trained"] == 1
    assert fidelity.counted(report) == f"1 record · {report.counts['tokens']} tokens"


def test_every_finding_shows_its_place_even_where_two_share_one():
    row = {"id": "a", "response_ids": [1, 2, 3], "rollout_logprobs": [-1.0], "usage": {"completion_tokens": 9}}
    text = fidelity.render(check_rollouts([{**row, "stop_token_ids": [7], "finish_reason": "stop"}]))
    assert text.count("at record 1") == 2  # counts-disagree, stop-token-missing


@pytest.mark.parametrize("color", [False, True])
def test_hostile_text_stays_text(color: bool):
    report = check_rollouts([{"id": HOSTILE, "response_ids": [1, -5, 3], "rollout_logprobs": [-1.0]}])
    screen = fidelity.render(report, color=color)
    assert "\x1b[31m|" not in screen and "\u202e" not in screen
    assert not {"\x1b", "\u202e"} & set(fidelity.render_markdown(report))
    assert "``" in fidelity.render_markdown(report)  # the name stands in code, where tags are text
    ET.fromstring(fidelity.render_junit(report))
    assert json.loads(fidelity.to_json(report))["outcome"] == "drift"
