"""The gates: bounds as data, each with its source and date, and the procedure that judges them.

To add a bound: one `[[bound]]` table in a preset's TOML. To add a preset: one file and one line here.
"""

from __future__ import annotations

#: name -> file in `presets/`
PRESETS: dict[str, str] = {
    "bitwise": "bitwise.toml",
    "strict": "strict.toml",
    "fp32": "fp32.toml",
    "fp16": "fp16.toml",
    "bf16": "bf16.toml",
    "fp8": "fp8.toml",
    "int8": "int8.toml",
    "floor": "floor.toml",
    "function": "function.toml",
    "leg": "leg.toml",
    "again": "again.toml",
}
#: Presets that ask one question of a check, beside or instead of a pair's absolute bounds.
PARTS = ("floor", "function", "leg", "again")
