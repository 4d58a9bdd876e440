"""Out as ids or text, back with log-probs: the same records, the same ids, every reply token told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from onepolicy.engines.fake import FakeEngine
from onepolicy.errors import AlignmentError, ContentError
from onepolicy.rollouts import Rollouts, column_values, concat
from onepolicy.suite import fixed_rollouts, load, returned, text_rows
from onepolicy.types import Scoring, Values

ENGINE = FakeEngine("", seed=1)
ASKED = fixed_rollouts(load("smoke"), ENGINE)[0]
SCORED = ASKED.with_scoring("old", replace(ENGINE.score(ASKED), semantics=None, dtype=None))


def scored(told: np.ndarray) -> Rollouts:
    """With values where `told`."""
    values = SCORED.scorings["old"].logprobs.values
    return ASKED.with_scoring("old", Scoring(Values(values, told)))


def test_what_comes_back_is_what_was_sent_with_a_scoring():
    back = returned(ASKED, SCORED.take(reversed(range(len(SCORED)))), dtype="float32")
    assert [back.record("record_id", i) for i in range(len(back))] == ASKED.record_ids()
    got, wanted = back.scorings["old"], SCORED.scorings["old"]
    assert np.array_equal(got.logprobs.values, wanted.logprobs.values)
    assert (got.semantics, got.dtype) == ("raw", "float32")
    assert not back.drawn.any()


def test_columns_that_the_scorer_dropped_are_kept():
    """A trainer returns ids and log-probs; without `drawn` a reader takes every reply token for drawn."""
    bare = Rollouts(
        SCORED.offsets,
        {"token_ids": SCORED.tokens["token_ids"], "drawn": Values(np.ones(SCORED.n_tokens, dtype=bool))},
        {"record_id": SCORED.records["record_id"]},
        {},
        SCORED.scorings,
    )
    back = returned(ASKED, bare)
    assert set(back.records) == set(ASKED.records)
    assert not back.drawn.any()


def test_prompts_may_be_unscored():
    place = np.arange(ASKED.n_tokens) - np.repeat(ASKED.offsets[:-1], ASKED.lengths)
    reply = place >= np.repeat(ASKED.records["prompt_length"].values, ASKED.lengths)
    assert returned(ASKED, scored(reply & (place > 0))).scorings["old"].logprobs.mask().sum() == reply.sum()


def with_ids(change: Callable[[list[str | None]], None]) -> Rollouts:
    names: list[str | None] = list(ASKED.record_ids())
    change(names)
    return replace(SCORED, records={**SCORED.records, "record_id": column_values("record_id", names)})


def other_token() -> Rollouts:
    ids = SCORED.token_ids.copy()
    ids[SCORED.offsets[1] + 4] += 1
    return replace(SCORED, tokens={**SCORED.tokens, "token_ids": Values(ids)})


def shortened() -> Rollouts:
    flat = np.delete(np.arange(SCORED.n_tokens), SCORED.offsets[2] - 1)
    offsets = np.concatenate([SCORED.offsets[:2], SCORED.offsets[2:] - 1])
    scoring = SCORED.scorings["old"]
    tokens = {k: v.take(flat) for k, v in SCORED.tokens.items()}
    records = {"record_id": SCORED.records["record_id"]}
    return Rollouts(offsets, tokens, records, {}, {"old": scoring.take(flat)})


def hole() -> Rollouts:
    told = SCORED.scorings["old"].logprobs.mask().copy()
    told[SCORED.offsets[1] - 3 : SCORED.offsets[1] - 1] = False
    return scored(told)


REFUSED: dict[str, tuple[Callable[[], Rollouts], type[Exception], str]] = {
    "missing": (
        lambda: SCORED.take([0, 2, 3]),
        AlignmentError,
        "'code-python-runs' is missing .* \\(4 more like it\\)",
    ),
    "never sent": (
        lambda: concat([SCORED, with_ids(lambda n: n.__setitem__(0, "prose-other")).take([0])]),
        AlignmentError,
        "'prose-other' is in the scored file, but never sent",
    ),
    "twice": (lambda: concat([SCORED, SCORED.take([3])]), AlignmentError, "'emoji-families' is more than once"),
    "unnamed": (lambda: with_ids(lambda n: n.__setitem__(2, None)), AlignmentError, "record 3 .* has no record_id"),
    "other ids": (other_token, AlignmentError, "'code-python-runs'.*position 4"),
    "other length": (shortened, AlignmentError, "'code-python-runs': \\d+ tokens"),
    "no scoring": (lambda: ASKED, ContentError, "no column 'old_logprobs'; it has no log-probs at all"),
    "a hole": (hole, ContentError, "'prose-ferry': 2 of \\d+ reply tokens have no 'old_logprobs', position \\d+ first"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_same_is_refused_by_name(name: str):
    make, kind, says = REFUSED[name]
    with pytest.raises(kind, match=says) as err:
        returned(ASKED, make())
    assert "\n" not in str(err.value)


def test_a_dtype_is_not_contradicted():
    told = ASKED.with_scoring("old", replace(SCORED.scorings["old"], dtype="bfloat16"))
    assert returned(ASKED, told).scorings["old"].dtype == "bfloat16"
    with pytest.raises(ContentError, match="computed in bfloat16, you say float32"):
        returned(ASKED, told, dtype="float32")


def test_texts_go_out_as_they_are():
    rows = {row["id"]: row for row in text_rows(load("full"))}
    texts = {x.id: x for x in load("full").texts}
    assert set(texts) - set(rows) == {"long-context-limit"}
    assert all(rows[k]["reply"] == x.reply for k, x in texts.items() if not x.made)
    assert rows["chat-recipe"]["messages"] == texts["chat-recipe"].prompt
    assert rows["combining-decomposed"]["group"] == rows["combining-composed"]["group"]


def test_made_texts_go_out_long_enough():
    """The first `tokens` ids of it are those that `fixed_rollouts` takes."""
    rows = {row["id"]: row for row in text_rows(load("default"))}
    rollouts, _ = fixed_rollouts(load("default"), ENGINE)
    ids = {
        rollouts.record("record_id", i): rollouts.token_ids[rollouts.sequence(i)].tolist() for i in range(len(rollouts))
    }
    for name in ("long-context-1k", "hindi-diary-512"):
        assert list(rows[name]["prompt"].encode())[: rows[name]["tokens"]] == ids[name]
    reply = rows["long-reply-4k"]
    assert (
        ids["long-reply-4k"]
        == list((reply["prompt"]).encode()) + list(reply["reply"].encode())[: reply["reply_tokens"]]
    )
