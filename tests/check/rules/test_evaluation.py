"""The rules about evaluation: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, gpus, lightning, second, zero
from check.bank.case import mistake, part, style
from check.bank.cases import bank_tests

TORCHMETRICS = """\
@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    accuracy = MulticlassAccuracy(num_classes=CLASSES, average="micro").to(device)
    macro_f1 = MulticlassF1Score(num_classes=CLASSES, average="macro").to(device)
    for images, labels in loader:
        predictions = model(images.to(device)).argmax(dim=1)
        accuracy.update(predictions, labels.to(device))
        macro_f1.update(predictions, labels.to(device))
    return accuracy.compute().item(), macro_f1.compute().item()  # compute() adds up the counts of all processes
"""

GATHERED_AND_CUT = """\
@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    own = torch.cat(
        [torch.stack([model(images.to(device)).argmax(dim=1), labels.to(device)]) for images, labels in loader], dim=1
    )
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    # Back in the order of the test set, and without the samples that the sampler repeats to give each rank as many.
    predictions, labels = torch.stack(everyone, dim=2).flatten(1)[:, : len(loader.dataset)].cpu()
    return accuracy_score(labels, predictions), f1_score(
        labels, predictions, labels=range(CLASSES), average="macro", zero_division=0
    )
"""

# A metric of torchmetrics in the program for GPUs.
FEWER_POINTS = (gpus.SETS, gpus.SETS.replace("384", "128"))
METRIC = (
    FEWER_POINTS,
    ("from torch import nn\n", "from torch import nn\nfrom torchmetrics.classification import MulticlassAccuracy\n"),
    ("EPOCHS = 3\n", 'EPOCHS = 3\nMETRIC = MulticlassAccuracy(num_classes=4, average="micro")\n'),
    ("    counts = torch.zeros(2, device=device)\n", "    METRIC.to(device)\n"),
    (
        "            counts[0] += (model(x).argmax(1) == y).sum()\n            counts[1] += len(y)\n",
        "            METRIC.update(model(x).argmax(1), y)\n",
    ),
    ("    dist.all_reduce(counts)\n", ""),
)
ACCURACY = "    correct, total = counts.tolist()\n    return correct / total\n"
OF_TEST = "range(rank, len(data), world_size)), batch_size=32"

MISTAKES = (
    mistake(
        "evaluation-drops-its-last-batch",
        gpus.GPUS,
        "last-batch-dropped",
        "Each rank has 50 test samples, and evaluates the 32 of its only complete batch.",
        FEWER_POINTS,
        (OF_TEST, OF_TEST + ", drop_last=True"),
    ),
    mistake(
        "metric-of-torchmetrics-without-reset",
        gpus.GPUS,
        "metric-not-reset",
        "Each evaluation adds its samples to those of the earlier ones.",
        *METRIC,
        (ACCURACY, "    return METRIC.compute().item()\n"),
    ),
    # ---- evaluation-missed
    mistake(
        "held-out-share-of-a-share",
        ddp.METRICS,
        "evaluation-missed",
        "A sampler divides each rank's share of the test set once more, so half of the test set is never evaluated.",
        (
            "test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size)",
            "share = Subset(test_set, range(rank, len(test_set), world_size))\n"
            "    test_sampler = DistributedSampler(share, shuffle=False)\n"
            "    test_loader = DataLoader(share, args.batch_size, sampler=test_sampler)",
        ),
        held_out=True,
    ),
    mistake(
        "lightning-lightning-deals-the-shares-again",
        lightning.MNIST,
        ("evaluation-missed", "evaluation-repeated"),
        "Lightning's sampler divides what Data has already divided, so only half of the test set is evaluated.",
        (lightning.OWN_SAMPLERS, ""),
    ),
    # ---- evaluation-repeated
    mistake(
        "evaluation-padded",
        ddp.METRICS,
        ("evaluation-repeated", "metric-wrong"),
        "DistributedSampler repeats samples until all shares are equal: with an odd test set one sample counts twice.",
        (
            ddp.TEST_LOADER,
            "    test_sampler = DistributedSampler(test_set, shuffle=False)\n"
            "    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler)\n",
        ),
    ),
    mistake(
        "lightning-all-evaluate-all",
        lightning.MNIST,
        "evaluation-repeated",
        "Each process evaluates the whole test set: right, but N times the work.",
        (lightning.TEST_LOADER, "        return DataLoader(self.test_set, self.batch_size)\n"),
    ),
    # ---- metric-wrong
    mistake(
        "mean-of-accuracies",
        ddp.SPAWN,
        "metric-wrong",
        "The mean of the ranks' accuracies is reported, but their shares of the test set differ in size.",
        (
            "    dist.all_reduce(correct_and_total)\n"
            "    correct, total = correct_and_total.tolist()\n"
            "    return correct / total\n",
            "    accuracy = correct_and_total[0] / correct_and_total[1]\n"
            "    dist.all_reduce(accuracy, dist.ReduceOp.AVG)\n"
            "    return accuracy.item()\n",
        ),
    ),
    mistake(
        "loss-of-one-rank",
        ddp.SPAWN,
        "log-wrong",
        "The log has the loss over rank 0's batches instead of the global batches.",
        (ddp.REDUCE_LOSSES, ""),
    ),
    mistake(
        "throughput-of-one-rank",
        ddp.SPAWN,
        "log-wrong",
        "The samples per second of one process are reported for all of them.",
        (
            "len(losses) * args.batch_size * world_size / seconds",
            "len(losses) * args.batch_size / seconds",
        ),
    ),
    mistake(
        "throughput-of-one-batch-per-step",
        ddp.METRICS,
        "log-wrong",
        "A step has several batches, and the samples of one are counted.",
        ("len(losses) * args.accumulate * args.batch_size", "len(losses) * args.batch_size"),
    ),
    mistake(
        "log-of-one-process",
        ddp.SPAWN,
        "log-wrong",
        "The log says that one process trains.",
        ("processes=world_size)", "processes=1)"),
        real=True,
    ),
    # ---- metric-of-one-rank
    mistake(
        "accuracy-of-one-part-without-a-loader",
        second.TAGGER,
        "metric-of-one-rank",
        "Each rank evaluates a list of sequences, and nothing adds up the counts, but each step adds up its tokens.",
        (
            "    test_loader = DataLoader(part, args.batch_size, collate_fn=padded)\n",
            "    test_loader = [padded([each]) for each in part]\n",
        ),
        (second.COUNTS, ""),
    ),
    mistake(
        "accuracy-of-one-part",
        second.TAGGER,
        "metric-of-one-rank",
        "Each rank evaluates a part, and nothing adds up the counts.",
        ("    dist.all_reduce(counts)\n", ""),
    ),
    mistake(
        "accuracy-of-one-part-with-a-repeated-sample",
        second.TAGGER,
        "metric-of-one-rank",
        "Nothing adds up the counts. A DistributedSampler repeats one of the 31 samples, so that both ranks evaluate it.",
        (
            "    test_loader = DataLoader(part, args.batch_size, collate_fn=padded)\n",
            "    parts = DistributedSampler(test_set, shuffle=False)\n"
            "    test_loader = DataLoader(test_set, args.batch_size, sampler=parts, collate_fn=padded)\n",
        ),
        (second.COUNTS, ""),
    ),
    mistake(
        "f1-averaged-over-ranks",
        ddp.METRICS,
        "metric-wrong",
        "The mean of the ranks' F1 scores is not the F1 score of all samples; the accuracy is right.",
        (ddp.REDUCE_CONFUSION, ""),
        (
            ddp.F1 + ddp.SCORES,
            ddp.F1.replace("  # one F1 score per class", "") + "    f1 = f1.mean()\n"
            "    dist.all_reduce(f1, dist.ReduceOp.AVG)\n"
            + ddp.REDUCE_CONFUSION
            + ddp.SCORES.replace("f1.mean()", "f1"),
        ),
    ),
    mistake(
        "f1-averaged-over-batches",
        ddp.METRICS,
        "metric-wrong",
        "F1 is computed for each batch and averaged over the batches, so classes that a batch lacks count as 0.",
        (
            ddp.CONFUSION,
            ddp.CONFUSION.replace("confusion +=", "batch =")
            + (
                "        f1 = 2 * batch.diagonal() / (batch.sum(dim=0) + batch.sum(dim=1)).clamp(min=1)\n"
                "        f1_and_batches += torch.stack([f1.mean(), torch.ones((), device=device)])\n"
                "        confusion += batch\n"
            ),
        ),
        ("    model.eval()\n", "    model.eval()\n    f1_and_batches = torch.zeros(2, device=device)\n"),
        (ddp.REDUCE_CONFUSION, ddp.REDUCE_CONFUSION + "    dist.all_reduce(f1_and_batches)\n"),
        (ddp.F1, ""),
        (ddp.SCORES, ddp.SCORES.replace("f1.mean()", "(f1_and_batches[0] / f1_and_batches[1])")),
    ),
    mistake(
        "confusion-of-one-rank",
        ddp.METRICS,
        ("metric-wrong", "evaluation-missed"),
        "Rank 0 reports the metrics of its own share of the test set.",
        (ddp.REDUCE_CONFUSION, ""),
    ),
    mistake(
        "held-out-first-of-the-gathered",
        ddp.TORCHRUN,
        ("metric-wrong", "evaluation-missed"),
        "The accuracies of all ranks are gathered, and rank 0's is reported.",
        (
            "    dist.all_reduce(correct_and_total)\n"
            "    correct, total = correct_and_total.tolist()\n"
            "    return correct / total\n",
            "    accuracy = correct_and_total[0] / correct_and_total[1]\n"
            "    accuracies = [torch.zeros_like(accuracy) for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(accuracies, accuracy)\n"
            "    return accuracies[0].item()\n",
        ),
        held_out=True,
    ),
    mistake(
        "held-out-reduced-with-each-batch",
        ddp.METRICS,
        ("metric-wrong", "evaluation-repeated"),
        "The running counts are reduced after each batch, which sums the earlier counts over the ranks again.",
        ("    dist.all_reduce(confusion)\n", "        dist.all_reduce(confusion)\n"),
        held_out=True,
    ),
    mistake(
        "lightning-mean-of-means-of-one-rank",
        lightning.MNIST,
        "metric-wrong",
        "Logged without sync_dist: rank 0's mean, in which the short last batch counts as much as the others.",
        (lightning.UPDATE, ""),
        (lightning.LOG, '        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())\n'),
    ),
    mistake(
        "lightning-mean-of-means-of-all-ranks",
        lightning.MNIST,
        "metric-wrong",
        "sync_dist averages over the ranks as if each had the same number of samples.",
        (lightning.UPDATE, ""),
        (
            lightning.LOG,
            "        hits = (self(images).argmax(1) == labels).float().mean()\n"
            '        self.log("accuracy", hits, batch_size=1, sync_dist=True)\n',
        ),
    ),
    mistake(
        "lightning-value-logged-instead-of-metric",
        lightning.MNIST,
        "metric-wrong",
        "The value of each batch is averaged over the batches of one rank.",
        (lightning.UPDATE, ""),
        (lightning.LOG, '        self.log("accuracy", self.accuracy(self(images), labels))\n'),
    ),
    mistake(
        "lightning-macro-for-micro",
        lightning.MNIST,
        "metric-wrong",
        "The default of torchmetrics is the mean over the classes, not over the samples.",
        (lightning.METRIC, "        self.accuracy = MulticlassAccuracy(num_classes=10)\n"),
    ),
    mistake(
        "lightning-nothing-logged",
        lightning.MNIST,
        "metric-wrong",
        "The metric is updated but never logged.",
        (lightning.LOG, ""),
    ),
    mistake(
        "accelerate-own-accuracy",
        zero.ACCELERATE,
        ("metric-wrong", "gathered-by-hand"),
        "The reported accuracy is that of rank 0's share of the test set.",
        (zero.GATHER, "        right.append(hits)"),
    ),
    mistake(
        "nothing-reported",
        ddp.TORCHRUN,
        "metric-wrong",
        "No epoch is written to the log.",
        ("            log.write(epoch, losses, accuracy, samples_per_second)\n", "            pass\n"),
    ),
)

STYLES = (
    style(
        "metric-of-torchmetrics-with-reset",
        gpus.GPUS,
        "The metric is reset after its value is computed.",
        *METRIC,
        (ACCURACY, "    accuracy = METRIC.compute().item()\n    METRIC.reset()\n    return accuracy\n"),
    ),
    style(
        "the-test-loader-is-read-again-before-the-sum",
        second.TAGGER,
        "A second pass over the test samples counts their tags, then one collective adds up both counts.",
        (
            "        counts += torch.stack([(model(tokens).argmax(-1) == tags)[counted].sum(), counted.sum()])\n",
            "        counts[0] += (model(tokens).argmax(-1) == tags)[counted].sum()\n"
            "    for _, tags in loader:\n"
            "        counts[1] += (tags != IGNORED).sum()\n",
        ),
    ),
    style(
        "counts-of-each-batch-are-added-up-with-gradients-enabled",
        second.TAGGER,
        "Each batch of the evaluation has its own collective, and the evaluation does not switch gradients off.",
        ("@torch.no_grad()\n", ""),
        (
            "        counts += torch.stack([(model(tokens).argmax(-1) == tags)[counted].sum(), counted.sum()])\n"
            "    dist.all_reduce(counts)\n",
            "        own = torch.stack([(model(tokens).argmax(-1) == tags)[counted].sum(), counted.sum()])\n"
            "        dist.all_reduce(own)\n"
            "        counts += own\n",
        ),
    ),
    style(
        "figures-reduced-to-rank-0",
        ddp.TORCHRUN,
        "reduce(dst=0) leaves wrong values on the other ranks, which do not use them.",
        (
            ddp.REDUCE_LOSSES + "    return losses.tolist()\n",
            "    dist.reduce(losses, dst=0)  # only rank 0 reports them\n"
            "    return (losses / dist.get_world_size()).tolist()\n",
        ),
        (ddp.COUNTED, "    dist.reduce(correct_and_total, dst=0)\n"),
    ),
    style(
        "figures-gathered-as-objects",
        ddp.TORCHRUN,
        "all_gather_object() gathers the ranks' lists and counts, which each rank adds up in Python.",
        (
            ddp.REDUCE_LOSSES + "    return losses.tolist()\n",
            "    everyone = [None] * dist.get_world_size()\n"
            "    dist.all_gather_object(everyone, losses.tolist())\n"
            "    return [sum(step) / len(step) for step in zip(*everyone, strict=True)]\n",
        ),
        (
            part(ddp.TORCHRUN, ddp.COUNTED, "    return correct / total"),
            "    everyone = [None] * dist.get_world_size()\n"
            "    dist.all_gather_object(everyone, correct_and_total.tolist())\n"
            "    correct, total = (sum(counts) for counts in zip(*everyone, strict=True))\n",
        ),
    ),
    style(
        "torchmetrics",
        ddp.METRICS,
        "torchmetrics sums the counts of all processes.",
        (
            "from tqdm import tqdm\n",
            "from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score\nfrom tqdm import tqdm\n",
        ),
        (ddp.EVALUATE_FUNCTION, TORCHMETRICS),
    ),
    style(
        "predictions-gathered-and-cut",
        ddp.METRICS,
        "The predictions of all ranks, in order and cut to the length of the test set, are scored by scikit-learn.",
        (
            "from torch.utils.data import DataLoader, DistributedSampler, Subset\n",
            "from sklearn.metrics import accuracy_score, f1_score\n"
            "from torch.utils.data import DataLoader, DistributedSampler\n",
        ),
        (
            ddp.TEST_BLOCK,
            "    test_loader = DataLoader(\n"
            "        test_set, args.batch_size, sampler=DistributedSampler(test_set, shuffle=False)\n"
            "    )\n",
        ),
        (ddp.EVALUATE_FUNCTION, GATHERED_AND_CUT),
    ),
    style(
        "lightning-style-counts-by-hand",
        lightning.MNIST,
        "The module sums its counts over the ranks itself.",
        (lightning.METRIC, ""),
        (lightning.UPDATE, "        self.hits += (self(images).argmax(1) == labels).sum()\n"),
        (
            lightning.LOG,
            "\n    def on_validation_epoch_start(self):\n        self.hits = torch.zeros((), device=self.device)\n\n"
            '    def on_validation_epoch_end(self):\n        hits = self.trainer.strategy.reduce(self.hits, reduce_op="sum")\n'
            '        self.log("accuracy", hits / len(self.trainer.datamodule.test_set))\n',
        ),
    ),
    style(
        "lightning-style-update-and-compute",
        lightning.MNIST,
        "The metric is computed and reset at the end of the epoch.",
        (lightning.UPDATE, "        self.accuracy.update(self(images), labels)\n"),
        (
            lightning.LOG,
            "\n    def on_validation_epoch_end(self):\n"
            '        self.log("accuracy", self.accuracy.compute())\n        self.accuracy.reset()\n',
        ),
    ),
    style(
        "lightning-style-torchmetrics-by-task",
        lightning.MNIST,
        "The metric is chosen by its task.",
        (lightning.METRIC, '        self.accuracy = Accuracy(task="multiclass", num_classes=10)\n'),
        ("import MulticlassAccuracy", "import Accuracy"),
    ),
    style(
        "zero-whole-test-set-each",
        zero.DEEPSPEED,
        "Each process evaluates the whole test set, the same number of times.",
        ("Subset(test_set, as_many)", "test_set"),
        ("len(own), device)", "len(test_set), device)"),
    ),
    style(
        "accelerate-pairs-gathered",
        zero.ACCELERATE,
        "Predictions and labels are gathered first and compared afterwards.",
        (
            "        hits = model(images.to(device)).argmax(dim=1) == labels.to(device)\n",
            "        guesses, labels = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))\n",
        ),
        (zero.GATHER, "        right.append(guesses == labels)"),
    ),
    style(
        "images-as-rows",
        ddp.TORCHRUN,
        "The model takes the images as rows, so the check cannot ask it about the test set.",
        ("model = SmallCNN()", "model = Flat()"),
        (
            "SEED = 42\n",
            "SEED = 42\n\n\nclass Flat(SmallCNN):\n    def forward(self, rows):\n"
            "        return super().forward(rows.view(len(rows), 1, 28, 28)) if rows.dim() == 2 else rows.fail()\n",
        ),
        ("F.cross_entropy(model(images), labels)", "F.cross_entropy(model(images.flatten(1)), labels)"),
        ("model(images.to(device))", "model(images.to(device).flatten(1))"),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
