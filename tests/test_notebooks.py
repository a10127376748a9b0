"""The notebooks run from top to bottom, in a kernel of this environment, and leave no trace in the repository."""

import shutil

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import runs

NOTEBOOKS = sorted(path.relative_to(runs.ROOT) for path in runs.ROOT.glob("0*/*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_delivered_without_outputs(notebook):
    for number, cell in enumerate(nbformat.read(runs.ROOT / notebook, as_version=4).cells, start=1):
        if cell.cell_type == "code":
            assert not cell.outputs, f"{notebook}, cell {number} holds outputs"
            assert cell.execution_count is None, f"{notebook}, cell {number} holds an execution count"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The stages in a folder of their own, so that what the cells write stays there."""
    for name in ("01_single_gpu", "02_pytorch_ddp", "solutions", "workshop"):
        shutil.copytree(runs.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    for name, value in runs.environment(
        PYTHONPATH=tmp_path, JUPYTER_PLATFORM_DIRS=1, IPYTHONDIR=tmp_path / "ipython"
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS")
    return tmp_path


def execute(path):
    """Run a notebook and return it. A failure names the cell."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        failed = next(
            number
            for number, cell in enumerate(notebook.cells, start=1)
            if cell.cell_type == "code" and any(output.output_type == "error" for output in cell.outputs)
        )
        pytest.fail(f"{path.name}, cell {failed} failed:\n{error}")
    return notebook


def outputs(notebook) -> str:
    """All text that the cells printed, tracebacks included."""
    return "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )


def pictures(notebook) -> int:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


def test_notebook_01(copy):
    notebook = execute(copy / "01_single_gpu" / "01_single_gpu.ipynb")
    text = outputs(notebook)
    for epoch in ("1/4", "4/4", "5/6", "6/6"):
        assert text.count(f"epoch {epoch} ") == 1
    assert "already holds 6 epochs of the 4 asked for" in text
    assert pictures(notebook) == 1
    assert runs.read_log(copy / "01_single_gpu" / "runs" / "single_gpu.pt")[-1]["accuracy"] > 0.9


def test_notebook_02(copy):
    notebook = execute(copy / "02_pytorch_ddp" / "02_pytorch_ddp.ipynb")
    text = outputs(notebook)
    assert "+    ddp_model = DDP(model)" in text
    assert "+from torch.distributed.elastic.multiprocessing.errors import record" in text
    assert pictures(notebook) == 1
    assert "killed the newest worker" in text
    assert "largest difference between any two weights: 0.0\n" in text
    difference = float(text.split("largest difference between the curves: ")[1].split()[0])
    assert difference < 1e-3


def test_a_cell_that_fails_is_named(copy):
    path = copy / "01_single_gpu" / "01_single_gpu.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(2, nbformat.v4.new_code_cell("1 / 0"))
    nbformat.write(notebook, path)
    with pytest.raises(pytest.fail.Exception, match=r"01_single_gpu.ipynb, cell 3 failed"):
        execute(path)
