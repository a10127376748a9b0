"""Train with FSDP and tensor parallelism on a 2-D mesh: tensor parallelism within a node, FSDP across nodes.
Then it trains the same model in one process, on the same global batches, and compares the losses.

4 processes as 2 nodes of 2:  torchrun --standalone --nproc-per-node=4 04_model_parallel_with_fsdp/fsdp_tensor_parallel.py
Slurm:  srun --nodes=2 --ntasks-per-node=1 ... torchrun --nnodes=2 --nproc-per-node=4 ... fsdp_tensor_parallel.py --cuts 4
"""

import os

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
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
    args = parse_extra(__doc__, "--cuts", "processes that share each matrix: the GPUs of a node")
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        # The last dimension contains consecutive ranks, and torchrun numbers the processes of a node consecutively. So the
        # processes that communicate most are on the same node.
        shape = (dist.get_world_size() // args.cuts, args.cuts)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
        model = load_model(device)
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tensor"], PLAN)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh["data"])
        batches = first_batches(args, device)  # global batches, the same on every rank
        # Processes that share a matrix need the same samples, so only the data dimension divides the batch.
        losses = train(model, batches, mesh["data"].get_local_rank(), mesh["data"].size())
        compare_losses("FSDP and tensor parallel", losses, train(load_model(device), batches, 0, 1))
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


def train(model, batches, share, shares):
    """Take one optimizer step per batch, with this process's share of it, and return the loss of each whole batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        own = batch[share::shares]
        loss = model(input_ids=own, labels=own, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if shares > 1:
        dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


if __name__ == "__main__":
    main()
