"""What a test needs that not every machine has. A test is skipped with the reason "needs ruby, chromium", and the last lines of a
run list what was not tried and the ``apt-get`` line that changes it (conftest.py).

    @needs("ruby")                # on a test
    require("chromium")           # in a fixture or in a test
"""

import os
import re
import shutil
import sys
import sysconfig
from collections import Counter

import pytest

from workshop.slurm.cluster import PROGRAMS, SEARCH_PATH

# Each program and the Debian package that brings it. "" stands for a package of the environment, so nothing is to be installed.
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
    "pkill": "procps",
    "cc": "gcc",
    "scontrol": "slurm-client",
    "debootstrap": "debootstrap",
} | {program: debian for program, (debian, _) in PROGRAMS.items()}
SLURM = tuple(PROGRAMS)  # of a practice cluster
DEEPSPEED = ("g++", "ninja", "Python.h")  # it compiles a part of itself at the first start on CPUs
# One row of the table for what is only installed together.
ROWS = dict.fromkeys(("slurmctld", "slurmd", "sbatch", "scontrol", "munged"), "Slurm")
GPU = "a GPU"
DAEMONS = ("slurmctld", "slurmd", "munged")  # in /usr/sbin, which an ordinary user does not have on the PATH
# Programs of the environment lie beside its Python. They are found there also where the environment is not activated.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])


def missing(*programs: str) -> list[str]:
    """Those of the programs that are not here."""
    assert set(programs) <= PACKAGES.keys(), "name the package of each"
    places = {program: SEARCH_PATH if program in DAEMONS else PATH for program in programs}
    found = {program for program, path in places.items() if shutil.which(program, path=path)}
    # A system's Python may come without its headers.
    if os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        found.add("Python.h")
    return [program for program in programs if program not in found]


def reason(*programs: str) -> str:
    """Why a test that needs these programs is skipped; "": nothing is missing."""
    return f"needs {', '.join(found)}" if (found := missing(*programs)) else ""


def needs(*programs: str) -> pytest.MarkDecorator:
    """The mark of a test that needs these programs."""
    return pytest.mark.skipif(bool(why := reason(*programs)), reason=why)


def require(*programs: str) -> None:
    """Skip the test if one of these programs is missing."""
    if why := reason(*programs):
        pytest.skip(why)


def table(reasons: list[str]) -> list[str]:
    """The lines that say what was not tried, from the reasons of all skipped tests."""
    counts, packages = Counter(), set()
    for why in reasons:
        found = re.match("needs (.*)", why)
        names = found[1].split(", ") if found else []
        if names and all(name in PACKAGES or name == GPU for name in names):
            counts.update({ROWS.get(name, name) for name in names})
            packages.update(PACKAGES.get(name, "") for name in names)
        else:
            counts[why] += 1  # a reason of its own
    width = max(map(len, counts), default=0)
    lines = [f"{name:{width}}  {count:4d} test{'s' * (count > 1)}" for name, count in counts.most_common()]
    if packages := packages - {""}:
        sudo = "" if os.geteuid() == 0 else "sudo "
        names = " ".join(sorted(packages))
        lines += ["", f"To try them as well: {sudo}apt-get install -y --no-install-recommends {names}"]
    return lines
