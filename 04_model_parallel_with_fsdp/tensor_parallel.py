"""Train with tensor parallelism: each process stores a part of each matrix, and all processes compute the same samples.
Then it trains the same model in one process, on the same batches, and compares the losses.

2 processes:  torchrun --standalone --nproc-per-node=2 04_model_parallel_with_fsdp/tensor_parallel.py
"""

import os

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from workshop.data.codellama import model_folder
from workshop.training.finetuning import compare_losses, first_batches, parse_extra

# In attention and in the MLP, the first matrices are split by columns and the last one by rows. The activations between them
# are sharded too, so in the forward pass each of these blocks communicates only once: it adds up the results of the last
# matrix. Attention is split between heads.
# In the backward pass, each block also communicates only once: it adds up the gradients of its input. PrepareModuleInput
# declares this input for the whole block. Without it, each of the first matrices would add up a gradient of its own.
INPUT = {"hidden_states": Replicate()}  # the same on all ranks; transformers passes it to attention by this keyword
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


@record  # torchrun then shows the traceback of the rank that failed first
def main():
    args = parse_extra(__doc__)
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        model = load_model(device)
        for layer in model.model.layers:
            parallelize_module(layer, mesh, PLAN)
        batches = first_batches(args, device)
        losses = train(model, batches)
        compare_losses("tensor parallel", losses, train(load_model(device), batches))
    finally:
        dist.destroy_process_group()


def choose_device(local_rank):
    # In a CUDA build, current_accelerator() returns "cuda" even without a GPU, so ask is_available() first.
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())  # 0 if only one GPU is visible
    return torch.accelerator.current_accelerator()


def load_model(device):
    """Return the model in float32, so that the losses differ only by rounding."""
    model = AutoModelForCausalLM.from_pretrained(
        model_folder("tiny-codellama"), dtype=torch.float32, local_files_only=True
    )
    return model.to(device)


def train(model, batches):
    """Take one optimizer step per batch and return the loss of each step."""
    # Only the split matrices are DTensors. The default on a GPU, foreach=True, does not accept them together with other tensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
