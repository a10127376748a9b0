"""Slow training: why the device waits, and which precision it computes in."""

import itertools

from workshop.check.evidence.events import BatchLoaded, DeviceSeen, LayersSeen, SamplesPrepared, ValuesAsked
from workshop.check.evidence.real import Speeds, last_error
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import crash
from workshop.check.rules.rule import NotJudged, Said, Seen, rule
from workshop.check.rules.words import plural
from workshop.check.scenarios import SPEED

SLOWER = 1.15  # times the time of the solution


@rule(
    why="In every epoch the device waits while one CPU core prepares the samples one by one.",
    fix="Transform all samples once into a TensorDataset on the device; use a BatchSampler and DataLoader(batch_size=None).",
    needs=(SamplesPrepared,),
    origin="loader:itself",
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
            yield Seen(f"the transform still ran on {plural(again, 'sample')} after step 1", process.data_where)
        elif whole > 0 and waited > 0.3 * whole:
            yield Seen(f"the steps wait for batches during {waited / whole:.0%} of the time", process.data_where)


@rule(
    why="A step that reads a value waits until the device has computed it, and the device then waits for the next step.",
    fix="Call item() or tolist() once, after the last step of the epoch; until then keep the loss as a tensor: loss.detach().",
    needs=(ValuesAsked,),
)
def host_sync(run: Run) -> Said:
    """Each step reads the value of a tensor."""
    for process in run.first_rank:
        asked = process.of(ValuesAsked)
        per_step = sorted(after.count - before.count for before, after in itertools.pairwise(asked))
        middle = per_step[len(per_step) // 2] if per_step else 0
        if middle >= 1:
            yield Seen(f"each step reads the value of a tensor ({plural(middle, 'time')})", asked[-1].where)


@rule(
    why="This device computes several times as fast in bfloat16 as in float32.",
    fix='Compute under torch.autocast(device.type, dtype=torch.bfloat16); with Lightning: Trainer(precision="bf16-mixed").',
    needs=(LayersSeen, DeviceSeen),
    origin="call:MixedPrecisionPolicy",
)
def precision(run: Run) -> Said:
    """The layers compute in a 32-bit type, although the device is faster in bfloat16."""
    for process in run.first_rank:
        types = [name.removeprefix("torch.") for layers in process.of(LayersSeen)[-1:] for name in layers.dtypes]
        if not bf16_is_fast(run):
            yield NotJudged("bfloat16: the device used here does not compute faster in it")
        elif types and not {"bfloat16", "float16"}.intersection(types):
            yield Seen(f"the outputs of the layers are {', '.join(types)}", process.data_where)


def bf16_is_fast(run: Run) -> bool:
    """Whether the device of the run computes faster in bfloat16."""
    return any(event.bf16_is_fast for event in run.all(DeviceSeen))


@rule(
    why="The same device could train on more samples in the same time.",
    fix="Find with torch.profiler where the time goes, and compare with the solution (./workshop.sh diff).",
    runs=SPEED,
    after=(crash,),
)
def slower(speeds: Speeds) -> Said:
    """Without the check the program is slower than the solution."""
    own, solution = max(speeds.own, default=0), max(speeds.solution, default=0)
    if not own or not solution:
        yield Seen("without the check the program writes no log, so its throughput is unknown")
    elif own * SLOWER < solution:
        pairs = [one * SLOWER < other for one, other in zip(speeds.own, speeds.solution, strict=False)]
        if 3 * sum(pairs) < 2 * len(pairs):
            spread = f"between {min(speeds.own):,.0f} and {own:,.0f} samples per second"
            yield NotJudged(f"the speed: {spread}, because other programs use this machine")
            return
        yield Seen(f"{own:,.0f} samples per second; the solution reaches {solution:,.0f} ({solution / own:.2f}x)")


@crash.also(SPEED)
def crash_by_itself(speeds: Speeds) -> Said:
    """The program fails when it runs without the check."""
    if speeds.failed:
        yield Seen(f"without the check it fails: {last_error(speeds.failed)}", detail=speeds.failed[-3000:])
