"""For scorers that live elsewhere: the texts as text, and a scored file checked against the ids that were sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from onepolicy.align import matched
from onepolicy.errors import AlignmentError, ContentError
from onepolicy.rollouts import Rollouts
from onepolicy.suite import makers
from onepolicy.suite.build import CHARACTERS_A_TOKEN
from onepolicy.suite.load import Suite


def text_rows(suite: Suite) -> Iterator[dict[str, Any]]:
    """One JSON-able dict a text, for engines with a tokenizer of their own.

    A made text is longer than it is meant to be: of prompt and reply together the first `tokens` ids count, and the
    last `reply_tokens` of these are the reply; without `tokens`, the first `reply_tokens` ids of the reply. Those made
    to the model's limit are not given: how long that is, only the model knows.
    """
    for x in suite.texts:
        row: dict[str, Any] = {"id": x.id, "group": x.group, "category": x.category}
        row |= {"prompt": x.prompt} if isinstance(x.prompt, str) else {"messages": x.prompt}
        made = x.made
        if made is None:
            yield {**row, "reply": x.reply}
        elif made.tokens is None:
            more = makers.text(made.maker, made.seed, made.reply_tokens * CHARACTERS_A_TOKEN)
            yield {**row, "reply": more, "reply_tokens": made.reply_tokens}
        elif made.tokens != "limit":
            more = makers.text(made.maker, made.seed, made.tokens * CHARACTERS_A_TOKEN)
            yield {**row, "prompt": more, "reply": "", "tokens": made.tokens, "reply_tokens": made.reply_tokens}


def returned(asked: Rollouts, scored: Rollouts, side: str = "old", dtype: str | None = None) -> Rollouts:
    """`asked` with the scoring `side` of `scored`, in the order of `asked`, everything else as it was sent.

    `dtype`: the precision the scorer computed in, where its file does not say. Prompts may be unscored.

    Errors: `AlignmentError`, by record, for one that is missing, that was never sent or stands there twice, and for
    other token ids; `ContentError` for a scoring that is not there, and for a reply token without a value.
    """
    if side not in scored.scorings:
        have = ", ".join(f"{name}_logprobs" for name in scored.scorings) or "no log-probs at all"
        raise ContentError(f"the scored file has no column '{side}_logprobs'; it has {have}")
    _require_same_records(asked, scored)
    scoring = matched(asked, scored).scorings[side]
    _require_replies(asked, scoring.logprobs.mask(), side)
    if dtype and scoring.dtype not in (None, dtype):
        raise ContentError(f"the scored file says that {side!r} was computed in {scoring.dtype}, you say {dtype}")
    scoring = replace(scoring, dtype=scoring.dtype or dtype, semantics=scoring.semantics or "raw")
    return asked.with_scoring(side, scoring)


def _require_same_records(asked: Rollouts, scored: Rollouts) -> None:
    sent = asked.record_ids()
    back = [scored.record("record_id", i) for i in range(len(scored))]
    if None in back:
        nth = back.index(None) + 1
        raise AlignmentError(f"record {nth} of the scored file has no record_id; wanted those that were exported")
    counts, known = Counter(back), set(sent)
    problems = {
        "missing from the scored file": [x for x in sent if x not in counts],
        "in the scored file, but never sent": [x for x in counts if x not in known],
        "more than once in the scored file": [x for x, n in counts.items() if n > 1],
    }
    for what, names in problems.items():
        if names:
            more = f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
            raise AlignmentError(f"record {names[0]!r} is {what}{more}")


def _require_replies(asked: Rollouts, told: np.ndarray, side: str) -> None:
    for i, name in enumerate(asked.record_ids()):
        mine = told[asked.sequence(i)]
        start = max(1, asked.record("prompt_length", i) or 0)
        empty = np.flatnonzero(~mine[start:]) + start
        if len(empty):
            raise ContentError(
                f"record {name!r}: {len(empty)} of {len(mine) - start} reply tokens have no '{side}_logprobs', "
                f"position {empty[0]} first"
            )
