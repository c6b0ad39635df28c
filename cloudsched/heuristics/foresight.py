"""What knowing the next few ticks would be worth: a yardstick for policies that predict.

No policy that runs in the world can do this. The tuned headroom controller gets, in place of the
work that arrived lately, the demand that will arrive in the next ticks; with its numbers tuned
again, what it gains over the controller without foresight is what perfect prediction is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.parameters import HeuristicConfig


class ForesightPolicy:
    """A heuristic whose fast average of arriving work is the CPU demand of the next ticks.

    Args:
        env: the clusters it decides for, and whose job tables it reads.
        heuristics: as for `HeuristicPolicy`; `headroom_trend` is the weight of the foresight.
        num_ticks: how far it sees.
    """

    def __init__(
        self,
        env: ClusterVectorEnv,
        heuristics: HeuristicConfig | Sequence[HeuristicConfig],
        num_ticks: int = 6,
    ) -> None:
        self._env = env
        self._num_ticks = num_ticks
        self._heuristic = HeuristicPolicy(env.config, heuristics)
        self._column = columns(env.config.num_resources).work_rate
        self._context = np.zeros(0, np.float32)
        self.reset(env.num_envs)

    def reset(self, num_clusters: int) -> None:
        """Read the job tables of the episodes that begin."""
        self._heuristic.reset(num_clusters)
        state, length = self._env.engine.state, self._env.config.episode_ticks
        arriving = np.zeros((num_clusters, length + 1))
        for e in range(num_clusters):
            count = int(state.clusters["num_jobs"][e])
            ticks = state.jobs["arrival"][e, :count]
            is_inside = ticks < length
            np.add.at(arriving[e], ticks[is_inside], state.demand[e, :count, 0][is_inside])
        total = np.cumsum(arriving, axis=1)
        ends = np.minimum(np.arange(length + 1) + self._num_ticks, length)
        share = (total[:, ends] - total) / self._env.engine.fleet.total_capacity[0]
        self._coming = (share / (1.0 + share)).astype(np.float32)  # squashed as the encoder does
        self._clusters = np.arange(num_clusters)

    def act(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Return (E,) legal actions."""
        ticks = self._env.engine.state.clusters["tick"]
        context = observation["context"].copy()
        context[:, self._column] = self._coming[self._clusters, ticks]
        return self._heuristic.act({**observation, "context": context})
