"""The servers of a cluster as a heat map: one cell each, in bands by model."""

from __future__ import annotations

from typing import NamedTuple

from PIL import ImageDraw

from cloudsched.envs.rendering.canvas import (
    BACKGROUND,
    MUTED,
    PANEL,
    PURPLE,
    SKY_BLUE,
    TEXT,
    Box,
    Colour,
    draw_level,
    has_room,
    ink_on,
    use_colour,
    write,
)
from cloudsched.envs.rendering.snapshot import Snapshot, server_groups, short_model
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.state import ACTIVE, ASLEEP, MODE_NAMES, WAKING

SERVERS_BOX: Box = (20, 74, 719, 425)
HEADING_HEIGHT = 20
MAX_CELL = (150, 96)
MIN_CELL_WIDTH = 4
MAX_SERVERS = 10_000  # larger fleets are thinned out
DETAILED_CELL = (88, 64)  # room for words
TITLE_HEIGHT = 20  # of a detailed cell
NUMBERED_CELL = (30, 20)  # room for the number of the server
SYMBOL_CELL = (9, 9)

BUSY_FILL: Colour = (62, 70, 86)  # behind the level
SECOND_RESOURCE = SKY_BLUE
# mode -> fill and line of a server that runs nothing
JOBLESS_LOOK: dict[int, tuple[Colour, Colour]] = {
    ACTIVE: ((62, 70, 86), (128, 140, 160)),
    WAKING: ((66, 42, 60), PURPLE),
    ASLEEP: (BACKGROUND, (88, 98, 118)),
}


class Layout(NamedTuple):
    """Where servers and headings are drawn."""

    cells: dict[int, Box]  # server -> its cell
    headings: list[tuple[int, int]]  # left and top, one for each group

    @property
    def is_detailed(self) -> bool:
        """Whether cells have room for words; all are of one size."""
        return has_room(next(iter(self.cells.values())), DETAILED_CELL)


def lay_out(fleet: Fleet) -> Layout:
    """Place the servers, in the largest cells with which all of them fit."""
    groups = server_groups(fleet, MAX_SERVERS)
    sizes = [len(group.drawn) for group in groups]
    width, height, columns = _largest_cell(sizes)
    gap = 6 if width > 60 else 3 if width > 16 else 1
    left, top = SERVERS_BOX[:2]
    cells: dict[int, Box] = {}
    headings = []
    for group in groups:
        headings.append((left, top))
        top += HEADING_HEIGHT
        for i, n in enumerate(group.drawn.tolist()):
            x, y = left + i % columns * width, top + i // columns * height
            cells[n] = (x, y, x + width - 1 - gap, y + height - 1 - gap)
        top += _num_rows(len(group.drawn), columns) * height
    return Layout(cells=cells, headings=headings)


def draw_servers(draw: ImageDraw.ImageDraw, snapshot: Snapshot, layout: Layout) -> None:
    """Draw every server and the headings of their groups."""
    groups = server_groups(snapshot.fleet, MAX_SERVERS)
    for (x, y), group in zip(layout.headings, groups, strict=True):
        length = write(draw, (x, y), group.title, 13)
        write(draw, (x + length + 12, y), snapshot.summary(group.servers), 13, MUTED)
    has_model = len(groups) < len(set(snapshot.fleet.models))
    for n, cell in layout.cells.items():
        if layout.is_detailed:
            _draw_detailed(draw, snapshot, n, cell, has_model=has_model)
        else:
            _draw_server(draw, snapshot, n, cell)
            if has_room(cell, NUMBERED_CELL):
                ink = ink_on(float(snapshot.use[n, 0]))
                write(draw, (cell[0] + 3, cell[3] - 3), str(n), 10, ink, "ls")


def draw_jobless(draw: ImageDraw.ImageDraw, mode: int, cell: Box) -> None:
    """Draw a server that runs nothing: idle is plain, waking has a triangle, asleep a dash."""
    left, top, right, bottom = cell
    fill, line = JOBLESS_LOOK[mode]
    if not has_room(cell, SYMBOL_CELL):
        draw.rectangle(cell, line if mode == WAKING else fill)
        return
    draw.rectangle(cell, fill, line)
    # Above the middle, out of the way of the server's number.
    x, y = (left + right) // 2, top + (bottom - top) * 2 // 5
    size = max(3, min(right - left, bottom - top) // 5)
    if mode == WAKING:
        draw.polygon(((x - size, y + size // 2), (x + size, y + size // 2), (x, y - size)), line)
    elif mode == ASLEEP:
        draw.rectangle((x - size, y - 1, x + size, y + size // 6), line)


def _draw_server(draw: ImageDraw.ImageDraw, snapshot: Snapshot, n: int, cell: Box) -> None:
    if snapshot.mode[n] == ACTIVE and snapshot.server_jobs[n]:
        use = float(snapshot.use[n, 0])
        draw_level(draw, cell, BUSY_FILL, use_colour(use), use)
    else:
        draw_jobless(draw, int(snapshot.mode[n]), cell)


def _draw_detailed(
    draw: ImageDraw.ImageDraw, snapshot: Snapshot, n: int, cell: Box, *, has_model: bool
) -> None:
    """Draw a large cell: number and watts above, use of two resources and words below."""
    left, top, right, bottom = cell
    mode, num_jobs = int(snapshot.mode[n]), int(snapshot.server_jobs[n])
    use = float(snapshot.use[n, 0])
    draw.rectangle((left, top, right, top + TITLE_HEIGHT - 1), PANEL)
    write(draw, (left + 6, top + 3), f"#{n}", 12)
    write(draw, (right - 5, top + 3), f"{snapshot.server_w[n]:,.0f} W", 12, anchor="ra")
    top += TITLE_HEIGHT
    if num_jobs and snapshot.fleet.num_resources > 1:
        bar = (right - 7, top, right, bottom)
        draw_level(draw, bar, PANEL, SECOND_RESOURCE, float(snapshot.use[n, 1]))
        right -= 9
    _draw_server(draw, snapshot, n, (left, top, right, bottom))
    if num_jobs:
        word, note = f"{use:.0%}", f"{num_jobs} job{'' if num_jobs == 1 else 's'}"
        write(draw, ((left + right) // 2, (top + bottom) // 2), word, 22, ink_on(use), "mm")
    else:
        word = "idle" if mode == ACTIVE else MODE_NAMES[mode]
        note = f"{snapshot.wake_left[n]} left" if mode == WAKING else ""
        write(draw, (left + 6, top + 5), word, 13, MUTED if mode == ASLEEP else TEXT)
    if has_model:
        note = short_model(snapshot.fleet.models[n], (right - left) // 8)
    write(draw, (left + 6, bottom - 6), note, 12, ink_on(use), "ls")


def _largest_cell(sizes: list[int]) -> tuple[int, int, int]:
    """Return width and height of the cell, with its gap, and the number of columns."""
    left, top, right, bottom = SERVERS_BOX
    room_x, room_y = right - left + 1, bottom - top + 1 - HEADING_HEIGHT * len(sizes)
    candidates = []
    for columns in range(room_x // MAX_CELL[0], room_x // MIN_CELL_WIDTH + 1):
        num_rows = sum(_num_rows(size, columns) for size in sizes)
        width = min(MAX_CELL[0], room_x // columns)
        height = min(MAX_CELL[1], room_y // num_rows, width)
        candidates.append((width, height, columns))
    return max(candidates, key=lambda cell: min(cell[0], 1.6 * cell[1]))


def _num_rows(size: int, columns: int) -> int:
    return -(-size // columns)
