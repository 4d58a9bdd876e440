"""TRL trains the packaged model with GRPO while another path draws the tokens. TRL itself is run, nothing stands in."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_examples import example

from onepolicy import Halted, Monitor, corrections
from onepolicy.errors import UsageError
from onepolicy.integrations import trl

pytestmark = pytest.mark.engines
AT = 5


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    """(the trainer after ten healthy steps, the monitor's rows)."""
    path = tmp_path_factory.mktemp("trl") / "monitor.jsonl"
    trainer = example("trl_grpo").run(steps=10, sinks=(f"jsonl:{path}",))
    return trainer, [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()][1:]


def test_a_healthy_run_is_silent(healthy: tuple[Any, list[dict[str, Any]]]) -> None:
    trainer, rows = healthy
    assert trainer.state.global_step == 10
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert all(row["findings"] == [] for row in rows)
    assert not trainer.monitor.warnings


def test_every_step_is_seen_whole(healthy: tuple[Any, list[dict[str, Any]]]) -> None:
    """Two micro-batches a step, every token that TRL trains on, both policies, the versions, the weights."""
    trainer, rows = healthy
    log = [x for x in trainer.state.log_history if "completions/mean_length" in x]
    for row, logged in zip(rows, log, strict=True):
        numbers = row["numbers"]
        assert numbers["sequences"] == 24
        assert numbers["tokens"] == numbers["scored"] == round(24 * logged["completions/mean_length"])
        assert 0.003 < numbers["abs_log_ratio/mean"] < 0.05  # bfloat16 decode against float32
        assert numbers["lag/mean"] == 0 and numbers["lag/known"] == 1
        assert numbers["corrected.kept/share"] == 1
        assert numbers["corrected.weight/max"] == pytest.approx(min(numbers["ratio/max"], 2.0))


def test_the_numbers_join_trls_log(healthy: tuple[Any, list[dict[str, Any]]]) -> None:
    """One step late, each once."""
    trainer, rows = healthy
    log = [x["onepolicy/abs_log_ratio/mean"] for x in trainer.state.log_history if "onepolicy/tokens" in x]
    assert log == pytest.approx([row["numbers"]["abs_log_ratio/mean"] for row in rows[:-1]])


@pytest.mark.parametrize("fault", ["temperature", "weights"])
def test_a_sampler_that_goes_wrong_is_named_within_two_steps(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    with pytest.raises(Halted) as halted:
        example("trl_grpo").run(fault=fault, at=AT, sinks=(f"jsonl:{path}",))
    # raised while the step after it is made, at AT + 2 the latest
    assert AT <= halted.value.step <= AT + 1
    assert {"gap-above-bound", "kl-above-bound"} & {f.code for f in halted.value.findings}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][1:]
    assert all(row["findings"] == [] for row in rows if row["step"] < AT)


# the loss


LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"]


def micro_batch(trainer: Any) -> dict[str, Any]:
    """TRL's own, with an old policy and a sampler far enough off that clips and caps bite; some tokens of a tool."""
    batch = copy.copy(trainer._buffered_inputs[0])
    rng = torch.Generator().manual_seed(0)
    shape = batch["sampling_per_token_logps"].shape
    noise = lambda scale: scale * torch.randn(shape, generator=rng)
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"] + noise(0.3)
    batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + noise(0.4)
    batch["tool_mask"] = (torch.rand(shape, generator=rng) > 0.2).long()
    return batch


def loss_of(trainer: Any, batch: dict[str, Any], kind: type[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the loss as `kind` makes it, its gradient with respect to the embeddings)."""
    trainer.model.train()
    trainer.model.zero_grad()
    loss = kind._compute_loss(trainer, trainer.model, batch)
    loss.backward()
    gradient = trainer.model.get_input_embeddings().weight.grad.clone()
    return loss.detach(), gradient


@pytest.fixture
def bare(healthy: tuple[Any, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trainer without its monitor, which a batch made up here would disturb."""
    monkeypatch.setattr(healthy[0], "monitor", None)
    monkeypatch.setattr(healthy[0], "_metrics", copy.deepcopy(healthy[0]._metrics))
    return healthy[0]


@pytest.mark.parametrize("loss_type", LOSSES)
def test_weights_enter_where_trls_own_do(loss_type: str, bare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's lines with its own ratio, as it is made under vLLM, against TRL's lines with our weights."""
    from trl import GRPOTrainer

    monkeypatch.setattr(bare, "loss_type", loss_type)
    batch = micro_batch(bare)
    mask = batch["completion_mask"] * batch["tool_mask"]
    ratio = ((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask).exp()
    monkeypatch.setattr(
        bare, "correction", corrections.preset("trl:token_truncate", vllm_importance_sampling_clip_max=1.5)
    )
    mine = loss_of(bare, batch, type(bare))
    with monkeypatch.context() as patch:
        patch.setattr(bare, "use_vllm", True)
        patch.setattr(bare, "vllm_importance_sampling_correction", True)
        theirs = loss_of(bare, {**batch, "importance_sampling_ratio": ratio.clamp(max=1.5)}, GRPOTrainer)
    plain = loss_of(bare, batch, GRPOTrainer)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
    assert not math.isclose(float(mine[0]), float(plain[0]), rel_tol=1e-3)
    assert bare.use_vllm is False


def test_without_a_correction_the_loss_is_trls(bare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import GRPOTrainer

    monkeypatch.setattr(bare, "correction", None)
    monkeypatch.setattr(bare, "monitor", Monitor("bf16", micro_batches=None, step_zero=False))
    batch = micro_batch(bare)
    mine, theirs = loss_of(bare, batch, type(bare)), loss_of(bare, batch, GRPOTrainer)
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


def test_evaluation_is_left_alone(bare: Any) -> None:
    from trl import GRPOTrainer

    bare.model.eval()
    batch = micro_batch(bare)
    with torch.no_grad():
        assert torch.equal(
            type(bare)._compute_loss(bare, bare.model, batch), GRPOTrainer._compute_loss(bare, bare.model, batch)
        )


def test_effects_are_logged_where_nobody_watches(bare: Any) -> None:
    loss_of(bare, micro_batch(bare), type(bare))
    assert bare._metrics["train"]["onepolicy/correction/changed_high/share"]


# what cannot be


def test_a_rollout_without_logprobs_is_refused(bare: Any) -> None:
    batch = micro_batch(bare)
    del batch["sampling_per_token_logps"]
    with pytest.raises(UsageError, match="let the rollout function return"):
        type(bare)._compute_loss(bare, bare.model.train(), batch)


def test_a_trl_that_reads_no_weights_is_refused(bare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl import GRPOTrainer

    real = GRPOTrainer._compute_loss

    def never(self: Any, model: Any, inputs: Any) -> Any:
        self.use_vllm = False
        return real(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", never)
    with pytest.raises(UsageError, match="reached no loss"):
        type(bare)._compute_loss(bare, bare.model.train(), micro_batch(bare))


def test_it_wants_trls_trainer_and_its_steps() -> None:
    with pytest.raises(UsageError, match="GRPOTrainer as a base"):
        trl.Watched()

    class Stands:
        """As much of a trainer as is asked for."""

        args = type("Args", (), {"gradient_accumulation_steps": 4})()
        __init__ = lambda self, *args, **keywords: None
        _compute_loss = _generate = _generate_and_score_completions = _get_per_token_logps_and_entropies = None

    mixed = type("Mixed", (trl.Watched, Stands), {})
    with pytest.raises(UsageError, match="wanted None or 4"):
        mixed(monitor=Monitor("bf16"))
