import pytest
import torch

from cloudsched.bench.train import CONTENDERS, TrainBenchConfig, run
from cloudsched.models.precision import products_dtype

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def test_the_bench_measures_every_contender_that_is_installed():
    lines = []
    result = run(
        TrainBenchConfig(
            batch_size=64,
            minibatch_size=32,
            num_epochs=1,
            seconds=0.05,
            rounds=1,
            env_counts=(4,),
            fleet_sizes=(4, 8),
            runner_counts=(1,),
        ),
        lines.append,
    )
    assert set(result["steps_per_s"]) == set(CONTENDERS)
    for name, speed in result["steps_per_s"].items():
        assert speed > 0 if name not in result["absent"] else speed is None
    assert set(result["ratios"]) == {"bare_torch", "sb3_maskable_ppo", "stock_rllib"}
    assert set(result["float32_ratios"]) == set(result["ratios"])
    ours = products_dtype("auto", "cpu")
    for name, precision in result["precision"].items():
        assert getattr(torch, precision) == (ours if name == "cloudsched" else torch.float32)
    assert set(result["set_policy_steps_per_s"]) == {4, 8}
    assert all(speed > 0 for speed in result["set_policy_steps_per_s"].values())
    assert result["steps_per_s_by_remote_runners"][1] > 0
    assert any("bare_torch" in line for line in lines)
