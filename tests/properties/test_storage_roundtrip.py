"""Any rollouts, in either file, from one file to the other, whole or in shards: no bit changes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onepolicy import schema, storage
from onepolicy.records import from_records, to_records
from onepolicy.rollouts import Rollouts, concat
from onepolicy.types import Lists, Scoring, Values

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(codec="utf-8"), max_size=4)
JSON = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | TEXT,
    lambda x: st.lists(x | st.none(), max_size=3) | st.dictionaries(TEXT, x | st.none(), max_size=3),
    max_leaves=4,
)
ITEMS: dict[str, st.SearchStrategy[Any]] = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "bool": st.booleans(),
    "float64": st.floats(),
    "string": TEXT,
    "json": JSON,
}
NUMPY = {
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
    "float64": np.float64,
    "string": object,
    "json": object,
}


@st.composite
def values(draw: st.DrawFn, dtype: str, n: int, first_null: list[int] | None = None, nulls: bool = True) -> Values:
    """`[n]` of a contract dtype; `float` is drawn at one of its widths."""
    single = dtype == "float" and draw(st.booleans())
    items = st.floats(width=32 if single else 64) if dtype == "float" else ITEMS[dtype]
    kind = (np.float32 if single else np.float64) if dtype == "float" else NUMPY[dtype]
    drawn = draw(st.lists(items, min_size=n, max_size=n))
    flat = np.fromiter(drawn, dtype=kind, count=n)
    if not nulls:
        return Values(flat)
    valid = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool)
    valid[first_null or []] = False
    return Values(flat, valid)


@st.composite
def lists(draw: st.DrawFn, n: int) -> Lists:
    """Values stand under rows that are null as well: they are not read."""
    rows = draw(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=3), min_size=n, max_size=n))
    offsets = np.concatenate([[0], np.cumsum([len(x) for x in rows])]).astype(np.int64)
    valid = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool)
    return Lists(np.array([v for x in rows for v in x], dtype=np.int32), offsets, valid)


@st.composite
def scorings(draw: st.DrawFn, n: int, starts: list[int]) -> Scoring:
    def extra(positive: bool) -> Values | None:
        if not draw(st.booleans()):
            return None
        col = draw(values("float", n, starts))
        return Values(np.abs(col.values) if positive else col.values, col.valid)

    return Scoring(
        draw(values("float", n, starts)),
        extra(True),
        extra(False),
        semantics=draw(st.sampled_from([None, *schema.SEMANTICS])),
        dtype=draw(st.none() | TEXT),
        fingerprint=draw(st.dictionaries(TEXT, JSON, max_size=2)),
        scoring_id=draw(st.none() | TEXT),
    )


def _chosen(draw: st.DrawFn, level: schema.Level, without: tuple[str, ...] = ()) -> list[str]:
    names = [n for n in schema.of_level(level) if n not in without and not schema.scoring_column(n)]
    return draw(st.lists(st.sampled_from(names), unique=True, max_size=4))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollouts:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    starts = [int(o) for o, n in zip(offsets, lengths, strict=False) if n]
    n_seq, n_tok = len(lengths), int(offsets[-1])
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n_tok, max_size=n_tok))
    tokens = {"token_ids": Values(np.array(ids, dtype=np.int32)), "drawn": draw(values("bool", n_tok, nulls=False))}
    for name in _chosen(draw, "token", ("token_ids", "drawn")):
        tokens[name] = draw(values(schema.COLUMNS[name].dtype, n_tok))
    records = {
        name: draw(values(schema.COLUMNS[name].dtype, n_seq))
        for name in _chosen(draw, "record", ("prompt_length", "logprob_semantics"))
    }
    csr = {name: draw(lists(n_tok)) for name in _chosen(draw, "token_list")}
    csr |= {name: draw(lists(n_seq)) for name in _chosen(draw, "record_list")}
    sides = draw(
        st.lists(st.sampled_from(["sampler", "old", "current", "reference", "leg_2"]), unique=True, max_size=3)
    )
    return Rollouts(offsets, tokens, records, csr, {name: draw(scorings(n_tok, starts)) for name in sides})


def _bits(col: Values) -> list[Any]:
    """What a column says: null, or the bits of a float (one pattern for every NaN), or the value."""
    out: list[Any] = []
    for x, ok in zip(col.values.tolist(), col.mask().tolist(), strict=True):
        is_nan = isinstance(x, float) and x != x
        out.append(None if not ok else "NaN" if is_nan else x.hex() if isinstance(x, float) else x)
    return out


def _said(r: Rollouts, widths: bool = True) -> dict[str, Any]:
    """Everything the rollouts hold, in plain comparable values."""
    columns = {**r.tokens, **r.records}
    for name, s in r.scorings.items():
        columns |= {f"{name}.{k}": v for k in ("logprobs", "entropy", "varentropy") if (v := getattr(s, k)) is not None}
    csr = {
        k: [None if x.valid is not None and not x.valid[i] else x.row(i).tolist() for i in range(len(x.offsets) - 1)]
        for k, x in r.lists.items()
    }
    return {
        "offsets": r.offsets.tolist(),
        "columns": {k: _bits(v) for k, v in columns.items()},
        "widths": {k: str(v.values.dtype) for k, v in columns.items()} if widths else {},
        "lists": csr,
        "declared": {k: (s.semantics, s.dtype, dict(s.fingerprint), s.scoring_id) for k, s in r.scorings.items()},
    }


@SETTINGS
@given(rollouts())
def test_either_file_keeps_every_bit(r: Rollouts) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for first, second in ((".parquet", ".jsonl"), (".jsonl", ".parquet")):
            one, two = Path(folder) / f"one{first}", Path(folder) / f"two{second}"
            storage.write(r, one, overwrite=True)
            once = storage.read(one)
            storage.write(once, two, overwrite=True)
            assert _said(once) == _said(r)
            assert _said(storage.read(two)) == _said(r)


@SETTINGS
@given(rollouts(), st.integers(1, 8), st.sampled_from([".parquet", ".jsonl"]))
def test_shards_are_the_whole(r: Rollouts, max_tokens: int, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x{suffix}"
        storage.write(r, path)
        shards = list(storage.iter_shards(path, max_tokens))
    assert all(s.n_tokens <= max_tokens or len(s) == 1 for s in shards)
    assert _said(concat(shards)) == _said(r)


@SETTINGS
@given(rollouts())
def test_records_keep_every_bit(r: Rollouts) -> None:
    text = [json.dumps(x) for x in to_records(r)]
    for x in to_records(r):  # strict JSON, but for the user's own values
        json.dumps({k: v for k, v in x.items() if k not in storage.jsonl.FREE}, allow_nan=False)
    assert _said(from_records(json.loads(x) for x in text)) == _said(r)


@SETTINGS
@given(rollouts(), st.randoms())
def test_taking_all_in_any_order_loses_nothing(r: Rollouts, random: Any) -> None:
    order = list(range(len(r)))
    random.shuffle(order)
    back = np.argsort(order)
    assert _said(r.take(order).take(back)) == _said(r)
    assert _said(concat([r.take([i]) for i in range(len(r))])) == _said(r)
