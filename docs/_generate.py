"""Pages that are generated from tables in the source: `python docs/_generate.py` writes them again."""

from __future__ import annotations

from pathlib import Path

from onepolicy import schema

HERE = Path(__file__).resolve().parent

_LEVELS = {
    "token": ("One value a token", "list", "a list as long as `token_ids`"),
    "record": ("One value a sequence", "value", "a value"),
    "token_list": ("A list a token", "list of lists", "a list of lists (or nulls) as long as `token_ids`"),
    "record_list": ("A list a sequence", "list", "a list"),
}

_INTRO = """\
# Columns

The column contract: what rollouts can carry, in Parquet, in JSON lines and in Python. A sequence is a prompt and its
reply; it is the atom, nothing ever cuts one. Only `token_ids` is required, but a comparison needs two scorings.

- Position i of a token column belongs to token i, given the tokens before it. Index 0 has no context, so its log-prob
  is null. A column of log-probs has exactly as many values as `token_ids`.
- Missing is null, never 0.0. Null, NaN and the infinities are kept apart.
- Log-probs, entropies and varentropies are in nats.
- Any other scoring has columns of its own: `<name>_logprobs`, `<name>_entropy`, `<name>_varentropy`. Its name is of
  letters, digits and `_`.
- Names that start with `x_` are yours and are ignored. Any other name that is not below is refused.
- `drawn` that is not given is `position >= prompt_length`; without `prompt_length`, nothing is drawn.

In Parquet one row is a sequence, and the file's metadata has `onepolicy.schema` (`1`) and `onepolicy.scorings`, the
JSON of what is declared of each scoring: `{name: {semantics, dtype, fingerprint, scoring_id}}`. In JSON lines one line
is a sequence, with the same declarations under the key `scorings` of the first line (any line will do, if all agree),
and under `float32` the names of the columns that are held in single precision. Non-finite numbers are written as
`"NaN"`, `"Infinity"` and `"-Infinity"`.

`semantics` and `logprob_semantics` are one of `raw` (before temperature, penalties and truncation), `temperature`
(logits divided by the temperature, whole vocabulary) and `processed` (after temperature, penalties and truncation,
renormalised over what was kept).
"""


def columns_markdown() -> str:
    """docs/columns.md, from `schema.COLUMNS`."""
    parts = [_INTRO]
    for level, (title, parquet, jsonl) in _LEVELS.items():
        rows = [_row(name) for name in schema.COLUMNS if schema.COLUMNS[name].level == level]
        head = f"\n## {title}\n\nParquet: a {parquet}. JSON: {jsonl}.\n\n"
        parts.append(head + "\n".join(["| column | type | null means | meaning |", "|---|---|---|---|", *rows]) + "\n")
    return "".join(parts)


def _row(name: str) -> str:
    spec = schema.COLUMNS[name]
    kind = "float32 or float64" if spec.dtype == "float" else spec.dtype
    required = " **Required.**" if spec.required else ""
    return f"| `{name}` | {kind} | {spec.null} | {spec.meaning}{required} |"


#: page -> its content
PAGES = {"columns.md": columns_markdown}

if __name__ == "__main__":
    for page, content in PAGES.items():
        (HERE / page).write_text(content(), encoding="utf-8")
