"""Where the repository lies."""

from pathlib import Path

from workshop.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


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
