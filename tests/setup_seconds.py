"""Measure how long a learner on a bare machine needs from a fresh clone to the first trained model. Print JSON.

    python tests/setup_seconds.py --rounds 3 > results/setup-2-cores.json

Each round has an empty home, so the caches of uv and pip are empty, and only Debian's essential packages, Python and git on PATH.
"""

import argparse
import datetime
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from workshop.run.machine import machine

TRAIN = "OMP_NUM_THREADS=1 01_single_gpu/run_single_gpu.sh --epochs 1"


def busy() -> float:
    """Return the seconds that all processors of this machine have been busy."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0)


def ours() -> float:
    """Return the processor time, in seconds, of the children of this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(variant: str) -> dict:
    with tempfile.TemporaryDirectory(prefix="setup-") as place:
        subprocess.run([ROOT / "tests" / "bare_machine.sh", f"{place}/bin"], check=True)
        os.mkdir(f"{place}/home")
        dropped = ("WORKSHOP_PYTHON", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "UV_CACHE_DIR")
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        environment |= {"PATH": f"{place}/bin", "HOME": f"{place}/home", "WORKSHOP_TORCH": variant}
        began, worked, everybody = time.monotonic(), ours(), busy()
        subprocess.run(["git", "clone", "--quiet", ROOT, f"{place}/clone"], check=True)
        command = ["./workshop.sh", "progress"]  # the first command installs the environment
        made = subprocess.run(command, cwd=f"{place}/clone", env=environment, capture_output=True, text=True)
        environment_seconds = re.search(r"ready after (\d+) s", made.stderr)
        if environment_seconds is None:
            sys.exit(made.stderr)
        done = subprocess.run(
            ["bash", "-c", TRAIN], cwd=f"{place}/clone", env=environment, capture_output=True, text=True
        )
        if "epoch 1/1" not in done.stdout:
            sys.exit(done.stdout + done.stderr)
        seconds, worked, everybody = time.monotonic() - began, ours() - worked, busy() - everybody
        return {
            "seconds": round(seconds, 1),
            "seconds of the environment": int(environment_seconds[1]),
            "processor seconds": round(worked, 1),
            "processors busy with something else": round((everybody - worked) / seconds, 2),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the time from a fresh clone to the first trained model.")
    parser.add_argument("--rounds", type=int, default=3, help="how many fresh clones")
    parser.add_argument("--torch", choices=["cuda", "cpu"], default="cuda", help="the value of WORKSHOP_TORCH")
    args = parser.parse_args()
    rounds = [measure(args.torch) for _ in range(args.rounds)]
    seconds = sorted(each["seconds"] for each in rounds)
    result = {
        "what": "from a fresh clone to the first trained model, without uv on the PATH, with an empty home",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "command": f"python tests/setup_seconds.py --rounds {args.rounds} --torch {args.torch}",
        "measured": f"git clone ...; ./workshop.sh; {TRAIN}",
        "seconds": {"median": seconds[len(seconds) // 2], "lowest": seconds[0], "highest": seconds[-1]},
        "rounds": rounds,
    }
    print(json.dumps(result, indent=1))
