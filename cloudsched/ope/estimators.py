"""Estimates of a policy's value from the decisions of others, with 95 % intervals.

The value is the discounted sum from the first observation of an episode, times `1 - gamma`: a mean
over the ticks to come, of which the nearest count most.

- **Fitted Q evaluation** reads a critic's value of the first observations. Its interval covers
  what the critic's own errors on the data add up to, so a poor fit shows.
- **Weighted importance sampling** reweights episodes by how much likelier the policy was to do what
  was done. It needs no model, and says nothing once no episode is left that the policy would have
  followed.
- **Doubly robust** starts from the critic's value and adds its reweighted errors along episodes. A
  tick counts as one action. The policy is deterministic, so the value of a tick that it would have
  decided just so is the value of its first observation; no other ticks have weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloudsched.ope.trajectories import Ticks
from cloudsched.statistics import CONFIDENCE, Estimate

MIN_EFFECTIVE_EPISODES = 10.0
NUM_RESAMPLES = 1000
NAMES = ("reward", "cost")

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class OffPolicyReport:
    """What the data says of a policy; estimates by name, `reward` and `cost`."""

    fitted_q: dict[str, Estimate]
    importance: dict[str, Estimate]
    doubly_robust: dict[str, Estimate]
    effective_episodes: float
    """Effective number of episodes that the policy would have followed for half the horizon."""
    agreement: float
    """Share of logged ticks in which the policy would have decided just so."""

    @property
    def has_support(self) -> bool:
        """Whether importance weights rest on enough episodes to be believed."""
        return self.effective_episodes >= MIN_EFFECTIVE_EPISODES


def off_policy_report(ticks: Ticks, gamma: float) -> OffPolicyReport:
    """Estimate in all three ways."""
    steps_GT: Floats = np.where(ticks.is_tick_GT, ticks.ratio_GT, 1.0)
    weight_GT: Floats = np.multiply.accumulate(steps_GT, axis=1)
    half = min(weight_GT.shape[1] - 1, round(0.5 / (1.0 - gamma)))
    return OffPolicyReport(
        fitted_q=fitted_q(ticks, gamma),
        importance=importance(ticks, weight_GT, gamma),
        doubly_robust=doubly_robust(ticks, weight_GT, gamma),
        effective_episodes=effective_size(weight_GT[:, half]),
        agreement=float((ticks.ratio_GT > 0.0)[ticks.is_tick_GT].mean()),
    )


def effective_size(weights: Floats) -> float:
    """Return how many equal weights would be as good: (sum w)**2 / sum w**2."""
    square = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / square if square > 0.0 else 0.0


def fitted_q(ticks: Ticks, gamma: float) -> dict[str, Estimate]:
    """Return the critic's value, with an interval as wide as its errors on the data make it.

    The critic's error at the start is the sum of its errors along the policy's own episodes. On the
    states of the data, with the decisions of each tick reweighted to the policy's, the mean error
    of a tick is known; it counts 1 / (1 - gamma) times. The interval covers the value with and
    without that correction, and the correction's sampling error.
    """
    counts_DG = _resamples(len(ticks.value_GT2))
    weight_G = (ticks.ratio_GT * ticks.is_tick_GT).sum(axis=1)
    error_G2 = (ticks.residual_GT2 * ticks.is_tick_GT[:, :, None]).sum(axis=1)
    total_D1 = np.maximum(counts_DG @ weight_G, 1e-12)[:, None]
    drift_D2 = counts_DG @ error_G2 / total_D1 / (1.0 - gamma)
    start_D2 = counts_DG @ ticks.value_GT2[:, 0] / counts_DG.sum(axis=1, keepdims=True)
    low_2, high_2 = _ends(start_D2 + drift_D2)
    drift_2 = drift_D2[0]
    low_2, high_2 = np.minimum(low_2, low_2 - drift_2), np.maximum(high_2, high_2 - drift_2)
    return _estimates(start_D2[0] + 0.5 * drift_2, low_2, high_2)


def importance(ticks: Ticks, weight_GT: Floats, gamma: float) -> dict[str, Estimate]:
    """Return weighted importance sampling, tick by tick."""
    counts_DG = _resamples(len(weight_GT))
    return _estimated(_weighted_sums(counts_DG, weight_GT, ticks.outcome_GT2, gamma))


def doubly_robust(ticks: Ticks, weight_GT: Floats, gamma: float) -> dict[str, Estimate]:
    """Return the critic's value plus its reweighted errors along episodes.

    Tick by tick, that is what it brought beyond the critic's value, over those who decided as the
    policy up to its end, plus that value over those who did up to its beginning. Each mean has its
    own sum of weights: logged policies that never do what the policy would do lose weight without
    others gaining it, so weights do not add up to the number of episodes.
    """
    counts_DG = _resamples(len(weight_GT))
    before_GT = np.concatenate([np.ones((len(weight_GT), 1)), weight_GT[:, :-1]], axis=1)
    beyond_D2 = _weighted_sums(counts_DG, weight_GT, ticks.outcome_GT2 - ticks.value_GT2, gamma)
    expected_D2 = _weighted_sums(counts_DG, before_GT, ticks.value_GT2, gamma)
    return _estimated(beyond_D2 + expected_D2)


def _weighted_sums(counts_DG: Floats, weight_GT: Floats, value_GT2: Floats, gamma: float) -> Floats:
    """Return (D, 2) discounted sums over ticks of weighted means over episodes, per resample."""
    num_episodes, num_ticks = weight_GT.shape
    top = counts_DG @ (weight_GT[:, :, None] * value_GT2).reshape(num_episodes, -1)
    bottom_DT = counts_DG @ weight_GT
    mean_DT2 = top.reshape(-1, num_ticks, 2) / np.maximum(bottom_DT, 1e-300)[:, :, None]
    mean_DT2[bottom_DT <= 0.0] = 0.0
    sums: Floats = np.einsum("t,dti->di", gamma ** np.arange(num_ticks), mean_DT2)
    return sums


def _resamples(num_episodes: int) -> Floats:
    """(D, G) how often each episode is in each resample; the first is the data as it is."""
    generator = np.random.default_rng(0)
    shares = np.full(num_episodes, 1.0 / num_episodes)
    draws = generator.multinomial(num_episodes, shares, size=NUM_RESAMPLES)
    return np.concatenate([np.ones((1, num_episodes)), draws.astype(np.float64)])


def _ends(values_D2: Floats) -> tuple[Floats, Floats]:
    tail = 100.0 * (1.0 - CONFIDENCE) / 2.0
    low_2, high_2 = np.percentile(values_D2, (tail, 100.0 - tail), axis=0)
    return low_2, high_2


def _estimated(values_D2: Floats) -> dict[str, Estimate]:
    return _estimates(values_D2[0], *_ends(values_D2))


def _estimates(mean_2: Floats, low_2: Floats, high_2: Floats) -> dict[str, Estimate]:
    return {
        name: Estimate(
            mean=float(mean_2[i]),
            ci_low=float(min(low_2[i], mean_2[i])),
            ci_high=float(max(high_2[i], mean_2[i])),
        )
        for i, name in enumerate(NAMES)
    }
