"""Settings of fleet, cluster and reward: frozen dataclasses that refuse nonsense.

Every field has exactly one default, here. Dictionaries become dataclasses through `from_dict`,
which refuses unknown keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, NoReturn, Self, get_args, get_type_hints

from cloudsched.errors import ConfigError, suggestion


class Settings:
    """What all configuration dataclasses share: dictionaries in and out, and checks."""

    PATH: ClassVar[str] = ""
    """What stands before a field's name in errors: where these settings lie in their parent."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a dictionary; nested dictionaries become nested settings."""
        names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        kinds = get_type_hints(cls)
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            cls._known(key, names)
            for kind in get_args(kinds[key]) or (kinds[key],):  # the settings in `Settings | None`
                if is_dataclass(kind) and isinstance(value, Mapping):
                    value = kind.from_dict(value)  # type: ignore[union-attr]
            arguments[key] = tuple(value) if isinstance(value, list) else value
        return cls(**arguments)

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested dictionaries that `from_dict` reads back."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, checked like a new one."""
        names = {f.name for f in fields(self)}  # type: ignore[arg-type]
        for key in changes:
            self._known(key, names)
        return replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def _known(cls, key: str, names: set[str]) -> None:
        if key not in names:
            hint = suggestion(key, names, path=cls.PATH)
            raise ConfigError(f"No setting named {f'{cls.PATH}{key}'!r}. {hint}")

    def _integer(self, name: str, *, low: int, high: int = 2**31 - 1) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._refuse(name, f"expected a whole number from {low} to {high}.")

    def _number(
        self, name: str, *, low: float, high: float = math.inf, exclusive: bool = False
    ) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            is_inside = False
        else:
            is_inside = not (exclusive and value == low)
        if not is_inside:
            bound = f"above {low}" if exclusive else f"of at least {low}"
            upper = "" if high == math.inf else f" and at most {high}"
            self._refuse(name, f"expected a finite number {bound}{upper}.")

    def _flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            self._refuse(name, "expected True or False.")

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            self._refuse(name, f"expected one of {', '.join(choices)}.")

    def _refuse(self, name: str, reason: str) -> NoReturn:
        raise ConfigError(f"{self.PATH}{name}={getattr(self, name)!r}: {reason}")


@dataclass(frozen=True, kw_only=True)
class FleetConfig(Settings):
    """Which servers there are; `cloudsched.sim.fleet.build_fleet` turns it into arrays."""

    PATH = "fleet."

    num_servers: int = 15
    """Number of servers, N."""
    kind: str = "tiers"
    """`tiers`: three synthetic classes of server; `measured`: real SPECpower machines."""
    resources: tuple[str, ...] = ("cpu", "memory")
    """Names of the resources, R of them; the first is the CPU, which drives power."""
    base_capacity: float = 1.0
    """Capacity of a standard server, in every resource."""
    base_idle_w: float = 100.0
    """Idle power of a standard server, in watts; only for `tiers`."""
    base_max_w: float = 300.0
    """Power of a standard server at full CPU load, in watts; only for `tiers`."""
    fleet_seed: int = 0
    """Seed of the order of the servers; fixed across runs, so that every run has one fleet."""

    def __post_init__(self) -> None:
        self._integer("num_servers", low=1, high=1_000_000)
        self._choice("kind", ("tiers", "measured"))
        self._number("base_capacity", low=0.0, exclusive=True, high=1e6)
        self._number("base_idle_w", low=0.0, high=1e6)
        self._number("base_max_w", low=0.0, exclusive=True, high=1e6)
        self._integer("fleet_seed", low=0)
        names = self.resources
        if not isinstance(names, tuple) or not all(isinstance(n, str) and n for n in names):
            self._refuse("resources", "expected a tuple of names.")
        if not 1 <= len(names) <= 16 or len(set(names)) != len(names):
            self._refuse("resources", "expected 1 to 16 different names.")
        if self.base_max_w <= self.base_idle_w:
            self._refuse(
                "base_max_w",
                f"expected more than fleet.base_idle_w={self.base_idle_w!r}; a server draws more "
                "at full load than idle.",
            )
        for name in ("base_idle_w", "base_max_w"):
            if self.kind == "measured" and getattr(self, name) != getattr(FleetConfig, name):
                self._refuse(
                    name,
                    "measured servers draw what was measured on them; leave it out, or use "
                    "fleet.kind=tiers.",
                )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Settings):
    """Weights of the reward (DESIGN: alpha, beta, late, toggle) and of the cost."""

    PATH = "reward."

    alpha: float = 5.0
    """Price of drawing the whole fleet's full power for one tick."""
    beta: float = 60.0
    """Price of one SLA violation, divided by N."""
    late_penalty: float = 6.0
    """Price of one late job in the queue for one tick, divided by N."""
    toggle_penalty: float = 0.2
    """Price of one request to sleep, times 15 / N."""
    illegal_penalty: float = 10.0
    """Price of one illegal action."""
    cost_late_rate: float = 0.1
    """Cost (not reward) of one late job in the queue for one tick; a new violation costs 1."""

    def __post_init__(self) -> None:
        for f in fields(self):
            self._number(f.name, low=0.0, high=1e9)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Settings):
    """The rules of one simulated cluster."""

    fleet: FleetConfig = field(default_factory=FleetConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    tick_s: float = 60.0
    """Length of a tick, in seconds."""
    episode_ticks: int = 1000
    """Ticks until an episode is truncated."""
    sleep: bool = True
    """Whether servers may sleep; without it there are no toggle actions."""
    standby_factor: float = 0.05
    """Power of a sleeping server, as a share of its idle power."""
    wake_power_factor: float = 1.0
    """Power of a waking server, as a share of its idle power."""
    wake_delay_ticks: int = 1
    """Ticks from the request to wake until the server takes jobs."""
    wake_delay_max_ticks: int | None = None
    """Each episode draws its delay, by its seed, from `wake_delay_ticks` to this; None: no draw."""
    sla_latency_ticks: int | None = 30
    """Longest wait that the SLA allows; None for no such limit."""
    sla_stretch: float | None = 1.6
    """Longest (wait + duration) / duration that the SLA allows; None for no such limit."""
    drop_expired: bool = False
    """Whether a job that missed its deadline leaves the queue instead of still having to run."""
    queue_capacity: int = 1000
    """Jobs that may wait; an arrival to a full queue is rejected, which is a violation."""
    visible_jobs: int = 5
    """Jobs at the head of the queue that a policy sees and may place, K."""
    window_order: str = "laxity"
    """Order of the queue: `laxity` (earliest deadline to start first) or `fifo`."""
    max_decisions_per_tick: int | None = None
    """Decisions after which a tick ends by itself; None for 2 N."""
    wait_only_when_stuck: bool = False
    """Whether `wait` is legal only when no placement is."""

    def __post_init__(self) -> None:
        if not isinstance(self.fleet, FleetConfig):
            raise ConfigError(f"fleet={self.fleet!r}: expected a FleetConfig.")
        if not isinstance(self.reward, RewardConfig):
            raise ConfigError(f"reward={self.reward!r}: expected a RewardConfig.")
        self._number("tick_s", low=0.0, exclusive=True, high=86_400.0)
        self._integer("episode_ticks", low=1, high=10_000_000)
        self._number("standby_factor", low=0.0, high=1.0)
        self._number("wake_power_factor", low=0.0, high=100.0)
        self._integer("wake_delay_ticks", low=0, high=1_000_000)
        if self.wake_delay_max_ticks is not None:
            self._integer("wake_delay_max_ticks", low=self.wake_delay_ticks, high=1_000_000)
        if self.sla_latency_ticks is not None:
            self._integer("sla_latency_ticks", low=0, high=100_000_000)
        if self.sla_stretch is not None:
            self._number("sla_stretch", low=1.0, high=1e6)
        self._integer("queue_capacity", low=1, high=100_000_000)
        self._integer("visible_jobs", low=1, high=4096)
        self._choice("window_order", ("fifo", "laxity"))
        if self.max_decisions_per_tick is not None:
            self._integer("max_decisions_per_tick", low=1)
        for name in ("sleep", "drop_expired", "wait_only_when_stuck"):
            self._flag(name)

    @property
    def num_servers(self) -> int:
        """N."""
        return self.fleet.num_servers

    @property
    def num_resources(self) -> int:
        """R."""
        return len(self.fleet.resources)

    @property
    def num_actions(self) -> int:
        """A: K*N placements, N toggles where servers may sleep, and `wait`, the last."""
        toggles = self.num_servers if self.sleep else 0
        return self.visible_jobs * self.num_servers + toggles + 1

    @property
    def decisions_per_tick(self) -> int:
        """Decisions after which a tick ends by itself."""
        limit = self.max_decisions_per_tick
        return 2 * self.num_servers if limit is None else limit
