"""Tool calls that are parsed from a reply and rendered again: the same text, the same JSON, or neither."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.tokens.templates.edits import common_prefix, shorten

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')
_MOST = 200_000  # characters that are searched for JSON
_DECODER = json.JSONDecoder()

#: What can become of a call -> in words.
CALL_CLASSES: dict[str, str] = {
    "key-order": "its keys stand in another order",
    "separators": "the white space between its parts is another",
    "indent": "it is spread over lines",
    "escapes": "letters are written as escapes, or escapes as letters",
    "numbers": "a number is written otherwise",
    "double-encoded": "its arguments are encoded twice: a JSON text inside of JSON",
    "decoded": "its arguments were a JSON text and are an object now",
    "python-repr": "its arguments are written as Python, which is no JSON",
    "values-differ": "its values are other ones",
    "missing": "it is not there",
    "around": "the call is the same, the text around it is not",
}


@dataclass(frozen=True, slots=True)
class CallChange:
    """Sampled and rendered text of the calls. `classes`: keys of `CALL_CLASSES`. `first`: first differing character."""

    sampled: str
    rendered: str
    equal_text: bool
    equal_json: bool
    classes: tuple[str, ...] = ()
    first: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "sampled": shorten(self.sampled),
            "rendered": shorten(self.rendered),
            "equal_as_text": self.equal_text,
            "equal_as_json": self.equal_json,
            "classes": list(self.classes),
            "first_diff_char": self.first,
        }


def json_values(text: str, *, nested: bool = False) -> Iterator[tuple[int, int, Any]]:
    """(start, stop, value) of every JSON object or list of objects in a text; `nested`: those inside others as well."""
    at, text = 0, text[:_MOST]
    starts = re.compile(r"[{\[]")
    while (hit := starts.search(text, at)) is not None:
        at = hit.start()
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        if isinstance(value, dict) or (value and isinstance(value[0], dict)):
            yield at, end, value
            at = at + 1 if nested else end
        else:
            at += 1


def without_json(text: str, n: int) -> str:
    """A text with its first n JSON objects taken out."""
    out, at = [], 0
    for start, end, _ in list(json_values(text))[:n]:
        out.append(text[at:start])
        at = end
    return "\0".join([*out, text[at:]])


def compare_calls(sampled: str, rendered: str) -> CallChange | None:
    """The calls in two texts, one after another; None where the sampled text has no JSON at all.

    `rendered` may go on after its calls: only as many as were sampled are compared.
    """
    ours = list(json_values(sampled))
    if not ours:
        return None
    theirs = list(json_values(rendered))[: len(ours)]
    a = "\n".join(sampled[s:e] for s, e, _ in ours)
    b = "\n".join(rendered[s:e] for s, e, _ in theirs)
    if a == b:
        same = sampled == rendered[: len(sampled)]
        return CallChange(a, b, same, True, () if same else ("around",), None)
    first = common_prefix(a, b)
    if len(theirs) < len(ours):
        classes = ("python-repr",) if _python_repr([v for _, _, v in ours], rendered) else ("missing",)
        return CallChange(a, b, False, False, classes, first)
    pairs = list(zip(ours, theirs, strict=True))
    classes = {c for x, y in pairs for c in _classes(x[2], y[2], sampled[x[0] : x[1]], rendered[y[0] : y[1]])}
    return CallChange(a, b, False, not classes & _NOT_EQUAL, _in_order(classes), first)


_NOT_EQUAL = {"double-encoded", "decoded", "python-repr", "values-differ", "missing"}


def _in_order(classes: set[str]) -> tuple[str, ...]:
    return tuple(c for c in CALL_CLASSES if c in classes)


def _classes(x: Any, y: Any, a: str, b: str) -> set[str]:
    """What differs between two JSON texts with the values x and y."""
    if a == b:
        return set()
    if not same_json(x, y):
        return {_unequal(x, y)}
    return spelling(a, b)


def same_json(x: Any, y: Any) -> bool:
    """Equal as JSON: `True` is not 1, and the order of keys does not count; 1 and 1.0 are one number."""
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(same_json(v, y[k]) for k, v in x.items())
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(same_json(*pair) for pair in zip(x, y, strict=True))
    if isinstance(x, bool) or isinstance(y, bool):
        return x is y
    return x == y


def _unequal(x: Any, y: Any) -> str:
    """Encoded twice somewhere, or other values."""
    if same_json(x, _opened(y)):
        return "double-encoded"
    return "decoded" if same_json(_opened(x), y) else "values-differ"


def _opened(value: Any) -> Any:
    """A value with every text that is JSON itself replaced by what it says, once."""
    if isinstance(value, dict):
        return {k: _opened(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_opened(v) for v in value]
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def spelling(a: str, b: str) -> set[str]:
    """How two texts of equal JSON differ in writing."""
    x, y = _TOKEN.findall(a), _TOKEN.findall(b)
    out: set[str] = set()
    if [_meaning(t) for t in x] != [_meaning(t) for t in y]:
        out.add("key-order")
        x, y = sorted(x, key=_meaning), sorted(y, key=_meaning)
    for s, t in zip(x, y, strict=False):
        if s != t:
            out.add("escapes" if s.startswith('"') else "numbers")
    gaps_a, gaps_b = _TOKEN.sub("", a), _TOKEN.sub("", b)
    if ("\n" in gaps_a) != ("\n" in gaps_b):
        out.add("indent")
    elif gaps_a != gaps_b:
        out.add("separators")
    return out


def _meaning(token: str) -> str:
    """A token of JSON in one spelling: strings without escapes, numbers by value."""
    try:
        value = json.loads(token)
    except ValueError:
        return token
    return f'"{value}' if isinstance(value, str) else repr(float(value)) if type(value) in (int, float) else repr(value)


def _python_repr(values: Sequence[Any], rendered: str) -> bool:
    return any(str(inner) in rendered for v in values for inner in _objects(v))


def _objects(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield value
    for v in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(v)


def argument_fate(arguments: dict[str, Any], rendered: str) -> CallChange | None:
    """What a rendered call makes of these arguments, against their usual spelling; None where it writes them in a way
    of its own that is no JSON (tags, `name=value`) but has all their values."""
    usual = json.dumps(arguments, ensure_ascii=False)
    for start, end, value in json_values(rendered, nested=True):
        if same_json(value, arguments):
            text = rendered[start:end]
            classes = _in_order(spelling(usual, text)) if text != usual else ()
            return CallChange(
                usual, text, text == usual, True, classes, common_prefix(usual, text) if classes else None
            )
    for start, end, text in _texts(rendered):
        if same_json(_opened(text), arguments):
            return CallChange(usual, rendered[start:end], False, False, ("double-encoded",), 0)
    if str(arguments) in rendered:
        return CallChange(usual, str(arguments), False, False, ("python-repr",), 1)
    leaves = [str(leaf) for leaf in _leaves(arguments) if isinstance(leaf, str)]
    if all(leaf in rendered for leaf in [*leaves, *arguments]):
        return None
    return CallChange(usual, shorten(rendered), False, False, ("values-differ",), None)


def _texts(rendered: str) -> Iterator[tuple[int, int, str]]:
    """Every JSON string in a text, wherever it stands."""
    for hit in re.finditer(r'"(?:[^"\\]|\\.)*"', rendered[:_MOST]):
        try:
            yield hit.start(), hit.end(), json.loads(hit.group())
        except ValueError:
            continue


def _leaves(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        yield value
        return
    for v in inner:
        yield from _leaves(v)
