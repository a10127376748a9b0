"""Train a model with experts: each process stores some of the experts of each layer, and computes the tokens that choose them.

Run it:  torchrun --standalone --nproc-per-node=2 strategies/expert_parallel.py --steps 20     (without torchrun: one process)
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from workshop.training.strategies import (
    SEED,
    Report,
    choose_device,
    load_batches,
    load_model,
    loss_of,
    parse_arguments,
)

EXPERTS = 8  # in each layer


class Experts(nn.Module):
    """Several copies of an MLP, of which each token uses the one with the highest probability.

    Each process gathers the tokens of all processes, computes its experts, and keeps the results of its own tokens. With many
    processes, a program sends each token only to the process of its expert, with all_to_all: exercise 7 of stage 06.
    """

    def __init__(self, mlp, width, rank, world_size, mesh):
        super().__init__()
        self.mesh, self.router = mesh, nn.Linear(width, EXPERTS, bias=False)
        experts = {str(number): copy.deepcopy(mlp) for number in range(EXPERTS)}
        for expert in experts.values():
            for parameter in expert.parameters():
                nn.init.normal_(parameter, std=0.02)
        self.experts = nn.ModuleDict({name: experts[name] for name in list(experts)[rank::world_size]})

    def forward(self, x):
        tokens = x.flatten(0, 1)
        if self.mesh:
            tokens = DTensor.from_local(tokens, self.mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()])
        probabilities, chosen = self.router(tokens).softmax(-1).max(-1)
        output = torch.zeros_like(tokens)
        for name, expert in self.experts.items():
            rows = (chosen == int(name)).nonzero().flatten()
            output = output.index_copy(0, rows, probabilities[rows, None] * expert(tokens[rows]))
        if self.mesh:  # each process has the results of its experts: sum them, and keep the own tokens
            output = DTensor.from_local(output, self.mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()
        return output.view_as(x)


def main():
    args = parse_arguments(__doc__)
    device = choose_device()
    if "RANK" in os.environ:
        dist.init_process_group(dist.get_default_backend_for_device(device))
    train(device, args)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(device, args):
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = init_device_mesh(device.type, (world_size,)) if world_size > 1 else None
    model = load_model(args)
    torch.manual_seed(SEED)
    for layer in model.model.layers:
        layer.mlp = Experts(layer.mlp, model.config.hidden_size, rank, world_size, mesh)
    model.to(device, getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = Report(args, device)
    for batch in load_batches(args, rank, world_size):
        loss = loss_of(model, batch.to(device))
        loss.backward()
        average_gradients(model, world_size)
        optimizer.step()
        optimizer.zero_grad()
        report.step(loss)
    report.end(full_state_dict(model, world_size))


def average_gradients(model, world_size):
    """Average the gradients over the processes. The gradient of an expert is already a sum, because it had all tokens."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # no token chose this expert
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= world_size
        if world_size > 1 and ".experts." not in name:
            dist.all_reduce(parameter.grad)


def full_state_dict(model, world_size):
    """Return the parameters of the whole model, with the experts of all processes."""
    everyone = [model.state_dict()]
    if world_size > 1:
        own = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        everyone = [None] * world_size
        dist.all_gather_object(everyone, own)
    return {name: tensor for each in everyone for name, tensor in each.items()}


if __name__ == "__main__":
    main()
