"""The rules about the mode of a model: mistakes that they must name, and correct styles that must pass."""

from check.bank import second
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

HEAD = "self.head(self.memory(self.embedding(tokens))[0])"
TRAIN, EVAL = "        model.train()\n", "    model.eval()\n"
LINEAR = "self.head = nn.Linear(32, TAGS)"
EPOCH = "        sampler.set_epoch(epoch)\n"
DROPOUT = (
    (LINEAR, "self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, TAGS))"),
    (EPOCH, f"{EPOCH}        torch.manual_seed(100 * epoch + rank)\n"),
)
SUMMED = "    dist.all_reduce(counts)\n"
NORMALIZED = (
    (LINEAR, "self.head, self.norm = nn.Linear(32, TAGS), nn.BatchNorm1d(32)"),
    (HEAD, "self.head(self.norm(self.memory(self.embedding(tokens))[0].transpose(1, 2)).transpose(1, 2))"),
)

MISTAKES = (
    mistake(
        "evaluation-mode-for-good",
        second.TAGGER,
        "left-in-evaluation",
        "The evaluation after the first epoch switches dropout off, and nothing switches it on again.",
        *DROPOUT,
        (TRAIN, ""),
    ),
    mistake(
        "evaluation-mode-that-the-model-asks-for",
        second.TAGGER,
        "left-in-evaluation",
        "The model has no dropout, but looks at its mode itself.",
        (HEAD, f"{HEAD} * (2 if self.training else 1)"),
        (TRAIN, ""),
    ),
    mistake(
        "evaluated-with-dropout",
        second.TAGGER,
        "evaluated-in-training",
        "The accuracy is that of a model with dropout.",
        *DROPOUT,
        (EVAL, ""),
    ),
    mistake(
        "running-statistics-drift-apart",
        second.TAGGER,
        "statistics-differ",
        "Each rank has running statistics of its own sequences, and evaluates with them.",
        *NORMALIZED,
        ("DistributedDataParallel(model)", "DistributedDataParallel(model, broadcast_buffers=False)"),
    ),
)

STYLES = (
    style(
        "train-after-the-evaluation",
        second.TAGGER,
        "The evaluation itself switches back to training mode.",
        *DROPOUT,
        (TRAIN, ""),
        (SUMMED, f"    model.train()\n{SUMMED}"),
    ),
    style(
        "batchnorm-with-buffers-of-rank-0",
        second.TAGGER,
        "DistributedDataParallel sends the running statistics of rank 0 before each forward pass.",
        *NORMALIZED,
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
