"""A small masked language model, cut into as many pipeline stages as there are processes (GPipe: all forward passes of the
micro-batches, then all backward passes). The first and the last stage both hold the token table: embedding and output layer are tied.

    torchrun --nproc-per-node=2 train.py

Each stage writes its own file into --dir; a later start goes on from the newest epoch that is there.
"""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, MASK, LENGTH, WIDTH = 41, 40, 24, 48


def make_sentences(n, seed):
    """A topic chooses words; a word is mostly followed by its partner."""
    g = torch.Generator().manual_seed(8)
    topics = (1.6 * torch.randn(6, MASK, generator=g)).softmax(1)
    partner = torch.randperm(MASK, generator=g)
    g = torch.Generator().manual_seed(seed)
    topic = torch.randint(6, (n,), generator=g)
    out = torch.multinomial(topics[topic], LENGTH, replacement=True, generator=g)
    for t in range(1, LENGTH, 2):
        follow = torch.rand(n, generator=g) < 0.9
        out[:, t] = torch.where(follow, partner[out[:, t - 1]], out[:, t])
    return out


def hide(sentences, g):
    """Inputs with 20 % of the words replaced by MASK, and a boolean tensor of the places to be guessed."""
    places = torch.rand(sentences.shape, generator=g) < 0.2
    return sentences.masked_fill(places, MASK), places


class Stage(nn.Module):
    """The layers of one stage; the first one also embeds, the last one also gives logits."""

    def __init__(self, stage, stages, layers, dropout):
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first or self.last:
            self.table = nn.Parameter(0.1 * torch.randn(VOCAB, WIDTH))
        if self.first:
            self.position = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        share = range(stage * layers // stages, (stage + 1) * layers // stages)
        self.layers = nn.ModuleDict({str(i): nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout, activation="gelu", batch_first=True, norm_first=True) for i in share})
        if self.last:
            self.norm, self.bias = nn.LayerNorm(WIDTH), nn.Parameter(torch.zeros(VOCAB))

    def forward(self, x):
        if self.first:
            x = self.table[x] + self.position
        for layer in self.layers.values():
            x = layer(x)
        return F.linear(self.norm(x), self.table, self.bias) if self.last else x


def build(stage, stages, layers, dropout):
    """Every stage draws the whole model and keeps its part, so that the first weights do not depend on the number of stages."""
    whole = Stage(0, 1, layers, dropout)
    part = Stage(stage, stages, layers, dropout)
    part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
    return part


class Pipeline:
    def __init__(self, module, micro_batches):
        self.module, self.micro_batches = module, micro_batches
        self.stage, self.stages = dist.get_rank(), dist.get_world_size()

    def receive(self, source, n):
        x = torch.empty(n, LENGTH, WIDTH)
        dist.recv(x, source)
        return x

    def forward(self, x):
        """One micro-batch up to the end of this stage: what came in and what goes out."""
        came = x if self.module.first else self.receive(self.stage - 1, len(x)).requires_grad_(torch.is_grad_enabled())
        out = self.module(came)
        if not self.module.last:
            dist.send(out.detach().contiguous(), self.stage + 1)
        return came, out

    def train_step(self, inputs, sentences, places):
        """Leaves the gradients of the mean loss over all hidden words in the parameters; returns the loss (on the last stage)."""
        hidden = places.sum()
        parts = list(zip(inputs.chunk(self.micro_batches), sentences.chunk(self.micro_batches), places.chunk(self.micro_batches)))
        kept, total = [], torch.zeros(())
        for x, words, where in parts:
            came, out = self.forward(x)
            if self.module.last:
                out = F.cross_entropy(out[where], words[where], reduction="sum") / hidden
                total += out.detach()
            kept.append((came, out))
        for came, out in kept:
            if self.module.last:
                out.backward()
            else:
                out.backward(self.receive(self.stage + 1, len(out)))
            if not self.module.first:
                dist.send(came.grad, self.stage - 1)
        return total

    @torch.no_grad()
    def evaluate(self, sentences):
        """Accuracy on hidden words; the last stage knows it and tells the others."""
        self.module.eval()
        inputs, places = hide(sentences, torch.Generator().manual_seed(99))
        right = torch.zeros(2)
        for x, words, where in zip(inputs.split(64), sentences.split(64), places.split(64)):
            _, out = self.forward(x)
            if self.module.last:
                right += torch.tensor([(out.argmax(2) == words)[where].sum(), where.sum()])
        self.module.train()
        dist.broadcast(right, self.stages - 1)
        return (right[0] / right[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--dir", default="stages")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    stage, stages = dist.get_rank(), dist.get_world_size()
    train, test = make_sentences(960, seed=1), make_sentences(256, seed=2)
    torch.manual_seed(0)
    module = build(stage, stages, args.layers, args.dropout)
    pipeline = Pipeline(module, args.micro_batches)
    tied = dist.new_group(sorted({0, stages - 1}))
    mine = [p for name, p in module.named_parameters() if name != "table" or module.first]  # counted once in the norm
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr, weight_decay=0.01)
    steps = len(train) // args.batch

    first, newest = 0, os.path.join(args.dir, "newest.json")
    if os.path.exists(newest):
        with open(newest) as f:
            first = json.load(f)["epochs"]
        state = torch.load(os.path.join(args.dir, f"epoch{first}_stage{stage}.pt"))
        assert state["stages"] == stages, "the number of stages must stay the same"
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])

    for epoch in range(first, args.epochs):
        g = torch.Generator().manual_seed(50 + epoch)  # the same on all stages: order and hidden words
        order = torch.randperm(len(train), generator=g)
        torch.manual_seed(1000 * (epoch + 1) + stage)  # dropout: another stream in each stage and epoch
        mean_loss = 0.0
        for i in range(steps):
            step = epoch * steps + i
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1, (step + 1) / 10) * (0.1 + 0.9 * (1 - step / (steps * args.epochs)))
            sentences = train[order[i * args.batch:(i + 1) * args.batch]]
            inputs, places = hide(sentences, g)
            optimizer.zero_grad()
            loss = pipeline.train_step(inputs, sentences, places)
            if stages > 1 and (module.first or module.last):
                dist.all_reduce(module.table.grad, group=tied)
            squares = sum(p.grad.square().sum() for p in mine)
            dist.all_reduce(squares)
            factor = (args.clip / (squares.sqrt() + 1e-6)).clamp(max=1)
            for p in module.parameters():
                p.grad *= factor
            optimizer.step()
            dist.broadcast(loss, stages - 1)
            mean_loss += loss.item() / steps
        accuracy = pipeline.evaluate(test)
        if stage == 0:
            print(f"epoch {epoch}: loss {mean_loss:.4f}, accuracy on hidden words {accuracy:.4f}", flush=True)
        os.makedirs(args.dir, exist_ok=True)
        torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict(), "stages": stages},
                   os.path.join(args.dir, f"epoch{epoch + 1}_stage{stage}.pt"))
        dist.barrier()
        if stage == 0:  # all stages have written their parts
            with open(newest + ".tmp", "w") as f:
                json.dump({"epochs": epoch + 1}, f)
            os.replace(newest + ".tmp", newest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
