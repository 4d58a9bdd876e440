"""Stop tokens of one record: sampled and trained, masked, missing, appended, of the wrong id, inside the reply.

A stop token that the policy drew belongs to its answer: without it stopping is never reinforced. One that somebody
appended was never drawn. Which is which is read from spans, a `drawn` column or null log-probs; where the record says
none of these, only what ids, mask and finish reason prove is said. Positions count from the reply's first id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onepolicy.codes import finding
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.cells import any_empty, empty, finish_of, of_reply, sampler_logprobs
from onepolicy.tokens.others import other_spans
from onepolicy.tokens.sampled import Sampled, sampled_runs
from onepolicy.types import Finding, Outcome, Severity


@dataclass
class _View:
    """One record as the rules read it."""

    record: TokenRecord
    ids: list[int]
    sampler_stops: frozenset[int]
    eos: int | None
    pad: int | None
    names: Mapping[int, str]

    @cached_property
    def stops(self) -> frozenset[int]:
        return self.sampler_stops | (frozenset() if self.eos is None else {self.eos})

    @cached_property
    def sampled(self) -> Sampled:
        return sampled_runs(self.record, self.stops, self.pad)

    @cached_property
    def mask(self) -> list[Any] | None:
        return of_reply(self.record.loss_mask, self.record)

    @cached_property
    def logprobs(self) -> list[Any] | None:
        return sampler_logprobs(self.record)

    @cached_property
    def finish(self) -> str | None:
        return finish_of(self.record)

    @cached_property
    def end(self) -> int:
        """Just behind the last id that was drawn."""
        return self.sampled.runs[-1][1] if self.sampled.runs else 0

    @property
    def last(self) -> int | None:
        return self.ids[self.end - 1] if self.end else None

    @property
    def ends_at_stop(self) -> bool:
        return self.last in self.stops

    def trained(self, i: int) -> bool | None:
        """Whether the token is in the loss mask, None where that is not known."""
        return None if self.mask is None or empty(self.mask[i]) else bool(self.mask[i])

    @cached_property
    def all_masked(self) -> bool:
        marks = [] if self.mask is None else [self.mask[a:b] for a, b in self.sampled.runs]
        return bool(marks) and not any(map(any, marks)) and not any(map(any_empty, marks))

    def named(self, token_id: int | None) -> str:
        name = None if token_id is None else self.names.get(token_id)
        return f"{token_id}" if name is None else f"{token_id} ({name!r})"

    def found(
        self, code: str, kind: str, at: int | None, message: str, more: Mapping[str, Any], **given: Any
    ) -> Finding:
        token = None if at is None else self.ids[at]
        evidence: dict[str, Any] = {
            "class": kind,
            "stop_position": at,
            "id": token,
            "token": None if token is None else self.names.get(token),
        }
        evidence |= {"mask": None if at is None or self.mask is None else self.mask[at]}
        evidence |= {"finish_reason": self.record.finish_reason, "drawn_by": self.sampled.source, **more}
        text = f"{self.record.record_id}: {message}"
        return finding(code, text, place=self.record.place, evidence=evidence, **given)


FAILS: dict[str, Any] = {"severity": Severity.FAIL, "outcome": Outcome.DRIFT}
WARNS: dict[str, Any] = {"severity": Severity.WARN, "outcome": Outcome.PASS}
NOTES: dict[str, Any] = {"severity": Severity.INFO, "outcome": Outcome.PASS}


def check_stops(
    record: TokenRecord,
    *,
    eos: int | None = None,
    stop_ids: Sequence[int] = (),
    pad: int | None = None,
    names: Mapping[int, str] | None = None,
) -> list[Finding]:
    """What is wrong with the stop tokens of one record.

    `eos`: the one id that the trainer takes for the end of a reply (else the record's `eos_token_id`). `stop_ids`: ids
    at which the sampler ends a reply, besides the record's own. `pad`: the trainer's padding id. `names`: token texts
    by id, for messages.

    Evidence: `class`, `stop_position` in the reply, `id`, `mask` there, `finish_reason`, `drawn_by` (see `Sampled`).
    """
    if not record.reply_ids:
        return []
    own = frozenset((*record.stop_ids, *stop_ids))
    said = record.extra.get("eos_token_id")
    eos = said if eos is None and type(said) is int else eos
    view = _View(record, record.reply_ids, own, eos, pad, names or {})
    if not view.stops:
        return [_unchecked(record, "stop_ids", "stop tokens")]
    turns = [_View(turn, turn.reply_ids or [], own, eos, pad, names or {}) for turn in _turns(record)]
    return [f for one in (view, *turns) for rule in RULES for f in rule(one)]


def _turns(record: TokenRecord) -> Iterator[TokenRecord]:
    """Turns that say how they ended, each as a record; the last one is the record's own end."""
    for k, turn in enumerate((record.turns or ())[:-1]):
        if isinstance(turn.get("finish_reason"), str) and turn.get("reply_ids"):
            yield TokenRecord(
                f"{record.record_id}, turn {k}",
                record.place,
                reply_ids=list(turn["reply_ids"]),
                logprobs=turn.get("logprobs"),
                loss_mask=turn.get("loss_mask"),
                finish_reason=turn["finish_reason"],
                extra={key: turn[key] for key in ("stop_reason", "matched_stop", "max_tokens") if key in turn},
            )


def _unchecked(record: TokenRecord, lacks: str, what: str) -> Finding:
    said = f"{record.record_id}: {lacks.replace('_', ' ')} not known, so {what} are not checked"
    return finding(
        "tokens-not-checked",
        said,
        place=record.place,
        evidence={"lacks": [lacks], "unchecked": ["stops"], "what": what},
    )


def _untrained(v: _View) -> Iterator[Finding]:
    """A sampled stop token that the loss mask leaves out."""
    if v.mask is None or v.finish in ("length", "abort"):
        return
    ends = [b - 1 for _, b in v.sampled.runs if v.ids[b - 1] in v.stops]
    masked = [i for i in ends if v.trained(i) is False]
    if v.all_masked and v.ends_at_stop:
        why = f"finished by stop id {v.last} but fully masked"
        more = {"why": why, "positions": masked, "ends_with_eos": v.last == v.eos, "eos": v.eos}
        text = f"{why}: {v.end} sampled ids, none of them trained"
        yield v.found(_NOT_TRAINED, "fully-masked", v.end - 1, text, more, **(FAILS if v.finish else WARNS))
        return
    masked = [i for i in masked if _run_is_trained(v, i)]
    if masked:
        cause = _cause(v, masked[-1])
        text = f"sampled stop token {v.named(v.ids[masked[-1]])} at {masked[-1]} has mask 0{_BECAUSE[cause]}"
        yield v.found(_NOT_TRAINED, "stop-masked", masked[-1], text, {"positions": masked, "cause": cause})


_NOT_TRAINED = "stop-token-not-trained"
_BECAUSE = {
    "pad-equals-stop": ", as the padding behind it has: the padding id is the stop id, and a mask by id takes both",
    None: "",
}


def _run_is_trained(v: _View, stop_at: int) -> bool:
    """A turn that is left out as a whole was left out on purpose."""
    start = next(a for a, b in v.sampled.runs if b - 1 == stop_at)
    return any(v.trained(i) for i in range(start, stop_at))


def _cause(v: _View, at: int) -> str | None:
    """Whether a mask made by `id != padding` explains that the stop token is left out."""
    behind = v.ids[at + 1 :]
    same = v.ids[at] == v.pad or (bool(behind) and set(behind) == {v.ids[at]})
    return "pad-equals-stop" if same else None


def _missing(v: _View) -> Iterator[Finding]:
    """The reply ended by itself, and its last sampled id is no stop id."""
    if v.finish not in ("stop", "string") or v.ends_at_stop or not v.end or _appended_at(v) is not None:
        return
    if len(v.ids) > 1 and v.end == len(v.ids) and v.ids[v.end - 2] in v.stops:
        return  # one id stands behind the stop token: said by `_inside`
    if v.record.extra.get("max_tokens") == v.end:
        return  # said by `_contradicts`
    kind, given = _kind_of_missing(v)
    if kind is None:
        return
    more = {"last_id": v.last, "ends_at": v.end, "completion_tokens": v.record.usage.get("completion_tokens")}
    text = f"finish reason {v.record.finish_reason!r}, but the last sampled id {v.named(v.last)} is no stop id"
    if kind == "missing":  # then nothing tells a token that is lost from a stop id that nobody named
        given = given | {"rivals": (f"{v.last} is a stop id that is not among {sorted(v.stops)}",)}
        more |= {"stop_ids": sorted(v.stops)}
    yield v.found("stop-token-missing", kind, None, f"{text}: {_MISSING[kind]}", more, **given)


_MISSING: dict[str, str] = {
    "stop-without-logprob": "a stop id stands behind it, without a log-prob",
    "stop-string-trimmed": "the stop string was trimmed",
    "stop-string": "it ended at a stop string; whether its tokens were kept cannot be seen here",
    "trimmed": "one token more was sampled than the record has ids",
    "cut-after-sampling": "the engine counted more tokens than the record has ids",
    "missing": "it was trimmed, or lost",
}


def _kind_of_missing(v: _View) -> tuple[str | None, dict[str, Any]]:
    if v.end < len(v.ids) and v.ids[v.end] in v.stops:
        return "stop-without-logprob", WARNS
    extra = v.record.usage.get("completion_tokens", len(v.ids)) - len(v.ids)
    if extra == 1 or len(v.record.logprobs or ()) == len(v.ids) + 1:
        return "trimmed", WARNS
    if extra > 1:
        return "cut-after-sampling", WARNS
    reason = v.record.extra.get("stop_reason", v.record.extra.get("matched_stop"))
    if not isinstance(reason, str) and v.finish != "string":
        return "missing", WARNS
    kept = _keeps(v, reason) if isinstance(reason, str) else None
    return {True: (None, {}), False: ("stop-string-trimmed", WARNS), None: ("stop-string", NOTES)}[kept]


def _keeps(v: _View, stop_string: str) -> bool | None:
    """Whether the ids still spell the stop string at their end, None where their texts are not known."""
    tail = v.ids[max(v.end - len(stop_string) - 1, 0) : v.end]
    strings = v.record.token_strings
    plain = strings and all(isinstance(x, str) and not x.startswith("token_id:") for x in strings)
    if strings and plain and len(strings) == len(v.ids):
        return stop_string in "".join(strings[: v.end])[-2 * len(stop_string) - 32 :]
    return stop_string in "".join(v.names[i] for i in tail) if all(i in v.names for i in tail) else None


def _appended(v: _View) -> Iterator[Finding]:
    """A stop id that was not drawn and is trained."""
    at = _appended_at(v)
    if at is None:
        return
    kind = "after-length-cut" if v.finish == "length" else "not-drawn"
    proof = {"spans": "outside of what was sampled", "drawn": "not drawn", "log-probs": "without a log-prob"}
    inside = "behind a reply that was cut by length"
    if v.finish != "length" and at < v.end:
        inside = "behind the stop string at which the reply ended" if _by_string(v) else "the engine counted one less"
    said = proof.get(v.sampled.source if at >= v.end else "", inside)
    trained = "is trained" if v.trained(at) else "is in the reply (no loss mask leaves it out)"
    text = f"stop token {v.named(v.ids[at])} at {at} {trained}, but was not sampled: {said}"
    yield v.found("stop-token-appended", kind, at, text, {"why": said}, **(FAILS if v.trained(at) else WARNS))


def _appended_at(v: _View) -> int | None:
    """Where a stop id stands that was appended and is trained."""
    at, ids, counted = v.end, v.ids, v.record.usage.get("completion_tokens")
    if at < len(ids):  # the record says what was drawn
        new = at > 0 and ids[at] in v.stops and not v.ends_at_stop and v.trained(at) is not False
        return at if new else None
    if not v.ends_at_stop or not v.trained(at - 1) or counted == at or v.sampled.source in ("spans", "drawn"):
        return None
    if _by_string(v):
        return at - 1
    has_logprob = v.logprobs is not None and v.logprobs[at - 1] != 0
    cut = v.finish == "length" and not has_logprob
    return at - 1 if cut or (counted == at - 1 and not has_logprob) else None


def _by_string(v: _View) -> bool:
    """The engine says that a stop string ended the reply, and the stop id behind it has no log-prob of its own."""
    said = v.record.extra.get("stop_reason", v.record.extra.get("matched_stop"))
    if not isinstance(said, str) or v.names.get(v.last or 0) == said:
        return False
    return v.logprobs is None or v.logprobs[v.end - 1] == 0


def _contradicts(v: _View) -> Iterator[Finding]:
    """The finish reason says one thing, the last sampled id the other."""
    code, limit = "finish-reason-contradicts", v.record.extra.get("max_tokens")
    if v.finish == "length" and v.ends_at_stop and _appended_at(v) is None:
        text = f"finish reason {v.record.finish_reason!r}, but the last sampled id {v.named(v.last)} is a stop id"
        yield v.found(code, "length-but-stop-token", v.end - 1, text, {})
    if v.finish == "stop" and not v.ends_at_stop and v.end and limit == v.end:
        text = (
            f"finish reason {v.record.finish_reason!r}, but the reply has the {limit} ids of its limit and no stop id"
        )
        yield v.found(code, "stop-at-the-limit", None, text, {"max_tokens": limit, "last_id": v.last})


def _wrong_id(v: _View) -> Iterator[Finding]:
    """The reply ended at a stop id that is not the one that the trainer tests for."""
    if v.eos is None or not v.ends_at_stop or v.last == v.eos or v.finish in ("length", "abort"):
        return
    several = v.eos in v.sampler_stops
    kind = "one-of-several" if several else "other-id"
    text = f"the reply ends at stop id {v.named(v.last)}; a test against {v.named(v.eos)} calls it unfinished"
    more = {"eos": v.eos, "stop_ids": sorted(v.sampler_stops), "fully_masked": v.all_masked}
    yield v.found("wrong-stop-id", kind, v.end - 1, text, more, **(NOTES if several and not v.all_masked else WARNS))


def _inside(v: _View) -> Iterator[Finding]:
    """A stop id in the middle of one drawn stretch: sampling went on behind it."""
    stops = v.sampler_stops or v.stops
    if stops.isdisjoint(v.ids[: max(v.end - 1, 0)]):
        return
    at = [i for a, b in v.sampled.runs for i in range(a, b - 1) if v.ids[i] in stops and _went_on(v, i)]
    if at:
        text = f"stop id {v.named(v.ids[at[0]])} at {at[0]}, and sampling went on: {v.end - at[0] - 1} ids behind it"
        yield v.found(
            "stop-token-inside", "sampling-went-on", at[0], text, {"positions": at, "behind": v.end - at[0] - 1}
        )


def _went_on(v: _View, i: int) -> bool:
    """Whether the next id is known to be drawn as well; several turns in one reply are not that."""
    behind = len(v.record.prompt_ids or ()) + i + 1
    if any(start <= behind < stop for _, start, stop in other_spans(v.record, behind + 1)):
        return False  # the record itself says that somebody else wrote it
    if v.sampled.source in ("spans", "drawn"):
        return True
    if v.logprobs is not None and v.logprobs[i + 1] == 0:
        return False  # tool output is often filled with 0.0
    marks = (v.trained(i), v.trained(i + 1))
    return all(marks) or (v.logprobs is not None and None in marks)


def _unsaid(v: _View) -> Iterator[Finding]:
    if v.finish is None and not v.ends_at_stop:
        yield _unchecked(v.record, "finish_reason", "replies without a stop token")


#: In this order; each looks at one thing.
RULES = (_untrained, _missing, _appended, _contradicts, _wrong_id, _inside, _unsaid)
