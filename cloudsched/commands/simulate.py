"""`cloudsched simulate`: watch one episode in the terminal, and save it as a GIF or PNG."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from cloudsched.commands.options import ScenarioOptions
from cloudsched.commands.output import console, print_settings
from cloudsched.commands.policies import make_policy
from cloudsched.envs.cluster import Arrays, ClusterVectorEnv
from cloudsched.envs.rendering import render_ansi, render_rgb
from cloudsched.envs.rendering.frames import MAX_FPS, MAX_SHEET_FRAMES, Frame, save_frames
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import TEST_SEEDS
from cloudsched.metrics import METRICS, episode_metrics
from cloudsched.policy import Policy
from cloudsched.results import check_folder

MAX_GIF_FRAMES = 600  # about a gigabyte until they are written


@dataclass(frozen=True, kw_only=True)
class Simulate(ScenarioOptions):
    """Watch one episode: servers, queue and power, tick by tick.

    Frames show the cluster when a tick's decisions have been taken. The live view needs 80 columns
    and shows less in a low terminal. Where stdout is no terminal, only the last frame is printed.

    Examples:
      cloudsched simulate
      cloudsched simulate --policy best_fit+sleep --workload diurnal --every 5 --ticks 1000
      cloudsched simulate --ticks 100 --out episode.gif --fps 10
    """

    policy: str = "power_aware+headroom"
    """A name (`cloudsched policies`), a file of `tune-heuristic`, or the folder of a bundle."""
    seed: int = TEST_SEEDS[0]
    """Seed of the arrivals; test seeds start at 1000000, train seeds at 0."""
    ticks: int = 200
    """Length of the episode, in ticks."""
    every: int = 1
    """Ticks from one frame to the next."""
    fps: float = 10.0
    """Frames a second, in the terminal and in a GIF."""
    out: Path | None = None
    """File to save: all frames as .gif, or eight of them as .png; None to save nothing."""

    def run(self) -> None:
        """Simulate, show, save, and print the metrics."""
        scenario = self._scenario()
        self._check()
        policy = make_policy(self.policy, scenario.config)
        env = ClusterVectorEnv(1, **scenario.to_dict(), copy=False, autoreset_mode="Disabled")
        observation, _ = env.reset(seed=self.seed)  # without copies: always the current one
        print_settings(scenario, [self.seed], is_json=False, policy=self.policy)
        frames: list[Frame] = []
        wanted = self._saved_ticks()
        with self._view() as show:
            for tick in _ticks(env, policy, observation):
                if tick % self.every == 0:
                    show(env)
                if tick in wanted:
                    frames.append(render_rgb(env.engine, 0))
                if tick == self.ticks - 1:
                    last_frame = Text.from_ansi(render_ansi(env.engine, 0))
        console().print(last_frame)
        for name, values in episode_metrics(env.engine).items():
            print(f"{name:<20} {values[0]:>12,.5g}  {METRICS[name]}")
        if self.out is not None:
            with Console(stderr=True).status(f"saving {len(frames)} frames"):
                path = save_frames(frames, self.out, self.fps)
            print(path)

    def _scenario(self) -> Scenario:
        scenario = self.scenario
        if "episode_ticks" in scenario.settings:
            raise ConfigError("--set episode_ticks=...: use --ticks for the length of the episode.")
        settings = {**scenario.settings, "episode_ticks": self.ticks}
        return scenario.replace(settings=settings)

    def _check(self) -> None:
        if self.every < 1:
            raise ConfigError(f"--every {self.every}: expected at least 1.")
        if not 0.0 < self.fps <= MAX_FPS:
            raise ConfigError(f"--fps {self.fps}: expected above 0 and at most {MAX_FPS:.0f}.")
        if self.out is None:
            return
        if self.out.suffix.lower() not in (".gif", ".png"):
            raise ConfigError(f"--out {str(self.out)!r}: expected a file ending in .gif or .png.")
        if len(self._saved_ticks()) > MAX_GIF_FRAMES:
            raise ConfigError(
                f"--out {str(self.out)!r}: {len(self._saved_ticks())} frames are too many for a "
                f"GIF; use --every {-(-self.ticks // MAX_GIF_FRAMES)} or more."
            )
        check_folder(self.out.parent)

    def _saved_ticks(self) -> frozenset[int]:
        """Return the ticks whose frames go into the file."""
        if self.out is None:
            return frozenset()
        shown = range(0, self.ticks, self.every)
        if self.out.suffix.lower() == ".gif":
            return frozenset(shown)
        steps = np.linspace(0, len(shown) - 1, min(len(shown), MAX_SHEET_FRAMES)).round()
        return frozenset(shown[int(step)] for step in steps)

    @contextmanager
    def _view(self) -> Iterator[Callable[[ClusterVectorEnv], None]]:
        """Give a function that shows a cluster, at most `fps` times a second."""
        if not sys.stdout.isatty():
            yield lambda env: None
            return
        screen = console()
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            due = time.monotonic()

            def show(env: ClusterVectorEnv) -> None:
                nonlocal due
                time.sleep(max(0.0, due - time.monotonic()))
                due = time.monotonic() + 1.0 / self.fps
                picture = render_ansi(env.engine, 0, max_lines=screen.height)  # it may be resized
                text = Text.from_ansi(picture, no_wrap=True, overflow="crop")
                live.update(text, refresh=True)

            yield show


def _ticks(env: ClusterVectorEnv, policy: Policy, observation: Arrays) -> Iterator[int]:
    """Run the episode of one cluster, and yield each tick once its decisions are taken."""
    policy.reset(1)
    cluster = env.engine.state.clusters[0]
    while cluster["tick"] < env.config.episode_ticks:
        actions = policy.act(observation)
        is_last = cluster["decisions_in_tick"] + 1 >= env.config.decisions_per_tick
        if is_last or actions[0] == env.engine.wait_action:
            yield int(cluster["tick"])
        env.advance(actions)
