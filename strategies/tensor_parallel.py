"""Train with tensor parallelism: each process stores a part of each matrix, and all processes compute the same samples.

Run it:  torchrun --standalone --nproc-per-node=2 strategies/tensor_parallel.py --steps 20
"""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from workshop.training.strategies import Report, choose_device, load_batches, load_model, loss_of, parse_arguments

# In attention and in the MLP, the first matrices are split by columns and the last one by rows. Each of these blocks
# communicates only once in the forward pass, to add up the results of the last matrix, and once in the backward pass, to add up
# the gradients of its input, which PrepareModuleInput declares. tensor_parallel.py of stage 04 explains this.
INPUT = {"hidden_states": Replicate()}
PLAN = {
    "self_attn": PrepareModuleInput(input_kwarg_layouts=INPUT, desired_input_kwarg_layouts=INPUT),
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def main():
    args = parse_arguments(__doc__)
    device = choose_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    train(device, args)
    dist.destroy_process_group()


def train(device, args):
    model = load_model(args).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, PLAN)
    # Only the split matrices are DTensors. The default on a GPU, foreach=True, does not accept them together with other tensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    report = Report(args, device)
    for batch in load_batches(args):
        loss = loss_of(model, batch.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.step(loss)
    report.end(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))


if __name__ == "__main__":
    main()
