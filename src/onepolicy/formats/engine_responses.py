"""Answers of inference engines as they came: one a line, a JSON array, or one file each; alone or beside their request.

vLLM: completions and chat (`return_token_ids`), `/inference/v1/generate`, offline `RequestOutput`s; SGLang's
`/generate` (`meta_info.output_token_logprobs` = [log-prob, id, text]); OpenAI's chat and completions, which have no
ids: text only. One record for each choice. There is no trainer side. What the log-probs mean is told by the server's
flags, not by the answer: it stays unknown unless `logprobs_mode` stands beside it.
With SGLang's return_sampling_mask the sampler is `output_token_sampling_logprobs`, over the kept tokens alone, and the
values over the whole vocabulary are the scoring `full` (https://github.com/sgl-project/sglang/pull/27408).
What an engine says of tokens that it was given (vLLM's `prompt_logprobs`, SGLang's `input_token_logprobs`, `echo`) is
the scoring `prompt`, of which nothing is drawn. An answer to `max_tokens` 0 or 1 whose prompt has values is a scoring
of that text: the token that had to be drawn is left out, and so is the answer's own id, so that
`compare A B --b prompt` finds its sequence by `custom_id` or `record_id` beside it, or by order. Keep the request
beside the answer: without it, one drawn token that ended by length is taken for such a scoring.
Layouts: vLLM 0.32's protocol classes; SGLang's documentation (0.4 to 0.5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from onepolicy.formats import engine_prompts as prompts
from onepolicy.formats import jsonl_lines
from onepolicy.formats.base import Files, RawColumn, RawRecord, Read, Shard, TextRecord, floats
from onepolicy.formats.cells import Row, ids_of, joined, present, unicode
from onepolicy.formats.engine_parts import asked, finish, prompt_ids, routes, versions
from onepolicy.formats.jsonl_lines import Line
from onepolicy.formats.sniff import keys_of
from onepolicy.values import quoted

name = "engine"
says = "raw answers of vLLM, SGLang or an OpenAI-style server"

split = jsonl_lines.split_lines
#: Keys under which an answer stands beside its request.
_INSIDE = ("response", "answer", "body", "output", "result")
_SPELLED = "token_id:"


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    keys = keys_of(head)
    inside = [_first(keys.get(k)) for k in _INSIDE]
    inside += [_first(part.get("body")) for part in inside]
    return any(map(_is_answer, (keys, *inside)))


def _first(x: Any) -> Mapping[str, Any]:
    """The answer, or the first of several."""
    return _mapping(cast(list[Any], x)[0] if isinstance(x, list) and x else x)


def _mapping(x: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], x) if isinstance(x, Mapping) else {}


def _is_answer(row: Mapping[str, Any]) -> bool:
    if "meta_info" in row:
        return True
    choices = row.get("choices", row.get("outputs"))
    first = choices[0] if isinstance(choices, list) and choices else None  # pyright: ignore[reportUnknownVariableType]
    return isinstance(first, Mapping) and bool({"message", "text", "token_ids", "logprobs"} & set(_mapping(first)))


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in paths]


def read(shard: Shard, files: Files) -> Iterator[Read]:
    return jsonl_lines.read_rows(shard, files, _answers)


def _answers(line: Line) -> Iterator[Read]:
    outer = answer = Row(line.value)
    for _ in range(3):
        key = next((k for k in _INSIDE if isinstance(answer.get(k), (Mapping, list))), None)
        if _is_answer(answer.row) or key is None:
            break
        inside = answer.get(key)
        if isinstance(inside, list):  # several answers to one request
            for i, item in enumerate(cast(list[Any], inside)):
                yield from _answer(outer, Row(item), f"{line.place}[{i}]")
            return
        answer = Row(inside)
    yield from _answer(outer, answer, line.place)


def _answer(outer: Row, answer: Row, place: str) -> Iterator[Read]:
    if "meta_info" in answer:
        yield _sglang(outer, answer, place)
        return
    if answer.get("error") is not None and "choices" not in answer:
        raise ValueError(f"an error, no answer: {quoted(answer.get('error'))}")
    key = answer.first("choices", "outputs")
    choices = answer.objects(key)
    if not choices:
        raise ValueError(f"no choices in the answer; its keys are {quoted(sorted(map(str, answer.row)))}")
    for i, choice in enumerate(choices):
        yield _choice(outer, answer, choice, place if len(choices) == 1 else f"{place}[{i}]", i, len(choices))


# vLLM and OpenAI


def _choice(outer: Row, answer: Row, choice: Row, place: str, index: int, of: int) -> Read:
    values, spelled, strings = _logprobs(choice)
    prompt, reply = prompt_ids(outer, answer, choice), choice.ids("token_ids")
    echo = prompts.echoed(outer, answer, choice, values, prompt, of == 1)
    texts = _texts(outer, answer, choice, strings, echo)
    if echo is not None:
        values = echo.reply
        if spelled is not None:
            prompt, spelled = (spelled[: echo.n_prompt] if prompt is None else prompt), spelled[echo.n_prompt :]
        if not echo.reply and (reply is None or len(reply) == 1):
            reply = np.zeros(0, dtype=np.int64)  # max_tokens 0, where vLLM draws one token that it does not show
    reply = spelled if reply is None else reply
    inside = choice if "prompt_logprobs" in choice else answer
    entries = prompts.of_entries(inside, prompt)
    given = entries if entries is not None else None if echo is None or prompt is None else echo.prompt
    n_reply = _drawn_tokens(answer, reply, echo) if of == 1 else None
    if prompt is not None and prompts.rescored(outer, choice, given, n_reply, bool(values), of == 1):
        return _scored_again(outer, answer, prompt, given, place, entries is not None, texts)
    facts = asked(outer, answer) | _facts(outer, answer, choice, index, of)
    if reply is None:
        return TextRecord(place, texts, facts, "no token ids in the answer (ask for return_token_ids): text only")
    ids = joined(prompt, reply)
    columns = present(
        sampler_logprobs=None if values is None else floats(values, "reply"),
        policy_version=versions(choice, len(reply)),
        prompt_logprobs=prompts.column(given, len(reply)),
    )
    lists = routes(choice.get("routed_experts"), len(ids))
    kept = choice.lists("sampling_mask")
    lists |= {} if kept is None else {"sampling_mask": (kept, "reply")}
    n_prompt, known = (0 if prompt is None else len(prompt)), prompt is not None
    claims = _counts(answer, of, known)
    said = _semantics(columns, entries is not None)
    return RawRecord(place, ids, n_prompt, columns, facts, lists, said, claims, prompt_known=known, texts=texts)


def _drawn_tokens(answer: Row, reply: NDArray[np.int64] | None, echo: prompts.Echo | None) -> int | None:
    """How many tokens were drawn, as far as the answer tells."""
    if reply is not None:
        return len(reply)
    return (answer.object("usage") or Row({})).whole("completion_tokens") if echo is None else len(echo.reply)


def _scored_again(
    outer: Row, answer: Row, prompt: NDArray[np.int64], values: list[Any] | None, place: str, by_vllm: bool,
    texts: Mapping[str, Any],
) -> RawRecord:  # fmt: skip
    """A text that was sent as a prompt. How the request would have drawn says nothing of it, and the answer's id is not
    its name."""
    facts = {
        "record_id": outer.name("custom_id") or outer.name("record_id"),
        "group_id": outer.name("group_id"),
        "sample_id": outer.name("sample_id"),
        "reward": outer.number("reward"),
        "step": outer.whole("step"),
    }
    claims = {key: n for key, n in _counts(answer, 1, True).items() if key == "prompt"}
    columns = present(prompt_logprobs=prompts.column(values, 0))
    said = _semantics(columns, by_vllm)
    return RawRecord(place, prompt, len(prompt), columns, facts, {}, said, claims, texts=texts)


def _semantics(columns: Mapping[str, RawColumn], by_vllm: bool) -> dict[str, dict[str, Any]]:
    return {"prompt": {"semantics": "raw"}} if by_vllm and "prompt_logprobs" in columns else {}


def _logprobs(choice: Row) -> tuple[list[Any] | None, NDArray[np.int64] | None, list[str] | None]:
    """Log-probs, ids as far as they stand among them, and the tokens as text."""
    said = choice.get("logprobs")
    if said is None:
        return None, None, None
    if isinstance(said, list):  # vLLM offline: {id: {"logprob"}} a token
        return _of_sampled(choice.objects("logprobs"), choice.ids("token_ids"))
    part = Row(said)
    if isinstance(part.get("token_logprobs"), list):
        strings = part.list("tokens")
        return part.list("token_logprobs"), _spelled(strings), _strings(strings)
    entries = part.objects("content") if "content" in part else None
    if entries is None:
        return None, None, None
    values = [e.get("logprob") for e in entries]
    if entries and all("token_id" in e for e in entries):
        return values, ids_of([e.get("token_id") for e in entries]), None
    strings = [e.get("token") for e in entries]
    return values, _spelled(strings), _strings(strings)


def _of_sampled(
    entries: list[Row], ids: NDArray[np.int64] | None
) -> tuple[list[Any] | None, NDArray[np.int64] | None, None]:
    """Without the ids the sampled one among the top ones is not known."""
    if ids is None or len(ids) != len(entries):
        raise ValueError(f"'logprobs': got {len(entries)} entries, wanted one for each of token_ids")
    found = [entry.get(str(token)) for entry, token in zip(entries, ids.tolist(), strict=True)]
    return [_mapping(x).get("logprob") if isinstance(x, Mapping) else x for x in found], None, None


def _spelled(strings: list[Any] | None) -> NDArray[np.int64] | None:
    """Ids of `token_id:5`, as vLLM writes tokens with `return_tokens_as_token_ids`."""
    if not strings or not all(isinstance(x, str) and x.startswith(_SPELLED) for x in strings):
        return None
    numbers = [x[len(_SPELLED) :] for x in strings]
    if not all(x.isascii() and x.isdigit() and len(x) < 11 for x in numbers):
        raise ValueError(f"'tokens': got {quoted(strings)}, wanted token_id:NUMBER")
    return ids_of([int(x) for x in numbers])


def _strings(items: list[Any] | None) -> list[str] | None:
    if items is None or not all(isinstance(x, str) for x in items):
        return None
    return [unicode("token", x) for x in items]


def _texts(
    outer: Row, answer: Row, choice: Row, strings: list[str] | None, echo: prompts.Echo | None
) -> dict[str, Any]:
    message = choice.get("message")
    reply = _mapping(message).get("content") if message is not None else choice.get("text")
    messages = _mapping(outer.get("request")).get("messages", outer.get("messages"))
    prompt = answer.get("prompt_text") or answer.get("prompt")
    if echo is not None:
        prompt, reply, strings = _cut(echo, prompt, reply, strings or [])
    found = {
        "reply_text": unicode("text", reply) if isinstance(reply, str) else None,
        "prompt_text": unicode("prompt", prompt) if isinstance(prompt, str) else None,
        "messages": messages if isinstance(messages, list) else None,
        "token_strings": strings,
    }
    return {key: value for key, value in found.items() if value is not None}


def _cut(echo: prompts.Echo, prompt: Any, text: Any, strings: list[str]) -> tuple[Any, str | None, list[str] | None]:
    """Prompt, reply and the reply's tokens, as far as the tokens spell the text: vLLM leaves the prompt out of it where
    it returns the ids."""
    given, drawn = "".join(strings[: echo.n_prompt]), strings[echo.n_prompt :]
    reply = "".join(drawn)
    if text == given + reply:
        return given, reply, drawn
    return prompt, (reply if text == reply else None), drawn or None


def _facts(outer: Row, answer: Row, choice: Row, index: int, of: int) -> dict[str, Any]:
    answer_id = answer.name("id") or answer.name("request_id") or outer.name("custom_id") or outer.name("id")
    usage = answer.object("usage") or Row({})
    details = usage.object("prompt_tokens_details") or Row({})
    several = of > 1 and answer_id is not None
    return {
        "record_id": f"{answer_id}#{index}" if several else answer_id,
        "group_id": answer_id if several else outer.name("group_id"),
        "sample_id": str(index) if several else outer.name("sample_id"),
        "finish_reason": finish(choice),
        "cached_prefix_length": details.whole("cached_tokens", 32),
        "reward": outer.number("reward"),
        "step": outer.whole("step"),
    }


def _counts(answer: Row, of: int, prompt_known: bool) -> dict[str, int]:
    usage = answer.object("usage") or Row({})
    prompt, reply = usage.whole("prompt_tokens"), usage.whole("completion_tokens")
    out = {} if reply is None or of > 1 else {"reply": reply}
    return out | ({} if prompt is None or not prompt_known else {"prompt": prompt})


# SGLang


def _sglang(outer: Row, answer: Row, place: str) -> Read:
    meta = answer.object("meta_info") or Row({})
    text = answer.text("text")
    texts = {} if text is None else {"reply_text": text}
    drawn, told = _triples(meta, "output_token_logprobs"), answer.ids("output_ids")
    prompt = prompt_ids(outer, answer, answer)
    prompt = _whole_prompt(meta) if prompt is None else prompt
    given = prompts.of_end(_triples(meta, "input_token_logprobs"), prompt)
    reply = drawn[1] if drawn is not None and told is None else told
    n_reply = meta.whole("completion_tokens") if reply is None else len(reply)
    if prompt is not None and prompts.rescored(outer, meta, given, n_reply, bool(drawn and drawn[0]), True):
        counted = Row({"usage": {"prompt_tokens": meta.whole("prompt_tokens")}})
        return _scored_again(outer, counted, prompt, given, place, False, {})
    facts = asked(outer, answer) | _meta_facts(outer, meta)
    if reply is None:
        return TextRecord(place, texts, facts, "no token ids in the answer (ask for return_logprob): text only")
    ids = joined(prompt, reply)
    columns = _drawn_columns(meta, None if drawn is None else _sampled(drawn, reply), len(reply))
    columns |= present(prompt_logprobs=prompts.column(given, len(reply)))
    if "output_token_sampling_logprobs" in meta:
        facts["logprob_semantics"] = "processed"
    kept = meta.lists(meta.first("output_token_sampling_mask", "sampling_mask", "output_top_p_token_ids"))
    lists = routes(meta.get("routed_experts"), len(ids))
    lists |= {} if kept is None else {"sampling_mask": (kept, "reply")}
    known = prompt is not None
    n_prompt = 0 if prompt is None else len(prompt)
    counts = {"reply": meta.whole("completion_tokens"), "prompt": meta.whole("prompt_tokens") if known else None}
    claims = {key: n for key, n in counts.items() if n is not None}
    return RawRecord(place, ids, n_prompt, columns, facts, lists, claims=claims, prompt_known=known, texts=texts)


def _whole_prompt(meta: Row) -> NDArray[np.int64] | None:
    """The prompt's ids, if the answer has all of them and not only its end."""
    given = _triples(meta, "input_token_logprobs")
    return given[1] if given is not None and given[0] and len(given[1]) == meta.whole("prompt_tokens") else None


def _drawn_columns(meta: Row, value: RawColumn | None, n: int) -> dict[str, RawColumn]:
    kept_only = meta.floats("output_token_sampling_logprobs", "reply")
    return present(
        sampler_logprobs=value if kept_only is None else kept_only,
        full_logprobs=None if kept_only is None else value,
        policy_version=_version(meta, n),
    )


def _sampled(drawn: tuple[list[Any], NDArray[np.int64]], reply: NDArray[np.int64]) -> RawColumn:
    values, ids = drawn
    if len(ids) == len(reply) and not np.array_equal(ids, reply):
        at = int(np.flatnonzero(ids != reply)[0])
        raise ValueError(
            f"output_token_logprobs are of other tokens than output_ids: position {at} has {ids[at]} and {reply[at]}"
        )
    return floats(values, "reply")


def _triples(meta: Row, key: str) -> tuple[list[Any], NDArray[np.int64]] | None:
    """(log-probs, ids) of `[[log-prob, id, text], ...]`."""
    triples = meta.list(key)
    if triples is None:
        return None
    for i, x in enumerate(triples):
        if not isinstance(x, list) or len(cast(list[Any], x)) < 2:
            raise ValueError(f"{key!r}, position {i}: got {quoted(x)}, wanted [log-prob, id, text]")
    return [x[0] for x in triples], ids_of([x[1] for x in triples])


def _meta_facts(outer: Row, meta: Row) -> dict[str, Any]:
    return {
        "record_id": meta.name("id") or outer.name("custom_id") or outer.name("id"),
        "group_id": outer.name("group_id"),
        "sample_id": outer.name("sample_id"),
        "finish_reason": finish(meta),
        "cached_prefix_length": meta.whole("cached_tokens", 32),
        "reward": outer.number("reward"),
        "step": outer.whole("step"),
    }


def _version(meta: Row, n: int) -> RawColumn | None:
    said = meta.name("weight_version")
    if said is None or not (said.isascii() and said.isdigit() and len(said) < 19):
        return None
    return RawColumn(np.full(n, int(said), dtype=np.int64), "reply")
