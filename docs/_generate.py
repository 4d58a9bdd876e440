"""Pages that are generated from tables in the source: `python docs/_generate.py` writes them again."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from onepolicy import corrections, schema, whatif
from onepolicy.cli.explain import SPECIAL_ROWS, joined_bounds, leg_rows, stretch
from onepolicy.codes import CODES, page
from onepolicy.codes.kind import Code
from onepolicy.codes.tokens import TOKENS
from onepolicy.corrections.frameworks import FILES
from onepolicy.corrections.rule import REQUIRED
from onepolicy.dialects import DIALECTS
from onepolicy.dialects.definitions import AVERAGES, DEFINITIONS, TERMS
from onepolicy.dialects.key import Dialect, Key
from onepolicy.dialects.verl_rejection import CRITERIA
from onepolicy.engines import ENGINES
from onepolicy.engines.base import Switch
from onepolicy.engines.fake_faults import FAULTS
from onepolicy.engines.open import engine_class
from onepolicy.estimate import LEAST_CLUSTERS
from onepolicy.formats import FORMATS, loose
from onepolicy.gates import PRESETS
from onepolicy.gates.bounds import Bound, load
from onepolicy.gates.judge import SURPRISAL_LEVEL, TAIL_TOKENS
from onepolicy.integrity import CHECKS
from onepolicy.intervals import CONFIDENCE
from onepolicy.legs import LEGS, SPECIAL
from onepolicy.metrics import METRICS
from onepolicy.metrics.aliases import SURVEY
from onepolicy.metrics.floor import BUCKETS
from onepolicy.metrics.tail import TAIL_HOLDS, TAIL_SHARE, WITHHOLD_ABOVE
from onepolicy.profiles import PROFILES
from onepolicy.signatures import SIGNATURES
from onepolicy.sums import Metric
from onepolicy.testing import CONTRACT

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

_PROCEDURE = f"""\
# Presets

A preset is a set of bounds, each with its source and date. The default is the preset of the coarser of the two declared
dtypes; where one side declares none, there is no default, and `--bounds` must name one. Where a check could measure
what rounding alone does, the default is `floor` besides: a gap must be of that size, *and* within the absolute bounds.
Legs have presets of their own: `function` in float32, `again` for an engine that is asked twice, `leg` for the others.
Your own bounds are a TOML file of the same form, `--bounds mine.toml`:

```toml
about = "What our launch script asks for."

[[bound]]
metric = "kl_sampler_scorer_k3/mean"   # any key of the metrics page, or another stack's name for it
at_most = 0.005
when = "required"                      # or "if_measured", or "alarm": it can only make drift
min_tokens = 2000                      # fewer cannot pass
source = "our last three healthy runs"
date = 2026-11-30
# absolute = true                      # the value's size, for metrics that may be negative
# otherwise = "kl_..."                 # stands in when the metric is not measured
```

## How a bound is judged

- Each mean has a {CONFIDENCE:.0%} limit to each side, from a jackknife that leaves out one cluster at a time (on the
  log scale for metrics that are never negative), with t quantiles at the effective number of clusters,
  (sum n)^2 / sum n^2, less one. Clusters are the coarsest recorded unit: group, else trajectory, else sequence.
- **Pass**: the limit on the bound's side is within the bound, on at least the tokens in the table, and no term was
  infinite or NaN. A report passes when nothing in it is drift, error or inconclusive.
- **Drift**: a one-sided test rejects "the value is within the bound". All such tests of a preset together are wrong at
  most {1 - CONFIDENCE:.0%} of the time (Holm). A failing finding about the record, the tokens or the meaning is drift
  or error by itself.
- **Inconclusive**: neither. A mean on fewer than {LEAST_CLUSTERS} effective clusters always is. Where it can be known,
  the finding says how many tokens and clusters would decide, were the value to stay.
- A maximum has no interval: one violation is drift, and a pass needs the tokens in the table.
- A quantile above p99 informs only, below {TAIL_TOKENS:,} tokens. A mean of ratios with a heavy tail (Pareto k above
  {WITHHOLD_ABOVE:g}, with {TAIL_HOLDS:.0%} of the variance or more in the largest {TAIL_SHARE:.0%}) has no interval,
  so it cannot pass.
- Surprisal is drift when p is at most {SURPRISAL_LEVEL:g} *and* the excess is above its bound: with many tokens
  anything is significant. Where the scorer drifts by another bound, its surprise is explained by that and only noted.
- `required` and not measured is inconclusive; `if_measured` and not measured prints *not covered*.
- *sees* on the screen is the smallest true value that this data would have called drift nine times in ten. Within a
  bound is not harmless: read what the gap does at your reply length.
"""

_ENGINES = """\
# Engines

On the command line: `name:target?key=value&key=value`, in quotes where the shell would read `?` and `&`. Heavy engines
run in a child process, one configuration each. Engines of other packages come through the entry point group
`onepolicy.engines`.

A switch that is *live* can be another at each scoring, without a new start of the engine: [legs](legs.md) change one of
them and score the same ids again.
"""

_FAULTS = """
### Faults of `fake`

`?fault=NAME` shows what a verdict on it looks like, without a model. `weights` and `forward` change the model itself,
`draw` what is drawn, `report` and `record` only what is told; `score` acts when given ids are scored, at some live
switches only; `process` gives no numbers at all.

| fault | where | what it does |
|---|---|---|
"""


_LEGS = """\
# Legs

A leg scores the same ids twice and changes one factor, so what differs is that factor's. `check` runs every leg that
the two engines can; `--legs` and `--skip` choose. `onepolicy explain LEG` prints one.

- *Same function*: both engines in float32, where sound ones agree to about 1e-5 and a wrong setting stands out.
- *Rounding*: in production precision; what differs must be of the size that other kernels of one engine show.
- A leg that an engine has no switch for is listed as not run, and leaves nothing open. One that was tried and failed
  leaves its question open.
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
    """docs/metrics.md, from `METRICS` and `SURVEY`."""
    rows = [
        f"| `{key}` | {m.level} | {_cell(formula)} | {m.unit} | {'' if m.ideal is None else f'{m.ideal:g}'} | "
        f"{_cell(m.source)} |"
        for key, formula, m in _metric_rows()
    ]
    names = [f"| `{name}` | `{a.metric}` |" for name, a in SURVEY.items()]
    return (
        "# Metrics\n\nd = log p_scorer - log p_sampler, r = e^d, means over tokens that the sampler drew. Nothing is "
        "clamped before it is measured.\n\n"
        "| key | level | formula | unit | in health | source |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\n## Other names\n\nA name works wherever a metric's key does. So do the frameworks' own keys, as "
        "`verl:rollout_corr/kl`: [dashboards](dashboards.md) has them, with what each computes otherwise.\n\n"
        "| name | our metric |\n|---|---|\n" + "\n".join(names) + "\n"
    )


def _metric_rows() -> list[tuple[str, str, Metric]]:
    """(key, formula, metric); the stretches of positions of one metric as one row."""
    lows = f"N to the next (N = 0 and powers of two from {BUCKETS[1]} to {BUCKETS[-1]})"
    rows: dict[str, tuple[str, str, Metric]] = {}
    for m in METRICS.values():
        key = stretch(m.key)
        formula = m.formula if key == m.key else re.sub(r"positions .*", f"positions {lows}", m.formula)
        rows.setdefault(key, (key, formula, m))
    return list(rows.values())


def presets_markdown() -> str:
    """docs/presets.md, from the TOML files."""
    parts = [_PROCEDURE]
    for name in PRESETS:
        preset = load(name)
        parts.append(f"\n## {name}\n\n{preset.about}\n\n| bounded | at most | when | tokens | source | date |\n")
        parts.append("|---|---|---|---|---|---|\n")
        parts += [
            f"| {_bounded(m, b)} | {b.at_most:g} | {b.when} | {b.min_tokens or ''} | {_cell(b.source)} | {b.date} |\n"
            for m, b in joined_bounds(preset.bounds)
        ]
    return "".join(parts)


def _bounded(metric: str, bound: Bound) -> str:
    """What is held against the bound: the metric, or its size, or what stands in for it."""
    name = f"size of `{metric}`" if bound.absolute else f"`{metric}`"
    return f"{name} (else `{bound.otherwise}`)" if bound.otherwise else name


def engines_markdown() -> str:
    """docs/engines.md, from each engine's switches."""
    parts = [_ENGINES]
    for name in ENGINES:
        cls = engine_class(name)
        can = [word for word, yes in (("samples", cls.SAMPLES), ("scores", cls.SCORES)) if yes]
        parts.append(f"\n## {name}\n\n{_about(sys.modules[cls.__module__])}\n\n")
        parts.append(f"It {' and '.join(can)}{', in a child process' if cls.HEAVY else ''}.\n\n")
        parts.append("| switch | default | choices | what it changes |\n|---|---|---|---|\n")
        parts += [_switch_row(key, switch) for key, switch in cls.SWITCHES.items()]
    rows = [f"| `{name}` | {fault.stage} | {_cell(fault.meaning)} |\n" for name, fault in FAULTS.items()]
    return "".join([*parts, _FAULTS, *rows])


def _about(module: ModuleType) -> str:
    """The text above an engine's code, as one paragraph a paragraph."""
    paragraphs = inspect.cleandoc(module.__doc__ or "").split("\n\n")
    return "\n\n".join(p.replace("\n", " ") for p in paragraphs)


def _switch_row(key: str, switch: Switch) -> str:
    default = f"`{switch.default}`" if switch.default != "" else ""
    choices = ", ".join(f"`{c}`" for c in switch.choices if c)
    live = " *live*" if switch.live else ""
    return f"| `{key}`{live} | {default} | {choices} | {_cell(switch.meaning)} |\n"


def legs_markdown() -> str:
    """docs/legs.md, from the tables of legs."""
    table = "| leg | compares | finds | needs |\n|---|---|---|---|\n"
    parts = [_LEGS]
    for question in dict.fromkeys(leg.question for leg in LEGS.values()):
        parts.append(f"\n## {question.value.capitalize()}\n\n{table}")
        parts += [_leg_row(key, leg_rows(leg), leg.code) for key, leg in LEGS.items() if leg.question is question]
    parts.append(f"\n## Meaning and staleness\n\n{table}")
    parts += [
        _leg_row(key, {"compares": said, **SPECIAL_ROWS[key]}, SPECIAL_ROWS[key]["finds"])
        for key, said in SPECIAL.items()
    ]
    return "".join(parts)


def _leg_row(key: str, rows: Mapping[str, str], code: str) -> str:
    finds = f"[{code}](codes.md#{code})" if code else "it informs"
    return f"| `{key}` | {_cell(rows['compares'])} | {finds} | {_cell(rows['needs'])} |\n"


def codes_markdown() -> str:
    """docs/codes.md: every code by rank, with its page; those of the tokens apart."""
    parts = [
        "# Finding codes\n\nIn the order of suspicion. `fail` makes a drift or an error, `warn` is shown, `info` is "
        "a note; a finding may weigh more or less than its code where the case asks for it. `onepolicy explain CODE` "
        "prints a page.\n"
    ]
    others = {code: spec for code, spec in CODES.items() if code not in TOKENS}
    rooms = [_by_rank(codes) for codes in (others, TOKENS)]
    for title, codes in zip(("Codes of log-probs", "Codes of tokens"), rooms, strict=True):
        parts.append(f"\n## {title}\n\n| code | rank | severity | outcome | what it says |\n|---|---|---|---|---|\n")
        parts += [
            f"| [{c}](#{c}) | {s.rank} | {s.severity} | {s.outcome} | {_cell(s.title)} |\n" for c, s in codes.items()
        ]
    for code in (*rooms[0], *rooms[1]):
        # a page's own headings go one level down, below its code
        text = re.sub(r"^(#+) ", r"#\1 ", page(code).strip(), flags=re.M)
        parts.append(f"\n{text}\n")
    return "".join(parts)


def _by_rank(codes: Mapping[str, Code]) -> dict[str, Code]:
    return dict(sorted(codes.items(), key=lambda item: item[1].rank))


def corrections_markdown() -> str:
    """docs/corrections.md: its own prose, with the tables between `<!-- table: x -->` and `<!-- end -->` made anew."""
    tables = {
        "corrections": _corrections_table,
        "effects": lambda: _two_columns("name", "what it is", corrections.EFFECTS),
        "presets": _correction_presets,
        "contract": lambda: _two_columns("rule", "broken, it says", CONTRACT),
    }
    return _filled("corrections.md", tables)


def _filled(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A page's own prose, with its tables made anew."""
    text = (HERE / page).read_text(encoding="utf-8")
    for name, table in tables.items():
        marked = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.S)
        found = marked.search(text)
        if not found:
            raise SystemExit(f"docs/{page}: no place for the table {name!r}")
        text = f"{text[: found.start()]}{found[1]}\n{table()}\n{found[2]}{text[found.end() :]}"
    return text


def dashboards_markdown() -> str:
    """docs/dashboards.md: its own prose, with the frameworks' keys and the definitions from their tables."""
    return _filled("dashboards.md", {"keys": _dialects, "definitions": _definitions})


def _dialects() -> str:
    return "\n".join(_dialect(d) for d in DIALECTS.values())


def _dialect(d: Dialect) -> str:
    """One framework: what it was read in, its options, its keys."""
    own = [k for k in d.options if k not in ("scorer", "precision")]
    options = [f"`{k}` {_default(d.options[k].default)} ({_cell(d.options[k].says)})" for k in own]
    parts = [
        f"### {d.title}\n\n`--as {d.name}`. Read in {d.read}; checked against {d.checked}. The scorer is "
        f"`{d.options['scorer'].default}` by default. {_plain(d.note)}".rstrip()
        + "\n\n",
        f"Options and defaults: {'; '.join(options)}.\n\n" if options else "",
        "| key | what it is | direction | quirks | our metric |\n|---|---|---|---|---|\n",
    ]
    rows: dict[str, str] = {}
    for key in d.keys.values():
        name, row = _key_row(key)
        rows.setdefault(name, row)
    return "".join([*parts, *rows.values()])


def _default(x: Any) -> str:
    return "none" if x is None else str(x).lower() if isinstance(x, bool) else str(x)


def _key_row(key: Key) -> tuple[str, str]:
    """(its name, its row); verl has the same keys for each of its criteria, which are one."""
    ours = f"`{key.ours}`" + ("" if key.same else ", another number") if key.ours else ""
    name, says, direction = key.name, key.says, key.direction
    if criterion := next((c for c in CRITERIA if f"_{c}_" in name), None):
        name, says = name.replace(f"_{criterion}_", "_{criterion}_"), says.removeprefix(f"{criterion}: ")
        direction = "k1: -d, then the bounds; k2, k3: KL(sampler || scorer)"
    return name, f"| `{name}` | {_plain(says)} | {_plain(direction)} | {_plain(key.quirks)} | {ours} |\n"


def _definitions() -> str:
    parts = ["| definition | what it is | mean over |\n|---|---|---|\n"]
    averages = ", ".join(AVERAGES)
    parts += [f"| `{name}/...` | {_plain(says)} | {averages} |\n" for name, (says, _, _) in TERMS.items()]
    averaged = {f"{name}/{average}" for name in TERMS for average in AVERAGES}
    others = [k for k in DEFINITIONS.keys.values() if k.name not in averaged]
    return "".join([*parts, *(f"| `{k.name}` | {_plain(k.says)} |  |\n" for k in others)])


def formats_markdown() -> str:
    """docs/formats.md: its own prose, and each reader as its module describes it."""
    return _filled("formats.md", {"formats": _formats, "spellings": _spellings})


def _formats() -> str:
    """Each format in the order in which they are asked."""
    modules: dict[str, Any] = {name: importlib.import_module(path) for name, path in FORMATS.items()}
    rows = [f"| [{name}](#{name}) | {_unformatted(_cell(m.says))} |\n" for name, m in modules.items()]
    parts = ["| reader | what it reads |\n|---|---|\n", *rows]
    parts += [f"\n### {name}\n\n{_unformatted(_about(m))}\n" for name, m in modules.items()]
    return "".join(parts)


def _spellings() -> str:
    """Names that the reader of loose records knows, by our column."""
    known: dict[str, list[str]] = {}
    for name, column in {**loose.COLUMNS, **loose.LISTS}.items():
        known.setdefault(column, []).append(name)
    known |= {column: list(names) for column, (names, _) in loose.FACTS.items()}
    ids = {"ids of the prompt": loose.PROMPT_IDS, "ids of the reply": loose.REPLY_IDS, "ids of both": loose.WHOLE_IDS}
    rows = [*ids.items(), *((f"`{column}`", names) for column, names in known.items())]
    cells = (f"| {column} | {', '.join(f'`{n}`' for n in names)} |\n" for column, names in rows)
    return "".join(["| our column | names that are known |\n|---|---|\n", *cells])


def _unformatted(text: str) -> str:
    """Prose in which Markdown would read an asterisk outside of code as emphasis."""
    return re.sub(r"(`[^`]*`)|\*", lambda found: found[1] or "\\*", text)


def audit_markdown() -> str:
    """docs/audit.md: its own prose, with the checks, causes, profiles and replays from their tables."""
    tables = {"checks": _checks, "signatures": _signatures, "profiles": _profiles, "replays": _replays}
    return _filled("audit.md", tables)


def _checks() -> str:
    """What each check of the record looks for: its docstring's first sentence."""
    return _two_columns("check", "what it looks for", {k: _about(m).split("\n\n")[0] for k, m in CHECKS.items()})


def _signatures() -> str:
    """The causes that are read from the shape of the data, in the order of their table."""
    parts = ["| cause | finding | what it says | needs | told apart from |\n|---|---|---|---|---|\n"]
    for key, s in SIGNATURES.items():
        rivals = ", ".join(f"`{r}`" for r in s.rivals)
        needs = _plain(", ".join(s.needs))
        parts.append(f"| `{key}` | [{s.code}](codes.md#{s.code}) | {_plain(s.says)} | {needs} | {rivals} |\n")
    return "".join(parts)


def _profiles() -> str:
    parts = ["| profile | the gap by | needs |\n|---|---|---|\n"]
    return "".join([*parts, *(f"| `{key}` | {_plain(p.title)} | {_plain(p.needs)} |\n" for key, p in PROFILES.items())])


def _replays() -> str:
    """What is replayed; `m2po` is read off the histogram."""
    parts = ["| row | the same as | needs |\n|---|---|---|\n"]
    rows = {name: call for name, (_, call) in whatif.REPLAYS.items()} | {"m2po": f"m2po(at_most={whatif.M2PO})"}
    needs = lambda name: "advantages" if name in whatif.SIGNED else ""
    return "".join([*parts, *(f"| `{name}` | `{call}` | {needs(name)} |\n" for name, call in rows.items())])


def _two_columns(first: str, second: str, rows: Mapping[str, str]) -> str:
    return f"| {first} | {second} |\n|---|---|\n" + "".join(f"| `{k}` | {_cell(v)} |\n" for k, v in rows.items())


def _corrections_table() -> str:
    """What each docstring says first, and its sentences about papers and defaults; numbers are the table's comments."""
    numbers = dict(re.findall(r'"(\w+)": \w+,  # (\d+)', inspect.getsource(corrections)))
    parts = ["| no. | correction | what it does | options | default and source |\n|---|---|---|---|---|\n"]
    for name, correct in corrections.CORRECTIONS.items():
        first, *rest = inspect.cleandoc(correct.__doc__ or "").split("\n\n")
        sentences = re.split(r"(?<=\.)\s+(?=[A-Za-z`])", " ".join(rest).replace("\n", " "))
        source = " ".join(x for x in sentences if _SOURCES.search(x))
        cells = (numbers[name], f"`{name}`", _plain(first), _options(correct.options), _plain(source))
        parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


_SOURCES = re.compile(r"\b(Paper|Source|[Dd]efaults?|verl|slime|SkyRL|NeMo-RL|AReaL|TRL|OpenRLHF|ROLL|open-instruct)\b")


def _options(options: Mapping[str, Any]) -> str:
    """As they are written in a call."""
    said = {k: f"={v!r}".replace("'", '"') for k, v in options.items()}
    return ", ".join(f"`{k}` *needed*" if v is REQUIRED else f"`{k}{said[k]}`" for k, v in options.items())


def _plain(text: str) -> str:
    """A cell; outside code, `*` would start emphasis."""
    return _cell(text.replace("\n", " ").replace(" * ", " \\* "))


def _correction_presets() -> str:
    """One table a framework, from the TOML files."""
    parts: list[str] = []
    for framework, file in FILES.items():
        text = (resources.files("onepolicy.corrections") / "presets" / file).read_text(encoding="utf-8")
        data = tomllib.loads(text)
        parts.append(f"### {data['framework']}\n\n{data['version']}, as of {data['date']}; {data['file']}; checked ")
        parts.append(f"{data['checked']}. {_plain(data.get('note', '').strip())}".strip() + "\n\n")
        parts.append("| preset | mode | denominator | options | applies | note |\n|---|---|---|---|---|---|\n")
        parts += [_preset_row(f"{framework}:{name}", table) for name, table in data["preset"].items()]
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


def _preset_row(name: str, table: Mapping[str, Any]) -> str:
    made = corrections.preset(name)
    note = table.get("note", "").strip() + (" *like_origin*" if "like_origin" in str(table["stage"]) else "")
    options = _options(table.get("options", {}))
    stages = " then ".join(f"`{stage.name}`" for stage in made.stages) or "nothing"
    return f"| `{name}` | {made.mode or 'either'} | {made.denominator} | {options} | {stages} | {_plain(note)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


#: page -> its content
PAGES = {
    "columns.md": columns_markdown,
    "metrics.md": metrics_markdown,
    "presets.md": presets_markdown,
    "engines.md": engines_markdown,
    "codes.md": codes_markdown,
    "legs.md": legs_markdown,
    "corrections.md": corrections_markdown,
    "dashboards.md": dashboards_markdown,
    "formats.md": formats_markdown,
    "audit.md": audit_markdown,
}

if __name__ == "__main__":
    for name, content in PAGES.items():
        (HERE / name).write_text(content(), encoding="utf-8")
