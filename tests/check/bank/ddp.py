"""The programs of stages 01 and 02, and parts of their text that several mistakes and styles edit."""

from check.bank.case import part

SINGLE = "01_single_gpu/single_gpu.py"
FAST = "solutions/01_single_gpu/exercise1_fast_single_gpu.py"
SPAWN = "solutions/02_pytorch_ddp/exercise1_multigpu.py"
TORCHRUN = "solutions/02_pytorch_ddp/exercise2_multigpu_torchrun.py"
METRICS = "solutions/02_pytorch_ddp/exercise3_global_metrics.py"

# Parts of these programs.
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
LOAD_CALL = "first_epoch = load_checkpoint(args.checkpoint, model, optimizer)"
WRAPPED = "ddp_model = DDP(model)  # the same parameters, but backward() averages the gradients over all processes"
DATA_IMPORTS = "from torch.utils.data import DataLoader, DistributedSampler, Subset"
SAMPLER = "    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)\n"
LOADER = "    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)\n"
SHUFFLED = "    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)\n"
TEST_LOADER = (
    "    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), args.batch_size)\n"
)
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
EVALUATE = "        accuracy = evaluate(model, test_loader, device)\n"
LOSS = "loss = F.cross_entropy(model(images), labels)"
WITH_DROPOUT = "loss = F.cross_entropy(F.dropout(model(images), 0.1), labels)"
SEED = "torch.manual_seed(SEED + 1000 * epoch + rank)"
PARSED = "    args = parse_arguments()\n"
BACKWARD = "        loss.backward()\n"
SAVE_IF = "        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs):\n"
SAVE_CALL = "            save_checkpoint(args.checkpoint, model, optimizer, epoch)\n"
LOAD_OPTIMIZER = '    optimizer.load_state_dict(checkpoint["optimizer"])\n'
NEXT_EPOCH = '    return checkpoint["epoch"] + 1\n'
REDUCE_LOSSES = "    dist.all_reduce(losses, dist.ReduceOp.AVG)\n"
NO_SYNC = "        with nullcontext() if is_last else model.no_sync():\n"
ACCUMULATED_LOSS = (
    "            loss = F.cross_entropy(model(images), labels) / accumulate  # the mean over all batches of the step\n"
)
ACCUMULATED_BACKWARD = "            loss.backward()\n"
IS_LAST = "(batch + 1) % accumulate == 0"
CONFUSION = (
    "        confusion += (labels.to(device) * CLASSES + predictions)"
    ".bincount(minlength=CLASSES**2).view_as(confusion)\n"
)
REDUCE_CONFUSION = "    dist.all_reduce(confusion)\n"
F1 = "    f1 = 2 * correct / (confusion.sum(dim=0) + confusion.sum(dim=1)).clamp(min=1)  # one F1 score per class\n"
SCORES = "    return (correct.sum() / confusion.sum()).item(), f1.mean().item()\n"
STEP = "        optimizer.step()\n"
LOAD = "    first_epoch = load_checkpoint(args.checkpoint, model, optimizer)\n"
WRITE = '    torch.save(checkpoint, path + ".tmp")\n'
SAVE_BLOCK = SAVE_IF + SAVE_CALL
IMPORTS = "import os\nimport time\n"
MAIN = part(SPAWN, "    # The processes find each other", "\n\ndef worker")
SPAWN_CALL = part(SPAWN, "    mp.spawn(worker", "\n\ndef worker")
STORE = '    store = dist.TCPStore("127.0.0.1", port, is_master=False)\n'
SPAWN_INIT = "    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)\n"
CHECK = "    check_arguments(parser, args, SmallCNN(), world_size="
RANKS = part(TORCHRUN, '    rank, world_size = int(os.environ["RANK"])', "    backend = dist")
GROUP = part(TORCHRUN, "    backend = dist.get_default", "\n\ndef parse_arguments")
TRAIN = part(SPAWN, "def train(", "@torch.inference_mode()")
GREETING = part(SPAWN, "    if rank == 0:\n        gpus =", "\n    ddp_model")
WRAP = part(SPAWN, "    ddp_model = DDP(model)", "\n    transform") + "\n"
DEALT = part(SPAWN, "    # The same permutation as in", "    # Distribute the test samples")
TEST_BLOCK = part(SPAWN, "    # Distribute the test samples", "\n    for epoch in range(")
TRAIN_EPOCH = "        losses = train_one_epoch(ddp_model, train_loader, optimizer, device)\n"
SPEED = "        samples_per_second = len(losses) * args.batch_size * world_size / seconds\n"
REPORT = part(SPAWN, "        accuracy = evaluate(", "\n\ndef train_one_epoch")
TRAIN_ONE = part(SPAWN, "def train_one_epoch(", "@torch.inference_mode()")
BATCH = part(SPAWN, "        images, labels = images.to(device)", "    dist.all_reduce(losses")
FORWARD = "        loss = F.cross_entropy(model(images), labels)\n"
ITEM = "        losses[step] = loss.item()\n"
COUNTED = "    dist.all_reduce(correct_and_total)\n"
SAVE_FUNCTION = part(SPAWN, "def save_checkpoint(path", "\n\ndef load_checkpoint")
LOAD_CHECKPOINT = part(SPAWN, "def load_checkpoint(path", '\n\nif __name__ == "__main__"')
SAVED = '"optimizer": optimizer.state_dict(), "epoch": epoch}\n'
ACCUMULATED = part(METRICS, "def train_one_epoch(", "@torch.inference_mode()")
WITHOUT_SYNC = part(METRICS, "        with nullcontext()", "        losses[step] +=")
EVALUATE_FUNCTION = part(METRICS, "@torch.inference_mode()", "\n\ndef save_checkpoint")
SINGLE_TRAIN_ONE = part(SINGLE, "def train_one_epoch(", "@torch.inference_mode()")
SINGLE_DATA = part(SINGLE, "    sampler = RandomSampler(", "    test_loader =")
ORDER = """\
        generator = torch.Generator().manual_seed(SEED + epoch)
        order = torch.randperm(len(train_set), generator=generator).tolist()
"""
STACKED = """\
    images = torch.stack([image for image, _ in train_set]).to(device)
    labels = torch.tensor([label for _, label in train_set], device=device)
"""

TRAINER = """\
def wrap(model):
    return DDP(model)


def prepare_data(rank, world_size, args):
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = load_dataset(args.dataset, transform)
    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)
    share = Subset(test_set, range(rank, len(test_set), world_size))
    return DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True), DataLoader(share, args.batch_size)


class Trainer:
    def __init__(self, rank, world_size, device, args):
        self.rank, self.world_size, self.device, self.args = rank, world_size, device, args
        torch.manual_seed(SEED)
        plain_model = SmallCNN().to(device)
        self.optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-3)
        self.first_epoch = load_checkpoint(args.checkpoint, plain_model, self.optimizer)
        self.model = wrap(plain_model)
        self.train_loader, self.test_loader = prepare_data(rank, world_size, args)
        self.log = EpochLog(args.checkpoint, args.epochs, device, processes=world_size)

    def fit(self):
        for epoch in range(self.first_epoch, self.args.epochs):
            torch.manual_seed(SEED + 1000 * epoch + self.rank)
            self.train_loader.sampler.set_epoch(epoch)
            start = time.perf_counter()
            losses = self._run_epoch()
            seconds = time.perf_counter() - start
            accuracy = evaluate(self.model.module, self.test_loader, self.device)
            if self.rank == 0:
                speed = len(losses) * self.args.batch_size * self.world_size / seconds
                self.log.write(epoch, losses, accuracy, speed)
                if (epoch + 1) % self.args.save_every == 0 or epoch + 1 == self.args.epochs:
                    save_checkpoint(self.args.checkpoint, self.model.module, self.optimizer, epoch)

    def _run_epoch(self):
        self.model.train()
        losses = torch.stack([self._run_batch(*batch) for batch in self.train_loader])
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        return losses.tolist()

    def _run_batch(self, images, labels):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images.to(self.device)), labels.to(self.device))
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def train(rank, world_size, device, args):
    Trainer(rank, world_size, device, args).fit()


"""

ITERABLE = """\
class Share(IterableDataset):
    def __init__(self, dataset, rank, world_size):
        self.dataset, self.rank, self.world_size, self.epoch = dataset, rank, world_size, 0

    def __len__(self):
        return len(self.dataset) // self.world_size

    def __iter__(self):
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(SEED + self.epoch)).tolist()
        for index in order[: len(self) * self.world_size][self.rank :: self.world_size]:
            yield self.dataset[index]


def train("""
