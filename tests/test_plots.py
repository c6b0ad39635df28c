"""The picture of a comparison shows every policy and changes nothing else."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from PIL import Image

from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import Evaluation, evaluate_all
from cloudsched.heuristics.catalog import BASES, SLEEP_SUFFIXES, make_heuristic
from cloudsched.plots import Point, pareto_front, png, power_against_sla
from cloudsched.statistics import Estimate

SCENARIO = Scenario(settings={"episode_ticks": 40}, load=0.9)


def evaluations(names: list[str]) -> dict[str, Evaluation]:
    policies = {name: make_heuristic(name, SCENARIO.config) for name in names}
    return evaluate_all(policies, SCENARIO, range(3))


def point(name: str, power_w: float, sla_percent: float) -> Point:
    power = Estimate(mean=power_w, ci_low=power_w, ci_high=power_w)
    sla = Estimate(mean=sla_percent, ci_low=sla_percent, ci_high=sla_percent)
    return Point(name, power, sla, "#000000", "o")


def test_the_front_holds_what_nothing_else_beats_in_both() -> None:
    points = [
        point("dear and good", 300.0, 0.0),
        point("cheap and bad", 100.0, 2.0),
        point("between", 200.0, 1.0),
        point("beaten", 210.0, 1.0),
        point("as cheap, and worse", 100.0, 3.0),
        point("as good, and dearer", 310.0, 0.0),
    ]
    names = [p.name for p in pareto_front(points)]
    assert names == ["cheap and bad", "between", "dear and good"]


@pytest.mark.parametrize(
    "names",
    [["rr"], ["rr", "random"], [base + suffix for base in BASES for suffix in SLEEP_SUFFIXES]],
    ids=len,
)
def test_every_policy_is_in_the_picture(names: list[str]) -> None:
    figure = power_against_sla(evaluations(names))
    listed = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(listed) == sorted(names)
    image = Image.open(io.BytesIO(png(figure)))
    assert image.size[0] > 1000
    assert len(image.getcolors(1 << 20) or []) > 10


def test_no_point_lies_left_of_the_bound() -> None:
    figure = power_against_sla(evaluations(["rr", "sjf+sleep", "power_aware+headroom"]))
    axes = figure.axes[0]
    texts = [text.get_text() for text in axes.texts if "left of this" in text.get_text()]
    bound_w = float(texts[0].split("(")[1].split(" W")[0].replace(",", ""))
    marks = [line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() in "os^D"]
    assert len(marks) == 3
    assert min(marks) > bound_w


def test_drawing_touches_no_global_state_of_matplotlib() -> None:
    code = "import sys, cloudsched.plots; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
