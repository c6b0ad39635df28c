"""A network learns gains of decisions that can be known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cloudsched.envs.scenario import Scenario
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.lookahead.branches import BranchCollector, BranchConfig
from cloudsched.lookahead.fitting import (
    LARGEST_GAIN,
    FittingConfig,
    Lessons,
    fit,
    foreseen,
)
from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network

SCENARIO = Scenario(workload="poisson", settings={"episode_ticks": 120})


@pytest.fixture(scope="module")
def batches():
    config = BranchConfig(num_clusters=32, num_states=128, chance=0.3, ticks=1, far_ticks=2)

    def rule(cluster):
        return HeuristicPolicy(cluster, load_heuristic("headroom@poisson"))

    collector = BranchCollector(SCENARIO, rule, rule, config, seed=0)
    return [collector.collect() for _ in range(16)]


def network_of(seed):
    torch.manual_seed(seed)
    return build_network(
        ObservationSizes.of(SCENARIO.config), NetworkConfig(is_balanced=False, width=16)
    )


def knowable_gains(batch):
    """What waking would gain if it were worth 2, and waiting if it were worth -1."""

    def worth(actions):
        return 2.0 * ((actions >= 75) & (actions < 90)) - 1.0 * (actions == 90)

    return (worth(batch.others) - worth(batch.decided)[:, None]).astype(np.float32)


def test_gains_that_can_be_known_are_foreseen(batches):
    lessons = Lessons.of(batches, [knowable_gains(batch) for batch in batches])
    network = network_of(0)
    shares = []
    found = fit(network, lessons, FittingConfig(), rate=2e-3, seed=0, report=shares.append)
    assert found.explained > 0.95
    assert found.gain_found == pytest.approx(found.gain_foreseen, abs=0.2)
    assert shares == []  # too short a lesson to tell anybody about


def test_the_same_seed_learns_the_same_bits(batches):
    lessons = Lessons.of(batches, [knowable_gains(batch) for batch in batches])
    ends = []
    for _ in range(2):
        network = network_of(1)
        fit(network, lessons, FittingConfig(num_epochs=1), rate=2e-3, seed=3, report=lambda _: None)
        ends.append(foreseen(network, lessons.rows(torch.arange(50))))
    assert torch.equal(*ends)


def test_chance_is_not_foreseen(batches):
    rng = np.random.default_rng(0)
    gains = [rng.normal(size=batch.others.shape).astype(np.float32) for batch in batches]
    lessons = Lessons.of(batches, gains)
    found = fit(
        network_of(2),
        lessons,
        FittingConfig(num_epochs=2),
        rate=1e-3,
        seed=0,
        report=lambda _: None,
    )
    assert found.explained < 0.1
    assert abs(found.gain_found) < 0.5


def test_luck_beyond_measure_is_cut(batches):
    gains = [np.full(batch.others.shape, 1e6, np.float32) for batch in batches]
    assert Lessons.of(batches, gains).gain.max() == LARGEST_GAIN
