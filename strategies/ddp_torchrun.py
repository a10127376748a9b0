"""Train with DDP, started by torchrun: each process stores the whole model and processes a part of each global batch.

Run it:  torchrun --standalone --nproc-per-node=2 strategies/ddp_torchrun.py --steps 20
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from workshop.training.strategies import Report, choose_device, load_batches, load_model, loss_of, parse_arguments


def main():
    args = parse_arguments(__doc__)
    device = choose_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
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
