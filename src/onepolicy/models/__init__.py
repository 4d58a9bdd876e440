"""Model directories that ship inside the package, by name.

`tiny` is a Llama of about a million parameters with a tokenizer and a chat template: enough to drive both
engines on a CPU, without a network. `tiny-moe` is its mixture-of-experts sibling: a Qwen3-MoE with the same tokenizer,
eight experts a layer of which two run. Their MODEL_CARD.md say what they were trained on and how well.
"""

from __future__ import annotations

from pathlib import Path

MODELS: dict[str, str] = {"tiny": "tiny", "tiny-moe": "tiny_moe"}


def path(name: str) -> str:
    """The directory of a packaged model.

    >>> path("tiny").endswith("tiny")
    True
    """
    if name not in MODELS:
        from onepolicy.errors import UnknownName  # imported here: a known name needs nothing else of the package

        raise UnknownName("packaged model", name, MODELS)
    return str(Path(__file__).resolve().parent / MODELS[name])
