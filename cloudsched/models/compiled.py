"""`SetNetwork` as one compiled loop, for acting: the twin of its `forward`.

A decision for one cluster costs torch sixty small operations, most of it overhead; here it is one
call. A cluster's result does not depend on what else is in the batch, to the last bit, so that a
service and an evaluation decide alike. `tests/models/test_compiled.py` holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from cloudsched.models.networks import QNetwork, SetNetwork
from cloudsched.models.pairs import NUM_PAIR_FEATURES
from cloudsched.models.prior import RuleCorrection, RulePrior
from cloudsched.models.set_kernels import BLOCK, Array, score_set


class SetWeights(NamedTuple):
    """The weights that acting needs; matrices are (inputs, outputs)."""

    server_in: Array
    server_in_bias: Array
    job_in: Array
    job_in_bias: Array
    context_in: Array
    first: Array
    first_bias: Array
    second: Array
    second_bias: Array
    server_hidden: Array
    server_hidden_bias: Array
    context_to_server: Array
    server_out: Array
    server_out_bias: Array
    pair_job: Array
    pair_features: Array
    pair_out: Array
    pair_out_bias: Array
    kind_out: Array
    kind_out_bias: Array


class Scratch(NamedTuple):
    """Room for what is computed on the way."""

    server: Array  # (N, W)
    is_needed: NDArray[np.int8]  # (N,) whether anything is legal for a server
    chosen: NDArray[np.int64]  # (BLOCK,) some of these servers
    embedded: Array  # (BLOCK, W)
    hidden: Array  # (BLOCK, W)
    server_out: Array  # (BLOCK, P + 2)
    job: Array  # (K, W)
    pair_job: Array  # (K, P)
    both: Array  # (2W,) what the context adds to servers and to jobs
    start: Array  # (W,) what a server's embedding starts from
    pooled: Array  # (C' + 3W,)
    middle: Array  # (C,)
    cluster: Array  # (C,)
    to_server: Array  # (W,)
    kind: Array  # (4,)
    features: Array  # (BLOCK * K, 8)
    pair: Array  # (BLOCK * K, P)


class CompiledSetNetwork:
    """Scores and chooses like the network it was made from, whose weights it has copied."""

    def __init__(self, network: SetNetwork) -> None:
        def matrix(layer: nn.Linear) -> Array:
            return np.ascontiguousarray(layer.weight.detach().cpu().numpy().T, dtype=np.float32)

        def bias(layer: nn.Linear) -> Array:
            return layer.bias.detach().cpu().numpy().astype(np.float32)

        first, second = (m for m in network.actor_context if isinstance(m, nn.Linear))
        self._weights = SetWeights(
            server_in=matrix(network.server_in),
            server_in_bias=bias(network.server_in),
            job_in=matrix(network.job_in),
            job_in_bias=bias(network.job_in),
            context_in=matrix(network.context_in),
            first=matrix(first),
            first_bias=bias(first),
            second=matrix(second),
            second_bias=bias(second),
            server_hidden=matrix(network.server_hidden),
            server_hidden_bias=bias(network.server_hidden),
            context_to_server=matrix(network.context_to_server),
            server_out=matrix(network.server_out),
            server_out_bias=bias(network.server_out),
            pair_job=matrix(network.pair_job),
            pair_features=matrix(network.pair_features),
            pair_out=matrix(network.pair_out)[:, 0].copy(),
            pair_out_bias=bias(network.pair_out),
            kind_out=matrix(network.kind_out),
            kind_out_bias=bias(network.kind_out),
        )
        self._is_balanced = network.is_balanced
        self._num_resources = network.num_resources
        self._scratch: dict[tuple[int, int, int], Scratch] = {}

    def logits(self, observation: Mapping[str, NDArray[Any]]) -> Array:
        """Return (E, A) masked logits."""
        servers, jobs = observation["servers"], observation["jobs"]
        mask = observation["action_mask"]
        sizes = (servers.shape[1], jobs.shape[1])
        own = (get_ident(), *sizes)  # threads must not write into each other's
        if own not in self._scratch:
            self._scratch[own] = self._room(*sizes)
        logits = np.empty(mask.shape, np.float32)
        score_set(
            self._weights,
            servers,
            jobs,
            observation["context"],
            mask,
            self._num_resources,
            self._is_balanced,
            self._scratch[own],
            logits,
        )
        return logits

    def _room(self, num_servers: int, num_jobs: int) -> Scratch:
        weights = self._weights
        width, pairs = weights.server_in.shape[1], weights.pair_out.shape[0]
        context = weights.first.shape[1]
        shapes = {
            "server": (num_servers, width),
            "embedded": (BLOCK, width),
            "hidden": (BLOCK, width),
            "server_out": (BLOCK, pairs + 2),
            "job": (num_jobs, width),
            "pair_job": (num_jobs, pairs),
            "both": (2 * width,),
            "start": (width,),
            "pooled": (weights.first.shape[0],),
            "middle": (context,),
            "cluster": (weights.second.shape[1],),
            "to_server": (width,),
            "kind": (4,),
            "features": (BLOCK * num_jobs, NUM_PAIR_FEATURES),
            "pair": (BLOCK * num_jobs, pairs),
        }
        rooms = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        return Scratch(
            is_needed=np.zeros(num_servers, np.int8), chosen=np.zeros(BLOCK, np.int64), **rooms
        )


class CompiledCorrection:
    """A compiled network beside the rule that it corrects."""

    def __init__(self, network: CompiledSetNetwork, prior: RulePrior) -> None:
        self._network = network
        self._prior = prior

    def logits(self, observation: Mapping[str, NDArray[Any]]) -> Array:
        """Return (E, A) masked logits."""
        logits = self._network.logits(observation)
        logits += self._prior(observation)
        return logits


def compile_network(network: nn.Module) -> CompiledSetNetwork | CompiledCorrection | None:
    """Return the compiled twin of a network that has one.

    For action values it gives the advantages: the best action is the same.
    """
    if type(network) is QNetwork:
        network = network.network
    if type(network) is RuleCorrection:
        compiled = compile_network(network.network)
        assert not isinstance(compiled, CompiledCorrection)
        return None if compiled is None else CompiledCorrection(compiled, network.prior)
    is_plain = type(network) is SetNetwork
    if not is_plain or next(network.parameters()).device.type != "cpu":
        return None
    assert isinstance(network, SetNetwork)
    return CompiledSetNetwork(network)
