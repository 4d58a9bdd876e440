"""`onepolicy suite list | export | import`: the fixed test set, and its way to scorers that live elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onepolicy.cli import options
from onepolicy.errors import UsageError

if TYPE_CHECKING:
    from onepolicy.suite.build import Encoder
    from onepolicy.suite.load import Suite

suite = typer.Typer(add_completion=False, rich_markup_mode=None, help="The fixed test set: list, export, import.")

Size = Annotated[str, typer.Option("--size", metavar="SIZE", help="smoke, default or full; each holds the one before.")]
Files = Annotated[
    list[Path] | None,
    typer.Option("--file", metavar="FILE", help="Your own items too: .txt, or JSON lines; a reply makes a text."),
]
OnlyFiles = Annotated[bool, typer.Option("--only-files", help="Your own items instead.")]
Target = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A .parquet or .jsonl file.")]


@suite.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """The fixed test set: prompts to draw from, texts to score.

    \b
    Example:
      onepolicy suite list
      onepolicy suite export -o ids.jsonl --tokenizer MODEL
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@suite.command(name="list")
def list_(files: Files = None, only_files: OnlyFiles = False) -> int:
    """Show sizes, categories, counts and versions.

    \b
    Example:
      onepolicy suite list
    """
    from onepolicy.cli.outputs import say
    from onepolicy.suite import CATEGORIES, SIZES, load

    sizes = {size: load(size, files or (), only_files) for size in SIZES}
    say(_table([("size", "prompts", "texts", "clusters of texts", "version"), *map(_size_row, sizes.values())]))
    per = {s.size: [Counter(x.category for x in kind) for kind in (s.prompts, s.texts)] for s in sizes.values()}
    seen = dict.fromkeys([*CATEGORIES, *per["full"][0], *per["full"][1]])
    rows = [
        (name, *(f"{per[size][0][name]}+{per[size][1][name]}" for size in SIZES), CATEGORIES.get(name, "yours"))
        for name in seen
        if any(counts[name] for counts in per["full"])
    ]
    say("\n" + _table([("prompts+texts", *SIZES, "what"), *rows]))
    return 0


def _size_row(s: Suite) -> tuple[str, ...]:
    clusters = len({x.group for x in s.texts})
    return s.size, str(len(s.prompts)), str(len(s.texts)), str(clusters), s.version


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)


@suite.command()
def export(
    output: Target,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="MODEL", help="A model directory, a packaged model, or an engine's spec."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="The texts themselves, for engines that tokenize.")] = False,
    size: Size = "default",
    files: Files = None,
    only_files: OnlyFiles = False,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", min=2, metavar="N", help="Longest sequence. Default: the model's positions."),
    ] = None,
    overwrite: options.Overwrite = False,
) -> int:
    """Write the fixed texts as token ids of a model, for a scorer that lives elsewhere. No weights are loaded.

    \b
    Example:
      onepolicy suite export -o ids.jsonl --tokenizer MODEL
    """
    from onepolicy.cli.outputs import require_free
    from onepolicy.storage import FORMATS
    from onepolicy.suite import load

    if text == (tokenizer is not None):
        raise UsageError("wanted --tokenizer MODEL (its token ids) or --text (the texts themselves)")
    require_free(output, overwrite, (".jsonl",) if text else FORMATS)
    loaded = load(size, files or (), only_files)
    if tokenizer is None:
        return _write_texts(loaded, output)
    return _write_ids(loaded, tokenizer, max_length, output, overwrite)


def _write_texts(loaded: Suite, output: Path) -> int:
    import json

    from onepolicy.cli.outputs import save
    from onepolicy.suite import text_rows

    rows = list(text_rows(loaded))
    save("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), output)
    given = {row["id"] for row in rows}
    _told(output, f"{len(rows)} texts", loaded, [f"{x.id}: up to the limit" for x in loaded.texts if x.id not in given])
    return 0


def _write_ids(loaded: Suite, tokenizer: str, max_length: int | None, output: Path, overwrite: bool) -> int:
    from onepolicy.cli.outputs import say
    from onepolicy.storage import write
    from onepolicy.suite import fixed_rollouts

    with _tokenizer(tokenizer) as (engine, positions):
        rollouts, left_out = fixed_rollouts(loaded, engine, max_length or positions)
    write(rollouts, output, overwrite=overwrite)
    clusters = len(set(rollouts.clusters()[1]))
    _told(output, f"{len(rollouts)} texts, {rollouts.n_tokens:,} tokens, {clusters} clusters", loaded, left_out)
    say(f"next: score them, add old_logprobs; onepolicy suite import SCORED --of {output} -o scored.parquet")
    return 0


def _told(output: Path, what: str, loaded: Suite, left_out: Sequence[str]) -> None:
    from onepolicy.cli.outputs import say

    say(f"{output}: {what}; suite {loaded.version}")
    for line in left_out:
        say(f"left out: {line}")


@contextmanager
def _tokenizer(spec: str) -> Iterator[tuple[Encoder, int | None]]:
    """(something that encodes, positions of its model), from a directory, a packaged model's name, or an engine."""
    import os

    from onepolicy.engines import ENGINES
    from onepolicy.engines.model_files import read_config, text_config
    from onepolicy.engines.open import engine_class, open_engine
    from onepolicy.engines.texts import OFFLINE, Texts

    name, colon, rest = spec.partition(":")
    if colon and name in ENGINES and not engine_class(name).HEAVY:
        with open_engine(spec) as engine:
            yield engine, None
        return
    directory = _directory(rest.partition("?")[0] if colon and name in ENGINES else spec)
    # transformers warns of texts longer than the model, which are about to be left out
    for key, value in {**OFFLINE, "TRANSFORMERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(key, value)
    config = text_config(read_config(directory)) if (directory / "config.json").is_file() else {}
    positions = config.get("max_position_embeddings")
    yield Texts(directory), positions if isinstance(positions, int) and positions > 1 else None


def _directory(target: str) -> Path:
    """Where the tokenizer stands; weights are not asked for. Errors: `UsageError`."""
    from onepolicy import models

    directory = Path(target).expanduser()
    if not directory.is_dir() and target in models.MODELS:
        return Path(models.path(target))
    if not directory.is_dir():
        known = ", ".join(models.MODELS)
        raise UsageError(f"--tokenizer {target!r}: no such directory, and no packaged model ({known})")
    return directory


@suite.command(name="import")
def import_(
    scored: Annotated[Path, typer.Argument(metavar="SCORED", help="What the scorer returned.")],
    of: Annotated[Path, typer.Option("--of", metavar="IDS", help="What `suite export` wrote.")],
    output: Target,
    side: Annotated[str, typer.Option("--side", metavar="NAME", help="Which scoring of SCORED.")] = "old",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="The precision it computed in, if SCORED is silent.")
    ] = None,
    overwrite: options.Overwrite = False,
) -> int:
    """Check what a scorer returned against the ids that were sent, and keep both in one file.

    \b
    Example:
      onepolicy suite import scored.jsonl --of ids.jsonl -o scored.parquet --dtype bfloat16
    """
    from onepolicy.cli.outputs import require_free, say
    from onepolicy.errors import ContentError, UnknownName
    from onepolicy.storage import FORMATS, read, write
    from onepolicy.suite import returned

    require_free(output, overwrite, FORMATS)
    if dtype not in (None, *DTYPES):
        raise UnknownName("dtype", dtype, DTYPES)
    asked, back = read(of), read(scored)
    try:
        rollouts = returned(asked, back, side, dtype)
    except ContentError as err:
        raise type(err)(f"{scored}: {err}") from None
    write(rollouts, output, overwrite=overwrite)
    told = int(rollouts.scorings[side].logprobs.mask().sum())
    say(f"{output}: {len(rollouts)} texts, {told:,} of {rollouts.n_tokens:,} tokens scored by {side!r}")
    say(f"next: onepolicy compare {output} OTHER --a {side} --view fixed, or recorded:{output}?side={side}")
    return 0


DTYPES = ("float32", "bfloat16", "float16")
