"""The front of offline learning: power against SLA violations, beside what was logged."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cloudsched.plots import COLOURS, DOTS_PER_INCH, MARKERS
from cloudsched.sweeps.cmdp import Row, front

GREY = "#9A9A9A"


def draw_front(rows: Sequence[Row], behaviours: Sequence[Row], title: str) -> Figure:
    """Draw each row with its 95 % intervals, the behaviours in grey, and the front of all."""
    figure = Figure(figsize=(9.0, 6.0), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, row in enumerate(behaviours):
        _draw(axes, row, GREY, ".", "behaviours in the data" if i == 0 else None)
    shown = [row for row in rows if not row.name.startswith("best behaviour")]
    looks: dict[str, str] = {}
    for row in shown:
        colour = looks.setdefault(row.name, COLOURS[len(looks) % len(COLOURS)])
        limits = sorted({r.limit for r in shown if r.limit is not None})
        marker = MARKERS[limits.index(row.limit) % len(MARKERS)] if row.limit is not None else "X"
        label = row.name if row.limit is None else f"{row.name}, limit {100 * row.limit:g} %"
        _draw(axes, row, colour, marker, label)
    best = front([*shown, *behaviours])
    axes.plot(
        [row.summary["mean_power_w"].mean for row in best],
        [100.0 * row.summary["sla_violation_rate"].mean for row in best],
        color="#000000",
        linewidth=0.9,
        linestyle="--",
        label="front",
        zorder=1,
    )
    axes.set_xlabel("mean power of the fleet (W)")
    axes.set_ylabel("SLA violations (% of jobs)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)
    return figure


def _draw(axes: Axes, row: Row, colour: str, marker: str, label: str | None) -> None:
    power, rate = row.summary["mean_power_w"], row.summary["sla_violation_rate"]
    is_grey = colour == GREY
    axes.errorbar(
        power.mean,
        100.0 * rate.mean,
        xerr=None if is_grey else [[power.mean - power.ci_low], [power.ci_high - power.mean]],
        yerr=None
        if is_grey
        else [[100.0 * (rate.mean - rate.ci_low)], [100.0 * (rate.ci_high - rate.mean)]],
        color=colour,
        marker=marker,
        markersize=6,
        linewidth=0.8,
        linestyle="none",
        alpha=0.8,
        label=label,
        zorder=2 if is_grey else 3,
    )
