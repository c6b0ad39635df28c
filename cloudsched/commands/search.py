"""What the searches in `tune/` share: their options, and how they run and end."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cloudsched.commands.output import console, print_json
from cloudsched.commands.train import load_config
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.rl.training import fit_schedules
from cloudsched.sweeps import search
from cloudsched.sweeps.cluster import check_shared, connected, output_folder, quiet
from cloudsched.sweeps.specs import config_digest


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """A search of hyper-parameters; each trial is a training."""

    config: Path = field(default_factory=lambda: Path("rllib_configs/ppo.py"))
    """Python file with `build() -> AlgorithmConfig`, whose hyper-parameters are searched."""
    workload: str = Scenario.workload
    """What arrives (`cloudsched workloads` lists them)."""
    preset: str = Scenario.preset
    """Rules of the cluster (`cloudsched presets` lists them)."""
    trials: int = 8
    """Trainings."""
    steps: int = 500_000
    """Decisions of the longest training."""
    reports: int = 10
    """Measurements on train seeds in the longest training."""
    num_seeds: int = 16
    """Train seeds of such a measurement."""
    gpus: float = 0.0
    """GPUs, or the share of one, for each training."""
    episode_ticks: int | None = None
    """Length of an episode, instead of the preset's."""
    out: Path = field(default_factory=lambda: Path("runs/search"))
    """Folder for everything; on a cluster one that every node sees."""
    address: str | None = None
    """A Ray cluster (`auto` for the one on this machine); RAY_ADDRESS or a local one by default."""
    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    @abstractmethod
    def tuner(self) -> Any:
        """Return what runs the search, without running it."""

    def run(self) -> None:
        """Search, then save and print what was found."""
        for name in ("trials", "steps", "reports", "num_seeds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: expected at least 1.")
        folder, algorithm = output_folder(self.out), self.algorithm()
        build = replace(self, config=self.config.absolute()).tuner
        what = {
            "search": type(self).__name__,
            "config": self.config.name,
            "config_digest": config_digest(algorithm),
            **{name: getattr(self, name) for name in ("workload", "preset", "trials", "steps")},
        }
        with connected(self.address) as context:
            check_shared(folder)
            print(f"search: {what}\nfolder: {folder}", file=sys.stderr)
            if context.dashboard_url:
                print(f"dashboard: http://{context.dashboard_url}", file=sys.stderr, flush=True)
            results = search.fit_or_resume(build, folder, what)
            # All of it while connected: in a Ray job, the code goes when the driver lets go of Ray.
            self._finish(search.save(results, folder, what))

    def _finish(self, document: dict[str, Any]) -> None:
        if self.json:
            print_json(document)
            return
        console().print(search.table(document))
        for path in document["files"].values():
            print(path)

    def algorithm(self) -> Any:
        """Return the config that the trials start from."""
        quiet()
        config = load_config(self.config)
        ticks = self.episode_ticks
        scenario = Scenario(
            preset=self.preset,
            workload=self.workload,
            settings={} if ticks is None else {"episode_ticks": ticks},
        )
        _ = scenario.config  # checks the names and values
        config.environment(env_config=scenario.to_dict())
        config.learners(num_gpus_per_learner=self.gpus)
        fit_schedules(config, self.steps)
        return config

    def make_tuner(self, search_space: dict[str, Any], scheduler: Any) -> Any:
        """Combine what is searched with how."""
        return search.make_tuner(
            algorithm=self.algorithm(),
            search_space=search_space,
            scheduler=scheduler,
            num_trials=self.trials,
            steps=self.steps,
            reports=self.reports,
            num_seeds=self.num_seeds,
            folder=output_folder(self.out),
        )
