"""What makes a program slower than its device is."""

import itertools

from workshop.check.evidence.events import BatchLoaded, DeviceSeen, LayersSeen, SamplesPrepared, ValuesAsked
from workshop.check.evidence.real import Speeds, last_error
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import crash
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import SPEED

SLOWER = 1.15  # times the solution's time


@rule(
    why="The device waits while one core prepares one sample after the other, in every epoch again.",
    fix="Transform all samples once into a TensorDataset on the device; use a BatchSampler and DataLoader(batch_size=None).",
    needs=(SamplesPrepared,),
)
def data_per_sample(run: Run) -> Said:
    """Samples are still prepared one by one when training has begun, or the steps wait for batches."""
    for process in run.first_rank:
        steps = process.steps
        prepared = [event.count for event in process.of(SamplesPrepared)]
        again = prepared[-1] - prepared[0] if prepared else 0
        waited = sum(event.seconds for seconds, event in process.timed(BatchLoaded) if seconds >= steps[0].seconds)
        whole = steps[-1].seconds - steps[0].seconds
        if again > sum(len(step.keys) for step in steps[1:]) / 2:
            yield Seen(f"after step 1 {plural(again, 'sample')} went through the transform again", process.data_where)
        elif whole > 0 and waited > 0.3 * whole:
            yield Seen(f"the steps wait for batches in {waited / whole:.0%} of the time", process.data_where)


@rule(
    why="A step that asks for a value waits until the device has computed it, and the device then waits for the next step.",
    fix="Keep the loss as a tensor (loss.detach()) and call item() or tolist() once, after the last step of the epoch.",
    needs=(ValuesAsked,),
)
def host_sync(run: Run) -> Said:
    """Each step asks a tensor for its value."""
    for process in run.first_rank:
        asked = process.of(ValuesAsked)
        per_step = sorted(after.count - before.count for before, after in itertools.pairwise(asked))
        middle = per_step[len(per_step) // 2] if per_step else 0
        if middle >= 1:
            yield Seen(f"each step asks a tensor for its value ({plural(middle, 'time')})", asked[-1].where)


@rule(
    why="This device computes several times as fast in bfloat16 as in float32.",
    fix='Compute under torch.autocast(device.type, dtype=torch.bfloat16); with Lightning: Trainer(precision="bf16-mixed").',
    needs=(LayersSeen, DeviceSeen),
)
def precision(run: Run) -> Said:
    """The layers compute in a 32-bit type on a device that is fast at bfloat16."""
    for process in run.first_rank:
        types = [name.removeprefix("torch.") for layers in process.of(LayersSeen)[-1:] for name in layers.dtypes]
        if not bf16_is_fast(run):
            yield NotJudged("bfloat16: the device that it trains on here is not fast at it")
        elif types and not {"bfloat16", "float16"}.intersection(types):
            yield Seen(f"the layers return {', '.join(types)}", process.data_where)


def bf16_is_fast(run: Run) -> bool:
    """Whether the device of the run computes faster in bfloat16."""
    return any(event.bf16_is_fast for event in run.all(DeviceSeen))


@rule(
    why="The same device could train on more samples in the same time.",
    fix="Compare with the solution (./workshop.sh diff): what is prepared once, what waits for the device, the precision.",
    runs=SPEED,
    after=(crash,),
)
def slower(speeds: Speeds) -> Said:
    """By itself the program is slower than the solution."""
    own, solution = max(speeds.own, default=0), max(speeds.solution, default=0)
    if not own or not solution:
        yield Seen("by itself it writes no log, so its samples/s are not known")
    elif own * SLOWER < solution:
        yield Seen(f"{own:,.0f} samples/s; the solution reaches {solution:,.0f}, {solution / own:.2f} times as many")


@crash.also(SPEED)
def crash_by_itself(speeds: Speeds) -> Said:
    """It fails outside of the check's recorder."""
    if speeds.failed:
        yield Seen(f"it fails when it runs by itself: {last_error(speeds.failed)}", detail=speeds.failed[-3000:])
