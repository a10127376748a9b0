"""Mistaken versions of stage 03's solutions, and correct ones in other styles, as in bank.py and correct.py.

P55 to P60 are Lightning's in the catalogue of public threads.
"""

from mistakes.bank import Mistake

MNIST = "solutions/03_pytorch_lightning/exercise1_lightning_mnist.py"
CIFAR10 = "solutions/03_pytorch_lightning/exercise2_lightning_cifar10.py"

# Lines of the solution that several versions edit.
LOSS = "        return F.cross_entropy(self(images), labels)\n"
OPTIMIZER = "        return torch.optim.AdamW(self.parameters(), lr=1e-3)\n"
METRIC = '        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")\n'
UPDATE = "        self.accuracy(self(images), labels)\n"
LOG = '        self.log("accuracy", self.accuracy)\n'
SAMPLER = "        sampler = DistributedSampler(self.train_set, world_size, rank, seed=SEED, drop_last=True)\n"
LOADER = "        return DataLoader(self.train_set, self.batch_size, sampler=sampler, drop_last=True)\n"
SHUFFLED = "        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)\n"
TEST_LOADER = "        return DataLoader(Subset(self.test_set, share), self.batch_size)\n"
OWN_SAMPLERS = "        use_distributed_sampler=False,  # Data deals out the samples itself\n"
CHECKPOINT = 'ModelCheckpoint(folder or ".", name, save_on_train_epoch_end=True)'
RESUME = "    snapshot = args.snapshot if os.path.exists(args.snapshot) else None\n"
STRATEGY = '        strategy="ddp",\n'
DEVICES = "        devices=args.devices,\n"
FIT = "    trainer.fit(Classifier(), data, ckpt_path=snapshot)\n"
FORWARD = "    def forward(self, images):\n"
STEM = "nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())"
STEPS = "        steps = self.trainer.estimated_stepping_batches\n"
INTERVAL = '"lr_scheduler": {"scheduler": schedule, "interval": "step"}'
ACCUMULATE = "        accumulate_grad_batches=args.accumulate,\n"
BEST = 'ModelCheckpoint(folder or ".", f"{name}-best", monitor="accuracy", mode="max")'
STOPPING = 'EarlyStopping("accuracy", mode="max", patience=5)'
LOGGER = 'CSVLogger(folder or ".", name=f"{name}-metrics")'
NODES = "        num_nodes=args.nodes,\n"
PLUGINS = "        plugins=[choose_environment()],\n"
SRUN = 'if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:'


def _mnist(name: str, kinds: str, note: str, *edits: tuple[str, str]) -> Mistake:
    return Mistake(f"lightning-{name}", MNIST, edits, tuple(kinds.split()), note)


LIGHTNING = (
    _mnist(
        "one-device",
        "wrong-group",
        "the Trainer takes one device, whoever starts how many",
        (DEVICES, "        devices=1,\n"),
    ),
    _mnist(
        "step-returns-nothing",
        "no-training no-learning crash",
        "Lightning takes a step without a loss for one that is to be skipped",
        (LOSS, "        F.cross_entropy(self(images), labels)\n"),
    ),
    _mnist(
        "own-backward",
        "crash",
        "the Trainer calls backward too: the graph is gone by then",
        (LOSS, "        loss = F.cross_entropy(self(images), labels)\n        loss.backward()\n        return loss\n"),
    ),
    _mnist(
        "loss-detached",
        "crash",
        "the Trainer finds nothing to differentiate",
        (LOSS, "        return F.cross_entropy(self(images), labels).detach()\n"),
    ),
    _mnist(
        "lightning-deals-the-shares-again",
        "evaluation-missed evaluation-repeated",
        "Lightning's sampler deals out what Data has dealt out already: half of the test set counts",
        (OWN_SAMPLERS, ""),
    ),
    _mnist(
        "shares-dealt-twice",
        "samples-missed",
        "a share by hand, and Lightning's sampler on top of it: each process sees a quarter",
        (OWN_SAMPLERS, ""),
        (SAMPLER, "        share = Subset(self.train_set, range(rank, len(self.train_set), world_size))\n"),
        (LOADER, "        return DataLoader(share, self.batch_size, shuffle=True, drop_last=True)\n"),
    ),
    _mnist(
        "nobody-deals",
        "same-samples",
        "Lightning was told not to, and Data does not: all processes draw the same order from the same seed",
        (SAMPLER, ""),
        (LOADER, SHUFFLED),
    ),
    _mnist(
        "sampler-seeded-by-rank",
        "shares-overlap",
        "each process cuts its share out of another order",
        (SAMPLER, SAMPLER.replace("seed=SEED", "seed=SEED + rank")),
    ),
    _mnist(
        "no-shuffle",
        "same-order",
        "each epoch brings the same batches",
        (SAMPLER, SAMPLER.replace("seed=SEED", "shuffle=False")),
    ),
    _mnist(
        "mean-of-means-of-one-rank",
        "metric-wrong",
        "logged without sync_dist: rank 0's own, and the short last batch counts as much as the others (P55)",
        (UPDATE, ""),
        (LOG, '        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())\n'),
    ),
    _mnist(
        "mean-of-means-of-all-ranks",
        "metric-wrong",
        "sync_dist averages the ranks, as if each had as many samples",
        (UPDATE, ""),
        (
            LOG,
            "        hits = (self(images).argmax(1) == labels).float().mean()\n"
            '        self.log("accuracy", hits, batch_size=1, sync_dist=True)\n',
        ),
    ),
    _mnist(
        "value-logged-instead-of-metric",
        "metric-wrong",
        "the value of each batch is averaged over the batches, and over nobody",
        (UPDATE, ""),
        (LOG, '        self.log("accuracy", self.accuracy(self(images), labels))\n'),
    ),
    _mnist(
        "macro-for-micro",
        "metric-wrong",
        "torchmetrics' default is the mean over the classes, not over the samples",
        (METRIC, "        self.accuracy = MulticlassAccuracy(num_classes=10)\n"),
    ),
    _mnist(
        "nothing-logged",
        "metric-wrong",
        "the metric is kept, and nobody is told",
        (LOG, ""),
    ),
    _mnist(
        "all-evaluate-all",
        "evaluation-repeated",
        "right, and paid for as often as there are processes",
        (TEST_LOADER, "        return DataLoader(self.test_set, self.batch_size)\n"),
    ),
    _mnist(
        "never-loads",
        "never-resumes",
        "the checkpoint is there, and nobody reads it",
        (RESUME, "    snapshot = None\n"),
    ),
    _mnist(
        "weights-only",
        "resume-fails",
        "without the optimizer's state Lightning does not carry on",
        (CHECKPOINT, CHECKPOINT.replace("name,", "name, save_weights_only=True,")),
    ),
    _mnist(
        "weights-without-the-rest",
        "epoch-repeated optimizer-lost resume-differs",
        "load_from_checkpoint brings the weights alone: epochs and optimizer begin anew",
        (
            FIT,
            "    model = Classifier.load_from_checkpoint(snapshot) if snapshot else Classifier()\n    trainer.fit(model, data)\n",
        ),
    ),
    _mnist(
        "nothing-fits-strict-off",
        "never-resumes",
        "the names begin with model., and strict=False says nothing of it (P58)",
        (
            FIT,
            "    model = Classifier()\n    if snapshot:\n        weights = torch.load(snapshot, weights_only=True)\n"
            '        model.model.load_state_dict(weights["state_dict"], strict=False)\n    trainer.fit(model, data)\n',
        ),
    ),
    _mnist(
        "checkpoint-at-the-end-only",
        "no-snapshot",
        "whoever is interrupted before has nothing",
        (CHECKPOINT, CHECKPOINT.replace("name,", "name, every_n_epochs=args.epochs,")),
    ),
    _mnist(
        "every-rank-saves",
        "two-writers snapshot-torn",
        "on_train_epoch_end runs on each process",
        (
            FORWARD,
            "    def on_train_epoch_end(self):\n"
            '        torch.save(self.model.state_dict(), "weights.pt")\n\n' + FORWARD,
        ),
    ),
    _mnist(
        "every-rank-prints",
        "several-print",
        "hooks run on each process",
        (FORWARD, '    def on_train_epoch_end(self):\n        print("this epoch is done")\n\n' + FORWARD),
    ),
    _mnist(
        "manual-without-zero-grad",
        "gradients-pile-up",
        "with automatic_optimization off the Trainer clears no gradients",
        (
            "        self.model = SmallCNN()\n",
            "        self.model = SmallCNN()\n        self.automatic_optimization = False\n",
        ),
        (
            LOSS,
            "        loss = F.cross_entropy(self(images), labels)\n        self.manual_backward(loss)\n"
            "        self.optimizers().step()\n        return loss\n",
        ),
    ),
    _mnist(
        "optimizer-of-another-model",
        "wrong-parameters no-learning",
        "it moves weights that nobody uses",
        (
            OPTIMIZER,
            "        self.other = [SmallCNN()]\n        return torch.optim.AdamW(self.other[0].parameters(), lr=1e-3)\n",
        ),
    ),
    _mnist(
        "accumulates-unasked",
        "accumulation-uneven",
        "half as many steps as in stage 02",
        (OWN_SAMPLERS, OWN_SAMPLERS + "        accumulate_grad_batches=2,\n"),
    ),
)


def _cifar10(name: str, kinds: str, note: str, *edits: tuple[str, str], real: bool = False) -> Mistake:
    return Mistake(f"lightning-{name}", CIFAR10, edits, tuple(kinds.split()), note, real)


LIGHTNING_CIFAR10 = (
    _cifar10(
        "stem-of-the-paper",
        "stem-shrinks",
        "7 x 7 with stride 2, and a pooling: 8 x 8 pixels are left",
        ("        self.model.stem = " + STEM + "\n", ""),
    ),
    _cifar10(
        "stem-keeps-the-pooling",
        "stem-shrinks",
        "half of the advice: the first convolution only",
        (STEM, STEM.replace("nn.ReLU())", "nn.ReLU(), nn.MaxPool2d(2))")),
    ),
    _cifar10(
        "stem-with-stride",
        "stem-shrinks",
        "3 x 3, and still every other pixel",
        (STEM, STEM.replace("3, padding=1", "3, stride=2, padding=1")),
    ),
    _cifar10(
        "images-of-28",
        "wrong-images",
        "the digits as they come: nothing fails, for the head takes the mean over any size",
        (".resize((32, 32))", ""),
    ),
    _cifar10(
        "schedule-by-the-epoch",
        "schedule-uneven",
        "Lightning takes a step of the schedule an epoch unless told otherwise: the rate hardly leaves its start",
        (INTERVAL, '"lr_scheduler": schedule'),
    ),
    _cifar10(
        "schedule-counts-no-accumulation",
        "schedule-uneven",
        "twice as many steps as there are: the cycle ends in its middle",
        (STEPS, "        steps = self.trainer.max_epochs * self.trainer.num_training_batches\n"),
        (
            OPTIMIZER.replace("return ", "optimizer = "),
            OPTIMIZER.replace("return ", "optimizer = ") + "        self.trainer.fit_loop.setup_data()\n",
        ),
    ),
    _cifar10(
        "schedule-counts-no-processes",
        "schedule-uneven",
        "the steps that one process alone would take",
        (
            STEPS,
            "        data, epochs = self.trainer.datamodule, self.trainer.max_epochs\n"
            "        steps = epochs * (len(data.train_set) // data.batch_size // self.trainer.accumulate_grad_batches)\n",
        ),
    ),
    _cifar10(
        "schedule-steps-twice",
        "schedule-uneven crash",
        "Lightning moves it already; at half of the run there are no steps left in the cycle",
        (
            FORWARD,
            "    def on_train_batch_end(self, outputs, batch, batch_index):\n        self.lr_schedulers().step()\n\n"
            + FORWARD,
        ),
    ),
    _cifar10(
        "accumulates-nothing",
        "accumulation-uneven",
        "the option is there, and nobody hears of it",
        (ACCUMULATE, ""),
    ),
    _cifar10(
        "accumulation-scaled-twice",
        "accumulation-scale",
        "Lightning divides the loss by the number of batches already",
        (LOSS, "        return F.cross_entropy(self(images), labels) / self.trainer.accumulate_grad_batches\n"),
    ),
    _cifar10(
        "best-without-monitor",
        "crash",
        "it keeps the last then, as the other one does, and Lightning cannot tell their states apart",
        (BEST, BEST.replace(', monitor="accuracy", mode="max"', "")),
    ),
    _cifar10(
        "best-is-the-worst",
        "best-lost",
        "the default is to keep the smallest, as for a loss",
        (BEST, BEST.replace(', mode="max"', "")),
    ),
    _cifar10(
        "no-best",
        "best-lost",
        "one checkpoint only",
        (f"            {BEST},\n", ""),
    ),
    _cifar10(
        "stops-when-it-rises",
        "stops-too-early",
        "the default is to stop when a loss no longer falls: an accuracy that rises counts as no progress",
        (STOPPING, 'EarlyStopping("accuracy", patience=5)'),
    ),
    _cifar10(
        "stops-by-a-name-nobody-logs",
        "crash",
        "Lightning says so, after the first epoch",
        (STOPPING, 'EarlyStopping("val_accuracy", mode="max", patience=5)'),
    ),
    _cifar10(
        "never-stops",
        "never-stops",
        "all epochs, whatever comes of them",
        (f"            {STOPPING},\n", ""),
    ),
    _cifar10(
        "no-logger",
        "not-logged crash",
        "LearningRateMonitor refuses to work without a logger",
        (LOGGER, "False"),
    ),
    _cifar10(
        "rate-not-logged",
        "not-logged",
        "a logger, and nobody who tells it the rate",
        ('            LearningRateMonitor("step"),\n', ""),
    ),
    _cifar10(
        "knows-one-node",
        "nodes-ignored",
        "two nodes are started, and the Trainer counts one",
        (NODES, ""),
    ),
    _cifar10(
        "processes-always-by-lightning",
        "wrong-group",
        "each of srun's tasks starts another process, and trains with that one; torchrun's do not: they find LOCAL_RANK",
        (PLUGINS, "        plugins=[LightningEnvironment()],\n"),
        real=True,
    ),
    _cifar10(
        "any-job-is-sruns",
        "job-mistaken",
        "a Jupyter session is a job of one task (P59)",
        (SRUN, 'if "SLURM_JOB_ID" in os.environ:'),
        real=True,
    ),
    _cifar10(
        "lightning-guesses",
        "job-mistaken",
        "left alone it takes a job's variables for srun's",
        (PLUGINS, ""),
        real=True,
    ),
)


def _style(name: str, *edits: tuple[str, str]) -> Mistake:
    return Mistake(f"lightning-style-{name}", MNIST, edits, (), "")


LIGHTNING_CORRECT = (
    _style("strategy-auto", (STRATEGY, '        strategy="auto",\n')),
    _style(
        "strategy-object",
        (STRATEGY, '        strategy=DDPStrategy(process_group_backend="gloo"),\n'),
        ("import torch\n", "import torch\nfrom lightning.pytorch.strategies import DDPStrategy\n"),
    ),
    _style("returns-a-dict", (LOSS, '        return {"loss": F.cross_entropy(self(images), labels)}\n')),
    _style(
        "optimizer-in-a-dict",
        (OPTIMIZER, '        return {"optimizer": torch.optim.AdamW(self.parameters(), lr=1e-3)}\n'),
    ),
    _style(
        "logs-the-loss",
        (
            LOSS,
            "        loss = F.cross_entropy(self(images), labels)\n"
            '        self.log("train_loss", loss, on_step=True, on_epoch=True)\n        return loss\n',
        ),
    ),
    _style(
        "manual-optimization",
        (
            "        self.model = SmallCNN()\n",
            "        self.model = SmallCNN()\n        self.automatic_optimization = False\n",
        ),
        (
            LOSS,
            "        optimizer = self.optimizers()\n        optimizer.zero_grad()\n"
            "        loss = F.cross_entropy(self(images), labels)\n"
            "        self.manual_backward(loss)\n        optimizer.step()\n        return loss\n",
        ),
    ),
    _style(
        "counts-by-hand",
        (METRIC, ""),
        (UPDATE, "        self.hits += (self(images).argmax(1) == labels).sum()\n"),
        (
            LOG,
            "\n    def on_validation_epoch_start(self):\n        self.hits = torch.zeros((), device=self.device)\n\n"
            '    def on_validation_epoch_end(self):\n        hits = self.trainer.strategy.reduce(self.hits, reduce_op="sum")\n'
            '        self.log("accuracy", hits / len(self.trainer.datamodule.test_set))\n',
        ),
    ),
    _style(
        "update-and-compute",
        (UPDATE, "        self.accuracy.update(self(images), labels)\n"),
        (
            LOG,
            "\n    def on_validation_epoch_end(self):\n"
            '        self.log("accuracy", self.accuracy.compute())\n        self.accuracy.reset()\n',
        ),
    ),
    _style(
        "saves-in-a-hook",
        (f", {CHECKPOINT}]", "]"),
        (
            FORWARD,
            "    def on_train_epoch_end(self):\n        self.trainer.save_checkpoint(self.snapshot)\n\n" + FORWARD,
        ),
        (FIT, FIT.replace("    trainer", "    Classifier.snapshot = args.snapshot\n    trainer")),
    ),
    _style(
        "sanity-check-and-progress-bar",
        ("        num_sanity_val_steps=0,\n", ""),
        ("enable_progress_bar=False", "enable_progress_bar=True"),
    ),
    _style(
        "torchmetrics-by-task",
        (METRIC, '        self.accuracy = Accuracy(task="multiclass", num_classes=10)\n'),
        ("import MulticlassAccuracy", "import Accuracy"),
    ),
    _style("default-logger", ("        logger=False,\n", "")),
)


def _cifar10_style(name: str, *edits: tuple[str, str]) -> Mistake:
    return Mistake(f"lightning-style-{name}", CIFAR10, edits, (), "")


LIGHTNING_CIFAR10_CORRECT = (
    _cifar10_style(
        "stem-by-its-parts",
        (
            "        self.model.stem = " + STEM + "\n",
            "        self.model.stem[0] = nn.Conv2d(3, width, 3, padding=1, bias=False)\n"
            "        self.model.stem[3] = nn.Identity()\n",
        ),
    ),
    _cifar10_style(
        "another-resnet",
        (
            "        self.model = models.ResNet18(width)\n",
            "        self.model = torchvision.models.ResNet(\n"
            "            torchvision.models.resnet.BasicBlock, [2, 2, 2, 2], num_classes=10\n        )\n",
        ),
        (
            "        self.model.stem = " + STEM + "\n",
            "        self.model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)\n"
            "        self.model.maxpool = nn.Identity()\n",
        ),
        ("import torch\n", "import torch\nimport torchvision\n"),
    ),
    _cifar10_style(
        "steps-counted-by-hand",
        (
            STEPS,
            "        data, world_size = self.trainer.datamodule, self.trainer.world_size\n"
            "        batches = len(data.train_set) // world_size // data.batch_size\n"
            "        steps = self.trainer.max_epochs * -(-batches // self.trainer.accumulate_grad_batches)\n",
        ),
    ),
    _cifar10_style(
        "cosine-after-warm-up",
        (
            "OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)",
            "LambdaLR(\n            optimizer, lambda step: min((step + 1) / 3, (steps - step) / steps * 0.9)"
            " if step < steps - 1 else 0.01\n        )",
        ),
    ),
    _cifar10_style(
        "best-and-last-by-one-callback",
        (
            f"            {BEST},\n            {CHECKPOINT},\n",
            '            ModelCheckpoint(folder or ".", f"{name}-best", monitor="accuracy", mode="max", save_last=True),\n',
        ),
        (
            "    folder, name =",
            "    ModelCheckpoint.CHECKPOINT_NAME_LAST = args.snapshot.removesuffix('.ckpt')\n    folder, name =",
        ),
    ),
    _cifar10_style(
        "patience-of-ten",
        (STOPPING, 'EarlyStopping(monitor="accuracy", patience=10, mode="max", min_delta=0.001)'),
    ),
    _cifar10_style(
        "launcher-by-rank",
        ('if "TORCHELASTIC_RUN_ID" in os.environ:', "if TorchElasticEnvironment.detect():"),
    ),
    _cifar10_style(
        "rate-logged-by-hand",
        ('            LearningRateMonitor("step"),\n', ""),
        (
            LOSS,
            '        self.log("learning_rate", self.optimizers().param_groups[0]["lr"])\n' + LOSS,
        ),
    ),
)
