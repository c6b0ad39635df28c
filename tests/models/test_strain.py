"""Logged decisions put under strain: they look like what the simulator shows, only worse."""

import numpy as np
import pytest
import torch

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.heuristics.catalog import make_heuristic
from cloudsched.models.constrained import ConstrainedConfig, ConstrainedModel
from cloudsched.models.constrained_learner import ConstrainedLearner
from cloudsched.models.kinds import PLACE, WAKE, kinds, toggled
from cloudsched.models.networks import NetworkConfig, ObservationSizes
from cloudsched.models.prepared import OBSERVATION
from cloudsched.models.strain import NUM_COPIES, after_longer_waits, under_strain

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def logged():
    """What a rule that keeps its servers well used saw, did, and saw next in each cluster."""
    env = ClusterVectorEnv(64, workload="diurnal")
    policy = make_heuristic("power_aware+band", env.config)
    seen, _ = env.reset(seed=0)
    rows = []
    for _ in range(400):
        before = {name: seen[name].copy() for name in OBSERVATION}
        action = policy.act(seen).copy()
        seen, *_ = env.step(action)
        rows.append({**before, "action": action, "later": seen["jobs"].copy()})
    columns_of_all = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return env.config, {name: torch.from_numpy(v) for name, v in columns_of_all.items()}


def of_kind(logged, kind):
    _, rows = logged
    every = kinds(toggled(rows), rows["action_mask"].shape[1])
    own = every.gather(1, rows["action"].unsqueeze(1)).squeeze(1)
    return {name: values[own == kind] for name, values in rows.items()}


def strained(logged):
    wakes = of_kind(logged, WAKE)
    worse, _ = under_strain({name: wakes[name] for name in OBSERVATION}, wakes["later"])
    return wakes, worse


def test_most_wakes_have_copies_and_all_stay_within_the_range_of_features(logged):
    wakes, worse = strained(logged)
    assert len(wakes["action"]) > 50
    assert len(worse["jobs"]) > 0.5 * NUM_COPIES * len(wakes["action"])
    for name in ("servers", "jobs", "context"):
        assert worse[name].isfinite().all()
        assert worse[name].abs().max() <= 1.0


def test_in_a_jam_jobs_wait_servers_sleep_and_the_mask_is_that_of_the_simulator(logged):
    config, _ = logged
    _, worse = strained(logged)
    at, num_resources = columns(config.num_resources), config.num_resources
    num_pairs = config.visible_jobs * config.num_servers
    for i in range(len(worse["jobs"])):
        servers, jobs, mask = (worse[name][i] for name in ("servers", "jobs", "action_mask"))
        legal = []
        for job in jobs:
            for server in servers:
                has_room = bool((job[:num_resources] <= server[:num_resources]).all())
                legal.append(bool(job[-1]) and bool(server[at.is_active]) and has_room)
        assert not any(legal)
        assert mask[:num_pairs].sum() == 0
        assert mask[-1] == 1
        asleep = servers[:, at.is_asleep] != 0.0
        assert asleep.any()
        assert torch.equal(mask[num_pairs:-1] != 0, asleep)
        assert jobs[:, -1].sum() >= 1
        length = worse["context"][i, 0] * config.num_servers / (1.0 - worse["context"][i, 0])
        assert length.item() >= jobs[:, -1].sum().item() - 0.01


def test_a_server_that_is_put_down_looks_like_one_that_sleeps(logged):
    config, rows = logged
    at = columns(config.num_resources)
    asleep = rows["servers"][:, :, at.is_asleep] != 0.0
    server = 3
    examples = rows["servers"][asleep[:, server], server]
    assert (examples == examples[0]).all()
    _, worse = strained(logged)
    ours = worse["servers"][worse["servers"][:, server, at.is_asleep] != 0.0, server]
    torch.testing.assert_close(ours, examples[:1].expand(len(ours), -1))


def test_copies_depend_on_their_own_rows_alone(logged):
    """Or two workers with half of a batch each would not have the gradient of one."""
    wakes, whole = strained(logged)
    half = len(wakes["action"]) // 2
    parts = [
        under_strain({name: wakes[name][rows] for name in OBSERVATION}, wakes["later"][rows])[0]
        for rows in (slice(None, half), slice(half, None))
    ]
    for name in OBSERVATION:
        assert torch.equal(whole[name], torch.cat([part[name] for part in parts]))


def test_a_wake_while_jobs_can_be_placed_has_no_copies(logged):
    wakes = of_kind(logged, WAKE)
    mask = wakes["action_mask"].clone()
    mask[:, 0] = 1
    worse, _ = under_strain(
        {**{name: wakes[name] for name in OBSERVATION}, "action_mask": mask}, wakes["later"]
    )
    assert len(worse["jobs"]) == 0


def placed_later(logged):
    placements = {name: of_kind(logged, PLACE)[name] for name in OBSERVATION}
    later, source = after_longer_waits(placements)
    return {name: values[source] for name, values in placements.items()}, later, placements


def test_placements_wait_longer_under_strain(logged):
    config, _ = logged
    at = columns(config.num_resources)
    _, later, placements = placed_later(logged)
    assert 0 < len(later["jobs"]) < len(placements["jobs"])
    is_empty = later["jobs"][:, :, -1] == 0.0
    assert (later["jobs"][is_empty] == 0.0).all()
    assert later["jobs"][:, :, at.wait].max() > placements["jobs"][:, :, at.wait].max()
    assert later["jobs"][:, :, at.laxity].min() < placements["jobs"][:, :, at.laxity].min()
    assert later["context"].abs().max() <= 1.0


def test_servers_woken_under_strain_are_as_in_the_simulator_and_so_is_the_mask(logged):
    config, rows = logged
    at, num_resources = columns(config.num_resources), config.num_resources
    num_pairs = config.visible_jobs * config.num_servers
    before, later, _ = placed_later(logged)
    modes = slice(at.is_active, at.is_asleep + 1)
    is_woken = (later["servers"][:, :, modes] != before["servers"][:, :, modes]).any(dim=2)
    assert (before["servers"][is_woken][:, at.is_asleep] == 1.0).all()
    assert torch.equal(later["servers"][~is_woken], before["servers"][~is_woken])
    for mode in (at.is_active, at.is_waking):
        ours = is_woken & (later["servers"][:, :, mode] == 1.0)
        assert ours.any()
        for server in ours.any(dim=0).nonzero().squeeze(1).tolist():
            woken = later["servers"][ours[:, server], server]
            same = rows["servers"][:, server]
            is_idle = (same[:, :num_resources] == same[:, num_resources : 2 * num_resources]).all(1)
            same = same[is_idle & (same[:, mode] == 1.0)]
            if len(same):
                known = [f for f in range(same.shape[1]) if f != at.idle_ticks]
                torch.testing.assert_close(woken[0, known], same[0, known])
    awake = (later["servers"][:, :, at.is_asleep] == 0.0).float().mean(dim=1)
    torch.testing.assert_close(later["context"][:, at.awake], awake)
    for servers, jobs, mask in zip(
        *(later[name] for name in ("servers", "jobs", "action_mask")), strict=True
    ):
        has_room = (jobs[:, None, :num_resources] <= servers[None, :, :num_resources]).all(dim=2)
        fits = has_room & (jobs[:, -1:] != 0.0) & (servers[:, at.is_active] != 0.0)
        assert torch.equal(mask[:num_pairs] != 0, fits.flatten())
        is_idle = (servers[:, at.is_active] != 0.0) & (servers[:, at.last_end] == 0.0)
        can_toggle = is_idle | (servers[:, at.is_asleep] != 0.0)
        assert torch.equal(mask[num_pairs:-1] != 0, can_toggle)


def test_a_policy_learned_from_logs_without_jams_wakes_a_server_in_one(logged):
    """Rows in which jobs waited while servers slept are left out; a jam is never seen."""
    config, rows = logged
    torch.manual_seed(0)
    learning = ConstrainedConfig(
        network=NetworkConfig(kind="flat", flat_width=32), learning_rate=1e-2
    )
    model = ConstrainedModel(ObservationSizes.of(config), learning)
    learner = ConstrainedLearner(model, learning, num_steps=200)
    is_calm = rows["context"][:, 0] * config.num_servers < 1.5 * (1.0 - rows["context"][:, 0])
    calm = {name: values[is_calm] for name, values in rows.items()}
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        chosen = torch.randint(len(calm["action"]), (128,), generator=generator)
        batch = {name: values[chosen] for name, values in calm.items()}
        batch |= {f"next_{name}": batch[name] for name in OBSERVATION}
        batch["next_jobs"] = batch.pop("later")
        batch["behaviour_probability"] = torch.ones(128)
        batch |= {name: torch.zeros(128) for name in ("reward", "cost")}
        batch["discount"] = torch.full((128,), learning.gamma)
        learner.step(batch)
    _, jams = strained(logged)
    with torch.inference_mode():
        logits = model.heads(jams).policy_BA
    chance = torch.softmax(logits, dim=1)
    wakes = (chance * (kinds(toggled(jams), logits.shape[1]) == WAKE)).sum(dim=1)
    assert (wakes > 0.5).float().mean().item() > 0.95
