"""`callable:`: what a user's function may return, and what each mistake says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onepolicy.check import check_file
from onepolicy.cli.main import run
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.errors import ContentError, EngineDied, EngineError, OnepolicyError, UsageError
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.storage import write
from onepolicy.types import Values


def rollouts(semantics: str | None = "raw", **declared: float) -> Rollouts:
    records = {"logprob_semantics": [semantics] * 2, **{k: [v] * 2 for k, v in declared.items()}}
    return Rollouts(
        np.array([0, 3, 5]),
        {"token_ids": Values(np.array([8, 4, 2, 1, 2], dtype=np.int32))},
        {k: column_values(k, v) for k, v in records.items()},
    )


def test_values_stand_at_their_own_tokens_and_index_0_is_null() -> None:
    with open_engine("callable:user_scorers:good?dtype=bfloat16") as engine:
        out = engine.score(rollouts())
        assert engine.fingerprint()["dtype"] == out.dtype == "bfloat16"
    assert out.logprobs.values.tolist() == [0.0, -0.5, -0.25, 0.0, -0.25]
    assert out.logprobs.mask().tolist() == [False, True, True, False, True]
    assert out.semantics == "raw"


def test_null_at_index_0_is_taken_as_in_a_file() -> None:
    with open_engine("callable:user_scorers:null_first") as engine:
        out = engine.score(rollouts())
    assert out.logprobs.values[out.logprobs.mask()].tolist() == [-1.0] * 3


@pytest.mark.parametrize(("name", "value"), [("temperature", -1.0), ("top_p", 2.0), ("min_p", float("nan"))])
def test_sampling_parameters_that_cannot_be_are_refused(name: str, value: float) -> None:
    with open_engine("callable:user_scorers:good") as engine, pytest.raises(ContentError, match=f"{name}: got"):
        engine.score(rollouts(**{name: value}))


def test_nan_passes_through_and_the_callers_ids_are_a_copy() -> None:
    with open_engine("callable:user_scorers:lists_with_nan") as engine:
        out = engine.score(rollouts())
    assert np.isnan(out.logprobs.values[out.logprobs.mask()]).all()
    given = rollouts()
    with open_engine("callable:user_scorers:changes_its_input") as engine:
        engine.score(given)
    assert given.token_ids.tolist() == [8, 4, 2, 1, 2]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("one_short", ContentError, "got 2 values for 3 tokens; this looks like logits[:-1] against ids[1:]"),
        ("padded", ContentError, "got 64 values for 3 tokens; one a token, no padding"),
        ("square", ContentError, "got an array of shape [3, 2], wanted [3]"),
        ("fewer", ContentError, "got 1 sequences for 2 that were asked"),
        ("texts", ContentError, "its values are not numbers: TypeError: an array of dtype <U4"),
        ("nones", ContentError, "use NaN where a value is missing"),
        ("nothing", ContentError, "got a NoneType, wanted a list with one array a sequence"),
        ("exiting", EngineError, "raised SystemExit: 0, at user_scorers.py:"),
        ("raising", EngineError, "raised RuntimeError: out of memory, at user_scorers.py:"),
    ],
)
def test_each_mistake_is_one_line(name: str, error: type[OnepolicyError], says: str) -> None:
    with open_engine(f"callable:user_scorers:{name}") as engine, pytest.raises(error) as caught:
        engine.score(rollouts())
    assert says in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("user_scorers", "wanted callable:pkg.mod:fn"),
        ("no_such_pkg.scorers:fn", "there is no module 'no_such_pkg'"),
        ("user_scorers:goood", "module 'user_scorers' is there, but has no 'goood'"),
        ("user_scorers:not_a_function", "'not_a_function' is a int, wanted a function"),
        (
            "broken_scorer:fn",
            "importing 'broken_scorer' failed: ZeroDivisionError: division by zero, at broken_scorer.py:2",
        ),
        ("needs_more:fn", "importing 'needs_more' failed: ModuleNotFoundError: No module named 'flash_attention_9'"),
    ],
)
def test_what_cannot_be_imported_says_what_is_missing(
    target: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_scorer.py").write_text("x = 1\nx / 0\n")
    (tmp_path / "needs_more.py").write_text("import flash_attention_9\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    with pytest.raises(UsageError) as caught, open_engine(f"callable:{target}"):
        pass
    assert says in str(caught.value)


def test_semantics_are_declared_by_somebody_and_never_guessed() -> None:
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    with open_engine("callable:user_scorers:good?semantics=raw") as engine:
        for temperature in (1.0, 0.7):  # where the meanings differ, it scores, and says its own: the verdict says so
            out = engine.score(rollouts("processed", **(neutral | {"temperature": temperature})))
            assert out.semantics == "raw" and out.logprobs.values.tolist() == [0.0, -0.5, -0.25, 0.0, -0.25]
        with pytest.raises(UsageError, match="logprob_semantics not declared"):
            engine.score(rollouts(None))
    with open_engine("callable:user_scorers:good") as engine:
        assert engine.score(rollouts("temperature", temperature=0.7)).semantics == "temperature"
        with pytest.raises(UsageError, match="logprob_semantics not declared"):
            engine.score(rollouts(None))
        for refused in (lambda: engine.encode(["x"]), lambda: engine.decode([1])):
            with pytest.raises(UsageError, match="it has no tokenizer"):
                refused()


def five() -> Rollouts:
    """Five sequences whose lengths are in no order."""
    lengths = [3, 5, 2, 1, 4]
    ids = np.arange(15, dtype=np.int32)
    records = {"logprob_semantics": column_values("logprob_semantics", ["raw"] * 5)}
    return Rollouts(np.concatenate([[0], np.cumsum(lengths)]), {"token_ids": Values(ids)}, records)


@pytest.mark.parametrize(("size", "seen"), [(0, [5] * 5), (1, [1] * 5), (2, [2, 2, 2, 2, 1])])
def test_batch_size_is_how_many_sequences_a_call_gets(size: int, seen: list[int]) -> None:
    given = five()
    with open_engine("callable:user_scorers:how_many", in_process=True) as engine:
        out = engine.score(given, using={"batch_size": size})
        assert engine.fingerprint()["batch_size"] == 0 and out.fingerprint["batch_size"] == size
    last = given.offsets[1:] - 1
    told = given.lengths > 1
    assert out.logprobs.values[last].tolist() == np.where(told, -np.array(seen, dtype=float), 0.0).tolist()


def test_reverse_shows_a_scorer_that_keeps_no_order() -> None:
    """One that sorts by length and forgets to sort back gives the right number of columns, of the wrong sequences."""
    given = five()
    with open_engine("callable:user_scorers:good", in_process=True) as engine:
        plain, reverse = engine.score(given), engine.score(given, using={"reverse": True})
    assert np.array_equal(plain.logprobs.values, reverse.logprobs.values)
    assert reverse.fingerprint["reverse"] is True and plain.fingerprint["reverse"] is False
    same = five().take([1, 1, 1])  # of one length, or its columns would not fit at all
    same = Rollouts(same.offsets, {"token_ids": Values(np.arange(15, dtype=np.int32)[::-1].copy())}, same.records)
    with open_engine("callable:user_scorers:sorted_by_ids", in_process=True) as engine:
        plain, reverse = engine.score(same), engine.score(same, using={"reverse": True})
        with pytest.raises(ContentError, match="values for 3 tokens"):
            engine.score(given.take([0, 2]), using={"reverse": False})
    assert not np.array_equal(plain.logprobs.values, reverse.logprobs.values)


def test_live_switches_are_checked() -> None:
    with open_engine("callable:user_scorers:good", in_process=True) as engine:
        with pytest.raises(UsageError, match="batch_size=-1, wanted at least 0"):
            engine.score(five(), using={"batch_size": -1})
        with pytest.raises(UsageError, match="'dtype' cannot change while it runs; live switches: batch_size, reverse"):
            engine.score(five(), using={"dtype": "float32"})


@pytest.mark.parametrize(("function", "how"), [("leaves", "exit code 0"), ("crashes", "SIGSEGV")])
def test_a_scorer_that_ends_its_process_ends_no_comparison(
    function: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in a worker: neither a crash nor an exit with 0 may look like a verdict."""
    monkeypatch.chdir(Path(__file__).parent)
    recorded = tmp_path / "rollouts.parquet"
    write(record_rollouts("fake:?seed=1", prompts=["a", "b"], params=SamplingParams(max_tokens=4)), recorded)
    spec = f"callable:user_scorers:{function}?dtype=float32"
    with pytest.raises(EngineDied, match=how):
        check_file(recorded, spec)
    assert run(["check", str(recorded), "--scorer", spec]) == 4
