"""Figures of how processes start: restarts by torchrun, the terms of Slurm, the rendezvous, a job that is requeued."""

from canvas import (
    BLUE,
    GREEN,
    GREY,
    NODE,
    NORMAL,
    REPEATED,
    SKY,
    VERMILION,
    WHITE,
    YELLOW,
    Canvas,
    figure,
    tint,
)

WORKER, LOST = tint(SKY), tint(VERMILION, 0.35)


def notes(canvas: Canvas, y: float, *lines: str, apart: float = 24) -> None:
    """Explain the numbered steps of a figure, one line for each."""
    for number, line in enumerate(lines, 1):
        canvas.number(34, y + apart * (number - 1), number)
        canvas.text(52, y + apart * (number - 1), line, align="left")


def checkpoint(canvas: Canvas, x: float, y: float, name: str) -> None:
    """The file of a checkpoint, centred at (x, y)."""
    canvas.box(x - 15, y - 13, 30, 26, name, fill=tint(YELLOW, 0.6), round_=2)


@figure(
    "torchrun",
    height=434,
    title="torchrun restarts all workers when one of them fails",
    alt="A time line of one torchrun agent and four workers, with a checkpoint after epochs 1 and 2. In epoch 3 the "
    "worker with rank 2 fails. The agent stops the other workers and starts four new ones. All of them load the "
    "checkpoint of epoch 2 and continue with epoch 3.",
)
def draw_torchrun(canvas: Canvas) -> None:
    """The agent, its workers, a worker that fails, and the restart from the last checkpoint."""
    canvas.text(118, 69, "agent", align="right", bold=True)
    for start, end, text in (
        (130, 408, "torchrun monitors its workers"),
        (408, 520, "stops, restarts"),
        (520, 780, "monitors the new workers"),
    ):
        canvas.box(start, 54, end - start, 30, text, fill=NODE, round_=2)
    for rank in range(4):
        draw_worker(canvas, 100 + 38 * rank, rank, fails=rank == 2)
    canvas.text(118, 281, "checkpoints", align="right", bold=True)
    canvas.stripe(130, 264, 650, 34, NODE)
    for x, name in ((230, "1"), (320, "2"), (650, "3"), (740, "4")):
        canvas.line((x, 244), (x, 268))
        checkpoint(canvas, x, 281, name)
    canvas.arrow((335, 281), (540, 281), (540, 246))
    canvas.number(464, 102, 2)
    canvas.number(440, 281, 3)
    notes(
        canvas,
        326,
        "Rank 2 fails. In epoch 3, the other ranks wait for it in the next collective.",
        "The agent stops all other workers, then starts all workers again, at most --max-restarts times (default: 0).",
        "Every new worker loads the last checkpoint (rank 0 writes one after each epoch) and repeats epoch 3.",
    )
    canvas.legend(
        52, 410, (LOST, REPEATED, "lost: computed since the last checkpoint"), (WORKER, "", "kept or computed again")
    )


def draw_worker(canvas: Canvas, y: float, rank: int, fails: bool) -> None:
    """One worker before and after the restart."""
    canvas.text(118, y + 15, f"worker, rank {rank}", align="right")
    end = 390 if fails else 410
    for left, right, text in ((140, 230, "epoch 1"), (230, 320, "epoch 2")):
        canvas.box(left, y, right - left, 30, text, fill=WORKER, round_=2)
    canvas.box(320, y, end - 320, 30, "epoch 3", fill=LOST, hatch=REPEATED, round_=2)
    for left, right, text in ((520, 560, "load"), (560, 650, "epoch 3"), (650, 740, "epoch 4")):
        canvas.box(left, y, right - left, 30, text, fill=WORKER if text != "load" else tint(YELLOW, 0.6), round_=2)
    canvas.text(748, y + 15, "…", align="left")
    if fails:
        for rise in (-8, 8):
            canvas.line((388, y + 15 - rise), (404, y + 15 + rise), colour=VERMILION, thick=3)
        canvas.number(422, y + 15, 1)


@figure(
    "slurm",
    height=548,
    title="From sbatch to a GPU: job, job step, task, process",
    alt="On the login node, sbatch submits job.sh. The job waits in the queue until Slurm allocates two nodes to it, "
    "then Slurm runs the script on the first node. The srun command in the script starts a job step with one "
    "task, torchrun, on each node. Each torchrun starts one training process for each of the two GPUs of its "
    "node: ranks 0 to 3.",
)
def draw_slurm(canvas: Canvas) -> None:
    """Login node, queue, job, allocated nodes, job step, tasks, processes and GPUs."""
    canvas.box(20, 50, 190, 86, fill=NODE, round_=8)
    canvas.text(34, 70, "login node", align="left", size=NORMAL, bold=True)
    canvas.box(34, 88, 162, 34, "sbatch job.sh", mono=True)
    canvas.arrow((115, 136), (115, 190))
    canvas.number(115, 160, 1)
    canvas.box(20, 190, 190, 160, fill=NODE, round_=8)
    canvas.text(34, 210, "queue (squeue)", align="left", size=NORMAL, bold=True)
    for row, (text, fill) in enumerate(
        (("job 100: RUNNING", WHITE), ("job 101: PENDING", tint(YELLOW, 0.6)), ("job 102: PENDING", WHITE))
    ):
        canvas.box(34, 228 + 38 * row, 162, 32, text, fill=fill)
    canvas.number(230, 264, 2)
    canvas.arrow((210, 282), (250, 282))
    canvas.box(250, 50, 530, 366, fill=WHITE, thick=1.8, round_=8)
    canvas.text(266, 70, "job 101: two allocated nodes, two GPUs on each", align="left", size=NORMAL, bold=True)
    for node in range(2):
        draw_allocated_node(canvas, 262 + 258 * node, node)
    canvas.box(270, 196, 490, 142, fill="none", edge=BLUE, dashed=True, thick=1.6)
    canvas.text(282, 212, "job step 101.0", align="left", bold=True)
    canvas.arrow((440, 160), (440, 226))
    canvas.arrow((440, 180), (644, 180), (644, 226))
    canvas.number(478, 180, 4)
    canvas.number(280, 142, 3)
    draw_slurm_notes(canvas)


def draw_allocated_node(canvas: Canvas, left: float, node: int) -> None:
    """A node of the job: its task, the processes that the task starts, and their GPUs."""
    canvas.box(left, 88, 248, 316, fill=NODE, round_=8)
    canvas.text(left + 14, 106, f"node{node + 1}", align="left", bold=True)
    if node == 0:
        canvas.box(left + 34, 122, 200, 38, "job.sh (batch script)\nsrun torchrun … train.py")
    canvas.box(left + 16, 226, 216, 30, f"task {node}: torchrun", fill=tint(BLUE, 0.25), edge=BLUE)
    for local in range(2):
        x = left + 16 + 112 * local
        canvas.arrow((x + 52, 256), (x + 52, 284))
        canvas.box(x, 284, 104, 42, f"process\nrank {2 * node + local}", fill=WORKER, edge=BLUE)
        canvas.arrow((x + 52, 326), (x + 52, 358))
        canvas.box(x, 358, 104, 32, f"GPU {local}", fill=tint(GREEN, 0.3), edge=GREEN, round_=2)
    canvas.number(left + 124, 270, 5)


def draw_slurm_notes(canvas: Canvas) -> None:
    """What happens at each number."""
    notes(
        canvas,
        434,
        "sbatch submits the job script. Its #SBATCH lines request nodes, GPUs and time.",
        "The job waits until its nodes are free. Slurm then allocates the nodes to the job.",
        "Slurm runs the script on the first node only.",
        "srun starts a job step: one task on each node (--ntasks-per-node=1).",
        "torchrun starts one process per GPU. Without torchrun: --ntasks-per-node=2, and each task is a training process.",
        apart=23,
    )


@figure(
    "rendezvous",
    height=476,
    title="A c10d rendezvous: two torchrun agents become one group",
    alt="The torchrun agents of two nodes connect to the rendezvous store on node1 with the same rendezvous ID and "
    "get the group ranks 0 and 1. Each agent then starts two workers with RANK 0 to 3, LOCAL_RANK 0 and 1, "
    "WORLD_SIZE 4 and the same MASTER_ADDR and MASTER_PORT, with which they form one process group.",
)
def draw_rendezvous(canvas: Canvas) -> None:
    """How agents find each other, and what the workers learn from it."""
    for node in range(2):
        draw_agent(canvas, 20 + 395 * node, node)
    canvas.box(236, 76, 137, 58, "rendezvous store\n(TCPStore)\nnode1:29500", fill=tint(YELLOW, 0.6))
    canvas.arrow((196, 105), (236, 105))
    canvas.arrow((603, 105), (373, 105))
    canvas.number(216, 88, 1)
    canvas.number(400, 105, 1)
    canvas.text(512, 90, "--rdzv-id=101", mono=True)
    canvas.brace(60, 740, 330, "one process group")
    canvas.number(328, 352, 4)
    notes(
        canvas,
        382,
        "Each agent connects to --rdzv-endpoint=node1:29500. The agent on that host opens the store.",
        "When --nnodes agents have joined with the same --rdzv-id, each agent gets its group rank.",
        "Each agent starts its workers and sets their variables. Group rank 0 chooses MASTER_ADDR and MASTER_PORT.",
        "init_process_group() in each worker connects to MASTER_ADDR:MASTER_PORT.",
    )


def draw_agent(canvas: Canvas, left: float, node: int) -> None:
    """A node with its agent and two workers."""
    canvas.box(left, 44, 365, 278, fill=NODE, round_=8)
    canvas.text(left + (14 if node == 0 else 351), 60, f"node{node + 1}", align="right" if node else "left", bold=True)
    x = left + (16 if node == 0 else 188)
    canvas.box(x, 76, 160, 58, fill=tint(BLUE, 0.25), edge=BLUE)
    middle = x + 80
    canvas.text(middle, 94, "torchrun (agent)", bold=True)
    canvas.text(middle + 10, 117, f"group rank {node}")
    canvas.number(middle - 46, 117, 2)
    for local in range(2):
        worker = left + 16 + 172 * local
        canvas.arrow((middle, 134), (middle, 152), (worker + 80, 152), (worker + 80, 172))
        variables = (
            f"RANK={2 * node + local}",
            f"LOCAL_RANK={local}",
            "WORLD_SIZE=4",
            "MASTER_ADDR=node1",
            "MASTER_PORT=40123",
        )
        canvas.box(worker, 172, 160, 138, fill=WORKER, edge=BLUE)
        canvas.text(worker + 80, 188, "worker", bold=True)
        for row, variable in enumerate(variables):
            canvas.text(worker + 16, 212 + 20 * row, variable, mono=True, align="left")
    canvas.number(left + 182, 152, 3)


@figure(
    "requeue",
    height=436,
    title="A job that goes back into the queue before its time limit",
    alt="A time line of one job that writes a checkpoint after each epoch. During epoch 4, 60 seconds before the time"
    " limit, Slurm sends SIGUSR1 to the batch script, and the script requeues the job. The job is pending for two"
    " minutes or longer. Then it starts again with the same job ID, loads checkpoint 3, repeats epoch 4 and "
    "continues.",
)
def draw_requeue(canvas: Canvas) -> None:
    """When the signal comes, what it starts, and what is computed twice."""
    rows = (("job state", 112), ("training", 156), ("checkpoints", 204))
    for name, y in rows:
        canvas.text(104, y + 16, name, align="right", bold=True)
    states = ((114, 402, "RUNNING", NODE), (402, 556, "PENDING", WHITE), (556, 780, "RUNNING, the same job ID", NODE))
    for left, right, text, fill in states:
        canvas.box(left, 112, right - left, 32, text, fill=fill, dashed=text == "PENDING", round_=2)
    epochs = (
        (114, 196, "epoch 1"),
        (196, 278, "epoch 2"),
        (278, 360, "epoch 3"),
        (596, 678, "epoch 4"),
        (678, 760, "epoch 5"),
    )
    for left, right, text in epochs:
        canvas.box(left, 156, right - left, 32, text, fill=WORKER, round_=2)
        canvas.line((right, 188), (right, 207))
        checkpoint(canvas, right, 220, text[-1])
    canvas.text(764, 172, "…", align="left")
    canvas.box(360, 156, 42, 32, "4", fill=LOST, hatch=REPEATED, round_=2)
    canvas.box(556, 156, 40, 32, "load", fill=tint(YELLOW, 0.6), round_=2)
    canvas.arrow((375, 220), (576, 220), (576, 190))
    canvas.number(476, 220, 4)
    draw_signal(canvas)
    notes(
        canvas,
        272,
        "Slurm sends SIGUSR1 to the batch script 60 s before the time limit (--signal=B:USR1@60).",
        'The trap in the script calls scontrol requeue "$SLURM_JOB_ID". Slurm ends the job; this part of epoch 4 is lost.',
        "The job waits for about two minutes (reason BeginTime), then until nodes are free.",
        "The script starts again. The program loads the last checkpoint and repeats epoch 4.",
    )
    lines = (
        "The checkpoint after each epoch limits what is lost to one epoch. A program that handles the signal itself",
        "(Lightning does, see stage 03) writes one more checkpoint before the job is requeued.",
    )
    for row, line in enumerate(lines):
        canvas.text(24, 384 + 20 * row, line, align="left", colour=GREY)


def draw_signal(canvas: Canvas) -> None:
    """The signal, the time limit, and the time between them."""
    canvas.arrow((380, 66), (380, 110), colour=VERMILION, thick=2)
    canvas.text(364, 56, "SIGUSR1", align="right", bold=True)
    canvas.number(380, 56, 1)
    canvas.line((462, 48), (462, 110), dashed=True, thick=1.6)
    canvas.text(470, 56, "time limit (--time)", align="left")
    canvas.arrow((383, 90), (460, 90), both=True)
    canvas.text(421, 76, "60 s")
    canvas.number(386, 128, 2)
    canvas.number(532, 128, 3)
