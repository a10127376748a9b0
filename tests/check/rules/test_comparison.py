"""The rules that compare any program with itself on one process: mistakes that they must name, and correct styles."""

from check.bank import second
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

CONTRASTIVE = "tests/check/referee/contrastive/train.py"
OFFSET = " + dist.get_rank() * len(z1)"
GATHERED = "AllGather.apply(z1), AllGather.apply(z2)"
REDUCED = "        grad = grad.clone()\n        dist.all_reduce(grad)\n"

SEGMENTATION = "tests/check/referee/segmentation/train.py"
SUMMED_COUNTS = "    counts = reduce_sum(counts)\n"
TAGS_OF_RANK = """\
    own = torch.cat([train_set[index][1] for index in range(rank, len(train_set), world_size)])
    counts = torch.bincount(own, minlength=TAGS).float()
"""
TAG_WEIGHTS = "    weights = counts.sum() / (TAGS * counts)\n"
TAG_EPOCHS = "    for epoch in range(first_epoch, args.epochs):\n"
WEIGHTED_TAGS = ', weight=weights, reduction="sum") * world_size / count'

# A weight of the mean square of the logits follows the size that was measured.
PENALTY = " + penalty * logits.square().mean()\n            loss.backward()\n            optimizer.step()\n"
ADAPTED = "            penalty *= 1 + 0.02 * logits.detach().square().mean().item()\n"
ADAPTED_TO_ALL = (
    "            size = logits.detach().square().mean()\n"
    "            dist.all_reduce(size)\n"
    "            penalty *= 1 + 0.02 * size.item() / world_size\n"
)
STEP = "\n            loss.backward()\n            optimizer.step()\n"
PENALTY_BEGINS = (TAG_EPOCHS, TAG_EPOCHS + "        penalty = 0.3\n")

MISTAKES = (
    # ---- coefficient-differs
    mistake(
        "penalty-adapted-by-each-rank",
        second.TAGGER,
        "coefficient-differs",
        "Each rank adapts the weight of a penalty to its own logits, so the ranks minimize different losses.",
        PENALTY_BEGINS,
        (second.TOKEN_MEAN + STEP, second.TOKEN_MEAN + PENALTY + ADAPTED),
    ),
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
    # ---- loss-weights-differ
    mistake(
        "class-weights-of-the-rank",
        second.TAGGER,
        "loss-weights-differ",
        "Each rank counts the tags of its own sequences, so the ranks weight the classes differently.",
        (TAG_EPOCHS, TAGS_OF_RANK + TAG_WEIGHTS + TAG_EPOCHS),
        (second.TOKEN_MEAN, WEIGHTED_TAGS),
    ),
    mistake(
        "losses-multiplied-by-weights-of-the-rank",
        SEGMENTATION,
        "loss-weights-differ",
        "The counts of the classes are not summed over the ranks, and the loss of each pixel is multiplied by a weight.",
        (SUMMED_COUNTS, ""),
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
        "penalty-adapted-together",
        second.TAGGER,
        "The weight of a penalty follows the logits of all ranks.",
        PENALTY_BEGINS,
        (second.TOKEN_MEAN + STEP, second.TOKEN_MEAN + PENALTY + ADAPTED_TO_ALL),
    ),
    style(
        "class-weights-of-all-ranks",
        second.TAGGER,
        "The counts of the tags are summed over all ranks.",
        (TAG_EPOCHS, TAGS_OF_RANK + "    dist.all_reduce(counts)\n" + TAG_WEIGHTS + TAG_EPOCHS),
        (second.TOKEN_MEAN, WEIGHTED_TAGS),
    ),
    style(
        "losses-multiplied-by-weights-of-the-data-set",
        SEGMENTATION,
        "Each rank counts the classes of the whole data set by itself.",
        (SUMMED_COUNTS, ""),
        ("range(rank * len(dataset) // world_size, (rank + 1) * len(dataset) // world_size)", "range(len(dataset))"),
    ),
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
