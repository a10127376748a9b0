"""``workshop pretend``: run any program on pretended GPUs, and print what it did with them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from workshop.errors import UserError
from workshop.measure.pretended_processes import variables
from workshop.measure.pretended_table import print_table
from workshop.run.environment import environment, free_port, loopback
from workshop.run.processes import end_family, sigterm_interrupts

LAST_WORDS = 5  # seconds
LAUNCHERS = ("torchrun", "torch.distributed.run")


def run_pretended(gpus: int, nodes: int, command: Sequence[str]) -> int:
    """Run a command on simulated nodes with pretended GPUs, and print a table; return the exit status of the command.

    Args:
        gpus: pretended GPUs per node.
        nodes: simulated nodes. With more than one, the command must be that of torchrun; it runs once per node.
        command: the program and its options, as its owner starts it.

    Raises:
        UserError: the command cannot be run in this way.
    """
    commands = [_on_node(command, node, nodes) for node in range(nodes)]
    with tempfile.TemporaryDirectory() as folder:
        statuses = _run(commands, gpus, Path(folder))
        reports = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    print_table(reports, gpus, nodes)
    return next((status for status in statuses if status), 0)


def _on_node(command: Sequence[str], node: int, nodes: int) -> list[str]:
    """Return the command of one simulated node."""
    words = list(command)
    if words[0] == "python":
        words[0] = sys.executable
    found = [index for index, word in enumerate(words) if Path(word).name in LAUNCHERS]
    if not found:
        if nodes > 1:
            raise UserError(
                "--nodes needs the command of torchrun: workshop pretend --nodes 2 -- torchrun --nproc-per-node=2 train.py"
            )
        return words
    at = found[0]
    if words[at] == "torchrun":
        words[at : at + 1] = [sys.executable, "-m", "torch.distributed.run"]
        at += 2
    if nodes == 1:
        return words
    own = ("--nnodes", "--node-rank", "--node_rank", "--rdzv", "--master", "--local-addr")
    if taken := [word for word in words[at:] if word.startswith(own)]:
        raise UserError(f"leave out {taken[0]}: --nodes sets it")
    place = [word for word in words if word != "--standalone"]
    options = (f"--nnodes={nodes}", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={_port()}")
    place[place.index(words[at]) + 1 : place.index(words[at]) + 1] = options
    return place


_port = cache(free_port)  # the same at each call


def _run(commands: list[list[str]], gpus: int, reports: Path) -> list[int]:
    """Run the command of each node until all have ended; if one fails, end the others."""
    started: list[subprocess.Popen] = []

    with sigterm_interrupts():
        try:
            for node, command in enumerate(commands):
                outer = environment(CUDA_VISIBLE_DEVICES=None, GLOO_SOCKET_IFNAME=loopback())
                outer.setdefault("OMP_NUM_THREADS", "1")
                outer |= variables(gpus, outer["PYTHONPATH"], reports, node)
                try:
                    started.append(subprocess.Popen(command, env=outer))
                except OSError as error:
                    raise UserError(f"{command[0]}: {os.strerror(error.errno or 0)}") from None
            return _wait(started)
        except KeyboardInterrupt:
            return [128 + signal.SIGINT]
        finally:
            for process in started:
                end_family(process)


def _wait(started: list[subprocess.Popen]) -> list[int]:
    """Return the exit statuses. If a node fails, the others get some seconds to fail as well: they may wait for it forever."""
    failed_at = 0.0
    while None in [process.poll() for process in started]:
        if any(process.returncode for process in started):
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > LAST_WORDS:
                break
        time.sleep(0.05)
    return [process.returncode or 0 for process in started]
