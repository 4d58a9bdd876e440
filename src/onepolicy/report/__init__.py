"""Reports for people and for machines. No number is computed here; what is not in the `Report` is not shown.

To add one: a file with a function of a `Report` that returns text, and one line here.
"""

from __future__ import annotations

from collections.abc import Callable

from onepolicy.report.json import to_json
from onepolicy.report.junit import render_junit
from onepolicy.report.markdown import render_markdown
from onepolicy.report.text import render

#: format -> function of a `Report` that gives its text.
RENDERERS: dict[str, Callable[..., str]] = {
    "text": render,
    "json": to_json,
    "markdown": render_markdown,
    "junit": render_junit,
}
