"""Causes read from the shape of the data. To add one: a file with a `Signature`, and one line here."""

from __future__ import annotations

from onepolicy.signatures import (
    experts,
    inside,
    lag,
    mass,
    one_group,
    outliers,
    penalties,
    position,
    raw_processed,
    records,
    rounding,
    series,
    softcap,
    stored_policy,
    temperature,
    truncation,
)
from onepolicy.signatures.base import Answer, Evidence, Signature

__all__ = ["SIGNATURES", "Answer", "Evidence", "Signature"]

#: Meaning, then staleness, then shape: a cause higher up explains more.
SIGNATURES: dict[str, Signature] = {
    s.key: s
    for s in (
        temperature.SIGNATURE,
        truncation.SIGNATURE,
        penalties.SIGNATURE,
        softcap.SIGNATURE,
        raw_processed.SIGNATURE,
        *stored_policy.SIGNATURES,
        mass.SIGNATURE,
        *inside.SIGNATURES,
        *lag.SIGNATURES,
        *series.SIGNATURES,
        *records.SIGNATURES,
        one_group.SIGNATURE,
        experts.SIGNATURE,
        position.SIGNATURE,
        outliers.SIGNATURE,
        *rounding.SIGNATURES,
    )
}
