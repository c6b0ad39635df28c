"""Ray's worker processes know the environment as soon as they import the package."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.ray
@pytest.mark.parametrize("is_gymnasium_first", [True, False])
def test_a_worker_makes_the_environment(local_ray: Any, is_gymnasium_first: bool) -> None:
    @local_ray.remote(num_cpus=1)
    def num_actions() -> int:
        if is_gymnasium_first:
            import gymnasium

            import cloudsched
        else:
            import cloudsched  # noqa: F401, I001
            import gymnasium
        return int(gymnasium.make("cloudsched/Cluster-v0").action_space.n)  # type: ignore[attr-defined]

    assert local_ray.get(num_actions.remote()) == 5 * 15 + 15 + 1
