"""Versions: how many a token's weights lie behind the scorer's, and replies whose tokens come from more than one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onepolicy.arrays import Array
from onepolicy.monitor.batch import Batch


@dataclass
class Versions:
    """Those of some rows of a batch. `mask`, `scored`: `[b, T]`; `zero`: `[b, T]` float64."""

    kind: Any
    batch: Batch
    rows: slice
    mask: Array
    scored: Array
    zero: Array

    @cached_property
    def given(self) -> Array:
        """`[b, T]`, the scale of versions."""
        return self.kind.wide(self.batch.versions, self.rows) + self.zero

    @cached_property
    def known(self) -> Array:
        return self.scored & self.kind.xp.isfinite(self.given) & (self.given >= 0)

    @cached_property
    def lag(self) -> Array:
        """`[b, T]` versions behind the scorer, below 0 ahead of it; 0 where unknown."""
        newest = self._newest if self.batch.version is None else self.batch.version
        return self.kind.xp.where(self.known, newest - self.given, self.zero)

    @property
    def _newest(self) -> Array:
        """Where nobody told the scorer's version: the newest one in the batch."""
        given = self.kind.wide(self.batch.versions)
        return self.kind.greatest(self.kind.xp.where(self.kind.xp.isfinite(given), given, given * 0 - 1))

    @cached_property
    def same(self) -> Array:
        return self.known & (self.lag == 0)

    @cached_property
    def behind(self) -> Array:
        return self.known & (self.lag > 0)

    @property
    def _by_token(self) -> bool:
        """Whether a reply can hold more than one version at all."""
        return self.batch.versions is not None and self.batch.versions.shape[-1] > 1

    @cached_property
    def changed(self) -> Array:
        """`[b, T]` tokens of another version than the first one of their reply whose version is known."""
        first = self.kind.take(self.given, self.kind.first(self.known))
        return self.known & (self.given != first)

    def counts(self) -> Array:
        """In the order of `vector.VERSIONS`."""
        kind, ahead = self.kind, self.known & (self.lag < 0)
        behind = kind.xp.where(self.behind, self.lag, self.zero).sum()
        mixed = kind.count(self.changed.any(-1)) if self._by_token else behind * 0
        return kind.stack([kind.count(self.known), behind, mixed, kind.count(ahead)])

    def greatest(self) -> tuple[Array, Array]:
        """(the largest lag, the newest version)."""
        xp = self.kind.xp
        lag = xp.where(self.behind, self.lag, self.zero)
        return self.kind.greatest(lag), self.kind.greatest(xp.where(self.known, self.given, self.zero))

    def change(self) -> tuple[Array, Array]:
        """(greatest, minus least) number of a reply's tokens before its first change of version; -inf for none, and
        where tokens of unknown versions stand before it."""
        kind, xp = self.kind, self.kind.xp
        if not self._by_token:
            none = self.zero.sum() - math.inf
            return none, none
        at = kind.first(self.changed)
        before = kind.take(self.mask.cumsum(-1), at) - 1.0
        holes = self.mask & ~self.known & (self.known.cumsum(-1) > 0)
        some = self.changed.any(-1) & (kind.take(holes.cumsum(-1), at)[:, 0] == 0)
        far = self.zero[:, 0] - math.inf
        return kind.greatest(xp.where(some, before[:, 0], far)), kind.greatest(xp.where(some, -before[:, 0], far))
