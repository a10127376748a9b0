"""Figures of stage 06: the schedules of a pipeline, ring attention, and a mesh with several axes."""

from canvas import (
    BLUE,
    NODE,
    NORMAL,
    PARTS,
    PURPLE,
    SKY,
    VERMILION,
    WHITE,
    Canvas,
    figure,
    tint,
)

# In "pipeline-schedules".
STAGES, MICROBATCHES = 4, 8
FORWARD, BACKWARD = 1, 2  # durations
Work = tuple[str, int]  # "F" or "B", and the number of the micro-batch


def order_of(schedule: str, stage: int) -> list[Work]:
    """Return the order in which a stage computes its passes."""
    numbers = range(MICROBATCHES)
    if schedule == "GPipe":
        return [("F", number) for number in numbers] + [("B", number) for number in numbers]
    order, ahead = [], STAGES - 1 - stage
    for number in range(MICROBATCHES + ahead):
        order += [("F", number)] if number < MICROBATCHES else []
        order += [("B", number - ahead)] if number >= ahead else []
    return order


def start_times(schedule: str) -> dict[tuple[int, Work], int]:
    """Return when each pass of each stage starts, as early as the stages before (or after) it allow."""
    orders = {stage: order_of(schedule, stage) for stage in range(STAGES)}
    starts: dict[tuple[int, Work], int] = {}
    ends: dict[tuple[int, Work], int] = {}
    free = dict.fromkeys(orders, 0)
    while any(orders.values()):
        for stage, order in orders.items():
            if not order:
                continue
            kind, number = order[0]
            before = stage - 1 if kind == "F" else stage + 1
            needed = ends.get((before, (kind, number))) if before in orders else 0
            if needed is None:
                continue  # the neighbor has not computed it yet
            start = max(free[stage], needed)
            starts[stage, (kind, number)] = start
            free[stage] = ends[stage, (kind, number)] = start + (FORWARD if kind == "F" else BACKWARD)
            order.pop(0)
    return starts


@figure(
    "pipeline-schedules",
    height=440,
    title="Two schedules of a pipeline with 4 stages and 8 micro-batches",
    alt="Two time lines of four ranks. With GPipe, each rank computes the forward passes of micro-batches 0 to 7, then "
    "their backward passes. With 1F1B, rank 3 alternates between forward and backward passes from the start, and "
    "ranks 2, 1 and 0 do so after one, two and three more forward passes. Both schedules end at the same time. With "
    "GPipe, each rank keeps the activations of eight micro-batches; with 1F1B, ranks 0 to 3 keep four, three, two and one.",
)
def draw_pipeline_schedules(canvas: Canvas) -> None:
    """One row for each rank, and one box for each pass."""
    for name, y, kept in (("GPipe", 62, "8, 8, 8, 8"), ("1F1B", 214, "4, 3, 2, 1")):
        canvas.text(24, y, name, align="left", size=NORMAL, bold=True)
        words = f"micro-batches that ranks 0 to 3 keep at most: {kept}"
        canvas.text(776, y, words, align="right")
        draw_schedule(canvas, name, y + 16)
    entries = (
        (tint(SKY), "", "F: forward pass"),
        (tint(BLUE, 0.35), "", "B: backward pass"),
        (NODE, "", "bubble: the rank computes nothing"),
    )
    canvas.legend(100, 360, *entries)
    lines = (
        "The number is the micro-batch. A backward pass takes twice as long as a forward pass.",
        "Both steps take (8 + 4 - 1) × 3 = 33 units of time, of which each rank waits 9: (p - 1)/(m + p - 1) = 3/11.",
    )
    for row, line in enumerate(lines):
        canvas.text(24, 390 + 23 * row, line, align="left")


def draw_schedule(canvas: Canvas, name: str, y: float) -> None:
    """The passes of all ranks in one schedule."""
    left, unit = 86, 20.9
    end = (MICROBATCHES + STAGES - 1) * (FORWARD + BACKWARD)
    for rank in range(STAGES):
        canvas.stripe(left, y + 29 * rank, unit * end, 26, NODE)
        canvas.text(78, y + 29 * rank + 13, f"rank {rank}", align="right")
    for (rank, (kind, number)), start in start_times(name).items():
        duration, fill = (FORWARD, tint(SKY)) if kind == "F" else (BACKWARD, tint(BLUE, 0.35))
        box = (left + unit * start, y + 29 * rank, unit * duration, 26)
        canvas.box(*box, f"{kind}{number}", fill=fill, round_=1)


@figure(
    "ring-attention",
    height=440,
    title="Ring attention on 4 ranks, with the pieces in zig-zag order",
    alt="Left: four ranks in a ring. Ranks 0, 1, 2 and 3 have the pieces 0 and 7, 1 and 6, 2 and 5, 3 and 4 of a "
    "sequence. Arrows show that each rank sends keys and values to the next rank, and the last rank to rank 0. Right: a "
    "table with eight pieces of queries as rows and eight pieces of keys as columns. Row i has i + 1 blocks of scores, "
    "in the colour of the rank that computes them. Each rank computes nine blocks.",
)
def draw_ring_attention(canvas: Canvas) -> None:
    """The ring on the left, and on the right which rank computes which block of scores."""
    canvas.text(196, 62, "keys and values rotate", bold=True)
    places = ((24, 86), (228, 86), (228, 238), (24, 238))
    for rank, (x, y) in enumerate(places):
        draw_pieces(canvas, x, y, rank)
    canvas.arrow((164, 124), (226, 124), colour=VERMILION, thick=2.4)
    canvas.arrow((298, 164), (298, 236), colour=VERMILION, thick=2.4)
    canvas.arrow((226, 276), (166, 276), colour=VERMILION, thick=2.4)
    canvas.arrow((94, 236), (94, 166), colour=VERMILION, thick=2.4)
    draw_scores(canvas, 476, 96)
    lines = (
        "Each rank computes with the keys and values that it has, while it sends them to the next rank. Three hops are enough.",
        "The queries of piece i need the keys of the pieces 0 to i: i + 1 blocks. Those on the diagonal have a mask.",
        "In zig-zag order, rank r has the pieces r and 7 - r, so each rank computes (r + 1) + (8 - r) = 9 blocks.",
    )
    for row, line in enumerate(lines):
        canvas.text(24, 364 + 24 * row, line, align="left")


def draw_pieces(canvas: Canvas, x: float, y: float, rank: int) -> None:
    """A rank and its two pieces."""
    fill, hatch = PARTS[rank]
    canvas.box(x, y, 140, 78, fill=NODE, round_=8)
    canvas.text(x + 70, y + 17, f"rank {rank}", size=NORMAL, bold=True)
    for place, piece in enumerate((rank, 7 - rank)):
        canvas.box(x + 12 + 60 * place, y + 34, 56, 32, f"{piece}", fill=fill, hatch=hatch, round_=0)


def draw_scores(canvas: Canvas, x: float, y: float) -> None:
    """The blocks of scores of a causal attention, in the colours of the ranks."""
    size = 26
    canvas.text(x + 4 * size, y - 34, "keys of piece", bold=True)
    canvas.text(x - 36, y + 4 * size, "queries\nof piece", bold=True, align="right")
    for piece in range(8):
        canvas.text(x + size * (piece + 0.5), y - 12, str(piece))
        canvas.text(x - 14, y + size * (piece + 0.5), str(piece))
        for key in range(8):
            fill, hatch = PARTS[min(piece, 7 - piece)] if key <= piece else (WHITE, "")
            canvas.box(x + size * key, y + size * piece, size, size, fill=fill, hatch=hatch, round_=0)
    canvas.text(x + 8 * size + 8, y + 4 * size, "colour:\nthe rank that\ncomputes\nthe block", align="left")


@figure(
    "mesh",
    height=418,
    title="A mesh of 8 ranks: pp = 2, cp = 2, tp = 2",
    alt="Two nodes with four ranks each. Node 0 has ranks 0 to 3 and pipeline stage 0, node 1 has ranks 4 to 7 and "
    "stage 1. Within a node, the two rows have different pieces of each sequence, and the two columns have different "
    "halves of each layer. Arrows between neighbors in a row are tensor parallelism, arrows between the rows are "
    "context parallelism, and the arrow between the nodes is pipeline parallelism.",
)
def draw_mesh(canvas: Canvas) -> None:
    """Which ranks communicate along which axis, and over which network."""
    for stage in range(2):
        x = 20 + 410 * stage
        canvas.box(x, 54, 350, 232, fill=NODE, round_=8)
        canvas.text(x + 175, 74, f"node {stage}: stage {stage}, blocks {2 * stage} and {2 * stage + 1}", bold=True)
        for piece in range(2):
            for part in range(2):
                draw_place(canvas, x + 14 + 188 * part, 96 + 108 * piece, 4 * stage + 2 * piece + part, piece, part)
            y = 96 + 108 * piece
            canvas.arrow((x + 148, y + 52), (x + 202, y + 52), both=True, colour=BLUE, thick=2.4)
            canvas.number(x + 175, y + 33, 1)
        for part in range(2):
            middle = x + 81 + 188 * part
            canvas.arrow((middle, 170), (middle, 204), both=True, colour=VERMILION, thick=2.4)
            canvas.number(middle + 18, 187, 2)
    canvas.arrow((370, 187), (430, 187), both=True, colour=PURPLE, thick=3.2)
    canvas.number(400, 166, 3)
    lines = (
        (
            1,
            "tp: an all-gather or reduce-scatter for each part of each block. It needs the fastest network, within a node.",
        ),
        (2, "cp: keys, values and their gradients for each block. The communication overlaps with the attention."),
        (
            3,
            "pp: the activations of one micro-batch, between ranks with the same part. It tolerates the slowest network.",
        ),
    )
    for row, (number, line) in enumerate(lines):
        canvas.number(34, 310 + 26 * row, number)
        canvas.text(52, 310 + 26 * row, line, align="left")
    canvas.text(
        24,
        392,
        "With dp = 2, eight more ranks would have the same stages and parts, and different sequences.",
        align="left",
    )


def draw_place(canvas: Canvas, x: float, y: float, rank: int, piece: int, part: int) -> None:
    """A rank of the mesh: the tokens that it has, and its part of each layer."""
    fill, hatch = PARTS[::2][part]
    canvas.box(x, y, 134, 74, fill=WHITE)
    canvas.text(x + 67, y + 16, f"rank {rank}", size=NORMAL, bold=True)
    canvas.text(x + 10, y + 38, f"half {piece} of the tokens", align="left")
    for place in range(2):
        own = place == part
        box = (x + 10 + 57 * place, y + 50, 57, 18)
        canvas.box(*box, fill=fill if own else WHITE, hatch=hatch * own, dashed=not own, round_=0)
