"""A rule: a function that reads evidence and yields what it has seen, declared with what the check must know about it::

    @rule(
        why="Every rank computes the same gradient, so more GPUs do not speed up the training.",
        fix="Pass a DistributedSampler to the DataLoader: each rank then gets a different part.",  # see pages.py
        runs=WHOLE,  # the scenario that it judges; WHOLE is the default
        after=(no_group,),
    )
    def same_samples(run: Run) -> Said:
        ...
        yield Seen(f"ranks 0 and 1 saw the same {count} samples in epoch 1", where)

With hyphens, the name of the function is the name of the rule in ``exercises.toml``. It is a pure function of the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, ParamSpec, TypeVar, overload

from workshop.check.evidence.events import Event
from workshop.check.evidence.run import Run
from workshop.check.rules.pages import page
from workshop.check.scenarios import WHOLE, Scenario

A = TypeVar("A")
B = TypeVar("B")
P = ParamSpec("P")


@dataclass(frozen=True)
class Seen:
    """What a rule has seen: one sentence with figures, the line of its cause, and more for ``--verbose``.

    ``fix``: what to do, if the fix of the rule does not suit this cause. ``origin``: the kind of statement to look for from
    ``where`` on, if the run does not show the line of the cause (see ``origins.py``). ``mild``: a hint for programs that are
    not exercises.
    """

    text: str
    where: str = ""
    detail: str = ""
    fix: str = ""
    origin: str = ""
    mild: bool = False


@dataclass(frozen=True)
class NotJudged:
    """What a rule cannot judge in this evidence, and why. ``goal``: the goal of the rule cannot be judged either."""

    text: str
    goal: bool = True


Said = Iterable[Seen | NotJudged]
Told = Iterable[tuple["Rule", Seen]]
Tells = Callable[P, Told]
Pair = tuple[Scenario[A], Scenario[B]]
Makes = Callable[[Callable[P, Said]], "Rule"]
Keeps = Callable[[Callable[P, Said]], Callable[P, Said]]


@dataclass(eq=False)
class Detector:
    """One function of a rule, for one combination of scenarios; ``rule`` and ``also`` take the settings from ``needs`` on."""

    rule: Rule
    function: Callable[..., Said]
    runs: tuple[Scenario[Any], ...]
    needs: tuple[type[Event], ...] = ()  # events that it reads, unless their probes are always installed
    after: tuple[Rule, ...] = ()  # rules that explain more: if one has found something, this one is not asked
    instead_of: tuple[Rule, ...] = ()  # rules that this one explains: if it finds something, they are not asked
    last: bool = False  # asked only if no rule has found an error
    figures: bool = False  # about reported figures: not asked if a rule that ``spoils`` them has found something
    passive: bool = False  # asked only if its scenarios are made anyway, for a different rule


@dataclass(eq=False)
class Rule:
    """One thing that can be wrong with a program; ``rule`` takes the settings from ``blocks`` on."""

    name: str  # as in ``exercises.toml``
    family: str  # the module that declares it
    why: str  # why it matters, a sentence or two
    fix: str  # what to do, with the name of the API
    blocks: bool = False  # if it has found something, nothing else can be judged
    spoils: bool = False  # if it has found something, the reported figures cannot be right
    hint: bool = False  # advice: shown, but no goal depends on it
    mild: bool = False  # a hint for programs that are not exercises
    always: bool = False  # asked of every program, whether or not an exercise lists it
    anywhere: bool = False  # also asked of programs that are not exercises
    unjudged: bool = False  # it says why a program that is not an exercise could not be judged
    origin: str = ""  # the kinds of cause to look for, if a finding names none (see ``origins.py``)
    detectors: list[Detector] = field(default_factory=list, repr=False)

    @property
    def ends(self) -> bool:
        """Whether it says how a run ended early, or why."""
        return self.blocks and self.family in ("ending", "collectives")

    @property
    def read(self) -> str:
        """Where to read more: a web address, or a path of the repository."""
        return page(self.fix)

    def _add(self, function: Callable[..., Said], runs: Any, **settings: Any) -> None:
        self.detectors.append(Detector(self, function, runs if isinstance(runs, tuple) else (runs,), **settings))

    @overload
    def also(self, runs: Scenario[A], **settings: Any) -> Keeps[[A]]: ...

    @overload
    def also(self, runs: Pair[A, B], **settings: Any) -> Keeps[[A, B]]: ...

    def also(self, runs: Any, *, active: bool = False, **settings: Any) -> Keeps[...]:
        """Declare a further function of this rule; ``active``: an exercise that lists the rule makes the check run ``runs``."""

        def declare(function: Callable[..., Said]) -> Callable[..., Said]:
            self._add(function, runs, passive=not active, **settings)
            return function

        return declare


def also(*rules: Rule, runs: Any, active: bool = False, **settings: Any) -> Callable[[Tells[P]], Tells[P]]:
    """Declare a function of several rules, which yields each finding together with its rule."""

    def declare(function: Tells[P]) -> Tells[P]:
        for each in rules:
            each._add(partial(findings, each, function), runs, passive=not active, **settings)
        return function

    return declare


def findings(about: Rule, function: Callable[..., Told], *evidence: Any) -> Said:
    """What a function of several rules has seen for one of them."""
    return (seen for each, seen in function(*evidence) if each is about)


def if_first(kind: object, found: Iterable[tuple[object, Seen]]) -> list[Seen]:
    """The first thing found, if it is of this kind: for rules that share one search."""
    return [seen for first, seen in islice(found, 1) if first == kind]


FLAGS = "blocks", "spoils", "hint", "mild", "always", "anywhere", "unjudged"
RULES: dict[str, Rule] = {}


@overload
def rule(*, why: str, fix: str, runs: Scenario[A], **settings: Any) -> Makes[[A]]: ...


@overload
def rule(*, why: str, fix: str, runs: Pair[A, B], **settings: Any) -> Makes[[A, B]]: ...


@overload
def rule(*, why: str, fix: str, **settings: Any) -> Makes[[Run]]: ...


def rule(*, why: str, fix: str, runs: Any = WHOLE, **settings: Any) -> Makes[...]:
    """Declare a function as a rule; it judges the result of one scenario, or of two together."""
    flags = {name: settings.pop(name, False) for name in FLAGS}
    origin = settings.pop("origin", "")

    def declare(function: Callable[..., Said]) -> Rule:
        name = function.__name__.replace("_", "-")
        if name in RULES:
            raise ValueError(f"two rules have the name {name}")
        family = function.__module__.rpartition(".")[2]
        RULES[name] = made = Rule(name, family, why, fix, **flags, origin=origin)
        made._add(function, runs, **settings)
        return made

    return declare
