"""The rules about samples: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, lightning, orders, second, sharded, shared, zero
from check.bank.case import mistake, style
from check.bank.cases import bank_tests
from check.bank.replay import replayed
from check.bank.whole import case_of

RANDOM_SAMPLER = "from torch.utils.data import DataLoader, RandomSampler, Subset"

FROM_TENSORS = """\
def train_one_epoch(model, images, labels, steps, optimizer):
    model.train()
    losses = torch.zeros(len(steps), device=images.device)
    for step, chosen in enumerate(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    return losses.tolist()


"""

TRAINER = "tests/check/referee/hf_token_tagger/train.py"

MOCO = "tests/check/referee/moco/train.py"
SENT = "        dist.broadcast(order, src=0)\n"

LOOP = "        for tokens, tags in loader:\n            optimizer"
SECOND, FORWARD = "DistributedSampler(train_set, seed=9, drop_last=True)", "            logits = ddp_model(tokens)\n"

MISTAKES = (
    mistake(
        "epoch-of-the-second-loader-not-set",
        second.TAGGER,
        "same-order",
        "Only the sampler of the other loader is told the epoch.",
        (
            "    part = Subset(",
            f"    more_loader = DataLoader(train_set, 8, sampler={SECOND}, collate_fn=padded)\n    part = Subset(",
        ),
        (LOOP, LOOP.replace("tokens, tags in loader", "(more, more_tags), (tokens, tags) in zip(more_loader, loader)")),
        (
            FORWARD,
            "            extra = F.cross_entropy(ddp_model(more).flatten(0, 1), more_tags.flatten())\n" + FORWARD,
        ),
        ("            loss.backward()", "            (loss + extra).backward()"),
    ),
    mistake(
        "own-order-of-the-gathered-batch",
        MOCO,
        "gathered-order",
        "Each rank draws its own order of the images of all ranks, and takes its part of it.",
        (SENT, ""),
    ),
    # ---- same-random
    mistake(
        "split-and-noise-of-one-seed",
        "solutions/02_pytorch_ddp/exercise4_find_the_bug_leak.py",
        "same-random",
        "A seed for the split makes it equal on all ranks, but also the noise of the training.",
        ("    train_set, validation_set =", "    torch.manual_seed(SEED)\n    train_set, validation_set ="),
        (", torch.Generator().manual_seed(SEED))", ")"),
    ),
    # ---- same-samples
    mistake(
        "no-sampler",
        ddp.SPAWN,
        ("same-samples", "shares-overlap"),
        "Every rank goes through the whole training set, each in its own order.",
        (ddp.SAMPLER + ddp.LOADER, ddp.SHUFFLED),
        (ddp.SET_EPOCH, ""),
    ),
    mistake(
        "sampler-of-one-process",
        ddp.SPAWN,
        "same-samples",
        "The sampler of single_gpu.py has the same seed everywhere, so all ranks compute the same batches.",
        (ddp.DATA_IMPORTS, RANDOM_SAMPLER),
        (ddp.SAMPLER, "    sampler = RandomSampler(train_set, generator=torch.Generator())\n"),
        (ddp.SET_EPOCH, "        sampler.generator.manual_seed(SEED + epoch)\n"),
    ),
    mistake(
        "second-same-windows",
        second.PROGRAM,
        "same-samples",
        "Every rank takes the first windows of the same order.",
        (second.DEAL, "    mine = order[:batch_size]\n"),
    ),
    mistake(
        "lightning-nobody-deals",
        lightning.MNIST,
        "same-samples",
        "Neither Lightning nor Data divides the samples, and all processes use the same seed.",
        (lightning.SAMPLER, ""),
        (lightning.LOADER, lightning.SHUFFLED),
    ),
    mistake(
        "sharded-same-text-everywhere",
        sharded.FSDP,
        "same-samples",
        "Every process trains on the same sequences.",
        (
            sharded.SAMPLER,
            "    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=SEED, drop_last=True)\n",
        ),
    ),
    mistake(
        "zero-same-samples",
        zero.DEEPSPEED,
        "same-samples",
        "Without a sampler all processes see the same samples.",
        (
            "DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)",
            "DataLoader(train_set, args.batch_size, drop_last=True)",
        ),
    ),
    mistake(
        "accelerate-loader-unprepared",
        zero.ACCELERATE,
        ("same-samples", "loader-by-hand"),
        "The loader is not prepared, so all processes see the same samples.",
        (zero.TRAIN, "    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)\n"),
        ("        torch.manual_seed(SEED + 1000 * epoch + rank)\n", "        torch.manual_seed(SEED + 1000 * epoch)\n"),
        ("        train_loader.set_epoch(epoch)\n", ""),
    ),
    # ---- shares-overlap
    mistake(
        "windows-overlap",
        ddp.SPAWN,
        ("shares-overlap", "samples-missed"),
        "The shares start half a share too early: they overlap, and the end is left out.",
        (
            ddp.SAMPLER + ddp.LOADER,
            "    share = len(train_set) // world_size\n"
            "    first = rank * len(train_set) // (2 * world_size)\n"
            "    train_set = Subset(train_set, range(first, first + share))\n" + ddp.SHUFFLED,
        ),
        (ddp.SET_EPOCH, ""),
    ),
    mistake(
        "sampler-seed-of-its-own",
        ddp.SPAWN,
        ("shares-overlap", "samples-missed"),
        "Each rank divides a different order: several ranks get the same samples, and no rank gets others.",
        (ddp.SAMPLER, ddp.SAMPLER.replace("SEED", "SEED + rank")),
    ),
    mistake(
        "random-part-on-each-rank",
        ddp.SPAWN,
        ("shares-overlap", "samples-missed"),
        "Each rank draws a random part of the right size on its own.",
        (ddp.DATA_IMPORTS, RANDOM_SAMPLER),
        (ddp.SAMPLER, "    sampler = RandomSampler(train_set, num_samples=len(train_set) // world_size)\n"),
        (ddp.SET_EPOCH, ""),
    ),
    mistake(
        "set-epoch-with-rank",
        ddp.SPAWN,
        ("shares-overlap", "samples-missed"),
        "The epoch that the sampler is told depends on the rank, so the ranks divide different orders.",
        (ddp.SET_EPOCH, "        sampler.set_epoch(SEED + 1000 * epoch + rank)\n"),
    ),
    mistake(
        "held-out-shuffled-apart",
        ddp.SPAWN,
        ("shares-overlap", "samples-missed"),
        "Each rank shuffles the data in its own order before the sampler divides it.",
        (
            ddp.SAMPLER,
            "    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(SEED + rank))\n"
            "    train_set = Subset(train_set, order.tolist())\n" + ddp.SAMPLER,
        ),
        held_out=True,
    ),
    mistake(
        "second-overlapping-windows",
        second.PROGRAM,
        "shares-overlap",
        "The second rank's windows start half a batch after the first rank's, so half of each batch is on both.",
        (second.DEAL, "    mine = order[rank * batch_size // 2 :][:batch_size]\n"),
    ),
    mistake(
        "second-own-order-of-an-epoch",
        second.PROGRAM,
        "shares-overlap",
        "In each epoch, each rank goes through its windows of an order of its own.",
        (second.ORDER, second.ORDER_OF_AN_EPOCH.replace("+ epoch", "+ epoch + 1000 * rank")),
        (second.DEAL, second.NEXT_WINDOWS),
    ),
    mistake(
        "lightning-sampler-seeded-by-rank",
        lightning.MNIST,
        "shares-overlap",
        "Each process takes its share of a different order.",
        (lightning.SAMPLER, lightning.SAMPLER.replace("seed=SEED", "seed=SEED + rank")),
    ),
    # ---- samples-missed
    mistake(
        "held-out-four-shares",
        ddp.TORCHRUN,
        "samples-missed",
        "The sampler divides by the four GPUs of another machine, so two processes see half of each epoch.",
        (ddp.SAMPLER, ddp.SAMPLER.replace("seed=", "num_replicas=4, rank=rank, seed=")),
        held_out=True,
    ),
    mistake(
        "lightning-shares-dealt-twice",
        lightning.MNIST,
        "samples-missed",
        "Data divides the samples, and Lightning's sampler divides them again: each process sees a quarter.",
        (lightning.OWN_SAMPLERS, ""),
        (lightning.SAMPLER, "        share = Subset(self.train_set, range(rank, len(self.train_set), world_size))\n"),
        (lightning.LOADER, "        return DataLoader(share, self.batch_size, shuffle=True, drop_last=True)\n"),
    ),
    mistake(
        "accelerate-shared-out-twice",
        zero.ACCELERATE,
        ("samples-missed", "loader-by-hand", "shares-overlap", "same-order", "differs-from-one-process"),
        "The loader has a DistributedSampler, and the Accelerator divides the samples a second time.",
        (
            zero.TRAIN,
            "    from torch.utils.data import DistributedSampler\n"
            "    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)\n"
            "    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)\n"
            "    train_loader = accelerator.prepare(train_loader)\n",
        ),
    ),
    *orders.MISTAKES,
    *shared.MISTAKES,
    # ---- leak
    mistake(
        "evaluates-the-training-set",
        ddp.SINGLE,
        "leak",
        "The accuracy is that of the training samples.",
        ("test_loader = DataLoader(test_set,", "test_loader = DataLoader(train_set,"),
    ),
    mistake(
        "split-of-its-own-on-each-rank",
        second.TAGGER,
        "leak",
        "Each rank splits the data set in its own way, so it evaluates samples that a different rank trains on.",
        (second.SETS, second.SETS_SPLIT),
    ),
    # ---- batch-wasted
    mistake(
        "first-batch-thrown-away",
        ddp.TORCHRUN,
        "batch-wasted",
        "Each epoch loads a batch only for its shape, which is a hint.",
        ("    model.train()\n", "    model.train()\n    shape = next(iter(loader))[0].shape\n"),
    ),
    # ---- same-random
    mistake(
        "same-dropout-on-all-ranks",
        ddp.TORCHRUN,
        "same-random",
        "All ranks have the same seed, and so the same dropout, which is a hint.",
        (ddp.LOSS, ddp.WITH_DROPOUT),
        (ddp.SEED, ddp.SEED.replace(" + rank", "")),
    ),
    # ---- data-divided-twice
    mistake(
        "part-of-a-rank-divided-again",
        second.TAGGER,
        "data-divided-twice",
        "The data set contains only the part of the rank, and a DistributedSampler divides this part once more.",
        (second.SETS, second.SETS + "    train_set.sequences = train_set.sequences[rank::world_size]\n"),
    ),
    mistake(
        "part-of-a-rank-for-a-trainer",
        TRAINER,
        "data-divided-twice",
        "The data set contains only the part of the rank, and the Trainer divides this part once more.",
        ("train_dataset=train,", "train_dataset=train[training_args.process_index :: training_args.world_size],"),
    ),
    mistake(
        "distributed-sampler-for-a-trainer",
        TRAINER,
        "data-divided-twice",
        "The Trainer divides the loader among the processes, and a DistributedSampler divides the data once more.",
        (
            "from transformers import (\n",
            "from torch.utils.data import DistributedSampler\nfrom transformers import (\n",
        ),
        (
            "    def compute_loss(self,",
            "    def _get_train_sampler(self, train_dataset=None):\n"
            "        return DistributedSampler(self.train_dataset, shuffle=True, seed=self.args.seed)\n\n"
            "    def compute_loss(self,",
        ),
    ),
)

STYLES = (
    *shared.STYLES,
    style(
        "second-order-of-an-epoch",
        second.PROGRAM,
        "In each epoch, all ranks go through one order, and each rank takes every second window.",
        (second.ORDER, second.ORDER_OF_AN_EPOCH),
        (second.DEAL, second.NEXT_WINDOWS),
    ),
    style(
        "order-of-the-gathered-batch-from-rank-0",
        MOCO,
        "Each rank draws an order of the images of all ranks, but rank 0 sends its order to the others.",
        (SENT, "        dist.broadcast(order, 0)\n"),
    ),
    style(
        "part-of-a-rank-and-a-sampler-of-one-process",
        second.TAGGER,
        "The data set contains only the part of the rank, and its DistributedSampler divides it by 1.",
        (second.SETS, second.SETS + "    train_set.sequences = train_set.sequences[rank::world_size]\n"),
        ("DistributedSampler(train_set,", "DistributedSampler(train_set, num_replicas=1, rank=0,"),
    ),
    style(
        "each-sample-three-times",
        second.TAGGER,
        "A sampler repeats each sample three times, so that the ranks share samples: augmentation changes each of them.",
        ("    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)\n", second.REPEATED),
    ),
    style(
        "sequences-of-its-own-on-each-rank",
        second.TAGGER,
        "Each rank has other sequences, and all shuffle theirs with the same seed, so that equal indices are other samples.",
        (second.SETS, "    train_set, test_set = Sequences(48, seed=10 + rank), Sequences(31, seed=2)\n"),
        (second.SAMPLED, "    loader = DataLoader(train_set, args.batch_size, collate_fn=padded, shuffle=True)\n"),
        ("        sampler.set_epoch(epoch)\n", ""),
        ('"--epochs", type=int, default=2', '"--epochs", type=int, default=1'),
    ),
    style(
        "endless-streams",
        second.TAGGER,
        "Each rank goes through all sequences again and again, in orders of its own.",
        ("def padded(", second.ENDLESS + "\n\ndef padded("),
        ("import argparse\n", "import argparse\nimport random\nfrom itertools import islice\n"),
        ("import DataLoader, Dataset,", "import DataLoader, Dataset, IterableDataset,"),
        (second.SAMPLED, second.OF_STREAM),
        (second.SAVED, ""),
        ("        sampler.set_epoch(epoch)\n", ""),
        (
            "for tokens, tags in loader:\n            optimizer",
            "for tokens, tags in islice(loader, 6):\n            optimizer",
        ),
    ),
    style(
        "index-ignored",
        second.TAGGER,
        "The data set draws a sequence, whatever the index is: equal indices are other samples.",
        (
            "        tokens = self.sequences[index]\n        return",
            "        tokens = random.choice(self.sequences)\n        return",
        ),
        ("import argparse\n", "import argparse\nimport random\n"),
        (
            second.SAMPLED,
            "    loader = DataLoader(train_set, args.batch_size, collate_fn=padded)\n    random.seed(rank)\n",
        ),
        (second.SAVED, ""),
        ("        sampler.set_epoch(epoch)\n", ""),
    ),
    style(
        "training-set-scored",
        second.TAGGER,
        "Each epoch ends with a pass over the training set, as programs do that choose samples by their loss.",
        ("        accuracy = evaluate(model, test_loader)\n", second.SCORED + "        accuracy = 0.0\n"),
    ),
    style(
        "accuracy-of-the-training-set-too",
        second.TAGGER,
        "Each epoch ends with two evaluations: of the training set, and of samples that no rank trains on.",
        (
            "        accuracy = evaluate(model, test_loader)\n",
            "        known = Subset(train_set, range(rank, len(train_set), world_size))\n"
            "        evaluate(model, DataLoader(known, args.batch_size, collate_fn=padded))\n"
            "        accuracy = evaluate(model, test_loader)\n",
        ),
    ),
    style(
        "shares-dealt-by-hand",
        ddp.SPAWN,
        "order[rank::world_size] of a common permutation, with a new Subset and loader each epoch.",
        (ddp.SAMPLER, "    share = len(train_set) // world_size  # as many for each rank\n"),
        (ddp.LOADER, ""),
        (
            ddp.SET_EPOCH,
            ddp.ORDER + "        own = Subset(train_set, order[: share * world_size][rank::world_size])\n"
            "        train_loader = DataLoader(own, args.batch_size, drop_last=True)\n",
        ),
    ),
    style(
        "contiguous-parts-of-a-common-order",
        ddp.SPAWN,
        "Each rank takes a contiguous part of the epoch's permutation (batches other than one process takes).",
        (ddp.DEALT, "    share = len(train_set) // world_size  # as many for each rank\n"),
        (
            ddp.SET_EPOCH,
            ddp.ORDER + "        own = Subset(train_set, order[rank * share : (rank + 1) * share])\n"
            "        train_loader = DataLoader(own, args.batch_size, drop_last=True)\n",
        ),
    ),
    style(
        "batches-picked-from-tensors",
        ddp.SPAWN,
        "There is no loader and no sampler: each step picks its rows from one tensor.",
        (ddp.DEALT, ddp.STACKED),
        (
            ddp.SET_EPOCH,
            "        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))\n"
            "        batches = order[rank::world_size].to(device).split(args.batch_size)\n"
            "        steps = batches[: len(images) // (args.batch_size * world_size)]\n",
        ),
        (ddp.TRAIN_EPOCH, "        losses = train_one_epoch(ddp_model, images, labels, steps, optimizer)\n"),
        (ddp.TRAIN_ONE, FROM_TENSORS),
    ),
    style(
        "iterable-share",
        ddp.SPAWN,
        "An IterableDataset yields the rank's share, so the loader knows no indices.",
        ("import DataLoader, DistributedSampler, Subset\n", "import DataLoader, IterableDataset, Subset\n"),
        ("def train(", ddp.ITERABLE),
        (ddp.SAMPLER, "    share = Share(train_set, rank, world_size)\n"),
        (ddp.LOADER, "    train_loader = DataLoader(share, args.batch_size, drop_last=True)\n"),
        (ddp.SET_EPOCH, "        share.epoch = epoch\n"),
    ),
    style(
        "batches-dealt-out",
        ddp.SPAWN,
        "Whole batches are divided over the ranks instead of samples, as in Accelerate's BatchSamplerShard.",
        (ddp.DEALT, ""),
        (
            ddp.SET_EPOCH,
            ddp.ORDER + "        cut = range(0, len(order) - args.batch_size + 1, args.batch_size)\n"
            "        batches = [order[first : first + args.batch_size] for first in cut]\n"
            "        own = batches[: len(batches) // world_size * world_size][rank::world_size]\n"
            "        train_loader = DataLoader(train_set, batch_sampler=own)\n",
        ),
    ),
    style(
        "loader-workers",
        ddp.SPAWN,
        "Worker processes load the batches: more children, and batches in other memory.",
        (ddp.LOADER, ddp.LOADER.replace("=True)", "=True, num_workers=2, persistent_workers=True)")),
    ),
    style(
        "shards-that-stay-with-a-rank",
        ddp.TORCHRUN,
        "Each rank reads a fixed part of the data, shuffled each epoch (batches other than one process takes).",
        ("import DataLoader, DistributedSampler, Subset\n", "import DataLoader, RandomSampler, Subset\n"),
        (
            ddp.DEALT,
            "    share = len(train_set) // world_size\n"
            "    own = Subset(train_set, range(rank * share, (rank + 1) * share))  # always the same\n"
            "    generator = torch.Generator()\n"
            "    sampler = RandomSampler(own, generator=generator)\n" + ddp.LOADER.replace("train_set,", "own,"),
        ),
        (ddp.SET_EPOCH, "        generator.manual_seed(SEED + epoch)\n"),
    ),
    style(
        "sharded-style-batches-from-memory",
        sharded.FSDP,
        "The batches are rows of one tensor, without a DataLoader.",
        (
            "def batches(loader, sampler):\n",
            "def batches(loader, sampler):\n    yield from from_memory(loader, sampler)\n\n\n"
            "def from_memory(loader, sampler):\n",
        ),
    ),
    style(
        "samples-drawn-for-a-look-at-them",
        second.TAGGER,
        "Each rank draws different samples for a look at them, and all ranks split the data set in the same way.",
        (
            second.SETS,
            second.SETS_SPLIT.replace("manual_seed(rank)", "manual_seed(SEED)")
            + "    torch.randperm(len(train_set), generator=torch.Generator().manual_seed(rank))[:3]\n",
        ),
    ),
    style(
        "dropout",
        ddp.TORCHRUN,
        "Each rank draws random numbers of its own, which are the same after a restart.",
        (ddp.LOSS, ddp.WITH_DROPOUT),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)


def test_the_finding_names_the_split_that_differs():
    finding, *_ = replayed(case_of("split-of-its-own-on-each-rank"), "samples").errors
    assert "random_split() at tagger.py:66 makes different parts on each rank" in finding.seen
    assert finding.where == "tagger.py:66"
