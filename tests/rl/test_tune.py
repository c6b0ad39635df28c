import pytest
from ray import tune

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def test_tune_runs_trials_and_reports_our_measures(tiny_config, tmp_path):
    tiny_config.training(lr=tune.grid_search([1e-3, 1e-4]))
    tuner = tune.Tuner(
        tiny_config.algo_class,
        param_space=tiny_config,
        run_config=tune.RunConfig(
            storage_path=str(tmp_path), stop={"training_iteration": 2}, verbose=0
        ),
        tune_config=tune.TuneConfig(metric="env_runners/episode_return_mean", mode="max"),
    )
    results = tuner.fit()
    assert not results.errors
    assert len(results) == 2
    best = results.get_best_result()
    assert best.metrics["env_runners"]["sla_violation_rate"] >= 0.0
