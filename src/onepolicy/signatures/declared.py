"""What the dump declares, read from the facts that were gathered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onepolicy.signatures.base import Evidence

#: A sampling parameter -> the values that switch it off.
NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0.0, -1.0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}


def words(evidence: Evidence, name: str) -> list[str]:
    """The values seen of a column, null left out."""
    return [str(x) for x in evidence.facts.get(name, ()) if str(x) not in ("null", "None")]


def numbers(evidence: Evidence, name: str) -> list[float]:
    """The same as numbers, sorted; what is none is left out."""
    out: list[float] = []
    for word in words(evidence, name):
        try:
            out.append(float(word))
        except ValueError:
            continue
    return sorted(x for x in out if not math.isnan(x))


def switched_on(evidence: Evidence, *names: str) -> dict[str, list[float]]:
    """Those of the parameters that are declared with a value that is not neutral."""
    found = {name: [x for x in numbers(evidence, name) if x not in NEUTRAL[name]] for name in names}
    return {name: values for name, values in found.items() if values}


def switched_off(evidence: Evidence, *names: str) -> bool:
    """Whether all of them are declared in every record, each with a neutral value."""
    return all(
        words(evidence, name) and "null" not in evidence.facts.get(name, ()) and not switched_on(evidence, name)
        for name in names
    )


def told(values: Mapping[str, Any]) -> str:
    """`top_p 0.8, top_k 50`."""
    return ", ".join(f"{name} {', '.join(f'{x:g}' for x in found)}" for name, found in values.items())
