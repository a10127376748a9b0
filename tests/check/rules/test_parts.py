"""The rules that compare the parts of a divided model with one process: mistakes that they must name, and correct styles."""

from check.bank.case import mistake, style
from check.bank.cases import bank_tests

TABLE = "tests/check/referee/sharded_embedding/train.py"
FEWER_CLICKS = (
    (
        "Clicks(sizes, 16384, seed=1), Clicks(sizes, 4096, seed=2)",
        "Clicks(sizes, 1024, seed=1), Clicks(sizes, 256, seed=2)",
    ),
    ('"--epochs", type=int, default=6', '"--epochs", type=int, default=2'),
)
AVERAGED = (
    "            # DDP averages; the table got the sum of the gradients of all ranks\n"
    "            table.local.grad /= world_size\n"
)
LAYERS = "tests/check/referee/tensor_parallel_mlp/train.py"
SHORTER = (
    ("make_data(4096, hp, 1)", "make_data(512, hp, 1)"),
    ("make_data(1024, hp, 2)", "make_data(64, hp, 2)"),
    ("    epochs: int = 6\n", "    epochs: int = 2\n"),
    ("    n_blocks: int = 3\n", "    n_blocks: int = 1\n"),
)
NORM = "        y = ToParallel.apply(self.norm(x))\n"

MISTAKES = (
    mistake(
        "parts-of-a-table-get-sums",
        TABLE,
        "gradient-of-parts",
        "DDP averages the gradients of the other layers, but the rows of the table get the sum over the ranks.",
        *FEWER_CLICKS,
        (AVERAGED, ""),
    ),
    mistake(
        "parts-replicated-norm-not-summed",
        LAYERS,
        "replicas-differ",
        "The norm is behind the operation that sums in the backward pass, so each rank has a part of its gradient.",
        *SHORTER,
        (NORM, "        y = self.norm(ToParallel.apply(x))\n"),
    ),
)

STYLES = (
    style(
        "parts-of-a-table-averaged-by-a-hook",
        TABLE,
        "A hook divides the gradient of the table.",
        *FEWER_CLICKS,
        (AVERAGED, ""),
        ("    start = 0\n", "    table.local.register_hook(lambda grad: grad / world_size)\n    start = 0\n"),
    ),
    style(
        "parts-replicated-norm-summed-before-the-step",
        LAYERS,
        "The gradients of the norm are summed over the ranks by hand.",
        *SHORTER,
        (NORM, "        y = self.norm(ToParallel.apply(x))\n"),
        (
            "            loss.backward()\n",
            "            loss.backward()\n"
            "            for block in model.blocks:\n"
            "                dist.all_reduce(block.norm.weight.grad)\n"
            "                dist.all_reduce(block.norm.bias.grad)\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
