"""Branches differ by their first decision alone."""

from __future__ import annotations

import numpy as np
import pytest

from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.lookahead import branches as module
from cloudsched.lookahead.branches import BranchCollector, BranchConfig
from cloudsched.workload.mixture import MixtureWorkload

SMALL = BranchConfig(num_clusters=16, num_states=24, chance=0.2, dull_chance=1.0, far_every=2)
SCENARIO = Scenario(preset="mixed_wake", workload="mixture", settings={"episode_ticks": 120})


def rule(cluster):
    return HeuristicPolicy(cluster, load_heuristic("headroom@mixed_wake/mixture"))


def test_other_decisions_are_legal_and_none_is_the_policys_own():
    collector = BranchCollector(SCENARIO, rule, rule, SMALL, seed=0)
    kinds = set()
    for _ in range(6):
        batch = collector.collect()
        mask = batch.observation["action_mask"]
        assert np.take_along_axis(mask, batch.others, axis=1).all()
        assert (batch.others != batch.decided[:, None]).all()
        assert mask[np.arange(24), batch.decided].all()
        kinds |= set(np.digitize(batch.others.ravel(), [75, 90]).tolist())
    assert kinds == {0, 1, 2}  # placements, toggles, waiting


def test_clusters_run_the_given_episodes_and_no_others(monkeypatch):
    started = []
    jobs = MixtureWorkload.jobs
    monkeypatch.setattr(
        MixtureWorkload,
        "jobs",
        lambda self, seed, ticks: started.append(seed) or jobs(self, seed, ticks),
    )
    given = np.array([3, 14, 15, 92])
    collector = BranchCollector(SCENARIO, rule, rule, SMALL, seed=0, episodes=given)
    for _ in range(6):
        collector.collect()
    assert len(started) > 2 * SMALL.num_clusters
    assert set(started) == set(given.tolist())


def test_the_same_decision_gains_nothing_at_all(monkeypatch):
    """Arrivals are common and policies decide alike, so even the last bit is the same."""
    monkeypatch.setattr(
        BranchCollector,
        "_other_decisions",
        lambda self, observation, decided: np.repeat(decided[:, None], 3, axis=1),
    )
    batch = BranchCollector(SCENARIO, rule, rule, SMALL, seed=1).collect()
    assert batch.gain.shape == (24, 3, 2)
    assert (batch.gain == 0.0).all()
    assert (batch.outlook == 0.0).all()


def test_gains_are_rewards_from_the_same_state_on(monkeypatch):
    collector = BranchCollector(SCENARIO, rule, rule, SMALL, seed=2)
    engine, follow, played = collector._engine, collector._follow, {}

    def watched(first, times):
        # Branch 27 tries the first other decision of state 3.
        played["starts"] = [engine.state.clusters[e].copy() for e in (3, 27)]
        played["rewards"], _ = follow(first, times)
        return played["rewards"], _

    monkeypatch.setattr(collector, "_follow", watched)
    batch = collector.collect()
    assert played["starts"][0] == played["starts"][1]
    rewards = played["rewards"]
    assert rewards[0, 27] - rewards[0, 3] == pytest.approx(batch.gain[3, 0, 0], abs=1e-4)
    assert batch.gain.any()


def test_leaving_finished_branches_out_changes_nothing(monkeypatch):
    found = []
    for few in (0.0, 0.99):
        monkeypatch.setattr(module, "FEW", few)
        found.append(BranchCollector(SCENARIO, rule, rule, SMALL, seed=3).collect())
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert (one == other).all()


def test_the_same_seed_gives_the_same_bits_and_another_seed_other_ones():
    one, again, other = (
        BranchCollector(SCENARIO, rule, rule, SMALL, seed=seed).collect() for seed in (4, 4, 5)
    )
    assert (one.gain == again.gain).all()
    assert (one.observation["context"] == again.observation["context"]).all()
    assert (one.observation["context"] != other.observation["context"]).any()


def test_a_leader_goes_elsewhere_and_what_it_decides_there_is_tried():
    def leader(cluster):
        return HeuristicPolicy(cluster, load_heuristic("power_aware"))  # nobody ever sleeps

    collector = BranchCollector(SCENARIO, rule, leader, SMALL, seed=7)
    at = columns(2)
    policy, other = rule(SCENARIO.config), leader(SCENARIO.config)
    num_apart = 0
    for _ in range(4):
        batch = collector.collect()
        assert not batch.observation["servers"][:, :, at.is_asleep].any()
        own, led = policy.act(batch.observation), other.act(batch.observation)
        assert (batch.decided == own).all()
        is_apart = led != own
        assert (batch.others[is_apart, 0] == led[is_apart]).all()
        num_apart += is_apart.sum()
    assert num_apart > 10  # the rule would put servers to sleep


def test_one_batch_out_of_some_goes_far():
    collector = BranchCollector(SCENARIO, rule, rule, SMALL, seed=6)
    assert [collector.collect().gain.shape[2] for _ in range(4)] == [2, 1, 2, 1]


def test_a_far_time_before_the_near_one_is_refused():
    with pytest.raises(ConfigError, match="far_ticks"):
        BranchConfig(ticks=10, far_ticks=10)
