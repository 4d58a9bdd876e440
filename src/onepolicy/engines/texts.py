"""Texts and token ids for engines that read a model directory. Ids are made once and never made again from text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onepolicy.errors import EngineError, MissingExtra, UsageError

#: Environment of every process that loads a model directory: nothing is fetched.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
#: OpenMP threads that spin while they wait cost a factor of ten or more where something else uses the cores.
PATIENT_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}


class Texts:
    """The tokenizer of a model directory, loaded at first use.

    Errors: `EngineError` when the directory has no readable tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._loaded = directory, None

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            self._loaded = _load(self._directory)
        return self._loaded

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        """Ids of texts, with the special tokens that the tokenizer adds by itself, or of chat messages."""
        return [self._one(i, prompt) for i, prompt in enumerate(prompts)]

    def _one(self, i: int, prompt: str | list[dict[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if not getattr(self._tokenizer, "chat_template", None):
            raise UsageError(f"prompt {i} is chat messages, but {self._directory} has no chat template")
        try:
            ids = self._tokenizer.apply_chat_template(
                prompt, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as err:
            raise EngineError(f"prompt {i}: the chat template failed: {type(err).__name__}: {err}") from err
        return [int(x) for x in ids]

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone; part of a character shows as U+FFFD."""
        return [self._tokenizer.decode([int(i)]) for i in ids]


def _load(directory: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as err:
        raise MissingExtra("transformers", "hf", "reading a tokenizer") from err
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as err:
        first = (str(err).strip().splitlines() or ["no message"])[0]
        raise EngineError(f"{directory}: its tokenizer cannot be loaded: {type(err).__name__}: {first}") from err


def stop_ids(directory: Path) -> list[int]:
    """The ids that end a reply: generation_config.json's `eos_token_id`, else config.json's. Sorted, maybe empty."""
    import json

    for name in ("generation_config.json", "config.json"):
        file = directory / name
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            return sorted({int(i) for i in (eos if isinstance(eos, list) else [eos])})
    return []


class Decoder:
    """Ids to text for people, from a directory's `tokenizer.json` alone: no model, no torch."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone; part of a character shows as U+FFFD."""
        return [self._tokenizer.decode([int(i)], skip_special_tokens=False) for i in ids]


def decoder_of(target: str) -> Decoder | None:
    """The decoder of a spec's target, None where that is no model directory with a tokenizer."""
    from onepolicy.engines.model_files import model_directory

    try:
        return Decoder(model_directory(target, "texts"))
    except Exception:  # text is for the eye only: whatever is missing, ids are shown
        return None
