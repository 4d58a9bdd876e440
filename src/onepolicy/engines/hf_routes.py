"""Which experts a mixture model takes for each token, read from its layers while they run."""

from __future__ import annotations

from functools import partial
from typing import Any

from onepolicy.errors import EngineError, UsageError

#: Names of the module that scores the experts, last part.
_ROUTERS = ("gate", "router")

#: Keys of a config that say how many experts a token gets.
_EACH = ("num_experts_per_tok", "moe_topk", "top_k_experts")


class Watch:
    """Hooks on every mixture layer of a model. `taken` gives what the last forward pass chose.

    Errors: `UsageError` for a model without mixture layers.
    """

    def __init__(self, model: Any, what: str) -> None:
        config = model.config.get_text_config()
        self._taken: dict[int, Any] = {}
        self._each: int = next((n for key in _EACH if (n := getattr(config, key, None))), 0)
        layers = _experts(model)
        for layer, module in enumerate(layers):
            module.register_forward_pre_hook(partial(self._given, layer), with_kwargs=True)
        for layer, module in enumerate([] if layers else _routers(model)):
            module.register_forward_hook(partial(self._scored, layer))
            layers.append(module)
        if not layers or not self._each:
            raise UsageError(f"{what}: routes=true, but it has no mixture-of-experts layers; leave it out")
        self._layers = len(layers)

    def _given(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the experts run: they are handed the choice."""
        for value in (*args, *kwargs.values()):
            if hasattr(value, "is_floating_point") and not value.is_floating_point() and value.shape[-1] == self._each:
                self._taken[layer] = value.reshape(-1, self._each)
                return

    def _scored(self, layer: int, module: Any, args: Any, output: Any) -> None:
        """After the router: the choice if it gives one, else the highest of its scores."""
        parts = output if isinstance(output, tuple) else (output,)
        whole = [p for p in parts if not p.is_floating_point()]
        self._taken[layer] = (whole[0] if whole else parts[0].topk(self._each, -1).indices).reshape(-1, self._each)

    def taken(self, rows: int, length: int) -> Any:
        """`[rows, length, L * K]` int16 experts of the last pass; ascending within a layer, because a router's own
        order is not defined in every kernel. Errors: `EngineError` when a layer did not tell."""
        import torch

        if len(self._taken) != self._layers:
            raise EngineError(f"routes: {len(self._taken)} of {self._layers} mixture layers told what they chose")
        layers = [self._taken[i].sort(-1).values.to(torch.int16) for i in range(self._layers)]
        self._taken.clear()
        return torch.cat(layers, -1).reshape(rows, length, -1)


def _experts(model: Any) -> list[Any]:
    """Modules that hold all experts of a layer and are called with the choice (transformers 5)."""
    import torch

    named = [m for name, m in model.named_modules() if name.rpartition(".")[2] == "experts"]
    return [m for m in named if not isinstance(m, torch.nn.ModuleList | torch.nn.ModuleDict)]


def _routers(model: Any) -> list[Any]:
    return [m for name, m in model.named_modules() if name.rpartition(".")[2] in _ROUTERS]
