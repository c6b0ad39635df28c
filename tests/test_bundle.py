"""A bundle comes back as it went in, or is refused; nothing in it runs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from cloudsched.bundle import DOCUMENT, WEIGHTS, Bundle, load_bundle, save_bundle
from cloudsched.commands.policies import make_policy
from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.errors import BundleError
from cloudsched.models.networks import NetworkConfig, ObservationSizes, QNetwork, build_network

CLUSTER = ClusterConfig(fleet=FleetConfig(num_servers=6), episode_ticks=30)


def make_bundle(*, kind: str = "set", is_q_network: bool = False) -> Bundle:
    torch.manual_seed(0)
    config = NetworkConfig(kind=kind, width=8, context_width=8, pair_width=8, flat_width=16)
    network: Any = build_network(ObservationSizes.of(CLUSTER), config)
    if is_q_network:
        network = QNetwork(network)
    return Bundle(
        network=config,
        cluster=CLUSTER,
        weights=network.state_dict(),
        is_q_network=is_q_network,
        training={"algorithm": "none"},
    )


@pytest.mark.parametrize("is_q_network", [False, True])
@pytest.mark.parametrize("kind", ["set", "flat"])
def test_a_policy_decides_the_same_after_a_round_trip(
    tmp_path: Path, kind: str, is_q_network: bool
) -> None:
    bundle = make_bundle(kind=kind, is_q_network=is_q_network)
    save_bundle(bundle, tmp_path / "bundle")
    loaded = load_bundle(tmp_path / "bundle")
    assert loaded.cluster == CLUSTER
    assert loaded.training == {"algorithm": "none"}
    env = ClusterVectorEnv(5, settings={"fleet": {"num_servers": 6}, "episode_ticks": 30})
    observation, _ = env.reset(seed=0)
    before, after = bundle.policy(CLUSTER), make_policy(str(tmp_path / "bundle"), CLUSTER)
    for _ in range(40):
        actions = before.act(observation)
        assert (actions == after.act(observation)).all()
        assert observation["action_mask"][range(5), actions].all()
        observation, *_ = env.step(actions)


def test_a_set_policy_serves_a_fleet_of_any_size_and_a_flat_one_says_why_not() -> None:
    large = ClusterConfig(fleet=FleetConfig(num_servers=500), visible_jobs=9)
    env = ClusterVectorEnv(2, settings={"fleet": {"num_servers": 500}, "visible_jobs": 9})
    observation, _ = env.reset(seed=0)
    actions = make_bundle().policy(large).act(observation)
    assert observation["action_mask"][range(2), actions].all()
    with pytest.raises(BundleError, match="N=500, K=9"):
        make_bundle(kind="flat").policy(large)
    with pytest.raises(BundleError, match="2 resources and cannot serve 1"):
        make_bundle().policy(ClusterConfig(fleet=FleetConfig(resources=("cpu",))))


def test_saving_again_replaces_the_bundle_and_leaves_nothing_else(tmp_path: Path) -> None:
    for _ in range(2):
        save_bundle(make_bundle(), tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert sorted(path.name for path in (tmp_path / "bundle").iterdir()) == [DOCUMENT, WEIGHTS]


def edit(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / DOCUMENT).read_text())
    (folder / DOCUMENT).write_text(json.dumps({**document, **changes}))


DAMAGES: dict[str, Any] = {
    "schema": lambda f: edit(f, schema="other.v1"),
    "encoder version 99": lambda f: edit(f, encoder_version=99),
    "checksum differs": lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-1] + b"x"),
    "Did you mean 'width'": lambda f: edit(f, network={"widht": 3}),
    "TypeError|AttributeError": lambda f: edit(f, cluster=3),
    "No such file": lambda f: (f / DOCUMENT).unlink(),
    "FileNotFoundError": lambda f: (f / WEIGHTS).unlink(),
    "cannot be read": lambda f: (f / DOCUMENT).write_bytes(b"\xff\xfe{"),
    "not a bundle's document": lambda f: (f / DOCUMENT).write_text("[1]"),
    "Expected a folder": lambda f: (f / DOCUMENT).write_text("[" * 100_000),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_or_foreign_bundle_is_refused(tmp_path: Path, message: str) -> None:
    folder = save_bundle(make_bundle(), tmp_path / "bundle")
    DAMAGES[message](folder)
    with pytest.raises(BundleError, match=message):
        load_bundle(folder)


def test_a_pickle_in_place_of_the_weights_is_refused_and_never_run(tmp_path: Path) -> None:
    folder = save_bundle(make_bundle(), tmp_path / "bundle")
    marker = tmp_path / "it_ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    blob = pickle.dumps(Evil())
    (folder / WEIGHTS).write_bytes(blob)
    import hashlib

    edit(folder, weights_sha256=hashlib.sha256(blob).hexdigest())
    with pytest.raises(BundleError, match="SafetensorError"):
        load_bundle(folder)
    assert not marker.exists()


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    bundle = make_bundle()
    next(iter(bundle.weights.values())).fill_(float("nan"))
    save_bundle(bundle, tmp_path / "bundle")
    with pytest.raises(BundleError, match="not finite"):
        load_bundle(tmp_path / "bundle")
