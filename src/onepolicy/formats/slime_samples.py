"""One sample of slime or miles as a raw record: what the rollout file says of it, and what the policy loss saw."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import ContentError
from onepolicy.formats.base import RawColumn, RawRecord, flags, floats
from onepolicy.formats.batches import own_tokens, put, scored, whole_numbers, wide
from onepolicy.formats.inert import Opaque
from onepolicy.formats.unpickle import Array, Tensor, array

#: The sample's status, in the words of an engine.
_FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "failed", "pending": None}
#: The policy loss's name -> ours. `train_log_probs` are of the weights inside the update.
_DEBUG = {
    "train_log_probs": "current_logprobs",
    "old_log_probs": "old_logprobs",
    "rollout_log_probs": "sampler_logprobs",
    "advantages": "advantages",
}


def sample_of(raw: Any) -> Mapping[str, Any]:
    """A sample is a dict, or a pickled `Sample`. Errors: `ValueError`."""
    if isinstance(raw, Opaque) and isinstance(raw.state, dict):
        return raw.state
    if not isinstance(raw, dict):
        raise ValueError(f"got {raw!r:.60}, wanted a sample")
    return raw


def checked(path: str, samples: Sequence[Any], size: int) -> None:
    """Errors: `ContentError` for samples that hold far more values than the file has bytes: one list that stands in all
    of them, to keep the reader busy for days."""
    values = (v for s in samples if isinstance(s, (dict, Opaque)) for v in _values(s))
    held = sum(len(v) if isinstance(v, (list, tuple)) else math.prod(v.size) for v in values)
    if held > 16 * size + (1 << 24):
        raise ContentError(f"{path}: damaged or made up: {held} values in a file of {size} bytes")


def _values(sample: Any) -> list[Any]:
    state = sample.state if isinstance(sample, Opaque) else sample
    return [v for v in state.values() if isinstance(v, (list, tuple, Tensor))] if isinstance(state, dict) else []


def ids_of(value: Any) -> NDArray[Any]:
    """Token ids, whole numbers. Errors: `ValueError`, `ContentError`."""
    return whole_numbers(array(value, "tokens"), "tokens")


def numbers(value: Any) -> NDArray[Any]:
    """A mask, offsets, a tensor of log-probs: one dimension. Errors: `ContentError`."""
    return wide(array(value).reshape(-1))


def column(value: Any) -> RawColumn:
    """A reply's values: a list with numbers and None, or a tensor."""
    if not isinstance(value, (list, tuple)):
        return floats(numbers(value), "reply")
    return floats(value, "reply")


def rollout_record(place: str, sample: Mapping[str, Any], step: int | None) -> RawRecord:
    """The sampler's side. Errors: `ValueError`, `TypeError`, `ContentError`."""
    ids = ids_of(sample.get("tokens"))
    reply = sample.get("response_length")
    if type(reply) is not int:
        raise ValueError(f"response_length: got {reply!r:.40}, wanted a number")
    columns: dict[str, RawColumn] = {}
    mask = sample.get("loss_mask")
    if mask is not None:
        columns["loss_mask"] = flags(numbers(mask), "reply")
    logprobs = sample.get("rollout_log_probs")
    if logprobs is not None:
        put_sampler(columns, column(logprobs), None if mask is None else numbers(mask))
    if sample.get("teacher_log_probs") is not None:
        columns["teacher_logprobs"] = column(sample["teacher_log_probs"])
    version = _one_version(sample.get("weight_versions"))
    if version is not None and 0 <= reply <= len(ids):
        columns["policy_version"] = RawColumn(np.full(reply, version, dtype=np.int64), "reply")
    prompt = len(ids) - reply
    return RawRecord(
        place, ids, prompt, columns, facts(sample, step), _lists(sample, len(ids), reply), texts=_texts(sample)
    )


def put_sampler(columns: dict[str, RawColumn], sampler: RawColumn, mask: NDArray[Any] | None) -> None:
    """The sampler's log-probs, and which tokens it drew."""
    if sampler.valid is None:
        put(columns, "drawn", own_tokens(mask, sampler.values, "reply"))
        sampler = scored(sampler.values, "reply", mask)
    columns["sampler_logprobs"] = sampler


def facts(sample: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Record columns of a sample."""
    reward, status = sample.get("reward"), sample.get("status")
    if isinstance(status, Opaque):
        status = status.args[0] if status.args else None
    group = sample.get("group_index")
    return {
        "step": step,
        "group_id": None if group is None else str(group),
        "sample_id": None if sample.get("index") is None else str(sample["index"]),
        "reward": float(reward) if isinstance(reward, (int, float)) else None,
        "finish_reason": _FINISH.get(status, status) if isinstance(status, str) else None,
    }


def _one_version(versions: Any) -> int | None:
    """One version of the weights drew all of it; where several did, the sample does not tell which token is whose."""
    if not isinstance(versions, list) or not versions:
        return None
    found = {str(v) for v in versions}
    text = found.pop()
    return int(text) if not found and text.isdigit() and len(text) < 18 else None


def _lists(sample: Mapping[str, Any], n_tokens: int, reply: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    ids, offsets = sample.get("rollout_top_p_token_ids"), sample.get("rollout_top_p_token_offsets")
    if ids is not None and offsets is not None:
        flat, bounds = numbers(ids), numbers(offsets)
        if bounds.dtype.kind not in "iu" or len(bounds) == 0 or (np.diff(bounds) < 0).any() or bounds[-1] > len(flat):
            raise ValueError("rollout_top_p_token_offsets: not the rows of rollout_top_p_token_ids")
        cuts = bounds.tolist()
        out["sampling_mask"] = ([flat[a:b] for a, b in itertools.pairwise(cuts)], "reply")
    experts = sample.get("rollout_routed_experts")
    if isinstance(experts, (Tensor, Array)):
        taken = array(experts)
        rest = [None] * (n_tokens - len(taken)) if len(taken) == n_tokens - 1 else []
        out["routed_experts"] = ([*taken, *rest], "whole")  # the last token is never fed
    return out


def _texts(sample: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    prompt, response = sample.get("prompt"), sample.get("response")
    if isinstance(prompt, str) and prompt:
        out["prompt_text"] = prompt
    elif isinstance(prompt, list) and prompt:
        out["messages"] = prompt
    if isinstance(response, str) and response:
        out["reply_text"] = response
    return out


def debug_record(place: str, sample: Mapping[str, Any], about: Mapping[str, Any]) -> RawRecord:
    """What the policy loss saw. It has no token ids, and nothing of the prompt."""
    columns = {ours: column(sample[theirs]) for theirs, ours in _DEBUG.items() if sample.get(theirs) is not None}
    if "current_logprobs" not in columns:
        raise ValueError("train_log_probs: none")
    mask = None if sample.get("local_loss_mask") is None else numbers(sample["local_loss_mask"])
    if mask is not None:
        columns["loss_mask"] = flags(mask, "reply")
    if "sampler_logprobs" in columns:
        put_sampler(columns, columns["sampler_logprobs"], mask)
    n, stated = len(columns["current_logprobs"].values), sample.get("response_length")
    which = "-".join(str(x)[:18] for x in (about.get("rank"), about.get("call"), sample.get("index")))
    claimed = {"reply": stated} if type(stated) is int else {}
    return RawRecord(
        place,
        np.arange(n),
        0,
        columns,
        {"sample_id": f"rank-call-index {which}"},
        claims=claimed,
        prompt_known=False,
        ids_known=False,
    )
