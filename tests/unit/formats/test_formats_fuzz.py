"""Every reader on files that were damaged at random: no exception but `ContentError`, no hang, no execution."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dump_samples import PROMPT, REPLY, ROWS, SAMPLER, canonical_row, nemo_rl_row, settled, sglang_answer
from onepolicy.errors import ContentError
from onepolicy.formats.base import BrokenRecord, RawRecord, Read, Shard, TextRecord
from onepolicy.formats.detect import detect, format_of
from onepolicy.formats.files import Files

ODD: list[Any] = [None, True, -1, 0, 2**31, 2**63, 10**400, 1.5, -1e308, float("nan"), float("inf"), "", "x", "NaN"]
ODD += ["\ud800", [], {}, [[]], [None], [{}], [1, "a"], [[1], [2, 3]], {"a": 1}, [[None, 5, None]], "1" * 5000]

#: Of each kind of damage and format; tens of thousands were run once by hand.
SEEDS = 40

DATA = Path(__file__).parent / "data"
FILES = {
    **ROWS,
    "verifiers_nodes": (
        "train_rollouts.jsonl",
        json.loads((DATA / "verifiers_traces.jsonl").read_text().split("\n")[0]),
    ),
    "verifiers_episode": ("traces.jsonl", json.loads((DATA / "verifiers_traces.jsonl").read_text().split("\n")[1])),
    **{
        f"prompt {i}": ("answers.jsonl", json.loads(line))
        for i, line in enumerate((DATA / "vllm_prompts.jsonl").read_text().splitlines())
    },
    "sglang": ("answers.jsonl", sglang_answer(routed_experts=[[0, 1]] * 6)),
    "wrapped": ("answers.jsonl", {"request": {"temperature": 0.5}, "response": {"body": ROWS["engine"][1]}}),
    "nemo_batch": ("train_data_step1.jsonl", nemo_rl_row(padding=0)),
    "miles": (
        "rank_0.json",
        {
            "rank": 0,
            "logprob_entries": [
                [{"global_position": i, "token_id": 5 + i, "logprob": -0.5, "is_valid": True} for i in range(4)]
            ],
        },
    ),
}


def read_all(path: Path, owner: str) -> list[Read]:
    """By whoever claims the file, and by its own format although it may not claim it any more."""
    out: list[Read] = []
    said: list[str] = []
    shards = [*detect([path]).shards]
    if owner in ROWS:
        shards.append(Shard(owner, (str(path),)))
    for shard in shards:
        try:
            out += format_of(shard.format).read(shard, Files())
        except ContentError as err:
            said.append(str(err))
    assert all("\n" not in text and str(path) in text for text in said)
    for item in out:
        assert isinstance(item, (RawRecord, TextRecord, BrokenRecord)) and str(path.parent) in item.place
        assert not isinstance(item, BrokenRecord) or (item.why and "\n" not in item.why and len(item.why) < 500)
    settled(out)
    return out


@pytest.mark.parametrize("name", FILES)
def test_wrong_types_anywhere(tmp_path: Path, name: str) -> None:
    file, row = FILES[name]
    path = tmp_path / Path(file).name
    for seed in range(SEEDS):
        rng = random.Random(seed)
        damaged = copy.deepcopy(row)
        for _ in range(rng.choice((1, 1, 3))):
            damage(damaged, rng)
        path.write_text(
            json.dumps(damaged) + "\n" + json.dumps(row) + "\n" if file.endswith("l") else json.dumps(damaged)
        )
        read_all(path, name)


def damage(x: Any, rng: random.Random) -> None:
    """One value somewhere inside becomes another; a list may lose or gain cells."""
    keys = list(x) if isinstance(x, dict) else range(len(x))
    if not keys:
        return
    key = rng.choice(list(keys))
    if isinstance(x[key], (dict, list)) and x[key] and rng.random() < 0.7:
        damage(x[key], rng)
    elif isinstance(x, list) and rng.random() < 0.3:
        del x[key]
    else:
        x[key] = copy.deepcopy(rng.choice(ODD))


@pytest.mark.parametrize("name", FILES)
def test_bytes_that_flip_and_files_that_end(tmp_path: Path, name: str) -> None:
    file, row = FILES[name]
    path = tmp_path / Path(file).name
    whole = ((json.dumps(row) + "\n") * 3).encode() if file.endswith("l") else json.dumps(row, indent=1).encode()
    for seed in range(SEEDS):
        rng = random.Random(seed)
        text = bytearray(whole)
        for _ in range(rng.choice((1, 4, 40))):
            text[rng.randrange(len(text))] = rng.randrange(256)
        path.write_bytes(text[: rng.randrange(len(text))] if seed % 3 == 0 else text)
        read_all(path, name)


def test_parquet_that_is_damaged(tmp_path: Path) -> None:
    """The footer and the pages; pages have checksums, as `storage` writes them."""
    path = tmp_path / "r.parquet"
    table = {key: [canonical_row()[key]] * 5 for key in ("token_ids", "sampler_logprobs", "prompt_length")}
    pq.write_table(pa.table(table), path, write_page_checksum=True)
    whole = path.read_bytes()
    for seed in range(25):
        rng = random.Random(seed)
        path.write_bytes(whole[: rng.randrange(len(whole))])
        read_all(path, "")
        text = bytearray(whole)
        text[rng.randrange(4, len(whole) // 2)] ^= 1 << rng.randrange(8)
        path.write_bytes(text)
        read_all(path, "canonical")


@pytest.mark.parametrize("name", ["loose", "text", "miles_debug"])
def test_parquet_with_columns_of_odd_types(tmp_path: Path, name: str) -> None:
    tables: dict[str, dict[str, Any]] = {
        "loose": {"prompt_ids": [PROMPT], "response_ids": [REPLY], "rollout_logprobs": [SAMPLER], "step": [1]},
        "text": {"prompt": ["a"], "completion": ["b"], "step": [1]},
        "miles_debug": {
            "sample_index": [0],
            "response_length": [4],
            "total_length": [7],
            "tokens": [PROMPT + REPLY],
            "loss_mask": [[1] * 4],
            "rollout_log_probs": [SAMPLER],
        },
    }
    odd: list[Any] = [
        ["x"],
        [None],
        [[1.5]],
        [[["deep"]]],
        [{"a": 1}],
        [b"\xff"],
        [True],
        [[None, 1]],
        [np.float32(0.5)],
    ]
    path = tmp_path / "r.parquet"
    for key in tables[name]:
        for value in odd:
            pq.write_table(pa.table({**tables[name], key: value}), path)
            items = read_all(path, "")
            assert not items or key in str(items) or isinstance(items[0], (RawRecord, TextRecord, BrokenRecord))


def test_thousands_of_brackets_and_huge_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.jsonl"
    good = json.dumps(ROWS["prime_rl"][1])
    path.write_text(f'{good}\n{"[" * 100_000}\n{{"token_ids": {"9" * 10_000}}}\n{good}\n')
    items = read_all(path, "")
    assert [type(x).__name__ for x in items] == ["RawRecord", "BrokenRecord", "BrokenRecord", "RawRecord"]


@pytest.mark.parametrize(
    "suffix", [".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".parquet", ".pt", ".dp"]
)
def test_noise_under_any_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rank_0{suffix}"
    starts = (b"", b"PAR1", b"{", b"[", b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd", b"BZh9", b"PK\x03\x04", b"\x80\x04")
    for seed, start in enumerate(starts * 3):
        path.write_bytes(start + random.Random(seed).randbytes(1 + 300 * (seed % 3)))
        found = detect([path])
        assert len(found.shards) + len(found.unclaimed) == 1
        read_all(path, "")
