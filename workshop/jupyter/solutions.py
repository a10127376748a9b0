"""The solution twins of the notebooks: python -m workshop.jupyter.solutions [STAGE ...] runs them here, and writes them anew.

A twin under ``solutions/`` has the cells of the learner's notebook, but for the folder that it starts in, links to files that
only the stage has, and the rungs of stage 01, which it measures on the exercise with its TODOs done one after the other. It
carries the outputs of a real run.
"""

import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from rich.console import Console

from workshop.course.exercises import stage_files
from workshop.repository import ROOT

RUNG = re.compile(r"rung-([0-3])")
ONLY_IN_THE_STAGE = {"left", "progress"}  # cells about a learner's own progress


def paths(stage: str) -> tuple[Path, Path]:
    """A stage's notebook and its solution twin."""
    name = f"{stage}/{stage}.ipynb"
    return ROOT / name, ROOT / "solutions" / name


STAGES = tuple(stage for stage in stage_files() if paths(stage)[0].exists())


def twin(stage: str) -> nbformat.NotebookNode:
    """The twin of a stage's notebook, not run yet."""
    source, target = paths(stage)
    notebook = nbformat.read(source, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell["id"] not in ONLY_IN_THE_STAGE]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(
                r"\]\(([^):#]+)(?=[)#])", lambda link: f"]({_link(link[1], source, target)}", cell.source
            )
        elif rung := RUNG.fullmatch(cell["id"]):
            cell.source = _rung(int(rung[1]))
        cell.source = cell.source.replace(f'start("{stage}"', f'start("solutions/{stage}"')
    title = notebook.cells[0]
    title.source += (
        "\n**Solved.** These are the outputs of one run; the first cell says on what. Yours are in your own notebook.\n"
    )
    return notebook


def _link(link: str, source: Path, target: Path) -> str:
    """A relative link of the notebook, as it has to be in the twin: to the file beside it, or to the stage's."""
    return link if (target.parent / link).exists() else os.path.relpath(source.parent / link, target.parent)


def _rung(number: int) -> str:
    if number == 0:
        return """\
%%bash
# As delivered.
rm -f runs/rung0.*
"$ROOT"/01_single_gpu/exercise1_run_fast_single_gpu.sh --epochs 3 --checkpoint runs/rung0.pt"""
    done = ",".join(map(str, range(1, number + 1)))
    return f"""\
%%bash
rm -f runs/rung{number}.*
"$PYTHON" -m workshop.course.todo exercise1_fast_single_gpu {done} runs/rung{number}.py  # as you had it then
"$PYTHON" runs/rung{number}.py --epochs 3 --checkpoint runs/rung{number}.pt"""


def execute(notebook: nbformat.NotebookNode, folder: Path, timeout: float = 400) -> None:
    """Run all cells in a kernel of this environment, as if the notebook lay in ``folder``.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
        nbclient.exceptions.CellTimeoutError: a cell took longer than ``timeout`` seconds.
    """
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()


def main() -> None:
    console = Console()
    if unknown := set(sys.argv[1:]) - set(STAGES):
        print(f"{min(unknown)}: no stage with a notebook; there are {', '.join(STAGES)}", file=sys.stderr)
        sys.exit(2)
    for stage in sys.argv[1:] or STAGES:
        notebook = twin(stage)
        _, target = paths(stage)
        with console.status(f"running {target.relative_to(ROOT)}"):
            execute(notebook, target.parent)
        text = nbformat.writes(notebook)
        for private in {str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix}:
            if private in text:
                sys.exit(f"an output of {target.relative_to(ROOT)} names {private}")
        target.write_text(text + "\n")
        console.print(f"{target.relative_to(ROOT)}: {len(text) / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
