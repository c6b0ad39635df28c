"""A rule and the network that corrects it, on their way between rounds and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cloudsched.config import ClusterConfig
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.jams import BEGIN
from cloudsched.heuristics.parameters import RANGES
from cloudsched.models.networks import (
    NetworkConfig,
    ObservationSizes,
    QNetwork,
    build_network,
)
from cloudsched.models.prior import LARGEST_LEAD
from cloudsched.policy import Policy
from cloudsched.rl.policy import NetworkPolicy

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Improved:
    """A network's settings and weights, or the rule alone where it has learned nothing yet."""

    network: NetworkConfig
    weights: Weights | None

    def policy(self, cluster: ClusterConfig) -> Policy:
        """Return the policy for clusters with some rules."""
        if self.weights is None:
            assert self.network.prior is not None, "there is no rule to correct"
            return HeuristicPolicy(cluster, self.network.prior)
        return NetworkPolicy(self.build(cluster).eval(), rule="argmax", is_frozen=True)

    def corrected(
        self, leads: float | Sequence[float], kinds: Sequence[bool], due_ticks: int
    ) -> Improved:
        """Return the same network with leads of the rule, which decides alone in a jam.

        With jobs in the queue and no server asleep, waiting saves nothing and makes those behind
        late, which is more than what branches of a few ticks show.

        Args:
            leads: what other decisions have to be better by: everywhere, or at each kind of site
                that the rule recognises.
            kinds: which of the four kinds of decisions are not left to the rule.
            due_ticks: ticks of laxity from which on only the rule may let jobs wait.
        """
        rule = self.network.prior
        assert rule is not None, "there is no rule to correct"
        sites = {name: row for name, row in rule.sites.items() if name != "caution"}
        if not isinstance(leads, float):
            sites["caution"] = tuple(leads)
        rule = rule.replace(
            caution=leads if isinstance(leads, float) else 1.0,
            sites=sites,
            jam_queue=rule.jam_queue if rule.jam else BEGIN["jam_queue"],
            jam={**rule.jam, "caution": RANGES["caution"][1]},
        )
        settings = self.network.replace(
            prior=rule,
            prior_weight=0.0,
            prior_leads=tuple(1.0 if is_free else LARGEST_LEAD for is_free in kinds),
            prior_due_ticks=due_ticks,
        )
        return Improved(network=settings, weights=self.weights)

    def build(self, cluster: ClusterConfig) -> QNetwork:
        """Return the network, with fresh weights where it has learned nothing yet."""
        network = QNetwork(build_network(ObservationSizes.of(cluster), self.network))
        if self.weights is not None:
            network.load_state_dict(self.weights)
        return network
