"""`onepolicy explain`: a finding code, a metric, another stack's name of a metric, or a preset."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import typer


def explain(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A finding code, metric, alias or preset. Default: list all.")
    ] = None,
) -> int:
    """What a finding code, a metric or a preset means.

    \b
    Example:
      onepolicy explain kl-above-bound
      onepolicy explain verl:rollout_corr/kl
    """
    from onepolicy.cli.outputs import say

    say("\n".join(_everything() if name is None else _about(name)))
    return 0


def _about(name: str) -> Iterator[str]:
    from onepolicy.codes import CODES, page
    from onepolicy.errors import UnknownName
    from onepolicy.gates import PRESETS
    from onepolicy.metrics import ALIASES, METRICS

    if name in CODES:
        return iter([plain_text(page(name))])
    if name in METRICS or name in ALIASES:
        return _metric(name)
    if name in PRESETS or name.endswith(".toml"):
        return _preset(name)
    raise UnknownName("code, metric or preset", name, [*CODES, *METRICS, *ALIASES, *PRESETS])


def _metric(name: str) -> Iterator[str]:
    from onepolicy.metrics import ALIASES, metric

    m = metric(name)
    yield m.key if m.key == name else f"{name} is {m.key}"
    if name in ALIASES:
        alias = ALIASES[name]
        same = "the same number" if alias.exact else "not the same number"
        yield f"  {alias.origin}: {same}" + (f"; {alias.note}" if alias.note else "")
    for label, said in (
        ("formula", m.formula),
        ("unit", m.unit),
        ("ideal", "none" if m.ideal is None else f"{m.ideal:g}, when the two sides are equal"),
        ("level", m.level),
        ("tokens", _USES.get(m.uses, m.uses)),
        ("source", m.source or "its definition"),
        ("also", ", ".join(n for n, a in ALIASES.items() if a.metric == m.key and n != name)),
    ):
        if said:
            yield f"  {label:<8} {said}"
    yield "  d = log-prob of the scorer minus log-prob of the sampler, r = e^d"


_USES = {
    "scored": "scored by both sides",
    "estimator": "drawn by the sampler, from the distribution that it reports",
    "surprisal_a": "drawn, with the sampler's entropy known",
    "surprisal_b": "drawn, with the scorer's entropy known",
    "exact": "scored by both sides with full distributions",
}


def _preset(name: str) -> Iterator[str]:
    from onepolicy.gates.bounds import load

    preset = load(name)
    yield f"{preset.name}  {preset.about}"
    for b in preset.bounds:
        what = f"|{b.metric}|" if b.absolute else b.metric
        least = f", from {b.min_tokens:,} tokens" if b.min_tokens else ""
        yield f"  {what} <= {b.at_most:g}  {b.when.replace('_', ' ')}{least}"
        if b.otherwise:
            yield f"      where it is not measured: {b.otherwise}"
        yield f"      {b.source} ({b.date})"


def _everything() -> Iterator[str]:
    from onepolicy.codes import CODES
    from onepolicy.gates import PRESETS
    from onepolicy.metrics import ALIASES, METRICS

    yield "Finding codes, in the order of suspicion"
    yield from (f"  {name:<24} {code.title}" for name, code in sorted(CODES.items(), key=lambda item: item[1].rank))
    yield "\nPresets\n  " + "  ".join(PRESETS)
    yield "\nMetrics"
    yield from (f"  {key:<36} {m.formula}" for key, m in METRICS.items())
    yield f"\nand {len(ALIASES)} names of other stacks, as {next(n for n in ALIASES if ':' in n)}"


def plain_text(markdown: str) -> str:
    """A page for the terminal: headings, links and code marks as plain text, fenced blocks indented."""
    out: list[str] = []
    fenced = False
    for line in markdown.strip().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            out.append(f"    {line}".rstrip())
        elif line.startswith("#"):
            out.append(line.lstrip("# ").upper() if line.startswith("## ") else line.lstrip("# "))
        else:
            out.append(_inline(line))
    return "\n".join(out)


def _inline(line: str) -> str:
    line = re.sub(r"\[([^\]]+)\]\((https?://[^)]+)\)", r"\1 (\2)", line)
    line = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", line)
    return line.replace("`", "").replace("**", "")
