"""Train with FSDP2: each process stores a shard of the parameters, the gradients and the optimizer state.

Run it:  torchrun --standalone --nproc-per-node=2 strategies/fsdp.py --steps 20
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from workshop.training.strategies import Report, choose_device, load_batches, load_model, loss_of, parse_arguments


def main():
    args = parse_arguments(__doc__, fsdp=True)
    device = choose_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    train(device, args)
    dist.destroy_process_group()


def train(device, args):
    model = load_model(args).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = Report(args, device)
    for batch in load_batches(args, dist.get_rank(), dist.get_world_size()):
        loss = loss_of(model, batch.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.step(loss)
    report.end(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))


if __name__ == "__main__":
    main()
