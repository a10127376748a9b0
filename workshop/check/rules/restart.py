"""Whether a run that was stopped, or in which a process died, resumes and ends as an uninterrupted one would."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from workshop.check.evidence.events import Backward, Loaded, Raised, StepBegun, StepTaken, UnevenJoined
from workshop.check.evidence.real import Killed, Kills, RealRun
from workshop.check.evidence.run import Process, Run, Step
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules.collectives import collectives_differ
from workshop.check.rules.ending import crash, ending, hang, no_training
from workshop.check.rules.files import snapshot_keys
from workshop.check.rules.gradients import weights_differ
from workshop.check.rules.processes import no_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import FAILING_RANK, KILLS, SPAWNED, SPLIT, WHOLE, Split

NEEDS = (Backward, StepBegun, StepTaken, Loaded, UnevenJoined)
SAME = 1e-6  # relative difference between the parameters of two runs up to which they count as the same


@dataclass(frozen=True)
class _Restart:
    """Rank 0 in three runs: without a break, up to where it was stopped, and started again in the same folder.

    Attributes:
        whole, first, second: these three.
        load: the line that loads the checkpoint, or "".
    """

    whole: Process
    first: Process
    second: Process
    load: str

    @property
    def missing(self) -> int:
        """How many steps the two parts have too few, compared with the run without a break; negative: too many."""
        return len(self.whole.steps) - len(self.first.steps) - len(self.second.steps)

    @property
    def steps(self) -> str:
        """The numbers of steps, in words."""
        first, second, whole = (len(process.steps) for process in (self.first, self.second, self.whole))
        return f"{first} + {second} steps in two parts, {whole} in one"

    @property
    def begin(self) -> Step:
        """The first step after the second start."""
        return self.second.steps[0]

    @property
    def expected(self) -> Step:
        """The step of the run without a break that it should equal."""
        return self.whole.steps[len(self.first.steps)]

    @cached_property
    def reproducible(self) -> bool:
        """Whether two runs, as far as both go, hold the same parameters before each step and see the same samples."""
        return all(
            one.keys == other.keys and difference(one.before.weights, other.before.weights) < SAME
            for one, other in zip(self.whole.steps, self.first.steps, strict=False)
        )

    @cached_property
    def resumed(self) -> bool:
        """Whether the second start begins with parameters that the first run had after a step."""
        had = [step.before.weights for step in self.first.steps[1:]]
        last = self.first.steps[-1].after
        had.append(last.weights if last else [])
        return min(difference(self.begin.before.weights, weights) for weights in had) < SAME

    @cached_property
    def anew(self) -> bool:
        """Whether the second start begins with fresh parameters and takes all steps again."""
        first = difference(self.begin.before.weights, self.whole.steps[0].before.weights) < SAME / 10
        fresh = first or not (self.reproducible or self.resumed)
        return fresh and len(self.second.steps) >= len(self.whole.steps)

    @cached_property
    def elsewhere(self) -> str:
        """How the second start begins elsewhere than where the first run ended; "" where it does not."""
        if not self.reproducible:  # unseeded: no two runs are alike, so only the first run shows what to expect
            return "" if self.resumed else "the second start begins with parameters that the first run never had"
        samples = set(self.begin.keys)
        if samples and samples != set(self.expected.keys) and samples == set(self.whole.steps[0].keys):
            return "the second start sees the samples in the order of the first epoch again"
        if difference(self.begin.before.weights, self.expected.before.weights) > SAME:
            return "the second start does not begin with the parameters that the first run ended with"
        return ""

    @property
    def state_lost(self) -> bool:
        """Whether the optimizer has a state before the break and none after it."""
        before = self.expected if self.reproducible else self.first.steps[-1]
        return self.begin.before.state == 0 and before.before.state > 0

    @property
    def rate_lost(self) -> bool:
        """Whether the second start begins with a different learning rate than the run without a break has there."""
        return self.reproducible and self.begin.before.rates != self.expected.before.rates

    @property
    def random_lost(self) -> bool:
        """Whether the steps draw random numbers, and after the second start different ones."""
        return self.reproducible and self.whole.draws and self.begin.random != self.expected.random

    @property
    def drifts(self) -> bool:
        """Whether the parameters at the end differ, for a reason that has no name yet."""
        named = self.state_lost or self.rate_lost or self.random_lost
        ends = (self.whole.steps[-1].after, self.second.steps[-1].after)
        if named or not self.reproducible or not ends[0] or not ends[1]:
            return False
        return difference(ends[0].weights, ends[1].weights) > SAME

    @property
    def first_step_differs(self) -> bool:
        """Whether the first step after the second start uses the same samples and leads to different parameters."""
        here, there = self.begin.after, self.expected.after
        same = set(self.begin.keys) == set(self.expected.keys)
        return same and difference(here.weights if here else [], there.weights if there else []) > SAME


def _load(run: Run) -> str:
    """The line that loads a checkpoint."""
    return next((event.where for event in run.all(Loaded)), "")


def _restart(whole: Run, split: Split) -> _Restart | None:
    """The three runs to compare; None where one of them took no step, or a rank has lost another."""
    runs = (whole, split.first, split.second)
    if not all(run.trained for run in runs) or split.second.ended_by_echo:
        return None
    return _Restart(whole.trained[0], split.first.trained[0], split.second.trained[0], _load(split.second))


def _aligned(whole: Run, split: Split) -> _Restart | None:
    """The three runs, where the second start takes as many steps as are left and begins where the first run ended."""
    restart = _restart(whole, split)
    return restart if restart and restart.missing == 0 and not restart.anew and not restart.elsewhere else None


# ---------------------------------------------------------------- what explains the most comes first


def _ranks_begin_apart(run: Run) -> bool:
    starts = [process.steps[0].before.weights for process in run.trained]
    return any(difference(starts[0], weights) > CLOSE for weights in starts)


@collectives_differ.also((WHOLE, SPLIT), needs=NEEDS)
def ranks_part_after_restart(whole: Run, split: Split) -> Said:
    """After the second start the ranks take different numbers of steps."""
    second = split.second
    restart = _restart(whole, split)
    if second.trained and second.ended_by_echo:
        parts = ", ".join(
            f"rank {process.rank} takes {plural(len(process.steps), 'step')}" for process in second.trained
        )
        yield Seen(f"after the second start {parts}, and one rank loses the connection to the other", _load(second))
    elif restart and not restart.anew and not _ranks_begin_apart(second):
        counts = sorted({len(process.steps) for process in second.trained})
        if len(counts) > 1 and not any(process.first(UnevenJoined) for process in second.trained):
            yield Seen(f"after the second start the ranks take {' and '.join(map(str, counts))} steps", restart.load)


@rule(
    why="The second start begins again with epoch 1: the work of the first run is lost.",
    fix="Where the checkpoint exists, load it before the first epoch (torch.load, load_state_dict) and continue with the epoch "
    "after the one that it was saved in. With Lightning: Trainer.fit(ckpt_path=...).",
    runs=(WHOLE, SPLIT),
    needs=NEEDS,
    after=(collectives_differ, snapshot_keys),
    anywhere=True,
)
def never_resumes(whole: Run, split: Split) -> Said:
    """The second start begins with fresh parameters and takes all steps again."""
    restart = _restart(whole, split)
    if restart and restart.anew:
        count = len(restart.second.steps)
        seen = f"the second start begins with fresh parameters and takes all {count} steps again"
        yield Seen(seen, restart.load or restart.begin.before.where)


@weights_differ.also((WHOLE, SPLIT), needs=NEEDS)
def ranks_begin_apart_after_restart(whole: Run, split: Split) -> Said:
    """After the second start the ranks begin with different parameters."""
    restart = _restart(whole, split)
    if restart and not restart.anew and _ranks_begin_apart(split.second):
        yield Seen("after the second start the ranks begin with different parameters", restart.load)


RANKS = (collectives_differ, snapshot_keys, never_resumes, weights_differ)


@rule(
    why="An epoch that is trained twice leads to different parameters than a run that was never stopped.",
    fix="Save the number of the epoch that has ended, and continue with that number plus one.",
    runs=(WHOLE, SPLIT),
    needs=NEEDS,
    after=RANKS,
    anywhere=True,
)
def epoch_repeated(whole: Run, split: Split) -> Said:
    """Both parts together have more steps than the run without a break."""
    restart = _restart(whole, split)
    if restart and restart.missing < 0:
        yield Seen(f"{restart.steps}: work is done twice", restart.load)


@rule(
    why="An epoch that is left out leads to different parameters than a run that was never stopped.",
    fix="Save the checkpoint after the epoch whose number it contains, and continue with that number plus one, up to --epochs.",
    runs=(WHOLE, SPLIT),
    needs=NEEDS,
    after=RANKS,
    anywhere=True,
)
def epoch_skipped(whole: Run, split: Split) -> Said:
    """Both parts together have fewer steps than the run without a break."""
    restart = _restart(whole, split)
    if restart and restart.missing > 0:
        yield Seen(f"{restart.steps}: work is left out", restart.load)
    elif whole.trained and split.first.trained and not split.second.trained and not split.second.failed:
        left = len(whole.trained[0].steps) - len(split.first.trained[0].steps)
        yield Seen(f"the second start takes no step, where {left} are left", _load(split.second))


COUNTED = (*RANKS, epoch_repeated, epoch_skipped)


@rule(
    why="The run cannot resume from what it has saved.",
    fix="Save model.state_dict(), optimizer.state_dict() and the epoch in one dict, and load them with "
    'torch.load(path, map_location="cpu", weights_only=True) into the same kinds of objects.',
    runs=(WHOLE, SPLIT),
    needs=NEEDS,
    after=COUNTED,
    anywhere=True,
)
def resume_fails(whole: Run, split: Split) -> Said:
    """The second start ends with an error."""
    second = split.second
    problem = ending(second)
    if problem and not second.trained:
        yield Seen(f"the second start fails: {problem.text}", problem.where, problem.detail)
    elif problem and _restart(whole, split):
        yield Seen(f"the second start ends with: {problem.text}", problem.where, problem.detail)


@rule(
    why="An optimizer without its state (AdamW's averages, momentum) starts cold, so the run diverges from an uninterrupted one.",
    fix="Save optimizer.state_dict() at the moment of the checkpoint, and load it with load_state_dict() on every rank.",
    runs=(WHOLE, SPLIT),
    needs=NEEDS,
    after=(*COUNTED, resume_fails),
    anywhere=True,
)
def optimizer_lost(whole: Run, split: Split) -> Said:
    """The optimizer's state is not restored."""
    restart = _aligned(whole, split)
    if restart and restart.state_lost:
        yield Seen("the optimizer's state is empty at the first step after the second start", restart.load)
    elif restart and restart.drifts and restart.first_step_differs:
        seen = (
            "from the same parameters and samples, the first step after the second start leads to different parameters"
        )
        yield Seen(f"{seen}: the optimizer's state was not restored", restart.load)


@rule(
    why="The learning rate starts again from the beginning of its schedule.",
    fix="Save scheduler.state_dict() in the checkpoint and load it with scheduler.load_state_dict().",
    runs=(WHOLE, SPLIT),
    needs=NEEDS,
    after=(*COUNTED, resume_fails, optimizer_lost),
    anywhere=True,
)
def schedule_lost(whole: Run, split: Split) -> Said:
    """The learning rate after the second start is not the one that was due."""
    restart = _aligned(whole, split)
    if restart and restart.rate_lost:
        there, here = (step.before.rates[0] for step in (restart.expected, restart.begin))
        yield Seen(
            f"the learning rate is {there:.3g} in a run without a break, and {here:.3g} after the second start",
            restart.load,
        )


@rule(
    why="Dropout and augmentation draw different numbers after a restart: the run is as good as an uninterrupted one, but "
    "not the same.",
    fix="Seed torch at the start of each epoch from (seed, epoch, rank); then a checkpoint needs no random state.",
    runs=(WHOLE, SPLIT),
    needs=NEEDS,
    after=(*COUNTED, resume_fails, optimizer_lost, schedule_lost),
    hint=True,
    anywhere=True,
)
def random_lost(whole: Run, split: Split) -> Said:
    """The steps draw random numbers, and after the second start different ones."""
    restart = _aligned(whole, split)
    if restart and restart.random_lost:
        seen = "the steps draw random numbers, and after the second start not those of a run without a break"
        yield Seen(seen, restart.load)


@rule(
    why="A run that was interrupted should end with the same parameters as one that was not.",
    fix="Save and load the model, the optimizer, the schedule and the epoch, on every rank, and seed each epoch from its number: "
    "torch.manual_seed(seed + epoch), sampler.set_epoch(epoch).",
    runs=(WHOLE, SPLIT),
    needs=NEEDS,
    # (Not after random_lost, a hint: where that explains the difference, this rule looks and finds nothing.)
    after=(*COUNTED, resume_fails, optimizer_lost, schedule_lost),
    anywhere=True,
)
def resume_differs(whole: Run, split: Split) -> Said:
    """The second start begins elsewhere, or ends elsewhere, than a run without a break."""
    restart = _restart(whole, split)
    if not restart or restart.anew or restart.missing:
        return
    if restart.elsewhere:
        yield Seen(restart.elsewhere, restart.load)
    elif restart.drifts and set(restart.begin.keys) != set(restart.expected.keys):
        yield Seen("the second start trains on different samples than a run without a break", restart.load)
    elif restart.drifts and not restart.first_step_differs:
        yield Seen("the parameters at the end differ from those of a run without a break", restart.load)


# ---------------------------------------------------------------- what the launcher is told, and what it does


@rule(
    why="torchrun reports only the exit code of the rank that failed, not the reason.",
    fix="Decorate main() with @record from torch.distributed.elastic.multiprocessing.errors: torchrun then shows the traceback "
    "of the rank that failed first.",
    runs=FAILING_RANK,
    needs=(Raised,),
)
def traceback_hidden(run: Run) -> Said:
    """The rank that was made to fail has left torchrun no traceback."""
    if run.first_exception() and 1 not in run.error_files:
        yield Seen("the check made rank 1 fail, and its traceback was not recorded for torchrun")


@rule(
    why="One dead process should not end the run: nothing starts its processes again.",
    fix="Start torchrun with --max-restarts=3.",
    runs=KILLS,
)
def not_restarted(kills: Kills) -> Said:
    """After the death of a worker the run does not come to its end."""
    killed = kills.worker
    if killed and killed.begun and killed.status != 0:
        how = "hangs" if killed.status is None else f"ends with status {killed.status}"
        seen = f"after kill -9 on one worker the run {how}: nothing starts the processes again"
        yield Seen(seen, detail=killed.text[-3000:])


@rule(
    why="Workers that outlive torchrun continue to train, and write the checkpoint that the next start writes too.",
    fix="Call exit_with_launcher() from workshop.training.launcher before the slow imports.",
    runs=KILLS,
)
def orphans(kills: Kills) -> Said:
    """Workers outlive torchrun."""
    count = kills.torchrun.orphans if kills.torchrun else 0
    if count:
        verb = "is" if count == 1 else "are"
        yield Seen(f"5 s after kill -9 on torchrun {plural(count, 'worker')} {verb} still training")


@crash.also(KILLS)
def crash_under_torchrun(kills: Kills) -> Said:
    """It fails without any kill."""
    status = kills.uninterrupted
    if status != 0:
        yield Seen(f"with all of the digits it {'does not end' if status is None else f'ends with status {status}'}")
    for killed in kills.both:
        if not killed.reached:
            seen = f"with the real torchrun it does not reach the end of epoch 1: {killed.error}"
            yield Seen(seen, detail=killed.text[-3000:])


@no_group.also(KILLS)
def no_group_under_torchrun(kills: Kills) -> Said:
    """The processes are not two of torchrun's."""
    for killed in kills.both:
        if killed.reached and killed.workers != 2:
            came = f"torchrun started {killed.workers or 'none'}"
            yield Seen(f"2 processes were asked for, but {came}", detail=killed.text[-3000:])


@resume_fails.also(KILLS)
def resume_fails_after_kill(kills: Kills) -> Said:
    """The next start after the death of torchrun fails."""
    killed = kills.torchrun
    if killed and killed.begun and not killed.orphans and killed.status != 0:
        yield Seen(f"after kill -9 on torchrun the next start fails: {killed.error}", detail=killed.text[-3000:])


@resume_differs.also(KILLS)
def resume_differs_after_kill(kills: Kills) -> Said:
    """The run ends, and not with the parameters of an uninterrupted one."""
    cases = ((kills.worker, "one worker and torchrun's restart"), (kills.torchrun, "torchrun and a new start"))
    for killed, what in cases:
        if killed and killed.begun and not killed.orphans and killed.status == 0:
            yield from (Seen(f"after kill -9 on {what} {problem}") for problem in _not_the_same(killed))


def _not_the_same(killed: Killed) -> Iterator[str]:
    if killed.difference is None:
        yield "there is no checkpoint"
    elif math.isinf(killed.difference):
        yield "the checkpoint contains different tensors"
    elif killed.difference > 0:
        yield f"the parameters differ by up to {killed.difference:.1e} from those of an uninterrupted run"


# ---------------------------------------------------------------- the real mp.spawn


@hang.also(SPAWNED)
def hang_under_spawn(run: RealRun) -> Said:
    """It does not end."""
    if None in run.statuses:
        yield Seen(f"with the real mp.spawn it had not ended after {run.limit:.0f} s", detail=run.text[-3000:])


@crash.also(SPAWNED, active=True)
def crash_under_spawn(run: RealRun) -> Said:
    """It fails in fresh interpreters."""
    if all(status in (0, None) for status in run.statuses):
        return
    meaning = ""
    if "bootstrapping phase" in run.text:
        meaning = '; each new process runs the top level of the file again: call main() under if __name__ == "__main__"'
    elif any(sign in run.text for sign in ("pickle", "Can't get attribute", "Can't get local")):
        meaning = (
            "; spawn passes the function and its arguments with pickle, which takes neither lambdas nor inner functions"
        )
    yield Seen(f"with the real mp.spawn: {run.error}{meaning}", detail=run.text[-3000:])


@no_training.also(SPAWNED)
def no_training_under_spawn(run: RealRun) -> Said:
    """It ends without a trace of training."""
    if set(run.statuses) == {0} and not run.processes and not run.checkpoint:
        seen = "with the real mp.spawn it ends without an error, and leaves neither log nor checkpoint"
        yield Seen(seen, detail=run.text[-3000:])
