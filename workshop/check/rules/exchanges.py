"""Whether ranks exchange the values of an evaluation."""

from collections import Counter

from workshop.check.evidence.events import Backward, BatchLoaded, Collective, Evaluated
from workshop.check.evidence.process import Process


def exchanged(process: Process) -> bool:
    """Whether the rank exchanges a value between an evaluation and the step after it."""
    evaluated, loaded, usual = False, False, _of_steps(process)
    sharded = any(step.before.sharded for step in process.steps)  # its forward passes gather parameters
    calls = Counter[str]()
    unclear = False  # whether it has exchanged a value after a batch was loaded, which may be a value of the step with this batch
    for _, event in process.events:
        if isinstance(event, Backward):
            evaluated = loaded = unclear = False
            calls.clear()
        elif isinstance(event, Evaluated):
            evaluated, loaded = True, False
        elif isinstance(event, BatchLoaded):
            if unclear:
                return True
            loaded = True
        elif isinstance(event, Collective) and "barrier" not in event.name and not (event.inside and sharded):
            if event.name == "broadcast" and event.dtype.endswith("uint8"):
                continue  # the state of a generator, which Accelerate sends before each epoch
            calls[event.where] += 1
            if evaluated and calls[event.where] > usual[event.where]:
                unclear = True
                # If each step calls it as well, with the batch that was loaded last, this is one call more.
                if not loaded or usual[event.where]:
                    return True
    return unclear


def _of_steps(process: Process) -> Counter[str]:
    """How often, at most, a line calls a collective between two backward passes without an evaluation, if it always does."""
    found: list[Counter[str]] = []
    calls, evaluated = Counter[str](), True  # before the first one, it is no step
    for _, event in process.events:
        if isinstance(event, Backward):
            found += [] if evaluated else [calls]
            calls, evaluated = Counter(), False
        elif isinstance(event, Evaluated):
            evaluated = True
        elif isinstance(event, Collective):
            calls[event.where] += 1
    always = set.intersection(*map(set, found)) if found else set()
    return Counter({line: max(each[line] for each in found) for line in always})
