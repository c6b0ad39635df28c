"""Learning from a dataset with Ray Train: any number of workers, fed by Ray Data from disk."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray.train
import torch
from numpy.typing import NDArray
from ray.data import Dataset, ExecutionOptions
from ray.train import CheckpointConfig, DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import Tensor

from cloudsched.config import Settings
from cloudsched.datasets.manifest import Manifest, read_episodes, read_manifest
from cloudsched.datasets.quiet import quiet_ray_data
from cloudsched.datasets.transitions import TransitionConfig, TransitionReader
from cloudsched.errors import ConfigError
from cloudsched.models.constrained import ConstrainedConfig, ConstrainedModel
from cloudsched.models.constrained_learner import ConstrainedLearner
from cloudsched.models.constrained_loss import loss_means
from cloudsched.models.lagrange import LagrangeConfig
from cloudsched.models.memory import keep_freed_memory
from cloudsched.models.networks import NetworkConfig, ObservationSizes
from cloudsched.models.precision import products_dtype, take_products_in
from cloudsched.rl.feeding import endless, finished_batches
from cloudsched.sim.fleet import build_fleet

STATE, PROGRESS, RUN = "state.pt", "progress.jsonl", "ray"


@dataclass(frozen=True, kw_only=True)
class OfflineRunConfig(Settings):
    """How long to learn, and on what."""

    num_steps: int = 1000
    """Gradient steps."""
    report_every: int = 100
    """Gradient steps between two reports."""
    checkpoint_every: int = 500
    """Gradient steps between two checkpoints."""
    seed: int = 0
    """Seed of the first weights and of the order of the data."""
    num_workers: int = 1
    """Workers that share each batch."""
    use_gpu: bool = False
    """Whether each worker has a GPU."""
    num_threads: int = 1
    """Threads of each worker."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "report_every", "checkpoint_every", "num_workers", "num_threads"):
            self._integer(name, low=1)
        self._integer("seed", low=0)
        self._flag("use_gpu")


def train(
    dataset: Path, config: ConstrainedConfig, run: OfflineRunConfig, folder: Path
) -> dict[str, Any]:
    """Learn from a dataset with Ray Train and return the learner's last state.

    Run again with the same folder, it goes on from the last checkpoint. Needs a running Ray.

    Args:
        dataset: folder of a dataset that is known to be sound.
        folder: gets `progress.jsonl` and, below `ray/`, the checkpoints.
    """
    if config.batch_size % run.num_workers:
        raise ConfigError(
            f"batch_size={config.batch_size}: expected a multiple of {run.num_workers} workers."
        )
    quiet_ray_data()
    manifest = read_manifest(dataset)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={
            "dataset": str(dataset.absolute()),
            "config": config.to_dict(),
            "run": run.to_dict(),
            "folder": str(folder.absolute()),
        },
        # Shares are small so that on two cores reading never waits for a worker's core.
        scaling_config=ScalingConfig(
            num_workers=run.num_workers,
            use_gpu=run.use_gpu,
            resources_per_worker={"CPU": 0.5, **({"GPU": 1} if run.use_gpu else {})},
        ),
        datasets={"train": worker_batches(dataset, manifest, config, run)},
        # Batches in the same order in every run, or a resumed run would not be the same.
        dataset_config=DataConfig(execution_options=ExecutionOptions(preserve_order=True)),
        run_config=RunConfig(
            name=RUN,
            storage_path=str(folder.absolute()),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=2),
        ),
    )
    result = trainer.fit()
    if result.error is not None:
        raise result.error
    assert result.checkpoint is not None
    return read_state(result.checkpoint)


def reader(
    dataset: Path, manifest: Manifest, config: ConstrainedConfig, seed: int
) -> TransitionReader:
    """Return the reader of the transitions that a learner with this config needs."""
    return TransitionReader(
        dataset.absolute(),
        manifest,
        TransitionConfig(gamma=config.gamma, num_ticks=config.num_ticks),
        seed=seed,
        author=best_author(dataset, manifest, config),
    )


def worker_batches(
    dataset: Path, manifest: Manifest, config: ConstrainedConfig, run: OfflineRunConfig
) -> Dataset:
    """Return the batches of a pass, each of as many transitions as one worker takes a step."""
    model = build_model(dataset, config, run.seed)
    if not run.use_gpu:  # or the worker, which has one, rounds what has to be
        take_products_in(products_dtype(config.precision, "cpu"), model)
    source = reader(dataset, manifest, config, run.seed)
    return finished_batches(source, model.preparation(), config.batch_size // run.num_workers)


def train_worker(settings: Mapping[str, Any]) -> None:
    """Learn as one of the workers of a Ray Train run."""
    quiet_ray_data()
    keep_freed_memory()
    config = config_from_dict(settings["config"])
    run = OfflineRunConfig.from_dict(settings["run"])
    context = ray.train.get_context()
    device = get_device()
    torch.set_num_threads(run.num_threads)
    module = build_model(Path(settings["dataset"]), config, run.seed).to(device)
    learner = ConstrainedLearner(module, config, num_steps=run.num_steps)
    shard = ray.train.get_dataset_shard("train")
    position = Position()
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        state = read_state(checkpoint)
        learner.load_state_dict(state["learner"])
        position = Position(**state["position"])
    log = Path(settings["folder"]) / PROGRESS

    def report(metrics: dict[str, float], state: dict[str, Any] | None) -> None:
        is_first = context.get_world_rank() == 0
        if is_first:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")
        if state is None or not is_first:
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, Path(folder) / STATE)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    mean = mean_of_workers if context.get_world_size() > 1 else None
    with closing(endless(shard, device)) as feed:
        learn(learner, feed, run, position, report, mean)


@dataclass
class Position:
    """How far into the data a run is."""

    epoch: int = 0
    batch: int = 0


def learn(
    learner: ConstrainedLearner,
    feed: Iterator[Mapping[str, Tensor] | None],
    run: OfflineRunConfig,
    position: Position,
    report: Callable[[dict[str, float], dict[str, Any] | None], None],
    mean: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Take gradient steps until `run.num_steps` are done.

    Args:
        feed: batches, None after each round; every round is the same.
        position: where to begin; updated.
        report: called with metrics, and now and then with a state to save.
    """
    losses = []
    seen = 0
    while learner.step_count < run.num_steps:
        batch = next(feed)
        if batch is None:
            position.epoch, position.batch, seen = position.epoch + 1, 0, 0
            continue
        seen += 1
        if seen <= position.batch:
            continue  # a resumed run has learned from this one before
        losses.append(learner.step(batch, mean_of_workers=mean))
        position.batch = seen
        done = learner.step_count
        is_last = done == run.num_steps
        is_saved = is_last or done % run.checkpoint_every == 0
        if is_saved or done % run.report_every == 0:
            metrics = {
                "step": done,
                "epoch": position.epoch,
                "price": learner.multiplier.price,
                **loss_means(losses),
            }
            losses.clear()
            state = {"learner": learner.state_dict(), "position": asdict(position)}
            report(metrics, state if is_saved else None)


def build_model(dataset: Path, config: ConstrainedConfig, seed: int) -> ConstrainedModel:
    """Build a learner's model with fresh weights, its values at the means of the data."""
    manifest = read_manifest(dataset)
    torch.manual_seed(seed)
    model = ConstrainedModel(ObservationSizes.of(manifest.scenario.config), config)
    mean = _mean_outcome(dataset, manifest)
    model.start_at(mean.excess, mean.violation_rate)
    return model


def build_critic(dataset: Path, config: ConstrainedConfig, seed: int) -> ConstrainedModel:
    """Build a model for the power and violations of a given policy, at the means of the data."""
    manifest = read_manifest(dataset)
    torch.manual_seed(seed)
    model = ConstrainedModel(ObservationSizes.of(manifest.scenario.config), config)
    mean = _mean_outcome(dataset, manifest)
    model.start_at(mean.power, mean.violation_rate)
    return model


def best_author(dataset: Path, manifest: Manifest, config: ConstrainedConfig) -> str:
    """Return the logged policy to learn from: the one that came nearest to what is wanted.

    That is who drew the least power at equal use of CPU among those that kept the limit, as
    logged; if none did, who had the fewest violations.
    """
    outcomes = logged_outcomes(dataset, manifest)
    limit = config.constraint.limit
    able = [name for name, outcome in outcomes.items() if outcome.violation_rate <= limit]
    if able:
        return min(able, key=lambda name: outcomes[name].fair_power)
    return min(outcomes, key=lambda name: outcomes[name].violation_rate)


class Outcome(NamedTuple):
    """What some logged episodes came to."""

    power: float  # share of full power
    excess: float  # the same, without the share of CPU in use
    fair_power: float  # what it would be at the mean use of CPU of all episodes
    violation_rate: float


def logged_outcomes(dataset: Path, manifest: Manifest) -> dict[str, Outcome]:
    """Return what each author came to, in those of its episodes that had the least randomness.

    No two episodes have the same arrivals, and some authors met with more work than others. What
    more work draws is the same slope for all; it is measured within authors.
    """
    episodes = read_episodes(dataset)
    behaviour = episodes["behaviour"].to_numpy()
    purest: dict[str, NDArray[np.bool_]] = {}
    for author in manifest.authors:
        own = [
            i
            for i, b in enumerate(manifest.behaviours)
            if b.policy == author and (behaviour == i).any()
        ]
        if own:
            purest[author] = behaviour == min(own, key=lambda i: manifest.behaviours[i].epsilon)
    use, power_w = (episodes[name].to_numpy() for name in ("utilisation", "mean_power_w"))
    groups = [(use[is_in], power_w[is_in]) for is_in in purest.values()]
    slope_w = within_slope(groups)
    return {
        author: _outcome(episodes, manifest, is_in, slope_w) for author, is_in in purest.items()
    }


def within_slope(groups: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> float:
    """Return the slope of y over x that fits all groups best, each with a level of its own."""
    apart = [(x - x.mean(), y - y.mean()) for x, y in groups]
    spread = sum(float(x @ x) for x, _ in apart)
    return sum(float(x @ y) for x, y in apart) / spread if spread > 0.0 else 0.0


def _mean_outcome(dataset: Path, manifest: Manifest) -> Outcome:
    episodes = read_episodes(dataset)
    return _outcome(episodes, manifest, np.ones(len(episodes), np.bool_), slope_w=0.0)


def _outcome(
    episodes: pa.Table, manifest: Manifest, is_in: NDArray[np.bool_], slope_w: float
) -> Outcome:
    column = {
        name: episodes[name].to_numpy()[is_in]
        for name in ("mean_power_w", "utilisation", "violations", "arrived")
    }
    full_power_w = float(build_fleet(manifest.scenario.config.fleet).max_w.sum())
    power, use = float(column["mean_power_w"].mean()) / full_power_w, column["utilisation"].mean()
    more_use = float(use - episodes["utilisation"].to_numpy().mean())
    return Outcome(
        power=power,
        excess=power - float(use),
        fair_power=power - slope_w * more_use / full_power_w,
        violation_rate=float(column["violations"].sum()) / max(1.0, float(column["arrived"].sum())),
    )


def mean_of_workers(values: Tensor) -> Tensor:
    """Return the mean of a tensor over all workers."""
    values = values.clone()
    torch.distributed.all_reduce(values)
    return values / torch.distributed.get_world_size()


def config_from_dict(values: Mapping[str, Any]) -> ConstrainedConfig:
    """Build a config from its dictionary."""
    return ConstrainedConfig.from_dict(
        {
            **values,
            "network": NetworkConfig.from_dict(values["network"]),
            "constraint": LagrangeConfig.from_dict(values["constraint"]),
        }
    )


def read_state(checkpoint: ray.train.Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    with checkpoint.as_directory() as folder:
        state: dict[str, Any] = torch.load(
            Path(folder) / STATE, map_location="cpu", weights_only=True
        )
    return state
