"""Longer pieces of text for the cases of exercise 4 of stage 06: layers that are divided in a different way."""

from check.bank.built import TENSOR
from check.bank.case import part

CHOICE = "    on_input, on_output = (GATHER, SCATTER) if sequence_parallel else (COPY, SUM)\n"
HOOK = "        attention.register_forward_pre_hook(lambda _, inputs: communicate(*inputs, group, on_input))\n"
COLUMN = "        return F.linear(communicate(x, self.group, self.on_input), self.weight, self.bias)\n"
SPLITS = "        model.blocks[0].register_forward_pre_hook(lambda _, inputs: communicate(*inputs, group, SPLIT))\n"
ATTENTION = part(TENSOR, "        # Query, key and value have the same input", "        mlp.up, mlp.down")
SEQUENCE = part(TENSOR, "    if sequence_parallel:\n", "    return model\n")
BLOCKS = "    for block in model.blocks:\n        attention, mlp"
ALL_NORMS = "(norm for block in model.blocks for norm in (block.norm1, block.norm2))"

UNEQUAL = "parameter.detach().chunk(dist.get_world_size(group), dimension)[dist.get_rank(group)].clone()"

WHOLE_ATTENTION = """        if sequence_parallel:
            attention.register_forward_pre_hook(lambda _, inputs: communicate(*inputs, group, JOIN))
            attention.register_forward_hook(lambda _, inputs, output: communicate(output, group, SPLIT))
"""

GATHERED_COLUMN = """        pair = ((lambda x, group: all_gather(x, group, 0)), (lambda x, group: own_part(x, group, 0)))
        weight = communicate(self.weight, self.group, pair)
        bias = None if self.bias is None else communicate(self.bias, self.group, pair)
        return F.linear(x, weight, bias)
"""

GATHERED_ROW = """        pair = ((lambda x, group: all_gather(x, group, 1)), (lambda x, group: own_part(x, group, 1)))
        return F.linear(x, communicate(self.weight, self.group, pair), self.bias)
"""

NORMS_ALONE = (
    (
        SEQUENCE,
        """    if sequence_parallel:
        for norm in (model.norm, *(norm for block in model.blocks for norm in (block.norm1, block.norm2))):
            norm.register_forward_pre_hook(lambda _, inputs: communicate(*inputs, group, SPLIT))
            norm.register_forward_hook(lambda _, inputs, output: communicate(output, group, JOIN))
            sum_gradients(norm.parameters(), group)
""",
    ),
)

FIRST_BLOCK_WHOLE = (
    (
        SPLITS,
        "        model.blocks[1].register_forward_pre_hook(lambda _, inputs: communicate(*inputs, group, SPLIT))\n",
    ),
    (
        BLOCKS,
        "    for block in model.blocks:\n"
        "        first = block is model.blocks[0]\n"
        "        on_input, on_output = (GATHER, SCATTER) if sequence_parallel and not first else (COPY, SUM)\n"
        "        attention, mlp",
    ),
    (HOOK, HOOK.replace("inputs: comm", "inputs, on_input=on_input: comm")),
    (ALL_NORMS, ALL_NORMS.replace("in model.blocks", "in model.blocks[1:]")),
)

OF_THE_BATCH = """
def gather_batch(x, group):
    return all_gather(x, group, 0)


def part_of_batch(x, group):
    return own_part(x, group, 0)


"""

STATE_OF_START = "    state = {name: torch.from_numpy(value) for name, value in model.start.items()}\n"
KEEP_START = "    model.start = {name: value.cpu().numpy().copy() for name, value in model.state_dict().items()}\n"

# ---------------------------------------------------------------- styles

BY_ALL_TO_ALL = """    sent = torch.stack(divide(x, group))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    output = received.sum(0)
"""

GATHERS_AGAIN = (
    (
        "class ColumnParallelLinear(",
        """class GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(all_gather(x, group), weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows, whole = gradient.flatten(0, -2), all_gather(x, ctx.group).flatten(0, -2)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return reduce_scatter(gradient @ weight, ctx.group), rows.t() @ whole, of_bias, None


class ColumnParallelLinear(""",
    ),
    (
        COLUMN,
        "        if self.on_input is GATHER:\n"
        "            return GatheredLinear.apply(x, self.weight, self.bias, self.group)\n" + COLUMN,
    ),
)

IN_PLACE = """def ColumnParallelLinear(linear, group=None, on_input=COPY):
    linear.weight, linear.bias = shard(linear.weight, group, 0), shard(linear.bias, group, 0)
    linear.group, linear.divided = group, {"weight": 0, "bias": 0}
    linear.register_forward_pre_hook(lambda _, inputs: communicate(*inputs, group, on_input))
    return linear


def RowParallelLinear(linear, group=None, on_output=SUM):
    def forward(x):
        output = communicate(F.linear(x, linear.weight), group, on_output)
        return output if linear.bias is None else output + linear.bias

    linear.weight, linear.forward = shard(linear.weight, group, 1), forward
    linear.group, linear.divided = group, {"weight": 1}
    if on_output is SCATTER:
        sum_gradients([linear.bias], group)
    return linear


"""

SUBCLASS = (
    ("decoder import Transformer", "decoder import Block, Transformer"),
    (
        "def parallelize(model, group",
        """class ParallelBlock(Block):
    def forward(self, x):
        x = x + self.attention(communicate(self.norm1(x), self.group, self.on_input))
        return x + self.mlp(communicate(self.norm2(x), self.group, self.on_input))


def parallelize(model, group""",
    ),
    (HOOK, "        block.__class__, block.group, block.on_input = ParallelBlock, group, on_input\n"),
    ("ColumnParallelLinear(mlp.up, group, on_input)", "ColumnParallelLinear(mlp.up, group, KEEP)"),
)

REDUCE_SCATTER_TENSOR = """    divide(x, group)  # raises an error if the parts are not equal
    rows = x.transpose(0, 1).contiguous()
    output = rows.new_empty(len(rows) // dist.get_world_size(group), *rows.shape[1:])
    dist.reduce_scatter_tensor(output, rows, group=group)
    output = output.transpose(0, 1)
"""

ALL_GATHER_TENSOR = """def gather(x, group):
    rows = x.transpose(0, 1).contiguous()
    whole = rows.new_empty(len(rows) * dist.get_world_size(group), *rows.shape[1:])
    dist.all_gather_into_tensor(whole, rows, group=group)
    return whole.transpose(0, 1)


"""
