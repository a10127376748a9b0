"""The rule about the settings of the solution: mistakes that it must name, and correct styles that must pass."""

from check.bank import ddp
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-3)"

MISTAKES = (
    mistake(
        "torchrun-adam-in-place-of-adamw",
        ddp.TORCHRUN,
        "settings-differ",
        "Adam has no weight decay by default, so the program trains a different model.",
        (ADAMW, ADAMW.replace("AdamW", "Adam")),
        real=True,
    ),
    mistake(
        "torchrun-batch-of-one-rank-divided",
        ddp.TORCHRUN,
        "settings-differ",
        "--batch-size is the number of samples of one rank, but each rank takes only a part of it.",
        (ddp.SPEED, ddp.SPEED.replace(" * world_size", "")),
        (ddp.LOADER, ddp.LOADER.replace("args.batch_size", "args.batch_size // world_size")),
        real=True,
    ),
)

STYLES = (
    style(
        "torchrun-sgd-with-its-own-rate",
        ddp.TORCHRUN,
        "A different optimizer with a learning rate of its own was chosen on purpose.",
        (ADAMW, "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"),
        real=True,
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
