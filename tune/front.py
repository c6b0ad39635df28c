"""Whole fronts of power against SLA: every policy with more headroom and with less.

A policy is one point, and two points can rarely be compared: one draws less, the other is late less
often. Here each policy's headroom is shifted up and down, which trades one for the other. Beside
the first policy, each other one is then compared at the shift that, **on train seeds**, drew least
while it was late no more often than the first; the figures are those on test seeds.

Run: `python -m tune.front --preset mixed_wake --workload mixture --policies \
headroom@mixed_wake/mixture runs/evolve`
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from cloudsched.bundle import load_bundle
from cloudsched.cli import run_script
from cloudsched.commands.options import ScenarioOptions
from cloudsched.config import ClusterConfig
from cloudsched.errors import ConfigError
from cloudsched.evaluation import Episodes, Evaluation, first_seeds, paired_difference
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.plots import fronts, png
from cloudsched.policy import Policy
from cloudsched.results import check_folder, provenance, to_json, to_parquet, write_files

Curve = dict[float, Evaluation]


@dataclass(frozen=True, kw_only=True)
class Front(ScenarioOptions):
    """Draw the front of each policy and compare them at equal service.

    Example: python -m tune.front --preset mixed_wake --workload mixture \
--policies headroom@mixed_wake/mixture runs/evolve
    """

    policies: tuple[str, ...] = ("headroom@mixed_wake/mixture", "runs/evolve")
    """Headroom controllers: names, tuned files, or bundles that correct one. The first is what the
    others are compared with."""
    shifts: tuple[float, ...] = (-0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 1.5)
    """Servers' worth of headroom to add; zero must be among them."""
    num_seeds: int = 50
    """Train seeds and test seeds, each."""
    out: Path = field(default_factory=lambda: Path("runs/front"))
    """Folder for front.png, front.json and episodes.parquet."""

    def run(self) -> None:
        """Run every policy with every shift, and compare."""
        if 0.0 not in self.shifts or len(self.policies) < 2:
            raise ConfigError(
                f"--policies {self.policies} --shifts {self.shifts}: expected at least two policies"
                " and 0 among the shifts."
            )
        check_folder(self.out)
        console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        curves: dict[str, dict[str, Curve]] = {}
        for split in ("train", "test"):
            episodes = Episodes(self.scenario, first_seeds(split, self.num_seeds))
            curves[split] = {
                name: {
                    shift: episodes.run(
                        shifted(name, shift, self.scenario.config), name=f"{name} {shift:+g}"
                    )
                    for shift in self.shifts
                }
                for name in self.policies
            }
            console.print(f"{split} seeds done")
        rows = [self._compare(name, curves) for name in self.policies[1:]]
        document = {
            "scenario": self.scenario.to_dict(),
            "shifts": self.shifts,
            "fronts": {name: _points(curve) for name, curve in curves["test"].items()},
            "comparisons": rows,
            **provenance(),
        }
        everything = [one for curve in curves["test"].values() for one in curve.values()]
        files = {
            self.out / "front.png": png(
                fronts({name: list(curve.values()) for name, curve in curves["test"].items()})
            ),
            self.out / "front.json": to_json(document).encode(),
            self.out / "episodes.parquet": to_parquet(everything),
        }
        write_files(files)
        for path in files:
            print(path)

    def _compare(self, name: str, curves: Mapping[str, dict[str, Curve]]) -> dict[str, object]:
        """Compare a policy, at the shift that train seeds tell, with the first as it is."""
        base = curves["train"][self.policies[0]][0.0].summary["sla_violation_rate"].mean
        train = {shift: one.summary for shift, one in curves["train"][name].items()}
        kept = [s for s in train if train[s]["sla_violation_rate"].mean <= base]
        shift = min(kept, key=lambda s: train[s]["mean_power_w"].mean) if kept else max(train)
        ours, first = curves["test"][name][shift], curves["test"][self.policies[0]][0.0]
        paired = paired_difference(ours, first)
        names = ("mean_power_w", "sla_violation_rate", "episode_return")
        share = paired["mean_power_w"].mean / first.summary["mean_power_w"].mean
        print(
            f"{name} shifted by {shift:+g}, beside {self.policies[0]}: power "
            f"{_interval(paired, 'mean_power_w', 1.0, 'W')} ({100 * share:+.2f} %), violations "
            f"{_interval(paired, 'sla_violation_rate', 100.0, 'points')}, return "
            f"{_interval(paired, 'episode_return', 1.0, '')}"
        )
        return {"policy": name, "shift": shift, **{n: asdict(paired[n]) for n in names}}


def shifted(name: str, shift: float, cluster: ClusterConfig) -> Policy:
    """Return a policy with more headroom, or less."""
    if not (Path(name) / "bundle.json").exists():
        rule = load_heuristic(name)
        moved = rule.shifted("headroom_constant", shift)
        return HeuristicPolicy(cluster, moved)
    bundle = load_bundle(Path(name))
    prior = bundle.network.prior
    if prior is None:
        raise ConfigError(f"{name!r}: the bundle corrects no rule, so there is nothing to shift.")
    moved = prior.shifted("headroom_constant", shift)
    return bundle.replace_prior(moved).policy(cluster)


def _points(curve: Curve) -> list[dict[str, object]]:
    return [
        {
            "shift": shift,
            **{n: asdict(one.summary[n]) for n in ("mean_power_w", "sla_violation_rate")},
        }
        for shift, one in curve.items()
    ]


def _interval(paired: Mapping[str, object], name: str, factor: float, unit: str) -> str:
    estimate = paired[name]
    mean, low, high = (factor * getattr(estimate, part) for part in ("mean", "ci_low", "ci_high"))
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}] {unit}".rstrip()


if __name__ == "__main__":
    sys.exit(run_script(Front, "python -m tune.front"))
