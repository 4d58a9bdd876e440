"""The arrows of the design: who may import whom, and who may import a third-party package where.

Layers from the bottom up; a module may import its own layer and those below. `anywhere` may be imported by all.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "onepolicy"

#: First match wins; the number is the layer.
LAYERS: list[tuple[str, int]] = [
    ("errors", 0),
    ("schema", 0),
    ("arrays", 0),
    ("types", 1),
    ("values", 1),
    ("rollouts", 1),
    ("declared", 1),
    ("records", 1),
    ("validate", 1),
    ("align", 2),
    ("grid", 2),
    ("histogram", 2),
    ("views", 2),
    ("exact", 2),
    ("intervals", 2),
    ("sums", 3),
    ("windows", 3),
    ("reduce", 3),
    ("padded", 3),
    ("metrics", 4),
    ("floor", 4),
    ("corrections", 4),
    ("dialects", 4),
    ("estimate", 5),
    ("codes", 5),
    ("gates", 6),
    ("storage", 7),
    ("models", 7),
    ("suite", 7),
    ("counted", 1),
    ("profiles", 4),
    ("formats", 8),  # above storage, which reads the canonical files
    ("rows", 8),
    ("signatures", 8),
    ("integrity", 9),  # it explains raw records, so it stands above the formats
    ("replays", 8),
    ("whatif", 8),
    ("survey", 9),
    ("auditing", 10),
    ("together", 10),
    ("pool", 10),
    ("on_ray", 10),
    ("audited", 10),
    ("audit", 10),
    ("convert", 10),
    ("tokens", 8),
    ("engines", 8),
    ("report", 9),
    ("record", 9),
    ("legs", 9),
    ("verdict", 9),
    ("engine_tokens", 9),
    ("same_tokens", 10),
    ("checking", 10),
    ("checked", 10),
    ("check", 10),
    ("monitor", 10),  # of what is above the gates it knows `check` alone, which it runs again on live engines
    ("integrations", 10),  # it is handed the monitor, and a framework's own classes: it imports neither
    ("testing", 11),
    ("cli", 11),
]
LAYER = dict(LAYERS)
#: The core: numpy and the standard library only, at any place in the file.
CORE = {name for name, layer in LAYERS if layer <= 6}
#: Rooms that must not know each other although the order alone would allow it.
FORBIDDEN = {
    ("engines", "metrics"),
    ("engines", "gates"),
    ("engines", "sums"),
    ("engines", "estimate"),
    ("storage", "sums"),
    ("storage", "metrics"),
    ("report", "engines"),
    ("report", "check"),
    ("report", "reduce"),
    ("monitor", "engines"),
    ("monitor", "legs"),
    ("monitor", "report"),
    ("monitor", "corrections"),
}
#: Rooms that are imported lazily as a whole may name these at the top of a file.
AT_THE_TOP = {"cli": ("typer", "click", "rich"), "report": ("rich",)}
STANDARD = set(sys.stdlib_module_names) | {"__future__"}


def room(path: Path, root: Path) -> str:
    first = path.relative_to(root).parts[0]
    return first.removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """(module, whether at the top of the file) of every import that runs; TYPE_CHECKING blocks do not."""
    found: list[tuple[str, bool]] = []

    def walk(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
                names = (
                    [f"{child.module}.{a.name}" for a in child.names] if child.module == "onepolicy" else [child.module]
                )
                found.extend((name, top) for name in names)
            walk(child, top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    walk(tree, True)
    return found


def violations(root: Path) -> list[str]:
    """Every import that breaks a rule, as `file: what`."""
    out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        here = room(path, root)
        if here in ("__init__", "__main__"):
            continue
        if here not in LAYER:
            out.append(f"{path.name}: room {here!r} is in no layer")
            continue
        for module, top in imports(ast.parse(path.read_text(encoding="utf-8"))):
            problem = _problem(here, module, top)
            if problem:
                out.append(f"{path.relative_to(root)}: {problem}")
    return out


def _problem(here: str, module: str, top: bool) -> str | None:
    package, _, rest = module.partition(".")
    if package == "onepolicy":
        there = rest.split(".")[0]
        if there in ("", "__version__") or there == here:
            return None
        if (here, there) in FORBIDDEN or LAYER.get(there, 99) > LAYER[here]:
            return f"{here} (layer {LAYER[here]}) must not import {there} (layer {LAYER.get(there)})"
        return None
    if package in STANDARD or package == "numpy":
        return None
    if here in CORE:
        return f"the core must not import {package}"
    if top and package not in AT_THE_TOP.get(here, ()):
        return f"{package} must be imported inside the function that needs it"
    return None


def test_the_arrows_hold() -> None:
    assert violations(SRC) == []


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("sums.py", "from onepolicy.gates.judge import judge", "must not import gates"),
        ("align.py", "import onepolicy.check", "must not import check"),
        ("metrics/new.py", "def f():\n    import torch", "the core must not import torch"),
        ("engines/new.py", "import torch", "inside the function"),
        ("engines/new.py", "from onepolicy.metrics import METRICS", "must not import metrics"),
        ("report/new.py", "from onepolicy.reduce import reduce", "must not import reduce"),
        ("attic/new.py", "", "in no layer"),
    ],
)
def test_this_test_can_fail(tmp_path: Path, file: str, text: str, says: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert any(says in v for v in violations(tmp_path))


def test_what_is_allowed_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    text = "import json\nimport numpy\nfrom onepolicy.types import Scoring\ndef f():\n    import torch\n"
    (tmp_path / "engines" / "good.py").write_text(text)
    assert violations(tmp_path) == []
