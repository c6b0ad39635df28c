"""Where a sweep runs: a local Ray that starts by itself, a cluster by address, or a Ray job."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cloudsched.errors import ConfigError
from cloudsched.results import check_folder

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the command of `ray job submit`
MARKER = ".shared"


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect to Ray, and let go of it at the end; a local Ray ends with it.

    Args:
        address: of a cluster, or `auto`; None for the one in RAY_ADDRESS, or a local one.

    Yields:
        What Ray tells of the connection.
    """
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new one writes boxes, also at verbose=0
    quiet()
    if JOB_VARIABLE in os.environ:
        # Ray may unpack a job's folder anew while it runs, and a process inside loses its place.
        os.chdir(tempfile.gettempdir())
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        context = ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"No Ray cluster at {address!r}: {error}") from error
    try:
        yield context
    finally:
        ray.shutdown()


def quiet() -> None:
    """Keep Ray's advice to its own developers from our users."""
    for name in ("ray.tune", "ray.rllib", "ray._common.deprecation"):
        logging.getLogger(name).setLevel(logging.ERROR)


def output_folder(folder: Path) -> Path:
    """Return the folder as an absolute path, once it is known that it will outlive the sweep."""
    if JOB_VARIABLE in os.environ and not folder.is_absolute():
        raise ConfigError(
            f"--out {str(folder)!r}: a job's own folder goes when the job's files go; give an "
            "absolute path that every node of the cluster sees."
        )
    check_folder(folder)
    return folder.absolute()


def check_shared(folder: Path) -> None:
    """Refuse a folder that some node of the cluster does not see; trials write there."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) == 1:
        return
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / MARKER
    marker.touch()
    try:
        looks = {
            node["NodeManagerAddress"]: _exists.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(str(marker))
            for node in nodes
        }
        blind = [host for host, look in looks.items() if not ray.get(look)]
    finally:
        marker.unlink()
    if blind:
        raise ConfigError(
            f"--out {str(folder)!r}: not visible on {', '.join(sorted(blind))}; give a folder that "
            "every node mounts (NFS, EFS, a ReadWriteMany volume)."
        )


@ray.remote(num_cpus=0)
def _exists(path: str) -> bool:
    return Path(path).exists()
