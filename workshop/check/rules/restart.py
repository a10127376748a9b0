"""Whether a run that was stopped, or in which a process died, resumes and ends as an uninterrupted one would."""

import math
from dataclasses import dataclass
from functools import cached_property

from workshop.check.evidence.events import Backward, Loaded, Raised, StepBegun, StepTaken, UnevenJoined
from workshop.check.evidence.real import Killed, Kills, RealRun
from workshop.check.evidence.run import Run, Step
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules.collectives import collectives_differ
from workshop.check.rules.ending import crash, ending, hang, no_training
from workshop.check.rules.files import snapshot_keys
from workshop.check.rules.gradients import weights_differ
from workshop.check.rules.processes import no_group
from workshop.check.rules.rule import Makes, Rule, Said, Seen, Told, also, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import FAILING_RANK, KILLS, SPAWNED, SPLIT, WHOLE, Split

NEEDS = (Backward, StepBegun, StepTaken, Loaded, UnevenJoined)
SAME = 1e-6  # relative difference between the parameters of two runs up to which they count as the same


@dataclass(frozen=True)
class _Restart:
    """The steps of rank 0 in three runs: without a break, up to where it was stopped, and started again in its folder."""

    whole: list[Step]
    first: list[Step]
    second: list[Step]
    draws: bool  # whether the steps draw random numbers
    load: str  # the line that loads the checkpoint, or ""

    @property
    def missing(self) -> int:
        """How many steps the two parts have too few, compared with the run without a break; negative: too many."""
        return len(self.whole) - len(self.first) - len(self.second)

    @property
    def steps(self) -> str:
        """The numbers of steps, in words."""
        return f"{len(self.first)} + {len(self.second)} steps in two parts, {len(self.whole)} in one"

    @property
    def begin(self) -> tuple[Step, Step]:
        """The first step after the second start, and the step of the run without a break that it should equal."""
        return self.second[0], self.whole[len(self.first)]

    @cached_property
    def reproducible(self) -> bool:
        """Whether two runs, as far as both go, hold the same parameters before each step and see the same samples."""
        return all(
            one.keys == other.keys and difference(one.before.weights, other.before.weights) < SAME
            for one, other in zip(self.whole, self.first, strict=False)
        )

    @cached_property
    def resumed(self) -> bool:
        """Whether the second start begins with parameters that the first run had after a step."""
        last = self.first[-1].after
        had = [*(step.before.weights for step in self.first[1:]), last.weights if last else []]
        return any(difference(self.second[0].before.weights, weights) < SAME for weights in had)

    @cached_property
    def anew(self) -> bool:
        """Whether the second start begins with fresh parameters and takes all steps again."""
        first = difference(self.second[0].before.weights, self.whole[0].before.weights) < SAME / 10
        return len(self.second) >= len(self.whole) and (first or not (self.reproducible or self.resumed))

    @cached_property
    def elsewhere(self) -> str:
        """How the second start begins elsewhere than where the first run ended; "" where it does not."""
        if not self.reproducible:  # unseeded: no two runs are alike, so only the first run shows what to expect
            return "" if self.resumed else "the second start begins with parameters that the first run never had"
        begin, expected = self.begin
        samples = set(begin.keys)
        if samples and samples != set(expected.keys) and samples == set(self.whole[0].keys):
            return "the second start sees the samples in the order of the first epoch again"
        if difference(begin.before.weights, expected.before.weights) > SAME:
            return "the second start does not begin with the parameters that the first run ended with"
        return ""

    @cached_property
    def lost(self) -> dict[str, bool]:
        """Whether the optimizer's state, the learning rate and the random numbers that steps draw were not restored."""
        begin, expected = self.begin
        before = expected if self.reproducible else self.first[-1]
        return {
            "state": begin.before.state == 0 and before.before.state > 0,
            "rate": self.reproducible and begin.before.rates != expected.before.rates,
            "random": self.reproducible and self.draws and begin.random != expected.random,
        }

    @cached_property
    def drift(self) -> str:
        """What first differs where the end does, for no reason in ``lost``: "samples", "first step", "later step" or ""."""
        if any(self.lost.values()) or not self.reproducible or not _apart(self.whole[-1], self.second[-1]):
            return ""
        begin, expected = self.begin
        if set(begin.keys) != set(expected.keys):
            return "samples"
        return "first step" if _apart(begin, expected) else "later step"


def _apart(one: Step, other: Step) -> bool:
    """Whether two steps lead to different parameters."""
    return bool(one.after and other.after and difference(one.after.weights, other.after.weights) > SAME)


def _load(run: Run) -> str:
    """The line that loads a checkpoint."""
    return next((event.where for event in run.all(Loaded)), "")


def _restart(whole: Run, split: Split) -> _Restart | None:
    """The three runs to compare; None where one of them took no step, or a rank has lost another."""
    runs = (whole, split.first, split.second)
    if not all(run.trained for run in runs) or split.second.ended_by_echo:
        return None
    whole_steps, first, second = (run.trained[0].steps for run in runs)
    return _Restart(whole_steps, first, second, whole.trained[0].draws, _load(split.second))


def _aligned(whole: Run, split: Split) -> _Restart | None:
    """The three runs, where the second start takes as many steps as are left and begins where the first run ended."""
    restart = _restart(whole, split)
    return restart if restart and restart.missing == 0 and not restart.anew and not restart.elsewhere else None


def _compares(why: str, fix: str, after: tuple[Rule, ...], hint: bool = False) -> "Makes[[Run, Split]]":
    return rule(why=why, fix=fix, runs=(WHOLE, SPLIT), needs=NEEDS, after=after, hint=hint, anywhere=True)


# What explains the most comes first.


@also(collectives_differ, weights_differ, runs=(WHOLE, SPLIT), needs=NEEDS)
def ranks_part_after_restart(whole: Run, split: Split) -> Told:
    """After the second start the ranks begin with different parameters, or take different numbers of steps."""
    second, restart = split.second, _restart(whole, split)
    starts = [process.steps[0].before.weights for process in second.trained]
    counts = sorted({len(process.steps) for process in second.trained})
    if counts and second.ended_by_echo:
        parts = ", ".join(f"rank {each.rank} takes {plural(len(each.steps), 'step')}" for each in second.trained)
        seen = f"after the second start {parts}, and one rank loses the connection to the other"
        yield collectives_differ, Seen(seen, _load(second))
    elif not restart or restart.anew:
        return
    elif any(difference(starts[0], weights) > CLOSE for weights in starts):
        yield weights_differ, Seen("after the second start the ranks begin with different parameters", restart.load)
    elif len(counts) > 1 and not any(process.first(UnevenJoined) for process in second.trained):
        seen = f"after the second start the ranks take {' and '.join(map(str, counts))} steps"
        yield collectives_differ, Seen(seen, restart.load)


@_compares(
    why="The second start begins again with epoch 1: the work of the first run is lost.",
    fix="Before the first epoch, load the checkpoint if there is one (torch.load, load_state_dict), and continue with the epoch "
    "after the one that it was saved in. With Lightning: Trainer.fit(ckpt_path=...).",
    after=(collectives_differ, snapshot_keys),
)
def never_resumes(whole: Run, split: Split) -> Said:
    """The second start begins with fresh parameters and takes all steps again."""
    if (restart := _restart(whole, split)) and restart.anew:
        seen = f"the second start begins with fresh parameters and takes all {len(restart.second)} steps again"
        yield Seen(seen, restart.load or restart.second[0].before.where)


RANKS = (collectives_differ, snapshot_keys, never_resumes, weights_differ)


@_compares(
    why="An epoch that is trained twice leads to different parameters than a run that was never stopped.",
    fix="Save the number of the epoch that has ended, and continue with that number plus one.",
    after=RANKS,
)
def epoch_repeated(whole: Run, split: Split) -> Said:
    """Both parts together have more steps than the run without a break."""
    if (restart := _restart(whole, split)) and restart.missing < 0:
        yield Seen(f"{restart.steps}: work is done twice", restart.load)


@_compares(
    why="An epoch that is left out leads to different parameters than a run that was never stopped.",
    fix="Save the checkpoint after the epoch whose number it contains, and continue with that number plus one, up to --epochs.",
    after=RANKS,
)
def epoch_skipped(whole: Run, split: Split) -> Said:
    """Both parts together have fewer steps than the run without a break."""
    if (restart := _restart(whole, split)) and restart.missing > 0:
        yield Seen(f"{restart.steps}: work is left out", restart.load)
    elif whole.trained and split.first.trained and not split.second.trained and not split.second.failed:
        left = len(whole.trained[0].steps) - len(split.first.trained[0].steps)
        yield Seen(f"the second start takes no step, where {left} are left", _load(split.second))


COUNTED = (*RANKS, epoch_repeated, epoch_skipped)


@_compares(
    why="The run cannot resume from what it has saved.",
    fix="Save model.state_dict(), optimizer.state_dict() and the epoch in one dict, and load them with "
    'torch.load(path, map_location="cpu", weights_only=True) into the same kinds of objects.',
    after=COUNTED,
)
def resume_fails(whole: Run, split: Split) -> Said:
    """The second start ends with an error."""
    problem, trained = ending(split.second), split.second.trained
    if problem and (not trained or _restart(whole, split)):
        lead = "ends with" if trained else "fails"
        yield Seen(f"the second start {lead}: {problem.text}", problem.where, problem.detail)


@_compares(
    why="An optimizer without its state (AdamW's averages, momentum) starts cold, so the run diverges from an uninterrupted one.",
    fix="Save optimizer.state_dict() at the moment of the checkpoint, and load it with load_state_dict() on every rank.",
    after=(*COUNTED, resume_fails),
)
def optimizer_lost(whole: Run, split: Split) -> Said:
    """The optimizer's state is not restored."""
    if (restart := _aligned(whole, split)) and restart.lost["state"]:
        yield Seen("the optimizer's state is empty at the first step after the second start", restart.load)
    elif restart and restart.drift == "first step":
        seen = "from the same parameters and samples, the first step differs: the optimizer's state was not restored"
        yield Seen(seen, restart.load)


@_compares(
    why="The learning rate starts again from the beginning of its schedule.",
    fix="Save scheduler.state_dict() in the checkpoint and load it with scheduler.load_state_dict().",
    after=(*COUNTED, resume_fails, optimizer_lost),
)
def schedule_lost(whole: Run, split: Split) -> Said:
    """The learning rate after the second start is not the one that was due."""
    if (restart := _aligned(whole, split)) and restart.lost["rate"]:
        here, there = (step.before.rates[0] for step in restart.begin)
        seen = f"the learning rate is {there:.3g} in a run without a break, and {here:.3g} after the second start"
        yield Seen(seen, restart.load)


RESTORED = (*COUNTED, resume_fails, optimizer_lost, schedule_lost)


@_compares(
    why="Dropout and augmentation draw different numbers after a restart: the run is as good, but not the same.",
    fix="Seed torch at the start of each epoch from (seed, epoch, rank); then a checkpoint needs no random state.",
    after=RESTORED,
    hint=True,
)
def random_lost(whole: Run, split: Split) -> Said:
    """The steps draw random numbers, and after the second start different ones."""
    if (restart := _aligned(whole, split)) and restart.lost["random"]:
        seen = "the steps draw random numbers, and after the second start not those of a run without a break"
        yield Seen(seen, restart.load)


@_compares(
    why="A run that was interrupted should end with the same parameters as one that was not.",
    fix="Save and load model, optimizer, schedule and epoch on every rank, and seed each epoch from its number: "
    "torch.manual_seed(seed + epoch), sampler.set_epoch(epoch).",
    after=RESTORED,  # not random_lost, a hint: where that explains the difference, this rule looks and finds nothing
)
def resume_differs(whole: Run, split: Split) -> Said:
    """The second start begins elsewhere, or ends elsewhere, than a run without a break."""
    restart = _restart(whole, split)
    if not restart or restart.anew or restart.missing:
        return
    if restart.elsewhere:
        yield Seen(restart.elsewhere, restart.load)
    elif restart.drift == "samples":
        yield Seen("the second start trains on different samples than a run without a break", restart.load)
    elif restart.drift == "later step":
        yield Seen("the parameters at the end differ from those of a run without a break", restart.load)


# What the launcher is told, and what it does.


@rule(
    why="torchrun reports only the exit code of the rank that failed, not the reason.",
    fix="Decorate main() with @record (torch.distributed.elastic.multiprocessing.errors): torchrun then shows the traceback.",
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
        yield Seen(seen, detail=killed.end)


@rule(
    why="Workers that outlive torchrun continue to train, and write the checkpoint that the next start writes too.",
    fix="Call exit_with_launcher() from workshop.training.launcher before the slow imports.",
    runs=KILLS,
)
def orphans(kills: Kills) -> Said:
    """Workers outlive torchrun."""
    count = kills.torchrun.orphans if kills.torchrun else 0
    if count:
        workers = f"{plural(count, 'worker')} {'is' if count == 1 else 'are'}"
        yield Seen(f"5 s after kill -9 on torchrun {workers} still training")


@also(crash, no_group, resume_fails, resume_differs, runs=KILLS)
def wrong_under_torchrun(kills: Kills) -> Told:
    """It fails without any kill, or does not resume after one."""
    status = kills.uninterrupted
    if status != 0:
        how = "does not end" if status is None else f"ends with status {status}"
        yield crash, Seen(f"with all of the digits it {how}")
    if kills.worker:
        yield from _after_kill(kills.worker, "one worker and torchrun's restart")
    if kills.torchrun and kills.torchrun.begun and not kills.torchrun.orphans and kills.torchrun.status != 0:
        seen = f"after kill -9 on torchrun the next start fails: {kills.torchrun.error}"
        yield resume_fails, Seen(seen, detail=kills.torchrun.end)
    elif kills.torchrun:
        yield from _after_kill(kills.torchrun, "torchrun and a new start")


def _after_kill(killed: Killed, what: str) -> Told:
    lead = f"after kill -9 on {what}"
    if not killed.reached:
        seen = f"with the real torchrun it does not reach the end of epoch 1: {killed.error}"
        yield crash, Seen(seen, detail=killed.end)
    elif killed.workers != 2:
        seen = f"2 processes were asked for, but torchrun started {killed.workers or 'none'}"
        yield no_group, Seen(seen, detail=killed.end)
    elif killed.orphans or killed.status != 0:
        return  # other rules say so
    elif killed.difference is None:
        yield resume_differs, Seen(f"{lead} there is no checkpoint")
    elif math.isinf(killed.difference):
        yield resume_differs, Seen(f"{lead} the checkpoint contains different tensors")
    elif killed.difference > 0:
        seen = f"{lead} the parameters differ by up to {killed.difference:.1e} from those of an uninterrupted run"
        yield resume_differs, Seen(seen)


@also(hang, no_training, runs=SPAWNED)
@also(crash, runs=SPAWNED, active=True)
def wrong_under_spawn(run: RealRun) -> Told:
    """With fresh interpreters it does not end, fails, or leaves no trace of training."""
    lead, meaning = "with the real mp.spawn", ""
    if "bootstrapping phase" in run.text:
        meaning = '; each new process runs the top level of the file again: call main() under if __name__ == "__main__"'
    elif any(sign in run.text for sign in ("pickle", "Can't get attribute", "Can't get local")):
        meaning = "; spawn passes the function and its arguments with pickle, which takes no lambdas or inner functions"
    if None in run.statuses:
        yield hang, Seen(f"{lead} it had not ended after {run.limit:.0f} s", detail=run.end)
    if any(run.statuses):
        yield crash, Seen(f"{lead}: {run.error}{meaning}", detail=run.end)
    if set(run.statuses) == {0} and not run.processes and not run.checkpoint:
        seen = f"{lead} it ends without an error, and leaves neither log nor checkpoint"
        yield no_training, Seen(seen, detail=run.end)
