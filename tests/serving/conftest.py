"""What the tests of the service share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cloudsched.bundle import Bundle, save_bundle
from cloudsched.config import ClusterConfig
from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network
from cloudsched.serving import schemas
from cloudsched.serving.service import DecisionService
from cloudsched.serving.shield import ShieldSettings
from cloudsched.serving.versions import Versions, load_version
from cloudsched.serving.wire import struct_of


@pytest.fixture(scope="session")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with fresh weights: it decides badly, but it decides."""
    import torch

    torch.manual_seed(7)
    cluster = ClusterConfig()
    network = NetworkConfig(width=16, context_width=32, pair_width=16)
    weights = build_network(ObservationSizes.of(cluster), network).state_dict()
    folder = tmp_path_factory.mktemp("policy") / "bundle"
    bundle = Bundle(
        network=network, cluster=cluster, weights=weights, training={"algorithm": "none"}
    )
    return save_bundle(bundle, folder)


def make_service(source: str, rules: ClusterConfig | None = None, **options: Any) -> Any:
    shield = options.pop("shield", ShieldSettings(sla_cap=1.0))
    return DecisionService(
        ClusterConfig() if rules is None else rules,
        Versions(active=load_version(source), **options.pop("versions", {})),
        load_version(shield.fallback),
        shield,
        **options,
    )


def document(model: str, **fields: Any) -> Any:
    """Return a document as the service sees it after parsing."""
    return msgspec.convert(fields, struct_of(getattr(schemas, model)))
