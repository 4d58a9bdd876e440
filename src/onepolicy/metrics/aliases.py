"""The names that other stacks and papers use, and our metric for each. Shipped in the docs.

`exact` False: the framework's number differs from ours in a way the note states; the note is the translation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a metric: whose, whether the number is the same, and the difference in words."""

    metric: str
    origin: str
    exact: bool = True
    note: str = ""


def _survey(**names: str) -> dict[str, Alias]:
    return {name: Alias(key, "survey") for name, key in names.items()}


ALIASES: dict[str, Alias] = {
    # names of the survey of 18 frameworks, numbers 1 to 17
    **_survey(
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
    ),
    "verl:rollout_corr/kl": Alias("kl_sampler_scorer_k1/mean", "verl"),
    "verl:rollout_corr/k3_kl": Alias("kl_sampler_scorer_k3/mean", "verl"),
    "verl:rollout_corr/chi2_token": Alias("chi2_token/mean", "verl", False, "verl clamps d to +-20 first"),
    "verl:rollout_corr/chi2_seq": Alias("chi2_sequence_product/mean", "verl", False, "verl clamps D to +-20 first"),
    "verl:rollout_corr/training_ppl": Alias("ppl_scorer/mean", "verl"),
    "verl:rollout_corr/rollout_ppl": Alias("ppl_sampler/mean", "verl"),
    "verl:rollout_corr/log_ppl_diff": Alias("log_ppl_diff/mean", "verl", True, "verl's docs state the opposite sign"),
    "verl:rollout_corr/ppl_ratio": Alias("ppl_ratio/mean", "verl", True, "verl's docs say exp of the mean"),
    "verl:rollout_corr/rollout_is_eff_sample_size": Alias(
        "ess_token/share", "verl", False, "verl's is of truncated weights"
    ),
    "verl:training/rollout_probs_diff_mean": Alias("prob_abs_diff/mean", "verl"),
    "verl:training/rollout_probs_diff_max": Alias("prob_abs_diff/max", "verl"),
    "verl:training/rollout_actor_probs_pearson_corr": Alias("prob_pearson/r", "verl"),
    "trl:sampling/sampling_logp_difference/mean": Alias(
        "abs_log_ratio/mean", "TRL", False, "TRL averages over ranks, each rank alike"
    ),
    "trl:sampling/sampling_logp_difference/max": Alias("abs_log_ratio/max", "TRL"),
    "trl:sampling/importance_sampling_ratio/mean": Alias("ratio/mean", "TRL", False, "TRL's is after truncation"),
    "slime:train/train_rollout_logprob_abs_diff": Alias(
        "abs_log_ratio/mean", "slime", False, "slime takes the mean over sequences of the sequence mean"
    ),
    "slime:tis": Alias("ratio/mean", "slime", False, "mean over sequences of the sequence mean"),
    "miles:train/train_rollout_kl": Alias(
        "kl_sampler_scorer_k3/mean", "miles", False, "clamped to +-10; NaN and infinite d count as 0"
    ),
    "nemo_rl:token_mult_prob_error": Alias("mult_prob_error/mean", "NeMo-RL"),
    "nemo_rl:gen_kl_error": Alias("kl_sampler_scorer_k3/mean", "NeMo-RL", True, "with the k3 setting"),
    "nemo_rl:policy_kl_error": Alias(
        "kl_scorer_sampler_weighted/mean", "NeMo-RL", False, "NeMo-RL has no importance weight: not an estimate"
    ),
    "nemo_rl:js_divergence_error": Alias("js_sampled/mean", "NeMo-RL", False, "NeMo-RL's is a sampled-token proxy"),
    "nemo_rl:sampling_importance_ratio": Alias("ratio/mean", "NeMo-RL", False, "after truncation when TIS is on"),
    "prime_rl:mismatch_kl/all/mean": Alias(
        "kl_sampler_scorer_k3/mean", "prime-rl", False, "the scorer is the current policy: staleness is in it"
    ),
    "openrlhf:vllm_kl": Alias("kl_sampler_scorer_k1/mean", "OpenRLHF"),
    "areal:behave_approx_kl": Alias("log_ratio/mean", "AReaL", False, "over kept tokens only"),
    "tinker:optim/kl_sample_train_v1": Alias("kl_sampler_scorer_k1/mean", "tinker-cookbook"),
    "tinker:optim/kl_sample_train_v2": Alias("kl_sampler_scorer_k2/mean", "tinker-cookbook"),
    "skyrl:policy/rollout_train_logprobs_abs_diff_mean": Alias("abs_log_ratio/mean", "SkyRL"),
    "skyrl:policy/rollout_train_logprobs_abs_diff_max": Alias("abs_log_ratio/max", "SkyRL"),
    "roll:actor/train_infer_ratio_token_mean": Alias(
        "ratio/mean", "ROLL", False, "mean over sequences of the sequence mean"
    ),
    "open_instruct:debug/vllm_vs_local_logprob_diff_mean": Alias("abs_log_ratio/mean", "open-instruct"),
    "tunix:sampler_trainer/logp_diff_mean": Alias("abs_log_ratio/mean", "tunix"),
    "tunix:sampler_trainer/probs_pearson_corr": Alias("prob_pearson/r", "tunix"),
    "torchtitan:bit_wise/logprob_diff/mean": Alias("log_ratio/mean", "torchtitan"),
    "torchtitan:bit_wise/logprob_diff/max": Alias("abs_log_ratio/max", "torchtitan"),
}
