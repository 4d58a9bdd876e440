"""Profiles: the gap by position, probability, entropy, kind of token, turn, version (`base` says what a bin holds).

To add one: a function in `bins.py`, and one line here.
"""

from __future__ import annotations

from onepolicy.profiles import bins
from onepolicy.profiles.adding import profiled
from onepolicy.profiles.base import Bins, Profile, Seen

__all__ = ["PROFILES", "Bins", "Profile", "Seen", "profiled"]

#: Names out of a dump that are told apart.
MOST = 256

PROFILES: dict[str, Profile] = {
    p.key: p
    for p in (
        Profile("position", "place in the reply", bins.position),
        Profile("part", "sixteenth of the reply", bins.part),
        Profile(
            "probability", "sampler's probability", bins.probability, order=tuple(x for _, x in bins.PROBABILITIES)
        ),
        Profile(
            "entropy",
            "entropy",
            bins.entropy,
            "old_entropy or sampler_entropy",
            order=tuple(x for _, x in bins.ENTROPIES),
        ),
        Profile("place", "first and last token", bins.place, order=("first", "inner", "last")),
        Profile("repeated", "seen before", bins.repeated, order=("new", "in the prompt", "in the reply")),
        Profile("kept", "tokens kept by top-p, top-k, min-p", bins.kept, "sampling_mask"),
        Profile("routes", "experts", bins.routes(), "routed_experts and scorer_routed_experts"),
        Profile(
            "routes before", "experts one token before", bins.routes(1), "routed_experts and scorer_routed_experts"
        ),
        Profile("lag", "version lag", bins.lag, "policy_version and scorer_version"),
        Profile("version", "sampler's weights", bins.version, "policy_version"),
        Profile("span", "replies of several versions", bins.span, "policy_version"),
        Profile("reused", "cached prefix's own tokens", bins.reused, "cached_prefix_length"),
        Profile("step", "training step", bins.of_record("step"), "step", "record"),
        Profile("scorer_version", "scorer's weights", bins.of_record("scorer_version"), "scorer_version", "record"),
        Profile("turn", "turn", bins.of_record("turn"), "turn", "record", most=MOST),
        Profile("env", "environment", bins.of_record("env_id"), "env_id", "record", most=MOST),
        Profile("replica", "sampler's replica", bins.of_record("replica_id"), "replica_id", "record", most=MOST),
        Profile("finish", "finish reason", bins.of_record("finish_reason"), "finish_reason", "record", most=MOST),
        Profile("length", "length of the reply", bins.length, level="record"),
        Profile("cached", "prefix cache", bins.cached, "cached_prefix_length", "record"),
        Profile(
            "padding", "padding in the scorer's batch", bins.padding, "padding_length", "record", order=bins.PADDINGS
        ),
    )
}
