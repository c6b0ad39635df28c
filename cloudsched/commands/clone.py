"""`cloudsched clone`: teach a network to decide as a heuristic does, as a start for training."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cloudsched.commands.options import ScenarioOptions
from cloudsched.errors import ConfigError
from cloudsched.results import check_folder, provenance

if TYPE_CHECKING:
    from cloudsched.models.cloning import CloningRound


@dataclass(frozen=True, kw_only=True)
class Clone(ScenarioOptions):
    """Clone a policy into a network and write it as a bundle.

    The teacher decides in half of the clusters; in the other half the network does, and the teacher
    only tells what it would have done (DAgger). Episodes are drawn below the test seeds. Ctrl-C
    keeps what was learned so far.

    Examples:
      cloudsched clone --teacher headroom@poisson --out runs/clone
      cloudsched train rllib_configs/ppo.py --start runs/clone
    """

    teacher: str = "power_aware+headroom"
    """Who teaches: a name of `cloudsched policies`, a tuned file, or a bundle."""
    network: str = "set"
    """`set` (any number of servers) or `flat`."""
    rounds: int = 60
    """Rollouts to learn from; each is 8,192 decisions."""
    seed: int = 0
    """Seed of weights and arrivals."""
    out: Path = field(default_factory=lambda: Path("runs/clone"))
    """Folder of the bundle."""

    def run(self) -> None:
        """Clone, and write the bundle."""
        if self.rounds < 1:
            raise ConfigError(f"--rounds {self.rounds}: expected at least 1.")
        check_folder(self.out)
        import torch

        from cloudsched.bundle import Bundle, save_bundle
        from cloudsched.commands.policies import make_policy
        from cloudsched.models.cloning import CloningConfig, clone
        from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network
        from cloudsched.models.rollout import training_seeds

        scenario = self.scenario
        settings = NetworkConfig(kind=self.network)
        torch.manual_seed(self.seed)
        network = build_network(ObservationSizes.of(scenario.config), settings)
        console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        done: list[CloningRound] = []

        def report(one: CloningRound) -> None:
            done.append(one)
            if len(done) % 5 == 0 or len(done) == self.rounds:
                console.print(
                    f"round {len(done)} of {self.rounds}: agrees with {self.teacher} in "
                    f"{100 * one.agreement:.1f} % of decisions"
                )

        try:
            clone(
                network,
                make_policy(self.teacher, scenario.config),
                scenario,
                training_seeds(64, self.seed),
                CloningConfig(num_rounds=self.rounds),
                report,
            )
        except KeyboardInterrupt:
            if not done:
                raise
            console.print("interrupted: keeping what was learned so far")
        training = {
            "algorithm": "cloning",
            "teacher": self.teacher,
            "scenario": scenario.to_dict(),
            "seed": self.seed,
            "rounds": len(done),
            **asdict(done[-1]),
            **provenance(),
        }
        bundle = Bundle(
            network=settings,
            cluster=scenario.config,
            weights=network.state_dict(),
            training=training,
        )
        print(save_bundle(bundle, self.out))
