"""Improves a policy round by round: branches, what they teach, and whether it helps.

A round runs what was learned last, tries other decisions on the same arrivals, each followed by
those of the best policy so far, and teaches a network from the branches of the last rounds what
they gain. What is learned takes the decision with the highest score, where the rule's own has a
lead: a gain that does not make up for it is left alone, because most of the smallest are errors.
Leads are compared in trial episodes below the test seeds. Where the rule tells kinds of sites
apart, each has a lead of its own, and later rounds run at the sites where something is learned.
Branches and trials fan out over Ray's workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from cloudsched.config import Settings
from cloudsched.envs.scenario import Scenario
from cloudsched.lookahead.branches import BranchCollector, BranchConfig, Branches
from cloudsched.lookahead.fitting import Fit, FittingConfig, Lessons, fit
from cloudsched.lookahead.improved import Improved, Weights
from cloudsched.lookahead.spread import learn_spread, spread_of
from cloudsched.lookahead.trials import USUAL, Trial, TrialEpisodes, shared_out
from cloudsched.lookahead.worth import OutlookWorth, site_terms
from cloudsched.models.networks import QNetwork
from cloudsched.models.prior import RuleCorrection
from cloudsched.sim.fleet import build_fleet

LEADER_LEAD = 0.05  # of the rule over who runs the clusters: shows where small gains lead
FOLLOW = ("best", "start")
KEPT_ROUNDS = 2
"""What a decision gains depends on who decides afterwards: branches followed by a policy that has
since become much better teach what is not so any more."""
SEED_STRIDE = 10_000  # between the seeds of rounds; workers of a round count up from there


@dataclass(frozen=True, kw_only=True)
class ImprovementConfig(Settings):
    """How long a policy is improved."""

    num_branches: int
    """Other decisions tried in each round, at least."""
    num_workers: int
    """Workers that collect them, each with arrivals of its own; what is learned depends on it."""
    num_trials: int
    """Episodes on which leads and rounds are compared."""
    first_trial_seed: int
    """Their first seed; below the test seeds."""
    rate_price: float = 0.0
    """What the SLA violation rate costs there besides the reward, a tick."""
    follow: str = "best"
    """Whose decisions follow in branches: those of the best policy so far, or of the start, which
    are several times as fast where that is a rule."""
    branches: BranchConfig = field(default_factory=BranchConfig)
    fitting: FittingConfig = field(default_factory=FittingConfig)

    def __post_init__(self) -> None:
        for name in ("num_branches", "num_workers", "num_trials"):
            self._integer(name, low=1)
        self._number("rate_price", low=0.0)
        self._choice("follow", FOLLOW)

    @property
    def batches_a_worker(self) -> int:
        """Batches that each worker collects in a round."""
        per_batch = self.branches.num_states * self.branches.num_others
        return -(-self.num_branches // (per_batch * self.num_workers))


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round found."""

    number: int
    num_branches: int
    seconds: float
    fit: Fit
    trial: Trial
    is_best: bool
    """Whether its policy is better than all before."""


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
        self._rounds: list[list[Branches]] = []
        self._trials = TrialEpisodes(
            scenario,
            start,
            config.num_trials,
            config.first_trial_seed,
            config.num_workers,
            tell,
            config.rate_price,
        )
        self._episodes: NDArray[np.int64] | None = None
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
        self._rounds = [*self._rounds, batches][-KEPT_ROUNDS:]
        learned, found = self._learn(number)
        chosen, trial = self._trials.choose(learned)
        self._leader = learned.corrected(LEADER_LEAD, *USUAL)
        self._episodes = self._trials.trusted(trial)
        is_best = trial.gain > self._best_gain
        if is_best:
            self._best_gain, self.best = trial.gain, chosen
        return Round(
            number=number,
            num_branches=num_branches,
            seconds=time.monotonic() - began,
            fit=found,
            trial=trial,
            is_best=is_best,
        )

    def trust(self, learned: Improved) -> Trial:
        """Choose anew how far a network is trusted that has learned before, and keep it so."""
        self.best, trial = self._trials.choose(learned)
        return trial

    def _learn(self, number: int) -> tuple[Improved, Fit]:
        """Learn from the branches of the last rounds."""
        batches = [batch for one in self._rounds for batch in one]
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

    def _collect(self, seed: int) -> list[Branches]:
        """Collect the branches of a round, with a Ray actor for each worker."""
        config = self.config
        actor = shared_out(BranchCollector, config.num_workers)
        followed = self.best if config.follow == "best" else self._start
        workers = [
            actor.remote(
                self.scenario,
                followed.policy,
                self._leader.policy,
                config.branches,
                seed + number,
                self._episodes,
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


def _weights_of(network: QNetwork) -> Weights:
    return {name: part.detach().clone() for name, part in network.state_dict().items()}
