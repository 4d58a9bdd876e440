"""Scenarios of the token codes: records in memory, the packaged tokenizer, edited copies of it, small templates."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onepolicy import models
from onepolicy.same_tokens import check_chat_template, check_rollouts, check_tokenizers, check_two_templates
from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.directory import Around
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.open import open_tokenizer
from onepolicy.types import TokenReport

Edit = Callable[[dict[str, Any]], Any]
END = 2  # <|im_end|>


@functools.cache
def tiny() -> Tokenizer:
    return open_tokenizer("tiny")


def ids(text: str) -> list[int]:
    """As the packaged tokenizer encodes a text."""
    return tiny().encode([text])[0]


def pieces(*texts: str) -> list[int]:
    """Each text encoded alone: an order of merges that the whole text would not get."""
    return [i for text in texts for i in ids(text)]


def edited(edit: Edit) -> FastTokenizer:
    """A copy of the packaged tokenizer.json with one thing changed."""
    content = copy.deepcopy(json.loads((Path(models.path("tiny")) / "tokenizer.json").read_text(encoding="utf-8")))
    edit(content)
    return FastTokenizer.from_json(content)


def beside(**more: Any) -> FastTokenizer:
    """The packaged tokenizer with other files around it."""
    return FastTokenizer.from_json(
        (Path(models.path("tiny")) / "tokenizer.json").read_text(encoding="utf-8"),
        beside=Around(**{"tokens": {"eos_token": "<|im_end|>"}, "specials_known": True, **more}),
    )


# -- rollouts ----------------------------------------------------------------------------------------------------------


def row(name: str, reply: Sequence[int], prompt: str = "2 + 2 =", **more: Any) -> dict[str, Any]:
    return {"id": name, "prompt_ids": ids(prompt), "response_ids": list(reply), "stop_token_ids": [END], **more}


#: A reply of eight ids that ends at its stop token.
REPLY = [*ids(" It is four, I think."), END]
#: The same text as `ids` of it, in other pieces.
OTHER_CUT = pieces(" def", " te", "st", "_na", "me", "(", ")", ":")


def rollouts(*rows: dict[str, Any], tokenizer: Tokenizer | None = None, **more: Any) -> TokenReport:
    return check_rollouts(rows, tokenizer, **more)


def with_tiny(*rows: dict[str, Any], **more: Any) -> TokenReport:
    return rollouts(*rows, tokenizer=tiny(), **more)


def _logprobs(n: int) -> list[float]:
    return [-0.25 - 0.125 * (i % 5) for i in range(n)]


def _sides(engine: list[int], trainer: list[int], **more: Any) -> TokenReport:
    """What engine and trainer read for one prompt, in the ids of a Llama 3 tokenizer."""
    return rollouts({"id": "prompt-07", "engine_ids": engine, "trainer_ids": trainer, "bos_token_id": 128000, **more})


_LLAMA = [128000, 128006, 882, 128007, 271, 9906, 11, 1917, 128009]


def _turns(sequence: Sequence[int], mask: Sequence[int] | None = None) -> TokenReport:
    """Two sampled turns, and the training sequence that was made of them."""
    turns = [{"prompt_ids": p, "reply_ids": r} for p, r in (TURN_1, TURN_2)]
    n = len(TURN_1[0])
    more = {} if mask is None else {"loss_mask": list(mask)[n:]}
    return with_tiny(
        {"id": "chat-3", "prompt_ids": list(sequence[:n]), "response_ids": list(sequence[n:]), "turns": turns, **more}
    )


def chat(*messages: tuple[str, str]) -> list[int]:
    """As the packaged template renders them, with the generation prompt behind."""
    told = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return ids(f"{told}<|im_start|>assistant\n")


_FIRST = chat(("user", "Pick a number."))
_SEVEN = [*ids("Seven."), END]
_REST = ids("\n<|im_start|>user\nDouble it.<|im_end|>\n<|im_start|>assistant\n")
_FOURTEEN = [*ids("Fourteen."), END]
#: Two turns as sampled: the ids of the prompt, the ids of the reply.
TURN_1, TURN_2 = (_FIRST, _SEVEN), ([*_FIRST, *_SEVEN, *_REST], _FOURTEEN)
WHOLE = [*TURN_2[0], *_FOURTEEN]
MASK = [0] * len(_FIRST) + [1] * len(_SEVEN) + [0] * len(_REST) + [1] * len(_FOURTEEN)


def _without_newline() -> TokenReport:
    """The trainer joins the turns as sampled and forgets what the template writes behind the stop token."""
    return _turns([*_FIRST, *_SEVEN, *_REST[1:], *_FOURTEEN])


def _span_encoded_again() -> TokenReport:
    """The first reply was sampled in other pieces than its text encodes to, and the trainer encoded the text."""
    sampled = [*pieces("Seve", "n."), END]
    second = [*_FIRST, *sampled, *_REST]
    turns = [{"prompt_ids": _FIRST, "reply_ids": sampled}, {"prompt_ids": second, "reply_ids": _FOURTEEN}]
    return with_tiny({"id": "chat-3", "prompt_ids": _FIRST, "response_ids": WHOLE[len(_FIRST) :], "turns": turns})


def _tool_output_trained() -> TokenReport:
    """The mask is 1 over the whole reply; the tool's answer stands inside."""
    call, answer = [*ids("look_up(7)"), END], ids("\n<tool>1.8 m</tool>\n")
    reply = [*call, *answer, *ids("1.8 metres."), END]
    start = len(ids("How high is the tide?")) + len(call)
    spans = [[start, start + len(answer)]]
    return rollouts(row("tool-2", reply, "How high is the tide?", loss_mask=[1] * len(reply), tool_spans=spans))


def _skipped() -> TokenReport:
    """One reply in which a turn ends and another begins, handed on as text without special tokens."""
    reply = [*ids("Seven."), END, *ids("\nMore?"), END]
    return with_tiny(row("chat-9", reply, response_text="Seven.\nMore?"), reencodes=True)


def _emoji_cut() -> TokenReport:
    """Cut by length two bytes into an emoji."""
    return with_tiny(row("story-4", ids(" so happy \U0001f60a")[:-2], finish_reason="length"))


# -- two tokenizers ----------------------------------------------------------------------------------------------------


def pair(edit: Edit) -> TokenReport:
    """The packaged tokenizer against an edited copy."""
    return check_tokenizers(edited(lambda content: None), edited(edit))


def around(a: dict[str, Any], b: dict[str, Any]) -> TokenReport:
    return check_tokenizers(beside(**a), beside(**b))


def _put(name: str, value: Any) -> Edit:
    return lambda content: content.update({name: value})


def _swap_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    a, b = list(vocabulary)[400], list(vocabulary)[450]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]


def _swap_merges(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[0], merges[40] = merges[40], merges[0]


def _single_digits(content: dict[str, Any]) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}


def _digits_merged(content: dict[str, Any]) -> None:
    """A merge that the packaged vocabulary does not have: 1 and 2 become one token."""
    content["model"]["vocab"]["12"] = 512
    content["model"]["merges"].append(["1", "2"])


_BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}


_STRIPPING = {
    "type": "Sequence",
    "decoders": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def _normalizing() -> FastTokenizer:
    return edited(_put("normalizer", {"type": "NFC"}))


# -- chat templates ----------------------------------------------------------------------------------------------------


def chatml(body: str = "{{ m.content }}", generation: str = "<|im_start|>assistant\\n") -> str:
    """ChatML with `body` (Jinja) for the text of a message."""
    return (
        f"{{% for m in messages %}}{{{{ '<|im_start|>' ~ m.role ~ '\\n' }}}}{body}{{{{ '<|im_end|>\\n' }}}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{generation}' }}}}{{% endif %}}"
    )


#: Thinking of all replies but the last goes.
FORGETTING = chatml(
    "{% set old = messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list %}"
    "{{ m.content.split('</think>\\n\\n')[-1] if m.role == 'assistant' and old else m.content }}"
)
#: Nothing opens the reply: its header comes with it.
NO_PROMPT = chatml().partition("{% if add_generation_prompt %}")[0]
#: Calls with their keys sorted.
SORTING = chatml(
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '{{ \'<call>{"name": "\' ~ c.function.name ~ \'", "arguments": \' }}'
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson(sort_keys=true) }}"
    "{{ '}</call>' }}{% endfor %}"
)


def template(text: str) -> TokenReport:
    return check_chat_template(text, tiny())


SCENARIOS: dict[str, Callable[[], TokenReport]] = {
    # the record
    "counts-disagree": lambda: rollouts(
        row("math-12", REPLY[:-1], finish_reason="stop", rollout_logprobs=_logprobs(len(REPLY)))
    ),
    "unknown-ids": lambda: with_tiny(row("math-12", [*REPLY[:-1], 51200, END])),
    "lines-skipped": lambda: rollouts(row("math-1", REPLY), {"id": "math-2", "response_ids": [12, "7", 3]}),
    "nothing-checked": lambda: rollouts({"prompt": "2 + 2 =", "completion": " It is four."}),
    # ids and text
    "retokenization-drift": lambda: with_tiny(row("code-5", OTHER_CUT, finish_reason="length"), reencodes=True),
    "noncanonical-ids": lambda: with_tiny(row("code-5", OTHER_CUT, finish_reason="length"), row("code-6", REPLY)),
    "incomplete-utf8": _emoji_cut,
    "text-not-kept": lambda: rollouts(row("word-8", ids(" cafe\u0301")), tokenizer=_normalizing()),
    "text-of-other-ids": lambda: with_tiny(row("math-12", REPLY, response_text="The answer is 4.")),
    "special-token-look-alike": lambda: with_tiny(row("quote-2", pieces("write <|", "im_end", "|> last"))),
    "special-tokens-lost": _skipped,
    "double-bos": lambda: _sides([128000, *_LLAMA], _LLAMA),
    "prompt-ids-differ": lambda: _sides(_LLAMA, [*_LLAMA[:5], 15339, *_LLAMA[6:]]),
    "prompt-cut": lambda: _sides([*_LLAMA[:1], *range(900, 1000)], list(range(940, 1000))),
    # two tokenizers
    "texts-encode-differently": lambda: with_tiny(
        row("math-12", ids("x=12"), finish_reason="length"), scorer_tokenizer=edited(_digits_merged)
    ),
    "vocabularies-differ": lambda: pair(_swap_ids),
    "merges-differ": lambda: pair(_swap_merges),
    "normalizer-differs": lambda: pair(_put("normalizer", {"type": "NFC"})),
    "pre-tokenizer-differs": lambda: pair(_single_digits),
    "post-processor-differs": lambda: pair(_put("post_processor", _BOS)),
    "decoder-differs": lambda: pair(_put("decoder", _STRIPPING)),
    "added-tokens-differ": lambda: pair(lambda content: content["added_tokens"][2].update(lstrip=True)),
    "special-ids-differ": lambda: around({}, {"tokens": {"eos_token": "<|endoftext|>"}}),
    "chat-template-differs": lambda: check_two_templates(chatml(), chatml("{{ m.content | trim }}"), tiny()),
    "stop-ids-differ": lambda: around({"stop_ids": (0, 2)}, {"stop_ids": (0,)}),
    "padded-vocabulary": lambda: around({"rows": 576}, {"rows": 576}),
    # chat templates
    "history-rewritten-by-template": lambda: template(FORGETTING),
    "generation-prompt-differs": lambda: template(NO_PROMPT),
    "suffix-after-stop-missing": _without_newline,
    "tool-call-rewritten": lambda: template(SORTING),
    "control-tokens-unknown": lambda: template(chatml().replace("<|im_end|>", "<|eot_id|>")),
    "template-failed": lambda: template("{% for m in messages %}{{ m.content }}"),
    # stop tokens, masks
    "stop-token-not-trained": lambda: rollouts(
        row("math-12", REPLY, loss_mask=[1] * (len(REPLY) - 1) + [0], finish_reason="stop")
    ),
    "stop-token-missing": lambda: rollouts(row("math-12", REPLY[:-1], finish_reason="stop")),
    "stop-token-appended": lambda: rollouts(row("math-12", REPLY, loss_mask=[1] * len(REPLY), finish_reason="length")),
    "wrong-stop-id": lambda: rollouts(row("math-12", REPLY, eos_token_id=0, finish_reason="stop")),
    "finish-reason-contradicts": lambda: rollouts(
        row("math-12", REPLY, rollout_logprobs=_logprobs(len(REPLY)), finish_reason="length")
    ),
    "undrawn-tokens-trained": _tool_output_trained,
    "stop-token-inside": lambda: rollouts(
        row("math-12", [*REPLY, *REPLY], rollout_logprobs=_logprobs(2 * len(REPLY)), finish_reason="stop")
    ),
    "sampled-not-trained": lambda: rollouts(
        row("math-12", REPLY[:-1], loss_mask=[0] * (len(REPLY) - 1), finish_reason="length")
    ),
    "tokens-not-checked": lambda: rollouts({"id": "math-12", "prompt_ids": [50], "response_ids": REPLY}),
    # sampled spans
    "sampled-span-changed": _span_encoded_again,
    "span-mask-wrong": lambda: _turns(WHOLE, [*MASK[1:], 0]),
}
