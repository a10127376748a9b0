"""``workshop simulate -- train.py``: the bytes of pretended GPUs, and scripts that read values or do not get far."""

import json
import sys
import textwrap

import pytest

import runs
from workshop.repository import ROOT

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]


def simulated(words, tmp_path, ranks=2, **env):
    """Simulate a script; return the process that has ended, and the data."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "workshop",
        "simulate",
        "--ranks",
        ranks,
        "--output",
        tmp_path / "out",
        "--",
        *words,
    ]
    done = runs.run(command, tmp_path, **env)
    file = tmp_path / "out" / "simulate.json"
    return done, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize("name", ["ddp_torchrun", "fsdp", "tensor_parallel"])
def test_the_peak_is_that_of_a_pretended_gpu(name, tmp_path, data):
    """The script runs unchanged in both ways."""
    script = [ROOT / "strategies" / f"{name}.py", "--steps", "3", "--output", tmp_path / "trained"]
    reports = tmp_path / "reports"
    reports.mkdir()
    done = runs.run([sys.executable, *TORCHRUN, *script], tmp_path, WORKSHOP_DATA=data, **runs.pretended(2, reports))
    assert done.returncode == 0, done.stderr
    pretended = [
        each for each in (json.loads(file.read_text()) for file in reports.glob("*.json")) if each["rank"] == 0
    ]
    done, found = simulated(script, tmp_path, WORKSHOP_DATA=data)
    assert done.returncode == 0, done.stderr
    print(name, found["peak"]["bytes"], pretended[0]["peak"])
    # The pretended GPU holds 1.6 to 2.8 % less (118 to 247 kB). We do not know why.
    assert found["peak"]["bytes"] == pytest.approx(max(pretended[0]["peak"].values()), rel=0.03)


def program(text: str, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text))
    return file


TRAIN = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo")
    model = DDP(nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 1024)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        {line}
"""


def test_a_script_may_print_its_loss(tmp_path):
    """The value is made up, and the output says so."""
    file = program(TRAIN.format(line='print("loss", loss.item())'), tmp_path)
    done, found = simulated(["torchrun", "--nproc-per-node=2", file, "--epochs", "1"], tmp_path, ranks=64)
    assert done.returncode == 0, done.stderr
    assert "train.py:15 reads a value. It got 1.0" in done.stdout
    assert found["steps"] == 3
    assert found["between_steps"]["optimizer"] == found["between_steps"]["parameters"] == 4 * (17 * 2048 + 2049 * 1024)
    assert [(row["collective"], row["ranks"]) for row in found["collectives"]] == [("all_reduce", 64)]


STOPPED = {
    "assert (loss > 0).item()": "train.py:15 (assert (loss > 0).item()): this line needs a value",
    "raise RuntimeError('no more')": "train.py:15 (raise RuntimeError('no more')): RuntimeError: no more",
}


@pytest.mark.parametrize("line", STOPPED)
def test_the_line_at_which_a_script_stops_is_named(line, tmp_path):
    done, found = simulated([program(TRAIN.format(line=line), tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"Stopped at {STOPPED[line]}" in done.stdout
    assert found["steps"] == 1


def test_a_script_without_a_module_is_one_line(tmp_path):
    for words, message in (
        ([program("x = 1", tmp_path)], "the program did not call any module with parameters"),
        (["no.py"], "there is no such"),
    ):
        done, _ = simulated(words, tmp_path)
        assert done.returncode == 2
        assert message in done.stderr
