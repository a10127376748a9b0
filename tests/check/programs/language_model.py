"""Train a small network to write Python, character by character, on any number of devices: counted in steps, no epochs.

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
    parser.add_argument("--batch-size", type=int, default=8, help="windows a step, on each process")
    parser.add_argument("--checkpoint", default="run.pt")
    parser.add_argument("--save-every", type=int, default=5, help="steps from one checkpoint to the next")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device, args)
    finally:
        dist.destroy_process_group()


def train(rank, world_size, device, args):
    tokens, vocabulary_size = read_tokens()
    torch.manual_seed(SEED)  # the same first weights in every run
    model = NextCharacter(vocabulary_size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # It must not depend on --steps: a run that is made longer later has to take the same way.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARM_UP))
    steps_done = load_checkpoint(args.checkpoint, model, optimizer, schedule, device)
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
    """Return the text of two standard modules as numbers, one for each character, and how many numbers there are."""
    text = "".join(Path(os.__file__).with_name(name).read_text("utf-8") for name in ("heapq.py", "shlex.py"))
    vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([vocabulary[character] for character in text]), len(vocabulary)


def get_batch(tokens, step, batch_size, rank, world_size):
    """Return this rank's windows of a step, and the characters that follow on each of theirs."""
    # Seeded with the step: all ranks shuffle alike, and a resumed run draws what it would have drawn.
    order = torch.randperm((len(tokens) - 1) // CONTEXT, generator=torch.Generator().manual_seed(SEED + step))
    mine = order[: batch_size * world_size][rank::world_size]
    positions = mine[:, None] * CONTEXT + torch.arange(CONTEXT)
    return tokens[positions], tokens[positions + 1]


def save_checkpoint(path, model, optimizer, schedule, step):
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save({**checkpoint, "step": step}, path + ".tmp")
    os.replace(path + ".tmp", path)  # atomic: whoever reads never finds half a checkpoint


def load_checkpoint(path, model, optimizer, schedule, device):
    """Fill all three from the checkpoint, if there is one, and return how many steps it has behind it."""
    if not os.path.exists(path):
        return 0
    checkpoint = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])
    return checkpoint["step"]


if __name__ == "__main__":
    main()
