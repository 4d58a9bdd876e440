"""A report as JSON: lossless, stable, and strict about what it reads."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from full import REPORTS, checked
from hypothesis import given, settings
from hypothesis import strategies as st
from scenarios import OF_NUMBERS, SCENARIOS

from onepolicy.errors import ContentError
from onepolicy.report.json import from_json, to_json
from onepolicy.sums import Sums
from onepolicy.types import Report


@cache
def scenario(code: str) -> Report:
    return SCENARIOS[code]()


@pytest.mark.parametrize("code", OF_NUMBERS)
def test_every_kind_of_report_comes_back_the_same(code: str):
    report = scenario(code)
    text = to_json(report)
    back = from_json(text)
    assert to_json(back) == text
    assert back.sums == report.sums
    assert (back.outcome, back.findings, back.gates) == (report.outcome, report.findings, report.gates)
    assert repr(back.measurements) == repr(report.measurements)  # NaN is not equal to itself


@pytest.mark.parametrize("code", OF_NUMBERS)
def test_no_number_is_nan_or_infinite(code: str):
    json.loads(to_json(scenario(code)), parse_constant=lambda name: pytest.fail(name))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_any_context_comes_back(context: dict):
    report = replace(scenario("undecided"), context=context)
    assert repr(from_json(to_json(report)).context) == repr(context)


def test_numpy_numbers_and_tuples_are_written_as_numbers_and_lists():
    context = {"n": np.int64(3), "x": np.float32(0.5), "nan": np.float64("nan"), "pair": (1, 2)}
    back = from_json(to_json(replace(scenario("undecided"), context=context))).context
    assert math.isnan(back.pop("nan"))
    assert back == {"n": 3, "x": 0.5, "pair": [1, 2]}


@pytest.mark.parametrize("what", REPORTS)
def test_legs_and_floor_come_back_the_same(what: str):
    report = REPORTS[what]()
    text = to_json(report)
    back = from_json(text)
    assert to_json(back) == text
    assert back.floor == report.floor
    assert repr(back.legs) == repr(report.legs)  # NaN is not equal to itself
    again = [Sums.from_dict(x.sums) for x in back.legs if x.sums is not None]
    assert again and again == [Sums.from_dict(x.sums) for x in report.legs if x.sums is not None]


def test_sums_stand_on_one_line_each():
    lines = to_json(checked()).splitlines()
    assert sum(line.startswith(' "sums": ') for line in lines) == len(checked().legs) + 1
    assert len(lines) < 12_000


def test_a_report_from_before_legs_and_floor_still_reads():
    data = json.loads(to_json(scenario("undecided")))
    assert data.pop("legs") == [] and data.pop("floor") is None
    back = from_json(json.dumps(data))
    assert (back.legs, back.floor) == ((), None)
    assert to_json(back) == to_json(scenario("undecided"))


@settings(deadline=None)
@given(VALUES)
def test_any_facts_of_a_leg_come_back(facts: object):
    leg = replace(checked().legs[0], facts={"found": facts})
    back = from_json(to_json(replace(scenario("undecided"), legs=(leg,))))
    assert repr(back.legs[0].facts) == repr(leg.facts)


def broken(**changes: object) -> str:
    data = json.loads(to_json(scenario("undecided")))
    return json.dumps({**data, **changes})


LEG = json.loads(to_json(replace(scenario("undecided"), legs=checked().legs[-1:])))["legs"][0]
FLOOR = json.loads(to_json(replace(scenario("undecided"), floor=checked().floor)))["floor"]

BAD = {
    "empty": ("", "not JSON"),
    "not JSON": ("{", "not JSON"),
    "a list": ("[]", "no key 'onepolicy_report'"),
    "another file": ('{"a": 1}', "no key 'onepolicy_report'"),
    "NaN as a number": ('{"onepolicy_report": NaN}', "NaN is not a number of JSON"),
    "too deep": ("[" * 100_000, "not JSON"),
    "a later format": ('{"onepolicy_report": 99}', "has format 99; this version reads 1"),
    "no sums": ('{"onepolicy_report": 1}', "it has no sums"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_report_is_refused_in_one_line(what: str):
    text, said = BAD[what]
    with pytest.raises(ContentError) as err:
        from_json(text)
    assert said in str(err.value) and "\n" not in str(err.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"outcome": "great"}, "outcome is 'great', wanted one of pass"),
        ({"preset": 3}, "preset is a int, wanted a str"),
        ({"findings": {}}, "findings is a dict, wanted a list"),
        ({"findings": [{}]}, "findings[0].code is a NoneType"),
        ({"measurements": {"x": {"metric": "x", "value": "0.1"}}}, "measurements.x.value is a str, wanted a number"),
        ({"measurements": {"x": {"metric": "x", "n": True}}}, "measurements.x.n is a bool"),
        ({"gates": [[]]}, "gates[0] is a list, wanted a dict"),
        ({"context": None}, "context is a NoneType"),
        ({"sums": {}}, "not saved sums"),
        ({"legs": None}, "legs is a NoneType, wanted a list"),
        ({"legs": [3]}, "legs[0] is a int, wanted a dict"),
        ({"legs": [{}]}, "legs[0].key is a NoneType"),
        ({"legs": [{**LEG, "question": "why"}]}, "legs[0].question is 'why', wanted one of same function"),
        ({"legs": [{**LEG, "ran": "maybe"}]}, "legs[0].ran is 'maybe', wanted one of run, not run, failed"),
        ({"legs": [{**LEG, "outcome": "fine"}]}, "legs[0].outcome is 'fine'"),
        ({"legs": [{**LEG, "sums": {}}]}, "legs[0].sums: these are not saved sums"),
        ({"legs": [{**LEG, "sums": [1]}]}, "legs[0].sums is a list, wanted a dict"),
        ({"legs": [{**LEG, "facts": []}]}, "legs[0].facts is a list, wanted a dict"),
        ({"legs": [{**LEG, "gates": {}}]}, "legs[0].gates is a dict, wanted a list"),
        ({"floor": []}, "floor is a list, wanted a dict"),
        ({"floor": {**FLOOR, "source": "guessed"}}, "floor.source is 'guessed', wanted one of measured"),
        ({"floor": {**FLOOR, "rms": "0.1"}}, "floor.rms is a str, wanted a number"),
        ({"floor": {**FLOOR, "scale": [[0, 1]]}}, "floor.scale[0] has 2 values, wanted 4"),
        ({"floor": {**FLOOR, "variants": [{"a": "x"}]}}, "floor.variants[0].b is a NoneType"),
    ],
)
def test_a_field_of_another_kind_is_refused_with_its_place(changes: dict, said: str):
    with pytest.raises(ContentError, match="not") as err:
        from_json(broken(**changes))
    assert said in str(err.value) and "\n" not in str(err.value)


def test_sums_of_an_unknown_view_are_refused():
    data = json.loads(to_json(scenario("undecided")))
    data["sums"]["view"] = "drawm"
    with pytest.raises(ContentError, match=r"sums\.view is 'drawm', wanted one of drawn, loss, fixed"):
        from_json(json.dumps(data))


def test_sums_of_a_leg_with_an_unknown_view_are_refused():
    leg = json.loads(to_json(checked()))["legs"][1]
    leg["sums"]["view"] = "drawm"
    with pytest.raises(ContentError, match=r"legs\[0\]\.sums\.view is 'drawm', wanted one of drawn, loss, fixed"):
        from_json(broken(legs=[leg]))


def test_a_finding_of_a_later_version_is_refused():
    data = json.loads(to_json(scenario("undecided")))
    data["findings"][0]["code"] = "moon-phase"
    with pytest.raises(ContentError, match="a finding 'moon-phase', which this version does not know"):
        from_json(json.dumps(data))


def test_a_pair_of_another_length_is_refused():
    data = json.loads(to_json(scenario("too-few-tokens")))
    data["gates"][0]["would_decide"] = [1]
    with pytest.raises(ContentError, match=r"gates\[0\]\.would_decide has 1 values, wanted 2"):
        from_json(json.dumps(data))
