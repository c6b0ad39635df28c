"""The Serve configs, the environment file and the scheduler's configuration are what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cloudsched.errors import ConfigError
from cloudsched.serving.backend import ServingSettings
from cloudsched.serving.fast_path import FAST_PATH
from cloudsched.serving.limits import check_host
from cloudsched.serving.local import LocalSettings

# Ray's own models.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FOLDER = Path(__file__).parents[2] / "serve"


@pytest.mark.parametrize("name", ["local.yaml", "cluster.yaml"])
def test_a_serve_config_is_valid_and_builds(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    from cloudsched.serving.app import build

    document = yaml.safe_load((FOLDER / name).read_text())
    schema = ServeDeploySchema.model_validate(document)
    (application,) = schema.applications
    assert application.import_path == "cloudsched.serving.app:build"
    assert build(application.args) is not None
    arguments = {k: v for k, v in application.args.items() if not k.endswith("_replicas")}
    assert ServingSettings.from_dict(arguments).config.num_servers == 15


def test_the_environment_file_is_the_fast_path() -> None:
    lines = (FOLDER / "fast_path.env").read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert {name: value.strip('"') for name, value in pairs.items()} == FAST_PATH


def test_the_scheduler_configuration_names_our_calls() -> None:
    document = yaml.safe_load((FOLDER / "kube-scheduler.yaml").read_text())
    assert document["apiVersion"] == "kubescheduler.config.k8s.io/v1"
    assert document["kind"] == "KubeSchedulerConfiguration"
    (extender,) = document["extenders"]
    assert extender["urlPrefix"].endswith("/k8s/TOKEN")
    assert (extender["filterVerb"], extender["prioritizeVerb"]) == ("filter", "prioritize")
    assert extender["nodeCacheCapable"] is False


def test_without_a_token_only_loopback_is_served() -> None:
    check_host("127.0.0.1", "")
    check_host("0.0.0.0", "secret")
    with pytest.raises(ConfigError, match="only for loopback"):
        check_host("0.0.0.0", "")
    with pytest.raises(ConfigError, match="max_replicas"):
        LocalSettings(min_replicas=3, max_replicas=2)
