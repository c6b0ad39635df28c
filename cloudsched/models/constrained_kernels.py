"""The loss of constrained learning with its gradient, and the choice of what follows, compiled.

Both take one pass over the legal actions of a row, in buffers that stay in the nearest cache.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.models.constrained_loss import ADVANTAGE_WEIGHT, Scales
from cloudsched.models.heads import COST, NUM_HEADS, POLICY, PRIOR, REWARD
from cloudsched.models.kinds import NUM_KINDS, PLACE, SLEEP, WAIT, WAKE

Array = NDArray[np.float32]
Bits = NDArray[np.uint16]

ROUNDED = (PRIOR, COST, POLICY)
"""Heads whose gradient `rounded_loss_gradient` packs."""

LOWEST = float(np.finfo(np.float32).min)
(
    TERM_TOTAL,
    TERM_PRIOR,
    TERM_POLICY,
    TERM_VALUE,
    TERM_ADVANTAGE,
    TERM_LUCK,
    TERM_PESSIMISM,
    TERM_NOISE,
    TERM_NEXT,
    TERM_SHARE,
    NUM_TERMS,
) = (0, 1, 2, 3, 5, 7, 8, 9, 13, 15, 19)
"""Where each term begins in what `loss_gradient` writes."""

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)


class Said(NamedTuple):
    """What the networks said of R rows, of which the first B were logged."""

    outputs: NDArray[Any]  # (R, 4, A), or their bits if they are bfloat16
    value: Array  # (B, 2), or of all rows
    luck: Array  # (B, 2)
    following: Array  # (U, 2) values of the next rows


class Logged(NamedTuple):
    """What the rows are."""

    mask: NDArray[np.int8]  # (R, A)
    is_asleep: NDArray[np.bool_]  # (R, T)
    action: NDArray[np.int64]  # (B,)
    kind: NDArray[np.int64]  # (B,) of the action
    meant: Array  # (B,) its probability
    outcome: Array  # (B, 2) reward and cost
    discount: Array  # (B,)
    following: NDArray[np.int64]  # (B,) the next row
    strained_kind: NDArray[np.int64]  # (R - B,) what was meant, or -1 for rows that do not count


class Room(NamedTuple):
    """Room for one row."""

    legal: NDArray[np.int64]  # (A,)
    bits: NDArray[np.int32]  # (A,)
    values: Array  # (6, A)
    outputs: Array  # (4, A)
    by_outputs: Array  # (4, A)


def room_for(num_actions: int) -> Room:
    """Return room for rows with so many actions."""
    width = max(num_actions, NUM_KINDS)
    return Room(
        np.empty(width, np.int64),
        np.empty(width, np.int32),
        np.empty((6, width), np.float32),
        np.empty((NUM_HEADS, num_actions), np.float32),
        np.empty((NUM_HEADS, num_actions), np.float32),
    )


@njit(cache=True, nogil=True, error_model="numpy")
def unpack(bits: Bits, out_values: Array) -> None:
    """Write what the bits of bfloat16 numbers, which numba does not know, stand for."""
    out_bits = out_values.view(np.uint32)
    for i in range(len(bits)):
        out_bits[i] = np.uint32(bits[i]) << np.uint32(16)


@njit(cache=True, nogil=True, error_model="numpy")
def pack(values: Array, out_bits: Bits) -> None:
    """Write the bits of the nearest numbers that bfloat16 has; of two, the even one."""
    found = values.view(np.uint32)
    for i in range(len(values)):
        odd = (found[i] >> np.uint32(16)) & np.uint32(1)
        nearest = (found[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        is_nan = (found[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out_bits[i] = np.uint16(0x7FC0) if is_nan else np.uint16(nearest)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def exponentials(values: Array, count: int, bits: NDArray[np.int32]) -> None:
    """Replace the first numbers by their exponentials, as the compiler can do to eight at once.

    Beyond +-87 they stay what they are there; a float32 holds hardly more.

    Args:
        bits: room for as many.
    """
    powers = bits.view(np.float32)
    for i in range(count):
        x = values[i]
        x = np.float32(-87.0) if x < np.float32(-87.0) else x
        x = np.float32(87.0) if x > np.float32(87.0) else x
        whole = np.floor(x * LOG2_E + np.float32(0.5))
        whole = np.float32(0.0) if math.isnan(whole) else whole  # the rest is none then
        rest = x - whole * LN2_HIGH - whole * LN2_LOW
        series = np.float32(1.9875691500e-4) * rest + np.float32(1.3981999507e-3)
        series = series * rest + np.float32(8.3334519073e-3)
        series = series * rest + np.float32(4.1665795894e-2)
        series = series * rest + np.float32(1.6666665459e-1)
        series = series * rest + np.float32(5.0000001201e-1)
        values[i] = series * rest * rest + rest + np.float32(1.0)
        bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for i in range(count):
        values[i] *= powers[i]


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def relative(values: Array, count: int, bits: NDArray[np.int32]) -> tuple[np.float32, np.float32]:
    """Replace numbers by their exponentials relative to the highest.

    Returns:
        The highest, and the sum of what was written.
    """
    highest = np.float32(LOWEST)
    for i in range(count):
        highest = max(highest, values[i])
    for i in range(count):
        values[i] -= highest
    exponentials(values, count, bits)
    total = np.float32(0.0)
    for i in range(count):
        total += values[i]
    return highest, total


@njit(cache=True, nogil=True, error_model="numpy")
def find_legal(mask: NDArray[np.int8], out_legal: NDArray[np.int64]) -> int:
    """Write the legal actions of a row, and return how many there are; without a branch."""
    count = 0
    for a in range(len(mask)):
        out_legal[count] = a
        count += int(mask[a] != 0)
    return count


@njit(cache=True, nogil=True, error_model="numpy")
def count_below(legal: NDArray[np.int64], count: int, end: int) -> int:
    """Return how many of the legal actions, which are in order, lie below one."""
    while count > 0 and legal[count - 1] >= end:
        count -= 1
    return count


@njit(cache=True, nogil=True, error_model="numpy")
def kind_of(action: int, is_asleep: NDArray[np.bool_], num_pairs: int) -> int:
    """Return the kind of an action."""
    if action < num_pairs:
        return PLACE
    if action == num_pairs + len(is_asleep):
        return WAIT
    return WAKE if is_asleep[action - num_pairs] else SLEEP


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def improve(is_asleep: NDArray[np.bool_], num_pairs: int, num_legal: int, room: Room) -> None:
    """Turn gains into the weights of a better policy, as `better_logits` defines it.

    Args:
        room: has the weights of the legal actions in the prior in `values[0]` and their gains, as
            factors, in `values[2]`, which is overwritten; `values[5]` gets the sums by kind.
    """
    legal, prior, wanted, sums = room.legal, room.values[0], room.values[2], room.values[5]
    num_place = count_below(legal, num_legal, num_pairs)
    num_moving = count_below(legal, num_legal, num_pairs + len(is_asleep))
    place_before = place_after = np.float32(0.0)
    for i in range(num_place):
        place_before += prior[i]
        wanted[i] *= prior[i]
        place_after += wanted[i]
    wake_before = wake_after = sleep_before = sleep_after = wait = np.float32(0.0)
    for i in range(num_place, num_moving):
        wanted[i] *= prior[i]
        if is_asleep[legal[i] - num_pairs]:
            wake_before += prior[i]
            wake_after += wanted[i]
        else:
            sleep_before += prior[i]
            sleep_after += wanted[i]
    for i in range(num_moving, num_legal):
        wanted[i] = prior[i]
        wait += prior[i]
    # Placements keep their odds against other kinds of action.
    if place_after > 0.0:
        for i in range(num_place):
            wanted[i] *= place_before / place_after
    wake, sleep = wake_before, sleep_before
    if num_place == 0:
        # One server more costs what the wakes lose, and one fewer saves as much.
        wake = min(wake_before, wake_after)
        sleep = sleep_before * wake_before / wake_after if wake_after > 0.0 else sleep_after
    for i in range(num_place, num_moving):
        if is_asleep[legal[i] - num_pairs]:
            wanted[i] *= wake / wake_after
        elif num_place > 0:
            wanted[i] = prior[i]
        else:
            wanted[i] *= sleep / sleep_after
    sums[PLACE], sums[WAKE], sums[SLEEP], sums[WAIT] = place_before, wake, sleep, wait


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def choose_next(
    outputs: Array,
    mask: NDArray[np.int8],
    is_asleep: NDArray[np.bool_],
    scales: Scales,
    room: Room,
    out_action: NDArray[np.int64],
) -> None:
    """Write what the better policy of each row does: the likeliest kind, then the likeliest action.

    Args:
        outputs: (B, H, A) prior and advantages; more heads are not read.
        out_action: (B,) overwritten.
    """
    for b in range(len(outputs)):
        out_action[b] = choose_row(outputs[b], mask[b], is_asleep[b], scales, room)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def rounded_choose_next(
    outputs: Bits,
    mask: NDArray[np.int8],
    is_asleep: NDArray[np.bool_],
    scales: Scales,
    room: Room,
    out_action: NDArray[np.int64],
) -> None:
    """Do as `choose_next`, with (B, H * A) outputs in bfloat16."""
    row = room.outputs.reshape(-1)[: outputs.shape[1]]
    for b in range(len(outputs)):
        unpack(outputs[b], row)
        out_action[b] = choose_row(room.outputs, mask[b], is_asleep[b], scales, room)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def choose_row(
    outputs: Array,
    mask: NDArray[np.int8],
    is_asleep: NDArray[np.bool_],
    scales: Scales,
    room: Room,
) -> int:
    """Return what the better policy of a row does."""
    num_actions = outputs.shape[1]
    num_pairs = num_actions - 1 - len(is_asleep)
    legal, wanted = room.legal, room.values[2]
    num_legal = find_legal(mask, legal)
    weigh_better(outputs, is_asleep, num_pairs, num_legal, scales, room)
    sums = room.values[5]
    toggles = sums[WAKE] + sums[SLEEP]
    first, end = 0, num_pairs
    if toggles > sums[PLACE]:
        first, end = num_pairs, num_actions - 1
    if sums[WAIT] > max(sums[PLACE], toggles):
        first, end = num_actions - 1, num_actions
    best, chosen = np.float32(-1.0), num_actions - 1
    for i in range(num_legal):
        if first <= legal[i] < end and wanted[i] > best:
            best, chosen = wanted[i], legal[i]
    return int(chosen)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def weigh_better(
    outputs: Array,
    is_asleep: NDArray[np.bool_],
    num_pairs: int,
    num_legal: int,
    scales: Scales,
    room: Room,
) -> tuple[np.float32, np.float32]:
    """Write the weights of prior and better policy to `room.values[0]` and `[2]`.

    Returns:
        The highest logit of the prior, and the sum of its weights.
    """
    legal, prior, gain = room.legal, room.values[0], room.values[2]
    # tanh(x) is 1 - 2 / (exp(2 x) + 1).
    to_reward = np.float32(2.0 * scales.nats_2[0] / scales.reach)
    to_cost = np.float32(2.0 * scales.price * scales.nats_2[1] / scales.reach)
    reach = np.float32(scales.reach)
    for i in range(num_legal):
        a = legal[i]
        prior[i] = outputs[PRIOR, a]
        gain[i] = to_reward * outputs[REWARD, a] - to_cost * outputs[COST, a]
    highest, total = relative(prior, num_legal, room.bits)
    exponentials(gain, num_legal, room.bits)
    for i in range(num_legal):
        gain[i] = reach - np.float32(2.0) * reach / (gain[i] + np.float32(1.0))
    exponentials(gain, num_legal, room.bits)
    improve(is_asleep, num_pairs, num_legal, room)
    return highest, total


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def loss_gradient(
    said: Said,
    logged: Logged,
    scales: Scales,
    room: Room,
    out_outputs: Array,
    out_value: Array,
    out_luck: Array,
    out_terms: NDArray[np.float64],
) -> None:
    """Write the gradients of `constrained_loss` by what the networks said, and its terms.

    Args:
        out_outputs: (R, 4, A) overwritten.
        out_value: (R, 2) overwritten.
        out_luck: (B, 2) overwritten.
        out_terms: (NUM_TERMS,) overwritten.
    """
    out_outputs[:] = 0.0
    out_terms[:] = 0.0
    for b in range(len(said.outputs)):
        outputs, by_outputs = said.outputs[b], out_outputs[b]
        add_row(
            b, outputs, said, logged, scales, room, by_outputs, out_value[b], out_luck, out_terms
        )
    complete(logged, scales, out_terms)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def rounded_loss_gradient(
    said: Said,
    logged: Logged,
    scales: Scales,
    room: Room,
    out_rounded: Bits,
    out_reward: Array,
    out_bias: Array,
    out_value_bias: Array,
    out_luck: Array,
    out_terms: NDArray[np.float64],
) -> None:
    """Do as `loss_gradient`, with (R, 4 * A) outputs in bfloat16; gradients leave as products do.

    Args:
        out_rounded: (R, 3 * A + 2) those by outputs and by values, without rewards; overwritten.
        out_reward: (B,) those by the rewards of the actions taken, the only ones; overwritten.
        out_bias: (4 * A,) those by all outputs, summed over the rows; overwritten.
        out_value_bias: (2,) those by values, summed over the rows; overwritten.
        out_luck: (B, 2) overwritten.
        out_terms: (NUM_TERMS,) overwritten.
    """
    outputs, by_outputs = room.outputs, room.by_outputs
    num_actions, num_logged = outputs.shape[1], len(logged.action)
    row, by_row = outputs.reshape(-1), by_outputs.reshape(-1)
    by_value = np.empty(2, np.float32)
    out_bias[:] = 0.0
    out_value_bias[:] = 0.0
    out_terms[:] = 0.0
    for b in range(len(said.outputs)):
        unpack(said.outputs[b], row)
        by_row[:] = 0.0
        add_row(b, outputs, said, logged, scales, room, by_outputs, by_value, out_luck, out_terms)
        if b < num_logged:
            out_reward[b] = by_outputs[REWARD, logged.action[b]]
        for k in range(len(ROUNDED)):
            start = k * num_actions
            pack(by_outputs[ROUNDED[k]], out_rounded[b, start : start + num_actions])
        pack(by_value, out_rounded[b, len(ROUNDED) * num_actions :])
        for i in range(len(by_row)):
            out_bias[i] += by_row[i]
        for k in range(2):
            out_value_bias[k] += by_value[k]
    complete(logged, scales, out_terms)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def add_row(
    b: int,
    outputs: Array,
    said: Said,
    logged: Logged,
    scales: Scales,
    room: Room,
    out_row: Array,
    out_value: Array,
    out_luck: Array,
    out_terms: NDArray[np.float64],
) -> None:
    """Add a row's terms, and write its gradients by outputs (where not zero), values and luck."""
    num_logged = len(logged.action)
    share = 1.0 / num_logged
    if b >= num_logged:
        out_value[:] = 0.0
        if logged.strained_kind[b - num_logged] >= 0:
            missed = miss(b, num_logged, outputs, logged, scales, room, share, out_row)
            out_terms[TERM_TOTAL] += share * missed
        return
    num_legal = find_legal(logged.mask[b], room.legal)
    weight = share * _gap(scales)
    imitate(b, num_legal, outputs, logged, scales, room, share, out_row, out_terms)
    doubt(b, num_legal, outputs, logged, scales, room, weight, out_row, out_terms)
    judge(b, outputs, said, logged, scales, share, out_row, out_value, out_luck[b], out_terms)


@njit(cache=True, nogil=True, error_model="numpy")
def _gap(scales: Scales) -> float:
    """Return what pessimism counts."""
    gap = ADVANTAGE_WEIGHT * scales.pessimism * 2.0 / scales.unit_4[3]
    return float(gap * (scales.advantage / scales.nats_2[1]) ** 2)


@njit(cache=True, nogil=True, error_model="numpy")
def complete(logged: Logged, scales: Scales, out_terms: NDArray[np.float64]) -> None:
    """Make means and the total of what the rows added."""
    share = 1.0 / len(logged.action)
    meant = 0.0
    for k in range(4):
        meant += out_terms[TERM_SHARE + k]
    for k in range(4):
        out_terms[TERM_SHARE + k] /= meant
    for k in range(TERM_PRIOR, TERM_SHARE):
        out_terms[k] *= share
    total = out_terms[TERM_TOTAL] + out_terms[TERM_PRIOR] + out_terms[TERM_POLICY]
    luck = 0.0
    for k in range(2):
        luck += out_terms[TERM_NOISE + 2 + k] / scales.unit_4[k]
        total += out_terms[TERM_VALUE + k]
        total += ADVANTAGE_WEIGHT * out_terms[TERM_ADVANTAGE + k] / scales.unit_4[2 + k]
    out_terms[TERM_LUCK] = 0.5 * luck
    out_terms[TERM_TOTAL] = total + luck + _gap(scales) * out_terms[TERM_PESSIMISM]


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def imitate(
    b: int,
    num_legal: int,
    outputs: Array,
    logged: Logged,
    scales: Scales,
    room: Room,
    share: float,
    out_row: Array,
    out_terms: NDArray[np.float64],
) -> None:
    """Add what prior and policy lose on a row: the one follows the data, the other the score."""
    is_asleep = logged.is_asleep[b]
    num_pairs = outputs.shape[1] - 1 - len(is_asleep)
    legal, prior, policy = room.legal, room.values[0], room.values[1]
    wanted, logits, sums = room.values[2], room.values[3], room.values[5]
    own, kind = logged.action[b], logged.kind[b]
    highest, total = weigh_better(outputs, is_asleep, num_pairs, num_legal, scales, room)
    weight = logged.meant[b] * scales.kind_4[kind]
    out_terms[TERM_SHARE + kind] += logged.meant[b]
    out_terms[TERM_PRIOR] += weight * (highest + math.log(total) - outputs[PRIOR, own])
    factor = np.float32(share * weight / total)
    for i in range(num_legal):
        out_row[PRIOR, legal[i]] = factor * prior[i]
    out_row[PRIOR, own] -= np.float32(share * weight)

    total_wanted = weight = 0.0
    for k in range(4):
        total_wanted += sums[k]
        weight += scales.kind_4[k] * sums[k]
    weight /= total_wanted
    mean_logit = np.float32(0.0)
    for i in range(num_legal):
        policy[i] = logits[i] = outputs[POLICY, legal[i]]
        mean_logit += wanted[i] * logits[i]
    highest, total = relative(policy, num_legal, room.bits)
    out_terms[TERM_POLICY] += weight * (highest + math.log(total) - mean_logit / total_wanted)
    factor = np.float32(share * weight / total)
    factor_wanted = np.float32(share * weight / total_wanted)
    for i in range(num_legal):
        out_row[POLICY, legal[i]] = factor * policy[i] - factor_wanted * wanted[i]


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def doubt(
    b: int,
    num_legal: int,
    outputs: Array,
    logged: Logged,
    scales: Scales,
    room: Room,
    weight: float,
    out_row: Array,
    out_terms: NDArray[np.float64],
) -> None:
    """Add the pessimism of a row: its own cost minus the soft minimum, in nats."""
    own = logged.action[b]
    legal, nats, chances = room.legal, np.float32(scales.nats_2[1]), room.values[0]
    for i in range(num_legal):
        chances[i] = -nats * outputs[COST, legal[i]]
    highest, total = relative(chances, num_legal, room.bits)
    out_terms[TERM_PESSIMISM] += nats * outputs[COST, own] + highest + math.log(total)
    factor = np.float32(weight * nats / total)
    for i in range(num_legal):
        out_row[COST, legal[i]] = -factor * chances[i]
    out_row[COST, own] += np.float32(weight * nats)


@njit(cache=True, nogil=True, error_model="numpy")
def judge(
    b: int,
    outputs: Array,
    said: Said,
    logged: Logged,
    scales: Scales,
    share: float,
    out_row: Array,
    out_value: Array,
    out_luck: Array,
    out_terms: NDArray[np.float64],
) -> None:
    """Add the errors of value, luck and advantage of a row, of reward and of cost."""
    own = logged.action[b]
    for k in range(2):
        following = said.following[logged.following[b], k]
        target = logged.outcome[b, k] + logged.discount[b] * following
        out_terms[TERM_NEXT + k] += following
        error = said.value[b, k] - target / scales.value_2[k]
        size = abs(error)
        out_terms[TERM_VALUE + k] += 0.5 * size * size if size < 1.0 else size - 0.5
        out_value[k] = share * min(max(error, -1.0), 1.0)
        out_terms[TERM_NOISE + k] += error * error
        # What luck does not explain is what the advantage is to explain.
        left = -error - said.luck[b, k]
        out_terms[TERM_NOISE + 2 + k] += left * left
        out_luck[k] = -2.0 * share * left / scales.unit_4[k]
        error = scales.advantage * outputs[REWARD + k, own] - left
        out_terms[TERM_ADVANTAGE + k] += error * error
        slope = 2.0 * share * ADVANTAGE_WEIGHT / scales.unit_4[2 + k] * error
        out_row[REWARD + k, own] += np.float32(slope * scales.advantage)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def miss(
    b: int,
    num_logged: int,
    outputs: Array,
    logged: Logged,
    scales: Scales,
    room: Room,
    share: float,
    out_row: Array,
) -> float:
    """Return by how much prior and policy miss the kind of action that was meant under strain."""
    is_asleep, kind = logged.is_asleep[b], logged.strained_kind[b - num_logged]
    num_pairs = outputs.shape[1] - 1 - len(is_asleep)
    legal, every, wanted = room.legal, room.values[0], room.values[1]
    num_legal = find_legal(logged.mask[b], legal)
    weight = scales.strained_4[kind] * scales.kind_4[kind]
    missed = 0.0
    for head in (PRIOR, POLICY):
        num_wanted = 0
        for i in range(num_legal):
            every[i] = outputs[head, legal[i]]
            if kind_of(legal[i], is_asleep, num_pairs) == kind:
                wanted[num_wanted] = every[i]
                num_wanted += 1
        highest, total = relative(every, num_legal, room.bits)
        highest_wanted, total_wanted = relative(wanted, num_wanted, room.bits)
        missed += float(highest - highest_wanted) + math.log(total / total_wanted)
        num_wanted = 0
        for i in range(num_legal):
            slope = every[i] / total
            if kind_of(legal[i], is_asleep, num_pairs) == kind:
                slope -= wanted[num_wanted] / total_wanted
                num_wanted += 1
            out_row[head, legal[i]] = share * weight * slope
    return float(weight * missed)
