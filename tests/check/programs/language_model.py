"""Train a small character-level language model on Python code, on any number of devices. It counts steps and has no epochs.

N processes:  torchrun --standalone --nproc-per-node=2 tests/check/programs/language_model.py --steps 20
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

SEED, CONTEXT, WARM_UP, LOG_EVERY = 1234, 32, 8, 5


class NextCharacter(nn.Module):
    def __init__(self, vocabulary_size):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, 32)
        self.memory = nn.GRU(32, 96, batch_first=True)
        self.head = nn.Linear(96, vocabulary_size)

    def forward(self, tokens):
        return self.head(self.memory(self.embedding(tokens))[0])


@record
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of text per step and process")
    parser.add_argument("--checkpoint", default="run.pt")
    parser.add_argument("--save-every", type=int, default=5, help="steps between two checkpoints")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
        device = torch.accelerator.current_accelerator()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device, args)
    finally:
        dist.destroy_process_group()


def train(rank, world_size, device, args):
    tokens, vocabulary_size = read_tokens()
    torch.manual_seed(SEED)  # the same initial parameters in every run
    model = NextCharacter(vocabulary_size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # It must not depend on --steps, so that a resumed run with a larger --steps has the same learning rates in the same steps.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARM_UP))
    steps_done = load_checkpoint(args.checkpoint, model, optimizer, schedule)
    ddp_model = nn.parallel.DistributedDataParallel(model)
    for step in range(steps_done + 1, args.steps + 1):
        inputs, targets = get_batch(tokens, step, args.batch_size, rank, world_size)
        optimizer.zero_grad()
        logits = ddp_model(inputs.to(device))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % LOG_EVERY == 0 or step == args.steps:
            dist.all_reduce(mean_loss := loss.detach(), dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step} | loss {mean_loss.item():.2f}", flush=True)
        if rank == 0 and (step % args.save_every == 0 or step == args.steps):
            save_checkpoint(args.checkpoint, model, optimizer, schedule, step)


def read_tokens():
    """Return the text of two modules of the standard library as tokens, one per character, and the size of the vocabulary."""
    text = "".join(Path(os.__file__).with_name(name).read_text("utf-8") for name in ("heapq.py", "shlex.py"))
    vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([vocabulary[character] for character in text]), len(vocabulary)


def get_batch(tokens, step, batch_size, rank, world_size):
    """Return this rank's windows of a step, batch_size x CONTEXT tokens, and for each token the one that follows it."""
    # The step determines the seed: all ranks get the same order, and a resumed run gets the same batches.
    order = torch.randperm((len(tokens) - 1) // CONTEXT, generator=torch.Generator().manual_seed(SEED + step))
    mine = order[: batch_size * world_size][rank::world_size]
    positions = mine[:, None] * CONTEXT + torch.arange(CONTEXT)
    return tokens[positions], tokens[positions + 1]


def save_checkpoint(path, model, optimizer, schedule, step):
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save({**checkpoint, "step": step}, path + ".tmp")
    os.replace(path + ".tmp", path)  # atomic: a reader never finds an incomplete checkpoint


def load_checkpoint(path, model, optimizer, schedule):
    """Restore the model, the optimizer and the schedule from the checkpoint, if it exists; return the number of steps done."""
    if not os.path.exists(path):
        return 0
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    return checkpoint["step"]


if __name__ == "__main__":
    main()
