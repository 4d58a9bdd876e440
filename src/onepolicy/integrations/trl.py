"""TRL: `GRPOTrainer` with a correction and a monitor, whatever draws the tokens.

    class Trainer(trl_integration.Watched, GRPOTrainer): ...
    Trainer(..., rollout_func=rollout, correction="trl:token_truncate", monitor=Monitor("bf16", micro_batches=None))

TRL's own correction runs only where TRL itself drives vLLM. The slot that it multiplies its weights in at (after the
clip, before the KL term) is used here for any sampler: a rollout function that returns `logprobs` is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from onepolicy.errors import UsageError
from onepolicy.integrations.columns import Columns, Correcting, chosen

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer as _Trainer
else:
    _Trainer = object

_SLOT = "importance_sampling_ratio"
_NEEDS = ("_compute_loss", "_get_per_token_logps_and_entropies", "_generate", "_generate_and_score_completions")


def columns(inputs: Mapping[str, Any], current: Any, scorer_version: int | None = None) -> Columns:
    """The columns of a batch as `_compute_loss` gets it, with the current log-probs `[B, T]`.

    Without `old_per_token_logps` TRL takes the current policy, detached, for the old one. Errors: `UsageError` where
    the rollout function gave no log-probs.
    """
    if "sampling_per_token_logps" not in inputs:
        raise UsageError("the batch has no sampling_per_token_logps: let the rollout function return its `logprobs`")
    mask = inputs["completion_mask"]
    old = inputs.get("old_per_token_logps")
    return Columns(
        sampler=inputs["sampling_per_token_logps"],
        old=current.detach() if old is None else old,
        mask=mask * inputs["tool_mask"] if "tool_mask" in inputs else mask,
        current=current,
        reference=inputs.get("ref_per_token_logps"),
        advantages=inputs["advantages"],
        policy_version=inputs.get("policy_version"),
        scorer_version=scorer_version,
    )


class Watched(_Trainer):
    """Goes before `GRPOTrainer` (or a subclass of it) in the bases.

    correction: a preset's name or one of `onepolicy.corrections`; its weights take the place of TRL's own. Denominators
        stay those of TRL's loss type. None: the loss stays as it is.
    monitor: a `Monitor`, with `micro_batches=None` or the number of gradient accumulation steps. Its numbers join TRL's
        log as `onepolicy/...`.

    A rollout function may return `policy_version`, a number a completion. Errors: `UsageError` for a TRL whose trainer
    works otherwise, at the latest in the first step.
    """

    def __init__(self, *args: Any, correction: Correcting | None = None, monitor: Any = None, **keywords: Any) -> None:
        base = super()
        missing = [name for name in _NEEDS if not hasattr(base, name)]
        if missing:
            raise UsageError(f"{type(self).__name__} has no {', '.join(missing)}; wanted TRL's GRPOTrainer as a base")
        super().__init__(*args, **keywords)
        self.correction = None if correction is None else chosen(correction)
        self.monitor = monitor
        steps = self.args.gradient_accumulation_steps
        if monitor is not None and monitor.micro_batches not in (None, steps):
            raise UsageError(f"the monitor has micro_batches={monitor.micro_batches}, wanted None or {steps} (TRL's)")
        self._looking: _Batch | None = None
        self._versions: list[int] | None = None
        self._generated_at: int | None = None
        self._logged: int | None = None

    # -- generation: who drew the tokens ----------------------------------------------------------------------------

    def _generate(self, prompts: Any) -> Any:
        out = super()._generate(prompts)
        extra = next(x for x in out if isinstance(x, dict))
        self._versions, self._generated_at = extra.pop("policy_version", None), self.state.global_step
        return out

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if self._versions is not None:
            like = output["advantages"]
            output["policy_version"] = like.new_tensor([float(x) for x in self._versions])
        return output

    # -- loss -------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if not model.training or (self.correction is None and self.monitor is None):
            return super()._compute_loss(model, inputs)
        self._looking = batch = _Batch(inputs)
        try:
            with self._weighting(self.correction is not None):
                loss = super()._compute_loss(model, batch)
        finally:
            self._looking = None
        return self._watch(loss, batch)

    @contextmanager
    def _weighting(self, on: bool) -> Iterator[None]:
        """While the loss is made, TRL believes that its own correction is on: it reads its weights from the batch."""
        before = self.use_vllm, self.vllm_importance_sampling_correction
        if on:
            self.use_vllm = self.vllm_importance_sampling_correction = True
        try:
            yield
        finally:
            self.use_vllm, self.vllm_importance_sampling_correction = before

    def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> Any:
        out = super()._get_per_token_logps_and_entropies(*args, **keywords)
        if self._looking is not None:
            self._scored(self._looking, out[0])
        return out

    def _scored(self, batch: _Batch, current: Any) -> None:
        """The current policy is scored: now the weights can be known, and TRL finds them in its batch."""
        batch.columns = seen = columns(batch, current, self._generated_at)
        if self.correction is not None:
            batch.correction = c = seen.correct(self.correction)
            # TRL's weights outside the mask are 1: some of its losses take their logarithm before they mask it
            batch[_SLOT] = c.weights.masked_fill(seen.mask == 0, 1.0)

    def _watch(self, loss: Any, batch: _Batch) -> Any:
        if batch.columns is None or (batch.correction is not None and not batch.read):
            raise UsageError("this TRL neither scores nor weights as 1.16 does: the correction reached no loss")
        if self.monitor is None:
            self._log("correction", batch.correction.effects.floats() if batch.correction else {})
            return loss
        weights = batch.correction if batch.correction is not None else batch.get(_SLOT)
        out = batch.columns.observe(self.monitor, weights)
        if self.monitor.micro_batches is None and self.accelerator.sync_gradients:
            out = self.monitor.step()
        if out.step != self._logged:
            self._logged = out.step
            self._log("", out.numbers)
        return loss * out.weight

    def _log(self, under: str, numbers: Mapping[str, float | None]) -> None:
        for name, x in numbers.items():
            if x is not None:
                self._metrics["train"]["/".join(filter(None, ("onepolicy", under, name)))].append(x)


class _Batch(dict[str, Any]):
    """TRL's batch, which knows whether the weights were read from it."""

    columns: Columns | None = None
    correction: Any = None
    read = False

    def __getitem__(self, key: str) -> Any:
        self.read = self.read or key == _SLOT
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read = self.read or key == _SLOT
        return super().get(key, default)
