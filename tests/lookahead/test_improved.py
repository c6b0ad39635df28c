"""How far a network that corrects a rule is trusted."""

from __future__ import annotations

import numpy as np
import torch

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.jams import BEGIN
from cloudsched.lookahead.improved import Improved
from cloudsched.models.networks import NetworkConfig

BUSY = Scenario(workload="poisson", load=1.0, settings={"episode_ticks": 300})
RULE = load_heuristic("headroom@poisson")
ALL_KINDS = (True,) * 4


def untrained() -> Improved:
    """Return a network that says anything."""
    torch.manual_seed(0)
    start = Improved(network=NetworkConfig(prior=RULE, is_balanced=False), weights=None)
    weights = {
        name: part.detach() + 0.1 * torch.randn(part.shape)
        for name, part in start.build(BUSY.config).state_dict().items()
    }
    return Improved(network=start.network, weights=weights)


def test_in_a_jam_the_rule_decides_alone() -> None:
    env = ClusterVectorEnv(16, copy=False, **BUSY.to_dict())
    observation, _ = env.reset(seed=0)
    rule = HeuristicPolicy(env.config, RULE)
    network = untrained().corrected(0.0, ALL_KINDS, 1).policy(env.config)
    awake, num_servers = columns(2).awake, env.config.num_servers
    same, other = [], []
    for _ in range(600):
        decided = rule.act(observation)
        queue = env.engine.state.clusters["queue_length"] / num_servers
        is_jam = (queue >= BEGIN["jam_queue"]) & (observation["context"][:, awake] >= 1.0)
        is_alike = network.act(observation) == decided
        same += list(is_alike[is_jam])
        other += list(is_alike[~is_jam])
        observation, *_ = env.step(decided)
    assert len(same) > 500
    assert np.all(same)
    assert np.mean(other) < 0.9


def test_a_lead_holds_everywhere_or_at_each_kind_of_site() -> None:
    everywhere = untrained().corrected(0.2, ALL_KINDS, 2).network.prior
    assert (everywhere.caution, dict(everywhere.sites)) == (0.2, {})
    sites = {"headroom_constant": (1.0, 2.0)}
    recogniser = tuple((0.0,) * 66 for _ in range(2))
    start = Improved(
        network=NetworkConfig(prior=RULE.replace(sites=sites, recogniser=recogniser)), weights=None
    )
    by_site = start.corrected([0.1, 0.8], ALL_KINDS, 2)
    assert by_site.network.prior.sites == {**sites, "caution": (0.1, 0.8)}
    again = by_site.corrected(0.05, ALL_KINDS, 2).network.prior
    assert (again.caution, dict(again.sites)) == (0.05, sites)
