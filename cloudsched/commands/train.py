"""`cloudsched train`: run an RLlib config and write the best policy as a bundle."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from rich.console import Console

from cloudsched.errors import ConfigError
from cloudsched.results import check_folder, provenance, write_files

if TYPE_CHECKING:
    from cloudsched.rl.training import RunState, TrainingRun, Weights

CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a policy with an RLlib config and write the best one as a bundle.

    The policy is measured on train seeds every few iterations, without exploration; the bundle
    holds the weights that did best there. Ctrl-C leaves a checkpoint and the bundle so far, and
    `--resume` goes on. A local Ray starts by itself; with RAY_ADDRESS set, that cluster is used.

    Examples:
      cloudsched train rllib_configs/ppo.py --minutes 3 --out runs/ppo
      cloudsched train rllib_configs/ppo.py --steps 5000000 --out runs/ppo --resume
      cloudsched evaluate --policy runs/ppo/bundle
    """

    config: tyro.conf.Positional[Path]
    """Python file with `build() -> AlgorithmConfig`, such as rllib_configs/ppo.py."""
    out: Path = field(default_factory=lambda: Path("runs/train"))
    """Folder for bundle, checkpoint, resolved config and progress.csv."""
    steps: int = 2_000_000
    """Decisions to train for, those before a resume included; schedules end there."""
    minutes: float | None = None
    """Stop after so many minutes, if that is sooner."""
    evaluate_every: int = 10
    """Iterations between measurements on train seeds."""
    num_seeds: int = 16
    """Train seeds for those measurements."""
    workload: str | None = None
    """Train on this workload instead of the config's."""
    preset: str | None = None
    """Train with this preset instead of the config's."""
    seed: int | None = None
    """Training seed instead of the config's."""
    hyperparameters: Path | None = None
    """JSON file of hyper-parameters that replace the config's, as `tune.ppo_asha` writes it."""
    start: Path | None = None
    """Bundle whose network training starts from, such as one of `cloudsched clone`."""
    resume: bool = False
    """Go on from the checkpoint in --out."""
    json: bool = False
    """Print the outcome as one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Train, and write the bundle."""
        self._check()
        config = load_config(self.config)
        changes = {"workload": self.workload, "preset": self.preset}
        config.environment(
            env_config={
                **config.env_config,
                **{key: value for key, value in changes.items() if value is not None},
            }
        )
        if self.seed is not None:
            config.debugging(seed=self.seed)
        from cloudsched.rl.training import (
            apply_hyperparameters,
            fit_schedules,
            read_hyperparameters,
        )

        if self.hyperparameters is not None:
            apply_hyperparameters(config, read_hyperparameters(self.hyperparameters))
        fit_schedules(config, self.steps)
        if self.start is not None:
            start_from(config, self.start)
        import ray

        logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # its advice is not for our users
        logging.basicConfig(format="%(message)s")
        logging.getLogger("cloudsched").setLevel(logging.INFO)  # how far cloning is, for example
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="error")
        # A supervisor's TERM is a Ctrl-C too; Ray's own handler would abort without a checkpoint.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            self._train(config)
        finally:
            ray.shutdown()

    def _train(self, config: Any) -> None:
        from cloudsched.rl.training import TrainingRun

        console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        resolved = json.dumps(config.to_dict(), indent=1, default=str)
        write_files({self.out / "config.json": resolved.encode()})
        console.print(f"config: {self.config} resolved in {self.out / 'config.json'}")
        console.print(f"scenario: {dict(config.env_config)}  seed: {config.seed}")
        algorithm = config.build_algo()
        is_interrupted = False
        try:
            run = TrainingRun(
                algorithm,
                self.out,
                num_seeds=self.num_seeds,
                keep=lambda weights, state: self._keep(run, weights, state),
            )
            if self.resume:
                run.restore()
            try:
                self._loop(run, console)
            except KeyboardInterrupt:
                is_interrupted = True
                console.print("interrupted: writing a checkpoint …")
            run.save()
            if run.state.best_return is None:
                run.evaluate()
            outcome = {**asdict(run.state), "bundle": str(self.out / "bundle")}
        finally:
            algorithm.stop()
        if is_interrupted:
            console.print(f"{self.out / 'bundle'} is usable; --resume goes on")
            raise KeyboardInterrupt
        if self.json:
            print(json.dumps(outcome, indent=1))
        else:
            print(self.out / "bundle")

    def _loop(self, run: TrainingRun, console: Console) -> None:
        started = saved = time.monotonic()
        limit = float("inf") if self.minutes is None else self.minutes * 60.0
        is_known = self.start is not None or run.starts_as_rule
        if is_known and run.state.iteration == 0:
            run.evaluate()  # what training starts from may stay the best
        while run.state.steps < self.steps and time.monotonic() - started < limit:
            result = run.iterate()
            if run.state.iteration % self.evaluate_every == 0:
                early = run.evaluate()
                rate = run.state.steps / max(run.state.seconds, 1e-9)
                console.print(
                    f"{run.state.seconds:6.0f} s  {early.steps:>10,} steps ({rate:,.0f}/s)  "
                    f"train seeds: return {early.episode_return:9.1f}  "
                    f"{early.mean_power_w:6.0f} W  {100 * early.sla_violation_rate:5.2f} % late"
                    f"{'  best' if early.is_best else ''}"
                )
                self._log(asdict(early))
            elif run.state.iteration == 1:
                sampled = result["env_runners"]["num_env_steps_sampled_lifetime"]
                console.print(f"first iteration done: {sampled:,.0f} steps")
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                run.save()
                saved = time.monotonic()
        run.evaluate()

    def _log(self, row: dict[str, Any]) -> None:
        path = self.out / "progress.csv"
        is_new = not path.exists()
        with path.open("a", encoding="utf-8") as file:
            if is_new:
                file.write(",".join(row) + "\n")
            file.write(",".join(map(str, row.values())) + "\n")

    def _keep(self, run: TrainingRun, weights: Weights, state: RunState) -> None:
        from cloudsched.bundle import Bundle, save_bundle

        bundle = Bundle.of_run(run, weights, config=str(self.config), **provenance())
        save_bundle(bundle, self.out / "bundle")

    def _check(self) -> None:
        for name in ("steps", "evaluate_every", "num_seeds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: expected at least 1.")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"--minutes {self.minutes}: expected more than 0.")
        check_folder(self.out)


def start_from(config: Any, folder: Path) -> None:
    """Let a config begin with the network of a bundle."""
    from cloudsched.bundle import WEIGHTS, load_bundle

    bundle = load_bundle(folder)
    if bundle.is_q_network or not hasattr(config, "initial_weights"):
        raise ConfigError(
            f"--start {str(folder)!r}: only PPO starts from a bundle, and only from one whose "
            "outputs are not action values."
        )
    config.training(initial_weights=str((folder / WEIGHTS).absolute()))
    config.rl_module(model_config={**config.model_config, "network": bundle.network.to_dict()})


def load_config(path: Path) -> Any:
    """Return what `build()` of a Python file returns."""
    if not path.is_file():
        raise ConfigError(f"No config file {str(path)!r}; rllib_configs/ holds ours.")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{str(path)!r} is not a Python file.")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "build", None)):
        raise ConfigError(f"{str(path)!r} has no build(); expected build() -> AlgorithmConfig.")
    return module.build()
