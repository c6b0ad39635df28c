"""Rebuild the packaged Google figures from a recording of task attempts.

Run: `python -m cloudsched.workload.fit_google_v2 --data FOLDER`. It reads the attempts in the first
14 parts of clusterdata-2011-2 (`google_v2_tasks_w1.parquet`) and writes `data/google_v2.json`. The
same file gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cloudsched.errors import CloudschedError
from cloudsched.workload.base import FloatArray, IntArray
from cloudsched.workload.google_v2 import DATA_FILE, table_from_json
from cloudsched.workload.traces.reading import DATA_VARIABLE, Column, find_path, read_parquet

SOURCE = "google_v2_tasks_w1.parquet"
RARE_TASKS = 30  # requests of fewer tasks are counted with the nearest more frequent one
OWN_QUANTILES_TASKS = 1000  # requests of as many tasks have a group of durations of their own
NUM_POOLED_GROUPS = 24  # the other requests, from short to long
LEVELS = (
    *(0.0, 0.01, 0.03, 0.06),
    *(round(0.05 * i, 2) for i in range(2, 19)),
    *(0.93, 0.96, 0.98, 0.99, 1.0),
)
EXACT_JOB_TASKS = 20  # numbers of tasks up to here are counted one by one, larger ones in bins
NUM_JOB_BINS = 60
NUM_PAIRS = 100_000  # of tasks of one job, to find how alike they are

ABOUT = {
    "what": "Requests and durations of tasks that finished, and tasks a job: shares and quantiles.",
    "source": "Google clusterdata-2011-2, task_events, trace time 600-70,756 s, FINISH only; "
    "John Wilkes and Charles Reiss, https://github.com/google/cluster-data",
    "license": "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/; these are summary figures "
    "derived from the trace, not the trace.",
    "units": "cpu and memory: share of the largest machine; durations: seconds from SCHEDULE to "
    "FINISH.",
    "command": "python -m cloudsched.workload.fit_google_v2 --data FOLDER",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m cloudsched.workload.fit_google_v2", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--data",
        default=os.environ.get(DATA_VARIABLE, "."),
        help=f"folder that holds {SOURCE} (default: ${DATA_VARIABLE}, else here)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / DATA_FILE,
        help="file to write (default: the packaged one)",
    )
    options = parser.parse_args(arguments)
    try:
        source = find_path(str(Path(options.data) / SOURCE))
        text = to_text(fit(source))
    except CloudschedError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.write_text(text, encoding="utf-8")
    print(options.out)
    return 0


def fit(source: Path) -> dict[str, Any]:
    """Return the figures of a file of task attempts."""
    columns = [Column(name=name) for name in ("cpu_req", "mem_req", "duration_s", "job")]
    values = read_parquet(source, columns, keep=("end_event", ("FINISH",))).columns
    # The file holds single precision; Google gives four digits.
    cpu, memory = _four_digits(values["cpu_req"]), _four_digits(values["mem_req"])
    duration_s, job = values["duration_s"], values["job"].astype(np.int64)
    request, of_task = np.unique(np.stack([cpu, memory], axis=1), axis=0, return_inverse=True)
    of_task = _merge_rare(request, of_task.reshape(-1))
    frequent, of_task, num_tasks = np.unique(of_task, return_inverse=True, return_counts=True)
    group = _groups(of_task, num_tasks, np.log(duration_s))
    group_of_task = group[of_task]
    quantiles = [
        _digits(np.quantile(duration_s[group_of_task == g], LEVELS), 5)
        for g in range(int(group.max()) + 1)
    ]
    job_tasks, num_jobs = _job_sizes(job)
    log_duration = np.log(duration_s)
    between_jobs = _between_share(job, log_duration)
    figures: dict[str, Any] = {
        "about": ABOUT,
        "requests": {
            "cpu": request[frequent, 0].tolist(),
            "memory": request[frequent, 1].tolist(),
            "tasks": num_tasks.tolist(),
            "group": group.tolist(),
        },
        "durations": {
            "level": list(LEVELS),
            "quantile_s": quantiles,
            "log_variance_between_jobs": round(between_jobs, 4),
            "job_weight": 0.0,
        },
        "jobs": {"tasks": job_tasks, "jobs": num_jobs},
        "spearman": {
            "cpu_memory": round(spearman(cpu, memory), 4),
            "cpu_duration": round(spearman(cpu, duration_s), 4),
            "memory_duration": round(spearman(memory, duration_s), 4),
        },
    }
    figures["durations"]["job_weight"] = _job_weight(figures, between_jobs)
    return figures


def to_text(figures: dict[str, Any]) -> str:
    """Write JSON with a line for every list of numbers, so that changes can be read."""
    numbers = r"\[[^\[\]{}]*\]"
    indented = json.dumps(figures, indent=1)
    return re.sub(numbers, lambda found: "".join(found.group().split()), indented) + "\n"


def spearman(x: FloatArray, y: FloatArray) -> float:
    """Return the rank correlation; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: FloatArray) -> FloatArray:
    _, position, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - 0.5 * (count - 1))[position]


def _merge_rare(request: FloatArray, of_task: IntArray) -> IntArray:
    """Return (J,): for each task its request, or the nearest frequent one if that is rare."""
    place = np.log(np.maximum(request, 1e-5))
    frequent = np.flatnonzero(np.bincount(of_task) >= RARE_TASKS)
    distance = ((place[:, None, :] - place[None, frequent, :]) ** 2).sum(axis=2)
    nearest: IntArray = frequent[np.argmin(distance, axis=1)]
    return nearest[of_task]


def _groups(of_task: IntArray, num_tasks: IntArray, log_duration: FloatArray) -> IntArray:
    """Return (S,): which group of durations each request has."""
    is_own = num_tasks >= OWN_QUANTILES_TASKS
    pooled = np.flatnonzero(~is_own)
    mean = np.bincount(of_task, log_duration) / num_tasks
    pooled = pooled[np.argsort(mean[pooled], kind="stable")]
    middle = np.cumsum(num_tasks[pooled]) - 0.5 * num_tasks[pooled]
    group = np.empty(len(num_tasks), dtype=np.int64)
    group[is_own] = np.arange(is_own.sum())
    group[pooled] = is_own.sum() + middle * NUM_POOLED_GROUPS // num_tasks[pooled].sum()
    return np.unique(group, return_inverse=True)[1].reshape(-1)


def _job_sizes(job: IntArray) -> tuple[list[int], list[int]]:
    """Return numbers of tasks, in bins where they are large, and how many jobs have as many."""
    tasks = np.sort(np.unique(job, return_counts=True)[1])
    edges = np.geomspace(EXACT_JOB_TASKS + 1, tasks[-1] + 1, NUM_JOB_BINS)
    bins = np.where(tasks <= EXACT_JOB_TASKS, tasks, EXACT_JOB_TASKS + np.digitize(tasks, edges))
    _, position, num_jobs = np.unique(bins, return_inverse=True, return_counts=True)
    mean = np.bincount(position, tasks) / num_jobs
    return np.rint(mean).astype(int).tolist(), num_jobs.tolist()


def _between_share(key: IntArray, values: FloatArray) -> float:
    """Return the share of the variance that lies between tasks of different keys."""
    _, position, count = np.unique(key, return_inverse=True, return_counts=True)
    mean = np.bincount(position, values) / count
    return float(np.var(mean[position]) / np.var(values))


def _job_weight(figures: dict[str, Any], between_jobs: float) -> float:
    """Find the weight with which tasks drawn for one job are as alike as in the recording."""
    table = table_from_json(figures)
    rng = np.random.default_rng(0)
    request = table.request(rng.random(NUM_PAIRS))
    shared, one, other = rng.standard_normal((3, NUM_PAIRS))
    low, high = 0.0, 1.0
    for _ in range(10):
        weight = 0.5 * (low + high)
        table = replace(table, job_weight=weight)
        first, second = (
            np.log(table.duration_s(request, table.rank_in_job(shared, own)))
            for own in (one, other)
        )
        is_too_alike = float(np.corrcoef(first, second)[0, 1]) > between_jobs
        low, high = (low, weight) if is_too_alike else (weight, high)
    return round(0.5 * (low + high), 3)


def _four_digits(values: FloatArray) -> FloatArray:
    distinct, position = np.unique(values, return_inverse=True)
    return np.array(_digits(distinct, 4))[position]


def _digits(values: FloatArray, num_digits: int) -> list[float]:
    return [float(f"{value:.{num_digits}g}") for value in values]


if __name__ == "__main__":
    sys.exit(main())
