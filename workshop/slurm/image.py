"""``workshop submit --container FILE.sif``: a job whose Python runs in an image of Apptainer, or Singularity."""

import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from workshop.errors import UserError
from workshop.repository import ROOT
from workshop.slurm.sites import Environment, Site

# A .sif file begins with 32 bytes for the shell, then "SIF_MAGIC" and 0, a version of 3 bytes, and for which machines it is.
MAGIC, ARCHITECTURE = slice(32, 41), slice(45, 47)
ARCHITECTURES = {b"02": "x86_64", b"04": "aarch64"}


def find_image(name: str, site: Site, folders: Sequence[Path]) -> Path:
    """The image for a job at a site.

    Args:
        name: a .sif file, or a sandbox, which is a folder.
        site: its profile.
        folders: what the job needs to see in the container.

    Raises:
        UserError: it is none, it cannot run there, or the site has one of its own.
    """
    # Where a profile needs WORKSHOP_IMAGE, whoever submits brings the image.
    if site.environment.kind == "container" and "WORKSHOP_IMAGE" not in site.environment.needs:
        raise UserError(f"{site.name} has a container of its own, which fits its network: leave out --container")
    path = Path(name).resolve()
    for place in (path, *folders):
        if not re.fullmatch(r"[\w@%+=./~-]+", str(place)):  # $PYTHON is split at spaces, --bind at commas and colons
            raise UserError(f"{place}: no spaces, commas or signs of the shell, please, in what a container has to see")
    if path.is_dir():
        if not (path / ".singularity.d").is_dir():
            raise UserError(f"{path} is a folder, and no sandbox of Apptainer; name a .sif file")
        return path
    try:
        with open(path, "rb") as file:
            head = file.read(48)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if head[MAGIC] != b"SIF_MAGIC":
        raise UserError(f"{path} is no image of Apptainer; containers/README.md says how to make one")
    built_for = ARCHITECTURES.get(head[ARCHITECTURE], "other machines")
    ours = site.environment.kind == "venv"  # the practice cluster is this machine, whatever it is
    if built_for != site.arch and not ours:
        raise UserError(f"{path.name} is for {built_for}, and the nodes of {site.name} are {site.arch}: build it there")
    return path


def settings_name(name: str, image: Path) -> str:
    """What the settings of jobs in an image are called: a job that waits must not find those for another image."""
    return f"{name}-{image.stem}-{zlib.crc32(str(image).encode()):08x}.sh"


def with_image(site: Site, name: str, image: Path) -> Site:
    """A site's profile for jobs whose ``$PYTHON`` is the one in an image.

    Only Python runs in it. What starts the processes, and finds out where they meet, stays outside, where Slurm's commands are.
    """
    where = site.environment
    flag = "" if name == "local" else {"cuda": "--nv ", "rocm": "--rocm "}[site.vendor]  # its GPUs are for counting
    folders = " ".join(f'"{folder}"' for folder in ("$PWD", "${WORKSHOP_DATA:-}", _without_placeholders(site.scratch)))
    prologue = [
        *(where.prologue if where.kind == "container" else where.container_prologue),
        'complain() { echo "$(hostname): $*" >&2; exit 2; }',
        "apptainer=$(command -v apptainer || command -v singularity) ||",
        f'    complain "neither apptainer nor singularity is here; see container_prologue in slurm-multinode/sites/{name}.toml"',
        f'[ -e {image} ] || complain "{image} cannot be seen from here; put it where all nodes see it"',
        "# What is visible in it, beside the home folder and /tmp. Scratch is not at every site what the profile says.",
        f"binds={','.join([str(ROOT), *dict.fromkeys(site.caches.values())])}",
        f"for folder in {folders}; do",
        '    [ ! -d "$folder" ] || binds+=,$folder',
        "done",
        "# Variables reach it as they are, but for PATH and LD_LIBRARY_PATH. The packages of modules and of ~/.local stay out.",
        "unset PYTHONPATH",
        "export PYTHONNOUSERSITE=1",
    ]
    inside = Environment(
        kind="container",
        prologue=prologue,
        python=f"$apptainer exec {flag}--bind $binds {image} python",
        needs={variable: meaning for variable, meaning in where.needs.items() if variable != "WORKSHOP_IMAGE"},
    )
    return site.model_copy(update={"environment": inside})


def _without_placeholders(folder: str) -> str:
    """ "/scratch" of "/scratch/PROJECT" and of "/scratch/$USER"."""
    return re.match(r"(/[a-z0-9_-]+(?=/|$))*", folder)[0]
