"""Collects the decisions of a supervisor and its sub-agents, each with its own advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cloudsched.models.hierarchy import MODULES, SUB_AGENTS, SUPERVISOR
from cloudsched.models.masking import log_prob, log_probs, sample
from cloudsched.models.rollout import Columns, FloatArray, LastObservations, RolloutCollector

SUPERVISED = -1


class HierarchyCollector(RolloutCollector):
    """A `RolloutCollector` whose `network` is a mapping of three, by name.

    The supervisor earns the reward itself; the sub-agents pay another price for late jobs. One
    cluster in four is led by each sub-agent alone, and there it learns; the supervisor leads the
    rest, and learns there. Where they take turns, a sub-agent would learn from little but its own
    critic's errors, or to leave to the other what costs it something.

    Args:
        sla_weights: of the sub-agents, by name: how many times the price in the reward they pay for
            a violation, and for a late job as far as that counts in the cost.
        arguments: as of the parent.
    """

    def __init__(self, *args: Any, sla_weights: Mapping[str, float], **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        rules, shape = self.env.config, (self.num_steps, self.env.num_envs)
        price = rules.reward.beta / rules.num_servers
        self._surcharges = {name: (sla_weights[name] - 1.0) * price for name in SUB_AGENTS}
        self._tables = {name: _Tables(shape) for name in MODULES}
        role_E = torch.arange(self.env.num_envs, device=self.device) % 4
        self._leader_E = torch.where(role_E < len(SUB_AGENTS), role_E, SUPERVISED)

    def collect_all(self, network: Mapping[str, Any]) -> dict[str, Columns]:
        """Take `num_steps` decisions in each cluster; return what each module learns from."""
        everything = self.collect(network)  # type: ignore[arg-type]
        return {name: tables.own_rows(everything) for name, tables in self._tables.items()}

    def _act(self, t: int, network: Any, observation: dict[str, Tensor]) -> None:
        """Let the supervisor choose, and the chosen decide."""
        is_supervised_E = self._leader_E == SUPERVISED
        logits = {name: self._ask(t, name, network, observation) for name in MODULES}
        choice_E = torch.where(is_supervised_E, sample(logits[SUPERVISOR]), self._leader_E)
        self._tables[SUPERVISOR].keep(t, logits[SUPERVISOR], choice_E, is_supervised_E)
        for number, name in enumerate(SUB_AGENTS):
            action_E = sample(logits[name])
            self._tables[name].keep(t, logits[name], action_E, self._leader_E == number)
            is_chosen_E = (choice_E == number).cpu()
            self._action[t] = torch.where(is_chosen_E, action_E.cpu(), self._action[t])

    def _ask(self, t: int, name: str, network: Any, observation: dict[str, Tensor]) -> Tensor:
        logits_EA: Tensor
        logits_EA, self._tables[name].value[t] = network[name](observation)
        return logits_EA

    def _estimate(self, network: Any, last_observations: LastObservations) -> None:
        """Fill in the advantages of each module, for its own reward."""
        for name, tables in self._tables.items():
            self._judge(
                network[name],
                self._own_reward(name),
                tables.value,
                last_observations,
                tables.advantage,
                tables.value_target,
            )

    def _own_reward(self, name: str) -> FloatArray:
        if name == SUPERVISOR:
            return self._reward
        return self._reward - (1.0 - self.gamma) * self._surcharges[name] * self._cost


class _Tables:
    """What one module said at each step; all are (T, E)."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.is_own = torch.zeros(shape, dtype=torch.bool)  # whether it leads here, and learns
        self.action = torch.zeros(shape, dtype=torch.int64)
        self.log_prob, self.value = torch.zeros(shape), torch.zeros(shape)
        self.advantage, self.value_target = torch.zeros(shape), torch.zeros(shape)

    def keep(self, t: int, logits_EA: Tensor, action_E: Tensor, is_own_E: Tensor) -> None:
        self.is_own[t], self.action[t] = is_own_E, action_E
        self.log_prob[t] = log_prob(log_probs(logits_EA), action_E)

    def own_rows(self, everything: Columns) -> Columns:
        """Return the rows that the module learns from, with its own figures."""
        own_B = self.is_own.flatten().nonzero().squeeze(1)
        figures = {
            name: getattr(self, name).flatten()
            for name in ("action", "log_prob", "value", "advantage", "value_target")
        }
        columns = everything._replace(**figures)
        return Columns(
            {name: table[own_B] for name, table in columns.observation.items()},
            *(table[own_B] for table in columns[1:]),
        )
