"""The lab of ``workshop diagnose``: programs that hang or fail, each with the cause that must be named.

``python -m diagnose.cases`` runs all of them and prints what each was named as JSON (results/diagnose-lab.json).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from workshop.repository import ROOT
from workshop.run.environment import environment, torchrun
from workshop.run.machine import machine

LAB = Path(__file__).with_name("lab")


@dataclass(frozen=True)
class Case:
    """A program of the lab.

    Attributes:
        name: its file, without ".py".
        causes: the words of ``Diagnosis.cause`` that name it.
        says: a regular expression that the first sentence must match.
        nodes: torchrun says that there are this number of nodes, although only this one exists.
        launcher: False: it runs with ``python`` alone.
        variables: changes of its environment.
    """

    name: str
    causes: tuple[str, ...]
    says: str
    nodes: int = 1
    launcher: bool = True
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def file(self) -> Path:
        """The program."""
        return LAB / f"{self.name}.py"

    def line(self) -> int:
        """Return the line of the cause, which the comment "the cause" marks; 0: it has none."""
        lines = self.file.read_text().splitlines()
        return next((number for number, line in enumerate(lines, 1) if "# the cause" in line), 0)

    def command(self, folder: Path) -> list[str]:
        """Return the command that runs it; it may write into ``folder``."""
        if not self.launcher:
            return [sys.executable, str(self.file)]
        if self.nodes > 1:
            start = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.nodes}", "--nproc-per-node=1"]
            return [
                *start,
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=127.0.0.1:0",
                "--local-addr=127.0.0.1",
                str(self.file),
            ]
        return [*torchrun(2), str(self.file), str(folder)]


CASES = [
    Case("skipped", ("order", "skipped"), r"[Rr]ank 0 called barrier #15 .* rank 1 called all_reduce #15"),
    Case("order", ("order",), r"rank 0 called broadcast #4 .* rank 1 called all_reduce #4"),
    Case("shape", ("shape",), r"Rank [01] was aborted in all_gather"),
    Case("dtype", ("dtype",), r"\[1048576\] float, .* \[1048576\] double"),
    Case("ended", ("ended",), r"Rank 1 has ended without an error"),
    Case("error", ("error",), r"Rank 1 failed first .*label 12 is out of range"),
    Case("killed", ("killed",), r"Rank 1 was killed by signal 9"),
    Case("stopped", ("stopped",), r"Rank 1 never called all_reduce #21"),
    Case("straggler", ("slow",), r"Rank 1 never called all_reduce #4 .*computing"),
    Case("loader", ("loader",), r"Rank 1 never called all_reduce #\d+ .*DataLoader"),
    Case("worker_killed", ("worker", "error"), r"Rank 1 .*(worker|DataLoader)"),
    Case("fork_lock", ("fork",), r"Rank 1 never called all_reduce #\d+ .*waits for a lock"),
    Case("file_system", ("file",), r"Rank 1 never called barrier #4 .*checkpoint.pt"),
    Case("server", ("network",), r"Rank 1 never called barrier"),
    Case("rank_missing", ("rendezvous",), r"Rank 1 has not called init_process_group"),
    Case("world_size", ("rendezvous",), r"Rank 2 of 3 has not started"),
    Case("node_missing", ("rendezvous",), r"waits for the other nodes", nodes=2),
    Case(
        "interface",
        ("interface", "error"),
        r"(nosuch0|Unable to find interface)",
        variables=(("GLOO_SOCKET_IFNAME", "nosuch0"),),
    ),
    Case("nan", ("skipped",), r"nan.py:15 skips the step"),
    Case("timeout", ("timeout",), r"Rank 0 gave up .*Rank 1 was in save"),
    Case("memory", ("memory",), r"Rank 1 ran out of memory"),
    Case("port", ("port",), r"cannot open the port", launcher=False),
]


@dataclass(frozen=True)
class Named:
    """What a program of the lab was named.

    Attributes:
        name: the program.
        first: the first sentence of the diagnosis.
        line: the line that it gives; 0: none.
        cause_line: the line of the cause; 0: the cause has no line.
        right: whether the first sentence is as expected.
        seconds: from the last progress to the diagnosis, as it says itself; None: the program ended by itself.
    """

    name: str
    first: str
    line: int
    cause_line: int
    right: bool
    seconds: int | None


def run(case: Case, folder: Path, patience: float = 10) -> Named:
    """Run a program of the lab under ``workshop diagnose --end``, and return what it was named."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "workshop",
        "diagnose",
        "--end",
        f"--patience={patience}",
        f"--output={folder / 'report'}",
    ]
    variables = environment(OMP_NUM_THREADS=1, **dict(case.variables))
    result = subprocess.run(
        [*command, "--", *case.command(folder)], env=variables, cwd=folder, capture_output=True, text=True, timeout=150
    )
    return named(case, result.stderr)


def named(case: Case, output: str) -> Named:
    """Return what a program was named, from the output of ``workshop diagnose``."""
    report = re.search(r"^workshop diagnose: (no progress for (\d+) s|the program has ended .*)\n  (.*)", output, re.M)
    if report is None:
        return Named(case.name, f"nothing: {output[-500:]}", 0, case.line(), False, None)
    place = re.search(rf"^  where: .*/{case.name}\.py:(\d+)", output[report.start() :], re.M)
    return Named(
        case.name,
        report[3],
        int(place[1]) if place else 0,
        case.line(),
        re.search(case.says, report[3]) is not None,
        int(report[2]) if report[2] else None,
    )


def main() -> None:
    """Run the whole lab, or the programs that the arguments name."""
    rows = []
    for case in CASES:
        if sys.argv[1:] and case.name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            rows.append(run(case, Path(folder)))
        print(
            f"{case.name}: {'right' if rows[-1].right else 'WRONG'}, {time.monotonic() - start:.0f} s", file=sys.stderr
        )
    here = os.fspath(ROOT)
    data = [
        {**asdict(row), "first": re.sub(r"/\S+/(?=\w+\.pt)", "", row.first.replace(here + "/", ""))} for row in rows
    ]
    print(json.dumps({"machine": machine(), "command": "python -m diagnose.cases", "programs": data}, indent=1))


if __name__ == "__main__":
    main()
