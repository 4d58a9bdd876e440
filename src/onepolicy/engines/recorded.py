"""`recorded:FILE?side=old`: replays a scoring that a file already holds, for the same tokens, proven the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from onepolicy.engines.base import SamplingParams, Switch
from onepolicy.engines.semantics import require_same_meaning
from onepolicy.errors import AlignmentError, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring


class RecordedEngine:
    """The scoring `side` of a stored file. Errors: `UsageError` for a file or a side that is not there."""

    NAME: ClassVar[str] = "recorded"
    SAMPLES: ClassVar[bool] = False
    SCORES: ClassVar[bool] = True
    HEAVY: ClassVar[bool] = False
    SWITCHES: ClassVar[Mapping[str, Switch]] = {"side": Switch(str, "old", "which scoring of the file")}

    def __init__(self, target: str, **options: Any) -> None:
        from onepolicy import storage

        self._side = str(options.get("side", "old"))
        self._what = f"engine recorded:{target}?side={self._side}"
        if not target or not Path(target).exists():
            raise UsageError(f"{self._what}: there is no file {target!r}")
        self._stored: Rollouts = storage.read(target)
        if self._side not in self._stored.scorings:
            have = ", ".join(self._stored.scorings) or "none"
            raise UsageError(f"{self._what}: the file has no '{self._side}_logprobs'; its scorings: {have}")
        self._scoring = self._stored.scorings[self._side]
        self._by_id = _rows(self._stored)
        self._by_tokens = {_tokens(self._stored, i): i for i in reversed(range(len(self._stored)))}

    def fingerprint(self) -> Mapping[str, Any]:
        """The recorded engine's, with where it was replayed from."""
        return {**self._scoring.fingerprint, "replayed": self._what, "dtype": self._scoring.dtype}

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> NoReturn:
        raise UsageError(f"{self._what}: it has no tokenizer; give token ids")

    def decode(self, ids: Sequence[int]) -> NoReturn:
        raise UsageError(f"{self._what}: it has no tokenizer; tokens are shown as ids")

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> NoReturn:
        raise UsageError(f"{self._what}: it replays a scoring; it cannot be the sampler")

    def score(self, rollouts: Rollouts, *, distributions: bool = False) -> Scoring:
        """The stored values, matched by record id where both sides have one, else by equal token ids.

        Errors: `AlignmentError` for a sequence that is not stored, or whose tokens differ, with the first position;
        `UsageError` for distributions, and for semantics that the rollouts contradict.
        """
        if distributions:
            raise UsageError(f"{self._what}: it holds no full distributions; use hf")
        if self._scoring.semantics is not None:
            require_same_meaning(rollouts, self._scoring.semantics, self._what)
        names, by_id = rollouts.record_ids(), _rows(rollouts) if self._by_id else {}
        rows = [self._find(rollouts, i, names[i], recorded=bool(by_id)) for i in range(len(rollouts))]
        picked = self._stored.take(rows).scorings[self._side]
        return Scoring(
            picked.logprobs,
            picked.entropy,
            picked.varentropy,
            None,
            picked.semantics,
            picked.dtype,
            self.fingerprint(),
            picked.scoring_id,
        )

    def close(self) -> None:
        pass

    def _find(self, rollouts: Rollouts, i: int, name: str, recorded: bool) -> int:
        row = self._by_id.get(name) if recorded else self._by_tokens.get(_tokens(rollouts, i))
        if row is None:
            how = "no record of that id" if recorded else "no sequence of the same tokens"
            raise AlignmentError(f"record {name!r}: {self._what} holds {how}")
        ours, theirs = rollouts.token_ids[rollouts.sequence(i)], self._stored.token_ids[self._stored.sequence(row)]
        n = min(len(ours), len(theirs))
        bad = np.flatnonzero(ours[:n] != theirs[:n])
        if len(bad):
            at = int(bad[0])
            raise AlignmentError(
                f"record {name!r}: tokens differ at position {at}: got {int(ours[at])} here, {int(theirs[at])} in "
                f"{self._what}; log-probs of different tokens are never compared"
            )
        if len(ours) != len(theirs):
            raise AlignmentError(
                f"record {name!r}: {len(ours)} tokens here, {len(theirs)} in {self._what}; nothing is cut to fit"
            )
        return row


def _rows(rollouts: Rollouts) -> dict[str, int]:
    """Row of each recorded id; empty unless every sequence has one."""
    col = rollouts.records.get("record_id")
    if col is None or not bool(col.mask().all()):
        return {}
    return {name: i for i, name in enumerate(rollouts.record_ids())}


def _tokens(rollouts: Rollouts, i: int) -> bytes:
    return np.ascontiguousarray(rollouts.token_ids[rollouts.sequence(i)], dtype=np.int32).tobytes()
