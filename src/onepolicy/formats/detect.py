"""Which files of a dump are whose: each is asked by its content, and what nobody knows is named with the reason."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from onepolicy.errors import ContentError
from onepolicy.formats import FORMATS, base
from onepolicy.formats.base import Format, Shard
from onepolicy.formats.files import Files
from onepolicy.formats.jsonl_lines import name_of
from onepolicy.formats.npy import MAGIC
from onepolicy.formats.sniff import arrays_of, head_of, is_parquet, keys_of

#: Files that stand beside a dump and hold no sequences: pattern of the name -> what it is.
BESIDE: dict[str, str] = {
    r"^\.": "a hidden file",
    r"^(STABLE|_SUCCESS|DONE|COMPLETE|COMMITTED)$": "a marker that a writer is done",
    r"\.(tmp|temp|part|partial|lock|crc|swp)$|~$": "a temporary file of a writer",
    r"^(meta|metadata|config|run_config|args|dataset_info|index|report)\.json$": "about the run, no sequences",
    r"_metadata\.jsonl$": "about the run, no sequences",
    r"(?i)^(README|LICENSE|NOTES)(\.|$)|\.(md|txt|log|out|err|yaml|yml|toml|py|sh|csv|html|png)$": "no rollouts",
}


@dataclass(frozen=True, slots=True)
class Detected:
    """`shards`: what can be read, in order. `unclaimed`: (file, why) of every other file."""

    shards: tuple[Shard, ...]
    unclaimed: tuple[tuple[str, str], ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the formats that were found, in the order of `FORMATS`."""
        found = {shard.format for shard in self.shards}
        return tuple(name for name in FORMATS if name in found)


def format_of(name: str) -> Format:
    """The module of that name in `FORMATS`. Errors: `KeyError`."""
    return cast(Format, importlib.import_module(FORMATS[name]))


def detect(uris: Iterable[str | Path], files: Files | None = None) -> Detected:
    """The files behind paths, folders, globs and URLs, grouped into shards. A folder may hold more than one format.

    Errors: `UsageError` for a path with nothing behind it.
    """
    files = Files() if files is None else files
    paths = files.expand(uris)
    claimed: dict[str, list[str]] = {}
    unclaimed: list[tuple[str, str]] = []
    for path in paths:
        owner, why = _owner(path, files, paths)
        if owner is None:
            unclaimed.append((path, why))
        else:
            claimed.setdefault(owner, []).append(path)
    shards: list[Shard] = []
    for name in FORMATS:
        for shard in format_of(name).shards(claimed[name]) if name in claimed else ():
            try:
                shards += _split(shard, files)
            except ContentError as err:
                unclaimed += [(path, _about(path, err)) for path in shard.paths]
    return Detected(tuple(shards), tuple(sorted(unclaimed)))


def _owner(path: str, files: Files, paths: Sequence[str]) -> tuple[str | None, str]:
    """(format, "") or (None, why not)."""
    beside = next((what for pattern, what in BESIDE.items() if re.search(pattern, os.path.basename(path))), None)
    if beside is not None:
        return None, beside
    try:
        head = head_of(path, files)
    except ContentError as err:
        return None, _about(path, err)
    if not head:
        return None, _EMPTY
    for name in FORMATS:
        if format_of(name).claims(path, head, paths):
            return name, ""
    return None, _unknown(path, head)


def is_damaged(why: str) -> bool:
    """Whether a file is unclaimed since it cannot be read, and not since it is something else."""
    return why not in {*BESIDE.values(), _EMPTY} and not why.startswith((_NO_FORMAT, _NOT_KNOWN))


_EMPTY, _NO_FORMAT, _NOT_KNOWN = "an empty file", "no known format has these", "not a dump that is known"


def _unknown(path: str, head: bytes) -> str:
    if head.startswith(MAGIC):
        return f"{_NOT_KNOWN}: an .npy is one array without a name; wanted .npz (np.savez) with token_ids and log-probs"
    arrays = arrays_of(head)
    keys = [str(k)[:40] for k in arrays or keys_of(head)]
    if not keys:
        return f"{_NOT_KNOWN}: {name_of(path)} begins with {head[:16]!r}"
    what = "columns" if is_parquet(head) else "arrays" if arrays else "keys"
    shown = ", ".join(keys[:12]) + (f" and {len(keys) - 12} more" if len(keys) > 12 else "")
    return f"{_NO_FORMAT} {what}: {shown}"


def _about(path: str, err: Exception) -> str:
    return str(err).removeprefix(f"{path}: ")


def _split(shard: Shard, files: base.Files) -> list[Shard]:
    cut = getattr(format_of(shard.format), "split", None)
    return [shard] if cut is None else cut(shard, files)
