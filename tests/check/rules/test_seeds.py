"""The rules about seeds: mistakes that they must name. The solutions must pass."""

from check.bank import ddp
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

MISTAKES = (
    mistake(
        "one-seed-for-all-ranks",
        ddp.SPAWN,
        "same-seed",
        "All ranks set the same seed, so augmentation would change the same samples in the same way.",
        (ddp.SEED, ddp.SEED.replace(" + rank", "")),
    ),
    mistake(
        "order-of-another-seed",
        ddp.SPAWN,
        "curve-differs",
        "The order of the samples is not that of one process, so the curves of the notebook do not coincide.",
        (ddp.SAMPLER, ddp.SAMPLER.replace("seed=SEED, ", "")),
        real=True,
    ),
)

STYLES = (
    style(
        "seed-by-keyword",
        ddp.SPAWN,
        "Each rank seeds torch once more, with a number of its own.",
        (ddp.SEED, "torch.manual_seed(1000 * (SEED + epoch) + 7 * rank)"),
        real=True,
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
