"""Checks for ``workshop doctor --class PEOPLE``: can a course begin on this machine?"""

import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from datetime import datetime
from functools import partial
from pathlib import Path

from workshop.board.protection import gaps, readers
from workshop.course.exercises import exercises
from workshop.course.sharing import class_folder
from workshop.doctor.result import GIB, OK, PROBLEM, WARNING, Result
from workshop.repository import ROOT

SETTINGS = ROOT / "ondemand" / "settings.yml"
EACH = 0.25 * GIB  # upper limit for a learner's copy and runs of stages 01 and 02 (measured: 0.1)


def class_checks(people: int) -> list:
    """Return the checks for a course with this number of people."""
    return [
        check_kernel,
        check_notebooks,
        check_exercises,
        check_readable,
        check_mnist,
        partial(check_room, people),
        check_app,
        check_reservation,
        check_board,
    ]


def check_kernel() -> Result:
    """Start a kernel as a notebook does, and run one cell."""
    missing = [name for name in ("jupyterlab", "ipykernel", "nbclient") if importlib.util.find_spec(name) is None]
    if missing:
        advice = f"{sys.executable} -m pip install -e '{ROOT}[notebooks]'"
        return Result("kernel", PROBLEM, f"{', '.join(missing)} missing", advice)
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import torch, workshop.jupyter")])
    start = time.monotonic()
    try:
        NotebookClient(
            notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
        ).execute()
    except Exception as error:  # a kernel that does not start may raise anything
        seen = f"does not start, or cannot import torch and the workshop: {str(error).strip().splitlines()[-1]}"
        return Result("kernel", PROBLEM, seen, "see the end of: jupyter kernel --debug")
    return Result("kernel", OK, f"starts and imports torch in {time.monotonic() - start:.0f} s")


def check_notebooks() -> Result:
    """Check that no notebook contains outputs of an earlier run."""
    import nbformat

    held = []
    for path in sorted(ROOT.glob("*/*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        if any(cell.cell_type == "code" and (cell.outputs or cell.execution_count) for cell in cells):
            held.append(path.name)
    if held:
        return Result("notebooks", WARNING, f"have outputs: {', '.join(held)}", f"git -C {ROOT} checkout -- '*.ipynb'")
    return Result("notebooks", OK, "without outputs")


def check_exercises() -> Result:
    """Check that the exercises are as delivered, and not already solved."""
    files = [str(path.relative_to(ROOT)) for exercise in exercises() for path, _ in exercise.pairs]
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--", *files]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return Result("exercises", WARNING, f"git cannot be started ({error.strerror})", "compare with a fresh clone")
    if done.returncode != 0:
        return Result(
            "exercises", WARNING, "git cannot tell whether they are as delivered", "compare with a fresh clone"
        )
    changed = [line.split()[-1] for line in done.stdout.splitlines()]
    if changed:
        return Result("exercises", PROBLEM, f"changed: {', '.join(changed)}", f"./workshop.sh reset {changed[0]}")
    return Result("exercises", OK, "as delivered")


def check_readable() -> Result:
    """Check that other users can read this folder and the Python of its environment."""
    python = Path(sys.executable)
    places = [ROOT, *ROOT.parents, *python.parents, *Path(os.path.realpath(python)).parents]
    closed = [place for place in dict.fromkeys(places) if place.exists() and not place.stat().st_mode & stat.S_IXOTH]
    files = [path for path in (*ROOT.glob("*"), *ROOT.glob("*/*.*"), python) if path.is_file()]
    closed += [path for path in files if not path.stat().st_mode & stat.S_IROTH]
    if closed:
        advice = f"chmod -R o+rX {closed[0]}, or make it readable for the group of the course and ignore this message"
        # This is only a problem if the learners share this copy.
        status = WARNING if read_settings()["cluster"] == "my_cluster" else PROBLEM
        return Result("sharing", status, f"other users cannot read {closed[0]}", advice)
    return Result("sharing", OK, f"other users can read {ROOT} and {python}")


def check_mnist() -> Result:
    """Report whether the optional data set MNIST is there."""
    from workshop.data import data_folder
    from workshop.data.mnist import missing_files

    if missing_files(data_folder()):
        seen = "digits; mnist is not fetched"
        return Result("class data", OK, seen, "only if you want to use --dataset mnist: ./workshop.sh fetch mnist")
    return Result("class data", OK, f"digits; mnist in {data_folder()}")


def check_room(people: int) -> Result:
    """Check that the disk for the learners' copies, according to the settings of the app, has enough space."""
    folder = Path(os.path.expandvars(read_settings()["folder"])).expanduser()
    place = next(place for place in (folder, *folder.parents) if place.exists())
    free, needed = shutil.disk_usage(place).free, people * EACH
    seen = f"{free / GIB:.0f} GiB free on the disk of {place}, {needed / GIB:.0f} GiB needed for {people} people"
    if free < needed:
        return Result("room", PROBLEM, seen, f"set folder: in {SETTINGS.relative_to(ROOT)} to a larger file system")
    return Result("room", OK, seen, "check the quota of a learner too: each needs 250 MB" if people > 1 else "")


def read_settings() -> dict:
    """Read the settings of the Open OnDemand app."""
    import yaml

    return yaml.safe_load(SETTINGS.read_text())


def check_app() -> Result:
    """Check that the settings of the Open OnDemand app fit this machine."""
    settings = read_settings()
    if settings["cluster"] == "my_cluster":
        return Result("app", OK, f"{SETTINGS.relative_to(ROOT)} is not filled in", "only needed for Open OnDemand")
    folder = Path(settings["workshop"])
    python = settings["python"] or str(folder / ".venv/bin/python")
    if not (folder / "workshop.sh").is_file():
        return Result("app", PROBLEM, f"workshop: {folder} does not exist", f"correct {SETTINGS.relative_to(ROOT)}")
    script = (
        f'{settings["modules"]}\nexec {shlex.quote(python)} -c "import torch, jupyterlab, ipykernel, line_profiler"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["it ends with an error"])[-1]
        advice = (
            f"run ./workshop.sh doctor in {folder} once, or install the packages: pip install -e '{folder}[notebooks]'"
        )
        return Result("app", PROBLEM, f"{python}: {why}", advice)
    clusters = Path("/etc/ood/config/clusters.d")
    if clusters.is_dir() and not (clusters / f"{settings['cluster']}.yml").exists():
        names = ", ".join(sorted(path.stem for path in clusters.glob("*.yml")))
        return Result("app", PROBLEM, f"cluster: {settings['cluster']} is not in {names}", f"correct {SETTINGS.name}")
    if not (ROOT / "ondemand/template/script.sh.erb").stat().st_mode & stat.S_IXUSR:
        return Result(
            "app", PROBLEM, "template/script.sh.erb is not executable", "chmod +x ondemand/template/script.sh.erb"
        )
    return Result("app", OK, f"cluster {settings['cluster']}, workshop in {folder}")


def check_reservation() -> Result:
    """Check that the reservation in the settings of the app exists."""
    settings = read_settings()
    name = settings["reservation"]
    if not name:
        return Result("reservation", OK, "none is set")
    command = ["pbs_rstat", "-F", name] if settings["scheduler"] == "pbs" else ["scontrol", "show", "reservation", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return Result(
            "reservation", WARNING, f"{command[0]} does not answer here", f"run on a login node: {' '.join(command)}"
        )
    if done.returncode != 0:
        advice = f"correct or empty reservation: in {SETTINGS.relative_to(ROOT)}, because otherwise no session starts"
        return Result("reservation", PROBLEM, f"{name} does not exist", advice)
    words = " ".join(done.stdout.split())
    begins = re.search(r"StartTime=(\S+)", words)
    if begins and datetime.fromisoformat(begins[1]) > datetime.now():
        seen = f"{name} begins at {begins[1]}; sessions wait until then"
        return Result("reservation", WARNING, seen, "to try a session earlier, empty the field in the form")
    return Result("reservation", OK, words[:160])


def check_board() -> Result:
    """Check that learners can write into the folder of the class, and cannot read or change the files of others."""
    folder = class_folder()
    if folder is None:
        return Result(
            "board", OK, "no folder of a class is set", "INSTRUCTORS.md, 'See who is stuck', says how to use it"
        )
    if not folder.is_dir():
        return Result("board", PROBLEM, f"{folder} does not exist", f"mkdir -m 3773 {folder}")
    for gap in gaps(folder):
        return Result("board", PROBLEM if gap.prevents else WARNING, gap.seen, gap.advice)
    if not os.access(folder, os.R_OK):
        return Result("board", WARNING, f"you cannot read {folder}", "run ./workshop.sh board with an account that can")
    return Result("board", OK, f"learners can write into {folder}; {readers(folder)} can read it")
