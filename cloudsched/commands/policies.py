"""How a `--policy` becomes a policy: a heuristic's name or file, or the folder of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cloudsched.heuristics.catalog import make_heuristic

if TYPE_CHECKING:
    from cloudsched.config import ClusterConfig
    from cloudsched.policy import Policy


def make_policy(name_or_path: str, cluster: ClusterConfig) -> Policy:
    """Build the policy for clusters with these rules."""
    if (Path(name_or_path) / "bundle.json").exists():
        from cloudsched.bundle import load_bundle  # torch is loaded only for those who need it

        return load_bundle(Path(name_or_path)).policy(cluster)
    return make_heuristic(name_or_path, cluster)
