"""Programs whose epochs, or steps, have the same samples in the same order."""

from check.bank import ddp, lightning, second, sharded, zero
from check.bank.case import mistake

STREAM = "    stream = batches(train_loader, sampler)\n"
STEPS = "    for step in range(1, args.steps + 1):\n        model.train()\n"

MISTAKES = (
    # ---- same-order
    mistake(
        "set-epoch-missing",
        ddp.SPAWN,
        "same-order",
        "The sampler is never told the epoch, so each epoch has the same order.",
        (ddp.SET_EPOCH, ""),
    ),
    mistake(
        "epoch-set-for-the-test-sampler",
        second.TAGGER,
        "same-order",
        "The name of the training sampler gets that of the test set, so set_epoch() never reaches the training sampler.",
        (
            "    part = Subset(test_set, range(rank, len(test_set), world_size))\n"
            "    test_loader = DataLoader(part, args.batch_size, collate_fn=padded)\n",
            "    sampler = DistributedSampler(test_set, shuffle=False, drop_last=True)\n"
            "    test_loader = DataLoader(test_set, args.batch_size, sampler=sampler, collate_fn=padded)\n",
        ),
    ),
    mistake(
        "set-epoch-constant",
        ddp.METRICS,
        "same-order",
        "set_epoch() is always called with the same number, so each epoch has the same order.",
        (ddp.SET_EPOCH, "        sampler.set_epoch(SEED)\n"),
    ),
    mistake(
        "held-out-order-of-the-first-epoch",
        ddp.SINGLE,
        ("same-order", "resume-differs"),
        "The order is seeded with the first epoch, so all epochs of a run have the same order.",
        ("generator.manual_seed(SEED + epoch)", "generator.manual_seed(SEED + first_epoch)"),
        held_out=True,
    ),
    mistake(
        "lightning-no-shuffle",
        lightning.MNIST,
        "same-order",
        "Each epoch has the same batches.",
        (lightning.SAMPLER, lightning.SAMPLER.replace("seed=SEED", "shuffle=False")),
    ),
    mistake(
        "zero-same-order",
        zero.DEEPSPEED,
        ("same-order", "differs-from-ddp"),
        "set_epoch() is missing.",
        ("        sampler.set_epoch(epoch)\n", ""),
    ),
    mistake(
        "accelerate-same-order",
        zero.ACCELERATE,
        "same-order",
        "Without set_epoch() and with a constant seed each epoch has the same order.",
        ("        train_loader.set_epoch(epoch)\n", "        train_loader.set_epoch(0)\n"),
    ),
    # ---- same-batch
    mistake(
        "sharded-stream-in-each-step",
        sharded.FIT,
        "same-batch",
        "Each step calls the generator function again, which begins with the first batch of the first epoch.",
        (STREAM + STEPS, STEPS + STREAM.replace("    stream", "        stream")),
    ),
)
