"""Rollout dumps: which files are whose, and each sequence as the dump has it.

To add one: a module as `base` describes, and one line in `FORMATS`. They are asked in this order.
"""

from __future__ import annotations

#: name -> module (imported when it is needed)
FORMATS: dict[str, str] = {
    "slime": "onepolicy.formats.slime",
    "skyrl": "onepolicy.formats.skyrl",
    "verl": "onepolicy.formats.verl",
    "roll": "onepolicy.formats.roll",
    "npz": "onepolicy.formats.npz",
    "prime_rl": "onepolicy.formats.prime_rl",
    "nemo_rl": "onepolicy.formats.nemo_rl",
    "open_instruct": "onepolicy.formats.open_instruct",
    "torchtitan": "onepolicy.formats.torchtitan",
    "verifiers": "onepolicy.formats.verifiers",
    "engine": "onepolicy.formats.engine_responses",
    "miles_debug": "onepolicy.formats.miles_debug",
    "canonical": "onepolicy.formats.canonical",
    "text": "onepolicy.formats.text_dumps",
    "loose": "onepolicy.formats.loose",
}
