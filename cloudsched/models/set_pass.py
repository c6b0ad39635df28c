"""`SetNetwork` on a CPU without autograd: its observations, its layers and the room it needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloudsched.models.networks import Observation, SetNetwork
from cloudsched.models.pair_kernels import write_added_power
from cloudsched.models.pairs import NUM_PAIR_FEATURES
from cloudsched.models.set_learning_kernels import BLOCK, embed
from cloudsched.models.threads import Threads

Array = NDArray[np.float32]

CACHED_SERVERS = 16_384
"""Servers, over all rows, whose embeddings fit into a cache: a minibatch of 1,024 rows of 15."""
FEWEST_ROWS = 32
"""Rows of a part; with fewer, the perceptrons' weights are read more often than they are used."""


class Layers(NamedTuple):
    """Weights of the layers that kernels work on, or their gradients; matrices as torch has them.

    They are: what is embedded, then what scores servers, then what scores pairs.
    """

    server_in: Array  # (W, F)
    server_in_bias: Array
    job_in: Array
    job_in_bias: Array
    context_in: Array  # (2W, C')
    server_hidden: Array  # (W, W); its bias counts as a part of what the cluster adds
    server_out: Array  # (P + 2, W)
    server_out_bias: Array
    pair_job: Array  # (P, W)
    pair_features: Array  # (P, 8)
    pair_out: Array  # (1, P)
    pair_out_bias: Array


LAYERS = tuple(
    f"{name.removesuffix('_bias')}.{'bias' if name.endswith('_bias') else 'weight'}"
    for name in Layers._fields
)
"""Their names in the network."""


class Seen(NamedTuple):
    """B observations as the kernels read them."""

    servers: Array  # (B, N, F)
    jobs: Array  # (B, K, F)
    context: Array  # (B, C')
    first_pair: NDArray[np.int64]  # (B + 1,) where the legal placements of a row begin
    added_w: Array  # what these add to the power, server by server: dear, and needed again

    @classmethod
    def without_pairs(cls, observation: Observation) -> Seen:
        """Take over what a critic reads."""
        servers, jobs, context = (
            observation[name].contiguous().numpy() for name in ("servers", "jobs", "context")
        )
        return cls(servers, jobs, context, np.empty(0, np.int64), np.empty(0, np.float32))

    @classmethod
    def of(cls, network: SetNetwork, observation: Observation, threads: Threads) -> Seen:
        """Take over observations, and work out what does not depend on weights."""
        parts = ("servers", "jobs", "context", "action_mask")
        servers, jobs, context, mask = (observation[name].contiguous() for name in parts)
        num_placements = servers.shape[1] * jobs.shape[1]
        first_pair = np.zeros(len(mask) + 1, np.int64)
        np.cumsum(mask[:, :num_placements].sum(dim=1).numpy(), out=first_pair[1:])
        added_w = np.empty(first_pair[-1], np.float32)
        shares = threads.shares(torch.arange(len(mask)))

        def write_share(number: int) -> None:
            rows = slice(int(shares[number][0]), int(shares[number][-1]) + 1)
            write_added_power(
                servers[rows].numpy(),
                jobs[rows].numpy(),
                mask[rows].numpy(),
                network.num_resources,
                first_pair[rows],
                added_w,
            )

        threads.run(write_share, len(shares))
        return cls(servers.numpy(), jobs.numpy(), context.numpy(), first_pair, added_w)

    @property
    def rows_per_part(self) -> int:
        """Rows to take together."""
        num_servers: int = self.servers.shape[1]
        return max(FEWEST_ROWS, CACHED_SERVERS // num_servers)


class Room(NamedTuple):
    """Room for M rows, with S = M * N servers and J = M * K jobs of which the first ones are used.

    What was read for the last time is overwritten with its gradient.
    """

    server_x: Array  # (S, F) features
    server: Array  # (S, W) embeddings
    job_x: Array  # (J, F) features of the jobs that wait
    job: Array  # (J, W) their embeddings
    first_job: NDArray[np.int64]  # (M + 1,) where those of a row begin
    context_x: Array  # (M, C')
    both: Array  # (M, 2W) what the context adds to servers and to jobs
    needed: NDArray[np.int64]  # (S,) servers for which something is legal
    first_needed: NDArray[np.int64]  # (M + 1,) where those of a row begin
    embedded: Array  # (S, W) their embeddings
    hidden: Array  # (S, W)
    down: Array  # (S, W) gradient by what goes into the rectifier of `hidden`
    outs: Array  # (S, P + 2) what they bring to their pairs, and two toggle scores
    pair_job: Array  # (J, P) what jobs bring to their pairs
    job_up: Array  # (J, W) gradient by their embeddings, of what they bring
    job_at: NDArray[np.int64]  # (K,) jobs in the slots of a row
    features: Array  # (BLOCK + N * K, 8) of pairs
    pair: Array  # (BLOCK + N * K, P) their embeddings
    scores: Array  # (A,)
    ups: Array  # (A,) gradients by scores
    legal: NDArray[np.int64]  # (A,)
    weight: Array  # (8, P)
    product_w: Array  # (2W or P + 2, W) parts of gradients of weights, here and below
    product_8: Array  # (P, 8)
    product_s: Array  # (W, F)
    product_j: Array  # (W, F)
    product_c: Array  # (2W, C')

    @classmethod
    def of(cls, layers: Layers, seen: Seen, num_rows: int) -> Room:
        """Make room for rows of some observations."""
        (_, n, features), (_, k, job_features) = seen.servers.shape, seen.jobs.shape
        context, width, pairs = seen.context.shape[1], *layers.pair_job.shape[::-1]
        servers, jobs, at_once = num_rows * n, num_rows * k, BLOCK + n * k
        actions = (k + 1) * n + 1
        shapes = {
            "server_x": (servers, features),
            "server": (servers, width),
            "job_x": (jobs, job_features),
            "job": (jobs, width),
            "context_x": (num_rows, context),
            "both": (num_rows, 2 * width),
            "embedded": (servers, width),
            "hidden": (servers, width),
            "down": (servers, width),
            "outs": (servers, pairs + 2),
            "pair_job": (jobs, pairs),
            "job_up": (jobs, width),
            "features": (at_once, NUM_PAIR_FEATURES),
            "pair": (at_once, pairs),
            "scores": (actions,),
            "ups": (actions,),
            "weight": (NUM_PAIR_FEATURES, pairs),
            "product_w": (max(width, pairs + 2), width),
            "product_8": (pairs, NUM_PAIR_FEATURES),
            "product_s": (width, features),
            "product_j": (width, job_features),
            "product_c": (2 * width, context),
        }
        numbers = {
            "first_job": num_rows + 1,
            "needed": servers,
            "first_needed": num_rows + 1,
            "job_at": k,
            "legal": actions,
        }
        return cls(
            **{name: np.empty(shape, np.float32) for name, shape in shapes.items()},
            **{name: np.empty(size, np.int64) for name, size in numbers.items()},
        )


class Perceptrons(NamedTuple):
    """Weights of the layers between: the cluster as a whole, for the actor and for the critic."""

    first: Tensor  # (2C, C' + 3W) the actor's, then the critic's
    first_bias: Tensor
    actor: Tensor  # (C, C)
    actor_bias: Tensor
    critic: Tensor  # (C, C)
    critic_bias: Tensor
    value: Tensor  # (1, C)
    value_bias: Tensor
    to_each: Tensor  # (W + 4, C) what the cluster adds to its servers, then scores of kinds
    to_each_bias: Tensor


PERCEPTRONS = (
    ("actor_context.0.weight", "critic.0.weight"),
    ("actor_context.0.bias", "critic.0.bias"),
    ("actor_context.2.weight",),
    ("actor_context.2.bias",),
    ("critic.2.weight",),
    ("critic.2.bias",),
    ("critic.4.weight",),
    ("critic.4.bias",),
    ("context_to_server.weight", "kind_out.weight"),
    ("server_hidden.bias", "kind_out.bias"),
)
"""The parameters in each of their fields, one below the other."""


class SetWeights(NamedTuple):
    """All weights of a network."""

    layers: Layers
    perceptrons: Perceptrons

    @classmethod
    def of(cls, network: nn.Module) -> SetWeights:
        """Return the weights that the network has now; they may change with it, or not."""
        named = {name: parameter.detach() for name, parameter in network.named_parameters()}
        joined = ([named[name] for name in names] for names in PERCEPTRONS)
        return cls(
            Layers(*(named[name].numpy() for name in LAYERS)),
            Perceptrons(*(torch.cat(some) if len(some) > 1 else some[0] for some in joined)),
        )


class Passed(NamedTuple):
    """What the perceptrons gave on the way."""

    first_MH: Tensor  # (M, 2C)
    cluster_MC: Tensor
    critic_MC: Tensor
    value_M: Tensor
    to_each_MW: Tensor  # (M, W + 4)

    @staticmethod
    def value_of(w: Perceptrons, pooled_MF: Tensor) -> Tensor:
        """Go through the critic's alone, and return (M,) values."""
        width = len(w.actor_bias)
        first_MC = torch.addmm(w.first_bias[width:], pooled_MF, w.first[width:].t()).relu_()
        critic_MC = torch.addmm(w.critic_bias, first_MC, w.critic.t()).relu_()
        return torch.addmv(w.value_bias, critic_MC, w.value[0])

    @classmethod
    def of(cls, w: Perceptrons, pooled_MF: Tensor) -> Passed:
        """Go through all of them."""
        width = len(w.actor_bias)
        first_MH = torch.addmm(w.first_bias, pooled_MF, w.first.t()).relu_()
        actor_MC, critic_MC = first_MH[:, :width], first_MH[:, width:]
        cluster_MC = torch.addmm(w.actor_bias, actor_MC, w.actor.t()).relu_()
        critic_MC = torch.addmm(w.critic_bias, critic_MC, w.critic.t()).relu_()
        return cls(
            first_MH,
            cluster_MC,
            critic_MC,
            torch.addmv(w.value_bias, critic_MC, w.value[0]),
            torch.addmm(w.to_each_bias, cluster_MC, w.to_each.t()),
        )


def pooled(layers: Layers, seen: Seen, chosen_M: Tensor, room: Room) -> Tensor:
    """Return (M, C' + 3W) what tells the clusters of rows as a whole."""
    num_features = seen.context.shape[1] + 3 * len(layers.server_in_bias)
    pooled_MF = torch.empty(len(chosen_M), num_features)
    embed(layers, seen, chosen_M.numpy(), room, pooled_MF.numpy())
    return pooled_MF
