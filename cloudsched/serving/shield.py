"""The shield: nothing leaves that breaks capacity, and a policy that fails is replaced.

It stands between the policy and the simulator's kernels. An action that the mask forbids, numbers
that are not finite, an exception or a missed deadline put the safe rule in the policy's place; so
does a cluster whose SLA violations exceed the cap, until it recovers. Capacity itself is guarded
by the mask: only legal actions are carried out, whoever chose them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloudsched.config import Settings
from cloudsched.serving.planner import Arrays, Decider, Verdict

SLA_CAP, ERROR, NONSENSE = "sla_cap", "policy_error", "policy_nonsense"
TIMEOUT, SUSPENDED = "policy_timeout", "suspended"
GOOD, BAD = np.ones(1, np.bool_), np.zeros(1, np.bool_)
REASONS = (SLA_CAP, ERROR, NONSENSE, TIMEOUT, SUSPENDED)


@dataclass(frozen=True, kw_only=True)
class ShieldSettings(Settings):
    """When the safe rule takes over."""

    fallback: str = "best_fit+sleep"
    """The safe rule (`cloudsched policies`)."""
    sla_cap: float = 0.05
    """Share of a window's jobs that may be violations; above it the safe rule decides."""
    sla_recovery: float = 0.02
    """Share at or below which the policy decides again."""
    window_ticks: int = 60
    """Length of the window of clusters whose state the service keeps."""
    window_jobs: int = 20
    """Jobs that a window must have before it counts."""
    deadline_s: float = 0.5
    """Time for one decision; a slower policy is suspended."""
    cooldown_s: float = 5.0
    """For how long."""

    def __post_init__(self) -> None:
        self._number("sla_cap", low=0.0, high=1.0)
        self._number("sla_recovery", low=0.0, high=1.0)
        self._integer("window_ticks", low=1, high=100_000)
        self._integer("window_jobs", low=1)
        self._number("deadline_s", low=0.0, exclusive=True)
        self._number("cooldown_s", low=0.0)

    def is_exceeded(self, arrived: int, violations: int, *, is_tripped: bool) -> bool:
        """Return whether a cluster with this window needs the safe rule."""
        if arrived < self.window_jobs:
            return is_tripped and violations > 0
        return violations > (self.sla_recovery if is_tripped else self.sla_cap) * arrived


class Breaker:
    """Suspends versions that were too slow, each for a while."""

    def __init__(self, cooldown_s: float) -> None:
        self._cooldown_s = cooldown_s
        self._until: dict[str, float] = {}

    def trip(self, version: str) -> None:
        """Suspend a version from now on."""
        self._until[version] = time.monotonic() + self._cooldown_s

    def is_suspended(self, version: str) -> bool:
        """Return whether a version must not decide now."""
        until = self._until.get(version)
        if until is None:
            return False
        if time.monotonic() < until:
            return True
        del self._until[version]
        return False


class ShieldedDecider:
    """Takes the policy's actions where they hold up, and the safe rule's elsewhere.

    Args:
        fallback: the safe rule, whose actions are legal by construction (its kernel reads the
            mask).
        is_capped: (S,) clusters whose SLA cap is exceeded.

    Attributes:
        interventions: for each cluster, reason and explanation, in order.
    """

    def __init__(
        self,
        version: str,
        primary: Decider,
        fallback: Decider,
        settings: ShieldSettings,
        breaker: Breaker,
        is_capped: NDArray[np.bool_],
    ) -> None:
        self._version = version
        self._primary = primary
        self._fallback = fallback
        self._settings = settings
        self._breaker = breaker
        self._is_overruled = is_capped.copy()
        self._has_overruled = bool(is_capped.any())
        self.interventions: dict[int, list[tuple[str, str]]] = {}
        for row in np.flatnonzero(is_capped).tolist():
            self._note(row, SLA_CAP, f"SLA violations above {settings.sla_cap:.1%}")
        if breaker.is_suspended(version):
            self._overrule(np.flatnonzero(~is_capped), SUSPENDED, f"{version} was too slow")

    def __call__(self, observation: Arrays, rows: NDArray[np.int64]) -> Verdict:
        """Decide."""
        if self._has_overruled:
            is_overruled = self._is_overruled[rows]
            if is_overruled.all():
                return self._fallback(observation, rows)
            if is_overruled.any():
                return self._merge(observation, rows, is_overruled)
        return self._try(observation, rows)

    def _try(self, observation: Arrays, rows: NDArray[np.int64]) -> Verdict:
        started = time.perf_counter()
        try:
            verdict = self._primary(observation, rows)
            is_good = self._holds_up(observation, verdict)
        except Exception as error:
            self._overrule(rows, ERROR, f"{type(error).__name__}: {error}"[:200])
            return self._fallback(observation, rows)
        elapsed_s = time.perf_counter() - started
        if elapsed_s > self._settings.deadline_s:
            self._breaker.trip(self._version)
            self._overrule(
                rows,
                TIMEOUT,
                f"{elapsed_s:.3f} s for a decision; {self._settings.deadline_s} at most",
            )
            return self._fallback(observation, rows)
        if not is_good.all():
            self._overrule(rows[~is_good], NONSENSE, "an illegal action, or numbers that are none")
            return self._merge(observation, rows, ~is_good, verdict)
        return verdict

    @staticmethod
    def _holds_up(observation: Arrays, verdict: Verdict) -> NDArray[np.bool_]:
        mask, actions, chances = observation["action_mask"], verdict.actions, verdict.chances
        if len(mask) == 1:  # numpy's overhead is most of the work for one cluster
            action = int(actions[0])
            is_legal = 0 <= action < mask.shape[1] and mask[0, action] != 0
            is_number = chances is None or not is_legal or math.isfinite(chances[0, action])
            return GOOD if is_legal and is_number else BAD
        is_inside = (actions >= 0) & (actions < mask.shape[1])
        chosen = np.where(is_inside, actions, 0)
        rows = np.arange(len(mask))
        is_good = is_inside & (mask[rows, chosen] != 0)
        if chances is not None:
            # A softmax with a NaN anywhere is NaN everywhere.
            is_good &= np.isfinite(chances[rows, chosen])
        return np.asarray(is_good)

    def _merge(
        self,
        observation: Arrays,
        rows: NDArray[np.int64],
        is_overruled: NDArray[np.bool_],
        verdict: Verdict | None = None,
    ) -> Verdict:
        """Let the safe rule decide where the policy is overruled, and the policy elsewhere."""
        safe = self._fallback(_some(observation, is_overruled), rows[is_overruled])
        safe_actions = safe.actions.copy()
        others = ~is_overruled
        if verdict is None:
            part = self._try(_some(observation, others), rows[others])
        else:
            part = Verdict(
                verdict.actions[others],
                None if verdict.chances is None else verdict.chances[others],
                verdict.propensity[others],
            )
        actions = np.empty(len(rows), np.int64)
        actions[is_overruled], actions[others] = safe_actions, part.actions
        chances = None
        if part.chances is not None:
            chances = np.zeros((len(rows), part.chances.shape[1]), np.float32)
            chances[others] = part.chances
            chances[is_overruled, safe_actions] = 1.0
        propensity = np.ones(len(rows), np.float32)
        propensity[others] = part.propensity
        return Verdict(actions, chances, propensity)

    def _overrule(self, rows: NDArray[np.int64], reason: str, detail: str) -> None:
        self._is_overruled[rows] = True
        self._has_overruled = True
        for row in rows.tolist():
            self._note(row, reason, detail)

    def _note(self, row: int, reason: str, detail: str) -> None:
        self.interventions.setdefault(row, []).append((reason, detail))


def _some(observation: Arrays, which: NDArray[np.bool_]) -> Arrays:
    return {name: array[which] for name, array in observation.items()}
