"""Exercise 5 of slurm-multinode, "the job stands still": mistakes and half repairs that must be named, and correct repairs."""

from check.bank.case import mistake, style
from check.bank.cases import bank_tests

STAGE = "slurm-multinode/exercise5_stands_still_"
SHARDS, WORKERS, SCANS = (f"solutions/{STAGE}{name}.py" for name in ("shards", "workers", "scans"))

OWN_SHARDS = "range(rank, SHARDS, world_size)"
NOT_FINITE = """\
        finite = torch.isfinite(loss).int()
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        if not finite:
            continue  # an empty image would make all parameters NaN
"""

MISTAKES = (
    mistake(
        "still-scans-zero-for-nan",
        SCANS,
        "loss-not-finite",
        "The loss of an empty image counts 0, but its gradients are NaN, and then so are all parameters.",
        (NOT_FINITE, "        loss = torch.nan_to_num(loss)\n"),
    ),
    mistake(
        "still-shards-as-delivered",
        f"{STAGE}shards.py",
        ("collectives-differ", "hang"),
        "Rank 0 has more batches than rank 1.",
    ),
    mistake(
        "still-shards-longer-timeout",
        f"{STAGE}shards.py",
        ("collectives-differ", "hang"),
        "A longer timeout only delays the error.",
        (
            "get_default_backend_for_device(device))",
            "get_default_backend_for_device(device), timeout=timedelta(hours=2))",
        ),
        ("import time\n", "import time\nfrom datetime import timedelta\n"),
    ),
    mistake(
        "still-shards-barrier-in-each-step",
        f"{STAGE}shards.py",
        ("collectives-differ", "hang"),
        "A barrier in each step does not give the ranks the same number of steps.",
        ("        optimizer.step()\n", "        optimizer.step()\n        dist.barrier()\n"),
    ),
    mistake(
        "still-shards-longest-rank",
        SHARDS,
        ("collectives-differ", "hang"),
        "The largest number of batches: the other ranks do not have that many.",
        ("dist.ReduceOp.MIN", "dist.ReduceOp.MAX"),
    ),
    mistake(
        "still-shards-all-on-each-rank",
        SHARDS,
        ("same-samples", "shares-overlap"),
        "Each rank reads all shards, so all ranks have the same number of batches, and the same batches.",
        (OWN_SHARDS, "range(SHARDS)"),
    ),
    mistake(
        "still-shards-without-ddp",
        f"{STAGE}shards.py",
        ("gradients-differ", "weights-differ", "collectives-differ"),
        "Without DDP no rank waits in backward(), and each rank trains a model of its own.",
        ("DDP(SmallCNN().to(device))", "SmallCNN().to(device)"),
    ),
    mistake(
        "still-workers-as-delivered",
        f"{STAGE}workers.py",
        ("collectives-differ", "hang"),
        "The queue of rank 1 is full, because only rank 0 empties its queue.",
    ),
    mistake(
        "still-workers-timeout-of-the-loader",
        f"{STAGE}workers.py",
        ("crash", "hang", "collectives-differ"),
        "With a timeout, the loader of rank 1 fails instead of waiting.",
        ("num_workers=1,", "num_workers=1, timeout=3,"),
    ),
    mistake(
        "still-scans-as-delivered",
        f"{STAGE}scans.py",
        ("collectives-differ", "hang"),
        "Only the rank with the empty image skips the step.",
    ),
    mistake(
        "still-scans-barrier-before-the-skip",
        f"{STAGE}scans.py",
        ("collectives-differ", "hang"),
        "The rank that skips calls a barrier instead of backward().",
        ("            continue  #", "            dist.barrier()\n            continue  #"),
    ),
    mistake(
        "still-scans-without-the-skip",
        SCANS,
        ("loss-not-finite", "no-learning"),
        "The gradients of the empty image make all parameters NaN.",
        (NOT_FINITE, ""),
    ),
    mistake(
        "still-scans-last-rank-decides",
        SCANS,
        ("loss-not-finite", "no-learning"),
        "The last rank does not know that the loss of rank 0 is not finite.",
        ("dist.all_reduce(finite, dist.ReduceOp.MIN)", "dist.broadcast(finite, src=dist.get_world_size() - 1)"),
    ),
)

STYLES = (
    style(
        "still-shards-all-gather",
        SHARDS,
        "All ranks gather the numbers of batches, and use the smallest.",
        (
            "    steps = torch.tensor(len(loader), device=device)\n    dist.all_reduce(steps, dist.ReduceOp.MIN)\n",
            "    batches = [None] * dist.get_world_size()\n    dist.all_gather_object(batches, len(loader))\n"
            "    steps = min(batches)\n",
        ),
    ),
    style(
        "still-workers-value-with-the-batch",
        WORKERS,
        "The brightness comes with the batch, without a queue.",
        (
            "self.data, self.brightness = data, mp.Queue(maxsize=most)  # without a limit, it could fill the memory",
            "self.data = data",
        ),
        (
            "        self.brightness.put(image.mean().item())\n        return image, label\n",
            "        return image, label, image.mean()\n",
        ),
        ("    for images, labels in loader:\n", "    for images, labels, brightness in loader:\n"),
        (
            "        for _ in range(len(images)):  # on each rank: the workers wait if the queue is full\n"
            "            total += loader.dataset.brightness.get()\n            count += 1\n",
            "        total += brightness.sum().item()\n        count += len(images)\n",
        ),
    ),
    style(
        "still-scans-no-nan",
        f"{STAGE}scans.py",
        "An empty image stays empty, so no loss is NaN.",
        ("image.std()", "(image.std() + 1e-6)"),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
