"""The rules about lightning: mistakes that they must name, and correct styles that must pass."""

from check.bank import lightning
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

DETECTOR = "tests/check/referee/lightning_module/train.py"
SYNCHRONIZED = 'self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)'

SETUP = "    def setup(self, stage):\n"

MISTAKES = (
    mistake(
        "scale-set-in-prepare-data",
        DETECTOR,
        "set-on-one-rank",
        "Only rank 0 calls prepare_data(), so the other ranks divide by 1.",
        ('"--epochs", type=int, default=5', '"--epochs", type=int, default=1'),
        ("make_recordings(1008)", "make_recordings(256)"),
        ("[720, 144, 144]", "[192, 32, 32]"),
        (SETUP, "        self.scale = 1.0\n\n    def prepare_data(self):\n        self.scale = 2.0\n\n" + SETUP),
        ("        recordings = TensorDataset(", "        assert self.scale\n        recordings = TensorDataset("),
    ),
    mistake(
        "lightning-sets-what-only-one-rank-has",
        DETECTOR,
        "set-on-one-rank",
        "Only rank 0 calls prepare_data(), so the other ranks have no such attribute.",
        ("make_recordings(1008)", "make_recordings(256)"),
        ("[720, 144, 144]", "[192, 32, 32]"),
        (SETUP, "    def prepare_data(self):\n        self.scale = 2.0\n\n" + SETUP),
        ("        recordings = TensorDataset(", "        assert self.scale\n        recordings = TensorDataset("),
    ),
    mistake(
        "lightning-counts-the-parts-of-a-batch",
        lightning.CIFAR10,
        "throughput-miscounted",
        "A batch is a pair of images and labels, so the number of samples is always 2.",
        ("batch_size_fn=lambda batch: len(batch[1])", "batch_size_fn=lambda batch: len(batch)"),
        held_out=True,
    ),
    # ---- monitor-differs
    mistake(
        "lightning-stops-by-the-loss-of-a-rank",
        DETECTOR,
        "monitor-differs",
        "EarlyStopping and ModelCheckpoint monitor a loss that each rank computes over its own part.",
        (SYNCHRONIZED, SYNCHRONIZED.replace(", sync_dist=True", "")),
    ),
    # ---- wrong-images
    mistake(
        "lightning-images-of-28",
        lightning.CIFAR10,
        "wrong-images",
        "The digits keep their 28 x 28 pixels: nothing fails, because the head averages over any size.",
        (".resize((32, 32))", ""),
    ),
    # ---- stem-shrinks
    mistake(
        "lightning-stem-of-the-paper",
        lightning.CIFAR10,
        "stem-shrinks",
        "The 7 x 7 convolution with stride 2 and the pooling leave 8 x 8 pixels.",
        ("        self.model.stem = " + lightning.STEM + "\n", ""),
    ),
    mistake(
        "lightning-stem-keeps-the-pooling",
        lightning.CIFAR10,
        "stem-shrinks",
        "Only the first convolution is replaced.",
        (lightning.STEM, lightning.STEM.replace("nn.ReLU())", "nn.ReLU(), nn.MaxPool2d(2))")),
    ),
    mistake(
        "lightning-stem-with-stride",
        lightning.CIFAR10,
        "stem-shrinks",
        "The convolution is 3 x 3, but still has stride 2.",
        (lightning.STEM, lightning.STEM.replace("3, padding=1", "3, stride=2, padding=1")),
    ),
    # ---- schedule-uneven
    mistake(
        "lightning-schedule-by-the-epoch",
        lightning.CIFAR10,
        "schedule-uneven",
        "By default Lightning steps the schedule once per epoch, so the rate hardly changes.",
        (lightning.INTERVAL, '"lr_scheduler": schedule'),
    ),
    mistake(
        "lightning-schedule-counts-no-accumulation",
        lightning.CIFAR10,
        "schedule-uneven",
        "The schedule has twice as many steps as the run and ends in its middle.",
        (lightning.STEPS, "        steps = self.trainer.max_epochs * self.trainer.num_training_batches\n"),
        (
            lightning.OPTIMIZER.replace("return ", "optimizer = "),
            lightning.OPTIMIZER.replace("return ", "optimizer = ") + "        self.trainer.fit_loop.setup_data()\n",
        ),
    ),
    mistake(
        "lightning-schedule-counts-no-processes",
        lightning.CIFAR10,
        "schedule-uneven",
        "The schedule has the steps that one process alone would take.",
        (
            lightning.STEPS,
            "        data, epochs = self.trainer.datamodule, self.trainer.max_epochs\n"
            "        steps = epochs * (len(data.train_set) // data.batch_size // self.trainer.accumulate_grad_batches)\n",
        ),
    ),
    mistake(
        "lightning-schedule-steps-twice",
        lightning.CIFAR10,
        ("schedule-uneven", "crash"),
        "Lightning already steps the schedule, so it ends after half of the run.",
        (
            lightning.FORWARD,
            "    def on_train_batch_end(self, outputs, batch, batch_index):\n        self.lr_schedulers().step()\n\n"
            + lightning.FORWARD,
        ),
    ),
    # ---- best-lost
    mistake(
        "lightning-best-is-the-worst",
        lightning.CIFAR10,
        "best-lost",
        "The default mode keeps the smallest value, as for a loss.",
        (lightning.BEST, lightning.BEST.replace(', mode="max"', "")),
    ),
    mistake(
        "lightning-no-best",
        lightning.CIFAR10,
        "best-lost",
        "Only the last checkpoint is kept.",
        (f"            {lightning.BEST},\n", ""),
    ),
    # ---- never-stops
    mistake(
        "lightning-never-stops",
        lightning.CIFAR10,
        "never-stops",
        "All epochs run, whether or not the model still learns.",
        (f"            {lightning.STOPPING},\n", ""),
    ),
    # ---- stops-too-early
    mistake(
        "lightning-stops-when-it-rises",
        lightning.CIFAR10,
        "stops-too-early",
        "The default is to stop when a loss no longer falls, so a rising accuracy counts as no progress.",
        (lightning.STOPPING, 'EarlyStopping("accuracy", patience=5)'),
    ),
    # ---- not-logged
    mistake(
        "lightning-no-logger",
        lightning.CIFAR10,
        ("not-logged", "crash"),
        "LearningRateMonitor refuses to work without a logger.",
        (lightning.LOGGER, "False"),
    ),
    mistake(
        "lightning-rate-not-logged",
        lightning.CIFAR10,
        "not-logged",
        "There is a logger, but nothing logs the learning rate.",
        ('            LearningRateMonitor("step"),\n', ""),
    ),
    # ---- nodes-ignored
    mistake(
        "lightning-knows-one-node",
        lightning.CIFAR10,
        "nodes-ignored",
        "Two nodes are started, but the Trainer counts one.",
        (lightning.NODES, ""),
    ),
    # ---- job-mistaken
    mistake(
        "lightning-any-job-is-sruns",
        lightning.CIFAR10,
        "job-mistaken",
        "The program takes any job for an srun step, but a Jupyter session is a job of one task.",
        (lightning.SRUN, 'if "SLURM_JOB_ID" in os.environ:'),
        real=True,
    ),
    mistake(
        "lightning-lightning-guesses",
        lightning.CIFAR10,
        "job-mistaken",
        "Without a plugin Lightning takes the variables of a job for those of srun.",
        (lightning.PLUGINS, ""),
        real=True,
    ),
    # ---- trainer-idle
    mistake(
        "lightning-own-loop",
        lightning.MNIST,
        "trainer-idle",
        "A loop of the program takes the steps, and the Trainer does nothing.",
        (
            lightning.FIT,
            "    model, data = Classifier(), Data(args.dataset, args.batch_size)\n"
            "    data.setup('fit')\n"
            "    optimizer = model.configure_optimizers()\n"
            "    for index, batch in enumerate(DataLoader(data.train_set, args.batch_size)):\n"
            "        optimizer.zero_grad()\n"
            "        model.training_step(batch, index).backward()\n"
            "        optimizer.step()\n",
        ),
    ),
    # ---- step-missing
    mistake(
        "lightning-step-of-another-name",
        lightning.MNIST,
        "step-missing",
        "The Trainer calls training_step(), and the module has no such method.",
        ("def training_step(", "def train_step("),
    ),
    # ---- schedule-flat
    mistake(
        "lightning-no-schedule",
        lightning.CIFAR10,
        "schedule-flat",
        "configure_optimizers() returns no schedule.",
        ('return {"optimizer": optimizer, ' + lightning.INTERVAL + "}", "return optimizer"),
    ),
)

STYLES = (
    style(
        "lightning-stops-by-a-metric-object",
        DETECTOR,
        "Only the accuracy is monitored, which torchmetrics synchronizes; each rank logs its own loss.",
        (SYNCHRONIZED, SYNCHRONIZED.replace(", sync_dist=True", "").replace("val_loss", "own_loss")),
        ('EarlyStopping("val_loss"', 'EarlyStopping("val_accuracy", mode="max"'),
        ('monitor="val_loss"', 'monitor="val_accuracy", mode="max"'),
    ),
    style(
        "lightning-style-sanity-check-and-progress-bar",
        lightning.MNIST,
        "The sanity check and the progress bar are on.",
        ("        num_sanity_val_steps=0,\n", ""),
        ("enable_progress_bar=False", "enable_progress_bar=True"),
    ),
    style(
        "lightning-style-default-logger",
        lightning.MNIST,
        "The Trainer makes its default logger.",
        ("        logger=False,\n", ""),
    ),
    style(
        "lightning-style-stem-by-its-parts",
        lightning.CIFAR10,
        "The parts of the stem are replaced one by one.",
        (
            "        self.model.stem = " + lightning.STEM + "\n",
            "        self.model.stem[0] = nn.Conv2d(3, width, 3, padding=1, bias=False)\n"
            "        self.model.stem[3] = nn.Identity()\n",
        ),
    ),
    style(
        "lightning-style-another-resnet",
        lightning.CIFAR10,
        "The model is torchvision's ResNet.",
        (
            "        self.model = models.ResNet18(width)\n",
            "        self.model = torchvision.models.ResNet(\n"
            "            torchvision.models.resnet.BasicBlock, [2, 2, 2, 2], num_classes=10\n        )\n",
        ),
        (
            "        self.model.stem = " + lightning.STEM + "\n",
            "        self.model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)\n"
            "        self.model.maxpool = nn.Identity()\n",
        ),
        ("import torch\n", "import torch\nimport torchvision\n"),
    ),
    style(
        "lightning-style-steps-counted-by-hand",
        lightning.CIFAR10,
        "The program computes the number of steps itself.",
        (
            lightning.STEPS,
            "        data, world_size = self.trainer.datamodule, self.trainer.world_size\n"
            "        batches = len(data.train_set) // world_size // data.batch_size\n"
            "        steps = self.trainer.max_epochs * -(-batches // self.trainer.accumulate_grad_batches)\n",
        ),
    ),
    style(
        "lightning-style-cosine-after-warm-up",
        lightning.CIFAR10,
        "A LambdaLR warms up and then decreases to a hundredth.",
        (
            "OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)",
            "LambdaLR(\n            optimizer, lambda step: min((step + 1) / 3, (steps - step) / steps * 0.9)"
            " if step < steps - 1 else 0.01\n        )",
        ),
    ),
    style(
        "lightning-style-best-and-last-by-one-callback",
        lightning.CIFAR10,
        "One ModelCheckpoint keeps the best and the last checkpoint.",
        (
            f"            {lightning.BEST},\n            {lightning.CHECKPOINT},\n",
            '            ModelCheckpoint(folder or ".", f"{name}-best", monitor="accuracy", mode="max", save_last=True),\n',
        ),
        (
            "    folder, name =",
            "    ModelCheckpoint.CHECKPOINT_NAME_LAST = args.checkpoint.removesuffix('.ckpt')\n    folder, name =",
        ),
    ),
    style(
        "lightning-style-patience-of-ten",
        lightning.CIFAR10,
        "EarlyStopping has a patience of ten epochs.",
        (lightning.STOPPING, 'EarlyStopping(monitor="accuracy", patience=10, mode="max", min_delta=0.001)'),
    ),
    style(
        "lightning-style-rate-logged-by-hand",
        lightning.CIFAR10,
        "training_step() logs the learning rate.",
        ('            LearningRateMonitor("step"),\n', ""),
        (
            lightning.LOSS,
            '        self.log("learning_rate", self.optimizers().param_groups[0]["lr"])\n' + lightning.LOSS,
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
