"""All cases of the bank."""

import importlib
from functools import cache
from pathlib import Path

from check.bank.case import Case


@cache
def families() -> dict[str, tuple[tuple[Case, ...], tuple[Case, ...]]]:
    """Return the mistakes and the styles of each family, by its name."""
    files = sorted((Path(__file__).parents[1] / "rules").glob("test_*.py"))
    modules = [importlib.import_module(f"check.rules.{file.stem}") for file in files]
    return {
        file.stem.removeprefix("test_"): (module.MISTAKES, module.STYLES)
        for file, module in zip(files, modules, strict=True)
    }


def all_mistakes() -> list[Case]:
    """Return all versions with a mistake."""
    return [case for mistakes, _ in families().values() for case in mistakes]


def all_styles() -> list[Case]:
    """Return all correct versions."""
    return [case for _, styles in families().values() for case in styles]


def case_of(name: str) -> Case:
    """Return the case with this name."""
    return next(case for case in (*all_mistakes(), *all_styles()) if case.name == name)
