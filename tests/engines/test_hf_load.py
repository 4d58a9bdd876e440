"""How the transformers engine loads a model: each switch against a model that was changed by other means."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_reference import chosen, expected, plain_logits, texts

from onepolicy import models
from onepolicy.engines import hf_load
from onepolicy.engines.base import Engine
from onepolicy.engines.open import open_engine
from onepolicy.errors import EngineError, UnknownName, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def torch() -> Any:
    return importlib.import_module("torch")


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with open_engine("hf:tiny?dtype=float32", in_process=True) as engine:
        yield engine


def scored(spec: str, rollouts: Rollouts, **using: Any) -> Scoring:
    with open_engine(spec, in_process=True) as engine:
        return engine.score(rollouts, using=using)


def raw_of(run: Callable[[np.ndarray], np.ndarray], rollouts: Rollouts) -> np.ndarray:
    return chosen(rollouts, expected(rollouts, run, lambda z, before, n, t: z))


def gap(scoring: Scoring, other: np.ndarray) -> np.ndarray:
    """`[T]` absolute, without each index 0."""
    return np.abs(scoring.logprobs.values - other)[scoring.logprobs.mask()]


def rms(scoring: Scoring, other: np.ndarray) -> float:
    return float(np.sqrt(np.mean(gap(scoring, other) ** 2)))


def copy_of_tiny(to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(models.path("tiny"), to)
    config = json.loads((to / "config.json").read_text())
    change(config)
    (to / "config.json").write_text(json.dumps(config))
    return to


# --- precision ------------------------------------------------------------------------------------------------------


def test_a_float32_head_multiplies_bfloat16_hidden_states_exactly(torch: Any) -> None:
    from transformers import AutoModelForCausalLM

    rollouts = texts("raw")
    model = AutoModelForCausalLM.from_pretrained(models.path("tiny"), dtype=torch.bfloat16).eval()

    def run(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            hidden = model.model(torch.tensor(ids[None], dtype=torch.long)).last_hidden_state[0]
        return hidden.double().numpy() @ model.lm_head.weight.detach().double().numpy().T

    want = raw_of(run, rollouts)
    with open_engine("hf:tiny?head_dtype=float32&batch_size=1", in_process=True) as engine:
        wide, decoded = engine.score(rollouts), engine.score(rollouts, using={"path": "decode"})
        assert engine._model.get_input_embeddings().weight.dtype is torch.bfloat16  # tied to the head, and left alone
    narrow = scored("hf:tiny?batch_size=1", rollouts)
    assert gap(wide, want).max() < 1e-5 and gap(narrow, want).mean() > 1e-3
    assert 1e-4 < gap(decoded, want).mean() < 0.05
    assert (wide.fingerprint["head_dtype"], wide.dtype) == ("float32", "bfloat16")


@pytest.fixture(scope="module")
def fine(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model with float32 weights that are no bfloat16 values."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models.path("tiny"), dtype=torch.float32)
    for weight in model.parameters():
        weight.data *= 1.001
    where = tmp_path_factory.mktemp("fine") / "model"
    shutil.copytree(models.path("tiny"), where)
    model.save_pretrained(where)
    return where


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_on_rounded_weights_is_the_reference_of_that_dtype(dtype: str, fine: Path, torch: Any) -> None:
    from transformers import AutoModelForCausalLM

    rollouts = texts("raw")
    model = AutoModelForCausalLM.from_pretrained(str(fine), dtype=getattr(torch, dtype)).float().eval()
    run = lambda ids: model(torch.tensor(ids[None], dtype=torch.long)).logits[0].double().detach().numpy()
    out = scored(f"hf:{fine}?dtype=float32&rounded_to={dtype}", rollouts)
    assert gap(out, raw_of(run, rollouts)).max() < 2e-5
    assert out.fingerprint["rounding_changed_weights"] is True and out.fingerprint["stored_dtype"] == "float32"
    assert gap(scored(f"hf:{fine}?dtype=float32", rollouts), raw_of(run, rollouts)).mean() > 1e-4


def test_rounding_what_is_already_rounded_changes_nothing_and_says_so(plain: Engine) -> None:
    rollouts = texts("raw")
    out = scored("hf:tiny?dtype=float32&rounded_to=bfloat16", rollouts)
    assert out.fingerprint["rounding_changed_weights"] is False and out.fingerprint["stored_dtype"] == "bfloat16"
    assert np.array_equal(out.logprobs.values, plain.score(rollouts).logprobs.values)


def test_float32_is_never_tf32(torch: Any) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with open_engine("hf:tiny?dtype=float32", in_process=True) as engine:
            kernels = engine.fingerprint()["kernels"]
        assert kernels["tf32"] is False and kernels["float32_matmul_precision"] == "highest"
        assert torch.backends.cuda.matmul.allow_tf32 is False and torch.backends.cudnn.allow_tf32 is False
    finally:
        torch.set_float32_matmul_precision(before)


# --- another config, other weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        ({"rope_theta": 5000}, lambda c: c["rope_parameters"].update(rope_theta=5000.0)),
        ({"rms_norm_eps": 1e-3}, lambda c: c.update(rms_norm_eps=1e-3)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            lambda c: c["rope_parameters"].update(rope_type="linear", factor=2.0),
        ),
    ],
    ids=["rope_theta", "rms_norm_eps", "rope_scaling"],
)
def test_an_override_acts_as_the_same_config_on_disk(
    overrides: dict[str, Any], change: Callable[[dict[str, Any]], None], tmp_path: Path, plain: Engine
) -> None:
    rollouts = texts("raw")
    out = scored(f"hf:tiny?dtype=float32&overrides={json.dumps(overrides)}", rollouts)
    run = plain_logits(copy_of_tiny(tmp_path / "model", change))
    assert gap(out, raw_of(run, rollouts)).max() < 2e-5
    assert rms(out, plain.score(rollouts).logprobs.values) > 0.01
    assert out.fingerprint["overrides"] == overrides
    assert out.fingerprint["config_digest"] != plain.fingerprint()["config_digest"]


def test_a_scaling_beyond_the_original_context_acts_there_alone(plain: Engine) -> None:
    """As an engine that draws meets it: keys before the limit were cached without it."""
    scaling = {"rope_type": "longrope", "factor": 4.0, "attention_factor": 1.0, "short_factor": [1.0] * 16}
    scaling |= {"long_factor": [4.0] * 16, "original_max_position_embeddings": 64}
    rollouts = texts("raw")
    overrides = json.dumps({"rope_scaling": scaling})
    out = scored(f"hf:tiny?dtype=float32&batch_size=1&overrides={overrides}", rollouts, path="decode")
    bad = np.abs(out.logprobs.values - plain.score(rollouts).logprobs.values) > 1e-3
    at = rollouts.sequence(3)
    assert rollouts.lengths[3] == 90 and not np.delete(bad, np.r_[at]).any()
    # the token at position 64 is read with the new scaling, so the first log-prob that moves is that of token 65
    assert np.flatnonzero(bad[at])[0] == 65 and bad[at][65:].mean() > 0.9


def noise(share: float, seed: int = 0) -> str:
    how = {"noise": {"tensor": "model.layers.2.mlp.down_proj.weight", "share": share, "seed": seed}}
    return f"hf:tiny?dtype=float32&edit={json.dumps(how)}"


def test_noise_on_one_matrix_grows_with_its_share(plain: Engine) -> None:
    rollouts = texts("raw")
    clean = plain.score(rollouts).logprobs.values
    one, five, again, other = (scored(noise(*how), rollouts) for how in ((0.01,), (0.05,), (0.01,), (0.01, 1)))
    assert 1e-4 < rms(one, clean) < 0.05 and rms(five, clean) == pytest.approx(5 * rms(one, clean), rel=0.1)
    assert np.array_equal(one.logprobs.values, again.logprobs.values)
    assert rms(other, one.logprobs.values) > 1e-4
    assert one.fingerprint["edit"]["noise"]["share"] == 0.01 and plain.fingerprint()["edit"] == {}


@pytest.mark.parametrize(
    ("switch", "error", "says"),
    [
        ('overrides={"rope_thetta": 1}', UnknownName, "unknown key of the model's config 'rope_thetta'; did you mean"),
        ('overrides={"rms_norm_eps": "x"}', UsageError, "overrides: rms_norm_eps='x' is refused by the model's config"),
        ("overrides=rope", UsageError, "overrides: got 'rope', wanted a JSON object"),
        ("overrides=[1]", UsageError, "wanted a JSON object"),
        ('edit={"noize": {}}', UnknownName, "did you mean 'noise'"),
        ('edit={"noise": {"tensor": "lm_head"}}', UsageError, "edit: wanted"),
        ('edit={"noise": {"tensor": "model.layers.2.mlp.down.weight", "share": 1}}', UnknownName, "down_proj.weight"),
        ("semantics=temperature", UsageError, "record 0: temperature not declared"),
        ("routes=true", UsageError, "it has no mixture-of-experts layers; leave it out"),
        ("batch_size=0", UsageError, "batch_size=0, wanted at least 1"),
        ("threads=-1", UsageError, "threads=-1, wanted at least 0"),
        ("attention=flash_attention_2", EngineError, "the model cannot be loaded: ImportError"),
    ],
)
def test_what_a_switch_cannot_be_is_one_line(switch: str, error: type[Exception], says: str) -> None:
    rollouts = texts("raw")
    undeclared = replace(rollouts, records={"logprob_semantics": rollouts.records["logprob_semantics"]})
    with pytest.raises(error) as caught, open_engine(f"hf:tiny?dtype=float32&{switch}", in_process=True) as engine:
        engine.score(undeclared)
    assert says in str(caught.value) and "\n" not in str(caught.value)


# --- what the numbers mean, and memory ------------------------------------------------------------------------------


def test_a_trainer_that_ignores_top_p_is_staged_by_semantics() -> None:
    rollouts = texts("processed", temperature=0.7, top_p=0.8)
    run = plain_logits(models.path("tiny"))
    for semantics, temperature in (("raw", 1.0), ("temperature", 0.7)):
        out = scored(f"hf:tiny?dtype=float32&semantics={semantics}", rollouts)
        want = chosen(rollouts, expected(rollouts, run, lambda z, before, n, t, by=temperature: z / by))
        assert out.semantics == semantics and gap(out, want).max() < 2e-5
    declared = scored("hf:tiny?dtype=float32", rollouts)
    assert declared.semantics == "processed" and np.isneginf(declared.logprobs.values).any()


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more"), True),
        (RuntimeError("shape mismatch"), False),
        (EngineError("out of memory, said before"), False),
    ],
)
def test_memory_that_is_not_enough_is_said(error: Exception, known: bool) -> None:
    with pytest.raises(EngineError if known else type(error)) as caught, hf_load.out_of_memory("hf:m: batch_size=8"):
        raise error
    assert str(caught.value).startswith("hf:m: batch_size=8: out of memory (") == known
    assert "\n" not in str(caught.value)


def test_a_forward_that_asks_for_too_much_ends_in_one_line(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine("hf:tiny?dtype=float32", in_process=True) as engine:
        monkeypatch.setattr(engine._model, "forward", lambda **inputs: torch.empty(2**55))
        with pytest.raises(EngineError, match=r"batch_size=8: out of memory \(.*; lower batch_size"):
            engine.score(texts("raw"))


# --- mixture models -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with 8 experts, 2 a token, in 3 layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(vocab_size=512, num_experts=8, num_experts_per_tok=2, **sizes, **heads)
    where = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(models.path("tiny"), where)
    for file in where.glob("*.safetensors"):
        file.unlink()
    Qwen3MoeForCausalLM(config).save_pretrained(where)
    return where


def plain_routes(directory: Path, rollouts: Rollouts) -> np.ndarray:
    """`[T, L * K]` by the router logits that transformers itself gives out, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    torch = importlib.import_module("torch")
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    rows = []
    for i in range(len(rollouts)):
        ids = torch.tensor(rollouts.token_ids[rollouts.sequence(i)][None], dtype=torch.long)
        with torch.no_grad():
            layers = model(ids, output_router_logits=True).router_logits
        rows.append(np.concatenate([np.sort(np.argsort(-z.numpy(), -1)[:, :2], -1) for z in layers], axis=-1))
    return np.concatenate(rows)


@pytest.mark.parametrize(
    "using", [{}, {"padding_side": "left"}, {"packing": "packed"}, {"path": "decode"}, {"batch_size": 1}], ids=str
)
def test_routes_are_those_of_the_routers_in_any_layout(using: dict[str, Any], mixture: Path) -> None:
    rollouts = texts("raw")
    out = scored(f"hf:{mixture}?dtype=float32&routes=true", rollouts, **using)
    assert out.routes is not None and out.routes.shape == (rollouts.n_tokens, 6) and out.routes.dtype == np.int16
    unread = np.repeat(rollouts.lengths == 1, rollouts.lengths)  # a single token has nothing to predict
    if using.get("path") == "decode":
        longest = int(rollouts.lengths.argmax())
        unread[rollouts.offsets[longest + 1] - 1] = True  # the last id of all is never fed
    assert (out.routes[unread] == -1).all()
    assert np.array_equal(out.routes[~unread], plain_routes(mixture, rollouts)[~unread])
    assert gap(out, raw_of(plain_logits(mixture), rollouts)).max() < 2e-5


def test_routers_that_give_scores_alone_are_read_too(torch: Any) -> None:
    """Mixture layers before transformers 5: a linear router, and experts that are called one by one."""
    from onepolicy.engines.hf_routes import Watch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(4, 8, bias=False)
            self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(8)])

        def forward(self, x: Any) -> Any:
            return self.gate(x)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])
            self.config = type("Config", (), {"get_text_config": lambda self: self, "num_experts_per_tok": 3})()

    model, x = Model(), torch.randn(10, 4)
    watch = Watch(model, "hf:m")
    scores = [layer(x).detach().numpy() for layer in model.layers]
    want = np.concatenate([np.sort(np.argsort(-z, -1)[:, :3], -1) for z in scores], -1)
    assert np.array_equal(watch.taken(2, 5).numpy(), want.reshape(2, 5, 6))
    model.layers[0](x)
    with pytest.raises(EngineError, match="1 of 2 mixture layers told what they chose"):
        watch.taken(2, 5)
