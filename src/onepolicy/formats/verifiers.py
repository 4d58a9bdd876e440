"""verifiers' rollouts, which prime-rl keeps as `rollouts/step_{N}/train_rollouts.jsonl`: one rollout a line.

`trajectory` (verifiers 0.1): a request a step, `tokens` with `prompt_ids`, `completion_ids`, their masks and
`completion_logprobs`. Steps whose prompt begins with all of an earlier step become one record; a step that extends none
begins another, and its place says so. Saved only where `trajectory` is among the `state_columns`.

`nodes` (its `v1`, alone or under an episode's `traces`): a tree of messages, each with the ids that it adds,
`mask` (sampled) and values of its sampled tokens; a path to a leaf is a record, and a turn that several paths share is
drawn in the first of them. `trainer_logprobs` are the policy inside the update. These files round values to four
decimals.

`verifiers/types.py` of 0.1, `verifiers/v1/graph.py` and `trace.py` of 0.4, https://github.com/PrimeIntellect-ai/verifiers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from onepolicy.formats import jsonl_lines
from onepolicy.formats.base import BrokenRecord, Files, RawColumn, RawRecord, Read, Shard, TextRecord, flags, floats
from onepolicy.formats.cells import Row, ids_of
from onepolicy.formats.jsonl_lines import WRONG, Line, why
from onepolicy.formats.sniff import keys_of
from onepolicy.values import quoted

name = "verifiers"
says = "verifiers' rollouts with trajectory steps or message nodes, as prime-rl saves them (train_rollouts.jsonl)"

split = jsonl_lines.split_lines
_STEP = re.compile(r"step_(\d{1,12})[/\\][^/\\]+$")
#: Values of the sampled tokens alone, by their names in a node.
_VALUES = {
    "logprobs": "sampler_logprobs",
    "trainer_logprobs": "current_logprobs",
    "entropies": "current_entropy",
    "reference_logprobs": "reference_logprobs",
    "advantages": "advantages",
}
_NO_IDS = "no token ids in the rollout: text only"


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    keys = keys_of(head)
    step = _head(keys.get("trajectory"))
    if "tokens" in step or {"prompt", "completion", "response"} <= step.keys():
        return True
    return any({"message", "mask"} <= _head(x.get("nodes")).keys() for x in (keys, _head(keys.get("traces"))))


def _head(x: Any) -> Mapping[str, Any]:
    first: Any = cast(list[Any], x)[0] if isinstance(x, list) and x else None
    return cast(Mapping[str, Any], first) if isinstance(first, Mapping) else {}


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in paths]


def read(shard: Shard, files: Files) -> Iterator[Read]:
    found = _STEP.search(shard.paths[0])
    step = int(found.group(1)) if found else None
    return jsonl_lines.read_rows(shard, files, lambda line: _rollouts(line, step))


def _rollouts(line: Line, step: int | None) -> Iterator[Read]:
    row = Row(line.value)
    if "trajectory" in row:
        yield from _steps(row, line.place, step)
        return
    if "nodes" in row or "traces" not in row:
        yield from _branches(row, Row({}), line.place, step)
        return
    for i, trace in enumerate(row.objects("traces")):
        place = f"{line.place}, trace {i}"
        try:
            yield from list(_branches(trace, row, place, step))
        except WRONG as err:
            yield BrokenRecord(place, why(err), trace.name("id"))


@dataclass(slots=True)
class _Text:
    """Tokens of a record as they are put together, and values over all of them, None where there are none."""

    ids: list[int] = field(default_factory=list[int])
    drawn: list[bool] = field(default_factory=list[bool])
    trained: list[bool] = field(default_factory=list[bool])
    columns: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    steps: list[int] = field(default_factory=list[int])

    def add(self, ids: Sequence[int], drawn: Sequence[bool], trained: Sequence[bool], values: dict[str, Any]) -> None:
        for key in {**self.columns, **values}:
            mine = self.columns.setdefault(key, [None] * len(self.ids))
            mine += values.get(key) or [None] * len(ids)
        self.ids += ids
        self.drawn += drawn
        self.trained += trained

    def record(self, place: str, facts: dict[str, Any], with_mask: bool, version: int | None = None) -> RawRecord:
        drawn = np.array(self.drawn, dtype=bool)
        columns = {key: floats(x, "whole") for key, x in self.columns.items()}
        columns["drawn"] = RawColumn(drawn, "whole")
        if with_mask:
            columns["loss_mask"] = RawColumn(np.array(self.trained, dtype=bool), "whole")
        if version is not None:
            columns["policy_version"] = RawColumn(np.full(len(drawn), version, dtype=np.int64), "whole", drawn)
        prompt = int(drawn.argmax()) if drawn.any() else len(drawn)
        return RawRecord(place, ids_of(self.ids), prompt, columns, facts)


# -- steps of a trajectory -------------------------------------------------------------------------------------------


def _steps(row: Row, place: str, step: int | None) -> Iterator[Read]:
    steps = row.objects("trajectory")
    texts: list[_Text] = []
    without: list[int] = []
    for k, one in enumerate(steps):
        tokens = one.object("tokens")
        if tokens is None:
            without.append(k)
            continue
        try:
            _extend(texts, tokens, _advantage(one, row), k)
        except ValueError as err:
            raise ValueError(f"step {k}: {err}") from None
    shared = _about(row, steps, step)
    if not texts:
        yield TextRecord(place, _messages(row), shared, _NO_IDS)
        return
    for i, text in enumerate(texts):
        alone = len(texts) == 1
        record_id = (
            shared["trajectory_id"] if alone or not shared["trajectory_id"] else f"{shared['trajectory_id']}/{i}"
        )
        facts = shared | {"record_id": record_id, "turn": None if alone else text.steps[0]}
        yield text.record(f"{place}{_which(text.steps, i)}", facts, True)
    for k in without:
        yield TextRecord(f"{place}, step {k}", {}, shared, f"step {k} has no token ids")


def _which(steps: Sequence[int], i: int) -> str:
    named = f", step {steps[0]}" if len(steps) == 1 else f", steps {', '.join(map(str, steps))}"
    return named + (" (extends no step before it)" if i else "")


def _extend(texts: list[_Text], tokens: Row, advantage: float | None, k: int) -> None:
    """Adds a step to the longest text that its prompt begins with, or begins a new one."""
    prompt, reply = _ids(tokens, "prompt_ids"), _ids(tokens, "completion_ids")
    before = [t for t in texts if len(t.ids) <= len(prompt) and prompt[: len(t.ids)] == t.ids]
    text = max(before, key=lambda t: len(t.ids), default=None)
    if text is None:
        text = _Text()
        texts.append(text)
    start = len(text.ids)
    given = _mask(tokens, "prompt_mask", len(prompt), False)[start:]
    text.add(prompt[start:], [False] * len(given), given, {})
    trained = _mask(tokens, "completion_mask", len(reply), True)
    values: list[Any] = tokens.list("completion_logprobs") or [None] * len(reply)
    if len(values) != len(reply):
        raise ValueError(f"'completion_logprobs': got {len(values)} values, wanted {len(reply)}, one a completion id")
    # what is masked and has 0.0 was put there by the environment
    drawn = [bool(m) or x not in (0, None) for m, x in zip(trained, values, strict=True)]
    columns: dict[str, Any] = {"sampler_logprobs": [x if d else None for x, d in zip(values, drawn, strict=True)]}
    if advantage is not None:
        columns["advantages"] = [advantage if d else None for d in drawn]
    text.add(reply, drawn, trained, columns)
    text.steps.append(k)


def _ids(tokens: Row, key: str) -> list[int]:
    ids = tokens.ids(key)
    if ids is None:
        raise ValueError(f"no {key!r}")
    return ids.tolist()


def _mask(tokens: Row, key: str, n: int, fill: bool) -> list[bool]:
    cells = tokens.list(key)
    if cells is None:
        return [fill] * n
    if len(cells) != n:
        raise ValueError(f"{key!r}: got {len(cells)} values, wanted {n}")
    return flags(cells, "whole").values.tolist()


def _advantage(one: Row, row: Row) -> float | None:
    mine = one.number("advantage")
    return row.number("advantage") if mine is None else mine


def _about(row: Row, steps: Sequence[Row], step: int | None) -> dict[str, Any]:
    sampling = row.object("sampling_args") or Row({})
    named = next((found for one in steps if (found := one.name("trajectory_id")) is not None), None)
    return {
        "trajectory_id": row.name("trajectory_id") if named is None else named,
        "group_id": row.name("example_id"),
        "env_id": row.name(row.first("env_name", "env_id", "task")) if not isinstance(row.get("task"), dict) else None,
        "reward": row.number("reward"),
        "step": step,
        "finish_reason": row.text("stop_condition"),
        **_sampling([sampling]),
    }


def _sampling(said: Sequence[Row]) -> dict[str, Any]:
    """Parameters that all of these requests agree on."""
    out: dict[str, Any] = {}
    for key in ("temperature", "top_p", "min_p", "top_k"):
        values = {one.whole(key, 32) if key == "top_k" else one.number(key) for one in said}
        if len(values) == 1 and None not in values:
            out[key] = values.pop()
    return out


def _messages(row: Row) -> dict[str, Any]:
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return {"prompt_text": prompt}
    return {"messages": prompt} if isinstance(prompt, list) else {}


# -- paths through a tree of messages --------------------------------------------------------------------------------


def _branches(trace: Row, episode: Row, place: str, step: int | None) -> Iterator[Read]:
    nodes = trace.objects("nodes")
    if not nodes:
        raise ValueError("no 'trajectory' and no 'nodes'")
    facts, version = _about_trace(trace, episode, step)
    paths = _paths(nodes)
    seen: set[int] = set()
    found = 0
    for i, path in enumerate(paths):
        text = _Text()
        for k in path:
            try:
                _add_node(text, nodes[k], k in seen)
            except ValueError as err:
                raise ValueError(f"node {k}: {err}") from None
        seen.update(path)
        if not any(text.drawn):
            continue
        found += 1
        record_id = facts["trajectory_id"]
        several = len(paths) > 1 and record_id is not None
        more = {"record_id": f"{record_id}/{i}" if several else record_id, **_sampling(_calls(trace, path))}
        yield text.record(place if len(paths) == 1 else f"{place}, branch {i}", facts | more, False, version)
    if not found:
        messages = [nodes[k].get("message") for k in paths[-1]]
        yield TextRecord(place, {"messages": messages}, facts, _NO_IDS)


def _paths(nodes: Sequence[Row]) -> list[list[int]]:
    """Of each leaf, the nodes from its root. Errors: `ValueError` for a parent that does not stand before its child."""
    parents = [node.whole("parent") for node in nodes]
    for k, parent in enumerate(parents):
        if parent is not None and not 0 <= parent < k:
            raise ValueError(f"node {k}: 'parent': got {parent}, wanted a node before it")
    inner = {p for p in parents if p is not None}
    out: list[list[int]] = []
    for leaf in (k for k in range(len(nodes)) if k not in inner):
        path, at = list[int](), cast("int | None", leaf)
        while at is not None:
            path.append(at)
            at = parents[at]
        out.append(path[::-1])
    return out


def _add_node(text: _Text, node: Row, again: bool) -> None:
    """`again`: its turn is drawn in an earlier path already."""
    ids = node.list("token_ids") or []
    ids_of(ids)
    sampled = _mask(node, "mask", len(ids), False)
    values: dict[str, Any] = {}
    for key, column in _VALUES.items():
        cells = node.list(key)
        if not cells:
            continue
        if len(cells) != sum(sampled):
            raise ValueError(f"{key!r}: got {len(cells)} values, wanted {sum(sampled)}, one for each sampled token")
        rest = iter(cells)
        values[column] = [next(rest) if s else None for s in sampled]
    text.add(ids, [False] * len(ids) if again else sampled, sampled, values)


def _calls(trace: Row, path: Sequence[int]) -> list[Row]:
    on = set(path)
    return [s for c in trace.objects("calls") if c.get("node") in on and (s := c.object("sampling")) is not None]


def _about_trace(trace: Row, episode: Row, step: int | None) -> tuple[dict[str, Any], int | None]:
    task = trace.object("task") or Row({})
    run, env, group = (episode.object(key) or Row({}) for key in ("run", "env", "group"))
    work = run.object("work") or Row({})
    policy = work.object("policy") or Row({})
    info = trace.object("info") or Row({})
    told = info.object("prime_rl") or Row({})
    task_name = task.name(task.first("key", "hash"))
    at = work.whole("step")
    facts = {
        "trajectory_id": trace.name("id"),
        "group_id": task_name if group.name("id") is None else group.name("id"),
        "env_id": env.name(env.first("name", "id")) or told.name("env_name"),
        "run_id": run.name("id"),
        "reward": _reward(trace),
        "step": step if at is None else at,
        "finish_reason": trace.text("stop_condition"),
    }
    first, last = policy.whole("start"), policy.whole("end")
    return facts, first if first == last else None


def _reward(trace: Row) -> float | None:
    """The sum of weighted scores; a number, as earlier versions have it."""
    said = trace.get("rewards")
    if not isinstance(said, Mapping):
        return trace.number("reward")
    total: float | None = None
    for key, value in cast(Mapping[str, Any], said).items():
        if value is None:
            continue
        part = Row(value) if isinstance(value, Mapping) else Row({"score": value})
        score, weight = part.number("score"), part.number("weight")
        if score is None:
            raise ValueError(f"'rewards', {quoted(key)}: got {quoted(value)}, wanted a score")
        total = (total or 0.0) + score * (1.0 if weight is None else weight)
    return total
