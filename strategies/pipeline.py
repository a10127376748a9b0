"""Train with pipeline parallelism: each process stores some of the layers, and the parts of a batch pass through all processes.

Run it:  torchrun --standalone --nproc-per-node=2 strategies/pipeline.py --steps 20
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from workshop.training.strategies import (
    Report,
    choose_device,
    load_batches,
    load_model,
    loss_of_logits,
    parse_arguments,
)

MICROBATCHES = 8  # equal parts of each global batch


class Stage(nn.Module):
    """The layers of one process. The first process also has the embedding, and the last one the output layer."""

    def __init__(self, model, rank, stages):
        super().__init__()
        count = len(model.model.layers)
        self.layers = nn.ModuleDict(
            {str(i): model.model.layers[i] for i in range(count) if i * stages // count == rank}
        )
        self.embed_tokens = model.model.embed_tokens if rank == 0 else nn.Identity()
        self.norm, self.lm_head = (
            (model.model.norm, model.lm_head) if rank == stages - 1 else (nn.Identity(), nn.Identity())
        )
        self.rotary = model.model.rotary_emb

    def forward(self, x):
        x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        for layer in self.layers.values():
            x = layer(x, position_embeddings=self.rotary(x, positions))
        return self.lm_head(self.norm(x))


def main():
    args = parse_arguments(__doc__)
    device = choose_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    train(device, args)
    dist.destroy_process_group()


def train(device, args):
    rank, stages = dist.get_rank(), dist.get_world_size()
    model = Stage(load_model(args), rank, stages).to(device)
    schedule = Schedule1F1B(PipelineStage(model, rank, stages, device), MICROBATCHES, loss_fn=loss_of_logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = Report(args, device)
    for batch in load_batches(args):
        losses = []
        schedule.step(*([batch.to(device)] if rank == 0 else []), target=batch.to(device), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        loss = (
            torch.stack(losses).mean() if losses else torch.zeros((), dtype=getattr(torch, args.dtype), device=device)
        )
        report.step(stages * loss)  # the report averages over the processes, and only the last one has a loss
    report.end(full_state_dict(model))


def full_state_dict(model):
    """Return the parameters of all stages, with the names of the whole model."""
    state = model.state_dict()
    own = {
        f"model.{name}": tensor.cpu() for name, tensor in state.items() if name.startswith(("layers", "embed", "norm"))
    }
    own |= {name: tensor.cpu() for name, tensor in state.items() if name.startswith("lm_head")}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: tensor for each in everyone for name, tensor in each.items()}


if __name__ == "__main__":
    main()
