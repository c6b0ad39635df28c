"""The compiled loops of `SetGradient`: all of a `SetNetwork` but its two perceptrons, both ways.

M rows of a batch are taken together. Only jobs that wait and servers for which something is legal
go through the layers that concern them alone. Products are taken in blocks: few enough rows that
they stay in a cache and that BLAS stays on one core.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.models.pair_kernels import cpu_load, write_pair_features
from cloudsched.models.pairs import NUM_PAIR_FEATURES
from cloudsched.models.surrogate import policy_gradient, value_gradient

if TYPE_CHECKING:
    from cloudsched.models.set_pass import Layers, Room, Seen

Array = NDArray[np.float32]

BLOCK = 128


# Sums may be taken in any order, always the same one: without it they are not vectorised.
@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def embed(w: Layers, seen: Seen, chosen: NDArray[np.int64], room: Room, out_pooled: Array) -> None:
    """Embed the servers and the jobs of rows, and write what tells their clusters as a whole.

    Args:
        chosen: (M,) the rows.
        room: gets the embeddings.
        out_pooled: (M, C' + 3W) overwritten.
    """
    num_servers, num_jobs = seen.servers.shape[1], seen.jobs.shape[1]
    num_features, num_job_features = seen.servers.shape[2], seen.jobs.shape[2]
    num_context, width = seen.context.shape[1], w.server_in_bias.shape[0]
    num_rows, num_present = chosen.shape[0], 0
    zero = np.float32(0.0)
    for m in range(num_rows):
        b = chosen[m]
        for n in range(num_servers):
            server, copy = seen.servers[b, n], room.server_x[m * num_servers + n]
            for i in range(num_features):
                copy[i] = server[i]
        room.first_job[m] = num_present
        for k in range(num_jobs):
            if seen.jobs[b, k, num_job_features - 1] != zero:
                for i in range(num_job_features):
                    room.job_x[num_present, i] = seen.jobs[b, k, i]
                num_present += 1
        for i in range(num_context):
            room.context_x[m, i] = out_pooled[m, i] = seen.context[b, i]
    room.first_job[num_rows] = num_present
    _product(room.context_x[:num_rows], w.context_in.T, room.both)
    _product(room.server_x[: num_rows * num_servers], w.server_in.T, room.server)
    _product(room.job_x[:num_present], w.job_in.T, room.job)
    for m in range(num_rows):
        both, pooled = room.both[m], out_pooled[m]
        pooled[num_context:] = zero
        mean = pooled[num_context : num_context + width]
        for i in range(width):
            both[i] += w.server_in_bias[i]
            both[width + i] += w.job_in_bias[i]
        for s in range(m * num_servers, (m + 1) * num_servers):
            row = room.server[s]
            for i in range(width):
                row[i] = max(row[i] + both[i], zero)
                mean[i] += row[i]
        for i in range(width):
            mean[i] /= np.float32(num_servers)
        job_mean = pooled[num_context + width : num_context + 2 * width]
        highest = pooled[num_context + 2 * width :]
        for j in range(room.first_job[m], room.first_job[m + 1]):
            row = room.job[j]
            for i in range(width):
                row[i] = max(row[i] + both[width + i], zero)
                job_mean[i] += row[i]
                highest[i] = max(highest[i], row[i])
        num_own = max(room.first_job[m + 1] - room.first_job[m], 1)
        for i in range(width):
            job_mean[i] /= np.float32(num_own)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def score_gradients(
    w: Layers,
    seen: Seen,
    columns: Any,
    chosen: NDArray[np.int64],
    value: Array,
    to_each: Array,
    num_resources: int,
    is_balanced: bool,
    weights: Any,
    share: float,
    room: Room,
    out: Layers,
    out_value: Array,
    out_to_each: Array,
    out_terms: NDArray[np.float64],
) -> None:
    """Score the actions of rows that were embedded; write gradients of all that the scores need.

    Args:
        columns: a `PPOColumns` of arrays.
        chosen: (M,) the rows.
        value: (M,) what the critic says.
        to_each: (M, W + 4) what the cluster adds to its servers, and scores of placing, waking,
            sleeping and waiting.
        weights: a `PPOWeights` whose value clip is a number.
        share: what a row counts: one over the number of rows in the minibatch.
        room: gets gradients of embeddings: `embedded` those of the servers in `needed`, `job_up`.
        out: gradients of weights, added to.
        out_value: (M,) overwritten.
        out_to_each: (M, W + 4) overwritten.
        out_terms: (6,) added to, but for the first.
    """
    num_rows, num_servers, num_jobs = chosen.shape[0], seen.servers.shape[1], seen.jobs.shape[1]
    width, num_pairs = w.server_in_bias.shape[0], w.pair_out.shape[1]
    toggles, wait = num_jobs * num_servers, columns.mask_BA.shape[1] - 1
    zero = np.float32(0.0)
    pair_out, pair_out_gradient = w.pair_out[0], out.pair_out[0]
    num_needed = _list_needed(columns.mask_BA, chosen, num_servers, num_jobs, room)
    num_present = room.first_job[num_rows]
    for q in range(num_needed):
        copy, row = room.embedded[q], room.server[room.needed[q]]
        for i in range(width):
            copy[i] = row[i]
    _product(room.embedded[:num_needed], w.server_hidden.T, room.hidden)
    for m in range(num_rows):
        for q in range(room.first_needed[m], room.first_needed[m + 1]):
            hidden = room.hidden[q]
            for i in range(width):
                hidden[i] = max(hidden[i] + to_each[m, i], zero)
    _product(room.hidden[:num_needed], w.server_out.T, room.outs)
    _product(room.job[:num_present], w.pair_job.T, room.pair_job)
    w0, w1, w2, w3 = (room.weight[0], room.weight[1], room.weight[2], room.weight[3])
    w4, w5, w6, w7 = (room.weight[4], room.weight[5], room.weight[6], room.weight[7])
    for f in range(NUM_PAIR_FEATURES):
        for i in range(num_pairs):
            room.weight[f, i] = w.pair_features[i, f]
    num_waiting = 0  # pairs whose part in the gradient of `pair_features` is still to be added
    for m in range(num_rows):
        b = chosen[m]
        mask = columns.mask_BA[b]
        place, wake, sleep = to_each[m, width], to_each[m, width + 1], to_each[m, width + 2]
        num_legal, first_waiting, at = 0, num_waiting, seen.first_pair[b]
        own_job = room.first_job[m]
        for k in range(num_jobs):
            room.job_at[k] = own_job
            own_job += seen.jobs[b, k, seen.jobs.shape[2] - 1] != zero
        num_asleep, num_toggles = 0, 0
        for n in range(num_servers):
            num_asleep += seen.servers[b, n, 2 * num_resources + 5] != zero
        for a in range(toggles, wait):
            num_toggles += mask[a]
        if is_balanced:
            num_placements = seen.first_pair[b + 1] - at
            place -= np.float32(math.log(max(num_placements, 1)))
            wake -= np.float32(math.log(max(num_asleep, 1)))
            sleep -= np.float32(math.log(max(num_toggles - num_asleep, 1)))
        for q in range(room.first_needed[m], room.first_needed[m + 1]):
            n = room.needed[q] - m * num_servers
            server, brought = seen.servers[b, n], room.outs[q]
            for i in range(num_pairs + 2):
                brought[i] += w.server_out_bias[i]
            if wait > toggles and mask[toggles + n] != 0:
                is_asleep = server[2 * num_resources + 5] != zero
                score = wake + brought[num_pairs] if is_asleep else sleep + brought[num_pairs + 1]
                room.scores[toggles + n] = score
                room.legal[num_legal] = toggles + n
                num_legal += 1
            load = cpu_load(server, num_resources)
            for k in range(num_jobs):
                if mask[k * num_servers + n] == 0:
                    continue
                x, hidden = room.features[num_waiting], room.pair[num_waiting]
                write_pair_features(
                    server, seen.jobs[b, k], num_resources, load, seen.added_w[at], x
                )
                at += 1
                num_waiting += 1
                x0, x1, x2, x3, x4, x5, x6, x7 = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
                job = room.pair_job[room.job_at[k]]
                score = w.pair_out_bias[0]
                for i in range(num_pairs):
                    some = x0 * w0[i] + x1 * w1[i] + x2 * w2[i] + x3 * w3[i]
                    more = x4 * w4[i] + x5 * w5[i] + x6 * w6[i] + x7 * w7[i]
                    hidden[i] = max(brought[i] + job[i] + some + more, zero)
                    score += hidden[i] * pair_out[i]
                room.scores[k * num_servers + n] = score + place
                room.legal[num_legal] = k * num_servers + n
                num_legal += 1
        if mask[wait] != 0:
            room.scores[wait] = to_each[m, width + 3]
            room.legal[num_legal] = wait
            num_legal += 1

        policy_gradient(
            room.scores,
            room.legal[:num_legal],
            columns.action_B[b],
            columns.old_log_prob_B[b],
            columns.advantage_B[b],
            weights.clip,
            weights.entropy_weight,
            share,
            room.ups,
            out_terms,
        )
        out_value[m] = value_gradient(
            value[m],
            columns.old_value_B[b],
            columns.return_B[b],
            weights.value_clip,
            weights.value_weight,
            share,
            out_terms,
        )

        up_m = out_to_each[m]
        up_m[:] = zero
        if mask[wait] != 0:
            up_m[width + 3] = room.ups[wait]
        for j in range(room.first_job[m], room.first_job[m + 1]):
            room.pair_job[j, :] = zero
        at = first_waiting
        for q in range(room.first_needed[m], room.first_needed[m + 1]):
            n = room.needed[q] - m * num_servers
            gradient = room.outs[q]  # in place of what the server brought, which was read
            gradient[:] = zero
            if wait > toggles and mask[toggles + n] != 0:
                i = 0 if seen.servers[b, n, 2 * num_resources + 5] != zero else 1
                gradient[num_pairs + i] = room.ups[toggles + n]
                up_m[width + 1 + i] += room.ups[toggles + n]
            for k in range(num_jobs):
                if mask[k * num_servers + n] == 0:
                    continue
                up = room.ups[k * num_servers + n]
                up_m[width] += up
                slope, job_gradient = room.pair[at], room.pair_job[room.job_at[k]]
                at += 1
                for i in range(num_pairs):
                    hidden_i = slope[i]
                    pair_out_gradient[i] += up * hidden_i
                    down = up * pair_out[i] if hidden_i > zero else zero
                    slope[i] = down
                    gradient[i] += down
                    job_gradient[i] += down
        out.pair_out_bias[0] += up_m[width]
        if num_waiting >= BLOCK:
            _add_product(room.pair[:num_waiting], room.features, room.product_8, out.pair_features)
            num_waiting = 0
    _add_product(room.pair[:num_waiting], room.features, room.product_8, out.pair_features)

    _add_sum(room.outs[:num_needed], out.server_out_bias)
    _add_product(room.outs[:num_needed], room.hidden, room.product_w, out.server_out)
    _product(room.outs[:num_needed], w.server_out, room.down)
    for m in range(num_rows):
        up_m = out_to_each[m]
        for q in range(room.first_needed[m], room.first_needed[m + 1]):
            down_q, hidden = room.down[q], room.hidden[q]
            for i in range(width):
                down_q[i] = down_q[i] if hidden[i] > zero else zero
                up_m[i] += down_q[i]
    _add_product(room.down[:num_needed], room.embedded, room.product_w, out.server_hidden)
    _product(room.down[:num_needed], w.server_hidden, room.embedded)
    _add_product(room.pair_job[:num_present], room.job, room.product_w, out.pair_job)
    _product(room.pair_job[:num_present], w.pair_job, room.job_up)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def embed_gradients(
    up_pooled: Array, pooled: Array, num_servers: int, room: Room, out: Layers
) -> None:
    """Add the gradients of the first layers, given those of what `embed` wrote.

    Args:
        up_pooled: (M, 3W) gradient of what was pooled, without that of the context.
        pooled: (M, C' + 3W) what was.
        room: as `score_gradients` left it.
        out: gradients of weights, added to.
    """
    num_rows, width = up_pooled.shape[0], out.server_in_bias.shape[0]
    zero = np.float32(0.0)
    for m in range(num_rows):
        mean, up = up_pooled[m, :width], room.both[m]
        for i in range(width):
            mean[i] /= np.float32(num_servers)
        up[:] = zero
        q, last = room.first_needed[m], room.first_needed[m + 1]
        for s in range(m * num_servers, (m + 1) * num_servers):
            row = room.server[s]
            if q < last and room.needed[q] == s:
                own = room.embedded[q]
                for i in range(width):
                    row[i] = mean[i] + own[i] if row[i] > zero else zero
                    up[i] += row[i]
                q += 1
                continue
            for i in range(width):
                row[i] = mean[i] if row[i] > zero else zero
                up[i] += row[i]
        first, last = room.first_job[m], room.first_job[m + 1]
        highest, up_highest = pooled[m, pooled.shape[1] - width :], up_pooled[m, 2 * width :]
        for i in range(width):
            num_highest = 0  # equal jobs share the gradient
            for j in range(first, last):
                num_highest += room.job[j, i] == highest[i]
            for j in range(first, last):
                down = room.job_up[j, i] + up_pooled[m, width + i] / np.float32(last - first)
                if room.job[j, i] == highest[i]:
                    down += up_highest[i] / np.float32(num_highest)
                room.job[j, i] = down if room.job[j, i] > zero else zero
                up[width + i] += room.job[j, i]
        for i in range(width):
            out.server_in_bias[i] += up[i]
            out.job_in_bias[i] += up[width + i]
    num_present = room.first_job[num_rows]
    _add_product(
        room.server[: num_rows * num_servers], room.server_x, room.product_s, out.server_in
    )
    _add_product(room.job[:num_present], room.job_x, room.product_j, out.job_in)
    _add_product(room.both[:num_rows], room.context_x, room.product_c, out.context_in)


@njit(inline="always")
def _list_needed(mask, chosen, num_servers, num_jobs, room):  # type: ignore[no-untyped-def]
    """List the servers for which something is legal; return how many there are."""
    num_needed = 0
    for m in range(chosen.shape[0]):
        room.first_needed[m] = num_needed
        row = mask[chosen[m]]
        for n in range(num_servers):
            is_needed = np.int8(0)
            for a in range(n, row.shape[0] - 1, num_servers):
                is_needed |= row[a]
            room.needed[num_needed] = m * num_servers + n
            num_needed += is_needed != 0
    room.first_needed[chosen.shape[0]] = num_needed
    return num_needed


@njit(cache=True, nogil=True, error_model="numpy")
def _product(x, weight, out):  # type: ignore[no-untyped-def]
    """Write the product of rows and a matrix to the first rows of `out`."""
    for first in range(0, x.shape[0], BLOCK):
        last = min(first + BLOCK, x.shape[0])
        np.dot(x[first:last], weight, out[first:last])


@njit(cache=True, nogil=True, error_model="numpy")
def _add_product(up, x, room, out):  # type: ignore[no-untyped-def]
    """Add the product of gradients and what a layer was given to the gradient of its weights."""
    for first in range(0, up.shape[0], BLOCK):
        last = min(first + BLOCK, up.shape[0])
        product = room[: out.shape[0]]
        np.dot(up[first:last].T, x[first:last], product)
        out += product


@njit(cache=True, nogil=True, error_model="numpy")
def _add_sum(rows, out):  # type: ignore[no-untyped-def]
    for m in range(rows.shape[0]):
        row = rows[m]
        for i in range(out.shape[0]):
            out[i] += row[i]
