"""Sampled ids -> text by one tokenizer -> ids by the same or another one: in bulk, and only what differs is explained.

Three questions a record: do the prompt's ids survive, the reply's ids, and the join of the two (prompt and reply
encoded as one text). Nothing is repaired: re-encoded ids are only ever compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onepolicy.errors import ContentError
from onepolicy.tokens.base import Tokenizer, TokenRecord
from onepolicy.tokens.classes import SAME_TEXT, Facts
from onepolicy.tokens.explain_difference import Difference, explain, outside
from onepolicy.tokens.reading import RecordStream
from onepolicy.tokens.roundtrip_result import RECORD_SAYS, TOKENIZERS, RoundTrip
from onepolicy.tokens.roundtrip_texts import compare_texts
from onepolicy.tokens.words import words_of

#: Ids on each side of a join that are tried first; where they do not survive, the whole sequence is.
WINDOW = 32
IDS, TEXT = "ids->text->ids", "text->ids->text"


@dataclass(slots=True)
class Way:
    """How the ids go: decoded by `a`, encoded by `b`.

    `add_special`: with what `b` puts around a text. `parse_special`: text that spells a special token becomes it.
    `compare_tokenizers`: where two differ, ask whether it is the sampled ids or the tokenizers.
    """

    a: Facts
    b: Facts
    add_special: bool = False
    parse_special: bool = True
    join: bool = True
    compare_tokenizers: bool = True

    @property
    def asks_both(self) -> bool:
        """Whether it is told apart what two tokenizers read otherwise and what the sampler cut otherwise."""
        return self.a.tokenizer is not self.b.tokenizer and self.compare_tokenizers

    def encode_all(self, legs: Sequence[Leg], side: Facts) -> list[list[int]]:
        """The ids of each leg's text: by words where a tokenizer allows it, else by the tokenizer itself."""
        texts = [leg.text for leg in legs]
        found = self._by_words(legs, texts, side) if legs and not self.add_special else None
        return self.encode(texts, side) if found is None else found

    def _by_words(self, legs: Sequence[Leg], texts: list[str], side: Facts) -> list[list[int]] | None:
        words = words_of(side.tokenizer, sum(map(len, texts)), parse_special=self.parse_special)
        if words is None:
            return None
        found = words.ids(texts, lambda new: self.encode(new, side))
        tried = words.to_try([leg.ids == ids for leg, ids in zip(legs, found, strict=True)])
        if self.encode([texts[k] for k in tried], side) == [found[k] for k in tried]:
            return found
        words.give_up()
        return None

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return self.a.tokenizer.decode(ids) if ids else []

    def encode(self, texts: Sequence[str], side: Facts | None = None) -> list[list[int]]:
        how = {"add_special": self.add_special, "parse_special": self.parse_special}
        return (side or self.b).tokenizer.encode(texts, **how) if texts else []


def way(decode_with: Tokenizer, encode_with: Tokenizer | None = None, **choices: Any) -> Way:
    """The way from one tokenizer to another, or back to the same."""
    a = Facts(decode_with)
    b = a if encode_with is None or encode_with is decode_with else Facts(encode_with)
    return Way(a, b, **choices)


def round_trip(
    records: RecordStream | Iterable[Any],
    decode_with: Tokenizer,
    encode_with: Tokenizer | None = None,
    *,
    add_special: bool = False,
    parse_special: bool = True,
    join: bool = True,
    progress: Callable[[RoundTrip], None] = lambda _: None,
) -> RoundTrip:
    """The round trip of every record of a stream. `encode_with` None: the tokenizer that decodes.

    Errors: those of `RecordStream` and of the tokenizers.
    """
    stream = records if isinstance(records, RecordStream) else RecordStream(records)
    there_and_back = way(decode_with, encode_with, add_special=add_special, parse_special=parse_special, join=join)
    total = RoundTrip()
    for chunk in stream:
        total += check_chunk(chunk, there_and_back)
        progress(total)
    return total


@dataclass(slots=True)
class Leg:
    """One sequence on its way: its ids, their text, the ids of that text; `own`: those of the decoding tokenizer.

    `sound`: all ids can be decoded.
    """

    ids: list[int]
    sound: bool = True
    text: str = ""
    again: list[int] = field(default_factory=list[int])
    own: list[int] | None = None


Legs = Sequence[Leg | None]
#: record -> the last ids of its prompt and the first of its reply, as one leg whose text is that of both apart.
Windows = dict[int, Leg]


def check_chunk(records: Sequence[TokenRecord], there: Way) -> RoundTrip:
    """The round trip of the records at hand, which are held in memory."""
    result = RoundTrip(n_records=len(records))
    prompts = _unique([r.prompt_ids for r in records], there)
    replies = [None if r.reply_ids is None else _leg(r.reply_ids, there) for r in records]
    windows = _travel(prompts, replies, there)
    found: list[Found] = []
    for record, prompt, reply in zip(records, prompts, replies, strict=True):
        result.n_tokens += sum(len(leg.ids) for leg in (prompt, reply) if leg)
        result.n_without_ids += prompt is None and reply is None
        for part, leg in (("prompt", prompt), ("reply", reply)):
            if leg is not None:
                result.checked[part] = result.checked.get(part, 0) + 1
                found += _judge(record, part, leg, there)
    if windows:
        result.checked["join"] = len(windows)
    _add(result, found + _judge_joins(records, prompts, replies, windows, there))
    compare_texts(result, records, [leg.text if leg and leg.sound else None for leg in replies], there)
    return result


def _leg(ids: list[int], there: Way) -> Leg:
    return Leg(ids, not ids or (min(ids) >= 0 and max(ids) < there.a.tokenizer.size))


def _unique(lists: Sequence[list[int] | None], there: Way) -> list[Leg | None]:
    """A leg for each list; equal lists, as the prompts of one group are, share one."""
    seen: dict[tuple[int, ...], Leg] = {}
    out: list[Leg | None] = []
    for ids in lists:
        key = () if ids is None else tuple(ids)
        if ids is not None and key not in seen:
            seen[key] = _leg(ids, there)
        out.append(None if ids is None else seen[key])
    return out


def _travel(prompts: Legs, replies: Legs, there: Way) -> Windows:
    """Decodes all in one batch, and encodes all in one batch."""
    legs = list({id(leg): leg for leg in (*prompts, *replies) if leg is not None and leg.sound}.values())
    _decode(legs, there)
    windows = _windows(prompts, replies, there) if there.join else {}
    legs = [leg for leg in legs if leg.sound]
    for leg, ids in zip([*legs, *windows.values()], there.encode_all([*legs, *windows.values()], there.b), strict=True):
        leg.again = ids
    if there.asks_both:
        differ = [leg for leg in legs if leg.again != leg.ids]
        for leg, ids in zip(differ, there.encode_all(differ, there.a), strict=True):
            leg.own = ids
    return windows


def _decode(legs: Sequence[Leg], there: Way) -> None:
    """Gives each leg its text. An id inside the range that the vocabulary lacks makes its leg unsound."""
    try:
        texts = there.decode([leg.ids for leg in legs])
    except ContentError:
        for leg in legs:
            leg.sound = all(map(there.a.has, set(leg.ids)))
        legs = [leg for leg in legs if leg.sound]
        texts = there.decode([leg.ids for leg in legs])
    for leg, text in zip(legs, texts, strict=True):
        leg.text = text


def _windows(prompts: Legs, replies: Legs, there: Way) -> Windows:
    pairs = {
        i: (prompt.ids[-WINDOW:], reply.ids[:WINDOW])
        for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
        if prompt and reply and prompt.sound and reply.sound and prompt.ids and reply.ids
    }
    texts = iter(there.decode([ids for pair in pairs.values() for ids in pair]))
    return {i: Leg(head + tail, text=next(texts) + next(texts)) for i, (head, tail) in pairs.items()}


@dataclass(slots=True)
class Found:
    """A difference, and what is needed to say whether its text changes: the text, the re-encoded ids, their decoder."""

    difference: Difference
    text: str
    again: list[int]
    side: Facts
    why: str = ""

    @property
    def same_text(self) -> bool:
        """Whether the classes alone say that the text is the same."""
        return set(self.difference.classes) <= SAME_TEXT


def _judge(record: TokenRecord, part: str, leg: Leg, there: Way) -> list[Found]:
    if leg.sound and leg.again == leg.ids:
        return []
    names = {"record_id": record.record_id, "place": record.place, "part": part}
    if not leg.sound:
        return [Found(outside(leg.ids, there.a, **names), "", [], there.a)]
    out: list[Found] = []
    again, side = (leg.again, there.b) if leg.own is None else (leg.own, there.a)
    if again != leg.ids:
        said = reencoding_said(record, part, leg.ids, leg.again)
        difference = explain(leg.ids, again, there.a, side, leg.text, reencodes=said, **names)
        out.append(Found(difference, leg.text, again, side, RECORD_SAYS if said else ""))
    if leg.own is not None and leg.own != leg.again:
        difference = explain(leg.own, leg.again, there.a, there.b, leg.text, **names)
        out.append(Found(difference, leg.text, leg.again, there.b, TOKENIZERS))
    return out


def _add(result: RoundTrip, found: Sequence[Found]) -> None:
    """Counts the differences, and decodes the re-encoded ids of those whose text may change, in one batch."""
    same: dict[int, bool] = {}
    for side in {id(f.side): f.side for f in found}.values():
        open_ = [f for f in found if f.side is side and f.again and not f.same_text]
        texts = side.tokenizer.decode([f.again for f in open_]) if open_ else []
        same.update((id(f), f.text == text) for f, text in zip(open_, texts, strict=True))
    for f in found:
        equal = same.get(id(f), True if f.same_text else None)
        result.fails(IDS)
        if equal is False:
            result.fails(TEXT)
        result.add_difference(f.difference, equal, f.why)


def reencoding_said(record: TokenRecord, part: str, ids: Sequence[int], again: Sequence[int]) -> str:
    """What in a record says that its trainer read the re-encoded ids and not the sampled ones; empty if nothing."""
    trainer = record.sides.get("trainer")
    whole = [*(record.prompt_ids or ()), *again] if part == "reply" else [*again, *(record.reply_ids or ())]
    if trainer is not None and list(ids) != list(again) and trainer in (list(again), whole):
        return "the trainer's ids are the re-encoded ones"
    if part != "reply" or len(ids) == len(again):
        return ""
    for name, values in (("log-probs of the trainer", record.scorer_logprobs), ("loss mask", record.loss_mask)):
        if values is not None and len(values) == len(again):
            return f"the {name} count {len(again)} tokens, the re-encoded ids, not the {len(ids)} that were sampled"
    return ""


def _judge_joins(
    records: Sequence[TokenRecord], prompts: Legs, replies: Legs, windows: Windows, there: Way
) -> list[Found]:
    """Where the window does not survive, the whole text is encoded and held against its two parts' own encodings."""
    doubtful = {i: (prompts[i], replies[i]) for i, leg in windows.items() if leg.again != leg.ids}
    whole = [Leg([*p.again, *r.again], text=p.text + r.text) for p, r in doubtful.values() if p and r]
    out: list[Found] = []
    for (i, (prompt, _)), apart, again in zip(doubtful.items(), whole, there.encode_all(whole, there.b), strict=True):
        if again != apart.ids and prompt is not None:
            difference = _at_join(records[i], apart, again, len(prompt.again), there.b)
            out.append(Found(difference, apart.text, again, there.b))
    return out


def _at_join(record: TokenRecord, apart: Leg, again: list[int], at: int, side: Facts) -> Difference:
    names = {"record_id": record.record_id, "place": record.place, "part": "join"}
    found = explain(apart.ids, again, side, side, apart.text, **names)
    if found.cls in SAME_TEXT:
        found = replace(found, cls="merged-across-join", classes=("merged-across-join", *found.classes[1:]))
    elif _only_space(found) and not any(k in side.added for k in apart.ids[max(0, at - 1) : at + 1]):
        how = "lost" if len(found.text) > len(found.reencoded_text) else "added"
        found = replace(found, cls="prefix-space", classes=("prefix-space", *found.classes[1:]), detail=how)
    where = f"the reply begins at position {at}"
    return replace(found, detail=f"{found.detail}, {where}" if found.detail else where)


def _only_space(found: Difference) -> bool:
    """Whether the first stretch is the same text but for white space."""
    return "".join(found.text.split()) == "".join(found.reencoded_text.split())
