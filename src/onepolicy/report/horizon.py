"""What a gap does to a whole answer, in words: one sentence for a verdict, and the table of `onepolicy horizon`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from onepolicy.metrics.horizon import usable
from onepolicy.report.numbers import factor, number, share
from onepolicy.report.text import escaped
from onepolicy.report.walks import caption, terminal

_LABEL, _COLUMN = 34, 11


def verdict_sentence(answer: Mapping[str, Any]) -> str:
    """`answer` of `metrics.horizon` (a report's `context["answer"]`) as one sentence; empty where it is empty."""
    if not answer:
        return ""
    use = usable(answer["ess_share"]).word
    counted = f" ({share(answer['ess_share'])} of the answers count)" if use == "costly" else ""
    return (
        f"at your {answer['length']:,.0f}-token replies a whole answer's log-ratio is "
        f"{number(answer['drift'], 2)} ± {number(answer['spread'], 2)}: sequence-level weights are {use}{counted}"
    )


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _drift(row: Mapping[str, Any]) -> str:
    return number(row["drift"])


def _typical(row: Mapping[str, Any]) -> str:
    """Only around zero it is what an answer is typically off by."""
    return "–" if row["label"] != "textbook walk" else f"×{number(row['typical_factor'])}"


def _off(by: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: share(row["off_by"][by])


#: label, how a reading's (or its simulation's) value is written
_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("drift of the log-ratio, nats", _drift),
    ("spread of the log-ratio, nats", lambda row: number(row["spread"])),
    ("median answer's ratio", lambda row: factor(row["median_ratio"])),
    ("typical factor either way", _typical),
    ("off by 1.5x or more, either way", _off("1.5")),
    ("off by 2x or more", _off("2")),
    ("off by 10x or more", _off("10")),
    ("effective share of the answers", lambda row: share(row["ess_share"])),
    ("token ratio outside its clip", lambda row: share(row["tokens_outside_clip"])),
    ("geometric ratio outside its clip", lambda row: share(row["answers_outside_clip"])),
    ("half are off by 2x after, tokens", lambda row: _tokens(row)),
)


def _tokens(row: Mapping[str, Any]) -> str:
    n = row["half_off_by_2"]
    if n is not None:
        return f"{n:,}"
    return f"> {row['until']:,}" if "until" in row else "never"


def render(result: Mapping[str, Any], width: int = 100) -> str:
    """`metrics.horizon.horizon`'s result as plain text, 60 to 100 columns wide, with the walks if there are any."""
    width = max(60, min(width, 100))
    lines = [*_head(result, width), *_tables(result, width), "", *_notes(result, width)]
    if "walks" in result:
        label = result["readings"][result["walks"]["reading"]]["label"]
        lines += ["", f"{caption(result['walks'], label)}: log-ratio of the answer so far"]
        lines += [terminal(result["walks"], width)]
        lines += wrapped(
            "dashes: drift ± spread, which grows like the square root of the tokens; dots: the drift", width
        )
    row = result["readings"][result["reading"]]
    lines += ["", *textwrap.wrap(f"{_capital(verdict_sentence({'length': result['length'], **row}))}.", width)]
    lines += textwrap.wrap(f"{_capital(usable(row['ess_share']).why)}.", width)
    return "\n".join(lines) + "\n"


def title(result: Mapping[str, Any]) -> str:
    return f"A gap of {number(result['gap']['sd'])} nats a token over answers of {_counted(result['length'], 'token')}"


def captions(result: Mapping[str, Any]) -> tuple[str, str]:
    """Title and note of the SVG."""
    label = result["readings"][result["walks"]["reading"]]["label"]
    what = caption(result["walks"], label)
    return title(result), f"{what}; dashed: drift ± spread, a square root; dotted: drift"


def _head(result: Mapping[str, Any], width: int) -> Iterator[str]:
    gap = result["gap"]
    yield title(result)
    rho = gap["autocorrelation"]
    said = "independent" if rho == 0 else f"autocorrelation {rho:.4g}"
    mean = "" if gap["mean"] is None else f" · mean log-ratio {number(gap['mean'])} nats"
    yield from wrapped(f"log-ratio of a token: {escaped(gap['law'], 60)} · {said}{mean}", width)


def _tables(result: Mapping[str, Any], width: int) -> Iterator[str]:
    """As many readings side by side as fit."""
    names = list(result["readings"])
    columns = 2 if result["answers"] else 1
    fit = max(1, (width - _LABEL) // (columns * _COLUMN))
    for i in range(0, len(names), fit):
        yield ""
        yield from _table(result, names[i : i + fit], columns)


def _table(result: Mapping[str, Any], names: Sequence[str], columns: int) -> Iterator[str]:
    rows = [result["readings"][name] for name in names]
    kinds = ("closed" if result["exact"] else "closed ≈", "simulated")[:columns]
    yield f"{'':{_LABEL}}" + "".join(f"{row['label']:>{columns * _COLUMN}}" for row in rows)
    yield f"{'':{_LABEL}}" + "".join(f"{kind:>{_COLUMN}}" for _ in rows for kind in kinds)
    for label, write in _ROWS:
        cells = []
        for row in rows:
            beside = {"label": row["label"], "until": result["simulated_until"], **row.get("simulated", {})}
            cells += [write(row), write(beside)][:columns] if columns == 2 else [write(row)]
        yield f"  {label:{_LABEL - 2}}" + "".join(f" {cell:>{_COLUMN - 1}}" for cell in cells)


def wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")


def _notes(result: Mapping[str, Any], width: int) -> Iterator[str]:
    for row in result["readings"].values():
        yield from wrapped(f"{row['label']}: {row['meaning']}", width)
    token, whole = (f"{result[k][0]:.6g} to {result[k][1]:.6g}" for k in ("clip", "sequence_clip"))
    yield from wrapped(f"clip: a token's ratio {token}; an answer's geometric mean ratio {whole}", width)
    if result["answers"]:
        said = f"simulated: {_counted(result['answers'], 'answer')} token by token, seed {result['seed']}"
        yield from wrapped(f"{said}; a share near 50% is known to ± {number(result['simulated_error'], 2)}", width)
    for note in result["notes"]:
        yield from wrapped(escaped(note), width)
