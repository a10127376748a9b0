"""Run cells in several processes: ``%%ranks`` runs a cell in each process of a gloo group, and draws the tensors it shows.

The first such cell starts the processes, which end with the kernel of the notebook. The kernel itself never joins a process
group, and no process uses a GPU.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from pathlib import Path

import workshop.run.process_group  # noqa: F401
from workshop.run.environment import environment, loopback

PATIENCE = 5  # seconds until a collective that a rank does not call fails, instead of half an hour


class Ranks:
    """A group of processes that run cells.

    Args:
        count: the number of processes.
    """

    def __init__(self, count: int):
        self.count, self.cells, self.failed = count, 0, False
        self.folder = tempfile.TemporaryDirectory(prefix="workshop-ranks-")
        variables = environment(gpus=False, OMP_NUM_THREADS=1, GLOO_SOCKET_IFNAME=loopback())
        self.processes = []
        for rank in range(count):
            with open(self._errors(rank), "w") as errors:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "workshop.jupyter.ranks", str(rank), str(count), self.folder.name],
                        env=variables,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        start_new_session=True,  # so that an interrupt of the kernel does not reach them
                    )
                )

    def _errors(self, rank: int) -> Path:
        return Path(self.folder.name) / f"errors-{rank}"

    def run(self, cell: str) -> list[dict]:
        """Run a cell in every process; return for each rank a dict with "output", "error" and "shown".

        Raises:
            RuntimeError: a process has died.
            KeyboardInterrupt: the cell was interrupted; the processes have been killed.
        """
        self.cells += 1
        # After an error, ranks may wait for each other in different collectives, so the next cell gets a new process group.
        request = json.dumps({"cell": cell, "group": self.cells if self.failed or self.cells == 1 else 0})
        try:
            for process in self.processes:
                with suppress(BrokenPipeError):
                    process.stdin.write(request + "\n")
                    process.stdin.flush()
            answers = [process.stdout.readline() for process in self.processes]
        except KeyboardInterrupt:
            self.end()
            raise
        if not all(answers):
            rank = answers.index("")
            said = self._errors(rank).read_text().strip().splitlines()
            self.end()
            raise RuntimeError(f"the process of rank {rank} has died" + (f": {said[-1]}" if said else ""))
        results = [json.loads(answer) for answer in answers]
        self.failed = any(result["error"] for result in results)
        return results

    def end(self) -> None:
        """Kill the processes, and delete their folder."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.folder.cleanup()


# ---------------------------------------------------------------- in each process


def _serve(rank: int, count: int, folder: str) -> None:
    """Run the cells that arrive on standard input, until it closes because the kernel has ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of C++ code must not mix with the answers
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    torch.set_num_threads(1)
    shown = []

    def show(name, tensor):
        """Add a tensor with one or two dimensions to the picture below the cell."""
        shown.append((str(name), torch.as_tensor(tensor).detach().clone().tolist()))

    names = {"rank": rank, "world_size": count, "torch": torch, "dist": dist, "F": F, "show": show}
    for line in sys.stdin:
        request = json.loads(line)
        output, error = io.StringIO(), ""
        shown.clear()
        with redirect_stdout(output), redirect_stderr(output):
            try:
                if request["group"]:
                    if dist.is_initialized():
                        dist.destroy_process_group()
                    meeting = f"file://{folder}/group-{request['group']}"
                    dist.init_process_group(
                        "gloo", meeting, rank=rank, world_size=count, timeout=timedelta(seconds=PATIENCE)
                    )
                exec(compile(request["cell"], "<cell>", "exec"), names)
            except BaseException as failure:  # also SystemExit: the process must survive for the next cell
                error = _in_the_cell(failure)
        answers.write(json.dumps({"output": output.getvalue(), "error": error, "shown": shown}) + "\n")
        answers.flush()


def _in_the_cell(failure: BaseException) -> str:
    """Format an exception in one line, with the number of the line in the cell that raised it."""
    own = [frame.lineno for frame in traceback.extract_tb(failure.__traceback__) if frame.filename == "<cell>"]
    line = failure.lineno if isinstance(failure, SyntaxError) else own[-1] if own else None
    message = " ".join(str(failure).split())
    if "timed out" in message.lower():
        message = f"waited {PATIENCE} s for the other ranks, and gave up"
    elif "connection closed" in message.lower() or "reset by peer" in message.lower():
        message = "lost the connection to a different rank, which has given up"
    place = f"line {line}: " if line else ""
    return f"{place}{type(failure).__name__}: {message[:300]}"


# ---------------------------------------------------------------- in the notebook


_current: Ranks | None = None


def ranks(line: str, cell: str) -> None:
    """Implement the cell magic ``%%ranks [N]``: run the cell in N processes (default: 4), which keep their variables.

    Predefined in the cell: ``rank``, ``world_size``, ``torch``, ``dist`` (with a gloo group), ``F``, and ``show(name, tensor)``,
    which adds a tensor to the picture below the cell.
    """
    from IPython.core.error import UsageError

    global _current
    if line.strip() not in ("", *"12345678"):
        raise UsageError("%%ranks takes a number of processes from 1 to 8")
    count = int(line.strip() or 4)
    if _current is None or _current.count != count or any(process.poll() is not None for process in _current.processes):
        if _current:
            _current.end()
        _current = Ranks(count)
    try:
        results = _current.run(cell)
    except RuntimeError as error:
        raise UsageError(f"{error}; the next %%ranks cell starts new processes") from error
    for rank, result in enumerate(results):
        for text in result["output"].splitlines():
            print(f"rank {rank} | {text}")
    errors = {result["error"] for result in results}
    if len(errors) == 1 and "" not in errors:
        print(f"all ranks | {errors.pop()}")
    else:
        for rank, result in enumerate(results):
            if result["error"]:
                print(f"rank {rank} | {result['error']}")
    if any(result["shown"] for result in results):
        from workshop.jupyter.pictures import show_tensors

        show_tensors([result["shown"] for result in results])


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
