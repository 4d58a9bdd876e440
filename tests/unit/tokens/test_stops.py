"""Stop tokens, each fault both ways: found with its class and place, and silent where all is well."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onepolicy.records import from_records
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.columns import check_rollouts, stop_suspects
from onepolicy.tokens.sampled import runs_of, sampled_runs
from onepolicy.tokens.stops import check_stops
from onepolicy.types import Finding, Severity

STOP, OTHER, PAD = 7, 8, 0


def reply(ids: list[int], finish: str | None = "stop", mask: Any = "all", **more: Any) -> TokenRecord:
    """A reply whose tokens are all trained, unless told."""
    return TokenRecord(
        "r", "file:1", reply_ids=ids, finish_reason=finish, loss_mask=[1] * len(ids) if mask == "all" else mask, **more
    )


def seen(findings: list[Finding]) -> list[tuple[str, str, str]]:
    """(code, class, severity) of each."""
    return [(f.code, f.evidence.get("class", ""), f.severity.value) for f in findings]


def check(record: TokenRecord, **more: Any) -> list[Finding]:
    return check_stops(record, **{"stop_ids": (STOP,), **more})


@pytest.mark.parametrize("finish", ["stop", "eos_token", "EOS", "end_turn", "tool_calls", None])
def test_a_stop_token_that_was_sampled_and_trained(finish: str | None) -> None:
    assert check(reply([40, 41, STOP], finish)) == []
    assert check(reply([40, 41, STOP], finish, None)) == []
    assert check(reply([40, STOP], finish, logprobs=[-0.5, -0.1]), eos=STOP) == []


@pytest.mark.parametrize("finish", ["length", "max_tokens", "abort"])
def test_a_reply_that_was_cut(finish: str) -> None:
    assert check(reply([40, 41, 42], finish)) == []
    assert check(reply([40, 41, 42], finish, [0, 0, 0])) == []


def test_a_masked_stop_token() -> None:
    (found,) = check(reply([40, 41, STOP], mask=[1, 1, 0]), names={STOP: "<end>"})
    assert seen([found]) == [("stop-token-not-trained", "stop-masked", "warn")]
    assert {k: found.evidence[k] for k in ("stop_position", "id", "token", "mask", "finish_reason", "cause")} == {
        "stop_position": 2,
        "id": STOP,
        "token": "<end>",
        "mask": 0,
        "finish_reason": "stop",
        "cause": None,
    }
    assert found.place == "file:1" and "'<end>'" in found.message and "at 2" in found.message


@pytest.mark.parametrize(
    ("ids", "mask", "pad"),
    [
        ([40, 41, STOP], [1, 1, 0], STOP),
        ([40, 41, STOP, STOP, STOP], [1, 1, 0, 0, 0], None),
    ],
)
def test_padding_with_the_stop_id_takes_the_real_one_too(ids: list[int], mask: list[int], pad: int | None) -> None:
    (found,) = check(reply(ids, mask=mask), pad=pad)
    assert (found.evidence["stop_position"], found.evidence["cause"]) == (2, "pad-equals-stop")
    assert "takes both" in found.message


def test_padding_behind_a_trained_stop_token_is_no_finding() -> None:
    for pads in ([PAD] * 3, [STOP] * 3):
        assert check(reply([40, 41, STOP, *pads], mask=[1, 1, 1, 0, 0, 0]), pad=pads[0]) == []
        assert check(reply([40, 41, STOP, *pads], mask=[1, 1, 1, 0, 0, 0])) == []
    assert sampled_runs(reply([40, STOP, PAD, PAD]), frozenset({STOP})).runs == [(0, 2)]
    assert sampled_runs(reply([40, 41, PAD, PAD]), frozenset({STOP}), PAD).source == "padding"


@pytest.mark.parametrize("fill", [0.0, -1.0, None])
@pytest.mark.parametrize(("pads", "pad"), [([PAD] * 3, None), ([STOP] * 3, None), ([PAD], PAD), ([STOP], None)])
def test_padding_whose_log_probs_are_filled(fill: float | None, pads: list[int], pad: int | None) -> None:
    logprobs = [-0.5, -0.2, -0.1, *([fill] * len(pads))]
    one = reply([40, 41, STOP, *pads], mask=[1, 1, 1, *([0] * len(pads))], logprobs=logprobs)
    assert check(one, pad=pad) == [] and sampled_runs(one, frozenset({STOP}), pad).runs == [(0, 3)]


def test_each_turn_that_says_how_it_ended() -> None:
    turns = [{"reply_ids": [40, 41], "finish_reason": "stop"}, {"reply_ids": [42, STOP], "finish_reason": "stop"}]
    one = reply([40, 41, 3, 90, 3, 42, STOP], mask=None, spans=[(0, 2), (5, 7)], turns=turns)
    (found,) = check(one)
    assert found.code == "stop-token-missing" and found.message.startswith("r, turn 0: ")
    turns[0]["reply_ids"] = [40, STOP]
    assert check(one) == []


def test_a_finished_reply_that_is_fully_masked() -> None:
    (found,) = check(reply([40, 41, STOP], mask=[0, 0, 0]))
    assert seen([found]) == [("stop-token-not-trained", "fully-masked", "fail")]
    assert found.evidence["why"] == "finished by stop id 7 but fully masked"
    (found,) = check(reply([40, 41, STOP], None, [0, 0, 0]))
    assert found.severity is Severity.WARN  # nobody says that it finished


def test_turns_each_end_with_a_stop_token() -> None:
    ids = [40, STOP, 3, 90, 3, 41, 42, STOP]
    spans = [(0, 2), (5, 8)]
    assert check(reply(ids, mask=[1, 1, 0, 0, 0, 1, 1, 1], spans=spans)) == []
    (found,) = check(reply(ids, mask=[1, 0, 0, 0, 0, 1, 1, 1], spans=spans))
    assert (found.evidence["class"], found.evidence["positions"]) == ("stop-masked", [1])
    # a turn that is left out as a whole was left out on purpose
    assert check(reply(ids, mask=[0, 0, 0, 0, 0, 1, 1, 1], spans=spans)) == []
    # spans count from the prompt
    assert check(reply(ids, mask=[1, 1, 0, 0, 0, 1, 1, 1], prompt_ids=[5, 5], spans=[(2, 4), (7, 10)])) == []


def test_a_missing_stop_token() -> None:
    (found,) = check(reply([40, 41, 42]))
    assert seen([found]) == [("stop-token-missing", "missing", "warn")]
    assert found.evidence["last_id"] == 42 and found.evidence["ends_at"] == 3


@pytest.mark.parametrize(
    ("more", "kind", "severity"),
    [
        ({"usage": {"completion_tokens": 4}}, "trimmed", "warn"),
        ({"logprobs": [-1.0, -1.0, -1.0, -0.1]}, "trimmed", "warn"),
        ({"usage": {"completion_tokens": 40}}, "cut-after-sampling", "warn"),
        ({"extra": {"stop_reason": "</a>"}}, "stop-string", "info"),
        ({"extra": {"matched_stop": "</a>"}, "token_strings": ["x", "y", "z"]}, "stop-string-trimmed", "warn"),
        ({"extra": {"stop_reason": STOP}}, "missing", "warn"),
    ],
)
def test_why_a_stop_token_is_missing(more: dict[str, Any], kind: str, severity: str) -> None:
    (found,) = check(reply([40, 41, 42], **more))
    assert seen([found]) == [("stop-token-missing", kind, severity)]


def test_a_stop_string_whose_tokens_are_kept_is_no_finding() -> None:
    more = {"extra": {"stop_reason": "</a>"}}
    assert check(reply([40, 41, 42], token_strings=["x", "</", "a>"], **more)) == []
    assert check(reply([40, 41, 42], "stop_sequence", **more), names={40: "x", 41: "</a", 42: ">"}) == []


def test_a_stop_id_without_a_log_prob() -> None:
    logprobs = [-0.5, -0.2, None]
    (found,) = check(reply([40, 41, STOP], mask=[1, 1, 0], logprobs=logprobs))
    assert seen([found]) == [("stop-token-missing", "stop-without-logprob", "warn")]
    (found,) = check(reply([40, 41, STOP], logprobs=logprobs))
    assert seen([found]) == [("stop-token-appended", "not-drawn", "fail")]
    assert (found.evidence["stop_position"], found.evidence["why"]) == (2, "without a log-prob")
    (found,) = check(reply([40, 41, STOP], mask=None, logprobs=logprobs))
    assert found.severity is Severity.WARN  # no mask: nobody says that it is trained


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": [-0.5, -0.2, None]},
        {"spans": [(0, 2)]},
        {"extra": {"drawn": [True, True, False]}},
        {},
        {"usage": {"completion_tokens": 2}},
        {"logprobs": [-0.5, -0.2]},
        {"logprobs": [-0.5, -0.2, 0.0]},
    ],
)
def test_a_stop_token_that_was_appended_to_a_cut_reply(more: dict[str, Any]) -> None:
    (found,) = check(reply([40, 41, STOP], "length", **more))
    assert seen([found]) == [("stop-token-appended", "after-length-cut", "fail")]
    assert found.evidence["stop_position"] == 2 and found.evidence["mask"] == 1
    untrained = check(reply([40, 41, STOP], "length", [1, 1, 0], **more))
    assert "stop-token-appended" not in {f.code for f in untrained}


def test_appended_although_the_engine_counted_one_less() -> None:
    (found,) = check(reply([40, 41, STOP], "stop", usage={"completion_tokens": 2}))
    assert seen([found]) == [("stop-token-appended", "not-drawn", "fail")]
    assert check(reply([40, 41, STOP], "stop", usage={"completion_tokens": 3})) == []


def test_the_finish_reason_contradicts_the_last_token() -> None:
    (found,) = check(reply([40, 41, STOP], "length", logprobs=[-0.5, -0.2, -0.3]))
    assert seen([found]) == [("finish-reason-contradicts", "length-but-stop-token", "warn")]
    (found,) = check(reply([40, 41, STOP], "length", usage={"completion_tokens": 3}))
    assert found.code == "finish-reason-contradicts"
    (found,) = check(reply([40, 41, 42], "stop", extra={"max_tokens": 3}))
    assert seen([found]) == [("finish-reason-contradicts", "stop-at-the-limit", "warn")]
    assert check(reply([40, 41, 42], "length", extra={"max_tokens": 3})) == []


def test_the_trainer_tests_another_id() -> None:
    (found,) = check(reply([40, 41, STOP]), eos=OTHER)
    assert seen([found]) == [("wrong-stop-id", "other-id", "warn")]
    assert (found.evidence["eos"], found.evidence["id"], found.evidence["stop_ids"]) == (OTHER, STOP, [STOP])
    (found,) = check(reply([40, 41, STOP]), eos=OTHER, stop_ids=(STOP, OTHER))
    assert seen([found]) == [("wrong-stop-id", "one-of-several", "info")]
    assert check(reply([40, 41, OTHER]), eos=OTHER, stop_ids=(STOP, OTHER)) == []
    assert seen(check(reply([40, 41, STOP], extra={"eos_token_id": OTHER}))) == [("wrong-stop-id", "other-id", "warn")]
    assert check(reply([40, 41, STOP], extra={"eos_token_id": [OTHER, STOP]})) == []
    # what it costs: the reply was called unfinished and masked
    found = check(reply([40, 41, STOP], mask=[0, 0, 0]), eos=OTHER, stop_ids=(STOP, OTHER))
    assert {f.code: f.severity.value for f in found} == {"stop-token-not-trained": "fail", "wrong-stop-id": "warn"}
    assert check(reply([40, 41, 42], "length"), eos=OTHER) == []


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": [-0.1] * 5}, {"spans": [(0, 5)]}, {"extra": {"drawn": [1] * 5}, "mask": None}]
)
def test_sampling_went_on_behind_a_stop_token(more: dict[str, Any]) -> None:
    (found,) = check(reply([40, STOP, 41, 42, STOP], **more))
    assert seen([found]) == [("stop-token-inside", "sampling-went-on", "warn")]
    assert (found.evidence["positions"], found.evidence["behind"]) == ([1], 3)


@pytest.mark.parametrize(
    "more",
    [
        {"mask": [1, 1, 0, 1, 1]},
        {"logprobs": [-0.1, -0.1, None, -0.1, -0.1], "mask": None},
        {"logprobs": [-0.1, -0.1, 0.0, -0.1, -0.1]},
        {"spans": [(0, 2), (3, 5)]},
        {"mask": None},
    ],
)
def test_a_turn_that_ends_inside_a_reply_is_no_such_thing(more: dict[str, Any]) -> None:
    assert check(reply([40, STOP, 90, 42, STOP], **more)) == []


def test_what_cannot_be_checked_is_said() -> None:
    (found,) = check_stops(reply([40, 41]))
    assert seen([found]) == [("tokens-not-checked", "", "info")] and found.evidence["lacks"] == ["stop_ids"]
    (found,) = check(reply([40, 41], None))
    assert found.evidence["lacks"] == ["finish_reason"]
    (found,) = check(reply([40, 41], "because"))
    assert found.evidence["lacks"] == ["finish_reason"]
    assert check(TokenRecord("r")) == [] and check(reply([])) == []


def test_the_records_own_stop_ids_count_too() -> None:
    assert check_stops(reply([40, 9], stop_ids=(9,))) == []
    assert check_stops(reply([40, 8], stop_ids=(9,)), stop_ids=(8,)) == []
    assert seen(check_stops(reply([40, 8], stop_ids=(9,))))[0][0] == "stop-token-missing"
    assert check_stops(reply([40, 9]), eos=9) == []


def test_runs_of_flags() -> None:
    assert runs_of([False, True, True, False, True]) == [(1, 3), (4, 5)]
    assert runs_of([]) == [] and runs_of([True]) == [(0, 1)]


def batch(rng: np.random.Generator, n: int) -> list[dict[str, Any]]:
    """Canonical records, healthy or with one fault each."""
    rows: list[dict[str, Any]] = []
    for i in range(n):
        p, r = int(rng.integers(1, 4)), int(rng.integers(2, 6))
        ids = [*rng.integers(20, 99, p + r).tolist(), STOP]
        drawn, mask, finish = [0] * p + [1] * (r + 1), [0] * p + [1] * (r + 1), "stop"
        fault = int(rng.integers(8))
        if fault == 0:
            mask[-1] = 0
        elif fault == 1:
            ids[-1] = 50
        elif fault == 2:
            drawn[-1], finish = 0, "length"
        elif fault == 3:
            finish = "length"
        elif fault == 4:
            ids[p] = STOP
        elif fault == 5:
            mask = [0] * len(mask)
        logprobs = [-1.0 if d else None for d in drawn]
        rows.append(
            {"record_id": f"r{i}", "token_ids": ids, "prompt_length": p, "drawn": drawn, "loss_mask": mask}
            | {"finish_reason": finish, "sampler_logprobs": logprobs, "stop_token_ids": [STOP]}
        )
    return rows


def test_a_batch_says_what_its_records_say() -> None:
    from onepolicy.tokens.columns import whole_records
    from onepolicy.tokens.masks import check_masks

    rollouts = from_records(batch(np.random.default_rng(0), 400))
    found = check_rollouts(rollouts)
    single = [f for r in whole_records(rollouts, np.arange(400)) for f in (*check_stops(r), *check_masks(r))]
    assert seen(found) == seen(single) and [f.place for f in found] == [f.place for f in single]
    assert {f.code for f in found} >= {"stop-token-not-trained", "stop-token-missing", "stop-token-appended"}
    assert not stop_suspects(rollouts).all()  # most are never made into records


def test_a_batch_without_stop_ids_or_replies() -> None:
    rows = batch(np.random.default_rng(1), 5)
    for row in rows:
        del row["stop_token_ids"]
    assert {f.code for f in check_rollouts(from_records(rows)) if f.code != "sampled-not-trained"} >= {
        "tokens-not-checked"
    }
    texts = from_records([{"token_ids": [1, 2, 3]}, {"token_ids": []}])
    assert check_rollouts(texts, stop_ids=(STOP,)) == []


def test_what_the_record_names_as_tool_output_is_no_sampling_behind_a_stop():
    given = {"reply_ids": [40, 2, 50, 51], "loss_mask": [1, 1, 1, 1], "logprobs": [-0.1, -0.2, -0.3, -0.4]}
    plain = TokenRecord("r", prompt_ids=[9], stop_ids=(2,), **given)
    tool = TokenRecord("r", prompt_ids=[9], stop_ids=(2,), extra={"tool_spans": [[3, 5]]}, **given)
    assert "stop-token-inside" in {f.code for f in check_stops(plain)}
    assert "stop-token-inside" not in {f.code for f in check_stops(tool)}
