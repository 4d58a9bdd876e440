"""The vector of a batch against independent numpy, on every kind of array, in any blocks, without a read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from loop_data import batch, torch_of, weights
from torch.utils._python_dispatch import TorchDispatchMode

from onepolicy.metrics import METRICS
from onepolicy.monitor import kinds, observe, vector
from onepolicy.monitor.batch import batch_of
from onepolicy.monitor.numbers import numbers
from onepolicy.monitor.observe import observed
from onepolicy.monitor.vector import LOOP, Merged
from onepolicy.padded import padded_metrics

CLIP = (0.2, 0.28)


def given(made: dict[str, Any], version: int | None = 5, correction: Any = None) -> Any:
    return batch_of(
        made["sampler_logprobs"],
        made["old_logprobs"],
        made["mask"],
        current=made.get("current_logprobs"),
        reference=made.get("reference_logprobs"),
        advantages=made.get("advantages"),
        versions=made.get("policy_version"),
        version=version,
        correction=correction,
        corrected=False,
    )


def of(made: dict[str, Any], **more: Any) -> dict[str, float | None]:
    """The numbers of one batch on one rank."""
    vec = observed(given(made, **more), CLIP)
    return numbers(Merged(np.asarray(vec)[None]))


def close(got: float | None, wanted: float, rel: float = 1e-9) -> bool:
    return got == pytest.approx(wanted, rel=rel, abs=1e-13)


@pytest.mark.parametrize("fill", [np.nan, np.inf, -9999.0, 0.0])
def test_the_summed_metrics_are_those_of_the_padded_ones(fill: float) -> None:
    made = batch(1, fill=fill, far=0.05)
    wanted = padded_metrics(
        made["sampler_logprobs"],
        made["old_logprobs"],
        made["mask"],
        [m for m in LOOP.values() if m.reducer == "sum"],
    )
    got = of(made)
    assert len(wanted) > 40
    for key, value in wanted.items():
        assert close(got[key], value), key


def test_extremes_and_quantiles() -> None:
    made = batch(2, rows=200, far=0.02)
    d = (made["old_logprobs"] - made["sampler_logprobs"])[made["mask"]]
    got = of(made)
    assert close(got["abs_log_ratio/max"], np.abs(d).max())
    assert close(got["ratio/max"], np.exp(d.max()))
    assert close(got["ratio/min"], np.exp(d.min()))
    p, q = (np.exp(made[f"{s}_logprobs"][made["mask"]]) for s in ("sampler", "old"))
    assert close(got["prob_abs_diff/max"], np.abs(p - q).max())
    by_row = [
        np.exp(np.abs(r[m])).mean()
        for r, m in zip(made["old_logprobs"] - made["sampler_logprobs"], made["mask"], strict=True)
        if m.any()
    ]
    assert close(got["mult_prob_error/sequence_max"], max(by_row))
    for name, level in (("p50", 50), ("p95", 95), ("p99", 99), ("p99.9", 99.9)):
        exact = np.percentile(np.abs(d), level, method="inverted_cdf")
        assert got[f"abs_log_ratio/{name}"] == pytest.approx(exact, rel=0.13), name
    assert close(got["over_two/share"], (d > np.log(2)).mean())


def test_ratios_all_on_one_side_of_one() -> None:
    """Masked places, which hold 0, must not be the extreme."""
    made = batch(3)
    made["old_logprobs"] = made["sampler_logprobs"] - 0.5
    got = of(made)
    assert close(got["ratio/max"], np.exp(-0.5))
    made["old_logprobs"] = made["sampler_logprobs"] + 0.5
    assert close(of(made)["ratio/min"], np.exp(0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["numpy", "device"])
def test_torch_gives_the_numbers_of_numpy(dtype: Any, kind: str) -> None:
    tensors = torch_of(batch(4, far=0.02), dtype)
    exact = {n: x.double().numpy() if x.is_floating_point() else x.numpy() for n, x in tensors.items()}
    with_weights = weights(exact)
    wanted = observed(given(exact, correction=with_weights), CLIP)
    as_torch = type(with_weights)(weights=torch.tensor(with_weights.weights), keep=torch.tensor(with_weights.keep))
    how = kinds.TorchKind(tensors["mask"]) if kind == "device" else None
    got = observed(given(tensors, correction=as_torch), CLIP, kind=how)
    assert isinstance(got, torch.Tensor) is (kind == "device")
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-9, atol=1e-12)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = batch(5, rows=37, far=0.02)
    whole = observed(given(made, correction=weights(made)), CLIP)
    for block in (1, 100, 300):
        monkeypatch.setattr(kinds, "BLOCK_CPU", block)
        parts = observed(given(made, correction=weights(made)), CLIP)
        np.testing.assert_allclose(parts, whole, rtol=1e-9, atol=1e-12)


def test_by_policy_version() -> None:
    made = batch(6, rows=60)
    d = made["old_logprobs"] - made["sampler_logprobs"]
    version, mask = made["policy_version"].copy(), made["mask"]
    version[3] = -1  # not known
    made["policy_version"] = version
    got = of(made, version=5)
    for name, lag in (("lag_0", version == 5), ("stale", (version < 5) & (version >= 0))):
        x = d[mask & lag]
        assert got[f"{name}.tokens"] == len(x)
        assert close(got[f"{name}.abs_log_ratio/mean"], np.abs(x).mean())
        assert close(got[f"{name}.kl_k3/mean"], (np.exp(x) - 1 - x).mean(), rel=1e-6)
        assert close(got[f"{name}.ratio_bias/mean"], np.expm1(x).mean())
        assert close(got[f"{name}.log_ratio/sd"], x.std())
        r = np.exp(x)
        assert close(got[f"{name}.ess_token/share"], r.sum() ** 2 / (len(r) * (r * r).sum()))
    known = version[mask & (version >= 0)]
    assert close(got["lag/mean"], (5 - known).mean()) and got["lag/max"] == 2 and got["newest_version"] == 5
    rows = [set(v[m & (v >= 0)]) for v, m in zip(version, mask, strict=True)]
    assert close(got["mixed_version/share"], sum(len(r) > 1 for r in rows) / sum(m.any() for m in mask))
    assert close(got["lag/known"], len(known) / mask.sum())


def test_the_first_change_of_version_in_a_reply() -> None:
    """Counted in the reply's own tokens: what is masked (a tool's output) and unknown versions do not count."""
    made = batch(6, rows=5, tokens=12, fill=-1.0)
    made["mask"] = np.ones((5, 12), dtype=bool)
    version = np.full((5, 12), 4)
    version[1, 3:] = 5  # after 3 tokens
    version[2, 2:] = 5
    made["mask"][2, 1:4] = False  # after 1 token, behind a masked span
    version[3, :3], version[3, 3:9], version[3, 9:] = -1, 4, 5  # unknown, then after 9
    made["mask"][4], version[4, 6:] = False, 5  # nothing trained: no change
    made["policy_version"] = version
    got = of(made, version=5)
    assert (got["mixed_version/first_change"], got["mixed_version/last_change"]) == (1, 9)
    assert got["mixed_version/share"] == pytest.approx(3 / 4)
    version[1:3], version[3, 5] = 4, -1  # a hole before the change: it is seen, its place is not
    got = of(made, version=5)
    assert got["mixed_version/share"] == pytest.approx(1 / 4)
    assert got["mixed_version/first_change"] is got["mixed_version/last_change"] is None
    made["policy_version"] = np.full((5, 1), 4)
    assert of(made, version=5)["mixed_version/first_change"] is None


def test_versions_ahead_of_the_scorer_are_in_no_lag() -> None:
    made = batch(6, rows=4, tokens=10, fill=-1.0)
    made["mask"] = np.ones((4, 10), dtype=bool)
    made["policy_version"] = np.array([7, 5, 4, 9])
    got = of(made, version=5)
    assert (got["lag/mean"], got["lag/max"], got["ahead/share"]) == (0.5, 1, 0.5)
    assert got["lag_0.tokens"] == got["stale.tokens"] == 10


def test_by_policy_version_without_the_scorers() -> None:
    made = batch(6)
    assert of(made, version=None)["lag/mean"] == of(made, version=5)["lag/mean"]  # the newest in it is 5
    made["policy_version"] = made["policy_version"][:, 0]
    assert of(made)["mixed_version/share"] == 0.0


def test_updates_and_reference() -> None:
    made = batch(7)
    made["current_logprobs"][5:9] = made["old_logprobs"][5:9]
    got, mask = of(made), made["mask"]
    sampler, old, current, reference = (made[f"{n}_logprobs"][mask] for n in ("sampler", "old", "current", "reference"))
    assert close(got["update.abs_log_ratio/mean"], np.abs(current - old).mean())
    assert close(got["update.outside_clip/share"], (np.abs(np.exp(current - old) - 1) > 0.2).mean())
    assert close(got["update.bit_equal/share"], (current == old).mean())
    assert close(got["current.kl_k1/mean"], (sampler - current).mean())
    assert close(got["reference.abs_log_ratio/mean"], np.abs(reference - old).mean())


def clip_by_hand(made: dict[str, Any], low: float, high: float) -> dict[str, float]:
    """One token after another."""
    n: dict[str, float] = {}
    rows, tokens = made["mask"].shape
    for i in range(rows):
        sign = "positive" if made["advantages"][i] > 0 else "negative"
        for t in range(tokens):
            if not made["mask"][i, t]:
                continue
            sampler, old, current = (made[f"{x}_logprobs"][i, t] for x in ("sampler", "old", "current"))
            clips = lambda r, sign=sign: r > 1 + high if sign == "positive" else r < 1 - low
            used, true = clips(np.exp(current - old)), clips(np.exp(current - sampler))
            for name, on in (
                ("n", True),
                ("clipped", used),
                ("wrongly_clipped", used and not true),
                ("wrongly_passed", true and not used),
            ):
                n[f"{name}/{sign}"] = n.get(f"{name}/{sign}", 0) + on
    return n


def test_clip_decisions_that_flip() -> None:
    made = batch(8, rows=80, gap=0.15)
    n, got = clip_by_hand(made, *CLIP), of(made)
    wrong = 0.0
    for sign in ("positive", "negative"):
        for name in ("clipped", "wrongly_clipped", "wrongly_passed"):
            assert close(got[f"{name}/{sign}"], n[f"{name}/{sign}"] / n[f"n/{sign}"]), (name, sign)
            assert n[f"{name}/{sign}"] > 0
            wrong += n[f"{name}/{sign}"] if name.startswith("wrongly") else 0
    assert close(got["wrong_decisions/share"], wrong / (n["n/positive"] + n["n/negative"]))


def test_without_a_current_policy_nothing_is_clipped_yet() -> None:
    made = batch(8, rows=80, gap=0.15)
    made.pop("current_logprobs")
    got = of(made)
    assert got["clipped/positive"] == 0 and got["wrongly_clipped/negative"] == 0
    d = made["old_logprobs"] - made["sampler_logprobs"]
    positive = made["mask"] & (made["advantages"] > 0)[:, None]
    assert close(got["wrongly_passed/positive"], (d[positive] > np.log1p(CLIP[1])).mean())


def test_raw_against_corrected() -> None:
    made = batch(9, rows=60, gap=0.05)
    c = weights(made)
    c.weights[4] = 0.0
    c.keep[4] = False
    got, mask = of(made, correction=c), made["mask"]
    w, r = (c.weights * c.keep)[mask], np.exp(made["old_logprobs"] - made["sampler_logprobs"])[mask]
    assert close(got["corrected.weight/mean"], w.mean()) and close(got["corrected.weight/max"], w.max())
    assert close(got["corrected.ess/share"], w.sum() ** 2 / (len(w) * (w * w).sum()))
    assert close(got["corrected.kept/share"], (w > 0).mean())
    assert close(got["corrected.lowered/share"], (w < r * (1 - 1e-9)).mean())
    assert got["corrected.raised/share"] == 0 and got["corrected.nonfinite/count"] == 0
    assert close(got["corrected.emptied/share"], 1 / (len(mask) - 1))
    assert close(got["ess_token/share"], r.sum() ** 2 / (len(r) * (r * r).sum()))  # the raw one stays raw


def test_weights_that_are_not_finite() -> None:
    made = batch(9)
    c = weights(made)
    at = tuple(np.argwhere(made["mask"])[0])
    c.weights[at], c.keep[at] = np.inf, True
    got = of(made, correction=c)
    assert got["corrected.nonfinite/count"] == 1 and np.isfinite(got["corrected.weight/mean"] or np.nan)
    assert of(made, correction=c.weights)["corrected.nonfinite/count"] == 1  # weights alone


def test_states_are_counted_apart() -> None:
    made = batch(10)
    places = [tuple(p) for p in np.argwhere(made["mask"])[:40:4]]
    bad = [np.nan, -np.inf, np.inf, 0.5, -9999.0]
    for place, x in zip(places, bad, strict=False):
        made["sampler_logprobs"][place] = x
    made["sampler_logprobs"][places[6]], made["old_logprobs"][places[6]] = 0.0, -7.0  # certain, and yet unlikely
    for place, x in zip(places[7:], [np.nan, -np.inf], strict=False):
        made["old_logprobs"][place] = x
    got = of(made)
    n = made["mask"].sum()
    wanted = {"null_sampler": 1, "neg_inf_sampler": 1, "pos_inf_sampler": 1, "positive_sampler": 1}
    wanted |= {"placeholder_sampler": 2, "null_old": 1, "neg_inf_old": 1, "pos_inf_old": 0, "placeholder_old": 0}
    assert {name: got[f"{name}/count"] for name in wanted} == wanted
    assert got["tokens"] == n and got["scored"] == n - 5 and close(got["missing/share"], 5 / n)
    # a fill of -9999 is in the mean of |d|, and cannot overflow a ratio
    assert got["abs_log_ratio/max"] == pytest.approx(9999, rel=1e-3)
    assert got["ratio/mean"] is not None and got["ratio/mean"] < 2
    assert all(x is None or np.isfinite(x) for x in got.values())


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_to_see(rows: int) -> None:
    made = {n: x[:rows] for n, x in batch(11).items()}
    made["mask"] = np.zeros_like(made["mask"])
    vec = observed(given(made), CLIP)
    got = numbers(Merged(vec[None]))
    assert got["tokens"] == 0 and got["abs_log_ratio/mean"] is None and got["ratio/max"] is None


def test_one_token_replies() -> None:
    made = {n: (x[:, 1:2] if x.ndim == 2 else x) for n, x in batch(12).items()}
    got, mask = of(made), made["mask"]
    assert close(got["abs_log_ratio/mean"], np.abs((made["old_logprobs"] - made["sampler_logprobs"])[mask]).mean())


def test_the_standard_error_is_that_of_rows_as_clusters() -> None:
    """Against the spread of the mean over redrawn batches whose rows share an effect."""
    rng = np.random.default_rng(13)
    found, errors = [], []
    for _ in range(300):
        length = rng.integers(5, 60, 64)
        mask = np.arange(60)[None] < length[:, None]
        scale = 0.05 * np.exp(0.5 * rng.standard_normal((64, 1)))
        a = np.full((64, 60), -1.0)
        merged = Merged(
            observed(
                given({"sampler_logprobs": a, "old_logprobs": a + scale * rng.standard_normal(a.shape), "mask": mask})
            )[None]
        )
        found.append(merged.ratio("token:scored:abs_log_ratio", "scored"))
        errors.append(merged.relative_error("abs_log_ratio") / np.sqrt(1 + 8 / 64))
    assert np.mean(errors) == pytest.approx(np.std(found) / np.mean(found), rel=0.15)


class NoReads(TorchDispatchMode):
    """Fails where the host would wait for a device: scalars read, shapes that hang on values, copies to the CPU."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "item", "is_nonzero", "unique", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(self.READS):
            raise AssertionError(f"{name} reads the device")
        if name in ("_to_copy", "copy_") and str((kwargs or {}).get("device")) == "cpu":
            raise AssertionError("a copy to the host")
        if name == "index" and any(t is not None and t.dtype is torch.bool for t in args[1]):
            raise AssertionError("boolean indexing")
        return func(*args, **(kwargs or {}))


def test_a_whole_step_reads_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU, on CPU tensors: observe, the collective, the judgement of the step before."""
    from onepolicy.monitor import Monitor

    tensors = torch_of(batch(14), torch.float32)
    device = kinds.TorchKind(tensors["mask"])
    monkeypatch.setattr(observe, "kind_of", lambda _: device)
    monitor = Monitor(step_zero=False)
    monitor.observe(**tensors, scorer_version=5)  # set up: may read
    with NoReads():
        out = [
            monitor.observe(
                **tensors, scorer_version=5, correction=torch.ones_like(tensors["mask"], dtype=torch.float32)
            )
        ]
        out.append(monitor.observe(**tensors, scorer_version=6))
    assert [o.step for o in out] == [1, 2]
    assert out[1].numbers["corrected.kept/share"] == 1.0
    assert isinstance(monitor._sum, type(None)) and isinstance(out[1].weight, torch.Tensor)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: float(x[0]),
    ],
)
def test_the_probe_sees_reads(read: Any) -> None:
    with NoReads(), pytest.raises(AssertionError):
        read(torch.ones(3))


def test_a_device_whose_values_do_not_exist() -> None:
    """On torch's `meta` device there is nothing that could be read: shapes are all there is."""
    tensors = torch_of(batch(15), torch.bfloat16, "meta")
    c = torch.ones(tensors["mask"].shape, device="meta")
    vec = observed(given(tensors, correction=c), CLIP, first=True)
    assert vec.device.type == "meta" and vec.shape == (vector.LENGTH,) and vec.dtype is torch.float64
    with pytest.raises((RuntimeError, NotImplementedError)):
        vec.sum().item()


def test_every_metric_that_sums_can_give_is_there() -> None:
    left = [m.key for m in METRICS.values() if m.key not in LOOP and m.reducer != "histogram"]
    assert all(METRICS[k].uses in ("exact", "surprisal_a", "surprisal_b", "position", "floor") for k in left)
