"""Programs on GPUs: what CUDA and NCCL refuse, what is on the wrong GPU, and why the CPU waits. Judged on pretended GPUs."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from workshop.check.evidence.events import (
    Autocasting,
    DeviceChosen,
    GpuMemory,
    GpuNoted,
    Loaded,
    Raised,
    StepTaken,
    Wrapped,
)
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.rules.processes import device_index, device_shared, of_one_node
from workshop.check.rules.rule import NotJudged, Rule, Said, Seen, rule
from workshop.check.rules.speed import data_per_sample, host_sync
from workshop.check.rules.words import named, plural
from workshop.check.scenarios import DEVICES, TWO_NODES

NUMBERS = "Give such a function numbers of Python where it needs sizes or indices, and not tensors on the GPU."
SENT = "Send tensors that are on the CPU: call cpu() on each before broadcast_object_list, gather_object or all_gather_object."
STEPS = 3  # steps of a process from which on a rule judges what every step does
REFUSED = ("two-devices", "numpy", "generator", "forked", "cpu-tensor", "no-such-gpu", "same-gpu")
OF_ONE_NODE = re.compile(r"num_nodes|[Ii]nvalid rank|does not match the world size")
COPIES = ("pageable", "pageable-non-blocking", "pinned", "pinned-non-blocking")
WAITS = ("wait", "synchronize")
LONG = 160  # letters of a message
MANY = 4  # waits of a library in a step; GradScaler has one or two
GROWTH = 512  # bytes by which every step increases the memory: the smallest piece that PyTorch takes from a GPU


def gpu_rule(
    *, why: str, fix: str, mild: bool = False, anywhere: bool = True, **settings: Any
) -> Callable[[Callable[[Run], Said]], Rule]:
    """Declare a rule about a run on pretended GPUs, on one node or on two; ``mild``: it is advice about speed and memory."""

    def declare(function: Callable[[Run], Said]) -> Rule:
        flags = {"mild": mild, "anywhere": anywhere, "always": anywhere and not mild}
        made = rule(why=why, fix=fix, runs=DEVICES, needs=(GpuNoted,), **flags, **settings)(function)
        order = {name: settings[name] for name in ("after", "instead_of") if name in settings}
        made.also(TWO_NODES, active=True, **order)(function)
        return made

    return declare


def _bytes(process: Process, default: int = 0) -> list[int]:
    """Return the bytes on all GPUs after each step of a process; ``default`` if it takes no step."""
    return [sum(event.bytes.values()) for event in process.of(GpuMemory)] or [default]


def _noted(run: Run, *kinds: str) -> Iterator[tuple[Process, GpuNoted]]:
    """Yield what the processes have noted of these kinds; for each kind and line only once."""
    seen: set[tuple[str, str]] = set()
    for process in run.processes:
        for event in process.of(GpuNoted):
            if event.kind in kinds and (event.kind, event.where) not in seen:
                seen.add((event.kind, event.where))
                yield process, event


def _failed(run: Run, *kinds: str) -> Iterator[GpuNoted]:
    """Yield what ended the run: a refusal of these kinds that the program did not catch."""
    if any(run.all(Raised)):
        yield from itertools.islice((event for _, event in _noted(run, *kinds)), 1)


@gpu_rule(
    why="An operation cannot use tensors on different devices. On the CPU the mistake is invisible.",
    fix="Move the model and every batch with .to(device); create tensors inside forward() with device=x.device.",
)
def two_devices(run: Run) -> Said:
    """An operation gets tensors of different devices."""
    for event in _failed(run, "two-devices"):
        yield Seen(
            f"on a machine with GPUs the program fails: an operation gets tensors on {event.detail}", event.where
        )


@gpu_rule(
    why="CUDA refuses some operations that work on the CPU.",
    fix='Copy a tensor with .cpu() before numpy(), create generators with torch.Generator("cuda"), and use no GPU in a forked '
    "process.",
)
def gpu_refused(run: Run) -> Said:
    """The program calls a different operation that CUDA refuses."""
    texts = {
        "numpy": "numpy() cannot read a tensor on a GPU",
        "generator": "a generator of the CPU cannot draw random numbers on a GPU",
        "forked": "a forked process cannot use a GPU that its parent has used",
    }
    for event in _failed(run, *texts):
        yield Seen(f"on a machine with GPUs the program fails: {texts[event.kind]}", event.where)
    state = next((event for event in run.all(Raised) if event.message == "RNG state must be a torch.ByteTensor"), None)
    if state:
        fix = 'Load the checkpoint with map_location="cpu": load_state_dict() copies to the GPU, and random states must stay.'
        yield Seen("a state of the random numbers is on a GPU, but PyTorch wants it on the CPU", state.where, fix=fix)
        return
    refused = (event for event in run.all(Raised) if event.message.startswith("DistributedDataParallel device_ids"))
    if error := next(refused, None):
        fix = "Move the model to the GPU with .to(device) before you pass it to DistributedDataParallel."
        yield Seen("DDP refuses device_ids: the model is not on this GPU", error.where, fix=fix)
    elif run.failed and not any(event.kind in REFUSED for event in run.all(GpuNoted)):
        from workshop.pretend.installation import unsupported  # imports torch, which `workshop hint` does not need

        found = run.first_exception()
        message, *_ = (found[1].message if found else "").splitlines() or [""]
        if reason := unsupported():
            yield NotJudged(f"what GPUs show: {reason}")
        elif run.hung and not found:
            if not of_one_node(run):  # rank_of_node names it
                yield NotJudged("what GPUs show: the run on pretended GPUs takes too long")
        elif found and (found[1].type == "FileExistsError" or OF_ONE_NODE.search(message)):
            return  # folder_made_twice names it; or it is for one node, and then runs on one
        elif message and not re.search(r"aten::|c10d::|\bpretend|backend", message):
            shown = message if len(message) <= LONG else f"{message[:LONG]} ..."  # some errors show a whole tensor
            yield NotJudged(f"what GPUs show (on pretended GPUs the program fails: {shown})")
        else:
            at = f" at {found[1].where}" if found and found[1].where else ""
            yield NotJudged(f"what GPUs show: the pretended GPUs of the check do not support what the program does{at}")


@gpu_rule(
    why="NCCL communicates between GPUs only. On the CPU, gloo accepts the same line.",
    fix='Move the tensor with .to(device) first, or create the group with backend="cpu:gloo,cuda:nccl".',
)
def nccl_on_cpu(run: Run) -> Said:
    """A collective of NCCL gets a tensor on the CPU."""
    for event in _failed(run, "cpu-tensor"):
        yield Seen(f"with NCCL the program fails: {event.detail} gets a tensor on the CPU", event.where)


@gpu_rule(
    why="NCCL refuses two ranks on one GPU. The objects of all_gather_object, broadcast_object_list and others go through the "
    "current GPU of each rank, whatever GPU its tensors are on.",
    fix="In each process, call torch.accelerator.set_device_index(local_rank) before the first collective.",
    instead_of=(device_index,),
)
def gpu_of_two_ranks(run: Run) -> Said:
    """A collective of NCCL gets tensors or objects of two ranks on the same GPU."""
    for event in _failed(run, "same-gpu"):
        ranks, gpu, *objects = event.detail.split(", ")
        chosen = {choice.index for choice in run.all(DeviceChosen) if choice.index is not None}
        other = (
            not objects and len(chosen) > 1
        )  # the ranks have chosen different GPUs, but this tensor is on another one
        fix = "Create the tensor on the GPU that the rank has chosen, or move it there." if other else ""
        what = f"objects of {ranks} go through the same {gpu}" if objects else f"{ranks} use the same {gpu}"
        where = event.where if objects or len(chosen) != 1 else run.where(DeviceChosen)
        yield Seen(f"on a machine with GPUs the program fails: {what}", where, fix=fix)


@gpu_rule(
    why="Each process of a node needs its own GPU, and numbers count only the GPUs in CUDA_VISIBLE_DEVICES.",
    fix="Remove the line that sets CUDA_VISIBLE_DEVICES; set it in the command or in the job script, to one GPU per process.",
    instead_of=(device_index,),
    origin="text:environ.*CUDA_VISIBLE_DEVICES",
)
def gpu_hidden(run: Run) -> Said:
    """The program asks for a GPU that its own CUDA_VISIBLE_DEVICES hides."""
    for event in _failed(run, "no-such-gpu"):
        gpu, _, variable = event.detail.partition(", with ")
        if variable:
            yield Seen(
                f"on a machine with GPUs the program fails: it asks for {gpu}, and has set {variable}", event.where
            )


@device_index.also(DEVICES, needs=(GpuNoted,))
def no_such_gpu(run: Run) -> Said:
    """The program asks for a GPU that its node does not have."""
    for event in _failed(run, "no-such-gpu"):
        yield Seen(f"the program asks for {event.detail}, which the node does not have", event.where)
    for raised in run.all(Raised):
        # DistributedDataParallel has one stream for each GPU of the node in a list.
        if raised.type == "IndexError" and "_get_stream" in raised.traceback:
            seen = "DistributedDataParallel gets device_ids with a GPU that the node does not have"
            yield Seen(seen, run.where(Wrapped) or raised.where)
            return


device_index.also(TWO_NODES, after=(device_index,), needs=(GpuNoted,))(no_such_gpu)


device_shared.also(TWO_NODES, after=(device_index,), needs=(GpuNoted,))(device_shared.detectors[0].function)


@gpu_rule(
    why="The GPUs are idle, and a CPU trains many times slower.",
    fix="Choose the GPU by the local rank: torch.accelerator.set_device_index(local_rank), and move the model there.",
    mild=True,  # the options of a program may ask for the CPU
    after=(device_index, device_shared),
)
def gpu_unused(run: Run) -> Said:
    """Processes train on the CPU although they see GPUs."""
    idle = [process for process in run.ranks if not any(_bytes(process, default=1))]
    if idle and not run.failed:
        yield Seen(f"on a machine with GPUs, {named(idle[0])} trains on the CPU", idle[0].step_where)


@gpu_rule(
    why="The GPU of rank 0 then also stores these tensors once for every other rank, and can run out of memory.",
    fix='Pass map_location="cpu" to torch.load: load_state_dict() copies to the GPU of each rank.',
)
def loaded_elsewhere(run: Run) -> Said:
    """A rank loads tensors onto the GPU of another rank."""
    for process, event in _noted(run, "loaded-elsewhere"):
        memory = next((each.bytes for each in reversed(process.of(GpuMemory))), {})
        own = max(memory, key=memory.__getitem__, default=None)  # a program can use a GPU that is not the current one
        if event.detail != f"GPU {own}":
            seen = f"{named(process)} loads tensors onto {event.detail}, which is not its own"
            # To unpickle objects that it receives, PyTorch also calls torch.load, without a path.
            loads = any(each.where == event.where and each.path for each in process.of(Loaded))
            yield Seen(seen, event.where, fix="" if loads else SENT)
            return


@gpu_rule(
    why="A step that waits for the GPU leaves it without work until the CPU has issued the next operations.",
    fix="Keep values on the GPU with detach(), and read them with item() once per epoch; synchronize only to measure times.",
    mild=True,
    after=(host_sync,),
)
def step_waits(run: Run) -> Said:
    """Each step waits for the GPU."""
    for process in run.ranks[:1]:
        lines = _each_step(process, WAITS)
        if lines:
            (where, times), *_ = lines.most_common(1)
            yield Seen(f"the CPU waits for the GPU in every step ({plural(times, 'time')} at this line)", where)
        inside = {event.where: event.detail for event in process.of(GpuNoted) if event.kind == "wait-inside"}
        for where, times in _each_step(process, ("wait-inside",)).items():
            if times >= MANY:
                seen = f"a library waits for the GPU {times} times in every step"
                if inside[where]:
                    # What a private function of a library gets, the library has made itself.
                    if not inside[where].startswith("in _"):
                        yield Seen(f"{seen}, {inside[where]}", where, fix=NUMBERS)
                elif any(process.of(Loaded)):
                    cause = "an optimizer waits if its step count is on the GPU"
                    yield Seen(
                        f"{seen}: {cause}", where, fix='Load the optimizer with torch.load(..., map_location="cpu").'
                    )


@gpu_rule(
    why="Each copy takes time, and the GPU waits for the batch.",
    fix="Move all samples to the GPU with .to(device) before the first epoch, and select each batch with a tensor of indices "
    "that is also on the GPU.",
    mild=True,
    anywhere=False,
    after=(data_per_sample,),
)
def step_copies(run: Run) -> Said:
    """Each step copies from the CPU to the GPU, although all data fits on the GPU."""
    for process in run.ranks[:1]:
        for where, times in _each_step(process, COPIES).most_common(1):
            yield Seen(f"every step copies to the GPU ({plural(times, 'time')} at this line)", where)


@gpu_rule(
    why="PyTorch keeps freed memory to use it again. After empty_cache() it must ask the driver again, which stops the GPU.",
    fix="Remove torch.cuda.empty_cache() from the loop; it does not make more memory available to this program.",
    mild=True,
)
def cache_emptied(run: Run) -> Said:
    """Each step calls torch.cuda.empty_cache()."""
    for process in run.ranks[:1]:
        for where in _each_step(process, ("empty-cache",)):
            yield Seen("torch.cuda.empty_cache() is called in every step", where)


def _each_step(process: Process, kinds: tuple[str, ...]) -> Counter[str]:
    """Return the lines that note one of these kinds in every step but the first, each with how often in the last step."""
    steps: list[Counter[str]] = [Counter()]
    for _, event in process.events:
        if isinstance(event, StepTaken):
            steps.append(Counter())
        elif isinstance(event, GpuNoted) and event.kind in kinds:
            steps[-1][event.where] += 1
    whole = steps[1:-1]  # from one step to the next
    if len(whole) < STEPS:
        return Counter()
    always = set.intersection(*map(set, whole))
    return Counter({where: whole[-1][where] for where in always})


@gpu_rule(
    why="From memory that is not pinned, CUDA cannot copy in the background, so the CPU still waits for the copy.",
    fix="Pass pin_memory=True to the DataLoader, or call pin_memory() on the tensor.",
    mild=True,
)
def copy_not_pinned(run: Run) -> Said:
    """A copy with non_blocking=True comes from memory that is not pinned."""
    for process in run.ranks[:1]:
        for where in _each_step(process, ("pageable-non-blocking",)):
            yield Seen("non_blocking=True has no effect: the memory is not pinned", where)


@gpu_rule(
    why="The memory is pinned, so the CPU need not wait for the copy: it could already issue the forward pass.",
    fix="Copy with .to(device, non_blocking=True): later operations on the GPU wait for the copy automatically.",
    mild=True,
)
def copy_blocks(run: Run) -> Said:
    """A copy from pinned memory waits."""
    for process in run.ranks[:1]:
        for where in _each_step(process, ("pinned",)):
            yield Seen("the batch is in pinned memory, but its copy to the GPU waits", where)


@gpu_rule(
    why="Autocast changes only operations of its own device type, so on a GPU everything is computed in float32.",
    fix="Pass the type of the device: torch.autocast(device.type, dtype=torch.bfloat16).",
)
def autocast_elsewhere(run: Run) -> Said:
    """Autocast is entered for the CPU while the model computes on a GPU."""
    for process in run.ranks[:1]:
        others = [event for event in process.of(Autocasting) if event.device == "cpu"]
        if others and any(_bytes(process)):
            yield Seen("the model is on a GPU, but autocast is entered for the CPU", others[0].where)


@gpu_rule(
    why="NCCL has to guess the GPU of a barrier. If the guess is wrong, the run hangs or uses a second GPU.",
    fix="Call torch.accelerator.set_device_index(local_rank) before the first collective.",
)
def barrier_before_gpu(run: Run) -> Said:
    """A barrier comes before the process has chosen its GPU."""
    for process, event in itertools.islice(_noted(run, "barrier"), 1):
        yield Seen(f"{named(process)} is in a barrier before it has chosen its GPU", event.where)


@gpu_rule(
    why="Each step keeps more tensors on the GPU, often with the graph of a loss, until the memory is full.",
    fix="Add up loss.detach(), or move outputs with .cpu(). A list of detached losses stays small if you empty it in each epoch.",
    mild=True,
)
def memory_grows(run: Run) -> Said:
    """The memory on the GPU grows with every step."""
    for process in run.ranks[:1]:
        sizes = _bytes(process)[1:]  # the first step creates the state of the optimizer
        growth = [after - before for before, after in itertools.pairwise(sizes)]
        if len(growth) >= STEPS and min(growth) >= GROWTH:
            yield Seen(f"each step leaves {min(growth):,} more bytes on the GPU", process.step_where)


@gpu_rule(
    why="Random numbers on this GPU, for example for dropout, differ in every run.",
    fix="Call torch.manual_seed(seed), which seeds the CPU and all GPUs, or choose the GPU before torch.cuda.manual_seed().",
)
def gpu_not_seeded(run: Run) -> Said:
    """A process draws random numbers on a GPU other than the one that it has seeded."""
    for process, event in itertools.islice(_noted(run, "not-seeded"), 1):
        seen = f"{named(process)} has seeded a different GPU than {event.detail}, on which it draws random numbers"
        yield Seen(seen, event.where)


@gpu_rule(
    why="bfloat16 has the range of float32, so no gradient underflows. The scaler makes the CPU wait for the GPU in each step.",
    fix="Use torch.amp.GradScaler only with float16; leave it out with bfloat16.",
    mild=True,
)
def scaler_unneeded(run: Run) -> Said:
    """Gradients are scaled although autocast computes in bfloat16."""
    for process in run.ranks[:1]:
        kinds = {event.dtype for event in process.of(Autocasting)}
        for event in [event for event in process.of(GpuNoted) if event.kind == "scaled" and kinds == {"bfloat16"}][:1]:
            yield Seen("a GradScaler scales the loss, but autocast computes in bfloat16", event.where)
