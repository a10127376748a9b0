"""The rules that compare any program with itself on one process: mistakes that they must name, and correct styles."""

from check.bank import second
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

CONTRASTIVE = "tests/check/referee/contrastive/train.py"
OFFSET = " + dist.get_rank() * len(z1)"
GATHERED = "AllGather.apply(z1), AllGather.apply(z2)"
REDUCED = "        grad = grad.clone()\n        dist.all_reduce(grad)\n"

MISTAKES = (
    # ---- gathered-loss
    mistake(
        "labels-from-zero-on-each-rank",
        CONTRASTIVE,
        "gathered-loss",
        "The columns are the samples of all ranks, and the labels count those of the first rank.",
        (OFFSET, ""),
    ),
    mistake(
        "gather-without-gradients",
        CONTRASTIVE,
        "gathered-loss",
        "What the losses of the other ranks say about the samples of a rank is lost.",
        (REDUCED, ""),
    ),
    # ---- depends-on-processes
    mistake(
        "only-the-samples-of-the-rank",
        CONTRASTIVE,
        "depends-on-processes",
        "Each rank compares its samples with its own only: a hint, because that can be intended.",
        (GATHERED, "z1, z2"),
        (OFFSET, ""),
    ),
)

STYLES = (
    style(
        "every-rank-computes-the-whole-loss",
        CONTRASTIVE,
        "Each rank computes the loss of all samples, so the gather returns only its own gradient, multiplied.",
        (
            "labels = torch.arange(len(z1), device=z1.device)" + OFFSET,
            "labels = torch.arange(len(all1), device=z1.device)",
        ),
        (
            "torch.cat([z1 @ all2.T, z1 @ all1.T - itself], dim=1)",
            "torch.cat([all1 @ all2.T, all1 @ all1.T - itself], dim=1)",
        ),
        (
            "torch.cat([z2 @ all1.T, z2 @ all2.T - itself], dim=1)",
            "torch.cat([all2 @ all1.T, all2 @ all2.T - itself], dim=1)",
        ),
    ),
    style(
        "tokens-of-all-ranks", second.TAGGER, "The mean over the tokens of all ranks; sequences have different lengths."
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
