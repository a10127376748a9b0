"""Mistakes that the check was not written for: made up without a look at its rules, to score it honestly."""

from mistakes.bank import Mistake

SPAWN = "solutions/02_pytorch_ddp/exercise1_multigpu.py"
TORCHRUN = "solutions/02_pytorch_ddp/exercise2_multigpu_torchrun.py"
METRICS = "solutions/02_pytorch_ddp/exercise3_global_metrics.py"
SINGLE = "01_single_gpu/single_gpu.py"

WRAP = "ddp_model = DDP(model)  # the same weights, but its backward() averages the gradients over all processes\n"
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
BACKWARD = "        loss.backward()\n"
STEP = "        optimizer.step()\n"
LOAD = "    first_epoch = load_snapshot(args.snapshot, model, optimizer, device)\n"
SAMPLER = "    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)\n"
WRITE = '    torch.save(snapshot, path + ".tmp")\n'
SAVE = (
    "        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs):\n"
    "            save_snapshot(args.snapshot, model, optimizer, epoch)\n"
)

ON_EXERCISE_1 = (
    Mistake(
        "held-out-optimizer-of-a-copy",
        SPAWN,
        (
            ("import os\n", "import copy\nimport os\n"),
            (
                OPTIMIZER,
                "    untrained = copy.deepcopy(model)  # to compare with later\n"
                "    optimizer = torch.optim.AdamW(untrained.parameters(), lr=1e-3)\n",
            ),
        ),
        ("wrong-parameters", "no-learning"),
        "A copy of the model is kept for comparison, and by a slip the optimizer gets the copy's parameters.",
    ),
    Mistake(
        "held-out-biases-not-averaged",
        SPAWN,
        (
            (WRAP, "ddp_model = model  # its gradients are averaged by hand\n"),
            (
                BACKWARD,
                BACKWARD + "        for name, parameter in model.named_parameters():\n"
                '            if name.endswith("weight"):\n'
                "                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)\n",
            ),
        ),
        ("gradients-differ", "weights-differ"),
        "The gradients are averaged by hand instead of by DDP, those of the weights only: the biases drift apart.",
    ),
    Mistake(
        "held-out-barrier-while-saving",
        SPAWN,
        ((WRITE, WRITE + "    dist.barrier()  # nobody reads it before it is whole\n"),),
        ("collectives-differ", "hang"),
        "A barrier stands in save_snapshot, which rank 0 alone calls: rank 1 is in the next epoch or gone by then.",
    ),
    Mistake(
        "held-out-weights-averaged-each-epoch",
        SPAWN,
        (
            (WRAP, "ddp_model = model  # averaged once an epoch: that saves traffic\n"),
            (
                "        seconds = time.perf_counter() - start\n",
                "        for parameter in model.parameters():\n"
                "            dist.all_reduce(parameter.data, dist.ReduceOp.AVG)\n"
                "        seconds = time.perf_counter() - start\n",
            ),
        ),
        ("gradients-differ", "weights-differ"),
        "Each process trains alone for an epoch, then the weights are averaged: between two averages they differ.",
    ),
    Mistake(
        "held-out-head-outside-ddp",
        SPAWN,
        (
            ("import torch.multiprocessing as mp\n", "import torch.multiprocessing as mp\nfrom torch import nn\n"),
            (
                WRAP,
                "images_to_features = nn.Sequential(model.conv1, nn.ReLU(), model.conv2, nn.ReLU(), nn.MaxPool2d(2))\n"
                "    trunk = nn.Sequential(images_to_features, nn.Flatten(), model.fc1, nn.ReLU())\n"
                "    ddp_model = nn.Sequential(DDP(trunk), model.fc2)\n",
            ),
        ),
        ("gradients-differ", "weights-differ"),
        "DDP wraps all layers but the last one, whose gradients each rank keeps to itself.",
    ),
    Mistake(
        "held-out-shuffled-apart",
        SPAWN,
        (
            (
                SAMPLER,
                "    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(SEED + rank))\n"
                "    train_set = Subset(train_set, order.tolist())\n" + SAMPLER,
            ),
        ),
        ("shares-overlap", "samples-missed"),
        "Each rank shuffles the data in its own order before the sampler deals: other positions, the same samples.",
    ),
    Mistake(
        "held-out-clipped-on-rank-0",
        SPAWN,
        (
            (
                STEP,
                "        if dist.get_rank() == 0:  # where the norm is watched\n"
                "            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)\n" + STEP,
            ),
        ),
        ("gradients-differ", "weights-differ"),
        "Rank 0 alone clips the gradients after they have been averaged, and then steps along others than rank 1.",
    ),
    Mistake(
        "held-out-learning-rate-by-rank",
        SPAWN,
        ((OPTIMIZER, OPTIMIZER.replace("1e-3", "1e-3 * (rank + 1)")),),
        ("weights-differ",),
        "The learning rate grows with the rank instead of the number of processes: equal gradients, unequal steps.",
    ),
    Mistake(
        "held-out-nobody-saves",
        SPAWN,
        ((SAVE, SAVE.replace("rank == 0", "mp.parent_process() is None")),),
        ("no-snapshot",),
        "The main process is to save, but it only starts the workers: they all have a parent, so none of them saves.",
    ),
    Mistake(
        "held-out-saved-before-training",
        SPAWN,
        ((SAVE, ""), ("        sampler.set_epoch(epoch)\n", "        sampler.set_epoch(epoch)\n" + SAVE)),
        ("epoch-skipped", "resume-differs"),
        "The snapshot is written before the epoch whose number it bears: a resumed run leaves that epoch out.",
    ),
    Mistake(
        "held-out-gradients-left-off",
        SPAWN,
        (
            ("@torch.inference_mode()\n", ""),
            (
                '    """Return the accuracy over the whole test set, between 0 and 1."""\n',
                '    """Return the accuracy over the whole test set, between 0 and 1."""\n'
                "    torch.set_grad_enabled(False)\n",
            ),
        ),
        ("crash",),
        "The evaluation turns gradients off and never on again: backward() fails in the second epoch.",
    ),
)

ON_EXERCISE_2 = (
    Mistake(
        "held-out-four-shares",
        TORCHRUN,
        ((SAMPLER, SAMPLER.replace("seed=", "num_replicas=4, rank=rank, seed=")),),
        ("samples-missed",),
        "The sampler still deals to the four GPUs of another machine: two processes see half of each epoch.",
    ),
    Mistake(
        "held-out-parameters-replaced-on-resume",
        TORCHRUN,
        (('load_state_dict(snapshot["model"])', 'load_state_dict(snapshot["model"], assign=True)'),),
        ("wrong-parameters", "no-learning", "resume-differs"),
        "With assign=True a resumed model gets new parameters, while the optimizer holds the old ones: nothing moves.",
    ),
    Mistake(
        "held-out-snapshot-copied",
        TORCHRUN,
        (
            ("import os\nimport time\n", "import os\nimport shutil\nimport time\n"),
            ('    os.replace(path + ".tmp", path)\n', '    shutil.copyfile(path + ".tmp", path)\n'),
        ),
        ("snapshot-torn",),
        "The temporary file is copied over the snapshot, which is in pieces for as long as the copy takes.",
    ),
    Mistake(
        "held-out-first-of-the-gathered",
        TORCHRUN,
        (
            (
                "    dist.all_reduce(correct_and_total)\n"
                "    correct, total = correct_and_total.tolist()\n"
                "    return correct / total\n",
                "    accuracy = correct_and_total[0] / correct_and_total[1]\n"
                "    accuracies = [torch.zeros_like(accuracy) for _ in range(dist.get_world_size())]\n"
                "    dist.all_gather(accuracies, accuracy)\n"
                "    return accuracies[0].item()\n",
            ),
        ),
        ("metric-wrong", "evaluation-missed"),
        "The accuracies of all ranks are gathered, and the first is reported: that of rank 0's half of the test set.",
    ),
    Mistake(
        "held-out-hook-that-sums",
        TORCHRUN,
        (
            (WRAP, WRAP + "    ddp_model.register_comm_hook(None, reduce_bucket)\n"),
            (
                "def train_one_epoch(",
                "def reduce_bucket(state, bucket):\n"
                '    """Reduce a bucket of gradients over all processes."""\n'
                "    work = dist.all_reduce(bucket.buffer(), async_op=True)\n"
                "    return work.get_future().then(lambda future: future.value()[0])\n\n\n"
                "def train_one_epoch(",
            ),
        ),
        ("gradient-scale", "differs-from-one-process"),
        "DDP's communication hook adds the gradients up and does not divide: they are twice as large on all ranks.",
    ),
    Mistake(
        "held-out-resumed-on-rank-0",
        TORCHRUN,
        (
            (
                LOAD,
                "    # One reader is enough: DDP hands rank 0's weights to all.\n"
                "    first_epoch = load_snapshot(args.snapshot, model, optimizer, device) if rank == 0 else 0\n"
                "    first_epoch = torch.tensor(first_epoch, device=device)\n"
                "    dist.broadcast(first_epoch, src=0)\n"
                "    first_epoch = first_epoch.item()\n",
            ),
        ),
        ("weights-differ", "optimizer-lost", "resume-differs"),
        "Rank 0 alone reads the snapshot; DDP spreads the weights, the epoch is sent, rank 1's optimizer starts cold.",
    ),
)

ON_EXERCISE_3 = (
    Mistake(
        "held-out-reduced-with-each-batch",
        METRICS,
        (("    dist.all_reduce(confusion)\n", "        dist.all_reduce(confusion)\n"),),
        ("metric-wrong", "evaluation-repeated"),
        "The running counts are reduced after each batch: what was reduced before is added up over the ranks again.",
    ),
    Mistake(
        "held-out-no-sync-too-late",
        METRICS,
        (
            (
                "        with nullcontext() if is_last else model.no_sync():\n"
                "            loss = F.cross_entropy(model(images), labels) / accumulate  # the mean of the batches'"
                " means\n",
                "        loss = F.cross_entropy(model(images), labels) / accumulate\n"
                "        with nullcontext() if is_last else model.no_sync():\n",
            ),
        ),
        ("accumulation-traffic",),
        "no_sync() surrounds backward() but not the forward pass that it acts on: gradients travel with every batch.",
    ),
    Mistake(
        "held-out-steps-a-batch-early",
        METRICS,
        (("(batch + 1) % accumulate == 0\n", "batch % accumulate == 0\n"),),
        ("accumulation-uneven", "differs-from-one-process"),
        "The step comes at the first batch of each group: the first step has one batch, and one is left at the end.",
    ),
    Mistake(
        "held-out-share-of-a-share",
        METRICS,
        (
            (
                "test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size)",
                "share = Subset(test_set, range(rank, len(test_set), world_size))\n"
                "    test_sampler = DistributedSampler(share, shuffle=False)\n"
                "    test_loader = DataLoader(share, args.batch_size, sampler=test_sampler)",
            ),
        ),
        ("evaluation-missed",),
        "Each rank's share of the test set is dealt out once more by a sampler: half of the test set is never seen.",
    ),
)

ON_ONE_DEVICE = (
    Mistake(
        "held-out-losses-keep-graphs",
        SINGLE,
        (("        losses[step] = loss.item()\n", "        losses[step] = loss\n"),),
        ("graph-kept",),
        "The loss goes into the tensor of losses with its graph, so the graphs of all steps of an epoch stay alive.",
    ),
    Mistake(
        "held-out-snapshot-made-once",
        SINGLE,
        (
            (
                "    for epoch in range(first_epoch, args.epochs):\n",
                "    # These refer to the live tensors, so once is enough.\n"
                '    snapshot = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}\n'
                "    for epoch in range(first_epoch, args.epochs):\n",
            ),
            ("(args.snapshot, model, optimizer, epoch)\n", "(args.snapshot, snapshot, epoch)\n"),
            ("def save_snapshot(path, model, optimizer, epoch):\n", "def save_snapshot(path, snapshot, epoch):\n"),
            (
                '    snapshot = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}\n',
                '    snapshot = {**snapshot, "epoch": epoch}\n',
            ),
        ),
        ("optimizer-lost", "resume-differs"),
        "The state dicts are taken once, before the first step: the weights stay current, the optimizer's is empty.",
    ),
    Mistake(
        "held-out-order-of-the-first-epoch",
        SINGLE,
        (("generator.manual_seed(SEED + epoch)", "generator.manual_seed(SEED + first_epoch)"),),
        ("same-order", "resume-differs"),
        "The order is seeded with the first epoch instead of this one: it is the same in all epochs of a run.",
    ),
)

HELD_OUT = ON_EXERCISE_1 + ON_EXERCISE_2 + ON_EXERCISE_3 + ON_ONE_DEVICE
