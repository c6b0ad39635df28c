"""Serves a policy and lets it run simulated clusters over HTTP, beside the in-process figures.

    python serve/simulated_hour.py --policy runs/ppo/bundle --workload diurnal

Starts `cloudsched serve` (or takes --url and --token), places the jobs of one simulated hour in
several clusters through HTTP, and evaluates the same policy on the same arrivals in process: both
must come to the same.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from gymnasium.vector import AutoresetMode

from cloudsched.commands.policies import make_policy
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import evaluate
from cloudsched.metrics import online_metrics
from cloudsched.serving.simulated import drive

FIGURES = ("mean_power_w", "energy_kwh", "sla_violation_rate", "jobs_served", "decisions")


def main() -> None:
    """Serve, drive, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="best_fit+sleep", help="a rule, or a bundle's folder")
    parser.add_argument("--workload", default="poisson")
    parser.add_argument("--ticks", type=int, default=60, help="minutes, at the default tick")
    parser.add_argument("--seeds", type=int, default=3, help="clusters, each with its own arrivals")
    parser.add_argument("--state-dir", default="runs/serve/demo-state")
    parser.add_argument("--url", default="", help="of a service that runs already, with the policy")
    parser.add_argument("--token", default="")
    arguments = parser.parse_args()
    scenario = Scenario(workload=arguments.workload, settings={"episode_ticks": arguments.ticks})
    seeds = list(range(arguments.seeds))
    if arguments.url:
        served = _over_http(arguments.url, arguments.token, scenario, seeds)
    else:
        with _service(arguments.policy, arguments.state_dir) as (url, token):
            served = _over_http(url, token, scenario, seeds)
    policy = make_policy(arguments.policy, scenario.config)
    in_process = evaluate(policy, scenario, seeds).metrics
    print(f"{'':24}{'over HTTP':>14}{'in process':>14}")
    for name in FIGURES:
        print(f"{name:24}{served[name].mean():14.4f}{in_process[name].mean():14.4f}")
    if any((served[name] != in_process[name]).any() for name in FIGURES):
        sys.exit("The service did not decide what the policy decides in process.")


@contextmanager
def _service(policy: str, state_dir: str) -> Iterator[tuple[str, str]]:
    """Run `cloudsched serve`; yield its URL and token."""
    is_bundle = (Path(policy) / "bundle.json").exists()
    command = [sys.executable, "-m", "cloudsched.cli", "serve", "--json", "--preset", "default"]
    command += ["--port", "0", "--grpc-port", "0", "--state-dir", state_dir]
    # What is compared is the policy; the shield would overrule it where it is bad.
    command += ["--shield.sla-cap", "1.0", "--bundle" if is_bundle else "--policy", policy]
    print("starting the service ...", file=sys.stderr, flush=True)
    service = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert service.stdout is not None
    try:
        text = os.read(service.stdout.fileno(), 65_536)
        if not text:
            sys.exit("The service did not start.")
        endpoint = json.loads(text)
        yield endpoint["url"], endpoint["token"]
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(60)


def _over_http(url: str, token: str, scenario: Scenario, seeds: list[int]) -> dict[str, Any]:
    """Let the service decide; return the figures of each cluster."""
    env = ClusterVectorEnv(
        len(seeds), **scenario.to_dict(), copy=False, autoreset_mode=AutoresetMode.DISABLED
    )
    env.reset(seed=seeds)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def ask(requests: list[dict[str, Any]]) -> Any:
        body = json.dumps({"requests": requests})
        connection.request("POST", "/v1/decisions/batch", body, headers)
        response = connection.getresponse()
        document = json.loads(response.read())
        if response.status != 200:
            sys.exit(f"{response.status}: {document['error']}")
        return document["replies"]

    drive(env, ask, alternatives=0)
    connection.close()
    return online_metrics(env.engine, np.arange(len(seeds)))


if __name__ == "__main__":
    main()
