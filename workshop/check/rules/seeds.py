"""The seeds that an exercise asks for: the ranks share the order of the samples, but not their random numbers."""

from workshop.check.evidence.real import RealRun
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import crash
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.samples import same_random
from workshop.check.scenarios import SPAWNED, WHOLE

ROUNDING = 1e-3  # by which the losses of two orders of summation may differ after some steps


@rule(
    why="Ranks with the same random state apply the same augmentation and dropout, so the samples of a step vary less.",
    fix="Seed each rank differently: torch.manual_seed(SEED + 1000 * epoch + rank).",
    after=(no_group, wrong_group, same_random),
    origin="reseeded:loop",
)
def same_seed(run: Run) -> Said:
    """The ranks have the same random state in every step, whether or not the program draws random numbers."""
    states = [[each.random for each in process.backwards] for process in run.trained]
    if len(states) > 1 and states[0] and all(each == states[0] for each in states[1:]):
        yield Seen("in every step all ranks have the same random state", run.trained[0].data_where)


@rule(
    why="N processes with the same global batches compute the same training as one process, so the loss curves must coincide.",
    fix="Use the seed SEED in DistributedSampler, average the losses over the ranks, and change nothing else of single_gpu.py.",
    runs=(WHOLE, SPAWNED),
    after=(crash,),
    passive=True,  # its goal does not wait for the real launcher
)
def curve_differs(whole: Run, run: RealRun) -> Said:
    """The losses of the first epoch are not those of the solution, which equal those of one process."""
    if not run.losses or any(run.statuses) or None in run.statuses:
        return
    where = next((process.data_where for process in whole.trained), "")
    apart = [abs(own - other) for own, other in zip(run.losses, run.expected, strict=False)]
    if len(run.losses) != len(run.expected):
        seen = f"the log has {len(run.losses)} losses for epoch 1, which has {len(run.expected)} global batches"
        yield Seen(seen, where)
    elif max(apart) > ROUNDING:
        step = next(number for number, gap in enumerate(apart) if gap > ROUNDING)
        both = f"{run.losses[step]:.4f}, but {run.expected[step]:.4f} with one process and the same global batches"
        yield Seen(f"the loss of step {step + 1} is {both}; the curves differ by up to {max(apart):.2g}", where)
