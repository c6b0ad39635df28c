"""The numbers that make a heuristic: weights of order and placement, and the sleep controller.

Every classic rule is a point in this space, so one kernel runs them all and one search tunes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from cloudsched.config import Settings
from cloudsched.sim.records import records

SLEEP_CONTROLLERS = ("never", "idle_timeout", "utilisation_band", "headroom")
SIGNALS = (
    *("load", "unevenness", "job_size", "wake_delay", "surge", "late"),
    *("rise", "job_rise", "sine", "cosine"),
)
"""What numbers may answer to, all about between -1 and 1. load: CPU work arriving over 200 ticks;
unevenness: the root mean square of it over its mean, as a log; job_size: work of a mean job, as a
log; wake_delay; surge: work of the last 5 ticks beyond that of 200; late: late jobs queued; rise:
work of the last 30 ticks beyond that of 200; job_rise: jobs of the last 30 ticks over those of 200,
as a log; sine and cosine of the time of day."""
NUM_TERMS = 1 + len(SIGNALS) + len(SIGNALS) * (len(SIGNALS) + 1) // 2
"""What sites are recognised by: one, the signals, and their products two by two."""

# Range that the search may use for each number.
RANGES: dict[str, tuple[float, float]] = {
    "order_wait": (-6.0, 0.0),
    "order_duration": (-1.0, 6.0),
    "order_laxity": (0.0, 6.0),
    "order_size": (-50.0, 50.0),
    "scan_depth": (1.0, 8.0),
    "place_leftover": (-2.0, 2.0),
    "place_alignment": (-4.0, 4.0),
    "place_power": (-1.0, 3.0),
    "place_energy": (0.0, 10.0),
    "place_extension": (0.0, 5.0),
    "place_idle": (-2.0, 6.0),
    "place_dear": (-2.0, 6.0),
    "place_dear_long": (-2.0, 10.0),
    "hold_laxity": (-1.0, 80.0),
    "reserve": (-0.5, 6.0),
    "reserve_laxity": (0.0, 30.0),
    "timeout_ticks": (0.0, 60.0),
    "spare_servers": (0.0, 6.0),
    "band_low": (0.05, 0.95),
    "band_high": (0.3, 1.2),
    "headroom_constant": (-6.0, 5.0),
    "headroom_root": (-2.0, 3.0),
    "headroom_queued": (0.0, 3.0),
    "headroom_urgent": (0.0, 6.0),
    "urgent_ticks": (0.0, 15.0),
    "headroom_rate": (-1.0, 1.0),
    "headroom_trend": (-1.0, 2.0),
    "headroom_release": (-0.5, 3.0),
    "hysteresis": (0.0, 3.0),
    "min_idle_ticks": (0.0, 20.0),
    "idle_bias": (-0.5, 12.0),
    "caution": (0.0, 20.0),
    "jam_queue": (0.0, 1.0),
}

IN_A_JAM = tuple(name for name in RANGES if name != "jam_queue")
"""What a jam may change: all but what tells it."""

NEVER_SLEEP, IDLE_TIMEOUT, UTILISATION_BAND, HEADROOM = range(len(SLEEP_CONTROLLERS))


@dataclass(frozen=True, kw_only=True)
class HeuristicConfig(Settings):
    """A heuristic: which job first, on which server, and when servers sleep.

    The visible job with the lowest `order_*` key that fits somewhere goes to the server with the
    lowest `place_*` score. When nothing fits (or is held back), the sleep controller may toggle a
    server; then the policy waits.
    """

    sleep: str = "never"
    """The sleep controller: never, idle_timeout, utilisation_band or headroom."""

    order_wait: float = 0.0
    """Weight of the ticks a job has waited; -1 alone is first in, first out."""
    order_duration: float = 0.0
    """Weight of the duration in ticks; 1 alone is shortest job first."""
    order_laxity: float = 0.0
    """Weight of the ticks left to start in time; 1 alone is least laxity first."""
    order_size: float = 0.0
    """Weight of the mean demand; -1 alone is largest first (first-fit decreasing)."""
    scan_depth: float = 1000.0
    """How many jobs of that order may be tried; 1 lets a job that fits nowhere block the rest."""

    place_index: float = 0.0
    """Weight of the server's index; 1 alone is first fit."""
    place_cycle: float = 0.0
    """Weight of the distance from the last server used; 1 alone is round robin."""
    place_leftover: float = 0.0
    """Weight of what stays free; 1 alone is best fit, -1 worst fit."""
    place_alignment: float = 0.0
    """Weight of demand times free capacity; -1 alone is Tetris."""
    place_power: float = 0.0
    """Weight of the added watts."""
    place_energy: float = 0.0
    """Weight of added watts times duration."""
    place_extension: float = 0.0
    """Weight of the idle energy for which the job keeps its server up longer than it would be."""
    place_idle: float = 0.0
    """Weight of the server having no job yet."""
    place_dear: float = 0.0
    """Weight of the server's place in the order of waking, so that the last ones run empty."""
    place_dear_long: float = 0.0
    """The same times the job's duration, squashed as in observations."""
    hold_laxity: float = 1e6
    """A job with more ticks of laxity than this is not placed on a server without jobs."""

    reserve: float = 0.0
    """Mean servers' worth of free capacity kept for jobs that cannot wait."""
    reserve_laxity: float = 5.0
    """Ticks of laxity up to which a job may use all that is kept; a job with more waits
    rather than use it, wholly so from ten ticks more on."""

    timeout_ticks: float = 5.0
    """idle_timeout: ticks without a job after which a server sleeps."""
    spare_servers: float = 1.0
    """idle_timeout: servers without a job that stay awake."""
    band_low: float = 0.5
    """utilisation_band: below this use of the awake capacity a server sleeps."""
    band_high: float = 0.8
    """utilisation_band: above this use of the awake capacity a server wakes."""

    headroom_constant: float = 1.0
    """headroom: mean servers' worth of capacity kept beyond what is in use."""
    headroom_root: float = 0.5
    """headroom: times the square root of the servers' worth in use (square-root staffing)."""
    headroom_queued: float = 1.0
    """headroom: weight of all queued demand."""
    headroom_urgent: float = 0.0
    """headroom: weight of the visible jobs that have little laxity left."""
    urgent_ticks: float = 5.0
    """headroom: laxity up to which a visible job is urgent."""
    headroom_rate: float = 0.0
    """headroom: weight of (work arriving a tick over 30 ticks - CPU in use)."""
    headroom_trend: float = 0.0
    """headroom: weight of (work arriving a tick over 5 ticks - over 200)."""
    headroom_release: float = 0.0
    """headroom: weight of the CPU given back within 5 ticks, which is subtracted."""
    hysteresis: float = 0.5
    """headroom: servers' worth that must be left over before one sleeps."""
    min_idle_ticks: float = 0.0
    """headroom: ticks without a job before a server may sleep."""
    idle_bias: float = 0.0
    """Servers rank by (full-load watts + this * idle watts) / CPU; low ones wake first."""
    caution: float = 1.0
    """Where a network corrects the rule: what the rule's lead over other decisions is multiplied
    by. The rule itself decides the same whatever it is."""
    jam_queue: float = 1e6
    """Jobs queued for each server from which on there is a jam if no server sleeps, and the numbers
    of `jam` hold."""

    jam: Mapping[str, float] = field(default_factory=dict)
    """What numbers are in a jam, by name. What saves power while there is room may cost room when
    there is too little of it, and every job behind then waits longer."""
    answers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """How numbers follow the site: by name, how far a number moves when a signal is one, for each
    of SIGNALS, within its range; empty for numbers that stay."""
    sites: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """What numbers are at each kind of site, by name; a number that is not here is the same at
    all. Between sites they are mixed by how likely each of them is."""
    recogniser: tuple[tuple[float, ...], ...] = ()
    """For each kind of site, the weights in its log-odds of one, the signals and their products."""

    def __post_init__(self) -> None:
        self._choice("sleep", SLEEP_CONTROLLERS)
        for name in NUMBER_FIELDS:
            self._number(name, low=-1e9, high=1e9)
        if not isinstance(self.answers, Mapping) or not all(map(self._is_answer, self.answers)):
            self._refuse(
                "answers",
                f"expected {len(SIGNALS)} finite weights for some of: {', '.join(RANGES)}.",
            )

        if not isinstance(self.jam, Mapping) or not all(map(self._is_jam_number, self.jam)):
            self._refuse("jam", f"expected finite numbers for some of: {', '.join(IN_A_JAM)}.")
        rows = self.recogniser
        if not isinstance(rows, Sequence) or not all(_is_row(row, NUM_TERMS) for row in rows):
            self._refuse("recogniser", f"expected {NUM_TERMS} finite weights for each site.")
        if not isinstance(self.sites, Mapping) or not all(map(self._is_site_number, self.sites)):
            self._refuse(
                "sites",
                f"expected a finite number for each of the {len(rows)} kinds of site that are "
                f"recognised, for some of: {', '.join(RANGES)}.",
            )
        if rows and not self.sites:
            self._refuse("sites", "expected some numbers where sites are recognised.")

    def shifted(self, name: str, amount: float) -> HeuristicConfig:
        """Return a copy with one number moved, at every site and in a jam."""
        sites, jam = dict(self.sites), dict(self.jam)
        if name in sites:
            sites[name] = tuple(value + amount for value in sites[name])
        if name in jam:
            jam[name] += amount
        return self.replace(**{name: getattr(self, name) + amount, "sites": sites, "jam": jam})

    def _is_answer(self, name: str) -> bool:
        return name in RANGES and _is_row(self.answers[name], len(SIGNALS))

    def _is_jam_number(self, name: str) -> bool:
        return name in IN_A_JAM and _is_finite(self.jam[name])

    def _is_site_number(self, name: str) -> bool:
        is_known = name in RANGES and len(self.recogniser) > 0
        return is_known and _is_row(self.sites[name], len(self.recogniser))


_TABLES = ("sleep", "answers", "sites", "recogniser", "jam")
NUMBER_FIELDS = tuple(f.name for f in fields(HeuristicConfig) if f.name not in _TABLES)
PARAMETER_DTYPE = np.dtype(
    [("sleep", np.int64), *((name, np.float64) for name in NUMBER_FIELDS)], align=True
)


def parameter_records(configs: Sequence[HeuristicConfig]) -> NDArray[np.void]:
    """Return one record for each config, as the kernel reads them."""
    table = records(len(configs), PARAMETER_DTYPE)
    table["sleep"] = [SLEEP_CONTROLLERS.index(config.sleep) for config in configs]
    for name in NUMBER_FIELDS:
        table[name] = [getattr(config, name) for config in configs]
    return table


def _is_row(values: object, length: int) -> bool:
    if not isinstance(values, list | tuple):
        return False
    return len(values) == length and all(map(_is_finite, values))


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]
