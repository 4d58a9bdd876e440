"""Prompts to draw from. `record` uses `prompts.jsonl`, 64 short ones written for this project, or a user's file."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from onepolicy.errors import ContentError, UsageError

Prompt = str | list[dict[str, str]]


def own_prompts() -> list[Prompt]:
    """The 64 prompts of `record`: code, prose, numbers, several scripts, and chats."""
    text = (resources.files("onepolicy.suite") / "prompts.jsonl").read_text(encoding="utf-8")
    return [_prompt(line, f"prompts.jsonl:{i}") for i, line in enumerate(text.splitlines(), 1)]


def read_prompts(path: str | Path) -> list[Prompt]:
    """A user's prompts: `.txt`, one a line; else JSON lines, each `{"prompt": text}` or `{"messages": [...]}`.

    Errors: `UsageError` for a file that cannot be read, `ContentError` with the line for one that is no prompt.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"prompts {str(path)!r} cannot be read: {err}") from None
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ContentError(f"prompts {str(path)!r}: the file holds no prompt")
    if path.suffix == ".txt":
        return [line for _, line in lines]
    return [_prompt(line, f"{path.name}:{i}") for i, line in lines]


def _prompt(line: str, where: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as err:
        raise ContentError(f"{where}: not JSON: {err}") from None
    if isinstance(row, str):
        return row
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return row["prompt"]
    if isinstance(row, dict) and _is_chat(row.get("messages")):
        return row["messages"]
    raise ContentError(f'{where}: wanted {{"prompt": text}} or {{"messages": [{{"role": ..., "content": ...}}]}}')


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
    )
