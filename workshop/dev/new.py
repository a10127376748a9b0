"""Run ``workshop dev new``: write the skeleton of a rule, an exercise, a stage or a site."""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from workshop.check.rules import FAMILIES
from workshop.check.rules.rule import RULES
from workshop.course.exercises import stage_files
from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import require_stages

IMPORT_OF_RUN = "from workshop.check.evidence.run import Run"
RULE = '''

@rule(
    why="TODO: why it matters, in one sentence.",
    fix="TODO: what to do, with the name of the API.",
    anywhere=True,
)
def {function}(run: Run) -> Said:
    """TODO: the mistake that this rule finds."""
    for process in run.trained[:1]:
        if not process.steps:
            yield Seen("TODO: what was seen, with numbers", process.data_where)
'''
ENTRY = """
[[exercise]]
file = "{file}"
launch = "{launch}"

[[exercise.goals]]
number = 1
title = "TODO: what the program does when this goal is met"
rules = []
hints = [
    "TODO: a question that leads to the right place in the code?",
    "TODO: the name of the API to look up.",
    "TODO: the solution, partly completed, as a code block.",
]

[[exercise.goals]]
number = 0
title = "it learns, and resumes from its checkpoint"
rules = ["no-learning", "no-checkpoint", "never-resumes", "resume-fails"]
"""
RUNNER = """#!/usr/bin/env bash
# TODO: what it starts, in one line.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/{up}/workshop/runner.sh"      # sets $PYTHON

exec "$PYTHON" {torchrun}"$here/{file}" "$@"
"""
TORCHRUN = '-P -m torch.distributed.run --standalone --nproc-per-node="${NPROC:-2}" '
BASES = {
    "single": "01_single_gpu/single_gpu.py",
    "spawn": "solutions/02_pytorch_ddp/exercise1_multigpu.py",
    "torchrun": "solutions/02_pytorch_ddp/exercise2_multigpu_torchrun.py",
}
NOTEBOOK_START = """\
try:
    from workshop.jupyter import check, hint, start
except ImportError:
    raise SystemExit(
        "This kernel does not have the workshop: choose the kernel 'Workshop' (menu Kernel, Change Kernel), "
        "or start Jupyter with ./workshop.sh lab"
    ) from None

start("{name}")"""
STAGE_README = """# {title}

**You will** TODO: objectives.

**You need** TODO: which stages come before.

| file | what it shows |
|---|---|
| `{file}` | TODO |

```bash
./workshop.sh check {name}
```
"""


def new_rule(name: str) -> list[Path]:
    """Add the skeleton of a rule to its family; return the files to edit.

    Args:
        name: "FAMILY/rule-name", such as "samples/late-order".

    Raises:
        UserError: the name has the wrong form, or is taken.
    """
    family, _, rule = name.partition("/")
    if not re.fullmatch(r"[a-z]+", family) or not re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", rule):
        raise UserError(f"{name}: a rule is named FAMILY/rule-name; the families are {', '.join(FAMILIES)}")
    if rule in RULES:
        raise UserError(f"rule {rule} already exists in rules/{RULES[rule].family}.py")
    if family not in FAMILIES:
        raise UserError(f"there is no family {family}; the families are {', '.join(FAMILIES)}")
    path = require_stages() / "workshop" / "check" / "rules" / f"{family}.py"
    text = path.read_text()
    if not re.search(r"^from workshop.check.evidence.run import .*\bRun\b", text, re.MULTILINE):  # rules/jobs.py
        text = text.replace("from workshop.check.rules", f"{IMPORT_OF_RUN}\nfrom workshop.check.rules", 1)
    write_atomically(path, text + RULE.format(function=rule.replace("-", "_")))
    test = require_stages() / "tests" / "check" / "rules" / f"test_{family}.py"
    return [path, test]


def new_exercise(name: str, launch: str = "single") -> list[Path]:
    """Write an exercise, its solution, both runners and its entry in exercises.toml; return the files to edit.

    The exercise is a copy of the course's basic script for its launcher, to which you add one idea.

    Args:
        name: "STAGE/exerciseK_topic".
        launch: "single", "spawn" or "torchrun".

    Raises:
        UserError: the name has the wrong form, the stage does not exist, or a file already exists.
    """
    stage, _, stem = name.removesuffix(".py").partition("/")
    if not re.fullmatch(r"exercise\d_[a-z0-9_]+", stem):
        raise UserError(f"{name}: an exercise is named STAGE/exerciseK_topic, such as 02_pytorch_ddp/exercise5_profile")
    root = require_stages()
    toml = root / stage / "exercises.toml"
    if not toml.is_file():
        raise UserError(f"there is no {stage}/exercises.toml; create the stage with: workshop dev new stage {stage}")
    return _write_exercise(toml, stem, launch)


def _write_exercise(toml: Path, stem: str, launch: str) -> list[Path]:
    root, stage = require_stages(), toml.parent.name
    number, _, topic = stem.partition("_")
    file, runner = f"{stem}.py", f"{number}_run_{topic}.sh"
    base = (root / BASES[launch]).read_text()
    head, line, rest = base.partition("def main():\n" if "def main():\n" in base else "def main() -> None:\n")
    check = f"./workshop.sh check {stage}/{file}"
    text = f'"""TODO: what it does, in two lines.\n\nThe check: {check}\n"""\n' + head.partition('"""\n')[2]
    marked = text + line + "    # TODO 1: what to achieve, not the code. Look up: the name of the API.\n" + rest
    torchrun = TORCHRUN if launch == "torchrun" else ""
    contents = {
        toml.parent / file: marked,
        root / "solutions" / stage / file: text + line + rest,
        toml.parent / runner: RUNNER.format(up="..", file=file, torchrun=torchrun),
        root / "solutions" / stage / runner: RUNNER.format(up="../..", file=file, torchrun=torchrun),
    }
    _refuse_existing(contents)
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
        if path.suffix == ".sh":
            path.chmod(0o755)
    write_atomically(toml, toml.read_text() + ENTRY.format(file=file, launch=launch))
    return [*contents, toml]


def new_stage(name: str) -> list[Path]:
    """Write a stage: folder, README, notebook, exercises.toml and one exercise with its solution; return the files to edit.

    Args:
        name: the folder, such as "07_inference".

    Raises:
        UserError: the name has the wrong form, or the folder exists.
    """
    if not re.fullmatch(r"\d\d_[a-z0-9_]+", name):
        raise UserError(f"{name}: a stage is named NN_topic, such as 07_inference")
    folder = require_stages() / name
    if folder.exists():
        raise UserError(f"folder {name} already exists")
    title = name[3:].replace("_", " ").capitalize()
    file = f"exercise1_{name[3:]}.py"
    order = max(file.order for file in stage_files().values()) + 1
    contents = {
        folder / "exercises.toml": f"order = {order}\n",
        folder / "README.md": STAGE_README.format(title=title, file=file, name=f"{name}/{file}"),
        folder / f"{name}.ipynb": _notebook(name, title),
    }
    folder.mkdir()
    for path, content in contents.items():
        write_atomically(path, content)
    return [*list(contents)[1:], *_write_exercise(folder / "exercises.toml", file.removesuffix(".py"), "single")]


def _notebook(name: str, title: str) -> str:
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    cells = [
        {"cell_type": "markdown", "id": "title", "metadata": {}, "source": [f"# {title}\n"]},
        {
            "cell_type": "code",
            "id": "start",
            "metadata": {},
            "execution_count": None,
            "outputs": [],
            "source": NOTEBOOK_START.format(name=name).splitlines(keepends=True),
        },
    ]
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1) + "\n"


def new_site(name: str) -> list[Path]:
    """Copy the template of a site's profile; return the file to fill in.

    Raises:
        UserError: the name has the wrong form, or the site exists.
    """
    if not re.fullmatch(r"[a-z0-9]+", name):
        raise UserError(f"{name}: use only lowercase letters and digits in the name of a site, such as marenostrum5")
    sites = require_stages() / "slurm-multinode" / "sites"
    path = sites / f"{name}.toml"
    _refuse_existing([path])
    shutil.copy(sites / "template.toml", path)
    return [path]


def _refuse_existing(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists():
            raise UserError(f"{path} already exists")


def run_dev_new(kind: str, name: str, launch: str) -> int:
    """Write a skeleton, print the files to edit, and return 0.

    Raises:
        UserError: see the functions above.
    """
    made = {
        "rule": lambda: new_rule(name),
        "exercise": lambda: new_exercise(name, launch),
        "stage": lambda: new_stage(name),
        "site": lambda: new_site(name),
    }[kind]()
    root = require_stages()
    print(f"Edit these files at each TODO, as CONTRIBUTING.md describes for a new {kind}:")
    for path in made:
        print(f"  {path.relative_to(root)}")
    print("Then run: ./workshop.sh dev check")
    return 0
