"""Options that several verbs share, declared once."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

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

RolloutsFile = Annotated[
    str | None,
    typer.Argument(metavar="FILE", help="What `record` wrote, or recorded:FILE?side=NAME. Default: draw first."),
]
SamplerSide = Annotated[str, typer.Option(metavar="NAME", help="Which recorded scoring to compare with.")]
Scores = Annotated[Path | None, typer.Option(metavar="FILE", help="Save rollouts and the scorer's values.")]
Exact = Annotated[bool, typer.Option("--exact", help="Compare full distributions where the engines can.")]
Declare = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="What the file does not say, as temperature=1.")
]
Timeout = Annotated[
    float, typer.Option(min=1.0, metavar="S", help="Seconds for one request to an engine, loading included.")
]
Resume = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep finished scorings there, and take those it holds.")
]


@dataclass(frozen=True, slots=True)
class Draws:
    """How a sampler draws: what `record` and `check` share. A verb's own defaults stand in the instance it gives."""

    max_tokens: MaxTokens = 64
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    samples: Samples = 1
    seed: Seed = 0

    def params(self) -> SamplingParams:
        """Errors: `UsageError` for numbers that are not finite, and for a nucleus of nothing."""
        from onepolicy.engines.base import SamplingParams

        for name, value in (("temperature", self.temperature), ("top-p", self.top_p), ("min-p", self.min_p)):
            if not math.isfinite(value):
                raise UsageError(f"--{name} {value}: wanted a finite number")
        if self.top_p <= 0:
            raise UsageError(f"--top-p {self.top_p:g}: wanted a share above 0; 1 switches it off")
        return SamplingParams(
            self.max_tokens, self.temperature, self.top_p, max(self.top_k, 0), self.min_p, samples=self.samples,
            seed=self.seed,
        )  # fmt: skip


#: What a verb draws with unless it says otherwise.
DRAWS = Draws()


def expanded(verb: Callable[..., int]) -> Callable[..., int]:
    """The verb as typer should see it: a parameter that is a group of options (`Draws`) becomes these options, in its
    place, with the values of its default as theirs."""
    signature = inspect.signature(verb, eval_str=True)
    groups: dict[str, type[Any]] = {
        p.name: type(p.default) for p in signature.parameters.values() if is_dataclass(p.default)
    }
    options = [option for p in signature.parameters.values() for option in _options_of(p)]

    @functools.wraps(verb)
    def command(**given: Any) -> int:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        return verb(**given)

    command.__signature__ = signature.replace(parameters=options)  # pyright: ignore[reportAttributeAccessIssue]
    command.__annotations__ = {p.name: p.annotation for p in options}
    return command


def _options_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    default = parameter.default
    if not is_dataclass(default):
        return [parameter]
    hints = get_type_hints(type(default), include_extras=True)
    return [
        inspect.Parameter(f.name, parameter.kind, default=getattr(default, f.name), annotation=hints[f.name])
        for f in fields(default)
    ]


def suite_of(size: str, prompts: list[Path] | None) -> Suite:
    """The suite of that size; prompts of the user's own stand instead of its prompts, its texts stay."""
    from dataclasses import replace

    from onepolicy.suite import load

    suite = load(size)
    if not prompts:
        return suite
    own = load(size, prompts, only_files=True)
    return replace(suite, version=f"{suite.version}+{own.version}", prompts=own.prompts, texts=suite.texts + own.texts)
