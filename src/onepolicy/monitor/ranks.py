"""One collective a step: every rank's vector to every rank, on a process group of its own, read one step later.

`start` is called first thing in a step, whatever else failed, and by every rank; `read` waits only for what was started
a step before. On a GPU the collective and the copy to the host run on a stream of their own.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from onepolicy.arrays import Array, is_torch
from onepolicy.errors import UsageError
from onepolicy.monitor.actions import SetUpError
from onepolicy.monitor.vector import LENGTH
from onepolicy.types import FloatArray


class Pending(Protocol):
    """A collective under way."""

    def read(self) -> FloatArray:
        """`[world, LENGTH]`, in rank order."""
        ...

    def on_device(self) -> Array:
        """The same, where it lies; the device waits for it, the host does not."""
        ...


class Ranks(Protocol):
    """Those who observe together."""

    rank: int
    world: int

    def start(self, vector: Array) -> Pending: ...


class Kept:
    """Vectors that are on the host already."""

    def __init__(self, rows: FloatArray) -> None:
        self._rows = rows

    def read(self) -> FloatArray:
        return self._rows

    def on_device(self) -> Array:
        return self._rows


class Alone:
    """One process: no collective."""

    rank, world = 0, 1

    def start(self, vector: Array) -> Pending:
        if not is_torch(vector):
            return Kept(vector[None].copy())
        return _DeviceCopy(vector.detach()[None].clone(), None)


class ProcessGroup:
    """The ranks of torch.distributed, all or some."""

    def __init__(self, members: Sequence[int] | None, timeout: float) -> None:
        """Collective: every member makes one, at the same place in the program. Errors: `UsageError`."""
        import torch
        import torch.distributed as dist

        mine = dist.get_rank()
        if members is not None and mine not in members:
            raise UsageError(f"ranks are {list(members)}, and this is rank {mine}: build the monitor on those alone")
        wait = datetime.timedelta(seconds=timeout)
        self.group: Any = dist.new_group(None if members is None else list(members), timeout=wait, **_local(members))
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        cuda = "nccl" in str(dist.get_backend(self.group))
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._stream: Any = torch.cuda.Stream() if cuda else None

    def start(self, vector: Array) -> Pending:
        import torch

        mine = (vector if is_torch(vector) else torch.from_numpy(vector)).detach()
        if self._stream is None:
            return self._gather(mine.to(self.device).contiguous())
        # the side stream waits for the vector, the training stream for nothing
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            mine = mine.to(self.device, non_blocking=True)
            mine.record_stream(self._stream)
            return self._gather(mine.contiguous())

    def _gather(self, mine: Array) -> Pending:
        import torch
        import torch.distributed as dist

        rows = torch.empty(self.world * LENGTH, dtype=torch.float64, device=self.device)
        work = _all_gather(dist)(rows, mine, group=self.group, async_op=True)
        return _DeviceCopy(rows.view(self.world, LENGTH), work, self._stream)

    def agree(self, problem: str) -> None:
        """Waits for all at set-up. Errors: `SetUpError` on every rank where one has a problem."""
        import torch
        import torch.distributed as dist

        text = problem.encode()[:_TEXT].ljust(_TEXT, b"\0")
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        rows = torch.empty(self.world * _TEXT, dtype=torch.uint8, device=self.device)
        _all_gather(dist)(rows, mine, group=self.group)
        texts = rows.view(self.world, _TEXT).cpu().numpy()
        for rank, text in enumerate(texts):
            told = bytes(text).rstrip(b"\0").decode(errors="replace")
            if told:
                raise SetUpError(f"rank {rank}: {told}")


#: Longest message, in bytes, that a rank tells the others at set-up.
_TEXT = 400


def _all_gather(dist: Any) -> Any:
    """Into one tensor; torch 2.13 renamed it."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _local(members: Sequence[int] | None) -> dict[str, Any]:
    """Only the members have to come, where there are some."""
    return {} if members is None else {"use_local_synchronization": True}


class _DeviceCopy:
    """Rows on a device, copied to the host behind the collective; read without waiting for anything later."""

    def __init__(self, rows: Array, work: Any, stream: Any = None) -> None:
        self._rows, self._work, self._stream = rows, work, stream
        self._host: Any = None
        self._done: Any = None
        if rows.device.type == "cuda":
            self._copy(rows)
        elif rows.device.type != "cpu":
            self._host = None

    def _copy(self, rows: Array) -> None:
        torch = sys.modules["torch"]
        with torch.cuda.stream(self._stream or torch.cuda.current_stream()):
            if self._work is not None:
                self._work.wait()  # on this stream: the host goes on
            self._host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._host.copy_(rows, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> FloatArray:
        if self._done is not None:
            self._done.synchronize()
            return self._host.numpy()
        if self._work is not None:
            self._work.wait()
        return (self._rows if self._rows.device.type == "cpu" else self._rows.cpu()).numpy()

    def on_device(self) -> Array:
        if self._done is not None:
            here = sys.modules["torch"].cuda.current_stream()
            here.wait_event(self._done)
            self._rows.record_stream(here)
        elif self._work is not None:
            self._work.wait()
        return self._rows


def ranks_of(who: str | Sequence[int], timeout: float) -> Any:
    """`"all"`: every rank of torch.distributed where it is initialised, else one process. `"alone"`: one process. A
    list of ranks: those. Errors: `UsageError`."""
    dist = sys.modules.get("torch.distributed")
    up = dist is not None and dist.is_available() and dist.is_initialized()
    if who == "alone" or (who == "all" and not up):
        return Alone()
    if isinstance(who, str) and who != "all":
        raise UsageError(f"ranks is {who!r}, wanted 'all', 'alone' or a list of ranks")
    if not up:
        raise UsageError(f"ranks is {who!r}, but torch.distributed is not initialised in this process")
    return ProcessGroup(None if who == "all" else [int(r) for r in who], timeout)


def rows_of(values: Any) -> FloatArray:
    """Saved rows, as they were read."""
    return np.array(values, dtype=np.float64).reshape(-1, LENGTH)
