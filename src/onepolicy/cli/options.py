"""Options that several verbs share, declared once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onepolicy.errors import UsageError

if TYPE_CHECKING:
    from onepolicy.engines.base import SamplingParams
    from onepolicy.suite import Suite

Bounds = Annotated[
    str | None,
    typer.Option(
        "--bounds",
        metavar="PRESET|FILE.toml",
        help="A preset (strict, bf16, fp8, ...) or your own file. Default: the floor and the coarser dtype's.",
    ),
]
SavedBounds = Annotated[
    str | None,
    typer.Option(
        "--bounds",
        metavar="PRESET|FILE.toml",
        help="A preset (strict, bf16, fp8, ...) or your own file. Default: those the report was judged by.",
    ),
]
View = Annotated[
    str,
    typer.Option(
        "--view", metavar="VIEW", help="Which tokens: drawn (by the sampler), loss (those under the loss mask), fixed."
    ),
]
ReplyLength = Annotated[
    int | None,
    typer.Option("--reply-length", min=1, metavar="N", help="Tokens of your replies. Default: the recorded median."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="REPORT.json", help="Save the report; `judge` reads it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of text.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace outputs that exist.")]
Outputs = Annotated[
    list[Path] | None,
    typer.Option("--output", "-o", metavar="FILE", help="Save the report: .json, .md, .xml (JUnit). May be repeated."),
]
Scorer = Annotated[str, typer.Option("--scorer", metavar="ENGINE", help="name:target?key=value, as hf:DIR.")]
Sampler = Annotated[
    str | None, typer.Option("--sampler", metavar="ENGINE", help="The engine that draws, for its own legs too.")
]
Reference = Annotated[
    str | None, typer.Option("--reference", metavar="ENGINE", help="A third scoring: which side owns the gap.")
]
FloorEngine = Annotated[
    str | None, typer.Option("--floor", metavar="ENGINE", help="Measure the floor with it, as hf:DIR. Default: scorer.")
]
Legs = Annotated[
    list[str] | None, typer.Option("--legs", metavar="NAMES", help="Only these legs; pair: none. Default: all.")
]
Skip = Annotated[list[str] | None, typer.Option("--skip", metavar="NAMES", help="All legs but these.")]
SuiteSize = Annotated[str, typer.Option("--suite", metavar="SIZE", help="smoke, default, full: see `suite list`.")]
Prompts = Annotated[
    list[Path] | None, typer.Option("--prompts", metavar="FILE", help="Draw from these instead of the suite.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, metavar="N", help="Longest reply.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, metavar="X", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, metavar="X", help="1 switches it off.")]
TopK = Annotated[int, typer.Option("--top-k", min=-1, metavar="N", help="0 switches it off.")]
MinP = Annotated[float, typer.Option("--min-p", min=0.0, max=1.0, metavar="X", help="0 switches it off.")]
Samples = Annotated[int, typer.Option("--samples", min=1, metavar="N", help="Replies to each prompt.")]
Seed = Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Seed of the draws.")]


def sampling_params(
    max_tokens: int, temperature: float, top_p: float, top_k: int, min_p: float, samples: int, seed: int
) -> SamplingParams:
    """Errors: `UsageError` for numbers that are not finite."""
    from onepolicy.engines.base import SamplingParams

    for name, value in (("temperature", temperature), ("top-p", top_p), ("min-p", min_p)):
        if not math.isfinite(value):
            raise UsageError(f"--{name} {value}: wanted a finite number")
    if top_p <= 0:
        raise UsageError(f"--top-p {top_p:g}: wanted a share above 0; 1 switches it off")
    return SamplingParams(max_tokens, temperature, top_p, max(top_k, 0), min_p, samples=samples, seed=seed)


def suite_of(size: str, prompts: list[Path] | None) -> Suite:
    """The suite of that size; prompts of the user's own stand instead of its prompts, its texts stay."""
    from dataclasses import replace

    from onepolicy.suite import load

    suite = load(size)
    if not prompts:
        return suite
    own = load(size, prompts, only_files=True)
    return replace(suite, version=f"{suite.version}+{own.version}", prompts=own.prompts, texts=suite.texts + own.texts)
