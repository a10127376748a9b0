"""A case of the bank: a version of a program, and what the check must say of it."""

from dataclasses import dataclass

from workshop.repository import ROOT

Edit = tuple[str, str]


@dataclass(frozen=True)
class Case:
    """A version of a program.

    Attributes:
        name: says what is different, in kebab-case.
        base: the path of the program under the repository's root.
        kinds: the check's first finding must be of one of these; empty: it must find no error.
        note: what happens.
        edits: pairs (old, new) of text, applied in order; each old text stands in the program exactly once.
        real: whether only a slow scenario shows it (a real launcher, a real training).
        held_out: whether it was made up without a look at the rules, to score them honestly.
        runner: edits of what starts the program, which then lies beside it.
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
        """A text after edits."""
        for old, new in edits:
            assert text.count(old) == 1, f"{self.name}: {old!r} stands in the text {text.count(old)} times"
            text = text.replace(old, new)
        return text

    def source(self) -> str:
        """The text of this version."""
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
    """A version with a mistake."""
    return Case(name, base, (kinds,) if isinstance(kinds, str) else kinds, note, edits, real, held_out, runner)


def style(name: str, base: str, note: str, *edits: Edit, real: bool = False, runner: tuple[Edit, ...] = ()) -> Case:
    """A correct version in another style."""
    return Case(name, base, (), note, edits, real, runner=runner)


def part(base: str, start: str, end: str) -> str:
    """The text of a program from a text that stands in it once up to the one that follows."""
    text = (ROOT / base).read_text()
    assert text.count(start) == 1, (base, start)
    return start + text.split(start)[1].split(end)[0]
