"""The names that other stacks and papers use, and our metric for each. Shipped in the docs.

`exact` False: the framework's number differs from ours in a way the note states; the note is the translation. The
frameworks' own names come from the dialects, which also compute them.
"""

from __future__ import annotations

from dataclasses import dataclass

from onepolicy.dialects import DIALECTS


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a metric: whose, whether the number is the same, and the difference in words."""

    metric: str
    origin: str
    exact: bool = True
    note: str = ""


def _survey(**names: str) -> dict[str, Alias]:
    return {name: Alias(key, "survey") for name, key in names.items()}


#: names of the survey of 18 frameworks, numbers 1 to 17
SURVEY: dict[str, Alias] = _survey(
    logp_abs_diff="abs_log_ratio/mean",
    logp_bias="log_ratio/mean",
    kl_k1="kl_sampler_scorer_k1/mean",
    kl_k2="kl_sampler_scorer_k2/mean",
    kl_k3="kl_sampler_scorer_k3/mean",
    kl_rev="kl_scorer_sampler_weighted/mean",
    js="js_sampled/mean",
    prob_abs_diff="prob_abs_diff/mean",
    prob_diff="prob_diff/mean",
    tv="tv_sampled/mean",
    pearson_p="prob_pearson/r",
    ratio="ratio/mean",
    chi2_token="chi2_token/mean",
    chi2_seq_product="chi2_sequence_product/mean",
    chi2_seq_geo="chi2_sequence_geometric/mean",
    ess_token="ess_token/share",
    ess_seq="ess_sequence/share",
    ppl_train="ppl_scorer/mean",
    ppl_roll="ppl_sampler/mean",
    log_ppl_diff="log_ppl_diff/mean",
    ppl_ratio="ppl_ratio/mean",
    extreme_frac="extreme_share/2",
    catastrophic_token_frac="catastrophic_token/share",
    catastrophic_seq_frac="catastrophic_sequence/share",
    length_scaling="length_scaling/variance_per_token",
    mult_prob_error="mult_prob_error/mean",
)

ALIASES: dict[str, Alias] = SURVEY | {
    f"{dialect.name}:{spelling}": Alias(key.ours, dialect.title, key.same, key.quirks)
    for dialect in DIALECTS.values()
    for spelling, name in dialect.names.items()
    if (key := dialect.keys[name]).ours
}
