"""Pages that are generated from tables in the source: `python docs/_generate.py` writes them again."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from onepolicy import schema
from onepolicy.codes import CODES, page
from onepolicy.engines import ENGINES
from onepolicy.engines.open import engine_class
from onepolicy.gates import PRESETS
from onepolicy.gates.bounds import load
from onepolicy.metrics import METRICS
from onepolicy.metrics.aliases import ALIASES

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


def metrics_markdown() -> str:
    """docs/metrics.md, from `METRICS` and `ALIASES`."""
    rows = [
        f"| `{m.key}` | {m.level} | {_cell(m.formula)} | {m.unit} | {'' if m.ideal is None else f'{m.ideal:g}'} | "
        f"{_cell(m.source)} |"
        for m in METRICS.values()
    ]
    names = [
        f"| `{name}` | {a.origin} | `{a.metric}` | {'yes' if a.exact else 'no'} | {_cell(a.note)} |"
        for name, a in ALIASES.items()
    ]
    return (
        "# Metrics\n\nd = log p_scorer - log p_sampler, r = e^d, means over tokens that the sampler drew. Nothing is "
        "clamped before it is measured.\n\n"
        "| key | level | formula | unit | in health | source |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\n## Other stacks' names\n\nA name works wherever a metric's key does. *Same number*: no means that the "
        "framework computes something else under that name; the note says what.\n\n"
        "| name | whose | our metric | same number | note |\n|---|---|---|---|---|\n" + "\n".join(names) + "\n"
    )


def presets_markdown() -> str:
    """docs/presets.md, from the TOML files."""
    parts = [
        "# Presets\n\nThe default is the preset of the coarser of the two declared dtypes. "
        "Your own bounds are a TOML file of the same form: `--bounds mine.toml`.\n"
    ]
    for name in PRESETS:
        preset = load(name)
        parts.append(f"\n## {name}\n\n{preset.about}\n\n| metric | at most | when | tokens | source | date |\n")
        parts.append("|---|---|---|---|---|---|\n")
        parts += [
            f"| `{b.metric}`{f' (else `{b.otherwise}`)' if b.otherwise else ''} | {b.at_most:g} | {b.when} | "
            f"{b.min_tokens or ''} | {_cell(b.source)} | {b.date} |\n"
            for b in preset.bounds
        ]
    return "".join(parts)


def engines_markdown() -> str:
    """docs/engines.md, from each engine's switches."""
    parts = [
        "# Engines\n\nOn the command line: `name:target?key=value&key=value`. Heavy engines run in a child process.\n"
    ]
    for name in ENGINES:
        cls = engine_class(name)
        does = " and ".join(word for word, can in (("samples", cls.SAMPLES), ("scores", cls.SCORES)) if can)
        about = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        parts.append(f"\n## {name}\n\n{about} It {does}{', in a child process' if cls.HEAVY else ''}.\n\n")
        parts.append("| switch | default | choices | what it changes |\n|---|---|---|---|\n")
        parts += [
            f"| `{key}` | `{s.default}` | {', '.join(f'`{c}`' for c in s.choices)} | {_cell(s.meaning)} |\n"
            for key, s in cls.SWITCHES.items()
        ]
    return "".join(parts)


def codes_markdown() -> str:
    """docs/codes.md: every code by rank, with its page."""
    parts = [
        "# Finding codes\n\nIn the order of suspicion. `fail` makes a drift or an error, `warn` is shown, `info` is "
        "a note. `onepolicy explain CODE` prints a page.\n"
    ]
    ordered = sorted(CODES.items(), key=lambda item: item[1].rank)
    parts += ["\n| code | rank | severity | outcome | what it says |\n|---|---|---|---|---|\n"]
    parts += [f"| [{c}](#{c}) | {s.rank} | {s.severity} | {s.outcome} | {_cell(s.title)} |\n" for c, s in ordered]
    for code, _ in ordered:
        # a page's own headings go one level down, below its code
        text = re.sub(r"^(#+) ", r"#\1 ", page(code).strip(), flags=re.M)
        parts.append(f"\n{text}\n")
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


#: page -> its content
PAGES = {
    "columns.md": columns_markdown,
    "metrics.md": metrics_markdown,
    "presets.md": presets_markdown,
    "engines.md": engines_markdown,
    "codes.md": codes_markdown,
}

if __name__ == "__main__":
    for name, content in PAGES.items():
        (HERE / name).write_text(content(), encoding="utf-8")
