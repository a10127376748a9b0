"""Exercise 7: build expert parallelism. Each process has some experts, and sends each token to the process of its expert.
This program works as delivered, but each process has all experts of each layer.
Do the TODOs in order. Run and check the program after each TODO.

Run it:    06_build_your_own/exercise7_run_experts.sh --steps 40
Check it:  ./workshop.sh check 06_build_your_own/exercise7_experts.py
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from workshop.training.arguments import positive_int
from workshop.training.building import SEED, Log, batches, loss_of, parse_arguments, run
from workshop.training.decoder import MLP, Transformer
from workshop.training.experts import pytorch_all_to_all, report_experts


class MixtureOfExperts(nn.Module):
    """Compute each token with a few of many experts: those that a trained router gives the largest probabilities.

    The result of a token is the sum of the outputs of its experts, each multiplied by its probability. The experts are divided
    over the ranks. Each rank calls the layer with its own tokens. All ranks must create the layer with the same random numbers.

    Args:
        width: the numbers per token.
        make_expert: returns a new expert, a module that maps rows x width to rows x width. It is also called with 0 rows.
        experts: the number of all experts.
        top_k: the number of experts for each token.
        capacity_factor: an expert computes at most this multiple of its equal share of each sequence, and drops later tokens:
            their result is 0. None: no limit.
        group: the ranks; None: all.
        all_to_all: a function with the arguments of ``AllToAll.apply``, which is the default.

    Attributes:
        chosen, computed: for each expert, how many tokens of this rank chose it in the last forward pass, and how many of them
            it computed.

    Raises:
        ValueError: the ranks do not divide the experts; top_k, capacity_factor or, in ``forward``, the input is impossible.
    """

    def __init__(self, width, make_expert, experts, top_k=1, capacity_factor=None, group=None, all_to_all=None):
        super().__init__()
        rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if experts < 1 or experts % self.ranks:
            raise ValueError(f"{self.ranks} ranks do not divide the {experts} experts")
        if not 1 <= top_k <= experts:
            raise ValueError(f"each token needs at least 1 and at most {experts} of the {experts} experts, not {top_k}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"the capacity factor must be larger than 0, not {capacity_factor}")
        self.width, self.top_k, self.capacity_factor, self.group = width, top_k, capacity_factor, group
        self.all_to_all = all_to_all or AllToAll.apply
        self.router = nn.Linear(width, experts, bias=False)
        self.own = [str(number) for number in range(experts) if number * self.ranks // experts == rank]
        self.experts = nn.ModuleDict()
        for number in range(experts):
            expert = make_expert()  # each rank creates all of them, to have the random numbers of one process
            # TODO 1: In the end, keep only the experts of this rank, self.own: no token comes for the others.
            self.experts[str(number)] = expert

    def forward(self, x):
        """Return the results of the tokens (... x length x width)."""
        if x.dim() < 2 or x.shape[-1] != self.width:
            raise ValueError(f"the input has the shape {list(x.shape)}; the layer needs ... x length x {self.width}")
        logits = self.router(x)
        # At least float32: in lower precision, many probabilities would be equal.
        self.probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        gates, experts = self.probabilities.topk(self.top_k)  # ... x length x top_k
        choices = experts.flatten()  # choice number i is one of token number i // top_k
        order = choices.argsort(stable=True)  # numbers of choices: those of expert 0, then those of expert 1, ...
        if self.capacity_factor is not None:
            order = order[self.has_place(experts).flatten()[order]]
        self.chosen, self.computed = (each.bincount(minlength=logits.shape[-1]) for each in (choices, choices[order]))
        outputs = self.compute(x.flatten(0, -2)[order // self.top_k], self.computed)
        results = outputs.new_zeros(len(choices), self.width).index_copy(0, order, outputs)
        return (results.view(*experts.shape, self.width) * gates.to(outputs.dtype).unsqueeze(-1)).sum(-2)

    def has_place(self, experts):
        """Return for each choice whether its expert still has a place for it. Each sequence has its own places.

        If sequences shared places, a result would depend on the other sequences of its rank and on the number of ranks. Earlier
        tokens get the places, because in a language model the result of a token must not depend on later tokens.
        """
        # TODO 2: An expert that gets most of the tokens delays all ranks, and its rank needs memory for them. Give each expert a
        # number of places per sequence: capacity_factor times its equal share of the choices, rounded up. Count for each choice
        # how many of the earlier choices of its sequence, in the order of (token, choice), have the same expert.
        # Look up: torch.nn.functional.one_hot, Tensor.cumsum.
        return torch.ones_like(experts, dtype=torch.bool)

    def compute(self, tokens, counts):
        """Return the outputs of the experts, in the order of the tokens: ``counts[0]`` tokens for expert 0, then the others."""
        # TODO 1: All ranks hold all experts, and sum their gradients. Instead, send each token to the rank that has its expert
        # among self.own, compute it there, and send the output back to its place. The ranks must know first how many tokens come
        # for each expert. A rank may get no token at all, and a rank whose tokens need no gradient must still take part in the
        # backward pass of the others. Run the program before you remove experts from the ranks.
        # Look up: torch.distributed.all_to_all_single (output_split_sizes, input_split_sizes), Tensor.repeat_interleave, argsort.
        parts = zip(self.experts, tokens.split(counts.tolist()), strict=True)
        return torch.cat([self.experts[name](part) for name, part in parts])

    def balance_loss(self):
        """Return the load-balancing loss of the last forward pass over the tokens of all ranks: 1 if all experts get the same.

        It is the sum over the experts of (share of the choices * mean probability), times the number of experts. Each rank gets
        the gradient of its own probabilities: the mean of the gradients of all ranks is the gradient of this loss.
        """
        # TODO 3: Compute this loss from self.probabilities and self.chosen. Take the shares and the mean probabilities over the
        # tokens of all ranks, because the mean of the losses of single ranks is a different number. all_reduce has no gradient:
        # give each rank the gradient of its own probabilities, and consider that average_gradients() divides it.
        # Look up: torch.distributed.all_reduce, Tensor.detach.
        return self.probabilities.new_zeros(())


class AllToAll(torch.autograd.Function):
    """Send rows to the ranks of a group, and return the rows that they send. The backward pass sends the gradients back.

    ``send`` and ``receive`` are the numbers of rows to and from each rank. The rows are in the order of the ranks.
    """

    # TODO 1: Write the static methods forward(ctx, rows, send, receive, group) and backward(ctx, gradient), because autograd does
    # not know how to compute the gradient of a collective. Look up: torch.autograd.Function, "Extending PyTorch".


def average_gradients(module, group=None):
    """Make the gradients those of the mean loss of all ranks. All ranks must call this after the backward pass.

    Each rank has all tokens of its experts, so it already has the sum of their gradients over the ranks.
    """
    # TODO 1: In the end, only divide the gradients of the experts here, and do not sum them: other ranks have other experts.
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # this rank has not used it, but others may have
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size(group)
            dist.all_reduce(parameter.grad, group=group)  # TODO 1: only if other ranks have this parameter too


def options(parser):
    parser.add_argument("--experts", type=positive_int, default=8, help="of each layer")
    parser.add_argument("--top-k", type=positive_int, default=1, help="experts for each token")
    parser.add_argument("--capacity-factor", type=float, help="limit for each expert, in equal shares of the tokens")
    parser.add_argument("--balance", type=float, default=0.0, help="factor of the load-balancing loss")
    parser.add_argument("--pytorch", action="store_true", help="use PyTorch's all-to-all with gradients")


def train(device, args):
    rank, world_size, width = dist.get_rank(), dist.get_world_size(), args.config.width
    sizes = {"experts": args.experts, "top_k": args.top_k, "capacity_factor": args.capacity_factor}
    exchange = pytorch_all_to_all if args.pytorch else None
    torch.manual_seed(SEED)
    model = Transformer(args.config)
    for block in model.blocks:
        block.mlp = MixtureOfExperts(width, lambda: MLP(args.config), **sizes, all_to_all=exchange)
    model.to(device, args.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    log, layers, counts = Log(args, device), [block.mlp for block in model.blocks], []
    for inputs, targets in batches(args):
        inputs, targets = inputs[rank::world_size].to(device), targets[rank::world_size].to(device)
        loss = loss_of(model(inputs), targets)
        if args.balance:
            loss = loss + args.balance * sum(layer.balance_loss() for layer in layers)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
        counts.append([(layer.chosen, layer.computed) for layer in layers])
    log.end()
    report_experts(args, counts)


if __name__ == "__main__":
    run(train, parse_arguments(__doc__, options))
