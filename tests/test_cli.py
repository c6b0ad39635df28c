"""Every verb: what it prints and saves, and what a mistake costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from PIL import Image

from cloudsched import __version__, cli
from cloudsched.commands.options import nested, parse_pairs
from cloudsched.envs.catalog import PRESETS
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
        (["evaluate", "--policy", "rr", "--set", "fleet.servers=5"], "No setting named 'servers'"),
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


@pytest.mark.parametrize(
    ("verb", "names"),
    [("workloads", WORKLOADS), ("policies", HEURISTICS), ("presets", PRESETS)],
)
def test_listings_have_a_line_for_each(shell: Shell, verb: str, names: Any) -> None:
    described = shell.json(verb, "--json")
    lines = shell(verb)[1].splitlines()
    assert set(names) <= set(described)
    assert len(lines) == len(described)
    for line, (name, description) in zip(lines, described.items(), strict=True):
        assert line.startswith(f"{name} ")
        assert line.endswith(description)


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
        (["tune-heuristic", "--num-seeds", "300"], "from 1 to 50"),
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
