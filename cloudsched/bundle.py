"""A trained policy as a folder: weights, and all that is needed to use and to judge them.

`weights.safetensors` holds tensors and nothing else, `bundle.json` the rest:

| key                | value                                                                   |
|--------------------|-------------------------------------------------------------------------|
| `schema`           | "cloudsched.bundle.v1"                                                  |
| `encoder_version`  | of the observations that the network was trained on                     |
| `num_resources`    | R; N and K matter only to `flat` networks                               |
| `network`          | the fields of a `NetworkConfig`                                         |
| `is_q_network`     | whether its outputs are action values (DQN)                             |
| `is_hierarchy`     | whether it is three networks: supervisor, `power`, `sla`; false if absent |
| `cluster`          | rules of the clusters that it was trained on                            |
| `weights_sha256`   | checksum of the weights file                                            |
| `training`         | provenance: algorithm, settings, steps, seed, versions                  |
| `evaluation`       | document of `cloudsched evaluate`, or null                              |

Nothing in a bundle is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from cloudsched.config import ClusterConfig
from cloudsched.envs.observation import ENCODER_VERSION
from cloudsched.errors import BundleError, CloudschedError
from cloudsched.heuristics.parameters import HeuristicConfig
from cloudsched.models.hierarchy import SUB_AGENTS, HierarchyNetwork
from cloudsched.models.networks import NetworkConfig, ObservationSizes, QNetwork, build_network
from cloudsched.rl.policy import NetworkPolicy

if TYPE_CHECKING:  # who only loads a bundle need not wait for RLlib
    from cloudsched.rl.training import TrainingRun, Weights

SCHEMA = "cloudsched.bundle.v1"
DOCUMENT, WEIGHTS = "bundle.json", "weights.safetensors"
MAX_DOCUMENT_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A trained policy and where it comes from."""

    network: NetworkConfig
    cluster: ClusterConfig
    weights: Mapping[str, Tensor]
    is_q_network: bool = False
    is_hierarchy: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None

    @classmethod
    def of_run(cls, run: TrainingRun, weights: Weights, **provenance: Any) -> Bundle:
        """Return the bundle of weights from a training run; `provenance` adds to its own."""
        config = run.algorithm.config
        is_q_network = isinstance(run.network, QNetwork)
        settings = dict(config.model_config.get("network", {}))
        if is_q_network:
            settings = {"is_balanced": False, **settings}
        return cls(
            network=NetworkConfig.from_dict(settings),
            cluster=run.scenario.config,
            weights=weights,
            is_q_network=is_q_network,
            is_hierarchy=isinstance(run.network, HierarchyNetwork),
            training={
                "algorithm": type(run.algorithm).__name__,
                "scenario": run.scenario.to_dict(),
                "seed": config.seed,
                **asdict(run.state),
                **provenance,
            },
        )

    def build(self, cluster: ClusterConfig) -> nn.Module:
        """Build the network, with its weights, for clusters of any size that it can serve."""
        if cluster.num_resources != self.cluster.num_resources:
            raise BundleError(
                f"The bundle was trained with {self.cluster.num_resources} resources and cannot "
                f"serve {cluster.num_resources}; train one for these resources."
            )
        build = HierarchyNetwork.build if self.is_hierarchy else build_network
        network: nn.Module = build(ObservationSizes.of(cluster), self.network)
        if self.is_q_network:
            network = QNetwork(network)  # type: ignore[arg-type]
        try:
            network.load_state_dict(dict(self.weights))
        except RuntimeError as error:
            fault = " ".join(str(error).split())[:200]
            raise BundleError(
                f"The weights do not fit a {self.network.kind!r} network for N="
                f"{cluster.num_servers}, K={cluster.visible_jobs} (trained at N="
                f"{self.cluster.num_servers}, K={self.cluster.visible_jobs}): {fault}"
            ) from error
        return network.eval()

    def part(self, name: str) -> Bundle:
        """Return one sub-agent of a hierarchy, to act alone."""
        if not self.is_hierarchy or name not in SUB_AGENTS:
            parts = " and ".join(map(repr, SUB_AGENTS)) if self.is_hierarchy else "no parts"
            raise BundleError(f"The bundle has no part {name!r} that acts; it has {parts}.")
        prefix = f"{name}."
        weights = {
            key.removeprefix(prefix): tensor
            for key, tensor in self.weights.items()
            if key.startswith(prefix)
        }
        return replace(self, weights=weights, is_hierarchy=False, evaluation=None)

    def replace_prior(self, rule: HeuristicConfig) -> Bundle:
        """Return a copy that corrects another rule."""
        return replace(self, network=self.network.replace(prior=rule), evaluation=None)

    def policy(self, cluster: ClusterConfig) -> NetworkPolicy:
        """Return the policy without exploration."""
        rule = "argmax" if self.is_q_network else "kind"
        return NetworkPolicy(self.build(cluster), rule=rule, is_frozen=True)


def save_bundle(bundle: Bundle, folder: Path) -> Path:
    """Write a bundle; a reader sees the old folder or the new one, never a mixture."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in bundle.weights.items()}
    blob = save(weights)
    document = {
        "schema": SCHEMA,
        "encoder_version": ENCODER_VERSION,
        "num_resources": bundle.cluster.num_resources,
        "network": bundle.network.to_dict(),
        "is_q_network": bundle.is_q_network,
        "is_hierarchy": bundle.is_hierarchy,
        "cluster": bundle.cluster.to_dict(),
        "weights_sha256": hashlib.sha256(blob).hexdigest(),
        "training": dict(bundle.training),
        "evaluation": None if bundle.evaluation is None else dict(bundle.evaluation),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        part.mkdir()
        (part / WEIGHTS).write_bytes(blob)
        (part / DOCUMENT).write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        if folder.exists():
            os.replace(folder, old)
        os.replace(part, folder)
    finally:
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)
    return folder


def load_bundle(folder: Path) -> Bundle:
    """Read and check a bundle."""
    document = _read_document(folder)
    if document.get("schema") != SCHEMA:
        raise BundleError(
            f"{folder}: schema {document.get('schema')!r} is not {SCHEMA!r}; not a bundle of this "
            "version of cloudsched."
        )
    if document.get("encoder_version") != ENCODER_VERSION:
        raise BundleError(
            f"{folder}: made for encoder version {document.get('encoder_version')!r}, but this is "
            f"version {ENCODER_VERSION}; train it again."
        )
    try:
        blob = (folder / WEIGHTS).read_bytes()
        if hashlib.sha256(blob).hexdigest() != document["weights_sha256"]:
            raise BundleError(f"{folder / WEIGHTS}: checksum differs; the file is damaged.")
        weights = load(blob)
        if not all(torch.isfinite(tensor).all() for tensor in weights.values()):
            raise BundleError(f"{folder / WEIGHTS}: holds weights that are not finite.")
        return Bundle(
            network=NetworkConfig.from_dict(document["network"]),
            cluster=ClusterConfig.from_dict(document["cluster"]),
            weights=weights,
            is_q_network=bool(document["is_q_network"]),
            is_hierarchy=bool(document.get("is_hierarchy", False)),
            training=document["training"],
            evaluation=document["evaluation"],
        )
    except BundleError:
        raise
    except (
        OSError,
        SafetensorError,
        KeyError,
        TypeError,
        AttributeError,
        CloudschedError,
    ) as error:
        raise BundleError(f"{folder}: damaged bundle: {type(error).__name__}: {error}") from error


def _read_document(folder: Path) -> dict[str, Any]:
    path = folder / DOCUMENT
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise BundleError(f"{path}: larger than any bundle's; not a bundle.")
        document = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BundleError(
            f"{path}: cannot be read: {error}. Expected a folder written by `cloudsched train`."
        ) from error
    if not isinstance(document, dict):
        raise BundleError(f"{path}: not a bundle's document.")
    return document
