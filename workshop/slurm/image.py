"""``workshop submit --container FILE.sif``: run the Python of a job in an image of Apptainer or Singularity."""

import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from workshop.errors import UserError
from workshop.repository import ROOT
from workshop.slurm.sites import Environment, Site

# A .sif file begins with 32 bytes for the shell, then "SIF_MAGIC" and 0, a version of 3 bytes, and the architecture.
MAGIC, ARCHITECTURE = slice(32, 41), slice(45, 47)
ARCHITECTURES = {b"02": "x86_64", b"04": "aarch64"}


def find_image(name: str, site: Site, folders: Sequence[Path]) -> Path:
    """Return the path of the image for a job at a site.

    Args:
        name: a .sif file, or a sandbox, which is a folder.
        site: the profile of the site.
        folders: the folders that the job needs in the container.

    Raises:
        UserError: it is not an image, it cannot run at the site, or the site has its own container.
    """
    # If the profile needs WORKSHOP_IMAGE, the site has no image of its own.
    if site.environment.kind == "container" and "WORKSHOP_IMAGE" not in site.environment.needs:
        raise UserError(f"{site.name} has its own container, which is built for its network: leave out --container")
    path = Path(name).resolve()
    for place in (path, *folders):
        if not re.fullmatch(r"[\w@%+=./~-]+", str(place)):  # the shell splits $PYTHON, Apptainer splits --bind
            raise UserError(f"{place}: a path in a container must not have spaces, commas or special characters")
    if path.is_dir():
        if not (path / ".singularity.d").is_dir():
            raise UserError(f"{path} is a folder, but not an Apptainer sandbox; name a .sif file")
        return path
    try:
        with open(path, "rb") as file:
            head = file.read(48)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if head[MAGIC] != b"SIF_MAGIC":
        raise UserError(f"{path} is not an Apptainer image; containers/README.md says how to build one")
    built_for = ARCHITECTURES.get(head[ARCHITECTURE], "other machines")
    ours = site.environment.kind == "venv"  # the practice cluster has the architecture of this machine
    if built_for != site.arch and not ours:
        raise UserError(f"{path.name} is for {built_for}, but the nodes of {site.name} are {site.arch}: build it there")
    return path


def settings_name(name: str, image: Path) -> str:
    """Return the name of the settings file, a different one for each image, so that a pending job keeps its settings."""
    return f"{name}-{image.stem}-{zlib.crc32(str(image).encode()):08x}.sh"


def with_image(site: Site, name: str, image: Path) -> Site:
    """Return the profile of a site for jobs whose ``$PYTHON`` runs in an image.

    Only Python runs in the container. The job script and srun stay outside, because they need Slurm's commands.
    """
    where = site.environment
    flag = "" if name == "local" else {"cuda": "--nv ", "rocm": "--rocm "}[site.vendor]  # it has no real GPUs
    folders = " ".join(f'"{folder}"' for folder in ("$PWD", "${WORKSHOP_DATA:-}", _without_placeholders(site.scratch)))
    prologue = [
        *(where.prologue if where.kind == "container" else where.container_prologue),
        'complain() { echo "$(hostname): $*" >&2; exit 2; }',
        "apptainer=$(command -v apptainer || command -v singularity) ||",
        f'    complain "there is neither apptainer nor singularity; see container_prologue in slurm-multinode/sites/{name}.toml"',
        f'[ -e {image} ] || complain "{image} is not visible on this node; put it on a file system that all nodes share"',
        "# The folders that are visible in the container, besides the home folder and /tmp, if they exist on this node.",
        f"binds={','.join([str(ROOT), *dict.fromkeys(site.caches.values())])}",
        f"for folder in {folders}; do",
        '    [ ! -d "$folder" ] || binds+=,$folder',
        "done",
        "# The container gets all variables except PATH and LD_LIBRARY_PATH. Hide packages of modules and ~/.local.",
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
    """Return "/scratch" for "/scratch/PROJECT" and for "/scratch/$USER"."""
    return re.match(r"(/[a-z0-9_-]+(?=/|$))*", folder)[0]
