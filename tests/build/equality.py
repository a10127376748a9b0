"""Measure how far the solutions of stage 06 are from one process: python tests/build/equality.py FILE

For each solution, train some steps in float64 with 1, 2 and 4 processes, and write the largest difference of the losses of each
step from those of one process. The losses of the steps after the first depend on all gradients.
"""

import json
import sys
import tempfile
from pathlib import Path

import runs
from workshop.files import write_atomically
from workshop.repository import ROOT
from workshop.run.machine import machine

STEPS = 6
OPTIONS = ("--dtype", "float64", "--steps", str(STEPS), "--batch-size", "8", "--length", "32")
PROGRAMS = {  # for each program, its options with 2 and with 4 processes
    "exercise1_ddp": ("", ""),
    "exercise2_zero1": ("", ""),
    "exercise3_fsdp": ("", ""),
    "exercise4_tensor": ("", ""),
    "exercise5_pipeline": ("--schedule gpipe", "--schedule gpipe"),
    "exercise5_pipeline ": ("--schedule 1f1b", "--schedule 1f1b"),
    "exercise6_ring": ("", ""),
    "exercise7_experts": ("--balance 0.1", "--balance 0.1"),
    "exercise8_all": ("--tp 2", "--pp 2 --tp 2"),
    "exercise8_all ": ("--cp 2", "--dp 2 --cp 2"),
}


def losses(program: str, processes: int, options: str) -> list[float]:
    """Train with a number of processes, and return the losses."""
    script = ROOT / "solutions" / "06_build_your_own" / f"{program.strip()}.py"
    launch = ["-P", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launch, f"--nproc-per-node={processes}", str(script), *OPTIONS, "--folder", "run"]
        done = runs.run([*command, *options.split()], Path(folder))
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(Path(folder, "run", "losses.json").read_text())["losses"]


def main() -> None:
    (file,) = sys.argv[1:]
    rows = []
    print(f"{'solution':20} {'options':24} {'processes':>9}  {'largest difference':>18}")
    for program, several in PROGRAMS.items():
        alone = losses(program, 1, "" if "exercise8" in program else several[0])
        for processes, options in zip((2, 4), several, strict=True):
            found = losses(program, processes, options)
            difference = max(abs(one - other) for one, other in zip(found, alone, strict=True))
            rows.append(
                {"solution": program.strip(), "options": options, "processes": processes, "difference": difference}
            )
            print(f"{program.strip():20} {options:24} {processes:9}  {difference:18.1e}", flush=True)
    result = {"machine": machine(), "steps": STEPS, "options": " ".join(OPTIONS), "rows": rows}
    write_atomically(Path(file), json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
