"""How fast offline learning is: recording, and gradient steps fed from disk, memory and d3rlpy.

`in_memory` is the same learner on transitions that lie in memory already: what feeding from disk
through Ray Data costs. `d3rlpy` is that library's `DiscreteCQL` on the same transitions, with a
perceptron and batch of the same size; ours then learns two heads, a prior and a policy, masks
illegal actions and reads from disk, d3rlpy learns one head from memory.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.data import ExecutionResources
from torch import Tensor

from cloudsched.config import Settings
from cloudsched.datasets.manifest import Manifest
from cloudsched.datasets.record import RecordingConfig, default_behaviours, record, with_ray_data
from cloudsched.datasets.schema import Arrays
from cloudsched.datasets.shard import MakePolicy
from cloudsched.datasets.transitions import TransitionReader
from cloudsched.envs.scenario import Scenario
from cloudsched.models.constrained import ConstrainedConfig
from cloudsched.models.constrained_learner import ConstrainedLearner
from cloudsched.models.memory import keep_freed_memory
from cloudsched.models.networks import NetworkConfig
from cloudsched.models.prepared import cut
from cloudsched.rl.feeding import endless, finished_batches
from cloudsched.rl.offline import build_model, reader

# d3rlpy and what it imports, apart from what this project brings itself.
D3RLPY = (
    *("d3rlpy", "gym", "gym-notices", "h5py", "structlog", "colorama", "dataclasses-json"),
    *("marshmallow", "typing-inspect", "mypy-extensions", "tqdm"),
    *("scikit-learn", "joblib", "threadpoolctl", "scipy", "narwhals"),
)
MEMORY_PIECES = 24  # row groups that the contenders in memory learn from

THREADS_END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class OfflineBenchConfig(Settings):
    """What is measured."""

    workload: str = "google_v2_sampled"
    """Workload of the recording, with the default preset."""
    num_episodes: int = 240
    """Episodes recorded while the clock runs."""
    batch_size: int = 1024
    """Transitions of a gradient step."""
    seconds: float = 5.0
    """Time for which each contender is measured, a round."""
    rounds: int = 5
    """Rounds over all contenders, in turns; medians of the rounds' ratios count."""
    num_threads: int = 1
    """Threads of a learner; reading has the other cores."""

    def __post_init__(self) -> None:
        for name in ("num_episodes", "batch_size", "rounds", "num_threads"):
            self._integer(name, low=1)
        self._number("seconds", low=0.0, exclusive=True)


Step = Callable[[], None]
"""Takes one gradient step."""


def run(
    config: OfflineBenchConfig, make_policy: MakePolicy, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure; needs a running Ray.

    Returns:
        `recorded_transitions_per_s`, `steps_per_s` by contender, `ratios` of our steps a second to
        those of `in_memory` and of `d3rlpy` (None with a reason in `absent` where it cannot run).
    """
    torch.set_num_threads(config.num_threads)
    keep_freed_memory()
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "data"
        manifest, speed = _record(config, folder, make_policy, report)
        contenders: dict[str, Step] = {
            "cloudsched": _fed_by_ray_data(config, folder, manifest, "set", stack),
            "in_memory": _fed_from_memory(config, folder, manifest, "set"),
            "cloudsched_flat": _fed_by_ray_data(config, folder, manifest, "flat", stack),
        }
        try:
            contenders["d3rlpy"] = _d3rlpy(config, folder, manifest)
        except ImportError as error:
            absent["d3rlpy"] = (
                f"{error}; it pins another Gymnasium than Ray does, so put it beside, not into, "
                f"the environment: pip install --no-deps --target DIR {' '.join(D3RLPY)}; then "
                "PYTHONPATH=$PYTHONPATH:DIR"
            )
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(config.rounds):
            for name, step in contenders.items():
                samples[name].append(_measure(step, config.seconds))
                report(f"{name}: {samples[name][-1]:,.1f} gradient steps/s")
    return {
        "recorded_transitions_per_s": speed,
        "steps_per_s": {name: float(np.median(speeds)) for name, speeds in samples.items()},
        "ratios": {
            "in_memory": _ratio(samples["cloudsched"], samples["in_memory"]),
            "d3rlpy": _ratio(samples["cloudsched_flat"], samples["d3rlpy"])
            if "d3rlpy" in samples
            else None,
        },
        "absent": absent,
        "config": asdict(config),
        "num_decisions": manifest.num_decisions,
    }


def _measure(step: Step, seconds: float) -> float:
    for _ in range(2):
        step()
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        step()
        count += 1
    return count / elapsed


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return float(np.median(np.array(ours) / np.array(theirs)))


def _record(
    config: OfflineBenchConfig,
    folder: Path,
    make_policy: MakePolicy,
    report: Callable[[str], None],
) -> tuple[Manifest, float]:
    """Record once to warm the workers up, and once with the clock running."""
    scenario = Scenario(workload=config.workload)
    count = len(default_behaviours())
    warm = RecordingConfig(num_episodes=2 * count, episodes_per_file=count // 2)
    short = Scenario(workload=config.workload, settings={"episode_ticks": 100})
    record(short, warm, folder.with_name("warm"), make_policy, _silent, {}, with_ray_data)
    start = time.perf_counter()
    full = RecordingConfig(num_episodes=config.num_episodes)
    manifest = record(scenario, full, folder, make_policy, _silent, {}, with_ray_data)
    speed = manifest.num_decisions / (time.perf_counter() - start)
    report(f"recording: {speed:,.0f} transitions/s")
    return manifest, speed


def _silent(_files: int, _decisions: int) -> None:
    pass


def _learner(config: OfflineBenchConfig, folder: Path, kind: str) -> ConstrainedLearner:
    learning = _learning(config, kind)
    model = build_model(folder, learning, seed=0)
    return ConstrainedLearner(model, learning, num_steps=1_000_000)


def _learning(config: OfflineBenchConfig, kind: str) -> ConstrainedConfig:
    return ConstrainedConfig(network=NetworkConfig(kind=kind), batch_size=config.batch_size)


def _fed_by_ray_data(
    config: OfflineBenchConfig, folder: Path, manifest: Manifest, kind: str, stack: ExitStack
) -> Step:
    learner = _learner(config, folder, kind)
    source = reader(folder, manifest, _learning(config, kind), seed=0)
    dataset = finished_batches(source, learner.module.preparation(), config.batch_size)
    # As Ray Train gives it to a worker: the cores of learners are not for reading.
    own = ExecutionResources(cpu=float(config.num_threads))
    dataset.context.execution_options.exclude_resources = own
    (shard,) = dataset.streaming_split(1)
    batches = endless(shard, "cpu")
    # Threads of Ray Data that outlive Ray take the process down with them.
    stack.callback(_await_threads, set(threading.enumerate()))
    stack.callback(batches.close)

    def step() -> None:
        batch = next(batches)
        learner.step(next(batches) if batch is None else batch)  # type: ignore[arg-type]

    return step


def _fed_from_memory(
    config: OfflineBenchConfig, folder: Path, manifest: Manifest, kind: str
) -> Step:
    learner = _learner(config, folder, kind)
    source = reader(folder, manifest, _learning(config, kind), seed=0)
    columns = _memory(source)
    prepared = learner.module.prepare(
        {name: torch.from_numpy(values) for name, values in columns.items()}
    )
    generator = np.random.default_rng(0)

    def shuffled() -> Generator[dict[str, Tensor]]:
        while True:
            order = torch.from_numpy(source.shuffled(columns["next_number"], generator))
            yield from cut(prepared, order, config.batch_size)

    batches = shuffled()
    return lambda: _discard(learner.step(next(batches)))


def _memory(source: TransitionReader) -> Arrays:
    parts = [source.read(p["file"], p["group"]) for p in source.pieces()[:MEMORY_PIECES]]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _d3rlpy(config: OfflineBenchConfig, folder: Path, manifest: Manifest) -> Step:
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        import d3rlpy
    columns = _memory(reader(folder, manifest, _learning(config, "set"), seed=0))
    parts = [columns[name].reshape(len(columns["action"]), -1) for name in ("servers", "jobs")]
    observations = np.concatenate([*parts, columns["context"]], axis=1)
    count = len(observations)
    ends = np.zeros(count, np.float32)
    ends[999::1000] = 1.0
    ends[-1] = 1.0
    with redirect_stdout(sys.stderr):  # it logs to stdout, which is for our document
        dataset = d3rlpy.dataset.MDPDataset(
            observations=observations,
            actions=columns["action"].reshape(-1, 1),
            rewards=columns["reward"].reshape(-1, 1),
            terminals=ends,
            action_space=d3rlpy.constants.ActionSpace.DISCRETE,
            action_size=manifest.scenario.config.num_actions,
        )
    width = NetworkConfig.flat_width
    algorithm = d3rlpy.algos.DiscreteCQLConfig(
        batch_size=config.batch_size,
        encoder_factory=d3rlpy.models.VectorEncoderFactory(hidden_units=[width, width]),
    ).create(device="cpu:0")
    with redirect_stdout(sys.stderr):
        algorithm.build_with_dataset(dataset)
    return lambda: _discard(algorithm.update(dataset.sample_transition_batch(config.batch_size)))


def _await_threads(known: set[threading.Thread]) -> None:
    """Wait until the threads that were not there before have ended, for a while."""
    deadline = time.monotonic() + THREADS_END_S
    for thread in set(threading.enumerate()) - known:
        thread.join(max(0.0, deadline - time.monotonic()))


def _discard(_: object) -> None:
    pass
