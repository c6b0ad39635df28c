"""Transitions agree with a loop that follows each decision by hand."""

import numpy as np
import pytest

from cloudsched.datasets.manifest import open_part, read_manifest
from cloudsched.datasets.schema import OBSERVATION, to_arrays
from cloudsched.datasets.transitions import (
    COLUMNS,
    NEXT,
    TransitionConfig,
    TransitionReader,
    Transitions,
    power_reward,
)
from cloudsched.sim.fleet import build_fleet


def by_hand(rows, reward, cost, gamma, num_ticks, i):
    """Return what follows decision i: next row (None if it is not there), sums and discount."""
    total_reward = total_cost = 0.0
    discount, ticks = 1.0, 0
    for k in range(i, len(reward)):
        if rows["episode"][k] != rows["episode"][i]:
            return None
        if ticks >= num_ticks:
            return k, total_reward, total_cost, discount
        total_reward += discount * reward[k]
        total_cost += discount * cost[k]
        ticks += rows["elapsed_ticks"][k]
        discount *= gamma ** rows["elapsed_ticks"][k]
        if rows["terminated"][k]:
            return i, total_reward, total_cost, 0.0
    return None


@pytest.mark.parametrize("num_ticks", [1, 3])
@pytest.mark.parametrize("is_terminated", [False, True])
def test_transitions_agree_with_a_loop_by_hand(num_ticks, is_terminated):
    generator = np.random.default_rng(num_ticks)
    count = 200
    rows = {
        "action": np.zeros(count, np.int32),
        "episode": np.repeat(np.arange(4), 50),
        "step": np.tile(np.arange(50, dtype=np.int32), 4),
        "elapsed_ticks": generator.integers(0, 2, count).astype(np.int32),
        "terminated": np.zeros(count, np.bool_),
    }
    rows["terminated"][49::50] = is_terminated
    reward, cost = generator.random((2, count)).astype(np.float32)
    found = Transitions.of(rows, reward, cost, TransitionConfig(gamma=0.9, num_ticks=num_ticks))
    for i in range(count):
        expected = by_hand(rows, reward, cost, 0.9, num_ticks, i)
        if expected is None:
            assert i not in found.usable
            continue
        assert i in found.usable
        assert found.next_row[i] == expected[0]
        values = (found.reward[i], found.cost[i], found.discount[i])
        np.testing.assert_allclose(values, expected[1:], rtol=1e-5)


def test_a_missing_decision_breaks_the_chain():
    rows = {
        "action": np.zeros(4, np.int32),
        "episode": np.zeros(4, np.int64),
        "step": np.array([0, 1, 5, 6], np.int32),
        "elapsed_ticks": np.ones(4, np.int32),
        "terminated": np.zeros(4, np.bool_),
    }
    ones = np.ones(4, np.float32)
    assert Transitions.of(rows, ones, ones, TransitionConfig()).usable.tolist() == [0, 2]


def test_the_reward_is_power_and_toggles_and_excess_takes_off_what_is_in_use(recorded):
    manifest = read_manifest(recorded)
    rows = to_arrays(open_part(recorded, "part-00000.parquet", manifest).read())
    config = manifest.scenario.config
    full_w = build_fleet(config.fleet).max_w.sum()
    power = power_reward(rows, config, is_excess=False)
    excess = power_reward(rows, config, is_excess=True)
    num_pairs = config.visible_jobs * config.num_servers
    for i in range(0, len(power), 37):
        action = rows["action"][i]
        expected = -rows["power_w"][i] / full_w
        if num_pairs <= action < config.num_actions - 1:
            is_awake = rows["servers"][i, action - num_pairs, 2 * 2 + 3] == 1.0
            expected -= is_awake * 0.2 * 15 / 4 / 5.0
        assert power[i] == pytest.approx(expected, rel=1e-5)
        free, capacity = rows["servers"][i, :, 0].sum(), rows["servers"][i, :, 2].sum()
        in_use = (1.0 - free / capacity) if rows["elapsed_ticks"][i] else 0.0
        assert excess[i] - power[i] == pytest.approx(in_use, abs=1e-5)


def test_a_reader_gives_each_usable_decision_once_with_what_it_led_to(recorded):
    manifest = read_manifest(recorded)
    reader = TransitionReader(recorded, manifest, TransitionConfig(), seed=5)
    pieces = reader.pieces()
    batch = reader.read(**{"name": pieces[0]["file"], "group": pieces[0]["group"]})
    assert set(batch) == set(COLUMNS)
    count = len(batch["action"])
    assert count > 0
    legal = batch["action_mask"][np.arange(count), batch["action"]]
    assert (legal == 1).all()
    again = reader.read(pieces[0]["file"], pieces[0]["group"])
    for name in COLUMNS:
        np.testing.assert_array_equal(batch[name], again[name])
    # The first decision of a tick follows, so no decision of that tick has been taken yet.
    taken = batch[NEXT + "context"][:, 2 + 11]
    assert (taken == 0.0).all()
    assert all(batch[NEXT + name].shape == batch[name].shape for name in OBSERVATION)


def test_a_reader_of_one_author_gives_its_decisions_alone_random_ones_included(recorded):
    manifest = read_manifest(recorded)
    author = manifest.behaviours[-1].policy
    wanted = [i for i, b in enumerate(manifest.behaviours) if b.policy == author]
    assert 0 < len(wanted) < len(manifest.behaviours)
    everyone = TransitionReader(recorded, manifest, TransitionConfig(), seed=5)
    alone = TransitionReader(recorded, manifest, TransitionConfig(), seed=5, author=author)
    expected = found = 0
    kept = [(piece["file"], piece["group"]) for piece in alone.pieces()]
    assert len(kept) < len(everyone.pieces())  # row groups without the author are not even read
    for piece in everyone.pieces():
        with open_part(recorded, piece["file"], manifest) as file:
            rows = to_arrays(file.read_row_group(piece["group"]))
        count = len(everyone.read(piece["file"], piece["group"])["action"])
        usable = Transitions.of(
            rows,
            rows["reward"],
            rows["cost"],
            TransitionConfig(),
        ).usable
        assert len(usable) == count
        expected += int(np.isin(rows["behaviour"][usable], wanted).sum())
        own = len(alone.read(piece["file"], piece["group"])["action"])
        assert own == 0 or (piece["file"], piece["group"]) in kept
        found += own
    assert found == expected > 0


def test_row_groups_that_are_read_together_are_shuffled_together(recorded):
    manifest = read_manifest(recorded)
    reader = TransitionReader(recorded, manifest, TransitionConfig(), seed=5)
    pieces = reader.pieces()[:2]
    together = reader.read_batch(
        {name: np.array([piece[name] for piece in pieces]) for name in ("file", "group")}
    )
    parts = [reader.read(piece["file"], piece["group"]) for piece in pieces]
    one_by_one = np.concatenate([part["reward"] for part in parts])
    assert not np.array_equal(together["reward"], one_by_one)
    np.testing.assert_array_equal(np.sort(together["reward"]), np.sort(one_by_one))


@pytest.mark.parametrize("run_length", [1, 3, 1000])
def test_only_short_runs_of_a_ticks_decisions_stay_together(recorded, run_length):
    manifest = read_manifest(recorded)
    config = TransitionConfig(run_length=run_length)
    reader = TransitionReader(recorded, manifest, config, seed=5)
    piece = reader.pieces()[0]
    number = reader.read(piece["file"], piece["group"])["next_number"]
    order = reader.shuffled(number, np.random.default_rng(0))
    assert sorted(order) == list(range(len(number)))
    expected = runs_by_hand(number, run_length)
    assert max(len(run) for run in expected) == min(
        run_length, np.unique(number, return_counts=True)[1].max()
    )
    found, k = [], 0
    lengths = {run[0]: len(run) for run in expected}
    while k < len(order):
        found.append(order[k : k + lengths[order[k]]].tolist())
        k += len(found[-1])
    assert sorted(found) == expected
    assert found != expected
    again = reader.shuffled(number, np.random.default_rng(0))
    np.testing.assert_array_equal(order, again)


def runs_by_hand(number, run_length):
    """Return the rows of each run of decisions with the same number."""
    runs = [[0]]
    for i in range(1, len(number)):
        if number[i] == number[i - 1] and len(runs[-1]) < run_length:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs
