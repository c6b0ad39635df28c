"""Every verb: what it prints and saves, and what a mistake costs."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from PIL import Image

from cloudsched import __version__, cli
from cloudsched.commands.options import nested, parse_pairs
from cloudsched.envs.catalog import PRESETS
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.heuristics.catalog import BASES, HEURISTICS
from cloudsched.metrics import METRICS
from cloudsched.workload.catalog import WORKLOADS

TINY = ["--seeds", "3", "--set", "episode_ticks=40"]


class Shell:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        code = cli.main(list(words))
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def json(self, *words: str) -> Any:
        code, out, _ = self(*words)
        assert code == 0
        return json.loads(out)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_verb_explains_itself(shell: Shell, name: str) -> None:
    verb = cli.VERBS[name]
    assert callable(getattr(import_module(verb.module), verb.class_name).run)
    code, out, err = shell(*name.split(), "--help")
    assert (code, err) == (0, "")
    assert f"usage: cloudsched {name}" in out
    assert "Example" in out


def test_the_overview_names_every_verb(shell: Shell) -> None:
    code, out, _ = shell("--help")
    assert code == 0
    assert all(f"  {name} " in out for name in cli.VERBS)
    assert shell()[0] == 2
    assert shell("--version") == (0, f"cloudsched {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evalute"], "No verb named 'evalute'. Did you mean 'evaluate'?"),
        (["bench"], "Did you mean 'bench env'?"),
        (["evaluate"], "--policy"),
        (["evaluate", "--policy", "bestfit"], "Did you mean 'best_fit'?"),
        (["evaluate", "--policy", "absent.json"], "Cannot read the heuristic 'absent.json'"),
        (["evaluate", "--policy", "rr", "--lod", "1"], "--load"),
        (["evaluate", "--policy", "rr", "--load", "much"], "--load"),
        (["evaluate", "--policy", "rr", "--load", "nan"], "load=nan"),
        (["evaluate", "--policy", "rr", "--split", "all"], "--split"),
        (["evaluate", "--policy", "rr", "--seeds", "51"], "seeds=51"),
        (["evaluate", "--policy", "rr", "--workload", "poison"], "Did you mean 'poisson'?"),
        (["evaluate", "--policy", "rr", "--workload", "swf"], "path"),
        (["evaluate", "--policy", "rr", "--preset", "larg"], "Did you mean 'large'?"),
        (["evaluate", "--policy", "rr", "--set", "wake_delay=5"], "'wake_delay_ticks'"),
        (["evaluate", "--policy", "rr", "--set", "fleet.servers=5"], "named 'fleet.servers'"),
        (["evaluate", "--policy", "rr", "--set", "reward.alpha=-1"], "reward.alpha=-1: expected"),
        (["evaluate", "--policy", "rr", "--set", "sleep"], "expected KEY=VALUE"),
        (["evaluate", "--policy", "rr", "--workload-option", "no=1"], "No setting named 'no'"),
        (["evaluate", "--policy", "rr", "--out", "/dev/null/x"], "is not a folder"),
        (["compare", "--baseline", "best"], "No policy named 'best'"),
        (["simulate", "--out", "episode.mp4"], ".gif or .png"),
        (["simulate", "--ticks", "0"], "episode_ticks=0"),
        (["simulate", "--ticks", "5000", "--out", "episode.gif"], "--every 9"),
        (["simulate", "--every", "0"], "--every 0"),
        (["simulate", "--fps", "0"], "--fps 0"),
        (["simulate", "--seed", "-3"], "seed=-3"),
        (["simulate", "--set", "episode_ticks=3"], "use --ticks"),
        (["bench", "env", "--repeats", "0"], "--repeats 0"),
    ],
    ids=" ".join,
)
def test_a_mistake_costs_one_line_and_exit_code_2(
    shell: Shell, words: list[str], message: str
) -> None:
    code, out, err = shell(*words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("verb", ["evaluate", "compare"])
def test_a_mistake_is_one_line_with_json_too(shell: Shell, verb: str) -> None:
    policy = "--policy" if verb == "evaluate" else "--policies"
    code, out, err = shell(verb, policy, "rr", "--json", "--workload", "poison")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_evaluate_prints_one_document_and_settings_beside_it(shell: Shell) -> None:
    code, out, err = shell("evaluate", "--policy", "rr", "--json", *TINY)
    document = json.loads(out)
    assert code == 0
    assert document["policy"] == "rr"
    assert document["seeds"] == [1_000_000, 1_000_001, 1_000_002]
    for metric in METRICS:
        assert set(document[metric]) == {"mean", "ci_low", "ci_high"}
    assert "episode_ticks=40" in err
    assert "1000000..1000002 (3)" in err


def test_evaluate_prints_settings_first_and_paths_last(shell: Shell, tmp_path: Path) -> None:
    out_folder = tmp_path / "deep" / "er"
    code, out, err = shell("evaluate", "--policy", "sjf+sleep", "--out", str(out_folder), *TINY)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "policy: sjf+sleep"
    files = [str(out_folder / name) for name in ("evaluation.json", "episodes.parquet")]
    assert lines[-2:] == files
    assert sorted(map(str, out_folder.iterdir())) == sorted(files)
    document = json.loads((out_folder / "evaluation.json").read_text())
    assert document["files"] == {"json": files[0], "parquet": files[1]}


def test_one_seed_has_no_interval_to_show(shell: Shell, tmp_path: Path) -> None:
    one = ["--seeds", "1", "--set", "episode_ticks=40"]
    code, out, err = shell("evaluate", "--policy", "rr", *one)
    assert (code, err) == (0, "one seed: no interval\n")
    (line,) = (line for line in out.splitlines() if "mean_power_w" in line)
    assert line.count("n/a") == 2
    code, out, err = shell("evaluate", "--policy", "rr", "--json", *one)
    power = json.loads(out)["mean_power_w"]
    assert power["ci_low"] == power["mean"] == power["ci_high"]
    assert err.endswith("one seed: no interval\n")
    words = ["compare", "--policies", "rr", "sjf", "--out", str(tmp_path), *one]
    code, out, err = shell(*words)
    assert (code, err) == (0, "one seed: no interval\n")
    assert "1 test seed: one seed: no interval; differences" in out
    (line,) = (line for line in out.splitlines() if line.startswith("  sjf "))
    assert line.count("n/a") >= 3
    assert "n/a" not in shell("evaluate", "--policy", "rr", *TINY)[1]


def test_train_and_test_seeds_are_chosen_by_the_split(shell: Shell) -> None:
    document = shell.json("evaluate", "--policy", "rr", "--split", "train", "--json", *TINY)
    assert document["seeds"] == [0, 1, 2]
    assert document["split"] == "train"


def test_settings_reach_the_cluster_and_the_workload(shell: Shell) -> None:
    words = ["evaluate", "--policy", "rr", "--json", "--seeds", "1", "--workload", "bursty"]
    changes = ["--set", "fleet.num_servers=4", "episode_ticks=20", "--set", "sla_stretch=none"]
    changes += ["--set", "sleep=false", 'fleet.resources=["cpu","memory","gpu"]']
    document = shell.json(*words, *changes, "--workload-option", "mean_tasks=3")
    cluster = document["cluster"]
    assert (cluster["fleet"]["num_servers"], cluster["sleep"]) == (4, False)
    assert cluster["sla_stretch"] is None
    assert cluster["fleet"]["resources"] == ["cpu", "memory", "gpu"]
    assert document["scenario"]["workload_options"] == {"mean_tasks": 3}


def test_values_of_settings_are_read_as_what_they_look_like() -> None:
    words = [["a=5", "b=0.5", "c=true", "d=None"], ["e=fifo", "f=x=y", "g=", "h=[1, 2]"]]
    values = {"a": 5, "b": 0.5, "c": True, "d": None, "e": "fifo", "f": "x=y", "g": "", "h": [1, 2]}
    assert parse_pairs("--set", words) == values
    assert nested({"fleet.n": 1, "sleep": True}) == {"fleet": {"n": 1}, "sleep": True}


@pytest.mark.parametrize(
    "words", [["a=1", "a=2"], ["fleet=1", "fleet.n=2"], ["fleet.n=2", "fleet=1"]]
)
def test_contradicting_settings_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        nested(parse_pairs("--set", [words]))


def test_compare_saves_table_document_and_picture(shell: Shell, tmp_path: Path) -> None:
    words = ["compare", "--policies", "rr", "random", "power_aware+headroom", *TINY]
    code, out, err = shell(*words, "--out", str(tmp_path), "--baseline", "sjf")
    assert (code, err) == (0, "")
    files = [str(tmp_path / n) for n in ("comparison.json", "episodes.parquet", "power_sla.png")]
    assert out.splitlines()[-3:] == files
    assert sorted(map(str, tmp_path.iterdir())) == sorted(files)
    document = json.loads(Path(files[0]).read_text())
    assert document["baseline"] == "sjf"
    assert set(document["differences"]) == {"rr", "random", "power_aware+headroom"}
    returns = [entry["episode_return"]["mean"] for entry in document["policies"].values()]
    assert returns == sorted(returns, reverse=True)
    assert len(pyarrow.parquet.read_table(files[1])) == 4 * 3
    with Image.open(files[2]) as image:
        assert image.size[0] > 1000
    assert all(name in out for name in document["policies"])


def test_compare_takes_all_heuristics_and_the_best_as_baseline(
    shell: Shell, tmp_path: Path
) -> None:
    document = shell.json("compare", "--json", "--out", str(tmp_path), *TINY)
    untuned = {name for name in HEURISTICS if "@" not in name}
    assert untuned <= set(document["policies"])
    assert document["baseline"] in document["policies"]
    assert document["files"]["plot"] == str(tmp_path / "power_sla.png")
    best = next(iter(document["policies"]))
    tuned = [name for name in document["policies"] if "@" in name]
    assert document["baseline"] == (tuned[0] if tuned else best)


def test_without_sleep_only_the_rules_that_never_sleep_are_compared(
    shell: Shell, tmp_path: Path
) -> None:
    words = ["--preset", "columbia", "--json", "--out", str(tmp_path), *TINY]
    document = shell.json("compare", *words)
    assert {name for name in document["policies"] if "@" not in name} == set(BASES)


def test_a_tuned_file_is_a_policy(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"parameters": HEURISTICS["ffd+band"].config.to_dict()}))
    mine = shell.json("evaluate", "--policy", str(path), "--json", *TINY)
    named = shell.json("evaluate", "--policy", "ffd+band", "--json", *TINY)
    assert mine["policy"] == str(path)
    assert mine["episode_return"] == named["episode_return"]


@pytest.mark.parametrize("suffix", ["png", "gif"])
def test_simulate_saves_what_it_shows(shell: Shell, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "new" / f"episode.{suffix}"
    words = ["--ticks", "20", "--every", "2", "--seed", "7", "--out", str(path)]
    code, out, err = shell("simulate", "--policy", "best_fit+sleep", *words)
    assert (code, err) == (0, "")
    assert "seeds: 7" in out
    assert out.count("tick 19/20") == 1
    assert "mean_power_w" in out
    assert out.splitlines()[-1] == str(path)
    with Image.open(path) as image:
        assert getattr(image, "n_frames", 1) == (1 if suffix == "png" else 10)


def test_simulate_shows_clusters_that_decide_once_a_tick(shell: Shell) -> None:
    code, out, _ = shell("simulate", "--preset", "columbia", "--ticks", "5")
    assert code == 0
    assert "tick 4/5" in out


def test_the_live_view_fits_a_terminal_of_80_by_24() -> None:
    words = ["simulate", "--ticks", "4", "--fps", "50", "--load", "10"]
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(command(*words), stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    output = b""
    with contextlib.suppress(OSError):  # how Linux tells that the other end is closed
        while block := os.read(leader, 65_536):
            output += block
    os.close(leader)
    assert process.wait() == 0
    text = output.decode().replace("\r\n", "\n")
    # Rich draws a frame from the upper left corner of the other screen.
    live = text[text.index("\x1b[?1049h") : text.index("\x1b[?1049l")]
    frames = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame) for frame in live.split("\x1b[H")[1:]]
    frames = [frame for frame in frames if frame.strip()]
    assert len(frames) == 4
    for tick, frame in enumerate(frames):
        lines = frame.split("\n")
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith(f"tick {tick}/4")
        assert re.search(r"^ *14 (active|waking|asleep)", frame, re.MULTILINE)
        assert "queue: " in frame
    assert re.search(r"; the first [2-5]:", frames[-1])


@pytest.mark.parametrize(
    ("verb", "names"),
    [("workloads", WORKLOADS), ("policies", HEURISTICS), ("presets", PRESETS)],
)
def test_listings_name_everything(shell: Shell, verb: str, names: Any) -> None:
    described = shell.json(verb, "--json")
    assert set(names) <= set(described)
    lines = shell(verb)[1].splitlines()
    for name, entry in described.items():
        description = entry if isinstance(entry, str) else entry["description"]
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        assert line[len(name) :].strip().startswith(description[:40])


@pytest.mark.parametrize("verb", ["workloads", "presets"])
def test_listings_of_settings_fit_100_columns(shell: Shell, verb: str) -> None:
    assert max(map(len, shell(verb)[1].splitlines())) <= 100


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_listed_with_every_option_its_default_and_its_meaning(
    shell: Shell, name: str
) -> None:
    kind = WORKLOADS[name].options
    options = shell.json("workloads", "--json")[name]["options"]
    assert list(options) == [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]
        default = options[f.name]["default"]
        assert default == (list(f.default) if isinstance(f.default, tuple) else f.default)
        assert options[f.name]["meaning"].endswith(".")


def test_the_listing_of_workloads_shows_defaults_of_the_class_that_changes_them(
    shell: Shell,
) -> None:
    text = shell("workloads")[1]
    diurnal, bursty = text.index("\ndiurnal "), text.index("\nbursty ")
    assert "  cpu_max=0.5   " in text[diurnal:bursty]
    assert "  cpu_max=0.2   " in text[bursty:]
    assert "Largest CPU demand." in text[bursty:]


def test_presets_are_listed_with_what_they_change(shell: Shell) -> None:
    presets = shell.json("presets", "--json")
    assert presets["default"]["changes"] == {}
    assert presets["large"]["changes"] == {"fleet.num_servers": 500, "queue_capacity": 20_000}
    for name, preset in presets.items():
        changes = nested(preset["changes"])
        assert Scenario(settings=changes).config == PRESETS[name].config
    text = shell("presets")[1]
    assert "changes fleet.num_servers=500  queue_capacity=20000" in text
    assert "  reward.beta=60 " in text


def test_listings_start_without_the_compiler() -> None:
    code = (
        "import sys; from cloudsched import cli; "
        "codes = [cli.main([verb]) for verb in ('--help', 'policies', 'workloads', 'presets')]; "
        "heavy = {'numba', 'gymnasium', 'pyarrow', 'matplotlib', 'torch', 'ray'}; "
        "print(codes, sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "[0, 0, 0, 0] []\n"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "cloudsched.cli", *words]


def test_a_mistake_in_a_real_process_leaves_no_traceback() -> None:
    done = subprocess.run(
        command("evaluate", "--policy", "nobody", "--json"), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("No policy named 'nobody'.")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_enough_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(command("policies"), stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, "")


def test_an_interrupt_leaves_one_line_and_nothing_half_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        command("compare", "--out", str(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells that start tests in the background let them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("seeds:"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "Interrupted.\n")
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune-heuristic", "--workloads", "--evaluations", "5"], "--workloads is empty"),
        (["tune-heuristic", "--fresh", "0"], "--fresh 0: expected at least 1"),
        (["tune-heuristic", "--evaluations", "0"], "--evaluations 0: expected at least 1"),
        (["tune-heuristic", "--num-seeds", "300"], "from 1 to 50"),
        (["tune-heuristic", "--num-seeds", "0"], "--num-seeds 0: expected at least 1"),
        (["tune-heuristic", "--set", "wake_delay=5"], "Did you mean 'wake_delay_ticks'?"),
        (["tune-heuristic", "--workload-option", "no=1"], "No setting named 'no'"),
        (["tune-heuristic", "--out", "/proc/tuned.json", "--evaluations", "5"], "/proc"),
        (["evaluate", "--policy", "rr", "--set", "fleet.resources=cpu,cpu"], "different names"),
        (["train", "absent.py"], "No config file 'absent.py'"),
    ],
)
def test_further_mistakes_cost_one_line_too(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


def test_a_heuristic_is_tuned_for_changed_settings_and_records_them(
    shell: Shell, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    words = ["--policy", "best_fit+sleep", "--workloads", "bursty", "--num-seeds", "2"]
    words += ["--evaluations", "8", "--population", "4", "--out", str(path), "--json"]
    words += ["--workload-option", "mean_tasks=3"]
    changes = ["episode_ticks=30", "fleet.num_servers=4", "wake_delay_ticks=2"]
    tuned = shell.json("tune-heuristic", *words, "--set", *changes)
    assert tuned == json.loads(path.read_text())
    assert tuned["settings"] == {
        "episode_ticks": 30,
        "fleet": {"num_servers": 4},
        "wake_delay_ticks": 2,
    }
    assert tuned["workload_options"] == {"mean_tasks": 3}
    # The return it claims is that of those settings.
    words = ["--policy", str(path), "--workload", "bursty", "--split", "train", "--seeds", "2"]
    words += ["--workload-option", "mean_tasks=3", "--json", "--set", *changes]
    evaluated = shell.json("evaluate", *words)
    assert evaluated["episode_return"]["mean"] == pytest.approx(tuned["train_return"], rel=1e-9)


def test_resources_may_be_written_with_commas(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "--policy", "rr", "--seeds", "2", "--json", "--set", "episode_ticks=5"]
    assert cli.main([*words, "fleet.resources=cpu,memory,gpu"]) == 0
    resources = json.loads(capsys.readouterr().out)["cluster"]["fleet"]["resources"]
    assert resources == ["cpu", "memory", "gpu"]


def test_help_on_the_first_half_of_a_verb_lists_the_verbs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "--help"]) == 0
    assert "bench env" in capsys.readouterr().out
