"""A training run: iterations, early results on train seeds, checkpoints, and the best policy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from torch import Tensor, nn

from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import Episodes, first_seeds
from cloudsched.models.hierarchy import HierarchyNetwork
from cloudsched.models.networks import NetworkConfig, QNetwork
from cloudsched.rl.policy import NetworkPolicy
from cloudsched.statistics import Estimate

CHECKPOINT, STATE = "checkpoint", "state.json"

Weights = dict[str, Tensor]


@dataclass
class RunState:
    """How far a run is; saved beside each checkpoint."""

    iteration: int = 0
    steps: int = 0
    seconds: float = 0.0
    best_return: float | None = None
    best_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class EarlyResult:
    """How the policy did on some train seeds, without exploration."""

    steps: int
    episode_return: float
    mean_power_w: float
    sla_violation_rate: float
    is_best: bool


class TrainingRun:
    """Trains an RLlib algorithm and keeps the weights that did best on train seeds.

    Args:
        algorithm: built; its `env_config` is the scenario.
        folder: where the checkpoint lives.
        num_seeds: train seeds for early results.
        keep: called with the network's weights whenever they are the best so far.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        folder: Path,
        *,
        num_seeds: int,
        keep: Callable[[Weights, RunState], None],
    ) -> None:
        self.algorithm = algorithm
        self.scenario = Scenario.from_dict(dict(algorithm.config.env_config))
        self.state = RunState()
        self._folder = folder
        self._keep = keep
        self._episodes = Episodes(self.scenario, first_seeds("train", num_seeds))

    @property
    def starts_as_rule(self) -> bool:
        """Whether networks begin as a heuristic, which may stay the best."""
        return getattr(self.algorithm.config, "rule", None) is not None

    @property
    def network(self) -> Any:
        """The network that is being trained."""
        return self.algorithm.policy_network()

    def iterate(self) -> dict[str, Any]:
        """Run one iteration and return RLlib's result."""
        result: dict[str, Any] = self.algorithm.train()
        self.state.iteration += 1
        self.state.steps = int(result[ENV_RUNNER_RESULTS][NUM_ENV_STEPS_SAMPLED_LIFETIME])
        self.state.seconds += float(result["time_this_iter_s"])
        return result

    def evaluate(self) -> EarlyResult:
        """Measure the policy on train seeds, and keep it if it is the best so far."""
        network, summary = max(map(self._measured, self._candidates()), key=_return_of)
        episode_return = summary["episode_return"].mean
        best = self.state.best_return
        is_best = best is None or episode_return > best
        if is_best:
            weights = {name: value.clone() for name, value in network.state_dict().items()}
            with _uninterrupted():  # or the state would tell of a policy that was not kept
                self.state.best_return, self.state.best_steps = episode_return, self.state.steps
                self._keep(weights, self.state)
        return EarlyResult(
            steps=self.state.steps,
            episode_return=episode_return,
            mean_power_w=summary["mean_power_w"].mean,
            sla_violation_rate=summary["sla_violation_rate"].mean,
            is_best=is_best,
        )

    def _candidates(self) -> list[nn.Module]:
        """Return what may be kept."""
        network = self.network
        # A supervisor that does worse than one of its sub-agents should leave the choice alone.
        others = network.single_minded() if isinstance(network, HierarchyNetwork) else []
        return [network, *others]

    def _measured(self, network: nn.Module) -> tuple[nn.Module, dict[str, Estimate]]:
        """Return the network and how it does on train seeds."""
        rule = "argmax" if isinstance(network, QNetwork) else "kind"
        policy = NetworkPolicy(network, rule=rule, is_frozen=True)
        return network, self._episodes.run(policy, name="policy").summary

    def save(self) -> None:
        """Write a checkpoint from which `restore` goes on; the last one stays until it is whole."""
        target = self._folder / CHECKPOINT
        part = self._folder / f".{CHECKPOINT}.{os.getpid()}.part"
        old = self._folder / f".{CHECKPOINT}.{os.getpid()}.old"
        try:
            self.write_checkpoint(part)
            if target.exists():
                os.replace(target, old)
            os.replace(part, target)
        finally:
            for leftover in (part, old):
                shutil.rmtree(leftover, ignore_errors=True)

    def restore(self) -> None:
        """Go on from the checkpoint."""
        target = self._folder / CHECKPOINT
        if not self.has_checkpoint:
            raise ConfigError(f"--resume: no checkpoint in {str(target)!r}; leave --resume out.")
        self.read_checkpoint(target)

    @property
    def has_checkpoint(self) -> bool:
        """Whether `restore` has something to go on from."""
        return (self._folder / CHECKPOINT / STATE).is_file()

    def write_checkpoint(self, folder: Path) -> None:
        """Write algorithm and state into a folder, not all at once as `save` does."""
        self.algorithm.save_to_path(str(folder.absolute()))
        (folder / STATE).write_text(json.dumps(asdict(self.state)), "utf-8")

    def read_checkpoint(self, folder: Path) -> None:
        """Take over what `write_checkpoint` wrote."""
        self.algorithm.restore_from_path(str(folder.absolute()))
        self.state = RunState(**json.loads((folder / STATE).read_text("utf-8")))


def _return_of(measured: tuple[nn.Module, dict[str, Estimate]]) -> float:
    return measured[1]["episode_return"].mean


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and TERM back until the block has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))

    # A handler that is not Python's, as Ray's in its workers, could not be put back.
    ours = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not None]
    previous = {number: signal.signal(number, hold) for number in ours}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if held and callable(handler := previous[signal.Signals(held[0][0])]):
            handler(*held[0])


def read_hyperparameters(path: Path) -> dict[str, Any]:
    """Return what a search of `tune/` found best, as `apply_hyperparameters` takes it."""
    try:
        document = json.loads(path.read_text("utf-8"))
        return {part: dict(document.get(part, {})) for part in ("training", "network")}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"Cannot read hyper-parameters from {str(path)!r}: {error}. Expected a JSON file with "
            "'training' and 'network', as `python -m tune.ppo_asha` writes it."
        ) from error


def apply_hyperparameters(config: Any, values: Mapping[str, Any]) -> None:
    """Change settings of an algorithm's config.

    Args:
        values: `training` holds arguments of `config.training`, `network` fields of a
            `NetworkConfig`; what a search found best has this form.
    """
    unknown = set(values) - {"training", "network"}
    if unknown:
        raise ConfigError(
            f"Hyper-parameters for {sorted(unknown)[0]!r}: expected 'training' or 'network'."
        )
    try:
        config.training(**values.get("training", {}))
    except TypeError as error:
        raise ConfigError(
            f"Hyper-parameters do not fit {type(config).__name__}: {error}."
        ) from error
    settings = {**config.model_config.get("network", {}), **values.get("network", {})}
    NetworkConfig.from_dict(settings)  # refuses unknown names
    config.rl_module(model_config={**config.model_config, "network": settings})


def fit_schedules(config: Any, steps: int) -> None:
    """Stretch or shrink the schedules of a config so that they end when training does."""
    schedules = {
        name: getattr(config, name)
        for name in ("lr", "entropy_coeff")
        if isinstance(getattr(config, name, None), list | tuple)
    }
    if schedules:
        factor = steps / max(points[-1][0] for points in schedules.values())
        config.training(
            **{
                name: [[round(time * factor), value] for time, value in points]
                for name, points in schedules.items()
            }
        )
