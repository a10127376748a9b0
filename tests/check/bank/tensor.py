"""Cases of exercise 4 of stage 06: tensor and sequence parallelism."""

from check.bank import tensor_styles
from check.bank.built import TENSOR
from check.bank.case import mistake, part, style
from check.bank.tensor_styles import ATTENTION, CHOICE, COLUMN, HOOK

SHARD = "    return nn.Parameter(own_part(parameter.detach(), group, dimension), parameter.requires_grad)\n"
PAIRS = "GATHER, SCATTER = (all_gather, reduce_scatter), (reduce_scatter, all_gather)\n"
SPLIT = "SPLIT, JOIN = (own_part, all_gather), (all_gather, own_part)\n"
QUERY = "ColumnParallelLinear(getattr(attention, name), group, KEEP))\n"
COLUMN_SHARDS = "        self.weight, self.bias = shard(linear.weight, group, 0), shard(linear.bias, group, 0)\n"
ROW = part(TENSOR, "        x = communicate(F.linear(x, self.weight)", "\n\ndef parallelize(")
BIAS_SUM = "        if on_output is SCATTER:\n            sum_gradients([self.bias], group)\n"
START = "    on_input, on_output = (GATHER"
LAST = "        model.norm.register_forward_hook(lambda _, inputs, output: communicate(output, group, JOIN))\n"
NORMS = part(TENSOR, "        for norm in (model.norm, *(norm", "    return model\n")
STATE = part(TENSOR, "    state = model.state_dict()\n", "    return state\n")
CLASSES = part(TENSOR, "class ColumnParallelLinear(", "def parallelize(")
SCATTERED = part(TENSOR, "    parts = [part.contiguous()", "    return output\n\n\ndef sum_gradients")
SUMMED = "            parameter.register_hook(lambda gradient: all_reduce(gradient, group))\n"

MISTAKES = (
    # ---- linear-whole
    mistake(
        "tensor-whole-everywhere",
        TENSOR,
        "linear-whole",
        "No layer is replaced, so all ranks compute the whole model; the losses are those of one process.",
        (START, "    return model\n" + START),
    ),
    mistake(
        "tensor-views",
        TENSOR,
        "linear-whole",
        "A part is a view, so the memory of the whole matrix stays in use.",
        (
            "own_part(parameter.detach(), group, dimension)",
            "divide(parameter.detach(), group, dimension)[dist.get_rank(group)]",
        ),
    ),
    mistake(
        "tensor-keeps-the-original",
        TENSOR,
        "linear-whole",
        "Each column-parallel layer keeps the layer that it replaces.",
        (COLUMN_SHARDS, COLUMN_SHARDS + "        self.original = [linear]\n"),
    ),
    mistake(
        "tensor-only-the-mlp",
        TENSOR,
        "linear-whole",
        "The attention is computed whole on all ranks.",
        (ATTENTION, tensor_styles.WHOLE_ATTENTION),
    ),
    # ---- linear-computed-whole
    mistake(
        "tensor-gathers-matrices",
        TENSOR,
        "linear-computed-whole",
        "Each rank stores its part, but gathers the matrix for each product and computes the whole layer.",
        (CHOICE, "    on_input = on_output = KEEP\n    sequence_parallel = False\n"),
        (COLUMN, tensor_styles.GATHERED_COLUMN),
        (ROW, tensor_styles.GATHERED_ROW),
    ),
    # ---- linear-case-fails
    mistake(
        "tensor-bias-before-the-sum",
        TENSOR,
        "linear-case-fails",
        "Each rank adds the bias of a row-parallel layer, so it counts several times.",
        (ROW, "        return communicate(F.linear(x, self.weight, self.bias), self.group, self.on_output)\n"),
    ),
    mistake(
        "tensor-sums-the-gradient-too",
        TENSOR,
        "linear-case-fails",
        "SUM sums the gradient in the backward pass as well.",
        ("SUM = (all_reduce, None)", "SUM = (all_reduce, all_reduce)"),
    ),
    mistake(
        "tensor-copy-without-sum",
        TENSOR,
        "linear-case-fails",
        "The gradient of the input comes from the features of one rank.",
        ("COPY = (None, all_reduce)", "COPY = (None, None)"),
    ),
    mistake(
        "tensor-trains-frozen-parameters",
        TENSOR,
        "linear-case-fails",
        "The part of a frozen parameter is trainable.",
        (", dimension), parameter.requires_grad)", ", dimension))"),
    ),
    mistake(
        "tensor-without-the-group",
        TENSOR,
        "linear-case-fails",
        "all_reduce is called for all ranks, whatever the group.",
        ("    dist.all_reduce(x, group=group)\n", "    dist.all_reduce(x)\n"),
    ),
    mistake(
        "tensor-unequal-parts",
        TENSOR,
        "linear-case-fails",
        "Features that the ranks do not divide are no error.",
        (SHARD, SHARD.replace("own_part(parameter.detach(), group, dimension)", tensor_styles.UNEQUAL)),
    ),
    # ---- blocks-send-more
    mistake(
        "tensor-query-key-value-one-by-one",
        TENSOR,
        "blocks-send-more",
        "Each of the three layers gathers its input.",
        (HOOK, ""),
        (QUERY, QUERY.replace("KEEP", "on_input")),
    ),
    mistake(
        "tensor-sums-whole-and-keeps-a-part",
        TENSOR,
        "blocks-send-more",
        "In place of reduce_scatter, an all-reduce sums everything and the rank keeps its part.",
        (SCATTERED, "    output = own_part(all_reduce(x, group), group)\n"),
    ),
    mistake(
        "tensor-norms-between-two-gathers",
        TENSOR,
        "blocks-send-more",
        "The norms are computed for a part, but each block sums whole activations; the losses are those of one process.",
        (CHOICE, "    on_input, on_output = COPY, SUM\n"),
        *tensor_styles.NORMS_ALONE,
    ),
    mistake(
        "tensor-gathers-again-in-each-layer",
        TENSOR,
        "blocks-send-more",
        "The hook gathers the input, and each of the three layers gathers its part of it again.",
        (QUERY, QUERY.replace("KEEP", "((lambda x, group: all_gather(own_part(x, group), group)), None)")),
    ),
    # ---- norms-whole
    mistake(
        "tensor-no-sequence-parallelism",
        TENSOR,
        "norms-whole",
        "sequence_parallel is ignored.",
        (CHOICE, "    on_input, on_output, sequence_parallel = COPY, SUM, False\n"),
    ),
    mistake(
        "tensor-joins-before-the-last-norm",
        TENSOR,
        "norms-whole",
        "All ranks compute the last norm for all tokens.",
        (LAST, "        model.norm.register_forward_pre_hook(lambda _, inputs: communicate(*inputs, group, JOIN))\n"),
        ("in (model.norm, *(norm", "in (*(), *(norm"),
    ),
    mistake(
        "tensor-splits-after-the-first-block",
        TENSOR,
        "norms-whole",
        "The first block has all tokens as its input.",
        *tensor_styles.FIRST_BLOCK_WHOLE,
    ),
    # ---- sequence-case-fails
    mistake(
        "tensor-norms-not-summed",
        TENSOR,
        "sequence-case-fails",
        "Each rank trains its own norms.",
        (NORMS, ""),
    ),
    mistake(
        "tensor-last-norm-not-summed",
        TENSOR,
        "sequence-case-fails",
        "The gradient of the norm that belongs to no block is forgotten.",
        ("in (model.norm, *(norm", "in (*(), *(norm"),
    ),
    mistake(
        "tensor-bias-not-summed",
        TENSOR,
        "sequence-case-fails",
        "Each rank trains its own bias of a row-parallel layer.",
        (BIAS_SUM, ""),
    ),
    mistake(
        "tensor-sums-again",
        TENSOR,
        "sequence-case-fails",
        "The hook sums what was accumulated, so the first of two backward passes counts more than once.",
        (
            SUMMED,
            "            parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad, group=group))\n",
        ),
    ),
    mistake(
        "tensor-join-sums",
        TENSOR,
        "sequence-case-fails",
        "All ranks compute the same loss, but the backward pass of JOIN sums their gradients.",
        (SPLIT, SPLIT.replace("(all_gather, own_part)", "(all_gather, reduce_scatter)")),
    ),
    mistake(
        "tensor-divides-the-batch",
        TENSOR,
        "sequence-case-fails",
        "Each rank gets a part of the batch, not of the sequence; a batch of one sequence is an error.",
        (PAIRS, tensor_styles.OF_THE_BATCH + PAIRS.replace("all_gather", "gather_batch")),
        (SCATTERED, SCATTERED.replace("divide(x, group)", "divide(x, group, 0)")),
        (SPLIT, SPLIT.replace("all_gather", "gather_batch").replace("own_part", "part_of_batch")),
    ),
    # ---- state-divided
    mistake(
        "tensor-saves-the-part-of-rank-0",
        TENSOR,
        "state-divided",
        "full_state_dict() is state_dict().",
        (STATE, "    state = model.state_dict()\n"),
    ),
    mistake(
        "tensor-gathers-dimension-0",
        TENSOR,
        "state-divided",
        "The columns of row-parallel layers become rows.",
        ("all_gather(state[key], module.group, dimension)", "all_gather(state[key], module.group, 0)"),
    ),
    mistake(
        "tensor-column-bias-forgotten",
        TENSOR,
        "state-divided",
        "The biases of column-parallel layers stay divided.",
        ('divided = {"weight": 0, "bias": 0}', 'divided = {"weight": 0}'),
    ),
    mistake(
        "tensor-one-name-of-a-layer",
        TENSOR,
        "state-divided",
        "A layer with two names is gathered under one of them.",
        ("named_modules(remove_duplicate=False)", "named_modules()"),
    ),
    mistake(
        "tensor-saves-the-start",
        TENSOR,
        "state-divided",
        "Rank 0 keeps the parameters with which the training began.",
        (START, tensor_styles.KEEP_START + START),
        (STATE, tensor_styles.STATE_OF_START),
    ),
    # ---- tensor-of-pytorch
    mistake(
        "tensor-uses-that-of-pytorch",
        TENSOR,
        "tensor-of-pytorch",
        "train() uses parallelize_module without --pytorch.",
        (
            "parallelize_with_pytorch(model, device) if args.pytorch else parallelize(model)",
            "parallelize_with_pytorch(model, device)",
        ),
        (
            "    state = pytorch_state_dict(model) if args.pytorch else full_state_dict(model)\n",
            "    state = pytorch_state_dict(model)\n",
        ),
    ),
)

STYLES = (
    style(
        "tensor-style-all-to-all",
        TENSOR,
        "The ranks exchange parts of the sequence and add them up themselves.",
        (SCATTERED, tensor_styles.BY_ALL_TO_ALL),
    ),
    style(
        "tensor-style-gathers-again",
        TENSOR,
        "Each rank keeps its part of the input of a column-parallel layer, and gathers it again in the backward pass.",
        *tensor_styles.GATHERS_AGAIN,
    ),
    style(
        "tensor-style-hooks",
        TENSOR,
        "The two classes are functions that divide a linear layer in place and add hooks.",
        (CLASSES, tensor_styles.IN_PLACE),
        (
            "        if isinstance(module, ColumnParallelLinear | RowParallelLinear):\n",
            '        if hasattr(module, "divided"):\n',
        ),
    ),
    style(
        "tensor-style-subclass-of-block",
        TENSOR,
        "A subclass of Block communicates explicitly, so no hook is needed.",
        *tensor_styles.SUBCLASS,
    ),
    style(
        "tensor-style-tensors",
        TENSOR,
        "The sequence is dimension 0 of the tensors that all_gather_into_tensor and reduce_scatter_tensor take.",
        (SCATTERED, tensor_styles.REDUCE_SCATTER_TENSOR),
        ("def reduce_scatter(x, group):", tensor_styles.ALL_GATHER_TENSOR + "def reduce_scatter(x, group):"),
        (PAIRS, PAIRS.replace("all_gather", "gather")),
    ),
)
