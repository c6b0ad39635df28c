"""The image of a cluster: servers as a heat map, the queue as blocks, power and counters.

The size is fixed, so that the frames of an episode make a video. No state is told by hue alone.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from cloudsched.envs.rendering.canvas import (
    BACKGROUND,
    GREEN,
    MUTED,
    ORANGE,
    PANEL,
    TEXT,
    VERMILLION,
    YELLOW,
    Box,
    Colour,
    draw_level,
    mix,
    use_colour,
    write,
)
from cloudsched.envs.rendering.heatmap import (
    BUSY_FILL,
    SECOND_RESOURCE,
    SERVERS_BOX,
    draw_jobless,
    draw_servers,
    lay_out,
)
from cloudsched.envs.rendering.snapshot import QueuedJob, Snapshot
from cloudsched.sim.state import ACTIVE, ASLEEP, WAKING

WIDTH, HEIGHT = 960, 540
POWER_BOX: Box = (740, 74, 939, 206)
LEGEND_BOX: Box = (740, 218, 939, 425)
QUEUE_BOX: Box = (20, 436, 939, 525)
MAX_SLOTS = 30
MAX_SLOT_WIDTH = 179
WORDY_SLOT_WIDTH = 120
WORDS_WIDTH = 66


def draw_picture(snapshot: Snapshot) -> Image.Image:
    """Draw a snapshot, 960 x 540 pixels."""
    image = Image.new("RGB", (WIDTH, HEIGHT), BACKGROUND)
    draw = ImageDraw.Draw(image)
    layout = lay_out(snapshot.fleet)
    _draw_counters(draw, snapshot)
    draw_servers(draw, snapshot, layout)
    _draw_power(draw, snapshot)
    _draw_legend(draw, snapshot, has_second=layout.is_detailed)
    _draw_queue(draw, snapshot)
    return image


def laxity_colour(job: QueuedJob) -> Colour:
    """Return green for a job with all its slack left, yellow at its deadline, vermillion beyond."""
    return VERMILLION if job.is_late else mix(YELLOW, GREEN, job.slack_left)


def slot_boxes(snapshot: Snapshot) -> list[Box]:
    """Return where each visible slot of the queue is drawn, the first job on the left."""
    left, top, right, bottom = QUEUE_BOX
    num_slots = min(snapshot.num_slots, MAX_SLOTS)
    step = min(MAX_SLOT_WIDTH, (right - left - 18) // num_slots)
    width = step - 6 - (WORDS_WIDTH if step >= WORDY_SLOT_WIDTH else 0)
    starts = range(left + 12, left + 12 + num_slots * step, step)
    return [(x, top + 30, x + width - 1, bottom - 8) for x in starts]


def _draw_counters(draw: ImageDraw.ImageDraw, snapshot: Snapshot) -> None:
    counters = (
        ("tick", f"{snapshot.tick:,} / {snapshot.episode_ticks:,}"),
        ("time of day", snapshot.clock),
        ("energy, kWh", f"{snapshot.energy_kwh:,.1f}"),
        ("queued", f"{snapshot.queue_length:,}"),
        ("running", f"{snapshot.num_running:,}"),
        ("completed", f"{snapshot.completed:,}"),
        ("rejected", f"{snapshot.rejected:,}"),
        ("violations", f"{snapshot.violations:,}"),
    )
    x = SERVERS_BOX[0]
    for i, (name, value) in enumerate(counters):
        is_alarm = name == "violations" and snapshot.violations > 0
        width = 180 if i == 0 else 108
        size = min(24, round(1.7 * width / len(value)))  # a digit is some 0.56 of the size wide
        write(draw, (x, 14), name, 13, MUTED)
        write(draw, (x, 56), value, size, VERMILLION if is_alarm else TEXT, "ls")
        x += width


def _draw_power(draw: ImageDraw.ImageDraw, snapshot: Snapshot) -> None:
    left, top, right, _ = POWER_BOX
    draw.rounded_rectangle(POWER_BOX, 6, PANEL)
    write(draw, (left + 12, top + 10), "power", 13, MUTED)
    write(draw, (left + 12, top + 26), _in_watts(snapshot.power_w), 30)
    start, end, above, below = left + 12, right - 12, top + 68, top + 86
    draw.rectangle((start, above, end, below), BACKGROUND)
    length = end - start
    filled = round(length * min(1.0, snapshot.power_share))
    draw.rectangle((start, above, start + filled, below), ORANGE)
    idle_x = start + round(length * float(snapshot.fleet.idle_w.sum()) / snapshot.full_w)
    draw.rectangle((idle_x, above - 3, idle_x + 1, below + 3), TEXT)
    share = f"{snapshot.power_share:.0%} of {_in_watts(snapshot.full_w)} at full load"
    write(draw, (start, top + 94), share, 12, MUTED)
    draw.rectangle((start, top + 113, start + 1, top + 124), TEXT)
    write(draw, (start + 8, top + 111), "all awake and idle", 12, MUTED)


def _in_watts(watts: float) -> str:
    return f"{watts:,.0f} W" if watts < 1e6 else f"{watts / 1e3:,.0f} kW"


def _draw_legend(draw: ImageDraw.ImageDraw, snapshot: Snapshot, *, has_second: bool) -> None:
    """Explain the colours, and count the servers in each state."""
    left, top, right, _ = LEGEND_BOX
    draw.rounded_rectangle(LEGEND_BOX, 6, PANEL)
    write(draw, (left + 12, top + 10), "CPU use of busy servers", 13, MUTED)
    start, end = left + 12, right - 12
    for x in range(start, end + 1):
        draw.line((x, top + 31, x, top + 43), use_colour((x - start) / (end - start)))
    for share, anchor in ((0.0, "la"), (0.5, "ma"), (1.0, "ra")):
        write(draw, (start + share * (end - start), top + 47), f"{share:.0%}", 12, MUTED, anchor)
    is_busy = snapshot.server_jobs > 0
    states = (
        ("active, idle", ACTIVE, (snapshot.mode == ACTIVE) & ~is_busy),
        ("waking", WAKING, snapshot.mode == WAKING),
        ("asleep", ASLEEP, snapshot.mode == ASLEEP),
    )
    y = top + 74
    draw_level(draw, (start, y, start + 24, y + 17), BUSY_FILL, use_colour(0.7), 0.7)
    _write_count(draw, y, "active, busy", int(np.count_nonzero(is_busy)))
    for name, mode, is_here in states:
        y += 25
        draw_jobless(draw, mode, (start, y, start + 24, y + 17))
        _write_count(draw, y, name, int(np.count_nonzero(is_here)))
    if has_second and snapshot.fleet.num_resources > 1:
        y += 25
        draw_level(draw, (start + 9, y, start + 15, y + 17), BACKGROUND, SECOND_RESOURCE, 0.6)
        write(draw, (start + 34, y + 1), f"{snapshot.fleet.resources[1]} use", 13)


def _write_count(draw: ImageDraw.ImageDraw, y: int, name: str, count: int) -> None:
    write(draw, (LEGEND_BOX[0] + 46, y + 1), name, 13)
    write(draw, (LEGEND_BOX[2] - 12, y + 1), f"{count:,}", 13, anchor="ra")


def _draw_queue(draw: ImageDraw.ImageDraw, snapshot: Snapshot) -> None:
    """Draw the visible slots and the jobs in them."""
    left, top, right, _ = QUEUE_BOX
    draw.rounded_rectangle(QUEUE_BOX, 6, PANEL)
    length = write(draw, (left + 12, top + 8), f"queue: {snapshot.queue_length:,} waiting", 13)
    if snapshot.num_late:
        late = f"{snapshot.num_late:,} late"
        write(draw, (left + 22 + length, top + 8), late, 13, VERMILLION)
    slots, resources = slot_boxes(snapshot), snapshot.fleet.resources
    sides = [f"{side}: {name}" for side, name in zip(("width", "height"), resources, strict=False)]
    note = f"first {len(slots)} shown; {', '.join(sides)}, colour: time left to start"
    write(draw, (right - 12, top + 8), note, 13, MUTED, "ra")
    has_words = len(slots) * WORDY_SLOT_WIDTH <= right - left - 18
    for slot in slots:
        draw.rectangle(slot, BACKGROUND)
    for slot, job in zip(slots, snapshot.jobs, strict=False):
        _draw_job(draw, snapshot, slot, job, has_words=has_words)


def _draw_job(
    draw: ImageDraw.ImageDraw, snapshot: Snapshot, slot: Box, job: QueuedJob, *, has_words: bool
) -> None:
    """Draw a block in a box that stands for a server of median capacity.

    Its width is the share of the CPU that the job demands, its height that of the second resource.
    """
    left, top, right, bottom = slot
    shares = np.minimum(1.0, job.demand / np.median(snapshot.fleet.capacity, axis=0)).tolist()
    width = max(3, round(shares[0] * (right - left + 1)))
    height = max(3, round(shares[min(1, len(shares) - 1)] * (bottom - top + 1)))
    draw.rectangle((left, bottom + 1 - height, left + width - 1, bottom), laxity_colour(job))
    if has_words:
        colour = VERMILLION if job.is_late else TEXT
        write(draw, (right + 7, top + 6), _laxity_words(job), 13, colour)
        write(draw, (right + 7, bottom - 6), f"runs {job.duration_ticks}", 13, MUTED, "ls")
    elif job.is_late:
        write(draw, ((left + right) // 2, top + 1), "!", 14, TEXT, "ma")


def _laxity_words(job: QueuedJob) -> str:
    if job.laxity_ticks is None:
        return "no limit"
    return f"{-job.laxity_ticks} late" if job.is_late else f"{job.laxity_ticks} left"
