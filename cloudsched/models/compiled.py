"""`SetNetwork` as one compiled loop, for acting: the twin of its `forward` and of `likeliest_kind`.

A decision for one cluster costs torch sixty small operations, most of it overhead; here it is one
call. A cluster's result does not depend on what else is in the batch, to the last bit, so that a
service and an evaluation decide alike. `tests/models/test_compiled.py` holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import nn

from cloudsched.models.networks import QNetwork, SetNetwork
from cloudsched.models.pairs import NUM_PAIR_FEATURES
from cloudsched.models.prior import RuleCorrection, RulePrior

Array = NDArray[np.float32]

LOWEST = float(np.finfo(np.float32).min)


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
    hidden: Array  # (W,)
    server_out: Array  # (N, P + 2)
    exponent: Array  # (N,) of the power curve
    job: Array  # (K, W)
    pair_job: Array  # (K, P)
    both: Array  # (2W,) what the context adds to servers and to jobs
    pooled: Array  # (C' + 3W,)
    middle: Array  # (C,)
    cluster: Array  # (C,)
    to_server: Array  # (W,)
    kind: Array  # (4,)
    features: Array  # (8,)
    pair: Array  # (P,)


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
        self._scratch: dict[tuple[int, int], Scratch] = {}

    def logits(self, observation: Mapping[str, NDArray[Any]]) -> Array:
        """Return (E, A) masked logits."""
        servers, jobs = observation["servers"], observation["jobs"]
        mask = observation["action_mask"]
        sizes = (servers.shape[1], jobs.shape[1])
        if sizes not in self._scratch:
            self._scratch[sizes] = self._room(*sizes)
        logits = np.empty(mask.shape, np.float32)
        score_set(
            self._weights,
            servers,
            jobs,
            observation["context"],
            mask,
            self._num_resources,
            self._is_balanced,
            self._scratch[sizes],
            logits,
        )
        return logits

    def _room(self, num_servers: int, num_jobs: int) -> Scratch:
        weights = self._weights
        width, pairs = weights.server_in.shape[1], weights.pair_out.shape[0]
        context = weights.first.shape[1]
        shapes = {
            "server": (num_servers, width),
            "hidden": (width,),
            "server_out": (num_servers, pairs + 2),
            "exponent": (num_servers,),
            "job": (num_jobs, width),
            "pair_job": (num_jobs, pairs),
            "both": (2 * width,),
            "pooled": (weights.first.shape[0],),
            "middle": (context,),
            "cluster": (weights.second.shape[1],),
            "to_server": (width,),
            "kind": (4,),
            "features": (NUM_PAIR_FEATURES,),
            "pair": (pairs,),
        }
        return Scratch(**{name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


class CompiledCorrection:
    """A compiled network beside the rule that it corrects."""

    def __init__(self, network: CompiledSetNetwork, prior: RulePrior) -> None:
        self._network = network
        self._prior = prior

    def logits(self, observation: Mapping[str, NDArray[Any]]) -> Array:
        """Return (E, A) masked logits."""
        logits = self._network.logits(observation)
        actions, scores = self._prior(observation)
        logits[np.arange(len(logits)), actions] += scores
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


@njit(inline="always")
def _linear(x, weight, out):  # type: ignore[no-untyped-def]
    """Add the product of x and a matrix to `out`."""
    for i in range(weight.shape[0]):
        value = x[i]
        if value != 0.0:
            for o in range(weight.shape[1]):
                out[o] += value * weight[i, o]


@njit(inline="always")
def _relu(out):  # type: ignore[no-untyped-def]
    for o in range(out.shape[0]):
        out[o] = max(out[o], np.float32(0.0))


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def score_set(
    w: SetWeights,
    servers: Array,
    jobs: Array,
    context: Array,
    mask: NDArray[np.int8],
    num_resources: int,
    is_balanced: bool,
    room: Scratch,
    out_logits: Array,
) -> None:
    """Write the masked logits of E clusters.

    Args:
        out_logits: (E, A) overwritten.
    """
    num_envs, num_servers, _ = servers.shape
    num_jobs, width, num_pairs = jobs.shape[1], w.server_hidden.shape[1], w.pair_out.shape[0]
    toggles = num_jobs * num_servers
    wait = mask.shape[1] - 1
    num_context = context.shape[1]
    for e in range(num_envs):
        room.both[:] = 0.0
        _linear(context[e], w.context_in, room.both)
        room.pooled[:] = 0.0
        room.pooled[:num_context] = context[e]
        for n in range(num_servers):
            row = room.server[n]
            row[:] = w.server_in_bias
            _linear(servers[e, n], w.server_in, row)
            for i in range(width):
                row[i] = max(row[i] + room.both[i], np.float32(0.0))
                room.pooled[num_context + i] += row[i]
        for i in range(width):
            room.pooled[num_context + i] /= np.float32(num_servers)
        num_present = 0
        mean, highest = num_context + width, num_context + 2 * width
        for k in range(num_jobs):
            row = room.job[k]
            if jobs[e, k, jobs.shape[2] - 1] == 0.0:
                row[:] = 0.0
                continue
            num_present += 1
            row[:] = w.job_in_bias
            _linear(jobs[e, k], w.job_in, row)
            for i in range(width):
                row[i] = max(row[i] + room.both[width + i], np.float32(0.0))
                room.pooled[mean + i] += row[i]
                room.pooled[highest + i] = max(room.pooled[highest + i], row[i])
        for i in range(width):
            room.pooled[mean + i] /= np.float32(max(num_present, 1))
        room.middle[:] = w.first_bias
        _linear(room.pooled, w.first, room.middle)
        _relu(room.middle)
        room.cluster[:] = w.second_bias
        _linear(room.middle, w.second, room.cluster)
        _relu(room.cluster)
        room.kind[:] = w.kind_out_bias
        _linear(room.cluster, w.kind_out, room.kind)
        room.to_server[:] = w.server_hidden_bias
        _linear(room.cluster, w.context_to_server, room.to_server)
        for k in range(num_jobs):
            room.pair_job[k, :] = 0.0
            _linear(room.job[k], w.pair_job, room.pair_job[k])

        num_placements = 0
        for a in range(toggles):
            num_placements += mask[e, a] != 0
        num_asleep = 0
        num_toggles = 0
        for n in range(num_servers):
            num_asleep += servers[e, n, 2 * num_resources + 5] != 0.0
        for a in range(toggles, wait):
            num_toggles += mask[e, a] != 0
        place, wake, sleep = room.kind[0], room.kind[1], room.kind[2]
        if is_balanced:
            place -= np.float32(math.log(max(num_placements, 1)))
            wake -= np.float32(math.log(max(num_asleep, 1)))
            sleep -= np.float32(math.log(max(num_toggles - num_asleep, 1)))

        for a in range(toggles):
            out_logits[e, a] = LOWEST
        for n in range(num_servers):
            is_needed = wait > toggles and mask[e, toggles + n] != 0
            for k in range(num_jobs):
                is_needed |= mask[e, k * num_servers + n] != 0
            if not is_needed:
                if wait > toggles:
                    out_logits[e, toggles + n] = LOWEST
                continue
            room.hidden[:] = room.to_server
            _linear(room.server[n], w.server_hidden, room.hidden)
            _relu(room.hidden)
            row = room.server_out[n]
            row[:] = w.server_out_bias
            _linear(room.hidden, w.server_out, row)
            if wait > toggles:
                out_logits[e, toggles + n] = LOWEST
                if mask[e, toggles + n] != 0:
                    is_asleep = servers[e, n, 2 * num_resources + 5] != 0.0
                    score = wake + row[num_pairs] if is_asleep else sleep + row[num_pairs + 1]
                    out_logits[e, toggles + n] = score
            room.exponent[n] = _exponent(servers[e, n], num_resources)
            for k in range(num_jobs):
                if mask[e, k * num_servers + n] == 0:
                    continue
                _pair_features(
                    servers[e, n], jobs[e, k], num_resources, room.exponent[n], room.features
                )
                for i in range(num_pairs):
                    room.pair[i] = row[i] + room.pair_job[k, i]
                _linear(room.features, w.pair_features, room.pair)
                score = w.pair_out_bias[0]
                for i in range(num_pairs):
                    score += max(room.pair[i], np.float32(0.0)) * w.pair_out[i]
                out_logits[e, k * num_servers + n] = score + place
        out_logits[e, wait] = room.kind[3] if mask[e, wait] != 0 else LOWEST


@njit(inline="always")
def _exponent(server, num_resources):  # type: ignore[no-untyped-def]
    watts = 2 * num_resources
    idle_w, max_w, half_w = server[watts], server[watts + 1], server[watts + 2]
    ratio = max(max_w - idle_w, np.float32(1e-6)) / max(half_w - idle_w, np.float32(1e-6))
    return min(max(np.float32(math.log2(ratio)), np.float32(0.1)), np.float32(8.0))


@njit(inline="always")
def _pair_features(server, job, num_resources, exponent, out):  # type: ignore[no-untyped-def]
    """Write the features of `cloudsched.models.pairs.pair_features`."""
    one, zero = np.float32(1.0), np.float32(0.0)
    least = np.float32(np.inf)
    total = zero
    for r in range(num_resources):
        leftover = server[r] - job[r]
        least = min(least, leftover)
        total += leftover
    watts = 2 * num_resources
    capacity = server[num_resources]
    load = min(max(one - server[0] / capacity, zero), one)
    load_after = min(max(load + job[0] / capacity, zero), one)
    span_w = max(server[watts + 1] - server[watts], np.float32(1e-6))
    added_w = span_w * (load_after**exponent - load**exponent)
    duration = _unsquash(job[num_resources])
    last_end = _unsquash(server[watts + 9])
    out[0] = least
    out[1] = total / np.float32(num_resources)
    out[2] = load
    out[3] = load_after
    out[4] = added_w
    out[5] = added_w * duration
    out[6] = server[watts] * max(duration - last_end, zero)
    out[7] = one if server[watts + 7] == zero else zero


@njit(inline="always")
def _unsquash(value):  # type: ignore[no-untyped-def]
    one = np.float32(1.0)
    return min(value / max(one - value, np.float32(1.0 / 11.0)), np.float32(10.0))


@njit(cache=True, nogil=True, error_model="numpy")
def choose(
    logits: Array, num_pairs: int, by_kind: bool, out_actions: NDArray[np.int64], out_chances: Array
) -> None:
    """Choose as `likeliest_kind` and `most_likely` do, and write the probabilities.

    Args:
        num_pairs: K*N, the number of placements.
        by_kind: whether the kind of action is chosen first.
        out_actions: (E,) overwritten.
        out_chances: (E, A) overwritten with the softmax of the logits.
    """
    num_actions = logits.shape[1]
    bounds = (0, num_pairs, num_actions - 1, num_actions)
    for e in range(logits.shape[0]):
        best = 0
        for a in range(num_actions):
            if logits[e, a] > logits[e, best]:
                best = a
        highest = logits[e, best]
        total = 0.0
        kind_total = 0.0
        likeliest = -1.0
        start, end = 0, num_actions
        for kind in range(3):
            kind_total = 0.0
            for a in range(bounds[kind], bounds[kind + 1]):
                # The lowest float stands for an illegal action; its exponential is exactly zero.
                chance = 0.0
                if logits[e, a] > LOWEST:
                    chance = math.exp(logits[e, a] - highest)
                out_chances[e, a] = chance
                kind_total += chance
            total += kind_total
            if by_kind and kind_total > likeliest:
                likeliest = kind_total
                start, end = bounds[kind], bounds[kind + 1]
        for a in range(num_actions):
            out_chances[e, a] /= total
        if by_kind:
            best = start
            for a in range(start, end):
                if logits[e, a] > logits[e, best]:
                    best = a
        out_actions[e] = best
