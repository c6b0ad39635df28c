"""Steps a second of the environment, beside two yardsticks, in one run on one core.

Every step counts everything that a learner pays for: a uniformly random legal action drawn inside
the measured loop, simulation, observation, mask and reward, and the reset of finished episodes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.heuristics.random import RandomPolicy
from cloudsched.sim.reference import ReferenceCluster

SCHEMA = "cloudsched.bench_env.v1"
CHUNK = 32  # steps between two looks at the clock
SEED = 0


class Size(NamedTuple):
    """How many servers and clusters, and after how many decisions a tick ends at the latest."""

    num_servers: int
    num_clusters: int
    decisions_per_tick: int | None = None

    @property
    def key(self) -> str:
        """Name in the results, such as `n15_e64`, or `n15_e64_d4` with 4 decisions a tick."""
        key = f"n{self.num_servers}_e{self.num_clusters}"
        return key if self.decisions_per_tick is None else f"{key}_d{self.decisions_per_tick}"


SIZES = (
    *(Size(15, 1), Size(15, 64), Size(15, 256), Size(15, 1024)),
    *(Size(150, 64), Size(500, 64)),
    # Among more servers a random policy waits less, and a step that ends no tick is cheap. With a
    # bound on the decisions of a tick, steps of small and large fleets are alike.
    *(Size(15, 64, 4), Size(150, 64, 4), Size(500, 64, 4)),
)
MEMORY_SIZE = Size(15, 1024)


class Runner(Protocol):
    """Something that can be stepped for a while."""

    def run(self, duration: Duration) -> float:
        """Return the steps a second, measured for about so long."""


@dataclass(frozen=True, kw_only=True)
class Duration:
    """How long to measure.

    Clusters that start together also end together, so a measurement that is too short would miss
    the resets, or pay for all of them.
    """

    least_s: float
    """Seconds, at least."""
    episode_steps: int
    """Then on until each cluster has ended an episode, if that takes no more steps than this."""


FULL = Duration(least_s=1.0, episode_steps=5000)
QUICK = Duration(least_s=0.05, episode_steps=0)


class BatchedRunner:
    """Our environment."""

    def __init__(self, size: Size) -> None:
        self.env = ClusterVectorEnv(
            size.num_clusters,
            settings={
                "fleet": {"num_servers": size.num_servers},
                "max_decisions_per_tick": size.decisions_per_tick,
            },
            autoreset_mode=AutoresetMode.SAME_STEP,
            copy=False,
        )
        self._policy = RandomPolicy(SEED)
        self._observation, _ = self.env.reset(seed=SEED)
        self._policy.reset(size.num_clusters)

    def run(self, duration: Duration) -> float:
        """Return the steps a second of all clusters together."""
        step, act, observation = self.env.step, self._policy.act, self._observation
        num_clusters = self.env.num_envs
        steps = episodes = 0
        most_steps = duration.episode_steps * num_clusters
        elapsed, start = 0.0, perf_counter()
        while elapsed < duration.least_s or (episodes < num_clusters and steps < most_steps):
            for _ in range(CHUNK):
                observation, _, _, _, info = step(act(observation))
                if "episode_metrics" in info:
                    episodes += int(info["_episode_metrics"].sum())
            steps += CHUNK * num_clusters
            elapsed = perf_counter() - start
        self._observation = observation
        return steps / elapsed

    @property
    def ticks_per_step(self) -> float:
        """Share of the decisions that ended a tick, in the episodes under way."""
        clusters = self.env.engine.state.clusters
        return float(clusters["tick"].sum() / max(1, clusters["decisions"].sum()))


class NaiveRunner:
    """The plain-Python twin of one cluster, on the same workload."""

    def __init__(self, num_servers: int) -> None:
        scenario = Scenario(settings={"fleet": {"num_servers": num_servers}})
        self._cluster = ReferenceCluster(scenario.config)
        workload = scenario.build_workload(self._cluster.fleet)
        self._jobs = workload.jobs(SEED, scenario.config.episode_ticks)
        self._draw = np.random.default_rng(SEED).random
        self._cluster.reset(self._jobs)

    def run(self, duration: Duration) -> float:
        """Return the steps a second, with observation and mask after each."""
        cluster, draw = self._cluster, self._draw
        steps = 0
        elapsed, start = 0.0, perf_counter()
        observation = cluster.observation()
        while elapsed < duration.least_s:
            legal = observation["action_mask"].nonzero()[0]
            if cluster.step(int(legal[int(draw() * len(legal))])).is_truncated:
                cluster.reset(self._jobs)
            observation = cluster.observation()
            steps += 1
            elapsed = perf_counter() - start
        return steps / elapsed


class CartPoleRunner:
    """Gymnasium's CartPole-v1, the step that most people have timed once."""

    def __init__(self) -> None:
        self._env = gymnasium.make("CartPole-v1")
        self._env.reset(seed=SEED)
        self._draw = np.random.default_rng(SEED).random

    def run(self, duration: Duration) -> float:
        """Return the steps a second of one environment with random actions."""
        env, draw = self._env, self._draw
        steps = 0
        elapsed, start = 0.0, perf_counter()
        while elapsed < duration.least_s:
            for _ in range(CHUNK):
                _, _, terminated, truncated, _ = env.step(int(draw() < 0.5))
                if terminated or truncated:
                    env.reset()
            steps += CHUNK
            elapsed = perf_counter() - start
        return steps / elapsed


def bench_env(
    *,
    repeats: int,
    duration: Duration,
    sizes: tuple[Size, ...] = SIZES,
    memory_size: Size = MEMORY_SIZE,
    report: Callable[[str, int], None] = lambda name, done: None,
) -> dict[str, Any]:
    """Measure everything `repeats` times, in turns, and return the medians with their spread.

    Args:
        report: called with what is about to be measured and how many measurements are done.
    """
    measured: dict[str, list[float]] = {}
    done = 0
    with one_core():
        runners: dict[str, Runner] = {}
        for size in sizes:
            report(f"preparing {size.key}", done)
            runners[size.key] = BatchedRunner(size)
        runners["naive_python"] = NaiveRunner(sizes[0].num_servers)
        runners["cartpole"] = CartPoleRunner()
        for runner in runners.values():
            runner.run(QUICK)  # compiles, and warms the caches
        # In turns, so that a slow spell of the machine does not fall on one of them alone.
        for _ in range(repeats):
            for name, runner in runners.items():
                report(name, done)
                measured.setdefault(name, []).append(runner.run(duration))
                done += 1
        report("memory", done)
        memory_mb = measure_memory(memory_size)
    rates = {name: median(values) for name, values in measured.items()}
    return {
        "schema": SCHEMA,
        "steps_per_s": rates,
        "spread": {name: [min(values), max(values)] for name, values in measured.items()},
        "ratios": _ratios(rates, sizes),
        "cost_growth": _cost_growth(rates, sizes),
        "ticks_per_step": {
            name: runner.ticks_per_step
            for name, runner in runners.items()
            if isinstance(runner, BatchedRunner)
        },
        "memory_mb": memory_mb,
        "repeats": repeats,
        "machine": machine(),
    }


def _ratios(rates: dict[str, float], sizes: tuple[Size, ...]) -> dict[str, float]:
    """Return how many times faster the best batch of the smallest fleet is than each yardstick."""
    like_yardstick = [size for size in sizes if size.decisions_per_tick is None]
    smallest = min(size.num_servers for size in like_yardstick)
    best = max(rates[size.key] for size in like_yardstick if size.num_servers == smallest)
    return {name: best / rates[name] for name in ("naive_python", "cartpole")}


def _cost_growth(rates: dict[str, float], sizes: tuple[Size, ...]) -> dict[str, float]:
    """Return the growth of the time a step / the growth of N; 1 is linear, less is better."""
    growth = {}
    for size in sizes:
        for base in sizes:
            is_base = base.num_servers == sizes[0].num_servers
            if is_base and size[1:] == base[1:] and size != base:
                cost = rates[base.key] / rates[size.key]
                growth[size.key] = cost * base.num_servers / size.num_servers
    return growth


@contextmanager
def one_core() -> Iterator[None]:
    """Keep the process on one core, where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure_memory(size: Size) -> dict[str, float]:
    """Return the memory that an environment takes, and of its whole process, in a fresh one."""
    code = f"from cloudsched.bench.env import *; print_memory(Size{tuple(size)})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    memory: dict[str, float] = json.loads(done.stdout)
    return memory


def print_memory(size: Size) -> None:
    """Print the growth of this process while it makes and steps an environment, as JSON."""
    BatchedRunner(Size(size.num_servers, 1)).run(QUICK)  # the kernels are not part of it
    before = _resident_mb("VmRSS")
    BatchedRunner(size).run(Duration(least_s=0.5, episode_steps=0))
    after = _resident_mb("VmHWM")
    print(json.dumps({size.key: after - before, "process": after}))


def _resident_mb(field: str) -> float:
    """Return VmRSS, the memory in use, or VmHWM, its peak."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text("utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024.0
    # Elsewhere only the peak is known; before the environment exists it is close to what is in use.
    import resource

    kilobytes = 1024.0 if sys.platform == "darwin" else 1.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / kilobytes / 1024.0


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text("utf-8").splitlines())
        model = next((value.strip() for key, _, value in lines if "model name" in key), model)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }
