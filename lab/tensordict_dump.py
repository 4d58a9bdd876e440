"""Writes a verl `tq_batch.pt` with the `tensordict` that is installed: the files in tests/unit/formats/data.

    pip install tensordict==0.15.3    # needs torch
    python lab/tensordict_dump.py tests/unit/formats/data

Nested tensors, a column of strings, locked and not. Token k of reply i is 10 i + k + 1, its rollout log-prob
-(k + 1) / 8, its old log-prob 1 / 64 more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tensordict  # pyright: ignore[reportMissingImports]
import torch

PROMPTS = ([5, 6], [7], [4, 5, 6], [1, 2, 3])
LENGTHS = (6, 4, 5, 2)


def nested(rows: list[list[Any]]) -> Any:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch() -> Any:
    replies = [[10 * i + k + 1 for k in range(n)] for i, n in enumerate(LENGTHS)]
    sampler = [[-(k + 1) / 8 for k in range(n)] for n in LENGTHS]
    columns = {
        "prompts": nested([list(p) for p in PROMPTS]),
        "responses": nested(replies),
        "response_mask": nested([[1] * n for n in LENGTHS]),
        "rollout_log_probs": nested(sampler),
        "old_log_probs": nested([[x + 1 / 64 for x in row] for row in sampler]),
    }
    out = tensordict.TensorDict(columns, batch_size=[len(LENGTHS)])
    names = (tensordict.NonTensorData(name) for name in ("a", "a", "b", "b"))
    out.set("uid", tensordict.NonTensorStack(*names))
    return out


def main(folder: Path) -> None:
    for name, tensors in (("", batch()), ("-locked", batch().lock_())):
        payload = {
            "tensordict": tensors,
            "keys": ["a_0_0", "a_0_1", "b_0_0", "b_0_1"],
            "tags": [{}] * 4,
            "global_steps": 9,
        }
        torch.save(payload, folder / f"tensordict-{tensordict.__version__}{name}.tq_batch.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
