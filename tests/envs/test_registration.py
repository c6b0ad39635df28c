"""`import cloudsched` is enough for `gymnasium.make`, whichever package comes first."""

from __future__ import annotations

import subprocess
import sys

import pytest

MAKE = (
    "env = gymnasium.make('cloudsched/Cluster-v0'); env.reset(seed=0); "
    "envs = gymnasium.make_vec('cloudsched/Cluster-v0', num_envs=2); envs.reset(seed=0); "
    "print(type(env.unwrapped).__name__, type(envs.unwrapped).__name__)"
)
KNOWN = (
    "from gymnasium.envs.registration import registry; print('cloudsched/Cluster-v0' in registry)"
)


def run(code: str) -> str:
    words = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "imports", ["import cloudsched, gymnasium", "import gymnasium, cloudsched"]
)
def test_the_environment_can_be_made_in_both_orders_of_imports(imports: str) -> None:
    assert run(f"{imports}; {MAKE}") == "ClusterEnv ClusterVectorEnv"


@pytest.mark.parametrize(
    "imports",
    [
        "import cloudsched; from gymnasium.envs.registration import make",
        "import cloudsched.config, gymnasium",
        "import cloudsched, importlib; importlib.reload(cloudsched); import gymnasium; "
        "importlib.reload(cloudsched)",
    ],
)
def test_the_environment_is_known_after_other_imports_too(imports: str) -> None:
    assert run(f"{imports}; {KNOWN}") == "True"


def test_nothing_is_left_behind_once_gymnasium_is_loaded() -> None:
    left = run(
        "import sys; before = list(sys.meta_path); import cloudsched; "
        "waiting = len(sys.meta_path) - len(before); "
        "import gymnasium.envs.registration as registration; "
        "print(waiting, sys.meta_path == before, type(registration.__loader__).__name__)"
    )
    assert left == "1 True SourceFileLoader"


def test_an_import_of_gymnasium_that_failed_may_be_tried_again() -> None:
    program = f"""
import sys
import cloudsched
sys.modules["gymnasium.vector"] = None  # what the registration imports is missing
try:
    import gymnasium
except ImportError:
    for name in [name for name in sys.modules if name.startswith("gymnasium")]:
        del sys.modules[name]
    {KNOWN}
"""
    assert run(program) == "True"
