"""What a format gives: shards of a dump, and each sequence as the dump has it, before anything is proven.

A format is one module with

    name: str                                   "nemo_rl"
    says: str                                   one line: what it is, and which files
    def claims(path: str, head: bytes, names: Sequence[str]) -> bool
        does this file look like mine, by content (`head`, its first `HEAD_BYTES`); `names`, the other files of the dump
    def shards(paths: Sequence[str]) -> list[Shard]
        the claimed files grouped into pieces that can be read alone (rank files of one step are one shard)
    def read(shard: Shard, files: Files) -> Iterator[RawRecord | TextRecord | BrokenRecord]
        one sequence at a time; a record that cannot be read is a `BrokenRecord`, never an exception; a file that
        cannot be read at all raises `ContentError`; a sequence without token ids is a `TextRecord`

and, where one file can be read in parts,

    def split(shard: Shard, files: Files) -> list[Shard]
        the shard cut by `start` and `stop`, at places that depend on the file alone

Nothing here computes a number. A format renames, and says where each column's values stand (`Layout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from onepolicy.types import BoolArray

#: Bytes of a file that `claims` sees, uncompressed. For what `detect` can parse it makes a short head instead, so that
#: no key hides behind a long list: of JSON the first record with its lists and texts cut, of Parquet `PAR1` and the
#: names of its columns with null values as JSON. `sniff.keys_of` reads all of them.
HEAD_BYTES = 1 << 16
#: A line longer than this is not read into memory: it is a broken record of its file.
LINE_BYTES = 1 << 28

#: Where the values of a token column stand. `whole`: one for each of token_ids (what stands at 0 is not used);
#: `reply`: one for each token after the prompt; `next`: len(token_ids) - 1 values, value i is about token i + 1.
Layout = Literal["whole", "reply", "next"]


@dataclass(frozen=True, slots=True)
class RawColumn:
    """A token column as the dump has it; its length is not proven. `valid` None: nothing is null.

    `at_zero`: a "whole" column whose value at index 0 is a filler by that format's layout, and is dropped in silence.
    """

    values: NDArray[Any]
    layout: Layout
    valid: BoolArray | None = None
    at_zero: bool = True


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One sequence. `place`: `file:line` or `file[index]`. `token_ids`: prompt and reply.

    `prompt_length`: tokens of the prompt; None when the dump does not tell. `prompt_known` False: `token_ids` holds the
    reply alone (prompt_length 0); one stand-in token is put before it so that the first reply token has its place.
    `columns`: token columns by their names in `schema.COLUMNS` (`sampler_logprobs`, `old_logprobs`, `loss_mask`, ...).
    `facts`: record columns (`step`, `group_id`, `reward`, `temperature`, ...), None where null.
    `lists`: token_list columns (`sampling_mask`, `routed_experts`, ...): a list a token, None where
    null, placed by the Layout. `scorings`: `{name: {semantics, dtype, fingerprint}}` as far as the dump tells.
    `ids_known` False: the dump has log-probs and no ids; `token_ids` then only counts the tokens, 0, 1, 2, ..., so that
    none looks like another. Nothing that asks which token stands somewhere may be run on it.
    `claims`: counts that the record states of itself (`token_ids`, `reply`, `prompt`), held against what is there.
    """

    place: str
    token_ids: NDArray[Any]
    prompt_length: int | None
    columns: Mapping[str, RawColumn] = field(default_factory=dict[str, RawColumn])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lists: Mapping[str, tuple[Sequence[Any], Layout]] = field(default_factory=dict[str, tuple[Sequence[Any], Layout]])
    scorings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    claims: Mapping[str, int] = field(default_factory=dict[str, int])
    prompt_known: bool = True
    #: text of the record, for the text checks: `prompt_text`, `reply_text`, `messages`
    texts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ids_known: bool = True


@dataclass(frozen=True, slots=True)
class TextRecord:
    """A sequence of which the dump has the text and no token ids: good for the template and re-encoding checks only.

    `texts`: `prompt_text`, `reply_text`, `messages`, `token_strings`; `facts` as in `RawRecord`; `why`: what is
    missing.
    """

    place: str
    texts: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    why: str = "text only: no token-level data"


@dataclass(frozen=True, slots=True)
class BrokenRecord:
    """A record that cannot be read: where, and one line that says why."""

    place: str
    why: str
    record_id: str | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A piece of a dump that can be read alone: the files of it, and the format that reads them.

    `start`, `stop`: a part of one file where the format can be cut (row groups, byte ranges of lines); None: all of it.
    `order` sorts shards; `options`: what the format needs to know besides (JSON-able).
    """

    format: str
    paths: tuple[str, ...]
    start: int | None = None
    stop: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Files(Protocol):
    """Opens the files of a dump, local or remote."""

    def open(self, path: str) -> BinaryIO:
        """Errors: `ContentError` for a file that cannot be opened."""
        ...

    def size(self, path: str) -> int:
        """Bytes as stored. Errors: as `open`."""
        ...


#: What a reader gives for one sequence.
Read = RawRecord | TextRecord | BrokenRecord


class Format(Protocol):
    """See the module's text."""

    name: str
    says: str

    def claims(self, path: str, head: bytes, names: Sequence[str]) -> bool: ...
    def shards(self, paths: Sequence[str]) -> list[Shard]: ...
    def read(self, shard: Shard, files: Files) -> Iterator[Read]: ...


def floats(values: Any, layout: Layout, at_zero: bool = True) -> RawColumn:
    """A float column of a list with numbers and None (null), or of an array. Errors: `ValueError`, `TypeError`."""
    if isinstance(values, np.ndarray):
        array: NDArray[Any] = values.reshape(-1)
        return RawColumn(array if array.dtype.kind == "f" else array.astype(np.float64), layout, None, at_zero)
    kinds = set(map(type, values))
    if not kinds <= {float, int, type(None)}:  # the rare spellings: "NaN", numpy scalars
        values = [None if x is None else _number(x) for x in values]
    out = _doubles(values)
    if type(None) not in kinds:
        return RawColumn(out, layout, None, at_zero)
    valid = np.ones(len(out), dtype=bool)
    odd = np.flatnonzero(np.isnan(out))  # numpy reads None as NaN
    valid[odd] = [values[i] is not None for i in odd.tolist()]
    return RawColumn(out, layout, valid, at_zero)


def _doubles(values: Any) -> NDArray[np.float64]:
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:
        raise ValueError("got an integer that no float can hold") from None


_WORDS = {"nan": float("nan"), "inf": float("inf"), "infinity": float("inf"), "-inf": -float("inf")}
_WORDS |= {"-infinity": -float("inf"), "+inf": float("inf"), "+infinity": float("inf")}


def _number(x: Any) -> float:
    if isinstance(x, str):
        if x.strip().lower() not in _WORDS:
            raise ValueError(f"got {x[:40]!r}, wanted a number")
        return _WORDS[x.strip().lower()]
    if isinstance(x, (bool, np.bool_)):
        raise ValueError(f"got {x}, wanted a number")
    if not isinstance(x, (int, float, np.number)):
        raise ValueError(f"got {str(x)[:40]}, wanted a number")
    return float(x)  # pyright: ignore[reportArgumentType]


def flags(values: Any, layout: Layout) -> RawColumn:
    """A mask: a list or array of booleans, 0 and 1, or None (null). Errors: `ValueError` for anything else."""
    cells: list[Any] = values.reshape(-1).tolist() if isinstance(values, np.ndarray) else values
    kinds = set(map(type, cells))
    if any(issubclass(kind, np.generic) for kind in kinds):
        cells = [x.item() if isinstance(x, np.generic) else x for x in cells]
        kinds = set(map(type, cells))
    if not kinds <= {bool, int, float, type(None)}:
        at = next(i for i, x in enumerate(cells) if not isinstance(x, (bool, int, float, type(None))))
        raise ValueError(f"position {at}: got {str(cells[at])[:40]!r}, wanted 0 or 1")
    array = _doubles(cells)
    null = np.array([x is None for x in cells], dtype=bool) if type(None) in kinds else None
    if null is not None:
        array[null] = 0.0
    good = (array == 0.0) | (array == 1.0)
    if not good.all():
        at = int(np.flatnonzero(~good)[0])
        raise ValueError(f"position {at}: got {array[at]:g}, wanted 0 or 1")
    return RawColumn(array.astype(bool), layout, None if null is None else ~null)
