"""`callable:pkg.mod:fn`: the user's own scorer, the normal way for FSDP and Megatron trainers.

`fn(list of int32 [T_i]) -> list of float [T_i]`: for each sequence one log-prob a token, at the semantics that the
rollouts declare; index 0 has no context and is ignored. NaN and infinities pass: they are judged later, in the open.
So does a meaning that differs from the rollouts' declared one: the scoring says its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

import onepolicy
from onepolicy.arrays import is_torch
from onepolicy.engines.base import SamplingParams, Switch, declared, using_of
from onepolicy.engines.semantics import common_semantics
from onepolicy.errors import ContentError, EngineError, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.schema import SEMANTICS
from onepolicy.types import Scoring, Values

_DTYPES = ("float32", "bfloat16", "float16")


class CallableEngine:
    """A function that scores, in a process of its own. The working directory is importable.

    Errors: `UsageError` for a target that cannot be imported or called.
    """

    NAME: ClassVar[str] = "callable"
    SAMPLES: ClassVar[bool] = False
    SCORES: ClassVar[bool] = True
    # a trainer of its own, as a rule: what exits or crashes in it must not end the comparison
    HEAVY: ClassVar[bool] = True
    SWITCHES: ClassVar[Mapping[str, Switch]] = {
        "dtype": Switch(str, "", "the precision it computes in", ("", *_DTYPES), declared=True),
        "semantics": Switch(
            str, "", "what its values mean; empty: whatever the rollouts declare", ("", *SEMANTICS), declared=True
        ),
        "batch_size": Switch(int, 0, "most sequences in one call of the function; 0 is a whole shard", live=True),
        "reverse": Switch(bool, False, "give it the sequences in reverse order, to see whether it keeps it", live=True),
    }

    def __init__(self, target: str, **options: Any) -> None:
        self._target = target
        self._dtype, self._semantics = options.get("dtype") or None, options.get("semantics") or None
        self._live = {k: options.get(k, s.default) for k, s in self.SWITCHES.items() if s.live}
        self._require_possible(self._live)
        self._function = load_function(target)

    def fingerprint(self) -> Mapping[str, Any]:
        """What is known of a function: its name, its module's file, what was declared."""
        return self._fingerprint(self._live)

    def _fingerprint(self, live: Mapping[str, Any]) -> dict[str, Any]:
        module = sys.modules.get(self._target.partition(":")[0])
        return {
            "engine": self.NAME,
            "function": self._target,
            "file": os.path.basename(getattr(module, "__file__", None) or ""),
            "dtype": self._dtype,
            "semantics": self._semantics,
            **live,
            "versions": {"onepolicy": onepolicy.__version__, "numpy": np.__version__},
        }

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> NoReturn:
        raise UsageError(f"engine callable:{self._target}: it has no tokenizer; give token ids")

    def decode(self, ids: Sequence[int]) -> NoReturn:
        raise UsageError(f"engine callable:{self._target}: it has no tokenizer; tokens are shown as ids")

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> NoReturn:
        raise UsageError(f"engine callable:{self._target}: it only scores; it cannot be the sampler")

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        """`[T]` float64 log-probs as the function gives them; index 0 is null. One call a batch.

        Errors: `EngineError` when the function raises; `ContentError` when it gives other shapes or no numbers;
        `UsageError` for distributions, and for semantics that the rollouts do not declare.
        """
        if distributions:
            raise UsageError(f"engine callable:{self._target}: it gives no full distributions; use hf")
        live = self._live | using_of(self, using)
        self._require_possible(live)
        rows = declared(rollouts, f"callable:{self._target}")
        ids = [np.array(rollouts.token_ids[rollouts.sequence(i)], dtype=np.int32) for i in range(len(rollouts))]
        given = self._given(ids, live)
        values = np.zeros(rollouts.n_tokens)
        valid = np.ones(rollouts.n_tokens, dtype=bool)
        for i, (name, column) in enumerate(zip(rollouts.record_ids(), given, strict=True)):
            at = rollouts.sequence(i)
            values[at] = self._column(name, column, at.stop - at.start)
            valid[at.start : at.start + 1] = False
        values[~valid] = 0.0
        semantics = self._semantics or common_semantics(rows)
        return Scoring(
            Values(values, valid), None, None, None, semantics, self._dtype, self._fingerprint(live), uuid.uuid4().hex
        )

    def close(self) -> None:
        pass

    def _require_possible(self, live: Mapping[str, Any]) -> None:
        if live["batch_size"] < 0:
            raise UsageError(f"engine callable:{self._target}: batch_size={live['batch_size']}, wanted at least 0")

    def _given(self, ids: list[NDArray[np.int32]], live: Mapping[str, Any]) -> list[Any]:
        """One column a sequence, in the order of `ids`, whatever order the function saw them in."""
        ids = ids[::-1] if live["reverse"] else ids
        size = live["batch_size"] or max(1, len(ids))
        given = [column for i in range(0, max(1, len(ids)), size) for column in self._call(ids[i : i + size])]
        return given[::-1] if live["reverse"] else given

    def _call(self, ids: list[NDArray[np.int32]]) -> list[Any]:
        try:
            given = self._function(ids)
        except (Exception, SystemExit) as err:  # sys.exit in a scorer is a failure of it, whatever its code
            raise EngineError(f"callable:{self._target} raised {_one_line(err)}, at {_place(err)}") from err
        try:
            out = list(given)
        except TypeError:
            raise ContentError(
                f"callable:{self._target}: got a {type(given).__name__}, wanted a list with one array a sequence"
            ) from None
        if len(out) != len(ids):
            raise ContentError(
                f"callable:{self._target}: got {len(out)} sequences for {len(ids)} that were asked; "
                "return one array for each, in order"
            )
        return out

    def _column(self, name: str, column: Any, wanted: int) -> NDArray[np.float64]:
        what = f"callable:{self._target}: record {name!r}"
        try:
            values = _numbers(column)
        except (TypeError, ValueError, RuntimeError) as err:
            raise ContentError(f"{what}: its values are not numbers: {_one_line(err)}") from err
        if values.ndim != 1:
            raise ContentError(f"{what}: got an array of shape {list(values.shape)}, wanted [{wanted}]")
        if len(values) == wanted - 1:
            raise ContentError(
                f"{what}: got {wanted - 1} values for {wanted} tokens; this looks like logits[:-1] against ids[1:]: "
                "put one value in front, value i belongs to token i and index 0 is ignored"
            )
        if len(values) != wanted:
            raise ContentError(f"{what}: got {len(values)} values for {wanted} tokens; one a token, no padding")
        return values


def load_function(target: str) -> Callable[[list[NDArray[np.int32]]], Any]:
    """The function `pkg.mod:fn`. Errors: `UsageError` saying whether the module or the name in it is the trouble."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise UsageError(f"engine callable:{target}: wanted callable:pkg.mod:fn, a function in a module")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        loaded: Any = importlib.import_module(module)
    except ModuleNotFoundError as err:
        if err.name and (module == err.name or module.startswith(err.name + ".")):
            where = f"it is looked for in {os.getcwd()} and the Python path"
            raise UsageError(f"engine callable:{target}: there is no module {err.name!r}; {where}") from err
        raise UsageError(f"engine callable:{target}: importing {module!r} failed: {_one_line(err)}") from err
    except (Exception, SystemExit) as err:
        text = f"importing {module!r} failed: {_one_line(err)}, at {_place(err)}"
        raise UsageError(f"engine callable:{target}: {text}") from err
    for part in name.split("."):
        if not hasattr(loaded, part):
            raise UsageError(f"engine callable:{target}: module {module!r} is there, but has no {name!r}")
        loaded = getattr(loaded, part)
    if not callable(loaded):
        raise UsageError(f"engine callable:{target}: {name!r} is a {type(loaded).__name__}, wanted a function")
    return loaded


def _numbers(column: Any) -> NDArray[np.float64]:
    """float64 of a list, an array, or a tensor on any device, bfloat16 and gradients included."""
    if is_torch(column):
        column = column.detach().double().cpu().numpy()
    elif isinstance(column, list | tuple) and column and is_torch(column[0]):
        column = [float(x) for x in column]
    elif isinstance(column, list | tuple) and column and column[0] is None:  # as in a file: no context, no value
        column = [np.nan, *column[1:]]
    array = np.asarray(column)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"an array of dtype {array.dtype}; use NaN where a value is missing")
    return array.astype(np.float64)


def _one_line(err: BaseException) -> str:
    first = (str(err).strip().splitlines() or ["no message"])[0]
    return f"{type(err).__name__}: {first[:300]}"


def _place(err: BaseException) -> str:
    """`file:line` of the innermost frame."""
    frames = traceback.extract_tb(err.__traceback__)
    if isinstance(err, SyntaxError) and err.filename:
        return f"{os.path.basename(err.filename)}:{err.lineno}"
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "an unknown place"
