"""Figures of stage 02: ranks, the ring all-reduce, DDP's buckets, the sampler."""

from canvas import (
    BLUE,
    COMMUNICATION,
    GREEN,
    GREY,
    INK,
    NODE,
    NORMAL,
    ORANGE,
    PARTS,
    SKY,
    WHITE,
    YELLOW,
    Canvas,
    figure,
    tint,
)

GPUS = 4  # per node, in "ranks"


@figure(
    "ranks",
    height=424,
    title="Two nodes with four GPUs each: one process per GPU",
    alt="Two nodes with four GPUs each; each GPU is used by one process. Node 0 has ranks 0 to 3 and node 1 has ranks"
    " 4 to 7. On both nodes the local ranks are 0 to 3, and the process with local rank i uses GPU i of its node."
    " All eight processes form one process group, so the world size is 8.",
)
def draw_ranks(canvas: Canvas) -> None:
    """Node, GPU, process, rank, local rank and world size, and how the numbers follow from each other."""
    for node in range(2):
        draw_node(canvas, 20 + node * 410, node)
    canvas.arrow((370, 202), (430, 202), both=True, thick=2)
    canvas.text(400, 186, "network")
    canvas.brace(30, 770, 272, "all processes on all nodes: one process group, WORLD_SIZE = 8")
    meanings = (
        ("RANK", "the number of a process in the whole group: GROUP_RANK × LOCAL_WORLD_SIZE + LOCAL_RANK"),
        ("LOCAL_RANK", 'the number of a process on its node; it selects the GPU: torch.device("cuda", LOCAL_RANK)'),
        ("LOCAL_WORLD_SIZE", "the number of processes on one node: 4"),
        ("WORLD_SIZE", "the number of processes on all nodes: 2 × 4 = 8"),
    )
    for row, (name, meaning) in enumerate(meanings):
        canvas.text(150, 330 + 24 * row, name, align="right", mono=True, bold=True)
        canvas.text(162, 330 + 24 * row, meaning, align="left")


def draw_node(canvas: Canvas, left: float, node: int) -> None:
    """One node with its GPUs, and the process on each of them."""
    canvas.box(left, 44, 350, 218, fill=NODE, round_=8)
    canvas.text(left + 14, 62, f"node {node}", align="left", size=NORMAL, bold=True)
    canvas.text(left + 338, 62, f"GROUP_RANK = {node}, LOCAL_WORLD_SIZE = {GPUS}", align="right")
    for local in range(GPUS):
        x = left + 10 + 84 * local
        canvas.box(x, 80, 78, 78, fill=tint(SKY), edge=BLUE)
        canvas.text(x + 39, 94, "process")
        canvas.text(x + 39, 117, f"rank {node * GPUS + local}", size=NORMAL + 1, bold=True)
        canvas.text(x + 39, 142, f"local rank {local}")
        canvas.arrow((x + 39, 158), (x + 39, 182))
        canvas.box(x, 182, 78, 38, f"GPU {local}\n(cuda:{local})", fill=tint(GREEN, 0.3), edge=GREEN, round_=2)
    draw_link(canvas, left)


def draw_link(canvas: Canvas, left: float) -> None:
    """The fast connection between the GPUs of a node."""
    first, last = left + 49, left + 49 + 84 * (GPUS - 1)
    canvas.line((first, 232), (last, 232), thick=2.5)
    for local in range(GPUS):
        canvas.line((first + 84 * local, 220), (first + 84 * local, 232), thick=2.5)
    canvas.text(left + 175, 248, "fast links between the GPUs of a node (NVLink, xGMI)")


RANKS = 4  # in the ring
Chunks = list[list[str]]  # for each rank, for each chunk: the ranks whose values it sums


def ring(chunks: Chunks, first: int, adds: bool) -> list[tuple[Chunks, set[tuple[int, int]]]]:
    """Return the chunks after each step, and which of them were received in it.

    In each step each rank sends one chunk to the next rank: in the first step the chunk with number ``rank + first``, in
    the next step the chunk before it, and so on.
    """
    states = []
    for step in range(RANKS - 1):
        chunks, before, received = [list(row) for row in chunks], chunks, set()
        for rank in range(RANKS):
            chunk, to = (rank + first - step) % RANKS, (rank + 1) % RANKS
            chunks[to][chunk] = before[rank][chunk] + before[to][chunk] if adds else before[rank][chunk]
            received.add((to, chunk))
        states.append((chunks, received))
    return states


@figure(
    "ring-all-reduce",
    height=546,
    title="Ring all-reduce with N = 4 ranks: reduce-scatter, then all-gather",
    alt="Four ranks in a ring, each with a tensor of four chunks. In three reduce-scatter steps each rank sends one "
    "chunk to the next rank and adds the chunk that it receives; after them each rank has the complete sum of one"
    " chunk. In three all-gather steps the ranks pass on these sums until every rank has all four. Each rank "
    "sends 2(N-1)/N times the size of the tensor: 1.5 times for N = 4.",
)
def draw_ring_all_reduce(canvas: Canvas) -> None:
    """Every step of a ring all-reduce, which the code really executes, and what it costs."""
    draw_ring(canvas)
    start: Chunks = [[letter] * RANKS for letter in "abcd"]
    scattered = ring(start, first=0, adds=True)
    gathered = ring(scattered[-1][0], first=1, adds=False)
    canvas.text(20, 118, "Reduce-scatter: add the received chunk", align="left", size=NORMAL, bold=True)
    draw_states(canvas, 136, [("before", start, set()), *named(scattered)])
    canvas.text(20, 302, "All-gather: keep the received chunk", align="left", size=NORMAL, bold=True)
    draw_states(canvas, 320, [("after the reduce-scatter", scattered[-1][0], set()), *named(gathered)])
    received, complete = (tint(ORANGE), COMMUNICATION, "received in this step"), (tint(GREEN), "", "sum: a + b + c + d")
    canvas.legend(330, 118, (WHITE, "", "ab: a + b"), received, complete)
    draw_cost(canvas)


def named(states: list[tuple[Chunks, set[tuple[int, int]]]]) -> list[tuple[str, Chunks, set[tuple[int, int]]]]:
    """Give each state the name of its step."""
    return [(f"after step {step}", *state) for step, state in enumerate(states, 1)]


def draw_ring(canvas: Canvas) -> None:
    """The ranks, and to which rank each of them sends."""
    for rank, letter in enumerate("abcd"):
        x = 90 + 170 * rank
        canvas.box(x, 44, 110, 30, f"rank {rank}: tensor {letter}", fill=tint(SKY), edge=BLUE)
        if rank < RANKS - 1:
            canvas.arrow((x + 110, 59), (x + 170, 59))
    canvas.arrow(
        (655, 74),
        (655, 92),
        (145, 92),
        (145, 74),
        text="each rank sends one of 4 chunks per step, to the next rank only",
    )


def draw_states(canvas: Canvas, y: float, states: list[tuple[str, Chunks, set[tuple[int, int]]]]) -> None:
    """Tables with a row for each rank and a column for each chunk, one table for each step."""
    for rank in range(RANKS):
        canvas.text(24, y + 45 + 26 * rank, f"rank {rank}", align="left")
    for place, (name, chunks, received) in enumerate(states):
        left = 70 + 182 * place
        canvas.text(left + 80, y + 14, name)
        for rank, row in enumerate(chunks):
            for chunk, summed in enumerate(row):
                is_new, is_complete = (rank, chunk) in received, len(summed) == RANKS
                fill = tint(GREEN) if is_complete else tint(ORANGE) if is_new else WHITE
                hatch = COMMUNICATION if is_new else ""
                text = "sum" if is_complete else "".join(sorted(summed))
                where = (left + 40 * chunk, y + 32 + 26 * rank)
                canvas.box(*where, 40, 26, text, fill=fill, hatch=hatch, round_=0)
        if place < len(states) - 1:
            canvas.arrow((left + 162, y + 84), (left + 180, y + 84))


def draw_cost(canvas: Canvas) -> None:
    """What each rank sends, for several numbers of ranks."""
    canvas.box(20, 470, 760, 62, fill=tint(YELLOW, 0.25), edge=GREY)
    canvas.text(34, 488, "Cost: each rank sends 1/N of the tensor in each of 2(N−1) steps,", align="left", bold=True)
    canvas.text(34, 512, "that is 2(N−1)/N times the size of the tensor:", align="left", bold=True)
    for place, ranks in enumerate((2, 4, 8, 64)):
        x = 530 + 68 * place
        canvas.text(x, 488, f"N = {ranks}")
        canvas.text(x, 512, f"{2 * (ranks - 1) / ranks:.2f} ×")


# In "ddp-buckets": when things begin and how long they take, in parts of a step.
FORWARD, LAYER, LAYERS, STEP = 3.0, 1.0, 6, 0.9
BUCKETS = ((1, 0.5), (2, 1.7), (3, 2.1))  # layers in the bucket, duration of its all-reduce


@figure(
    "ddp-buckets",
    height=420,
    title="DDP communicates gradients in buckets while the backward pass computes",
    alt="Two time lines of one training step. Without overlap, one all-reduce of all gradients starts after the "
    "backward pass. With DDP, the all-reduce of a bucket starts as soon as the gradients in it are ready, while "
    "the backward pass computes the layers before. Only the all-reduce of the last bucket ends after the backward"
    " pass, so the step is shorter.",
)
def draw_buckets(canvas: Canvas) -> None:
    """One training step with and without the overlap of communication and backward pass, on the same scale."""
    compute_end = FORWARD + LAYERS * LAYER
    alone = sum(duration for _, duration in BUCKETS)
    canvas.text(20, 58, "Without overlap: one all-reduce after the backward pass", align="left", size=NORMAL, bold=True)
    draw_lanes(canvas, 72)
    draw_compute(canvas, 72, step_at=compute_end + alone)
    draw_bar(canvas, 118, compute_end, alone, "all-reduce all gradients", tint(ORANGE), COMMUNICATION)
    canvas.text(
        20, 198, "DDP: one all-reduce for each bucket, during the backward pass", align="left", size=NORMAL, bold=True
    )
    draw_lanes(canvas, 212)
    time, ready = 0.0, FORWARD
    for number, (layers, duration) in enumerate(BUCKETS, 1):
        ready += layers * LAYER
        time = max(time, ready)
        canvas.line((at(ready), 212 + 34), (at(ready), 258), dashed=True)
        draw_bar(canvas, 258, time, duration, f"bucket {number}", tint(ORANGE), COMMUNICATION)
        time += duration
    draw_compute(canvas, 212, step_at=time)
    canvas.text(at((compute_end + compute_end + alone) / 2), 89, "GPU waits")
    canvas.text(at((compute_end + time) / 2), 229, "GPU waits")
    end, end_alone = at(time + STEP), at(compute_end + alone + STEP)
    canvas.line((end_alone, 108), (end_alone, 318), dashed=True)
    canvas.arrow((end_alone, 275), (end, 275), both=True)
    canvas.text((end + end_alone) / 2, 262, "time saved")
    draw_bucket_notes(canvas, compute_end, time)


def at(time: float) -> float:
    """The place of a time on the axis."""
    return 118 + 46.5 * time


def draw_lanes(canvas: Canvas, y: float) -> None:
    """The names of the two lanes, and an area for each."""
    for place, name in enumerate(("computation", "communication")):
        canvas.stripe(110, y + 46 * place - 2, 670, 38, NODE)
        canvas.text(104, y + 46 * place + 17, name, align="right")


def draw_bar(canvas: Canvas, y: float, start: float, duration: float, text: str, fill: str, hatch: str = "") -> None:
    """Something that takes time; the text is left out where it does not fit."""
    width = 46.5 * duration
    name = text if width > 8 * len(text) else text.removeprefix("bucket ")
    canvas.box(at(start), y, width, 34, name, fill=fill, hatch=hatch, round_=2)


def draw_compute(canvas: Canvas, y: float, step_at: float) -> None:
    """The forward pass, the backward pass layer by layer from the last one to the first, and the optimizer step."""
    draw_bar(canvas, y, 0, FORWARD, "forward", tint(SKY))
    for place in range(LAYERS):
        name = f"B{LAYERS - place}"
        draw_bar(canvas, y, FORWARD + place * LAYER, LAYER, name, tint(BLUE, 0.35))
    draw_bar(canvas, y, step_at, STEP, "step", tint(GREEN))


def draw_bucket_notes(canvas: Canvas, compute_end: float, time: float) -> None:
    """What the names stand for, and what remains visible of the communication."""
    canvas.brace(at(compute_end) + 4, at(time), 298, "exposed communication")
    canvas.brace(at(FORWARD + LAYER), at(compute_end) - 4, 298, "hidden behind the\nbackward pass")
    canvas.arrow((at(0), 320), (at(0) + 60, 320))
    canvas.text(at(0) + 68, 320, "time", align="left")
    lines = (
        "B6 to B1: the backward pass of layers 6 to 1. step: optimizer.step().",
        "The all-reduce of a bucket starts when all its gradients are ready. A bucket has about 25 MiB, the first 1 MiB.",
    )
    for row, line in enumerate(lines):
        canvas.text(20, 378 + 21 * row, line, align="left")


# torch.randperm(10) with a generator that is seeded with 0, as DistributedSampler(range(10), 3, rank, seed=0) draws it.
ORDER = (4, 1, 7, 5, 3, 9, 0, 8, 6, 2)
DEALT = 3  # ranks


@figure(
    "sampler",
    height=440,
    title="DistributedSampler distributes 10 samples over 3 ranks",
    alt="All ranks shuffle samples 0 to 9 into the same order, 4, 1, 7, 5, 3, 9, 0, 8, 6, 2, because they seed the "
    "generator with seed + epoch. The first two samples are appended to make twelve. Rank 0 gets every third "
    "sample from the first on (4, 5, 0, 2), rank 1 from the second on (1, 3, 8, 4), rank 2 from the third on (7, "
    "9, 6, 1), so samples 4 and 1 are used twice.",
)
def draw_sampler(canvas: Canvas) -> None:
    """How the samples of an epoch are shuffled, padded and distributed over the ranks."""
    total = -(-len(ORDER) // DEALT) * DEALT
    padded = ORDER + ORDER[: total - len(ORDER)]
    steps = ("data set", "1. shuffle", "2. pad", "3. distribute")
    for y, name in zip((74, 152, 152, 262), steps, strict=True):
        if name != "2. pad":
            canvas.text(24, y, name, align="left", size=NORMAL, bold=True)
    for place in range(len(ORDER)):
        canvas.box(120 + 52 * place, 58, 42, 32, str(place), size=NORMAL)
    canvas.arrow(
        (375, 92), (375, 134), text="the same order on all ranks: the generator is seeded with seed + epoch (set_epoch)"
    )
    for place, sample in enumerate(padded):
        fill, hatch = PARTS[place % DEALT]
        x = 120 + 52 * place
        is_extra = place >= len(ORDER)
        canvas.box(x, 136, 42, 32, str(sample), fill=fill, hatch=hatch, dashed=is_extra, size=NORMAL)
        canvas.text(x + 21, 180, f"→ {place % DEALT}")
    canvas.text(112, 180, "to rank", align="right")
    canvas.text(696, 102, "2. pad", size=NORMAL, bold=True)
    canvas.text(696, 123, "the first 2 again")
    for rank in range(DEALT):
        y = 216 + 44 * rank
        fill, hatch = PARTS[rank]
        canvas.text(186, y + 16, f"rank {rank}", align="right", size=NORMAL)
        for place, sample in enumerate(padded[rank::DEALT]):
            is_extra = rank + place * DEALT >= len(ORDER)
            box = (204 + 52 * place, y, 42, 32)
            canvas.box(*box, str(sample), fill=fill, hatch=hatch, dashed=is_extra, size=NORMAL)
        canvas.text(
            420, y + 16, f"positions {rank}, {rank + DEALT}, {rank + 2 * DEALT}, {rank + 3 * DEALT}", align="left"
        )
    canvas.line((548, 216), (556, 216), (556, 336), (548, 336))
    canvas.text(568, 276, "4 samples on each rank:\nall ranks take the same\nnumber of steps", align="left")
    draw_sampler_notes(canvas)


def draw_sampler_notes(canvas: Canvas) -> None:
    """What padding means, and what happens in the next epoch."""
    lines = (
        "Dashed: the sample is used a second time in this epoch, so that all ranks get the same number of samples.",
        "drop_last=True in the sampler: no padding. It drops sample 2, the last one; each rank then gets 3 samples.",
        "Call set_epoch(epoch) before each epoch. Without it, every epoch has the order of epoch 0.",
    )
    for row, line in enumerate(lines):
        canvas.text(24, 372 + 22 * row, line, align="left", colour=INK)
