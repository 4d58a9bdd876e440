"""Monitor and correction of a step's batch, against the step: time, and memory above the batch itself.

Beside (a) forward and backward of the packaged model over as many tokens (measured on a small batch, scaled), (b)
verl's metric set written out in torch, (c) one read of the two columns. A column is one float32 `[B, T]`.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.data import median_seconds

SHAPES = ((64, 8192), (512, 32768))
#: Rows and tokens of the model's own batch, whose time is scaled to the tokens.
MODEL_BATCH = (2, 512)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    step = _model_seconds_per_token()
    for shape in SHAPES:
        _show(shape, step, runs=3 if shape[0] * shape[1] < 1 << 22 else 1)


def _show(shape: tuple[int, int], step: float, runs: int) -> None:
    data = _batch(*shape)
    sampler, old, mask, current, advantages = data
    tokens, column = sampler.numel(), sampler.numel() * 4
    from onepolicy import Monitor, corrections

    monitor = Monitor(step_zero=False)
    more = {"current_logprobs": current, "advantages": advantages}
    truncate = lambda: corrections.truncate(sampler=sampler, old=old, mask=mask, cap=2.0)
    c = truncate()
    works: dict[str, Callable[[], Any]] = {
        "one read of the two columns": lambda: (sampler.sum(), old.sum()),
        "verl's metric set in torch": lambda: verl_metrics(sampler, old, mask),
        "monitor: sampler against old": lambda: monitor.observe(sampler, old, mask),
        "monitor: current policy and advantages too": lambda: monitor.observe(sampler, old, mask, **more),
        "correction: truncate": truncate,
        "monitor with that correction": lambda: monitor.observe(sampler, old, mask, correction=c, **more),
    }
    found = {name: (median_seconds(work, runs), peak_bytes(work)) for name, work in works.items()}
    both = found["correction: truncate"][0] + found["monitor with that correction"][0]
    read, verl = (found[name][0] for name in list(works)[:2])
    model = step * tokens
    print(f"monitor and correction, {list(shape)}, {tokens / 1e6:.1f} M tokens, one core")
    for name, (seconds, extra) in found.items():
        ratios = f"{seconds / verl:6.2f} x verl's set {seconds / read:7.1f} x a read {seconds / model:8.3%} of a step"
        print(f"  {name:44s} {seconds:7.3f} s {ratios} {extra / column:6.2f} columns of memory")
    print(f"  {'forward and backward of the packaged model':44s} {model:7.1f} s (scaled from {MODEL_BATCH})")
    print(f"  monitor and correction together: {both / model:.2%} of that, {both / verl:.2f} x verl's set")


def _batch(rows: int, tokens: int) -> tuple[Any, ...]:
    import torch

    g = torch.Generator().manual_seed(0)
    sampler = -torch.empty(rows, tokens).exponential_(1, generator=g)
    old = sampler + 0.05 * torch.randn(rows, tokens, generator=g)
    length = torch.randint(tokens // 4, tokens + 1, (rows,), generator=g)
    mask = torch.arange(tokens)[None] < length[:, None]
    return sampler, old.clamp_(max=0), mask, old.clone(), torch.randn(rows, generator=g)


def peak_bytes(work: Callable[[], Any]) -> int:
    """Resident memory that the call needs above what was there before it. Linux: the kernel's own high-water mark."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls freed is given back first
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    kept = work()
    peak = _resident("VmHWM") - before
    del kept
    return max(peak, 0)


def _resident(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def verl_metrics(rollout: Any, old: Any, mask: Any) -> dict[str, float]:
    """The names that verl logs, as its documentation gives the formulas; every one read at once, as it does."""
    import torch

    with torch.no_grad():
        n = mask.sum()
        mean = lambda x: ((x * mask).sum() / n).item()
        lengths = mask.sum(-1).clamp(min=1)
        row_mean = lambda x: (x * mask).sum(-1) / lengths
        d = old - rollout
        safe = d.clamp(-20, 20)
        ratio = safe.exp()
        weight = ratio.clamp(max=2.0) * mask
        out = {"kl": mean(-d), "k3_kl": mean(d.exp() - d - 1), "chi2_token": mean((2 * safe).exp()) - 1}
        summed = (d * mask).sum(-1).clamp(-20, 20)
        out["chi2_seq"] = ((2 * summed).exp().mean() - 1).item()
        train, roll = -row_mean(old), -row_mean(rollout)
        difference = train - roll
        out |= {"training_ppl": train.exp().mean().item(), "rollout_ppl": roll.exp().mean().item()}
        out |= {"training_log_ppl": train.mean().item(), "rollout_log_ppl": roll.mean().item()}
        out |= {"log_ppl_diff": difference.mean().item(), "log_ppl_abs_diff": difference.abs().mean().item()}
        out |= {"log_ppl_diff_max": difference.max().item(), "log_ppl_diff_min": difference.min().item()}
        out["ppl_ratio"] = difference.exp().mean().item()
        out |= {"is_mean": mean(weight), "is_max": weight.max().item()}
        out["is_min"] = weight.masked_fill(~mask, float("inf")).min().item()
        out["is_std"] = mean((weight - out["is_mean"]) ** 2) ** 0.5
        out |= {"is_high": mean((ratio > 2.0).float()), "is_low": mean((ratio < 0.5).float())}
        out["is_ess"] = 1 / mean((weight / out["is_mean"]) ** 2)
        by_row = row_mean(weight)
        out |= {"is_seq_mean": by_row.mean().item(), "is_seq_std": by_row.std().item()}
        out |= {"is_seq_max": by_row.max().item(), "is_seq_min": by_row.min().item()}
        out["is_seq_max_deviation"] = (by_row - 1).abs().max().item()
        p, q = (torch.masked_select(x.exp(), mask) for x in (old, rollout))
        gap = (p - q).abs()
        out |= {"probs_diff_max": gap.max().item(), "probs_diff_mean": gap.mean().item()}
        out["probs_diff_std"] = gap.std().item()
        out["probs_pearson"] = torch.corrcoef(torch.stack([p, q]))[0, 1].item()
    return out


def _model_seconds_per_token() -> float:
    """Forward and backward of the packaged model with the loss of a policy gradient, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from onepolicy.models import path

    model = AutoModelForCausalLM.from_pretrained(str(path("tiny")), dtype=torch.float32)
    rows, tokens = MODEL_BATCH
    ids = torch.randint(0, model.config.vocab_size, (rows, tokens))

    def step() -> None:
        logits = model(ids).logits[:, :-1].float()
        logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])
        logp.mean().backward()
        model.zero_grad()

    seconds = median_seconds(step, 3)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"packaged model, {parameters / 1e6:.2f} M parameters: {seconds / rows / tokens * 1e6:.1f} us a token")
    return seconds / (rows * tokens)


if __name__ == "__main__":
    main()
