"""Lines of RL frameworks, cut out of their wheels and run; nothing is imported or installed.

The wheels come from `make frameworks` (pip download without dependencies, 6 MB).
"""

from __future__ import annotations

import ast
import dataclasses
import math
import typing
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from correction_batches import Batch, random_batch
from onepolicy import corrections

WHEELS = Path(__file__).parents[1] / "build" / "frameworks"
SEEDS = range(100)


@cache
def source(package: str, path: str) -> ast.Module:
    """The file of that name in the package's wheel, parsed."""
    found = sorted(WHEELS.glob(f"{package}-*.whl"))
    assert found, f"no wheel of {package} in build/frameworks: run `make frameworks`"
    with zipfile.ZipFile(found[0]) as wheel:
        name = next(n for n in wheel.namelist() if n == path or n.endswith(f"/purelib/{path}"))
        return ast.parse(wheel.read(name))


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for t in targets if isinstance(t, ast.Name)]


def nodes(tree: ast.AST, names: set[str]) -> list[ast.stmt]:
    """Definitions of these names, at the top of the file or in a class."""
    found = [n for n in ast.iter_child_nodes(tree) if isinstance(n, ast.stmt) and names & set(names_of(n))]
    for cls in ast.iter_child_nodes(tree):
        if isinstance(cls, ast.ClassDef) and cls.name not in names:
            found += nodes(cls, names)
    return found


def cut(package: str, path: str, *names: str, **given: Any) -> dict[str, Any]:
    """Run these definitions of a wheel's file, with torch and `given` at hand; functions without their decorators."""
    found = nodes(source(package, path), set(names))
    missing = set(names) - {n for node in found for n in names_of(node)}
    assert not missing, f"{package} {path} has no {missing}"
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    space: dict[str, Any] = {"torch": torch, "math": math, "nn": torch.nn, "Any": Any, **vars(typing), **given}
    space |= {"dataclass": dataclasses.dataclass, "field": dataclasses.field, "__name__": __name__}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *found], []), f"{package}:{path}", "exec"), space)
    return space


def batches(**options: Any) -> Iterator[tuple[Batch, dict[str, torch.Tensor]]]:
    """Finite batches of tokens whose log ratios are within +-20, and the tensors that frameworks take."""
    for seed in SEEDS:
        batch = random_batch(seed, odd=False, extreme=False, **options)
        if not batch.mask.any():
            continue
        sampler, policy = (np.where(batch.mask, x, 0.0) for x in (batch.sampler, batch.policy))
        A = (
            batch.advantages
            if batch.advantages.ndim == 2
            else np.broadcast_to(batch.advantages[:, None], batch.mask.shape)
        )
        A = np.where(A == 0, 0.3, A)
        arrays = {"sampler": sampler, "policy": policy, "mask": batch.mask, "A": A}
        yield batch, {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in arrays.items()}


def ours(name: str, x: dict[str, torch.Tensor], like_origin: bool = False, **options: Any) -> corrections.Correction:
    p = corrections.preset(name, like_origin=like_origin, **options)
    behind = {"old": x["sampler"]} if p.behind == "old" else {"sampler": x["sampler"]}
    policy = {"current": x["policy"]} if p.mode == "bypass" else {"old": x["policy"]}
    return p(**behind, **policy, mask=x["mask"], advantages=x["A"])


def same(c: corrections.Correction, weights: torch.Tensor, what: Any, keep: torch.Tensor | None = None) -> None:
    """Weights times keep are the origin's weights; keep, where the origin has one."""
    torch.testing.assert_close(c.weights * c.keep, weights.to(c.weights.dtype), rtol=1e-9, atol=0, msg=str(what))
    if keep is not None:
        assert torch.equal(c.keep, keep.bool()), what
