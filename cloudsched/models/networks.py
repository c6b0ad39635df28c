"""The networks: observations in, masked logits (B, A) and values (B,) out.

`SetNetwork` shares its weights over servers and over jobs, so they depend neither on N nor on K,
and it scores only pairs that fit. `FlatNetwork` is the classic pair of perceptrons on everything at
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cloudsched.config import ClusterConfig, Settings
from cloudsched.envs.observation import feature_shapes
from cloudsched.errors import ConfigError
from cloudsched.heuristics.parameters import HeuristicConfig
from cloudsched.models.kinds import NUM_KINDS
from cloudsched.models.legal import legal_scores
from cloudsched.models.masking import mask_logits
from cloudsched.models.pairs import NUM_PAIR_FEATURES, pair_features
from cloudsched.models.precision import Linear, Output
from cloudsched.models.prior import LARGEST_LEAD, RuleCorrection, RulePrior
from cloudsched.models.scoring import ActionScores, Scene
from cloudsched.registry import Registry

Observation = Mapping[str, Tensor]
ROW = "row"


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Settings):
    """Which network, and how wide."""

    kind: str = "set"
    """`set`: weights shared over servers and jobs; `flat`: one perceptron on everything."""
    width: int = 32
    """set: width of the embedding of a server or a job."""
    context_width: int = 128
    """set: width of the embedding of the whole cluster."""
    pair_width: int = 32
    """set: width of the embedding of a job on a server."""
    flat_width: int = 256
    """flat: width of both hidden layers."""
    is_balanced: bool = True
    """set: whether a kind of action is as likely however many of it are legal. For probabilities;
    action values need no such correction."""
    prior: HeuristicConfig | None = None
    """The rule that the network corrects; None to start from nothing."""
    prior_weight: float = 4.0
    """Score of what the rule would do; the actions begin near zero."""
    prior_leads: tuple[float, ...] = (0.0,) * NUM_KINDS
    """What other actions have to make up for beside that, by their kind: to place, to wake, to put
    to sleep, to wait."""
    prior_due_ticks: int | None = None
    """While a visible job has no more than so many ticks left to start in time, only the rule may
    decide to wait: no network holds it back. None leaves it to the network."""

    def __post_init__(self) -> None:
        self._choice("kind", tuple(NETWORKS))
        for name in ("width", "context_width", "pair_width", "flat_width"):
            self._integer(name, low=1, high=65_536)
        self._flag("is_balanced")
        self._number("prior_weight", low=0.0, high=100.0)
        leads = self.prior_leads
        are_numbers = isinstance(leads, tuple) and all(isinstance(x, int | float) for x in leads)
        is_right = are_numbers and all(0.0 <= lead <= LARGEST_LEAD for lead in leads)
        if not is_right or len(leads) != NUM_KINDS:
            raise ConfigError(
                f"prior_leads={leads!r}: expected {NUM_KINDS} numbers from 0 to {LARGEST_LEAD:g}."
            )
        if self.prior_due_ticks is not None:
            self._integer("prior_due_ticks", low=-1000, high=1000)
        if self.prior is not None and self.prior.place_cycle != 0.0:
            raise ConfigError(
                "prior: a rule that takes servers in turn (place_cycle) remembers the last one; "
                "expected a rule that decides from the observation alone."
            )


@dataclass(frozen=True, kw_only=True)
class ObservationSizes:
    """The sizes that networks are built for."""

    num_servers: int
    num_jobs: int
    server_features: int
    job_features: int
    context_features: int
    num_actions: int

    @classmethod
    def of(cls, config: ClusterConfig) -> ObservationSizes:
        """Return the sizes of a cluster's observations."""
        servers, jobs, context = feature_shapes(
            config.num_servers, config.visible_jobs, config.num_resources
        )
        return cls(
            num_servers=servers[0],
            num_jobs=jobs[0],
            server_features=servers[1],
            job_features=jobs[1],
            context_features=context[0],
            num_actions=config.num_actions,
        )

    @property
    def num_resources(self) -> int:
        """R."""
        return (self.server_features - 12) // 2


class FlatNetwork(nn.Module):
    """Two perceptrons, actor and critic, on all features in one row."""

    def __init__(self, sizes: ObservationSizes, config: NetworkConfig) -> None:
        super().__init__()
        features = (
            sizes.num_servers * sizes.server_features
            + sizes.num_jobs * sizes.job_features
            + sizes.context_features
        )
        self.actor = _perceptron(features, config.flat_width, sizes.num_actions, Linear)
        self.critic = _perceptron(features, config.flat_width, 1, Linear)
        self.is_fixed_F = is_fixed(sizes)

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return masked logits (B, A) and values (B,); `condensed` observations will do."""
        row_BF = observation[ROW] if ROW in observation else joined(observation)
        *layers, last = self.actor
        hidden_BH = row_BF
        for layer in layers:
            hidden_BH = layer(hidden_BH)
        assert isinstance(last, nn.Linear)
        logits_BA = legal_scores(hidden_BH, last, observation["action_mask"])
        return logits_BA, self.critic(row_BF).squeeze(-1)

    def condensed(self, observation: Observation) -> dict[str, Tensor]:
        """Return what `forward` reads of B observations, as it reads it.

        Minibatches are cheaper to take from it, and features are joined and rounded only once.
        """
        first = self.actor[0]
        assert isinstance(first, Linear)
        row_BF = joined(observation).to(first.products)
        return {ROW: row_BF, "action_mask": observation["action_mask"]}


class SetNetwork(nn.Module):
    """Scores every job on every server that it fits, every toggle, and waiting.

    The logit of an action is its own score plus that of its kind (place, wake, sleep, wait) minus
    the log of how many actions of the kind are legal: a kind is not likelier because it has more
    actions, so that a policy means the same on 15 servers and on 500.
    """

    context_layer: type[nn.Linear] = nn.Linear
    """Of what tells the cluster as a whole; too small for PPO to gain from rounded products."""

    def __init__(self, sizes: ObservationSizes, config: NetworkConfig) -> None:
        super().__init__()
        width, context_width, pair_width = config.width, config.context_width, config.pair_width
        self.num_resources = sizes.num_resources
        self.is_balanced = config.is_balanced
        self.has_prior = config.prior is not None
        self.server_in = nn.Linear(sizes.server_features, width)
        self.job_in = nn.Linear(sizes.job_features, width)
        self.context_in = nn.Linear(sizes.context_features, 2 * width, bias=False)

        pooled = sizes.context_features + 3 * width
        self.actor_context = _perceptron(
            pooled, context_width, context_width, self.context_layer, is_open=False
        )
        self.critic = _perceptron(pooled, context_width, 1, self.context_layer)

        self.server_hidden = nn.Linear(width, width)
        self.context_to_server = nn.Linear(context_width, width, bias=False)
        # One product gives both what a server brings to its pairs and its two toggle scores.
        self.server_out = nn.Linear(width, pair_width + 2)
        self.pair_job = nn.Linear(width, pair_width, bias=False)
        self.pair_features = nn.Linear(NUM_PAIR_FEATURES, pair_width, bias=False)
        self.pair_out = nn.Linear(pair_width, 1)
        self.kind_out = nn.Linear(context_width, 4)
        self._start_calm()

    def _start_calm(self) -> None:
        """Begin as a policy that places whatever fits, anywhere, and rarely toggles."""
        for layer in (self.pair_out, self.kind_out):
            nn.init.orthogonal_(layer.weight, gain=0.01)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.server_out.weight[-2:] *= 0.01
            self.server_out.bias[-2:] = 0.0
            # Beside a rule, that is the rule's business; toggles it did not ask for stay rare.
            calm = torch.tensor([0.0 if self.has_prior else 1.0, -1.0, -1.0, 0.0])
            # In action values it is a reward, of about the size that decisions differ by.
            self.kind_out.bias.copy_(2.0 * calm if self.is_balanced else calm)

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return masked logits (B, A) and values (B,)."""
        servers_BNF, jobs_BKF = observation["servers"], observation["jobs"]
        context_BF = observation["context"]
        to_server_BW, to_job_BW = self.context_in(context_BF).chunk(2, dim=-1)
        server_BNW = _embed(self.server_in, servers_BNF, to_server_BW)
        is_present_BK1 = jobs_BKF[:, :, -1:]
        job_BKW = _embed(self.job_in, jobs_BKF, to_job_BW) * is_present_BK1

        num_present = is_present_BK1.sum(dim=1).clamp(min=1.0)
        pooled = torch.cat(
            [
                context_BF,
                server_BNW.mean(dim=1),
                job_BKW.sum(dim=1) / num_present,
                job_BKW.amax(dim=1),  # embeddings are not negative, so empty slots do not matter
            ],
            dim=1,
        )
        cluster_BC = self.actor_context(pooled)
        value_B = self.critic(pooled).squeeze(-1)

        hidden_BNW = _embed(self.server_hidden, server_BNW, self.context_to_server(cluster_BC))
        kind_B4 = self.kind_out(cluster_BC)
        out_BNP2, pair_job_BKP = self.server_out(hidden_BNW), self.pair_job(job_BKW)
        if out_BNP2.device.type != "cpu":
            return self.score(observation, out_BNP2, pair_job_BKP, kind_B4), value_B
        logits_BA: Tensor = ActionScores.apply(  # type: ignore[no-untyped-call]
            out_BNP2,
            pair_job_BKP,
            kind_B4,
            self.pair_features.weight,
            self.pair_out.weight,
            self.pair_out.bias,
            Scene.of(observation, self.num_resources, self.is_balanced),
        )
        return logits_BA, value_B

    def score(
        self, observation: Observation, out_BNP2: Tensor, pair_job_BKP: Tensor, kind_B4: Tensor
    ) -> Tensor:
        """Return masked logits (B, A); what `ActionScores` does on the CPU, on any device."""
        mask_BA = observation["action_mask"]
        pair_BNP, toggle_BN2 = out_BNP2.tensor_split([-2], dim=2)
        parts = [self._placements(observation, pair_BNP, pair_job_BKP, kind_B4[:, 0])]
        if mask_BA.shape[1] > parts[0].shape[1] + 1:
            parts.append(self._toggles(observation, toggle_BN2, kind_B4))
        parts.append(kind_B4[:, 3:])
        return mask_logits(torch.cat(parts, dim=1), mask_BA)

    def _placements(
        self, observation: Observation, server_BNP: Tensor, pair_job_BKP: Tensor, kind_B: Tensor
    ) -> Tensor:
        """Return (B, K*N) logits of the placements; zero where a job does not fit."""
        num_servers, num_jobs = server_BNP.shape[1], pair_job_BKP.shape[1]
        is_legal = observation["action_mask"][:, : num_jobs * num_servers] != 0
        batch_M, action_M = is_legal.nonzero(as_tuple=True)
        hidden_MP = self.pair_hidden(observation, server_BNP, pair_job_BKP, batch_M, action_M)
        if self.is_balanced:
            kind_B = kind_B - is_legal.sum(dim=1).clamp(min=1).log()
        score_M = self.pair_out(hidden_MP).squeeze(-1) + kind_B.index_select(0, batch_M)
        return torch.zeros_like(is_legal, dtype=score_M.dtype).masked_scatter(is_legal, score_M)

    def pair_hidden(
        self,
        observation: Observation,
        server_BNP: Tensor,
        pair_job_BKP: Tensor,
        batch_M: Tensor,
        action_M: Tensor,
    ) -> Tensor:
        """Return (M, P) embeddings of the placements `action_M` in the clusters `batch_M`."""
        num_servers, num_jobs = server_BNP.shape[1], pair_job_BKP.shape[1]
        server_M = batch_M * num_servers + action_M % num_servers
        job_M = batch_M * num_jobs + action_M // num_servers
        features_MP = pair_features(
            observation["servers"].flatten(0, 1).index_select(0, server_M),
            observation["jobs"].flatten(0, 1).index_select(0, job_M),
            self.num_resources,
        )
        return torch.relu_(
            server_BNP.flatten(0, 1).index_select(0, server_M)
            + pair_job_BKP.flatten(0, 1).index_select(0, job_M)
            + self.pair_features(features_MP)
        )

    def _toggles(self, observation: Observation, score_BN2: Tensor, kind_B4: Tensor) -> Tensor:
        """Return (B, N) logits of the toggles: waking where asleep, else sleeping."""
        num_servers = score_BN2.shape[1]
        is_legal = observation["action_mask"][:, -1 - num_servers : -1] != 0
        is_asleep = observation["servers"][:, :, 2 * self.num_resources + 5] != 0.0
        kind_B2 = kind_B4[:, 1:3]
        if self.is_balanced:
            num_asleep = is_asleep.sum(dim=1)
            num_idle = is_legal.sum(dim=1) - num_asleep
            kind_B2 = kind_B2 - torch.stack([num_asleep, num_idle], 1).clamp(min=1).log()
        score_BN2 = score_BN2 + kind_B2.unsqueeze(1)
        return torch.where(is_asleep, score_BN2[:, :, 0], score_BN2[:, :, 1])


class QNetwork(nn.Module):
    """A network whose two outputs become action values, in the dueling way.

    A value is that of the observation plus how much better the action is than the mean of the legal
    ones.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return masked action values (B, A) and the highest of each row (B,)."""
        mask_BA = observation["action_mask"]
        logits_BA, value_B = self.network(observation)
        legal_BA = logits_BA.masked_fill(mask_BA == 0, 0.0)
        mean_B1 = legal_BA.sum(dim=1, keepdim=True) / mask_BA.sum(dim=1, keepdim=True)
        q_BA = mask_logits(value_B.unsqueeze(1) + legal_BA - mean_B1, mask_BA)
        return q_BA, q_BA.amax(dim=1)


NETWORKS: Registry[type[FlatNetwork] | type[SetNetwork]] = Registry(
    "network", {"set": SetNetwork, "flat": FlatNetwork}
)


def build_network(sizes: ObservationSizes, config: NetworkConfig) -> nn.Module:
    """Build a network with fresh weights, and beside it the rule that it corrects, if any."""
    network = NETWORKS[config.kind](sizes, config)
    if config.prior is None:
        return network
    is_balanced = config.is_balanced and config.kind == "set"
    prior = RulePrior(
        config.prior,
        config.prior_weight,
        config.prior_leads,
        sizes.num_resources,
        due_ticks=config.prior_due_ticks,
        is_balanced=is_balanced,
    )
    return RuleCorrection(network, prior)


def joined(observation: Observation) -> Tensor:
    """Return all features of a cluster in one row, (B, F)."""
    servers, jobs = observation["servers"], observation["jobs"]
    return torch.cat([servers.flatten(1), jobs.flatten(1), observation["context"]], dim=1)


def is_fixed(sizes: ObservationSizes) -> Tensor:
    """Return (F,) which of all features in one row never change: capacities and watts."""
    is_fixed_NF = torch.zeros(sizes.num_servers, sizes.server_features, dtype=torch.bool)
    is_fixed_NF[:, sizes.num_resources : 2 * sizes.num_resources + 3] = True
    num_others = sizes.num_jobs * sizes.job_features + sizes.context_features
    return torch.cat([is_fixed_NF.flatten(), torch.zeros(num_others, dtype=torch.bool)])


def _embed(layer: nn.Linear, things_BNF: Tensor, to_each_BW: Tensor) -> Tensor:
    """Return (B, N, W) embeddings of things, each from its features and what the cluster adds.

    The bias goes to the cluster's part, which is small, and the sum is taken in place: a pass over
    all things of all clusters costs more than their products.
    """
    to_each_BW = to_each_BW + layer.bias
    return torch.relu_(nn.functional.linear(things_BNF, layer.weight).add_(to_each_BW.unsqueeze(1)))


def _perceptron(
    inputs: int, width: int, outputs: int, layer: type[nn.Linear], *, is_open: bool = True
) -> nn.Sequential:
    """Return two hidden layers of a class, the second being the last unless `is_open`."""
    layers: list[Any] = [layer(inputs, width), nn.ReLU(True), layer(width, width), nn.ReLU(True)]
    if is_open:
        layers.append(Output(width, outputs))
        nn.init.orthogonal_(layers[-1].weight, gain=0.01)
        nn.init.zeros_(layers[-1].bias)
    return nn.Sequential(*layers)
