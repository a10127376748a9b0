"""Run the solved notebooks here, and write them with their outputs: python -m workshop.jupyter.solutions [STAGE ...]

A solved notebook under ``solutions/`` has the cells of the learner's notebook. Only three things differ: the folder that it
starts in, links to files that exist only in the stage, and the rungs of stage 01, which run the exercise with its TODOs done
one after the other.
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


# Further notebooks: the name under which the commands know each of them, and its path without the suffix.
MORE = {"strategies": "strategies/scale", "surviving": "slurm-multinode/surviving"}


def paths(stage: str) -> tuple[Path, Path]:
    """Return the paths of the notebook of a stage, or of a name in MORE, and of its solved twin."""
    name = f"{MORE.get(stage, f'{stage}/{stage}')}.ipynb"
    return ROOT / name, ROOT / "solutions" / name


STAGES = tuple(stage for stage in (*stage_files(), *MORE) if paths(stage)[0].exists())


def twin(stage: str) -> nbformat.NotebookNode:
    """Return the twin of a stage's notebook, without outputs of a run."""
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
        cell.source = cell.source.replace(f'start("{source.parent.name}"', f'start("solutions/{source.parent.name}"')
    title = notebook.cells[0]
    title.source += (
        "\n**Solved.** These outputs are from one run on the machine in the first cell. Yours are in your notebook.\n"
    )
    return notebook


def _link(link: str, source: Path, target: Path) -> str:
    """Convert a relative link for the twin: to a file beside the twin if it exists, or else to the file of the stage."""
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
"$PYTHON" -m workshop.course.todo exercise1_fast_single_gpu {done} runs/rung{number}.py  # with these TODOs done
"$PYTHON" runs/rung{number}.py --epochs 3 --checkpoint runs/rung{number}.pt"""


def execute(notebook: nbformat.NotebookNode, folder: Path, timeout: float = 400) -> None:
    """Run all cells in a kernel of this environment, with ``folder`` as the current folder.

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
        print(f"{min(unknown)} is not a stage with a notebook; choose from: {', '.join(STAGES)}", file=sys.stderr)
        sys.exit(2)
    for stage in sys.argv[1:] or STAGES:
        notebook = twin(stage)
        _, target = paths(stage)
        target.parent.mkdir(exist_ok=True)
        with console.status(f"running {target.relative_to(ROOT)}"):
            execute(notebook, target.parent)
        text = nbformat.writes(notebook)
        for private in {str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix}:
            if private in text:
                sys.exit(f"an output of {target.relative_to(ROOT)} contains the private path {private}")
        target.write_text(text + "\n")
        console.print(f"{target.relative_to(ROOT)}: {len(text) / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
