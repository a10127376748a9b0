"""Train with context parallelism: each process has a part of each sequence, and gathers the keys and values of the others.

Run it:  torchrun --standalone --nproc-per-node=2 strategies/context_parallel.py --steps 20
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AttentionInterface

from workshop.training.strategies import TOKENS, Report, choose_device, load_batches, load_model, parse_arguments


def main():
    args = parse_arguments(__doc__)
    device = choose_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    train(device, args)
    dist.destroy_process_group()


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    everywhere = torch.arange(TOKENS, device=device)
    own = everywhere.chunk(world_size)[rank]  # the positions of this process: consecutive tokens
    mask = own.unsqueeze(1) >= everywhere  # a token attends to itself and to the tokens before it

    def attend(module, query, key, value, attention_mask, scaling=None, **options):
        # Shard(2): each process has its tokens. Partial(): each process computes a term of the gradient of all keys and values.
        # Ring attention, exercise 6 of stage 06, never stores the keys and values of all tokens at once.
        parts = (DTensor.from_local(each, mesh, [Shard(2)]) for each in (key, value))
        key, value = (part.full_tensor(grad_placements=[Partial()]) for part in parts)
        grouped = query.shape[1] > key.shape[1]
        output = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=grouped)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("context_parallel", attend)
    model = load_model(args).to(device)
    model.set_attn_implementation("context_parallel")
    model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = Report(args, device)
    for batch in load_batches(args):
        batch = batch.to(device)
        logits = model(input_ids=batch[:, own], position_ids=own.unsqueeze(0), use_cache=False).logits
        targets = F.pad(batch[:, 1:], (0, 1), value=-100)[
            :, own
        ]  # shifted before they are divided; the last token has none
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss * world_size / batch[:, 1:].numel()  # the mean over the processes is the mean over all tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.step(loss)
    report.end(model.module.state_dict())


if __name__ == "__main__":
    main()
