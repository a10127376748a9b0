"""Which strategy to use, as a flow chart; the reasons are in strategies/RULES.md."""

from canvas import BLUE, GREEN, NORMAL, SKY, WHITE, YELLOW, Canvas, figure, tint

# Each question, and what to use if the answer is yes.
QUESTIONS = (
    (
        "Do parameters, gradients and optimizer state\nfit on one GPU, with room for activations?",
        "One GPU",
        "Add DDP to train on more samples per second.",
    ),
    (
        "Do the parameters fit on each GPU if gradients\nand optimizer state are sharded?",
        "ZeRO-1 or ZeRO-2,",
        "or FSDP2 with reshard_after_forward=False.",
    ),
    (
        "Do the shards and one or two gathered layers\nfit on each GPU?",
        "FSDP2, or ZeRO-3",
        "Parameters are gathered layer by layer.",
    ),
)

# What to check after any answer: a symptom, and the lines that say what to do.
CHECKS = (
    (
        "Activations do not fit",
        "1. Activation checkpointing, and",
        "smaller batches with gradient",
        "accumulation.",
        "",
        "2. If a single sequence still does",
        "not fit: context parallelism.",
        "",
        "Sharding parameters does not",
        "reduce activations.",
    ),
    (
        "Many nodes, slow network",
        "DDP: gradient accumulation.",
        "",
        "FSDP2: HSDP, if the GPUs of one",
        "node can hold the model. It shards",
        "within a node and replicates",
        "between nodes.",
        "",
        "Keep tensor parallelism within a",
        "node.",
    ),
    (
        "You adapt a pretrained model",
        "Try LoRA first. It trains a small",
        "fraction of the parameters, so",
        "gradients and optimizer state are",
        "small.",
        "",
        "The base model then often fits on",
        "one GPU.",
    ),
)


@figure(
    "which-strategy",
    height=640,
    title="Which strategy should I use?",
    alt="A flow chart. If parameters, gradients and optimizer state fit on one GPU: one GPU or DDP. Else, if the "
    "parameters fit: ZeRO-1, ZeRO-2 or FSDP2 with reshard_after_forward=False. Else, if the shards and one or two"
    " gathered layers fit: FSDP2 or ZeRO-3. Else: tensor parallelism within each node, more GPUs or CPU offload. "
    "Then: activation checkpointing, smaller batches and context parallelism if activations do not fit; HSDP for "
    "a slow network between nodes; LoRA to adapt a pretrained model.",
)
def draw_which_strategy(canvas: Canvas) -> None:
    """The questions from top to bottom, what to use for each answer, and what to check afterwards."""
    for row, (question, answer, reason) in enumerate(QUESTIONS):
        y = 52 + 92 * row
        canvas.box(20, y, 360, 58, question, fill=tint(YELLOW, 0.35), round_=14, size=NORMAL)
        canvas.arrow((380, y + 29), (450, y + 29), text="yes")
        canvas.box(450, y, 330, 58, fill=tint(GREEN, 0.3), edge=GREEN)
        canvas.text(464, y + 18, answer, align="left", size=NORMAL, bold=True)
        canvas.text(464, y + 40, reason, align="left")
        canvas.arrow((200, y + 58), (200, y + 92))
        canvas.text(212, y + 73, "no", align="left")
    canvas.box(20, 328, 760, 58, fill=tint(GREEN, 0.3), edge=GREEN)
    canvas.text(
        34,
        346,
        "FSDP2 with tensor parallelism within each node, more GPUs, or CPU offload",
        align="left",
        size=NORMAL,
        bold=True,
    )
    reason = (
        "Tensor parallelism shards each layer. It communicates in every layer, so it needs fast links (NVLink, xGMI)."
    )
    canvas.text(34, 368, reason, align="left")
    draw_checks(canvas)


def draw_checks(canvas: Canvas) -> None:
    """What to check after any answer of the chart."""
    canvas.text(20, 412, "Then check, whatever the answer was:", align="left", size=NORMAL, bold=True)
    for place, (symptom, *remedy) in enumerate(CHECKS):
        x = 20 + 258 * place
        canvas.box(x, 428, 244, 192, fill=WHITE)
        canvas.box(x, 428, 244, 32, symptom, fill=tint(SKY), edge=BLUE, bold=True, size=NORMAL)
        canvas.text(x + 10, 466 + 8.1 * len(remedy), "\n".join(remedy), align="left")
