"""Networks of offline learning, with all heads (`cloudsched.models.heads`) in one pass.

All heads are linear in the last layers, so each is one ordinary network: `single` returns its
weights, and a bundle needs nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from cloudsched.models.heads import COST, NUM_HEADS, POLICY, PRIOR, REWARD, Heads
from cloudsched.models.kinds import is_asleep
from cloudsched.models.legal import chosen_scores
from cloudsched.models.networks import (
    ROW,
    FlatNetwork,
    NetworkConfig,
    Observation,
    ObservationSizes,
    SetNetwork,
    is_fixed,
    joined,
)
from cloudsched.models.precision import Linear, Output

FIXED = "fixed"
"""(X,) what is the same in all rows."""

Condense = Callable[[Observation], dict[str, Tensor]]
"""Makes of observations what a network reads, as it reads it."""

IS_LOGIT = (1.0, 0.0, 0.0, 1.0)  # of the heads


class SetHeads(SetNetwork):
    """`SetNetwork` with four outputs instead of one at each of its last layers."""

    context_layer = Linear

    def __init__(self, sizes: ObservationSizes, config: NetworkConfig) -> None:
        super().__init__(sizes, config)
        prior = {name: getattr(self, name) for name in ("pair_out", "kind_out", "server_out")}
        self._pair_width = config.pair_width
        self.pair_out = nn.Linear(config.pair_width, NUM_HEADS)
        self.kind_out = nn.Linear(config.context_width, 4 * NUM_HEADS)
        self.server_out = nn.Linear(config.width, config.pair_width + 2 * NUM_HEADS)
        last = self.critic[-1]
        assert isinstance(last, nn.Linear)
        self.critic[-1] = Output(last.in_features, 2)
        with torch.no_grad():
            for layer in (self.pair_out, self.kind_out, self.critic[-1]):
                assert isinstance(layer, nn.Linear)
                layer.weight.zero_()
                layer.bias.zero_()
            self.server_out.weight[config.pair_width :].zero_()
            self.server_out.bias[config.pair_width :].zero_()
            for head in (PRIOR, POLICY):
                self.kind_out.bias[4 * head : 4 * head + 4] = prior["kind_out"].bias

    def forward(self, observation: Observation) -> Heads:  # type: ignore[override]
        """Return all heads; observations as `condensing` leaves them will do."""
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
        cluster_BC = self.actor_context(pooled).float()
        hidden_BNW = torch.relu_(
            self.server_hidden(server_BNW) + self.context_to_server(cluster_BC).unsqueeze(1)
        )
        kind_BH4 = self.kind_out(cluster_BC).unflatten(1, (NUM_HEADS, 4))
        pair_BNP, toggle = self.server_out(hidden_BNW).tensor_split([self._pair_width], dim=2)

        is_legal = mask_BA[:, :num_pairs] != 0
        batch_M, action_M = is_legal.nonzero(as_tuple=True)
        hidden_MP = self.pair_hidden(
            observation, pair_BNP, self.pair_job(job_BKW), batch_M, action_M
        )
        score_MH = self.pair_out(hidden_MP) + kind_BH4[:, :, 0].index_select(0, batch_M)
        pairs_BAH = score_MH.new_zeros(batch, num_pairs, NUM_HEADS)
        pairs_BAH = pairs_BAH.index_put((batch_M, action_M), score_MH)
        parts = [pairs_BAH.transpose(1, 2)]
        is_asleep_BN = is_asleep(observation)
        if mask_BA.shape[1] > num_pairs + 1:
            toggle_BHN2 = toggle.unflatten(2, (NUM_HEADS, 2)).transpose(1, 2)
            toggle_BHN2 = toggle_BHN2 + kind_BH4[:, :, None, 1:3]
            parts.append(torch.where(is_asleep_BN.unsqueeze(1), *toggle_BHN2.unbind(dim=3)))
        parts.append(kind_BH4[:, :, 3:])
        outputs_BHA = torch.cat(parts, dim=2)
        if self.is_balanced:
            log_counts_BA = _log_counts(mask_BA, is_legal, is_asleep_BN)
            is_logit_H = outputs_BHA.new_tensor(IS_LOGIT)
            outputs_BHA = outputs_BHA - log_counts_BA.unsqueeze(1) * is_logit_H[:, None]
        return Heads(outputs_BHA, mask_BA, self.critic(pooled))

    def advice(self, observation: Observation) -> Tensor:
        """Return (B, 3, A) all heads but the policy."""
        heads = self.forward(observation)
        return heads.outputs_BHA[:, :POLICY]

    def condensing(self) -> Condense:
        """Return what makes of B observations what `forward` reads: all of it."""
        return dict

    def taken(self, observation: Observation, action_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, 2) the values, and (B, 2) the advantages of one action each."""
        heads = self(observation)
        taken_B1 = action_B.unsqueeze(1)
        gain = [heads.reward_BA.gather(1, taken_B1), heads.cost_BA.gather(1, taken_B1)]
        return heads.value_B2, torch.cat(gain, dim=1)

    def start_at(self, values_2: Tensor) -> None:
        """Make these the values of everything."""
        last = self.critic[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.bias.copy_(values_2)

    def fast_parameters(self) -> list[nn.Parameter]:
        """Return what has to grow large: placements differ by little in what they leave over."""
        layers = (self.pair_features, self.pair_job, self.pair_out)
        return [p for layer in layers for p in layer.parameters()]

    def single(self, head: int) -> dict[str, Tensor]:
        """Return the weights of a `SetNetwork` whose logits are those of one head."""
        state = dict(self.state_dict())
        width = self._pair_width
        for end in ("weight", "bias"):
            state[f"pair_out.{end}"] = state[f"pair_out.{end}"][head : head + 1]
            state[f"kind_out.{end}"] = state[f"kind_out.{end}"][4 * head : 4 * head + 4]
            server = state[f"server_out.{end}"]
            toggles = server[width + 2 * head : width + 2 * head + 2]
            state[f"server_out.{end}"] = torch.cat([server[:width], toggles])
            last = f"critic.{len(self.critic) - 1}.{end}"
            state[last] = state[last][:1]
        return state


class FlatHeads(nn.Module):
    """`FlatNetwork` with all heads and both values on one body.

    Its fleet is always the same, so that what never changes about the servers adds as much to every
    row. Their weights learn like all others, but take part in no product of many rows; they are the
    last ones of the first layer.
    """

    def __init__(self, sizes: ObservationSizes, config: NetworkConfig) -> None:
        super().__init__()
        self._num_actions = sizes.num_actions
        first, _, second, _, _ = FlatNetwork(sizes, config).actor
        assert isinstance(first, Linear)
        assert isinstance(second, Linear)
        is_fixed_F = is_fixed(sizes)
        self._order = torch.cat([(~is_fixed_F).nonzero(), is_fixed_F.nonzero()]).squeeze(1)
        self._num_changing = int((~is_fixed_F).sum())
        self.first: Linear = first
        self.second: Linear = second
        with torch.no_grad():
            first.weight.copy_(first.weight[:, self._order])
        # Advantages are told apart however rough the product is; values are not.
        self.out = Linear(config.flat_width, NUM_HEADS * sizes.num_actions)
        self.value = Output(config.flat_width, 2)
        for layer in (self.out, self.value):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, observation: Observation) -> Heads:
        """Return all heads; observations as `condensing` leaves them will do."""
        body_BW = self._body(observation)
        outputs_BHA = self.out(body_BW).float().view(-1, NUM_HEADS, self._num_actions)
        return Heads(outputs_BHA, observation["action_mask"], self.value(body_BW))

    def advice(self, observation: Observation) -> Tensor:
        """Return (B, 3, A) all heads but the policy."""
        outputs_BO = self.out.first(self._body(observation), POLICY * self._num_actions)
        return outputs_BO.float().view(-1, POLICY, self._num_actions)

    def taken(self, observation: Observation, action_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, 2) the values, and (B, 2) the advantages of one action each.

        It takes as many products as there are rows, not those of all actions.
        """
        body_BW = self._body(observation).float()
        chosen_B2 = torch.stack([h * self._num_actions + action_B for h in (REWARD, COST)], dim=1)
        return self.value(body_BW), chosen_scores(body_BW, self.out, chosen_B2)

    def condensing(self) -> Condense:
        """Return what makes of B observations what `forward` reads; it holds no weights."""
        changing, fixed = self._order.tensor_split([self._num_changing])
        return partial(
            _condensed, changing=changing.clone(), fixed=fixed.clone(), dtype=self.first.products
        )

    def split_first(self, first_WF: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first layer's weights, or gradients, for what changes, and what never does."""
        changing_WC, fixed_WX = first_WF.tensor_split([self._num_changing], dim=1)
        return changing_WC, fixed_WX

    def _body(self, observation: Observation) -> Tensor:
        if ROW not in observation:
            observation = self.condensing()(observation)
        changing_WC, fixed_WX = self.split_first(self.first.weight)
        bias_W = self.first.bias + fixed_WX @ observation[FIXED]
        parts = (part.to(self.first.products) for part in (observation[ROW], changing_WC, bias_W))
        hidden_BW = torch.relu_(nn.functional.linear(*parts))
        return torch.relu_(self.second(hidden_BW))

    def start_at(self, values_2: Tensor) -> None:
        """Make these the values of everything."""
        with torch.no_grad():
            self.value.bias.copy_(values_2)

    def fast_parameters(self) -> list[nn.Parameter]:
        """Return none: all of a perceptron's layers learn alike."""
        return []

    def single(self, head: int) -> dict[str, Tensor]:
        """Return the weights of a `FlatNetwork` whose logits are those of one head."""
        first_WF = torch.empty_like(self.first.weight)
        first_WF[:, self._order] = self.first.weight.detach()
        start, end = head * self._num_actions, (head + 1) * self._num_actions
        layers = {
            "0": (first_WF, self.first.bias),
            "2": (self.second.weight, self.second.bias),
        }
        actor = {**layers, "4": (self.out.weight[start:end], self.out.bias[start:end])}
        critic = {**layers, "4": (self.value.weight[:1], self.value.bias[:1])}
        return {
            f"{net}.{number}.{name}": tensor.detach()
            for net, numbered in (("actor", actor), ("critic", critic))
            for number, layer in numbered.items()
            for name, tensor in zip(("weight", "bias"), layer, strict=True)
        }


def _condensed(
    observation: Observation, *, changing: Tensor, fixed: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return B observations as a flat network reads them.

    Args:
        changing: which of all features in one row change.
        fixed: which never do.
    """
    row_BF = joined(observation)
    return {
        ROW: row_BF.index_select(1, changing.to(row_BF.device)).to(dtype),
        FIXED: row_BF[0, fixed.to(row_BF.device)],
        "action_mask": observation["action_mask"],
    }


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
