"""What stands around encoding on two sides: tokens around a text, decoding, special ids, stop ids, template, head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onepolicy.codes import finding
from onepolicy.errors import OnepolicyError
from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.pair_texts import Pair, first_difference, tokens_as_text
from onepolicy.tokens.part_differences import PartRow
from onepolicy.tokens.part_words import Roles, shown, sides
from onepolicy.tokens.probes import class_of_change
from onepolicy.types import Finding, Outcome, Severity

#: Texts that show what is put around them.
_TEXTS = ("a", "hello world", "x=1")
_DECODED = 512  # texts that are decoded on both sides


def judge(pair: Pair, parts: Mapping[str, PartRow], same: Sequence[str], roles: Roles) -> list[Finding]:
    """`same`: texts whose ids are the same on both sides; they are decoded on both."""
    return [
        *_post(pair, parts["post_processor"], roles),
        *_decoder(pair, parts["decoder"], same[:_DECODED], roles),
        *_special(pair, parts["special_ids"], roles),
        *_stops(parts, roles),
        *_template(parts, roles),
        *_padded(pair, parts, roles),
    ]


def _note(quiet: bool) -> dict[str, Any]:
    """A difference that nothing shows: a warning, and a note where two backends may only use other words."""
    return {"severity": Severity.INFO if quiet else Severity.WARN, "outcome": Outcome.PASS}


def _quiet(pair: Pair) -> bool:
    return pair[0].BACKEND != pair[1].BACKEND


def _digests(row: PartRow, roles: Roles) -> dict[str, Any]:
    return {"part": row.part, "differences": list(row.words), "digests": dict(zip(roles, row.digests, strict=True))}


# tokens around a text


def put_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Ids that encoding with special tokens puts before and after a text; None where that cannot be told."""
    try:
        plain, full = tokenizer.encode(_TEXTS), tokenizer.encode(_TEXTS, add_special=True)
    except OnepolicyError:  # a mode that the backend does not have
        return None
    found = [_added(x, y) for x, y in zip(plain, full, strict=True)]
    return found[0] if all(f == found[0] for f in found) else None


def _added(plain: list[int], full: list[int]) -> tuple[list[int], list[int]] | None:
    at = next((i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain), None)
    return None if at is None else (full[:at], full[at + len(plain) :])


def _post(pair: Pair, row: PartRow, roles: Roles) -> list[Finding]:
    around = put_around(pair[0]), put_around(pair[1])
    if around[0] is None or around[1] is None or around[0] == around[1]:
        return _post_words(pair, row, roles, tried=None not in around)
    told = [_around_words(t, a) for t, a in zip(pair, around, strict=True) if a is not None]
    evidence: dict[str, Any] = _digests(row, roles) | {"class": "tokens around a text"}
    evidence |= {r: {"before": a[0], "after": a[1]} for r, a in zip(roles, around, strict=True) if a is not None}
    message = sides("tokens put around a text (add_special_tokens=True)", told, roles)
    return [finding("post-processor-differs", message, evidence=evidence)]


def _post_words(pair: Pair, row: PartRow, roles: Roles, tried: bool) -> list[Finding]:
    """A post-processor that is only written otherwise, as far as could be tried."""
    if not row.differs:
        return []
    end = "they put the same tokens around a text" if tried else "what they do could not be tried"
    message = f"post-processors are written otherwise ({'; '.join(row.words)}); {end}"
    return [finding("post-processor-differs", message, evidence=_digests(row, roles), **_note(_quiet(pair)))]


def _around_words(tokenizer: Tokenizer, around: tuple[list[int], list[int]]) -> str:
    named = [
        f"{where} {', '.join(f'{i} {shown(t)}' for i, t in zip(ids, tokens_as_text(tokenizer, ids), strict=True))}"
        for where, ids in zip(("before:", "after:"), around, strict=True)
        if ids
    ]
    return "; ".join(named) or "none"


# ids back to text


def _decoder(pair: Pair, row: PartRow, texts: Sequence[str], roles: Roles) -> list[Finding]:
    ids = pair[0].encode(texts)
    made = [t.decode(ids) for t in pair]
    unlike = [(i, x, y) for i, (x, y) in enumerate(zip(*made, strict=True)) if x != y]
    if not unlike:
        if not row.differs:
            return []
        message = f"decoders are written otherwise ({'; '.join(row.words)}); {len(texts)} texts come back the same"
        return [finding("decoder-differs", message, evidence=_digests(row, roles), **_note(True))]
    i, left, right = unlike[0]
    at = first_difference(left, right) or 0
    evidence = _digests(row, roles) | {
        "texts": len(texts),
        "differ": len(unlike),
        "class": class_of_change(left[at : at + 2], right[at : at + 2]),
        "first": {"ids": ids[i][:32], roles[0]: left[:160], roles[1]: right[:160], "first_diff": at},
    }
    said = sides("the same ids become other text", (shown(left[:40]), shown(right[:40])), roles)
    message = f"{said}; {len(unlike)} of {len(texts)} texts"
    return [finding("decoder-differs", message, place=f"text {texts[i][:40]!r}, character {at}", evidence=evidence)]


# ids with a role


def _special(pair: Pair, row: PartRow, roles: Roles) -> list[Finding]:
    a, b = row.contents
    if not row.differs or not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return []
    unlike = [r for r in sorted({*a, *b}) if a.get(r) != b.get(r)]
    both = [r for r in unlike if a.get(r) is not None and b.get(r) is not None]
    fatal = [r for r in both if r in ("bos", "eos")]
    evidence = _digests(row, roles) | {"roles": {r: [a.get(r), b.get(r)] for r in unlike}}
    trap = [role for role, ids in zip(roles, (a, b), strict=True) if ids.get("pad") == ids.get("eos") is not None]
    said = "; ".join(sides(r, (shown(a.get(r)), shown(b.get(r))), roles) for r in unlike)
    if "pad" in unlike and len(trap) == 1:
        said += f"; on {trap[0]} padding is EOS, so a mask by padding id hides the sampled EOS"
        evidence["pad_is_eos"] = trap
    if fatal:
        return [finding("special-ids-differ", said, evidence=evidence)]
    quiet = _quiet(pair) if not both else False
    return [finding("special-ids-differ", said, evidence=evidence, **_note(quiet))]


def _stops(parts: Mapping[str, PartRow], roles: Roles) -> list[Finding]:
    row = parts["stop_ids"]
    if not row.differs:
        return []
    a, b = (set(c or ()) for c in row.contents)
    evidence = _digests(row, roles) | {
        "stop_ids": {role: sorted(ids) for role, ids in zip(roles, (a, b), strict=True)},
        "missing": {roles[1]: sorted(a - b), roles[0]: sorted(b - a)},
    }
    said = sides("stop ids", (shown(sorted(a)), shown(sorted(b))), roles)
    if a and b:
        return [finding("stop-ids-differ", said, evidence=evidence)]
    named = parts["special_ids"].contents[0 if not a else 1]
    eos = named.get("eos") if isinstance(named, Mapping) else None
    if (a or b) == {eos}:  # without stop ids a reply ends at EOS
        return []
    return [finding("stop-ids-differ", said, evidence=evidence, **_note(False))]


# the chat template


def _template(parts: Mapping[str, PartRow], roles: Roles) -> list[Finding]:
    row, defaults = parts["chat_template"], parts["template_defaults"]
    if not row.differs and not defaults.differs:
        return []
    said = [*row.words, *(f"default {w}" for w in defaults.words if row.state != "not known")]
    if row.state == "not known" or not said:
        return []
    evidence = _digests(row, roles) | {"defaults": list(defaults.words)}
    message = f"chat templates differ: {'; '.join(said)}"
    if None in row.contents:
        return [finding("chat-template-differs", message, evidence=evidence, **_note(False))]
    tried, unlike = _rendered(row.contents, defaults.contents)
    evidence |= {"conversations": tried, "conversations_differ": len(unlike), "examples": unlike[:3]}
    if tried and not unlike:
        message += f"; {tried} conversations come out the same"
        return [finding("chat-template-differs", message, evidence=evidence, **_note(_same_code(*row.contents)))]
    if unlike:
        first = unlike[0]
        message += f"; {len(unlike)} of {tried} conversations come out otherwise"
        place = f"conversation {first['conversation']}, character {first['first_diff']}"
        return [finding("chat-template-differs", message, place=place, evidence=evidence)]
    return [finding("chat-template-differs", message, evidence=evidence)]


def _rendered(templates: Sequence[Any], defaults: Sequence[Any]) -> tuple[int, list[dict[str, Any]]]:
    """How many conversations were rendered on both sides, and where they differ. A template that refuses one on both
    sides is the same there."""
    from onepolicy.tokens.templates.conversations import built_in
    from onepolicy.tokens.templates.render import FROZEN, ChatTemplate

    tried, unlike = 0, list[dict[str, Any]]()
    made = [ChatTemplate(t, variables=dict(d or {}), now=FROZEN) for t, d in zip(templates, defaults, strict=True)]
    for conversation in built_in():
        for generation in (False, True):
            texts = [_text(t, conversation, generation) for t in made]
            if any(text is not None for text in texts):
                tried += 1
                if texts[0] != texts[1]:
                    unlike.append(_where(conversation.name, generation, texts))
    return tried, unlike


def _text(template: Any, conversation: Any, generation: bool) -> str | None:
    """The text, None where the template refuses or fails."""
    try:
        return template.render(conversation.whole(), add_generation_prompt=generation, **conversation.options())
    except OnepolicyError:
        return None


def _where(name: str, generation: bool, texts: Sequence[str | None]) -> dict[str, Any]:
    left, right = (text or "" for text in texts)
    at = first_difference(left, right) or 0
    near = [None if text is None else text[max(0, at - 20) : at + 40] for text in texts]
    return {"conversation": name, "generation_prompt": generation, "first_diff": at, "around": near}


def _same_code(a: Any, b: Any) -> bool:
    """Whether two templates differ in nothing but comments and white space inside of tags."""
    try:
        from jinja2 import Environment
        from jinja2.exceptions import TemplateError
    except ImportError:
        return False
    env = Environment(trim_blocks=True, lstrip_blocks=True)
    try:
        code = [[(kind, text) for _, kind, text in env.lex(t) if not _is_idle(kind)] for t in (a, b)]
    except (TemplateError, TypeError, RecursionError):
        return False
    return code[0] == code[1]


def _is_idle(kind: str) -> bool:
    return kind == "whitespace" or kind.startswith("comment")


# the model's head


def _padded(pair: Pair, parts: Mapping[str, PartRow], roles: Roles) -> list[Finding]:
    row = parts["padded_vocabulary"]
    if row.state == "not known":
        return []
    a, b = row.contents
    said = sides("rows of the head", (shown(a), shown(b)), roles)
    more = sides("ids of the tokenizer", (pair[0].size, pair[1].size), roles)
    evidence = _digests(row, roles) | {"rows": [a, b], "sizes": [pair[0].size, pair[1].size]}
    if row.differs:
        follows = parts["vocabulary"].differs  # said there
        return [finding("padded-vocabulary", f"{said}; {more}", evidence=evidence, **_note(follows))]
    if isinstance(a, int) and a > max(pair[0].size, pair[1].size):
        return [finding("padded-vocabulary", f"{said}; {more}", evidence=evidence)]
    return []
