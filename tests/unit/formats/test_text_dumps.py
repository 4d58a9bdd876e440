"""Text dumps, written by the frameworks' own lines where those can be cut out of their packages (`make frameworks`)."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from dump_samples import broken, lines, read_dump
from framework_code import cut, source
from onepolicy.formats.base import TextRecord


def texts(*uris: Any) -> list[TextRecord]:
    found, items = read_dump(*uris)
    assert found.formats == ("text",) and all(isinstance(x, TextRecord) for x in items), items
    return [x for x in items if isinstance(x, TextRecord)]


def test_verl_by_its_own_writer(tmp_path: Path) -> None:
    write = cut("verl", "verl/trainer/ppo/ray_trainer.py", "_write_generations", os=os, json=json)["_write_generations"]
    write(["2+2?", "3+3?"], ["4", "7"], ["4", "6"], [1.0, 0.0], {"acc": [True, False]}, str(tmp_path), 40)
    one, two = texts(tmp_path)
    assert one.texts == {"prompt_text": "2+2?", "reply_text": "4"} and one.why == "text only: no token-level data"
    assert one.facts["step"] == 40 and (one.facts["reward"], two.facts["reward"]) == (1.0, 0.0)
    assert two.place == f"{tmp_path}/40.jsonl:2"


def test_areal_by_its_own_writer(tmp_path: Path) -> None:
    dump = _async_function("areal", "areal/infra/workflow_executor.py", "_dump_trajectory")
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    me = SimpleNamespace(_get_dump_dir=lambda _: str(tmp_path), _get_tokenizer=lambda: tokenizer)
    traj = {
        "input_ids": torch.tensor([[5, 6, 7, 8]]),
        "rewards": torch.tensor([0.5]),
        "loss_mask": torch.tensor([[0, 0, 1, 1]]),
        "attention_mask": torch.ones(1, 4, dtype=torch.int64),
        "versions": torch.tensor([[-1, -1, 3, 4]]),
    }
    assert asyncio.run(dump(me, traj, 17, False)) == (True, "")
    (record,) = texts(tmp_path)
    assert record.texts == {"prompt_text": "5 6", "reply_text": "7 8"}
    told = {k: record.facts[k] for k in ("group_id", "sample_id", "reward", "seqlen", "prompt_len", "tail_version")}
    assert told == {
        "group_id": "17",
        "sample_id": "0",
        "reward": 0.5,
        "seqlen": 4,
        "prompt_len": 2,
        "tail_version": 4,
    }


def _async_function(package: str, path: str, name: str) -> Any:
    """As `cut`, of a coroutine."""
    found = (n for n in ast.walk(source(package, path)) if isinstance(n, ast.AsyncFunctionDef) and n.name == name)
    space: dict[str, Any] = {
        "os": os,
        "json": json,
        "RTensor": SimpleNamespace(localize=lambda x: x),
        "aiofiles": SimpleNamespace(os=SimpleNamespace(makedirs=_makedirs), open=_AsyncFile),
    }
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, next(found)], []), f"{package}:{path}", "exec"), space)
    return space[name]


async def _makedirs(path: str, exist_ok: bool) -> None:
    os.makedirs(path, exist_ok=exist_ok)


class _AsyncFile:
    def __init__(self, path: str, mode: str) -> None:
        self._path = Path(path)

    async def __aenter__(self) -> _AsyncFile:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def write(self, text: str) -> None:
        self._path.write_text(text)


def test_swift_by_its_own_writer(tmp_path: Path) -> None:
    check = cut("ms_swift", "swift/utils/utils.py", "check_json_format", Mapping=Mapping, Sequence=Sequence)
    given = {"is_master": lambda: True, "is_last_rank": lambda: True, "Queue": Queue, "os": os, "json": json, "io": io}
    writer = cut(
        *("ms_swift", "swift/utils/io_utils.py", "JsonlWriter"),
        check_json_format=check["check_json_format"],
        dist=torch.distributed,
        **given,
    )["JsonlWriter"](str(tmp_path / "completions.jsonl"))
    writer.append({"step": ["3", "3"], "prompt": ["a", "b"], "completion": ["c", "d"], "advantages": [0.5, -0.5]})
    one, two = texts(tmp_path)
    assert one.texts == {"prompt_text": "a", "reply_text": "c"} and two.texts["reply_text"] == "d"
    assert one.facts["step"] == 3 and one.place.endswith("completions.jsonl:1[0]")


@pytest.mark.parametrize("chat", [False, True])
def test_trl_parquet(tmp_path: Path, chat: bool) -> None:
    """The layout of GRPOTrainer.log in trl 1.16, written with pandas as it does."""
    prompt: Any = [{"role": "user", "content": "2+2?"}] if chat else "2+2?"
    reply: Any = [{"role": "assistant", "content": "4"}] if chat else "4"
    path = tmp_path / "completions" / "completions_00012.parquet"
    path.parent.mkdir()
    pd.DataFrame({"step": [12], "prompt": [prompt], "completion": [reply], "accuracy_reward": [1.0]}).to_parquet(path)
    (record,) = texts(tmp_path)
    assert record.texts["reply_text"] == "4" and record.facts["step"] == 12
    assert record.texts.get("messages" if chat else "prompt_text") == prompt


def test_roll_columns_in_a_line(tmp_path: Path) -> None:
    """After its documentation: one line holds the columns of a step."""
    row = {"prompts": ["a", "b", "c"], "responses": ["x", "y", "z"], "scores": [1, 0, 1]}
    found = texts(lines(tmp_path / "rollout_dump_data.step_5.jsonl", [row]))
    assert [x.texts["reply_text"] for x in found] == ["x", "y", "z"]
    assert [x.facts["reward"] for x in found] == [1.0, 0.0, 1.0] and found[0].facts["step"] == 5


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "3.jsonl", [{"input": "a", "output": "b"}, {"input": 7, "output": "b"}, {"input": "a"}])
    one, two = broken(path)
    assert one.place == f"{path}:2" and "'input': got 7, wanted text" in one.why
    assert "no reply" in two.why


def test_texts_with_one_side_of_log_probs_and_no_ids(tmp_path: Path) -> None:
    row = {"id": "r", "response_text": "ok!", "token_strings": ["ok", "!"], "rollout_logprobs": [-0.5, -0.1]}
    (record,) = texts(lines(tmp_path / "a.jsonl", [row]))
    assert record.texts == {"reply_text": "ok!", "token_strings": ["ok", "!"]} and record.facts["record_id"] == "r"
