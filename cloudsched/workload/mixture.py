"""Many sites in one workload: each episode draws a kind of workload and a load by its seed.

One policy for all sites is trained and tested here; no single rule's numbers suit every episode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cloudsched.config import Settings
from cloudsched.errors import ConfigError
from cloudsched.sim.jobs import JobTable
from cloudsched.workload.base import Workload, check_seed

SITE_STREAM = 1
"""Sets the draw of the site apart from the draws of its jobs."""


@dataclass(frozen=True, kw_only=True)
class MixtureOptions(Settings):
    """What an episode may turn out to be."""

    workloads: tuple[str, ...] = ("poisson", "diurnal", "bursty", "google_v2_bursty")
    """Kinds of workload, each as likely as the others; none that needs a file."""
    load_spread: float = 0.6
    """Episodes have loads from `load * (1 - load_spread)` to `load * (1 + load_spread)`: 0.2 to 0.8
    around 0.5."""
    load_steps: int = 7
    """Number of different loads, evenly spaced over that range."""

    def __post_init__(self) -> None:
        names = self.workloads
        if not isinstance(names, tuple) or not names or not all(isinstance(n, str) for n in names):
            raise ConfigError(f"workloads={names!r}: expected a tuple of names, at least one.")
        self._number("load_spread", low=0.0, high=0.99)
        self._integer("load_steps", low=1, high=1000)


class MixtureWorkload:
    """Draws one of its workloads for each episode.

    Args:
        make: builds one of the workloads for a load.
    """

    def __init__(
        self, options: MixtureOptions, *, load: float, make: Callable[[str, float], Workload]
    ) -> None:
        spread = options.load_spread if options.load_steps > 1 else 0.0
        loads = load * np.linspace(1.0 - spread, 1.0 + spread, options.load_steps)
        self._sites = [(name, float(one)) for name in options.workloads for one in loads]
        self._make = make
        self._built: dict[tuple[str, float], Workload] = {}

    @property
    def jobs_per_tick(self) -> float:
        """Mean number of arrivals a tick, over all sites."""
        return float(np.mean([self._workload(*site).jobs_per_tick for site in self._sites]))

    def jobs(self, seed: int, num_ticks: int) -> JobTable:
        """Return the arrivals of one episode."""
        return self._workload(*self.site(seed)).jobs(seed, num_ticks)

    def site(self, seed: int) -> tuple[str, float]:
        """Return the name and the load that this seed draws."""
        check_seed(seed)
        draw = np.random.default_rng([int(seed), SITE_STREAM])
        return self._sites[int(draw.integers(len(self._sites)))]

    def _workload(self, name: str, load: float) -> Workload:
        """Build a site's workload when it is first drawn: finding its rate takes time."""
        if (name, load) not in self._built:
            self._built[name, load] = self._make(name, load)
        return self._built[name, load]
