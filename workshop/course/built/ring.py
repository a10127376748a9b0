"""Cases for ring_attention, shard_sequence and gather_sequence of exercise 6."""

from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from workshop.course.built.cases import Case, first_problem
from workshop.training.traffic import Messages

CLOSE = 1e-10  # of float64, relative to the largest number
PIECE, SIZE = 3, 4  # tokens of half a rank, numbers of a head
UNEVEN = 1.1  # times the mean of all ranks; with pieces in zig-zag order, all are equal
MORE = 1.05  # times the needed bytes or products
PRODUCTS = {
    "forward": 2,
    "backward": 7,
}  # of queries and keys: two, and five more if the backward pass computes both again
Tensors = list[torch.Tensor]
NAMES = ("output", "gradient of query", "gradient of key", "gradient of value")


def tensors(heads: int = 2, key_heads: int = 2, piece: int = PIECE, dtype: torch.dtype = torch.float64) -> Tensors:
    """Query, key, value and a gradient of the output, equal on all ranks, with the memory layout of a model."""
    chance = torch.Generator().manual_seed(0)
    length = 2 * dist.get_world_size() * piece
    shapes = [(2, length, count, SIZE) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=chance).transpose(1, 2).to(dtype) for shape in shapes]


def in_one_process(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor, causal: bool
) -> Tensors:
    inputs = [each.detach().requires_grad_() for each in (query, key, value)]
    heads = query.shape[1] // key.shape[1]
    expanded = [each.repeat_interleave(heads, 1) for each in inputs[1:]]
    output = F.scaled_dot_product_attention(inputs[0], *expanded, is_causal=causal)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def on_this_rank(module: ModuleType, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
    return [module.shard_sequence(each, 2).detach().clone().requires_grad_() for each in (query, key, value)]


def differing(module: ModuleType, found: Tensors, expected: Tensors, what: str, close: float = CLOSE) -> str:
    """Name the first tensor that differs from the part of this rank of that of one process, or return ""."""
    for name, own, whole in zip(NAMES, found, expected, strict=False):
        right = module.shard_sequence(whole, 2)
        if own.shape != right.shape:
            return f"the {name} has the shape {tuple(own.shape)} instead of {tuple(right.shape)}{what}"
        error = float((own.double() - right).abs().max() / whole.abs().max())
        if not error < close:
            return f"the {name} differs by {error:.1e} (relative) from scaled_dot_product_attention{what}"
    return ""


def attention(module: ModuleType) -> str:
    found = []
    for causal in (True, False):
        for heads, key_heads in ((2, 2), (4, 2), (3, 1)):
            whole = tensors(heads, key_heads)
            output = module.ring_attention(*on_this_rank(module, *whole[:3]), causal=causal)
            what = f", with causal={causal} and {heads} heads of queries for {key_heads} of keys"
            found.append(differing(module, [output.detach()], in_one_process(*whole, causal), what))
    return next(filter(None, found), "")


def large_scores(module: ModuleType) -> str:
    query, key, value, gradient = tensors()
    whole = [query * 300, key * 300, value, gradient]
    output = module.ring_attention(*on_this_rank(module, *whole[:3]))
    return differing(module, [output.detach()], in_one_process(*whole, True), ", with scores of 100,000")


def computed(module: ModuleType, whole: Tensors, causal: bool = True) -> Tensors:
    """Return the output and the gradients of this rank."""
    inputs = on_this_rank(module, *whole[:3])
    output = module.ring_attention(*inputs, causal=causal)
    output.backward(module.shard_sequence(whole[3], 2))
    return [output.detach(), *(torch.zeros_like(each) if each.grad is None else each.grad for each in inputs)]


def attention_gradients(module: ModuleType) -> str:
    found = []
    for causal in (True, False):
        for heads, key_heads in ((2, 2), (4, 2)):
            whole = tensors(heads, key_heads)
            what = f", with causal={causal} and {heads} heads of queries for {key_heads} of keys"
            found.append(differing(module, computed(module, whole, causal), in_one_process(*whole, causal), what))
    return next(filter(None, found), "")


def low_precision(module: ModuleType) -> str:
    """The sums have many terms, so a program must not add them up in bfloat16."""
    whole = tensors(4, 1, piece=16, dtype=torch.bfloat16)
    found = computed(module, whole)
    if {each.dtype for each in found} != {torch.bfloat16}:
        return (
            f"output and gradients of inputs in bfloat16 have the types {', '.join(str(each.dtype) for each in found)}"
        )
    expected = in_one_process(*(each.double() for each in whole), True)
    return differing(module, found, expected, "", close=torch.finfo(torch.bfloat16).eps)


def sequence_shards(module: ModuleType) -> str:
    ranks = dist.get_world_size()
    for shape, dim in (((2, 4 * ranks, 3), 1), ((6 * ranks,), 0), ((2, 3, 2 * ranks), 2)):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        own = module.shard_sequence(whole, dim)
        size, rank = own.shape[dim], dist.get_rank()
        wrong = (
            ""
            if size * ranks == shape[dim]
            else f"shard_sequence() returns {size} of {shape[dim]} tokens on rank {rank}"
        )
        if wrong := first_problem(wrong):
            return wrong
        if not torch.equal(module.gather_sequence(own, dim), whole):
            return f"gather_sequence(shard_sequence(tensor, {dim}), {dim}) is not the tensor, with the shape {shape}"
    return ""


def one_member(module: ModuleType) -> str:
    """Each rank is the only one of its group."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    whole = tensors()
    inputs = [each.detach().clone().requires_grad_() for each in whole[:3]]
    output = module.ring_attention(*(module.shard_sequence(each, 2, group) for each in inputs), group=group)
    output.backward(module.shard_sequence(whole[3], 2, group))
    expected = in_one_process(*whole, True)
    found = [module.gather_sequence(output.detach(), 2, group), *(each.grad for each in inputs)]
    wrong = [name for name, a, b in zip(NAMES, found, expected, strict=True) if not float((a - b).abs().max()) < CLOSE]
    return f"the {wrong[0]} differs from scaled_dot_product_attention in a group of one rank" if wrong else ""


def sequence_errors(module: ModuleType) -> str:
    query, longer = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 8, 4)
    cases: dict[str, Callable[[], object]] = {
        "shard_sequence() of a sequence with one token too many": lambda: module.shard_sequence(
            torch.zeros(1, 2 * dist.get_world_size() + 1)
        ),
        "keys and values of different shapes": lambda: module.ring_attention(query, query, longer),
        "keys of a different length than the queries": lambda: module.ring_attention(query, longer, longer),
        "an odd number of tokens": lambda: module.ring_attention(*[torch.randn(1, 2, 5, 4)] * 3),
    }
    for what, function in cases.items():
        try:
            function()
        except ValueError:
            continue
        return f"{what}: no ValueError is raised"
    return ""


def sent(module: ModuleType) -> tuple[int, int, int]:
    """The bytes of the keys and values of a rank, and what it sends in the forward and the backward pass."""
    whole = tensors(4, 2)
    inputs = on_this_rank(module, *whole[:3])
    with Messages() as forward:
        output = module.ring_attention(*inputs)
    with Messages() as backward:
        output.backward(module.shard_sequence(whole[3], 2))
    return inputs[1].nbytes + inputs[2].nbytes, forward.bytes, backward.bytes


def forward_bytes(module: ModuleType) -> str:
    own, forward, _ = sent(module)
    needed = (dist.get_world_size() - 1) * own
    return "" if forward <= MORE * needed else f"a forward pass sends {forward} bytes per rank; {needed} are enough"


def backward_bytes(module: ModuleType) -> str:
    own, _, backward = sent(module)
    needed = (2 * dist.get_world_size() - 1) * own
    return "" if backward <= MORE * needed else f"a backward pass sends {backward} bytes per rank; {needed} are enough"


def work(module: ModuleType) -> dict[str, list[float]]:
    """The products of each rank, in multiples of one product for a piece of queries and a piece of keys."""
    whole = tensors()
    inputs = on_this_rank(module, *whole[:3])
    with FlopCounterMode(display=False) as forward:
        output = module.ring_attention(*inputs)
    with FlopCounterMode(display=False) as backward:
        output.backward(torch.ones_like(output))
    unit = 2 * whole[0][:, :, :PIECE, 0].numel() * PIECE * SIZE
    own = [each.get_total_flops() / unit for each in (forward, backward)]
    everyone: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return dict(zip(PRODUCTS, map(list, zip(*everyone, strict=True)), strict=True))


def scores(module: ModuleType) -> str:
    ranks = dist.get_world_size()
    pieces = ranks * (2 * ranks + 1)  # half of the (2 N)² pairs of pieces, and those on the diagonal
    for phase, products in work(module).items():
        most, found = PRODUCTS[phase] * pieces, sum(products)
        if found > MORE * most:
            of = f"the {2 * ranks} pieces of queries and {2 * ranks} pieces of keys"
            return f"for {of}, the {phase} pass computes {found:.0f} products of two pieces; {most} are enough"
    return ""


def scores_of_ranks(module: ModuleType) -> str:
    for phase, products in work(module).items():
        if max(products) > UNEVEN * sum(products) / len(products):
            each = " and ".join(f"{number:.0f}" for number in products)
            return f"in the {phase} pass, the ranks compute {each} products of two pieces, which is uneven"
    return ""


# Cases in which ranks may wait for each other come last, because nothing can be tried after them.
CASES: dict[str, Case] = {
    "sequence-shards": sequence_shards,
    "one-member": one_member,
    "attention": attention,
    "large-scores": large_scores,
    "forward-bytes": forward_bytes,
    "attention-gradients": attention_gradients,
    "low-precision": low_precision,
    "backward-bytes": backward_bytes,
    "scores": scores,
    "scores-of-ranks": scores_of_ranks,
    "sequence-errors": sequence_errors,
}
