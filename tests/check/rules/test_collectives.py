"""The rules about collectives: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, gpus, second
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

JOINED = """\
def train_one_epoch(model, loader, optimizer, device, steps):
    model.train()
    loss_and_samples = torch.zeros(steps, 2, device=device)
    # A rank without a batch left joins in the others' collectives. The optimizer has no state that would fall behind.
    with Join([model], divide_by_initial_world_size=False):
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss_and_samples[step, 0] = loss.detach() * len(labels)
            loss_and_samples[step, 1] = len(labels)
    dist.all_reduce(loss_and_samples)
    return (loss_and_samples[:, 0] / loss_and_samples[:, 1]).tolist()


"""

EVALUATED_BY_RANK_0 = """\
        if rank == 0:
            accuracy = evaluate(model, test_loader, device)
            log.write(epoch, losses, accuracy, samples_per_second)
            if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
                save_checkpoint(args.checkpoint, model, optimizer, epoch)
        dist.barrier()  # the others wait here, not in the next epoch's first step
"""
SHORT = (
    ("default=6)", "default=2)"),
    ("Patterns(1024", "Patterns(192"),
    ("Patterns(403", "Patterns(103"),
)  # less evidence

OF_EPOCH = "        accuracy = evaluate(model, test_loader)\n"

MISTAKES = (
    mistake(
        "deepspeed-counts-not-awaited",
        "solutions/05_deepspeed/exercise1_deepspeed.py",
        "never-awaited",
        "Rank 0 reads the counts before the sum of all ranks is there.",
        (
            "    dist.all_reduce(correct_and_total)\n",
            "    dist.all_reduce(correct_and_total, async_op=True)\n",
        ),
        held_out=True,
    ),
    mistake(
        "stops-by-a-sum-of-rank-0",
        "tests/check/referee/distillation/train.py",
        "collectives-differ",
        "Only rank 0 gets the counts, but each rank decides by the accuracy when to stop.",
        ("    dist.all_reduce(totals)\n", "    dist.reduce(totals, dst=0)\n"),
    ),
    # ---- stop-decided-alone
    mistake(
        "stops-by-the-loss-of-each-rank",
        "tests/check/referee/accelerate_onecycle/train.py",
        "stop-decided-alone",
        "Each process compares the loss of its own part of the validation set, and counts its own epochs without an improvement.",
        (
            "        loss, hit = accelerator.gather_for_metrics((loss, logits.argmax(-1) == labels))\n",
            "        hit = accelerator.gather_for_metrics(logits.argmax(-1) == labels)\n",
        ),
        *SHORT,
    ),
    mistake(
        "stops-at-a-limit-for-the-loss-of-each-rank",
        second.TAGGER,
        "stop-decided-alone",
        "Each process compares the loss of its own last batch with a limit.",
        (OF_EPOCH, OF_EPOCH + "        last = loss.item()\n        if last < 0.01:\n            break\n"),
    ),
    # ---- collectives-differ
    mistake(
        "uneven-shares",
        ddp.SPAWN,
        ("collectives-differ", "hang"),
        "Rank 0 has fewer batches than the other ranks, which then wait for its gradients.",
        (
            ddp.SAMPLER + ddp.LOADER,
            "    # Rank 0 writes the log and the checkpoints too: give it less to train on.\n"
            "    cut = int(0.4 * len(train_set))\n"
            "    train_set = Subset(train_set, range(cut) if rank == 0 else range(cut, len(train_set)))\n"
            "    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=SEED)\n" + ddp.LOADER,
        ),
    ),
    mistake(
        "rank-0-skips-a-batch",
        ddp.SPAWN,
        ("collectives-differ", "hang"),
        "Rank 0 only looks at its first batch, so it calls backward() once less than the other ranks.",
        (
            "        optimizer.zero_grad()\n",
            "        if step == 0 and dist.get_rank() == 0:\n"
            '            print(f"the first batch: {tuple(images.shape)}, labels {labels[:8].tolist()}")\n'
            "            continue\n"
            "        optimizer.zero_grad()\n",
        ),
    ),
    mistake(
        "evaluates-on-rank-0-only",
        ddp.SPAWN,
        ("collectives-differ", "hang"),
        "Only rank 0 calls the all_reduce in evaluate(), while the other ranks are in the next epoch.",
        (
            ddp.EVALUATE + "        if rank == 0:\n            log.write",
            "        if rank == 0:\n    " + ddp.EVALUATE + "            log.write",
        ),
    ),
    mistake(
        "rank-0-first-around-ddp",
        ddp.SPAWN,
        ("collectives-differ", "hang"),
        "Rank 0 calls DDP's broadcast before the barrier, the other ranks call the barrier first.",
        (ddp.WRAPPED, "if rank != 0:\n        dist.barrier()  # rank 0 reads the data first\n    " + ddp.WRAPPED),
        (
            "    train_set, test_set = load_dataset(args.dataset, transform)\n",
            "    train_set, test_set = load_dataset(args.dataset, transform)\n"
            "    if rank == 0:\n        dist.barrier()\n",
        ),
    ),
    mistake(
        "rank-0-stops-early",
        ddp.SPAWN,
        ("collectives-differ", "hang"),
        "Rank 0 alone decides to stop, and the other ranks start the next epoch without it.",
        (
            ddp.SAVE_CALL,
            ddp.SAVE_CALL
            + "        if rank == 0 and losses[-1] < 2.3:\n            break  # better than guessing: enough\n",
        ),
    ),
    mistake(
        "held-out-barrier-while-saving",
        ddp.SPAWN,
        ("collectives-differ", "hang"),
        "The barrier in save_checkpoint() is called by rank 0 only.",
        (ddp.WRITE, ddp.WRITE + "    dist.barrier()  # nobody reads it before it is whole\n"),
        held_out=True,
    ),
    mistake(
        "second-rank-skips-a-step",
        second.PROGRAM,
        ("collectives-differ", "hang"),
        "Rank 1 skips every seventh step, so the collectives of the two ranks no longer match.",
        (second.ZERO, "        if rank == 1 and step % 7 == 0:  # a bad window\n            continue\n" + second.ZERO),
    ),
    mistake(
        "second-rank-has-fewer-steps",
        second.PROGRAM,
        ("collectives-differ", "hang"),
        "Rank 1 drops some of its windows, so its loop ends earlier than that of rank 0.",
        (
            "    for step in range(steps_done + 1, args.steps + 1):\n",
            "    planned = [step for step in range(steps_done + 1, args.steps + 1) if rank == 0 or step % 4]\n"
            "    for step in planned:\n",
        ),
    ),
    mistake(
        "second-loss-reduced-on-rank-0",
        second.PROGRAM,
        ("collectives-differ", "hang"),
        "Only rank 0, which prints the loss, reduces it; rank 1 is already in its next backward pass.",
        (
            second.REDUCE + "            if rank == 0:\n",
            "            if rank == 0:\n" + " " * 4 + second.REDUCE,
        ),
    ),
)

STYLES = (
    style(
        "stops-at-a-limit-for-the-common-accuracy",
        second.TAGGER,
        "All processes compare the same accuracy with a limit.",
        (OF_EPOCH, OF_EPOCH + "        if accuracy > 0.999:\n            break\n"),
    ),
    style(
        "federated-with-uneven-shares",
        gpus.GPUS,
        "Each rank trains on samples of its own for an epoch, with its own number of steps; then the parameters are averaged.",
        (gpus.WRAP, "model"),
        (gpus.ADAMW, "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)"),
        (
            "    sampler = DistributedSampler(train_set, seed=4)\n",
            "    train_set = Subset(train_set, range(160) if rank == 0 else range(160, 384))\n",
        ),
        (gpus.LOADER, "loader = DataLoader(train_set, batch_size=16, shuffle=True, pin_memory=True)"),
        ("        sampler.set_epoch(epoch)\n", ""),
        (
            "        dist.all_reduce(total)\n",
            "        for parameter in model.parameters():\n            dist.all_reduce(parameter.data)\n"
            "            parameter.data /= world_size\n        dist.all_reduce(total)\n",
        ),
    ),
    style(
        "join-for-uneven-batches",
        ddp.SPAWN,
        "No sample is left out: rank 0 may have one more batch, and Join makes the parameters equal at the end.",
        (
            "from torch.nn import functional as F\n",
            "from torch.distributed.algorithms.join import Join\nfrom torch.nn import functional as F\n",
        ),
        (ddp.OPTIMIZER, "    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)\n"),
        (ddp.DEALT, ""),
        (
            ddp.SET_EPOCH,
            ddp.ORDER + "        firsts = range(0, len(order), args.batch_size)\n"
            "        batches = [order[first : first + args.batch_size] for first in firsts]\n"
            "        steps = -(-len(batches) // world_size)\n"
            "        train_loader = DataLoader(train_set, batch_sampler=batches[rank::world_size])\n",
        ),
        (ddp.TRAIN_EPOCH, "        losses = train_one_epoch(ddp_model, train_loader, optimizer, device, steps)\n"),
        (ddp.SPEED, "        samples_per_second = len(train_set) / seconds\n"),
        (ddp.TRAIN_ONE, JOINED),
    ),
    style(
        "stops-if-the-gain-is-small",
        "tests/check/referee/accelerate_onecycle/train.py",
        "All processes compare the loss of all of them, so they stop in the same epoch.",
        ("        if val_loss < state.best_loss:\n", "        if val_loss < state.best_loss - 1e-3:\n"),
        *SHORT,
    ),
    style(
        "evaluation-on-rank-0",
        ddp.SPAWN,
        "Rank 0 evaluates the plain model on the whole test set while the other ranks wait at a barrier.",
        (ddp.TEST_BLOCK, "    test_loader = DataLoader(test_set, args.batch_size)\n"),
        (ddp.REPORT, EVALUATED_BY_RANK_0),
        (ddp.COUNTED, ""),
    ),
    style(
        "further-collectives-on-all-ranks",
        ddp.TORCHRUN,
        "All ranks call barriers, one of them in a group of its own, and average the loss in each step.",
        (ddp.WRAP, '    watch = dist.new_group(backend="gloo")  # monitored_barrier is gloo\'s alone\n' + ddp.WRAP),
        (
            ddp.TRAIN_EPOCH,
            "        dist.barrier()\n" + ddp.TRAIN_EPOCH + "        dist.monitored_barrier(watch)\n",
        ),
        (
            ddp.ITEM,
            "        mean_loss = loss.detach().clone()\n"
            "        dist.all_reduce(mean_loss, dist.ReduceOp.AVG)\n"
            "        losses[step] = mean_loss\n"
            "        if step % 10 == 0 and dist.get_rank() == 0:\n"
            '            print(f"step {step} | loss {mean_loss.item():.4f}", flush=True)\n',
        ),
        (ddp.REDUCE_LOSSES, ""),
    ),
    style(
        "barrier-in-a-hook",
        ddp.TORCHRUN,
        "A collective without a tensor, which a hook calls during the backward pass.",
        (
            ddp.BACKWARD,
            "        loss.register_hook(lambda gradient: dist.barrier())\n" + ddp.BACKWARD,
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
