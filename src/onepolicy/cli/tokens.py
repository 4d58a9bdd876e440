"""`onepolicy tokens`: rollouts, tokenizers, engines or a chat template, looked at before any probability."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onepolicy.cli import options
from onepolicy.errors import UsageError
from onepolicy.types import TokenReport

if TYPE_CHECKING:
    from onepolicy.tokens.base import Tokenizer

Rollouts = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="Rollouts, .jsonl or .parquet: ids, texts, masks, whatever they have."),
]
First = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="MODEL", help="The sampler's: a directory, a file of any kind, a server."),
]
Second = Annotated[
    str | None, typer.Option("--scorer-tokenizer", metavar="MODEL", help="The trainer's. Default: the same one.")
]
Sampler = Annotated[str | None, typer.Option("--sampler", metavar="ENGINE", help="Both engines' ids of one suite.")]
Scorer = Annotated[str | None, typer.Option("--scorer", metavar="ENGINE", help="The engine to hold against it.")]
Template = Annotated[
    Path | None, typer.Option("--template", metavar="FILE", help="A chat template: is it safe for multi-turn RL?")
]
OtherTemplate = Annotated[
    Path | None, typer.Option("--scorer-template", metavar="FILE", help="The trainer's, to hold against it.")
]
Conversations = Annotated[
    Path | None, typer.Option("--conversations", metavar="FILE", help="Your own chats for it, JSON lines.")
]
Reencodes = Annotated[
    bool | None,
    typer.Option("--reencodes/--keeps-ids", help="Whether your pipeline encodes replies again. Default: not known."),
]
StopIds = Annotated[list[int] | None, typer.Option("--stop-id", metavar="ID", help="An id that ends a reply.")]
Strict = Annotated[bool, typer.Option("--strict", help="A record that cannot be read is an error.")]


def tokens(
    file: Rollouts = None,
    tokenizer: First = None,
    scorer_tokenizer: Second = None,
    sampler: Sampler = None,
    scorer: Scorer = None,
    template: Template = None,
    scorer_template: OtherTemplate = None,
    conversations: Conversations = None,
    reencodes: Reencodes = None,
    stop_id: StopIds = None,
    strict: Strict = False,
    suite: options.SuiteSize = "smoke",
    timeout: options.Timeout = 600.0,
    output: options.Outputs = None,
    as_json: options.Json = False,
    overwrite: options.Overwrite = False,
) -> int:
    """The same text is the same tokens, and sampled tokens stay themselves: is that so?

    \b
    Example:
      onepolicy tokens rollouts.jsonl --tokenizer MODEL
      onepolicy tokens --tokenizer MODEL --scorer-tokenizer OTHER
      onepolicy tokens --sampler vllm:MODEL --scorer hf:MODEL
      onepolicy tokens --template chat_template.jinja --tokenizer MODEL
    """
    from onepolicy.cli.outputs import require_free, show_tokens

    require_free(output or [], overwrite)
    given = {"FILE": file, "--sampler": sampler, "--template": template}
    asked = [name for name, value in given.items() if value is not None]
    _require_one(asked, tokenizer, scorer_tokenizer, sampler, scorer)
    chats = template is not None or (not asked and scorer_tokenizer is None)
    _require_use("a FILE of rollouts", file is not None, {"--reencodes": reencodes, "--stop-id": stop_id})
    _require_use("--template", chats, {"--scorer-template": scorer_template, "--conversations": conversations})
    _require_use("rollouts, tokenizers or a template", sampler is None, {"--tokenizer": tokenizer})
    if sampler is not None and scorer is not None:
        report = _engines(sampler, scorer, suite, timeout)
    elif file is not None:
        report = _rollouts(file, tokenizer, scorer_tokenizer, reencodes, stop_id or [], strict)
    elif template is None and tokenizer is not None and scorer_tokenizer is not None:
        report = _tokenizers(tokenizer, scorer_tokenizer)
    else:
        report = _template(template, scorer_template, tokenizer, conversations, strict)
    return show_tokens(report, output, as_json)


def _require_one(asked: list[str], tokenizer: str | None, other: str | None, sampler: Any, scorer: Any) -> None:
    """Errors: `UsageError` for nothing to look at, or two things at once."""
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)}: one thing at a time; run the command once for each")
    if (sampler is None) != (scorer is None):
        raise UsageError("--sampler and --scorer go together: two engines, the same prompts")
    if not asked and tokenizer is None:
        wanted = "a FILE of rollouts, --tokenizer (and --scorer-tokenizer), --sampler and --scorer, or --template"
        raise UsageError(f"nothing to look at: give {wanted}")
    if other is not None and tokenizer is None:
        raise UsageError("--scorer-tokenizer is held against --tokenizer MODEL, which is missing")


def _require_use(what: str, asked: bool, given: dict[str, Any]) -> None:
    """Errors: `UsageError` for an option that belongs to another question, and would be ignored."""
    idle = [name for name, value in given.items() if value is not None]
    if idle and not asked:
        raise UsageError(f"{idle[0]} goes with {what}; nothing asked here uses it")


def _opened(target: str | None) -> Tokenizer | None:
    from onepolicy.tokens.open import open_tokenizer

    return None if target is None else open_tokenizer(target)


def _rollouts(
    file: Path, tokenizer: str | None, other: str | None, reencodes: bool | None, stop_ids: list[int], strict: bool
) -> TokenReport:
    from onepolicy.cli.progress import progress
    from onepolicy.same_tokens import check_rollouts

    a, b = _opened(tokenizer), _opened(other)
    with progress("reading", "records") as told:
        return check_rollouts(file, a, b, reencodes=reencodes, stop_ids=stop_ids, strict=strict, progress=told)


def _tokenizers(first: str, second: str) -> TokenReport:
    from onepolicy.same_tokens import check_tokenizers
    from onepolicy.tokens.open import open_tokenizer

    return check_tokenizers(open_tokenizer(first), open_tokenizer(second))


def _engines(sampler: str, scorer: str, suite: str, timeout: float) -> TokenReport:
    from onepolicy.engine_tokens import check_engine_tokens
    from onepolicy.suite import load

    return check_engine_tokens(sampler, scorer, load(suite), timeout=timeout)


def _template(
    template: Path | None, other: Path | None, tokenizer: str | None, conversations: Path | None, strict: bool
) -> TokenReport:
    from onepolicy.same_tokens import check_chat_template, check_two_templates
    from onepolicy.tokens.templates.conversations import load_conversations

    own, skipped = load_conversations(conversations, strict=strict) if conversations else ([], [])
    text = _read(template)
    if other is not None:
        return check_two_templates(text, _read(other), _opened(tokenizer), conversations=own, seen=skipped)
    return check_chat_template(text, _opened(tokenizer), conversations=own, seen=skipped)


def _read(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        why = err.strerror if isinstance(err, OSError) else "it is not UTF-8 text"
        raise UsageError(f"template {path}: cannot be read: {why}") from None
