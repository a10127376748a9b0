"""Replace multigpu_torchrun.py while a job script is checked.

The program records its node and the variables that its launcher has set, connects to the other ranks, and pretends to train:
each epoch takes some time, and rank 0 writes the number of the epoch to a checkpoint. It does not import torch, so a check
takes only seconds. The records are in the folder ``notes`` beside it.
"""

import argparse
import json
import os
import socket
import subprocess
import time
from pathlib import Path

PATIENCE = 20  # seconds that it waits for the other ranks, as a collective does
SECONDS_PER_EPOCH = 0.4
FAILS = "fails"  # if there is a file of this name, the last rank fails in its second epoch
LATE = 10  # seconds after which the other ranks then notice it
# The variables of launchers that the rules read.
NOTED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", "--snapshot", type=Path, default=Path("runs/multigpu_torchrun.pt"))
    args = parser.parse_known_args()[0]
    notes = Path(__file__).parent / "notes"
    notes.mkdir(exist_ok=True)
    notebook = notes / f"{socket.gethostname()}-{os.getpid()}.jsonl"

    def note(event: str, **facts) -> None:
        with open(notebook, "a") as file:
            file.write(json.dumps({"event": event, "time": time.time(), "job": job, **facts}) + "\n")

    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    asked = ["scontrol", "--oneliner", "show", "step", f"{job}.{step}"]
    note(
        "start",
        host=socket.gethostname(),
        environment={name: os.environ[name] for name in NOTED if name in os.environ},
        launcher=Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0"),
        step=subprocess.run(asked, capture_output=True, text=True).stdout if step else "",
    )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    others = meet(rank, world_size, notes)
    fails = (notes.parent / FAILS).exists()
    first = json.loads(args.checkpoint.read_text())["epoch"] + 1 if args.checkpoint.exists() else 0
    for epoch in range(first, args.epochs):
        time.sleep(SECONDS_PER_EPOCH)
        if fails and epoch == first + 1 and rank == world_size - 1:
            note("fail")
            os._exit(1)
        try:
            agree(rank, others)
        except OSError:
            time.sleep(LATE if fails else 0)  # a collective of NCCL does not notice at once that a rank has died
            raise
        if rank == 0:
            args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            temporary = args.checkpoint.with_suffix(".tmp")
            temporary.write_text(json.dumps({"epoch": epoch}))
            os.replace(temporary, args.checkpoint)
            note("epoch", epoch=epoch)
            print(f"epoch {epoch + 1}/{args.epochs}", flush=True)


def meet(rank: int, world_size: int, notes: Path) -> list[socket.socket]:
    """Connect all ranks with rank 0. Rank 0 returns its connections to all other ranks, every other rank the one to rank 0."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun itself listens on MASTER_PORT, so rank 0 uses a different port and writes it to a file for the other ranks.
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    attempt = f"{os.environ.get('SLURM_JOB_ID')}-{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    board = notes / f"group-{attempt}-{address}-{port}.txt"
    if rank == 0:
        with socket.create_server(("", 0 if by_torchrun else port), backlog=world_size) as server:
            server.settimeout(PATIENCE)
            board.with_suffix(".tmp").write_text(f"{socket.gethostname()} {server.getsockname()[1]}")
            os.replace(board.with_suffix(".tmp"), board)
            connections = [server.accept()[0] for _ in range(world_size - 1)]
        for connection in connections:
            connection.settimeout(PATIENCE)
        if len({connection.recv(16) for connection in connections}) != world_size - 1:
            raise RuntimeError("two processes have the same rank")
        return connections
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if by_torchrun:
                address, port = board.read_text().split()
            connection = socket.create_connection((address, int(port)), timeout=PATIENCE)
            connection.sendall(f"{rank:16}".encode())
            return [connection]
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def agree(rank: int, others: list[socket.socket]) -> None:
    """Wait for all ranks, as a collective does. If a rank has died, the others end with an error."""
    if rank > 0:
        others[0].sendall(b"x")
    for connection in others:
        if connection.recv(1) != b"x":
            raise ConnectionError("a different rank has closed the connection")
    if rank == 0:
        for connection in others:
            connection.sendall(b"x")


if __name__ == "__main__":
    main()
