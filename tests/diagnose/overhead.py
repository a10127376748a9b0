"""What ``workshop diagnose -- COMMAND`` costs a healthy run: pairs of runs with and without it, in turn.

``python -m diagnose.overhead`` prints the ratios as JSON (results/diagnose-overhead-2-cores.json).
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from workshop.run.environment import environment, torchrun
from workshop.run.machine import machine

ROUNDS = 9
STEPS = 1500
PROGRAM = f"""
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({STEPS} + 100):
    if step == 100:
        dist.barrier()
        start = time.perf_counter()
    loss = model(torch.randn(64, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
if dist.get_rank() == 0:
    print("seconds", time.perf_counter() - start)
dist.destroy_process_group()
"""


def seconds(program: Path, watched: bool) -> float:
    """Return the seconds of the loop of a run."""
    before = [sys.executable, "-P", "-m", "workshop", "diagnose", "--"] if watched else []
    done = subprocess.run(
        [*before, *torchrun(2), str(program)],
        env=environment(OMP_NUM_THREADS=1),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure, and print the result."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "train.py"
        program.write_text(PROGRAM)
        rows = []
        for number in range(ROUNDS):
            order = (False, True) if number % 2 else (True, False)
            found = {watched: seconds(program, watched) for watched in order}
            rows.append({"alone": round(found[False], 3), "watched": round(found[True], 3)})
    ratios = [row["watched"] / row["alone"] for row in rows]
    result = {
        "machine": machine(),
        "command": "python -m diagnose.overhead",
        "what": f"{STEPS} steps of DDP with two gloo processes and two all-reduces per step; watched: by workshop diagnose",
        "seconds": rows,
        "ratio": {
            "median": round(statistics.median(ratios), 4),
            "lowest": round(min(ratios), 4),
            "highest": round(max(ratios), 4),
        },
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
