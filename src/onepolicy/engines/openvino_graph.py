"""A model directory's weights as an OpenVINO graph, written out op by op: no torch, and no weight is rounded.

The graph is what OpenVINO's own exporters make (a stateful decoder: `input_ids`, `attention_mask`, `position_ids`,
`beam_idx` to `logits`), so its pipelines take it as any other. Weights keep the type that their file has.
It covers decoders of the Llama family: RMS norm, rotary positions, grouped heads, a gated MLP with SiLU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.engines import model_files
from onepolicy.errors import EngineError, UsageError

#: `model_type` of config.json that the graph is right for.
FAMILY = ("llama", "mistral", "qwen2", "qwen3")
#: safetensors dtype -> (numpy's view of the bytes, OpenVINO's name)
_TYPES = {"F32": (np.float32, "f32"), "F16": (np.float16, "f16"), "BF16": (np.uint16, "bf16")}
#: Keys of config.json that change the function, and the only value that the graph computes.
_PLAIN: dict[str, Any] = {"hidden_act": "silu", "sliding_window": None, "use_sliding_window": False}


def write(directory: Path, file: Path) -> None:
    """Writes the model of `directory` to `file` (`*.xml`), its weights beside it.

    Errors: `UsageError` for an architecture that is not covered; `EngineError` for weights that do not fit config.json.
    """
    import openvino

    config = model_files.text_config(model_files.read_config(directory))
    require_covered(config, directory)
    graph = _Graph(config, Weights(directory))
    openvino.save_model(graph.model(), str(file), compress_to_fp16=False)


def require_covered(config: Mapping[str, Any], directory: Path) -> None:
    """Errors: `UsageError` naming what the graph does not compute."""
    found = {"model_type": config.get("model_type")} if config.get("model_type") not in FAMILY else {}
    plain = _PLAIN if config.get("use_sliding_window", True) else {"hidden_act": "silu"}
    found |= {k: config[k] for k, only in plain.items() if k in config and config[k] != only}
    rope = rope_of(config)
    if rope["rope_type"] != "default":
        found["rope_type"] = rope["rope_type"]
    if found:
        got = ", ".join(f"{k} {v!r}" for k, v in found.items())
        raise UsageError(
            f"engine openvino:{directory}: {got} is not covered; wanted {', '.join(FAMILY)} with plain rotary "
            "positions and SiLU, or a directory that holds openvino_model.xml (optimum-cli export openvino makes one)"
        )


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_type` and `rope_theta`, from where either generation of config.json has them."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    kind = new.get("rope_type") or old.get("rope_type") or old.get("type") or "default"
    return {"rope_type": kind, "rope_theta": float(new.get("rope_theta") or config.get("rope_theta") or 10_000.0)}


class Weights:
    """The tensors of a directory as float32 outputs of constants that keep the file's bytes and type."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found = {
            name: (dtype, shape, file, start)
            for path in sorted(directory.glob("*.safetensors"))
            for name, dtype, shape, file, start, _ in model_files._tensors(path)
        }
        self._used: set[str] = set()
        self._held: list[Any] = []

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def get(self, name: str, shape: tuple[int, ...]) -> Any:
        """A float32 output of that shape. Errors: `EngineError` for a tensor that is missing, or has another shape."""
        import openvino
        import openvino.opset13 as op

        if name not in self._found:
            raise EngineError(f"{self._directory}: tensor {name!r} is not in the files; they do not fit config.json")
        dtype, found, file, start = self._found[name]
        if tuple(found) != shape or dtype not in _TYPES:
            wanted = f"{list(shape)} of {', '.join(_TYPES)}"
            raise EngineError(f"{self._directory}: tensor {name!r}: got {found} of {dtype}, wanted {wanted}")
        self._used.add(name)
        view, kind = _TYPES[dtype]
        data = np.memmap(file, view, "r", offset=start, shape=shape)
        self._held.append(data)  # the constant looks into it and does not keep it
        constant = op.constant(openvino.Tensor(data, list(shape), getattr(openvino.Type, kind)))
        return constant if kind == "f32" else op.convert(constant, "f32")

    def require_all_used(self) -> None:
        """Errors: `EngineError` when a tensor is left over: then the graph is not this model."""
        rest = sorted(set(self._found) - self._used - {"lm_head.weight"})
        rest = [name for name in rest if not name.endswith("rotary_emb.inv_freq")]
        if rest:
            raise EngineError(
                f"{self._directory}: {len(rest)} tensors belong to nothing that config.json declares, {rest[0]!r} first"
            )


class _Graph:
    """One decoder. Shapes: B sequences, T tokens of this step, P tokens before it."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        import openvino
        import openvino.opset13 as op

        self._ov, self._op, self._weights = openvino, op, weights
        self._width, self._inner = int(config["hidden_size"]), int(config["intermediate_size"])
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config.get("num_key_value_heads") or self._heads)
        self._size = int(config.get("head_dim") or self._width // self._heads)
        self._layers, self._vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
        self._eps, self._theta = float(config["rms_norm_eps"]), rope_of(config)["rope_theta"]
        self._positions = int(config["max_position_embeddings"])
        self._tied = bool(config.get("tie_word_embeddings", False))
        self._sinks: list[Any] = []

    def model(self) -> Any:
        op, ov = self._op, self._ov
        self._ids, mask, positions = (
            self._input(name, "i64", 2) for name in ("input_ids", "attention_mask", "position_ids")
        )
        self._beam = self._input("beam_idx", "i32", 1)
        embedding = self._weights.get("model.embed_tokens.weight", (self._vocab, self._width))
        self._cos, self._sin = self._rotations(positions)
        self._batch = op.gather(op.shape_of(self._ids), self._ints(0), self._int(0))
        self._mask = self._causal(mask)
        x = op.gather(embedding, self._ids, self._int(0))
        for i in range(self._layers):
            x = self._layer(f"model.layers.{i}.", i, x)
        x = self._norm("model.norm.weight", x)
        head = embedding if self._tied else self._weights.get("lm_head.weight", (self._vocab, self._width))
        logits = op.result(op.matmul(x, head, False, True))
        logits.output(0).set_names({"logits"})
        self._weights.require_all_used()
        return ov.Model([logits], self._sinks, [self._ids, mask, positions, self._beam])

    # parts

    def _layer(self, name: str, i: int, x: Any) -> Any:
        op = self._op
        x = op.add(x, self._attention(name + "self_attn.", i, self._norm(name + "input_layernorm.weight", x)))
        y = self._norm(name + "post_attention_layernorm.weight", x)
        gate = op.swish(self._linear(name + "mlp.gate_proj", y, self._width, self._inner))
        up = self._linear(name + "mlp.up_proj", y, self._width, self._inner)
        return op.add(x, self._linear(name + "mlp.down_proj", op.multiply(gate, up), self._inner, self._width))

    def _attention(self, name: str, i: int, x: Any) -> Any:
        op, rows = self._op, self._heads * self._size
        q = self._turn(self._split(name + "q", x, self._heads))
        k = self._turn(self._split(name + "k", x, self._kv_heads))
        v = self._split(name + "v", x, self._kv_heads)
        k, v = (self._repeat(self._cached(f"past_key_values.{i}.{kind}", y)) for kind, y in (("key", k), ("value", v)))
        y = op.scaled_dot_product_attention(q, k, v, self._mask)
        y = op.reshape(op.transpose(y, self._ints(0, 2, 1, 3)), self._ints(0, 0, rows), True)
        return self._linear(name + "o_proj", y, rows, self._width)

    def _split(self, name: str, x: Any, heads: int) -> Any:
        """`[B, heads, T, size]`; Qwen 3 norms each head of q and k."""
        y = self._linear(name + "_proj", x, self._width, heads * self._size)
        y = self._op.reshape(y, self._ints(0, 0, heads, self._size), True)
        if name + "_norm.weight" in self._weights:
            y = self._norm(name + "_norm.weight", y, self._size)
        return self._op.transpose(y, self._ints(0, 2, 1, 3))

    def _turn(self, x: Any) -> Any:
        """Rotary positions in transformers' order: the halves of a head are the two coordinates."""
        op, half = self._op, self._size // 2
        low = op.slice(x, self._ints(0), self._ints(half), self._ints(1), self._ints(3))
        high = op.slice(x, self._ints(half), self._ints(2**63 - 1), self._ints(1), self._ints(3))
        turned = op.concat([op.multiply(high, self._float(-1)), low], -1)
        return op.add(op.multiply(x, self._cos), op.multiply(turned, self._sin))

    def _rotations(self, positions: Any) -> tuple[Any, Any]:
        """`[B, 1, T, size]` cosines and sines, looked up by position.

        Angles computed in the graph would be rounded to bfloat16 with everything else wherever OpenVINO does not see
        that this is a rotary embedding; there is no position 257 in bfloat16.
        """
        op = self._op
        # transformers takes powers and angles in float32 too
        powers = np.arange(0, self._size, 2, dtype=np.float32) / np.float32(self._size)
        inverse = np.float32(1) / np.float32(self._theta) ** powers
        angles = np.arange(self._positions, dtype=np.float32)[:, None] * inverse
        out: list[Any] = []
        for function in (np.cos, np.sin):
            table = op.constant(function(angles.astype(np.float64)).astype(np.float32))
            half = op.gather(table, positions, self._int(0))
            out.append(op.unsqueeze(op.concat([half, half], -1), self._int(1)))
        return out[0], out[1]

    def _cached(self, name: str, new: Any) -> Any:
        """`[B, heads, P + T, size]`: what the state holds, then `new`, which goes into the state too."""
        op = self._op
        empty = op.broadcast(self._float(0), op.concat([self._batch, self._ints(self._kv_heads, 0, self._size)], 0))
        info = self._ov.op.util.VariableInfo()
        info.data_shape = self._ov.PartialShape([-1, self._kv_heads, -1, self._size])
        info.data_type, info.variable_id = self._ov.Type.f32, name
        variable = self._ov.op.util.Variable(info)
        past = op.gather(op.read_value(empty, variable), self._beam, self._int(0))
        both = op.concat([past, new], 2)
        self._sinks.append(op.assign(both, variable))
        return both

    def _repeat(self, x: Any) -> Any:
        """Each KV head once for every query head that shares it."""
        op, times = self._op, self._heads // self._kv_heads
        if times == 1:
            return x
        shape = op.shape_of(x)
        length = op.gather(shape, self._ints(2), self._int(0))
        wide = op.concat([self._batch, self._ints(self._kv_heads, times), length, self._ints(self._size)], 0)
        y = op.broadcast(op.unsqueeze(x, self._int(2)), wide, "BIDIRECTIONAL")
        return op.reshape(y, self._ints(0, self._heads, -1, self._size), True)

    def _causal(self, mask: Any) -> Any:
        """`[B, 1, T, P + T]`: 0 where a token may look, -inf where not."""
        op = self._op
        last = op.gather(op.shape_of(mask), self._int(1), self._int(0))
        steps = op.gather(op.shape_of(self._ids), self._int(1), self._int(0))
        keys = op.range(self._int(0), last, self._int(1), "i64")
        queries = op.unsqueeze(op.range(op.subtract(last, steps), last, self._int(1), "i64"), self._int(1))
        seen = op.logical_and(
            op.less_equal(keys, queries), op.unsqueeze(op.not_equal(mask, self._int(0)), self._ints(1, 2))
        )
        return op.select(seen, self._float(0), self._float(-np.inf))

    def _norm(self, name: str, x: Any, size: int | None = None) -> Any:
        op = self._op
        mean = op.reduce_mean(op.power(x, self._float(2)), self._ints(-1), True)
        scale = op.divide(self._float(1), op.sqrt(op.add(mean, self._float(self._eps))))
        return op.multiply(op.multiply(x, scale), self._weights.get(name, (size or self._width,)))

    def _linear(self, name: str, x: Any, columns: int, rows: int) -> Any:
        y = self._op.matmul(x, self._weights.get(name + ".weight", (rows, columns)), False, True)
        if name + ".bias" not in self._weights:
            return y
        return self._op.add(y, self._weights.get(name + ".bias", (rows,)))

    # leaves

    def _input(self, name: str, kind: str, rank: int) -> Any:
        node = self._op.parameter([-1] * rank, getattr(self._ov.Type, kind), name=name)
        node.output(0).set_names({name})
        return node

    def _int(self, value: int) -> Any:
        return self._op.constant(np.int64(value))

    def _ints(self, *values: int) -> Any:
        return self._op.constant(np.array(values, dtype=np.int64))

    def _float(self, value: float) -> Any:
        return self._op.constant(np.float32(value))
