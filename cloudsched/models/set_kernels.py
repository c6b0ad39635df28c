"""The compiled loops of `SetNetwork`: all of it for acting, its scores of actions for learning.

They share a file because numba's cache does not notice changes in another one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.models.pair_kernels import (
    added_power,
    cpu_load,
    power_exponent,
    write_pair_features,
)
from cloudsched.models.pairs import NUM_PAIR_FEATURES

if TYPE_CHECKING:
    from cloudsched.models.compiled import Scratch, SetWeights

Array = NDArray[np.float32]

LOWEST = float(np.finfo(np.float32).min)
BLOCK = 128  # rows that go through a layer together; few enough that BLAS stays on one core


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
                exponent = power_exponent(server, num_resources)
                load = cpu_load(server, num_resources)
                curve = load**exponent
                for k in range(num_jobs):
                    if mask[e, k * num_servers + n] != 0:
                        job, features = jobs[e, k], room.features[num_chosen_pairs]
                        added_w = added_power(server, job, num_resources, exponent, load, curve)
                        write_pair_features(server, job, num_resources, load, added_w, features)
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


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def score_actions(
    server_out: Array,
    pair_job: Array,
    kind: Array,
    feature_weight: Array,
    pair_weight: Array,
    pair_bias: Array,
    servers: Array,
    jobs: Array,
    mask: NDArray[np.int8],
    num_resources: int,
    is_balanced: bool,
    is_kept: bool,
    out_features: Array,
    out_logits: Array,
) -> None:
    """Write the masked logits of B clusters from the embeddings of servers and jobs.

    Args:
        server_out: (B, N, P + 2) what servers bring to their pairs, and their two toggle scores.
        pair_job: (B, K, P) what jobs bring to their pairs.
        kind: (B, 4) scores of placing, waking, sleeping and waiting.
        feature_weight: (8, P).
        pair_weight: (P,).
        pair_bias: (1,).
        is_kept: whether the features are kept, for `action_gradients`.
        out_features: (B, N * K, 8) overwritten, the first rows with the legal pairs, server by
            server; (1, 1, 8) if not kept.
        out_logits: (B, A) overwritten.
    """
    num_rows, num_servers, _ = servers.shape
    num_jobs, num_pairs = jobs.shape[1], pair_weight.shape[0]
    toggles, wait = num_jobs * num_servers, mask.shape[1] - 1
    zero = np.float32(0.0)
    w0, w1, w2, w3 = feature_weight[0], feature_weight[1], feature_weight[2], feature_weight[3]
    w4, w5, w6, w7 = feature_weight[4], feature_weight[5], feature_weight[6], feature_weight[7]
    for b in range(num_rows):
        row_mask, row_logits = mask[b], out_logits[b]
        place, wake, sleep = kind[b, 0], kind[b, 1], kind[b, 2]
        if is_balanced:
            num_placements, num_asleep, num_toggles = 0, 0, 0
            for a in range(toggles):
                num_placements += row_mask[a]
            for a in range(toggles, wait):
                num_toggles += row_mask[a]
            for n in range(num_servers):
                num_asleep += servers[b, n, 2 * num_resources + 5] != 0.0
            place -= np.float32(math.log(max(num_placements, 1)))
            wake -= np.float32(math.log(max(num_asleep, 1)))
            sleep -= np.float32(math.log(max(num_toggles - num_asleep, 1)))
        row_logits[:] = LOWEST
        if row_mask[wait] != 0:
            row_logits[wait] = kind[b, 3]
        num_seen = 0
        for n in range(num_servers):
            server, brought = servers[b, n], server_out[b, n]
            if wait > toggles and row_mask[toggles + n] != 0:
                is_asleep = server[2 * num_resources + 5] != 0.0
                score = wake + brought[num_pairs] if is_asleep else sleep + brought[num_pairs + 1]
                row_logits[toggles + n] = score
            is_first = True
            exponent = load = curve = zero
            for k in range(num_jobs):
                if row_mask[k * num_servers + n] == 0:
                    continue
                if is_first:
                    exponent = power_exponent(server, num_resources)
                    load = cpu_load(server, num_resources)
                    curve = load**exponent
                    is_first = False
                x = out_features[b, num_seen] if is_kept else out_features[0, 0]
                num_seen += 1
                added_w = added_power(server, jobs[b, k], num_resources, exponent, load, curve)
                write_pair_features(server, jobs[b, k], num_resources, load, added_w, x)
                x0, x1, x2, x3, x4, x5, x6, x7 = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
                job = pair_job[b, k]
                score = pair_bias[0]
                for i in range(num_pairs):
                    some = x0 * w0[i] + x1 * w1[i] + x2 * w2[i] + x3 * w3[i]
                    more = x4 * w4[i] + x5 * w5[i] + x6 * w6[i] + x7 * w7[i]
                    score += max(brought[i] + job[i] + some + more, zero) * pair_weight[i]
                row_logits[k * num_servers + n] = score + place


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def action_gradients(
    server_out: Array,
    pair_job: Array,
    feature_weight: Array,
    pair_weight: Array,
    servers: Array,
    mask: NDArray[np.int8],
    asleep_column: int,
    features: Array,
    logits_gradient: Array,
    room: Array,
    out_server: Array,
    out_job: Array,
    out_kind: Array,
    out_feature_weight: Array,
    out_pair_weight: Array,
    out_pair_bias: Array,
) -> None:
    """Write the gradients of `score_actions`, given those of its logits.

    Args:
        features: (B, N * K, 8) that `score_actions` kept.
        logits_gradient: (B, A); those of illegal actions do not count.
        room: (2, BLOCK, P) overwritten, with gradients of pairs and of `feature_weight`.
        out_server: (B, N, P + 2) overwritten.
        out_job: (B, K, P) overwritten.
        out_kind: (B, 4) overwritten.
        out_feature_weight: (8, P) added to.
        out_pair_weight: (P,) added to.
        out_pair_bias: (1,) added to.
    """
    num_rows, num_servers, _ = servers.shape
    num_jobs, num_pairs = pair_job.shape[1], pair_weight.shape[0]
    toggles, wait = num_jobs * num_servers, mask.shape[1] - 1
    zero = np.float32(0.0)
    w0, w1, w2, w3 = feature_weight[0], feature_weight[1], feature_weight[2], feature_weight[3]
    w4, w5, w6, w7 = feature_weight[4], feature_weight[5], feature_weight[6], feature_weight[7]
    slopes = room[0]
    product = room[1, :NUM_PAIR_FEATURES]
    for b in range(num_rows):
        row_mask, row_gradient = mask[b], logits_gradient[b]
        out_job[b] = 0.0
        out_kind[b] = 0.0
        if row_mask[wait] != 0:
            out_kind[b, 3] = row_gradient[wait]
        num_seen = 0
        num_waiting = 0  # pairs whose part in the gradient of `feature_weight` is still to be added
        for n in range(num_servers):
            brought, gradient = server_out[b, n], out_server[b, n]
            gradient[:] = 0.0
            if wait > toggles and row_mask[toggles + n] != 0:
                i = 0 if servers[b, n, asleep_column] != 0.0 else 1
                gradient[num_pairs + i] = row_gradient[toggles + n]
                out_kind[b, 1 + i] += row_gradient[toggles + n]
            for k in range(num_jobs):
                if row_mask[k * num_servers + n] == 0:
                    continue
                up = row_gradient[k * num_servers + n]
                out_kind[b, 0] += up
                x = features[b, num_seen]
                x0, x1, x2, x3, x4, x5, x6, x7 = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
                job, slope = pair_job[b, k], slopes[num_waiting]
                for i in range(num_pairs):
                    some = x0 * w0[i] + x1 * w1[i] + x2 * w2[i] + x3 * w3[i]
                    more = x4 * w4[i] + x5 * w5[i] + x6 * w6[i] + x7 * w7[i]
                    slope[i] = max(brought[i] + job[i] + some + more, zero)
                job_gradient = out_job[b, k]
                for i in range(num_pairs):
                    hidden = slope[i]
                    out_pair_weight[i] += up * hidden
                    down = up * pair_weight[i] if hidden > zero else zero
                    slope[i] = down
                    gradient[i] += down
                    job_gradient[i] += down
                num_seen += 1
                num_waiting += 1
                if num_waiting == BLOCK:
                    _add_product(
                        features[b, num_seen - BLOCK : num_seen],
                        slopes,
                        product,
                        out_feature_weight,
                    )
                    num_waiting = 0
        if num_waiting > 0:
            done = features[b, num_seen - num_waiting : num_seen]
            _add_product(done, slopes[:num_waiting], product, out_feature_weight)
        out_pair_bias[0] += out_kind[b, 0]


@njit(inline="always")
def _add_product(features, slopes, room, out):  # type: ignore[no-untyped-def]
    """Add the (8, P) product of features and slopes; few rows are not worth a call of BLAS."""
    if features.shape[0] > 16:
        np.dot(features.T, slopes, room)
        out += room
        return
    for m in range(features.shape[0]):
        slope = slopes[m]
        for i in range(NUM_PAIR_FEATURES):
            x, row = features[m, i], out[i]
            for o in range(slope.shape[0]):
                row[o] += x * slope[o]


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
