"""Files that `tensordict` itself has written, of the first and last versions that verl took: lab/tensordict_dump.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dump_samples import read_dump, settled

FILES = sorted((Path(__file__).parent / "data").glob("tensordict-*.tq_batch.pt"))
PROMPTS, LENGTHS = ([5, 6], [7], [4, 5, 6], [1, 2, 3]), (6, 4, 5, 2)


def test_there_are_files_of_three_versions():
    assert [f.name.split("-")[1].removesuffix(".tq_batch.pt") for f in FILES] == ["0.10.0", "0.15.3", "0.8.3"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nested_tensors_strings_and_locks_are_read(file: Path):
    found, items = read_dump(file)
    assert [shard.format for shard in found.shards] == ["verl"]
    rollouts = settled(items).rollouts
    assert rollouts is not None and len(rollouts) == 4
    for i, (prompt, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        at = rollouts.sequence(i)
        assert rollouts.token_ids[at].tolist() == [*prompt, *(10 * i + k + 1 for k in range(n))]
        assert rollouts.drawn[at].tolist() == [False] * len(prompt) + [True] * n
        reply = slice(at.stop - n, at.stop)
        sampler, old = (rollouts.scorings[s].logprobs.values[reply] for s in ("sampler", "old"))
        assert sampler.tolist() == [-(k + 1) / 8 for k in range(n)]
        assert np.all(old - sampler == 1 / 64)
    assert rollouts.records["group_id"].values.tolist() == ["a", "a", "b", "b"]
