"""Registers the environments with Gymnasium, whichever of the two is imported first.

Gymnasium takes a quarter of a second to import, and since version 1.0 it asks no plugins for their
environments. So where it is not loaded yet, a finder waits in `sys.meta_path` until somebody
imports it, and registers them then; `import cloudsched` itself costs next to nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `importlib.abc` alone would cost ten times the rest
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

CLUSTER_ID = "cloudsched/Cluster-v0"
GYMNASIUM_REGISTRATION = "gymnasium.envs.registration"


def register_environments() -> None:
    """Register them now if Gymnasium is there, and otherwise as soon as it is."""
    registration = sys.modules.get(GYMNASIUM_REGISTRATION)
    if registration is not None:
        _register(registration)
    elif not any(isinstance(finder, _GymnasiumFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _GymnasiumFinder())


class _GymnasiumFinder:
    """Finds the one module that it waits for as others would, and registers once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that registers; None for all others."""
        if fullname != GYMNASIUM_REGISTRATION:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._register_after(spec.loader)
                return spec
        return None

    def _register_after(self, loader: Loader) -> None:
        execute = loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)
            if self in sys.meta_path:  # only now: an import that failed may be tried again
                sys.meta_path.remove(self)

        # On this loader alone: every module has its own, and tools go on seeing the usual class.
        loader.exec_module = execute_and_register  # type: ignore[method-assign]


def _register(registration: ModuleType) -> None:
    if CLUSTER_ID not in registration.registry:
        registration.register(
            id=CLUSTER_ID,
            entry_point="cloudsched.envs.cluster:ClusterEnv",
            vector_entry_point="cloudsched.envs.cluster:ClusterVectorEnv",
        )
