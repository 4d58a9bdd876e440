"""Findings of the audit: what a dump says of itself, before and beside its numbers."""

from __future__ import annotations

from onepolicy.codes.kind import DRIFT, FAIL, INFO, OPEN, PASS, WARN, Code

#: The record: lengths, values, masks, missing and doubled records.
INTEGRITY: dict[str, Code] = {
    "records-unreadable": Code(
        1,
        WARN,
        OPEN,
        "records that cannot be read",
        "Write them again, or wait until the run has closed the file; the others are audited.",
    ),
    "record-contradicts-itself": Code(
        1,
        FAIL,
        DRIFT,
        "records state counts that are not theirs",
        "Ids and counts come from two places: take both from one answer of the engine.",
    ),
    "logprob-length-mismatch": Code(
        1,
        FAIL,
        DRIFT,
        "records have more or fewer log-probs than tokens",
        "Take ids and log-probs from one answer of the engine; never cut the longer list to the shorter one.",
    ),
    "shift-by-one": Code(
        1,
        FAIL,
        DRIFT,
        "the two sides' log-probs are shifted against each other",
        "Value i belongs to token i given those before it: mend the slice of logits or of labels that is off.",
        True,
    ),
    "filled-logprob": Code(
        1,
        FAIL,
        DRIFT,
        "fill values stand where log-probs should",
        "Leave what was not scored null, and fail where a list is short: 0.0 means certainty.",
        True,
    ),
    "uniform-vocabulary": Code(
        1,
        FAIL,
        DRIFT,
        "every log-prob of a side is the same number",
        "That engine computed constant logits: look for weights that never arrived, zeroed or on the meta device.",
        True,
    ),
    "values-at-masked-places": Code(
        1,
        WARN,
        PASS,
        "values that would do harm stand where the loss mask is 0",
        "Leave them null or 0.0: exp of a large log-ratio times a mask of 0 is NaN, and masks change.",
    ),
    "duplicate-records": Code(
        1,
        WARN,
        PASS,
        "the same sequence is in the dump more than once",
        "Look for ranks that write the same records, and for retries; each copy counts again in every number.",
    ),
    "record-id-repeated": Code(
        1,
        WARN,
        PASS,
        "one record id stands for different sequences",
        "Make ids unique over ranks and steps: joining two files by such an id pairs different replies.",
    ),
    "records-missing": Code(
        1,
        WARN,
        PASS,
        "the numbering of groups or samples has holes",
        "Find out what left them out (a filter, a lost rank, a failed request): what is missing is seldom random.",
    ),
    "nothing-trained": Code(
        1,
        WARN,
        PASS,
        "records whose loss mask is empty",
        "Nothing, if a filter did it knowingly; else see who writes the mask.",
    ),
    "one-source": Code(
        1,
        WARN,
        OPEN,
        "both sides hold the same numbers to the bit",
        "Check that the second list is computed, not copied; two engines agree to the bit only when built to.",
    ),
    "stored-as-bf16": Code(
        1,
        WARN,
        PASS,
        "a side's log-probs were rounded to bfloat16 when they were stored",
        "Store log-probs as float32: this rounding alone is up to 0.4% of each value.",
    ),
    "stored-as-fp16": Code(
        1,
        WARN,
        PASS,
        "a side's log-probs were rounded to float16 when they were stored",
        "Store log-probs as float32: this rounding alone is up to 0.05% of each value.",
    ),
    "top-token-stored": Code(
        1,
        FAIL,
        DRIFT,
        "a side stores the likeliest token's log-prob instead of the sampled one's",
        "Read the sampled token's own entry: engines list the top tokens first, the sampled one may stand behind.",
        True,
    ),
}

#: Which policy and which distribution each side describes.
MEANING: dict[str, Code] = {
    "temperature-mismatch": Code(
        3,
        FAIL,
        DRIFT,
        "the two sides' log-probs are of different temperatures",
        "Divide the logits by the sampling temperature before the softmax, on both sides or on neither; dividing "
        "log-probs by it gives no distribution.",
        True,
    ),
    "temperature-suspected": Code(
        3,
        INFO,
        OPEN,
        "the gap looks like one of temperature, and chosen tokens alone cannot tell",
        "Record the scorer's entropy and varentropy, or score the dump again: onepolicy audit --scorer.",
    ),
    "truncated-support-mismatch": Code(
        3,
        FAIL,
        DRIFT,
        "one side is renormalised over the tokens that top-p, top-k or min-p kept, the other is not",
        "Replay the sampler's kept set in the scorer, or draw with top_p 1, top_k off and min_p 0.",
        True,
    ),
    "penalty-mismatch": Code(
        3,
        FAIL,
        DRIFT,
        "one side's log-probs hold a repetition, presence or frequency penalty",
        "Train without penalties, or apply the same ones to the scorer's logits.",
        True,
    ),
    "softcap-differs": Code(
        3,
        FAIL,
        DRIFT,
        "the two sides cap the final logits otherwise",
        "Set final_logit_softcapping alike on both sides: cap * tanh(logits / cap), before the temperature.",
        True,
    ),
    "semantics-contradicted": Code(
        3,
        FAIL,
        DRIFT,
        "what is declared of the log-probs is not what they are",
        "Declare what the engine reports (raw, temperature, processed) and the parameters that it really drew with.",
        True,
    ),
    "reported-metric-explained": Code(
        7,
        INFO,
        PASS,
        "a number that the run reported is found again, by another definition than its name says",
        "Compare dashboards by definition, not by name: onepolicy explain FRAMEWORK:KEY.",
    ),
    "kl-includes-unsampled-tokens": Code(
        3,
        WARN,
        PASS,
        "a reported number takes in tokens that the sampler did not draw",
        "Mask tool output, prompts and padding out of every mean: no estimator of KL exists where nothing was drawn.",
    ),
    "reported-metric-unexplained": Code(
        3,
        WARN,
        PASS,
        "a number that the run reported cannot be had from what it saved",
        "Look for a filter between the two: other tokens, other weights, values clamped or replaced on the way.",
    ),
    "old-copied-from-sampler": Code(
        4,
        FAIL,
        DRIFT,
        "the scorer's values are the sampler's to the bit, though other weights should have made them",
        "Score the tokens with the weights of that step, or call the column what it is.",
        True,
    ),
    "reference-follows-policy": Code(
        4,
        FAIL,
        DRIFT,
        "after updates the reference still equals the policy to the bit",
        "Load the reference once and freeze it: a penalty against oneself is 0.",
    ),
}

AUDIT: dict[str, Code] = {**INTEGRITY, **MEANING}
