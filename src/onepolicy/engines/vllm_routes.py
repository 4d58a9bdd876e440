"""Which experts a mixture model took for each token, read from vLLM's routers while it prefills one sequence.

The two functions run inside the engine's worker (`LLM.collective_rpc`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: By layer: the `[n, K]` experts of each step.
Taken = dict[int, list[NDArray[np.int16]]]


def watch(worker: Any) -> int:
    """Hooks every router of the model; the number of layers that have one. Errors: `ValueError` for kernels that
    choose the experts by themselves."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    layers = [m for m in worker.model_runner.get_model().modules() if isinstance(m, MoERunner)]
    worker.onepolicy_routes = taken = {}
    for layer in layers:
        if layer._quant_method.is_monolithic or not isinstance(layer.router, BaseRouter):
            raise ValueError(f"the experts of layer {layer.layer_id} are chosen inside its kernel and cannot be read")
        layer.router.set_capture_fn(partial(_keep, taken, layer.layer_id))
    return len(layers)


def _keep(taken: Taken, layer: int, experts: Any) -> None:
    taken.setdefault(layer, []).append(experts.cpu().numpy().astype(np.int16))


def take(worker: Any) -> NDArray[np.int16]:
    """`[n, L * K]` experts of the tokens since the last call, in ascending order within a layer: a router's own order
    is not defined in every kernel."""
    taken: Taken = worker.onepolicy_routes
    layers = [np.sort(np.concatenate(taken[layer]), axis=1) for layer in sorted(taken)]
    taken.clear()
    return np.concatenate(layers, axis=1) if layers else np.zeros((0, 0), dtype=np.int16)
