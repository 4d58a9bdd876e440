"""`assert_token_fidelity`: ids survive decoding and encoding, or an error says where they do not.

For a data pipeline that hands text from one step to the next: prompt ids, reply ids, and the join of the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from onepolicy.errors import ContentError, UnknownName
from onepolicy.rollouts import Rollouts
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.classes import CLASSES
from onepolicy.tokens.objects import as_pair
from onepolicy.tokens.reading import RecordStream
from onepolicy.tokens.roundtrip import check_chunk, way
from onepolicy.tokens.roundtrip_result import PARTS, Group, RoundTrip, first_in_words

#: What is asserted of each record.
ASSERTED = ("prompt", "reply", "join")
_ADVICE = "hand the sampled ids on instead of their text (do not filter such replies, that would bias the policy)"


class TokenFidelityError(AssertionError):
    """Ids that did not survive. `result`: everything that was found."""

    def __init__(self, message: str, result: RoundTrip) -> None:
        super().__init__(message)
        self.result = result


def assert_token_fidelity(
    rollouts: Rollouts | TokenRecord | Mapping[str, Any] | Iterable[Any],
    *,
    decode_with: Any,
    encode_with: Any = None,
    parts: Collection[str] = ASSERTED,
    allow: Collection[str] = (),
) -> RoundTrip:
    """Raises if ids do not come back from `encode_with` as they went into `decode_with`.

    `rollouts`: `Rollouts`, records (`TokenRecord` or mappings with `prompt_ids`, `response_ids`, ...), or a path.
    `decode_with`, `encode_with` (None: the same): a tokenizer of transformers or tokenizers, one of `onepolicy.tokens`,
    a target such as a model directory, or a function (ids -> text; text -> ids). `parts`: some of `ASSERTED`. `allow`:
    classes that may differ (`classes.CLASSES`); `other-segmentation` is what normal sampling does.

    Errors: `TokenFidelityError`, an AssertionError: how many, the first record, its class and place.
    `ContentError` for a record that cannot be read, and where no record has ids: then nothing was checked.
    """
    for name, known in (*((x, ASSERTED) for x in parts), *((x, CLASSES) for x in allow)):
        if name not in known:
            raise UnknownName("part" if known is ASSERTED else "class", name, known)
    result = _checked(rollouts, decode_with, encode_with, "join" in parts)
    _refuse_unchecked(result)
    wrong = {key: g for key, g in result.groups.items() if key[0] in parts and key[1] not in allow}
    if wrong:
        raise TokenFidelityError(_message(wrong, result), result)
    return result


def _checked(rollouts: Any, decode_with: Any, encode_with: Any, join: bool) -> RoundTrip:
    there = way(*as_pair(decode_with, encode_with), join=join, compare_tokenizers=False)
    total = RoundTrip()
    rows = [rollouts] if isinstance(rollouts, TokenRecord | Mapping) else rollouts
    if hasattr(rows, "__len__") and not len(rows):
        return total
    for chunk in RecordStream(rows, strict=True):
        total += check_chunk(chunk, there)
    return total


def _refuse_unchecked(result: RoundTrip) -> None:
    if result.n_records and result.n_without_ids == result.n_records:
        raise ContentError(f"none of {result.n_records} records has token ids: nothing was checked")


def _message(wrong: Mapping[tuple[str, str, str], Group], result: RoundTrip) -> str:
    """How many, and the first one whole."""
    by_part: dict[str, int] = {}
    for (part, _, _), group in wrong.items():
        by_part[part] = by_part.get(part, 0) + group.n
    counts = ", ".join(f"{n} of {result.checked[part]} {PARTS[part]}" for part, n in by_part.items())
    (part, cls, _), group = next(iter(wrong.items()))
    first = group.examples[0]
    where = f"{first['place']}: " if first.get("place") else ""
    lengths = f"{first['sampled_len']} ids become {first['reencoded_len']}"
    return (
        f"{counts} do not survive decoding and encoding; first: {where}record {first['record_id']}, {part}, position "
        f"{first['first_diff']}: {CLASSES[cls]} ({cls}){first_in_words(first)}; {lengths}; {_ADVICE}"
    )
