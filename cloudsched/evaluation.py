"""The protocol: every policy faces the same 50 train or 50 test episodes, all in one batch.

Train seeds are for tuning and learning, test seeds for reporting; the fleet is the same in both. A
policy that takes illegal actions or starves jobs shows it in `illegal`, `jobs_served` and
`work_served`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError, InvalidActionError
from cloudsched.metrics import episode_metrics
from cloudsched.policy import Policy
from cloudsched.registry import Registry
from cloudsched.sim.engine import wake_delay_of
from cloudsched.statistics import Estimate, summarise
from cloudsched.workload.base import FIRST_TEST_SEED

TRAIN_SEEDS = range(0, 50)
TEST_SEEDS = range(FIRST_TEST_SEED, FIRST_TEST_SEED + 50)
SPLITS: Registry[range] = Registry("split", {"train": TRAIN_SEEDS, "test": TEST_SEEDS})

Progress = Callable[[str, float], None]
"""Called now and then with a policy's name and the share of its episodes that is done."""

PROGRESS_STEPS = 200  # decisions between two reports of progress


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What one policy did in one scenario, seed by seed."""

    policy: str
    scenario: Scenario
    seeds: tuple[int, ...]
    metrics: Mapping[str, NDArray[np.float64]]  # (S,) each, named as in `cloudsched.metrics`

    @property
    def summary(self) -> dict[str, Estimate]:
        """Mean and 95 % bootstrap interval of each metric."""
        return summarise(self.metrics)

    @property
    def energy_over_bound(self) -> Estimate:
        """Energy / its lower bound, mean over seeds; 1.0 would be provably optimal."""
        bound = self.metrics["energy_bound_kwh"]
        ratio = np.divide(
            self.metrics["energy_kwh"], bound, out=np.ones(len(bound)), where=bound > 0.0
        )
        return summarise({"energy_over_bound": ratio})["energy_over_bound"]


class Episodes:
    """One episode for each seed, for any number of policies: all face the same arrivals.

    Args:
        scenario: rules and workload.
        seeds: one for each episode, usually `TEST_SEEDS` or `TRAIN_SEEDS`.
    """

    def __init__(self, scenario: Scenario, seeds: Sequence[int]) -> None:
        if len(seeds) == 0:
            raise ConfigError("There are no seeds to evaluate on; give at least one.")
        self.scenario = scenario
        self.seeds = tuple(int(seed) for seed in seeds)
        self.env = ClusterVectorEnv(
            len(seeds), **scenario.to_dict(), copy=False, autoreset_mode=AutoresetMode.DISABLED
        )
        ticks = self.env.config.episode_ticks
        self._tables = [self.env.workload.jobs(seed, ticks) for seed in self.seeds]
        self._wake_delays = [wake_delay_of(self.env.config, seed) for seed in self.seeds]

    def run(
        self, policy: Policy, *, name: str | None = None, progress: Progress | None = None
    ) -> Evaluation:
        """Let a policy decide in all episodes, side by side, until the last has ended.

        Args:
            name: what to call the policy; its class if None.
        """
        env = self.env
        name = type(policy).__name__ if name is None else name
        # without copies: always the current one
        observation = env.reset_to(self._tables, wake_delays=self._wake_delays)
        policy.reset(env.num_envs)
        is_over, steps = False, 0
        while not is_over:
            try:
                is_over = bool(env.advance(policy.act(observation)).is_truncated.all())
            except InvalidActionError as error:
                raise InvalidActionError(f"Policy {name!r}: {error}") from error
            steps += 1
            if progress is not None and (is_over or steps % PROGRESS_STEPS == 0):
                progress(name, env.engine.state.clusters["tick"].mean() / env.config.episode_ticks)
        return Evaluation(
            policy=name,
            scenario=self.scenario,
            seeds=self.seeds,
            metrics=episode_metrics(env.engine),
        )


def evaluate(
    policy: Policy,
    scenario: Scenario,
    seeds: Sequence[int],
    *,
    name: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Run one policy through one episode for each seed."""
    return Episodes(scenario, seeds).run(policy, name=name, progress=progress)


def evaluate_all(
    policies: Mapping[str, Policy],
    scenario: Scenario,
    seeds: Sequence[int],
    *,
    progress: Progress | None = None,
) -> dict[str, Evaluation]:
    """Run several policies, by name, through the same episodes."""
    episodes = Episodes(scenario, seeds)
    return {
        name: episodes.run(policy, name=name, progress=progress)
        for name, policy in policies.items()
    }


def paired_difference(evaluation: Evaluation, baseline: Evaluation) -> dict[str, Estimate]:
    """Estimate the mean of `evaluation - baseline`, seed by seed, for each metric."""
    if evaluation.seeds != baseline.seeds or evaluation.scenario != baseline.scenario:
        raise ConfigError(
            f"{evaluation.policy!r} and {baseline.policy!r} were evaluated on different seeds or "
            "scenarios; only the same episodes can be compared pair by pair."
        )
    return summarise(
        {name: values - baseline.metrics[name] for name, values in evaluation.metrics.items()}
    )


def first_seeds(split: str, count: int | None = None) -> Sequence[int]:
    """Return the seeds of a split, or the first `count` of them."""
    seeds = SPLITS[split]
    if count is None:
        return seeds
    if not 1 <= count <= len(seeds):
        raise ConfigError(f"seeds={count!r}: expected a whole number from 1 to {len(seeds)}.")
    return seeds[:count]
