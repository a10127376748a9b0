"""Processes that a program starts with the method "spawn" get only what a new interpreter would get."""

import json
import socket
import textwrap

import pytest

from check import small

PROGRAM = """
    import os
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    x = torch.arange(64.0).reshape(32, 2) / 64
    DATA = TensorDataset(x, x.sum(1, keepdim=True))

    def worker(rank, world_size, rate):
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "FREE"}
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        sampler = DistributedSampler(DATA)
        model = DDP(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for a, b in DataLoader(DATA, 4, sampler=sampler, num_workers=WORKERS, collate_fn=COLLATE):
                optimizer.zero_grad()
                (model(a) - b).square().mean().backward()
                optimizer.step()
        dist.destroy_process_group()

    WORKERS, COLLATE = 0, None

    if __name__ == "__main__":
        RATE = 0.1
        mp.spawn(worker, args=(2, RATE), nprocs=2)
"""


def checked(folder, *changes):
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = textwrap.dedent(PROGRAM).replace("FREE", str(server.getsockname()[1]))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "train.py").write_text(text)
    report = json.loads(small.check(folder, "--json", "--", "python", "train.py").stdout)
    assert not [each for each in report["not_checked"] if "ended" in each], report
    return [each for each in report["findings"] if each["level"] in ("error", "not judged")], text.splitlines()


def test_a_correct_program_gets_no_finding(tmp_path):
    assert not checked(tmp_path)[0]


@pytest.mark.parametrize(
    ("old", "new", "said", "line"),
    [
        (
            "    if __name__",
            "    if True or __name__",
            "runs the top level of the file again: call mp.spawn() under",
            "mp.spawn",
        ),
        ("lr=rate", "lr=RATE", "RATE has no value here", "RATE = 0.1"),
        ("spawn(worker,", "spawn(lambda *given: worker(*given),", "no lambdas, inner functions", "mp.spawn"),
        (
            "WORKERS, COLLATE = 0, None",
            "WORKERS, COLLATE = 1, lambda each: torch.stack(each)",
            "no lambdas",
            "DataLoader(",
        ),
    ],
)
def test_what_fails_only_in_a_new_interpreter_is_named(old, new, said, line, tmp_path):
    (found,), lines = checked(tmp_path, (old.strip(), new.strip()))
    assert found["kind"] == "crash"
    assert said in found["seen"]
    assert line in lines[int(found["where"].rpartition(":")[2]) - 1]


def test_a_file_that_the_top_level_writes_has_several_writers(tmp_path):
    (found,), lines = checked(
        tmp_path, ("WORKERS, COLLATE", 'open("words.json", "w").write("start")\nWORKERS, COLLATE')
    )
    assert found["kind"] == "two-writers"
    assert "words.json" in lines[int(found["where"].rpartition(":")[2]) - 1]


def test_a_top_level_that_fails_in_the_other_processes_is_named(tmp_path):
    (found,), lines = checked(tmp_path, ("WORKERS, COLLATE", 'os.mkdir("results")\nWORKERS, COLLATE'))
    assert found["kind"] == "crash"
    assert "mkdir" in lines[int(found["where"].rpartition(":")[2]) - 1]


def test_a_top_level_that_cannot_run_twice_in_a_process_is_used_as_it_was(tmp_path):
    """What it registers in a library is already registered in the forked process; a new interpreter would not have it."""
    once = 'if hasattr(torch, "once"):\n    raise ValueError("already registered")\ntorch.once = True\nWORKERS, COLLATE'
    assert not checked(tmp_path, ("WORKERS, COLLATE", once))[0]


def test_processes_of_a_package_can_have_workers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = textwrap.dedent(PROGRAM).replace("FREE", str(server.getsockname()[1])).replace("= 0, None", "= 1, None")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "learn.py").write_text(text)
    start = 'import torch.multiprocessing as mp\nfrom package.learn import worker\nif __name__ == "__main__":\n'
    start += '    mp.set_start_method("spawn")\n    mp.spawn(worker, args=(2, 0.1), nprocs=2)\n'
    (tmp_path / "package" / "__main__.py").write_text(start)
    report = json.loads(small.check(tmp_path, "--json", "--", "python", "-m", "package").stdout)
    assert not [each for each in report["findings"] if each["level"] == "error"]
    assert not [each for each in report["not_checked"] if "ended" in each or "wait" in each], report


BY_HAND = (
    ("DDP(nn.Linear(2, 1))", "nn.Linear(2, 1)"),
    (
        "            optimizer.step()",
        "            for each in model.parameters():\n                dist.all_reduce(each.grad, dist.ReduceOp.AVG)\n"
        "            optimizer.step()",
    ),
)


@pytest.mark.parametrize(
    ("seed", "kinds"), [("torch.manual_seed(0)", []), ("def seed():\n    torch.manual_seed(0)", ["weights-differ"])]
)
def test_a_module_seeds_each_process_that_imports_it(tmp_path, seed, kinds):
    (tmp_path / "lib.py").write_text(f"import torch\n\n{seed}\n")
    found, _ = checked(tmp_path, ("import os\n", "import lib\nimport os\n"), *BY_HAND)
    assert [each["kind"] for each in found] == kinds


HOGWILD = """
    import torch
    import torch.multiprocessing as mp

    def train(model):
        torch.manual_seed(0)
        x = torch.randn(64, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in x.split(4):
            optimizer.zero_grad()
            (model(part) - part.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()

    if __name__ == "__main__":
        mp.set_start_method("spawn", force=True)
        model = torch.nn.Linear(2, 1)
        model.share_memory()
        before = model.weight.detach().clone()
        processes = [mp.Process(target=train, args=(model,)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert not model.weight.equal(before)  # the processes have changed the parameters of this one
"""


def test_processes_that_share_their_parameters_cannot_be_judged(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(HOGWILD))
    report = json.loads(small.check(tmp_path, "--json", "--", "python", "train.py").stdout)
    (found,) = [each for each in report["findings"] if each["level"] != "hint"]
    assert found["level"] == "not judged"
    assert "shared memory" in found["seen"]
    alone = textwrap.dedent(HOGWILD).replace(
        "def train(model):\n", "def train(model):\n    model = torch.nn.Linear(2, 1)\n"
    )
    (tmp_path / "train.py").write_text(alone.replace("assert not", "assert"))
    report = json.loads(small.check(tmp_path, "--json", "--", "python", "train.py").stdout)
    assert report["findings"][0]["kind"] == "no-group"


OF_TENSORS = """
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.utils.data import DataLoader, DistributedSampler

    def worker(rank, samples):
        dist.init_process_group("gloo", init_method="tcp://localhost:FREE", rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        sampler = DistributedSampler(samples)
        loader = DataLoader(samples, 2, sampler=sampler, num_workers=1)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader:  # its new process gets the samples again
                optimizer.zero_grad()
                model(batch).mean().backward()
                optimizer.step()
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.set_start_method("spawn")
        mp.spawn(worker, nprocs=2, args=([torch.randn(4) for _ in range(16)],))
"""


def test_tensors_that_the_ranks_get_can_be_passed_on_to_the_workers_of_a_loader(tmp_path, monkeypatch):
    monkeypatch.setattr("check.test_spawned.PROGRAM", OF_TENSORS)
    assert not checked(tmp_path)[0]
