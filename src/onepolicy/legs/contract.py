"""What the sampler's log-probs mean, found by probing: replies are drawn under one setting at a time, and their
reported log-probs are held against a scorer that computes them with and without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.engines.base import Engine, SamplingParams
from onepolicy.errors import EngineDied, EngineError, UsageError
from onepolicy.legs.base import values_of
from onepolicy.legs.run import as_raw
from onepolicy.rollouts import Rollouts, concat
from onepolicy.types import Finding, FloatArray, LegResult, Outcome, Question, Ran, Scoring

#: One setting at a time; anything that follows from it is that setting's.
PROBES: dict[str, Mapping[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.7},
}
_PROMPTS, _TOKENS = 12, 16
#: A gap is counted up to this many nats: one token outside a set must not decide alone.
_CAP = 3.0
#: How many times closer one meaning must be than the other, and over how many tokens that tell them apart.
_CLEARER, _LEAST = 2.0, 12

#: What to set so that an engine's log-probs mean this.
FLAGS: dict[str, dict[str, str]] = {
    "vllm": {"raw": "logprobs=raw (--logprobs-mode raw_logprobs)", "processed": "logprobs=processed "
             "(--logprobs-mode processed_logprobs)"},
    "http": {"raw": "logprobs=raw and a server started with --logprobs-mode raw_logprobs", "processed":
             "logprobs=processed and a server started with --logprobs-mode processed_logprobs"},
    "hf": {"raw": "semantics=raw", "temperature": "semantics=temperature", "processed": "semantics=declared"},
    "callable": {"raw": "semantics=raw, and no temperature or truncation in the function", "processed":
                 "the same temperature and truncation in the function"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Probes:
    """Replies drawn under each setting; `refused`: settings that the sampler does not know. `prompted`: the sampler's
    own prompt log-probs of the same tokens, if it gives any."""

    rollouts: Rollouts | None
    names: tuple[str, ...]
    refused: Mapping[str, str]
    prompted: Scoring | None = None


def draw_probes(engine: Engine, prompts: Sequence[Sequence[int]], seed: int = 0) -> Probes:
    """A few short replies under each setting of `PROBES`. Errors: `EngineDied`."""
    parts: list[Rollouts] = []
    names: list[str] = []
    refused: dict[str, str] = {}
    for name, settings in PROBES.items():
        try:
            params = SamplingParams(max_tokens=_TOKENS, seed=seed + 1000, ignore_eos=True, **settings)
            drawn = engine.sample(list(prompts[:_PROMPTS]), params)
        except EngineDied:
            raise
        except (EngineError, UsageError) as err:
            refused[name] = str(err)
            continue
        parts.append(drawn)
        names += [name] * len(drawn)
    rollouts = concat(parts) if parts else None
    return Probes(rollouts, tuple(names), refused, _prompted(engine, rollouts))


def _prompted(engine: Engine, rollouts: Rollouts | None) -> Scoring | None:
    if rollouts is None or not engine.SCORES:
        return None
    try:
        return engine.score(as_raw(rollouts))
    except EngineDied:
        raise
    except (EngineError, UsageError):
        return None


def contract_of(probes: Probes, raw: Scoring, processed: Scoring) -> dict[str, Any]:
    """The rows of the contract, from the probes and a scorer's two readings of them.

    `{"settings": [{setting, applied, gap_if_applied, gap_if_not, tokens}], "meaning": ..., "prompt_logprobs": ...}`;
    `applied` None: not told apart. Gaps are mean absolute nats over the tokens where the readings differ.
    """
    assert probes.rollouts is not None
    rollouts = probes.rollouts
    reported, without, applied = (values_of(s) for s in (rollouts.scorings["sampler"], raw, processed))
    rows = [_row(name, probes, reported, without, applied) for name in PROBES if name in probes.names]
    rows += [{"setting": n, "applied": None, "why": "not supported by the sampler"} for n in probes.refused]
    return {"settings": rows, "meaning": meaning_of(rows), "prompt_logprobs": _prompt_row(probes, without)}


def _row(name: str, probes: Probes, reported: FloatArray, without: FloatArray, applied: FloatArray) -> dict[str, Any]:
    assert probes.rollouts is not None
    here = np.repeat(np.array(probes.names) == name, probes.rollouts.lengths) & probes.rollouts.drawn
    with np.errstate(invalid="ignore"):
        apart = here & ~(np.abs(applied - without) < 0.02) & np.isfinite(without) & np.isfinite(reported)
        if_applied, if_not = (float(np.minimum(np.abs(reported - x)[apart], _CAP).mean()) if apart.any() else 0.0
                              for x in (np.maximum(applied, -1e4), without))  # fmt: skip
    n = int(apart.sum())
    setting = ", ".join(f"{k}={v}" for k, v in PROBES[name].items())
    row = {"setting": setting, "name": name, "gap_if_applied": if_applied, "gap_if_not": if_not, "tokens": n}
    return {**row, "applied": _decided(if_applied, if_not, n)}


def _decided(if_applied: float, if_not: float, n: int) -> bool | None:
    if n < _LEAST or not max(if_applied, if_not) > _CLEARER * min(if_applied, if_not):
        return None
    return if_applied < if_not


def meaning_of(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """`raw`, `temperature`, `processed`, `mixed`, or None where the rows do not tell."""
    told = {row["name"]: row["applied"] for row in rows if row["applied"] is not None}
    if not told:
        return None
    if not any(told.values()):
        return "raw"
    if all(told.values()):
        return "processed" if len(told) > 1 or "temperature" not in told else "temperature"
    only_temperature = told.get("temperature") and not any(v for k, v in told.items() if k != "temperature")
    return "temperature" if only_temperature else "mixed"


def _prompt_row(probes: Probes, without: FloatArray) -> dict[str, Any] | None:
    """Whether the sampler's prompt log-probs are raw: they are held against the scorer's raw reading."""
    if probes.prompted is None or probes.rollouts is None:
        return None
    given = values_of(probes.prompted)
    on = probes.rollouts.drawn & np.isfinite(given) & np.isfinite(without)
    sampled = values_of(probes.rollouts.scorings["sampler"])
    with np.errstate(invalid="ignore"):
        gap = float(np.abs(given - without)[on].mean()) if on.any() else None
        same = bool(np.array_equal(given[on], sampled[on]))
    return {"gap_to_raw": gap, "equal_to_sampled": same, "tokens": int(on.sum())}


def contract_result(contract: Mapping[str, Any], sampler: str, declared: str | None) -> LegResult:
    """The leg: drift where the measured meaning is not the declared one."""
    differs = differing(contract, declared)
    told = [row for row in contract["settings"] if row["applied"] is not None]
    outcome = Outcome.DRIFT if differs else Outcome.PASS if told else Outcome.INCONCLUSIVE
    return LegResult(
        "contract", Question.MEANING, "what the sampler's log-probs mean, by probing", sampler,
        "the scorer's readings with and without each setting", Ran.DONE, "", outcome, facts=dict(contract),
    )  # fmt: skip


def differing(contract: Mapping[str, Any], declared: str | None) -> list[Mapping[str, Any]]:
    """The settings whose measured effect is not what `declared` says."""
    if declared is None:
        return []
    expected = {"raw": (), "temperature": ("temperature",), "processed": tuple(PROBES)}.get(declared, tuple(PROBES))
    return [
        row for row in contract["settings"]
        if row["applied"] is not None and row["applied"] != (row["name"] in expected)
    ]  # fmt: skip


def contract_findings(
    contract: Mapping[str, Any], engines: tuple[str, str], declared: str | None, scorer: str | None, matters: bool
) -> list[Finding]:
    """Findings of the leg. `engines`: names of sampler and scorer; `declared`, `scorer`: what each side's log-probs are
    said to mean; `matters`: the rollouts were drawn under settings where meanings differ."""
    out: list[Finding] = []
    for row in differing(contract, declared):
        done = "applied" if row["applied"] else "not applied"
        message = (
            f"{row['setting']} is {done} in the sampler's log-probs, declared {declared!r} "
            f"(gap {row['gap_if_applied']:.2g} nats if applied, {row['gap_if_not']:.2g} if not)"
        )
        flag = FLAGS.get(engines[0], {}).get(str(declared), f"the sampler's log-probs to {declared}")
        out.append(finding("logprob-contract", message, origin="run", advice=f"Set {flag}, or declare "
                           f"{contract['meaning']!r}.", evidence=dict(row)))  # fmt: skip
    measured = contract["meaning"] or declared
    if matters and scorer is not None and measured is not None and scorer != measured and not out:
        flag = FLAGS.get(engines[1], {}).get(measured, f"the scorer to {measured}")
        other = FLAGS.get(engines[0], {}).get(scorer, f"the sampler to {scorer}")
        message = f"the sampler's log-probs are {measured!r} (probed), the scorer computes {scorer!r}"
        out.append(finding("logprob-contract", message, origin="run", advice=f"Set {flag} on the scorer, or {other} on "
                           "the sampler."))  # fmt: skip
    return out


#: Values that engines and pipelines write where there is no log-prob.
PLACEHOLDERS = (0.0, -9999.0, -1e9, -100.0, -1e4)
_LEAST_PLACEHOLDERS = 3


def placeholder_findings(rollouts: Rollouts, sampler: Scoring, scorer: Scoring) -> list[Finding]:
    """Drawn tokens whose reported value is a placeholder: the exact number, where the scorer is far from it.

    0.0 is none where a kept set may hold one token alone.
    """
    a, b = values_of(sampler), values_of(scorer)
    out: list[Finding] = []
    with np.errstate(invalid="ignore"):
        others = np.abs(b - a)[rollouts.drawn & np.isfinite(a) & np.isfinite(b) & ~np.isin(a, PLACEHOLDERS)]
    if len(others) and np.median(others) > 0.1:
        return out  # the two sides differ everywhere: those values are not what is wrong
    for value in PLACEHOLDERS[1:] if _truncated(rollouts) else PLACEHOLDERS:
        with np.errstate(invalid="ignore"):
            at = np.flatnonzero(rollouts.drawn & (a == value) & (np.abs(b - value) > 0.1))
        if len(at) >= _LEAST_PLACEHOLDERS:
            s = int(np.searchsorted(rollouts.offsets, at[0], side="right")) - 1
            place = f"record {rollouts.content_ids()[s]}, position {int(at[0] - rollouts.offsets[s])}"
            message = f"{len(at):,} drawn tokens have the sampler log-prob {value:g} exactly, where the scorer's is not"
            out.append(finding("placeholder-logprob", message, origin="run", place=place, evidence={"value": value}))
    return out


def _truncated(rollouts: Rollouts) -> bool:
    neutral = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0)}
    return any(rollouts.record(k, i) not in v for k, v in neutral.items() for i in range(len(rollouts)))


def with_contract(fingerprint: Mapping[str, Any], contract: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint with what was found, setting by setting."""
    found = {row["name"]: row["applied"] for row in contract["settings"] if "name" in row}
    return {**fingerprint, "logprob_contract": {"meaning": contract["meaning"], "applied": found}}


def processed(rollouts: Rollouts) -> Rollouts:
    """The same tokens, to be scored with everything applied that is declared."""
    from onepolicy.rollouts import column_values

    column = column_values("logprob_semantics", ["processed"] * len(rollouts))
    return replace(rollouts, records={**rollouts.records, "logprob_semantics": column})
