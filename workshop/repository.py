"""Find the repository, and the packages that it requires."""

import importlib.metadata
import os
import re
import sys
import tomllib
from pathlib import Path

from workshop.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
# In a copy that an Open OnDemand session made: the Python of the shared workshop, and its folder, one per line.
ORIGIN = ".workshop_origin"
DISTRIBUTION = "distributed-pytorch-workshop"
# Packages whose module has a different name, apart from a hyphen in place of an underscore.
MODULES = {
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "pyyaml": "yaml",
    "pytest-xdist": "xdist",
}


def require_stages() -> Path:
    """Return the repository's root.

    Raises:
        UserError: the package was installed without the stages (``pip install`` of a wheel, say).
    """
    if not (ROOT / "01_single_gpu").is_dir():
        raise UserError(
            "the stages are not beside the installed package; clone the repository and run ./workshop.sh there, "
            "or install it with: pip install -e ."
        )
    return ROOT


def open_folder(name: str | os.PathLike, without: str | None = None) -> Path:
    """Create a folder for results if it does not exist, and return it.

    Args:
        name: the path of the folder.
        without: a file that an earlier run may have left in it; it is deleted.

    Raises:
        UserError: the folder cannot be created or written into.
    """
    folder = Path(name).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if without:
            (folder / without).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror}); choose a folder with --output") from error
    return folder


def workshop_command() -> str:
    """Return the command that calls ``workshop.sh`` from the current folder: in the repository, a relative path."""
    here = Path.cwd()
    if here == ROOT or not here.is_relative_to(ROOT):
        return "./workshop.sh"
    return os.path.relpath(ROOT / "workshop.sh")


def python_path(root: Path = ROOT) -> str:
    """Return ``PYTHONPATH`` for programs that we start: ``root`` first, then what environment modules have added to it.

    In the environment that ``workshop.sh`` created, only folders of the repository count, because the packages of environment
    modules have different versions.
    """
    own = Path(sys.prefix) == ROOT / ".venv"
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    others = [
        place
        for place in inherited
        if place not in (str(root), str(ROOT)) and (not own or Path(place).is_relative_to(ROOT))
    ]
    return os.pathsep.join([str(root), *others])


def packages(extra: str = "") -> dict[str, str]:
    """Return the packages that the workshop requires on this system, as pyproject.toml lists them, with their modules.

    Args:
        extra: return only the packages of this optional group instead.
    """
    if (file := ROOT / "pyproject.toml").is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    else:  # installed as a wheel
        lines = [line for line in importlib.metadata.requires(DISTRIBUTION) or () if _extra(line) == extra]
    names = [re.match(r"[\w.-]+", line)[0].lower() for line in lines if _is_for_this_system(line)]
    return {
        name: MODULES.get(name, name.replace("-", "_")) for name in names if name != "py-spy"
    }  # a program without a module


def requirements(extra: str = "") -> list[str]:
    """Return the modules of ``packages(extra)``, by the names under which they are imported."""
    return list(packages(extra).values())


def _extra(line: str) -> str:
    """Return the optional group that a line of the metadata belongs to; "": none."""
    found = re.search(r"""extra == ['"]([\w-]+)['"]""", line)
    return found[1] if found else ""


def _is_for_this_system(line: str) -> bool:
    found = re.search(r"""sys_platform == ['"](\w+)['"]""", line)
    return not found or found[1] == sys.platform
