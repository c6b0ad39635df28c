"""Policy versions: which one decides for a cluster, and how to load another.

The active version decides for all clusters but the canary's share; a cluster stays with its version
as long as the share stands, because the choice hangs on the cluster's name alone. The shadow
decides beside the one that answers, and its decisions only count in the metrics.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.datasets.mixing import mix_decisions
from cloudsched.errors import ConfigError
from cloudsched.heuristics.catalog import RANDOM, load_heuristic
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.random import RandomPolicy
from cloudsched.policy import Policy
from cloudsched.serving.planner import Arrays, Decider, Verdict
from cloudsched.sim.fleet import Fleet

ACTIVE, CANARY, SHADOW = "active", "canary", "shadow"


@dataclass(frozen=True, kw_only=True, eq=False)
class Version:
    """A policy that is loaded, and where it comes from."""

    name: str
    source: str
    weights_sha256: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] | None = None
    bundle: Any = None  # a cloudsched.bundle.Bundle; None for rules

    def policy(self, config: ClusterConfig, fleet: Fleet) -> Policy:
        """Build the policy for clusters with these rules and servers."""
        if self.bundle is not None:
            policy: Policy = self.bundle.policy(config)
            return policy
        if self.source == RANDOM:
            return RandomPolicy()
        return HeuristicPolicy(config, load_heuristic(self.source), fleet)


def load_version(source: str, name: str = "") -> Version:
    """Load a bundle's folder or a rule by name, checked as far as can be without a fleet."""
    folder = Path(source)
    if (folder / "bundle.json").exists():
        from cloudsched.bundle import WEIGHTS, load_bundle  # torch only for those who need it

        bundle = load_bundle(folder)
        digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
        return Version(
            name=name or f"{folder.resolve().parent.name}-{digest[:8]}",
            source=source,
            weights_sha256=digest,
            training=bundle.training,
            evaluation=bundle.evaluation,
            bundle=bundle,
        )
    if source != RANDOM:
        load_heuristic(source)  # refuses what does not exist, with a suggestion
    return Version(name=name or source, source=source)


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The versions in use; replaced as a whole, so that a request sees one state of affairs."""

    active: Version
    canary: Version | None = None
    canary_share: float = 0.0
    shadow: Version | None = None

    def of_cluster(self, cluster: str) -> Version:
        """Return the version that decides for a cluster."""
        if self.canary is None or position(cluster) >= self.canary_share:
            return self.active
        return self.canary

    def with_version(self, version: Version, role: str, share: float) -> Versions:
        """Return these versions with one role filled anew."""
        if role == ACTIVE:
            # What was tried as a canary and is now active for all is no canary any more.
            is_promoted = self.canary is not None and self.canary.source == version.source
            if is_promoted:
                return replace(self, active=version, canary=None, canary_share=0.0)
            return replace(self, active=version)
        if role == CANARY:
            return replace(self, canary=version, canary_share=share)
        if role == SHADOW:
            return replace(self, shadow=version)
        raise ConfigError(f"role={role!r}: expected active, canary or shadow.")

    def without(self, role: str) -> Versions:
        """Return these versions without their canary or shadow."""
        if role == CANARY:
            return replace(self, canary=None, canary_share=0.0)
        if role == SHADOW:
            return replace(self, shadow=None)
        raise ConfigError(f"role={role!r}: only a canary or a shadow can be taken away.")


def position(cluster: str) -> float:
    """Return where a cluster's name falls in [0, 1), evenly and for ever."""
    return zlib.crc32(cluster.encode()) / 2**32


class PolicyDecider:
    """A policy as a `Decider`.

    Args:
        memory: (S,) the last server of round robin in each cluster; updated.
    """

    def __init__(self, policy: Policy, memory: NDArray[np.int64]) -> None:
        self._policy = policy
        self._weigh = getattr(policy, "weigh", None)
        self._memory = memory if isinstance(policy, HeuristicPolicy) else None

    def __call__(self, observation: Arrays, rows: NDArray[np.int64]) -> Verdict:
        """Decide."""
        propensity = np.ones(len(rows), np.float32)  # policies act without exploring
        if self._weigh is not None:
            actions, chances = self._weigh(observation)
            return Verdict(actions, chances, propensity)
        if self._memory is None:
            return Verdict(self._policy.act(observation), None, propensity)
        policy: Any = self._policy
        if len(policy.last_server) != len(rows):
            policy.reset(len(rows))
        policy.last_server[:] = self._memory[rows]
        actions = policy.act(observation)
        self._memory[rows] = policy.last_server
        return Verdict(actions, None, propensity)


class ExploringDecider:
    """Another decider with some decisions drawn at random, and the exact probability of each."""

    def __init__(
        self, decider: Decider, epsilon: float, num_pairs: int, generator: np.random.Generator
    ) -> None:
        self._decider = decider
        self._epsilon = epsilon
        self._num_pairs = num_pairs
        self._generator = generator

    def __call__(self, observation: Arrays, rows: NDArray[np.int64]) -> Verdict:
        """Decide."""
        verdict = self._decider(observation, rows)
        actions, propensity = np.empty_like(verdict.actions), np.empty_like(verdict.propensity)
        mix_decisions(
            observation["action_mask"],
            verdict.actions,
            np.full(len(rows), self._epsilon),
            self._generator.random((len(rows), 3)),
            self._num_pairs,
            actions,
            propensity,
        )
        return Verdict(actions, verdict.chances, propensity)
