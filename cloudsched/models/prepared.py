"""Transitions as the constrained learner takes them in, and how batches are cut from them.

All that depends on the data alone is done here, for many batches at once and beside the learner:
decisions put under strain (`cloudsched.models.strain`), kinds of actions, features as the network
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from cloudsched.models.head_networks import FIXED, Condense
from cloudsched.models.kinds import kinds_of, toggled
from cloudsched.models.networks import ROW
from cloudsched.models.strain import strained_rows

OBSERVATION = ("servers", "jobs", "context", "action_mask")
NEXT, NEXT_ACTION = "next_", "next_action"
NEXT_NUMBER = "next_number"
LOGGED = ("action", "behaviour_probability", "discount")
OUTCOME = "outcome"
"""(B, 2) reward and cost."""
FOLLOWING = "following"
"""(B,) which of the U next rows follows."""
IS_ASLEEP = "is_asleep"
"""(B, T), see `cloudsched.models.kinds`."""
KIND = "kind"
"""(B,) of the action."""
EXOGENOUS = "exogenous"
"""(B, F) what happened whatever was decided."""
STRAINED_KIND = "strained_kind"
"""(S,) what was meant in the rows that follow the B logged ones, or -1 if they do not count."""
STRAINED_FROM = "strained_from"
"""(S,) the logged rows that they were made from."""
SEEN = (*OBSERVATION, ROW, IS_ASLEEP)
"""What networks and losses read: of the logged and strained rows and, as `NEXT`, of the next."""
ROWS = 32  # of what goes through the network at once, or a multiple

Prepare = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Makes of transitions what a model takes in."""


def prepare(
    columns: Mapping[str, Tensor], *, condense: Condense, arrivals: slice
) -> dict[str, Tensor]:
    """Return B transitions (`cloudsched.datasets.transitions`) as the learner takes them in.

    Args:
        condense: makes of observations what the network reads.
        arrivals: where a context tells of arrivals.
    """
    observation = {name: columns[name] for name in OBSERVATION}
    following = {name: columns[NEXT + name] for name in OBSERVATION}
    action_B, meant_B = columns["action"], columns["behaviour_probability"]
    num_actions = observation["action_mask"].shape[1]
    kind_B = kinds_of(action_B, toggled(observation), num_actions)
    strained = strained_rows(observation, following["jobs"], kind_B, meant_B > 0.5)
    together = {
        name: torch.cat([values, strained.observation[name]])
        for name, values in observation.items()
    }
    kept = (*LOGGED, NEXT_NUMBER, NEXT_ACTION)
    prepared = {name: columns[name] for name in kept if name in columns}
    for prefix, seen in (("", together), (NEXT, following)):
        prepared |= {prefix + name: values for name, values in condense(seen).items()}
        prepared[prefix + IS_ASLEEP] = toggled(seen)
    prepared[KIND] = kind_B
    prepared[OUTCOME] = torch.stack([columns["reward"], columns["cost"]], dim=1)
    prepared[EXOGENOUS] = torch.cat(
        [observation["context"], following["context"][:, arrivals]], dim=1
    )
    prepared[STRAINED_KIND], prepared[STRAINED_FROM] = strained.kind_S, strained.source_S
    return prepared


def cut(prepared: Mapping[str, Tensor], order_B: Tensor, size: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of `size` transitions in an order, each with its strained rows.

    Numbers of rows are filled up to multiples of `ROWS` with some that do not count: matrix
    products are prepared anew for each size. What is left over of the order is dropped.
    """
    count, num_batches = len(order_B), len(order_B) // size
    place_B = torch.empty_like(order_B)
    place_B[order_B] = torch.arange(count, device=order_B.device)
    batch_S = place_B[prepared[STRAINED_FROM]] // size
    strained_S = batch_S.argsort(stable=True)
    ends = torch.bincount(batch_S, minlength=num_batches).cumsum(0).tolist()
    for i, first in enumerate(range(0, num_batches * size, size)):
        rows_B = order_B[first : first + size]
        own_S = strained_S[ends[i - 1] if i else 0 : ends[i]]
        seen_R = _filled_up(torch.cat([rows_B, count + own_S]))
        kind_S = prepared[STRAINED_KIND].new_full((len(seen_R) - size,), -1)
        kind_S[: len(own_S)] = prepared[STRAINED_KIND].index_select(0, own_S)
        next_U, following_B = _distinct(prepared, rows_B)
        batch = {STRAINED_KIND: kind_S, FOLLOWING: following_B}
        for name in SEEN:
            if name in prepared:
                batch[name] = prepared[name].index_select(0, seen_R)
                batch[NEXT + name] = prepared[NEXT + name].index_select(0, next_U)
        if FIXED in prepared:
            batch[FIXED] = batch[NEXT + FIXED] = prepared[FIXED]
        for name in (*LOGGED, NEXT_ACTION, KIND, OUTCOME, EXOGENOUS):
            if name in prepared:
                batch[name] = prepared[name].index_select(0, rows_B)
        yield batch


def _distinct(prepared: Mapping[str, Tensor], rows_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return U rows with all that is next in these, and (B,) which of them each has.

    All decisions of a tick are followed by the same observation, so some rows of a batch share it.
    """
    place_B = torch.arange(len(rows_B), device=rows_B.device)
    if NEXT_NUMBER not in prepared or NEXT_ACTION in prepared:
        return rows_B, place_B
    sorted_B, by_next_B = prepared[NEXT_NUMBER].index_select(0, rows_B).sort(stable=True)
    is_first_B = torch.ones_like(sorted_B, dtype=torch.bool)
    is_first_B[1:] = sorted_B[1:] != sorted_B[:-1]
    place_B[by_next_B] = is_first_B.cumsum(0) - 1
    return _filled_up(rows_B[by_next_B[is_first_B]]), place_B


def _filled_up(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows[: -len(rows) % ROWS]])
