"""Files of frames: complete, readable, and never half-written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageSequence

from cloudsched.envs.rendering.frames import save_frames
from cloudsched.errors import ConfigError

HEIGHT, WIDTH = 24, 40


def frames_of(count: int) -> list[NDArray[np.uint8]]:
    """Frames that differ: a bar that grows from the left."""
    frames = np.full((count, HEIGHT, WIDTH, 3), (17, 20, 27), np.uint8)
    for i in range(count):
        frames[i, :, : i + 1] = (213, 94, 0)
    return list(frames)


def test_a_gif_has_all_frames_in_order(tmp_path: Path) -> None:
    frames = frames_of(12)
    path = save_frames(frames, tmp_path / "episode.gif", fps=5)
    with Image.open(path) as gif:
        assert gif.size == (WIDTH, HEIGHT)
        read = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(gif)]
    assert len(read) == 12
    for frame, original in zip(read, frames, strict=True):
        assert np.abs(frame.astype(int) - original).max() <= 8


@pytest.mark.parametrize(("fps", "duration_ms"), [(5, 200), (0.5, 2000), (30, 30), (50, 20)])
def test_a_gif_plays_at_the_asked_speed(tmp_path: Path, fps: float, duration_ms: int) -> None:
    with Image.open(save_frames(frames_of(3), tmp_path / "episode.gif", fps)) as gif:
        assert gif.info["duration"] == duration_ms
        assert gif.info["loop"] == 0


def test_frames_that_stay_the_same_keep_their_time(tmp_path: Path) -> None:
    first, second = frames_of(2)
    with Image.open(save_frames([first, first, first, second], tmp_path / "a.gif", 10)) as gif:
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(gif)]
    assert durations == [300, 100]


def test_a_colour_of_a_single_frame_survives_in_a_gif(tmp_path: Path) -> None:
    frames = frames_of(40)
    frames[23][4:12, 4:20] = (0, 158, 115)
    with Image.open(save_frames(frames, tmp_path / "episode.gif", 5)) as gif:
        gif.seek(23)
        colour = np.asarray(gif.convert("RGB"))[8, 8].astype(int)
    assert np.abs(colour - (0, 158, 115)).max() <= 8


@pytest.mark.parametrize(
    ("count", "columns", "rows"), [(1, 1, 1), (3, 1, 3), (4, 2, 2), (7, 2, 4), (100, 2, 4)]
)
def test_a_png_shows_at_most_eight_frames(
    tmp_path: Path, count: int, columns: int, rows: int
) -> None:
    frames = frames_of(min(count, WIDTH)) * (count // WIDTH + 1)
    with Image.open(save_frames(frames[:count], tmp_path / "sheet.png", 5)) as sheet:
        assert sheet.format == "PNG"
        assert sheet.width == columns * (WIDTH + 8) - 8
        assert sheet.height == rows * (HEIGHT + 8) - 8


def test_a_png_runs_from_the_first_to_the_last_frame(tmp_path: Path) -> None:
    frames = frames_of(30)
    with Image.open(save_frames(frames, tmp_path / "sheet.png", 5)) as sheet:
        pixels = np.asarray(sheet)
    assert np.array_equal(pixels[:HEIGHT, :WIDTH], frames[0])
    assert np.array_equal(pixels[-HEIGHT:, -WIDTH:], frames[-1])


@pytest.mark.parametrize("name", ["episode.mp4", "episode", "episode.gif.txt"])
def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a \.gif or \.png file"):
        save_frames(frames_of(2), tmp_path / name, 5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fps", [0, -1, 51, float("nan"), float("inf")])
def test_a_speed_that_no_viewer_plays_is_refused(tmp_path: Path, fps: float) -> None:
    with pytest.raises(ConfigError, match="fps="):
        save_frames(frames_of(2), tmp_path / "episode.gif", fps)


def test_no_frames_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no frames"):
        save_frames([], tmp_path / "episode.gif", 5)


def test_frames_of_different_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Frame 1 has shape"):
        save_frames([frames_of(1)[0], frames_of(1)[0][1:]], tmp_path / "episode.gif", 5)


def test_frames_that_are_no_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected \\(H, W, 3\\) of uint8"):
        save_frames([np.zeros((4, 4, 3))], tmp_path / "episode.gif", 5)  # type: ignore[list-item]


def test_missing_folders_are_made(tmp_path: Path) -> None:
    assert save_frames(frames_of(2), tmp_path / "a" / "b" / "episode.gif", 5).exists()


@pytest.mark.parametrize("suffix", [".gif", ".png"])
def test_an_interrupt_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = tmp_path / f"episode{suffix}"
    path.write_bytes(b"old")

    def interrupted(image: Image.Image, file: object, *args: object, **options: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_frames(frames_of(3), path, 5)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
