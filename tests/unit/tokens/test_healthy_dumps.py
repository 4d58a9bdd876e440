"""Healthy rollouts in the forms in which frameworks and servers write them: nothing to warn of."""

from __future__ import annotations

from typing import Any

import pytest

from onepolicy.same_tokens import check_rollouts
from onepolicy.tokens.open import open_tokenizer
from onepolicy.types import Outcome, Severity

TINY = open_tokenizer("tiny")
TEXT, PAD, END = "The lighthouse blinked twice.", 0, 2
PROMPT, BODY, TOOL = TINY.encode(
    [
        "<|im_start|>user\nTell me.<|im_end|>\n<|im_start|>assistant\n",
        TEXT,
        "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n",
    ]
)
REPLY = [*BODY, END]
N, T = len(REPLY), len(TOOL)
OURS = [-0.3 - 0.1 * (i % 5) for i in range(N)]
THEIRS = [x + 0.001 * (i % 3) for i, x in enumerate(OURS)]
STRINGS = [TINY.decode([[i]])[0] for i in REPLY]
CONTENT = [{"token": s, "logprob": x, "bytes": list(s.encode())} for s, x in zip(STRINGS, OURS, strict=True)]
USAGE = {"prompt_tokens": len(PROMPT), "completion_tokens": N, "total_tokens": len(PROMPT) + N}
MULTI = {"prompt_ids": PROMPT, "response_ids": [*REPLY, *TOOL, *REPLY], "finish_reason": "stop"}
MULTI_MASK = [*[1] * N, *[0] * T, *[1] * N]

#: form -> one rollout
FORMS: dict[str, dict[str, Any]] = {
    "slime": {
        "tokens": [*PROMPT, *REPLY], "response": TEXT, "response_length": N, "loss_mask": [1] * N,
        "rollout_log_probs": OURS, "status": "completed", "prompt": TINY.decode([PROMPT])[0],
    },
    "slime, cut": {
        "tokens": [*PROMPT, *BODY], "response": TEXT, "response_length": N - 1, "loss_mask": [1] * (N - 1),
        "rollout_log_probs": OURS[:-1], "status": "truncated",
    },
    "TRL": {
        "prompt_ids": PROMPT, "completion_ids": REPLY, "completion_mask": [1] * N, "old_per_token_logps": THEIRS,
        "sampling_per_token_logps": OURS,
    },
    "TRL, padded with another stop id": {
        "prompt_ids": [PAD, PAD, *PROMPT], "completion_ids": [*REPLY, PAD, PAD, PAD],
        "completion_mask": [*[1] * N, 0, 0, 0], "old_per_token_logps": [*THEIRS, 0.0, 0.0, 0.0],
        "sampling_per_token_logps": [*OURS, 0.0, 0.0, 0.0],
    },
    "verl, padded": {
        "prompts": [PAD, *PROMPT], "responses": [*REPLY, PAD, PAD], "response_mask": [*[1] * N, 0, 0],
        "rollout_log_probs": [*OURS, -1.0, -1.0], "old_log_probs": [*THEIRS, 0.0, 0.0],
    },
    "prime-rl": {
        "prompt_ids": PROMPT, "prompt_mask": [0] * len(PROMPT), "completion_ids": REPLY, "completion_mask": [1] * N,
        "completion_logprobs": OURS,
    },
    "SkyRL": {
        "prompt_token_ids": PROMPT, "response_ids": REPLY, "loss_mask": [1] * N, "rollout_logprobs": OURS,
        "stop_reason": "stop",
    },
    "torchtitan": {
        "rollout_id": "1", "status": "completed",
        "turns": [{"prompt_token_ids": PROMPT, "completion_token_ids": REPLY, "completion_logprobs": OURS}],
    },
    "mask and log-probs of the whole sequence": {
        "prompt_ids": PROMPT, "response_ids": REPLY, "loss_mask": [*[0] * len(PROMPT), *[1] * N],
        "logprobs": [*[None] * len(PROMPT), *OURS],
    },
    "vLLM's answer": {
        "prompt_token_ids": PROMPT, "usage": USAGE,
        "choices": [
            {"message": {"role": "assistant", "content": TEXT}, "logprobs": {"content": CONTENT}, "token_ids": REPLY,
             "finish_reason": "stop", "stop_reason": None}
        ],
    },
    "token_id strings": {
        "prompt_token_ids": PROMPT, "response_ids": REPLY, "token_strings": [f"token_id:{i}" for i in REPLY],
        "logprobs": OURS, "response_text": TEXT, "finish_reason": "stop",
    },
    "SGLang's finish reason": {
        "prompt_ids": PROMPT, "output_ids": REPLY, "text": TEXT, "finish_reason": {"type": "stop", "matched": END},
    },
    "tool output, 0.0 for its log-probs": {
        **MULTI, "response_mask": MULTI_MASK, "rollout_logprobs": [*OURS, *[0.0] * T, *OURS],
    },
    "tool output, null for its log-probs": {
        **MULTI, "response_mask": MULTI_MASK, "rollout_logprobs": [*OURS, *[None] * T, *OURS],
    },
    "tool output, turns": {
        **MULTI, "loss_mask": MULTI_MASK,
        "turns": [
            {"prompt_ids": PROMPT, "response_ids": REPLY},
            {"prompt_ids": [*PROMPT, *REPLY, *TOOL], "response_ids": REPLY},
        ],
    },
    "a cut reply, filtered": {
        "prompt_ids": PROMPT, "response_ids": BODY, "loss_mask": [0] * (N - 1), "rollout_logprobs": OURS[:-1],
        "finish_reason": "length",
    },
    "a cut reply, padded": {
        "prompt_ids": PROMPT, "response_ids": [*BODY, PAD, PAD], "loss_mask": [*[1] * (N - 1), 0, 0],
        "finish_reason": "length",
    },
    "aborted before the first token": {
        "prompt_ids": PROMPT, "response_ids": [], "loss_mask": [], "rollout_logprobs": [], "finish_reason": "abort",
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokenizer", [TINY, None], ids=["with its tokenizer", "alone"])
def test_nothing_to_warn_of(form: str, tokenizer: Any) -> None:
    stops = [] if tokenizer is not None else [PAD, END]
    report = check_rollouts([FORMS[form]], tokenizer, stop_ids=stops)
    assert report.outcome is Outcome.PASS
    assert [f for f in report.findings if f.severity is not Severity.INFO] == []
    assert report.counts["records"] == 1


def test_all_at_once() -> None:
    report = check_rollouts(FORMS.values(), TINY)
    assert report.outcome is Outcome.PASS and report.headline == "the sampled ids survive decoding and encoding"
    assert report.details["round_trip"]["checked"]["reply"] == len(FORMS)
