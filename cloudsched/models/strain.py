"""Logged wakes under strain: what a policy has to know of jams, which no log shows.

A rule wakes servers in time, so its logs hold next to no state in which jobs wait while servers
sleep. There a clone is left to chance: it may hold waiting for twice as likely as waking however
long the queue is, and whoever then does what is likeliest never wakes a server again.

But whoever woke a server would have done so all the more with less room, fewer servers awake and
more jobs waiting. So each logged wake also stands for some that were not logged: the same decision
with the servers that are awake full, some of them asleep, and a queue of jobs that fit nowhere.

After a jam many servers wake at once, which no log shows either. A policy that neither wakes too
late nor places anything puts them to sleep and wakes them again until the tick ends. But whoever
placed a job would have done so with more servers awake, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cloudsched.envs.observation import TIME_SCALE, columns
from cloudsched.models.kinds import PLACE, WAKE
from cloudsched.models.networks import Observation

NUM_COPIES = 4  # of each wake
ONE_IN = 8  # placements has a copy
SHARES = (float(ONE_IN), 1.0 / NUM_COPIES, 0.0, 0.0)  # what a row counts, by kind of action
NUM_LENGTHS = 5  # of queues: as many jobs as are visible, or 4, 16, 64 or 256 times that
ROOM = (0.0, 0.1, 0.3)  # what is left of the free capacity of a server that is awake
AGE_TICKS = (0.0, 4.0, 20.0, 100.0)  # by how much longer the jobs have been waiting


class Strained(NamedTuple):
    """Observations that no log shows, what was meant in them, and the rows they were made from."""

    observation: dict[str, Tensor]
    kind_S: Tensor
    source_S: Tensor


def strained_rows(
    observation: Observation, later_jobs: Tensor, kind_B: Tensor, is_meant_B: Tensor
) -> Strained:
    """Return what was meant as wakes and as placements, under strain.

    Args:
        later_jobs: (B, K, F) what is in the window some ticks later.
        kind_B: of what was done.
    """
    wakes, placements = (
        (is_meant_B & (kind_B == kind)).nonzero().squeeze(1) for kind in (WAKE, PLACE)
    )
    worse, wake_S = under_strain(_rows(observation, wakes), later_jobs.index_select(0, wakes))
    later, placement_S = after_longer_waits(_rows(observation, placements))
    kinds = [torch.full_like(wake_S, WAKE), torch.full_like(placement_S, PLACE)]
    return Strained(
        {name: torch.cat([worse[name], later[name]]) for name in worse},
        torch.cat(kinds),
        torch.cat([wakes[wake_S], placements[placement_S]]),
    )


def after_longer_waits(placements: Observation) -> tuple[dict[str, Tensor], Tensor]:
    """Return observations like those in which a job was placed, only that jobs waited longer.

    Where the window is full, the queue behind it is longer too. In every second one some servers
    that slept have just been woken, as it is after a jam: all the more was there to place.
    Placements are common, so that one in `ONE_IN` is enough.

    Returns:
        The observations, and the row that each was made from.
    """
    rows_S = (_number(placements["context"]) % ONE_IN == 0).nonzero().squeeze(1)
    placements = _rows(placements, rows_S)
    number_S = _number(placements["context"]) // ONE_IN
    jobs = _aged(placements["jobs"], number_S)
    is_present = placements["jobs"][:, :, -1:]
    jobs = jobs * is_present
    servers, mask, awake_S = _woken_servers(placements, number_S)
    context = _longer_queue(placements["context"], jobs, servers, awake_S, number_S)
    found = {"servers": servers, "jobs": jobs, "context": context, "action_mask": mask}
    return found, rows_S


def _woken_servers(placements: Observation, number_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (S, N, F) servers, in half of the rows some of the sleeping ones woken, (S, A) masks,
    and (S,) how many servers are awake, as a share of those that were.
    """
    servers, jobs, mask = (placements[name] for name in ("servers", "jobs", "action_mask"))
    num_servers, num_resources = servers.shape[1], jobs.shape[2] - 4
    at = columns(num_resources)
    was_asleep = servers[:, :, at.is_asleep] != 0.0
    server_N = torch.arange(num_servers, device=servers.device)
    number_S1 = number_S.unsqueeze(1)
    turn_SN = (server_N + number_S1 // 2) % 3
    is_woken = was_asleep & (number_S1 % 2 == 0)
    is_waking, is_active = is_woken & (turn_SN == 0), is_woken & (turn_SN == 1)
    servers = servers.clone()
    servers[:, :, at.is_asleep] -= (is_waking | is_active).float()
    servers[:, :, at.is_waking] += is_waking
    servers[:, :, at.is_active] += is_active
    servers[:, :, at.wake_left] += placements["context"][:, at.wake_delay, None] * is_waking

    num_pairs = num_servers * jobs.shape[1]
    demand, free = jobs[:, :, None, :num_resources], servers[:, None, :, :num_resources]
    fits = (demand <= free).all(dim=3) & is_active.unsqueeze(1) & (jobs[:, :, -1:] != 0.0)
    num_toggles = mask.shape[1] - num_pairs - 1  # none where nothing may sleep
    mask = mask.clone()
    mask[:, :num_pairs] |= fits.flatten(1)
    mask[:, num_pairs:-1] &= ~is_waking[:, :num_toggles]
    num_awake_S = (~was_asleep).sum(dim=1)
    num_woken_S = (is_waking | is_active).sum(dim=1)
    return servers, mask, 1.0 + num_woken_S / num_awake_S.clamp(min=1)


def under_strain(wakes: Observation, later_jobs: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return observations like those in which a server was woken, only worse.

    A wake has no copies if jobs could still be placed, or if no jobs are known that fit nowhere.
    What varies does so with the observation itself: a resumed run needs no generator's state, and
    several workers make of their shares what one would make of all.

    Args:
        wakes: S observations.
        later_jobs: (S, K, F) what is in the window some ticks later; fills up the queue.

    Returns:
        The observations, and the row that each was made from.
    """
    num_servers, num_jobs = wakes["servers"].shape[1], wakes["jobs"].shape[1]
    num_pairs = num_servers * num_jobs
    jobs_S2KF = torch.cat([wakes["jobs"], later_jobs], dim=1)
    is_full = (wakes["action_mask"][:, :num_pairs] == 0).all(dim=1)
    rows_S = (is_full & (jobs_S2KF[:, :, -1] != 0.0).any(dim=1)).nonzero().squeeze(1)
    rows_S = rows_S.repeat_interleave(NUM_COPIES)
    copy_S = torch.arange(len(rows_S), device=rows_S.device) % NUM_COPIES
    context = wakes["context"][rows_S]
    number_S = copy_S + _number(context)

    servers, is_asleep = _worse_servers(wakes["servers"][rows_S], number_S)
    jobs = _aged(_filled(jobs_S2KF[rows_S], num_jobs), number_S)
    num_resources = (servers.shape[2] - 12) // 2
    demand, free = jobs[:, :, None, :num_resources], servers[:, None, :, :num_resources]
    fits = ((demand <= free).all(dim=3) & ~is_asleep.unsqueeze(1)).any(dim=2)
    jobs = jobs * ~fits.unsqueeze(2)
    num_awake = (wakes["servers"][rows_S][:, :, columns(num_resources).is_asleep] == 0).sum(dim=1)
    awake_S = (~is_asleep).sum(dim=1) / num_awake.clamp(min=1)
    context = _longer_queue(context, jobs, servers, awake_S, number_S)

    mask = torch.zeros_like(wakes["action_mask"][rows_S])
    num_toggles = mask.shape[1] - num_pairs - 1  # none where nothing may sleep
    mask[:, num_pairs:-1] = is_asleep[:, :num_toggles]
    mask[:, -1] = 1
    is_jammed_S = jobs[:, :, -1].any(dim=1)
    found = {"servers": servers, "jobs": jobs, "context": context, "action_mask": mask}
    return {name: values[is_jammed_S] for name, values in found.items()}, rows_S[is_jammed_S]


def _worse_servers(servers: Tensor, number_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return (S, N, F) servers with less room, in half of the copies fewer awake; who sleeps."""
    num_resources = (servers.shape[2] - 12) // 2
    at = columns(num_resources)
    is_awake = servers[:, :, at.is_asleep] == 0.0
    server_N = torch.arange(servers.shape[1], device=servers.device)
    number_S1 = number_S.unsqueeze(1)
    # Every second or third server that was awake sleeps.
    is_put_down = is_awake & ((server_N + number_S1) % (2 + number_S1 % 2) == 0)
    is_put_down &= number_S1 % 4 < 2
    full = servers.clone()
    room_S = servers.new_tensor(ROOM)[number_S % len(ROOM)]
    full[:, :, :num_resources] *= room_S[:, None, None]
    asleep = torch.zeros_like(servers)
    fixed = slice(num_resources, 2 * num_resources + 3)  # capacities and watts
    asleep[:, :, fixed] = servers[:, :, fixed]
    asleep[:, :, :num_resources] = servers[:, :, num_resources : 2 * num_resources]
    asleep[:, :, at.is_asleep] = 1.0
    is_asleep = ~is_awake | is_put_down
    return torch.where(is_asleep.unsqueeze(2), asleep, full), is_asleep


def _filled(known: Tensor, num_jobs: int) -> Tensor:
    """Return (S, K, F) known jobs in all slots of the window, some of them twice."""
    is_known = known[:, :, -1] != 0.0
    known_first = (~is_known).to(torch.int8).argsort(dim=1, stable=True)
    slot_K = torch.arange(num_jobs, device=known.device)
    chosen_SK = known_first.gather(1, slot_K % is_known.sum(dim=1, keepdim=True))
    return known.gather(1, chosen_SK.unsqueeze(2).expand(-1, -1, known.shape[2]))


def _aged(jobs: Tensor, number_S: Tensor) -> Tensor:
    """Return jobs that have been waiting longer."""
    at = columns(jobs.shape[2] - 4)
    jobs = jobs.clone()
    age_S1 = jobs.new_tensor(AGE_TICKS)[number_S // 3 % len(AGE_TICKS)].unsqueeze(1)
    jobs[:, :, at.wait] = _squash(_stretch(jobs[:, :, at.wait]) + age_S1)
    jobs[:, :, at.laxity] = _squash(_stretch(jobs[:, :, at.laxity]) - age_S1)
    return jobs


def _longer_queue(
    context: Tensor, jobs: Tensor, servers: Tensor, awake_S: Tensor, number_S: Tensor
) -> Tensor:
    """Return (S, F) contexts that tell of the queue, of who is awake and of the power.

    Args:
        awake_S: servers awake, as a share of those that were before.
    """
    num_servers, num_resources = servers.shape[1], jobs.shape[2] - 4
    at = columns(num_resources)
    num_visible_S = jobs[:, :, -1].sum(dim=1)
    is_more_S = num_visible_S == jobs.shape[1]
    times_S = torch.where(is_more_S, 4.0 ** (number_S % NUM_LENGTHS), 1.0)
    length_S = num_visible_S * times_S
    late_S = (jobs[:, :, at.laxity] < 0.0).sum(dim=1) * times_S
    capacity = servers[:, :, num_resources : 2 * num_resources].sum(dim=1).clamp(min=1e-6)
    queued = jobs[:, :, :num_resources].sum(dim=1) * times_S.unsqueeze(1) / capacity
    context = context.clone()
    context[:, at.queued - 1] = length_S / (length_S + num_servers)
    context[:, at.queued : at.queued + num_resources] = queued / (queued + 1.0)
    context[:, at.late] = late_S / (late_S + num_servers)
    context[:, at.awake : at.awake + 2] *= awake_S.unsqueeze(1)
    context[:, at.awake : at.awake + 2].clamp_(max=1.0)
    return context


def _number(context: Tensor) -> Tensor:
    """Return (S,) numbers that are as good as drawn."""
    return (1e4 * context.abs().sum(dim=1)).long()


def _squash(ticks: Tensor) -> Tensor:
    return ticks / (ticks.abs() + TIME_SCALE)


def _stretch(feature: Tensor) -> Tensor:
    return TIME_SCALE * feature / (1.0 - feature.abs()).clamp(min=1e-3)


def _rows(observation: Observation, rows_S: Tensor) -> dict[str, Tensor]:
    return {name: values.index_select(0, rows_S) for name, values in observation.items()}
