"""`cloudsched workloads | policies | presets`: what exists, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloudsched.commands.output import print_json


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What the listings share."""

    json: bool = False
    """Print one JSON document, name -> description."""

    def run(self) -> None:
        """Print the names and what they mean."""
        described = self.described()
        if self.json:
            print_json(described)
            return
        width = max(len(name) for name in described)
        for name, description in described.items():
            print(f"{name:<{width}}  {description}")

    def described(self) -> Mapping[str, str]:
        """Return one line on each thing."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Workloads(Listing):
    """List the workloads: what may arrive at a cluster.

    Example:
      cloudsched workloads --json
    """

    def described(self) -> Mapping[str, str]:
        """Return one line on each workload."""
        from cloudsched.workload.catalog import WORKLOADS

        need = " Needs --workload-option path=..."
        return {
            name: entry.description + (need if entry.needs_file else "")
            for name, entry in WORKLOADS.items()
        }


@dataclass(frozen=True, kw_only=True)
class Policies(Listing):
    """List the policies that every `--policy` takes by name.

    Example:
      cloudsched policies | grep headroom
    """

    def described(self) -> Mapping[str, str]:
        """Return one line on each policy."""
        from cloudsched.heuristics.catalog import policy_descriptions

        return policy_descriptions()


@dataclass(frozen=True, kw_only=True)
class Presets(Listing):
    """List the presets: the rules of a cluster, by name.

    Example:
      cloudsched presets
    """

    def described(self) -> Mapping[str, str]:
        """Return one line on each preset."""
        from cloudsched.envs.catalog import PRESETS

        return {name: preset.description for name, preset in PRESETS.items()}
