"""The notebooks run from top to bottom, and are kept without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
TINY = {
    "01_simulator.ipynb": "num_ticks = 12\nnum_clusters = 2",
    "02_compare_policies.ipynb": (
        "num_seeds = 3\nsettings = {'episode_ticks': 40}\nworkload = 'poisson'"
    ),
    "03_offline_cmdp.ipynb": (
        "workload = 'poisson'\nsettings = {'episode_ticks': 60}\nnum_episodes = 120\n"
        "num_steps = 3\nnum_critic_steps = 3\nnum_seeds = 2\ncost_limit = 0.01"
    ),
    "04_serving.ipynb": "bundle_folder = None\nnum_ticks = 10\nnum_clusters = 2",
}
PICTURES = {
    "01_simulator.ipynb": 2,
    "02_compare_policies.ipynb": 1,
    "03_offline_cmdp.ipynb": 1,
    "04_serving.ipynb": 1,
}


def test_every_notebook_is_tested() -> None:
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_a_notebook_is_stored_without_outputs(name: str) -> None:
    for cell in nbformat.read(FOLDER / name, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("name", TINY)
def test_a_notebook_runs_and_draws_its_pictures(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    (parameters,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    parameters.source = TINY[name]
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == PICTURES[name]
