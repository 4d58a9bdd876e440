"""Engines that misbehave on purpose, hosted in real workers by test_worker.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from onepolicy.engines.base import Switch
from onepolicy.errors import ContentError, UnknownName
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values


class OddEngine:
    NAME, SAMPLES, SCORES, HEAVY = "odd", False, True, True
    SWITCHES = {"mode": Switch(str, "good", "how it misbehaves")}  # noqa: RUF012
    ENVIRONMENT = {"ODD_DEFAULT": "set"}  # noqa: RUF012

    def __init__(self, target: str, mode: str = "good") -> None:
        print("starting", target)
        if mode == "no-start":
            raise ContentError("this engine never starts")
        self.mode, self.calls = mode, 0
        self.child = subprocess.Popen(["sleep", "1000"]) if mode in ("parent", "slow") else None

    def fingerprint(self) -> dict[str, Any]:
        return {"child": self.child.pid if self.child else None, "env": os.environ["ODD_DEFAULT"], "inf": float("inf")}

    def encode(self, prompts: list[Any]) -> Any:
        if self.mode == "unpackable":
            return object()
        raise UnknownName("colour", "gren", ["green", "red"])

    def decode(self, ids: list[int]) -> Any:
        raise ZeroDivisionError("first line\nsecond line")

    def score(self, rollouts: Rollouts, *, distributions: bool = False) -> Scoring:
        self.calls += 1
        print('noise on stdout {"hello": 1}')
        sys.stdout.buffer.write(b"\x00\x01\xff" * 1000 + b"\n")
        sys.stdout.flush()
        if self.mode == "slow" and self.calls > 1:
            time.sleep(600)
        if self.mode == "exit":
            print("\x1b[31mfatal: the weights are cursed\x1b[0m", file=sys.stderr, flush=True)
            os._exit(3)
        return Scoring(Values(-rollouts.token_ids.astype(np.float64)), semantics="raw", dtype="float32")

    def close(self) -> None:
        pass
