"""One sequence that did not survive ids -> text -> ids: where it differs, in what, and why.

Only sequences that differ come here, so this may take its time; it is linear in their length.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from onepolicy.tokens.classes import Facts, Stretch, classify, plain
from onepolicy.tokens.probes import class_of

#: Stretches of one sequence that are told apart; the rest is counted.
MOST_STRETCHES = 16
#: A sequence of at most so many ids is shown whole; else so many around the first difference.
SHOWN = 64
#: Tokens on each side of the first difference that are shown as text and bytes.
AROUND = 3
#: How far the ids are searched for the place where both go on alike, and how many must be alike there.
_REACH, _ALIKE = 48, 3


@dataclass(frozen=True, slots=True)
class Difference:
    """What is wrong with one prompt, reply or join.

    `first_diff`: position in the sampled ids of that part (of a join: in prompt + reply). `classes`: of every stretch,
    the first one's first. `reencoded_ids` begin at `reencoded_from`. `text_equal`: decoding the re-encoded ids gives
    the same text again. `reencodes`: what in the record says that its pipeline encodes text again.
    """

    record_id: str
    place: str
    part: str
    cls: str
    detail: str = ""
    classes: tuple[str, ...] = ()
    stretches: int = 1
    first_diff: int = 0
    sampled_len: int = 0
    reencoded_len: int = 0
    reencoded_from: int = 0
    reencoded_ids: tuple[int, ...] = ()
    sampled_ids: tuple[int, ...] = ()
    text_equal: bool | None = None
    text: str = ""
    reencoded_text: str = ""
    kind: str = ""
    sampled_around: tuple[dict[str, Any], ...] = ()
    reencoded_around: tuple[dict[str, Any], ...] = ()
    dangling_tokens: int = 0
    bad_positions: tuple[int, ...] = ()
    reencodes: str = ""

    def as_json(self) -> dict[str, Any]:
        """Without what is empty; the class under the name `class`."""
        found = plain(asdict(self))
        return {"class": found.pop("cls"), "first_diff": self.first_diff, **found}


def explain(
    sampled: Sequence[int],
    again: Sequence[int],
    a_side: Facts,
    b_side: Facts,
    text: str | None = None,
    **named: Any,
) -> Difference:
    """The difference of two lists of ids that are not equal.

    `text`: of the sampled ids, where known: without U+FFFD in it nothing is broken. `named`: the record, its place, the
    part.
    """
    sampled, again = list(sampled), list(again)
    broken = {} if text is not None and "\ufffd" not in text else _broken_tokens(sampled, a_side)
    places = stretches(sampled, again, a_side, b_side)
    judged = [_stretch(place, sampled, again, a_side, b_side, broken) for place in places[:MOST_STRETCHES]]
    classes = [classify(one) for one in judged]
    i, _, j, _ = places[0]
    lo = 0 if len(again) <= SHOWN else max(0, j - SHOWN // 2)
    here, here_again = judged[0].texts
    return Difference(
        cls=classes[0][0],
        detail=classes[0][1],
        classes=tuple(dict.fromkeys(name for name, _ in classes)),
        stretches=len(places),
        first_diff=i,
        sampled_len=len(sampled),
        reencoded_len=len(again),
        reencoded_from=lo,
        reencoded_ids=tuple(again[lo : lo + SHOWN]),
        sampled_ids=tuple(sampled[max(0, i - SHOWN // 2) if len(sampled) > SHOWN else 0 :][:SHOWN]),
        text=here[:200],
        reencoded_text="" if here == here_again else here_again[:200],
        kind=class_of(here or here_again),
        sampled_around=around(sampled, i, a_side),
        reencoded_around=around(again, j, b_side),
        dangling_tokens=sum(where == "end" for where in broken.values()),
        bad_positions=tuple(at for at, where in broken.items() if where == "inside")[:SHOWN],
        **named,
    )


def outside(ids: Sequence[int], side: Facts, **named: Any) -> Difference:
    """Of ids that cannot be decoded, because the vocabulary lacks some of them."""
    bad = [k for k, token_id in enumerate(ids) if not side.has(token_id)]
    shown = [ids[k] for k in bad[:8]]
    return Difference(
        cls="outside-vocabulary",
        detail=f"{len(bad)} ids, the first {', '.join(map(str, shown))}; the vocabulary has {side.tokenizer.size}",
        classes=("outside-vocabulary",),
        first_diff=bad[0] if bad else 0,
        sampled_len=len(ids),
        bad_positions=tuple(bad[:SHOWN]),
        sampled_ids=tuple(shown),
        sampled_around=around(ids, bad[0] if bad else 0, side),
        **named,
    )


def around(ids: Sequence[int], at: int, side: Facts) -> tuple[dict[str, Any], ...]:
    """The tokens near a position: index, id, text, bytes in hex."""
    near = range(max(0, at - AROUND), min(len(ids), at + AROUND + 1))
    return tuple(_shown(k, ids[k], side.bytes_of(ids[k])) for k in near)


def _shown(position: int, token_id: int, data: bytes) -> dict[str, Any]:
    return {"position": position, "id": token_id, "text": data.decode("utf-8", "replace"), "bytes": data.hex()}


Place = tuple[int, int, int, int]


def _stretch(place: Place, a: list[int], b: list[int], a_side: Facts, b_side: Facts, broken: dict[int, str]) -> Stretch:
    i, i_end, j, j_end = place
    near = range(i, i_end) if i < i_end else range(max(0, i - 1), i_end + 1)  # a byte of U+FFFD may stand beside it
    where = {broken[k] for k in near if k in broken}
    return Stretch(
        a[i:i_end],
        b[j:j_end],
        a_side,
        b_side,
        before=b[j - 1] if j else None,
        after=b[j_end] if j_end < len(b) else None,
        at_start=all(x in b_side.added for x in b[:j]),
        broken="inside" if "inside" in where else "end" if where else "",
    )


def stretches(a: list[int], b: list[int], a_side: Facts, b_side: Facts) -> list[Place]:
    """`[start, stop)` in a and in b of every stretch that differs; what is between them is equal, in order."""
    na, nb = _as_array(a), _as_array(b)
    found: list[Place] = []
    i = j = 0
    while True:
        same = _same(na, nb, i, j)
        i, j = i + same, j + same
        if i == len(a) and j == len(b):
            return found
        di, dj = _by_bytes(a, b, i, j, a_side, b_side) or _by_ids(a, b, i, j) or _rest(na, nb, i, j)
        found.append((i, i + di, j, j + dj))
        i, j = i + di, j + dj


def _as_array(ids: list[int]) -> Any:
    """Ids as numbers that can be compared; those of any size are kept apart as objects."""
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        return np.array(ids, dtype=object)


def _same(a: Any, b: Any, i: int, j: int) -> int:
    """How many ids are equal from there on."""
    n, block = min(len(a) - i, len(b) - j), 64
    done = 0
    while done < n:
        size = min(block, n - done)
        differs = a[i + done : i + done + size] != b[j + done : j + done + size]
        if differs.any():
            return done + int(differs.argmax())
        done, block = done + size, min(block * 2, 1 << 16)
    return n


def _by_bytes(a: list[int], b: list[int], i: int, j: int, a_side: Facts, b_side: Facts) -> tuple[int, int] | None:
    """The nearest place where both have spelled the same bytes and go on alike; where they never do, the last place
    before their bytes differ; None if there is none."""
    x, y, checked = i, j, 0
    left, right = bytearray(), bytearray()
    last: tuple[int, int] | None = None
    while x < len(a) or y < len(b):
        if (len(left) <= len(right) or y >= len(b)) and x < len(a):
            left += a_side.bytes_of(a[x])
            x += 1
        else:
            right += b_side.bytes_of(b[y])
            y += 1
        common = min(len(left), len(right))
        if left[checked:common] != right[checked:common]:
            return last
        checked = common
        if len(left) == len(right):
            last = (x - i, y - j)
            if x < len(a) and y < len(b) and a[x] == b[y]:
                return last
    return last


def _by_ids(a: list[int], b: list[int], i: int, j: int) -> tuple[int, int] | None:
    """The nearest place from which some ids are alike, or at which both end."""
    for total in range(1, 2 * _REACH):
        for di in range(max(0, total - _REACH), min(total, _REACH) + 1):
            x, y = i + di, j + total - di
            if x <= len(a) and y <= len(b) and a[x : x + _ALIKE] == b[y : y + _ALIKE]:
                return di, total - di
    return None


def _rest(a: Any, b: Any, i: int, j: int) -> tuple[int, int]:
    """All that is left, without the end that is alike."""
    left, right = a[i:][::-1], b[j:][::-1]
    same = _same(left, right, 0, 0)
    return len(left) - same, len(right) - same


def _broken_tokens(ids: list[int], side: Facts) -> dict[int, str]:
    """Position -> "end" or "inside" of each token that holds bytes of an incomplete or impossible character. Special
    tokens at the end are no text: a character cut off before them is cut off at the end."""
    pieces = [side.bytes_of(x) for x in ids]
    text = len(ids)
    while text and ids[text - 1] in side.added:
        text -= 1
    spans = broken_spans(b"".join(pieces[:text]))
    if not spans:
        return {}
    ends = np.cumsum([len(p) for p in pieces])
    found: dict[int, str] = {}
    for start, stop, where in spans:
        first, last = (int(np.searchsorted(ends, at, side="right")) for at in (start, stop - 1))
        found.update((k, where) for k in range(first, last + 1) if pieces[k])
    return found


def broken_spans(data: bytes) -> list[tuple[int, int, str]]:
    """`[start, stop)` of the bytes that are no UTF-8, and whether they are a character cut off at the end."""
    found: list[tuple[int, int, str]] = []
    view, at = memoryview(data), 0
    while True:
        try:
            codecs.utf_8_decode(view[at:], "strict", True)
            return found
        except UnicodeDecodeError as err:
            start, stop = at + err.start, at + err.end
            found.append((start, stop, "end" if err.reason == "unexpected end of data" else "inside"))
            at = stop
