"""numpy's `.npz` with arrays under the names that people use: padded `[B, T]`, or flat `[T]` with `cu_seqlens`.

Padded rows are cut by `attention_mask`, which may be padded on either side, or by `lengths`, which count from the left;
prompts and replies that are arrays of their own by `prompt_mask` and `response_mask` (up to its last 1), by
`prompt_length` and `response_length`, or by an `attention_mask` over both. Arrays over the whole text, one less, or
over the reply are told by their width. `[B]` and single values are of the record. The file is read whole, and pickles
in it never are.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import ContentError
from onepolicy.formats import loose
from onepolicy.formats.base import BrokenRecord, Files, RawColumn, RawRecord, Read, Shard
from onepolicy.formats.batches import run_of_ones, wide
from onepolicy.formats.jsonl_lines import WRONG, Line, why
from onepolicy.formats.npy import array_of
from onepolicy.formats.sniff import arrays_of

name = "npz"
says = "numpy's .npz, padded with a mask or lengths, or flat with cu_seqlens, under common names"

_OFFSETS = ("cu_seqlens", "cu_seq_lens", "offsets", "seq_offsets")
_LENGTHS = ("lengths", "length", "seq_lens", "seqlens", "sequence_lengths", "input_lengths", "total_length")
_PROMPT_LENGTHS = ("prompt_length", "prompt_lengths", "prompt_lens")
_REPLY_LENGTHS = ("response_length", "response_lengths", "response_lens", "completion_length", "completion_lengths")
_PROMPT_MASKS = ("prompt_mask", "prompt_attention_mask")
_REPLY_MASKS = ("response_attention_mask", "completion_attention_mask")
#: Masks of a reply's own tokens: what stands behind the last 1 is padding.
_OWN_MASKS = ("response_mask", "completion_mask", "action_mask")
_MASK = "attention_mask"
_TOKEN_LEVEL = (*loose.COLUMNS, *loose.LISTS)
_IDS = (*loose.PROMPT_IDS, *loose.REPLY_IDS, *loose.WHOLE_IDS)
_FACTS = tuple(key for keys, _ in loose.FACTS.values() for key in keys)
_KNOWN = {*_TOKEN_LEVEL, *_IDS, *_FACTS, *_OFFSETS, *_LENGTHS, *_PROMPT_LENGTHS, *_REPLY_LENGTHS, *_PROMPT_MASKS}
_KNOWN |= {*_REPLY_MASKS, *_OWN_MASKS, _MASK}

_Array = NDArray[Any]


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    found = set(arrays_of(head))
    return bool(found & {*loose.REPLY_IDS, *loose.WHOLE_IDS}) and bool(found & set(_TOKEN_LEVEL))


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in paths]


def read(shard: Shard, files: Files) -> Iterator[Read]:
    path = shard.paths[0]
    arrays = _arrays(path, files)
    try:
        rows = _flat(arrays) if any(key in arrays for key in _OFFSETS) else _padded(arrays)
    except ValueError as err:
        raise ContentError(f"{path}: {err}") from None
    single = {loose.COLUMNS[key] for key, x in arrays.items() if key in loose.COLUMNS and x.dtype == np.float32}
    for i in range(rows.n):
        place = f"{path}[{i}]"
        try:
            record = loose.record(Line(place, rows.row(i), i + 1))
        except WRONG as err:
            yield BrokenRecord(place, why(err))
            continue
        yield _narrowed(record, single) if isinstance(record, RawRecord) else record


def _narrowed(record: RawRecord, single: set[str]) -> RawRecord:
    """Single precision as it stands in the file."""
    columns = {
        key: RawColumn(c.values.astype(np.float32), c.layout, c.valid, c.at_zero)
        if key in single and c.values.dtype == np.float64
        else c
        for key, c in record.columns.items()
    }
    return replace(record, columns=columns)


def _arrays(path: str, files: Files) -> dict[str, _Array]:
    """Those with a name that is known. Errors: `ContentError`."""
    out: dict[str, _Array] = {}
    with files.open(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                for member in archive.namelist():
                    key = member.removesuffix(".npy")
                    if key in _KNOWN and key != member:
                        out[key] = _plain(array_of(archive.read(member)), key)
        except ValueError as err:
            raise ContentError(f"{path}: {err}") from None
        except Exception as err:  # a damaged archive raises errors of many kinds
            what = " ".join(str(err).split())[:160] or type(err).__name__
            raise ContentError(f"{path}: cannot be read as .npz: {what}; is the file complete?") from None
    return out


def _plain(array: _Array, key: str) -> _Array:
    """Errors: `ValueError` for elements that are neither numbers nor text."""
    if array.dtype.kind not in "biufUS":
        hint = "; bfloat16 has to be saved as float32" if array.dtype.kind == "V" else ""
        raise ValueError(f"{key!r}: an array of {array.dtype}, wanted numbers or text{hint}")
    return np.char.decode(array, "utf-8", "replace") if array.dtype.kind == "S" else wide(array)


# -- what a row is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """`n` records: `tokens` has a list of parts for each array of tokens, `values` one value a record, `ones` one."""

    n: int
    tokens: Mapping[str, Sequence[_Array]]
    values: Mapping[str, _Array]
    ones: Mapping[str, Any]

    def row(self, i: int) -> dict[str, Any]:
        """As `loose` reads it."""
        out: dict[str, Any] = dict(self.ones) | {key: x[i].tolist() for key, x in self.values.items()}
        return out | {key: parts[i].tolist() for key, parts in self.tokens.items()}


def _rows(arrays: Mapping[str, _Array], n: int, tokens: Mapping[str, Sequence[_Array]]) -> _Rows:
    """The other arrays: one value a record, or one for all."""
    rest = {key: x for key, x in arrays.items() if key not in tokens and key in (*_FACTS, *loose.COLUMNS)}
    values = {key: x for key, x in rest.items() if x.ndim == 1 and len(x) == n}
    for names, key in ((_PROMPT_LENGTHS, "prompt_length"), (_REPLY_LENGTHS, "response_length")):
        if (counts := _counts(arrays, names, n)) is not None:
            values[key] = counts
    ones = {key: x.item() for key, x in rest.items() if x.ndim == 0}
    return _Rows(n, tokens, values, ones)


def _counts(arrays: Mapping[str, _Array], names: Sequence[str], n: int) -> _Array | None:
    """`[B]` lengths under one of the names. Errors: `ValueError` for what no lengths are."""
    key = next((key for key in names if key in arrays), None)
    if key is None:
        return None
    x = arrays[key]
    if x.shape != (n,) or x.dtype.kind not in "iu" or (n and int(x.min()) < 0):
        raise ValueError(f"{key!r}: got {x.dtype} {list(x.shape)}, wanted {n} whole numbers of at least 0")
    return x.astype(np.int64)


def _first(arrays: Mapping[str, _Array], names: Sequence[str]) -> str | None:
    return next((key for key in names if key in arrays and arrays[key].dtype.kind in "iu"), None)


# -- flat ------------------------------------------------------------------------------------------------------------


def _flat(arrays: Mapping[str, _Array]) -> _Rows:
    key = next(key for key in _OFFSETS if key in arrays)
    offsets = arrays[key]
    ids = _first(arrays, loose.WHOLE_IDS)
    if ids is None or arrays[ids].ndim != 1:
        raise ValueError(f"{key!r} stands beside no flat ids of whole texts; wanted token_ids [T]")
    total = len(arrays[ids])
    good = offsets.ndim == 1 and offsets.dtype.kind in "iu" and len(offsets) > 0 and int(offsets[0]) == 0
    if not good or bool((np.diff(offsets.astype(np.int64)) < 0).any()) or int(offsets[-1]) != total:
        raise ValueError(f"{key!r}: wanted whole numbers from 0 to {total} that never fall, one more than sequences")
    offsets, n = offsets.astype(np.int64), len(offsets) - 1
    replies = _counts(arrays, _REPLY_LENGTHS, n)
    prompts = _counts(arrays, _PROMPT_LENGTHS, n)
    if replies is None and prompts is not None:
        replies = np.diff(offsets) - prompts
    edges = None if replies is None else np.concatenate([[0], np.cumsum(replies)])
    tokens: dict[str, Sequence[_Array]] = {}
    for name_ in (ids, *(k for k in _TOKEN_LEVEL if k in arrays and arrays[k].ndim)):
        x = arrays[name_]
        if len(x) == total:
            tokens[name_] = np.split(x, offsets[1:-1]) if n else []
        elif edges is not None and len(x) == int(edges[-1]) and bool((np.diff(edges) >= 0).all()):
            tokens[name_] = np.split(x, edges[1:-1]) if n else []
        elif x.shape != (n,):
            of = "" if edges is None else f", or {int(edges[-1])} of the replies"
            raise ValueError(f"{name_!r}: got {len(x)} values, wanted {total}, one for each of {ids!r}{of}")
    return _rows(arrays, n, tokens)


# -- padded ----------------------------------------------------------------------------------------------------------


def _padded(arrays: Mapping[str, _Array]) -> _Rows:
    whole, prompt, reply = (_first(arrays, names) for names in (loose.WHOLE_IDS, loose.PROMPT_IDS, loose.REPLY_IDS))
    main = whole if whole is not None else reply
    if main is None or arrays[main].ndim != 2:
        shape = [] if main is None else list(arrays[main].shape)
        raise ValueError(f"{main or 'ids'!r}: got {shape}, wanted ids [B, T], or flat ones with cu_seqlens [B + 1]")
    n = len(arrays[main])
    for key, x in arrays.items():
        if key in _KNOWN and x.ndim > 1 and len(x) != n:
            raise ValueError(f"{key!r}: got {len(x)} rows, wanted {n}, one for each row of {main!r}")
    cut = _Cut(arrays, n, whole, prompt, reply)
    keys = [k for k in (whole, *(() if whole else (prompt, reply))) if k is not None]
    keys += [k for k in _TOKEN_LEVEL if k in arrays and arrays[k].ndim > 1 and k not in keys]
    rows = _rows(arrays, n, {key: cut.parts(key) for key in keys})
    if whole is not None and reply is not None:
        _require_ends(rows.tokens[whole], cut.parts(reply), whole, reply)
    lengths = cut.reply_lengths()
    if whole is not None and lengths is not None and "prompt_length" not in rows.values:
        rows = replace(rows, values={**rows.values, "response_length": lengths})
    return rows


class _Cut:
    """Where the tokens of each row stand, by the width of an array."""

    def __init__(
        self, arrays: Mapping[str, _Array], n: int, whole: str | None, prompt: str | None, reply: str | None
    ) -> None:
        width = lambda key: 0 if key is None or arrays[key].ndim != 2 else arrays[key].shape[1]
        self._arrays, self._n, self._whole = arrays, n, whole
        self._widths = width(whole), width(prompt), width(reply)
        self._spans: dict[str, list[slice]] = {}

    def parts(self, key: str) -> list[_Array]:
        """Errors: `ValueError` for a width that fits nowhere."""
        x = self._arrays[key]
        if x.ndim < 2:
            raise ValueError(f"{key!r}: got {list(x.shape)}, wanted a row for each sequence, [B, T]")
        width, (whole, prompt, reply) = x.shape[1], self._widths
        if self._whole is not None and width in (whole, whole - 1):
            less = whole - width
            return [row[s.start : s.stop - less] for row, s in zip(x, self._of_whole(), strict=True)]
        if self._whole is None and width == prompt and key in loose.PROMPT_IDS:
            return [row[s] for row, s in zip(x, self._of_prompt(), strict=True)]
        if width == reply or (self._whole is not None and self._mask(_OWN_MASKS, width) is not None):
            return [row[s] for row, s in zip(x, self._of_reply(width), strict=True)]
        if self._whole is None and width == prompt + reply:
            both = zip(x, self._of_prompt(), self._of_reply(reply), strict=True)
            return [np.concatenate([row[a], row[prompt:][b]]) for row, a, b in both]
        wanted = f"{whole} or {whole - 1}" if self._whole else f"{reply} of the replies or {prompt + reply} of both"
        raise ValueError(f"{key!r}: got {list(x.shape)}, wanted a width of {wanted}")

    def reply_lengths(self) -> _Array | None:
        """`[B]`, where whole texts stand beside something that tells of their replies; None where nothing does."""
        width = self._widths[2]
        if self._whole is None or "response_length" in self._arrays or not width:
            return None
        return np.array([s.stop - s.start for s in self._of_reply(width)], dtype=np.int64)

    def _of_whole(self) -> list[slice]:
        return self._kept("whole", self._widths[0], self._mask((_MASK,), self._widths[0]), _LENGTHS, self._whole)

    def _of_prompt(self) -> list[slice]:
        width = self._widths[1]
        mask = self._mask(_PROMPT_MASKS, width)
        both = self._mask((_MASK,), width + self._widths[2])
        mask = both[:, :width] if mask is None and both is not None else mask
        return self._kept("prompt", width, mask, _PROMPT_LENGTHS, _first(self._arrays, loose.PROMPT_IDS))

    def _of_reply(self, width: int) -> list[slice]:
        mask, own = self._mask(_REPLY_MASKS, width), self._mask(_OWN_MASKS, width)
        if mask is None and not any(key in self._arrays for key in _REPLY_LENGTHS):
            both = self._mask((_MASK,), self._widths[1] + width if self._whole is None else self._widths[0])
            if own is not None and (both is None or not self._widths[2]):
                return [slice(0, int(at[-1]) + 1 if len(at := np.flatnonzero(row)) else 0) for row in own]
            mask = both[:, -width:] if both is not None and width else None
        return self._kept(f"reply {width}", width, mask, _REPLY_LENGTHS, _first(self._arrays, loose.REPLY_IDS))

    def _mask(self, names: Sequence[str], width: int) -> _Array | None:
        shape = (self._n, width)
        key = next((key for key in names if key in self._arrays and self._arrays[key].shape == shape), None)
        return None if key is None else self._arrays[key]

    def _kept(self, what: str, width: int, mask: _Array | None, names: Sequence[str], ids: str | None) -> list[slice]:
        if what not in self._spans:
            self._spans[what] = self._worked_out(what.split()[0], width, mask, names, ids)
        return self._spans[what]

    def _worked_out(
        self, what: str, width: int, mask: _Array | None, names: Sequence[str], ids: str | None
    ) -> list[slice]:
        if mask is not None:
            return [run_of_ones(row) if row.any() else slice(0, 0) for row in mask]
        counts = _counts(self._arrays, names, self._n)
        if counts is None:
            mine = {
                "whole": f"attention_mask [B, {width}] or lengths [B]",
                "prompt": "prompt_mask or prompt_length [B]",
            }
            wanted = mine.get(what, "attention_mask over prompt and reply, response_mask or response_length [B]")
            raise ValueError(
                f"nothing tells which of {width} places of a row of {ids or what!r} are tokens; wanted {wanted}"
            )
        if self._n and int(counts.max()) > width:
            raise ValueError(f"{what}: got a length of {int(counts.max())}, but a row has {width} places")
        if ids is not None:
            _refuse_left(self._arrays[ids], counts, ids)
        return [slice(0, k) for k in counts.tolist()]


def _require_ends(texts: Sequence[_Array], replies: Sequence[_Array], whole: str, reply: str) -> None:
    """Errors: `ValueError` for a reply that is not how its text ends."""
    for i, (text, end) in enumerate(zip(texts, replies, strict=True)):
        if len(end) > len(text) or not np.array_equal(text[len(text) - len(end) :], end):
            raise ValueError(f"{reply!r}, row {i}: its {len(end)} tokens are not the last ones of {whole!r}")


def _refuse_left(ids: _Array, counts: _Array, key: str) -> None:
    """Lengths count from the left: behind them stands one padding id. Errors: `ValueError` for other tokens there."""
    for i, (row, k) in enumerate(zip(ids, counts.tolist(), strict=True)):
        rest = row[k:]
        if len(rest) > 1 and bool((rest != rest[-1]).any()):
            raise ValueError(
                f"{key!r}, row {i}: ids stand behind its {k} tokens; padded on the left? wanted a mask [B, T]"
            )
