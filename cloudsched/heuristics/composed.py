"""The policy that runs a heuristic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.envs.observation import columns
from cloudsched.errors import ConfigError
from cloudsched.heuristics.adaptive import RuleNumbers
from cloudsched.heuristics.kernels import CURVE_STEPS, FleetTable, dearness_of, decide
from cloudsched.heuristics.parameters import HeuristicConfig
from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.fleet import Fleet


class HeuristicPolicy:
    """Order, placement and sleep control, composed from the numbers of a `HeuristicConfig`.

    Args:
        cluster: rules of the clusters it will decide for; fixes the fleet.
        heuristics: one for all clusters, or one for each (tuning runs many candidates at once).
        fleet: the servers, where they are not those that the rules describe.

    Attributes:
        last_server: (E,) the server that round robin used last: all that is remembered.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        heuristics: HeuristicConfig | Sequence[HeuristicConfig],
        fleet: Fleet | None = None,
    ) -> None:
        configs = [heuristics] if isinstance(heuristics, HeuristicConfig) else list(heuristics)
        self._columns = columns(cluster.num_resources)
        self._numbers = RuleNumbers(configs, self._columns)
        self._fleet = fleet_table(cluster, fleet)
        self.reset(len(configs))

    def reset(self, num_clusters: int) -> None:
        """Forget which server round robin used last."""
        if len(self._numbers.fixed) not in (1, num_clusters):
            raise ConfigError(
                f"{len(self._numbers.fixed)} heuristics for {num_clusters} clusters; "
                "expected one for all, or one for each."
            )
        self.last_server = np.full(num_clusters, -1, np.int64)
        self._actions = np.zeros(num_clusters, np.int64)

    def act(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Return (E,) legal actions; the array is overwritten by the next call."""
        if len(observation["servers"]) != len(self._actions):
            self.reset(len(observation["servers"]))
        decide(
            self._fleet,
            self._columns,
            self._numbers(observation),
            observation["servers"],
            observation["jobs"],
            observation["context"],
            observation["action_mask"],
            self.last_server,
            self._actions,
        )
        return self._actions


def fleet_table(cluster: ClusterConfig, fleet: Fleet | None = None) -> FleetTable:
    """Return the power curves and the worth of a mean server, as the kernel reads them."""
    engine = ClusterEngine(cluster, fleet=fleet)
    capacity = engine.fleet.capacity
    loads = np.linspace(0.0, 1.0, CURVE_STEPS + 1)
    return FleetTable(
        curve_w=np.stack([engine.power_at(float(load)) for load in loads], axis=1),
        server_worth=capacity.mean(axis=0) / capacity.max(axis=0),
        dearness=dearness_of(engine.power_at(1.0), capacity[:, 0]),
    )
