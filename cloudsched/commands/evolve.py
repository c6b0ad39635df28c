"""`cloudsched evolve`: learn how a rule's numbers follow the site, as a policy for many sites."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cloudsched.commands.options import ScenarioOptions
from cloudsched.errors import ConfigError
from cloudsched.results import check_folder, provenance

if TYPE_CHECKING:
    from cloudsched.heuristics.parameters import HeuristicConfig
    from cloudsched.heuristics.tuning import TuningProgress

REPORT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Evolve(ScenarioOptions):
    """Learn a policy whose numbers follow the site, and write it as a bundle.

    It starts as a rule with fixed numbers. Evolution on whole episodes, drawn below the test seeds,
    finds how the numbers should follow load, unevenness of arrivals, size of jobs, wake delay and
    time of day. With --by-site it finds numbers for each kind of site of a mixture apart, and the
    policy learns to recognise the kind from what arrives. With --jam it finds the order in which
    jobs are best placed while they queue though no server sleeps, for a rule with or without
    numbers by site. The bundle is a network that corrects the rule found and so far leaves it as it
    is; PPO may train it further (`cloudsched train rllib_configs/ppo.py --start …`). Ctrl-C keeps
    what was found so far.

    Examples:
      cloudsched evolve --preset mixed_wake --workload mixture --start headroom@mixed_wake/mixture
      cloudsched evolve --preset mixed_wake --workload mixture --start headroom@mixed_wake/mixture \
--by-site --evaluations 6720 --episodes 16 --population 14 --step 0.06 --teachers headroom@mixture
      cloudsched evolve --preset mixed_wake --workload mixture --start runs/evolve --jam \
--evaluations 600 --out runs/jam
      cloudsched evaluate --preset mixed_wake --workload mixture --policy runs/jam
    """

    start: str = "power_aware+headroom"
    """The rule to start from: a name of `cloudsched policies`, a file of `tune-heuristic`, or a
    bundle of this command, to go on with it: with --jam any, else one without numbers by site."""
    teachers: tuple[str, ...] = ()
    """Further rules, with --by-site: each search begins with the one that does best there. May be
    bundles of earlier searches --by-site, to go on with them."""
    by_site: bool = False
    """Search for the numbers of each kind of site apart; only with workload `mixture`."""
    jam: bool = False
    """Search for the order in which jobs are placed in a jam; all other numbers stay."""
    rate_price: float = 0.0
    """What the SLA violation rate costs besides the reward, a tick. The reward counts violations;
    with this, a share of jobs that are late also weighs where few jobs arrive."""
    evaluations: int = 2000
    """Candidates to try, over all kinds of site; each search takes whole generations."""
    minutes: float | None = None
    """Stop after so many minutes, if that is sooner."""
    population: int = 20
    """Candidates in a generation."""
    episodes: int = 32
    """Episodes of each candidate, other ones in each generation."""
    step: float = 0.05
    """How far the first candidates lie from the start, as a share of each number's range."""
    seed: int = 0
    """Seed of the search and of its arrivals."""
    out: Path = field(default_factory=lambda: Path("runs/evolve"))
    """Folder of the bundle."""

    def run(self) -> None:
        """Evolve, and write the bundle."""
        self._check()
        from cloudsched.heuristics.adapting import SearchConfig, adapt_heuristic

        console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        scenario = self.scenario
        start = self._rule("start", self.start)
        teachers = [self._rule("teachers", name) for name in self.teachers]
        console.print(
            f"evolving {self.start} on {self.workload} (preset {self.preset}, load {self.load:g}), "
            f"seed {self.seed}"
        )
        config = SearchConfig(
            evaluations=self.evaluations,
            population=self.population,
            num_seeds=self.episodes,
            step=self.step,
            seed=self.seed,
            rate_price=self.rate_price,
        )
        watch = _Watch(console, self.evaluations, self.minutes)
        if self.jam:
            from cloudsched.heuristics.jams import learn_jam

            found = learn_jam(start, scenario, config, watch)
        elif self.by_site:
            from cloudsched.heuristics.sites import adapt_by_site

            found = adapt_by_site(
                start, scenario, config, lambda at: watch(at.search, f"{at} "), teachers
            )
        else:
            found = adapt_heuristic(start, scenario, config, watch)
        print(self._save(found, watch.done, time.monotonic() - watch.began))

    def _rule(self, option: str, name: str) -> HeuristicConfig:
        from cloudsched.bundle import load_bundle
        from cloudsched.heuristics.catalog import load_heuristic

        folder = Path(name)
        is_bundle = (folder / "bundle.json").exists()
        rule = load_bundle(folder).network.prior if is_bundle else load_heuristic(name)
        if rule is None:
            raise ConfigError(f"--{option} {name!r}: the policy in it corrects no rule.")
        if rule.sleep != "headroom":
            raise ConfigError(f"--{option} {name!r}: expected a rule that keeps headroom awake.")
        if rule.sites and option == "start" and not self.jam:
            raise ConfigError(
                f"--start {name!r}: it has numbers by site already; start from a plain rule, and "
                "give this one as one of the --teachers."
            )
        return rule

    def _save(self, found: HeuristicConfig, done: int, seconds: float) -> Path:
        import torch

        from cloudsched.bundle import Bundle, save_bundle
        from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network

        torch.manual_seed(self.seed)
        scenario = self.scenario
        settings = NetworkConfig(prior=found)
        network = build_network(ObservationSizes.of(scenario.config), settings)
        training = {
            "algorithm": "evolution",
            "start": self.start,
            "teachers": list(self.teachers),
            "scenario": scenario.to_dict(),
            "seed": self.seed,
            "evaluations": done,
            "episodes": done * self.episodes,
            "seconds": seconds,
            **provenance(),
        }
        bundle = Bundle(
            network=settings,
            cluster=scenario.config,
            weights=network.state_dict(),
            training=training,
        )
        return save_bundle(bundle, self.out)

    def _check(self) -> None:
        for name, low in (("evaluations", 1), ("population", 4), ("episodes", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"--{name} {getattr(self, name)}: expected at least {low}.")
        if not 0.0 < self.step <= 1.0:
            raise ConfigError(f"--step {self.step}: expected a number above 0 and at most 1.")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"--minutes {self.minutes}: expected more than 0.")
        if self.teachers and not self.by_site:
            raise ConfigError("--teachers: they teach searches --by-site; add that option.")
        if not 0.0 <= self.rate_price < math.inf:
            raise ConfigError(f"--rate-price {self.rate_price}: expected 0 or more.")
        if self.jam and self.by_site:
            raise ConfigError("--jam --by-site: expected one of them; --jam starts from the other.")
        check_folder(self.out)


class _Watch:
    """Prints where a search stands from time to time, and ends it when its time is up."""

    def __init__(self, console: Console, evaluations: int, minutes: float | None) -> None:
        self.began = self._reported = time.monotonic()
        self.done = 0
        self._console, self._evaluations = console, evaluations
        self._limit = float("inf") if minutes is None else 60.0 * minutes

    def __call__(self, state: TuningProgress, where: str = "") -> None:
        """Take note of a generation."""
        self.done, now = state.evaluations, time.monotonic()
        if now - self._reported > REPORT_SECONDS:
            self._reported = now
            self._console.print(
                f"{now - self.began:6.0f} s  {self.done:6d} of {self._evaluations} candidates: "
                f"{where}better than the start by {100 * state.generation_gain:.2f} % (median), "
                f"{100 * state.best_gain:.2f} % (best)"
            )
        if now - self.began > self._limit:
            raise KeyboardInterrupt
