"""Colours, type and the few shapes that images of a cluster are made of.

Colours are Okabe and Ito's and viridis, which people with colour blindness can tell apart.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]  # left, top, right, bottom; the last two belong to the box

BACKGROUND: Colour = (17, 20, 27)
PANEL: Colour = (28, 33, 43)
TEXT: Colour = (236, 239, 244)
MUTED: Colour = (152, 162, 178)
GREEN: Colour = (0, 158, 115)
YELLOW: Colour = (240, 228, 66)
VERMILLION: Colour = (213, 94, 0)
ORANGE: Colour = (230, 159, 0)
PURPLE: Colour = (204, 121, 167)
SKY_BLUE: Colour = (86, 180, 233)

USE_RAMP: tuple[Colour, ...] = (
    (59, 82, 139),
    (44, 113, 142),
    (33, 144, 141),
    (92, 200, 99),
    (253, 231, 37),
)


def use_colour(share: float) -> Colour:
    """Return the colour of a share of the CPU in use."""
    position = min(max(share, 0.0), 1.0) * (len(USE_RAMP) - 1)
    left = min(int(position), len(USE_RAMP) - 2)
    return mix(USE_RAMP[left], USE_RAMP[left + 1], position - left)


def ink_on(share: float) -> Colour:
    """Return the colour of text on a cell filled to `share`: dark on the light end of the ramp.

    Text up to the middle of a cell lies on the fill wherever this is dark, and is light on both
    fill and rest elsewhere.
    """
    return BACKGROUND if share >= 0.6 else TEXT


def mix(first: Colour, second: Colour, share: float) -> Colour:
    """Return a colour between two, `share` of the way to the second."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


def has_room(box: Box, size: tuple[int, int]) -> bool:
    """Return whether something of this width and height fits into a box."""
    return box[2] - box[0] + 1 >= size[0] and box[3] - box[1] + 1 >= size[1]


def draw_level(
    draw: ImageDraw.ImageDraw, box: Box, empty: Colour, full: Colour, share: float
) -> None:
    """Draw a box that is filled from below; any use at all shows."""
    left, top, right, bottom = box
    draw.rectangle(box, empty)
    if share > 0.0:
        height = max(1, round(min(share, 1.0) * (bottom - top + 1)))
        draw.rectangle((left, bottom + 1 - height, right, bottom), full)


def write(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    size: int,
    colour: Colour = TEXT,
    anchor: str = "la",
) -> float:
    """Write a line of text and return its length in pixels."""
    stamp, (shift_x, shift_y), length = _stamp(text, size, anchor)
    draw.bitmap((round(at[0] + shift_x), round(at[1] + shift_y)), stamp, colour)
    return length


# Setting type is most of the time that a frame takes, and frames repeat nearly all their words.
@lru_cache(maxsize=4096)
def _stamp(text: str, size: int, anchor: str) -> tuple[Image.Image, tuple[float, float], float]:
    """Return a mask of the text, where it goes from the anchor, and the length of the text."""
    font = _font(size)
    left, top, right, bottom = font.getbbox(text, anchor=anchor)
    left, top = math.floor(left), math.floor(top)
    stamp = Image.new("L", (max(1, math.ceil(right) - left), max(1, math.ceil(bottom) - top)))
    ImageDraw.Draw(stamp).text((-left, -top), text, 255, font, anchor)
    return stamp, (left, top), font.getlength(text)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font, so that no font has to be installed."""
    return ImageFont.load_default(size)
