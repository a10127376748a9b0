"""Mistaken versions of the solutions: each an edit, with the finding that it must raise."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """A solution with a mistake in it.

    Attributes:
        name: says what is wrong, in kebab-case.
        base: the solution's path under the repository's root.
        edits: pairs (old, new) of text, applied in order; each old text stands in the base exactly once.
        kinds: the first error of the check must be of one of these kinds (keys of ``workshop.check.findings.WHY``).
        note: what happens, and the id (P06) if it is from the catalogue of public threads.
        real: whether only a real launcher shows it (torchrun itself, or kill -9).
    """

    name: str
    base: str
    edits: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...]
    note: str
    real: bool = False

    def source(self, text: str) -> str:
        """The mistaken program, from the text of the base."""
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.name}: {old!r} stands in {self.base} {text.count(old)} times"
            text = text.replace(old, new)
        return text


SINGLE = "01_single_gpu/single_gpu.py"
SPAWN = "solutions/02_pytorch_ddp/exercise1_multigpu.py"
TORCHRUN = "solutions/02_pytorch_ddp/exercise2_multigpu_torchrun.py"
METRICS = "solutions/02_pytorch_ddp/exercise3_global_metrics.py"

# Lines of the solutions that several mistakes edit.
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
LOAD = "first_epoch = load_snapshot(args.snapshot, model, optimizer, device)"
WRAP = "ddp_model = DDP(model)  # the same weights, but its backward() averages the gradients over all processes"
IMPORTS = "from torch.utils.data import DataLoader, DistributedSampler, Subset"
RANDOM_SAMPLER = "from torch.utils.data import DataLoader, RandomSampler, Subset"
SAMPLER = "    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)\n"
LOADER = "    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)\n"
SHUFFLED = "    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)\n"
TEST_LOADER = (
    "    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size)\n"
)
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
EVALUATE = "        accuracy = evaluate(model, test_loader, device)\n"
FORWARD = "loss = F.cross_entropy(model(images), labels)"
BACKWARD = "        loss.backward()\n"
SAVE_IF = "        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs):\n"
SAVE = "            save_snapshot(args.snapshot, model, optimizer, epoch)\n"
LOAD_OPTIMIZER = '    optimizer.load_state_dict(snapshot["optimizer"])\n'
NEXT_EPOCH = '    return snapshot["epoch"] + 1\n'
REDUCE_LOSSES = "    dist.all_reduce(losses, dist.ReduceOp.AVG)\n"
NO_SYNC = "        with nullcontext() if is_last else model.no_sync():\n"
ACCUMULATED_LOSS = (
    "            loss = F.cross_entropy(model(images), labels) / accumulate  # the mean of the batches' means\n"
)
ACCUMULATED_BACKWARD = "            loss.backward()\n"
IS_LAST = "(batch + 1) % accumulate == 0"
CONFUSION = (
    "        confusion += (labels.to(device) * CLASSES + predictions)"
    ".bincount(minlength=CLASSES**2).view_as(confusion)\n"
)
REDUCE_CONFUSION = "    dist.all_reduce(confusion)\n"
F1 = "    f1 = 2 * correct / (confusion.sum(dim=0) + confusion.sum(dim=1)).clamp(min=1)  # of each class\n"
SCORES = "    return (correct.sum() / confusion.sum()).item(), f1.mean().item()\n"

BANK = (
    # ---- Exercise 1: the processes and their group
    Mistake(
        "each-process-alone",
        SPAWN,
        (
            ("    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)\n", ""),
            ("        dist.destroy_process_group()\n", "        pass\n"),
            (WRAP, "ddp_model = model"),
            (SAMPLER, "    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)\n"),
            ("disable=dist.get_rank() > 0 or None", "disable=None"),
            (REDUCE_LOSSES, ""),
            ("    dist.all_reduce(correct_and_total)\n", ""),
        ),
        ("no-group",),
        "mp.spawn starts the processes and that is all: each trains a model of its own on its share.",
    ),
    Mistake(
        "each-a-group-of-one",
        SPAWN,
        (
            (
                "init_process_group(backend, store=store, rank=rank, world_size=world_size)",
                "init_process_group(backend, store=store, rank=0, world_size=1)",
            ),
        ),
        ("wrong-group",),
        "Rank 0 of 1 was left over from a test with one process: every process is a group by itself (P40).",
    ),
    Mistake(
        "fixed-port",
        SPAWN,
        (
            (
                "    # The store is where the processes find each other. "
                "Port 0: the system picks a free one, nobody collides.\n"
                '    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)\n',
                "",
            ),
            ("args=(args.nproc, store.port, args)", "args=(args.nproc, args)"),
            ("def worker(rank, world_size, port, args):", "def worker(rank, world_size, args):"),
            (
                '    store = dist.TCPStore("127.0.0.1", port, is_master=False)\n',
                '    os.environ["MASTER_ADDR"] = "localhost"\n    os.environ["MASTER_PORT"] = "12355"\n',
            ),
            (
                "init_process_group(backend, store=store, rank=rank,",
                "init_process_group(backend, rank=rank,",
            ),
        ),
        ("port-fixed",),
        "The address and port of the PyTorch tutorial: a second run on the machine fails with EADDRINUSE (P19).",
    ),
    # ---- Exercise 1: gradients and weights
    Mistake(
        "not-wrapped",
        SPAWN,
        ((WRAP, "ddp_model = model"),),
        ("gradients-differ",),
        "The group and the sampler are there, DDP is not: each process trains a model of its own (P06).",
    ),
    Mistake(
        "forward-through-module",
        SPAWN,
        ((FORWARD, "loss = F.cross_entropy(model.module(images), labels)"),),
        ("gradients-differ",),
        "The forward goes past DDP to the model in it, and its backward averages nothing (P27).",
    ),
    Mistake(
        "loss-averaged-instead-of-gradients",
        SPAWN,
        (
            (WRAP, "ddp_model = model"),
            (BACKWARD, "        dist.all_reduce(loss.data, dist.ReduceOp.AVG)\n" + BACKWARD),
        ),
        ("gradients-differ",),
        "The value of the loss is averaged before the backward; the gradients stay those of each process (P07).",
    ),
    Mistake(
        "gradients-summed-by-hand",
        SPAWN,
        (
            (WRAP, "ddp_model = model"),
            (
                BACKWARD,
                BACKWARD + "        for parameter in model.parameters():\n"
                "            dist.all_reduce(parameter.grad)\n",
            ),
        ),
        ("gradient-scale",),
        "all_reduce adds up by default and nobody divides: the gradient is world_size times too large (P31).",
    ),
    Mistake(
        "only-matrices-averaged",
        SPAWN,
        (
            (WRAP, "ddp_model = model"),
            (
                BACKWARD,
                BACKWARD + "        for parameter in model.parameters():\n"
                "            if parameter.dim() > 1:  # the large ones\n"
                "                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)\n",
            ),
        ),
        ("gradients-differ",),
        "Averaged by hand, but without the biases: theirs differ from rank to rank, and soon all weights do.",
    ),
    Mistake(
        "first-weights-of-its-own",
        SPAWN,
        (
            ("torch.manual_seed(SEED)  # the same first weights in every run", "torch.manual_seed(SEED + rank)"),
            (WRAP, "ddp_model = model"),
            (
                BACKWARD,
                BACKWARD + "        for parameter in model.parameters():\n"
                "            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)\n",
            ),
        ),
        ("weights-differ",),
        "The gradients are averaged by hand, but nobody broadcast the first weights: each rank has drawn its own.",
    ),
    # ---- Exercise 1: shares of the data
    Mistake(
        "no-sampler",
        SPAWN,
        ((SAMPLER + LOADER, SHUFFLED), (SET_EPOCH, "")),
        ("same-samples", "shares-overlap"),
        "Every rank goes through the whole training set, each in an order of its own (P18).",
    ),
    Mistake(
        "sampler-of-one-process",
        SPAWN,
        (
            (IMPORTS, RANDOM_SAMPLER),
            (SAMPLER, "    sampler = RandomSampler(train_set, generator=torch.Generator())\n"),
            (SET_EPOCH, "        sampler.generator.manual_seed(SEED + epoch)\n"),
        ),
        ("same-samples",),
        "The sampler of single_gpu.py, with the same seed everywhere: all ranks compute the very same batches (P18).",
    ),
    Mistake(
        "windows-overlap",
        SPAWN,
        (
            (
                SAMPLER + LOADER,
                "    share = len(train_set) // world_size\n"
                "    first = rank * len(train_set) // (2 * world_size)\n"
                "    train_set = Subset(train_set, range(first, first + share))\n" + SHUFFLED,
            ),
            (SET_EPOCH, ""),
        ),
        ("shares-overlap", "samples-missed"),
        "Shares cut by hand that begin half a share too early: they overlap, and the end is left out.",
    ),
    Mistake(
        "sampler-seed-of-its-own",
        SPAWN,
        ((SAMPLER, SAMPLER.replace("SEED", "SEED + rank")),),
        ("shares-overlap", "samples-missed"),
        "Each rank deals out another order: some samples fall to several ranks, others to none (P17).",
    ),
    Mistake(
        "random-part-on-each-rank",
        SPAWN,
        (
            (IMPORTS, RANDOM_SAMPLER),
            (SAMPLER, "    sampler = RandomSampler(train_set, num_samples=len(train_set) // world_size)\n"),
            (SET_EPOCH, ""),
        ),
        ("shares-overlap", "samples-missed"),
        "Each rank draws a random part of the right size on its own: right on average, wrong in every epoch.",
    ),
    Mistake(
        "set-epoch-missing",
        SPAWN,
        ((SET_EPOCH, ""),),
        ("same-order",),
        "The sampler is never told the epoch, and deals out the same order in each (P09).",
    ),
    Mistake(
        "set-epoch-with-rank",
        SPAWN,
        ((SET_EPOCH, "        sampler.set_epoch(SEED + 1000 * epoch + rank)\n"),),
        ("shares-overlap", "samples-missed"),
        "The epoch that the sampler is told depends on the rank: the ranks share out different orders (P15).",
    ),
    # ---- Exercise 1: who waits where
    Mistake(
        "uneven-shares",
        SPAWN,
        (
            (
                SAMPLER + LOADER,
                "    # Rank 0 writes the log and the snapshots too: give it less to train on.\n"
                "    cut = int(0.4 * len(train_set))\n"
                "    train_set = Subset(train_set, range(cut) if rank == 0 else range(cut, len(train_set)))\n"
                "    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=SEED)\n" + LOADER,
            ),
        ),
        ("collectives-differ", "hang"),
        "Rank 0 has fewer batches than the others, which wait for its gradients (P29).",
    ),
    Mistake(
        "rank-0-skips-a-batch",
        SPAWN,
        (
            (
                "        optimizer.zero_grad()\n",
                "        if step == 0 and dist.get_rank() == 0:\n"
                '            print(f"the first batch: {tuple(images.shape)}, labels {labels[:8].tolist()}")\n'
                "            continue\n"
                "        optimizer.zero_grad()\n",
            ),
        ),
        ("collectives-differ", "hang"),
        "Rank 0 looks at its first batch and goes on to the next, a backward short of the others (P23).",
    ),
    Mistake(
        "evaluates-on-rank-0-only",
        SPAWN,
        (
            (
                EVALUATE + "        if rank == 0:\n            log.write",
                "        if rank == 0:\n    " + EVALUATE + "            log.write",
            ),
        ),
        ("collectives-differ", "hang"),
        "The all_reduce in evaluate() runs on rank 0 alone, the others are already in the next epoch (P25).",
    ),
    Mistake(
        "rank-0-first-around-ddp",
        SPAWN,
        (
            (WRAP, "if rank != 0:\n        dist.barrier()  # rank 0 reads the data first\n    " + WRAP),
            (
                "    train_set, test_set = load_dataset(args.dataset, transform)\n",
                "    train_set, test_set = load_dataset(args.dataset, transform)\n"
                "    if rank == 0:\n        dist.barrier()\n",
            ),
        ),
        ("collectives-differ", "hang"),
        "Rank 0 meets DDP's broadcast before the barrier, the others the barrier before DDP's broadcast.",
    ),
    Mistake(
        "rank-0-stops-early",
        SPAWN,
        (
            (
                SAVE,
                SAVE
                + "        if rank == 0 and losses[-1] < 2.3:\n            break  # better than guessing: enough\n",
            ),
        ),
        ("collectives-differ", "hang"),
        "Rank 0 decides alone that training is over; the others start the next epoch without it.",
    ),
    # ---- Exercise 1: who writes, and what
    Mistake(
        "every-rank-saves",
        SPAWN,
        ((SAVE_IF, "        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:\n"),),
        ("two-writers",),
        "All ranks write one snapshot, through one temporary file (P12, P46).",
    ),
    Mistake(
        "every-rank-prints",
        SPAWN,
        ((EVALUATE, EVALUATE + '        print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}", flush=True)\n'),),
        ("several-print",),
        "A line an epoch from every process, all the same.",
    ),
    Mistake(
        "saves-the-wrapped-model",
        SPAWN,
        ((SAVE, SAVE.replace("model", "ddp_model")),),
        ("snapshot-keys",),
        'The keys of the saved weights start with "module.", and the plain model cannot load them (P22, P45).',
    ),
    # ---- Exercise 1: figures
    Mistake(
        "mean-of-accuracies",
        SPAWN,
        (
            (
                "    dist.all_reduce(correct_and_total)\n"
                "    correct, total = correct_and_total.tolist()\n"
                "    return correct / total\n",
                "    accuracy = correct_and_total[0] / correct_and_total[1]\n"
                "    dist.all_reduce(accuracy, dist.ReduceOp.AVG)\n"
                "    return accuracy.item()\n",
            ),
        ),
        ("metric-wrong",),
        "The mean of the ranks' accuracies, whose shares of the test set are not equally large.",
    ),
    Mistake(
        "loss-of-one-rank",
        SPAWN,
        ((REDUCE_LOSSES, ""),),
        ("metric-wrong",),
        "The log has the loss over rank 0's batches, not the one over the global batches.",
    ),
    Mistake(
        "throughput-of-one-rank",
        SPAWN,
        (
            (
                "len(losses) * args.batch_size * world_size / seconds",
                "len(losses) * args.batch_size / seconds",
            ),
        ),
        ("metric-wrong",),
        "The samples a second of one process are reported for all of them.",
    ),
    Mistake(
        "unused-parameter",
        SPAWN,
        (
            (
                "    model = SmallCNN().to(device)\n",
                "    model = SmallCNN()\n"
                "    model.fc3 = torch.nn.Linear(128, 10)  # a second head, for later\n"
                "    model = model.to(device)\n",
            ),
        ),
        ("crash",),
        "DDP waits for the gradient of a layer that the loss does not use, and raises in the second forward (P14).",
    ),
    # ---- Exercise 2: what torchrun sets
    Mistake(
        "rank-as-a-string",
        TORCHRUN,
        (
            (
                'rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])',
                'rank, world_size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])',
            ),
            (TEST_LOADER, TEST_LOADER.replace("range(rank,", "range(dist.get_rank(),")),
            ("SEED + 1000 * epoch + rank", "SEED + 1000 * epoch + dist.get_rank()"),
        ),
        ("no-snapshot",),
        'The rank is "0", which is never equal to 0: nobody prints, and nobody saves (P33).',
    ),
    Mistake(
        "rank-as-device-index",
        TORCHRUN,
        (('int(os.environ["LOCAL_RANK"])', 'int(os.environ["RANK"])'),),
        ("device-index",),
        "The rank over all machines picks the device: right on the first machine, out of range on the second (P36).",
    ),
    Mistake(
        "address-overwritten",
        TORCHRUN,
        (
            (
                "    dist.init_process_group(backend)\n",
                '    os.environ["MASTER_ADDR"] = "localhost"\n'
                '    os.environ["MASTER_PORT"] = "12355"\n'
                "    dist.init_process_group(backend)\n",
            ),
        ),
        ("address-overwritten", "port-fixed"),
        "Two lines of an mp.spawn tutorial: torchrun's store is at another port, and nobody opens this one (P39).",
        real=True,
    ),
    Mistake(
        "world-size-literal",
        TORCHRUN,
        (("dist.init_process_group(backend)", "dist.init_process_group(backend, rank=rank, world_size=4)"),),
        ("wrong-group", "hang"),
        "The number of processes of another machine: two of them wait for four (P40).",
    ),
    Mistake(
        "outlives-torchrun",
        TORCHRUN,
        (
            (
                "from workshop.training.launcher import exit_with_launcher\n\n"
                "exit_with_launcher()  # kill -9 on torchrun would leave this process training, and saving; "
                "before the slow imports\n\n",
                "",
            ),
        ),
        ("orphans",),
        "After kill -9 on torchrun its workers train on, and write to the snapshot that the next start writes too.",
        real=True,
    ),
    Mistake(
        "traceback-not-recorded",
        TORCHRUN,
        (("@record  # torchrun then shows the traceback of the rank that failed first\n", ""),),
        ("traceback-hidden",),
        "Without @record torchrun's summary says which rank failed, but not why.",
        real=True,
    ),
    # ---- Exercise 2: the snapshot, and carrying on from it
    Mistake(
        "snapshot-written-in-place",
        TORCHRUN,
        (
            (
                '    torch.save(snapshot, path + ".tmp")\n    os.replace(path + ".tmp", path)\n',
                "    torch.save(snapshot, path)\n",
            ),
        ),
        ("snapshot-torn",),
        "A process that dies while it saves leaves half a snapshot in place of the last good one.",
    ),
    Mistake(
        "last-epoch-again",
        TORCHRUN,
        ((NEXT_EPOCH, '    return snapshot["epoch"]\n'),),
        ("epoch-repeated",),
        "The saved epoch is finished, and is trained once more (P47).",
    ),
    Mistake(
        "next-epoch-skipped",
        TORCHRUN,
        (
            (
                NEXT_EPOCH,
                '    epochs_done = snapshot["epoch"] + 1\n    return epochs_done + 1  # carry on with the next one\n',
            ),
        ),
        ("epoch-skipped",),
        "The number of finished epochs is already the number of the next one: adding 1 leaves an epoch out.",
    ),
    Mistake(
        "optimizer-not-saved",
        TORCHRUN,
        ((' "optimizer": optimizer.state_dict(),', ""), (LOAD_OPTIMIZER, "")),
        ("optimizer-lost", "resume-fails"),
        "The snapshot has the weights alone; the check of the options refuses to carry on from such a one (P48).",
    ),
    Mistake(
        "optimizer-not-loaded",
        TORCHRUN,
        ((LOAD_OPTIMIZER, ""),),
        ("optimizer-lost",),
        "The optimizer's state is in the snapshot, but nobody reads it: AdamW starts cold (P48).",
    ),
    Mistake(
        "optimizer-made-again",
        TORCHRUN,
        ((WRAP, WRAP + "\n    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=1e-3)"),),
        ("optimizer-lost",),
        "The state is loaded into one optimizer, and the steps are taken with another (P44).",
    ),
    Mistake(
        "never-loaded",
        TORCHRUN,
        ((LOAD, "first_epoch = 0"),),
        ("never-resumes",),
        "Snapshots are written, but the second start begins with fresh weights and the first epoch.",
    ),
    Mistake(
        "snapshot-only-at-the-end",
        TORCHRUN,
        ((SAVE_IF, "        if rank == 0 and epoch + 1 == args.epochs:\n"),),
        ("no-snapshot",),
        "The one snapshot comes when the run is over: after a crash there is nothing to carry on from (P50).",
    ),
    Mistake(
        "options-in-the-snapshot",
        TORCHRUN,
        (
            (SAVE, SAVE.replace("epoch)", "epoch, args)")),
            (
                "def save_snapshot(path, model, optimizer, epoch):",
                "def save_snapshot(path, model, optimizer, epoch, args):",
            ),
            ('"epoch": epoch}', '"epoch": epoch, "args": args}'),
        ),
        ("resume-fails",),
        "A Namespace in the snapshot: torch.load(weights_only=True) refuses the file (P41).",
    ),
    Mistake(
        "snapshot-path-per-rank",
        TORCHRUN,
        (
            (LOAD, 'path = f"{args.snapshot}.rank{rank}"\n    ' + LOAD.replace("args.snapshot", "path")),
            (SAVE, SAVE.replace("args.snapshot", "path")),
        ),
        ("no-snapshot", "collectives-differ", "hang"),
        "Rank 0 saves under a name of its own: the other ranks find no file of theirs and begin anew (P42).",
    ),
    Mistake(
        "schedule-not-saved",
        TORCHRUN,
        (
            (
                LOAD,
                LOAD + "\n    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)",
            ),
            (EVALUATE, "        scheduler.step()\n" + EVALUATE),
        ),
        ("schedule-lost",),
        "The learning rate halves with each epoch, and after a restart begins at its first value again (P43).",
    ),
    Mistake(
        "order-counted-from-the-restart",
        TORCHRUN,
        ((SET_EPOCH, "        sampler.set_epoch(epoch - first_epoch)\n"),),
        ("resume-differs",),
        "The order of the samples is that of the epochs since the last start: a restart sees the first order again.",
    ),
    # ---- Exercise 3: accumulation
    Mistake(
        "accumulated-not-divided",
        METRICS,
        (
            (ACCUMULATED_LOSS, f"            {FORWARD}\n"),
            ("losses[step] += loss.item()", "losses[step] += loss.item() / accumulate"),
        ),
        ("accumulation-scale",),
        "The gradient of a step is the sum over its batches, not their mean; the logged loss is right.",
    ),
    Mistake(
        "divided-by-the-wrong-number",
        METRICS,
        (
            (ACCUMULATED_LOSS, f"            {FORWARD}\n"),
            (ACCUMULATED_BACKWARD, "            (loss / len(loader)).backward()\n"),
            ("losses[step] += loss.item()", "losses[step] += loss.item() / accumulate"),
        ),
        ("accumulation-scale", "gradient-scale", "metric-wrong"),
        "Divided by the batches of the epoch instead of those of the step: the gradient is several times too small.",
    ),
    Mistake(
        "step-a-batch-too-early",
        METRICS,
        ((IS_LAST, "batch % accumulate == 0"),),
        ("accumulation-uneven",),
        "0 divides by everything: the first step has one batch, and the last batch waits for the next epoch.",
    ),
    Mistake(
        "leftover-batch-takes-a-step",
        METRICS,
        (
            (LOADER, "    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)\n"),
            ("torch.zeros(len(loader) // accumulate,", "torch.zeros(-(-len(loader) // accumulate),"),
            ("    batches = islice(loader, len(losses) * accumulate)  # what is left over makes no whole step\n", ""),
            ("tqdm(batches,", "tqdm(loader,"),
            (IS_LAST, IS_LAST + " or batch + 1 == len(loader)"),
        ),
        ("accumulation-uneven",),
        "What is left over takes a step of its own: one small batch, divided as if there were several.",
    ),
    Mistake(
        "zeroed-with-every-batch",
        METRICS,
        (
            ("            optimizer.step()\n            optimizer.zero_grad()\n", "            optimizer.step()\n"),
            (NO_SYNC, "        optimizer.zero_grad()\n" + NO_SYNC),
        ),
        ("accumulation-scale", "accumulation-uneven"),
        "Nothing adds up: a step goes along the last of its batches alone, divided by their number.",
    ),
    Mistake(
        "sync-with-every-batch",
        METRICS,
        (
            (
                NO_SYNC + ACCUMULATED_LOSS + ACCUMULATED_BACKWARD,
                ACCUMULATED_LOSS.removeprefix("    ") + ACCUMULATED_BACKWARD.removeprefix("    "),
            ),
        ),
        ("accumulation-traffic",),
        "No no_sync(): the result is right, and the gradients travel with every batch.",
    ),
    Mistake(
        "no-sync-on-the-last-batch-too",
        METRICS,
        ((NO_SYNC, "        with model.no_sync():\n"),),
        ("gradients-differ",),
        "The gradients never travel: the replicas drift apart (P13).",
    ),
    # ---- Exercise 3: figures and orders
    Mistake(
        "f1-averaged-over-ranks",
        METRICS,
        (
            (REDUCE_CONFUSION, ""),
            (
                F1 + SCORES,
                F1.replace("  # of each class", "") + "    f1 = f1.mean()\n"
                "    dist.all_reduce(f1, dist.ReduceOp.AVG)\n" + REDUCE_CONFUSION + SCORES.replace("f1.mean()", "f1"),
            ),
        ),
        ("metric-wrong",),
        "The mean of the ranks' F1 scores is not the F1 score of all samples; the accuracy is right.",
    ),
    Mistake(
        "f1-averaged-over-batches",
        METRICS,
        (
            (
                CONFUSION,
                CONFUSION.replace("confusion +=", "batch =")
                + (
                    "        f1 = 2 * batch.diagonal() / (batch.sum(dim=0) + batch.sum(dim=1)).clamp(min=1)\n"
                    "        f1_and_batches += torch.stack([f1.mean(), torch.ones((), device=device)])\n"
                    "        confusion += batch\n"
                ),
            ),
            ("    model.eval()\n", "    model.eval()\n    f1_and_batches = torch.zeros(2, device=device)\n"),
            (REDUCE_CONFUSION, REDUCE_CONFUSION + "    dist.all_reduce(f1_and_batches)\n"),
            (F1, ""),
            (SCORES, SCORES.replace("f1.mean()", "(f1_and_batches[0] / f1_and_batches[1])")),
        ),
        ("metric-wrong",),
        "F1 is computed for each batch and averaged over all batches: classes that a batch lacks count as 0.",
    ),
    Mistake(
        "confusion-of-one-rank",
        METRICS,
        ((REDUCE_CONFUSION, ""),),
        ("metric-wrong", "evaluation-missed"),
        "Rank 0 reports the figures of its own share of the test set.",
    ),
    Mistake(
        "evaluation-padded",
        METRICS,
        (
            (
                TEST_LOADER,
                "    test_sampler = DistributedSampler(test_set, shuffle=False)\n"
                "    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler)\n",
            ),
        ),
        ("evaluation-repeated", "metric-wrong"),
        "DistributedSampler fills up the shares until they are equal: with an odd test set one sample counts twice.",
    ),
    Mistake(
        "set-epoch-constant",
        METRICS,
        ((SET_EPOCH, "        sampler.set_epoch(SEED)\n"),),
        ("same-order",),
        "set_epoch() is called, but always with the same number: each epoch has the same order (P08).",
    ),
    # ---- One device
    Mistake(
        "optimizer-of-another-model",
        SINGLE,
        ((OPTIMIZER, OPTIMIZER.replace("model.parameters()", "SmallCNN().parameters()")),),
        ("wrong-parameters", "no-learning"),
        "The optimizer has the parameters of a model that nobody uses: the loss does not move (P01).",
    ),
    Mistake(
        "loss-kept-with-its-graph",
        SINGLE,
        (("losses[step] = loss.item()", "losses[step] = loss"),),
        ("graph-kept",),
        "The tensor of losses becomes a part of the graph, and holds the graph of every step (P02).",
    ),
    Mistake(
        "zero-grad-missing",
        SINGLE,
        (("        optimizer.zero_grad()\n", ""),),
        ("gradients-pile-up",),
        "Each step goes along the gradients of all steps before it too (P03).",
    ),
    Mistake(
        "zero-grad-after-backward",
        SINGLE,
        (("        optimizer.zero_grad()\n", ""), (BACKWARD, BACKWARD + "        optimizer.zero_grad()\n")),
        ("no-learning",),
        "The gradients are thrown away just before the step: no weight ever moves.",
    ),
    Mistake(
        "evaluates-the-training-set",
        SINGLE,
        (("test_loader = DataLoader(test_set,", "test_loader = DataLoader(train_set,"),),
        ("leak",),
        "The accuracy is that of the samples that the model was trained on.",
    ),
    Mistake(
        "weights-not-loaded",
        SINGLE,
        (('    model.load_state_dict(snapshot["model"])\n', ""),),
        ("resume-differs",),
        "The second start takes the optimizer and the epoch from the snapshot, and fresh weights.",
    ),
)
