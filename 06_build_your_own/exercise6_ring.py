"""Exercise 6: build ring attention. Each process has a part of each sequence, and the keys and values rotate.
This program works as delivered, but each rank gathers the keys and values of the whole sequence.
Do the TODOs in order. Run and check the program after each TODO.

Run it:    06_build_your_own/exercise6_run_ring.sh --steps 40
Check it:  ./workshop.sh check 06_build_your_own/exercise6_ring.py
"""

import math
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from workshop.training.building import SEED, Log, batches, loss_of, parse_arguments, run
from workshop.training.decoder import Transformer


def pieces_of(rank, ranks):
    """Return the numbers of the two pieces that a rank has, in ascending order; a sequence has 2 pieces per rank."""
    # TODO 3: The queries of early pieces need few keys, and those of late pieces need many. Choose the pieces of each rank so
    # that all ranks compute the same number of scores when visible() skips the others.
    return [2 * rank, 2 * rank + 1]


def shard_sequence(tensor, dim=1, group=None):
    """Return this rank's pieces of a tensor that all ranks have, one after the other.

    Raises:
        ValueError: twice the number of ranks does not divide the length of the sequence, which is dimension ``dim``.
    """
    ranks, length = dist.get_world_size(group), tensor.shape[dim]
    if length % (2 * ranks):
        raise ValueError(
            f"a sequence of {length} tokens cannot be divided into 2 equal pieces for each of {ranks} ranks"
        )
    pieces = tensor.chunk(2 * ranks, dim)
    return torch.cat([pieces[number] for number in pieces_of(dist.get_rank(group), ranks)], dim)


def gather_sequence(tensor, dim=1, group=None):
    """Return the whole tensor, given this rank's pieces from ``shard_sequence``. The result has no gradient."""
    ranks, pieces = dist.get_world_size(group), {}
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    for rank, part in enumerate(parts):
        pieces.update(zip(pieces_of(rank, ranks), part.chunk(2, dim), strict=True))
    return torch.cat([pieces[number] for number in range(2 * ranks)], dim)


def ring_attention(query, key, value, group=None, causal=True):
    """Compute the attention of this rank's queries to the keys and values of all ranks.

    Args:
        query: batch x heads x tokens x head size, with the tokens of this rank in the order of ``shard_sequence``.
        key, value: the same, of the same tokens. They may have fewer heads, each for several heads of the query.
        group: the ranks that have the sequence; None: all. All of them must have the same shapes.
        causal: each token attends only to itself and the tokens before it.

    Raises:
        ValueError: the shapes do not fit together, or the number of tokens of a rank is odd.
    """
    same = query.dim() == 4 and key.shape == value.shape == (query.shape[0], *key.shape[1:2], *query.shape[2:])
    if not same or query.shape[1] % key.shape[1]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
        raise ValueError(
            f"query, key and value must have 4 dimensions that differ only in the heads, not the shapes {shapes}"
        )
    if query.shape[2] % 2:
        raise ValueError(f"this rank has {query.shape[2]} tokens of the sequence, which are not 2 equal pieces")
    query = query.unflatten(1, (key.shape[1], -1))  # heads of keys x heads of queries for each of them
    with torch.autocast(query.device.type, enabled=False):  # it would compute the scores with the precision of bfloat16
        return RingAttention.apply(query, key.unsqueeze(2), value.unsqueeze(2), group, causal).flatten(1, 2)


class RingAttention(torch.autograd.Function):
    """Attention to the keys and values of all ranks, for tensors of batch x heads of keys x heads for each x tokens x size."""

    @staticmethod
    def forward(ctx, query, key, value, group, causal):
        ctx.group, ctx.causal, wide_query = group, causal, wide(query)
        # TODO 1: Compute with the keys and values of one rank after the other, so that no rank stores all of them: first those of
        # this rank, then those of the previous rank, and so on. Communicate the next ones while you compute (rotate). Correct
        # the output and the total (the logarithm of the sum of the exponentials of the scores) for each block from visible().
        # Look up: "online softmax" in the paper on FlashAttention, torch.logaddexp.
        keys, values = wide(gather_sequence(torch.stack([key, value]), -2, group))
        positions = torch.arange(keys.shape[-2], device=query.device)
        future = positions > shard_sequence(positions, 0, group)[:, None]
        scores = wide_query @ keys.mT * query.shape[-1] ** -0.5
        scores = scores.masked_fill(future, -math.inf) if causal else scores
        total = scores.logsumexp(-1)
        output = (scores - total[..., None]).exp() @ values
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        group, causal = ctx.group, ctx.causal
        # TODO 2: Compute the gradients block by block too. The saved total gives the weights of the softmax: exp(scores - total).
        # The gradients follow the keys and values from rank to rank, and each rank adds its terms. Finally each rank has the
        # sum for its own keys and values. Look up: the backward pass in the paper on FlashAttention.
        query, key, value, *_ = ctx.saved_tensors
        keys, values = gather_sequence(torch.stack([key, value]), -2, group)
        positions = torch.arange(keys.shape[-2], device=query.device)
        future = positions > shard_sequence(positions, 0, group)[:, None]
        with torch.enable_grad():
            whole = [wide(each.detach()).requires_grad_() for each in (query, keys, values)]
            scores = whole[0] @ whole[1].mT * query.shape[-1] ** -0.5
            output = (scores.masked_fill(future, -math.inf) if causal else scores).softmax(-1) @ whole[2]
        d_query, *d_whole = torch.autograd.grad(output, whole, wide(gradient))
        d_whole = torch.stack(d_whole)
        dist.all_reduce(d_whole, group=group)
        d_key, d_value = shard_sequence(d_whole, -2, group)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


def visible(query, rank, source, ranks, causal):
    """Yield slices of the queries of a rank and of the keys of a source, and by how many tokens the queries come later."""
    size = query.shape[-2] // 2
    for row, query_piece in enumerate(pieces_of(rank, ranks)):
        for column, key_piece in enumerate(pieces_of(source, ranks)):
            shift = (query_piece - key_piece) * size if causal else math.inf
            # TODO 3: Skip the keys if all of them come after all these queries.
            yield slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size), shift


def scores_of(query, key, shift):
    """Return the scores of queries for keys. The first query comes ``shift`` tokens after the first key."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if shift < key.shape[-2]:  # some keys are in the future of some queries
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + shift)
        scores = scores.masked_fill(future, -math.inf)
    return scores


def rotate(tensor, group):
    """Send a tensor to the next rank. Return a function that waits for the tensor of the previous rank and returns it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    # TODO 1: Receive only the tensor of the previous rank. Start to send and to receive here, and wait in the function that you
    # return, so that the ranks can compute in between. A single rank sends nothing.
    # Look up: torch.distributed.batch_isend_irecv, torch.distributed.P2POp.
    tensors = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(tensors, tensor, group=group)
    return lambda: tensors[rank - 1]


def wide(tensor):
    """Convert a tensor for sums of many terms, which need at least the precision of float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def options(parser):
    parser.add_argument("--pytorch", action="store_true", help="use PyTorch's context_parallel, which needs GPUs")
    if "--pytorch" in sys.argv and not torch.accelerator.is_available():
        parser.error("--pytorch: PyTorch's context_parallel does not run on the CPU")


def train(device, args):
    torch.manual_seed(SEED)
    model = Transformer(args.config).to(device, args.dtype)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if not args.pytorch:
        for block in model.blocks:
            block.attention.attend = ring_attention
    model = nn.parallel.DistributedDataParallel(model)  # averages the gradients: each rank has the mean over its tokens
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    log = Log(args, device)
    for inputs, targets in batches(args):
        # The target of a token is the token after it. batches() has shifted the targets already. This must happen before the
        # sequence is divided, because the token after the last one of a piece is on a different rank.
        tensors, dims = [inputs.to(device), targets.to(device), torch.arange(args.length, device=device)], [1, 1, 0]
        with context_parallel(mesh, buffers=tensors, buffer_seq_dims=dims) if args.pytorch else nullcontext():
            if not args.pytorch:
                tensors = [shard_sequence(tensor, dim) for tensor, dim in zip(tensors, dims, strict=True)]
            inputs, targets, positions = tensors
            loss = loss_of(model(inputs, positions), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    log.end()


if __name__ == "__main__":
    run(train, parse_arguments(__doc__, options, divides="length"))
