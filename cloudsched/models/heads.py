"""Networks of offline learning: a prior over actions, and two values of each, in one pass.

What they return for B observations is a `Heads`. The logits of the prior are those of a policy that
imitates the data. Advantages say how much better or worse an action is than what the data would do,
in power (reward) and in SLA violations (cost); values are those of doing as the data for one
decision and following the learned policy afterwards.

All three are linear in the last layers, so their weighted sum is one ordinary network with one
head: `combined` returns its weights, and a bundle needs nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cloudsched.models.masking import mask_logits
from cloudsched.models.networks import (
    FlatNetwork,
    NetworkConfig,
    Observation,
    ObservationSizes,
    SetNetwork,
)

PRIOR, REWARD, COST = range(3)
NUM_HEADS = 3


class Heads(NamedTuple):
    """What the network says of B observations; advantages of illegal actions mean nothing."""

    prior_BA: Tensor  # masked logits
    reward_BA: Tensor
    cost_BA: Tensor
    value_B2: Tensor  # of reward and of cost

    def score(self, *, price: float | Tensor, temperature: float | Tensor) -> Tensor:
        """Return (B, A) masked logits of the best policy that stays near the prior.

        It maximises reward - price * cost - temperature * KL(policy || prior).
        """
        return self.prior_BA + (self.reward_BA - price * self.cost_BA) / temperature


class SetHeads(SetNetwork):
    """`SetNetwork` with three outputs instead of one at each of its last layers."""

    def __init__(self, sizes: ObservationSizes, config: NetworkConfig) -> None:
        super().__init__(sizes, config)
        prior = {name: getattr(self, name) for name in ("pair_out", "kind_out", "server_out")}
        self._pair_width = config.pair_width
        self.pair_out = nn.Linear(config.pair_width, NUM_HEADS)
        self.kind_out = nn.Linear(config.context_width, 4 * NUM_HEADS)
        self.server_out = nn.Linear(config.width, config.pair_width + 2 * NUM_HEADS)
        last = self.critic[-1]
        assert isinstance(last, nn.Linear)
        self.critic[-1] = nn.Linear(last.in_features, 2)
        with torch.no_grad():
            for layer in (self.pair_out, self.kind_out, self.critic[-1]):
                assert isinstance(layer, nn.Linear)
                layer.weight.zero_()
                layer.bias.zero_()
            self.server_out.weight[config.pair_width :].zero_()
            self.server_out.bias[config.pair_width :].zero_()
            self.kind_out.bias[:4] = prior["kind_out"].bias

    def forward(self, observation: Observation) -> Heads:  # type: ignore[override]
        """Return all heads."""
        servers_BNF, jobs_BKF = observation["servers"], observation["jobs"]
        context_BF, mask_BA = observation["context"], observation["action_mask"]
        batch, num_servers, num_jobs = len(mask_BA), servers_BNF.shape[1], jobs_BKF.shape[1]
        num_pairs = num_servers * num_jobs
        to_server, to_job = self.context_in(context_BF).unsqueeze(1).chunk(2, dim=-1)
        server_BNW = torch.relu_(self.server_in(servers_BNF) + to_server)
        is_present_BK1 = jobs_BKF[:, :, -1:]
        job_BKW = torch.relu_(self.job_in(jobs_BKF) + to_job) * is_present_BK1
        pooled = torch.cat(
            [
                context_BF,
                server_BNW.mean(dim=1),
                job_BKW.sum(dim=1) / is_present_BK1.sum(dim=1).clamp(min=1.0),
                job_BKW.amax(dim=1),
            ],
            dim=1,
        )
        cluster_BC = self.actor_context(pooled)
        hidden_BNW = torch.relu_(
            self.server_hidden(server_BNW) + self.context_to_server(cluster_BC).unsqueeze(1)
        )
        kind_BH4 = self.kind_out(cluster_BC).unflatten(1, (NUM_HEADS, 4))
        pair_BNP, toggle = self.server_out(hidden_BNW).tensor_split([self._pair_width], dim=2)

        is_legal = mask_BA[:, :num_pairs] != 0
        batch_M, action_M = is_legal.nonzero(as_tuple=True)
        hidden_MP = self.pair_hidden(observation, pair_BNP, job_BKW, batch_M, action_M)
        score_MH = self.pair_out(hidden_MP) + kind_BH4[:, :, 0].index_select(0, batch_M)
        pairs_BAH = score_MH.new_zeros(batch, num_pairs, NUM_HEADS)
        pairs_BAH = pairs_BAH.index_put((batch_M, action_M), score_MH)
        parts = [pairs_BAH.transpose(1, 2)]
        is_asleep = servers_BNF[:, :, 2 * self.num_resources + 5] != 0.0
        if mask_BA.shape[1] > num_pairs + 1:
            toggle_BHN2 = toggle.unflatten(2, (NUM_HEADS, 2)).transpose(1, 2)
            toggle_BHN2 = toggle_BHN2 + kind_BH4[:, :, None, 1:3]
            parts.append(torch.where(is_asleep.unsqueeze(1), *toggle_BHN2.unbind(dim=3)))
        parts.append(kind_BH4[:, :, 3:])
        prior_BA, reward_BA, cost_BA = torch.cat(parts, dim=2).unbind(dim=1)
        if self.is_balanced:
            prior_BA = prior_BA - _log_counts(mask_BA, is_legal, is_asleep)
        value_B2 = self.critic(pooled)
        return Heads(mask_logits(prior_BA, mask_BA), reward_BA, cost_BA, value_B2)

    def combined(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the weights of a `SetNetwork` whose logits are the heads' weighted sum."""
        state = dict(self.state_dict())
        width = self._pair_width
        for end in ("weight", "bias"):
            pair = state[f"pair_out.{end}"]
            state[f"pair_out.{end}"] = _mixed(pair, weights, 1)
            state[f"kind_out.{end}"] = _mixed(state[f"kind_out.{end}"], weights, 4)
            server = state[f"server_out.{end}"]
            toggles = _mixed(server[width:], weights, 2)
            state[f"server_out.{end}"] = torch.cat([server[:width], toggles])
            last = f"critic.{len(self.critic) - 1}.{end}"
            state[last] = state[last][:1]
        return state


class FlatHeads(FlatNetwork):
    """`FlatNetwork` with three times as many outputs, and two values."""

    def __init__(self, sizes: ObservationSizes, config: NetworkConfig) -> None:
        super().__init__(sizes, config)
        self._num_actions = sizes.num_actions
        for net, outputs in ((self.actor, NUM_HEADS * sizes.num_actions), (self.critic, 2)):
            last = net[-1]
            assert isinstance(last, nn.Linear)
            fresh = nn.Linear(last.in_features, outputs)
            nn.init.zeros_(fresh.weight)
            nn.init.zeros_(fresh.bias)
            net[-1] = fresh

    def forward(self, observation: Observation) -> Heads:  # type: ignore[override]
        """Return all heads."""
        servers, jobs = observation["servers"], observation["jobs"]
        row_BF = torch.cat([servers.flatten(1), jobs.flatten(1), observation["context"]], dim=1)
        prior_BA, reward_BA, cost_BA = self.actor(row_BF).split(self._num_actions, dim=1)
        prior_BA = mask_logits(prior_BA, observation["action_mask"])
        return Heads(prior_BA, reward_BA, cost_BA, self.critic(row_BF))

    def combined(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the weights of a `FlatNetwork` whose logits are the heads' weighted sum."""
        state = dict(self.state_dict())
        for end in ("weight", "bias"):
            actor = f"actor.{len(self.actor) - 1}.{end}"
            state[actor] = _mixed(state[actor], weights, self._num_actions)
            critic = f"critic.{len(self.critic) - 1}.{end}"
            state[critic] = state[critic][:1]
        return state


HeadNetwork = SetHeads | FlatHeads

HEAD_NETWORKS: Mapping[str, type[SetHeads] | type[FlatHeads]] = {"set": SetHeads, "flat": FlatHeads}


def build_heads(sizes: ObservationSizes, config: NetworkConfig) -> HeadNetwork:
    """Build a network with fresh weights."""
    return HEAD_NETWORKS[config.kind](sizes, config)


def _log_counts(mask_BA: Tensor, is_placement_BP: Tensor, is_asleep_BN: Tensor) -> Tensor:
    """Return (B, A) the log of how many actions of each action's kind are legal."""
    num_pairs = is_placement_BP.shape[1]
    num_placements_B1 = is_placement_BP.sum(dim=1, keepdim=True)
    parts = [num_placements_B1.expand(-1, num_pairs)]
    if mask_BA.shape[1] > num_pairs + 1:
        num_toggles_B1 = (mask_BA[:, num_pairs:-1] != 0).sum(dim=1, keepdim=True)
        num_asleep_B1 = is_asleep_BN.sum(dim=1, keepdim=True)
        parts.append(torch.where(is_asleep_BN, num_asleep_B1, num_toggles_B1 - num_asleep_B1))
    parts.append(num_placements_B1.new_ones(len(mask_BA), 1))
    return torch.cat(parts, dim=1).clamp(min=1).log()


def _mixed(rows: Tensor, weights_H: Tensor, count: int) -> Tensor:
    """Sum the heads' rows, `count` for each head, with weights."""
    stacked = rows.reshape(NUM_HEADS, count, *rows.shape[1:])
    mixed: Tensor = torch.tensordot(weights_H.to(rows), stacked, dims=1)
    return mixed
