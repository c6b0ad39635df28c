import importlib.util
from pathlib import Path

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from cloudsched.rl.algorithms.columns import ColumnTraining

FOLDER = Path(__file__).parents[2] / "rllib_configs"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_experiment_file_builds_a_valid_config_and_says_how_to_run_it(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.build()
    assert isinstance(config, AlgorithmConfig)
    assert issubclass(config.algo_class, ColumnTraining)
    config.validate()
    assert "Run: `" in module.__doc__
