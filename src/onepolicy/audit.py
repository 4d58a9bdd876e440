"""`audit`: a dump in, what is wrong, where and why out. Any framework's files, in constant memory, without torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from onepolicy import pool
from onepolicy.audited import Dump, report_of
from onepolicy.auditing import Unreadable, Work, batches
from onepolicy.codes import finding
from onepolicy.convert import Converted, convert
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.errors import ContentError, MergeError, UsageError
from onepolicy.formats.base import Shard
from onepolicy.formats.detect import Detected, detect, is_damaged
from onepolicy.formats.files import Files
from onepolicy.formats.settle import ids_known
from onepolicy.on_ray import address_of, over_ray
from onepolicy.same_tokens import check_rollouts
from onepolicy.signatures.reported import Reported
from onepolicy.survey import Survey
from onepolicy.together import Answer, Piece, audit_piece, pieces
from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.kinds import kind_table
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.reading import RecordStream
from onepolicy.types import Finding, Outcome, Report, Severity
from onepolicy.views import VIEWS

#: The side that is held against the sampler, the first of these that the dump has.
SCORERS = ("old", "scorer", "current")
#: What an engine said of tokens that it was given: seldom of those that were drawn, so compared where it is asked for.
GIVEN = "prompt"
#: Batches of a shard that are looked at to learn which sides the dump has.
_PEEK = 2
#: Answers that are merged among themselves first.
TOGETHER = 32

Told = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Choices:
    """How an audit is run. `sides`: the two scorings, None: the dump's own. `on`: local, ray or ray://HOST:PORT.
    `what_if`: replay the corrections. `dialect`: a framework's name and options, whose metrics are computed its way.
    `tokenizer`: for the token checks, kinds and texts. `scorer`: an engine that computes the side that is missing, the
    file's tokens `declare`d as in `check`. `reported`: numbers of the run's own dashboard, made again from the dump."""

    sides: tuple[str | None, str | None] = (None, None)
    view: str = "drawn"
    bounds: str | None = None
    reply_length: int | None = None
    workers: int | None = None
    on: str = "local"
    what_if: bool = True
    dialect: tuple[str, Mapping[str, Any]] | None = None
    tokenizer: str | None = None
    scorer: str | None = None
    declare: Mapping[str, str] = field(default_factory=dict[str, str])
    reported: Mapping[str, float] = field(default_factory=dict[str, float])


def audit(uris: Iterable[str | Path], choices: Choices | None = None, progress: Told | None = None) -> Report:
    """The report on a dump: files, folders, globs, fsspec URLs.

    Errors: `UsageError` for a path with nothing behind it, an unknown view or side; `ContentError` where no file is of
    a known format, or none can be read.
    """
    choices = choices or Choices()
    if choices.view not in VIEWS:
        raise UsageError(f"--view: got {choices.view!r}, wanted one of {', '.join(VIEWS)}")
    if choices.on != "local":
        address_of(choices.on)
    uris = tuple(str(u) for u in uris)
    if choices.dialect is not None:
        Accumulator(*choices.dialect)  # an unknown option is told before anything is read
    with tempfile.TemporaryDirectory(prefix="onepolicy-") as folder:
        read, lost = uris, list[Finding]()
        if choices.scorer is not None:
            done, lost = scored(uris, choices, Path(folder))
            read = (str(done),)
        found = detect(read, Files())
        _require_some(found, uris)
        wanted = ("sampler", "scorer") if choices.scorer else choices.sides
        names = sides_of(found.shards, wanted)
        tokenizer = None if choices.tokenizer is None else open_tokenizer(choices.tokenizer)
        kinds = None if tokenizer is None else kind_table(tokenizer)
        spill = folder if choices.on == "local" else None  # another machine does not see the folder
        work = Work(names, choices.view, None, choices.what_if, choices.dialect, kinds, spill)
        survey, unreadable = surveyed(found.shards, work, choices, progress)
        names = _picked(wanted, _records_of(survey), names)
        if names != work.names:  # the first records were not like the rest
            survey, unreadable = surveyed(found.shards, replace(work, names=names), choices, progress)
        if unreadable and not survey.dump.counts.get("records"):
            raise ContentError(f"nothing can be read: {unreadable[0].why}")
        skipped = [(path, why) for path, why in found.unclaimed if not is_damaged(why)]
        unreadable += [Unreadable((path,), f"{path}: {why}") for path, why in found.unclaimed if is_damaged(why)]
        dump = Dump(uris, _counted(found.shards), skipped, unreadable, more=lost)
        if tokenizer is not None:
            dump = _with_tokens(dump, found.shards, tokenizer)
        if choices.reported:
            dump = replace(dump, more=(*dump.more, *_about_reported(found.shards, choices, names)))
        return report_of(survey, dump, choices.bounds, choices.reply_length)


def scored(uris: Sequence[str], choices: Choices, folder: Path) -> tuple[Path, list[Finding]]:
    """The dump with the scorer's values beside the sampler's, as one file: `check FILE --scorer ENGINE`, no legs; and
    what had to be left out before.

    Errors: those of `convert` and `check_file`.
    """
    from onepolicy.check import Choices as Checked
    from onepolicy.check import check_file

    plain, done = folder / "rollouts.parquet", folder / "scored.parquet"
    converted = convert(uris, plain)
    assert choices.scorer is not None
    bounds = choices.bounds or "bf16"  # its verdict is not kept, and a dump seldom says its dtypes
    check_file(
        plain, choices.scorer, bounds=bounds, save_scores=done, declare=choices.declare, choices=Checked(legs=())
    )
    return done, _left_out(converted)


def _left_out(converted: Converted) -> list[Finding]:
    """Records and files that never reached the scorer."""
    out: list[Finding] = []
    if converted.unreadable:
        message = f"{len(converted.unreadable)} files cannot be read: {converted.unreadable[0]}"
        out.append(finding("files-unreadable", message, origin="run", evidence={"files": converted.unreadable[:20]}))
    if converted.left_out:
        message = f"{converted.left_out:,} records do not fit their tokens and were not scored: {converted.reasons[0]}"
        evidence = {"records": converted.left_out, "first": converted.reasons}
        out.append(finding("records-unreadable", message, origin="run", evidence=evidence))
    if converted.texts:
        message = f"{converted.texts:,} records hold text only and were not scored"
        out.append(finding("text-only", message, origin="run", severity=Severity.INFO, outcome=Outcome.PASS))
    return out


def _with_tokens(dump: Dump, shards: Sequence[Shard], tokenizer: Tokenizer) -> Dump:
    """The token checks of the same records, and what decodes the worst tokens."""
    report = check_rollouts(_token_records(shards), tokenizer)
    found = tuple(f for f in report.findings if f.code not in NOT_HERE)
    decode = lambda ids: tokenizer.decode([[i] if tokenizer.exists(i) else [] for i in ids])
    return replace(dump, vocab_size=tokenizer.size, decode=decode, more=(*dump.more, *found))


def _about_reported(shards: Sequence[Shard], choices: Choices, names: tuple[str | None, str | None]) -> list[Finding]:
    """Which definition gives each number that the run reported."""
    told = Reported(choices.reported, None if choices.dialect is None else choices.dialect[0])
    for shard in shards:
        try:
            for read in batches(shard):
                if read.rollouts is not None:
                    told.add(read.rollouts, (names[0] or "sampler", names[1] or "old"))
        except ContentError:
            continue  # told already
    return [replace(f, origin="run") for f in told.findings()]


#: Notes of the token checks that say what `audit` says otherwise.
NOT_HERE = ("tokens-not-checked", "nothing-checked")


def _token_records(shards: Sequence[Shard]) -> Iterator[Any]:
    for shard in shards:
        try:
            for read in batches(shard):
                rollouts = read.rollouts
                if rollouts is None or not (known := ids_known(rollouts)).any():
                    continue
                for chunk in RecordStream(rollouts if known.all() else rollouts.take(known)):
                    yield from chunk
        except ContentError:
            continue  # told already


def _require_some(found: Detected, uris: Sequence[str]) -> None:
    if found.shards:
        return
    if found.unclaimed:
        path, why = found.unclaimed[0]
        more = f" (and {len(found.unclaimed) - 1} more files)" if len(found.unclaimed) > 1 else ""
        raise ContentError(f"no file of a known format: {path}: {why}{more}")
    raise ContentError(f"no files in {', '.join(uris)}")


def _counted(shards: Sequence[Shard]) -> dict[str, int]:
    files: dict[str, set[str]] = {}
    for shard in shards:
        files.setdefault(shard.format, set()).update(shard.paths)
    return {name: len(paths) for name, paths in sorted(files.items())}


def surveyed(
    shards: Sequence[Shard], work: Work, choices: Choices, progress: Told | None = None
) -> tuple[Survey, list[Unreadable]]:
    """Every shard, merged in their order. Where records differ in what they are clustered by, all are clustered by
    sequence: a second pass."""
    try:
        return _merged(shards, work, choices, progress)
    except MergeError as err:
        if work.unit is not None or "cluster_unit" not in str(err):
            raise
        return _merged(shards, replace(work, unit="sequence"), choices, progress)


def _merged(
    shards: Sequence[Shard], work: Work, choices: Choices, progress: Told | None
) -> tuple[Survey, list[Unreadable]]:
    out, some, unreadable = Survey(work.names), Survey(work.names), list[Unreadable]()
    todo = pieces(shards, choices.workers or pool.cores())
    done = 0
    for n, answer in enumerate(_in_order(_answers(todo, work, choices)), start=1):
        unreadable += answer.unreadable
        for survey in answer.surveys:
            some.add(survey)
        if n % TOGETHER == 0:  # a merge costs what both sides hold: thousands of files are not added to all
            out.add(some)
            some = Survey(work.names)
        done += len(todo[n - 1].shards)
        if progress is not None:
            progress(done, len(shards))
    out.add(some)
    return out, unreadable


def _answers(todo: Sequence[Piece], work: Work, choices: Choices) -> Iterator[tuple[int, Answer]]:
    items = [(piece, work) for piece in todo]
    if choices.on != "local":
        return over_ray(audit_piece, items, choices.on)
    return pool.over(audit_piece, items, choices.workers or min(pool.cores(), len(items)))


def _in_order(answers: Iterator[tuple[int, Any]]) -> Iterator[Any]:
    """As they come, but in the shards' order; early ones wait."""
    waiting: dict[int, Any] = {}
    n = 0
    for i, answer in answers:
        waiting[i] = answer
        while n in waiting:
            yield waiting.pop(n)
            n += 1


# -- which sides -----------------------------------------------------------------------------------------------------


def sides_of(
    shards: Sequence[Shard], wanted: tuple[str | None, str | None] = (None, None)
) -> tuple[str | None, str | None]:
    """The two scorings that are compared: what was asked for, else the sampler and the first of `SCORERS` there is.

    Errors: `UsageError` for a side that the dump does not have, or that is to be compared with itself.
    """
    have = scorings(shards, wanted)
    for name in wanted:
        if name is not None and name not in have:
            raise UsageError(f"no scoring {name!r} in this dump; it has {', '.join(have) or 'none'}")
    a, b = _picked(wanted, dict.fromkeys(have, 1))
    if a is not None and a == b:
        raise UsageError(f"--a and --b: {a!r} would be compared with itself; this dump has {', '.join(have)}")
    return a, b


def _picked(
    wanted: tuple[str | None, str | None],
    have: Mapping[str, int],
    otherwise: tuple[str | None, str | None] = (None, None),
) -> tuple[str | None, str | None]:
    """`have`: scoring -> its records. A side that few records have does not stand for the dump. `otherwise`: where one
    of the two is not there."""
    a = wanted[0] or ("sampler" if have.get("sampler") else None)
    most = max((n for s, n in have.items() if s in SCORERS and s != a), default=0)
    b = wanted[1] or next((s for s in SCORERS if s != a and have.get(s) and 2 * have[s] >= most), None)
    b = b or next((s for s in sorted(have) if have[s] and s not in (a, "reference", GIVEN)), None)
    return otherwise if None in (a, b) and None not in otherwise else (a, b)


def _records_of(survey: Survey) -> dict[str, int]:
    """Scoring -> records of whose drawn tokens it speaks."""
    names = {n.removesuffix("_dtype") for n in survey.facts if n.endswith("_dtype")}
    return {name: survey.dump.counts.get(f"records with {name}", 0) for name in sorted(names)}


def scorings(shards: Sequence[Shard], wanted: Sequence[str | None] = ()) -> list[str]:
    """Names of the scorings in the dump, by its first readable shard of each format; by the others too, where those
    lack what is `wanted`."""
    out: dict[str, None] = {}
    seen: set[str] = set()
    rest: list[Shard] = []
    for shard in shards:
        names = None if shard.format in seen else _peek(shard)
        if names is None:
            rest.append(shard)
            continue
        seen.add(shard.format)
        out.update(dict.fromkeys(names))
    for shard in rest:
        if all(name in out for name in wanted if name is not None):
            break
        out.update(dict.fromkeys(_peek(shard) or ()))
    return list(out)


def _peek(shard: Shard) -> list[str] | None:
    """Scorings of the shard's first records; None where it cannot be read."""
    out: dict[str, None] = {}
    try:
        for read in islice(batches(shard, 1 << 14), _PEEK):
            if read.rollouts is not None:
                out.update(dict.fromkeys(read.rollouts.scorings))
            for raw, _ in read.settled.aside if read.settled else ():
                columns = getattr(raw, "columns", {})
                out.update(dict.fromkeys(c.removesuffix("_logprobs") for c in columns if c.endswith("_logprobs")))
    except ContentError:
        return list(out) or None
    return list(out)
