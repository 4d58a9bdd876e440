"""Surprisal against entropy: were the tokens drawn from the distribution that is reported?

If token t is drawn from P_t, then -log P_t(token) - H(P_t) has mean zero and the variance of -log P_t (varentropy), and
the sum over drawn tokens is a martingale: z = sum(-logp - H) / sqrt(sum Var) is standard normal. Two engines may agree
on every log-prob and both be wrong about what was drawn; z sees it. Rivals: selection by reward, greedy or truncated
sampling, filtering; rounding of sd s adds about s^2 nats a token.
"""

from __future__ import annotations

from onepolicy.sums import Metric


def _side(side: str, name: str) -> list[Metric]:
    uses = f"surprisal_{side}"
    excess = {"excess": lambda xp, x: -getattr(x, side) - getattr(x, f"{side}_entropy")}
    variance = {"variance": lambda xp, x: getattr(x, f"{side}_varentropy")}
    return [
        Metric(
            f"surprisal_{name}/z",
            "token",
            uses,  # type: ignore[arg-type]
            excess | variance,
            lambda t: t.divide(t.sum("excess"), abs(t.sum("variance")) ** 0.5),
            f"sum(-logp - H) / sqrt(sum Var) under the {name}'s distribution: standard normal if drawn from it",
            unit="standard deviations",
            source="martingale central limit theorem",
        ),
        Metric(
            f"surprisal_{name}/excess",
            "token",
            uses,  # type: ignore[arg-type]
            excess,
            lambda t: t.mean("excess"),
            f"mean(-logp - H) under the {name}'s distribution: its size in nats a token",
        ),
    ]


METRICS = [*_side("a", "sampler"), *_side("b", "scorer")]
