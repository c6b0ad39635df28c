"""The environments keep Gymnasium's contract, and show nothing of the future."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import cloudsched  # noqa: F401 - registers the environments
from cloudsched.envs.catalog import PRESETS
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.errors import CloudschedError, ConfigError, EpisodeError, InvalidActionError
from cloudsched.sim.jobs import JobTable

SHORT = {"episode_ticks": 4}


def legal(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.array([rng.choice(np.flatnonzero(row)) for row in mask])


@pytest.mark.parametrize("preset", PRESETS)
def test_gymnasium_accepts_the_environment(preset: str) -> None:
    env = gymnasium.make("cloudsched/Cluster-v0", preset=preset, settings={"episode_ticks": 20})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The mask is an int8 box; Gymnasium's remark on image-like boxes does not apply.
        check_env(env.unwrapped, skip_render_check=True)


def test_make_vec_builds_the_batched_environment() -> None:
    envs = gymnasium.make_vec("cloudsched/Cluster-v0", num_envs=3, workload="diurnal")
    assert isinstance(envs.unwrapped, ClusterVectorEnv)
    observation, _ = envs.reset(seed=5)
    assert envs.observation_space.contains(observation)
    envs.close()


def play(env: ClusterVectorEnv, seeds: list[int], steps: int, action_seed: int) -> list[Any]:
    """Record what cluster i shows under random legal actions that depend only on its seed."""
    rngs = [np.random.default_rng([action_seed, seed]) for seed in seeds]
    observation, _ = env.reset(seed=seeds)
    record = [observation]
    for _ in range(steps):
        actions = np.array(
            [
                rng.choice(np.flatnonzero(row))
                for rng, row in zip(rngs, observation["action_mask"], strict=True)
            ]
        )
        observation, reward, _, truncated, info = env.step(actions)
        record.append((observation, reward, truncated, info["elapsed_ticks"], info["cost"]))
    return record


def same(left: Any, right: Any, pick: int) -> None:
    """Assert that cluster `pick` of `left` is the only cluster of `right`."""
    if isinstance(left, dict):
        for name in left:
            np.testing.assert_array_equal(left[name][pick], right[name][0])
    elif isinstance(left, tuple):
        for a, b in zip(left, right, strict=True):
            same(a, b, pick)
    else:
        assert left[pick] == right[0]


@pytest.mark.parametrize("mode", list(AutoresetMode)[:2])
def test_same_seed_same_bits_whatever_the_batch(mode: AutoresetMode) -> None:
    seeds = [3, 1_000_000, 42, 7]
    settings = {"episode_ticks": 12}
    batch = play(ClusterVectorEnv(4, settings=settings, autoreset_mode=mode), seeds, 150, 0)
    for i, seed in enumerate(seeds):
        alone = play(ClusterVectorEnv(1, settings=settings, autoreset_mode=mode), [seed], 150, 0)
        for left, right in zip(batch, alone, strict=True):
            same(left, right, i)


def test_each_episode_draws_its_wake_delay_by_its_seed() -> None:
    settings = {**SHORT, "wake_delay_ticks": 1, "wake_delay_max_ticks": 5}
    seeds = list(range(100, 200))
    batch = ClusterVectorEnv(100, settings=settings)
    observation, _ = batch.reset(seed=seeds)
    delays = batch.engine.state.clusters["wake_delay_ticks"]
    assert set(delays.tolist()) == {1, 2, 3, 4, 5}
    column = columns(batch.config.num_resources).wake_delay
    np.testing.assert_allclose(observation["context"][:, column], delays / (delays + 5), rtol=1e-6)
    alone = ClusterVectorEnv(1, settings=settings)
    for seed in (100, 150, 199):
        alone.reset(seed=seed)
        assert alone.engine.state.clusters["wake_delay_ticks"][0] == delays[seed - 100]
    fixed = ClusterVectorEnv(100, settings=SHORT)
    fixed.reset(seed=seeds)
    assert (fixed.engine.state.clusters["wake_delay_ticks"] == 1).all()
    for name in ("arrival", "duration"):  # the jobs of a seed do not depend on the delay
        np.testing.assert_array_equal(batch.engine.state.jobs[name], fixed.engine.state.jobs[name])


def wait_until_over(env: ClusterVectorEnv) -> tuple[Any, ...]:
    wait = np.full(env.num_envs, env.engine.wait_action)
    for _ in range(env.config.episode_ticks - 1):
        assert not env.step(wait)[3].any()
    return env.step(wait)


def test_next_step_autoreset_shows_the_last_state_then_starts_anew() -> None:
    env = ClusterVectorEnv(2, settings=SHORT)
    env.reset(seed=0)
    _, _, terminated, truncated, info = wait_until_over(env)
    assert truncated.all()
    assert not terminated.any()
    assert info["_episode_metrics"].all()
    assert (env.engine.state.clusters["tick"] == 4).all()
    observation, reward, _, truncated, info = env.step(np.zeros(2, np.int64))
    assert not truncated.any()
    assert (reward == 0).all()
    assert (info["elapsed_ticks"] == 0).all()
    assert (env.engine.state.clusters["tick"] == 0).all()
    assert (env.engine.state.clusters["illegal"] == 0).all()
    assert "episode_metrics" not in info
    assert env.observation_space.contains(observation)


def test_same_step_autoreset_hands_out_the_final_observation() -> None:
    reference = ClusterVectorEnv(2, settings=SHORT)
    env = ClusterVectorEnv(2, settings=SHORT, autoreset_mode=AutoresetMode.SAME_STEP)
    reference.reset(seed=0)
    env.reset(seed=0)
    last, *_ = wait_until_over(reference)
    _, _, _, truncated, info = wait_until_over(env)
    assert truncated.all()
    assert (env.engine.state.clusters["tick"] == 0).all()
    for e in range(2):
        for name, value in info["final_obs"][e].items():
            np.testing.assert_array_equal(value, last[name][e])
    assert info["final_info"]["episode_metrics"]["arrived"].shape == (2,)


def test_without_autoreset_a_finished_cluster_must_be_reset_by_hand() -> None:
    env = ClusterVectorEnv(2, settings=SHORT, autoreset_mode=AutoresetMode.DISABLED)
    env.reset(seed=0)
    wait_until_over(env)
    with pytest.raises(EpisodeError, match="reset_mask"):
        env.step(np.zeros(2, np.int64))
    env.reset(options={"reset_mask": np.array([True, False])})
    assert env.engine.state.clusters["tick"].tolist() == [0, 4]


def test_fresh_episodes_differ_and_never_use_a_test_seed() -> None:
    env = ClusterVectorEnv(1, settings=SHORT, autoreset_mode=AutoresetMode.SAME_STEP)
    used: list[int] = []
    jobs = env.workload.jobs

    class Spy:
        def jobs(self, seed: int, num_ticks: int) -> JobTable:
            used.append(seed)
            return jobs(seed, num_ticks)

    env.workload = Spy()
    env.reset(seed=9)
    for _ in range(40):
        env.step(np.array([env.engine.wait_action]))
    assert used[0] == 9
    assert len(set(used)) == len(used) == 11
    assert max(used[1:]) < 1_000_000


def test_rewards_add_up_to_the_return_in_the_metrics() -> None:
    settings = {"episode_ticks": 60, "fleet": {"num_servers": 4}, "sla_latency_ticks": 2}
    env = ClusterVectorEnv(3, load=1.5, settings=settings)
    rng = np.random.default_rng(1)
    observation, _ = env.reset(seed=0)
    total = np.zeros(3)
    cost = np.zeros(3)
    is_over = np.zeros(3, bool)
    returns = np.zeros(3)
    violations = np.zeros(3)
    while not is_over.all():
        actions = legal(observation["action_mask"], rng)
        actions[rng.random(3) < 0.05] = -1
        observation, reward, _, truncated, info = env.step(actions)
        total += reward * ~is_over
        cost += info["cost"] * ~is_over
        if truncated.any():
            ended = truncated & ~is_over
            returns[ended] = info["episode_metrics"]["episode_return"][ended]
            violations[ended] = info["episode_metrics"]["violations"][ended]
            is_over |= ended
    np.testing.assert_allclose(total, returns, rtol=1e-12)
    assert (cost >= violations).all()
    assert violations.sum() > 0


def test_observations_do_not_depend_on_the_future() -> None:
    """Two job tables that agree up to tick 10 look alike up to tick 10."""
    rng = np.random.default_rng(0)
    arrival = np.sort(rng.integers(0, 30, 60))
    demand = rng.uniform(0.05, 0.5, (60, 2))
    duration = rng.integers(1, 20, 60)
    is_later = arrival > 10
    tables = [
        JobTable(arrival_tick=arrival, demand=demand, duration_ticks=duration),
        JobTable(
            arrival_tick=arrival,
            demand=np.where(is_later[:, None], 0.9 * demand, demand),
            duration_ticks=np.where(is_later, duration + 7, duration),
        ),
    ]
    env = ClusterVectorEnv(2, settings={"episode_ticks": 30})
    observation = env.reset_to(tables)
    agreed = 0
    while env.engine.state.clusters["tick"][0] <= 10:
        for array in observation.values():
            np.testing.assert_array_equal(array[0], array[1])
        agreed += 1
        action = rng.choice(np.flatnonzero(observation["action_mask"][0]))
        observation, *_ = env.step(np.array([action, action]))
    assert agreed > 20
    assert any((array[0] != array[1]).any() for array in observation.values())


def test_an_illegal_action_waits_costs_and_counts() -> None:
    env = gymnasium.make("cloudsched/Cluster-v0", disable_env_checker=True)
    env.reset(seed=0)
    _, reward, _, _, info = env.step(env.action_space.n - 2 - 15)  # job 5 of an almost empty queue
    assert info["elapsed_ticks"] == 1
    assert reward < -10
    assert env.unwrapped.vector.engine.state.clusters["illegal"][0] == 1


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros(3, np.int64), r"shape \(3,\)"),
        (np.zeros(2), "float64"),
        (np.zeros((2, 1), np.int64), r"\(2, 1\)"),
        (["place", "wait"], "whole numbers"),
    ],
)
def test_actions_of_the_wrong_form_are_refused(actions: Any, message: str) -> None:
    env = ClusterVectorEnv(2)
    env.reset(seed=0)
    with pytest.raises(InvalidActionError, match=message):
        env.step(actions)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "defualt"}, "Did you mean 'default'"),
        ({"workload": "google_v2_sample"}, "Did you mean 'google_v2_sampled'"),
        ({"num_envs": 0}, "num_envs=0"),
        ({"render_mode": "human"}, "render_mode='human'"),
        ({"load": -1.0}, "load"),
        ({"load": float("nan")}, "load"),
        ({"settings": {"wake_delay": 3}}, "wake_delay_ticks"),
        ({"settings": 3}, "dictionary"),
    ],
)
def test_a_bad_environment_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((CloudschedError, TypeError), match=message):
        ClusterVectorEnv(**arguments)


def test_stepping_before_the_first_reset_is_refused() -> None:
    with pytest.raises(EpisodeError, match="reset"):
        ClusterVectorEnv(1).step(np.zeros(1, np.int64))


def test_rendering_needs_a_mode_and_a_reset() -> None:
    with pytest.raises(EpisodeError, match="reset"):
        ClusterVectorEnv(1, render_mode="ansi").render()
    env = ClusterVectorEnv(1)
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="render_mode"):
        env.render()


def test_clusters_left_out_of_the_first_reset_start_with_the_first_step() -> None:
    env = ClusterVectorEnv(2, settings=SHORT)
    env.reset(seed=0, options={"reset_mask": np.array([True, False])})
    _, reward, _, truncated, _ = env.step(np.full(2, env.engine.wait_action))
    assert env.engine.state.clusters["tick"].tolist() == [1, 0]
    assert reward[0] < 0 == reward[1]
    assert not truncated.any()


def test_seeds_must_match_the_clusters() -> None:
    with pytest.raises(ConfigError, match="2 seeds for 3 clusters"):
        ClusterVectorEnv(3).reset(seed=[1, 2])
    with pytest.raises(ConfigError, match="reset_mask"):
        ClusterVectorEnv(3).reset(options={"reset_mask": [1, 2]})


def test_copies_stay_and_views_move_on() -> None:
    for copy in (True, False):
        env = ClusterVectorEnv(1, copy=copy)
        first, _ = env.reset(seed=0)
        before = first["context"].copy()
        env.step(np.array([env.engine.wait_action]))
        assert np.array_equal(first["context"], before) == copy
