"""Which of several differing parts makes a text differ: an experiment, not a guess.

A side is built again from its parts, once with one part of the other side. What that one part changes, it explains.
Built with the `tokenizers` library; a side whose parts are not in its terms, or that does not come out the same when
it is built again, is not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.pair_texts import Pair, TextRow
from onepolicy.tokens.part_differences import PartRow
from onepolicy.tokens.part_words import as_json

#: What differs at a place -> the parts that can do that, in the order in which text passes through them.
CANDIDATES: dict[str, tuple[str, ...]] = {
    "ids": ("added_tokens", "model", "vocabulary"),
    "cuts": ("added_tokens", "normalizer", "pre_tokenizer", "model", "vocabulary", "merges"),
    "bytes": ("added_tokens", "normalizer", "pre_tokenizer", "model", "vocabulary"),
    "added": ("added_tokens", "normalizer", "pre_tokenizer", "vocabulary"),
}
#: What differs at a place -> the switches of a model that can do that.
_SWITCHES: dict[str, frozenset[str]] = {
    "ids": frozenset({"type", "byte_fallback"}),
    "cuts": frozenset({"type", "dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"}),
    "bytes": frozenset({"type", "byte_fallback", "unk_token", "unk_id", "fuse_unk"}),
}
#: Changes of a text that no model makes.
_BEFORE_MODEL = ("leading space", "white-space", "accents", "capitals", "compatibility")
_MOST = 512  # texts that are tried again
_MODEL = ("model", "vocabulary", "merges")

Contents = dict[str, Any]


def explain(pair: Pair, rows: Mapping[str, PartRow], texts: Sequence[TextRow]) -> dict[str, list[TextRow]]:
    """Part -> the differing texts that it explains; under `` those that no known difference explains."""
    out: dict[str, list[TextRow]] = {}
    several: list[TextRow] = []
    for text in texts:
        parts = _in_question(rows, text)
        if len(parts) > 1:
            several.append(text)
        else:
            out.setdefault(parts[0] if parts else "", []).append(text)
    for part, found in _told_apart(pair, rows, several).items():
        out.setdefault(part, []).extend(found)
    return out


def _in_question(rows: Mapping[str, PartRow], text: TextRow) -> list[str]:
    """The differing parts that can make this text differ as it does."""
    parts = [part for part in CANDIDATES[text.kind] if rows[part].differs]
    if "model" in parts and not _model_can(rows["model"], text):
        parts.remove("model")
    return parts


def _model_can(row: PartRow, text: TextRow) -> bool:
    a, b = (content or {} for content in row.contents)
    if text.kind == "bytes" and text.place in _BEFORE_MODEL:
        return False
    return any(a.get(switch) != b.get(switch) for switch in _SWITCHES[text.kind])


def _told_apart(pair: Pair, rows: Mapping[str, PartRow], texts: Sequence[TextRow]) -> dict[str, list[TextRow]]:
    """As `explain`, for texts with more than one part in question. Not told apart: all of these parts."""
    tried = list(texts[:_MOST])
    parts = sorted({part for text in tried for part in _in_question(rows, text)})
    sides = _rebuilt(pair, rows, [text.text for text in tried])
    changed = {part: _changed(sides, part) for part in parts}
    out: dict[str, list[TextRow]] = {}
    for i, text in enumerate(tried):
        suspects = _in_question(rows, text)
        for part in [p for p in suspects if changed[p] and changed[p][i]] or suspects:
            out.setdefault(part, []).append(text)
    return out


@dataclass(frozen=True, slots=True)
class _Side:
    """A side that can be built again from its `parts`: the texts' ids by it, and the parts of the `other` side."""

    parts: Contents
    other: Contents
    texts: list[str]
    ids: list[list[int]]

    def with_others(self, names: Sequence[str]) -> list[list[int]] | None:
        """Ids with the named parts of the other side; None where such a tokenizer cannot be built."""
        return _ids({**self.parts, **{name: self.other[name] for name in names}}, self.texts)


def _rebuilt(pair: Pair, rows: Mapping[str, PartRow], texts: list[str]) -> list[_Side]:
    """The sides that come out the same when they are built from their parts."""
    if not texts or not all(rows[name].contents[at] is not None for name in ("model", "vocabulary") for at in (0, 1)):
        return []
    parts = [_parts(tokenizer, rows, at) for at, tokenizer in enumerate(pair)]
    made = [_Side(parts[at], parts[1 - at], texts, tokenizer.encode(texts)) for at, tokenizer in enumerate(pair)]
    return [side for side in made if side.with_others(()) == side.ids]


def _changed(sides: Sequence[_Side], part: str) -> list[bool]:
    """Whether one part of the other side changes a text's ids, on either side. Empty: that could not be tried."""
    out: list[bool] = []
    for side in sides:
        ids = side.with_others([part])
        if ids is None and part in _MODEL:  # merges need the tokens that they make
            ids = side.with_others(_MODEL)
        if ids is not None:
            out = [known or x != y for known, x, y in zip(out or [False] * len(ids), side.ids, ids, strict=True)]
    return out


def _parts(tokenizer: Tokenizer, rows: Mapping[str, PartRow], at: int) -> Contents:
    """What encodes: contents by part; the added tokens as a tokenizer.json has them."""
    names = ("model", "vocabulary", "merges", "normalizer", "pre_tokenizer")
    flags = ("id", "content", "special", "lstrip", "rstrip", "single_word", "normalized")
    added = [{f: getattr(t, f) for f in flags} for _, t in sorted(tokenizer.added.items())]
    return {name: rows[name].contents[at] for name in names} | {"added_tokens": added}


def _ids(contents: Contents, texts: list[str]) -> list[list[int]] | None:
    """Ids of the texts by a tokenizer built from parts, None where it cannot be built."""
    if not _fits(contents):
        return None
    try:
        from tokenizers import Tokenizer as Library

        built = Library.from_str(json.dumps(_json(contents)))
        return [e.ids for e in built.encode_batch(texts, add_special_tokens=False)]
    except BaseException as err:  # bare Exception for what the library does not read; its panics are no Exception
        if isinstance(err, Exception) or type(err).__name__ == "PanicException":
            return None
        raise


def _fits(contents: Contents) -> bool:
    """Whether the vocabulary holds what the merges take and make: the library panics where it does not."""
    model, merges, vocabulary = contents["model"], contents["merges"], contents["vocabulary"]
    if model.get("type") != "BPE":
        return True
    if not isinstance(merges, list) or not all(isinstance(m, list) and len(m) == 2 for m in merges):
        return not merges
    prefix = str(model.get("continuing_subword_prefix", ""))
    return all(
        isinstance(y, str) and x in vocabulary and y in vocabulary and x + y.removeprefix(prefix) in vocabulary
        for x, y in merges
    )


def _json(contents: Contents) -> dict[str, Any]:
    model = dict(contents["model"])
    if model["type"] == "Unigram":
        model["vocab"] = contents["merges"]
    else:
        model["vocab"] = contents["vocabulary"]
        model |= {"merges": contents["merges"] or []} if model["type"] == "BPE" else {}
    return {
        "version": "1.0",
        "added_tokens": contents["added_tokens"],
        "normalizer": as_json("normalizers", contents["normalizer"]),
        "pre_tokenizer": as_json("pretokenizers", contents["pre_tokenizer"]),
        "model": model,
    }
