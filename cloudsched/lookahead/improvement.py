"""Improves a policy round by round: branches, what they teach, and whether it helps.

A round runs what was learned last, tries other decisions on the same arrivals, each followed by
those of the best policy so far, and teaches a network from the branches of all rounds what they
gain. What is learned takes the decision with the highest score, where the rule's own has a lead: a
gain that does not make up for it is left alone, because most of the smallest are errors. Leads are
compared in trial episodes below the test seeds. Branches and trials fan out over Ray's workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloudsched.config import ClusterConfig, Settings
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import Episodes
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.lookahead.branches import BranchCollector, BranchConfig, Branches
from cloudsched.lookahead.fitting import Fit, FittingConfig, Lessons, fit
from cloudsched.lookahead.spread import learn_spread, spread_of
from cloudsched.lookahead.worth import OutlookWorth, site_terms
from cloudsched.models.kinds import NUM_KINDS
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
LEADS = (0.02, 0.05, 0.1, 0.2, 0.3)  # in units of the spread of gains
LEADER_LEAD = 0.1  # of who runs the clusters: enough to see where small gains lead
NEVER = 1e3  # no gain makes up for this lead
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

    leads: Sequence[float]
    """Of the rule, over placing, waking, putting to sleep and waiting."""
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
    """Whether its policy is better than all before."""


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

    def with_leads(self, leads: Sequence[float]) -> Improved:
        """Return the same network with leads of the rule over the four kinds of decisions."""
        settings = self.network.replace(prior_weight=0.0, prior_leads=tuple(leads))
        return Improved(network=settings, weights=self.weights)

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
        start: a rule, or what was improved before: a network whose scores are gains.
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
        self._start = self._leader = start
        self.best = start
        """The best policy so far."""
        torch.manual_seed(seed)
        self._untaught = _weights_of(start.build(scenario.config))
        cluster = scenario.config
        fleet_cpu = float(build_fleet(cluster.fleet).total_capacity[0])
        self._worth = OutlookWorth(cluster.reward.alpha / fleet_cpu)
        self._batches: list[Branches] = []
        self._trials = TrialEpisodes(scenario, config.trial_seeds, config.num_workers)
        self._baseline = self._trials.run(start)
        self._best_gain = 0.0

    @property
    def weights(self) -> Weights:
        """Those of the best policy's network, which leave the rule as it is before it learned."""
        return self._untaught if self.best.weights is None else self.best.weights

    def round(self, number: int) -> Round:
        """Run one round, and keep its policy if it is the best so far.

        Args:
            number: from one.
        """
        began = time.monotonic()
        seed = (100 * self._seed + number) * SEED_STRIDE
        batches = self._collect(seed)
        num_branches = sum(batch.others.size for batch in batches)
        self._batches += batches
        learned, found = self._learn(number)
        self._leader = learned.with_leads([LEADER_LEAD] * NUM_KINDS)
        trials = self._try_leads(learned)
        best = max(trials, key=lambda trial: trial.gain)
        is_best = best.gain > self._best_gain
        if is_best:
            self._best_gain = best.gain
            self.best = learned.with_leads(best.leads)
        return Round(
            number=number,
            num_branches=num_branches,
            seconds=time.monotonic() - began,
            fit=found,
            trials=trials,
            best=best,
            is_best=is_best,
        )

    def _learn(self, number: int) -> tuple[Improved, Fit]:
        """Learn from the branches of all rounds."""
        batches = self._batches
        cluster, fitting = self.scenario.config, self.config.fitting
        terms = [
            site_terms(batch.observation["context"], cluster.num_servers, cluster.num_resources)
            for batch in batches
        ]
        far = [i for i, batch in enumerate(batches) if batch.gain.shape[2] > 1]
        self._worth.learn([batches[i] for i in far], [terms[i] for i in far])
        gains = [self._worth(*pair) for pair in zip(batches, terms, strict=True)]
        weights = learn_spread(terms, gains)
        scaled = [
            gain / spread_of(term, weights)[:, None]
            for gain, term in zip(gains, terms, strict=True)
        ]
        network = self._start.build(cluster)
        network.load_state_dict(self._untaught)
        correction = network.network
        assert isinstance(correction, RuleCorrection)
        found = fit(
            correction.network,
            Lessons.of(batches, scaled),
            fitting,
            rate=fitting.first_rate if self._start.weights is None else fitting.later_rate,
            seed=self._seed + number,
            report=lambda share: self._tell(f"learning: {100 * share:.0f} %"),
        )
        return Improved(network=self._start.network, weights=_weights_of(network)), found

    def _try_leads(self, learned: Improved) -> list[Trial]:
        """Measure the policy with different leads of the rule, then without kinds of decisions."""
        trials = [self._try(learned, (lead,) * NUM_KINDS) for lead in LEADS]
        for kind in range(NUM_KINDS):
            best = max(trials, key=lambda trial: trial.gain).leads
            leads = tuple(NEVER if k == kind else lead for k, lead in enumerate(best))
            trials.append(self._try(learned, leads))
        return trials

    def _try(self, learned: Improved, leads: Sequence[float]) -> Trial:
        metrics, start = self._trials.run(learned.with_leads(leads)), self._baseline
        before = start["episode_return"]
        gain = (metrics["episode_return"] - before) / np.maximum(np.abs(before), 1e-9)
        text = ", ".join(f"{lead:g}" for lead in leads)
        self._tell(f"leads {text}: {100 * gain.mean():+.2f} % in trial episodes")
        return Trial(
            leads=tuple(leads),
            gain=float(gain.mean()),
            episode_return=float(metrics["episode_return"].mean()),
            mean_power_w=float(metrics["mean_power_w"].mean()),
            sla_violation_rate=float(metrics["sla_violation_rate"].mean()),
        )

    def _collect(self, seed: int) -> list[Branches]:
        """Collect the branches of a round, with a Ray actor for each worker."""
        config = self.config
        actor = _shared_out(BranchCollector, config.num_workers)
        workers = [
            actor.remote(
                self.scenario,
                self.best.policy,
                self._leader.policy,
                config.branches,
                seed + number,
            )
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
            self._tell(f"trying other decisions: {100 * share:.0f} %")
        for worker in workers:
            ray.kill(worker)
        return [batch for batches in found for batch in batches]  # whoever was faster


class TrialEpisodes:
    """Episodes on which policies are compared, shared out among Ray actors."""

    def __init__(self, scenario: Scenario, seeds: Sequence[int], num_workers: int) -> None:
        actor = _shared_out(_TrialShare, num_workers)
        shares = [seeds[number::num_workers] for number in range(num_workers)]
        self._workers = [actor.remote(scenario, share) for share in shares if len(share)]

    def run(self, improved: Improved) -> dict[str, NDArray[np.float64]]:
        """Return what a policy was measured to do, episode by episode."""
        found = ray.get([worker.measure.remote(improved) for worker in self._workers])
        return {name: np.concatenate([part[name] for part in found]) for name in found[0]}


class _TrialShare(Episodes):
    def measure(self, improved: Improved) -> Mapping[str, NDArray[np.float64]]:
        return self.run(improved.policy(self.env.config)).metrics


def _shared_out(one: type, num_workers: int) -> Any:
    """Return a class of Ray actors of which so many fit: more than CPUs share them."""
    cpus = ray.cluster_resources().get("CPU", 1.0)
    return ray.remote(num_cpus=min(1.0, cpus / num_workers) / 2.0)(one)


def _weights_of(network: QNetwork) -> Weights:
    return {name: part.detach().clone() for name, part in network.state_dict().items()}
