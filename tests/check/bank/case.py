"""A case of the bank: a version of a program, and what the check must say about it."""

from dataclasses import dataclass

from workshop.repository import ROOT

Edit = tuple[str, str]


@dataclass(frozen=True)
class Case:
    """A version of a program.

    Attributes:
        name: what is different, in kebab-case.
        base: the path of the program, relative to the root of the repository.
        kinds: the kinds of which the first finding must be one; empty if the check must find no error.
        note: what happens.
        edits: pairs (old, new) of text, applied in order; each old text occurs exactly once in the program.
        real: whether only a slow scenario shows it (a real launcher or a real training).
        held_out: whether it was written without knowledge of the rules, to measure how well they generalize.
        runner: edits of the runner, which is then copied beside the program.
    """

    name: str
    base: str
    kinds: tuple[str, ...]
    note: str
    edits: tuple[Edit, ...]
    real: bool = False
    held_out: bool = False
    runner: tuple[Edit, ...] = ()

    def edited(self, text: str, edits: tuple[Edit, ...]) -> str:
        """Return a text after edits."""
        for old, new in edits:
            assert text.count(old) == 1, f"{self.name}: {old!r} occurs {text.count(old)} times in the text"
            text = text.replace(old, new)
        return text

    def source(self) -> str:
        """Return the text of this version."""
        return self.edited((ROOT / self.base).read_text(), self.edits)


def mistake(
    name: str,
    base: str,
    kinds: str | tuple[str, ...],
    note: str,
    *edits: Edit,
    real: bool = False,
    held_out: bool = False,
    runner: tuple[Edit, ...] = (),
) -> Case:
    """Return a version with a mistake."""
    return Case(name, base, (kinds,) if isinstance(kinds, str) else kinds, note, edits, real, held_out, runner)


def style(name: str, base: str, note: str, *edits: Edit, real: bool = False, runner: tuple[Edit, ...] = ()) -> Case:
    """Return a correct version in a different style."""
    return Case(name, base, (), note, edits, real, runner=runner)


def part(base: str, start: str, end: str) -> str:
    """Return the part of a program from ``start``, which occurs once, up to the next ``end``."""
    text = (ROOT / base).read_text()
    assert text.count(start) == 1, (base, start)
    return start + text.split(start)[1].split(end)[0]
