"""Programs that ask mpi4py for their rank, which need not be installed: the check starts the ranks without MPI."""

import multiprocessing
import sys

import numpy as np
import pytest
import torch.distributed as dist

from workshop.check import ranks_of_mpi
from workshop.check.command import check_command
from workshop.errors import UserError

COMMAND = ["mpiexec", "-n", "2", "python", "train.py"]
# As in many diffusion models: MPI tells the ranks who they are, and sends what rank 0 has read from a file to the others.
PROGRAM = """
import io
import os

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

FILE = "last.pt"


def setup():
    comm = MPI.COMM_WORLD
    os.environ["MASTER_ADDR"] = comm.bcast("localhost", root=0)
    os.environ["RANK"] = str(comm.rank)
    os.environ["WORLD_SIZE"] = str(comm.Get_size())
    os.environ["MASTER_PORT"] = str(comm.bcast(29400, root=0))
    dist.init_process_group("gloo")


def load(path):
    data = None
    if MPI.COMM_WORLD.Get_rank() == 0:
        with open(path, "rb") as file:
            data = file.read()
    return torch.load(io.BytesIO(MPI.COMM_WORLD.bcast(data)))


def main():
    setup()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(240, 6)
    targets = inputs @ torch.randn(6, 1)
    shard = slice(MPI.COMM_WORLD.Get_rank(), None, MPI.COMM_WORLD.Get_size())
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    start = 0
    if os.path.exists(FILE):
        saved = load(FILE)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1
    ddp = DistributedDataParallel(model)
    data = TensorDataset(inputs[shard], targets[shard])
    for epoch in range(start, 4):
        order = torch.Generator().manual_seed(epoch)
        total = torch.zeros(())
        for batch, target in DataLoader(data, batch_size=10, shuffle=True, generator=order):
            loss = torch.nn.functional.mse_loss(ddp(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = MPI.COMM_WORLD.allreduce(total.item()) / (12 * size)
        if rank == 0:
            print(f"epoch {epoch}: {mean:.4f}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, FILE + ".new")
            os.replace(FILE + ".new", FILE)
        MPI.COMM_WORLD.Barrier()
    dist.destroy_process_group()


main()
"""


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("", "", []),
        ("MPI.COMM_WORLD.Get_rank(), None", "0, None", ["same-samples"]),
        ("    if MPI.COMM_WORLD.Get_rank() == 0:\n        with", "    if True:\n        with", []),
        ("        MPI.COMM_WORLD.Barrier()", "        if rank == 0:\n            MPI.COMM_WORLD.Barrier()", ["hang"]),
    ],
)
def test_ranks_that_mpi4py_numbers_are_judged(tmp_path, old, new, kinds):
    assert old in PROGRAM
    (tmp_path / "train.py").write_text(PROGRAM.replace(old, new) if old else PROGRAM)
    *_, verdict = check_command(COMMAND, folder=tmp_path)
    assert [finding.kind for finding in verdict.errors] == kinds, verdict.findings


@pytest.mark.parametrize("uses", ["MPI.Win.Create(memory)", "MPI.COMM_WORLD.Isend(array, dest=1)"])
def test_what_the_stand_in_lacks_is_named_before_anything_starts(tmp_path, uses):
    (tmp_path / "ranks.py").write_text(f"from mpi4py import MPI\n\n\ndef send():\n    {uses}\n")
    (tmp_path / "train.py").write_text("import ranks\n")
    with pytest.raises(UserError, match=r"lacks what the program uses: (MPI\.Win|Isend\(\))"):
        list(check_command(COMMAND, folder=tmp_path))


def _rank(rank, port, results):
    ranks_of_mpi.install(rank, 3, port)
    from mpi4py import MPI

    comm, numbers = MPI.COMM_WORLD, np.full(2, rank + 1.0)
    summed, all_of_them = np.zeros(2), np.zeros((3, 2))
    comm.Allreduce(numbers, summed, op=MPI.SUM)
    comm.Allreduce(MPI.IN_PLACE, numbers, op=MPI.MAX)
    comm.Allgather(np.full(2, rank), all_of_them)
    root = np.full(2, -1.0)
    comm.Reduce(np.full(2, rank), root, op=MPI.SUM, root=1)
    sent = np.full(2, float(rank))
    comm.Bcast(sent, root=2)
    comm.send(f"from {rank}", dest=(rank + 1) % 3)
    odd = comm.Split(rank % 2, -rank)
    told = {
        "summed": summed.tolist(), "most": numbers.tolist(), "all": all_of_them.tolist(), "root": root.tolist(),
        "sent": sent.tolist(), "received": comm.recv(source=(rank - 1) % 3), "gathered": comm.gather(rank, root=2),
        "scattered": comm.scatter([10, 11, 12] if rank == 0 else None), "least": comm.allreduce(rank, MPI.MIN),
        "exchanged": comm.alltoall([10 * rank + other for other in range(3)]), "reduced": comm.reduce(rank, MPI.PROD, 1),
        "split": (odd.rank, odd.size, odd.allgather(rank)), "alone": MPI.COMM_SELF.allgather(rank), "size": comm.Get_size(),
        "either": comm.allreduce(rank == 1, MPI.LOR), "shared": comm.Split_type(MPI.COMM_TYPE_SHARED).Dup().allgather(rank),
    }  # fmt: skip
    comm.barrier()
    results.put((rank, told))


def test_the_collectives_return_what_those_of_mpi_do():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(rank, store.port, results)) for rank in range(3)]
    for each in ranks:
        each.start()
    told = dict(results.get() for _ in ranks)
    for each in ranks:
        each.join()
    assert "mpi4py" not in sys.modules
    for rank in range(3):
        same = {key: told[rank][key] for key in ("summed", "most", "all", "sent", "least", "size", "either", "shared")}
        assert same == {
            "summed": [6.0, 6.0], "most": [3.0, 3.0], "all": [[0, 0], [1, 1], [2, 2]], "sent": [2.0, 2.0],
            "least": 0, "size": 3, "either": True, "shared": [0, 1, 2],
        }  # fmt: skip
        assert told[rank]["received"] == f"from {(rank - 1) % 3}"
        assert told[rank]["scattered"] == 10 + rank
        assert told[rank]["exchanged"] == [rank, 10 + rank, 20 + rank]
        assert told[rank]["alone"] == [rank]
    assert [told[rank]["root"] for rank in range(3)] == [[-1, -1], [3, 3], [-1, -1]]
    assert [told[rank]["gathered"] for rank in range(3)] == [None, None, [0, 1, 2]]
    assert [told[rank]["reduced"] for rank in range(3)] == [None, 0, None]
    assert [told[rank]["split"] for rank in range(3)] == [(1, 2, [2, 0]), (0, 1, [1]), (0, 2, [2, 0])]
