"""Every metric, in one table: key -> `Metric`. Directions: d = log p_scorer - log p_sampler, r = e^d.

To add one: a `Metric` in the file of its family (terms written with operators and `xp`, formula and source in the
entry), a test against an independent reference. Its file's list is in this table already.
"""

from __future__ import annotations

from onepolicy.errors import UnknownName
from onepolicy.metrics import divergence, floor, length, ratio, size, surprisal, tail
from onepolicy.metrics.aliases import ALIASES
from onepolicy.sums import Metric

METRICS: dict[str, Metric] = {
    m.key: m for family in (size, divergence, ratio, length, surprisal, tail, floor) for m in family.METRICS
}


def metric(name: str) -> Metric:
    """The metric of that key or alias. Errors: `UnknownName` (did you mean)."""
    key = ALIASES[name].metric if name in ALIASES else name
    if key not in METRICS:
        raise UnknownName("metric", name, [*METRICS, *ALIASES])
    return METRICS[key]
