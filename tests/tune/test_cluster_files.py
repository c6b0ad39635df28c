"""The cluster files say what Ray's launcher and KubeRay understand, as far as that can be seen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "cluster/kuberay"

# Of KubeRay's ray.io/v1 types (raycluster_types.go, rayjob_types.go): what must be there, and what
# may be. Read off by hand; the operator itself is not here to ask.
CLUSTER_FIELDS = {
    *("headGroupSpec", "workerGroupSpecs", "rayVersion", "authOptions"),
    *("enableInTreeAutoscaling", "autoscalerOptions", "headServiceAnnotations", "suspend"),
}
HEAD_FIELDS = {"serviceType", "headService", "enableIngress", "rayStartParams", "template"}
WORKER_FIELDS = {
    *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams"),
    *("template", "scaleStrategy", "idleTimeoutSeconds", "suspend"),
}
WORKER_REQUIRED = {"groupName", "minReplicas", "maxReplicas", "template"}
JOB_FIELDS = {
    *(
        "activeDeadlineSeconds",
        "backoffLimit",
        "rayClusterSpec",
        "submitterPodTemplate",
        "metadata",
    ),
    *("clusterSelector", "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "jobId"),
    *("runtimeEnvYAML", "submissionMode", "entrypointResources", "entrypointNumCpus", "suspend"),
    *("entrypointNumGpus", "ttlSecondsAfterFinished", "shutdownAfterJobFinishes"),
}
CONTAINER_FIELDS = {"name", "image", "ports", "resources", "volumeMounts", "env", "command", "args"}


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text("utf-8"))


def cluster_specs() -> list[dict]:
    job = load(KUBERAY / "rayjob.yaml")
    return [load(KUBERAY / "raycluster.yaml")["spec"], job["spec"]["rayClusterSpec"]]


def test_the_launcher_file_fits_rays_schema():
    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
    config = load(ROOT / "cluster/aws.yaml")
    jsonschema.validate(config, schema)
    assert config["head_node_type"] in config["available_node_types"]
    workers = [kind for kind in config["available_node_types"] if kind != config["head_node_type"]]
    assert (
        sum(config["available_node_types"][kind]["max_workers"] for kind in workers)
        <= (config["max_workers"])
    )


def test_the_launcher_file_passes_rays_own_preparation():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(load(ROOT / "cluster/aws.yaml"))
    validate_config(config)
    assert config["available_node_types"]["head"]["resources"] == {"CPU": 0}


def test_what_the_launcher_mounts_is_there():
    mounts = load(ROOT / "cluster/aws.yaml")["file_mounts"].values()
    local = [path for path in mounts if not path.startswith("~")]
    assert local
    assert [path for path in local if not (ROOT / path).exists()] == []


def test_kuberay_objects_have_the_fields_that_their_types_know():
    cluster, job = load(KUBERAY / "raycluster.yaml"), load(KUBERAY / "rayjob.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job["spec"]) <= JOB_FIELDS
    assert job["spec"]["submissionMode"] in {"K8sJobMode", "HTTPMode", "SidecarMode"}
    for document in (cluster, job):
        name = document["metadata"]["name"]
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name)
        assert len(name) <= 47


@pytest.mark.parametrize("spec", cluster_specs(), ids=["RayCluster", "RayJob"])
def test_a_cluster_has_a_head_without_trials_and_gpu_workers_that_see_one_folder(spec):
    assert {"headGroupSpec", "workerGroupSpecs"} <= set(spec) <= CLUSTER_FIELDS
    assert spec["rayVersion"] == ray.__version__
    assert spec["authOptions"] == {"mode": "token"}
    head = spec["headGroupSpec"]
    assert {"rayStartParams", "template"} <= set(head) <= HEAD_FIELDS
    assert head["rayStartParams"]["num-cpus"] == "0"
    for group in spec["workerGroupSpecs"]:
        assert set(group) >= WORKER_REQUIRED
        assert set(group) <= WORKER_FIELDS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        [container] = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    for group in (head, *spec["workerGroupSpecs"]):
        # parameters of `ray start` are text, or the operator refuses them
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        for container in pod["containers"]:
            assert {"name", "image"} <= set(container) <= CONTAINER_FIELDS
            assert {mount["name"] for mount in container["volumeMounts"]} <= {
                volume["name"] for volume in pod["volumes"]
            }
        claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]]
        assert claims == [load(KUBERAY / "storage.yaml")["metadata"]["name"]]


def test_job_and_cluster_are_the_same_cluster():
    cluster, of_job = cluster_specs()
    assert cluster == of_job


def test_the_dockerfile_and_all_files_name_the_installed_ray():
    for path in (ROOT / "cluster/Dockerfile", ROOT / "cluster/aws.yaml"):
        [version] = set(re.findall(r"rayproject/ray:([\d.]+)-", path.read_text()))
        assert version == ray.__version__


def test_commands_in_the_files_have_options_that_the_benchmark_knows(capsys):
    from cloudsched.cli import run_script
    from tune.benchmark import Benchmark

    assert run_script(Benchmark, "python -m tune.benchmark", ["--help"]) == 0
    shown = capsys.readouterr().out
    for path in (ROOT / "cluster/aws.yaml", *KUBERAY.glob("ray*.yaml")):
        text = path.read_text()
        [command] = re.findall(r"python -m tune\.benchmark ([^\"\n]*)", text)
        for option in re.findall(r"--[a-z-]+", command):
            assert option in shown, (path, option)


def test_the_runtime_env_sends_code_and_nothing_else():
    from ray.runtime_env import RuntimeEnv

    environment = load(ROOT / "runtime_env.yaml")
    RuntimeEnv(**environment)  # refuses unknown fields
    assert {".git/", ".venv/", "runs/"} <= set(environment["excludes"])
