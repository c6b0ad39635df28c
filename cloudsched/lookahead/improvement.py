"""Improves a policy round by round: branches, what they teach, and whether it helps.

A round runs the policy of the round before, tries other decisions on the same arrivals, and teaches
a network what they gain. The next policy takes the decision with the highest score, where the
rule's own has a lead: a gain that does not make up for it is left alone, because most of the
smallest are errors. Leads are compared in trial episodes below the test seeds. Collecting fans out
over Ray's workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import ray
import torch
from torch import Tensor

from cloudsched.config import ClusterConfig, Settings
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import Episodes
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.lookahead.branches import BranchCollector, BranchConfig, Branches
from cloudsched.lookahead.fitting import Fit, FittingConfig, Lessons, fit
from cloudsched.lookahead.worth import FloatArray, OutlookWorth, site_signals
from cloudsched.models.networks import (
    NetworkConfig,
    ObservationSizes,
    QNetwork,
    build_network,
)
from cloudsched.models.prior import RuleCorrection
from cloudsched.policy import Policy
from cloudsched.rl.policy import NetworkPolicy
from cloudsched.sim.fleet import build_fleet

Weights = dict[str, Tensor]
LEADS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # in returns
SEED_STRIDE = 10_000  # between the seeds of rounds; workers of a round count up from there


@dataclass(frozen=True, kw_only=True)
class ImprovementConfig(Settings):
    """How long a policy is improved."""

    num_branches: int
    """Other decisions tried in each round, at least."""
    num_workers: int
    """Workers that collect them, each with arrivals of its own; what is learned depends on it."""
    trial_seeds: Sequence[int]
    """Episodes on which leads and rounds are compared; below the test seeds."""
    branches: BranchConfig = field(default_factory=BranchConfig)
    fitting: FittingConfig = field(default_factory=FittingConfig)

    def __post_init__(self) -> None:
        for name in ("num_branches", "num_workers"):
            self._integer(name, low=1)

    @property
    def batches_a_worker(self) -> int:
        """Batches that each worker collects in a round."""
        per_batch = self.branches.num_states * self.branches.num_others
        return -(-self.num_branches // (per_batch * self.num_workers))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How a policy did on the trial episodes."""

    lead: float
    gain: float
    """Return beyond that of the start, in proportion; mean over episodes."""
    episode_return: float
    mean_power_w: float
    sla_violation_rate: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round found."""

    number: int
    num_branches: int
    seconds: float
    fit: Fit
    trials: Sequence[Trial]
    best: Trial
    is_best: bool
    """Whether its policy is better than all before, and acts in the next round."""


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

    def build(self, cluster: ClusterConfig) -> QNetwork:
        """Return the network, with fresh weights where it has learned nothing yet."""
        network = QNetwork(build_network(ObservationSizes.of(cluster), self.network))
        if self.weights is not None:
            network.load_state_dict(self.weights)
        return network


class Improvement:
    """Improves what it starts from.

    Args:
        scenario: where; arrivals are drawn below the test seeds.
        start: a rule, or what was improved before: a network whose scores are returns.
        seed: of arrivals, of the network and of all draws.
        tell: called with a line about what goes on.
    """

    def __init__(
        self,
        scenario: Scenario,
        start: Improved,
        config: ImprovementConfig,
        seed: int,
        tell: Callable[[str], None],
    ) -> None:
        self.config, self.scenario, self._seed, self._tell = config, scenario, seed, tell
        torch.manual_seed(seed)
        self._network = start.build(scenario.config)
        self._untaught = _weights_of(self._network)
        self._has_learned = start.weights is not None
        self.acting = start
        """The best policy so far; branches set out from what it does."""
        cluster = scenario.config
        fleet_cpu = float(build_fleet(cluster.fleet).total_capacity[0])
        self._worth = OutlookWorth(cluster.reward.alpha / fleet_cpu)
        self._kept: list[Branches] = []
        self._episodes = Episodes(scenario, config.trial_seeds)
        policy = self.acting.policy(scenario.config)
        self._baseline = self._episodes.run(policy, name="start").metrics
        self._best_gain = 0.0

    @property
    def weights(self) -> Weights:
        """Those of the acting policy's network, which leave the rule as it is before it learned."""
        return self._untaught if self.acting.weights is None else self.acting.weights

    def round(self, number: int) -> Round:
        """Run one round, and keep its policy if it is the best so far.

        Args:
            number: from one.
        """
        began = time.monotonic()
        seed = (100 * self._seed + number) * SEED_STRIDE
        batches = collect(self.scenario, self.acting, self.config, seed, self._tell)
        num_branches = sum(batch.others.size for batch in batches)
        found = self._learn(batches, number)
        trials = self._try_leads()
        best = max(trials, key=lambda trial: trial.gain)
        is_best = best.gain > self._best_gain
        if is_best:
            self._best_gain = best.gain
            self.acting = self._improved(best.lead)
            self._kept = batches
        else:  # the same policy goes on, and what it was taught before still holds
            self._kept += batches
        return Round(
            number=number,
            num_branches=num_branches,
            seconds=time.monotonic() - began,
            fit=found,
            trials=trials,
            best=best,
            is_best=is_best,
        )

    def _improved(self, lead: float) -> Improved:
        """Return the network as it is now, with a lead of the rule."""
        settings = self.acting.network.replace(prior_weight=lead)
        return Improved(network=settings, weights=_weights_of(self._network))

    def _learn(self, batches: list[Branches], number: int) -> Fit:
        """Learn from the branches of this round and of the one before."""
        far = [batch for batch in batches if batch.gain.shape[2] > 1]
        self._worth.learn(far, list(map(self._signals, far)))
        lessons = [*self._kept, *batches]
        gains = [self._worth(batch, self._signals(batch)) for batch in lessons]
        fitting = self.config.fitting
        correction = self._network.network
        assert isinstance(correction, RuleCorrection)
        rate = fitting.later_rate if self._has_learned else fitting.first_rate
        self._has_learned = True
        return fit(
            correction.network,
            Lessons.of(lessons, gains),
            fitting,
            rate=rate,
            seed=self._seed + number,
            report=lambda share: self._tell(f"learning: {100 * share:.0f} %"),
        )

    def _signals(self, batch: Branches) -> FloatArray:
        config = self.scenario.config
        return site_signals(batch.observation["context"], config.num_servers, config.num_resources)

    def _try_leads(self) -> list[Trial]:
        """Measure the policy with different leads of the rule."""
        trials = []
        for lead in LEADS:
            policy = self._improved(lead).policy(self.scenario.config)
            metrics = self._episodes.run(policy, name=f"lead {lead:g}").metrics
            start = self._baseline["episode_return"]
            gain = (metrics["episode_return"] - start) / np.maximum(np.abs(start), 1e-9)
            trials.append(
                Trial(
                    lead=lead,
                    gain=float(gain.mean()),
                    episode_return=float(metrics["episode_return"].mean()),
                    mean_power_w=float(metrics["mean_power_w"].mean()),
                    sla_violation_rate=float(metrics["sla_violation_rate"].mean()),
                )
            )
            self._tell(f"lead {lead:g}: {100 * trials[-1].gain:+.2f} % in trial episodes")
        return trials


def _weights_of(network: QNetwork) -> Weights:
    return {name: part.detach().clone() for name, part in network.state_dict().items()}


def collect(
    scenario: Scenario,
    acting: Improved,
    config: ImprovementConfig,
    seed: int,
    tell: Callable[[str], None],
) -> list[Branches]:
    """Collect the branches of a round, with a Ray actor for each worker."""
    # More workers than CPUs share them: none must wait for another to end.
    cpus = ray.cluster_resources().get("CPU", 1.0)
    actor = ray.remote(num_cpus=min(1.0, cpus / config.num_workers))(BranchCollector)
    workers = [
        actor.remote(scenario, acting.policy, config.branches, seed + number)
        for number in range(config.num_workers)
    ]
    found: list[list[Branches]] = [[] for _ in workers]
    running = {worker.collect.remote(): number for number, worker in enumerate(workers)}
    while running:
        (ready,), _ = ray.wait(list(running), num_returns=1)
        number = running.pop(ready)
        found[number].append(ray.get(ready))
        if len(found[number]) < config.batches_a_worker:
            running[workers[number].collect.remote()] = number
        share = sum(map(len, found)) / (len(workers) * config.batches_a_worker)
        tell(f"trying other decisions: {100 * share:.0f} %")
    for worker in workers:
        ray.kill(worker)
    return [batch for batches in found for batch in batches]  # whoever was faster
