"""`onepolicy explain FRAMEWORK:KEY`: every key of every dialect, by every spelling."""

from __future__ import annotations

import pytest

from onepolicy.cli.explain import _about
from onepolicy.dialects import DIALECTS, key_names
from onepolicy.errors import UnknownName


def said(name: str) -> str:
    return "\n".join(_about(name))


def test_every_key_says_what_it_is() -> None:
    for dialect in DIALECTS.values():
        for spelling, name in dialect.names.items():
            text, key = said(f"{dialect.name}:{spelling}"), dialect.keys[name]
            assert text.startswith(f"{dialect.name}:{spelling}")
            assert f"says     {key.says}" in text
            assert key.quirks in text
            assert dialect.read in text
            assert not key.ours or f"ours     {key.ours}" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "verl:rollout_corr/kl",
            ["the same number", "KL(sampler || scorer); the scorer is old", "tokens of -d"],
        ),
        ("areal:behave_approx_kl", ["not the same number", "the opposite sign of k1"]),
        ("prime_rl:mismatch_kl/all/mean", ["the scorer is current", "staleness"]),
        ("nemo_rl:probs_ratio", ["a key of NeMo-RL", "needs    current log-probs, old log-probs"]),
        ("ms_swift:rollout_correction/ess", ["only with options set, of rollout_importance_sampling_mode"]),
        ("miles:train/ess_ratio", ["one share a sequence"]),
    ],
)
def test_what_it_says(name: str, says: list[str]) -> None:
    text = said(name)
    assert [x for x in says if x not in text] == []


def test_did_you_mean() -> None:
    with pytest.raises(UnknownName, match="did you mean 'verl:rollout_corr/kl'"):
        said("verl:rollout_corr/kll")
    with pytest.raises(UnknownName, match="did you mean 'skyrl:is_ratio_std'"):
        said("skyrl:is_ratio_sd")


def test_the_list_counts_them() -> None:
    from onepolicy.cli.explain import _everything

    *_, last = _everything()
    assert int(last.split()[1]) > len(key_names())
