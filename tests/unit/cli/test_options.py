"""Groups of options: declared once, offered by several verbs, each with its own defaults."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest

from onepolicy.cli import options
from onepolicy.cli.main import command
from onepolicy.errors import UsageError

NAMES = [f.name for f in fields(options.Draws)]


def declared(verb: str) -> dict[str, Any]:
    root: Any = command()
    return {p.name: p for p in root.commands[verb].params}


def test_record_and_check_declare_the_same_draws() -> None:
    record, check = declared("record"), declared("check")
    for name in NAMES:
        a, b = record[name], check[name]
        assert (a.opts, a.help, a.metavar) == (b.opts, b.help, b.metavar)
    own = {name for name in NAMES if record[name].default != check[name].default}
    assert own == {"max_tokens"}
    assert (record["max_tokens"].default, check["max_tokens"].default) == (128, 64)


def test_they_stand_where_the_group_stood_and_come_in_as_one() -> None:
    got: list[tuple[int, options.Draws, bool]] = []

    @options.expanded
    def verb(first: int, draws: options.Draws = options.DRAWS, last: bool = False) -> int:
        got.append((first, draws, last))
        return 0

    assert list(inspect.signature(verb).parameters) == ["first", *NAMES, "last"]
    given = {name: getattr(options.DRAWS, name) for name in NAMES}
    assert verb(first=3, last=True, **{**given, "top_p": 0.5}) == 0
    assert got == [(3, replace(options.DRAWS, top_p=0.5), True)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"min_p": float("inf")}, "--min-p inf"),
        ({"top_p": 0.0}, "--top-p 0"),
    ],
)
def test_draws_that_are_none_are_refused(changed: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(options.DRAWS, **changed).params()


def test_a_top_k_of_minus_one_is_off() -> None:
    assert replace(options.DRAWS, top_k=-1).params().top_k == 0
