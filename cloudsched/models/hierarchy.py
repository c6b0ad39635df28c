"""A supervisor and two sub-agents: who decides is itself decided, from the live observation.

The supervisor is asked at every decision and nobody remembers anything, so the three together are
one network like any other: for training, evaluation and serving alike.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cloudsched.models.masking import most_likely
from cloudsched.models.networks import NetworkConfig, Observation, ObservationSizes, build_network

SUPERVISOR, POWER, SLA = "supervisor", "power", "sla"
SUB_AGENTS = (POWER, SLA)
"""In the order of the supervisor's actions."""
MODULES = (SUPERVISOR, *SUB_AGENTS)


class SupervisorNetwork(nn.Module):
    """Scores the sub-agents; its weights depend neither on N nor on K."""

    def __init__(self, sizes: ObservationSizes, config: NetworkConfig) -> None:
        super().__init__()
        width, context_width = config.width, config.context_width
        self.server_in = nn.Linear(sizes.server_features, width)
        self.job_in = nn.Linear(sizes.job_features, width)
        pooled = sizes.context_features + 2 * width
        self.cluster = nn.Sequential(
            nn.Linear(pooled, context_width),
            nn.ReLU(),
            nn.Linear(context_width, context_width),
            nn.ReLU(),
        )
        # One layer gives the scores and the value.
        self.out = nn.Linear(context_width, len(SUB_AGENTS) + 1)
        nn.init.orthogonal_(self.out.weight, gain=0.01)
        nn.init.zeros_(self.out.bias)

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return logits (B, 2) of the sub-agents and values (B,)."""
        jobs_BKF = observation["jobs"]
        is_present_BK1 = jobs_BKF[:, :, -1:]
        job_BKW = torch.relu_(self.job_in(jobs_BKF)) * is_present_BK1
        pooled = torch.cat(
            [
                observation["context"],
                torch.relu_(self.server_in(observation["servers"])).mean(dim=1),
                job_BKW.sum(dim=1) / is_present_BK1.sum(dim=1).clamp(min=1.0),
            ],
            dim=1,
        )
        out_B3 = self.out(self.cluster(pooled))
        return out_B3[:, :-1], out_B3[:, -1]


class HierarchyNetwork(nn.Module):
    """Three networks that act as one: the likelier sub-agent by the supervisor decides."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name in MODULES:
            self.add_module(name, networks[name])

    @classmethod
    def build(cls, sizes: ObservationSizes, config: NetworkConfig) -> HierarchyNetwork:
        """Build all three with fresh weights."""
        sub_agents = {name: build_network(sizes, config) for name in SUB_AGENTS}
        return cls({SUPERVISOR: SupervisorNetwork(sizes, config), **sub_agents})

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return masked logits (B, A) of the sub-agents chosen, and the supervisor's values."""
        supervisor, *sub_agents = (self.get_submodule(name) for name in MODULES)
        scores_B2, value_B = supervisor(observation)
        choice_B = most_likely(scores_B2)
        logits_2BA = torch.stack([network(observation)[0] for network in sub_agents])
        return logits_2BA[choice_B, torch.arange(len(choice_B), device=choice_B.device)], value_B

    def single_minded(self) -> list[HierarchyNetwork]:
        """Return copies whose supervisors always choose the same sub-agent, one for each."""
        copies = [copy.deepcopy(self) for _ in SUB_AGENTS]
        for choice, network in enumerate(copies):
            out = network.get_submodule(f"{SUPERVISOR}.out")
            assert isinstance(out, nn.Linear)
            with torch.no_grad():
                out.weight[:-1] = 0.0
                out.bias[:-1] = torch.eye(len(SUB_AGENTS))[choice]
        return copies
