"""Options that several verbs share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Bounds = Annotated[
    str | None,
    typer.Option(
        "--bounds",
        metavar="PRESET|FILE.toml",
        help="bitwise, strict, fp32, fp16, bf16, or your own file. Default: by the coarser declared dtype.",
    ),
]
SavedBounds = Annotated[
    str | None,
    typer.Option(
        "--bounds",
        metavar="PRESET|FILE.toml",
        help="bitwise, strict, fp32, fp16, bf16, or your own file. Default: those the report was judged by.",
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
