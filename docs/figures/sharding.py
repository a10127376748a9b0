"""Figures of stages 04 and 05: FSDP, resharding a checkpoint, HSDP, tensor parallelism, ZeRO."""

from canvas import (
    BLUE,
    COMMUNICATION,
    GREEN,
    NODE,
    NORMAL,
    ORANGE,
    PARTS,
    PURPLE,
    SKY,
    VERMILION,
    WHITE,
    YELLOW,
    Canvas,
    figure,
    tint,
)

# In "fsdp": durations, in parts of a step.
GATHER, FORWARD, BACKWARD, SCATTER, STEP, LAYERS = 0.9, 1.3, 2.0, 0.9, 0.9, 3
Span = tuple[float, float]


def at(time: float) -> float:
    """The place of a time on the axis of "fsdp"."""
    return 134 + 47.5 * time


def plan_fsdp() -> tuple[dict[str, list[tuple[int, float, float]]], dict[int, list[Span]], float]:
    """When each layer is gathered, computed and scattered (layer, start, duration), and from when to when it is gathered."""
    lanes: dict[str, list[tuple[int, float, float]]] = {"gather": [], "forward": [], "backward": [], "scatter": []}
    gathered: dict[int, list[Span]] = {layer: [] for layer in range(1, LAYERS + 1)}
    lanes["gather"].append((1, 0, GATHER))
    time = begin = 0.0
    time = GATHER
    for layer in range(1, LAYERS + 1):
        if layer < LAYERS:
            lanes["gather"].append((layer + 1, time, GATHER))
        lanes["forward"].append((layer, time, FORWARD))
        gathered[layer].append((begin, time + FORWARD))
        begin, time = time, time + FORWARD
    begin = time
    lanes["gather"].append((LAYERS, time, GATHER))
    time += GATHER
    for layer in range(LAYERS, 0, -1):
        if layer > 1:
            lanes["gather"].append((layer - 1, time, GATHER))
        lanes["backward"].append((layer, time, BACKWARD))
        gathered[layer].append((begin, time + BACKWARD))
        begin, time = time, time + BACKWARD
        lanes["scatter"].append((layer, time, SCATTER))
    return lanes, gathered, time + SCATTER


@figure(
    "fsdp",
    height=470,
    title="FSDP gathers the parameters layer by layer",
    alt="A time line of one training step of a model with three layers under FSDP. In the forward pass, each layer is"
    " all-gathered just before it is computed and freed after it. In the backward pass, from layer 3 to layer 1, "
    "each layer is all-gathered again and computed, its gradients are reduce-scattered, and it is freed. At most "
    "two layers are gathered at the same time.",
)
def draw_fsdp(canvas: Canvas) -> None:
    """All-gather, compute, free, and in the backward pass also reduce-scatter, with what is in memory meanwhile."""
    lanes, gathered, end = plan_fsdp()
    for name, y in (("all-gather", 84), ("computation", 122), ("reduce-scatter", 160)):
        canvas.stripe(128, y - 2, 652, 34, NODE)
        canvas.text(120, y + 15, name, align="right")
    turn = lanes["backward"][0][1] - GATHER
    canvas.line((at(turn), 54), (at(turn), 316), dashed=True)
    canvas.text(at(turn) - 12, 62, "forward pass", align="right", bold=True)
    canvas.text(at(turn) + 12, 62, "backward pass", align="left", bold=True)
    for lane, y, fill, hatch in (
        ("gather", 84, tint(ORANGE), COMMUNICATION),
        ("forward", 122, tint(SKY), ""),
        ("backward", 122, tint(BLUE, 0.35), ""),
        ("scatter", 160, tint(PURPLE), "\\\\\\\\"),
    ):
        for layer, start, duration in lanes[lane]:
            letter = {"forward": "F", "backward": "B"}.get(lane, "")
            box = (at(start), y, 47.5 * duration, 30)
            canvas.box(*box, f"{letter}{layer}", fill=fill, hatch=hatch, round_=2)
    canvas.box(at(end), 122, 47.5 * STEP, 30, "step", fill=tint(GREEN), round_=2)
    draw_residency(canvas, gathered)
    lines = (
        "1 to 3: the layer. F, B: its forward and backward computation. step: optimizer.step() on the shard of each rank.",
        "all-gather: each rank gets the whole layer from the shards of all ranks. It frees the layer after the computation.",
        "reduce-scatter: averages the gradients over all ranks. Each rank keeps only the gradients of its own shard.",
        "The all-gather of the next layer overlaps with computation, so at most two layers are gathered at the same time.",
    )
    for row, line in enumerate(lines):
        canvas.text(24, 376 + 23 * row, line, align="left")


def draw_residency(canvas: Canvas, gathered: dict[int, list[Span]]) -> None:
    """For each layer: its own shard all the time, and the whole layer while it is gathered."""
    canvas.text(20, 216, "Parameters in the memory of one rank", align="left", bold=True)
    for layer, spans in gathered.items():
        y = 232 + 32 * (layer - 1)
        canvas.text(120, y + 12, f"layer {layer}", align="right")
        canvas.stripe(128, y + 9, 652, 6, tint(GREEN, 0.7))
        for start, end in spans:
            canvas.box(at(start), y, at(end) - at(start), 24, "whole layer", fill=tint(YELLOW, 0.55), round_=2)
    entries = (
        (tint(GREEN, 0.7), "", "own shard (1/N of the layer), always in memory"),
        (tint(YELLOW, 0.55), "", "gathered, until it is freed"),
    )
    canvas.legend(128, 342, *entries)


ROWS = 8  # of the tensor in "reshard"


@figure(
    "reshard",
    height=470,
    title="A checkpoint of 4 ranks, loaded by 2 ranks",
    alt="Four ranks save a tensor of eight rows: each rank writes its two rows into a file of its own, and one rank "
    "writes the file .metadata. Two ranks load it: both read .metadata, then rank 0 reads rows 0 to 3 from the "
    "first two files and rank 1 reads rows 4 to 7 from the last two files.",
)
def draw_reshard(canvas: Canvas) -> None:
    """Who writes which rows into which file, and who reads them with a different number of ranks."""
    canvas.text(96, 62, "4 ranks save", size=NORMAL, bold=True)
    canvas.text(96, 82, "dcp.save(state, …)", mono=True)
    canvas.text(400, 62, "folder step-20", size=NORMAL, bold=True)
    canvas.text(704, 62, "2 ranks load", size=NORMAL, bold=True)
    canvas.text(704, 82, "dcp.load(state, …)", mono=True)
    canvas.box(286, 76, 228, 300, fill=NODE, round_=8)
    for rank, (fill, hatch) in enumerate(PARTS):
        y = 100 + 56 * rank
        draw_rows(canvas, 84, y, (2 * rank, 2 * rank + 1), [(fill, hatch)] * 2)
        canvas.text(74, y + 23, f"rank {rank}", align="right")
        canvas.box(322, y + 6, 156, 34, f"__{rank}_0.distcp", fill=fill, hatch=hatch, mono=True)
        canvas.arrow((190, y + 23), (320, y + 23))
        canvas.arrow((478, y + 23), (608, y + 23))
    canvas.box(322, 328, 156, 34, ".metadata", fill=tint(YELLOW, 0.6), mono=True)
    for rank in range(2):
        y = 100 + 112 * rank
        rows = range(4 * rank, 4 * rank + 4)
        draw_rows(canvas, 610, y, tuple(rows), [PARTS[row // 2] for row in rows])
        canvas.text(726, y + 46, f"rank {rank}", align="left")
    draw_reshard_notes(canvas)


def draw_rows(canvas: Canvas, x: float, y: float, rows: tuple[int, ...], colours: list[tuple[str, str]]) -> None:
    """The rows of the tensor that a rank holds."""
    for place, (row, (fill, hatch)) in enumerate(zip(rows, colours, strict=True)):
        canvas.box(x, y + 23 * place, 104, 23, f"row {row}", fill=fill, hatch=hatch, round_=0)


def draw_reshard_notes(canvas: Canvas) -> None:
    """The purpose of the metadata, and how other numbers of ranks read it."""
    canvas.text(84, 345, "one rank writes it", align="left")
    canvas.arrow((196, 345), (320, 345))
    canvas.arrow((478, 345), (608, 345))
    canvas.text(616, 345, "all ranks read it first", align="left")
    lines = (
        ".metadata says which file contains which part of which tensor.",
        "Each rank reads only the parts that it needs. With 8 ranks, each would read one row: half of one file.",
        "All ranks call dcp.save and dcp.load. No rank ever holds the whole tensor.",
    )
    for row, line in enumerate(lines):
        canvas.text(24, 400 + 23 * row, line, align="left")


@figure(
    "hsdp",
    height=452,
    title="HSDP on a 2 × 2 mesh: shard within a node, replicate between nodes",
    alt="Four ranks in a mesh of two rows and two columns. Each row is a node that holds one copy of the model: ranks"
    " 0 and 2 hold shard 0, ranks 1 and 3 hold shard 1. The rows are the shard groups, which all-gather "
    "parameters and reduce-scatter gradients within a node. The columns are the replicate groups, which "
    "all-reduce gradients between the nodes.",
)
def draw_hsdp(canvas: Canvas) -> None:
    """Which group all-gathers and reduce-scatters, and which one all-reduces."""
    for node in range(2):
        y = 66 + 170 * node
        canvas.box(20, y, 440, 116, fill=NODE, round_=8)
        canvas.text(240, y + 18, f"node {node}: one copy of the model", bold=True)
        for local in range(2):
            draw_mesh_rank(canvas, 40 + 240 * local, y + 32, 2 * node + local, local)
        canvas.arrow((200, y + 68), (280, y + 68), both=True, colour=BLUE, thick=2.4)
        canvas.number(240, y + 52, 1)
    for local in range(2):
        x = 76 + 328 * local
        canvas.arrow((x, 170), (x, 268), both=True, colour=VERMILION, thick=2.4)
        canvas.number(x, 209, 2)
    canvas.text(240, 209, "network between\nthe nodes")
    draw_hsdp_groups(canvas)
    code = 'init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))'
    canvas.text(24, 382, "mesh = " + code, mono=True, align="left")
    canvas.text(24, 406, "fully_shard(layer, mesh=mesh)", mono=True, align="left")
    canvas.text(
        24,
        430,
        "Each GPU stores 1/2 of the model instead of 1/4. In return, less data crosses the network.",
        align="left",
    )


def draw_mesh_rank(canvas: Canvas, x: float, y: float, rank: int, shard: int) -> None:
    """A rank, and which of the two shards it holds."""
    canvas.box(x, y, 160, 72, fill=WHITE)
    canvas.text(x + 80, y + 16, f"rank {rank}", size=NORMAL, bold=True)
    for place, (colour, hatch) in enumerate(PARTS[::2]):
        own = place == shard
        fill, text = (colour, f"shard {place}") if own else (WHITE, "")
        canvas.box(x + 8 + 72 * place, y + 32, 72, 30, text, fill=fill, hatch=hatch * own, dashed=not own, round_=0)


def draw_hsdp_groups(canvas: Canvas) -> None:
    """The two kinds of groups, and what each of them communicates."""
    groups = (
        (
            66,
            1,
            "shard groups: the rows",
            ("ranks 0, 1 and ranks 2, 3", "all-gather parameters (forward, backward)", "reduce-scatter gradients"),
        ),
        (
            200,
            2,
            "replicate groups: the columns",
            ("ranks 0, 2 and ranks 1, 3", "all-reduce the gradients of their shard:", "half of all gradients"),
        ),
    )
    for y, number, name, lines in groups:
        canvas.box(480, y, 300, 116, fill=WHITE)
        canvas.number(500, y + 22, number)
        canvas.text(518, y + 22, name, align="left", bold=True)
        for row, line in enumerate(lines):
            canvas.text(492, y + 50 + 23 * row, line, align="left")
    canvas.text(480, 340, "In the backward pass, the reduce-scatter\ncomes first, then the all-reduce.", align="left")


@figure(
    "tensor-parallel",
    height=456,
    title="Tensor parallelism: an MLP whose matrices are sharded over 2 ranks",
    alt="An MLP on two ranks that have the same input X. The first matrix A is sharded by columns, so each rank "
    "computes one half of the activations and applies GeLU without communication. The second matrix B is sharded "
    "by rows, so each rank gets a partial sum of the full size. One all-reduce adds the partial sums; both ranks "
    "then have the output Z.",
)
def draw_tensor_parallel(canvas: Canvas) -> None:
    """Column-parallel, then row-parallel, and one all-reduce at the end."""
    heads = ((192, "column-parallel", "ColwiseParallel()"), (484, "row-parallel", "RowwiseParallel()"))
    for x, name, style in heads:
        canvas.text(x, 58, name, bold=True)
        canvas.text(x, 76, style, mono=True)
    for rank in range(2):
        draw_mlp(canvas, 92 + 136 * rank, rank)
    canvas.box(622, 92, 60, 254, "all-\nreduce:\n\nZ0 + Z1", fill=tint(ORANGE), hatch=COMMUNICATION)
    lines = (
        "Y = GeLU(X A),  Z = Y B,  with  A = [A0 | A1]  (columns)  and  B = [B0 ; B1]  (rows):  Z = Y0 B0 + Y1 B1.",
        "GeLU acts on each element, so Y0 and Y1 need no communication. The forward pass of the MLP has one all-reduce,",
        "and its backward pass has one for the gradient of X. The ranks process the same samples.",
    )
    for row, line in enumerate(lines):
        canvas.text(24, 384 + 24 * row, line, align="left")


def draw_mlp(canvas: Canvas, y: float, rank: int) -> None:
    """The part of one rank: X, its half of A, its half of Y, its half of B, its partial sum of Z."""
    fill, hatch = PARTS[::2][rank]
    canvas.box(20, y, 582, 118, fill=NODE, round_=8)
    canvas.text(32, y + 18, f"rank {rank}", align="left", size=NORMAL, bold=True)
    middle = y + 70
    canvas.box(34, middle - 30, 60, 60, "X", fill=WHITE, round_=0, size=NORMAL)
    canvas.text(114, middle, "×", size=NORMAL)
    for place in range(2):
        own = place == rank
        box = (132 + 60 * place, middle - 30, 60, 60)
        canvas.box(
            *box, f"A{rank}" if own else "", fill=fill if own else WHITE, hatch=hatch * own, dashed=not own, round_=0
        )
    canvas.arrow((258, middle), (324, middle))
    canvas.text(290, middle - 14, "GeLU")
    canvas.box(328, middle - 30, 60, 60, f"Y{rank}", fill=fill, hatch=hatch, round_=0, size=NORMAL)
    canvas.text(408, middle, "×", size=NORMAL)
    for place in range(2):
        own = place == rank
        box = (428, middle - 38 + 38 * place, 112, 38)
        canvas.box(
            *box, f"B{rank}" if own else "", fill=fill if own else WHITE, hatch=hatch * own, dashed=not own, round_=0
        )
    canvas.arrow((544, middle), (620, middle))
    canvas.text(574, middle - 14, f"Z{rank}")
    canvas.arrow((682, middle), (712, middle))
    canvas.box(714, middle - 30, 60, 60, "Z", fill=WHITE, round_=0, size=NORMAL)


# The ZeRO paper's mixed precision Adam: bytes per parameter.
PARAMETERS, GRADIENTS, OPTIMIZER = 2.0, 2.0, 4.0 + 4.0 + 4.0
ZERO_GPUS, ZERO_MODEL = 8, 7e9


def zero_bytes(stage: int, gpus: int) -> tuple[float, float, float]:
    """Bytes per parameter on each GPU: parameters, gradients, optimizer state."""
    return (
        PARAMETERS / (gpus if stage >= 3 else 1),
        GRADIENTS / (gpus if stage >= 2 else 1),
        OPTIMIZER / (gpus if stage >= 1 else 1),
    )


@figure(
    "zero",
    height=548,
    title="ZeRO: bytes per parameter on each of 8 GPUs",
    alt="Stacked bars of the bytes per parameter on each of 8 GPUs, for Adam in mixed precision, without activations."
    " ZeRO-0, which is DDP: 2 for parameters, 2 for gradients and 12 for the optimizer state, 16 in total. "
    "ZeRO-1: 5.5. ZeRO-2: 3.75. ZeRO-3: 2. For 7 billion parameters these are 112, 38.5, 26.25 and 14 GB.",
)
def draw_zero(canvas: Canvas) -> None:
    """What each stage of ZeRO shards, and how many bytes per parameter remain on each GPU."""
    floor, scale = 366, 17.0
    for level in (0, 4, 8, 12, 16):
        end = 450 if level == 12 else 780  # the formulas are beside it
        canvas.line((70, floor - scale * level), (end, floor - scale * level), colour="#c9ccd1", thick=0.8)
        canvas.text(60, floor - scale * level, str(level), align="right")
    canvas.text(60, 58, "bytes per parameter", align="left")
    names = ("ZeRO-0 (DDP)", "ZeRO-1", "ZeRO-2", "ZeRO-3 (as FSDP)")
    sharded = ("nothing is sharded", "shards: optimizer state", "… and gradients", "… and parameters")
    for stage in range(4):
        draw_zero_bar(canvas, 90 + 176 * stage, floor, scale, stage)
        middle = 90 + 176 * stage + 60
        canvas.text(middle, floor + 18, names[stage], size=NORMAL, bold=True)
        canvas.text(middle, floor + 38, sharded[stage])
        canvas.text(middle, floor + 58, f"{sum(zero_bytes(stage, ZERO_GPUS)) * ZERO_MODEL / 1e9:g} GB")
    entries = (
        (tint(BLUE, 0.45), "", "parameters (16-bit): 2"),
        (tint(ORANGE), COMMUNICATION, "gradients (16-bit): 2"),
        (tint(GREEN), "xxx", "optimizer state (32-bit): 4 + 4 + 4"),
    )
    canvas.legend(60, 454, *entries)
    notes = (
        "Counted as in the ZeRO paper: Adam in mixed precision, 16 bytes per parameter, without activations and buffers.",
        "GB: on each GPU, for a model of 7 billion parameters.",
        "AdamW in float32 also needs 16 bytes per parameter, but divided differently: 4 + 4 + 8.",
    )
    for row, note in enumerate(notes):
        canvas.text(60, 484 + 22 * row, note, align="left")
    formulas = ("ZeRO-1:  2 + 2 + 12/N", "ZeRO-2:  2 + (2 + 12)/N", "ZeRO-3:  (2 + 2 + 12)/N")
    canvas.box(470, 102, 290, 88, fill=WHITE)
    canvas.text(490, 120, "bytes per parameter on N GPUs:", align="left")
    for row, formula in enumerate(formulas):
        canvas.text(490, 140 + 18 * row, formula, align="left", mono=True)


def draw_zero_bar(canvas: Canvas, x: float, floor: float, scale: float, stage: int) -> None:
    """One stacked bar; a part too low for a label has it beside the bar."""
    colours = ((tint(BLUE, 0.45), ""), (tint(ORANGE), COMMUNICATION), (tint(GREEN), "xxx"))
    y, beside = floor, floor - 10
    for value, (fill, hatch) in zip(zero_bytes(stage, ZERO_GPUS), colours, strict=True):
        height = scale * value
        y -= height
        text = f"{value:g}"
        canvas.box(x, y, 120, height, text if height > 20 else "", fill=fill, hatch=hatch, round_=0)
        if height <= 20:
            beside = min(beside, y + height / 2)
            canvas.text(x + 126, beside, text, align="left")
            beside -= 16
    canvas.text(x + 60, y - 16, f"{sum(zero_bytes(stage, ZERO_GPUS)):g}", size=NORMAL + 1, bold=True)
