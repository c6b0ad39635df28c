"""From logged decisions to what learners take in: a decision, what its tick brought, what followed.

Placements and toggles take no time, so a decision is judged where time has passed: at the first
decision of a later tick. All decisions of a tick share that bootstrap, which keeps errors from
piling up along the free decisions in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
from numba import njit
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig, Settings
from cloudsched.datasets.manifest import Manifest, open_part
from cloudsched.datasets.schema import OBSERVATION, Arrays, to_arrays
from cloudsched.envs.observation import columns
from cloudsched.sim.fleet import build_fleet

if TYPE_CHECKING:
    from ray.data import Dataset

FloatArray = NDArray[np.float32]

MIXED_GROUPS = (
    8  # row groups, at least, that are shuffled together; one holds a few ticks of a few episodes
)
NEXT = "next_"
COLUMNS = (
    *OBSERVATION,
    *(NEXT + name for name in OBSERVATION),
    "next_number",
    "action",
    "behaviour_probability",
    "reward",
    "cost",
    "discount",
)
"""Columns of a batch of transitions; `reward` and `cost` are discounted sums over its ticks. Where
`next_number` is the same, so is all that is next."""


@dataclass(frozen=True, kw_only=True)
class TransitionConfig(Settings):
    """How decisions become transitions."""

    gamma: float = 0.99
    """Discount of a tick."""
    num_ticks: int = 1
    """Ticks after which the rest is bootstrapped."""
    reward: str = "excess"
    """`power`: the share of the fleet's full power that a tick drew, negative. `excess`: the same
    without the share of its CPU that was in use. Work has to be done sooner or later, so in the
    long run both rank policies alike; but discounting rewards those who put work off, and only
    `excess` does not pay them. Requests to sleep cost what they do in the environment's reward.
    Violations are in the cost alone."""
    run_length: int = 4
    """Decisions of a tick, at most, that stay together when transitions are shuffled. What follows
    is the same for all of them, so that a batch has that many fewer next rows to go through the
    networks; 1 for none."""

    def __post_init__(self) -> None:
        self._number("gamma", low=0.0, high=1.0)
        self._integer("num_ticks", low=1, high=10_000)
        self._integer("run_length", low=1)
        self._choice("reward", ("excess", "power"))


class TransitionReader:
    """Reads row groups as transitions.

    Costs are divided by the jobs that arrive in a tick. Costs and rewards are multiplied by
    `1 - gamma`, so that values read as a share of full power and as a violation rate.

    Args:
        folder: of the dataset.
        seed: of the order of row groups, and of transitions in what is read together.
        author: the policy whose decisions are wanted, random ones included; None for all.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        config: TransitionConfig,
        *,
        seed: int,
        author: str | None = None,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._config = config
        self._seed = seed
        self._is_wanted = np.array([author in (None, b.policy) for b in manifest.behaviours])

    def pieces(self, num_passes: int = 1) -> list[dict[str, Any]]:
        """Return the row groups with wanted rows, for Ray Data, in an order drawn from the seed.

        Args:
            num_passes: how often they come, each time in another order.
        """
        found = []
        for name in self._manifest.files:
            with open_part(self._folder, name, self._manifest) as file:
                for group in range(file.num_row_groups):
                    count = self._num_wanted(file, group)
                    if count > 0:
                        found.append({"file": name, "group": group, "num_wanted": count})
        generator = np.random.default_rng(self._seed)
        orders = [generator.permutation(len(found)) for _ in range(num_passes)]
        return [found[i] for order in orders for i in order]

    def _num_wanted(self, file: pq.ParquetFile, group: int) -> int:
        """Return how many rows of a row group are wanted; mostly all or none, and it tells so."""
        metadata = file.metadata.row_group(group)
        for i in range(metadata.num_columns):
            column = metadata.column(i)
            if column.path_in_schema == "behaviour" and column.is_stats_set:
                statistics = column.statistics
                if statistics is not None and statistics.has_min_max:
                    is_wanted = self._is_wanted[statistics.min : statistics.max + 1]
                    if is_wanted.all() or not is_wanted.any():
                        return int(metadata.num_rows) if is_wanted.all() else 0
        behaviour = file.read_row_group(group, columns=["behaviour"])["behaviour"].to_numpy()
        return int(self._is_wanted[behaviour].sum())

    def dataset(
        self, finish: Callable[[Arrays], Any], *, min_rows: int, min_blocks: int
    ) -> Dataset:
        """Return the transitions as a Ray Data dataset that streams from disk.

        Args:
            finish: makes a block, as `map_batches` takes it, of transitions that were read and
                shuffled together; done by whoever reads them.
            min_rows: how many these are, about, or more.
            min_blocks: if one pass over the data gives fewer, as many follow as it takes.
        """
        import ray

        pieces = self.pieces()
        num_rows = sum(piece["num_wanted"] for piece in pieces)
        num_blocks = max(1, min(len(pieces) // MIXED_GROUPS, num_rows // min_rows))
        num_passes = -(-min_blocks // num_blocks)
        read = ray.data.from_items(
            self.pieces(num_passes), override_num_blocks=num_passes * num_blocks
        )
        return read.map_batches(
            lambda some: finish(self.read_batch(some)), batch_size=None, zero_copy_batch=True
        )

    def read_batch(self, pieces: dict[str, NDArray[Any]]) -> Arrays:
        """Read some row groups and shuffle them together."""
        places = [
            (str(name), int(group))
            for name, group in zip(pieces["file"], pieces["group"], strict=True)
        ]
        parts = [self.read(name, group) for name, group in places]
        together = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
        generator = np.random.default_rng([self._seed, _number(places[0][0]), places[0][1]])
        order = self.shuffled(together["next_number"], generator)
        return {name: values[order] for name, values in together.items()}

    def shuffled(
        self, next_number: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return an order of transitions in which short runs of a tick's decisions stay together.

        Args:
            next_number: (B,) of transitions as `read` returns them, of one row group or several.
        """
        starts = run_starts(next_number, self._config.run_length)
        lengths = np.diff(starts, append=len(next_number))
        chosen = generator.permutation(len(starts))
        lengths = lengths[chosen]
        before = np.cumsum(lengths) - lengths
        return np.repeat(starts[chosen] - before, lengths) + np.arange(len(next_number))

    def read(self, name: str, group: int) -> Arrays:
        """Return the transitions of a row group that have all they need in it, as logged."""
        with open_part(self._folder, name, self._manifest) as file:
            rows = to_arrays(file.read_row_group(group))
        config = self._manifest.scenario.config
        scale = 1.0 - self._config.gamma
        reward = scale * power_reward(rows, config, is_excess=self._config.reward == "excess")
        cost = scale * rows["cost"] / np.float32(self._manifest.arrivals_per_tick)
        transitions = Transitions.of(rows, reward, cost.astype(np.float32), self._config)
        is_wanted = self._is_wanted[rows["behaviour"]]
        chosen = transitions.usable[is_wanted[transitions.usable]]
        following = transitions.next_row[chosen]
        batch = {part: rows[part][chosen] for part in OBSERVATION}
        # Where nothing follows, the row itself stands in; its discount is zero.
        batch |= {NEXT + part: rows[part][following] for part in OBSERVATION}
        batch["next_number"] = following + (_number(name) * 2**16 + group) * 2**32
        batch["action"] = rows["action"][chosen].astype(np.int64)
        batch["behaviour_probability"] = rows["behaviour_probability"][chosen]
        batch["reward"] = transitions.reward[chosen]
        batch["cost"] = transitions.cost[chosen]
        batch["discount"] = transitions.discount[chosen]
        return batch


def run_starts(next_number: NDArray[np.int64], run_length: int) -> NDArray[np.int64]:
    """Return where runs of transitions with the same number begin, each of a length at most."""
    place = np.arange(len(next_number))
    is_first = np.ones(len(next_number), np.bool_)
    is_first[1:] = next_number[1:] != next_number[:-1]
    first = np.maximum.accumulate(np.where(is_first, place, 0))
    return np.flatnonzero((place - first) % run_length == 0)


def _number(name: str) -> int:
    """Return the number in the name of a file."""
    return int(name.split("-")[1].split(".")[0])


@dataclass(frozen=True)
class Transitions:
    """What followed each of B rows."""

    next_row: NDArray[np.int64]
    """(B,) the row to bootstrap from; the row itself where the episode terminated before."""
    reward: FloatArray
    """(B,) discounted sum until then."""
    cost: FloatArray
    discount: FloatArray
    """(B,) gamma ** ticks until then, zero where the episode terminated before."""
    usable: NDArray[np.int64]
    """Rows whose ticks lie wholly among the B."""

    @classmethod
    def of(
        cls, rows: Arrays, reward: FloatArray, cost: FloatArray, config: TransitionConfig
    ) -> Transitions:
        """Work out the transitions of rows in the order of the contract."""
        count = len(rows["action"])
        next_row = np.zeros(count, np.int64)
        sums = np.zeros((3, count), np.float32)
        look_ahead(
            rows["episode"],
            rows["step"],
            rows["elapsed_ticks"],
            np.asarray(rows["terminated"], np.bool_),
            reward,
            cost,
            config.num_ticks,
            config.gamma,
            next_row,
            sums,
        )
        usable = (next_row >= 0).nonzero()[0]
        return cls(next_row, sums[0], sums[1], sums[2], usable)


def power_reward(rows: Arrays, config: ClusterConfig, *, is_excess: bool) -> FloatArray:
    """Return (B,) what each decision drew, as a share of full power, and paid for toggles.

    Args:
        is_excess: whether the share of CPU in use is taken off.
    """
    fleet = build_fleet(config.fleet)
    action, servers = rows["action"], rows["servers"]
    num_pairs = config.visible_jobs * config.num_servers
    reward = -rows["power_w"] / np.float32(fleet.max_w.sum())
    if is_excess:
        # The observation of the decision that ends a tick is what the tick drew power for.
        capacity = servers[0, :, config.num_resources].sum() if len(servers) else np.float32(1.0)
        in_use = 1.0 - servers[:, :, 0].sum(axis=1) / capacity
        reward += in_use * (rows["elapsed_ticks"] > 0)
    toggled = ((action >= num_pairs) & (action < config.num_actions - 1)).nonzero()[0]
    is_active = columns(config.num_resources).is_active
    sleeps = servers[toggled, action[toggled] - num_pairs, is_active]
    if config.reward.alpha > 0.0:
        price = config.reward.toggle_penalty * 15.0 / config.num_servers / config.reward.alpha
        reward[toggled] -= np.float32(price) * sleeps
    return reward.astype(np.float32, copy=False)


@njit(cache=True, nogil=True, error_model="numpy")
def look_ahead(
    episode: NDArray[np.int64],
    step: NDArray[np.int32],
    elapsed: NDArray[np.int32],
    terminated: NDArray[np.bool_],
    reward: FloatArray,
    cost: FloatArray,
    num_ticks: int,
    gamma: float,
    out_next_row: NDArray[np.int64],
    out_sums: FloatArray,
) -> None:
    """Write, for every row, what happened until `num_ticks` tick ends lie behind it.

    Args:
        out_next_row: (B,) first row after that; the row itself where the episode terminated before;
            -1 where the rows break off before. Overwritten.
        out_sums: (3, B) discounted reward, discounted cost, remaining discount. Overwritten.
    """
    count = len(episode)
    for i in range(count):
        total_reward = 0.0
        total_cost = 0.0
        discount = 1.0
        ticks = 0
        k = i
        out_next_row[i] = -1
        while True:
            total_reward += discount * reward[k]
            total_cost += discount * cost[k]
            ticks += elapsed[k]
            discount *= gamma ** elapsed[k]
            if terminated[k]:
                out_next_row[i] = i
                discount = 0.0
                break
            k += 1
            if k == count or episode[k] != episode[i] or step[k] != step[k - 1] + 1:
                break
            if ticks >= num_ticks:
                out_next_row[i] = k
                break
        out_sums[0, i] = total_reward
        out_sums[1, i] = total_cost
        out_sums[2, i] = discount
