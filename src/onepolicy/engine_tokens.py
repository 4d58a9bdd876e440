"""The tokens of two engines: the ids that each gives the same prompts, and the tokenizers in their directories."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onepolicy.codes import by_rank, finding
from onepolicy.engines.base import Engine, EngineSpec
from onepolicy.engines.open import engine_class, named, open_engine
from onepolicy.errors import EngineError, OnepolicyError, UsageError
from onepolicy.gates.judge import worst
from onepolicy.rollouts import Rollouts
from onepolicy.suite import Suite
from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.columns import check_rollouts
from onepolicy.tokens.gather import Gathered
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.pair import PairReport, compare_tokenizers
from onepolicy.tokens.prompt_sides import compare_prompts
from onepolicy.types import Finding, Listing, Severity, TokenReport

SIDES = ("sampler", "scorer")
#: Files of a model directory that a tokenizer and its template are made of.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "tokenizer.model",
    "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "tekken.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Encoded:
    """What one engine made of the prompts. `why`: the reason where it gives no ids for text."""

    ids: list[list[int]] | None
    why: str = ""


def check_engine_tokens(sampler: str, scorer: str, suite: Suite, *, timeout: float = 600.0) -> TokenReport:
    """Each engine started once, one at a time, and asked for the ids of the suite's prompts; then the tokenizers in
    their model directories.

    Errors: `UsageError` for a spec that is wrong; `EngineError` for an engine that does not start.
    """
    prompts = [p.prompt for p in suite.prompts]
    encoded = [_encoded(spec, prompts, timeout) for spec in (sampler, scorer)]
    homes = [directory_of(spec) for spec in (sampler, scorer)]
    tokenizers = [None if home is None else open_tokenizer(str(home)) for home in homes]
    findings, listings, details, counts = [], [], {}, {"prompts": len(prompts)}
    if encoded[0].ids is not None and encoded[1].ids is not None:
        names = [f"{i}" for i in range(len(prompts))]
        findings += prompt_findings(encoded[0].ids, encoded[1].ids, names, tokenizers[0])
        same = sum(a == b for a, b in zip(encoded[0].ids, encoded[1].ids, strict=True))
        counts |= {"with the same ids": same}
    else:
        why = "; ".join(f"{side}: {e.why}" for side, e in zip(SIDES, encoded, strict=True) if e.why)
        findings.append(finding("nothing-checked", f"the prompts' ids were not compared: {why}"))
    pair = _pair(tokenizers)
    if pair is not None:
        findings += pair.findings
        details, listings = {"pair": pair.to_json()}, pair_listings(pair)
    subject = dict(zip(SIDES, (sampler, scorer), strict=True)) | {"suite": f"{suite.size} {suite.version}"}
    outcome = worst([f.outcome for f in findings])
    said = "both engines read the same ids"
    return TokenReport(outcome, tuple(by_rank(findings)), subject, counts, tuple(listings), details, said)


def _encoded(spec: str, prompts: Sequence[Any], timeout: float) -> Encoded:
    with open_engine(spec, timeout=timeout) as engine:
        return encoded_by(engine, prompts)


def encoded_by(engine: Engine, prompts: Sequence[Any]) -> Encoded:
    """The engine's ids of the prompts; a refusal is an answer too."""
    try:
        return Encoded(engine.encode(list(prompts)))
    except (UsageError, EngineError) as err:
        return Encoded(None, str(err))


def _pair(tokenizers: Sequence[Tokenizer | None]) -> PairReport | None:
    a, b = tokenizers
    return None if a is None or b is None else compare_tokenizers(a, b)


def prompt_findings(
    a: Sequence[list[int]], b: Sequence[list[int]], names: Sequence[str], tokenizer: Tokenizer | None
) -> list[Finding]:
    """What differs between the ids of the sampler's and the scorer's prompts, one finding a kind."""
    special = {} if tokenizer is None else tokenizer.special_ids()
    pairs = [{"id": n, "sampler_ids": x, "scorer_ids": y} for n, x, y in zip(names, a, b, strict=True)]
    gathered = Gathered()  # engines pad nothing, so an id that pads elsewhere is a token here
    gathered.add(compare_prompts(pairs, special.get("bos"), sides=SIDES, tokenizer=tokenizer))
    return gathered.findings()


def directory_of(spec: str) -> Path | None:
    """The model directory of an engine's spec; None where its target is none (a server, a callable, a file)."""
    from onepolicy.engines.model_files import model_directory

    parsed = named(EngineSpec.parse(spec))
    if parsed.name.rpartition(":")[2] in ("callable", "recorded", "http", "fake"):
        return None
    try:
        return model_directory(parsed.target, engine_class(parsed.name).NAME)
    except OnepolicyError:
        return None


# -- within a check ----------------------------------------------------------------------------------------------------


def findings_in_check(rollouts: Rollouts, sampler: Path | None, scorer: Path | None) -> list[Finding]:
    """What the rollouts' own columns and the two directories show, before any number is judged; no notes.

    The tokenizers are compared where a file of theirs differs: equal files cost nothing.
    """
    gathered = Gathered()
    gathered.add(check_rollouts(rollouts))
    found = gathered.findings()
    if sampler is not None and scorer is not None and files_digest(sampler) != files_digest(scorer):
        try:
            found += compare_tokenizers(open_tokenizer(str(sampler)), open_tokenizer(str(scorer))).findings
        except OnepolicyError as err:
            found.append(finding("nothing-checked", f"the two tokenizers differ and cannot be compared: {err}"))
    return [replace(f, origin="run") for f in found if f.severity is not Severity.INFO]


def files_digest(home: Path) -> str:
    """SHA-256 over the names and bytes of the tokenizer's files in a directory."""
    total = hashlib.sha256()
    for name in FILES:
        file = home / name
        if file.is_file():
            data = file.read_bytes()
            total.update(f"{name} {len(data)} ".encode())
            total.update(data)
    return total.hexdigest()


def pair_listings(pair: PairReport) -> list[Listing]:
    """The parts with their digests, and the behaviour by class, as tables for people: what differs line by line."""
    parts = [(row.part, *row.digests, "; ".join(row.words)) for row in pair.parts if row.differs]
    for state in ("same", "not known"):
        names = [row.part for row in pair.parts if row.state == state]
        parts += [(state, "", "", ", ".join(names))] if names else []
    behaviour = [
        (row.group, f"{row.texts:,}", f"{row.differ:,}", "" if row.first is None else _first(row.first))
        for row in pair.behaviour
        if row.differ
    ]
    same = [row for row in pair.behaviour if not row.differ]
    behaviour += [
        (
            "all others" if behaviour else "all",
            f"{sum(row.texts for row in same):,}",
            "0",
            ", ".join(row.group for row in same),
        )
    ]
    columns = ("class of texts", "texts:", "differ:", "first")
    return [
        Listing("Parts", ("part", *pair.roles, "difference"), tuple(parts), "digest of each side's"),
        Listing("Behaviour", columns, tuple(behaviour), "ids of the same texts"),
    ]


def _first(row: Any) -> str:
    return f"{row.text[:40]!r}: {row.counts[0]} against {row.counts[1]} tokens, from token {row.first_diff}"
