"""A cluster as coloured text, for terminals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cloudsched.envs.rendering.snapshot import (
    QueuedJob,
    Snapshot,
    server_groups,
    short_model,
    take_snapshot,
)
from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.state import ACTIVE, ASLEEP, MODE_NAMES, WAKING

# Larger fleets are shown as a grid.
MAX_TABLE_SERVERS = 40
GRID_COLUMNS = 75
GRID_ROWS = 24
MAX_JOB_LINES = 10
MIN_JOB_LINES = 2
LINES_BESIDE_TABLE = 2 + 1 + 2 + MIN_JOB_LINES  # status, heads of table and queue, jobs
MAX_BARS = 3
BARS_WIDTH = 36

PLAIN, BOLD, DIM, RED, MAGENTA = "0", "1", "2", "1;31", "35"
MODE_COLOURS = {ACTIVE: PLAIN, WAKING: MAGENTA, ASLEEP: DIM}
# 256-colour codes that grow lighter from blue over green to yellow, as viridis does.
USE_COLOURS = ("38;5;62", "38;5;31", "38;5;36", "38;5;77", "38;5;148", "38;5;220")
LEVELS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
IDLE_MARK, WAKING_MARK, ASLEEP_MARK = "□", "↑", "z"


def render_ansi(engine: ClusterEngine, e: int, *, max_lines: int | None = None) -> str:
    """Draw cluster e as text of 80 columns with ANSI colours.

    Args:
        max_lines: height of the terminal; None for as many lines as there is to tell. Where they
            are few, a grid stands for the table of servers, blank lines and the last jobs of the
            queue go, and in the end what is lowest.
    """
    snapshot = take_snapshot(engine, e)
    if max_lines is None:
        return "\n".join(_layout(snapshot, FULL_LAYOUT)) + "\n"
    for layout in _layouts(max_lines):
        lines = _layout(snapshot, layout)
        if len(lines) <= max_lines:
            break
    return "\n".join(lines[:max_lines])


class _Layout(NamedTuple):
    """How much is drawn."""

    table_servers: int  # larger fleets are shown as a grid with one character for each server
    grid_rows: int
    job_lines: int
    blank_lines: int  # between the parts


FULL_LAYOUT = _Layout(MAX_TABLE_SERVERS, GRID_ROWS, MAX_JOB_LINES, 1)


def _layouts(max_lines: int) -> Iterator[_Layout]:
    """Yield ever smaller layouts."""
    # Whether there is a table must not depend on the queue, or the view would flicker.
    full = FULL_LAYOUT._replace(
        table_servers=min(MAX_TABLE_SERVERS, max_lines - LINES_BESIDE_TABLE)
    )
    yield full
    for job_lines in range(MAX_JOB_LINES, MIN_JOB_LINES - 1, -1):
        yield full._replace(job_lines=job_lines, blank_lines=0)
    for grid_rows in range(min(GRID_ROWS, max_lines), 0, -1):
        yield _Layout(full.table_servers, grid_rows, MIN_JOB_LINES, 0)


def _layout(snapshot: Snapshot, layout: _Layout) -> list[str]:
    blank = [""] * layout.blank_lines
    is_small = snapshot.fleet.num_servers <= layout.table_servers
    return [
        *_header(snapshot),
        *blank,
        *(_table(snapshot) if is_small else _grid(snapshot, layout.grid_rows)),
        *blank,
        *_queue(snapshot, layout.job_lines),
    ]


def _header(snapshot: Snapshot) -> Iterator[str]:
    yield _paint(
        f"tick {snapshot.tick}/{snapshot.episode_ticks}  {snapshot.clock}  "
        f"power {snapshot.power_w:,.0f} W = {snapshot.power_share:.0%} of {snapshot.full_w:,.0f} W",
        BOLD,
    )
    violations = f"violations {snapshot.violations}"
    yield (
        f"queue {snapshot.queue_length}  running {snapshot.num_running}  "
        f"completed {snapshot.completed}  rejected {snapshot.rejected}  "
        + (_paint(violations, RED) if snapshot.violations else violations)
    )


def _table(snapshot: Snapshot) -> Iterator[str]:
    """One line for each server."""
    resources = snapshot.fleet.resources[:MAX_BARS]
    width = BARS_WIDTH // len(resources)
    heads = "".join(f"{name[: width - 1]:<{width}}" for name in resources)
    yield _paint(f"{'#':>3} {'state':<10}{heads}{'jobs':>4}{'watts':>7}  model", DIM)
    for n, mode in enumerate(snapshot.mode.tolist()):
        word, bars = MODE_NAMES[mode], " " * (width * len(resources))
        if mode == ACTIVE:
            bars = "".join(_bar(use, width) for use in snapshot.use[n, : len(resources)].tolist())
        elif mode == WAKING and snapshot.wake_left[n] < 100:
            word = f"{word} {snapshot.wake_left[n]}"
        state = _paint(f"{word:<10}", MODE_COLOURS[mode])
        figures = f"{snapshot.server_jobs[n]:>4}{snapshot.server_w[n]:>7.0f}"
        yield f"{n:>3} {state}{bars}{figures}  {short_model(snapshot.fleet.models[n], 17)}"


def _grid(snapshot: Snapshot, rows: int) -> Iterator[str]:
    """One character for each server, under the name of its model."""
    for group in server_groups(snapshot.fleet, rows * GRID_COLUMNS):
        yield f"{_paint(group.title, BOLD)}: {snapshot.summary(group.servers)}"
        for start in range(0, len(group.drawn), GRID_COLUMNS):
            row = group.drawn[start : start + GRID_COLUMNS]
            yield "  " + "".join(_mark(snapshot, n) for n in row.tolist())
    ramp = "".join(
        _paint(level, _use_colour(i / (len(LEVELS) - 1))) for i, level in enumerate(LEVELS)
    )
    yield (
        f"  {ramp} active, by CPU   {IDLE_MARK} active, idle   "
        f"{_paint(WAKING_MARK, MAGENTA)} waking   {_paint(ASLEEP_MARK, DIM)} asleep"
    )


def _mark(snapshot: Snapshot, n: int) -> str:
    mode = int(snapshot.mode[n])
    if mode != ACTIVE:
        return _paint(WAKING_MARK if mode == WAKING else ASLEEP_MARK, MODE_COLOURS[mode])
    if snapshot.server_jobs[n] == 0:
        return IDLE_MARK
    use = float(snapshot.use[n, 0])
    return _paint(LEVELS[min(int(use * len(LEVELS)), len(LEVELS) - 1)], _use_colour(use))


def _queue(snapshot: Snapshot, max_jobs: int) -> Iterator[str]:
    """The visible jobs, one on a line."""
    shown = snapshot.jobs[:max_jobs]
    if not shown:
        yield _paint("queue: empty", BOLD)
        return
    late = f"{snapshot.num_late} late"
    yield (
        _paint(f"queue: {snapshot.queue_length} waiting, ", BOLD)
        + _paint(late, RED if snapshot.num_late else BOLD)
        + f"; the first {len(shown)}:"
    )
    resources = snapshot.fleet.resources[:MAX_BARS]
    heads = "".join(f"{name[:8]:>9}" for name in resources)
    yield _paint(f"{'slot':>4}{'job':>8}{heads}{'duration':>10}{'waited':>8}{'laxity':>8}", DIM)
    for k, job in enumerate(shown):
        line = _job_line(k, job, len(resources))
        yield _paint(line, RED) if job.is_late else line


def _job_line(k: int, job: QueuedJob, num_shown: int) -> str:
    demand = "".join(f"{amount:>9.3g}" for amount in job.demand[:num_shown])
    laxity = "none" if job.laxity_ticks is None else str(job.laxity_ticks)
    ticks = f"{job.duration_ticks:>10}{job.wait_ticks:>8}{laxity:>8}"
    return f"{k:>4}{job.row:>8}{demand}{ticks}{'  LATE' if job.is_late else ''}"


def _bar(use: float, width: int) -> str:
    """A bar with its percentage behind it, `width` columns in all."""
    length = width - 6
    eighths = round(use * length * 8)
    partial = EIGHTHS[eighths % 8] if eighths % 8 else ""
    filled = "█" * (eighths // 8) + partial
    rest = _paint("·" * (length - len(filled)), DIM)
    return f"{_paint(filled, _use_colour(use))}{rest}{use:>5.0%} "


def _use_colour(use: float) -> str:
    return USE_COLOURS[min(int(use * len(USE_COLOURS)), len(USE_COLOURS) - 1)]


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text else ""
