"""``workshop diagnose -- COMMAND`` reports nothing about healthy programs, not even about slow ones."""

import subprocess
import sys

import pytest

from workshop.repository import ROOT
from workshop.run.environment import environment, torchrun

STRATEGIES = sorted(
    file for file in (ROOT / "strategies").glob("*.py") if file.stem not in ("ddp_spawn", "one_process")
)
START = "import time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
COMPUTES = """
end = time.monotonic() + 14
while time.monotonic() < end:
    torch.randn(99, 99) @ torch.randn(99, 99)
dist.barrier()
"""
SAVES = """
for _ in range(40 * (dist.get_rank() == 0)):
    open("checkpoint.pt", "wb").write(bytes(1 << 20))
    time.sleep(0.35)
dist.barrier()
"""
SLOW = {
    "a slow loader": START + "for _ in range(4):\n    time.sleep(4); dist.all_reduce(torch.ones(1))\n",
    "one rank evaluates alone": START + "time.sleep(14 * (dist.get_rank() == 0)); dist.barrier()\n",
    "all ranks compute for long": START + COMPUTES,
    "a slow checkpoint": START + SAVES,
    "a slow start": "import time, os\ntime.sleep(14 * (os.environ['RANK'] == '1'))\n" + START + "dist.barrier()\n",
    "no collectives": "import time\ntime.sleep(14)\n",
}


def stderr_of(command, folder, **variables) -> str:
    diagnose = [sys.executable, "-P", "-m", "workshop", "diagnose", "--"]
    done = subprocess.run(
        [*diagnose, *map(str, command)],
        env=environment(OMP_NUM_THREADS=1, **variables),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.full
@pytest.mark.parametrize("script", STRATEGIES, ids=lambda file: file.stem)
def test_a_strategy_is_not_reported(script, tmp_path, data):
    command = [*torchrun(2), script, "--steps", 4, "--output", tmp_path / "out"]
    assert "workshop diagnose" not in stderr_of(command, tmp_path, WORKSHOP_DATA=data)


@pytest.mark.full
@pytest.mark.parametrize("name", ["ddp_spawn", "one_process"])
def test_a_strategy_that_python_starts_is_not_reported(name, tmp_path, data):
    command = [sys.executable, ROOT / "strategies" / f"{name}.py", "--steps", 4, "--output", tmp_path / "out"]
    assert "workshop diagnose" not in stderr_of(command, tmp_path, WORKSHOP_DATA=data)


@pytest.mark.full
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_program_is_not_reported(name, tmp_path):
    (tmp_path / "train.py").write_text(SLOW[name])
    assert "workshop diagnose" not in stderr_of([*torchrun(2), "train.py"], tmp_path)
