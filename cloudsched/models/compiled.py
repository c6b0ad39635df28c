"""`SetNetwork` as one compiled loop, for acting: the twin of its `forward`.

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
BLOCK = 128  # servers that go through a layer together; few enough that BLAS stays on one core


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
    """Add the product of x and a matrix to `out`.

    Eight inputs at a time: `out` is loaded and stored an eighth as often.
    """
    num_inputs = weight.shape[0]
    for i in range(0, num_inputs - 7, 8):
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        p, q, r, s = x[i + 4], x[i + 5], x[i + 6], x[i + 7]
        wa, wb, wc, wd = weight[i], weight[i + 1], weight[i + 2], weight[i + 3]
        wp, wq, wr, ws = weight[i + 4], weight[i + 5], weight[i + 6], weight[i + 7]
        for o in range(weight.shape[1]):
            some = a * wa[o] + b * wb[o] + c * wc[o] + d * wd[o]
            out[o] += some + p * wp[o] + q * wq[o] + r * wr[o] + s * ws[o]
    for i in range(num_inputs - num_inputs % 8, num_inputs):
        a = x[i]
        for o in range(weight.shape[1]):
            out[o] += a * weight[i, o]


@njit(inline="always")
def _relu(out):  # type: ignore[no-untyped-def]
    for o in range(out.shape[0]):
        out[o] = max(out[o], np.float32(0.0))


# Sums may be taken in any order, always the same one: without it they are not vectorised.
@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
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
    zero = np.float32(0.0)
    for e in range(num_envs):
        room.both[:] = 0.0
        _linear(context[e], w.context_in, room.both)
        room.start[:] = w.server_in_bias
        for i in range(width):
            room.start[i] += room.both[i]
        room.pooled[:] = 0.0
        room.pooled[:num_context] = context[e]
        total = room.pooled[num_context : num_context + width]
        for first in range(0, num_servers, BLOCK):
            last = min(first + BLOCK, num_servers)
            np.dot(servers[e, first:last], w.server_in, room.server[first:last])
            for n in range(first, last):
                for i in range(width):
                    value = max(room.server[n, i] + room.start[i], zero)
                    room.server[n, i] = value
                    total[i] += value
        for i in range(width):
            total[i] /= np.float32(num_servers)
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
                row[i] = max(row[i] + room.both[width + i], zero)
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

        out_logits[e, :] = LOWEST
        room.is_needed[:] = 0
        num_placements, num_asleep, num_toggles = 0, 0, 0
        for k in range(num_jobs):
            for n in range(num_servers):
                room.is_needed[n] |= mask[e, k * num_servers + n]
                num_placements += mask[e, k * num_servers + n]
        for n in range(wait - toggles):
            room.is_needed[n] |= mask[e, toggles + n]
            num_toggles += mask[e, toggles + n]
        for n in range(num_servers):
            num_asleep += servers[e, n, 2 * num_resources + 5] != 0.0
        place, wake, sleep = room.kind[0], room.kind[1], room.kind[2]
        if is_balanced:
            place -= np.float32(math.log(max(num_placements, 1)))
            wake -= np.float32(math.log(max(num_asleep, 1)))
            sleep -= np.float32(math.log(max(num_toggles - num_asleep, 1)))

        first = 0
        while first < num_servers:
            first, num_chosen = _next_servers(room.is_needed, first, room.chosen)
            for m in range(num_chosen):
                room.embedded[m] = room.server[room.chosen[m]]
            hidden, outs = room.hidden[:num_chosen], room.server_out[:num_chosen]
            np.dot(room.embedded[:num_chosen], w.server_hidden, hidden)
            for m in range(num_chosen):
                for i in range(width):
                    hidden[m, i] = max(hidden[m, i] + room.to_server[i], zero)
            np.dot(hidden, w.server_out, outs)
            num_chosen_pairs = 0
            for m in range(num_chosen):
                n = room.chosen[m]
                server = servers[e, n]
                for i in range(num_pairs):
                    outs[m, i] += w.server_out_bias[i]
                if wait > toggles and mask[e, toggles + n] != 0:
                    i = num_pairs if server[2 * num_resources + 5] != 0.0 else num_pairs + 1
                    kind = wake if i == num_pairs else sleep
                    out_logits[e, toggles + n] = kind + outs[m, i] + w.server_out_bias[i]
                exponent = _exponent(server, num_resources)
                load = _load(server, num_resources)
                curve = load**exponent
                for k in range(num_jobs):
                    if mask[e, k * num_servers + n] != 0:
                        features = room.features[num_chosen_pairs]
                        _pair_features(
                            server, jobs[e, k], num_resources, exponent, load, curve, features
                        )
                        num_chosen_pairs += 1
            np.dot(room.features[:num_chosen_pairs], w.pair_features, room.pair[:num_chosen_pairs])
            row = 0
            for m in range(num_chosen):
                n = room.chosen[m]
                for k in range(num_jobs):
                    if mask[e, k * num_servers + n] != 0:
                        score = w.pair_out_bias[0]
                        for i in range(num_pairs):
                            value = room.pair[row, i] + outs[m, i] + room.pair_job[k, i]
                            score += max(value, zero) * w.pair_out[i]
                        out_logits[e, k * num_servers + n] = score + place
                        row += 1
        if mask[e, wait] != 0:
            out_logits[e, wait] = room.kind[3]


@njit(inline="always")
def _next_servers(is_needed, first, out_chosen):  # type: ignore[no-untyped-def]
    """Write the next servers that are needed; return where to go on, and how many there are."""
    num_chosen = 0
    n = first
    while n < is_needed.shape[0] and num_chosen < BLOCK:
        if is_needed[n] != 0:
            out_chosen[num_chosen] = n
            num_chosen += 1
        n += 1
    return n, num_chosen


@njit(inline="always")
def _exponent(server, num_resources):  # type: ignore[no-untyped-def]
    watts = 2 * num_resources
    idle_w, max_w, half_w = server[watts], server[watts + 1], server[watts + 2]
    ratio = max(max_w - idle_w, np.float32(1e-6)) / max(half_w - idle_w, np.float32(1e-6))
    return min(max(np.float32(math.log2(ratio)), np.float32(0.1)), np.float32(8.0))


@njit(inline="always")
def _load(server, num_resources):  # type: ignore[no-untyped-def]
    one, zero = np.float32(1.0), np.float32(0.0)
    return min(max(one - server[0] / server[num_resources], zero), one)


@njit(inline="always")
def _pair_features(server, job, num_resources, exponent, load, curve, out):  # type: ignore[no-untyped-def]
    """Write the features of `cloudsched.models.pairs.pair_features`.

    Args:
        curve: the load to the power of the exponent.
    """
    one, zero = np.float32(1.0), np.float32(0.0)
    least = np.float32(np.inf)
    total = zero
    for r in range(num_resources):
        leftover = server[r] - job[r]
        least = min(least, leftover)
        total += leftover
    watts = 2 * num_resources
    load_after = min(max(load + job[0] / server[num_resources], zero), one)
    span_w = max(server[watts + 1] - server[watts], np.float32(1e-6))
    added_w = span_w * (load_after**exponent - curve)
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
