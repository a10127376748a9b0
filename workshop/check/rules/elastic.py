"""Training with a changing number of ranks: what torchrun must know, and what must not depend on the number of ranks."""

from collections.abc import Iterator

from workshop.check.evidence.events import Key, Loaded, Saved
from workshop.check.evidence.process import Step
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import difference, ratio
from workshop.check.evidence.text import Restarted
from workshop.check.rules.alike import SAME
from workshop.check.rules.ending import ending
from workshop.check.rules.restart import (
    never_resumes,
    not_restarted,
    optimizer_lost,
    resume_differs,
    resume_fails,
    store_shared,
)
from workshop.check.rules.rule import Rule, Said, Seen, Told, also, findings, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import RESIZED, RUNNER, WHOLE

GRADIENTS = 0.01  # relative difference above which two gradients of the same parameters and samples are different
SAVE = "Call save_checkpoint after every --save-every steps; it writes a checkpoint that any number of ranks can load."
ONE_FILE = "Let rank 0 save one checkpoint, in a file without the rank in its name, and load this file on all ranks."


@rule(
    why="torchrun waits for a fixed number of nodes: the training stops when one leaves, and cannot use one that joins.",
    fix="Start torchrun with a range of nodes: --nnodes=1:3.",
    runs=RUNNER,
)
def nodes_fixed(runner: dict[str, str]) -> Said:
    """The runner starts no torchrun, or one with a fixed number of nodes."""
    if error := runner.get("error"):
        yield Seen(
            f"the runner fails: {error}", fix="Start torchrun with exec, and with a range of nodes: --nnodes=1:3."
        )
        return
    least, _, most = runner["nnodes"].partition(":")
    if runner["standalone"] == "True":
        yield Seen(
            "the runner starts torchrun with --standalone, which is one node",
            fix="Pass --nnodes=1:3 to torchrun instead.",
        )
    elif int(least) > 1 or int(most or least) < 3:
        yield Seen(
            f"the runner starts torchrun with --nnodes={runner['nnodes']}, but one to three nodes should be able to train"
        )


@rule(
    why="torchruns that do not meet train on their own, and all of them write to the same checkpoint.",
    fix="Pass the same --rdzv-id to torchrun on all nodes, --rdzv-backend=c10d, and --rdzv-endpoint with $ENDPOINT.",
    runs=RUNNER,
    after=(nodes_fixed,),
)
def nodes_apart(runner: dict[str, str]) -> Said:
    """The torchruns of two nodes do not meet, or those of two trainings do."""
    backend, number = runner["rdzv_backend"], runner["rdzv_id"]
    if backend == "static":
        yield Seen("the runner names no --rdzv-backend, and the default, static, does not let nodes join or leave")
    elif number in ("none", "") or number != runner.get("other_rdzv_id"):
        yield Seen(
            "the runner names no --rdzv-id" if number in ("none", "") else "each start has a different --rdzv-id"
        )
    elif "first" not in runner["rdzv_endpoint"] or "second" not in runner.get("other_rdzv_endpoint", ""):
        yield Seen(
            f"with ENDPOINT=first:29500 the torchrun of the runner connects to {runner['rdzv_endpoint'] or 'no endpoint'}"
        )


@not_restarted.also(RUNNER, active=True, after=(nodes_fixed,))
def no_restarts(runner: dict[str, str]) -> Said:
    """The runner lets torchrun restart nothing."""
    if runner["max_restarts"] == "0":
        yield Seen(
            "torchrun starts with --max-restarts=0: when a node leaves, the ranks of the others fail, and so does torchrun"
        )


@store_shared.also(RUNNER, active=True, after=(nodes_fixed,))
def old_store(runner: dict[str, str]) -> Said:
    """The ranks use the store of the first rank 0, whose node may leave."""
    if runner["own_store"] != "1":
        yield Seen("torchrun shares its store with the ranks: after rank 0 has left, the others look for it and hang")


@rule(
    why="A step with more samples needs a different learning rate, so the training depends on how many nodes there were.",
    fix="Let --batch-size be the global batch, and give each rank its part: batch[rank::world_size].",
    runs=(WHOLE, RESIZED),
)
def batch_follows_ranks(whole: Run, resized: Restarted) -> Said:
    """The number of samples per step depends on the number of ranks."""
    return findings(batch_follows_ranks, resizing, whole, resized)


@rule(
    why="The global batch is the same for any number of ranks, so the learning rate that fits it is the same as well.",
    fix="Do not multiply the learning rate of the optimizer by the number of ranks.",
    runs=(WHOLE, RESIZED),
)
def rate_follows_ranks(whole: Run, resized: Restarted) -> Said:
    """The learning rate depends on the number of ranks."""
    return findings(rate_follows_ranks, resizing, whole, resized)


@rule(
    why="DDP averages over the ranks. If they have different numbers of samples, the samples get different weights.",
    fix="Sum the loss over the samples of the rank (reduction='sum'), divide it by the size of the global batch, and multiply it "
    "by the number of ranks.",
    runs=(WHOLE, RESIZED),
)
def parts_unweighted(whole: Run, resized: Restarted) -> Said:
    """From the same parameters and samples, a different number of ranks computes a different gradient."""
    return findings(parts_unweighted, resizing, whole, resized)


@rule(
    why="The model trains on some samples of the epoch twice, or not at all.",
    fix="Continue after the steps that the checkpoint counts: deal only the rest of that epoch to the ranks.",
    runs=(WHOLE, RESIZED),
    after=(batch_follows_ranks, resume_fails, never_resumes, resume_differs),
)
def rest_misdealt(whole: Run, resized: Restarted) -> Said:
    """A different number of ranks repeats samples of the epoch, or leaves some out."""
    return findings(rest_misdealt, resizing, whole, resized)


@rule(
    why="The next failure costs more steps than in a run that was never stopped, or the last steps are in no checkpoint.",
    fix="After a restart within an epoch, number its steps as in the whole epoch: from the step of the checkpoint on, up "
    "to the number of all its batches.",
    runs=(WHOLE, RESIZED),
    after=(batch_follows_ranks, rest_misdealt, resume_fails, never_resumes, resume_differs),
)
def saves_elsewhere(whole: Run, resized: Restarted) -> Said:
    """A run that continues saves after other steps than the uninterrupted one."""
    return findings(saves_elsewhere, resizing, whole, resized)


@also(resume_fails, never_resumes, resume_differs, optimizer_lost, runs=(WHOLE, RESIZED), after=(batch_follows_ranks,))
def resizing(whole: Run, resized: Restarted) -> Told:
    """What goes wrong when other numbers of ranks continue: the cause that explains most comes first."""
    if not whole.trained:
        return []
    runs = (resized.again, *resized.others)
    base = joined(whole)
    for run in runs:
        own = joined(run)
        if own and own[0] and base[0] and len(own[0]) != len(base[0]):
            sizes = (f"{len(of[0])} samples with {plural(by.nproc, 'rank')}" for by, of in ((whole, base), (run, own)))
            return [
                (batch_follows_ranks, Seen(f"a step trains on {' and on '.join(sizes)}", whole.trained[0].data_where))
            ]
    taken = [process.steps for process in resized.first.trained[:1]]
    if not any(resized.first.all(Saved)) or (taken and len(taken[0]) == len(whole.trained[0].steps)):
        seen = Seen("there is no checkpoint before the last step", resized.first.where(Saved), fix=SAVE)
        return [(never_resumes, seen)]
    for run in runs:
        if found := next(_unlike(whole, run), None):
            about, seen = found
            return [(about, seen)]
    return []


def joined(run: Run) -> list[list[Key]]:
    """The samples of each step, of all ranks together."""
    ranks = [process.steps for process in run.trained]
    return [[key for step in steps for key in step.keys] for steps in zip(*ranks, strict=False)]


def _unlike(whole: Run, run: Run) -> Iterator[tuple[Rule, Seen]]:
    """How a run that continues the training differs from the uninterrupted one."""
    base, lead = whole.trained[0].steps, f"continued with {plural(run.nproc, 'rank')}"
    load = run.where(Loaded)
    if ended := ending(run):
        yield resume_fails, Seen(f"{lead}: {ended.text}", ended.where or load, ended.detail, fix=ONE_FILE)
    if not run.trained:
        yield rest_misdealt, Seen(f"{lead}, it takes no step", load)
        return
    rest = run.trained[0].steps
    done = _position(base, rest[0])
    if done is None:
        yield (
            resume_differs,
            Seen(f"{lead}, it begins with parameters that the first run never had", load, fix=ONE_FILE),
        )
    elif done == 0:
        yield never_resumes, Seen(f"{lead}, it begins with fresh parameters", load, fix=ONE_FILE)
    elif rest[0].before.state == 0 and base[done].before.state > 0:
        yield optimizer_lost, Seen(f"{lead}, the optimizer state is empty at the first step", load)
    elif rates := _rates(base[done:], rest):
        yield (
            rate_follows_ranks,
            Seen(f"the learning rate is {rates[0]:.3g} with 2 ranks and {rates[1]:.3g} with {run.nproc}", load),
        )
    elif seen := _misdealt(joined(whole), joined(run), done, _epoch(whole)):
        yield rest_misdealt, Seen(f"{lead}, {seen}", rest[0].before.where)
    elif moved := _saves_moved(whole, run, done):
        yield saves_elsewhere, Seen(f"{lead}, {moved}", run.where(Saved))
    elif set(joined(whole)[done]) == set(joined(run)[0]):
        one, other = base[done].before.gradients, rest[0].before.gradients
        if difference(one, other, least=GRADIENTS) > GRADIENTS:
            factor = ratio(other, one)
            how = f"{factor:.2f} times as large" if factor and abs(factor - 1) > GRADIENTS else "different"
            where = run.trained[0].data_where
            yield parts_unweighted, Seen(f"{lead}, the gradient of the same samples is {how}", where)


def _saves_moved(whole: Run, run: Run, done: int) -> str:
    """After which other steps of the training a run saves that has begun after ``done`` of them; "" if after the same ones."""
    usual, found = (
        {
            begun + sum(step.seconds < seconds for step in of.trained[0].steps)
            for process in of.trained
            for seconds, _ in process.timed(Saved)
        }
        for of, begun in ((whole, 0), (run, done))
    )
    left, own = (sorted(each for each in saves if each > done) for saves in (usual, found))
    return f"it saves after the steps {own}, and not after {left}" if left and own and left != own else ""


def _position(base: list[Step], begin: Step) -> int | None:
    """The number of steps after which the uninterrupted run had the parameters of a step; None: it never had them."""
    gaps = [difference(step.before.weights, begin.before.weights) for step in base]
    best = min(range(len(gaps)), key=gaps.__getitem__)
    return best if gaps[best] < SAME else None


def _rates(base: list[Step], rest: list[Step]) -> tuple[float, float] | None:
    """The first two learning rates that differ."""
    pairs = ((due.before.rates[0], own.before.rates[0]) for due, own in zip(base, rest, strict=False))
    return next((pair for pair in pairs if abs(pair[0] - pair[1]) > SAME * pair[0]), None)


def _epoch(whole: Run) -> int:
    """The number of steps per epoch: all epochs of the exercise have the same number."""
    epochs = whole.asked.epochs if whole.asked and whole.asked.epochs else 1
    return len(whole.trained[0].steps) // epochs


def _misdealt(base: list[list[Key]], rest: list[list[Key]], done: int, epoch: int) -> str:
    """What is wrong with the samples after ``done`` steps, if an epoch has ``epoch`` steps; "" if nothing is."""
    begin = done - done % epoch
    seen = {key for keys in base[begin:done] for key in keys}
    repeated = sum(key in seen for keys in rest[: epoch - done % epoch] for key in keys) if done % epoch else 0
    left = len(base) - done
    steps = f"it takes {plural(len(rest), 'step')}, and {left} are left"
    if repeated:
        return f"it trains on {repeated} samples of the epoch again" + (f": {steps}" if len(rest) != left else "")
    if len(rest) != left:
        return steps
    for first in range(done, len(base), epoch):
        end = first - first % epoch + epoch
        keys = [key for step in rest[first - done : end - done] for key in step]
        if twice := len(keys) - len(set(keys)):
            return f"it trains on {plural(twice, 'sample')} twice in an epoch"
    return ""
