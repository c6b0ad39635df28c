"""How far a network is trusted at each kind of site.

What was learned from branches may be right where jobs are alike and wrong where bursts or an
overload come from time to time, longer after a decision than branches are followed. So the rule's
lead at each kind of site is chosen in episodes of that kind: the one that returned most for
certain, and so high that the rule is left alone where none did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

ALONE = 0.8
"""A lead that leaves the rule alone but for what stands out by far. Leads are mixed by how likely
each kind is; a much higher one would be felt wherever a kind can't be ruled out."""


def choose_cautions(
    gains: Mapping[float, NDArray[np.float64]], kinds: Sequence[str]
) -> dict[str, float]:
    """Return the lead at each kind of site.

    Args:
        gains: by lead, (episodes,) what the policy returned beyond the rule, in proportion.
        kinds: of the episodes.
    """
    rows = {kind: [i for i, one in enumerate(kinds) if one == kind] for kind in set(kinds)}
    chosen: dict[str, float] = {}
    for kind, own in rows.items():
        surely = {level: _surely(values[own]) for level, values in gains.items()}
        best = max(surely, key=lambda level: surely[level])
        chosen[kind] = best if surely[best] > 0.0 else ALONE
    return chosen


def _surely(gains: NDArray[np.float64]) -> float:
    """Return the mean less its standard error."""
    return float(gains.mean() - gains.std() / np.sqrt(len(gains)))
