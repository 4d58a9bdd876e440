"""What belongs to no verb: `--version`, `--debug`, and help when no verb is given."""

from __future__ import annotations

from typing import Annotated

import typer

from onepolicy import __version__


def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="On an error, print the traceback too.")] = False,
) -> None:
    """Do the two engines of LLM reinforcement learning give the same tokens the same probabilities?

    Exit codes: 0 pass, 1 drift, 2 usage, 3 inconclusive, 4 error.

    \b
    Example:
      onepolicy record --sampler vllm:MODEL -o rollouts.parquet
      onepolicy check rollouts.parquet --scorer hf:MODEL
    """
    if version:
        print(f"onepolicy {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
