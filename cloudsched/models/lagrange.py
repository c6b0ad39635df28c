"""The multiplier of a constraint, by dual ascent on its logarithm."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloudsched.config import Settings


@dataclass(frozen=True, kw_only=True)
class LagrangeConfig(Settings):
    """How the price of the constraint is found."""

    limit: float = 0.01
    """The most that the cost may be."""
    initial_price: float = 2.0
    """Lambda at the start."""
    learning_rate: float = 0.005
    """Change of log lambda when the cost is one limit above its limit."""
    min_price: float = 1.0
    """Lambda never falls below this: what a violation is worth where the limit does not bind."""
    max_price: float = 1e3
    """Lambda never rises above this."""
    max_error: float = 2.0
    """Violations count as at most so many limits, so that one bad batch does not move it far."""

    def __post_init__(self) -> None:
        for name in ("limit", "initial_price", "min_price", "max_price", "max_error"):
            self._number(name, low=0.0, exclusive=True)
        self._number("learning_rate", low=0.0)


class LagrangeMultiplier:
    """Lambda: rises while the cost is above its limit, falls while it is below.

    Ascent on log lambda keeps it positive, and moves it by factors: the right price may be many
    orders of magnitude away.
    """

    def __init__(self, config: LagrangeConfig) -> None:
        self._config = config
        self._log_price = math.log(config.initial_price)

    @property
    def price(self) -> float:
        """Lambda."""
        return math.exp(self._log_price)

    def update(self, cost: float) -> float:
        """Move lambda after a cost was estimated, and return it."""
        config = self._config
        error = (cost - config.limit) / config.limit
        error = min(max(error, -config.max_error), config.max_error)
        self._log_price += config.learning_rate * error
        low, high = math.log(config.min_price), math.log(config.max_price)
        self._log_price = min(max(self._log_price, low), high)
        return self.price

    def state_dict(self) -> dict[str, float]:
        """Return what `load_state_dict` needs."""
        return {"log_price": self._log_price}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved state."""
        self._log_price = float(state["log_price"])
