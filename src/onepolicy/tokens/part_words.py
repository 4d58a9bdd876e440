"""How two contents of one part differ, in words. `roles` names the sides: `sampler: ..., scorer: ...`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from onepolicy.tokens import components
from onepolicy.tokens.base import AddedToken

Roles = tuple[str, str]
_MOST = 8  # differences of one part that are spelled out
_WIDE = 90  # characters of a value that are shown


def words(name: str, a: Any, b: Any, roles: Roles) -> list[str]:
    """The differences of the part `name`, most telling first. Empty where the contents are equal."""
    if a == b:
        return []
    return WORDS.get(name, plain)(a, b, roles)


def shown(value: Any) -> str:
    """A value in a line: text in quotes with its backslashes as they are, None as `none`."""
    if value is None:
        return "none"
    text = f'"{_visible(value)}"' if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDE else text[: _WIDE - 1] + "…"


def _visible(text: str) -> str:
    """Line ends, tabs and what cannot be seen as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def sides(label: str, values: Iterable[Any], roles: Roles) -> str:
    """`label: sampler A, scorer B`, the two values as they are given."""
    a, b = values
    return f"{label}: {roles[0]} {a}, {roles[1]} {b}"


def plain(a: Any, b: Any, roles: Roles) -> list[str]:
    """Keys that differ, or the two values."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return [f"{roles[0]} {shown(a)}, {roles[1]} {shown(b)}"]
    keys = sorted({*a, *b})
    return [sides(str(k), (shown(a.get(k)), shown(b.get(k))), roles) for k in keys if a.get(k) != b.get(k)]


def vocabulary_change(a: Mapping[str, int], b: Mapping[str, int]) -> tuple[list[str], list[str], list[str]]:
    """Tokens that only a has, that only b has, and that both have under another id, each in the order of ids."""
    only_a = sorted((t for t in a if t not in b), key=a.__getitem__)
    only_b = sorted((t for t in b if t not in a), key=b.__getitem__)
    moved = sorted((t for t in a if t in b and a[t] != b[t]), key=a.__getitem__)
    return only_a, only_b, moved


def _vocabulary(a: Any, b: Any, roles: Roles) -> list[str]:
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return plain(a, b, roles)
    only_a, only_b, moved = vocabulary_change(a, b)
    out = [] if len(a) == len(b) else [sides("tokens", (len(a), len(b)), roles)]
    for role, tokens in zip(roles, (only_a, only_b), strict=True):
        if tokens:
            out.append(f"{len(tokens)} tokens stand on {role} only: {_some(tokens)}")
    if moved:
        examples = ", ".join(f"{shown(t)} is {a[t]} on {roles[0]} and {b[t]} on {roles[1]}" for t in moved[:3])
        out.append(f"{len(moved)} tokens have another id: {examples}")
    return out


def _some(items: Sequence[Any]) -> str:
    more = ", ..." if len(items) > 4 else ""
    return ", ".join(shown(i) for i in items[:4]) + more


def _merges(a: Any, b: Any, roles: Roles) -> list[str]:
    if not isinstance(a, list) or not isinstance(b, list):
        return plain(a, b, roles)
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    first = [shown(" + ".join(map(str, side[at]))) if at < len(side) else "none" for side in (a, b)]
    out = [] if len(a) == len(b) else [sides("number", (len(a), len(b)), roles)]
    out.append(sides(f"first other one at rank {at}", first, roles))
    keys = [{tuple(map(str, row)) if isinstance(row, list) else str(row) for row in side} for side in (a, b)]
    if keys[0] == keys[1]:
        out.append("only their order differs")
    else:
        counts = [len(keys[0] - keys[1]), len(keys[1] - keys[0])]
        out.append(sides("that the other side lacks", counts, roles))
    return out


def _chain(a: Any, b: Any, roles: Roles) -> list[str]:
    """Components that run one after another."""
    if not all(isinstance(c, list | None) for c in (a, b)):
        return plain(a, b, roles)
    left, right = list(a or []), list(b or [])
    both = [c for c in left if c in right]
    left, right = [c for c in left if c not in both], [c for c in right if c not in both]
    if not left and not right:
        return ["the same steps in another order"]
    out: list[str] = []
    for step in list(left):
        twin = next((c for c in right if c.get("type") == step.get("type")), None)
        if twin is not None:
            out += [_setting(step["type"], k, step.get(k), twin.get(k), roles) for k in _unlike(step, twin)]
            left.remove(step)
            right.remove(twin)
    for role, rest in zip(roles, (left, right), strict=True):
        out += [f"{role} only: {component(step)}" for step in rest]
    return out


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [k for k in sorted({*a, *b}) if a.get(k) != b.get(k)]


def _setting(kind: str, key: str, a: Any, b: Any, roles: Roles) -> str:
    return sides(f"{key} of {kind}", (_value(a), _value(b)), roles)


def _value(value: Any) -> str:
    """A setting; a pattern as its text."""
    if isinstance(value, Mapping) and len(value) == 1:
        value = next(iter(value.values()))
    return shown(value)


def component(step: Mapping[str, Any]) -> str:
    """One step as `Split pattern="\\\\p{N}" behavior="Isolated"`; what is off is left out."""
    told = {k: v for k, v in step.items() if k != "type" and v not in (None, False)}
    return " ".join([str(step.get("type")), *(f"{k}={_value(v)}" for k, v in told.items())])


#: Short texts that show what a pre-tokenizer does, and what each shows.
_SHOW: dict[str, str] = {
    "1234567": "digits",
    "in 2024": "a space before digits",
    "a cat": "a space before a word",
    "don't DON'T": "contractions",
    "camelCase HTTPServer": "capitals inside words",
    "a   b": "spaces",
    "x\n\n  y": "line ends",
    "日本語です": "scripts without spaces",
    "cafe\u0301": "marks",
    "a,b!?": "punctuation",
}


def _pre_tokenizer(a: Any, b: Any, roles: Roles) -> list[str]:
    """What the two do to short texts, where that can be tried; then how they are written."""
    return _by_doing(a, b, roles) + _chain(_in_steps(a), _in_steps(b), roles)


def _in_steps(content: Any) -> Any:
    """`ByteLevel` with both a space in front and GPT-2's expression as two steps, so that each is compared alone."""
    if not isinstance(content, list) or not any(c.get("add_prefix_space") and c.get("use_regex") for c in content):
        return content
    out: list[Any] = []
    for step in content:
        split = step.get("type") == "ByteLevel" and step.get("use_regex")
        out += (components.canonical({**step, "add_prefix_space": False}) or [])[:1] if split else []
        out.append({**step, "use_regex": False} if split else step)
    return out


def _by_doing(a: Any, b: Any, roles: Roles) -> list[str]:
    cuts = [splits(side, list(_SHOW)) for side in (a, b)]
    if cuts[0] is None or cuts[1] is None:
        return []
    out: list[str] = []
    for text, left, right in zip(_SHOW, cuts[0], cuts[1], strict=True):
        if left != right:
            say = _digits if text == "1234567" else _pieces
            out.append(sides(_SHOW[text], (say(left), say(right)), roles))
    return out


def _pieces(pieces: list[str]) -> str:
    return " ".join(f"[{_visible(p)}]" for p in pieces)


def _digits(pieces: list[str]) -> str:
    """How a row of seven digits is split."""
    lengths = [len(p) for p in pieces]
    if lengths == [1] * 7:
        return "one by one"
    if lengths == [7]:
        return "all together"
    largest = max(lengths)
    side = "right" if lengths[0] < largest else "left"
    return f"in groups of up to {largest} from the {side}"


def splits(content: Any, texts: list[str]) -> list[list[str]] | None:
    """What a pre-tokenizer cuts each text into; None where its terms are not those of a tokenizer.json."""
    if content is None:
        return [[t] for t in texts]
    try:
        from tokenizers import Tokenizer

        bare = {"version": "1.0", "added_tokens": [], "pre_tokenizer": as_json("pretokenizers", content)}
        whole = Tokenizer.from_str(json.dumps(bare | {"model": {"type": "BPE", "vocab": {}, "merges": []}}))
        cut = whole.pre_tokenizer.pre_tokenize_str
        return [[text[start:stop] for _, (start, stop) in cut(text)] for text in texts]
    except Exception:  # the library raises bare Exception for any content that it does not read
        return None


def as_json(key: str, content: Any) -> Any:
    """A part's steps as a tokenizer.json writes them, with the settings that it insists on."""
    if not isinstance(content, list):
        return content
    idle = {"ByteLevel": {"trim_offsets": True}, "Split": {"invert": False}}
    filled = [{**idle.get(str(c.get("type")), {}), **c} for c in content]
    return {"type": "Sequence", key: filled}


FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


def added_change(
    a: Mapping[int, AddedToken], b: Mapping[int, AddedToken], flags: Sequence[str] = FLAGS
) -> dict[str, list[str]]:
    """Text of an added token -> what differs: `only a`, `only b`, `id`, and each differing flag."""
    left, right = ({t.content: t for t in side.values()} for side in (a, b))
    out: dict[str, list[str]] = {}
    for content in {**left, **right}:
        x, y = left.get(content), right.get(content)
        if x is None or y is None:
            out[content] = ["only b" if x is None else "only a"]
        elif unlike := [f for f in ("id", *flags) if getattr(x, f) != getattr(y, f)]:
            out[content] = unlike
    return out


def added_words(
    a: Mapping[int, AddedToken], b: Mapping[int, AddedToken], change: Mapping[str, list[str]], roles: Roles
) -> list[str]:
    """Each differing token with each differing flag named."""
    left, right = ({t.content: t for t in side.values()} for side in (a, b))
    out: list[str] = []
    for content, what in list(change.items())[:_MOST]:
        if what in (["only a"], ["only b"]):
            out.append(f"{shown(content)} is an added token on {roles[what == ['only b']]} only")
            continue
        flags = [sides(f, (_flag(left[content], f), _flag(right[content], f)), roles) for f in what]
        out.append(f"{shown(content)}: {'; '.join(flags)}")
    return out + ([f"and {len(change) - _MOST} more"] if len(change) > _MOST else [])


def _flag(token: AddedToken, name: str) -> str:
    value = getattr(token, name)
    return str(value) if name == "id" else "on" if value else "off"


def _template(a: Any, b: Any, roles: Roles) -> list[str]:
    if a is None or b is None:
        return [f"{roles[a is None]} only"]
    if not isinstance(a, str) or not isinstance(b, str):
        names = [list(t) if isinstance(t, Mapping) else ["default"] for t in (a, b)]
        return [sides("templates", (", ".join(map(str, n)) for n in names), roles)]
    left, right = a.split("\n"), b.split("\n")
    at = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    lines = [shown(_from_difference(side, other, at)) for side, other in ((left, right), (right, left))]
    return [sides(f"first other line {at + 1}", lines, roles)]


def _from_difference(side: list[str], other: list[str], at: int) -> str | None:
    """A line; of a long one, what stands around the first other character."""
    if at >= len(side):
        return None
    line, twin = side[at], other[at] if at < len(other) else ""
    if len(line) <= _WIDE - 10:
        return line
    first = next((i for i, (x, y) in enumerate(zip(line, twin, strict=False)) if x != y), min(len(line), len(twin)))
    start = max(0, first - 20)
    return ("…" if start else "") + line[start : start + _WIDE - 12]


WORDS: dict[str, Callable[[Any, Any, Roles], list[str]]] = {
    "vocabulary": _vocabulary,
    "merges": _merges,
    "normalizer": _chain,
    "pre_tokenizer": _pre_tokenizer,
    "decoder": _chain,
    "chat_template": _template,
}
