"""Trial episodes: how far a network is trusted, with which decisions, and at which sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import Episodes
from cloudsched.heuristics.sites import Kind, pools_by_kind
from cloudsched.lookahead.caution import ALONE, choose_cautions
from cloudsched.lookahead.improved import Improved
from cloudsched.models.kinds import NUM_KINDS, PLACE, SLEEP, WAIT, WAKE

LEADS = (0.025, 0.05, 0.1, 0.2, 0.4)  # in units of the spread of gains
EVERYWHERE = "everywhere"  # the kind of all sites, where the rule tells none apart


class Choice(NamedTuple):
    """What the network may decide."""

    kinds: tuple[bool, ...]
    """Whether to place, to wake, to put to sleep and to wait are not left to the rule."""
    due_ticks: int
    """Laxity from which on only the rule lets jobs wait."""

    def flipped(self, kind: int) -> Choice:
        """Return the same with one kind of decision left to the rule, or no longer left to it."""
        return self._replace(kinds=tuple(own != (k == kind) for k, own in enumerate(self.kinds)))


USUAL = Choice(tuple(kind != WAKE for kind in range(NUM_KINDS)), 2)
"""What a server awake is worth some time later is overrated, so that waking is left to the rule. If
it is not, branches are followed by who wakes servers so, and sleeping comes to look cheap."""
CHANGES: Sequence[Callable[[Choice], Choice]] = (
    lambda choice: choice._replace(due_ticks=1),
    lambda choice: choice._replace(due_ticks=4),
    lambda choice: choice._replace(due_ticks=8),
    lambda choice: choice.flipped(PLACE),
    lambda choice: choice.flipped(SLEEP),
    lambda choice: choice.flipped(WAIT),
)
"""What is tried one after the other, and kept where it helps."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How a policy did in the trial episodes."""

    choice: Choice
    leads: Mapping[str, float]
    """Of the rule at each kind of site; so high that it is left alone where nothing helped."""
    gain: float
    """Return, less the price of the violation rate, beyond that of the start, in proportion; mean
    over episodes."""
    episode_return: float
    mean_power_w: float
    sla_violation_rate: float


class TrialEpisodes:
    """Episodes on which policies are compared, shared out among Ray actors.

    Args:
        start: what they are compared with; where its rule tells kinds of sites apart, each kind has
            equally many episodes.
        first_seed: those of the episodes count up from there, or are drawn by it.
        tell: called with a line about what goes on.
        rate_price: what the SLA violation rate costs besides the reward, a tick.
    """

    def __init__(
        self,
        scenario: Scenario,
        start: Improved,
        num_episodes: int,
        first_seed: int,
        num_workers: int,
        tell: Callable[[str], None],
        rate_price: float = 0.0,
    ) -> None:
        self._rate_price = rate_price * scenario.config.episode_ticks
        self.pools = _pools(scenario, start, first_seed)
        self._tell = tell
        if self.pools:
            share = max(2, num_episodes // len(self.pools))
            draws = np.random.default_rng(first_seed)
            seeds = [int(s) for pool in self.pools.values() for s in draws.choice(pool, share)]
            self._kinds = [_arrivals(kind) for kind in self.pools for _ in range(share)]
        else:
            seeds = list(range(first_seed, first_seed + num_episodes))
            self._kinds = [EVERYWHERE] * num_episodes
        actor = shared_out(_TrialShare, num_workers)
        # Neighbours are of one kind, and some kinds take longer than others.
        self._order = np.concatenate(
            [np.arange(len(seeds))[w::num_workers] for w in range(num_workers)]
        )
        shares = [seeds[number::num_workers] for number in range(num_workers)]
        self._workers = [actor.remote(scenario, share) for share in shares if share]
        self._start = self._run(start)

    def choose(self, learned: Improved) -> tuple[Improved, Trial]:
        """Return the network with what it is trusted with, and how that did."""
        gains = {}
        for lead in LEADS:
            metrics = self._run(learned.corrected(lead, *USUAL))
            gains[lead] = self._gain(metrics)
            self._tell(f"lead {lead:g}: {100 * gains[lead].mean():+.2f} % in trial episodes")
        leads = choose_cautions(gains, self._kinds)
        chosen, best = self._try(learned, USUAL, leads)
        for change in CHANGES:
            other, trial = self._try(learned, change(best.choice), leads)
            if trial.gain > best.gain:
                chosen, best = other, trial
        return chosen, best

    def trusted(self, trial: Trial) -> NDArray[np.int64] | None:
        """Return seeds of the sites where a policy is more than its rule; None for any."""
        pools = [pool for k, pool in self.pools.items() if trial.leads[_arrivals(k)] < ALONE]
        return np.concatenate(pools) if pools else None

    def _try(
        self, learned: Improved, choice: Choice, leads: Mapping[str, float]
    ) -> tuple[Improved, Trial]:
        by_kind = [leads[_arrivals(kind)] for kind in self.pools]
        improved = learned.corrected(by_kind or leads[EVERYWHERE], *choice)
        metrics = self._run(improved)
        trial = Trial(
            choice=choice,
            leads=leads,
            gain=float(self._gain(metrics).mean()),
            episode_return=float(metrics["episode_return"].mean()),
            mean_power_w=float(metrics["mean_power_w"].mean()),
            sla_violation_rate=float(metrics["sla_violation_rate"].mean()),
        )
        free = "".join("x" if is_free else "-" for is_free in choice.kinds)
        self._tell(f"kinds {free}, due {choice.due_ticks}: {100 * trial.gain:+.2f} %")
        return improved, trial

    def _gain(self, metrics: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return (episodes,) what a policy is worth beyond the start, in proportion."""
        return gains_beyond(self._start, metrics, self._rate_price)

    def _run(self, improved: Improved) -> dict[str, NDArray[np.float64]]:
        """Return what a policy was measured to do, episode by episode."""
        found = ray.get([worker.measure.remote(improved) for worker in self._workers])
        names, total = found[0], len(self._order)
        joined = {name: np.empty(total) for name in names}
        for name, values in joined.items():
            values[self._order] = np.concatenate([part[name] for part in found])
        return joined


class _TrialShare(Episodes):
    def measure(self, improved: Improved) -> Mapping[str, NDArray[np.float64]]:
        return self.run(improved.policy(self.env.config)).metrics


def gains_beyond(
    before: Mapping[str, NDArray[np.float64]],
    after: Mapping[str, NDArray[np.float64]],
    rate_price: float,
) -> NDArray[np.float64]:
    """Return (episodes,) what one policy is worth beyond another, in proportion to what that is.

    Args:
        rate_price: what an SLA violation rate of one costs besides the reward.
    """
    was, now = (
        one["episode_return"] - rate_price * one["sla_violation_rate"] for one in (before, after)
    )
    return np.asarray((now - was) / np.maximum(np.abs(was), 1e-9))


def shared_out(one: type, num_workers: int) -> Any:
    """Return a class of Ray actors of which so many fit: more than CPUs share them."""
    cpus = ray.cluster_resources().get("CPU", 1.0)
    return ray.remote(num_cpus=min(1.0, cpus / num_workers) / 2.0)(one)


def _pools(scenario: Scenario, start: Improved, seed: int) -> dict[Kind, NDArray[np.int64]]:
    """Return seeds by kind of site, in the order in which the rule recognises them."""
    rule = start.network.prior
    if rule is None or not rule.recogniser or scenario.workload != "mixture":
        return {}
    pools = pools_by_kind(scenario, seed)
    return pools if len(pools) == len(rule.recogniser) else {}


def _arrivals(kind: Kind) -> str:
    """Return what arrives there; cautions do not depend on how long waking takes."""
    return f"{kind.workload}, load {kind.load:.2f}"
