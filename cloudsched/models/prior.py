"""A rule that a network corrects: what a heuristic would do counts as much as some score.

A network that starts this way decides as the rule does, and learning moves it away from there only
where that pays. The rule reads the observation alone, so the two together are a network like any
other, for training, evaluation and serving, and for fleets of any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

from cloudsched.envs.observation import TIME_SCALE, Columns, columns
from cloudsched.heuristics.adaptive import RuleNumbers
from cloudsched.heuristics.kernels import CURVE_STEPS, FleetTable, dearness_of, decide
from cloudsched.heuristics.parameters import HeuristicConfig
from cloudsched.models.kinds import PLACE, SLEEP, WAIT, WAKE

LARGEST_LEAD = 1e4
"""No gain makes up for it."""
ROUNDING = 1e-6  # of laxities, which are rounded to float32
LARGEST_W = 480.0
"""What the thirstiest server is taken to draw at full load: observations only tell the proportions,
and this is the draw in the fleet that the shipped rules were tuned on."""


class RulePrior:
    """What a heuristic's action in each cluster is ahead of the others by.

    Args:
        rule: the heuristic; one that remembers nothing.
        weight: the score of its action.
        leads: (4,) what other actions lose, by their kind: place, wake, sleep, wait.
        due_ticks: while a visible job has no more than so many ticks left to start in time, only
            the rule may decide to wait; None where the network always may.
        is_balanced: whether the scores of an action are lowered by the log of how many of its kind
            are legal, which is then made up for, so that the rule counts alike in every fleet.
    """

    def __init__(
        self,
        rule: HeuristicConfig,
        weight: float,
        leads: Sequence[float],
        num_resources: int,
        *,
        due_ticks: int | None,
        is_balanced: bool,
    ) -> None:
        self._columns = columns(num_resources)
        self._numbers = RuleNumbers([rule], self._columns)
        self._num_resources = num_resources
        self._weight = weight
        self._leads = np.array(leads, np.float32)
        self._latest = -1.0 if due_ticks is None else due_ticks / (abs(due_ticks) + TIME_SCALE)
        self._is_balanced = is_balanced
        self._seen = np.zeros((0, 0), np.float32)
        self._fleet: FleetTable | None = None

    def __call__(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Return (E, A) what to add to the scores of actions; all rows are of one fleet."""
        servers, mask = observation["servers"], observation["action_mask"]
        scores = np.empty(mask.shape, np.float32)
        numbers = self._numbers(observation)
        score_rule(
            servers,
            observation["jobs"],
            mask,
            self._decisions(observation, numbers),
            self._columns,
            self._weight,
            self._leads,
            numbers["caution"],
            self._latest,
            self._is_balanced,
            scores,
        )
        return scores

    def actions(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Return (E,) what the rule would do."""
        return self._decisions(observation, self._numbers(observation))

    def _decisions(
        self, observation: Mapping[str, NDArray[Any]], numbers: NDArray[np.void]
    ) -> NDArray[np.int64]:
        servers, mask = observation["servers"], observation["action_mask"]
        actions = np.empty(len(mask), np.int64)
        decide(
            self._fleet_of(servers[0]),
            self._columns,
            numbers,
            servers,
            observation["jobs"],
            observation["context"],
            mask,
            np.full(len(mask), -1, np.int64),
            actions,
        )
        return actions

    def _fleet_of(self, servers_NF: NDArray[np.float32]) -> FleetTable:
        """Return capacities and power curves, as far as an observation tells them."""
        first = self._num_resources
        facts = servers_NF[:, first : 2 * first + 3]  # capacity, and watts idle, full and half
        if self._fleet is None or not np.array_equal(facts, self._seen):
            self._seen = facts.copy()
            self._fleet = _fleet_table(facts.astype(np.float64), self._num_resources)
        return self._fleet


class RuleCorrection(nn.Module):
    """A network whose logits are added to the scores of a rule."""

    def __init__(self, network: nn.Module, prior: RulePrior) -> None:
        super().__init__()
        self.network = network
        self.prior = prior

    def forward(self, observation: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return masked logits (B, A) and values (B,)."""
        logits_BA, value_B = self.network(observation)
        arrays = {name: tensor.cpu().numpy() for name, tensor in observation.items()}
        return logits_BA + torch.from_numpy(self.prior(arrays)).to(logits_BA.device), value_B


def _fleet_table(facts: NDArray[np.float64], num_resources: int) -> FleetTable:
    idle, full, half = facts[:, num_resources:].T
    bend = np.log2(np.maximum(full - idle, 1e-6) / np.maximum(half - idle, 1e-6)).clip(0.1, 8.0)
    loads = np.linspace(0.0, 1.0, CURVE_STEPS + 1)
    curve = idle[:, None] + (full - idle)[:, None] * loads ** bend[:, None]
    return FleetTable(
        curve_w=LARGEST_W * curve,
        server_worth=facts[:, :num_resources].mean(axis=0),
        dearness=dearness_of(full, facts[:, 0]),
    )


@njit(cache=True, nogil=True, error_model="numpy")
def score_rule(
    servers: NDArray[np.float32],
    jobs: NDArray[np.float32],
    mask: NDArray[np.int8],
    actions: NDArray[np.int64],
    at: Columns,
    weight: float,
    leads: NDArray[np.float32],
    caution: NDArray[np.float64],
    latest: float,
    is_balanced: bool,
    out_scores: NDArray[np.float32],
) -> None:
    """Write what is added to the score of each action.

    Args:
        actions: (E,) of the rule.
        leads: (4,) what actions other than the rule's lose: place, wake, sleep, wait.
        caution: (E,) what that is multiplied by, or (1,) for all clusters.
        latest: laxity, as observations have it, up to which a job is due.
        out_scores: (E, A) overwritten.
    """
    num_pairs, wait = servers.shape[1] * jobs.shape[1], mask.shape[1] - 1
    for e in range(mask.shape[0]):
        own = _kind(servers, mask, num_pairs, at.is_asleep, e, actions[e])
        times = caution[e if caution.shape[0] > 1 else 0]
        num_alike = 0
        for a in range(mask.shape[1]):
            kind = _kind(servers, mask, num_pairs, at.is_asleep, e, a)
            out_scores[e, a] = -leads[kind] * times
            num_alike += mask[e, a] != 0 and kind == own
        for k in range(jobs.shape[1]):
            is_there = jobs[e, k, jobs.shape[2] - 1] != 0.0
            if is_there and jobs[e, k, at.laxity] <= latest + ROUNDING:
                out_scores[e, wait] = -LARGEST_LEAD
        out_scores[e, actions[e]] = weight + (math.log(num_alike) if is_balanced else 0.0)


@njit(inline="always")
def _kind(servers, mask, num_pairs, asleep_column, e, a):  # type: ignore[no-untyped-def]
    if a < num_pairs:
        return PLACE
    if a == mask.shape[1] - 1:
        return WAIT
    return WAKE if servers[e, a - num_pairs, asleep_column] != 0.0 else SLEEP
