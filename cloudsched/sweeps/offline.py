"""From a dataset to a bundle: the constrained learner's outcome, as an ordinary policy."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from pathlib import Path
from typing import Any

from torch import Tensor

from cloudsched.bundle import Bundle, save_bundle
from cloudsched.datasets.manifest import Manifest, read_manifest
from cloudsched.models.constrained import ConstrainedConfig
from cloudsched.results import provenance
from cloudsched.rl.offline import OfflineRunConfig, build_model

BUNDLE, CLONE = "bundle", "clone"


def save_bundles(
    dataset: Path,
    config: ConstrainedConfig,
    run: OfflineRunConfig,
    learner_state: Mapping[str, Any],
    folder: Path,
) -> Path:
    """Write the learned policy, and beside it the clone of the data, and return the former.

    Args:
        learner_state: of a `ConstrainedLearner`.
        folder: gets `bundle` and `clone`.
    """
    manifest = read_manifest(dataset)
    model = build_model(dataset, config, run.seed)
    model.load_state_dict(learner_state["model"])
    price = exp(learner_state["multiplier"]["log_price"])
    training = {
        "config": config.to_dict(),
        "run": run.to_dict(),
        "scenario": manifest.scenario.to_dict(),
        "dataset": _summary(dataset, manifest),
        "steps": learner_state["step_count"],
        "price": price,
        **provenance(),
    }
    _save(model.cloned_weights(), config, manifest, "OfflineClone", training, folder / CLONE)
    weights = model.policy_weights()
    return _save(weights, config, manifest, "ConstrainedOffline", training, folder / BUNDLE)


def _save(
    weights: Mapping[str, Tensor],
    config: ConstrainedConfig,
    manifest: Manifest,
    algorithm: str,
    training: Mapping[str, Any],
    folder: Path,
) -> Path:
    return save_bundle(
        Bundle(
            network=config.network,
            cluster=manifest.scenario.config,
            weights=weights,
            training={"algorithm": algorithm, **training},
        ),
        folder,
    )


def _summary(dataset: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "folder": str(dataset),
        "num_decisions": manifest.num_decisions,
        "num_episodes": manifest.num_episodes,
        "behaviours": [behaviour.name for behaviour in manifest.behaviours],
    }
