"""`python -m tune.front` shifts headroom, and compares at equal service."""

from __future__ import annotations

import json

import pytest

from cloudsched.cli import run_script
from tune.front import Front

WORDS = ["--set", "episode_ticks=150", "--num-seeds", "6", "--shifts", "-1", "0", "2"]


def test_more_headroom_draws_more_and_is_late_less(tmp_path, capsys):
    policies = ["--policies", "headroom@poisson", "power_aware+headroom"]
    words = [*policies, *WORDS, "--out", str(tmp_path)]
    assert run_script(Front, "front", words) == 0
    document = json.loads((tmp_path / "front.json").read_text())
    for points in document["fronts"].values():
        assert [point["shift"] for point in points] == [-1.0, 0.0, 2.0]
        power = [point["mean_power_w"]["mean"] for point in points]
        late = [point["sla_violation_rate"]["mean"] for point in points]
        assert power[0] < power[2]
        assert late[0] >= late[2]
    (comparison,) = document["comparisons"]
    assert comparison["policy"] == "power_aware+headroom"
    assert f"shifted by {comparison['shift']:+g}" in capsys.readouterr().out
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["--shifts", "1"], ["--policies", "headroom@poisson"]])
def test_a_mistake_costs_one_line(words, capsys):
    assert run_script(Front, "front", words) == 2
    assert "expected at least two policies" in capsys.readouterr().err
