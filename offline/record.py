"""Step 1 of 4: record the decisions of many policies as a dataset.

Run: `python -m offline.record --workload diurnal --out runs/offline/diurnal`
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cloudsched.bench.memory import PeakMemory
from cloudsched.cli import run_script
from cloudsched.commands.options import ScenarioOptions
from cloudsched.commands.output import print_json, print_settings
from cloudsched.commands.policies import make_policy
from cloudsched.datasets.manifest import Behaviour, Manifest
from cloudsched.datasets.record import RecordingConfig, default_behaviours, record, with_ray_data
from cloudsched.results import provenance
from cloudsched.sweeps.cluster import check_shared, connected, output_folder


@dataclass(frozen=True, kw_only=True)
class Record(ScenarioOptions):
    """Log every decision of some policies, with the exact probability of each, as Parquet.

    Episodes take turns between the behaviours, each with its own arrivals (seeds from 50 to
    999,999: never the test seeds, nor the train seeds on which policies are compared). Ray Data
    spreads them over all cores; decisions stream to disk, so memory does not grow. The folder
    appears when it is whole.

    Examples:
      python -m offline.record --workload diurnal --out runs/offline/diurnal
      python -m offline.record --behaviours rr+sleep~0.1 runs/ppo/bundle~0.05 --episodes 100
    """

    out: Path = field(default_factory=lambda: Path("runs/offline/data"))
    """A new folder for the dataset."""
    episodes: int = RecordingConfig.num_episodes
    """Episodes to record."""
    behaviours: tuple[str, ...] = ()
    """POLICY or POLICY~EPSILON, where EPSILON is the share of decisions drawn at random; a policy
    is a name (`cloudsched policies`) or the folder of a bundle. Default: rr, sjf, best_fit and
    power_aware, each without sleep and with +sleep, +band and +headroom, at 0, 0.05 and 0.2."""
    episodes_per_file: int = RecordingConfig.episodes_per_file
    """Episodes that share a file, and run side by side."""
    seed: int = RecordingConfig.seed
    """Seed of the choice of arrivals and of random decisions."""
    address: str | None = None
    """Ray cluster to record on; a local Ray starts by itself."""
    json: bool = False
    """Print the outcome as one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Record, with progress on stderr."""
        scenario = self.scenario
        behaviours = tuple(_absolute(Behaviour.parse(text)) for text in self.behaviours)
        config = RecordingConfig(
            num_episodes=self.episodes,
            episodes_per_file=self.episodes_per_file,
            seed=self.seed,
            behaviours=behaviours or default_behaviours(),
        )
        for behaviour in config.behaviours:
            make_policy(behaviour.policy, scenario.config)  # refuses unknown names before work
        out = output_folder(self.out)
        print_settings(
            scenario,
            [config.seed],
            is_json=self.json,
            behaviours=" ".join(behaviour.name for behaviour in config.behaviours),
            episodes=config.num_episodes,
        )
        num_files = -(-config.num_episodes // config.episodes_per_file)
        with connected(self.address):
            check_shared(out.parent)
            start = time.monotonic()

            def report(done: int, decisions: int) -> None:
                rate = decisions / (time.monotonic() - start)
                print(
                    f"file {done} of {num_files}: {decisions:,} decisions, {rate:,.0f} a second",
                    file=sys.stderr,
                    flush=True,
                )

            with PeakMemory() as memory:
                manifest = record(
                    scenario, config, out, make_policy, report, provenance(), with_ray_data
                )
        self._print(manifest, memory.peak_mb)

    def _print(self, manifest: Manifest, peak_mb: float) -> None:
        if self.json:
            print_json(
                {
                    "dataset": str(self.out),
                    "num_decisions": manifest.num_decisions,
                    "num_episodes": manifest.num_episodes,
                    "action_counts": dict(manifest.action_counts),
                    "peak_memory_mb": round(peak_mb),
                }
            )
            return
        counts = ", ".join(f"{count:,} {kind}" for kind, count in manifest.action_counts.items())
        print(
            f"{manifest.num_decisions:,} decisions ({counts}) of {manifest.num_episodes} episodes"
        )
        if peak_mb:
            print(f"{peak_mb:,.0f} MB of memory at the peak, Ray included")
        print(self.out)


def _absolute(behaviour: Behaviour) -> Behaviour:
    """Workers may run elsewhere, so a bundle is named by its whole path."""
    path = Path(behaviour.policy)
    return behaviour.replace(policy=str(path.absolute())) if path.exists() else behaviour


if __name__ == "__main__":
    sys.exit(run_script(Record, "python -m offline.record"))
