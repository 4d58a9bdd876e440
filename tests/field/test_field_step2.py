"""Public faults as small inputs (`cases/step2.jsonl`): what the legs of a check say of them.

C26 is a server whose scores of a prompt depend on what it has served before, with the prefix cache on. The leg
`sampler-cache` is promised to find that a cached prefix changes values, where, and by how much. It looks at replies
behind a cached prompt where tokens were drawn, and at all tokens where, as here, none were. Which request filled the
cache, and with what, it does not say.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy.check import Choices, check
from onepolicy.codes import CODES
from onepolicy.engines.base import Switch, using_of
from onepolicy.legs import LEGS
from onepolicy.records import from_records
from onepolicy.rollouts import Rollouts
from onepolicy.types import LegResult, Outcome, Ran, Report, Scoring, Severity, Values

LINES = (Path(__file__).parent / "cases" / "step2.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}
#: The names of the cases -> (leg, its code).
LEG_OF = {"prefix-cache-corrupts-prompt-logprobs": ("sampler-cache", "depends-on-cache")}
#: "compare with an absolute tolerance of 2e-3"
NEAR = {"abs": 2e-3}


class Server:
    """The case's server: its scores of the two prompts are those of the run with that cache and that order. The case
    names no precision; its sound runs agree to the last digit given."""

    NAME, SAMPLES, SCORES, HEAVY = "server-of-the-case", False, True, False
    SWITCHES = {  # noqa: RUF012
        "path": Switch(str, "decode", "how it scores", ("decode",), live=True),
        "cache": Switch(str, "cold", "prompts anew, or from the prefix cache", ("cold", "warm"), live=True),
    }

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.runs, self.prompts = case["input"]["runs"], case["input"]["prompts"]

    def fingerprint(self) -> Mapping[str, Any]:
        return {"engine": self.NAME, "dtype": "float32"}

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        now = {"cache": "cold", "path": "decode", **using_of(self, using)}
        ids = [rollouts.token_ids[rollouts.sequence(i)].tolist() for i in range(len(rollouts))]
        order = [next(name for name, prompt in self.prompts.items() if prompt == x) for x in ids]
        run = next(r for r in self.runs if r["order"] == order and r["cache"] == (now["cache"] == "warm"))
        values = np.concatenate([[np.nan, *run[name]] for name in order])
        logprobs = Values(np.nan_to_num(values), ~np.isnan(values))
        said = {**self.fingerprint(), **now}
        return Scoring(logprobs, semantics="raw", dtype="float32", fingerprint=said, scoring_id=secrets.token_hex(4))

    def close(self) -> None: ...


def recorded(case: Mapping[str, Any], order: list[str]) -> Rollouts:
    """The prompts in that order, nothing drawn, with the server's scores without the cache."""
    rows = [
        {"record_id": name, "token_ids": ids, "drawn": [0] * len(ids), "logprob_semantics": "raw"}
        for name in order
        for ids in [case["input"]["prompts"][name]]
    ]
    rollouts = from_records(rows)
    return rollouts.with_scoring("sampler", Server(case).score(rollouts))


def checked(case: Mapping[str, Any], order: list[str]) -> tuple[Report, LegResult]:
    """A check with that leg alone. The scorer is the same server, without its cache: the pair agrees."""
    key = LEG_OF[case["expected"]["finding"]][0]
    choices = Choices(legs=[key])
    rollouts = recorded(case, order)
    report, _ = check(rollouts, Server(case), sampler=Server(case), view="fixed", bounds="fp32", choices=choices)
    return report, next(x for x in report.legs if x.key == key)


def test_every_case_has_a_row_in_the_table() -> None:
    assert {case["expected"]["finding"] for case in CASES.values()} == set(LEG_OF)
    assert all(leg in LEGS and LEGS[leg].code == code and code in CODES for leg, code in LEG_OF.values())


def test_c26_a_cached_prefix_that_changes_values_is_drift_and_placed() -> None:
    case = CASES["C26"]
    wanted = case["expected"]
    first = next(name for name in case["input"]["prompts"] if name != wanted["affected"]["prompt"])
    report, leg = checked(case, [first, wanted["affected"]["prompt"]])
    assert (leg.ran, leg.outcome) == (Ran.DONE, Outcome.DRIFT)
    assert leg.measurements["abs_log_ratio/max"].value == pytest.approx(wanted["max_abs"], **NEAR)
    found = next(f for f in report.findings if f.code == "depends-on-cache")
    assert found.severity is Severity.FAIL
    # scores[i] is of token i + 1
    at = wanted["affected"]["score_positions"]
    assert found.place == f"first bad token: record {wanted['affected']['prompt']}, position {at[0] + 1}"
    equal = leg.measurements["bit_equal/share"]
    assert equal.value == pytest.approx(1 - len(at) / equal.n)
    assert max(at) + 1 < wanted["shared_prefix_tokens"]  # what is wrong lies inside the shared prefix


def test_c26_the_other_order_and_no_cache_are_sound() -> None:
    case = CASES["C26"]
    report, leg = checked(case, ["p2", "p1"])
    assert leg.ran is Ran.DONE
    assert leg.measurements["bit_equal/share"].value == 1
    assert not {f.code for f in report.findings if f.severity is Severity.FAIL}
    off = [run for run in case["input"]["runs"] if not run["cache"]]
    assert len(off) == 2
    assert all(off[0][name] == off[1][name] for name in case["input"]["prompts"])
