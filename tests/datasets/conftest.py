import shutil

import pytest

from cloudsched.commands.policies import make_policy
from cloudsched.datasets.manifest import read_manifest
from cloudsched.datasets.record import RecordingConfig, in_process, record


@pytest.fixture
def copied(recorded, tmp_path):
    """A dataset that a test may damage."""
    return shutil.copytree(recorded, tmp_path / "copied")


@pytest.fixture
def record_again(recorded, tmp_path):
    """The same recording, made once more."""
    manifest = read_manifest(recorded)
    config = RecordingConfig(
        num_episodes=12, episodes_per_file=8, behaviours=manifest.behaviours, seed=3
    )
    folder = tmp_path / "again"
    record(manifest.scenario, config, folder, make_policy, lambda *_: None, {}, in_process)
    return folder
