"""`onepolicy record`: a sampler draws replies; ids, log-probs and what is declared are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onepolicy.cli import options

_DEFAULT_PROMPTS = "Prompts: .txt (one a line) or JSON lines. Default: 64 of our own."
_DRAWS = options.Draws(max_tokens=128)


@options.expanded
def record(
    sampler: Annotated[str, typer.Option(metavar="ENGINE", help="name:target?key=value, as vllm:DIR?dtype=bfloat16.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A .parquet or .jsonl file.")],
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=_DEFAULT_PROMPTS)] = None,
    draws: options.Draws = _DRAWS,
    overwrite: options.Overwrite = False,
) -> int:
    """Draw replies from a sampler; keep their ids and log-probs.

    \b
    Example:
      onepolicy record --sampler 'vllm:MODEL?dtype=bfloat16' -o rollouts.parquet
    """
    from onepolicy.cli.outputs import require_free, say
    from onepolicy.cli.progress import progress
    from onepolicy.record import record_rollouts
    from onepolicy.storage import FORMATS, write
    from onepolicy.suite import read_prompts

    require_free(output, overwrite, FORMATS)
    chosen = None if prompts is None else read_prompts(prompts)
    params = draws.params()
    partial = output.with_name(f"{output.stem}.partial{output.suffix}")
    with progress("drawing", "prompts") as told:
        rollouts = record_rollouts(sampler, prompts=chosen, params=params, progress=told, partial=partial)
    write(rollouts, output, overwrite=overwrite)
    say(f"{output}: {int(rollouts.drawn.sum()):,} drawn tokens in {len(rollouts):,} replies")
    say(f"next: onepolicy check {output} --scorer ENGINE")
    return 0
