"""A dump's numbers under a framework's names, shard by shard: by step, as its dashboard has them, and pooled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onepolicy.dialects import of
from onepolicy.dialects.key import Dialect, Key
from onepolicy.dialects.totals import Total
from onepolicy.dialects.view import View
from onepolicy.errors import ContentError, MergeError

FORMAT = 1
#: Sequences of no known step.
NO_STEP = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A key's value in each step (None: not measured there) and over the whole dump; `why` says what is missing."""

    key: Key
    steps: Mapping[int | None, float | None]
    whole: float | None
    why: str = ""


class Accumulator:
    """Adds views; merges with other accumulators of the same dialect and options; its state is JSON-able."""

    def __init__(self, dialect: str | Dialect, options: Mapping[str, Any] | None = None) -> None:
        """Errors: `UnknownName` (did you mean) for a dialect or an option; `UsageError` for an option's value."""
        self.dialect = dialect if isinstance(dialect, Dialect) else of(dialect)
        self.options = self.dialect.resolve(options)
        self.keys = [k for k in self.dialect.keys.values() if k.shown(self.options)]
        self._needs = {k.name: k.columns(self.options) for k in self.keys}
        self._totals: dict[str, dict[str, Total]] = {}
        self._views: dict[str, dict[str, int]] = {}

    def add(self, view: View, step: int | None = None) -> None:
        """One batch of a step. Columns that it lacks leave out the keys that need them."""
        at = NO_STEP if step is None else str(int(step))
        totals, seen = self._totals.setdefault(at, {}), self._views.setdefault(at, {})
        view = view.prepared(self.options["scorer"], self.options["precision"] == "float32")
        seen[""] = seen.get("", 0) + 1
        made: dict[str, Any] = {}
        lacking, once = set[str](), set[str]()
        with np.errstate(all="ignore"):
            for key in self.keys:
                missing = [name for name in self._needs[key.name] if not view.has(name)]
                lacking.update(missing)
                for part in () if missing else key.parts:
                    if part.name not in made:
                        made[part.name] = part.term(view, self.options)
                    taken = self._name(key, part.name)
                    if taken not in once:  # however many keys share it
                        once.add(taken)
                        totals.setdefault(taken, Total(part.reduce)).take(made[part.name])
        for name in sorted(lacking):
            seen[name] = seen.get(name, 0) + 1

    def merge(self, other: Accumulator) -> None:
        """Add the other's totals to these. Errors: `MergeError` for another dialect or other options."""
        for what in ("options", "dialect"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs if what == "options" else mine.name != theirs.name:
                raise MergeError(f"numbers of {self.dialect.name} and {other.dialect.name}: their {what} differ")
        for at, totals in other._totals.items():
            _add(self._totals.setdefault(at, {}), totals)
        for at, seen in other._views.items():
            into = self._views.setdefault(at, {})
            for name, n in seen.items():
                into[name] = into.get(name, 0) + n

    def rows(self) -> list[Row]:
        """Every key that these options show, in the dialect's order. `whole` pools all steps as one batch."""
        whole: dict[str, Total] = {}
        for totals in self._totals.values():
            _add(whole, totals)
        steps = sorted(self._totals, key=lambda s: (s == NO_STEP, int(s or 0)))
        return [
            Row(
                key,
                {int(s) if s else None: self._value(key, self._totals[s]) for s in steps},
                self._value(key, whole),
                self._why(key),
            )
            for key in self.keys
        ]

    def numbers(self) -> dict[str, float | None]:
        """key -> its value over the whole dump."""
        return {row.key.name: row.whole for row in self.rows()}

    def _value(self, key: Key, totals: Mapping[str, Total]) -> float | None:
        found = [totals.get(self._name(key, part.name)) for part in key.parts]
        values = [t.value() if t is not None else None for t in found]
        if any(v is None for v in values):
            return None
        out = key.value(self.options, *values)
        return None if out is None else float(out)

    def _why(self, key: Key) -> str:
        views = sum(seen.get("", 0) for seen in self._views.values())
        said: list[str] = []
        for name in self._needs[key.name]:
            n = sum(seen.get(name, 0) for seen in self._views.values())
            if n:
                column = f"{self.options['scorer']}_logprobs" if name == "scorer" else COLUMNS[name]
                said.append(f"no {column}" + (f" in {n} of {views} batches" if n < views else ""))
        return ", ".join(said)

    def _name(self, key: Key, part: str) -> str:
        """A part is kept apart for each set of columns: batches that lack one of them are not in it."""
        return f"{part} @ {' '.join(self._needs[key.name])}"

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; equal data gives equal content, however it was split and in whatever order it came."""
        return {
            "format": FORMAT,
            "dialect": self.dialect.name,
            "options": dict(self.options),
            "views": {at: dict(sorted(seen.items())) for at, seen in sorted(self._views.items())},
            "steps": {
                at: {name: total.to_list() for name, total in sorted(totals.items())}
                for at, totals in sorted(self._totals.items())
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], dialect: Dialect | None = None) -> Accumulator:
        """The inverse of `to_dict`; `dialect`: where it is none of the table's. Errors: `ContentError` otherwise."""
        try:
            if data["format"] != FORMAT:
                raise ContentError(f"saved numbers have format {data['format']!r}; this version reads {FORMAT}")
            out = cls(dialect or data["dialect"], data["options"])
            out._views = {at: {k: int(n) for k, n in seen.items()} for at, seen in data["views"].items()}
            out._totals = {
                at: {name: Total.from_list(x) for name, x in totals.items()} for at, totals in data["steps"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as err:
            if isinstance(err, ContentError):
                raise
            raise ContentError(f"these are not saved numbers of a dialect: {type(err).__name__} {err}") from err
        return out


#: column of a view -> what a dump calls it
COLUMNS = {
    "old": "old_logprobs",
    "current": "current_logprobs",
    "entropy": "old_entropy or current_entropy",
    "advantages": "advantages",
}


def _add(into: dict[str, Total], totals: Mapping[str, Total]) -> None:
    for name, total in totals.items():
        into.setdefault(name, Total(total.reduce)).merge(total)
