"""Checkpoints that are read, but do not reach the model."""

from itertools import islice

from workshop.check.evidence.events import FileRenamed, FileWritten, Loaded, ModelLoaded, Saved
from workshop.check.evidence.misuses import OwnStateLoaded
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import difference
from workshop.check.rules.alike import SAME
from workshop.check.rules.restart import never_resumes, resume_differs
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import SPLIT, WHOLE, Split

FEW = 0.1  # share of the tensors that match


@rule(
    why="The model keeps its random parameters, without an error, so the file has no effect.",
    fix="Call load_state_dict() of the model with the saved state_dict and without strict=False; remove a prefix such as "
    '"module." from the names.',
    needs=(ModelLoaded,),
    anywhere=True,
)
def nothing_loaded(run: Run) -> Said:
    """A model accepts (nearly) none of the tensors that it is given."""
    for process in run.ranks[:1] or run.processes[:1]:
        yield from _unmatched(process)


def _unmatched(process: Process) -> Said:
    for event in process.of(ModelLoaded):
        if event.given > 1 and event.matched <= FEW * event.given:
            seen = (
                f"load_state_dict(strict=False) finds {event.matched} of the {plural(event.given, 'name')} in the model"
            )
            yield Seen(seen, event.where)
            return


def _saved(run: Run) -> set[str]:
    """The files with parameters that a run saved, also under the names that they got afterwards."""
    found: set[str] = set()
    for process in run.processes:
        renamed = False
        for _, event in process.events:
            if isinstance(event, Saved) and event.keys:
                found.add(event.path)
            elif isinstance(event, FileRenamed):
                renamed = event.source in found
            elif isinstance(event, FileWritten) and renamed:
                found.add(event.path)
                renamed = False
    return found


@nothing_loaded.also((WHOLE, SPLIT), needs=(ModelLoaded,), instead_of=(never_resumes, resume_differs))
def nothing_restored(whole: Run, split: Split) -> Said:
    """The second start reads the checkpoint, and the model begins with fresh parameters all the same."""
    for process in split.second.trained[:1]:
        unmatched = list(_unmatched(process))
        if unmatched:
            yield from unmatched
            return
        begin, saved = process.steps[0], _saved(split.first)
        loads = [(seconds, event) for seconds, event in process.timed(Loaded) if event.path in saved]
        early = [each for seconds, each in loads if seconds < begin.seconds]
        given = any(seconds < begin.seconds for seconds, _ in process.timed(ModelLoaded))
        fresh = whole.trained and difference(begin.before.weights, whole.trained[0].steps[0].before.weights) < SAME / 10
        if early and not given and fresh and not begin.before.sharded:
            name = early[-1].path.rsplit("/", 1)[-1]
            seen = f"the second start reads {name}, but loads it into no model: it begins with fresh parameters"
            yield Seen(seen, early[-1].where)
            return


@rule(
    why="state_dict() returns the tensors of the model, not copies: each step changes them too, so this restores nothing.",
    fix="Keep copies: copy.deepcopy(model.state_dict()), or {name: value.clone() for name, value in model.state_dict().items()}.",
    needs=(OwnStateLoaded,),
    anywhere=True,
    origin="holds:\\.state_dict\\(",
)
def own_state_loaded(run: Run) -> Said:
    """A model gets back the tensors that it has anyway, such as those of an earlier best epoch."""
    for event in islice(run.all(OwnStateLoaded), 1):
        yield Seen(
            "load_state_dict() gets the present tensors of the model itself, not copies of earlier ones", event.where
        )
