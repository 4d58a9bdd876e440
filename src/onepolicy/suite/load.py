"""`load`: a size of the suite, a user's own files beside it or instead of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from onepolicy.errors import ContentError, UnknownName, UsageError
from onepolicy.suite import makers
from onepolicy.suite.items import SIZES, Item, Prompt, SuitePrompt, SuiteText, item, prompt_of, rows

#: Raised with every change of the data; what it names is pinned by a test.
VERSION = "2026.11.30"
#: The files of the package, in the order of their items.
FILES = ("prompts.jsonl", "quick.jsonl", "texts.jsonl")


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts to draw from and texts to score, two kinds that no number mixes.

    `version`: of the package's data, size, and a digest of every item; the same items have the same version.
    """

    size: str
    version: str
    prompts: tuple[SuitePrompt, ...]
    texts: tuple[SuiteText, ...]


def load(size: str = "default", files: Sequence[str | Path] = (), only_files: bool = False) -> Suite:
    """The items of one size (`smoke` is in `default` is in `full`), then those of `files`.

    `only_files`: nothing of ours. Files: `.txt`, one prompt a line; else JSON lines as `suite.items` describes.

    Errors: `UnknownName` for a size; `UsageError` for a file that cannot be read, and for `only_files` without any;
    `ContentError` with file and line for an item that is none, or whose id is taken.
    """
    if size not in SIZES:
        raise UnknownName("suite size", size, SIZES)
    if only_files and not files:
        raise UsageError("the suite was asked for your files only, but no file was given")
    wanted = SIZES[: SIZES.index(size) + 1]
    ours = [] if only_files else [pair for name in FILES for pair in _own(name) if pair[1].size in wanted]
    items = _unlike(ours + [pair for path in files for pair in _of_user(Path(path))])
    return Suite(
        size,
        f"{'files' if only_files else VERSION}-{size}-{digest(items)}",
        tuple(x for x in items if isinstance(x, SuitePrompt)),
        tuple(x for x in items if isinstance(x, SuiteText)),
    )


def digest(items: Sequence[Item]) -> str:
    """SHA-256, 12 hex digits, over all items in order, and the makers' parts where one is made."""
    total = hashlib.sha256()
    for x in items:
        total.update(json.dumps([type(x).__name__, asdict(x)], sort_keys=True).encode() + b"\n")
    if any(x.made for x in items):
        total.update(makers.source())
    return total.hexdigest()[:12]


def own_prompts() -> list[Prompt]:
    """The 64 prompts of `record`: code, prose, numbers, several scripts, and chats."""
    return [x.prompt for _, x in _own("quick.jsonl")]


def read_prompts(path: str | Path) -> list[Prompt]:
    """A user's prompts: `.txt`, one a line; else JSON lines, each `{"prompt": text}` or `{"messages": [...]}`.

    Errors: `UsageError` for a file that cannot be read, `ContentError` with the line for one that is no prompt.
    """
    path = Path(path)
    if path.suffix == ".txt":
        return _lines(path)
    found = [prompt_of(row, where) for where, row in rows(_text(path), path.name)]
    if not found:
        raise ContentError(f"prompts {str(path)!r}: the file holds no prompt")
    return found


def _own(name: str) -> list[tuple[str, Item]]:
    text = (resources.files("onepolicy.suite") / "data" / name).read_text(encoding="utf-8")
    return [(where, item(row, where, where, "")) for where, row in rows(text, name)]


def _of_user(path: Path) -> list[tuple[str, Item]]:
    """(where, item) of each. Ids and categories that are not given come from the file's name."""
    if path.suffix == ".txt":
        found = [(f"{path.name}:{i}", line) for i, line in enumerate(_lines(path), 1)]
    else:
        found = list(rows(_text(path), path.name))
    if not found:
        raise ContentError(f"{path}: the file holds no prompt and no text")
    return [(where, item(row, where, where, path.stem)) for where, row in found]


def _lines(path: Path) -> list[Prompt]:
    found: list[Prompt] = [line.rstrip("\r") for line in _text(path).split("\n") if line.strip()]
    if not found:
        raise ContentError(f"prompts {str(path)!r}: the file holds no prompt")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"prompts {str(path)!r} cannot be read: {err}") from None


def _unlike(found: Sequence[tuple[str, Item]]) -> list[Item]:
    """Errors: `ContentError` for an id that two items have."""
    first: dict[str, str] = {}
    for where, x in found:
        if x.id in first:
            raise ContentError(f"{where}: id {x.id!r} is taken (by {first[x.id]}); every item has its own")
        first[x.id] = where
    return [x for _, x in found]
