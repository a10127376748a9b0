"""Train the same model in float32, bfloat16 and float8, and show what each format loses. One process, also without a GPU.

The program rounds the numbers to each format, and adds their products in float32. A GPU multiplies the rounded numbers directly,
which is faster, so the times are not those of a GPU. With bfloat16, a GPU also adds the products in float32, so you can expect
about the same loss. With float8, an H100 can lose more, because it keeps only about 14 bits of a sum (see docs/numerics.md).

Run it:  python 06_build_your_own/numerics.py --steps 100
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from workshop.files import write_atomically
from workshop.run.machine import machine
from workshop.training.arguments import ArgumentParser, positive_int
from workshop.training.building import SEED, batches, loss_of
from workshop.training.decoder import Config, Transformer

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# For each way to train: the format of the parameters and moments, of the factors of the forward pass, and of the gradients, and
# whether each tensor is scaled before it is rounded.
WAYS = {
    "float32": (torch.float32, None, None, False),
    "bfloat16 products, float32 parameters": (torch.float32, BF16, BF16, False),
    "bfloat16 everywhere": (BF16, BF16, BF16, False),
    "float8 products, each tensor scaled": (torch.float32, E4M3, E5M2, True),
    "float8 products, not scaled": (torch.float32, E4M3, E5M2, False),
}
LAST = 20  # steps whose mean loss is shown


def rounded(x, dtype, scaled):
    """Return x with the precision of a format; ``scaled``: as a multiple of its largest value, which uses the whole range."""
    if dtype is None:
        return x
    most = torch.finfo(dtype).max
    scale = most / x.abs().amax().float().clamp(min=1e-30) if scaled else 1.0
    return ((x.float() * scale).clamp(-most, most).to(dtype).float() / scale).to(x.dtype)


class Product(torch.autograd.Function):
    """The product of a linear layer, with rounded factors in the forward pass and in the backward pass."""

    lost, count = 0, 0  # elements of gradients that the format rounds to zero, and all elements

    @staticmethod
    def forward(ctx, x, weight, forward_format, backward_format, scaled):
        x, weight = rounded(x, forward_format, scaled), rounded(weight, forward_format, scaled)
        ctx.save_for_backward(x, weight)
        ctx.options = backward_format, scaled
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        kept = rounded(gradient, *ctx.options)
        Product.lost += int(((kept == 0) & (gradient != 0)).sum())
        Product.count += gradient.numel()
        return kept @ weight, kept.flatten(0, -2).T @ x.flatten(0, -2), None, None, None


def with_rounded_products(model, *formats):
    """Let the linear layers in the blocks of a Transformer round their factors. The embedding and the output layer stay exact."""
    for block in model.blocks:
        for layer in block.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = lambda x, layer=layer: product(layer, x, formats)
    return model


def product(layer, x, formats):
    output = Product.apply(x, layer.weight, *formats)
    return output if layer.bias is None else output + layer.bias


def train(args, parameters_format, *formats):
    """Return the mean loss of the last steps, the share of gradients rounded to zero, and the share of updates without effect."""
    torch.manual_seed(SEED)
    Product.lost = Product.count = unchanged = updates = 0
    model = with_rounded_products(Transformer(args.config).to(parameters_format), *formats)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for inputs, targets in batches(args):
        loss = loss_of(model(inputs).float(), targets)
        loss.backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        for old, parameter in zip(before, model.parameters(), strict=True):
            unchanged += int(((old == parameter) & (parameter.grad != 0)).sum())
            updates += int((parameter.grad != 0).sum())
        optimizer.zero_grad()
        losses.append(loss.item())
    last = losses[-LAST:]
    return sum(last) / len(last), Product.lost / Product.count, unchanged / updates


def main():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive_int, default=100)
    parser.add_argument("--batch-size", type=positive_int, default=8, help="sequences per batch")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--folder", default="runs/numerics", help="folder for the table")
    args = parser.parse_args()
    args.config = Config()
    rows = []
    print(f"{'':40} {'loss':>6}  {'gradients lost':>14}  {'updates lost':>12}")
    for name, formats in WAYS.items():
        loss, gradients, updates = train(args, *formats)
        rows.append({"name": name, "loss": loss, "gradients_lost": gradients, "updates_lost": updates})
        print(f"{name:40} {loss:6.3f}  {gradients:14.1%}  {updates:12.1%}", flush=True)
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    table = {"machine": machine(), "steps": args.steps, "lr": args.lr, "rows": rows}
    write_atomically(folder / "numerics.json", json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
