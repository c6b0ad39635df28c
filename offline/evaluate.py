"""Step 4 of 4: say how good policies would be, from the dataset alone, and how good they are.

Run: `python -m offline.evaluate runs/offline/diurnal --policies runs/offline/policy/bundle`
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.table import Table

from cloudsched.cli import run_script
from cloudsched.commands.output import console, print_json
from cloudsched.commands.policies import make_policy
from cloudsched.datasets.check import require_sound
from cloudsched.datasets.manifest import Manifest
from cloudsched.datasets.transitions import TransitionConfig, TransitionReader
from cloudsched.errors import ConfigError
from cloudsched.evaluation import TEST_SEEDS
from cloudsched.models.constrained import ConstrainedConfig
from cloudsched.ope.estimators import OffPolicyReport, off_policy_report
from cloudsched.ope.fqe import EvaluationConfig, fit_critic
from cloudsched.ope.trajectories import read_ticks
from cloudsched.ope.truth import true_value
from cloudsched.results import provenance, to_json, write_files
from cloudsched.rl.offline import build_critic
from cloudsched.sim.fleet import build_fleet
from cloudsched.statistics import Estimate

HORIZONS = 6  # in units of 1 / (1 - gamma); what comes later weighs less than 0.3 %
METHODS = ("fitted_q", "importance", "doubly_robust")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Estimate power and violations of policies from logged decisions, and compare with the truth.

    Three estimates, each with a 95 % interval: fitted Q evaluation, weighted importance sampling
    and doubly robust. Where too few logged episodes did what the policy would do, a warning says
    that the last two have no support. The value is a discounted mean over the ticks that follow the
    start of an episode; power includes what requests to sleep cost in the reward.

    Examples:
      python -m offline.evaluate runs/offline/diurnal --policies runs/offline/policy/bundle
      python -m offline.evaluate runs/offline/diurnal --policies best_fit+sleep --truth-seeds 0
    """

    dataset: tyro.conf.Positional[Path]
    """Folder that offline.record wrote."""
    policies: tuple[str, ...]
    """Names of policies (`cloudsched policies`) or folders of bundles."""
    gamma: float = ConstrainedConfig.gamma
    """Discount of a tick: 0.97 looks about 33 ticks ahead."""
    steps: int = EvaluationConfig.num_steps
    """Gradient steps of fitted Q evaluation, for each policy."""
    seed: int = EvaluationConfig.seed
    """Seed of the critic's weights."""
    truth_seeds: int = 200
    """Simulated episodes for the truth, from seed 1000000 on; 0 for none."""
    threads: int = 1
    """Threads of the critic."""
    out: Path | None = None
    """File to save the JSON document in."""
    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Estimate, simulate and print."""
        if not 0.0 < self.gamma < 1.0:
            raise ConfigError(f"--gamma {self.gamma}: expected a number between 0 and 1.")
        manifest = require_sound(self.dataset)
        for name in self.policies:
            make_policy(name, manifest.scenario.config)  # refuses unknown names before work
        torch.set_num_threads(self.threads)
        entries = {}
        for name in self.policies:
            print(f"{name}: fitting a critic", file=sys.stderr, flush=True)
            entries[name] = self._entry(name, manifest)
        document = {
            "schema": "cloudsched.off_policy.v1",
            "dataset": str(self.dataset),
            "gamma": self.gamma,
            "policies": entries,
            **provenance(),
        }
        if self.out is not None:
            write_files({self.out: to_json(document).encode()})
        if self.json:
            print_json(document)
            return
        console().print(_table(entries))
        for name, entry in entries.items():
            if entry["warning"]:
                print(f"{name}: {entry['warning']}")
        if self.truth_seeds:
            good = sum(map(_is_honest, entries.values()))
            print(f"the truth inside, or a warning given: {good} of {len(entries)} policies")

    def _entry(self, name: str, manifest: Manifest) -> dict[str, Any]:
        scenario = manifest.scenario
        policy = make_policy(name, scenario.config)
        config = ConstrainedConfig(gamma=self.gamma, pessimism=0.0)
        reader = TransitionReader(
            self.dataset,
            manifest,
            TransitionConfig(gamma=self.gamma, num_ticks=config.num_ticks, reward="power"),
            seed=self.seed,
        )
        model = build_critic(self.dataset, config, self.seed)
        run = EvaluationConfig(num_steps=self.steps, seed=self.seed)

        def report(metrics: dict[str, float]) -> None:
            print(
                f"{name}: step {metrics['step']:.0f} of {self.steps}", file=sys.stderr, flush=True
            )

        critic = fit_critic(model, reader, policy, config, run, report)
        max_ticks = round(HORIZONS / (1.0 - self.gamma))
        ticks = read_ticks(
            self.dataset, manifest, policy, critic, gamma=self.gamma, max_ticks=max_ticks
        )
        truth = None
        if self.truth_seeds:
            first = TEST_SEEDS[0]
            truth = true_value(
                scenario,
                make_policy(name, scenario.config),
                range(first, first + self.truth_seeds),
                gamma=self.gamma,
                arrivals_per_tick=manifest.arrivals_per_tick,
                max_ticks=max_ticks,
            )
        full_power_w = float(build_fleet(scenario.config.fleet).max_w.sum())
        return _document(off_policy_report(ticks, self.gamma), truth, full_power_w)


def _document(
    report: OffPolicyReport, truth: dict[str, Estimate] | None, full_power_w: float
) -> dict[str, Any]:
    estimates = {method: _in_units(getattr(report, method), full_power_w) for method in METHODS}
    entry: dict[str, Any] = {
        "estimates": estimates,
        "effective_episodes": report.effective_episodes,
        "agreement": report.agreement,
        "has_support": report.has_support,
        "warning": None
        if report.has_support
        else (
            f"no support: {report.effective_episodes:.1f} effective episodes; importance "
            "sampling and doubly robust mean little here"
        ),
        "truth": None,
        "is_inside": None,
    }
    if truth is not None:
        entry["truth"] = _in_units(truth, full_power_w)
        entry["is_inside"] = {
            method: {
                measure: estimates[method][measure]["ci_low"]
                <= entry["truth"][measure]["mean"]
                <= estimates[method][measure]["ci_high"]
                for measure in ("power_w", "cost_rate")
            }
            for method in METHODS
        }
    return entry


def _is_honest(entry: dict[str, Any]) -> bool:
    """Whether the doubly robust intervals of power and cost hold the truth, or were warned of."""
    return not entry["has_support"] or all(entry["is_inside"]["doubly_robust"].values())


def _in_units(estimates: dict[str, Estimate], full_power_w: float) -> dict[str, dict[str, float]]:
    reward = estimates["reward"]
    power = Estimate(
        mean=-reward.mean * full_power_w,
        ci_low=-reward.ci_high * full_power_w,
        ci_high=-reward.ci_low * full_power_w,
    )
    return {"power_w": asdict(power), "cost_rate": asdict(estimates["cost"])}


def _table(entries: dict[str, Any]) -> Table:
    table = Table("policy", "estimate", title="off-policy", title_justify="left")
    for column in ("power, W", "truth, W", "cost, % of jobs", "truth, %"):
        table.add_column(column, justify="right")
    for name, entry in entries.items():
        for method in METHODS:
            cells = []
            for measure, factor in (("power_w", 1.0), ("cost_rate", 100.0)):
                value = entry["estimates"][method][measure]
                digits = 0 if factor == 1.0 else 2
                cells.append(
                    f"{factor * value['mean']:,.{digits}f} "
                    f"[{factor * value['ci_low']:,.{digits}f}, "
                    f"{factor * value['ci_high']:,.{digits}f}]"
                )
                truth = entry["truth"]
                is_inside = truth is not None and entry["is_inside"][method][measure]
                cells.append(
                    ""
                    if truth is None
                    else f"{factor * truth[measure]['mean']:,.{digits}f}"
                    f"{' inside' if is_inside else ' OUTSIDE'}"
                )
            is_weak = method != "fitted_q" and not entry["has_support"]
            table.add_row(name, method + (" (no support)" if is_weak else ""), *cells)
    return table


if __name__ == "__main__":
    sys.exit(run_script(Evaluate, "python -m offline.evaluate"))
