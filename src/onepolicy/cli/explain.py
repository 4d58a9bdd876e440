"""`onepolicy explain`: a finding code, a metric, another stack's name of a metric, a leg, or a preset."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from onepolicy.dialects.key import Dialect, Key
    from onepolicy.gates.bounds import Bound
    from onepolicy.legs.base import Leg, Want


def explain(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A finding code, metric, alias, leg or preset. Default: list all."),
    ] = None,
) -> int:
    """What a finding code, a metric, a leg or a preset means.

    \b
    Example:
      onepolicy explain kl-above-bound
      onepolicy explain verl:rollout_corr/kl
      onepolicy explain scorer-packing
    """
    from onepolicy.cli.outputs import say

    say("\n".join(_everything() if name is None else _about(name)))
    return 0


def _about(name: str) -> Iterator[str]:
    from onepolicy.codes import CODES, page
    from onepolicy.dialects import key_names, key_of
    from onepolicy.errors import UnknownName
    from onepolicy.gates import PRESETS
    from onepolicy.legs import LEGS, SPECIAL
    from onepolicy.metrics import ALIASES, METRICS

    if name in CODES:
        return iter([plain_text(page(name))])
    if key_of(name) is not None:
        return _translated(name)
    if name in METRICS or name in ALIASES:
        return _metric(name)
    if name in LEGS:
        return _rows(name, leg_rows(LEGS[name]))
    if name in SPECIAL:
        return _rows(name, {"compares": SPECIAL[name], **SPECIAL_ROWS.get(name, {})})
    if name in PRESETS or name.endswith(".toml"):
        return _preset(name)
    known = [*CODES, *METRICS, *ALIASES, *key_names(), *LEGS, *SPECIAL, *PRESETS]
    raise UnknownName("code, metric, leg or preset", name, known)


def _rows(title: str, rows: Mapping[str, str]) -> Iterator[str]:
    yield title
    yield from (f"  {label:<8} {said}" for label, said in rows.items() if said)


def _metric(name: str) -> Iterator[str]:
    from onepolicy.metrics import ALIASES, metric

    m = metric(name)
    yield m.key if m.key == name else f"{name} is {m.key}"
    if name in ALIASES:
        alias = ALIASES[name]
        yield f"  {alias.origin}: {_sameness(alias.exact, alias.note)}"
    yield from _metric_rows(m.key, besides=name)
    yield _SIGNS


_SIGNS = "  d = log-prob of the scorer minus log-prob of the sampler, r = e^d"


def _sameness(exact: bool, note: str) -> str:
    return ("the same number" if exact else "not the same number") + (f"; {note}" if note else "")


def _metric_rows(key: str, besides: str) -> Iterator[str]:
    from onepolicy.dialects import key_names
    from onepolicy.metrics import ALIASES, METRICS

    m, spelled = METRICS[key], set(key_names())
    others = {n: a for n, a in ALIASES.items() if a.metric == key and n != besides and (":" not in n or n in spelled)}
    for label, said in (
        ("formula", m.formula),
        ("unit", m.unit),
        ("ideal", "none" if m.ideal is None else f"{m.ideal:g}, when the two sides are equal"),
        ("level", m.level),
        ("tokens", _USES.get(m.uses, m.uses)),
        ("source", m.source or "its definition"),
        ("also", ", ".join(n for n, a in others.items() if a.exact)),
        ("near", ", ".join(n for n, a in others.items() if not a.exact)),
    ):
        if said:
            yield f"  {label:<8} {said}"


def _translated(name: str) -> Iterator[str]:
    """A framework's key: what it is, in which direction, its quirks, and our metric with the difference."""
    from onepolicy.dialects import key_of

    found = key_of(name)
    assert found is not None
    dialect, key = found
    nearest = f"{name} is {'' if key.same else 'near, but not, '}{key.ours}"
    yield nearest if key.ours else f"{name}, a key of {dialect.title}"
    yield f"  {dialect.title}: {_sameness(key.same, key.quirks) if key.ours else key.quirks or 'no metric of ours'}"
    yield from (f"  {label:<8} {said}" for label, said in key_rows(dialect, key).items() if said)
    if key.ours:
        yield f"  ours     {key.ours}"
        yield from _metric_rows(key.ours, besides=name)
    yield _SIGNS


def key_rows(dialect: Dialect, key: Key) -> dict[str, str]:
    """What a dialect says of a key, by label; also of the docs."""
    whose = dialect.options["scorer"].default
    columns = key.columns(dialect.resolve())
    policy = f"the scorer is {whose}" if "scorer" in columns else ""
    needs = [whose if name == "scorer" else name for name in columns]
    options = "" if key.shown(dialect.resolve()) else f"only with options set, of {', '.join(dialect.options)}"
    return {
        "says": key.says,
        "compares": "; ".join(x for x in (key.direction, policy) if x),
        "needs": ", ".join(dict.fromkeys(n if n in _WHOLE else f"{n} log-probs" for n in needs)),
        "logged": options,
        "read in": f"{dialect.title} {dialect.read}; checked against {dialect.checked}",
    }


_WHOLE = ("entropy", "advantages")
_USES = {
    "scored": "scored by both sides",
    "estimator": "drawn by the sampler, from the distribution that it reports",
    "surprisal_a": "drawn, with the sampler's entropy known",
    "surprisal_b": "drawn, with the scorer's entropy known",
    "exact": "scored by both sides with full distributions",
    "position": "scored by both sides, at these places of their sequences",
    "floor": "scored by both sides, where the rounding that is predicted at the token is known",
}


# -- legs --------------------------------------------------------------------------------------------------------------

_OVER = {
    "drawn": "all drawn tokens",
    "some": "drawn tokens of some sequences, each of another prompt",
    "texts": "the suite's fixed texts",
}
_ASKS = {
    "same function": "same function: in float32 a wrong setting stands out a thousandfold",
    "rounding": "rounding: is it of the size that other kernels of one engine show?",
}
#: The legs that are no pair of scorings, in the same rows.
SPECIAL_ROWS = {
    "contract": {
        "asks": "meaning: which of temperature, truncation and penalties is in the reported log-probs?",
        "over": "short replies drawn for it, one setting at a time",
        "finds": "logprob-contract",
        "needs": "a sampler that draws, and a scorer that computes log-probs with and without a setting",
    },
    "routes": {
        "asks": "rounding: do the two engines choose other experts more often than two kernels of the scorer do?",
        "over": "all drawn tokens, each at the position that predicts it",
        "finds": "routes-differ",
        "needs": "a mixture model, and routes=true on both engines",
    },
    "step-0": {
        "asks": "staleness: are a trainer's own values one policy before its first update?",
        "over": "drawn tokens that are trained on",
        "finds": "not-at-step-zero",
        "needs": "old and current (or reference) log-probs in the rollouts",
    },
}


def leg_rows(leg: Leg) -> dict[str, str]:
    """The question, the changed factor, both scorings, bounds, finding, and the engines that can run it."""
    from onepolicy.codes import CODES

    bounds = (
        f"preset {leg.bounds}" if leg.bounds else "preset leg where the floor is known, else those of the precision"
    )
    return {
        "asks": _ASKS.get(leg.question.value, leg.question.value),
        "compares": leg.factor,
        "first": _scoring(leg.a),
        "second": _scoring(leg.b),
        "over": _OVER.get(leg.on, leg.on) + (", at temperature 1 without truncation" if leg.raw else ""),
        "bounds": bounds if leg.code else "none: it informs",
        "finds": f"{leg.code}: {CODES[leg.code].title}" if leg.code else "",
        "needs": "; ".join(_needs(leg, side) for side in dict.fromkeys((leg.a.side, leg.b.side))),
    }


def _scoring(want: Want) -> str:
    if want.recorded:
        return "the sampler's values, recorded with the draw"
    loaded = ", ".join(f"{k}={'its own' if v == '{dtype}' else v}" for k, v in want.load.items())
    using = " or ".join(", ".join(_setting(k, v) for k, v in choice.items()) or "as it is" for choice in want.using)
    said = [f"loaded with {loaded}"] * bool(loaded) + [using] * (using != "as it is")
    return ": ".join([f"the {want.side}", ", ".join(said)]) if said else f"the {want.side}"


def _setting(name: str, value: Any) -> str:
    from onepolicy.legs.base import Other

    return f"another {name} ({', '.join(value.values)})" if isinstance(value, Other) else f"{name}={value}".lower()


def _needs(leg: Leg, side: str) -> str:
    """The switches that the side's engine needs for the leg, and the engines that have them."""
    wants = [w for w in (leg.a, leg.b) if w.side == side and not w.recorded]
    if not wants:
        return f"the {side}'s recorded values"
    switches = list(dict.fromkeys(said for w in wants if (said := _switches(w))))
    if not switches:
        return f"any {side}"
    return (
        f"a {side} with {', '.join(switches)} ({', '.join(n for n in _engines() if all(_able(n, w) for w in wants))})"
    )


def _switches(want: Want) -> str:
    """The switches of its load options, and the first ones of its alternatives that an engine has."""
    least = [c for c in want.using if not any(set(other) < set(c) for other in want.using)]
    using = [" and ".join(choice) for choice in least]
    return ", ".join([*want.load, *([" or ".join(using)] if all(using) else [])])


def _engines() -> list[str]:
    from onepolicy.engines import ENGINES

    return list(ENGINES)


def _able(name: str, want: Want) -> bool:
    """Whether an engine, as it is by default, can give this scoring."""
    from onepolicy.engines.open import engine_class
    from onepolicy.legs.base import CannotRun, load_for, using_for

    cls = engine_class(name)
    current = {k: s.default for k, s in cls.SWITCHES.items()}
    fixed = {k: current.get(k) if v == "{dtype}" else v for k, v in want.load.items()}
    try:
        using_for(want, name, cls.SWITCHES, current)
        load_for(replace(want, load=fixed), name, cls.SWITCHES, current)
    except CannotRun:
        return False
    return cls.SCORES


# -- presets -----------------------------------------------------------------------------------------------------------


def _preset(name: str) -> Iterator[str]:
    from onepolicy.gates.bounds import load

    preset = load(name)
    yield f"{preset.name}  {preset.about}"
    for metric, b in joined_bounds(preset.bounds):
        what = f"|{metric}|" if b.absolute else metric
        least = f", from {b.min_tokens:,} tokens" if b.min_tokens else ""
        yield f"  {what} <= {b.at_most:g}  {b.when.replace('_', ' ')}{least}"
        if b.otherwise:
            yield f"      where it is not measured: {b.otherwise}"
        yield f"      {b.source} ({b.date})"


def joined_bounds(bounds: Iterable[Bound]) -> Iterator[tuple[str, Bound]]:
    """(what is bounded, its bound), equal bounds of one metric's stretches of positions as one."""
    kind = lambda b: (stretch(b.metric), b.at_most, b.when, b.min_tokens, b.source, b.date)
    for _, group in itertools.groupby(bounds, kind):
        found = list(group)
        yield stretch(found[0].metric) if len(found) > 1 else found[0].metric, found[0]


def stretch(metric: str) -> str:
    """`gap_over_floor_from_512/rms` as `gap_over_floor_from_N/rms`; other names as they are."""
    return re.sub(r"_from_\d+/", "_from_N/", metric)


def _everything() -> Iterator[str]:
    from onepolicy.codes import CODES
    from onepolicy.dialects import key_names
    from onepolicy.gates import PRESETS
    from onepolicy.legs import LEGS, SPECIAL
    from onepolicy.metrics import ALIASES, METRICS

    yield "Finding codes, in the order of suspicion"
    yield from (f"  {name:<24} {code.title}" for name, code in sorted(CODES.items(), key=lambda item: item[1].rank))
    yield "\nLegs"
    yield from (f"  {key:<24} {said}" for key, said in ({k: x.factor for k, x in LEGS.items()} | SPECIAL).items())
    yield "\nPresets\n  " + "  ".join(PRESETS)
    yield "\nMetrics"
    known = {stretch(key): re.sub(r"positions .*", "positions from N on", m.formula) for key, m in METRICS.items()}
    yield from (f"  {key:<36} {formula}" for key, formula in known.items())
    others = [n for n in ALIASES if ":" not in n] + key_names()
    yield f"\nand {len(others)} names of other stacks, as {key_names()[0]}"


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
