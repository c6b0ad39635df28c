"""How a `--policy` becomes a policy: a heuristic's name or file, or the folder of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cloudsched.heuristics.catalog import make_heuristic

if TYPE_CHECKING:
    from cloudsched.config import ClusterConfig
    from cloudsched.policy import Policy


def make_policy(name_or_path: str, cluster: ClusterConfig) -> Policy:
    """Build the policy for clusters with these rules; `FOLDER#power` is a part of a hierarchy."""
    folder, _, part = name_or_path.partition("#")
    if (Path(folder) / "bundle.json").exists():
        from cloudsched.bundle import load_bundle  # torch is loaded only for those who need it

        bundle = load_bundle(Path(folder))
        return (bundle.part(part) if part else bundle).policy(cluster)
    return make_heuristic(name_or_path, cluster)
