"""The programs of stage 03, and parts of their text that several mistakes and styles edit."""

MNIST = "solutions/03_pytorch_lightning/exercise1_lightning_mnist.py"
CIFAR10 = "solutions/03_pytorch_lightning/exercise2_lightning_cifar10.py"

# Parts of these programs.
LOSS = "        return F.cross_entropy(self(images), labels)\n"
OPTIMIZER = "        return torch.optim.AdamW(self.parameters(), lr=1e-3)\n"
METRIC = '        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")\n'
UPDATE = "        self.accuracy(self(images), labels)\n"
LOG = '        self.log("accuracy", self.accuracy)\n'
SAMPLER = "        sampler = DistributedSampler(self.train_set, world_size, rank, seed=SEED, drop_last=True)\n"
LOADER = "        return DataLoader(self.train_set, self.batch_size, sampler=sampler, drop_last=True)\n"
SHUFFLED = "        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)\n"
TEST_LOADER = "        return DataLoader(Subset(self.test_set, share), self.batch_size)\n"
OWN_SAMPLERS = "        use_distributed_sampler=False,  # Data distributes the samples itself\n"
CHECKPOINT = 'ModelCheckpoint(folder or ".", name, save_on_train_epoch_end=True)'
RESUME = "    checkpoint = args.checkpoint if os.path.exists(args.checkpoint) else None\n"
STRATEGY = '        strategy="ddp",\n'
DEVICES = "        devices=args.devices,\n"
FIT = "    trainer.fit(Classifier(), data, ckpt_path=checkpoint)\n"
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
