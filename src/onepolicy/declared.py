"""What a file declares of its scorings beside their columns: semantics, dtype, fingerprint, scoring id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from onepolicy import schema
from onepolicy.errors import ContentError, UnknownName
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values
from onepolicy.values import quoted

#: What is declared of a scoring.
DECLARED = ("semantics", "dtype", "fingerprint", "scoring_id")


@dataclass(slots=True)
class Header:
    """What a file declares beside its columns, gathered as its records are read."""

    scorings: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    float32: set[str] = field(default_factory=set[str])

    def add(self, declared: Any) -> None:
        """Merges one `scorings` mapping. Errors: `ContentError` for a wrong shape or a contradiction."""
        for name, said in _mapping("scorings", declared).items():
            _refuse_name(name)
            known = self.scorings.setdefault(name, {})
            for key, value in _mapping(f"scorings.{name}", said).items():
                if known.setdefault(key, _declaration(name, key, value)) != value:
                    raise ContentError(
                        f"scorings.{name}.{key}: got {quoted(value)}, but it was {quoted(known[key])} before; "
                        "one file holds one scoring of a name"
                    )

    def scoring(self, name: str, columns: Mapping[str, Values], n_tokens: int) -> Scoring:
        """The scoring of that name from its columns (`logprobs`, ...); no log-probs are all null."""
        said = self.scorings.get(name, {})
        unscored = Values(np.zeros(n_tokens), np.zeros(n_tokens, dtype=bool))
        return Scoring(
            columns.get("logprobs", unscored),
            columns.get("entropy"),
            columns.get("varentropy"),
            None,
            said.get("semantics"),
            said.get("dtype"),
            said.get("fingerprint") or {},
            said.get("scoring_id"),
        )


def _mapping(what: str, x: Any) -> dict[str, Any]:
    if not isinstance(x, Mapping):
        raise ContentError(f"{what}: got {quoted(cast(object, x))}, wanted an object")
    return {str(k): v for k, v in cast(Mapping[Any, Any], x).items()}


def _refuse_name(name: str) -> None:
    """Columns are named after their scoring, and a file with a column that is not in the contract is not read."""
    if not schema.is_scoring_name(name):
        wanted = "letters, digits and '_', not starting with 'x_'"
        raise ContentError(f"scoring {quoted(name)}: wanted a name of {wanted}")


def _declaration(name: str, key: str, value: Any) -> Any:
    if key not in DECLARED:
        raise ContentError(f"scorings.{name}: {UnknownName('declaration', key[:60], DECLARED)}")
    what = f"scorings.{name}.{key}"
    if key == "fingerprint" and value is not None:
        return _mapping(what, value)
    if not isinstance(value, (str, type(None))):
        raise ContentError(f"{what}: got {quoted(value)}, wanted text")
    if key == "semantics" and value not in (None, *schema.SEMANTICS):
        raise ContentError(f"{what}: got {quoted(value)}, wanted one of {', '.join(schema.SEMANTICS)}")
    return value


def declarations(rollouts: Rollouts) -> dict[str, dict[str, Any]]:
    """`{name: {semantics, dtype, fingerprint, scoring_id}}`, what `Header.add` reads.

    Errors: `ContentError` for a scoring with a name that no column can have.
    """
    for name in rollouts.scorings:
        _refuse_name(name)
    return {
        name: {key: dict(s.fingerprint) if key == "fingerprint" else getattr(s, key) for key in DECLARED}
        for name, s in rollouts.scorings.items()
    }


def scorings_of(columns: Mapping[str, Values], header: Header, n_tokens: int) -> dict[str, Scoring]:
    """The scorings that the header declares or that have a column, in that order."""
    parts: dict[str, dict[str, Values]] = {name: {} for name in header.scorings}
    for name, col in columns.items():
        split = schema.scoring_column(name)
        if split:
            parts.setdefault(split[0], {})[split[1]] = col
    return {name: header.scoring(name, cols, n_tokens) for name, cols in parts.items()}
