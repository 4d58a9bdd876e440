"""Tool calls: the same text, the same JSON, or neither."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.tokens.templates.tool_calls import (
    CALL_CLASSES,
    argument_fate,
    compare_calls,
    json_values,
    same_json,
    without_json,
)

#: sampled, rendered, equal as JSON, classes
PAIRS: list[tuple[str, str, bool, set[str]]] = [
    ('{"a": 1}', '{"a": 1}', True, set()),
    ('{"a":1,"b":"é"}', '{"a": 1, "b": "é"}', True, {"separators"}),
    ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', True, {"key-order"}),
    ('{"a": "é"}', '{"a": "\\u00e9"}', True, {"escapes"}),
    ('{"a": "/"}', '{"a": "\\/"}', True, {"escapes"}),
    ('{"a": 1.0, "b": 1e3}', '{"a": 1, "b": 1000.0}', True, {"numbers"}),
    ('{"a": 1}', '{\n  "a": 1\n}', True, {"indent"}),
    ('{"a":"é","b":1}', '{"b": 1, "a": "\\u00e9"}', True, {"key-order", "escapes", "separators"}),
    ('{"n": "f", "a": {"x": 1}}', '{"n": "f", "a": "{\\"x\\": 1}"}', False, {"double-encoded"}),
    ('{"n": "f", "a": "{\\"x\\": 1}"}', '{"n": "f", "a": {"x": 1}}', False, {"decoded"}),
    ('{"a": true}', '{"a": 1}', False, {"values-differ"}),
    ('{"a": null}', '{}', False, {"values-differ"}),
    ('<t>{"a": true}</t>', "<t>{'a': True}</t>", False, {"python-repr"}),
    ('{"a": 1}', "no call at all", False, {"missing"}),
    ('{"a": 1}{"b": 2}', '{"a": 1}', False, {"missing"}),
    ('<t>{"a": 1}</t>', '<t>\n{"a": 1}</t>', True, {"around"}),
]  # fmt: skip


@pytest.mark.parametrize(("sampled", "rendered", "equal", "classes"), PAIRS)
def test_two_calls(sampled: str, rendered: str, equal: bool, classes: set[str]) -> None:
    change = compare_calls(sampled, rendered)
    assert change is not None and (change.equal_json, set(change.classes)) == (equal, classes)
    assert change.equal_text == (not classes) and classes <= set(CALL_CLASSES)
    assert json.loads(json.dumps(change.to_json()))["equal_as_json"] is equal


def test_a_text_without_calls() -> None:
    assert compare_calls("just text { no json", '{"a": 1}') is None
    assert list(json_values("[1, 2] {x} [")) == []
    assert [v for _, _, v in json_values('a {"x": {"y": 1}} [{"z": 2}]')] == [{"x": {"y": 1}}, [{"z": 2}]]
    assert [v for _, _, v in json_values('{"x": {"y": 1}}', nested=True)] == [{"x": {"y": 1}}, {"y": 1}]
    assert without_json('a{"x": 1}b{"y": 2}c', 1) == 'a\0b{"y": 2}c'


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(min_size=1, max_size=4), VALUES, min_size=1, max_size=4)


@given(OBJECTS, st.booleans(), st.booleans(), st.sampled_from([None, (",", ":"), (" , ", " : ")]))
def test_other_spellings_of_one_value_are_equal_as_json(value: Any, ascii_only: bool, order: bool, gaps: Any) -> None:
    a = json.dumps(value, ensure_ascii=False)
    b = json.dumps(value, ensure_ascii=ascii_only, sort_keys=order, separators=gaps)
    change = compare_calls(a, b)
    assert change is not None and change.equal_json and change.equal_text == (a == b)
    assert bool(change.classes) == (a != b)


@given(OBJECTS, OBJECTS)
def test_other_values_are_never_equal(x: Any, y: Any) -> None:
    change = compare_calls(json.dumps(x), json.dumps(y))
    assert change is not None and change.equal_json == same_json(x, y)


@pytest.mark.parametrize(
    ("rendered", "equal", "classes"),
    [
        ('<c>{"name": "f", "arguments": {"b": "é", "a": null}}</c>', True, ()),
        ('f\n```json\n{"b": "é", "a": null}\n```', True, ()),
        ('<c>{"arguments":{"b":"é","a":null}}</c>', True, ("separators",)),
        ('{"arguments": "{\\"b\\": \\"é\\", \\"a\\": null}"}', False, ("double-encoded",)),
        ("arguments: {'b': 'é', 'a': None}", False, ("python-repr",)),
        ('{"arguments": {"b": "e"}}', False, ("values-differ",)),
        ("f()", False, ("values-differ",)),
    ],
)
def test_arguments_in_a_rendered_call(rendered: str, equal: bool, classes: tuple[str, ...]) -> None:
    change = argument_fate({"b": "é", "a": None}, rendered)
    assert change is not None and (change.equal_json, change.classes) == (equal, classes)


def test_arguments_in_a_format_of_its_own_are_no_fault() -> None:
    assert argument_fate({"town": "Cork", "day": "2"}, "<f=tide><town>Cork</town><day>2</day></f>") is None
