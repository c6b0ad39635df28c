"""Records one file of decisions: a batch of episodes, each under its own behaviour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.datasets.manifest import ACTION_KINDS, Behaviour, checksum
from cloudsched.datasets.mixing import mix_decisions
from cloudsched.datasets.schema import OBSERVATION, SCALARS, arrow_schema, to_table
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.heuristics.catalog import HEURISTICS, load_heuristic
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.metrics import online_metrics
from cloudsched.policy import Policy

CHUNK = 128  # decisions of a cluster in one row group
COMPRESSION: Literal["lz4"] = "lz4"  # read four times as fast as zstd, for two thirds more bytes

MakePolicy = Callable[[str, ClusterConfig], Policy]
"""Builds a policy by name or folder; bundles are known only above this layer."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Episodes that go into one file, all run side by side."""

    scenario: Scenario
    behaviours: tuple[Behaviour, ...]
    rows: tuple[int, ...]
    """For each episode, its behaviour."""
    seeds: tuple[int, ...]
    """For each episode, its arrivals."""
    first_episode: int
    """Number of the first episode; the others follow."""
    entropy: int
    """Seed of the random decisions."""


class ShardResult(NamedTuple):
    """What a file holds."""

    rows: int
    sha256: str
    num_ticks: int
    action_counts: dict[str, int]
    episodes: dict[str, list[float]]  # measures of the episodes, in order


def record_shard(shard: Shard, path: Path, make_policy: MakePolicy) -> ShardResult:
    """Run the episodes of a shard to their end and write every decision.

    Memory holds one row group at a time, whatever the length of the episodes.
    """
    # Alike behaviours next to each other, so that each policy sees a slice, not a copy.
    order = sorted(range(len(shard.rows)), key=lambda i: (shard.rows[i], i))
    env = ClusterVectorEnv(
        len(order),
        **shard.scenario.to_dict(),
        copy=False,
        autoreset_mode=AutoresetMode.DISABLED,
    )
    config = env.config
    observation, _ = env.reset(seed=[shard.seeds[i] for i in order])
    behaviours = [shard.behaviours[shard.rows[i]] for i in order]
    decide = _Deciders(behaviours, config, make_policy)
    chunk = _Chunk(env, observation)
    constants = {
        "behaviour": np.array([shard.rows[i] for i in order]),
        "episode": shard.first_episode + np.array(order),
        "seed": np.array([shard.seeds[i] for i in order]),
    }
    epsilon = np.array([behaviour.epsilon for behaviour in behaviours])
    generator = np.random.default_rng([shard.entropy, shard.first_episode])
    actions, probability = np.zeros(len(order), np.int64), np.zeros(len(order), np.float32)
    num_pairs = config.visible_jobs * config.num_servers
    counts = np.zeros(len(ACTION_KINDS), np.int64)
    schema, rows, step, is_over = arrow_schema(config), 0, 0, False
    with pq.ParquetWriter(
        path,
        schema,
        compression=COMPRESSION,
        use_dictionary=False,
        write_statistics=["behaviour"],  # so that readers of one behaviour skip the others
    ) as writer:
        while not is_over:
            chunk.begin(step)
            uniforms = generator.random((CHUNK, len(order), 3))
            for t in range(CHUNK):
                mask = observation["action_mask"]
                greedy = decide(observation)
                mix_decisions(mask, greedy, epsilon, uniforms[t], num_pairs, actions, probability)
                chunk.take(t, actions, probability)
            table, is_over = chunk.rows(constants)
            counts += _count_kinds(table, config)
            if len(table["action"]):
                writer.write_table(to_table(table, schema), row_group_size=len(table["action"]))
            rows += len(table["action"])
            step += CHUNK
    measures = online_metrics(env.engine, np.argsort(order))
    return ShardResult(
        rows=rows,
        sha256=checksum(path),
        num_ticks=int(env.engine.state.clusters["tick"].sum()),
        action_counts=dict(zip(ACTION_KINDS, counts.tolist(), strict=True)),
        episodes={name: values.tolist() for name, values in measures.items()},
    )


class _Deciders:
    """Lets each policy decide in its own clusters; all heuristics run in one compiled call."""

    def __init__(
        self, behaviours: Sequence[Behaviour], config: ClusterConfig, make_policy: MakePolicy
    ) -> None:
        names = [behaviour.policy for behaviour in behaviours]
        self._parts: list[tuple[slice, Policy]] = []
        for start, end in _runs([None if _is_heuristic(name) else name for name in names]):
            part = names[start:end]
            policy: Policy
            if _is_heuristic(part[0]):
                policy = HeuristicPolicy(config, [load_heuristic(name) for name in part])
            else:
                policy = make_policy(part[0], config)
                policy.reset(end - start)
            self._parts.append((slice(start, end), policy))
        self._actions = np.zeros(len(names), np.int64)

    def __call__(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        for where, policy in self._parts:
            self._actions[where] = policy.act({k: v[where] for k, v in observation.items()})
        return self._actions


class _Chunk:
    """The next `CHUNK` decisions of each cluster, in preallocated columns."""

    def __init__(self, env: ClusterVectorEnv, observation: Mapping[str, NDArray[Any]]) -> None:
        self._env = env
        self._observation = observation  # always the current one: nothing is copied
        self._clusters = env.engine.state.clusters
        self._tick_s = env.config.tick_s
        shape = (env.num_envs, CHUNK)
        self._columns: dict[str, NDArray[Any]] = {
            name: np.zeros((*shape, *observation[name].shape[1:]), observation[name].dtype)
            for name in OBSERVATION
        }
        for name, kind in SCALARS.items():
            self._columns[name] = np.zeros(shape, kind.to_pandas_dtype())
        self._is_live = np.zeros(shape, np.bool_)
        self._energy_j = np.zeros(env.num_envs)
        self._is_over = np.zeros(env.num_envs, np.bool_)

    def begin(self, step: int) -> None:
        """Number the decisions of this chunk."""
        self._columns["step"][:] = step + np.arange(CHUNK)

    def take(self, t: int, actions: NDArray[np.int64], probability: NDArray[np.float32]) -> None:
        """Store what is seen and done, carry it out, and store what came of it."""
        columns_ = self._columns
        for name in OBSERVATION:
            columns_[name][:, t] = self._observation[name]
        columns_["action"][:, t] = actions
        columns_["behaviour_probability"][:, t] = probability
        self._is_live[:, t] = ~self._is_over
        result = self._env.advance(actions)
        columns_["reward"][:, t] = result.reward
        columns_["cost"][:, t] = result.cost
        columns_["elapsed_ticks"][:, t] = result.elapsed_ticks
        columns_["truncated"][:, t] = result.is_truncated
        energy_j = self._clusters["energy_j"].copy()
        columns_["power_w"][:, t] = (energy_j - self._energy_j) / self._tick_s
        self._energy_j = energy_j
        self._is_over = result.is_truncated.copy()

    def rows(
        self, constants: Mapping[str, NDArray[np.int64]]
    ) -> tuple[dict[str, NDArray[Any]], bool]:
        """Return the decisions of live episodes, episode by episode, and whether all have ended."""
        for name, values in constants.items():
            self._columns[name][:] = values[:, None]
        if self._is_live.all():
            table = {k: v.reshape(-1, *v.shape[2:]) for k, v in self._columns.items()}
        else:
            table = {k: v[self._is_live] for k, v in self._columns.items()}
        return table, bool(self._is_over.all())


def _count_kinds(table: Mapping[str, NDArray[Any]], config: ClusterConfig) -> NDArray[np.int64]:
    """Count decisions in the order of `ACTION_KINDS`."""
    action = table["action"]
    num_pairs = config.visible_jobs * config.num_servers
    num_waits = int((action == config.num_actions - 1).sum())
    toggled = ((action >= num_pairs) & (action < config.num_actions - 1)).nonzero()[0]
    servers = table["servers"][toggled, action[toggled] - num_pairs]
    num_wakes = int(servers[:, columns(config.num_resources).is_asleep].sum())
    num_placed = len(action) - num_waits - len(toggled)
    return np.array([num_placed, len(toggled) - num_wakes, num_wakes, num_waits])


def _is_heuristic(name: str) -> bool:
    return name in HEURISTICS or name.endswith(".json")


def _runs(names: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Yield where equal names follow each other."""
    start = 0
    for i in range(1, len(names) + 1):
        if i == len(names) or names[i] != names[start]:
            yield start, i
            start = i
