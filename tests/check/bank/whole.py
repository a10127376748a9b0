"""All cases of the bank."""

import importlib
from functools import cache
from pathlib import Path

from check.bank.case import Case


@cache
def families() -> dict[str, tuple[tuple[Case, ...], tuple[Case, ...]]]:
    """The mistakes and the styles in each file of tests, by the names of the families."""
    files = sorted((Path(__file__).parents[1] / "rules").glob("test_*.py"))
    modules = [importlib.import_module(f"check.rules.{file.stem}") for file in files]
    return {
        file.stem.removeprefix("test_"): (module.MISTAKES, module.STYLES)
        for file, module in zip(files, modules, strict=True)
    }


def all_mistakes() -> list[Case]:
    """All versions with a mistake."""
    return [case for mistakes, _ in families().values() for case in mistakes]


def all_styles() -> list[Case]:
    """All correct versions."""
    return [case for _, styles in families().values() for case in styles]


def case_of(name: str) -> Case:
    """The case with a name."""
    return next(case for case in (*all_mistakes(), *all_styles()) if case.name == name)
