"""The rules about accumulation: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, lightning, second, sharded
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

CHUNKS = """\
def train_one_epoch(model, loader, optimizer, device, accumulate):
    model.train()
    losses = torch.zeros(len(loader), device=device)
    for step, (images, labels) in enumerate(tqdm(loader, leave=False, disable=dist.get_rank() > 0 or None)):
        optimizer.zero_grad()
        # The loader's batch is that of a whole step: as much as fits at once is cut off of it.
        portions = list(zip(images.to(device).chunk(accumulate), labels.to(device).chunk(accumulate), strict=True))
        with model.no_sync():
            for portion in portions[:-1]:
                losses[step] += backward(model, *portion, accumulate)
        losses[step] += backward(model, *portions[-1], accumulate)
        optimizer.step()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


def backward(model, images, labels, accumulate):
    loss = F.cross_entropy(model(images), labels) / accumulate
    loss.backward()
    return loss.detach()


"""

REDUCED_BY_HAND = """\
        loss = F.cross_entropy(model(images), labels) / accumulate  # the mean over all batches of the step
        loss.backward()
        if is_last:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
"""

MISTAKES = (
    # ---- divided-twice
    mistake(
        "accelerate-divides-too",
        "tests/check/referee/accelerate_onecycle/train.py",
        "divided-twice",
        "The program divides the loss by the number of batches per step, and Accelerator.backward() does so once more.",
        ("accelerator.backward(loss)", "accelerator.backward(loss / args.accum)"),
    ),
    # ---- accumulation-uneven
    mistake(
        "step-a-batch-too-early",
        ddp.METRICS,
        "accumulation-uneven",
        "The first step has one batch, because 0 % accumulate is 0, and the last batch waits for the next epoch.",
        (ddp.IS_LAST, "batch % accumulate == 0"),
    ),
    mistake(
        "leftover-batch-takes-a-step",
        ddp.METRICS,
        "accumulation-uneven",
        "The batches that are left over get a step of their own: one small batch, divided as if there were several.",
        (ddp.LOADER, "    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)\n"),
        ("torch.zeros(len(loader) // accumulate,", "torch.zeros(-(-len(loader) // accumulate),"),
        (
            "    batches = islice(loader, len(losses) * accumulate)  # drop the last batches if they do not fill a step\n",
            "",
        ),
        ("tqdm(batches,", "tqdm(loader,"),
        (ddp.IS_LAST, ddp.IS_LAST + " or batch + 1 == len(loader)"),
    ),
    mistake(
        "held-out-steps-a-batch-early",
        ddp.METRICS,
        ("accumulation-uneven", "differs-from-one-process"),
        "The step comes at the first batch of each group: the first step has one batch, and one is left at the end.",
        ("(batch + 1) % accumulate == 0\n", "batch % accumulate == 0\n"),
        held_out=True,
    ),
    mistake(
        "lightning-accumulates-unasked",
        lightning.MNIST,
        "accumulation-uneven",
        "accumulate_grad_batches=2 halves the number of steps.",
        (lightning.OWN_SAMPLERS, lightning.OWN_SAMPLERS + "        accumulate_grad_batches=2,\n"),
    ),
    mistake(
        "lightning-accumulates-nothing",
        lightning.CIFAR10,
        "accumulation-uneven",
        "The Trainer does not get the option --accumulate.",
        (lightning.ACCUMULATE, ""),
    ),
    # ---- accumulation-scale
    mistake(
        "accumulated-not-divided",
        ddp.METRICS,
        "accumulation-scale",
        "The gradient of a step is the sum over its batches, not their mean; the logged loss is right.",
        (ddp.ACCUMULATED_LOSS, f"            {ddp.LOSS}\n"),
        ("losses[step] += loss.item()", "losses[step] += loss.item() / accumulate"),
    ),
    mistake(
        "divided-by-the-wrong-number",
        ddp.METRICS,
        ("accumulation-scale", "gradient-scale", "log-wrong"),
        "The loss is divided by the batches of the epoch instead of those of the step, so the gradient is too small.",
        (ddp.ACCUMULATED_LOSS, f"            {ddp.LOSS}\n"),
        (ddp.ACCUMULATED_BACKWARD, "            (loss / len(loader)).backward()\n"),
        ("losses[step] += loss.item()", "losses[step] += loss.item() / accumulate"),
    ),
    mistake(
        "divided-by-the-number-of-processes",
        ddp.METRICS,
        "accumulation-scale",
        "The loss is divided by the number of processes instead of the number of batches.",
        (ddp.ACCUMULATED_LOSS, ddp.ACCUMULATED_LOSS.replace("/ accumulate ", "/ dist.get_world_size() ")),
    ),
    mistake(
        "zeroed-with-every-batch",
        ddp.METRICS,
        ("accumulation-scale", "accumulation-uneven"),
        "zero_grad() runs before each batch, so a step uses the gradient of its last batch only.",
        ("            optimizer.step()\n            optimizer.zero_grad()\n", "            optimizer.step()\n"),
        (ddp.NO_SYNC, "        optimizer.zero_grad()\n" + ddp.NO_SYNC),
    ),
    mistake(
        "lightning-accumulation-scaled-twice",
        lightning.CIFAR10,
        "accumulation-scale",
        "Lightning already divides the loss by the number of batches.",
        (
            lightning.LOSS,
            "        return F.cross_entropy(self(images), labels) / self.trainer.accumulate_grad_batches\n",
        ),
    ),
    mistake(
        "sharded-sum-of-the-batches",
        sharded.FIT,
        "accumulation-scale",
        "The loss is not divided by the number of batches.",
        (sharded.PART_LOSS, sharded.PART_LOSS.replace(" / args.accumulate", "")),
    ),
    # ---- accumulation-traffic
    mistake(
        "sync-with-every-batch",
        ddp.METRICS,
        "accumulation-traffic",
        "Without no_sync() the result is right, but each batch communicates the gradients.",
        (
            ddp.NO_SYNC + ddp.ACCUMULATED_LOSS + ddp.ACCUMULATED_BACKWARD,
            ddp.ACCUMULATED_LOSS.removeprefix("    ") + ddp.ACCUMULATED_BACKWARD.removeprefix("    "),
        ),
    ),
    mistake(
        "held-out-no-sync-too-late",
        ddp.METRICS,
        "accumulation-traffic",
        "no_sync() surrounds backward() but not the forward pass that it acts on, so each batch communicates gradients.",
        (
            "        with nullcontext() if is_last else model.no_sync():\n"
            "            loss = F.cross_entropy(model(images), labels) / accumulate  # the mean over all batches of"
            " the step\n",
            "        loss = F.cross_entropy(model(images), labels) / accumulate\n"
            "        with nullcontext() if is_last else model.no_sync():\n",
        ),
        held_out=True,
    ),
    mistake(
        "sharded-reduces-every-batch",
        sharded.FIT,
        "accumulation-traffic",
        "Each batch reduces the gradients.",
        (sharded.SYNC, ""),
    ),
)

STYLES = (
    style(
        "backward-passes-before-the-training",
        second.TAGGER,
        "The program first measures its backward pass. The first zero_grad() of the training clears these gradients.",
        (
            "    for epoch in range(first_epoch, args.epochs):\n",
            "    for tokens, _ in itertools.islice(loader, 2):\n"
            "        ddp_model(tokens).square().mean().backward()\n"
            "    for epoch in range(first_epoch, args.epochs):\n",
        ),
        ("import argparse\n", "import argparse\nimport itertools\n"),
    ),
    style(
        "sync-flag-instead-of-no-sync",
        ddp.METRICS,
        "require_backward_grad_sync is set instead of no_sync(), as in nanoGPT.",
        (
            ddp.WITHOUT_SYNC,
            "        model.require_backward_grad_sync = is_last\n"
            "        loss = F.cross_entropy(model(images), labels) / accumulate  # the mean over all batches of the step\n"
            "        loss.backward()\n",
        ),
    ),
    style(
        "large-batch-cut-in-portions",
        ddp.METRICS,
        "The loader yields the batch of a whole step, and no_sync() surrounds all portions but the last.",
        (ddp.LOADER, ddp.LOADER.replace("args.batch_size", "args.batch_size * args.accumulate")),
        (ddp.ACCUMULATED, CHUNKS),
    ),
    style(
        "accumulated-then-averaged-by-hand",
        ddp.METRICS,
        "Without DDP the local gradients add up, and are averaged over the ranks just before the step.",
        (ddp.WRAP, ""),
        ("train_one_epoch(ddp_model, train_loader", "train_one_epoch(model, train_loader"),
        (ddp.WITHOUT_SYNC, REDUCED_BY_HAND),
    ),
    style(
        "sum-divided-by-the-samples-of-a-step",
        ddp.METRICS,
        "The loss is a sum over samples, divided once; zero_grad() runs before the first batch of a step.",
        (
            "cross_entropy(model(images), labels) / accumulate  # the mean over all batches of the step\n",
            'cross_entropy(model(images), labels, reduction="sum") / (accumulate * len(labels))\n',
        ),
        ("            optimizer.step()\n            optimizer.zero_grad()\n", "            optimizer.step()\n"),
        (
            "        step, is_last = batch // accumulate, (batch + 1) % accumulate == 0\n",
            "        step, is_last = batch // accumulate, (batch + 1) % accumulate == 0\n"
            "        if batch % accumulate == 0:\n"
            "            optimizer.zero_grad()\n",
        ),
    ),
    style(
        "sharded-style-last-backward",
        sharded.FIT,
        "set_is_last_backward() marks the last backward pass too.",
        (sharded.SYNC, sharded.SYNC + "            model.set_is_last_backward(part == args.accumulate)\n"),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
