"""Findings about engines, log-probs and the gap between them."""

from __future__ import annotations

from onepolicy.codes.kind import DRIFT, ERROR, FAIL, INFO, OPEN, PASS, WARN, Code

NUMBERS: dict[str, Code] = {
    "engine-died": Code(
        1, FAIL, ERROR, "an engine's process ended half way", "Read its log; what was measured before is saved."
    ),
    "engine-failed": Code(
        1, FAIL, ERROR, "an engine refused or failed", "Read its message; what was measured before is saved."
    ),
    "nothing-scored": Code(
        1, FAIL, ERROR, "no token has finite log-probs on both sides", "Record log-probs on both sides.", True
    ),
    "positive-logprob": Code(
        1,
        FAIL,
        ERROR,
        "a log-prob above 0",
        "A probability above one cannot be: look for probabilities, losses or logits stored as log-probs.",
        True,
    ),
    "nonfinite-logprob": Code(
        1,
        FAIL,
        ERROR,
        "a log-prob is NaN or +inf",
        "Find the first one in the engine; never fill it with 0.0, which means certainty.",
    ),
    "missing-logprobs": Code(
        1,
        WARN,
        OPEN,
        "drawn tokens without a log-prob",
        "Find out why they were not scored; they are left out of every number here, and counted.",
    ),
    "vocabulary-differs": Code(
        2, FAIL, DRIFT, "the two engines have vocabularies of different size", "Use one model directory.", True
    ),
    "tokenizer-differs": Code(
        2, WARN, PASS, "the two engines' tokenizers have different digests", "Use one tokenizer directory."
    ),
    "semantics-differ": Code(
        3,
        FAIL,
        DRIFT,
        "the two sides' log-probs mean different things",
        "Make both raw, or both processed at the same temperature and truncation.",
        True,
    ),
    "support-violation": Code(
        3,
        FAIL,
        DRIFT,
        "a drawn token has probability zero on one side only",
        "Sets of top-p, top-k or min-p computed on one side only, or twice with other rounding: replay the sampler's.",
    ),
    "not-drawn-from-reported": Code(
        3,
        FAIL,
        DRIFT,
        "the tokens were not drawn from the distribution that is reported",
        "Report the distribution that is sampled (vLLM: processed log-probs), or sample the one that is reported.",
    ),
    "logprob-contract": Code(
        3,
        FAIL,
        DRIFT,
        "log-probs do not mean what is declared",
        "Set the flag that the message names, or declare what is really reported.",
    ),
    "placeholder-logprob": Code(
        1,
        FAIL,
        DRIFT,
        "placeholder values stand where log-probs should",
        "Leave what was not scored null: 0.0 means certainty.",
    ),
    "not-at-step-zero": Code(
        4,
        FAIL,
        DRIFT,
        "before the first update the trainer's own values already differ",
        "Old, current and reference are one policy before the first step: look at dropout, dtypes, adapters, caches.",
    ),
    "weights-differ": Code(
        4,
        WARN,
        PASS,
        "the two engines loaded different weights",
        "A gap between different weights is staleness, not mismatch: load the same checkpoint on both sides.",
    ),
    "different-function": Code(
        5,
        FAIL,
        DRIFT,
        "in float32 the two engines compute different functions",
        "A setting differs (rope, norm epsilon, mask, weights, template): rounding is a thousand times smaller here.",
    ),
    "not-repeatable": Code(
        5,
        FAIL,
        DRIFT,
        "an engine contradicts itself when it is asked again",
        "Look for dropout, a mode left on, races, atomic sums; nothing else here can be trusted before that.",
    ),
    "depends-on-order": Code(
        5,
        FAIL,
        DRIFT,
        "the scorer's values depend on the order of the sequences",
        "It sorts its batch and does not sort back, or carries state from one sequence to the next.",
    ),
    "depends-on-packing": Code(
        5,
        FAIL,
        DRIFT,
        "packed sequences see each other",
        "The document mask is missing or wrong, or positions do not restart: see the first bad token.",
    ),
    "depends-on-padding": Code(
        5,
        FAIL,
        DRIFT,
        "values move with the padding side",
        "Give position ids that start at the first real token, and a mask over the padding.",
    ),
    "depends-on-batch": Code(
        5,
        FAIL,
        DRIFT,
        "values depend on what else is in the batch, beyond rounding",
        "Rows of a batch see each other: look at masks, packing inside the scorer, and batch-dependent routing.",
    ),
    "depends-on-path": Code(
        5,
        FAIL,
        DRIFT,
        "decode and prefill of one engine disagree beyond rounding",
        "Look at the KV cache: positions, its dtype, sliding windows, chunk boundaries.",
    ),
    "depends-on-cache": Code(
        5,
        FAIL,
        DRIFT,
        "values from a cached prefix differ beyond rounding",
        "The cache holds what other weights or other settings computed: reset it at every weight update.",
    ),
    "depends-on-load": Code(
        5,
        FAIL,
        DRIFT,
        "a loaded server gives other values than an idle one, beyond rounding",
        "Batch-dependent kernels or routing: use batch-invariant kernels, or compare at production load.",
    ),
    "depends-on-kernel": Code(
        5,
        FAIL,
        DRIFT,
        "another attention kernel of the scorer disagrees beyond rounding",
        "One of the two kernels reads mask, window, scale or soft-cap otherwise.",
    ),
    "texts-differ": Code(
        5,
        FAIL,
        DRIFT,
        "on fixed texts the two engines differ beyond rounding",
        "See the position table and the worst texts: long contexts and rare tokens are where drawn replies do not go.",
    ),
    "routes-differ": Code(
        5,
        FAIL,
        DRIFT,
        "the two engines choose other experts more often than rounding does",
        "Replay the sampler's experts in the scorer (R3), or compute the router in float32 on both sides.",
    ),
    "beyond-rounding": Code(
        5,
        FAIL,
        DRIFT,
        "the gap is larger than rounding predicts",
        "See the same-function leg: if float32 agrees, a production kernel differs; else a setting does.",
    ),
    "beyond-rounding-late": Code(
        5,
        FAIL,
        DRIFT,
        "from some position on the gap is larger than rounding predicts",
        "What acts late: rope scaling beyond the original context, sliding windows, chunk and cache boundaries.",
    ),
    "ratio-biased": Code(
        5,
        FAIL,
        DRIFT,
        "the mean ratio is not 1",
        "Below 1 by a constant: truncated support (top-p, top-k, min-p) on the sampler's side only.",
    ),
    "kl-above-bound": Code(
        5, FAIL, DRIFT, "the KL divergence is above its bound", "Repeat in float32 on both sides: a bug stays."
    ),
    "gap-above-bound": Code(
        5, FAIL, DRIFT, "the mean gap is above its bound", "Repeat in float32 on both sides: a bug stays."
    ),
    "token-above-bound": Code(
        5,
        FAIL,
        DRIFT,
        "a single token's gap is above its bound",
        "Look at the worst tokens: few far outliers are a place to look, many are a precision.",
    ),
    "above-bound": Code(5, FAIL, DRIFT, "a metric is above its bound", "See the metric's formula and the gap table."),
    "heavy-ratio-tail": Code(
        5,
        WARN,
        PASS,
        "the ratios' tail is too heavy for means of them",
        "Few tokens carry the mean: see the worst tokens; intervals of ratio means are withheld.",
    ),
    "same-function-open": Code(
        6,
        WARN,
        OPEN,
        "whether both engines compute the same function is open",
        "Give the float32 leg what it lacks (memory, time), or leave it out knowingly: --skip same-function.",
    ),
    "leg-failed": Code(
        6, WARN, OPEN, "a leg was tried and failed", "Read its message; --skip LEG leaves it out knowingly."
    ),
    "not-measured": Code(
        6, INFO, OPEN, "a required metric was not measured", "Record what it needs, or choose bounds without it."
    ),
    "too-few-tokens": Code(6, INFO, OPEN, "too few tokens to pass", "Record more tokens."),
    "too-few-clusters": Code(
        6, INFO, OPEN, "too few independent prompts for an interval", "Record more prompts, not longer replies."
    ),
    "undecided": Code(6, INFO, OPEN, "the interval holds the bound", "Record more tokens."),
    "nonfinite-terms": Code(
        6, INFO, OPEN, "some terms of a metric are not finite, so it cannot pass", "See the worst tokens."
    ),
    "kl-withheld": Code(
        7,
        INFO,
        PASS,
        "no estimator of KL exists for these tokens",
        "The reported distribution is not the one that was sampled, or neither side drew the tokens.",
    ),
    "semantics-undeclared": Code(
        7, INFO, PASS, "what the log-probs mean is not declared", "Set logprob_semantics and the sampling parameters."
    ),
    "floor-incomplete": Code(
        7,
        INFO,
        PASS,
        "what rounding alone would do is not known, so absolute bounds are used",
        "Name an engine that can emulate the sampler's precision: --floor hf:MODEL.",
    ),
    "floor-assumed": Code(
        7,
        INFO,
        PASS,
        "the floor is assumed from the scorer's own error, not measured between kernels",
        "Use a scorer with more than one kernel, or --floor hf:MODEL.",
    ),
    "texts-left-out": Code(7, INFO, PASS, "part of the suite was left out", "Nothing, if that is known."),
    "not-covered": Code(7, INFO, PASS, "a bound was not covered by what was measured", "Nothing, if that is known."),
}
