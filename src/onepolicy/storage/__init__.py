"""The canonical files: Parquet (`.parquet`) and JSON lines (`.jsonl`, `.json`), the same content in both.

Both keep every bit: null, NaN and the infinities stay apart, float32 stays float32. Full distributions are not stored.
Columns are those of `schema.COLUMNS` (docs/columns.md); a name that starts with `x_` is the user's own and is ignored,
any other unknown name is refused.

Parquet: one row a sequence, token columns are lists. File metadata: `onepolicy.schema` = "1", `onepolicy.scorings` =
JSON of `{name: {semantics, dtype, fingerprint, scoring_id}}`. JSON lines: one record a line, as `records` describes,
the same declarations under the key `scorings` of the first one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from onepolicy.errors import ContentError, UsageError
from onepolicy.rollouts import Rollouts, concat
from onepolicy.storage import jsonl, parquet
from onepolicy.validate import validate_columns

__all__ = ["FORMATS", "iter_shards", "read", "write"]

#: suffix -> module with `shards(path, max_tokens)` and `write(rollouts, path)`.
FORMATS: dict[str, ModuleType] = {".parquet": parquet, ".jsonl": jsonl, ".json": jsonl}
#: Tokens that `read` converts at a time: bounds what it needs beside the result.
_READ_TOKENS = 1 << 20


def read(path: str | Path) -> Rollouts:
    """All sequences of a file, in order, checked by `validate`.

    Errors: `UsageError` for a file that is not there or of an unknown kind; `ContentError`, one line with the file
    and the record or line, for content that cannot be read or that breaks the column contract.
    """
    return concat(_declared_alike(list(iter_shards(path, _READ_TOKENS))))


def iter_shards(path: str | Path, max_tokens: int) -> Iterator[Rollouts]:
    """The same sequences in batches of at most `max_tokens` tokens, or of one longer sequence; never the whole file.

    Errors: as `read`, at the batch where they are met.
    """
    path = _existing(Path(path))
    if max_tokens < 1:
        raise UsageError(f"max_tokens: got {max_tokens}, wanted at least 1")
    n_records = n_tokens = 0
    for shard in _format(path).shards(path, max_tokens):
        try:
            validate_columns(shard, first=n_records)
        except ContentError as err:
            raise ContentError(f"{path}: {err}") from None
        n_records, n_tokens = n_records + len(shard), n_tokens + shard.n_tokens
        yield shard
    if n_tokens == 0:
        raise ContentError(f"{path}: the file is empty: {n_records} sequences, 0 tokens; nothing to compare")


def write(rollouts: Rollouts, path: str | Path, overwrite: bool = False) -> None:
    """Writes the file whole or not at all: a temporary one beside it takes its name at the end.

    Errors: `UsageError` for a file that is there (unless `overwrite`), an unknown suffix or a folder that cannot be
    written to; `ContentError` for text that is not Unicode, values that are not JSON, a scoring's name that is no name.
    """
    path = Path(path)
    form = _format(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; wanted the name of a file")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already; --overwrite (overwrite=True) replaces it")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        form.write(rollouts, temporary)
        os.replace(temporary, path)
    except OSError as err:
        raise UsageError(f"cannot write {path}: {err.strerror or err}") from err
    finally:
        temporary.unlink(missing_ok=True)


def _format(path: Path) -> ModuleType:
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise UsageError(f"{path}: got the suffix {path.suffix!r}, wanted one of {', '.join(FORMATS)}")
    return form


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; wanted a file ({', '.join(FORMATS)})")
    if not path.exists():
        raise UsageError(f"no such file: {path}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"no permission to read {path}")
    return path


def _declared_alike(parts: list[Rollouts]) -> list[Rollouts]:
    """A declaration may stand on a later line than the values it speaks of; the last part knows all of them."""
    known = parts[-1].scorings
    return [
        replace(
            part,
            scorings={
                name: replace(
                    scoring,
                    semantics=known[name].semantics,
                    dtype=known[name].dtype,
                    fingerprint=known[name].fingerprint,
                    scoring_id=known[name].scoring_id,
                )
                if name in known
                else scoring
                for name, scoring in part.scorings.items()
            },
        )
        for part in parts
    ]
