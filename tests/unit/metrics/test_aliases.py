"""Other people's names resolve, and say where their number is another one."""

from __future__ import annotations

import pytest

from onepolicy.errors import UnknownName
from onepolicy.metrics import METRICS, metric
from onepolicy.metrics.aliases import ALIASES


@pytest.mark.parametrize("name", ALIASES)
def test_every_alias_names_a_metric(name: str) -> None:
    alias = ALIASES[name]
    assert metric(name) is METRICS[alias.metric]
    assert alias.exact or alias.note


def test_numbers_1_to_17_of_the_survey_have_names() -> None:
    wanted = (
        "logp_abs_diff logp_bias kl_k1 kl_k2 kl_k3 kl_rev mult_prob_error js prob_abs_diff prob_diff tv pearson_p "
        "ratio "
        "chi2_token chi2_seq_product chi2_seq_geo ess_token ess_seq ppl_train ppl_roll log_ppl_diff ppl_ratio "
        "extreme_frac catastrophic_token_frac catastrophic_seq_frac length_scaling"
    )
    assert set(wanted.split()) <= set(ALIASES)


def test_did_you_mean() -> None:
    with pytest.raises(UnknownName, match="did you mean 'kl_k3'"):
        metric("kl_k33")
    with pytest.raises(UnknownName, match="verl:rollout_corr/kl"):
        metric("verl:rollout_corr/kll")


def test_terms_that_share_a_key_are_the_same_formula() -> None:
    """A term's key is its level, uses and name; two formulas under one name would overwrite each other."""
    import numpy as np

    from onepolicy.arrays import NUMPY
    from onepolicy.metrics.floor import BUCKETS
    from onepolicy.views import SEQUENCE_TERMS, Sequences, Tokens

    n = 2 * len(BUCKETS)  # two tokens in each stretch of positions
    a = np.linspace(-3, -0.1, n)
    more = {k: np.abs(a) for k in ("a_entropy", "a_varentropy", "b_entropy", "b_varentropy")}
    more |= {k: np.abs(a) + i for i, k in enumerate(("gap_z2", "gap_n", "floor_z2", "floor_n"))}
    exact = dict.fromkeys(("kl_ab", "kl_ba", "js", "tv"), a)
    tokens = Tokens(a, a * 1.1, **more, position=np.repeat(BUCKETS, 2) + np.tile([0, 1], n // 2), exact=exact)
    rows = Sequences(np.arange(1.0, n + 1), {k: np.abs(a) for k in SEQUENCE_TERMS})
    seen: dict[str, np.ndarray] = {}
    for m in METRICS.values():
        for name, key in m.term_keys().items():
            got = m.terms[name](NUMPY, tokens if m.level == "token" else rows)
            assert np.array_equal(seen.setdefault(key, got), got), key
