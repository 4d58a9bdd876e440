"""What a tokenizer is here: ids of texts, texts and bytes of ids, and a description of its parts.

Every backend (`BACKENDS`, one file each) is a `Tokenizer`. A text is encoded as a pipeline would meet it in the middle
of a sequence: nothing is added around it unless asked for. Ids are Python ints; a batch is a list of lists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

#: The parts of a tokenizer, in the order in which text passes through them; then what stands around it.
PARTS: dict[str, str] = {
    "model": "kind of model and its switches (BPE, Unigram; unknown token, byte fallback, dropout)",
    "vocabulary": "token -> id",
    "merges": "pairs in their order, or the pieces' scores",
    "normalizer": "what is changed in a text before it is split",
    "pre_tokenizer": "how a text is split before merging",
    "post_processor": "what is added around a text",
    "decoder": "how ids become text",
    "added_tokens": "tokens matched before the model, with their flags",
    "special_ids": "BOS, EOS, padding, unknown",
    "chat_template": "the template's text",
    "template_defaults": "arguments that the template gets by default",
    "stop_ids": "ids that end a reply (generation config)",
    "padded_vocabulary": "rows of the model's head",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part as JSON-able content. `known` False: this backend cannot tell (`why`); None content: it has none."""

    content: Any = None
    known: bool = True
    why: str = ""

    @property
    def digest(self) -> str:
        """First 12 hex digits of SHA-256 over the canonical JSON; `none` and `unknown` for those."""
        if not self.known:
            return "unknown"
        if self.content is None:
            return "none"
        text = json.dumps(self.content, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in the text before anything else. `lstrip`, `rstrip`: it eats white space there."""

    id: int
    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class Tokenizer(Protocol):
    """One tokenizer. Methods take and give whole batches: that is what is fast in every backend.

    `name`: as the user gave it. `size`: ids run from 0 to below this (there may be holes). `added`: by id.
    """

    BACKEND: ClassVar[str]
    name: str
    size: int
    added: Mapping[int, AddedToken]
    chat_template: str | None

    def encode(self, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True) -> list[list[int]]:
        """Ids of each text. `add_special`: with what the post-processor puts around it (BOS, EOS). `parse_special`:
        text that spells a special token becomes that token (what transformers and tokenizers do by default).

        Errors: `UsageError` for a mode that the backend does not have.
        """
        ...

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """The text of each list, without clean-up; U+FFFD where bytes are no UTF-8. Ids must exist (`exists`)."""
        ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token inside a text, None where it has none of its own or does not exist."""
        ...

    def exists(self, token_id: int) -> bool:
        """Whether the vocabulary has the id."""
        ...

    def special_ids(self) -> Mapping[str, int | None]:
        """`bos`, `eos`, `pad`, `unk` -> id, None where there is none."""
        ...

    def parts(self) -> Mapping[str, Part]:
        """Every one of `PARTS`."""
        ...


@dataclass(slots=True)
class TokenRecord:
    """One rollout as the token checks see it. What a file does not say is None; nothing is guessed.

    Ids are prompt and reply apart. `loss_mask`, `logprobs` (the sampler's), `scorer_logprobs` belong to the reply's
    ids, but have the length that the file gave. `sides`: other ids for the same prompt or reply, by who read them
    (`engine`, `trainer`). `spans`: `[start, stop)` in prompt + reply that were sampled, where known. `turns`: as
    sampled, each {"prompt_ids", "reply_ids", ...}. `usage`: counts that the engine reported.
    """

    record_id: str
    place: str = ""
    prompt_ids: list[int] | None = None
    reply_ids: list[int] | None = None
    prompt_text: str | None = None
    reply_text: str | None = None
    messages: list[Any] | None = None
    loss_mask: list[Any] | None = None
    logprobs: list[Any] | None = None
    scorer_logprobs: list[Any] | None = None
    token_strings: list[str] | None = None
    token_bytes: list[list[int]] | None = None
    finish_reason: str | None = None
    stop_ids: tuple[int, ...] = ()
    usage: Mapping[str, int] = field(default_factory=dict[str, int])
    sides: Mapping[str, list[int]] = field(default_factory=dict[str, list[int]])
    spans: list[tuple[int, int]] | None = None
    turns: list[Mapping[str, Any]] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
