"""The same prompt as two sides read it: engine ids against trainer ids, and what kind of difference it is.

What is looked for, in this order: a beginning-of-sequence token too many or missing; EOS appended; the generation
prompt missing; a prompt cut on the left or right; a block that only one side has; anything else, with its place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from onepolicy.codes import finding
from onepolicy.errors import ContentError
from onepolicy.tokens.base import Tokenizer, TokenRecord
from onepolicy.tokens.classes import CLASSES, Facts
from onepolicy.tokens.explain_difference import explain
from onepolicy.tokens.pair_texts import first_difference, tokens_as_text
from onepolicy.types import Finding, Outcome, Severity

Sides = tuple[str, str]
_LONGEST_TAIL = 64  # ids: a generation prompt is shorter
_CHUNK = 1024  # prompts that are looked at together
_NO_GENERATION = "generation-prompt-missing"
_AROUND = 4  # ids shown on either side of a place
_TITLES = {
    "bos-missing": "the beginning-of-sequence token is missing on {short}",
    "bos-inside": "a beginning-of-sequence token stands inside the prompt on {long} only",
    "bos-moved": "the beginning-of-sequence token stands at another place",
    "eos-appended": "{long} ends the prompt with EOS",
    "block-missing": "{short} lacks {missing} ids that {long} has",
    "special-in-front": "{long} puts {missing} special tokens in front that {short} does not have",
    "empty": "{short} has no prompt ids",
    "other": "other ids from token {first_diff} on",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, its ids on both sides. `bos`: None for a model that has no such token. `eos`: its own, if it says."""

    name: str
    ids: tuple[list[int], list[int]]
    bos: int | None
    eos: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of all prompts."""

    sides: Sides
    eos: frozenset[int]
    pad: int | None
    generation: tuple[int, ...]
    tokenizer: Tokenizer | None
    facts: Facts | None


def compare_prompts(
    pairs: Iterable[Mapping[str, Any] | TokenRecord],
    bos: int | None = None,
    *,
    eos: int | Iterable[int] | None = None,
    pad: int | None = None,
    generation_prompt: Sequence[int] = (),
    sides: Sides = ("engine", "trainer"),
    tokenizer: Tokenizer | None = None,
) -> list[Finding]:
    """A finding for each prompt whose ids differ, or which begins with BOS twice on both sides.

    A pair has `id`, `engine_ids` and `trainer_ids` (as `sides` says), and may have its own `bos_token_id`, null for a
    model without BOS; or it is a `TokenRecord` with these `sides`. `eos`: ids that end a text. `pad`: padding, which is
    taken away at the left. `generation_prompt`: the ids that open a reply; without them a tail that prompts of
    several lengths lack is taken for it. `tokenizer` shows tokens as text, and
    its EOS is taken where `eos` is not given.

    Errors: `ContentError` for a pair without both lists, or with ids that are none.
    """
    if eos is None and tokenizer is not None:
        eos = tokenizer.special_ids().get("eos")
    facts = None if tokenizer is None else Facts(tokenizer)
    known = _Known(sides, _ids_of(eos), pad, tuple(generation_prompt), tokenizer, facts)
    rest, lengths = enumerate(pairs), dict[tuple[int, ...], set[int]]()
    out: list[Finding] = []
    while prompts := [_prompt(pair, i, bos, known) for i, pair in islice(rest, _CHUNK)]:
        tails = _common_tails(prompts, lengths)
        out += [f for prompt in prompts for f in _judge(prompt, known, tails)]
    return out


def _ids_of(eos: int | Iterable[int] | None) -> frozenset[int]:
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


# reading


def _prompt(pair: Mapping[str, Any] | TokenRecord, at: int, bos: int | None, known: _Known) -> Prompt:
    if isinstance(pair, TokenRecord):
        found, name = pair.sides, pair.record_id
        row: Mapping[str, Any] = {f"{side}_ids": found.get(side) for side in known.sides} | dict(pair.extra)
    else:
        row, name = pair, str(pair.get("id", at))
    ids = [_ids(row.get(f"{side}_ids"), f"prompt {name}: {side}_ids") for side in known.sides]
    own = row.get("bos_token_id", bos)
    own = None if own is None else _id(own, f"prompt {name}: bos_token_id")
    eos = _ids_of(row.get("eos_token_id")) | _ids_of(pair.stop_ids if isinstance(pair, TokenRecord) else ())
    return Prompt(name, (_unpadded(ids[0], known.pad, own), _unpadded(ids[1], known.pad, own)), own, eos)


def _ids(value: Any, where: str) -> list[int]:
    if value is None or isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ContentError(f"{where}: got {type(value).__name__}, wanted a list of token ids")
    return [_id(x, f"{where}[{i}]") for i, x in enumerate(value)]


def _id(value: Any, where: str) -> int:
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = -1
    if found < 0:
        raise ContentError(f"{where}: got {value!r}, wanted a token id, a whole number from 0")
    return found


def _unpadded(ids: list[int], pad: int | None, bos: int | None) -> list[int]:
    """Without padding at the left, unless that is the BOS token too: then nobody can tell."""
    if pad is None or pad == bos:
        return ids
    return ids[next((i for i, x in enumerate(ids) if x != pad), len(ids)) :]


# judging


def _judge(prompt: Prompt, known: _Known, tails: frozenset[tuple[int, ...]]) -> list[Finding]:
    a, b = prompt.ids
    if a == b:
        return _both(prompt, known)
    on_both = min(_leading(ids, prompt.bos) for ids in (a, b)) >= 2
    doubled = (_both(prompt, known) if on_both else []) + _doubled(prompt, known)
    rest = _without_bos(prompt)
    if rest[0] == rest[1]:
        return doubled or [_bos_missing(prompt, known)]
    return [*doubled, _other(prompt, rest, known, tails)]


def _leading(ids: Sequence[int], bos: int | None) -> int:
    """How many BOS tokens stand at the beginning. No token is the BOS of a model that has none."""
    if bos is None:
        return 0
    return next((i for i, x in enumerate(ids) if x != bos), len(ids))


def _runs(ids: Sequence[int], bos: int | None) -> list[int]:
    """Positions of a BOS right behind another: nothing lies between them, so no text begins there."""
    return [] if bos is None else [i for i in range(1, len(ids)) if ids[i] == bos == ids[i - 1]]


def _both(prompt: Prompt, known: _Known) -> list[Finding]:
    """BOS twice in a row on both sides. A BOS before each text of a packed sequence is no such thing."""
    ids = prompt.ids[0]
    at = _runs(ids, prompt.bos)
    padding = known.pad is not None and known.pad == prompt.bos
    if not at or (padding and _leading(ids, prompt.bos) > 2):
        return []
    evidence = {"class": "on-both-sides"} | _counts(prompt, known) | {"positions": at, "sides": list(known.sides)}
    evidence["equal_after_dropping"] = prompt.ids[0] == prompt.ids[1]
    return [
        finding(
            "double-bos",
            f"prompt {prompt.name}: BOS ({prompt.bos}) stands twice in a row on both sides",
            place=f"prompt {prompt.name}, token {at[0]}",
            evidence=evidence,
            severity=Severity.WARN,
            outcome=Outcome.PASS,
            rivals=_padding(prompt, known),
        )
    ]


def _padding(prompt: Prompt, known: _Known) -> tuple[str, ...]:
    return ("left padding with the same id",) if known.pad is not None and known.pad == prompt.bos else ()


def _bos_at(prompt: Prompt) -> list[list[int]]:
    """Positions of BOS on both sides."""
    return [[i for i, x in enumerate(ids) if prompt.bos is not None and x == prompt.bos] for ids in prompt.ids]


def _counts(prompt: Prompt, known: _Known) -> dict[str, Any]:
    """BOS tokens by side: how many, and where."""
    at = _bos_at(prompt)
    return {
        "prompt": prompt.name,
        "bos": prompt.bos,
        "bos_count": {side: len(found) for side, found in zip(known.sides, at, strict=True)},
        "bos_at": {side: found[:16] for side, found in zip(known.sides, at, strict=True)},
        "lengths": {side: len(ids) for side, ids in zip(known.sides, prompt.ids, strict=True)},
    }


def _without_bos(prompt: Prompt) -> tuple[list[int], list[int]]:
    """Both sides without the BOS tokens at the beginning; without all of them where that makes the sides equal."""
    a, b = (ids[_leading(ids, prompt.bos) :] for ids in prompt.ids)
    every = [[x for x in ids if x != prompt.bos] for ids in prompt.ids]
    return (every[0], every[1]) if every[0] == every[1] else (a, b)


def _doubled(prompt: Prompt, known: _Known) -> list[Finding]:
    """BOS more often on one side: at the beginning, or inside, where two texts were encoded apart and joined."""
    lead = [_leading(ids, prompt.bos) for ids in prompt.ids]
    counts = [len(at) for at in _bos_at(prompt)]
    more = 0 if (lead[0], counts[0]) > (lead[1], counts[1]) else 1
    rest = _without_bos(prompt)
    equal = rest[0] == rest[1]
    twice = lead[more] >= 2 and lead[0] != lead[1]
    inside = equal and counts[more] >= 2 and counts[more] > counts[1 - more]
    if not twice and not inside:
        return []
    at = _bos_at(prompt)[more][1:]
    evidence = _counts(prompt, known) | {
        "class": "on-one-side",
        "side": known.sides[more],
        "positions": at[:16],
        "equal_after_dropping": equal,
        "offset": abs(counts[0] - counts[1]) if inside else abs(lead[0] - lead[1]),
    }
    told = ", ".join(f"{n} on {side}" for side, n in zip(known.sides, counts, strict=True))
    end = "the rest is the same" if equal else "the rest differs too"
    message = f"prompt {prompt.name}: BOS ({prompt.bos}) stands {told}; {end}"
    place = f"prompt {prompt.name}, {known.sides[more]}, token {at[0]}"
    return [finding("double-bos", message, place=place, evidence=evidence, rivals=_padding(prompt, known))]


def _bos_missing(prompt: Prompt, known: _Known) -> Finding:
    """Equal but for BOS, which stands twice on neither side."""
    lead = [_leading(ids, prompt.bos) for ids in prompt.ids]
    counts = [len(at) for at in _bos_at(prompt)]
    short = 0 if (lead[0], counts[0]) < (lead[1], counts[1]) else 1
    kind = "bos-moved" if counts[0] == counts[1] else "bos-missing" if lead[0] != lead[1] else "bos-inside"
    more = _counts(prompt, known) | {"equal_after_dropping": True, "offset": abs(counts[0] - counts[1])}
    return _differ(prompt, known, kind, short, more)


def _other(
    prompt: Prompt, rest: tuple[list[int], list[int]], known: _Known, tails: frozenset[tuple[int, ...]]
) -> Finding:
    """What kind of difference it is, once the BOS tokens at the beginning are set aside."""
    short = 0 if len(rest[0]) < len(rest[1]) else 1
    less, more = rest[short], rest[1 - short]
    if not less:
        return _differ(prompt, known, "empty", short, {})
    if more[: len(less)] == less:
        return _tail(prompt, tuple(more[len(less) :]), short, known, tails)
    lacking = {"missing": len(more) - len(less), "missing_ids": more[: len(more) - len(less)][:64]}
    if more[-len(less) :] == less:
        if less[0] == more[0] and len(less) > 1:  # a cut would hardly fall on the very token that opens the prompt
            doubled = lacking["missing_ids"] == [less[0]]
            rivals = ("the first id is a BOS that stands twice: name it (bos_token_id)",) if doubled else ()
            return replace(_differ(prompt, known, "block-missing", short, lacking), rivals=rivals)
        if _all_special(known, lacking["missing_ids"]):
            return _differ(prompt, known, "special-in-front", short, lacking)
        return _cut(prompt, known, "left", short, lacking)
    head = first_difference(less, more) or 0
    if len(more) > len(less) and less[head:] == more[len(more) - len(less) + head :]:
        gone = more[head : head + len(more) - len(less)]
        return _differ(prompt, known, "block-missing", short, lacking | {"missing_ids": gone[:64]})
    return _differ(prompt, known, "other", short, {}) if known.facts is None else _explained(prompt, known, short)


def _explained(prompt: Prompt, known: _Known, short: int) -> Finding:
    """Other ids, by what stands at the first difference: the same text in other pieces, a control token spelled out."""
    facts = known.facts
    assert facts is not None
    a, b = prompt.ids
    found = explain(a, b, facts, facts, record_id=prompt.name, place="", part="prompt")
    more = {"class": found.cls, "classes": list(found.classes), "text": found.text, "other_text": found.reencoded_text}
    spelled = {"special-token-look-alike": 0, "special-token-spelled-out": 1}.get(found.cls)
    if spelled is None:
        return _differ(prompt, known, "other", short, more, f": {CLASSES[found.cls]}")
    control, text = known.sides[1 - spelled], known.sides[spelled]
    evidence = _base(prompt, known) | {"kind": "other", "side": control, "token": found.detail} | more
    evidence["class"] = "special-token-look-alike"
    message = f"prompt {prompt.name}: {control} has the control token {found.detail} where {text} has it spelled out"
    place = f"prompt {prompt.name}, {control}, token {evidence['first_diff']}"
    weight: dict[str, Any] = {"severity": Severity.FAIL, "outcome": Outcome.DRIFT}
    return finding("special-token-look-alike", message, place=place, evidence=evidence, **weight)


def _all_special(known: _Known, ids: Sequence[int]) -> bool:
    """Nobody cuts a prompt behind its special tokens: a post-processor puts them there on one side."""
    added = {} if known.tokenizer is None else known.tokenizer.added
    return all(i in added and added[i].special for i in ids)


def _tail(
    prompt: Prompt, tail: tuple[int, ...], short: int, known: _Known, tails: frozenset[tuple[int, ...]]
) -> Finding:
    """One side goes on where the other ends."""
    more: dict[str, Any] = {"missing": len(tail), "missing_ids": list(tail[:64])}
    if set(tail) <= known.eos | prompt.eos:
        return _differ(prompt, known, "eos-appended", short, more | {"side": known.sides[1 - short]})
    n = min(len(tail), len(known.generation))  # all of it is missing, or its end (an opening `<think>`)
    sure = n > 0 and tail[-n:] == known.generation[-n:]
    if not sure and tail not in tails:
        return _cut(prompt, known, "right", short, more)
    side = known.sides[short]
    message = f"prompt {prompt.name}: the generation prompt ({len(tail)} ids) is missing on {side}"
    return finding(
        "generation-prompt-differs",
        message + _as_text(known, tail),
        place=_place(prompt, known, short, len(prompt.ids[short])),
        evidence=_base(prompt, known) | more | {"side": side, "kind": _NO_GENERATION, "class": _NO_GENERATION},
        severity=Severity.FAIL,
        outcome=Outcome.DRIFT,
        rivals=() if sure else _rivals_of_tail(tail, "the prompt is cut on the right"),
    )


def _rivals_of_tail(tail: Sequence[int], other: str) -> tuple[str, ...]:
    return (other, "EOS is appended on the other side") if len(tail) == 1 else (other,)


def _common_tails(prompts: Sequence[Prompt], lengths: dict[tuple[int, ...], set[int]]) -> frozenset[tuple[int, ...]]:
    """Tails that prompts of several lengths lack on one side: a cut leaves them all at one length. `lengths`: what was
    left before each tail, so far."""
    for prompt in prompts:
        a, b = _without_bos(prompt)
        short, long = (a, b) if len(a) < len(b) else (b, a)
        if short and len(short) < len(long) <= len(short) + _LONGEST_TAIL and long[: len(short)] == short:
            lengths.setdefault(tuple(long[len(short) :]), set()).add(len(short))
    return frozenset(tail for tail, found in lengths.items() if len(found) > 1)


# findings


def _base(prompt: Prompt, known: _Known) -> dict[str, Any]:
    at = first_difference(*prompt.ids)
    around = {
        side: ids[max(0, (at or 0) - _AROUND) : (at or 0) + _AROUND + 1]
        for side, ids in zip(known.sides, prompt.ids, strict=True)
    }
    out: dict[str, Any] = {"prompt": prompt.name, "first_diff": at, "around": around}
    out["lengths"] = {side: len(ids) for side, ids in zip(known.sides, prompt.ids, strict=True)}
    if known.tokenizer is not None:
        out["texts"] = {side: tokens_as_text(known.tokenizer, ids) for side, ids in around.items()}
    return out


def _place(prompt: Prompt, known: _Known, side: int, at: int | None) -> str:
    return f"prompt {prompt.name}, {known.sides[side]}, token {at}"


def _as_text(known: _Known, ids: Sequence[int]) -> str:
    return "" if known.tokenizer is None or not ids else f": {''.join(tokens_as_text(known.tokenizer, ids))[:60]!r}"


def _differ(prompt: Prompt, known: _Known, kind: str, short: int, more: Mapping[str, Any], said: str = "") -> Finding:
    """`said`: what the message adds; else the missing ids as text, where a tokenizer is there to tell it."""
    evidence = _base(prompt, known) | {"class": kind, "kind": kind, "side": known.sides[short]} | dict(more)
    words = evidence | {"short": known.sides[short], "long": known.sides[1 - short]}
    said = said or _as_text(known, more.get("missing_ids", ()))
    message = f"prompt {prompt.name}: {_TITLES[kind].format(**words)}{said}"
    place = f"prompt {prompt.name}, token {evidence['first_diff']}"
    return finding("prompt-ids-differ", message, place=place, evidence=evidence)


def _cut(prompt: Prompt, known: _Known, where: str, short: int, more: Mapping[str, Any]) -> Finding:
    """A prompt that lacks its beginning or its end on one side."""
    side, kept = known.sides[short], len(prompt.ids[short])
    evidence = (
        _base(prompt, known)
        | {"class": f"cut-{where}", "kind": f"cut-{where}", "cut": where, "side": side, "kept": kept}
        | dict(more)
    )
    message = f"prompt {prompt.name}: cut on the {where} on {side}: {kept} ids are left, {more['missing']} are missing"
    short_tail = where == "right" and more["missing"] <= _LONGEST_TAIL
    rivals = _rivals_of_tail(more["missing_ids"], "the generation prompt is missing") if short_tail else ()
    return finding(
        "prompt-cut",
        message,
        place=_place(prompt, known, short, 0 if where == "left" else kept),
        evidence=evidence,
        rivals=rivals,
    )
