"""One record of a file, under any spelling of its keys in use, as a `TokenRecord`.

A key is read by its name and the shape of its value: `prompt` may be text, messages or ids. Where several keys mean
one field, the first of the table that is not null counts. What no row of the table knows goes to `extra`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from onepolicy.errors import ContentError
from onepolicy.tokens.answers import (
    answer_logprobs,
    ended_by,
    finish_reason,
    is_unicode,
    messages_of,
    one_choice,
    reply_messages,
)
from onepolicy.tokens.base import TokenRecord
from onepolicy.values import quoted

#: key of a record -> the fields of `TokenRecord` that it can fill, by shape. `@` before a name: read by a rule below.
SPELLINGS: dict[str, tuple[str, ...]] = {
    # names
    "record_id": ("record_id",),
    "id": ("record_id",),
    "uid": ("record_id",),
    "uuid": ("record_id",),
    "request_id": ("record_id",),
    "rollout_id": ("record_id",),
    # the canonical form: prompt and reply in one list
    "token_ids": ("@token_ids",),
    "rollout_ids": ("@token_ids",),
    "prompt_length": ("@prompt_length",),
    "response_length": ("@response_length",),
    "drawn": ("@drawn",),
    # ids
    "prompt_ids": ("prompt_ids",),
    "prompt_token_ids": ("prompt_ids",),
    "prompt_tokens": ("prompt_ids", "@ignored_strings"),
    "response_ids": ("reply_ids",),
    "reply_ids": ("reply_ids",),
    "response_token_ids": ("reply_ids",),
    "completion_ids": ("reply_ids",),
    "completion_token_ids": ("reply_ids",),
    "output_ids": ("reply_ids",),
    "output_token_ids": ("reply_ids",),
    "sampled_ids": ("reply_ids",),
    # text, messages, or ids under a plain name
    "response_text": ("reply_text",),
    "completion_text": ("reply_text",),
    "output_text": ("reply_text",),
    "reply_text": ("reply_text",),
    "completion": ("reply_text", "reply_ids", "@reply_messages"),
    "completions": ("reply_text", "reply_ids", "@reply_messages"),
    "response": ("reply_text", "reply_ids", "@reply_messages"),
    "responses": ("reply_text", "reply_ids", "@reply_messages"),
    "output": ("reply_text", "reply_ids", "@reply_messages"),
    "text": ("reply_text",),
    "prompt_text": ("prompt_text",),
    "prompt": ("prompt_text", "messages", "prompt_ids"),
    "prompts": ("prompt_text", "messages", "prompt_ids"),
    "input": ("prompt_text", "messages", "prompt_ids"),
    "message": ("@reply_messages",),
    "messages": ("messages", "@messages"),
    "prompt_messages": ("messages", "@messages"),
    # one value a token
    "loss_mask": ("loss_mask",),
    "response_mask": ("loss_mask",),
    "completion_mask": ("loss_mask",),
    "sampler_logprobs": ("logprobs",),
    "rollout_logprobs": ("logprobs",),
    "rollout_log_probs": ("logprobs",),
    "sampling_logprobs": ("logprobs",),
    "sampling_per_token_logps": ("logprobs",),
    "response_logprobs": ("logprobs",),
    "completion_logprobs": ("logprobs",),
    "logprobs": ("logprobs", "@answer_logprobs"),
    "trainer_logprobs": ("scorer_logprobs",),
    "scorer_logprobs": ("scorer_logprobs",),
    "old_logprobs": ("scorer_logprobs",),
    "old_log_probs": ("scorer_logprobs",),
    "old_per_token_logps": ("scorer_logprobs",),
    "current_logprobs": ("scorer_logprobs",),
    "token_strings": ("token_strings",),
    "tokens": ("token_strings", "reply_ids"),
    "token_bytes": ("token_bytes",),
    # how the reply ended
    "finish_reason": ("finish_reason", "@finish_reason"),
    "stop_reason": ("finish_reason", "@ended_by"),
    "status": ("finish_reason", "@ignored_number"),
    "stop_token_ids": ("stop_ids",),
    "stop_ids": ("stop_ids",),
    "eos_token_id": ("@eos_token_id",),
    "usage": ("usage",),
    # more than one reader, more than one turn
    "engine_ids": ("@engine",),
    "sampler_ids": ("@engine",),
    "engine_prompt_ids": ("@engine",),
    "sampler_prompt_ids": ("@engine",),
    "trainer_ids": ("@trainer",),
    "scorer_ids": ("@trainer",),
    "trainer_prompt_ids": ("@trainer",),
    "scorer_prompt_ids": ("@trainer",),
    "spans": ("spans",),
    "sampled_spans": ("spans",),
    "assistant_spans": ("spans",),
    "assistant_spans_in_rollout": ("spans",),
    "turns": ("turns",),
}
#: field -> the shape of its value (`_shape`).
SHAPES: dict[str, tuple[str, ...]] = {
    "record_id": ("text", "number"),
    "prompt_ids": ("list",),
    "reply_ids": ("list",),
    "prompt_text": ("text",),
    "reply_text": ("text",),
    "messages": ("objects",),
    "loss_mask": ("list",),
    "logprobs": ("list", "strings"),  # "-inf" is a text
    "scorer_logprobs": ("list", "strings"),
    "token_strings": ("strings",),
    "token_bytes": ("list", "lists"),
    "finish_reason": ("text",),
    "stop_ids": ("list", "number"),
    "usage": ("object",),
    "spans": ("lists",),
    "turns": ("objects",),
    "@messages": ("text",),
    "@token_ids": ("list",),
    "@prompt_length": ("number",),
    "@response_length": ("number",),
    "@drawn": ("list",),
    "@eos_token_id": ("number", "list"),
    "@engine": ("list",),
    "@trainer": ("list",),
    "@answer_logprobs": ("objects", "object"),
    "@reply_messages": ("objects", "object"),
    "@finish_reason": ("object",),
    "@ignored_strings": ("strings",),
    "@ended_by": ("number",),
    "@ignored_number": ("number",),
}
_IDS = ("prompt_ids", "reply_ids", "@token_ids", "@engine", "@trainer", "stop_ids", "@eos_token_id")
_WHOLE = ("stop_ids", "@eos_token_id", "@prompt_length", "@response_length")
#: Fields of one value a token, and how files spell values that JSON does not have.
_VALUES = ("logprobs", "scorer_logprobs")
_NUMBERS = {int, float, type(None)}
_SPELLED = ("inf", "infinity", "nan")
_SAID = {
    "list": "a list of numbers",
    "lists": "a list of lists",
    "strings": "a list of texts",
    "objects": "a list of objects",
    "object": "an object",
    "text": "a text",
    "number": "a number",
}


def record_of(row: Any, name: str, place: str = "") -> TokenRecord:
    """One row as a record. `name`: what it is called if it has no id of its own. `place`: where it stands.

    Errors: `ContentError` that says which key and position, got and wanted; the place is not in it.
    """
    if not isinstance(row, Mapping):
        raise ContentError(f"got {quoted(row)}, wanted an object with the ids or the text of one rollout")
    found, extra = _sorted(one_choice(cast(Mapping[str, Any], row)))
    record = TokenRecord(record_id=name, place=place, extra=extra)
    for field, (key, value) in found.items():
        if not field.startswith("@"):
            setattr(record, field, _READ.get(field, _as_is)(value, key))
    for field, rule in _RULES.items():
        if field in found:
            rule(record, found[field][1], found)
    return record


def _sorted(row: Mapping[str, Any]) -> tuple[dict[str, tuple[str, Any]], dict[str, Any]]:
    """field -> (key, value), and what no field takes."""
    found: dict[str, tuple[str, Any]] = {}
    extra: dict[str, Any] = {}
    for key in (key for key in SPELLINGS if key in row):
        value = _plain(row[key])
        if value is None:
            continue
        field = _field(key, value)
        if field.startswith("@ignored") or field in found:
            extra[key] = value
        else:
            found[field] = (key, value)
            _refuse(field, key, value)
    extra.update((key, value) for key, value in row.items() if key not in SPELLINGS)
    return found, extra


def _plain(value: Any) -> Any:
    """Arrays, tensors and tuples as lists."""
    if isinstance(value, tuple):
        return list(cast(tuple[Any, ...], value))
    return value.tolist() if hasattr(value, "tolist") else value


def _field(key: str, value: Any) -> str:
    """Which field a key fills, by the shape of its value. Errors: `ContentError`."""
    shape = _shape(value)
    for field in SPELLINGS[key]:
        if shape in SHAPES[field] or (value == [] and "s" in SHAPES[field][0]):
            return field
    wanted = " or ".join(dict.fromkeys(_SAID[s] for f in SPELLINGS[key] if "ignored" not in f for s in SHAPES[f]))
    raise ContentError(f"{key!r}: got {quoted(value)}, wanted {wanted}")


def _shape(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "object"
    if not isinstance(value, list):
        return "number" if isinstance(value, int | float) else type(value).__name__
    first: Any = next((x for x in cast(list[Any], value) if x is not None), 0)
    kinds = ((str, "strings"), (Mapping, "objects"), ((list, tuple), "lists"))
    return next((shape for kind, shape in kinds if isinstance(first, kind)), "list")


def _refuse(field: str, key: str, value: Any) -> None:
    """Errors: `ContentError` for what the field cannot hold, at its position."""
    cells = cast(list[Any], value) if isinstance(value, list) else None
    if field in _IDS and cells is not None and not is_ids(cells):
        _wrong_cell(key, cells, lambda x: type(x) is int, "an integer token id")
    if field in _WHOLE and cells is None and type(value) is not int:
        raise ContentError(f"{key!r}: got {quoted(value)}, wanted an integer")
    if field in _VALUES and cells is not None and not (set(map(type, cells)) <= _NUMBERS or all(map(is_value, cells))):
        _wrong_cell(key, cells, is_value, "a number or null")
    if field == "token_strings" and cells is not None and not all(isinstance(x, str) for x in cells):
        _wrong_cell(key, cells, lambda x: isinstance(x, str), "text")
    if isinstance(value, str) and not is_unicode(value):
        raise ContentError(f"{key!r}: the text has half of a surrogate pair, so it is not Unicode")


def _wrong_cell(key: str, cells: list[Any], fits: Callable[[Any], bool], wanted: str) -> None:
    at = next(i for i, x in enumerate(cells) if not fits(x))
    raise ContentError(f"{key!r}, position {at}: got {quoted(cells[at])}, wanted {wanted}")


def is_value(x: Any) -> bool:
    """A number or none; infinities and NaN also as JSON spells them."""
    return x is None or isinstance(x, int | float) or (isinstance(x, str) and x.lower().lstrip("+-") in _SPELLED)


def is_ids(values: Sequence[Any]) -> bool:
    """Whether all are integers; a boolean is none."""
    return set(map(type, values)) <= {int}


# what a field makes of its value


def _as_is(value: Any, key: str) -> Any:
    return value


def _stop_ids(value: Any, key: str) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _usage(value: Mapping[str, Any], key: str) -> dict[str, int]:
    return {k: v for k, v in value.items() if type(v) is int}


def _spans(value: list[Any], key: str) -> list[tuple[int, int]]:
    if not all(isinstance(x, list | tuple) and len(x) == 2 and is_ids(x) for x in value):
        raise ContentError(f"{key!r}: got {quoted(value)}, wanted a list of [start, stop) pairs")
    return [(x[0], x[1]) for x in value]


def _turns(value: list[Any], key: str) -> list[Mapping[str, Any]]:
    """Each turn with its own keys, and beside them the names of `TokenRecord`'s fields."""
    out: list[Mapping[str, Any]] = []
    for number, turn in enumerate(value):
        if not isinstance(turn, Mapping):
            raise ContentError(f"{key!r}, turn {number}: got {quoted(turn)}, wanted an object")
        try:
            found, _ = _sorted(cast(Mapping[str, Any], turn))
        except ContentError as err:
            raise ContentError(f"{key!r}, turn {number}: {err}") from None
        out.append({**turn, **{field: v for field, (_, v) in found.items() if not field.startswith("@")}})
    return out


_READ: dict[str, Callable[[Any, str], Any]] = {
    "record_id": lambda value, key: str(value),
    "stop_ids": _stop_ids,
    "usage": _usage,
    "spans": _spans,
    "turns": _turns,
}


# rules for what fills more than one field

Found = Mapping[str, tuple[str, Any]]
#: In the canonical form these are as long as `token_ids`; a record keeps the reply's part.
_TOKEN_COLUMNS = ("loss_mask", "logprobs", "scorer_logprobs")


def _token_ids(record: TokenRecord, ids: list[int], found: Found) -> None:
    """Prompt and reply apart. Where neither a length nor flags tell them apart, nothing is known to be sampled."""
    drawn = found["@drawn"][1] if "@drawn" in found else None
    if drawn is not None and len(drawn) != len(ids):
        raise ContentError(f"'drawn': got {len(drawn)} values, wanted {len(ids)}, one for each of token_ids")
    known = record.spans[0][0] if record.spans else len(ids)
    first = next((i for i, x in enumerate(drawn) if x), len(ids)) if drawn else known
    at: int = found["@prompt_length"][1] if "@prompt_length" in found else first
    if not 0 <= at <= len(ids):
        raise ContentError(f"'prompt_length': got {at}, wanted 0 to {len(ids)}, the length of token_ids")
    record.prompt_ids = ids[:at]
    if at < len(ids) or "@prompt_length" in found:
        record.reply_ids = ids[at:]
    for name in _TOKEN_COLUMNS:
        if (column := getattr(record, name)) is not None and len(column) == len(ids):
            setattr(record, name, column[at:])
    if drawn:
        record.spans = runs(drawn)


def _response_length(record: TokenRecord, length: Any, found: Found) -> None:
    """`tokens` of prompt and reply, of which the last `response_length` are the reply's (slime)."""
    ids = record.reply_ids or []
    if record.prompt_ids is None and found.get("reply_ids", ("",))[0] == "tokens" and 0 <= length < len(ids):
        record.prompt_ids, record.reply_ids = ids[: len(ids) - length], ids[len(ids) - length :]


def runs(flags: Iterable[Any]) -> list[tuple[int, int]]:
    """`[start, stop)` of every run of true flags."""
    out: list[tuple[int, int]] = []
    start, n = None, 0
    for n, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = n
        elif not flag and start is not None:
            out.append((start, n))
            start = None
    return out


def _eos(record: TokenRecord, value: Any, found: Found) -> None:
    record.extra = {**record.extra, "eos_token_id": value}
    record.stop_ids = record.stop_ids or _stop_ids(value, "eos_token_id")


def _side(name: str) -> Callable[[TokenRecord, Any, Found], None]:
    def add(record: TokenRecord, value: list[int], found: Found) -> None:
        record.sides = {**record.sides, name: value}

    return add


_RULES: dict[str, Callable[[TokenRecord, Any, Found], None]] = {
    "@messages": lambda record, value, found: setattr(record, "messages", messages_of(value)),
    "@token_ids": _token_ids,
    "@response_length": _response_length,
    "@eos_token_id": _eos,
    "@engine": _side("engine"),
    "@trainer": _side("trainer"),
    "@answer_logprobs": lambda record, value, found: answer_logprobs(record, value),
    "@reply_messages": lambda record, value, found: reply_messages(record, value),
    "@finish_reason": lambda record, value, found: finish_reason(record, value),
    "@ended_by": lambda record, value, found: ended_by(record, value),
}
