"""What the tables promise: names, our metrics, and whether a number is the same as ours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from build import random_rollouts
from onepolicy.align import align
from onepolicy.dialects import DIALECTS, key_names, key_of
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.dialects.key import Dialect
from onepolicy.dialects.view import View
from onepolicy.errors import UnknownName
from onepolicy.estimate import measure
from onepolicy.metrics import METRICS
from onepolicy.metrics.aliases import ALIASES
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts

KEYS = [(d, k) for d in DIALECTS.values() for k in d.keys.values()]
#: Shows the keys that have a metric of ours.
SHOWN = {
    "verl": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.2"},
    "skyrl": {"tis_ratio_type": "token"},
    "slime": {"mismatch_metrics": True},
    "miles": {"mismatch_metrics": True},
    "ms_swift": {"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_threshold": 1.2},
    "nemo_rl": {"truncated_importance_sampling_ratio": 1.2},
    "trl": {
        f"vllm_importance_sampling_{k}": v for k, v in {"mode": "token_mask", "clip_min": 0.9, "clip_max": 1.2}.items()
    },
}


def uneven() -> Rollouts:
    """Replies of unequal length and gap, so that means of means and caps show; a few tokens are far off."""
    base = random_rollouts(4, sequences=30, gap=0.3)
    rng = np.random.default_rng(9)
    a, b = (base.scorings[n].logprobs.values.copy() for n in ("sampler", "old"))
    far = rng.random(len(a)) < 0.02
    a[far] = b[far] - 3.2
    a[: base.lengths[0]] = b[: base.lengths[0]] - 25.0  # a sequence beyond every clamp
    near = replace(base.scorings["old"].logprobs, values=b)
    scorings = {
        "sampler": replace(base.scorings["sampler"], logprobs=replace(near, values=a)),
        "old": replace(base.scorings["old"], logprobs=near),
        "current": replace(base.scorings["old"], logprobs=near, scoring_id="c"),
    }
    return replace(base, scorings=scorings)


#: Keys that come to our number on a batch without what makes them differ: staleness, ranks, empty sequences, a
#: rejected token, a value that is not finite.
ELSEWHERE = ("staleness", "rank", "kept tokens", "NaN and infinite")


@pytest.fixture(scope="module")
def ours() -> dict[str, float | None]:
    return {k: m.value for k, m in measure(reduce(align(uneven()), METRICS.values())).items()}


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda d: d.name)
def test_a_key_is_the_same_as_ours_or_is_not(dialect: Dialect, ours: dict[str, float | None]) -> None:
    """With the same scorer, over a batch in which means of means and caps show."""
    acc = Accumulator(dialect, {"precision": "float64", "scorer": "old", **SHOWN.get(dialect.name, {})})
    acc.add(View.of(uneven()))
    theirs = acc.numbers()
    for key in dialect.keys.values():
        assert not key.ours or key.ours in METRICS
        assert key.same or not key.ours or key.quirks, f"{key.name}: what is different must be said"
        if key.ours and key.name in theirs:
            same = theirs[key.name] == pytest.approx(ours[key.ours], rel=1e-9, abs=1e-12)
            assert same or not key.same, key.name
            assert not same or key.same or any(word in key.quirks for word in ELSEWHERE), key.name


def test_names() -> None:
    for dialect in DIALECTS.values():
        spellings = [s for k in dialect.keys.values() for s in (k.name, *k.also)]
        assert len(set(spellings)) == len(spellings), dialect.name
        assert {s: dialect.key(s).name for s in spellings} == dict(dialect.names)
    assert len(key_names()) == len(set(key_names())) == len(KEYS)
    found = key_of("areal:ppo_actor/behave_approx_kl/avg")
    assert found is not None
    assert found[1].name == "behave_approx_kl/avg"
    assert key_of("verl:nothing") is None
    assert key_of("kl_k3") is None
    with pytest.raises(UnknownName, match="did you mean 'rollout_corr/kl'"):
        DIALECTS["verl"].key("rollout_corr/kll")


def test_parts_that_share_a_name_are_one() -> None:
    """Two terms under one name in a dialect would overwrite each other."""
    for dialect in DIALECTS.values():
        seen: dict[str, object] = {}
        view = View.of(uneven()).prepared("old", single=False)
        options = dialect.resolve(SHOWN.get(dialect.name, {}))
        for key in dialect.keys.values():
            if not key.shown(options) or any(not view.has(n) for n in key.columns(options)):
                continue
            for part in key.parts:
                with np.errstate(over="ignore"):
                    values = np.asarray(part.term(view, options))
                before = seen.setdefault(part.name, values)
                assert np.array_equal(before, values), (dialect.name, part.name)


def test_the_aliases_are_those_of_the_tables() -> None:
    assert ALIASES["verl:rollout_corr/kl"].metric == "kl_sampler_scorer_k1/mean"
    assert ALIASES["verl:rollout_corr/kl"].exact
    assert not ALIASES["trl:sampling/importance_sampling_ratio/mean"].exact
    assert {n for n in ALIASES if ":" in n} == {
        f"{d.name}:{s}" for d in DIALECTS.values() for s, n in d.names.items() if d.keys[n].ours
    }
