"""`cloudsched improve`: try other decisions on the same arrivals, and learn which are better."""

from __future__ import annotations

import math
import signal
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from cloudsched.commands.options import ScenarioOptions
from cloudsched.errors import ConfigError
from cloudsched.results import check_folder, provenance

if TYPE_CHECKING:
    from cloudsched.lookahead.improved import Improved
    from cloudsched.lookahead.improvement import Improvement, Round
    from cloudsched.lookahead.trials import Trial

REPORT_SECONDS = 10.0
FIRST_TRIAL_SEED = 500_000  # far from the 50 train seeds that rules are tuned on, and no test seeds
ALGORITHM = "lookahead"


@dataclass(frozen=True, kw_only=True)
class Improve(ScenarioOptions):
    """Improve a rule or a policy by lookahead, and write it as a bundle.

    In every round many clusters run. From some of their states branches set out: each takes another
    decision than the best policy so far, which then decides again, on the same arrivals. A network
    learns from the branches of the last rounds how much better or worse each decision is, and the
    next round's clusters are run by what decides so, to see where that leads. The best policy on
    trial episodes, none of them of the test seeds, is kept; where the rule tells kinds of sites
    apart (a bundle of `evolve --by-site`), it is trusted only with those where it did better. Ray's
    workers collect the branches: a local Ray starts by itself; with RAY_ADDRESS set, that cluster
    is used. Ctrl-C keeps what was found so far.

    Examples:
      cloudsched improve --start headroom@poisson --workload poisson
      cloudsched improve --start runs/evolve --preset mixed_wake --workload mixture --rounds 6
      cloudsched evaluate --policy runs/improve --workload poisson
    """

    start: str = "power_aware+headroom"
    """What to improve: a name of `cloudsched policies`, a file of `tune-heuristic`, or a bundle of
    `evolve` or of this command, to go on with it."""
    rounds: int = 3
    """Rounds; with 0, what a bundle of this command learned stays, and trials only choose anew how
    far it is trusted, for another --rate-price or at other sites."""
    branches: int = 400_000
    """Other decisions tried in each round."""
    follow: Literal["best", "start"] = "best"
    """Whose decisions follow in branches: `best`, the best policy so far, or `start`, which is
    several times as fast where it is a rule."""
    trials: int = 128
    """Episodes on which policies are compared after each round."""
    rate_price: float = 0.0
    """What the SLA violation rate costs in trials besides the reward, a tick, as for `evolve`."""
    width: int = 32
    """Width of the network's embeddings of servers, jobs and pairs of them."""
    workers: int | None = None
    """Processes that try decisions, each with arrivals of its own; one for each CPU if None. What
    is learned depends on their number, as it does on the seed."""
    seed: int = 0
    """Seed of the network, of arrivals and of all draws."""
    address: str | None = None
    """A Ray cluster (`auto` for the one on this machine); RAY_ADDRESS or a local one by default."""
    out: Path = field(default_factory=lambda: Path("runs/improve"))
    """Folder of the bundle."""

    def run(self) -> None:
        """Improve, and write the bundle."""
        if self.rounds < 0:
            raise ConfigError(f"--rounds {self.rounds}: expected at least 0.")
        for name in ("branches", "trials", "width", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name} {value}: expected at least 1.")
        if not 0.0 <= self.rate_price < math.inf:
            raise ConfigError(f"--rate-price {self.rate_price}: expected 0 or more.")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: expected at least 0.")
        check_folder(self.out)
        scenario, start = self.scenario, self._start()
        if self.rounds == 0 and start.weights is None:
            raise ConfigError(
                f"--rounds 0 --start {self.start!r}: expected a bundle of `cloudsched improve`; "
                "nothing else has learned yet what could be trusted more or less."
            )
        import ray

        from cloudsched.lookahead.improvement import Improvement, ImprovementConfig
        from cloudsched.models.threads import one_thread
        from cloudsched.sweeps.cluster import connected

        console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        console.print(
            f"improving {self.start} on {self.workload} (preset {self.preset}, load {self.load:g}),"
            f" seed {self.seed}"
        )
        watch = _Watch(console)
        # Minibatches are small: torch's threads would wait for each other more than they work.
        with connected(self.address), one_thread():
            # A supervisor's TERM is a Ctrl-C too; Ray's own handler would abort.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            config = ImprovementConfig(
                num_branches=self.branches,
                follow=self.follow,
                num_workers=self.workers or max(1, int(ray.cluster_resources().get("CPU", 1))),
                num_trials=self.trials,
                first_trial_seed=FIRST_TRIAL_SEED,
                rate_price=self.rate_price,
            )
            if self.rounds == 0:
                rule = replace(start, weights=None)
                improvement = Improvement(scenario, rule, config, self.seed, watch)
                trial = improvement.trust(start)
                watch.tell_trial("trust chosen anew", trial)
                self._save(improvement, {"trial": asdict(trial)}, watch.seconds)
            else:
                self._improve(Improvement(scenario, start, config, self.seed, watch), watch)
        print(self.out)

    def _improve(self, improvement: Improvement, watch: _Watch) -> None:
        """Run the rounds, and write the bundle after each."""
        rounds: list[Round] = []
        try:
            for number in range(1, self.rounds + 1):
                rounds.append(improvement.round(number))
                watch.tell_round(rounds[-1], self.rounds)
                found = {"rounds": [asdict(one) for one in rounds]}
                self._save(improvement, found, watch.seconds)
        except KeyboardInterrupt:
            if not rounds:
                raise
            watch.tell("interrupted: keeping what was found so far")

    def _start(self) -> Improved:
        """Return what to improve."""
        from cloudsched.bundle import load_bundle
        from cloudsched.heuristics.catalog import load_heuristic
        from cloudsched.lookahead.improved import Improved
        from cloudsched.models.networks import NetworkConfig

        folder = Path(self.start)
        settings = NetworkConfig(width=self.width, pair_width=self.width, is_balanced=False)
        if (folder / "bundle.json").exists():
            bundle = load_bundle(folder)
            rule = bundle.network.prior
            if rule is None:
                raise ConfigError(f"--start {self.start!r}: the policy in it corrects no rule.")
            if bundle.training.get("algorithm") == ALGORITHM:
                return Improved(network=bundle.network, weights=dict(bundle.weights))
        else:
            rule = load_heuristic(self.start)
        return Improved(network=settings.replace(prior=rule), weights=None)

    def _save(self, improvement: Improvement, found: dict[str, Any], seconds: float) -> None:
        from cloudsched.bundle import Bundle, save_bundle

        best = improvement.best
        training = {
            "algorithm": ALGORITHM,
            "start": self.start,
            "scenario": self.scenario.to_dict(),
            "seed": self.seed,
            "seconds": seconds,
            **found,
            **provenance(),
        }
        bundle = Bundle(
            network=best.network,
            cluster=self.scenario.config,
            weights=improvement.weights,
            is_q_network=True,
            training=training,
        )
        save_bundle(bundle, self.out)


class _Watch:
    """Prints what goes on from time to time."""

    def __init__(self, console: Console) -> None:
        self._began = self._reported = time.monotonic()
        self._console = console

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def __call__(self, line: str) -> None:
        """Take note of something that goes on."""
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self.tell(line)

    def tell_round(self, one: Round, num_rounds: int) -> None:
        """Print what a round found."""
        what = f"round {one.number} of {num_rounds}: {one.num_branches:,} branches"
        self.tell_trial(what, one.trial, "  best" if one.is_best else "")

    def tell_trial(self, what: str, trial: Trial, end: str = "") -> None:
        """Print how something did in the trial episodes."""
        self.tell(
            f"{what}, trial episodes: return {trial.episode_return:9.1f} "
            f"({100 * trial.gain:+.2f} %)  {trial.mean_power_w:6.0f} W  "
            f"{100 * trial.sla_violation_rate:.2f} % late{end}"
        )

    def tell(self, line: str) -> None:
        """Print a line."""
        self._reported = time.monotonic()
        self._console.print(f"{self.seconds:6.0f} s  {line}")
