"""Transitions as the constrained learner takes them in, and how batches are cut from them.

All that depends on the data alone is done here, for many batches at once and beside the learner:
decisions put under strain (`cloudsched.models.strain`), kinds of actions, features as the network
reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from cloudsched.models.heads import HeadNetwork
from cloudsched.models.kinds import kinds_of, toggled
from cloudsched.models.networks import ROW
from cloudsched.models.strain import strained_rows

OBSERVATION = ("servers", "jobs", "context", "action_mask")
NEXT, NEXT_ACTION = "next_", "next_action"
OUTCOME = ("action", "behaviour_probability", "reward", "cost", "discount")
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
SEEN = (*OBSERVATION, ROW, IS_ASLEEP)  # columns of B + S rows
ROWS = 128  # of what goes through the network at once, or a multiple


def prepare(
    columns: Mapping[str, Tensor], network: HeadNetwork, arrivals: slice
) -> dict[str, Tensor]:
    """Return B transitions (`cloudsched.datasets.transitions`) as the learner takes them in.

    Args:
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
    prepared = {name: columns[name] for name in (*OUTCOME, NEXT_ACTION) if name in columns}
    for prefix, seen in (("", together), (NEXT, following)):
        prepared |= {prefix + name: values for name, values in network.condensed(seen).items()}
        prepared[prefix + IS_ASLEEP] = toggled(seen)
    prepared[KIND] = kind_B
    prepared[EXOGENOUS] = torch.cat(
        [observation["context"], following["context"][:, arrivals]], dim=1
    )
    prepared[STRAINED_KIND], prepared[STRAINED_FROM] = strained.kind_S, strained.source_S
    return prepared


def cut(prepared: Mapping[str, Tensor], order_B: Tensor, size: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of `size` transitions in an order, each with its strained rows.

    Some of its rows follow once more, so that their number is a multiple of `ROWS`: matrix products
    are prepared anew for each size. What is left over is dropped.
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
        filling = rows_B[: -(size + len(own_S)) % ROWS]
        seen_R = torch.cat([rows_B, count + own_S, filling])
        kind_S = prepared[STRAINED_KIND].index_select(0, own_S)
        batch = {STRAINED_KIND: torch.cat([kind_S, torch.full_like(filling, -1)])}
        for name, values in prepared.items():
            if name not in (STRAINED_KIND, STRAINED_FROM):
                batch[name] = values.index_select(0, seen_R if name in SEEN else rows_B)
        yield batch
