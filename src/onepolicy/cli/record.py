"""`onepolicy record`: a sampler draws replies; ids, log-probs and what is declared are kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from onepolicy.cli import options
from onepolicy.errors import UsageError

_DEFAULT_PROMPTS = "Prompts: .txt (one a line) or JSON lines. Default: 64 of our own."


def record(
    sampler: Annotated[str, typer.Option(metavar="ENGINE", help="name:target?key=value, as vllm:DIR?dtype=bfloat16.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="A .parquet or .jsonl file.")],
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=_DEFAULT_PROMPTS)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest reply.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="X", help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, metavar="X", help="1 switches it off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=-1, metavar="N", help="0 switches it off.")] = 0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0, metavar="X", help="0 switches it off.")] = 0.0,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Replies to each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the draws.")] = 0,
    overwrite: options.Overwrite = False,
) -> int:
    """Draw replies from a sampler; keep their ids and log-probs.

    \b
    Example:
      onepolicy record --sampler 'vllm:MODEL?dtype=bfloat16' -o rollouts.parquet
    """
    from onepolicy.cli.outputs import require_free, say
    from onepolicy.cli.progress import progress
    from onepolicy.engines.base import SamplingParams
    from onepolicy.record import record_rollouts
    from onepolicy.storage import FORMATS, write
    from onepolicy.suite import read_prompts

    require_free(output, overwrite, FORMATS)
    for name, value in (("temperature", temperature), ("top-p", top_p), ("min-p", min_p)):
        if not math.isfinite(value):
            raise UsageError(f"--{name} {value}: wanted a finite number")
    chosen = None if prompts is None else read_prompts(prompts)
    params = SamplingParams(max_tokens, temperature, top_p, max(top_k, 0), min_p, samples=samples, seed=seed)
    partial = output.with_name(f"{output.stem}.partial{output.suffix}")
    with progress("drawing", "prompts") as told:
        rollouts = record_rollouts(sampler, prompts=chosen, params=params, progress=told, partial=partial)
    write(rollouts, output, overwrite=overwrite)
    say(f"{output}: {int(rollouts.drawn.sum()):,} drawn tokens in {len(rollouts):,} replies")
    say(f"next: onepolicy check {output} --scorer ENGINE")
    return 0
