"""Whether the steps of two runs begin with the same parameters, and lead to the same ones."""

from collections.abc import Sequence

from workshop.check.evidence.events import ModelEvaluated, Sketch
from workshop.check.evidence.process import Process, Step
from workshop.check.evidence.sketches import difference

SAME = 1e-6  # parameters of two runs count as equal up to this relative difference


def begin_apart(one: Step, other: Step) -> float:
    """The relative difference between the parameters before two steps."""
    return difference(one.before.weights, other.before.weights)


def lead_apart(one: Step, other: Step, bound: float) -> bool:
    """Whether two steps lead to different parameters."""
    return bool(one.after and other.after and difference(one.after.weights, other.after.weights) > bound)


def is_reproducible(base: list[Step], done: list[Step]) -> bool:
    """Whether two runs have the same parameters before each common step, and see the same samples."""
    return all(
        one.keys == other.keys and begin_apart(one, other) < SAME for one, other in zip(base, done, strict=False)
    )


def has_resumed(done: list[Step], begin: Step, evaluated: Sequence[list[Sketch]] = ()) -> bool:
    """Whether a step begins with parameters that the first run had after some step, or in an evaluation.

    A program may change parameters after a step, such as those that must not be negative. Only those with gradients count: the
    forward pass itself may change others, such as those of a momentum encoder.
    """
    had = [
        *(step.before.weights for step in done[1:]),
        *(step.after.weights for step in done if step.after),
        *evaluated,
    ]
    now = begin.before.weights
    trained = [number for number, gradient in enumerate(begin.before.gradients) if gradient] or [*range(len(now))]
    same = (each for each in had if len(each) == len(now))
    return any(
        difference([now[number] for number in trained], [each[number] for number in trained]) < SAME for each in same
    )


def evaluated(process: Process) -> list[list[Sketch]]:
    """The parameters of models before evaluations."""
    return [event.weights for event in process.of(ModelEvaluated)]
