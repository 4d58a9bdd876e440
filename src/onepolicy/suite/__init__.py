"""The fixed test set: prompts to draw from and texts to score, the same for everyone, kept apart in every number.

`load` gives a size of it, `fixed_rollouts` and `encoded_prompts` its token ids by an engine's tokenizer. Data: `data/`,
JSON lines, every text written for this project; `items` has the format, `makers` writes the long ones.
"""

from __future__ import annotations

from onepolicy.suite.build import encoded_prompts, fixed_rollouts
from onepolicy.suite.exchange import returned, text_rows
from onepolicy.suite.items import SIZES, Prompt, SuitePrompt, SuiteText
from onepolicy.suite.load import VERSION, Suite, load, own_prompts, read_prompts

__all__ = [
    "CATEGORIES",
    "SIZES",
    "VERSION",
    "Prompt",
    "Suite",
    "SuitePrompt",
    "SuiteText",
    "encoded_prompts",
    "fixed_rollouts",
    "load",
    "own_prompts",
    "read_prompts",
    "returned",
    "text_rows",
]

#: category -> what its items hold; `env_id` of their rollouts.
CATEGORIES: dict[str, str] = {
    "prose": "English: stories, letters, explanations, dialogue",
    "latex": "formulas, theorems, tables, drawings",
    "code": "Python, C, Rust, JavaScript, SQL, shell, Haskell, Go, HTML",
    "json": "JSON, JSON Schema, YAML, CSV",
    "tools": "tool definitions, calls and their results",
    "chinese": "simplified and traditional",
    "japanese": "kanji with both kana, plain and polite",
    "korean": "Hangul, plain and polite",
    "arabic": "with and without vowel signs",
    "hindi": "Devanagari",
    "mixed": "several scripts in one text, both directions",
    "emoji": "joined families, skin tones, flags, keycaps, variation selectors",
    "combining": "composed and decomposed forms of one text, stacked marks, jamo",
    "control": "control characters, zero-width characters, spaces of every width",
    "runs": "long runs of spaces, digits and signs; logs and tables",
    "rare": "rare tokens, and one token over and over",
    "specials": "text that looks like special tokens",
    "certain": "the next token is all but forced: counting, the alphabet, copies",
    "entropy": "nothing helps to guess the next token: random strings, open questions",
    "brief": "replies of one token, and empty ones",
    "chat": "several turns",
    "long-reply": "replies of 1k tokens and more",
    "long-context": "contexts of 1k tokens up to the model's limit",
}
