"""Pictures of a cluster, checked against the state that they show."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.envs.rendering import render_ansi, render_rgb
from cloudsched.envs.rendering.canvas import GREEN, ORANGE, VERMILLION, YELLOW
from cloudsched.envs.rendering.heatmap import BUSY_FILL, SERVERS_BOX, lay_out
from cloudsched.envs.rendering.picture import POWER_BOX, slot_boxes
from cloudsched.envs.rendering.snapshot import server_groups, short_model, take_snapshot
from cloudsched.envs.rendering.text import RED
from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.fleet import build_fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.sim.state import ACTIVE, ASLEEP, MODE_NAMES, WAKING

BUSY, SLEEPING, WAKENED, IDLE = 0, 1, 2, 3  # servers of `mixed_engine`
NUM_VISIBLE = 3


def engine_of(
    *rows: tuple[int, int, float], num_servers: int = 4, **settings: Any
) -> ClusterEngine:
    """A cluster with jobs given as (arrival, duration, demand in every resource)."""
    fleet = settings.pop("fleet", FleetConfig(num_servers=num_servers))
    settings = {"visible_jobs": NUM_VISIBLE, "wake_delay_ticks": 3, **settings}
    engine = ClusterEngine(ClusterConfig(fleet=fleet, **settings))
    num_resources = engine.fleet.num_resources
    table = JobTable(
        arrival_tick=np.array([row[0] for row in rows], dtype=np.int32),
        duration_ticks=np.array([row[1] for row in rows], dtype=np.int32),
        demand=np.array([[row[2]] * num_resources for row in rows]).reshape(-1, num_resources),
        time_of_day_s=6.5 * 3600,
    )
    engine.reset([table])
    return engine


def place(engine: ClusterEngine, k: int, n: int) -> None:
    take(engine, k * engine.config.num_servers + n)


def toggle(engine: ClusterEngine, n: int) -> None:
    take(engine, engine.config.visible_jobs * engine.config.num_servers + n)


def wait(engine: ClusterEngine, ticks: int) -> None:
    for _ in range(ticks):
        take(engine, engine.wait_action)


def take(engine: ClusterEngine, action: int) -> None:
    assert engine.mask[0, action]
    engine.step([action])


@pytest.fixture
def mixed_engine() -> ClusterEngine:
    """A server in every state at tick 4; of the queued jobs one is late and one is not."""
    engine = engine_of((0, 50, 0.6), (0, 4, 0.3), (3, 40, 0.2))
    place(engine, 1, BUSY)  # the long job; the short one is due first
    toggle(engine, SLEEPING)
    toggle(engine, WAKENED)
    wait(engine, 4)
    toggle(engine, WAKENED)
    modes = engine.state.servers["mode"][0].tolist()
    assert modes == [ACTIVE, ASLEEP, WAKING, ACTIVE]
    return engine


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def server_line(text: str, n: int) -> str:
    return next(line for line in plain(text).splitlines() if re.match(rf"\s*{n} [aw]", line))


def cell_pixels(engine: ClusterEngine, n: int) -> NDArray[np.uint8]:
    left, top, right, bottom = lay_out(engine.fleet).cells[n]
    return render_rgb(engine, 0)[top : bottom + 1, left : right + 1]


def count(pixels: NDArray[np.uint8], colour: tuple[int, int, int]) -> int:
    return int((pixels == np.array(colour, np.uint8)).all(axis=-1).sum())


def main_colour(pixels: NDArray[np.uint8]) -> tuple[int, ...]:
    colours, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    return tuple(colours[counts.argmax()].tolist())


def random_engine(num_servers: int) -> ClusterEngine:
    """A cluster in the middle of an episode of random legal actions."""
    rng = np.random.default_rng(num_servers)
    rows = [(t, int(d), 0.2) for t in range(20) for d in rng.integers(1, 20, num_servers // 3)]
    engine = engine_of(*rows, num_servers=num_servers)
    for _ in range(3 * num_servers):
        engine.step([rng.choice(np.flatnonzero(engine.mask[0]))])
    return engine


def test_the_text_shows_the_counters_of_the_state(mixed_engine: ClusterEngine) -> None:
    cluster = mixed_engine.state.clusters[0]
    text = plain(render_ansi(mixed_engine, 0))
    assert "tick 4/1000" in text
    assert "06:34" in text
    assert f"power {cluster['power_w']:,.0f} W" in text
    assert f"{cluster['power_w'] / mixed_engine.fleet.max_w.sum():.0%} of" in text
    for word in ("violations", "completed", "rejected"):
        assert f"{word} {cluster[word]}" in text
    assert f"running {cluster['num_running']}" in text
    assert f"queue {cluster['queue_length']}" in text
    assert (cluster["violations"], cluster["queue_length"], cluster["num_running"]) == (1, 2, 1)


def test_the_text_names_the_state_of_every_server(mixed_engine: ClusterEngine) -> None:
    text = render_ansi(mixed_engine, 0)
    for n, mode in enumerate(mixed_engine.state.servers["mode"][0]):
        assert MODE_NAMES[mode] in server_line(text, n)
        assert mixed_engine.fleet.models[n] in server_line(text, n)


def test_bars_and_figures_follow_the_use_of_a_server(mixed_engine: ClusterEngine) -> None:
    text = render_ansi(mixed_engine, 0)
    use = 0.6 / mixed_engine.fleet.capacity[BUSY, 0]
    busy, idle = server_line(text, BUSY), server_line(text, IDLE)
    assert busy.count(f"{use:.0%}") == 2  # CPU and memory
    assert busy.count("█") > 0 == idle.count("█")
    assert f"{mixed_engine.state.servers['power_w'][0, BUSY]:.0f}" in busy


def test_late_jobs_are_red_and_say_so(mixed_engine: ClusterEngine) -> None:
    lines = render_ansi(mixed_engine, 0).splitlines()
    late = [line for line in lines if line.endswith("LATE\x1b[0m")]
    assert len(late) == 1
    assert late[0].startswith(f"\x1b[{RED}m")
    assert plain(late[0]).split()[-2:] == ["-1", "LATE"]
    assert "2 waiting, 1 late" in plain("\n".join(lines))


def test_a_job_is_late_only_after_its_last_tick() -> None:
    engine = engine_of((0, 4, 0.3))
    laxities = []
    for _ in range(5):
        (job,) = take_snapshot(engine, 0).jobs
        laxities.append((job.laxity_ticks, job.is_late))
        wait(engine, 1)
    assert laxities == [(3, False), (2, False), (1, False), (0, False), (-1, True)]


def test_a_job_without_a_deadline_is_never_late() -> None:
    engine = engine_of((0, 4, 0.3), sla_latency_ticks=None, sla_stretch=None)
    wait(engine, 50)
    assert "none" in plain(render_ansi(engine, 0)).splitlines()[-1]
    assert "LATE" not in render_ansi(engine, 0)
    assert count(render_rgb(engine, 0), VERMILLION) == 0


def test_an_empty_queue_is_called_empty() -> None:
    assert "queue: empty" in plain(render_ansi(engine_of(), 0))


@pytest.mark.parametrize("num_servers", [1, 15, 40, 41, 500])
def test_the_text_fits_on_a_screen_80_columns_wide(num_servers: int) -> None:
    lines = plain(render_ansi(random_engine(num_servers), 0)).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert len(lines) <= max(30, 12 + (num_servers if num_servers <= 40 else 0))


@pytest.mark.parametrize("kind", ["tiers", "measured"])
def test_the_grid_has_one_mark_for_each_server(kind: str) -> None:
    engine = engine_of(fleet=FleetConfig(num_servers=300, kind=kind))
    for n in range(0, 300, 3):
        toggle(engine, n)
    for n in range(0, 300, 6):
        toggle(engine, n)
    rows = [line for line in plain(render_ansi(engine, 0)).splitlines() if line.startswith("  ")]
    marks = "".join(row.strip() for row in rows[:-1])
    assert (marks.count("□"), marks.count("↑"), marks.count("z")) == (200, 50, 50)
    assert len(marks) == 300


@pytest.mark.parametrize("resources", [("cpu",), ("cpu", "memory", "gpu", "disk")])
def test_any_number_of_resources_can_be_drawn(resources: tuple[str, ...]) -> None:
    engine = engine_of((0, 5, 0.3), (0, 5, 0.3), fleet=FleetConfig(resources=resources))
    place(engine, 0, 0)
    assert max(len(line) for line in plain(render_ansi(engine, 0)).splitlines()) <= 80
    assert render_rgb(engine, 0).shape == (540, 960, 3)


@pytest.mark.parametrize("num_servers", [1, 15, 17, 18, 40, 41, 500, 3000])
@pytest.mark.parametrize("height", [4, 12, 24, 50])
def test_text_fits_a_terminal_of_any_height(num_servers: int, height: int) -> None:
    text = plain(render_ansi(random_engine(num_servers), 0, max_lines=height))
    lines = text.split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("tick ")
    if height >= 24:
        assert "queue: " in text


def test_a_usual_terminal_shows_every_server_of_the_default_fleet_and_its_first_jobs() -> None:
    text = plain(render_ansi(random_engine(15), 0, max_lines=24))
    for n in range(15):
        assert re.search(rf"^ *{n} (active|waking|asleep)", text, re.MULTILINE)
    assert "queue: " in text


@pytest.mark.parametrize("num_servers", [1, 15, 150, 500, 20_000])
def test_the_image_has_one_size_whatever_the_fleet(num_servers: int) -> None:
    image = render_rgb(engine_of((0, 5, 0.3), num_servers=num_servers, visible_jobs=1), 0)
    assert image.shape == (540, 960, 3)
    assert image.dtype == np.uint8


@pytest.mark.parametrize("num_servers", [1, 4, 15, 61, 150, 500, 5000])
@pytest.mark.parametrize("kind", ["tiers", "measured"])
def test_every_server_has_a_cell_of_its_own_inside_the_map(num_servers: int, kind: str) -> None:
    cells = lay_out(build_fleet(FleetConfig(num_servers=num_servers, kind=kind))).cells
    assert sorted(cells) == list(range(num_servers))
    taken = np.zeros((540, 960), np.int64)
    left, top, right, bottom = SERVERS_BOX
    for x0, y0, x1, y1 in cells.values():
        assert left <= x0 < x1 <= right
        assert top <= y0 < y1 <= bottom
        taken[y0 : y1 + 1, x0 : x1 + 1] += 1
    assert taken.max() == 1


def test_fleets_too_large_to_draw_are_thinned_out_and_say_so() -> None:
    groups = server_groups(build_fleet(FleetConfig(num_servers=1000)), 300)
    assert sum(len(group.servers) for group in groups) == 1000
    assert sum(len(group.drawn) for group in groups) <= 300
    assert all("1 in 4 drawn" in group.title for group in groups)


def test_groups_run_from_the_most_to_the_least_efficient_model() -> None:
    groups = server_groups(build_fleet(FleetConfig(num_servers=15)), 100)
    assert [group.title for group in groups] == ["efficient", "standard", "power_hungry"]


@pytest.mark.parametrize("num_servers", [4, 150, 500, 5000])
def test_the_states_of_servers_have_different_colours(num_servers: int) -> None:
    fleet = FleetConfig(num_servers=num_servers)
    demand = 0.9 * float(build_fleet(fleet).capacity[BUSY].min())
    engine = engine_of((0, 9, demand), fleet=fleet, visible_jobs=1)
    place(engine, 0, BUSY)
    toggle(engine, SLEEPING)
    toggle(engine, WAKENED)
    toggle(engine, WAKENED)
    colours = {main_colour(cell_pixels(engine, n)) for n in (BUSY, SLEEPING, WAKENED, IDLE)}
    assert len(colours) == 4


def test_a_cell_fills_with_the_use_of_the_cpu() -> None:
    engine = engine_of((0, 9, 0.5), (0, 9, 0.25), num_servers=500)
    for n in (0, 1):
        assert engine.fleet.capacity[n, 0] == engine.fleet.capacity[0, 0]
        place(engine, 0, n)
    cells = [cell_pixels(engine, n) for n in (0, 1)]
    for cell, demand in zip(cells, (0.5, 0.25), strict=True):
        share = 1.0 - count(cell, BUSY_FILL) / (cell.shape[0] * cell.shape[1])
        assert share == pytest.approx(demand / engine.fleet.capacity[0, 0], abs=0.05)
    assert tuple(cells[0][-1, 0]) != tuple(cells[1][-1, 0])  # the colour changes too


def test_blocks_of_late_jobs_are_vermillion(mixed_engine: ClusterEngine) -> None:
    image = render_rgb(mixed_engine, 0)
    slots = slot_boxes(take_snapshot(mixed_engine, 0))
    pixels = [image[top : bottom + 1, left : right + 1] for left, top, right, bottom in slots]
    assert [count(slot, VERMILLION) > 0 for slot in pixels] == [True, False, False]
    assert len(np.unique(pixels[1].reshape(-1, 3), axis=0)) == 2  # the job on its ground
    assert len(np.unique(pixels[2].reshape(-1, 3), axis=0)) == 1  # an empty slot


def test_a_job_turns_from_green_to_yellow_to_vermillion() -> None:
    engine = engine_of((0, 10, 0.5))
    left, _, _, bottom = slot_boxes(take_snapshot(engine, 0))[0]
    colours = []
    for _ in range(8):
        colours.append(tuple(render_rgb(engine, 0)[bottom, left].tolist()))
        wait(engine, 1)
    assert (colours[0], colours[6], colours[7]) == (GREEN, YELLOW, VERMILLION)
    assert len(set(colours)) == 8


def test_the_block_of_a_larger_job_is_larger() -> None:
    engine = engine_of((0, 10, 0.6), (0, 10, 0.2))
    image = render_rgb(engine, 0)
    large, small = (
        count(image[top : bottom + 1, left : right + 1], GREEN)
        for left, top, right, bottom in slot_boxes(take_snapshot(engine, 0))[:2]
    )
    assert large == pytest.approx(9 * small, rel=0.15)


def test_the_gauge_is_filled_to_the_share_of_full_power(mixed_engine: ClusterEngine) -> None:
    left, top, right, bottom = POWER_BOX
    gauge = render_rgb(mixed_engine, 0)[top : bottom + 1, left : right + 1]
    is_orange = (gauge == np.array(ORANGE, np.uint8)).all(axis=-1)
    share = mixed_engine.state.clusters["power_w"][0] / mixed_engine.fleet.max_w.sum()
    columns = np.flatnonzero(is_orange.any(axis=0))
    assert (columns[-1] - 12) / (right - left - 24) == pytest.approx(share, abs=0.01)


def test_drawing_changes_nothing_and_repeats_itself(mixed_engine: ClusterEngine) -> None:
    arrays: list[NDArray[Any]] = list(mixed_engine.state)
    before = [array.copy() for array in arrays]
    first = render_rgb(mixed_engine, 0), render_ansi(mixed_engine, 0)
    second = render_rgb(mixed_engine, 0), render_ansi(mixed_engine, 0)
    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1]
    for array, copy in zip(arrays, before, strict=True):
        assert np.array_equal(array, copy)


def test_each_cluster_of_an_engine_has_its_own_picture() -> None:
    engine = ClusterEngine(ClusterConfig(), 2)
    jobs = JobTable(
        arrival_tick=np.array([0]), demand=np.array([[0.3, 0.3]]), duration_ticks=np.array([4])
    )
    engine.reset([jobs, jobs.before(0)])
    assert "1 waiting" in plain(render_ansi(engine, 0))
    assert "queue: empty" in plain(render_ansi(engine, 1))
    assert not np.array_equal(render_rgb(engine, 0), render_rgb(engine, 1))


@pytest.mark.parametrize(
    ("model", "short"),
    [
        ("efficient", "efficient"),
        ("Dell Inc. PowerEdge R720 (Intel Xeon E5-2660, 2.2 GHz)", "PowerEdge R720"),
        ("LTechKorea, Inc. LKG-2212-C", "LKG-2212-C"),
        ("a" * 40, "a" * 17),
    ],
)
def test_long_model_names_keep_the_words_that_tell_them_apart(model: str, short: str) -> None:
    assert short_model(model, 17) == short
