"""Collects decisions: E clusters, one forward pass a step, into preallocated columns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloudsched.envs.cluster import FRESH_SEEDS, ClusterVectorEnv
from cloudsched.models.flat_acting import FlatActing
from cloudsched.models.losses import generalised_advantages, shared_luck
from cloudsched.models.set_acting import SetActing
from cloudsched.models.surrogate import draw
from cloudsched.models.threads import one_thread

FloatArray = NDArray[np.float32]
Network = Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]
LastObservations = list[tuple[int, int, dict[str, FloatArray]]]
"""Step, cluster and observation of each episode's end within a rollout."""


class Columns(NamedTuple):
    """B = T * E decisions, time-major; overwritten by the next rollout."""

    observation: dict[str, Tensor]  # (B, ...) each
    action: Tensor  # (B,) int64
    log_prob: Tensor  # (B,)
    value: Tensor  # (B,) as the critic says it: `symlog` of the value
    advantage: Tensor  # (B,) over one plus the value's size
    value_target: Tensor  # (B,) what the critic should have said
    reward: Tensor  # (B,) times `1 - gamma`
    cost: Tensor  # (B,) of SLA violations
    elapsed: Tensor  # (B,) int64, ticks that the decision took
    is_cut: Tensor  # (B,) bool, the next row of the cluster belongs to another episode


class RolloutCollector:
    """Runs a network in E clusters and works out the advantages of its decisions.

    Rewards are multiplied by `1 - gamma`, so that values are mean rewards a tick. They are of order
    one where all goes well and a hundred times that in a cluster full of late jobs, so critics
    speak in `symlog` of the value (nearly itself around zero, its logarithm far away), and
    advantages come in the same unit: divided by one plus the value's size. Otherwise a few
    overloaded clusters decide what is learned for all. A critic should say what it said plus that
    advantage, not `symlog` of the sum: the mean of logarithms makes little of rare disasters, and a
    policy that believes it keeps too few servers awake.

    Args:
        env: with `copy=False` and same-step autoreset.
        num_steps: decisions of each cluster in one rollout, T.
        gamma: discount of one tick; a decision that takes no time is not discounted.
        lambda_: decay of the advantage's trace over one tick.
        group_size: clusters that see the same arrivals, next to each other; what a tick brought to
            the others of the group is taken out of a cluster's advantage.
        device: where the network lives; columns stay on the CPU.
    """

    def __init__(
        self,
        env: ClusterVectorEnv,
        *,
        num_steps: int,
        gamma: float,
        lambda_: float,
        group_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.env = env
        self.num_steps = num_steps
        self.gamma = gamma
        self.lambda_ = lambda_
        self.group_size = group_size
        self.device = torch.device(device)
        self.finished: list[dict[str, float]] = []
        """Measures of the episodes that ended since this was last cleared."""
        shape = (num_steps, env.num_envs)
        space = env.single_observation_space
        self._observation = {
            name: torch.from_numpy(np.zeros((*shape, *part.shape), part.dtype))
            for name, part in space.spaces.items()  # type: ignore[attr-defined]
        }
        self._action = torch.zeros(shape, dtype=torch.int64)
        self._log_prob, self._value = torch.zeros(shape), torch.zeros(shape)
        self._advantage, self._value_target = torch.zeros(shape), torch.zeros(shape)
        self._reward, self._next_value = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._cost = np.zeros(shape, np.float32)
        self._elapsed = np.zeros(shape, np.int64)
        self._first_tick = np.zeros(env.num_envs, np.int64)
        self._luck, self._scratch = np.zeros_like(self._reward), np.zeros((2, 2 * num_steps), "f4")
        self._is_cut = np.zeros(shape, np.bool_)
        self._live: dict[str, Tensor] | None = None

    def reset(self, seeds: list[int]) -> None:
        """Start an episode in each cluster; equal seeds give equal arrivals, for ever."""
        observation, _ = self.env.reset(seed=seeds)
        self._first_tick[:] = 0
        self._live = {name: torch.from_numpy(array) for name, array in observation.items()}

    def collect(self, network: Network) -> Columns:
        """Take `num_steps` decisions in each cluster."""
        threads = one_thread() if isinstance(network, FlatActing | SetActing) else nullcontext()
        with torch.inference_mode(), threads:
            return self._collect(network)

    def _collect(self, network: Network) -> Columns:
        assert self._live is not None, "reset() comes first"
        last_observations: LastObservations = []
        self._is_cut[:] = False
        act = self._way_to_act(network)
        actions = self._action.numpy()
        for t in range(self.num_steps):
            act(t)
            _, reward, _, truncated, info = self.env.step(actions[t])
            self._reward[t] = reward
            self._cost[t] = info["cost"]
            self._elapsed[t] = info["elapsed_ticks"]
            if "final_obs" in info:
                self._is_cut[t] = truncated
                ended = truncated.nonzero()[0]
                last_observations += [(t, int(e), info["final_obs"][e]) for e in ended]
                measures = info["episode_metrics"]
                self.finished += [{k: float(v[e]) for k, v in measures.items()} for e in ended]
        self._reward *= 1.0 - self.gamma
        self._estimate(network, last_observations)
        self._first_tick += self._elapsed.sum(axis=0)
        return Columns(
            observation={name: table.flatten(0, 1) for name, table in self._observation.items()},
            action=self._action.flatten(),
            log_prob=self._log_prob.flatten(),
            value=self._value.flatten(),
            advantage=self._advantage.flatten(),
            value_target=self._value_target.flatten(),
            reward=torch.from_numpy(self._reward).flatten(),
            cost=torch.from_numpy(self._cost).flatten(),
            elapsed=torch.from_numpy(self._elapsed).flatten(),
            is_cut=torch.from_numpy(self._is_cut).flatten(),
        )

    def _way_to_act(self, network: Network) -> Callable[[int], None]:
        """Return what keeps the observations of a step, draws its actions and fills in its rows."""
        assert self._live is not None
        live = self._live
        if isinstance(network, FlatActing):  # its critic is asked later, for all rows at once
            self._flat = network.begin(live, self._observation)
            action, log_prob = self._action.numpy(), self._log_prob.numpy()
            return lambda t: self._flat.act(t, action, log_prob)

        def act(t: int) -> None:
            seen = {name: self._observation[name][t].copy_(one) for name, one in live.items()}
            self._act(t, network, self._on_device(seen))

        return act

    def _act(self, t: int, network: Network, observation: dict[str, Tensor]) -> None:
        """Draw the actions of step t, and fill in its rows."""
        if isinstance(network, SetActing):  # its critic is asked later too
            self._action[t], self._log_prob[t] = network.draw(observation)
            return
        logits_EA, value_E = network(observation)
        self._action[t], self._log_prob[t] = draw(logits_EA)
        self._value[t] = value_E

    def _on_device(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.device.type == "cpu":
            return observation
        return {name: table.to(self.device) for name, table in observation.items()}

    def _estimate(self, network: Network, last_observations: LastObservations) -> None:
        """Fill in advantages, and what the critic should have said."""
        if isinstance(network, FlatActing):
            self._value.copy_(self._flat.values().view_as(self._value))
        elif isinstance(network, SetActing):
            value_B = network.values({k: v.flatten(0, 1) for k, v in self._observation.items()})
            self._value.copy_(value_B.view_as(self._value))
        self._judge(
            network,
            self._reward,
            self._value,
            last_observations,
            self._advantage,
            self._value_target,
        )

    def _judge(
        self,
        network: Network,
        reward: FloatArray,
        said: Tensor,
        last_observations: LastObservations,
        out_advantage: Tensor,
        out_target: Tensor,
    ) -> None:
        """Write advantages, and what a critic should have said; all are (T, E).

        Args:
            reward: what the network is paid.
            said: what its critic did say.
        """
        value, next_value = symexp(said.numpy()), self._next_value
        self._fill_next_values(value, network, last_observations, next_value)
        advantage = out_advantage.numpy()
        self._fill_advantages(reward, value, next_value, advantage)
        out_target.copy_(said + torch.from_numpy(advantage / (1.0 + np.abs(value))))
        if self.group_size > 1:
            calm = reward - self._shared_luck(reward, value, next_value)
            self._fill_advantages(calm, value, next_value, advantage)
        advantage /= 1.0 + np.abs(value)

    def _fill_next_values(
        self,
        value: FloatArray,
        network: Network,
        last_observations: LastObservations,
        out_next_value: FloatArray,
    ) -> None:
        """Write the (T, E) values of what each decision led to."""
        assert self._live is not None
        out_next_value[:-1] = value[1:]
        out_next_value[-1] = self._values(network, self._live)
        if last_observations:
            steps, clusters, observations = zip(*last_observations, strict=True)
            stacked = {
                name: torch.from_numpy(np.stack([one[name] for one in observations]))
                for name in self._live
            }
            values = self._values(network, stacked)
            out_next_value[list(steps), list(clusters)] = values

    def _values(self, network: Network, observation: dict[str, Tensor]) -> FloatArray:
        """Return (B,) what the critic takes observations to be worth."""
        if isinstance(network, FlatActing | SetActing):
            return symexp(network.values(observation).numpy())
        return symexp(network(self._on_device(observation))[1].cpu().numpy())

    def _fill_advantages(
        self,
        reward: FloatArray,
        value: FloatArray,
        next_value: FloatArray,
        out_advantage: FloatArray,
    ) -> None:
        """Write (T, E) advantages."""
        trace = np.power(self.lambda_, self._elapsed, dtype=np.float32)
        trace[self._is_cut] = 0.0
        generalised_advantages(reward, value, next_value, self._discount, trace, out_advantage)

    def _shared_luck(
        self, reward: FloatArray, value: FloatArray, next_value: FloatArray
    ) -> FloatArray:
        """Return (T, E) what each tick brought to the others of the group; overwritten later."""
        shared_luck(
            reward + self._discount * next_value - value,
            self._elapsed,
            self._first_tick,
            self.group_size,
            self._scratch,
            self._luck,
        )
        return self._luck

    @property
    def _discount(self) -> FloatArray:
        """(T, E) discount of what follows each decision."""
        return np.power(self.gamma, self._elapsed, dtype=np.float32)


def symexp(x: FloatArray) -> FloatArray:
    """Return what `symlog`, the signed logarithm of one plus the size, makes x of.

    What a critic says beyond 12 is taken for 12.
    """
    return np.asarray(np.sign(x) * np.expm1(np.minimum(np.abs(x), np.float32(12.0))))


def training_env(num_envs: int, **scenario: object) -> ClusterVectorEnv:
    """Build clusters as a collector needs them."""
    return ClusterVectorEnv(num_envs, **scenario, copy=False, autoreset_mode="SameStep")  # type: ignore[arg-type]


def training_seeds(
    num_envs: int, entropy: int | None, *, stream: int = 0, group_size: int = 1
) -> list[int]:
    """Draw the first seed of each cluster from the training range.

    Args:
        stream: sets runners apart.
        group_size: clusters next to each other that share a seed.
    """
    generator = np.random.default_rng(None if entropy is None else [entropy, stream])
    seeds = generator.integers(FRESH_SEEDS, size=-(-num_envs // group_size))
    return [int(seeds[e // group_size]) for e in range(num_envs)]
