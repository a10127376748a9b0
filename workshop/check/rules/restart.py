"""Whether a run that was stopped, or in which a process died, resumes and ends as an uninterrupted one would."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from workshop.check.evidence.events import (
    GroupDestroyed,
    Joined,
    LoaderStarted,
    Raised,
    Sketch,
    UnevenJoined,
)
from workshop.check.evidence.misuses import PlateauSeen
from workshop.check.evidence.process import Step
from workshop.check.evidence.real import Killed, Kills, RealRun
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import CLOSE, difference
from workshop.check.rules import accelerate, carried
from workshop.check.rules.alike import SAME, begin_apart, evaluated, has_resumed, is_reproducible, lead_apart
from workshop.check.rules.carried import Cause, first_cause, firsts
from workshop.check.rules.collectives import collectives_differ
from workshop.check.rules.ending import crash, ending, hang, no_training
from workshop.check.rules.files import checkpoint_keys
from workshop.check.rules.gradients import (
    buffers_differ,
    buffers_overwritten,
    gradients_differ,
    models_differ,
    weights_differ,
)
from workshop.check.rules.inputs import encoded_differently
from workshop.check.rules.metrics import result_discarded
from workshop.check.rules.own_state import one_for_all, saved_apart
from workshop.check.rules.processes import no_group
from workshop.check.rules.rule import Makes, Rule, Said, Seen, Told, also, findings, rule
from workshop.check.rules.shares import plays
from workshop.check.rules.stages import one_stage_saved
from workshop.check.rules.starts import in_closure, loading, scale_lost, torn_by_writers, uneven, without_further_steps
from workshop.check.rules.words import plural
from workshop.check.scenarios import FAILING_RANK, KILLS, SPAWNED, SPLIT, STARTED, WHOLE, Split

# The same at the end of runs with more than two processes. DDP changes the order of its buckets after the first step of each
# start, so that more than two numbers are added up in another order, and AdamW makes the difference larger.
ROUNDING = 1e-3
SKIP = "Save how many batches of the epoch, or of the stream, were done, and skip them after the checkpoint is loaded."
MISSING_IN_WRAPPER = re.compile(r'Missing key\(s\) in state_dict: "module\.')
WRAPPER = "Load the checkpoint into the model inside the wrapper: ddp_model.module.load_state_dict(...)."
# What an error says if the cause can be what the checkpoint contains, or how it is read.
OF_THE_FILE = re.compile(
    r"weights_only|pickl|state_dict|Missing key|size mismatch|archive|deserializ|KeyError|CUDA|EOFError"
)
RESUMED = "The run ends after it has read the checkpoint: repair this line for a run that resumes, then stop a run and resume it."
SCALER = "Save the state_dict() of the GradScaler in the checkpoint, and load it where the checkpoint is loaded."
# With these mistakes, the ranks have state of their own, so no run resumes from the checkpoint of one rank as it was.
CAUSES = (
    gradients_differ,
    weights_differ,
    models_differ,
    buffers_overwritten,
    buffers_differ,
    result_discarded,
    encoded_differently,
    one_stage_saved,
)

# What differs for an unknown reason: chance may decide it, and few programs restore the state of all random numbers.
WITHOUT_STATE = "the optimizer state is empty at the first step after the second start"
IN_FIRST_ORDER = "sees the samples in the order of the first epoch again"
WITHOUT_CAUSE = re.compile("different samples than|different gradients:|parameters at the end differ")
# A rule that ``second_start`` judges; it reports only one of them.
_of_restart: "partial[Makes[[Run, Split]]]" = partial(
    rule, runs=(WHOLE, SPLIT), after=(checkpoint_keys, weights_differ), anywhere=True
)


@_of_restart(
    why="The second start begins again with epoch 1: the work of the first run is lost.",
    fix="Load the state_dict() of model and optimizer (torch.load), begin at the next epoch; in Lightning: fit(ckpt_path=...).",
    after=(checkpoint_keys,),
)
def never_resumes(whole: Run, split: Split) -> Said:
    """The second start begins with fresh parameters and repeats all steps."""
    return findings(never_resumes, second_start, whole, split)


@_of_restart(
    why="An epoch that is trained twice leads to different parameters than a run that was never stopped.",
    fix="Save the number of the last finished epoch, and resume with that number plus one.",
    origin="last:load_from_checkpoint restored",
)
def epoch_repeated(whole: Run, split: Split) -> Said:
    """Both parts together have more steps than the uninterrupted run."""
    return findings(epoch_repeated, second_start, whole, split)


@_of_restart(
    why="An epoch that is left out leads to different parameters than a run that was never stopped.",
    fix="Save the checkpoint after the epoch whose number it contains, and resume with that number plus one, up to --epochs.",
    origin="call:skip_first_batches restored",
)
def epoch_skipped(whole: Run, split: Split) -> Said:
    """Both parts together have fewer steps than the uninterrupted run."""
    return findings(epoch_skipped, second_start, whole, split)


@_of_restart(
    why="The run cannot resume from what it has saved.",
    fix="Save only the epoch and the state_dict() of model and optimizer; use torch.load(map_location='cpu', weights_only=True).",
)
def resume_fails(whole: Run, split: Split) -> Said:
    """The second start ends with an error."""
    return findings(resume_fails, second_start, whole, split)


@_of_restart(
    why="Without its state (AdamW's moments, SGD's momentum) the optimizer takes different steps than in an uninterrupted run.",
    fix="Save the current state_dict() of the optimizer in each checkpoint; load it with load_state_dict() on every rank.",
    origin="loading:optim filled",
)
def optimizer_lost(whole: Run, split: Split) -> Said:
    """The optimizer state is not restored."""
    return findings(optimizer_lost, second_start, whole, split)


@_of_restart(
    why="The schedule of the learning rate does not continue at the step where it stopped, but begins again or at another step.",
    fix="Save the state_dict() of the scheduler in the checkpoint, and load it with scheduler.load_state_dict().",
    origin="rescaled loading:sched stateful:sched filled restored",
)
def schedule_lost(whole: Run, split: Split) -> Said:
    """The learning rate after the second start differs from that of an uninterrupted run."""
    return findings(schedule_lost, second_start, whole, split)


@_of_restart(
    why="Dropout and augmentation draw different numbers after a restart, so the run is valid but not identical.",
    fix="Call torch.manual_seed with a function of seed, epoch and rank in each epoch; a checkpoint then needs no random state.",
    hint=True,
    origin="reseeded:loop",
)
def random_lost(whole: Run, split: Split) -> Said:
    """After the second start the steps draw different random numbers."""
    return findings(random_lost, second_start, whole, split)


@_of_restart(
    why="An interrupted run should end with the same parameters as an uninterrupted one.",
    fix="Load the epoch and each state_dict() on all ranks; call torch.manual_seed(seed + epoch) and sampler.set_epoch(epoch).",
)
def resume_differs(whole: Run, split: Split) -> Said:
    """The second start begins or ends with other parameters or samples than an uninterrupted run."""
    return findings(resume_differs, second_start, whole, split)


@resume_differs.also((WHOLE, SPLIT), after=CAUSES)
def unexplained(whole: Run, split: Split) -> Said:
    """A difference without a known cause. A mistake of the whole run explains it, for example ranks that drift apart."""
    found = (seen for about, seen in _second_start(whole, split) if about is None)
    return [replace(seen, mild=bool(WITHOUT_CAUSE.search(seen.text))) for seen in found]


@also(collectives_differ, weights_differ, runs=(WHOLE, SPLIT))
def second_start(whole: Run, split: Split) -> Told:
    """How the second start differs from an uninterrupted run, and why."""
    return [(about, seen) for about, seen in _second_start(whole, split) if about]


def _second_start(whole: Run, split: Split) -> Iterable[tuple[Rule | None, Seen]]:
    """How the second start differs: the cause that explains most comes first. Without a known cause, there is no rule."""
    split = without_further_steps(whole, split)
    second, ended, load = split.second, ending(split.second), loading(split.second, split.first)
    if second.trained and second.ended_by_echo:
        some = carried.only_some_load(second)
        parts = some or ", ".join(
            f"rank {each.rank} takes {plural(len(each.steps), 'step')}" for each in second.trained
        )
        seen = f"after the second start {parts}, and one rank loses the connection"
        return [(collectives_differ, Seen(seen, load, origin="gate" if some else ""))]
    # With learning rates of 0, get_state_dict() of torch.distributed.checkpoint takes a step that creates the state.
    taken = (step for process in second.trained for step in process.steps if any(step.before.rates or [1.0]))
    if ended and not any(taken):
        return _failed(split, ended)
    if not whole.trained or not split.first.trained:
        return []
    base, done = whole.trained[0].steps, split.first.trained[0].steps
    if lost := scale_lost(whole, split):
        return [(resume_differs, Seen(lost, load, fix=SCALER, origin="loading:scaler"))]
    if not second.trained:
        left = len(base) - len(done)  # 0: the first save was after the last step that this rank takes
        return [(epoch_skipped, Seen(f"the second start takes no step, but {left} are left", load))] if left > 0 else []
    rest = second.trained[0].steps
    resumed = is_reproducible(base, done) or has_resumed(done, rest[0], evaluated(split.first.trained[0]))
    fresh = begin_apart(rest[0], base[0]) < SAME / 10 or not resumed
    if fresh and (len(rest) >= len(base) or whole.cut):
        seen = f"the second start begins with fresh parameters and repeats all {len(rest)} steps"
        return [(never_resumes, Seen(seen, load or rest[0].before.where, origin="uncalled call:fit.ckpt_path"))]
    if found := _ranks_apart(whole, split, load) or _steps_missing(whole, split, load):
        return found
    if ended:
        return [(resume_fails, _with_fix(Seen(f"the second start ends with: {ended.text}", ended.where, ended.detail)))]
    return _state_lost(whole, split, load)


def _ranks_apart(whole: Run, split: Split, load: str) -> list[tuple[Rule, Seen]]:
    """How the ranks of the second start differ from each other, or from those of an uninterrupted run."""
    second, begun = split.second, [each.steps[0].before for each in split.second.trained]
    if (
        not begun[0].sharded
        and not second.divided
        and begun[0].of_model
        and any(difference(begun[0].weights, each.weights) > CLOSE for each in begun)
    ):
        started = [each.steps[0].before.weights for each in whole.trained]
        if any(difference(started[0], each) > CLOSE for each in started):
            seen = "the ranks begin with different parameters, also without a restart"
            return [(weights_differ, Seen(seen, whole.trained[0].step_where, origin="reseeded"))]
        some = carried.only_some_load(second)
        seen = some or "the ranks begin with different parameters"
        return [(weights_differ, Seen(f"after the second start {seen}", load, origin="gate" if some else "of-some"))]
    if cause := one_for_all(whole, split):
        return [(resume_differs, _seen(cause, load))]
    return []


def _seen(cause: Cause, load: str) -> Seen:
    seen, fix, where, origin = cause
    return Seen(seen, where or load, fix=fix, origin=origin)


def _steps_missing(whole: Run, split: Split, load: str) -> list[tuple[Rule, Seen]]:
    """Whether the ranks of the second start take different numbers of steps, or together with the first start too many."""
    second = split.second
    counts = sorted({len(process.steps) for process in second.trained})
    if len(counts) > 1 and not uneven(whole) and not any(process.first(UnevenJoined) for process in second.trained):
        seen = f"after the second start the ranks take {' and '.join(map(str, counts))} steps"
        return [(collectives_differ, Seen(seen, load))]
    base, done, rest = (len(run.trained[0].steps) for run in (whole, split.first, second))
    if (left := base - done - rest) and not in_closure(whole.trained[0].steps):
        about, work = (epoch_skipped, "some are skipped") if left > 0 else (epoch_repeated, "some are repeated")
        missing = [(about, Seen(f"{done} + {rest} steps in two starts, but {base} in one: {work}", load))]
        begin, before = second.trained[0].steps[0].before, split.first.trained[0].steps[-1].before
        if whole.asked is None and begin.state == 0 and before.state > 0 and not before.sharded:
            missing.append((optimizer_lost, Seen(WITHOUT_STATE, load)))
        return missing
    return []


def _state_lost(whole: Run, split: Split, load: str) -> Iterable[tuple[Rule | None, Seen]]:
    """What the second start has not restored."""
    base, done, rest = (run.trained[0].steps for run in (whole, split.first, split.second))
    bound = SAME if whole.nproc <= 2 else ROUNDING
    first, draws = split.first.trained[0], whole.trained[0].draws
    planned = not any(whole.all(PlateauSeen)) and all(
        one.before.rates == two.before.rates for one, two in zip(base, done, strict=False)
    )
    differences = list(_not_restored(base, done, rest, draws, bound, evaluated(first), planned))
    if cause := carried.frozen_changed(whole, split):
        yield resume_differs, _seen(cause, load)
        return
    if differences and " samples " in differences[0][1] and plays(split.second.trained[0]):
        return  # the second start begins new games, as most programs of reinforcement learning do
    if differences and differences[0][0] in (resume_differs, optimizer_lost) and (cause := first_cause(whole, split)):
        lost = _seen(cause, load)
        about = optimizer_lost if "optimizer state" in lost.text else resume_differs
        lead = "" if lost.text.startswith("the second start") else f"{differences[0][1].partition(': ')[0]}: "
        yield about, replace(lost, text=f"{lead}{lost.text}")
        return
    if not differences and (cause := _copy_or_best_lost(whole, split, is_reproducible(base, done))):
        yield resume_differs, _seen(cause, load)
    elif not differences and (name := carried.saved_too_often(whole, split.second, len(done))):
        seen = f"after the second start {name}, but not in an uninterrupted run: the best value so far is not restored"
        yield resume_differs, Seen(seen, load, origin="restored")
    for about, seen in differences:
        origin = "call:set_epoch" if " samples " in seen else "of-some" if about is resume_differs else ""
        where, fix = load, accelerate.fix_of_order(whole) if IN_FIRST_ORDER in seen else ""
        if "does not skip" in seen:
            begun = (
                event
                for event in split.second.trained[0].of(LoaderStarted)
                if (event.loader, event.iteration) == rest[0].loader
            )
            where, fix, origin = next((event.where for event in begun), load), SKIP, "here"
        yield None if about is resume_differs else about, Seen(seen, where, fix=fix, origin=origin)


def _copy_or_best_lost(whole: Run, split: Split, reproducible: bool) -> Cause | None:
    """State beside the model and the optimizer that the second start does not restore."""
    done = len(split.first.trained[0].steps)
    copy = carried.copy_lost(whole, split, done) or saved_apart(whole, split, done) if reproducible else None
    return copy or carried.best_lost(whole, split)


def _failed(split: Split, ended: Seen) -> Told:
    """How a second start fails that takes no step; nothing, if two-writers names the cause."""
    origin = "" if ended.where else "call:save"
    seen = _with_fix(Seen(f"the second start fails: {ended.text}", ended.where, ended.detail, origin=origin))
    return [] if torn_by_writers(split) else [(resume_fails, seen)]


def _with_fix(seen: Seen) -> Seen:
    """Add the fix for a plain checkpoint that is loaded into a wrapped model, and for an error after the checkpoint was read."""
    if MISSING_IN_WRAPPER.search(f"{seen.text} {seen.detail}"):
        return replace(seen, fix=WRAPPER)
    return seen if OF_THE_FILE.search(seen.text) or not seen.where else replace(seen, fix=RESUMED)


def _not_restored(
    base: list[Step],
    done: list[Step],
    rest: list[Step],
    draws: bool,
    bound: float,
    known: Sequence[list[Sketch]] = (),
    planned: bool = False,
) -> Iterator[tuple[Rule, str]]:
    """What the second start (``rest``) has not restored.

    Args:
        base, done, rest: the steps of the uninterrupted run, of the first part and of the second.
        draws: the steps draw random numbers.
        bound: the relative difference up to which the parameters at the end count as equal.
        known: the parameters in the evaluations of the first part.
        planned: the learning rates depend on nothing that the program measures.
    """
    begin, expected, reproducible, samples = rest[0], base[len(done)], is_reproducible(base, done), set(rest[0].keys)
    # Without a seed two runs always differ, so only the first part shows what to expect.
    due = expected if reproducible else done[-1]
    apart = reproducible and lead_apart(base[-1], rest[-1], bound)
    other = next((step for step, own in zip(base[len(done) :], rest, strict=False) if step.keys != own.keys), None)
    if not reproducible and not has_resumed(done, begin, known):
        yield resume_differs, "the second start begins with parameters that the first run never had"
    elif reproducible and samples and samples != set(expected.keys) and samples == set(base[0].keys):
        within = expected.loader is not None and expected.loader == base[0].loader
        what = "does not skip the batches of the epoch that were done" if within else IN_FIRST_ORDER
        yield resume_differs, f"the second start {what}"
    elif reproducible and any(begin_apart(own, due) > SAME for due, own in firsts(base[len(done) :], rest)):
        yield resume_differs, "the second start does not begin with the parameters that the first run ended with"
    elif begin.before.state == 0 and due.before.state > 0:
        yield optimizer_lost, WITHOUT_STATE
    elif (reproducible or planned) and (rates := _other_rate(base[len(done) :], rest)):
        yield schedule_lost, f"the learning rate is {rates} after the second start"
    elif reproducible and draws and begin.random != expected.random:
        yield random_lost, "after the second start the steps draw different random numbers than in an uninterrupted run"
    elif apart and samples and other:
        yield resume_differs, "the second start trains on different samples than an uninterrupted run"
    elif apart and samples == set(expected.keys) and Counter(begin.rows) != Counter(expected.rows):
        yield (
            random_lost,
            "after the second start the same samples have different contents, as after a random augmentation",
        )
    elif apart and difference(begin.before.gradients, expected.before.gradients) > CLOSE:
        what = "random numbers, statistics or a second model, for example, are not restored"
        yield resume_differs, f"from the same parameters and samples the first step has different gradients: {what}"
    elif apart and lead_apart(begin, expected, bound):
        yield optimizer_lost, "from the same parameters the first step differs: the optimizer state is not restored"
    elif apart:
        gap = difference(base[-1].after.weights, rest[-1].after.weights) if base[-1].after and rest[-1].after else 0
        yield (
            resume_differs,
            f"the parameters at the end differ from those of an uninterrupted run (relatively by {gap:.1g})",
        )


def _other_rate(base: list[Step], rest: list[Step]) -> str:
    """Where the learning rates of the second start first differ from those of an uninterrupted run."""
    for number, (due, own) in enumerate(zip(base, rest, strict=False), 1):
        if due.before.rates != own.before.rates:
            apart = [pair for pair in zip(due.before.rates, own.before.rates, strict=False) if pair[0] != pair[1]]
            one, other = apart[0] if apart else (due.before.rates[0], own.before.rates[0])
            return f"{one:.3g} in an uninterrupted run, but {other:.3g} in step {number}"
    return ""


@rule(
    why="torchrun reports only the exit code of the rank that failed, not the reason.",
    fix="Decorate main() with @record (torch.distributed.elastic.multiprocessing.errors): torchrun then shows the traceback.",
    runs=FAILING_RANK,
    origin="returned:main",
)
def traceback_hidden(run: Run) -> Said:
    """torchrun gets no traceback of the rank that the check made fail."""
    if run.first_exception() and 1 not in run.error_files:
        yield Seen("the check made rank 1 fail, but torchrun got no traceback from it")


@rule(
    why="The other ranks keep waiting for a rank that failed as long as its connections are open.",
    fix="Train in `try:`, and call torch.distributed.destroy_process_group() in `finally:`.",
    runs=FAILING_RANK,
)
def kept_after_error(run: Run) -> Said:
    """The rank that the check made fail did not leave the process group."""
    for process in run.ranks:
        if process.rank == 1 and process.first(Raised) and not process.first(GroupDestroyed):
            yield Seen(
                "the check made rank 1 fail in step 3, and it did not destroy its process group", run.where(Joined)
            )


@rule(why="One dead process should not end the run.", fix="Start torchrun with --max-restarts=3.", runs=KILLS)
def not_restarted(kills: Kills) -> Said:
    """After one worker was killed, the run does not finish."""
    killed = kills.worker
    if killed and killed.reached and killed.workers == 2 and killed.status != 0:
        yield Seen(f"after kill -9 on a worker the run {_ends(killed.status)}{_why_not(killed)}", detail=killed.end)


def _why_not(killed: Killed) -> str:
    if killed.shared_store:
        return ": the restarted workers meet the old ones in the store of torchrun, which they share"
    return ": nothing restarts it"


@rule(
    why="The restarted workers use the store of torchrun, where they can find the addresses of the dead ones, and then fail.",
    fix="Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun starts: each start then gets a new store.",
    runs=KILLS,
    after=(not_restarted,),
)
def store_shared(kills: Kills) -> Said:
    """The workers share the store of torchrun, so some restarts fail."""
    if kills.worker and kills.worker.reached and kills.worker.shared_store:
        yield Seen(
            "the restart worked this time, but torchrun shares its store with the workers, so some restarts fail"
        )


def _ends(status: int | None) -> str:
    return "does not end" if status is None else f"ends with status {status}"


@rule(
    why="Workers that outlive torchrun continue to train, and write the same checkpoint as the next start.",
    fix="Call exit_with_launcher() from workshop.training.launcher before the slow imports.",
    runs=KILLS,
)
def orphans(kills: Kills) -> Said:
    """Workers outlive torchrun."""
    if kills.torchrun and (count := kills.torchrun.orphans):
        yield Seen(f"5 s after kill -9 on torchrun, {plural(count, 'worker')} still trained")


@also(crash, no_group, resume_fails, resume_differs, runs=KILLS)
def wrong_under_torchrun(kills: Kills) -> Told:
    """The run fails without a kill, or does not resume after one."""
    if kills.uninterrupted != 0:
        yield crash, Seen(f"with the whole data set the run {_ends(kills.uninterrupted)}")
    kinds = ("one worker and torchrun's restart", "torchrun and a new start")
    for killed, what in zip((kills.worker, kills.torchrun), kinds, strict=True):
        if killed and not killed.reached:
            yield crash, Seen(f"with torchrun it does not reach the end of epoch 1: {killed.error}", detail=killed.end)
        elif killed and killed.workers != 2:
            yield no_group, Seen(f"torchrun started {plural(killed.workers, 'process')}, not 2", detail=killed.end)
        elif killed and killed.status == 0 and (problem := _unlike_uninterrupted(killed.difference)):
            yield resume_differs, Seen(f"after kill -9 on {what} {problem}")
        elif killed and killed.status != 0 and killed is kills.torchrun and not killed.orphans:
            yield resume_fails, Seen(f"after kill -9 on torchrun a new start fails: {killed.error}", detail=killed.end)


def _unlike_uninterrupted(gap: float | None) -> str:
    if gap is None:
        return "there is no checkpoint"
    if math.isinf(gap):
        return "the checkpoint contains different tensors"
    return f"the parameters differ by up to {gap:.1e} from those of an uninterrupted run" if gap > 0 else ""


@also(hang, no_training, runs=SPAWNED)
@also(crash, runs=SPAWNED, active=True)
@also(hang, no_training, runs=STARTED)
@also(crash, runs=STARTED, active=True)
def wrong_in_reality(run: RealRun) -> Told:
    """With the real launcher the run hangs, fails, or writes neither log nor checkpoint."""
    lead, meaning, origin = f"with the real {run.launcher}", "", ""
    if "bootstrapping phase" in run.text:
        meaning = '; each new process runs the top level of the file again: call main() under if __name__ == "__main__"'
        origin = r"text:^main\(\)"
    elif any(sign in run.text for sign in ("pickle", "Can't get attribute", "Can't get local")):
        meaning = "; spawn passes the function and its arguments with pickle, which does not accept lambdas or inner functions"
        origin = "call:spawn"
    if None in run.statuses:
        yield hang, Seen(f"{lead} it had not ended after {run.limit:.0f} s", detail=run.end)
    if any(run.statuses):
        yield crash, Seen(f"{lead}: {run.error}{meaning}", detail=run.end, origin=origin)
    if set(run.statuses) == {0} and not run.processes and not run.checkpoint:
        yield no_training, Seen(f"{lead} it ends without an error, but without log or checkpoint", detail=run.end)
