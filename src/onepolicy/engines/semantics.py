"""What a declared log-prob means, as rules that are applied to logits. No engine is named here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from onepolicy.engines.base import SamplingParams, declared
from onepolicy.errors import ContentError, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.schema import SEMANTICS

#: Below this temperature vLLM draws the argmax and reports log-probs at temperature 1, without truncation.
GREEDY = 1e-5


@dataclass(frozen=True, slots=True)
class Rules:
    """What is done to the logits before the log-softmax, in this order: penalties, temperature, min_p, top_k, top_p.

    The neutral value of each switches it off; `top_k` 0 keeps everything.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Rules:
        """The rules of one sequence's declaration, as `base.declared` gives it.

        Errors: `ContentError` for a semantics that is none of `schema.SEMANTICS`.
        """
        semantics = row["logprob_semantics"]
        if semantics not in SEMANTICS:
            raise ContentError(f"logprob_semantics: got {semantics!r}, wanted one of {', '.join(SEMANTICS)}")
        if semantics == "raw":
            return cls()
        greedy = float(row["temperature"]) < GREEDY
        temperature = 1.0 if greedy else float(row["temperature"])
        if semantics == "temperature":
            return cls(temperature=temperature)
        full = cls(
            temperature,
            float(row["top_p"]),
            max(0, int(row["top_k"])),
            float(row["min_p"]),
            float(row["repetition_penalty"]),
            float(row["presence_penalty"]),
            float(row["frequency_penalty"]),
        )
        return replace(full, top_p=1.0, top_k=0, min_p=0.0) if greedy else full

    @classmethod
    def of_params(cls, params: SamplingParams) -> Rules:
        """The rules by which an engine draws with these parameters."""
        return cls.of({"logprob_semantics": "processed", **{f.name: getattr(params, f.name) for f in fields(cls)}})

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


def common_semantics(rows: list[dict[str, Any]]) -> str | None:
    """The one semantics that all sequences declare; None when they differ."""
    seen = {row["logprob_semantics"] for row in rows}
    return seen.pop() if len(seen) == 1 else None


def require_same_meaning(rollouts: Rollouts, mine: str, engine: str) -> list[dict[str, Any]]:
    """The declarations, once it is sure that values of semantics `mine` mean the same for every sequence.

    `processed` at temperature 1 without truncation and penalties is `raw`, whatever it is called.

    Errors: `UsageError` naming the first sequence where they do not.
    """
    rows = declared(rollouts, engine)
    for i, row in enumerate(rows):
        ours = {**row, "logprob_semantics": mine}
        unknown = mine != "raw" and any(v is None for v in ours.values())
        if mine != row["logprob_semantics"] and (unknown or Rules.of(ours) != Rules.of(row)):
            raise UsageError(
                f"record {i}: its log-probs are {row['logprob_semantics']!r} (temperature {row['temperature']}, top_p "
                f"{row['top_p']}, top_k {row['top_k']}), {engine} gives {mine!r}; these are different distributions: "
                f"record at {mine!r}, or score with an engine that applies the declared rules (hf)"
            )
    return rows
