"""The notebook of docs/ runs in a kernel of Jupyter, without Ray, torch and NumPy, and its plans show as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "placement.ipynb"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells after they have run; an error in any of them is raised here."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), (
        "it is kept without outputs"
    )
    loaded = "import sys\nprint(sorted({'numpy', 'ray', 'torch'} & set(sys.modules)))"
    notebook.cells.append(nbformat.v4.new_code_cell(loaded))
    place = {"metadata": {"path": str(tmp_path_factory.mktemp("empty"))}}
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources=place
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_plans_are_pictures_inline(cells: list[Any]) -> None:
    pictures = [
        o.data
        for cell in cells
        for o in cell.outputs
        if o.output_type == "execute_result"
    ]
    assert len(pictures) == 3
    for picture in pictures:
        assert "<svg" in picture["text/html"]
        assert picture["text/plain"].startswith("<plan of ")
    assert "rollout" in pictures[0]["text/html"]


def test_it_compares_explains_and_predicts(cells: list[Any]) -> None:
    said = "\n".join(map(text_of, cells))
    fix = "fix: cluster.component_placement.env=0-3"
    for expected in (
        "lines differ, marked *",
        "[accelerator-out-of-range]",
        fix,
        "from published rates",
    ):
        assert expected in said, expected


def test_neither_ray_nor_torch_nor_numpy_was_needed(cells: list[Any]) -> None:
    assert text_of(cells[-1]) == "[]\n"


@pytest.mark.slow
def test_a_curve_grows_below_the_cell_that_trains(tmp_path: Path) -> None:
    few = {
        "runner.total_iterations": 3,
        "runner.output_dir": str(tmp_path),
        "env.total_num_envs": 4,
        "algorithm.epochs": 1,
    }
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(
            f"import rlplace\nrun = rlplace.train('cartpole', {few})"
        ),
        nbformat.v4.new_code_cell("run"),
        nbformat.v4.new_code_cell("rlplace.plan('hybrid_ppo')"),
    ]
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    trained, shown, planned = notebook.cells
    (curve,) = [o for o in trained.outputs if o.output_type == "display_data"]
    assert "<svg" in curve.data["text/html"]
    assert "env/return" in curve.data["text/html"]
    assert "finished, 3 iterations" in shown.outputs[0].data["text/html"]
    assert "<svg" in planned.outputs[0].data["text/html"]
