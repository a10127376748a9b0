"""Programs that some tests need and that not every machine has. A test without them is skipped ("needs ruby, chromium"), and a
run ends with a list of what was skipped and the ``apt-get`` line that installs it (conftest.py).

    @needs("ruby")                # on a test
    require("chromium")           # in a fixture or in a test
"""

import os
import re
import shutil
import sys
import sysconfig
import tomllib
from collections import Counter

import pytest

from workshop.repository import ROOT, packages
from workshop.slurm.cluster import PROGRAMS, SEARCH_PATH

# Each program and the Debian package that contains it; "" if the program is already in the Python environment.
PACKAGES = {
    "shellcheck": "",
    "uv": "",
    "ninja": "",
    "chromium": "chromium",
    "ruby": "ruby",
    "g++": "g++",
    "Python.h": "python3-dev",
    "make": "make",
    "git": "git",
    "mpiexec.openmpi": "openmpi-bin",
    "mpiexec.mpich": "mpich",
    "setpriv": "util-linux",
    "mount": "mount",
    "pkill": "procps",
    "cc": "gcc",
    "scontrol": "slurm-client",
    "debootstrap": "debootstrap",
} | {program: debian for program, (debian, _) in PROGRAMS.items()}
SLURM = tuple(PROGRAMS)  # for a practice cluster
DEEPSPEED = ("g++", "ninja", "Python.h")  # DeepSpeed compiles an extension at its first start on CPUs
# The table has one row for programs that are always installed together.
ROWS = dict.fromkeys(("slurmctld", "slurmd", "sbatch", "scontrol", "munged"), "Slurm")
GPU = "a GPU"
DAEMONS = ("slurmctld", "slurmd", "munged")  # in /usr/sbin, which an ordinary user does not have on the PATH
# The programs of the environment are beside its Python. Search there too, because the environment may not be activated.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])


def modules() -> set[str]:
    """Return the names of the modules of all packages in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {module for extra in ("", *project["optional-dependencies"]) for module in packages(extra).values()}


def missing(*programs: str) -> list[str]:
    """Return the programs that are not installed."""
    assert set(programs) <= PACKAGES.keys(), "add each program and its package to PACKAGES"
    places = {program: SEARCH_PATH if program in DAEMONS else PATH for program in programs}
    found = {program for program, path in places.items() if shutil.which(program, path=path)}
    # The Python of a Linux distribution may lack its headers.
    if os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        found.add("Python.h")
    return [program for program in programs if program not in found]


def reason(*programs: str) -> str:
    """Return why a test that needs these programs is skipped, or "" if nothing is missing."""
    return f"needs {', '.join(found)}" if (found := missing(*programs)) else ""


def needs(*programs: str) -> pytest.MarkDecorator:
    """Return a mark that skips the test if one of these programs is missing."""
    return pytest.mark.skipif(bool(why := reason(*programs)), reason=why)


def require(*programs: str) -> None:
    """Skip the test if one of these programs is missing."""
    if why := reason(*programs):
        pytest.skip(why)


def table(reasons: list[str]) -> list[str]:
    """Return the lines that say what was skipped and how to install it, from the reasons of all skipped tests."""
    counts, packages = Counter(), set()
    for why in reasons:
        found = re.match("needs (.*)", why)
        names = found[1].split(", ") if found else []
        if names and all(name in PACKAGES or name == GPU for name in names):
            counts.update({ROWS.get(name, name) for name in names})
            packages.update(PACKAGES.get(name, "") for name in names)
        else:
            counts[why] += 1  # a reason other than missing programs
    width = max(map(len, counts), default=0)
    lines = [f"{name:{width}}  {count:4d} test{'s' * (count > 1)}" for name, count in counts.most_common()]
    if packages := packages - {""}:
        sudo = "" if os.geteuid() == 0 else "sudo "
        names = " ".join(sorted(packages))
        lines += ["", f"To try them as well: {sudo}apt-get install -y --no-install-recommends {names}"]
    return lines
