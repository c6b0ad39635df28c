import numpy as np
import torch

from cloudsched.envs.cluster import FRESH_SEEDS
from cloudsched.models.masking import mask_logits
from cloudsched.models.rollout import RolloutCollector, training_env, training_seeds

SETTINGS = {"episode_ticks": 12, "fleet": {"num_servers": 4}, "visible_jobs": 3}


class Recorder:
    """A stand-in for a network: uniform logits, and a value that identifies the observation."""

    def __call__(self, observation):
        mask = observation["action_mask"]
        value = 0.1 * observation["context"].sum(dim=1) - 0.1 * observation["servers"].sum((1, 2))
        return mask_logits(torch.zeros(mask.shape), mask), value


def collector(num_steps=100, num_envs=3, seeds=(1, 2, 3)):
    env = training_env(num_envs, settings=SETTINGS)
    result = RolloutCollector(env, num_steps=num_steps, gamma=0.9, lambda_=0.8)
    result.reset(list(seeds))
    return result


def test_columns_agree_with_a_plain_loop_over_the_environment():
    collected = collector()
    columns = collected.collect(Recorder())
    actions = columns.action.view(100, 3).numpy()

    env = training_env(3, settings=SETTINGS)
    observation, _ = env.reset(seed=[1, 2, 3])
    network = Recorder()
    steps = []
    for t in range(100):
        before = {name: array.copy() for name, array in observation.items()}
        for name, table in columns.observation.items():
            np.testing.assert_array_equal(table.view(100, 3, *table.shape[1:])[t], before[name])
        _, reward, _, truncated, info = env.step(actions[t])
        value = value_of(network, before)
        after = {name: array.copy() for name, array in observation.items()}
        for e in truncated.nonzero()[0]:
            for name in after:
                after[name][e] = info["final_obs"][e][name]
        next_value = value_of(network, after)
        steps.append((reward, value, next_value, info["elapsed_ticks"], truncated))

    assert sum(step[4].sum() for step in steps) > 3, "episodes end within the rollout"
    advantage = np.zeros(3)
    for t in reversed(range(100)):
        reward, value, next_value, elapsed, is_cut = steps[t]
        discount = 0.9**elapsed
        surprise = 0.1 * reward + discount * next_value - value
        advantage = surprise + discount * np.where(is_cut, 0.0, 0.8**elapsed) * advantage
        got = columns.advantage.view(100, 3)[t]
        want = advantage / (1.0 + np.abs(value))
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
        target = columns.value_target.view(100, 3)[t].numpy()
        said = columns.value.view(100, 3)[t].numpy()
        np.testing.assert_allclose(target, said + want, rtol=1e-3, atol=1e-3)
    assert len(collected.finished) == sum(step[4].sum() for step in steps)


def value_of(network, observation):
    said = network({k: torch.from_numpy(v) for k, v in observation.items()})[1].numpy()
    return np.sign(said) * (np.exp(np.abs(said)) - 1.0)


def test_a_critic_settles_on_the_mean_not_on_the_mean_of_logarithms():
    env = training_env(512, settings=SETTINGS)
    one = RolloutCollector(env, num_steps=1, gamma=0.9, lambda_=0.8)
    one.reset(list(range(512)))
    one._elapsed[:] = 10_000  # what follows is far away, so the value is the mean reward
    said = torch.tensor(0.0)
    lottery = np.random.default_rng(0)
    for _ in range(400):
        rewards = np.where(lottery.random((1, 512)) < 0.02, -1000.0, -1.0).astype(np.float32)
        advantage, target = torch.zeros(1, 512), torch.zeros(1, 512)
        one._judge(Waiter(), rewards, said.expand(1, 512).clone(), [], advantage, target)
        said = said + 0.05 * (target.mean() - said)
    value = float(torch.sign(said) * torch.expm1(said.abs()))
    assert -25.0 < value < -17.0  # -20.98; the mean of logarithms would say -1.27


def test_every_action_of_a_rollout_was_legal():
    columns = collector().collect(Recorder())
    mask = columns.observation["action_mask"]
    assert (mask.gather(1, columns.action.unsqueeze(1)) == 1).all()


def test_a_second_rollout_goes_on_where_the_first_ended():
    whole = collector(num_steps=60)
    torch.manual_seed(5)
    want = whole.collect(Recorder()).action.view(60, 3).clone()
    parts = collector(num_steps=30)
    torch.manual_seed(5)
    first = parts.collect(Recorder()).action.view(30, 3).clone()
    second = parts.collect(Recorder()).action.view(30, 3)
    torch.testing.assert_close(torch.cat([first, second]), want)


def test_training_seeds_lie_below_the_test_seeds_and_differ_between_runners():
    seeds = training_seeds(1000, 0, stream=1)
    assert max(seeds) < FRESH_SEEDS
    assert seeds == training_seeds(1000, 0, stream=1)
    assert seeds != training_seeds(1000, 0, stream=2)


def test_clusters_of_a_group_see_the_same_arrivals_episode_after_episode():
    env = training_env(4, settings=SETTINGS)
    grouped = RolloutCollector(env, num_steps=300, gamma=0.9, lambda_=0.8, group_size=2)
    grouped.reset(training_seeds(4, 0, group_size=2))
    grouped.collect(Waiter())  # all take the same decisions, so all are in the same episode
    assert len(grouped.finished) == 4 * (300 // 12)
    state = env.engine.state
    for first in (0, 2):
        jobs = [
            state.jobs["arrival"][e, : state.clusters["num_jobs"][e]] for e in (first, first + 1)
        ]
        np.testing.assert_array_equal(*jobs)
    assert (state.jobs["arrival"][0] != state.jobs["arrival"][2]).any()


def test_the_shared_luck_leaves_the_critics_targets_alone_and_calms_advantages():
    spreads, targets = [], []
    for group_size in (1, 8):
        env = training_env(16)
        one = RolloutCollector(env, num_steps=300, gamma=0.99, lambda_=0.97, group_size=group_size)
        one.reset(training_seeds(16, 0, group_size=8))
        torch.manual_seed(0)
        columns = one.collect(Placer())
        spreads.append(columns.advantage.std())
        targets.append(columns.value_target)
    torch.testing.assert_close(targets[0], targets[1])
    assert spreads[1] < 0.7 * spreads[0]


class Waiter:
    """Only waits."""

    def __call__(self, observation):
        mask = torch.zeros_like(observation["action_mask"])
        mask[:, -1] = 1
        return mask_logits(torch.zeros(mask.shape), mask), torch.zeros(len(mask))


class Placer:
    """Places whatever fits, anywhere, and never toggles."""

    def __call__(self, observation):
        mask = observation["action_mask"].clone()
        mask[:, 75:90] = 0
        logits = torch.zeros(mask.shape)
        logits[:, 90] = -20.0
        return mask_logits(logits, mask), torch.full((len(mask),), -1.3)
