"""Switches of vLLM's start: what each changes, what the fingerprint says of it, and starts that fail."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy import models
from onepolicy.engines.base import Engine, EngineSpec, options_of
from onepolicy.engines.open import open_engine
from onepolicy.engines.vllm import VllmEngine
from onepolicy.engines.vllm_start import config_changes, one_line
from onepolicy.errors import EngineError, UnknownName, UsageError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Scoring, Values

pytestmark = pytest.mark.engines

TINY = Path(models.path("tiny"))


def text(length: int, prompt: int) -> Rollouts:
    """One text of ids that nobody would draw, to be scored raw."""
    ids = np.random.default_rng(2).integers(3, 512, length).astype(np.int32)
    records = {"logprob_semantics": ["raw"], "prompt_length": [prompt]}
    columns = {k: column_values(k, v) for k, v in records.items()}
    return Rollouts(np.array([0, length], dtype=np.int64), {"token_ids": Values(ids)}, columns)


def gaps(a: Scoring, b: Scoring) -> np.ndarray:
    """`[n]` |log-ratio| where both are valid."""
    both = a.logprobs.mask() & b.logprobs.mask()
    assert both.any()
    return np.abs(a.logprobs.values[both].astype(np.float64) - b.logprobs.values[both])


# a small step of prefill, entropies, in float32


@pytest.fixture(scope="module")
def chunked() -> Iterator[Engine]:
    spec = "vllm:tiny?dtype=float32&chunked_prefill=true&max_num_batched_tokens=64&block_size=32&entropy=true"
    with open_engine(spec) as engine:
        yield engine


def test_a_long_text_prefilled_in_parts_is_the_same_function(chunked: Engine, vllm: Engine, hf: Engine) -> None:
    long = text(2000, 1960)
    want = hf.score(long)
    for out in (chunked.score(long), vllm.score(long), chunked.score(long, using={"path": "decode", "cache": "cold"})):
        d = gaps(out, want)
        assert d.mean() < 1e-5 and d.max() < 1e-3
    said = chunked.score(long).fingerprint
    assert (said["chunked_prefill"], said["max_num_batched_tokens"], said["block_size"]) == (True, 64, 32)
    assert vllm.fingerprint()["max_num_batched_tokens"] > 2000


def test_entropies_are_those_of_transformers(chunked: Engine, hf: Engine, processed: Rollouts) -> None:
    for rollouts in (processed, text(2000, 1960)):
        out, want = chunked.score(rollouts, using={"path": "decode"}), hf.score(rollouts)
        at = out.logprobs.mask()
        for name, bound in (("entropy", 1e-4), ("varentropy", 1e-3)):
            mine, other = getattr(out, name), getattr(want, name)
            assert np.array_equal(mine.mask(), at) and (mine.values[at] > 0).any()
            assert np.abs(mine.values - other.values)[at].max() < bound


# a mixture model with another rotary base


def mixture(directory: Path) -> Path:
    """A random Qwen3-MoE of the packaged vocabulary, whose experts do differ."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=3, head_dim=32, num_attention_heads=2, num_experts=8,
        num_key_value_heads=2, num_experts_per_tok=2, moe_intermediate_size=64, intermediate_size=128,
        norm_topk_prob=True, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=[2, 0], pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, directory)
    return directory


def by_hand(directory: Path, rollouts: Rollouts, rope: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs `[T]` (the first NaN) and sorted experts `[T, L * K]` of one text, by plain transformers in fp32."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(directory)
    config.rope_parameters = rope
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32).eval()
    ids = torch.tensor(rollouts.token_ids[None].astype(np.int64))
    with torch.no_grad():
        out = model(ids, output_router_logits=True)
    logprobs = torch.log_softmax(out.logits[0].double(), -1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    routes = [np.sort(layer.topk(2, -1).indices.numpy(), 1) for layer in out.router_logits]
    return np.concatenate([[np.nan], logprobs]), np.concatenate(routes, 1)


def test_a_mixture_model_with_overrides_runs_and_says_its_routes(tmp_path: Path) -> None:
    directory, some = mixture(tmp_path / "moe"), text(200, 150)
    changed, experts = by_hand(directory, some, {"rope_type": "default", "rope_theta": 500.0})
    plain, _ = by_hand(directory, some, {"rope_type": "default", "rope_theta": 10000.0})
    spec = f'vllm:{directory}?dtype=float32&routes=true&max_num_batched_tokens=64&overrides={{"rope_theta": 500.0}}'
    with open_engine(spec) as engine:
        out, again = engine.score(some), engine.score(some)
        decoded = engine.score(some, using={"path": "decode"})
        with pytest.raises(UsageError, match="routes=true scores one sequence at a time"):
            engine.score(some, using={"batch_size": 2})
    assert np.abs(out.logprobs.values - changed)[1:].max() < 1e-3
    assert np.abs(out.logprobs.values - plain)[1:].mean() > 0.1
    assert gaps(decoded, out).max() < 1e-3 and decoded.routes is None
    assert out.fingerprint["overrides"] == {"rope_theta": 500.0} and out.fingerprint["batch_size"] == 1
    assert out.routes is not None and out.routes.dtype == np.int16 and out.routes.shape == (200, 6)
    assert np.array_equal(out.routes, again.routes)
    assert (out.routes == experts).all(1).mean() > 0.99  # near ties may fall to the other side
    assert len(np.unique(out.routes)) == 8


# what is refused


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("{", UsageError, "overrides: got '{', wanted a JSON object"),
        ("[1]", UsageError, "overrides: got a list, wanted a JSON object"),
        ('{"rope_thta": 1}', UnknownName, "unknown override of tiny's config 'rope_thta'; did you mean 'rope_theta'?"),
        ('{"rope_scaling": 2}', UsageError, "overrides: rope_scaling: got 2, wanted an object"),
    ],
)
def test_overrides_that_are_none_are_refused(given: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        config_changes(TINY, given)
    assert says in str(caught.value)


def test_overrides_go_where_the_model_reads_them() -> None:
    assert config_changes(TINY, "") == {}
    assert config_changes(TINY, '{"rms_norm_eps": 0.1}') == {"rms_norm_eps": 0.1}
    both = config_changes(TINY, '{"rope_theta": 5.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}')
    assert both == {"rope_parameters": {"rope_theta": 5.0, "rope_type": "yarn", "factor": 2.0}}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("cache=warm&path=decode&prefix_caching=false", "cache=warm needs prefix_caching=true"),
        ("cache=cold", "cache=cold needs path=decode"),
        ("batch_size=40", r"batch_size: got 40, wanted 0 to max_num_seqs \(32\)"),
        ("routes=true&batch_size=2", "routes=true scores one sequence at a time"),
        ("routes=true&enforce_eager=false", "routes=true reads experts in Python, which enforce_eager=false skips"),
    ],
)
def test_switches_that_do_not_go_together_are_refused_before_anything_starts(options: str, says: str) -> None:
    spec = EngineSpec.parse(f"vllm:tiny?{options}")
    with pytest.raises(UsageError, match=says):
        VllmEngine(spec.target, **options_of(VllmEngine, spec))


def test_a_start_without_memory_is_one_line() -> None:
    with pytest.raises(EngineError) as caught, open_engine("vllm:tiny?kv_cache_gib=100000"):
        pass
    said = str(caught.value)
    assert "the engine cannot start: ValueError: Available memory" in said and "\n" not in said


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("1 validation error for ModelConfig\n  Value error, Unknown method: foo. [type=value_error]\n  For", "foo."),
        ("1 validation error for X\nmax_tokens\n  Input should be 1 [type=ge]", "max_tokens Input should be 1"),
        ("CUDA out of memory. Tried to allocate 2 GiB.\nSee documentation", "CUDA out of memory."),
        ("", "ValueError: no message"),
    ],
)
def test_errors_of_many_lines_become_the_one_that_says_it(message: str, says: str) -> None:
    line = one_line(ValueError(message))
    assert says in line and "\n" not in line and "[type=" not in line and "documentation" not in line
