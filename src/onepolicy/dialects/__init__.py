"""The translator: each framework's metric keys, computed its own way, quirks included and named.

    numbers = accumulate.Accumulator("verl", {"rollout_is": "token"})
    for step, batch in view.views(rollouts):
        numbers.add(batch, step)
    numbers.rows()

To add a framework: a file with its keys, a line here, and a test against its code or numbers worked by hand.
"""

from __future__ import annotations

from onepolicy.dialects.areal import AREAL
from onepolicy.dialects.key import Dialect, Key
from onepolicy.dialects.miles import MILES
from onepolicy.dialects.ms_swift import MS_SWIFT
from onepolicy.dialects.nemo_rl import NEMO_RL
from onepolicy.dialects.open_instruct import OPEN_INSTRUCT
from onepolicy.dialects.openrlhf import OPENRLHF
from onepolicy.dialects.prime_rl import PRIME_RL
from onepolicy.dialects.roll import ROLL
from onepolicy.dialects.skyrl import SKYRL
from onepolicy.dialects.slime import SLIME
from onepolicy.dialects.tinker import TINKER
from onepolicy.dialects.torchtitan import TORCHTITAN
from onepolicy.dialects.trl import TRL
from onepolicy.dialects.tunix import TUNIX
from onepolicy.dialects.verl import VERL
from onepolicy.errors import UnknownName

DIALECTS: dict[str, Dialect] = {
    "verl": VERL,
    "trl": TRL,
    "slime": SLIME,
    "miles": MILES,
    "nemo_rl": NEMO_RL,
    "prime_rl": PRIME_RL,
    "skyrl": SKYRL,
    "openrlhf": OPENRLHF,
    "areal": AREAL,
    "roll": ROLL,
    "ms_swift": MS_SWIFT,
    "open_instruct": OPEN_INSTRUCT,
    "torchtitan": TORCHTITAN,
    "tunix": TUNIX,
    "tinker": TINKER,
}


def of(name: str) -> Dialect:
    """The dialect of that name. Errors: `UnknownName` (did you mean)."""
    if name not in DIALECTS:
        raise UnknownName("dialect", name, DIALECTS)
    return DIALECTS[name]


def key_of(name: str) -> tuple[Dialect, Key] | None:
    """The dialect and key of `verl:rollout_corr/kl`, by any spelling of the key; None for no such name."""
    whose, _, key = name.partition(":")
    dialect = DIALECTS.get(whose)
    return (dialect, dialect.key(key)) if dialect is not None and key in dialect.names else None


def key_names() -> list[str]:
    """Every `dialect:key`."""
    return [f"{d.name}:{key}" for d in DIALECTS.values() for key in d.keys]
