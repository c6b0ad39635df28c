"""What knowing the next ticks would be worth: the yardstick for policies that predict.

Tunes the headroom controller again with the true arrivals of the next ticks in view, on episodes
drawn below the test seeds, and compares it with the controller that it started from, on test seeds.

Run: `python -m tune.foresight --preset slow_wake --workload google_v2_bursty`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from cloudsched.cli import run_script
from cloudsched.commands.options import ScenarioOptions
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.evaluation import TEST_SEEDS, TRAIN_SEEDS, Episodes, paired_difference
from cloudsched.heuristics.adapting import SearchConfig, tune_on_fresh_arrivals
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.foresight import ForesightPolicy
from cloudsched.heuristics.parameters import HeuristicConfig
from cloudsched.heuristics.tuning import TuningProgress, free_parameters
from cloudsched.results import check_folder, provenance, write_files


@dataclass(frozen=True, kw_only=True)
class Foresight(ScenarioOptions):
    """Measure what knowing the arrivals of the next ticks is worth to the headroom controller.

    Example: python -m tune.foresight --preset slow_wake --workload google_v2_bursty \
--policy headroom@slow_wake/google_v2_bursty
    """

    policy: str = "headroom@slow_wake/google_v2_bursty"
    """The controller without foresight, where the search starts: a name or a tuned file."""
    ticks: int = 6
    """How far it sees."""
    evaluations: int = 1000
    """Candidates to try; the controller without foresight should have had no fewer."""
    episodes: int = 48
    """Episodes of each candidate, other ones in each generation: where episodes differ as much as
    here, what fits the fifty train seeds fits no others."""
    population: int = 16
    """Candidates in a generation."""
    step: float = 0.05
    """How far the first candidates lie from the start, as a share of each number's range."""
    seed: int = 0
    """Seed of the search."""
    out: Path = field(default_factory=lambda: Path("runs/foresight.json"))
    """File to write."""

    def run(self) -> None:
        """Tune, compare, and write the outcome."""
        check_folder(self.out.parent)
        console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        start = load_heuristic(self.policy)

        def report(state: TuningProgress) -> None:
            median, best = 100 * state.generation_gain, 100 * state.best_gain
            console.print(
                f"{state.evaluations:5d} candidates: better than the start by {median:+.2f} % "
                f"(median), {best:+.2f} % (best)"
            )

        tuned = tune_on_fresh_arrivals(
            start.replace(headroom_trend=max(start.headroom_trend, 0.3)),
            [self.scenario],
            TRAIN_SEEDS,
            free_parameters(start, is_whole=True),
            SearchConfig(
                evaluations=self.evaluations,
                population=self.population,
                num_seeds=self.episodes,
                step=self.step,
                seed=self.seed,
            ),
            report,
            partial(_seeing, num_ticks=self.ticks),
        )
        episodes = Episodes(self.scenario, TEST_SEEDS)
        blind = episodes.run(HeuristicPolicy(episodes.env.config, start), name=self.policy)
        seeing = episodes.run(
            ForesightPolicy(episodes.env, tuned.config, self.ticks), name="with foresight"
        )
        worth = paired_difference(seeing, blind)["episode_return"]
        for one in (blind, seeing):
            summary = one.summary
            console.print(
                f"{one.policy}: {summary['mean_power_w'].mean:.0f} W, "
                f"{100 * summary['sla_violation_rate'].mean:.2f} % late, return "
                f"{summary['episode_return'].mean:.0f}"
            )
        print(
            f"knowing the next {self.ticks} ticks is worth {worth.mean:.0f} "
            f"[{worth.ci_low:.0f}, {worth.ci_high:.0f}] of return"
        )
        document = {
            "policy": self.policy,
            "scenario": self.scenario.to_dict(),
            "ticks": self.ticks,
            "evaluations": tuned.evaluations,
            "parameters": tuned.config.to_dict(),
            "worth": asdict(worth),
            **provenance(),
        }
        write_files({self.out: f"{json.dumps(document, indent=1)}\n".encode()})


def _seeing(
    env: ClusterVectorEnv, configs: Sequence[HeuristicConfig], num_ticks: int
) -> ForesightPolicy:
    return ForesightPolicy(env, configs, num_ticks)


if __name__ == "__main__":
    sys.exit(run_script(Foresight, "python -m tune.foresight"))
