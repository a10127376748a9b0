"""Train with DDP, started by mp.spawn: the program starts the processes itself and passes each process its rank.

Run it:  python strategies/ddp_spawn.py --nproc 2 --steps 20
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

from workshop.training.arguments import positive_int
from workshop.training.strategies import Report, choose_device, load_batches, load_model, loss_of, parse_arguments


def main():
    args = parse_arguments(__doc__, options)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(start, (args, f"file://{folder}/store"), nprocs=args.nproc)


def options(parser):
    parser.add_argument("--nproc", type=positive_int, default=2, help="number of processes")


def start(rank, args, store):
    os.environ["LOCAL_RANK"] = str(rank)
    device = choose_device()
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=args.nproc)
    train(device, args)
    dist.destroy_process_group()


def train(device, args):
    model = DDP(load_model(args).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = Report(args, device)
    for batch in load_batches(args, dist.get_rank(), dist.get_world_size()):
        loss = loss_of(model, batch.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.step(loss)
    report.end(model.module.state_dict())


if __name__ == "__main__":
    main()
