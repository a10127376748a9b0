"""The rules about loaders and their workers: mistakes that they must name, and correct styles that must pass."""

import pytest

from check.bank import second
from check.bank.case import mistake, style
from check.bank.cases import bank_tests
from workshop.check.rules.loaders import _read_in_other_orders

TESTED = "DataLoader(part, args.batch_size, collate_fn=padded)"
LOADER = "sampler=sampler, collate_fn=padded, drop_last=True)"
LENGTHS = "        lengths = torch.randint("
SHORTER = (
    (
        "import torch\nimport torch.distributed as dist\n",
        "import numpy as np\nimport torch\nimport torch.distributed as dist\n",
    ),
    ("DistributedSampler, Subset\n", "DistributedSampler, Subset, get_worker_info\n"),
    (LENGTHS, f"        self.rng = np.random.default_rng(seed)\n{LENGTHS}"),
    (
        "tokens = self.sequences[index]",
        "tokens = self.sequences[index][self.rng.integers(2) if get_worker_info() else 0 :]",
    ),
)
SEEDED = "setattr(get_worker_info().dataset, 'rng', np.random.default_rng(torch.initial_seed()))"
STREAM = "tests/check/referee/streaming_text_2/train.py"
WORKERS = """\
        first = self.rank * info.num_workers + info.id
        stride = self.world_size * info.num_workers
"""
EPOCH = "        sampler.set_epoch(epoch)\n"
PERSISTENT = (
    ("tokens = self.sequences[index]", "tokens = self.sequences[index][int(self.epoch) % 2 :]"),
    (LOADER, f"{LOADER[:-1]}, num_workers=2, persistent_workers=True)"),
)

MISTAKES = (
    # ---- workers-overlap
    mistake(
        "stream-divided-by-ranks-only",
        STREAM,
        "workers-overlap",
        "The two workers of a rank read the same documents, because only the ranks have different ones.",
        (WORKERS, "        first, stride = self.rank, self.world_size\n"),
    ),
    mistake(
        "numpy-generator-copied-into-workers",
        second.TAGGER,
        "workers-repeat",
        "Each worker of each epoch begins with a copy of the same generator.",
        *SHORTER,
        (LOADER, f"{LOADER[:-1]}, num_workers=2)"),
    ),
    mistake(
        "epoch-drawn-by-each-rank",
        second.TAGGER,
        "epochs-of-ranks",
        "Each rank gives its DistributedSampler a number of its own, so the parts belong to different orders.",
        ("    part = Subset", "    draws = torch.Generator().manual_seed(rank)\n    part = Subset"),
        (EPOCH, "        sampler.set_epoch(int(torch.randint(1000, (1,), generator=draws)))\n"),
    ),
    mistake(
        "epoch-set-beside-persistent-workers",
        second.TAGGER,
        "workers-kept",
        "The data set changes its samples by its attribute `epoch`, of which the workers have a copy.",
        *PERSISTENT,
        (LENGTHS, f"        self.epoch = 0\n{LENGTHS}"),
        (EPOCH, f"{EPOCH}        train_set.epoch = epoch\n"),
    ),
    mistake(
        "validation-smaller-than-a-batch",
        second.TAGGER,
        "loader-empty",
        "The share of a rank has 15 or 16 sequences, so a loader that drops the last batch has none.",
        (TESTED, "DataLoader(part, 64, collate_fn=padded, drop_last=True)"),
    ),
)

STYLES = (
    style(
        "workers-of-a-rank-side-by-side",
        STREAM,
        "The workers of a rank divide the documents of the rank, and not those of all ranks.",
        (
            WORKERS,
            "        first = self.rank + self.world_size * info.id\n"
            "        stride = self.world_size * info.num_workers\n",
        ),
    ),
    style(
        "epoch-shared-with-persistent-workers",
        second.TAGGER,
        "The persistent workers read the number of the epoch from shared memory.",
        *PERSISTENT,
        (LENGTHS, f"        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()\n{LENGTHS}"),
        (EPOCH, f"{EPOCH}        train_set.epoch.fill_(epoch)\n"),
    ),
    style(
        "numpy-generator-seeded-in-each-worker",
        second.TAGGER,
        "Each worker seeds its copy of the generator with a number of its own, which also depends on the epoch.",
        *SHORTER,
        (LOADER, f"{LOADER[:-1]}, num_workers=2, worker_init_fn=lambda worker: {SEEDED})"),
        (EPOCH, f"{EPOCH}        torch.manual_seed(100 * epoch + rank)\n"),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        (range(100), range(100, 200), 0),
        (range(100), range(199, 99, -1), 0),
        (range(100), reversed(range(100)), 100),
        (range(100), range(50, 150), 50),
        ([number % 70 for number in range(100)], range(100), 0),  # a worker that draws with replacement
        (range(8), reversed(range(8)), 0),
    ],
)
def test_workers_that_read_the_same_samples_in_different_orders_are_seen(first, second, common):
    batches = []
    for one, other in zip(first, second, strict=True):  # the workers take turns
        batches += [[("content", one)], [("content", other)]]
    assert _read_in_other_orders(batches, 2) == common
