"""The picture of a comparison: what each policy draws, against how often it breaks the SLA.

Figures are built without pyplot, so that no backend is chosen and no global state changes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from cloudsched.evaluation import Evaluation
from cloudsched.results import write_files
from cloudsched.statistics import Estimate, summarise

DOTS_PER_INCH = 150
MAX_LABELS = 8
MIN_SLA_SPAN = 0.1  # percent; a smaller axis would make drama of a single violation
INTERVAL_SPANS = 0.6  # how far beyond the means the frame may follow intervals, in their span
LEGEND_ROWS = 42
MARKER_PIXELS = 18.0
# Okabe and Ito's colours, which people with colour blindness can tell apart, and a few more.
COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B8A800", "#000000"),
    *("#8C6D46", "#7F7F7F", "#5B3A8C", "#A0C15A"),
)
MARKERS = ("o", "s", "^", "D", "*", "P", "X", "v", "p", "h")
LABEL_OFFSETS = [
    (radius * np.cos(angle), radius * np.sin(angle))
    for radius in (26.0, 44.0, 66.0, 92.0, 122.0, 156.0)
    for angle in np.radians([60, 35, 90, 120, 15, 150, 165, -30, -60, -120, -150, 0, 180])
]  # points (1/72 inch) from a point to its label, the best first


class Point(NamedTuple):
    """One policy in the picture."""

    name: str
    power_w: Estimate
    sla_percent: Estimate
    colour: str
    marker: str


def power_against_sla(evaluations: Mapping[str, Evaluation]) -> Figure:
    """Draw mean power against SLA violation rate, with 95 % intervals both ways.

    Policies are listed in the order of their return. The line joins those that no other beats in
    both measures. No schedule that gives the same service can lie in the shaded area.
    """
    ranked = sorted(
        evaluations.values(), key=lambda e: float(e.metrics["episode_return"].mean()), reverse=True
    )
    points = _points(ranked)
    # A legend of several columns takes its width from the figure, not from the axes.
    columns = -(-len(points) // LEGEND_ROWS)
    width = 9.0 + 2.3 * columns
    figure = Figure(figsize=(width, 7.2), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.75 / width, 0.085, 8.0 / width, 0.86))
    for point in reversed(points):  # the best on top
        _draw_point(axes, point)
    front = pareto_front(points)
    _draw_front(axes, front)
    _set_limits(axes, points)
    _draw_bound(axes, min(float(_bound_w(e).mean()) for e in ranked))
    _label(axes, _labelled(points, front), [*_places(axes, points), *_along(axes, front)])
    axes.set_xlabel("mean power of the fleet (W)")
    axes.set_ylabel("SLA violations (% of jobs)")
    axes.set_title(_title(ranked[0]), loc="left", fontsize=11)
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    _draw_legend(figure, points, left=8.95 / width, columns=columns)
    return figure


def fronts(curves: Mapping[str, Sequence[Evaluation]]) -> Figure:
    """Draw one line for each policy: mean power against SLA violation rate at several settings."""
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    for (name, curve), colour, marker in zip(
        curves.items(), cycle(COLOURS), cycle(MARKERS), strict=False
    ):
        power = [one.summary["mean_power_w"] for one in curve]
        late = [100.0 * one.summary["sla_violation_rate"].mean for one in curve]
        axes.plot(late, [one.mean for one in power], marker=marker, color=colour, label=name)
    first = next(iter(curves.values()))[0]
    axes.set_xlabel("SLA violations, % of jobs")
    axes.set_ylabel("mean power, W")
    axes.set_title(_title(first, what="mean"))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in power and SLA, by rising power."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.power_w.mean, p.sla_percent.mean)):
        if not front or point.sla_percent.mean < front[-1].sla_percent.mean:
            front.append(point)
    return front


def png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG file, which appears complete or not at all."""
    write_files({path: png(figure)})


def _points(evaluations: Sequence[Evaluation]) -> list[Point]:
    """Give each family of policies a colour, and each variant of families a marker."""
    colours: dict[str, str] = {}
    markers: dict[str, str] = {}
    next_colour, next_marker = cycle(COLOURS), cycle(MARKERS)
    points = []
    # By name, so that a family keeps its looks whatever its rank.
    for evaluation in sorted(evaluations, key=lambda e: e.policy):
        family, variant = _family(evaluation.policy)
        if family not in colours:
            colours[family] = next(next_colour)
        if variant not in markers:
            markers[variant] = next(next_marker)
        measures = summarise(
            {
                "power": evaluation.metrics["mean_power_w"],
                "sla": 100.0 * evaluation.metrics["sla_violation_rate"],
            }
        )
        points.append(
            Point(
                evaluation.policy,
                measures["power"],
                measures["sla"],
                colours[family],
                markers[variant],
            )
        )
    by_name = {point.name: point for point in points}
    return [by_name[evaluation.policy] for evaluation in evaluations]


def _family(policy: str) -> tuple[str, str]:
    """Split `best_fit+sleep@poisson` into `best_fit` and `+sleep@`: sites share a marker."""
    match = re.fullmatch(r"([^+@]*)(\+[^@]*)?(@.*)?", policy)
    if match is None:
        return policy, ""
    return match[1], (match[2] or "") + ("@" if match[3] else "")


def _bound_w(evaluation: Evaluation) -> NDArray[np.float64]:
    metrics = evaluation.metrics
    share = np.divide(
        metrics["energy_bound_kwh"],
        metrics["energy_kwh"],
        out=np.zeros(len(evaluation.seeds)),
        where=metrics["energy_kwh"] > 0.0,
    )
    return share * metrics["mean_power_w"]


def _draw_point(axes: Axes, point: Point) -> None:
    power, sla = point.power_w, point.sla_percent
    axes.errorbar(
        power.mean,
        sla.mean,
        xerr=[[power.mean - power.ci_low], [power.ci_high - power.mean]],
        yerr=[[sla.mean - sla.ci_low], [sla.ci_high - sla.mean]],
        ecolor=point.colour,
        elinewidth=0.8,
        alpha=0.35,
        zorder=2,
    )
    axes.plot(
        power.mean,
        sla.mean,
        marker=point.marker,
        color=point.colour,
        markersize=11 if point.marker == "*" else 7,
        markeredgecolor="white",
        markeredgewidth=0.7,
        linestyle="none",
        zorder=4,
        clip_on=False,
    )


def _draw_front(axes: Axes, front: Sequence[Point]) -> None:
    axes.plot(
        [point.power_w.mean for point in front],
        [point.sla_percent.mean for point in front],
        color="#444444",
        linewidth=1.4,
        linestyle=(0, (5, 2)),
        zorder=3,
        label="_front",
    )


def _set_limits(axes: Axes, points: Sequence[Point]) -> None:
    """Show every mean, and as much of the intervals as leaves the means apart."""
    sla = [point.sla_percent.mean for point in points]
    span = max(max(sla) - min(sla), MIN_SLA_SPAN)
    low = min(point.sla_percent.ci_low for point in points)
    high = max(point.sla_percent.ci_high for point in points)
    bottom = max(low, min(sla) - INTERVAL_SPANS * span)
    top = max(min(high, max(sla) + INTERVAL_SPANS * span), min(sla) + span)
    margin = 0.06 * (top - bottom)
    axes.set_ylim(max(bottom - margin, -0.03 * (top - bottom)), top + margin)
    if low < bottom or high > top:
        axes.text(
            0.99,
            0.01,
            "intervals leave the frame: seeds differ more than policies do on the same seed",
            transform=axes.transAxes,
            ha="right",
            fontsize=8,
            color="#444444",
        )


def _draw_bound(axes: Axes, bound_w: float) -> None:
    left, right = axes.get_xlim()
    left = min(left, bound_w)
    left -= 0.07 * (right - left)
    axes.set_xlim(left, right)
    axes.axvspan(left, bound_w, color="#D9D9D9", zorder=0)
    axes.axvline(bound_w, color="#777777", linewidth=1.2, zorder=1)
    axes.annotate(
        f"no schedule of the same service can be left of this ({bound_w:,.0f} W)",
        (bound_w, 0.5),
        xycoords=("data", "axes fraction"),
        xytext=(-6, 0),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="center",
        fontsize=8.5,
        color="#444444",
    )


def _labelled(points: Sequence[Point], front: Sequence[Point]) -> list[Point]:
    """Choose the points worth a name in the picture: the best by return, and along the front."""
    steps = np.linspace(0, len(front) - 1, min(len(front), MAX_LABELS)).round().astype(int)
    return list(dict.fromkeys([points[0], *(front[i] for i in steps)]))


def _places(axes: Axes, points: Sequence[Point]) -> NDArray[np.float64]:
    """(P, 2) where points lie in the image, in pixels."""
    data = [(point.power_w.mean, point.sla_percent.mean) for point in points]
    places: NDArray[np.float64] = axes.transData.transform(data)
    return places


def _along(axes: Axes, front: Sequence[Point]) -> Iterator[NDArray[np.float64]]:
    """Yield places a marker's width apart on the line that joins the front."""
    places = _places(axes, front)
    for start, end in pairwise(places):
        length = float(np.hypot(*(end - start)))
        for share in np.arange(MARKER_PIXELS, length, MARKER_PIXELS) / length:
            yield start + share * (end - start)


def _label(axes: Axes, points: Sequence[Point], avoid: Sequence[NDArray[np.float64]]) -> None:
    """Write names beside points, each where it covers no other name and no place to avoid."""
    figure = axes.figure
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    scale = figure.dpi / 72.0
    inside = axes.get_window_extent(renderer)
    half = MARKER_PIXELS / 2.0
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in avoid]
    for point in points:
        text = axes.annotate(
            point.name,
            (point.power_w.mean, point.sla_percent.mean),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=8.5,
            color=point.colour,
            ha="center",
            va="center",
            zorder=6,
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85},
            arrowprops={"arrowstyle": "-", "color": point.colour, "linewidth": 0.8},
        )
        size = text.get_window_extent(renderer)
        x, y = _places(axes, [point])[0]
        best_cost = np.inf
        for rank, (dx, dy) in enumerate(LABEL_OFFSETS):
            dx += np.sign(dx) * size.width / (2.0 * scale)
            box = Bbox.from_bounds(
                x + dx * scale - size.width / 2, y + dy * scale - size.height / 2, *size.size
            )
            is_inside = inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1)
            cost = rank + 100.0 * box.count_overlaps(taken) + (0.0 if is_inside else 1000.0)
            if cost < best_cost:
                best_cost, best_box = cost, box
                text.set_position((dx, dy))
        taken.append(best_box)


def _draw_legend(figure: Figure, points: Sequence[Point], *, left: float, columns: int) -> None:
    handles = [
        Line2D([], [], color=p.colour, marker=p.marker, linestyle="none", label=p.name)
        for p in points
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, 0.965),
        ncols=columns,
        fontsize=8,
        frameon=False,
        labelspacing=0.25,
        handletextpad=0.3,
        title="by return, the best first",
        title_fontsize=8.5,
        alignment="left",
    )


def _title(evaluation: Evaluation, what: str = "mean and 95 % interval") -> str:
    scenario = evaluation.scenario
    changes = ", changed" if scenario.settings or scenario.workload_options else ""
    return (
        f"{scenario.workload} at load {scenario.load:g}, preset {scenario.preset}{changes}: "
        f"{what} over {len(evaluation.seeds)} seeds"
    )
