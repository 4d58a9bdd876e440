"""A backend's target with its options: `PATH?key=value&key=value`, values percent-encoded where they hold & or %."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from urllib.parse import unquote

from onepolicy.errors import UnknownName, UsageError


def split_options(target: str, backend: str, known: Collection[str]) -> tuple[str, dict[str, str]]:
    """The path and the options. A path that exists may hold a question mark.

    Errors: `UsageError` for an option that is no key=value or comes twice; `UnknownName` for one that is not `known`.
    """
    if Path(target).expanduser().exists():
        return target, {}
    path, _, query = target.partition("?")
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or key in options:
            raise UsageError(f"tokenizer {target!r}: options are key=value joined by &, each once")
        if key not in known:
            raise UnknownName(f"option of the tokenizer backend {backend!r}", key, known)
        options[key] = unquote(value)
    return path, options


def file_of(path: str, backend: str, patterns: Collection[str]) -> Path:
    """The file that a target names: itself, or the only one of the patterns in a directory.

    Errors: `UsageError` where there is none, or more than one of the first pattern that fits.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return place
    wanted = " or ".join(patterns)
    if not place.is_dir():
        raise UsageError(f"tokenizer {backend}:{path}: no such file or directory; wanted {wanted}")
    for pattern in patterns:
        found = sorted(place.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(f.name for f in found[:5])
            raise UsageError(f"tokenizer {backend}:{path}: the directory holds {names}; name the one that is meant")
    raise UsageError(f"tokenizer {backend}:{path}: the directory holds no {wanted}")
