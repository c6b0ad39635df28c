"""What a person sees while trials run: a line for each result, and how long it may still take."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ray.tune import Callback

WIDTH = 34  # columns of a trial's name


class ProgressLines(Callback):  # type: ignore[misc]
    """Writes to stderr of the driver, so that `ray job logs` shows it too.

    Args:
        num_done: trials that were finished before, and are not among those that run.
        num_trials: all of them.
        steps: decisions that each training had behind it when this run began.
        goal: decisions that all of them are to have in the end; 0 if nobody knows.
    """

    def __init__(
        self,
        *,
        num_done: int,
        num_trials: int,
        steps: Mapping[str, int] = MappingProxyType({}),
        goal: int = 0,
    ) -> None:
        self._num_done = num_done
        self._num_trials = num_trials
        self._steps = dict(steps)
        self._first_steps = sum(steps.values())
        self._goal = goal
        self._started = 0.0

    def setup(self, **_: Any) -> None:
        """Start the clock, here because a resumed search gets a copy that was made long ago."""
        self._started = time.monotonic()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: Mapping[str, Any], **_: Any
    ) -> None:
        """Tell where a training is."""
        name = str(trial)
        if "steps" in result:
            self._steps[name] = int(result["steps"])
        if "train_seeds" in result:
            rate = result["steps"] / max(result["seconds"], 1e-9)
            text = f"{result['steps']:>10,} decisions ({rate:,.0f}/s)  {_measures(result, 'train')}"
            self._print(name, f"{text}{'  best' if result['train_seeds']['is_best'] else ''}")
        if "test_seeds" in result:
            self._print(name, f"{'done':>24}  {_measures(result, 'test')}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Tell how many are done, and when the rest may be."""
        others = sum(other.is_finished() for other in trials if other is not trial)
        num_done = self._num_done + others + 1
        rest = self._rest() if num_done < self._num_trials else ""
        self._print("", f"{num_done} of {self._num_trials} trials done{rest}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Tell that a trial failed once too often."""
        self._print(str(trial), f"failed: {trial.error_file or 'no details'}")

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """Tell that a trial starts again from its last checkpoint."""
        self._print(str(trial), "lost its process; starts again from its checkpoint")

    def _rest(self) -> str:
        steps = sum(self._steps.values())
        if steps <= self._first_steps or not self._goal:
            return ""
        seconds_a_step = (time.monotonic() - self._started) / (steps - self._first_steps)
        minutes = max(0, self._goal - steps) * seconds_a_step / 60.0
        return f"; about {minutes:.0f} more minutes"

    def _print(self, name: str, text: str) -> None:
        seconds = time.monotonic() - self._started
        print(f"{seconds:6.0f} s  {name:<{WIDTH}}  {text}", file=sys.stderr, flush=True)


def _measures(result: Mapping[str, Any], split: str) -> str:
    measures = result[f"{split}_seeds"]
    return (
        f"{split} seeds: return {measures['episode_return']:9.1f}  "
        f"{measures['mean_power_w']:6.0f} W  {100 * measures['sla_violation_rate']:5.2f} % late"
    )
