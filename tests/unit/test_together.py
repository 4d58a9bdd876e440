"""Small files that are surveyed as one batch give the report, to the byte, that they give one by one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audit_dumps import sample
from build import column
from dump_samples import lines, loose_row, nemo_rl_row, open_instruct_row, prime_rl_row, vllm_completion
from exchanged_dumps import exchanged, replies
from onepolicy import auditing, pool, together
from onepolicy.audit import Choices, audit
from onepolicy.auditing import Work
from onepolicy.errors import ContentError, EngineDied
from onepolicy.formats.base import Shard
from onepolicy.formats.detect import detect
from onepolicy.report.json import to_json
from onepolicy.rollouts import Rollouts
from onepolicy.storage import write
from onepolicy.together import audit_piece, pieces
from onepolicy.types import Lists, Values

Change = Callable[[Rollouts, int], Rollouts]
FILES = 12


def dump(folder: Path, change: Change = lambda part, k: part, kinds: str = "parquet", files: int = FILES) -> Path:
    """Files of five records; `change` makes of each what the case is about. `kinds`: suffixes in turn."""
    folder.mkdir()
    whole = sample(5 * files)
    for k in range(files):
        part = change(whole.take(np.arange(5 * k, 5 * k + 5)), k)
        suffix = kinds.split()[k % len(kinds.split())]
        path = folder / f"{k:03d}.{suffix.removesuffix('.gz')}"
        write(part, path)
        if suffix.endswith(".gz"):
            (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    return folder


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str, list[int]]]:
    """(report one by one, report together, files in each batch that was surveyed together)."""
    sizes: list[int] = []
    surveyed = together._Run._surveyed

    def counted(run: Any) -> Any:
        out = surveyed(run)
        sizes.append(len(run.reads))
        return out

    def run(folder: Path, **choices: Any) -> tuple[str, str, list[int]]:
        choices = {"workers": 1} | choices
        with monkeypatch.context() as patch:
            patch.setattr(together, "EACH", 1)
            patch.setattr(together._Run, "_surveyed", counted)
            joined = to_json(audit([folder], Choices(**choices)))
            patch.setattr(together, "SMALL", -1)
            alone = to_json(audit([folder], Choices(**choices)))
        return alone, joined, sizes

    return run


def with_record(part: Rollouts, **columns: Any) -> Rollouts:
    return replace(part, records={**part.records, **{k: Values(np.asarray(v)) for k, v in columns.items()}})


def with_scoring(part: Rollouts, name: str, **changes: Any) -> Rollouts:
    return part.with_scoring(name, replace(part.scorings[name], **changes))


def silent(part: Rollouts, name: str, rows: Any) -> Rollouts:
    """Nulls where the scoring is to say nothing."""
    logprobs = part.scorings[name].logprobs
    quiet = np.repeat(np.isin(np.arange(len(part)), rows), part.lengths)
    return with_scoring(part, name, logprobs=Values(logprobs.values, logprobs.mask() & ~quiet))


def third(part: Rollouts, name: str = "reference") -> Rollouts:
    old = part.scorings["old"]
    return part.with_scoring(
        name, replace(old, scoring_id=name, logprobs=column(old.logprobs.values * 0.5, old.logprobs.mask()))
    )


def without(part: Rollouts, *names: str) -> Rollouts:
    keep = lambda columns: {k: v for k, v in columns.items() if k not in names}
    return Rollouts(part.offsets, keep(part.tokens), keep(part.records), keep(part.lists), keep(part.scorings))


def single(part: Rollouts, name: str) -> Rollouts:
    logprobs = part.scorings[name].logprobs
    return with_scoring(part, name, logprobs=Values(logprobs.values.astype(np.float32), logprobs.valid))


def some_null(part: Rollouts, name: str, rows: Any) -> Rollouts:
    col = part.records[name]
    return replace(part, records={**part.records, name: Values(col.values, ~np.isin(np.arange(len(part)), rows))})


def experts(part: Rollouts, width: int, seed: int) -> Rollouts:
    rng, n = np.random.default_rng(seed), part.n_tokens
    made = lambda: Lists(rng.integers(0, 8, n * width).astype(np.int32), np.arange(0, n * width + 1, width))
    return replace(part, lists={"routed_experts": made(), "scorer_routed_experts": made()})


#: name -> (what is done to the file k, batches of files that are expected)
CASES: dict[str, tuple[Change, list[int]]] = {
    "all alike": (lambda p, k: p, [12]),
    "other columns in the middle": (lambda p, k: without(p, "reward", "turn") if 4 <= k < 7 else p, [4, 3, 5]),
    "another side in the middle": (lambda p, k: third(p) if k >= 9 else p, [9, 3]),
    "float32 in some": (lambda p, k: single(p, "old") if k < 5 else p, [5, 7]),
    "other semantics": (lambda p, k: with_scoring(p, "sampler", semantics="raw" if k < 6 else "processed"), [6, 6]),
    "other dtypes": (lambda p, k: with_scoring(p, "old", dtype="float32" if k < 6 else "bfloat16"), [6, 6]),
    "another vocabulary": (lambda p, k: with_scoring(p, "old", fingerprint={"vocab_size": 900 + k // 8}), [8, 4]),
    "ids of scorings of each file": (
        lambda p, k: with_scoring(with_scoring(p, "old", scoring_id=f"o{k}"), "sampler", scoring_id=f"s{k}"), [12]
    ),
    "ids of scorings in turn": (
        lambda p, k: with_scoring(with_scoring(p, "old", scoring_id="xy"[k % 2]), "sampler", scoring_id="yx"[k % 2]),
        [12],
    ),
    "one scoring in one file": (lambda p, k: with_scoring(p, "old", scoring_id="a") if k == 5 else p, [5, 6]),
    "temperatures": (lambda p, k: with_record(p, temperature=np.full(5, [1.0, 0.7, -1.0, 0.0][k % 4])), [12]),
    "top-p of each record": (lambda p, k: with_record(p, top_p=[1.0, 0.9, 0.5, 1.0, 2.0]), [12]),
    "silent records": (lambda p, k: silent(p, "old", range(k % 4)), [12]),
    "silent on both sides": (lambda p, k: silent(silent(third(p), "old", [k % 5]), "reference", [k % 3]), [12]),
    "a silent file": (lambda p, k: silent(p, "old", range(5)) if k in (0, 6) else p, [12]),
    "one side only": (lambda p, k: without(p, "old"), [12]),
    "ids that begin again": (lambda p, k: with_record(p, record_id=np.array([*"abcde"], dtype=object)), [12]),
    "copies": (lambda p, k: p.take([0, 1, 0, 2, 0]), [12]),
    "null rewards": (lambda p, k: some_null(p, "reward", [k % 5, 9]), [12]),
    "groups in some files": (lambda p, k: p if k < 6 else without(p, "group_id"), [6, 6, 12]),
    "groups in some records": (lambda p, k: some_null(p, "group_id", [2] if k == 4 else []), [4, 7, 12]),
    "experts": (lambda p, k: experts(p, 4 if k < 8 else 6, k), [8, 4]),
    "null steps": (lambda p, k: some_null(p, "step", [k % 7]), [12]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "kinds"), [*((case, "parquet") for case in CASES), *((case, "jsonl") for case in [*CASES][::3])]
)
def test_a_report_is_the_same_to_the_byte(both: Any, tmp_path: Path, case: str, kinds: str):
    change, batches = CASES[case]
    alone, joined, sizes = both(dump(tmp_path / "dump", change, kinds))
    assert joined == alone
    if kinds == "parquet":
        assert sizes == batches
    assert max(sizes) > 1


@pytest.mark.parametrize(
    "choices",
    [
        {"view": "loss"}, {"view": "fixed"}, {"what_if": False}, {"dialect": ("verl", {"rollout_is": "token"})},
        {"sides": ("old", "sampler")}, {"workers": 2},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_is_asked(both: Any, tmp_path: Path, choices: dict[str, Any]):
    """Of a framework's numbers it is told in how many batches a column is missing."""
    change = lambda p, k: silent(without(p, "advantages") if k in (3, 4, 9) else p, "old", [k % 5])
    alone, joined, sizes = both(dump(tmp_path / "dump", change, "parquet parquet jsonl"), **choices)
    assert joined == alone
    assert choices.get("workers") == 2 or max(sizes) > 1


#: What is done to the scorer's values `x` `[T]` of one file.
FAULTS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, at: np.where(at % 9 == 0, np.nan, x),
    lambda x, at: np.where(at % 7 == 3, -np.inf, x),
    lambda x, at: np.where(at % 5 == 0, 0.0, x),
    lambda x, at: np.where(at % 11 == 0, 1.0, x),
    lambda x, at: np.where(at % 6 == 0, -100.0, x),
    lambda x, at: np.roll(x, 1),
    lambda x, at: x / np.log(2.0),
    lambda x, at: np.maximum(x, -0.5),
    lambda x, at: np.full(len(x), x.sum()),
    lambda x, at: np.round(x, 1),
    lambda x, at: -x,
    lambda x, at: x + 3.0 * (at % 13 == 0),
)


def test_faults_of_the_record_in_each_file(both: Any, tmp_path: Path):
    def change(part: Rollouts, k: int) -> Rollouts:
        logprobs = part.scorings["old"].logprobs
        values = FAULTS[k % len(FAULTS)](logprobs.values, np.arange(part.n_tokens))
        mask = Values(np.random.default_rng(k).random(part.n_tokens) < 0.8)
        part = with_scoring(part, "old", logprobs=Values(values, logprobs.valid))
        return replace(part, tokens={**part.tokens, "loss_mask": mask})

    alone, joined, sizes = both(dump(tmp_path / "dump", change, files=24))
    assert joined == alone and sizes == [24]
    assert len({f["code"] for f in json.loads(joined)["findings"]}) > 8


@pytest.mark.parametrize("row", [prime_rl_row, nemo_rl_row, open_instruct_row, loose_row, vllm_completion])
def test_files_of_other_formats(both: Any, tmp_path: Path, row: Callable[..., dict[str, Any]]):
    (tmp_path / "dump").mkdir()
    for k in range(FILES):
        lines(tmp_path / "dump" / f"{k:03d}.jsonl", [row()] * (1 + k % 3))
    alone, joined, sizes = both(tmp_path / "dump")
    assert joined == alone and sizes == [FILES]


def test_records_that_changed_places_are_found_in_the_dumps_order(both: Any, tmp_path: Path):
    (tmp_path / "dump").mkdir()
    moved = exchanged(replies(5 * FILES), np.roll(np.arange(5 * FILES), 1))
    for k in range(FILES):
        write(moved.take(np.arange(5 * k, 5 * k + 5)), tmp_path / "dump" / f"{k:03d}.parquet")
    alone, joined, sizes = both(tmp_path / "dump")
    assert joined == alone and sizes == [FILES]
    assert "rolled by one record" in next(
        f["message"] for f in json.loads(joined)["findings"] if "exchanged" in f["code"]
    )


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_joined(both: Any, tmp_path: Path):
    folder = dump(tmp_path / "dump", kinds="parquet")
    data = bytearray((folder / "005.parquet").read_bytes())
    data[40 : len(data) // 2] = bytes(len(data) // 2 - 40)  # the footer is whole
    (folder / "005.parquet").write_bytes(data)
    alone, joined, sizes = both(folder)
    assert joined == alone and sizes == [5, 6]
    found = next(f for f in json.loads(joined)["findings"] if f["code"] == "files-unreadable")
    assert "1 of 12 files" in found["message"] and found["place"].endswith("005.parquet")


def test_broken_records_and_files_that_end_early(both: Any, tmp_path: Path):
    """Every place names its own file and line."""
    folder = dump(tmp_path / "dump", kinds="jsonl jsonl jsonl.gz", files=18)
    for k in (1, 6, 9):  # a list that is short, a line that is cut, a record without ids
        rows = (folder / f"{k:03d}.jsonl").read_text().splitlines()
        row = json.loads(rows[2])
        row["old_logprobs"] = row["old_logprobs"][:-1]
        rows[2] = {1: json.dumps(row), 6: rows[2][:50], 9: json.dumps({"token_ids": []})}[k]
        (folder / f"{k:03d}.jsonl").write_text("\n".join(rows) + "\n")
    packed = folder / "011.jsonl.gz"
    packed.write_bytes(packed.read_bytes()[:-100])
    alone, joined, sizes = both(folder)
    assert joined == alone and max(sizes) > 1
    told = json.loads(joined)
    for name in ("001.jsonl:3", "006.jsonl:3", "009.jsonl:3", "011.jsonl.gz"):
        assert any(f"{name}" in json.dumps(f) for f in told["findings"]), name


def test_files_of_text_between(both: Any, tmp_path: Path):
    folder = dump(tmp_path / "dump", kinds="jsonl")
    for name in ("002a.jsonl", "007a.jsonl", "007b.jsonl"):
        (folder / name).write_text(json.dumps({"prompt": "What is 2 + 2?", "response": "4", "reward": 1.0}) + "\n")
    alone, joined, sizes = both(folder)
    assert joined == alone and max(sizes) > 1


@pytest.mark.parametrize("seed", range(4))
def test_files_of_every_kind_in_any_order(both: Any, tmp_path: Path, seed: int):
    """Two of the changes above, others every three files."""
    cases = [change for change, _ in CASES.values()]

    def change(part: Rollouts, k: int) -> Rollouts:
        rng = np.random.default_rng([seed, k // 3])
        for i in rng.choice(len(cases), 2):
            try:
                part = cases[int(i)](part, k % FILES)
            except KeyError:  # the column is gone already
                continue
        return part

    folder = dump(tmp_path / "dump", change, "parquet parquet parquet jsonl jsonl jsonl", files=30)
    alone, joined, sizes = both(folder)
    assert joined == alone
    assert max(sizes) > 1


def test_the_words_of_a_worst_token_are_of_its_own_record_where_ids_begin_again(both: Any, tmp_path: Path):
    change = lambda p, k: with_record(p, record_id=np.array([*"abcde"], dtype=object))
    folder = dump(tmp_path / "dump", change)
    parts = [change(sample(5 * FILES).take(np.arange(5 * k, 5 * k + 5)), k) for k in range(FILES)]
    for report in map(json.loads, both(folder)[:2]):
        for told in report["context"]["tokens"]:
            rows = [(p, "abcde".index(told["record"])) for p in parts]
            held = [p.token_ids[p.sequence(i)] for p, i in rows if _says(p, i, told)]
            words = [f"[{t}]" for t in held[0].tolist()]
            assert len(held) == 1 and told["before"] + told["token"] + told["after"] in "".join(words)


def _says(part: Rollouts, i: int, told: dict[str, Any]) -> bool:
    at, k = part.sequence(i), told["position"]
    sides = ((s, part.scorings[n].logprobs.values[at]) for s, n in (("sampler", "sampler"), ("scorer", "old")))
    return all(k < len(x) and float(x[k]) == told[side] for side, x in sides)


def test_pieces_hold_every_shard_once_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = dump(tmp_path / "dump", kinds="parquet", files=40)
    (folder / "020.parquet").write_bytes((folder / "020.parquet").read_bytes() + bytes(together.SMALL))
    shards = [Shard("canonical", (str(path),)) for path in sorted(folder.iterdir())]
    shards[30] = cut = replace(shards[30], start=0, stop=1)
    large = shards[20]
    for workers in (1, 2, 5):
        found = pieces(shards, workers)
        assert [s for piece in found for s in piece.shards] == list(shards)
        assert [piece.number for piece in found] == [shards.index(piece.shards[0]) for piece in found]
        assert (large,) in [p.shards for p in found] and (cut,) in [p.shards for p in found]
        assert 2 * workers <= len(found) <= 4 * workers + 4
    monkeypatch.setattr(together, "BYTES", 3 * (folder / "001.parquet").stat().st_size)
    monkeypatch.setattr(together, "EACH", 1)
    assert max(len(piece.shards) for piece in pieces(shards, 1)) <= 4


def test_a_batch_is_no_larger_than_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = dump(tmp_path / "dump", files=8)
    tokens = [r.n_tokens for r in (sample(40).take(np.arange(5 * k, 5 * k + 5)) for k in range(8))]
    seen: list[int] = []
    survey = auditing.survey_of
    monkeypatch.setattr(auditing, "survey_of", lambda r, *a, **k: (seen.append(r.n_tokens), survey(r, *a, **k))[1])
    monkeypatch.setattr(together, "BATCH_TOKENS", 2 * max(tokens))
    monkeypatch.setattr(together, "EACH", 1)
    (piece,) = pieces(detect([folder]).shards, 1)
    audit_piece(piece, Work(("sampler", "old")))
    assert sum(seen) == sum(tokens) and max(seen) <= 2 * max(tokens) and len(seen) < 8
    seen.clear()
    monkeypatch.setattr(together, "BATCH_RECORDS", 5)
    audit_piece(piece, Work(("sampler", "old")))
    assert seen == tokens


def test_an_error_of_one_file_is_told_of_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever a survey refuses of many files, each of them is looked at again."""
    folder = dump(tmp_path / "dump", files=6)
    survey = together.survey_read

    def refuses(read: Any, *more: Any) -> Any:
        if len(read.places) > 5:
            raise ContentError("not these")
        return survey(read, *more)

    monkeypatch.setattr(together, "EACH", 1)
    monkeypatch.setattr(together, "survey_read", refuses)
    (piece,) = pieces(detect([folder]).shards, 1)
    answer = audit_piece(piece, Work(("sampler", "old")))
    (found,) = answer.surveys
    assert not answer.unreadable and found.dump.counts["records"] == 30 and found.dump.counts["files"] == 6


def test_a_dead_worker_is_told_with_few_words():
    piece = together.Piece(tuple(Shard("canonical", (f"{i}.jsonl",)) for i in range(3)), 0)
    with pytest.raises(EngineDied, match=r"on 0\.jsonl and 2 more files; is there enough memory"):
        pool._count_try({0: pool.TRIES - 1}, [0], [(piece,)])
