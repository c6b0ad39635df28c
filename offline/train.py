"""Step 3 of 4: learn a policy from a dataset alone, with violations below a limit.

Run: `python -m offline.train runs/offline/diurnal --cost-limit 0.01 --out runs/offline/policy`
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from cloudsched.cli import run_script
from cloudsched.commands.output import print_json
from cloudsched.datasets.check import require_sound
from cloudsched.errors import ConfigError
from cloudsched.models.constrained import ConstrainedConfig
from cloudsched.models.lagrange import LagrangeConfig
from cloudsched.models.networks import NetworkConfig
from cloudsched.rl.offline import PROGRESS, RUN, OfflineRunConfig, train
from cloudsched.sweeps.cluster import check_shared, connected, output_folder
from cloudsched.sweeps.offline import CLONE, save_bundles


@dataclass(frozen=True, kw_only=True)
class Train:
    """Learn, with Ray Train, the policy of least power whose violation rate keeps a limit.

    The data streams from disk through Ray Data. The outcome is an ordinary bundle, and beside it
    lies a clone of the data for comparison. Ctrl-C leaves the last checkpoint, and --resume goes on
    from it to the same weights as if nothing had happened. A local Ray starts by itself.

    Examples:
      python -m offline.train runs/offline/diurnal --cost-limit 0.02 --out runs/offline/policy
      cloudsched evaluate --policy runs/offline/policy/bundle --workload diurnal
    """

    dataset: tyro.conf.Positional[Path]
    """Folder that offline.record wrote."""
    out: Path = field(default_factory=lambda: Path("runs/offline/policy"))
    """Folder for bundle, clone, checkpoints and progress.jsonl."""
    cost_limit: float = LagrangeConfig.limit
    """Largest violation rate: 0.01 is one job in a hundred."""
    pessimism: float = ConstrainedConfig.pessimism
    """How much costlier actions look that the data lacks."""
    temperature: float = ConstrainedConfig.temperature
    """Price of leaving the data: ticks of full power that one nat of divergence is worth."""
    steps: int = OfflineRunConfig.num_steps
    """Gradient steps."""
    batch_size: int = ConstrainedConfig.batch_size
    """Transitions of a gradient step, over all workers."""
    network: str = NetworkConfig.kind
    """set: weights shared over servers and jobs, for clusters of any size; flat: a perceptron."""
    workers: int = OfflineRunConfig.num_workers
    """Workers that share each batch (distributed data parallel)."""
    threads: int = OfflineRunConfig.num_threads
    """Threads of each worker."""
    gpu: bool = False
    """Give each worker a GPU."""
    checkpoint_every: int = OfflineRunConfig.checkpoint_every
    """Gradient steps between two checkpoints."""
    seed: int = OfflineRunConfig.seed
    """Training seed."""
    resume: bool = False
    """Go on from the last checkpoint in --out."""
    address: str | None = None
    """Ray cluster to train on; a local Ray starts by itself."""
    json: bool = False
    """Print the outcome as one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Train, with progress on stderr, and write the bundles."""
        config = ConstrainedConfig(
            network=NetworkConfig(kind=self.network),
            constraint=LagrangeConfig(limit=self.cost_limit),
            pessimism=self.pessimism,
            temperature=self.temperature,
            batch_size=self.batch_size,
        )
        run = OfflineRunConfig(
            num_steps=self.steps,
            checkpoint_every=self.checkpoint_every,
            seed=self.seed,
            num_workers=self.workers,
            num_threads=self.threads,
            use_gpu=self.gpu,
        )
        out = output_folder(self.out)
        if (out / RUN).exists() and not self.resume:
            raise ConfigError(f"{self.out} holds a run; --resume goes on, or choose another --out.")
        if self.resume and not (out / RUN).exists():
            raise ConfigError(f"--resume: no run in {str(self.out)!r}; leave --resume out.")
        manifest = require_sound(self.dataset)
        print(f"config: {config.to_dict()}", file=sys.stderr)
        print(
            f"data: {manifest.num_decisions:,} decisions of {manifest.num_episodes} episodes, "
            f"{len(manifest.behaviours)} behaviours, {manifest.scenario.workload}",
            file=sys.stderr,
            flush=True,
        )
        out.mkdir(parents=True, exist_ok=True)
        with connected(self.address), told(out / PROGRESS, run.num_steps):
            check_shared(out)
            state = train(self.dataset, config, run, out)
        bundle = save_bundles(self.dataset, config, run, state["learner"], out)
        if self.json:
            print_json(
                {"bundle": str(bundle), "clone": str(self.out / CLONE), "steps": run.num_steps}
            )
        else:
            print(bundle)


@contextmanager
def told(path: Path, num_steps: int) -> Iterator[None]:
    """Print what a run adds to its progress file, until it ends."""
    has_ended = threading.Event()
    seen = path.stat().st_size if path.exists() else 0

    def tell() -> None:
        nonlocal seen
        while not has_ended.wait(1.0):
            if not path.exists():
                continue
            with path.open(encoding="utf-8") as file:
                file.seek(seen)
                lines = file.readlines()
                seen = file.tell()
            for line in lines:
                row = json.loads(line)
                print(
                    f"step {row['step']:>6} of {num_steps}: violations "
                    f"{100 * row['estimated_cost']:5.2f} %, power beyond use "
                    f"{100 * row['estimated_excess']:5.2f} % of full, price {row['price']:.2f}, "
                    f"clone {row['prior']:.3f} nats",
                    file=sys.stderr,
                    flush=True,
                )

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join(timeout=5.0)


if __name__ == "__main__":
    sys.exit(run_script(Train, "python -m offline.train"))
