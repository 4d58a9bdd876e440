"""Masks, masked places, ids, and records that are doubled or missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from integrity_dumps import batch, changed, codes, drawn, found, reply, settled
from onepolicy.formats.base import floats
from onepolicy.integrity.records import duplicate_findings, missing_findings
from onepolicy.rollouts import Rollouts
from onepolicy.types import Values


def masked(r: Rollouts, mask: Any) -> Rollouts:
    return replace(r, tokens={**r.tokens, "loss_mask": Values(np.asarray(mask, dtype=bool))})


# -- values where nothing counts --


@pytest.mark.parametrize(
    ("value", "kind"), [(-9999.0, "below -60"), (1.0, "above 0"), (np.nan, "nan"), (-np.inf, "infinite")]
)
def test_harmful_values_behind_the_mask(value: float, kind: str) -> None:
    r = drawn("float32")
    out = r.drawn & (np.arange(r.n_tokens) % 7 == 3)
    m = masked(r, r.drawn & ~out)
    (f,) = [x for x in found(batch(changed(m, "sampler", lambda x: np.where(out, value, x)))) if x.severity != "info"]
    assert (f.code, f.evidence["by_side"]) == ("values-at-masked-places", {"sampler": {kind: int(out.sum())}})
    assert f.evidence["overflowing"] == (0 if value in (1.0,) or np.isnan(value) else int(out.sum()))


def test_zeros_and_ordinary_values_behind_the_mask_are_silent() -> None:
    r = drawn("float32")
    out = r.drawn & (np.arange(r.n_tokens) % 7 == 3)
    m = masked(r, r.drawn & ~out)
    assert [
        f for f in found(batch(changed(m, "sampler", lambda x: np.where(out, 0.0, x)))) if f.severity != "info"
    ] == []
    assert [f for f in found(batch(m)) if f.severity != "info"] == []


def test_a_value_in_the_prompt() -> None:
    a = [-9999.0, -9999.0, -0.5, -1.0]
    (f,) = found(settled(reply("r", a, [-0.1, -0.2, -0.5, -1.1], 4, prompt=2, layout="whole", mask=[0, 0, 1, 1])))
    assert f.code == "values-at-masked-places"
    assert [(p["record"], p["position"], p["value"]) for p in f.evidence["places"]] == [("r", 1, -9999.0)]


# -- the mask --


def test_nothing_trained_by_share() -> None:
    r = drawn("float32")
    record = np.repeat(np.arange(len(r)), r.lengths)
    for keep, severity in ((lambda i: i % 3 != 0, "info"), (lambda i: i % 3 == 0, "warn"), (lambda i: i < 0, "fail")):
        f = next(x for x in found(batch(masked(r, r.drawn & keep(record)))) if x.code == "nothing-trained")
        empty = int((~keep(np.arange(len(r)))).sum())
        assert (f.severity.value, f.evidence["empty"], f.evidence["records"]) == (severity, empty, 24)


def test_prompt_and_tool_output_inside_the_mask() -> None:
    r = drawn("float32")
    everything = np.ones(r.n_tokens, dtype=bool)
    (f,) = [x for x in found(batch(masked(r, everything))) if x.code == "undrawn-tokens-trained"]
    assert f.evidence["kinds"] == {"prompt": 4 * len(r), "reply": 0}
    tool = r.drawn & (np.arange(r.n_tokens) % 10 == 4)
    known = replace(r, tokens={**r.tokens, "drawn": Values(r.drawn & ~tool)})
    (f,) = [x for x in found(batch(masked(known, r.drawn))) if x.code == "undrawn-tokens-trained"]
    assert f.evidence["kinds"] == {"prompt": 0, "reply": int(tool.sum())}
    assert f.evidence["places"][0]["prompt"] is False
    assert codes(found(batch(masked(known, r.drawn & ~tool)))) == []


def test_drawn_tokens_outside_the_mask_are_a_note_where_drawn_is_known() -> None:
    r = drawn("float32")
    tool, out = (r.drawn & (np.arange(r.n_tokens) % 10 == k) for k in (4, 7))
    known = replace(r, tokens={**r.tokens, "drawn": Values(r.drawn & ~tool)})
    (f,) = found(batch(masked(known, r.drawn & ~tool & ~out)))
    assert (f.code, f.severity.value, f.evidence["tokens"]) == ("sampled-not-trained", "info", int(out.sum()))
    assert found(batch(masked(r, r.drawn & ~out))) == []  # `drawn` is the whole reply, so perhaps a guess


# -- ids --


def test_ids_beyond_the_vocabulary() -> None:
    r = drawn("float32")
    size = int(r.token_ids.max()) + 1
    assert found(batch(r, vocab_size=size), vocab_size=size) == []
    n = int((r.token_ids >= size - 20).sum())
    (f,) = found(batch(r, vocab_size=size - 20), vocab_size=size - 20)
    assert (f.code, f.evidence["unknown"], f.evidence["largest"]) == ("unknown-ids", n, size - 1)
    assert f.evidence["places"][0]["id"] >= size - 20 and f.severity.value == "fail"
    (padded,) = found(batch(r, vocab_size=size - 20), vocab_size=size - 20, padded_vocab_size=size + 8)
    assert padded.severity.value == "warn" and "padded table" in padded.message
    (late,) = found(batch(r), vocab_size=size - 20)  # known only when judged: not counted, still said
    assert late.evidence["unknown"] is None


def test_impossible_ids_and_what_engines_say_of_themselves() -> None:
    (f,) = found(settled(reply("r", [-0.5, -0.6], [-0.5, -0.6], [5, -1])))
    assert (f.code, f.place) == ("unknown-ids", "record r, reply position 1 (dump.jsonl:r)")
    assert "got -1 at position 1" in f.message
    said = reply("r", [-0.5, -0.6], [-0.5, -0.7], [5, 900], scorings={"old": {"fingerprint": {"vocab_size": 512}}})
    (f,) = found(settled(said))
    assert (f.code, f.evidence["vocab_size"], f.evidence["unknown"]) == ("unknown-ids", 512, 1)


# -- doubled and missing records --

IDS = np.arange(50, dtype=np.uint64)
PLACES = [f"f.jsonl:{i + 1}" for i in range(50)]


def doubled(**more: Any) -> list[Any]:
    names, content = IDS.copy(), IDS.copy()
    for key, array in (("names", names), ("content", content)):
        for to, of in more.pop(key, {}).items():
            array[to] = of
    return duplicate_findings(content, names, PLACES, **more)


def test_copies_by_id_and_content() -> None:
    assert doubled() == []
    (f,) = doubled(names={30: 1, 31: 1}, content={30: 1, 31: 1})
    assert (f.code, f.evidence["copies"], f.evidence["sequences"]) == ("duplicate-records", 2, 1)
    assert f.evidence["places"] == ["f.jsonl:31 (as f.jsonl:2)", "f.jsonl:32 (as f.jsonl:2)"]
    (f,) = doubled(names={30: 1})
    assert (f.code, f.evidence["ids"], f.place) == ("record-id-repeated", 1, "f.jsonl:31")
    assert codes(doubled(names={30: 1, 40: 2}, content={30: 1})) == ["duplicate-records", "record-id-repeated"]
    assert duplicate_findings(IDS[:0], IDS[:0]) == []


def test_a_short_reply_drawn_twice_is_no_copy() -> None:
    surprisal = np.full(50, 80.0)
    assert codes(doubled(content={30: 1}, surprisal=surprisal)) == ["duplicate-records"]
    assert codes(doubled(content={30: 1}, surprisal=surprisal, named=False)) == ["duplicate-records"]
    surprisal[[1, 30]] = 2.0
    assert doubled(content={30: 1}, surprisal=surprisal) == []
    assert doubled(content={30: 1}, surprisal=surprisal, named=False) == []
    assert codes(doubled(names={30: 1}, content={30: 1}, surprisal=surprisal)) == ["duplicate-records"]


def test_holes_in_a_numbering() -> None:
    whole = list(range(100, 164))
    assert missing_findings([None] * 64, whole) == []
    (f,) = missing_findings([None] * 62, [i for i in whole if i not in (107, 140)])
    assert (f.evidence["missing"], f.evidence["of"], f.evidence["numbers"]) == (2, 64, ["107", "140"])
    assert missing_findings([None] * 3, [1, 500, 90000]) == []
    assert missing_findings([None] * 3, ["a", "b", "c"]) == []
    assert missing_findings([None] * 3, [None, 1, 2]) == []
    assert missing_findings([None] * 32, list(range(0, 64, 2))) == []  # every second: never a whole numbering


def test_holes_within_groups_and_small_groups() -> None:
    groups = [g for g in "abcdefgh" for _ in range(8)]
    samples = [str(i) for _ in "abcdefgh" for i in range(8)]
    assert missing_findings(groups, samples) == []
    (f,) = missing_findings(groups[:20] + groups[21:], samples[:20] + samples[21:])
    assert f.evidence["numbers"] == ["c/4"]
    (f,) = missing_findings(groups[:20] + groups[21:])
    assert (f.evidence["usual"], f.evidence["missing"], f.evidence["sizes"]) == (8, 1, {"c": 7})
    assert missing_findings([*"aaabbbbccdddddeeeeee"]) == []  # no usual size
    assert missing_findings([*"aabbccd"]) == []  # too few groups to say


def test_rewards_do_not_disturb() -> None:
    record = reply("r", [-0.5, -0.6], [-0.5, -0.7], 2, facts={"reward": 1.0, "step": 3})
    assert found(settled(replace(record, columns={**record.columns, "advantages": floats([0.1, 0.1], "reply")}))) == []
