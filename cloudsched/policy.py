"""What every policy is, learned or not: batched observations in, actions out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Policy(Protocol):
    """Decides for E clusters at once.

    A policy that remembers anything between decisions keeps it per cluster, so that a cluster's
    decisions do not depend on which others are in the batch.
    """

    def reset(self, num_clusters: int) -> None:
        """Forget everything: new episodes begin in `num_clusters` clusters."""

    def act(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Return (E,) legal actions for observations with a leading axis E."""
