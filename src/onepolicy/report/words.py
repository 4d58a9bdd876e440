"""What every report says in the same words: engines, counts, the floor, outcomes. Text only, no layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepolicy.codes import CODES
from onepolicy.report.numbers import number
from onepolicy.report.text import escaped
from onepolicy.types import Finding, Floor, Gate, Outcome, Report, Severity

_PACKAGE = {"hf": "transformers", "fake": "onepolicy", "callable": "onepolicy"}
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_KINDS = {"drawn": "drawn tokens", "loss": "tokens under the loss mask", "fixed": "tokens of fixed text"}


def withheld(report: Report) -> bool:
    """Whether a failing finding leaves the numbers below it unjudged."""
    return any(CODES[f.code].withholds and f.severity is Severity.FAIL for f in report.findings)


def is_note(f: Finding) -> bool:
    """Shown, but it changes nothing."""
    return f.severity is Severity.INFO and f.outcome is Outcome.PASS


def headline(report: Report) -> str:
    """The verdict in words: the title of the finding that made it."""
    made_it = [f for f in report.findings if f.outcome is report.outcome]
    title = CODES[made_it[0].code].title if made_it else ""
    return "the two sides agree within every bound" if report.outcome is Outcome.PASS else title


def precision(dtype: str) -> str:
    """bfloat16 as bf16."""
    return _SHORT.get(dtype, escaped(dtype, 20))


def engine(fingerprint: Mapping[str, Any], dtype: Any) -> str:
    """Engine, version, model, precision, device: what a person needs to tell two set-ups apart."""
    name = fingerprint.get("engine")
    if not name:
        return f"engine not recorded · {escaped(dtype or 'dtype not declared', 20)}"
    package = _PACKAGE.get(str(name), str(name))
    version = mapping(fingerprint.get("versions")).get(package)
    said = f"{name} {version}" if package in (name, "onepolicy") else f"{name} ({package} {version})"
    kv = fingerprint.get("kv_cache_dtype")
    parts = [
        said if version else name,
        fingerprint.get("model") or fingerprint.get("function"),
        dtype or fingerprint.get("dtype") or "dtype not declared",
        f"KV cache {kv}" if kv and kv != fingerprint.get("dtype") else None,
        fingerprint.get("quantization"),
        fingerprint.get("device"),
        f"fault {fingerprint['fault']}" if fingerprint.get("fault") not in (None, "none") else None,
    ]
    return " · ".join(escaped(p, 48) for p in parts if p)


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping of a fingerprint or a context; empty for whatever else a file has there."""
    return value if isinstance(value, Mapping) else {}


def answer(report: Report) -> Mapping[str, Any]:
    """What the gap does to a whole answer; empty where it is not known."""
    found = mapping(report.context.get("answer"))
    needed = ("length", "sd", "drift", "spread", "median_ratio", "ess_share", "walk_factor")
    return found if all(isinstance(found.get(k), (int, float)) for k in needed) else {}


def sides(report: Report) -> list[tuple[str, str]]:
    """(side, its engine in words) of each fingerprint."""
    dtypes = mapping(report.context.get("dtypes"))
    return [(escaped(name, 16), engine(f, dtypes.get(name))) for name, f in report.fingerprints.items()]


def counted(report: Report) -> str:
    """Tokens, sequences and clusters that the numbers are over."""
    counts, m = report.sums.counts, report.measurements.get("abs_log_ratio/mean")
    unit = escaped(report.sums.cluster_unit, 24)
    n, viewed = counts.get("scored", 0), counts.get("viewed", 0)
    of = "" if n == viewed else f" of {viewed:,}"
    clusters = f"{m.effective_clusters:.3g} effective clusters (by {unit})" if m else "no clusters"
    tokens = f"{n:,}{of} {_KINDS.get(report.sums.view, 'tokens')}"
    return f"{tokens} · {counts.get('viewed_sequences', 0):,} sequences · {clusters}"


def gate_word(gate: Gate) -> str:
    """The outcome, or why there is none."""
    for start, word in (
        ("unjudged", "unjudged"),
        ("not measured", "not covered"),
        ("significant, explained", "explained"),
        ("informs", "informs only"),
    ):
        if gate.why.startswith(start):
            return word if gate.outcome is Outcome.PASS else "not measured"
    return gate.outcome.value


def silent(gate: Gate) -> bool:
    """An alarm that was not raised: no row of a table."""
    return gate.when == "alarm" and gate.outcome is Outcome.PASS


def floor_words(floor: Floor) -> str:
    """Where the floor comes from, with the range of its variants' pairs."""
    parts: list[str] = [floor.source]
    if floor.rms is not None:
        sizes = sorted(v.rms for v in floor.variants)
        spread = f" ({number(sizes[0])} to {number(sizes[-1])})" if len(sizes) > 1 else ""
        parts = [f"{floor.source} {number(floor.rms)} nats RMS{spread}"]
    if floor.variants:
        parts.append(", ".join(dict.fromkeys(escaped(name, 32) for v in floor.variants for name in (v.a, v.b))))
    return " · ".join(parts)


def suite_words(report: Report) -> str:
    """Size, version and counts of the suite; empty where there is none."""
    found = mapping(report.context.get("suite"))
    size, version = (str(found[k]) if found.get(k) is not None else "" for k in ("size", "version"))
    parts = [
        version if size in version else f"{size} {version}",
        *(f"{found[k]} {k}" for k in ("prompts", "texts") if found.get(k) is not None),
    ]
    left_out = found.get("left_out")
    if isinstance(left_out, (list, tuple)) and left_out:
        parts.append(f"{len(left_out)} left out")
    return " · ".join(escaped(p, 120) for p in parts if p)


def dump_words(report: Report) -> str:
    """Records, tokens, files and formats of an audited dump; empty for other reports."""
    found = mapping(report.context.get("audit"))
    counts, formats = mapping(found.get("counts")), mapping(found.get("formats"))
    if not counts:
        return ""
    files, records = counts.get("files", 0), counts.get("records", 0)
    parts = [f"{_several(records, 'record')} in {_several(files, 'file')} ({', '.join(map(str, formats))})"]
    parts += [f"{counts['tokens']:,} tokens"] if counts.get("tokens") else []
    parts += [f"{counts['records left out']:,} records left out"] if counts.get("records left out") else []
    names = found.get("names")
    if isinstance(names, (list, tuple)) and all(names):
        parts.append(f"{names[0]} against {names[1]}")
    return " · ".join(escaped(p, 120) for p in parts)


def _several(n: object, one: str) -> str:
    return f"{n:,} {one}{'' if n == 1 else 's'}"


def flat(value: Any) -> str:
    """Mappings and lists of facts as one line of words."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{k} {flat(v)}" if not isinstance(v, Mapping) else f"{k} ({flat(v)})" for k, v in value.items()
        )
    if isinstance(value, (list, tuple)):
        return ", ".join(flat(v) for v in value)
    return number(value) if isinstance(value, float) else str(value)
