"""Frames of an episode as a file: an animated GIF, or a PNG with a few of them side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cloudsched.errors import ConfigError

MAX_SHEET_FRAMES = 8
MAX_STRIP_FRAMES = 3  # up to here they go below each other, beyond into two columns
SHEET_GAP = 8
SHEET_BACKGROUND = (255, 255, 255)
MAX_FPS = 50.0  # viewers play GIFs with shorter frames at their own, slower speed
GIF_COLOURS = 255  # one fewer than GIF has: that one marks pixels that do not change
PALETTE_STRIDE = 4  # pixels, either way

Frame = NDArray[np.uint8]  # (H, W, 3)


def save_frames(frames: Sequence[Frame], path: str | os.PathLike[str], fps: float) -> Path:
    """Write frames to a `.gif` (all of them) or a `.png` (at most 8, evenly spaced).

    The file appears complete or not at all, also when interrupted. In a GIF, equal frames in a row
    become one that stays longer.

    Args:
        frames: (H, W, 3) uint8 each, all of one size, as `render_rgb` draws them.
        path: where to; missing folders are made.
        fps: frames a second, of a GIF.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in (".gif", ".png"):
        raise ConfigError(f"Cannot write frames to {str(target)!r}: expected a .gif or .png file.")
    if not (np.isfinite(fps) and 0.0 < fps <= MAX_FPS):
        raise ConfigError(f"fps={fps!r}: expected a number above 0 and at most {MAX_FPS:.0f}.")
    _check(frames)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _written_whole(target) as file:
        if suffix == ".gif":
            _write_gif(frames, file, fps)
        else:
            _contact_sheet(_evenly(frames)).save(file, "PNG", optimize=True)
    return target


def _check(frames: Sequence[Frame]) -> None:
    if len(frames) == 0:
        raise ConfigError("There are no frames to save; render at least one.")
    shape = frames[0].shape
    for i, frame in enumerate(frames):
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise ConfigError(
                f"Frame {i} has shape {frame.shape} and type {frame.dtype}; "
                "expected (H, W, 3) of uint8."
            )
        if frame.shape != shape:
            raise ConfigError(
                f"Frame {i} has shape {frame.shape}, but frame 0 has {shape}; "
                "expected frames of one size."
            )


@contextmanager
def _written_whole(target: Path) -> Iterator[BinaryIO]:
    """Open a file beside the target, which takes its place once all is written."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            yield file
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _write_gif(frames: Sequence[Frame], file: BinaryIO, fps: float) -> None:
    # One palette for all frames: with one each, still parts would flicker and compress badly.
    # It is made from some pixels of every frame; an octree keeps rare colours, such as an alarm's.
    sample = np.concatenate([frame[::PALETTE_STRIDE, ::PALETTE_STRIDE] for frame in frames])
    palette = Image.fromarray(sample).quantize(GIF_COLOURS, Image.Quantize.FASTOCTREE)
    images = (
        Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE)
        for frame in frames
    )
    next(images).save(
        file,
        "GIF",
        save_all=True,
        append_images=images,
        duration=max(20, round(100.0 / fps) * 10),  # GIF counts in hundredths of a second
        loop=0,
        optimize=True,
    )


def _contact_sheet(frames: Sequence[Frame]) -> Image.Image:
    """Put frames into one image, to be read row by row."""
    height, width = frames[0].shape[:2]
    columns = 1 if len(frames) <= MAX_STRIP_FRAMES else 2
    rows = -(-len(frames) // columns)
    size = (
        columns * (width + SHEET_GAP) - SHEET_GAP,
        rows * (height + SHEET_GAP) - SHEET_GAP,
    )
    sheet = Image.new("RGB", size, SHEET_BACKGROUND)
    for i, frame in enumerate(frames):
        at = (i % columns * (width + SHEET_GAP), i // columns * (height + SHEET_GAP))
        sheet.paste(Image.fromarray(frame), at)
    return sheet


def _evenly(frames: Sequence[Frame]) -> list[Frame]:
    """Pick at most 8 frames, evenly spaced from the first to the last."""
    count = min(len(frames), MAX_SHEET_FRAMES)
    return [frames[i] for i in np.linspace(0, len(frames) - 1, count).round().astype(int).tolist()]
