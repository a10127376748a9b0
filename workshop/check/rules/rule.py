"""What a rule is: a function from evidence to what it has seen, declared with all that the check needs to know of it.

    @rule(
        why="Every rank pays for the same work, and the averaged gradient is that of one batch.",
        fix="Give the DataLoader a DistributedSampler, which gives each rank a different part.",
        runs=WHOLE,
        needs=(Backward,),
        after=(no_group,),
    )
    def same_samples(run: Run) -> Said:
        ...
        yield Seen(f"ranks 0 and 1 saw the same {count} samples in epoch 1", where)

The function's name, with hyphens, is the rule's name in ``exercises.toml``. It is pure: nothing but the evidence counts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypedDict, TypeVar, Unpack, overload

from workshop.check.evidence.events import Event
from workshop.check.evidence.run import Run
from workshop.check.scenarios import WHOLE, Scenario

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


@dataclass(frozen=True)
class Seen:
    """What a rule has seen: one sentence with figures, the line of its cause, and more for ``--verbose``."""

    text: str
    where: str = ""
    detail: str = ""


@dataclass(frozen=True)
class NotJudged:
    """What a rule cannot judge in this evidence, and why. ``goal``: whether its goal can then not be judged either."""

    text: str
    goal: bool = True


Said = Iterable[Seen | NotJudged]


def if_first(kind: object, found: Iterable[tuple[object, Seen]]) -> list[Seen]:
    """What was found first, if it is of this kind: for rules that share one search."""
    return [seen for first, seen in islice(found, 1) if first == kind]


class Settings(TypedDict, total=False):
    """The settings of a detector.

    Attributes:
        needs: the kinds of events that it reads, so that the check installs the probes that write them. Those of probes that
            are ``always`` installed, or installed for each program that imports their library, may be left out.
        after: rules that explain more: where one of them has found something, this one is not asked.
        instead_of: rules that this one explains: where it finds something, they are not asked.
        last: asked only where no rule has found an error.
        figures: about figures that the program reports: not asked where a rule that ``spoils`` them has found something.
    """

    needs: tuple[type[Event], ...]
    after: "tuple[Rule, ...]"
    instead_of: "tuple[Rule, ...]"
    last: bool
    figures: bool


class RuleSettings(Settings, total=False):
    """The settings of a rule, beside those of its first detector.

    Attributes:
        blocks: nothing else can be judged where it has found something.
        spoils: figures that a program reports cannot be right where it has found something.
        hint: a matter of taste: shown, but no goal depends on it.
        always: asked of every program, whether or not an exercise lists it.
        anywhere: asked of programs that are no exercise, too.
    """

    blocks: bool
    spoils: bool
    hint: bool
    always: bool
    anywhere: bool


@dataclass(eq=False)
class Detector:
    """One function of a rule, for one combination of scenarios."""

    rule: "Rule"
    function: Callable[..., Said]
    runs: tuple[Scenario[Any], ...]
    needs: tuple[type[Event], ...] = ()
    after: "tuple[Rule, ...]" = ()
    instead_of: "tuple[Rule, ...]" = ()
    last: bool = False
    figures: bool = False
    passive: bool = False  # asked where its scenarios are made anyway; does not make the check run them


@dataclass(eq=False)
class Rule:
    """One thing that can be wrong with a program.

    Attributes:
        name: as in ``exercises.toml``.
        family: the name of the module that declares it.
        why: why it matters, a sentence or two.
        fix: what to do, with the name of the API.
        detectors: its functions: the first, and those of ``also``.
    """

    name: str
    family: str
    why: str
    fix: str
    blocks: bool = False
    spoils: bool = False
    hint: bool = False
    always: bool = False
    anywhere: bool = False
    detectors: list[Detector] = field(default_factory=list, repr=False)

    def _add(self, function: Callable[..., Said], runs: object, passive: bool, settings: Settings) -> None:
        scenarios = runs if isinstance(runs, tuple) else (runs,)
        self.detectors.append(Detector(self, function, scenarios, passive=passive, **settings))

    @overload
    def also(
        self, runs: Scenario[A], *, active: bool = False, **settings: Unpack[Settings]
    ) -> Callable[[Callable[[A], Said]], Callable[[A], Said]]: ...

    @overload
    def also(
        self, runs: tuple[Scenario[A], Scenario[B]], *, active: bool = False, **settings: Unpack[Settings]
    ) -> Callable[[Callable[[A, B], Said]], Callable[[A, B], Said]]: ...

    @overload
    def also(
        self, runs: tuple[Scenario[A], Scenario[B], Scenario[C]], *, active: bool = False, **settings: Unpack[Settings]
    ) -> Callable[[Callable[[A, B, C], Said]], Callable[[A, B, C], Said]]: ...

    def also(
        self, runs: object, *, active: bool = False, **settings: Unpack[Settings]
    ) -> Callable[[Callable[..., Said]], Callable[..., Said]]:
        """Declare another function of this rule, asked wherever these scenarios are made for another rule's sake.

        Args:
            runs: as in ``rule``.
            active: whether an exercise that lists this rule makes the check run these scenarios.
        """

        def declare(function: Callable[..., Said]) -> Callable[..., Said]:
            self._add(function, runs, not active, settings)
            return function

        return declare


RULES: dict[str, Rule] = {}


@overload
def rule(*, why: str, fix: str, **settings: Unpack[RuleSettings]) -> Callable[[Callable[[Run], Said]], Rule]: ...


@overload
def rule(
    *, why: str, fix: str, runs: Scenario[A], **settings: Unpack[RuleSettings]
) -> Callable[[Callable[[A], Said]], Rule]: ...


@overload
def rule(
    *, why: str, fix: str, runs: tuple[Scenario[A], Scenario[B]], **settings: Unpack[RuleSettings]
) -> Callable[[Callable[[A, B], Said]], Rule]: ...


@overload
def rule(
    *, why: str, fix: str, runs: tuple[Scenario[A], Scenario[B], Scenario[C]], **settings: Unpack[RuleSettings]
) -> Callable[[Callable[[A, B, C], Said]], Rule]: ...


def rule(
    *,
    why: str,
    fix: str,
    runs: object = WHOLE,
    blocks: bool = False,
    spoils: bool = False,
    hint: bool = False,
    always: bool = False,
    anywhere: bool = False,
    **settings: Unpack[Settings],
) -> Callable[[Callable[..., Said]], Rule]:
    """Declare a function as a rule; see ``RuleSettings`` and ``Settings``.

    Args:
        why: why it matters.
        fix: what to do.
        runs: the scenario that the function judges, or up to three of them, in the order of its arguments; the whole run
            unless said otherwise.
    """

    def declare(function: Callable[..., Said]) -> Rule:
        name = function.__name__.replace("_", "-")
        if name in RULES:
            raise ValueError(f"two rules have the name {name}")
        family = function.__module__.rpartition(".")[2]
        made = Rule(name, family, why, fix, blocks, spoils, hint, always, anywhere)
        made._add(function, runs, False, settings)
        RULES[name] = made
        return made

    return declare
