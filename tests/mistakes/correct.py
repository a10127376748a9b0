"""Correct versions in other styles: the check must find no error in any of them.

SP01 and so on are the styles of ``facts/correct-styles.md``. "Other order": two processes with half the batch rightly
take other batches than one process does; all others compute with two processes what they compute with one.
"""

from mistakes.bank import Mistake
from workshop.repository import ROOT

SINGLE = "01_single_gpu/single_gpu.py"
SPAWN = "solutions/02_pytorch_ddp/exercise1_multigpu.py"
TORCHRUN = "solutions/02_pytorch_ddp/exercise2_multigpu_torchrun.py"
METRICS = "solutions/02_pytorch_ddp/exercise3_global_metrics.py"


def _part(base: str, start: str, end: str) -> str:
    """The text of a base from a text that stands in it once up to the one that follows."""
    text = (ROOT / base).read_text()
    assert text.count(start) == 1, (base, start)
    return start + text.split(start)[1].split(end)[0]


# What stands in the bases, exactly once in each that it is used with.
IMPORTS = "import os\nimport time\n"
MAIN = _part(SPAWN, "    # The store is where", "\n\ndef worker")
SPAWN_CALL = _part(SPAWN, "    mp.spawn(worker", "\n\ndef worker")
STORE = '    store = dist.TCPStore("127.0.0.1", port, is_master=False)\n'
SPAWN_INIT = "    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)\n"
CHECK = "    check_arguments(parser, args, SmallCNN(), world_size="
BACKEND = "    backend = dist.get_default_backend_for_device(device)  # "
RANKS = _part(TORCHRUN, '    rank, world_size = int(os.environ["RANK"])', "    backend = dist")
GROUP = _part(TORCHRUN, "    backend = dist.get_default", "\n\ndef parse_arguments")
TRAIN = _part(SPAWN, "def train(", "@torch.inference_mode()")
LOAD = "    first_epoch = load_snapshot(args.snapshot, model, optimizer, device)\n"
GREETING = _part(SPAWN, "    if rank == 0:\n        gpus =", "\n    ddp_model")
WRAP = _part(SPAWN, "    ddp_model = DDP(model)", "\n    transform") + "\n"
ADAM = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
SAMPLER = "    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)\n"
LOADER = "    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)\n"
DEALT = _part(SPAWN, "    # The order of single_gpu.py", "    # Dealt out too")
TEST = _part(SPAWN, "    # Dealt out too", "\n    for epoch in range(")
SEEDED = "        torch.manual_seed(SEED + 1000 * epoch + rank)\n"
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
TRAIN_EPOCH = "        losses = train_one_epoch(ddp_model, train_loader, optimizer, device)\n"
SPEED = "        samples_per_second = len(losses) * args.batch_size * world_size / seconds\n"
REPORT = _part(SPAWN, "        accuracy = evaluate(", "\n\ndef train_one_epoch")
TRAIN_ONE = _part(SPAWN, "def train_one_epoch(", "@torch.inference_mode()")
BATCH = _part(SPAWN, "        images, labels = images.to(device)", "    dist.all_reduce(losses")
FORWARD = "        loss = F.cross_entropy(model(images), labels)\n"
BACKWARD = "        loss.backward()\n"
STEP = "        optimizer.step()\n"
ITEM = "        losses[step] = loss.item()\n"
AVERAGED = "    dist.all_reduce(losses, dist.ReduceOp.AVG)\n"
COUNTED = "    dist.all_reduce(correct_and_total)\n"
SAVE = _part(SPAWN, "def save_snapshot(path", "\n\ndef load_snapshot")
LOAD_SNAPSHOT = _part(SPAWN, "def load_snapshot(path", '\n\nif __name__ == "__main__"')
SAVED = '"optimizer": optimizer.state_dict(), "epoch": epoch}\n'
LOADED = '    optimizer.load_state_dict(snapshot["optimizer"])\n'
ACCUMULATED = _part(METRICS, "def train_one_epoch(", "@torch.inference_mode()")
WITHOUT_SYNC = _part(METRICS, "        with nullcontext()", "        losses[step] +=")
F1 = _part(METRICS, "@torch.inference_mode()", "\n\ndef save_snapshot")
SINGLE_TRAIN_ONE = _part(SINGLE, "def train_one_epoch(", "@torch.inference_mode()")
SINGLE_DATA = _part(SINGLE, "    sampler = RandomSampler(", "    test_loader =")

# A share by hand, in an order that all ranks draw alike.
ORDER = """\
        generator = torch.Generator().manual_seed(SEED + epoch)
        order = torch.randperm(len(train_set), generator=generator).tolist()
"""

CONTEXT_PROCESS = """\
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=worker, args=(rank, args.nproc, store.port, args)) for rank in range(args.nproc)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        time.sleep(0.1)
        if any(process.exitcode for process in processes):  # one has failed: the others would wait for it
            for process in processes:
                process.terminate()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)
"""

FREE_PORT = """\
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free.getsockname()[1])
    mp.spawn(worker, args=(args.nproc, args), nprocs=args.nproc)
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
        self.first_epoch = load_snapshot(args.snapshot, plain_model, self.optimizer, device)
        self.model = wrap(plain_model)
        self.train_loader, self.test_loader = prepare_data(rank, world_size, args)
        self.log = EpochLog(args.snapshot, args.epochs, device, processes=world_size)

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
                    save_snapshot(self.args.snapshot, self.model.module, self.optimizer, epoch)

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

EVALUATED_BY_RANK_0 = """\
        if rank == 0:
            accuracy = evaluate(model, test_loader, device)
            log.write(epoch, losses, accuracy, samples_per_second)
            if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
                save_snapshot(args.snapshot, model, optimizer, epoch)
        dist.barrier()  # the others wait here, not in the next epoch's first step
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

MOVED = """\
def save_snapshot(path, model, optimizer, epoch):
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="saving-", delete=False) as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, file)
        file.flush()
        os.fsync(file.fileno())
    shutil.move(file.name, path)  # in the same folder this is os.rename, which is atomic
"""

KEPT = """\
def save_snapshot(path, model, optimizer, epoch):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, temporary)
    shutil.copyfile(temporary, path.with_name(f"{path.stem}-epoch{epoch}{path.suffix}"))
    temporary.replace(path)
    path.with_name(f"{path.stem}-epoch{epoch - 2}{path.suffix}").unlink(missing_ok=True)  # the last two are enough
"""

DCP_SAVE = """\
def save_snapshot(path, model, optimizer, epoch):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{path}.dcp{epoch}")  # all ranks, a file each
    if dist.get_rank() == 0:
        # It names the folder to carry on from, and appears once that is complete.
        snapshot = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(snapshot, path + ".tmp")
        os.replace(path + ".tmp", path)
        for earlier in range(epoch):
            shutil.rmtree(f"{path}.dcp{earlier}", ignore_errors=True)
"""

DCP_LOAD = """\
def load_snapshot(path, model, optimizer, device):
    if not os.path.exists(path):
        return 0
    epoch = torch.load(path, map_location=device, weights_only=True)["epoch"]
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{path}.dcp{epoch}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return epoch + 1
"""

RANDOM_STATE_SAVED = """\
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            log.write(epoch, losses, accuracy, samples_per_second)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
            # Each rank has a file of its own for its random state. All lie there before the snapshot that needs them.
            own = f"{args.snapshot}.rank{rank}"
            os.makedirs(os.path.dirname(own) or ".", exist_ok=True)
            torch.save(torch.get_rng_state(), f"{own}.tmp")
            os.replace(f"{own}.tmp", f"{own}.epoch{epoch}")
            dist.barrier()
            if rank == 0:
                save_snapshot(args.snapshot, model, optimizer, epoch)
            dist.barrier()
            for earlier in range(epoch):
                if os.path.exists(f"{own}.epoch{earlier}"):
                    os.remove(f"{own}.epoch{earlier}")
"""

RANDOM_STATE_LOADED = """
    torch.manual_seed(SEED + rank)
    if os.path.exists(own := f"{args.snapshot}.rank{rank}.epoch{first_epoch - 1}"):
        torch.set_rng_state(torch.load(own, weights_only=True))
    for epoch in range(first_epoch, args.epochs):
        # The rest of the random state comes from the file of this rank.
"""

GROUP_AS_CONTEXT = """\
    with process_group():
        train(rank, world_size, device, args)


@contextmanager
def process_group():
    dist.init_process_group(timeout=timedelta(minutes=5))  # no backend: the one of each device
    try:
        yield
    finally:
        dist.destroy_process_group()
"""

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
        loss = F.cross_entropy(model(images), labels) / accumulate  # the mean of the batches' means
        loss.backward()
        if is_last:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
"""

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

SINGLE_FROM_TENSORS = """\
def train_one_epoch(model, images, labels, steps, optimizer):
    model.train()
    losses = []
    for chosen in steps:
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


"""

STACKED = """\
    images = torch.stack([image for image, _ in train_set]).to(device)
    labels = torch.tensor([label for _, label in train_set], device=device)
"""

SPAWN_STYLES = (
    # -- how the processes come to be, and find each other
    Mistake(
        "context-process-instead-of-spawn",
        SPAWN,
        ((MAIN, CONTEXT_PROCESS),),
        (),
        "SP04: mp.get_context('spawn').Process, started and watched by hand",
    ),
    Mistake(
        "spawn-joined-later",
        SPAWN,
        (
            (
                SPAWN_CALL,
                "    context = mp.spawn(worker, args=(args.nproc, store.port, args), nprocs=args.nproc, join=False)\n"
                "    while not context.join(timeout=1):\n"
                "        pass\n",
            ),
        ),
        (),
        "SP04: spawn(join=False) and context.join()",
    ),
    Mistake(
        "start-processes-forkserver",
        SPAWN,
        (
            (
                SPAWN_CALL,
                "    mp.start_processes(\n"
                "        worker, args=(args.nproc, store.port, args), nprocs=args.nproc, start_method='forkserver'\n"
                "    )\n",
            ),
        ),
        (),
        "SP04: start_processes, and from a fork server: the children's parent is not the script",
    ),
    Mistake(
        "file-store",
        SPAWN,
        (
            (IMPORTS, IMPORTS.replace("import time", "import tempfile\nimport time")),
            (
                MAIN,
                "    with tempfile.TemporaryDirectory() as folder:\n"
                '        mp.spawn(worker, args=(args.nproc, f"file://{folder}/store", args), nprocs=args.nproc)\n',
            ),
            ("def worker(rank, world_size, port, args):\n", "def worker(rank, world_size, address, args):\n"),
            (STORE, ""),
            (SPAWN_INIT, SPAWN_INIT.replace("store=store", "init_method=address")),
        ),
        (),
        "init_method='file://...' in a temporary folder: no port at all",
    ),
    Mistake(
        "address-in-the-environment",
        SPAWN,
        (
            (IMPORTS, IMPORTS.replace("import time", "import socket\nimport time")),
            (MAIN, FREE_PORT),
            ("def worker(rank, world_size, port, args):\n", "def worker(rank, world_size, args):\n"),
            (STORE, ""),
            (SPAWN_INIT, SPAWN_INIT.replace("store=store", 'init_method="env://"')),
        ),
        (),
        "MASTER_ADDR and MASTER_PORT as in the tutorial, but with a free port that the system has picked",
    ),
    # -- shares of the data
    Mistake(
        "shares-dealt-by-hand",
        SPAWN,
        (
            (SAMPLER, "    share = len(train_set) // world_size  # as many for each rank\n"),
            (LOADER, ""),
            (
                SET_EPOCH,
                ORDER + "        own = Subset(train_set, order[: share * world_size][rank::world_size])\n"
                "        train_loader = DataLoader(own, args.batch_size, drop_last=True)\n",
            ),
        ),
        (),
        "SP22's kin: order[rank::world_size] of a common permutation, a new Subset and loader each epoch",
    ),
    Mistake(
        "contiguous-parts-of-a-common-order",
        SPAWN,
        (
            (DEALT, "    share = len(train_set) // world_size  # as many for each rank\n"),
            (
                SET_EPOCH,
                ORDER + "        own = Subset(train_set, order[rank * share : (rank + 1) * share])\n"
                "        train_loader = DataLoader(own, args.batch_size, drop_last=True)\n",
            ),
        ),
        (),
        "each rank takes a contiguous part of the epoch's permutation. Other order",
    ),
    Mistake(
        "batches-picked-from-tensors",
        SPAWN,
        (
            (DEALT, STACKED),
            (
                SET_EPOCH,
                "        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))\n"
                "        batches = order[rank::world_size].to(device).split(args.batch_size)\n"
                "        steps = batches[: len(images) // (args.batch_size * world_size)]\n",
            ),
            (TRAIN_EPOCH, "        losses = train_one_epoch(ddp_model, images, labels, steps, optimizer)\n"),
            (TRAIN_ONE, FROM_TENSORS),
        ),
        (),
        "no loader and no sampler: the samples lie in one tensor, and each step picks its rows",
    ),
    Mistake(
        "iterable-share",
        SPAWN,
        (
            ("import DataLoader, DistributedSampler, Subset\n", "import DataLoader, IterableDataset, Subset\n"),
            ("def train(", ITERABLE),
            (SAMPLER, "    share = Share(train_set, rank, world_size)\n"),
            (LOADER, "    train_loader = DataLoader(share, args.batch_size, drop_last=True)\n"),
            (SET_EPOCH, "        share.epoch = epoch\n"),
        ),
        (),
        "an IterableDataset yields the rank's share: the loader knows no indices",
    ),
    Mistake(
        "batches-dealt-out",
        SPAWN,
        (
            (DEALT, ""),
            (
                SET_EPOCH,
                ORDER + "        cut = range(0, len(order) - args.batch_size + 1, args.batch_size)\n"
                "        batches = [order[first : first + args.batch_size] for first in cut]\n"
                "        own = batches[: len(batches) // world_size * world_size][rank::world_size]\n"
                "        train_loader = DataLoader(train_set, batch_sampler=own)\n",
            ),
        ),
        (),
        "SP13's way (Accelerate's BatchSamplerShard): whole batches are dealt out, not samples",
    ),
    Mistake(
        "join-for-uneven-batches",
        SPAWN,
        (
            (
                "from torch.nn import functional as F\n",
                "from torch.distributed.algorithms.join import Join\nfrom torch.nn import functional as F\n",
            ),
            (ADAM, "    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)\n"),
            (DEALT, ""),
            (
                SET_EPOCH,
                ORDER + "        firsts = range(0, len(order), args.batch_size)\n"
                "        batches = [order[first : first + args.batch_size] for first in firsts]\n"
                "        steps = -(-len(batches) // world_size)\n"
                "        train_loader = DataLoader(train_set, batch_sampler=batches[rank::world_size])\n",
            ),
            (TRAIN_EPOCH, "        losses = train_one_epoch(ddp_model, train_loader, optimizer, device, steps)\n"),
            (SPEED, "        samples_per_second = len(train_set) / seconds\n"),
            (TRAIN_ONE, JOINED),
        ),
        (),
        "SP07: no sample is left out, rank 0 may have a batch more; weights are equal again after the Join block",
    ),
    Mistake(
        "loader-workers",
        SPAWN,
        ((LOADER, LOADER.replace("=True)", "=True, num_workers=2, persistent_workers=True)")),),
        (),
        "worker processes load the batches: further children, and batches that arrive in other memory",
    ),
    # -- model and gradients
    Mistake(
        "trainer-class-and-helpers",
        SPAWN,
        ((TRAIN, TRAINER),),
        (),
        "SP05: a Trainer class, the wrap and the data in helpers, no step numbers, no progress bar",
    ),
    Mistake(
        "wrapped-model-takes-the-name",
        SPAWN,
        (
            (WRAP, "    model = DDP(model)\n"),
            (TRAIN_EPOCH, TRAIN_EPOCH.replace("ddp_model", "model")),
            ("evaluate(model, test_loader, device)", "evaluate(model.module, test_loader, device)"),
            (
                "save_snapshot(args.snapshot, model, optimizer, epoch)",
                "save_snapshot(args.snapshot, model.module, optimizer, epoch)",
            ),
        ),
        (),
        "SP03's opposite: model = DDP(model), and model.module where the plain one is meant",
    ),
    Mistake(
        "module-keys-both-ways",
        SPAWN,
        (
            (CHECK + "args.nproc)\n", "    check_arguments(parser, args, world_size=args.nproc)\n"),
            (LOAD, "    ddp_model = DDP(model)\n" + LOAD.replace(" model,", " ddp_model,")),
            (WRAP, ""),
            (
                "save_snapshot(args.snapshot, model, optimizer, epoch)",
                "save_snapshot(args.snapshot, ddp_model, optimizer, epoch)",
            ),
        ),
        (),
        "SP17: saved from and loaded into the wrapped model, 'module.' in front of each key; a hint at most",
    ),
    Mistake(
        "module-keys-stripped",
        SPAWN,
        (
            (
                "save_snapshot(args.snapshot, model, optimizer, epoch)",
                "save_snapshot(args.snapshot, ddp_model, optimizer, epoch)",
            ),
            (
                '    snapshot = {"model": model.state_dict(), ',
                '    weights = {name.removeprefix("module."): weight for name, weight in model.state_dict().items()}\n'
                '    snapshot = {"model": weights, ',
            ),
        ),
        (),
        "the wrapped model's state, with 'module.' taken off: the file fits the plain model",
    ),
    Mistake(
        "gradients-averaged-by-hand",
        SPAWN,
        (
            (
                WRAP,
                "    for weight in model.state_dict().values():\n        dist.broadcast(weight, src=0)\n",
            ),
            (TRAIN_EPOCH, TRAIN_EPOCH.replace("ddp_model", "model")),
            (
                BACKWARD,
                BACKWARD + "        for parameter in model.parameters():\n"
                "            dist.all_reduce(parameter.grad)\n"
                "            parameter.grad /= dist.get_world_size()\n",
            ),
        ),
        (),
        "no DDP: each gradient is summed over the ranks and divided by their number",
    ),
    # -- figures and output
    Mistake(
        "evaluation-on-rank-0",
        SPAWN,
        (
            (TEST, "    test_loader = DataLoader(test_set, args.batch_size)\n"),
            (REPORT, EVALUATED_BY_RANK_0),
            (COUNTED, ""),
        ),
        (),
        "rank 0 alone evaluates the plain model on the whole test set, the others wait at a barrier",
    ),
    Mistake(
        "print-taken-from-other-ranks",
        SPAWN,
        (
            ("import os\n", "import builtins\nimport os\n"),
            (SPAWN_INIT, SPAWN_INIT + "    if rank > 0:\n        builtins.print = lambda *args, **kwargs: None\n"),
            (GREETING, GREETING.replace("    if rank == 0:\n", "").replace("        ", "    ")),
        ),
        (),
        "as in DETR's setup_for_distributed: all ranks call print, and only rank 0's prints",
    ),
)

TORCHRUN_STYLES = (
    # -- processes and devices
    Mistake(
        "ranks-from-the-group",
        TORCHRUN,
        (
            (
                RANKS,
                '    dist.init_process_group(init_method="env://")  # no backend: the one of each device\n'
                "    rank, world_size = dist.get_rank(), dist.get_world_size()\n"
                '    device = choose_device(dist.get_node_local_rank(), int(os.environ["LOCAL_WORLD_SIZE"]))\n',
            ),
            (_part(TORCHRUN, "    backend = dist.get_default", "    try:\n"), ""),
        ),
        (),
        "SP10, SP12, SP14: rank, world size and local rank come from torch, and no backend is named",
    ),
    Mistake(
        "device-by-remainder",
        TORCHRUN,
        (
            (
                '    device = choose_device(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))\n',
                "    devices = torch.accelerator.device_count()\n"
                '    device = choose_device(rank % max(devices, 1), int(os.environ["LOCAL_WORLD_SIZE"]))\n',
            ),
        ),
        (),
        "SP14: rank % device_count(), right where each machine runs as many processes as it has devices",
    ),
    Mistake(
        "group-left-at-exit",
        TORCHRUN,
        (
            (IMPORTS.replace("time\n", ""), "import atexit\n" + IMPORTS.replace("time\n", "")),
            (
                _part(TORCHRUN, "    dist.init_process_group(backend)", "\n\ndef parse_arguments"),
                "    dist.init_process_group(backend)\n"
                "    atexit.register(leave_group)\n"
                "    train(rank, world_size, device, args)\n"
                "\n\n"
                "def leave_group():\n"
                "    dist.destroy_process_group()\n",
            ),
        ),
        (),
        "SP11: atexit destroys the group",
    ),
    Mistake(
        "group-as-context-manager",
        TORCHRUN,
        (
            ("import time\n", "import time\nfrom contextlib import contextmanager\nfrom datetime import timedelta\n"),
            (GROUP, GROUP_AS_CONTEXT),
        ),
        (),
        "SP10, SP11: a context manager joins and leaves the group, without a backend and with a timeout",
    ),
    Mistake(
        "further-collectives-on-all-ranks",
        TORCHRUN,
        (
            (WRAP, '    watch = dist.new_group(backend="gloo")  # monitored_barrier is gloo\'s alone\n' + WRAP),
            (
                TRAIN_EPOCH,
                "        dist.barrier()\n" + TRAIN_EPOCH + "        dist.monitored_barrier(watch)\n",
            ),
            (
                ITEM,
                "        mean_loss = loss.detach().clone()\n"
                "        dist.all_reduce(mean_loss, dist.ReduceOp.AVG)\n"
                "        losses[step] = mean_loss\n"
                "        if step % 10 == 0 and dist.get_rank() == 0:\n"
                '            print(f"step {step} | loss {mean_loss.item():.4f}", flush=True)\n',
            ),
            (AVERAGED, ""),
        ),
        (),
        "SP09: barriers, one of a group of its own, and a loss that is averaged in each step",
    ),
    # -- gradients
    Mistake(
        "gradients-in-one-flat-tensor",
        TORCHRUN,
        (
            (WRAP, ""),
            (TRAIN_EPOCH, TRAIN_EPOCH.replace("ddp_model", "model")),
            (
                BACKWARD,
                BACKWARD + "        gradients = [parameter.grad for parameter in model.parameters()]\n"
                "        flat = torch.cat([gradient.flatten() for gradient in gradients])\n"
                "        dist.all_reduce(flat, dist.ReduceOp.AVG)\n"
                "        lengths = [gradient.numel() for gradient in gradients]\n"
                "        for gradient, mean in zip(gradients, flat.split(lengths), strict=True):\n"
                "            gradient.copy_(mean.view_as(gradient))\n",
            ),
        ),
        (),
        "no DDP: one all_reduce for all gradients; the first weights are equal because the seed is",
    ),
    Mistake(
        "gradients-averaged-in-hooks",
        TORCHRUN,
        (
            (
                WRAP,
                "    for parameter in model.parameters():\n"
                "        dist.broadcast(parameter.data, src=0)\n"
                "        parameter.register_post_accumulate_grad_hook(average)\n",
            ),
            (TRAIN_EPOCH, TRAIN_EPOCH.replace("ddp_model", "model")),
            (
                "def train_one_epoch(",
                "def average(parameter):\n"
                "    dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)\n\n\n"
                "def train_one_epoch(",
            ),
        ),
        (),
        "no DDP: a hook of each parameter averages its gradient during backward()",
    ),
    Mistake(
        "ddp-with-options",
        TORCHRUN,
        (
            (
                WRAP,
                "    options = {'gradient_as_bucket_view': True, 'static_graph': True, 'broadcast_buffers': False}\n"
                "    ddp_model = DDP(model, bucket_cap_mb=1, **options)\n"
                "    ddp_model.register_comm_hook(None, default_hooks.allreduce_hook)\n",
            ),
            (
                "from torch.distributed.elastic.multiprocessing.errors import record\n",
                "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
                "from torch.distributed.elastic.multiprocessing.errors import record\n",
            ),
        ),
        (),
        "gradients that are views of the buckets, a static graph, a communication hook that averages",
    ),
    Mistake(
        "zero-grad-last-and-loss-now-and-then",
        TORCHRUN,
        (
            (
                BATCH,
                "        images, labels = images.to(device), labels.to(device)\n"
                + FORWARD
                + BACKWARD
                + STEP
                + "        optimizer.zero_grad(set_to_none=False)\n"
                "        losses[step] = loss.detach()\n"
                "        if step % 10 == 0 and dist.get_rank() == 0:\n"
                '            tqdm.write(f"step {step} | loss of rank 0 {loss.item():.4f}")\n',
            ),
        ),
        (),
        "zero_grad at the end of the step and with zeros, loss.item() in one step of ten",
    ),
    Mistake(
        "bfloat16-autocast",
        TORCHRUN,
        (
            (
                FORWARD,
                "        with torch.autocast(device.type, torch.bfloat16):\n"
                "            loss = F.cross_entropy(model(images), labels)\n",
            ),
        ),
        (),
        "the forward pass in bfloat16: two processes round otherwise than one, but train alike",
    ),
    Mistake(
        "momentum-clipping-and-schedule",
        TORCHRUN,
        (
            (
                ADAM,
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)\n"
                "    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)\n",
            ),
            (LOAD, LOAD.replace("optimizer, device", "optimizer, schedule, device")),
            (TRAIN_EPOCH, TRAIN_EPOCH + "        schedule.step()\n"),
            (STEP, "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n" + STEP),
            (
                "save_snapshot(args.snapshot, model, optimizer, epoch)",
                "save_snapshot(args.snapshot, model, optimizer, schedule, epoch)",
            ),
            (
                "def save_snapshot(path, model, optimizer, epoch):",
                "def save_snapshot(path, model, optimizer, schedule, epoch):",
            ),
            (
                SAVED,
                SAVED + '    snapshot["schedule"] = schedule.state_dict()\n',
            ),
            (
                "def load_snapshot(path, model, optimizer, device):",
                "def load_snapshot(path, model, optimizer, schedule, device):",
            ),
            (LOADED, LOADED + '    schedule.load_state_dict(snapshot["schedule"])\n'),
        ),
        (),
        "SGD with momentum, clipped gradients, and a schedule that is saved and carried on with",
    ),
    # -- data
    Mistake(
        "shards-that-stay-with-a-rank",
        TORCHRUN,
        (
            ("import DataLoader, DistributedSampler, Subset\n", "import DataLoader, RandomSampler, Subset\n"),
            (
                DEALT,
                "    share = len(train_set) // world_size\n"
                "    own = Subset(train_set, range(rank * share, (rank + 1) * share))  # always the same\n"
                "    generator = torch.Generator()\n"
                "    sampler = RandomSampler(own, generator=generator)\n" + LOADER.replace("train_set,", "own,"),
            ),
            (SET_EPOCH, "        generator.manual_seed(SEED + epoch)\n"),
        ),
        (),
        "SP22: each rank reads a fixed part of the data, shuffled anew each epoch by a common seed. Other order",
    ),
    # -- figures and output
    Mistake(
        "figures-reduced-to-rank-0",
        TORCHRUN,
        (
            (
                AVERAGED + "    return losses.tolist()\n",
                "    dist.reduce(losses, dst=0)  # only rank 0 reports them\n"
                "    return (losses / dist.get_world_size()).tolist()\n",
            ),
            (COUNTED, "    dist.reduce(correct_and_total, dst=0)\n"),
        ),
        (),
        "reduce(dst=0): the other ranks hold figures of no use, and do not use them",
    ),
    Mistake(
        "figures-gathered-as-objects",
        TORCHRUN,
        (
            (
                AVERAGED + "    return losses.tolist()\n",
                "    everyone = [None] * dist.get_world_size()\n"
                "    dist.all_gather_object(everyone, losses.tolist())\n"
                "    return [sum(step) / len(step) for step in zip(*everyone, strict=True)]\n",
            ),
            (
                _part(TORCHRUN, COUNTED, "    return correct / total"),
                "    everyone = [None] * dist.get_world_size()\n"
                "    dist.all_gather_object(everyone, correct_and_total.tolist())\n"
                "    correct, total = (sum(counts) for counts in zip(*everyone, strict=True))\n",
            ),
        ),
        (),
        "all_gather_object of the ranks' lists and counts, added up on each rank in Python",
    ),
    Mistake(
        "logging-instead-of-print",
        TORCHRUN,
        (
            ("import os\n", "import logging\nimport os\nimport sys\n"),
            (
                "    dist.init_process_group(backend)\n",
                "    dist.init_process_group(backend)\n"
                "    logging.basicConfig(stream=sys.stdout, level=logging.INFO if rank == 0 else logging.WARNING)\n",
            ),
            (
                GREETING,
                '    logging.info("training on %s from epoch %d: %d processes", device, first_epoch + 1, world_size)\n',
            ),
        ),
        (),
        "the logging module, with a level that keeps the other ranks silent",
    ),
    # -- files
    Mistake(
        "temporary-file-moved",
        TORCHRUN,
        (
            ("import os\nimport time\n", "import os\nimport shutil\nimport tempfile\nimport time\n"),
            (SAVE, MOVED),
        ),
        (),
        "SP19: NamedTemporaryFile, fsync and shutil.move",
    ),
    Mistake(
        "last-two-snapshots-kept",
        TORCHRUN,
        (
            ("import os\nimport time\n", "import os\nimport shutil\nimport time\nfrom pathlib import Path\n"),
            (SAVE, KEPT),
        ),
        (),
        "SP19: Path.replace, and the snapshots of the last two epochs beside it",
    ),
    Mistake(
        "loaded-on-the-cpu-as-any-object",
        TORCHRUN,
        (
            (
                "    snapshot = torch.load(path, map_location=device, weights_only=True)\n",
                "    snapshot = torch.load(path, map_location=lambda storage, location: storage, weights_only=False)\n",
            ),
            (SAVED, SAVED.replace('"epoch": epoch}', '"epoch": epoch, "seed": SEED}')),
        ),
        (),
        "SP15, SP16: weights_only=False, a lambda as map_location, and something more in the snapshot",
    ),
    Mistake(
        "random-state-in-a-file-of-each-rank",
        TORCHRUN,
        (
            (
                _part(TORCHRUN, "\n    for epoch in range(first_epoch", "        sampler.set_epoch(epoch)"),
                RANDOM_STATE_LOADED,
            ),
            (REPORT, RANDOM_STATE_SAVED),
        ),
        (),
        "SP06: each rank writes, but a file of its own; the snapshot comes after a barrier",
    ),
    Mistake(
        "distributed-checkpoint",
        TORCHRUN,
        (
            ("import os\nimport time\n", "import os\nimport shutil\nimport time\n"),
            (
                "import torch.distributed as dist\n",
                "import torch.distributed as dist\nimport torch.distributed.checkpoint as dcp\n"
                "from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict\n",
            ),
            (
                "        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs):\n",
                "        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:\n",
            ),
            (SAVE, DCP_SAVE),
            (LOAD_SNAPSHOT, DCP_LOAD),
        ),
        (),
        "SP18: all ranks save and load with torch.distributed.checkpoint; the snapshot names the folder to load from",
    ),
)

METRICS_STYLES = (
    Mistake(
        "sync-flag-instead-of-no-sync",
        METRICS,
        (
            (
                WITHOUT_SYNC,
                "        model.require_backward_grad_sync = is_last\n"
                "        loss = F.cross_entropy(model(images), labels) / accumulate  # the mean of the batches' means\n"
                "        loss.backward()\n",
            ),
        ),
        (),
        "SP01: nanoGPT's way",
    ),
    Mistake(
        "large-batch-cut-in-portions",
        METRICS,
        (
            (LOADER, LOADER.replace("args.batch_size", "args.batch_size * args.accumulate")),
            (ACCUMULATED, CHUNKS),
        ),
        (),
        "SP02: the loader yields the batch of a whole step, and no_sync() stands around all portions but the last",
    ),
    Mistake(
        "accumulated-then-averaged-by-hand",
        METRICS,
        (
            (WRAP, ""),
            ("train_one_epoch(ddp_model, train_loader", "train_one_epoch(model, train_loader"),
            (WITHOUT_SYNC, REDUCED_BY_HAND),
        ),
        (),
        "no DDP: local gradients add up, and are averaged over the ranks right before the step",
    ),
    Mistake(
        "sum-divided-by-the-samples-of-a-step",
        METRICS,
        (
            (
                "cross_entropy(model(images), labels) / accumulate  # the mean of the batches' means\n",
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
        (),
        "the loss is a sum over samples that is divided once, and zero_grad stands before the first batch of a step",
    ),
    Mistake(
        "torchmetrics",
        METRICS,
        (
            (
                "from tqdm import tqdm\n",
                "from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score\n"
                "from tqdm import tqdm\n",
            ),
            (F1, TORCHMETRICS),
        ),
        (),
        "torchmetrics adds up the counts of all processes",
    ),
    Mistake(
        "predictions-gathered-and-cut",
        METRICS,
        (
            (
                "from torch.utils.data import DataLoader, DistributedSampler, Subset\n",
                "from sklearn.metrics import accuracy_score, f1_score\n"
                "from torch.utils.data import DataLoader, DistributedSampler\n",
            ),
            (
                TEST,
                "    test_loader = DataLoader(\n"
                "        test_set, args.batch_size, sampler=DistributedSampler(test_set, shuffle=False)\n"
                "    )\n",
            ),
            (F1, GATHERED_AND_CUT),
        ),
        (),
        "the predictions of all ranks, put in order and cut to the length of the test set, scored by scikit-learn",
    ),
)

SINGLE_STYLES = (
    Mistake(
        "single-from-tensors-in-bfloat16",
        SINGLE,
        (
            (SINGLE_DATA, STACKED),
            (
                "        sampler.generator.manual_seed(SEED + epoch)\n",
                "        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))\n"
                "        steps = order.to(device).split(args.batch_size)[: len(images) // args.batch_size]\n",
            ),
            (
                "        losses = train_one_epoch(model, train_loader, optimizer, device)\n",
                "        losses = train_one_epoch(model, images, labels, steps, optimizer)\n",
            ),
            (SINGLE_TRAIN_ONE, SINGLE_FROM_TENSORS),
        ),
        (),
        "batches picked from one tensor, bfloat16, no value asked for before the epoch has ended",
    ),
    Mistake(
        "single-warm-up-in-steps",
        SINGLE,
        (
            (
                ADAM,
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)\n"
                "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 30))\n",
            ),
            (LOAD, LOAD.replace("optimizer, device", "(optimizer, schedule), device")),
            (
                "train_one_epoch(model, train_loader, optimizer, device)\n",
                "train_one_epoch(model, train_loader, optimizer, schedule, device)\n",
            ),
            (
                "def train_one_epoch(model, loader, optimizer, device):\n",
                "def train_one_epoch(model, loader, optimizer, schedule, device):\n",
            ),
            (
                STEP,
                "        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)\n"
                + STEP
                + "        schedule.step()\n",
            ),
            (
                "save_snapshot(args.snapshot, model, optimizer, epoch)",
                "save_snapshot(args.snapshot, model, (optimizer, schedule), epoch)",
            ),
            (
                SAVED,
                '"optimizer": [part.state_dict() for part in optimizer], "epoch": epoch}\n',
            ),
            (
                LOADED,
                '    for part, state in zip(optimizer, snapshot["optimizer"], strict=True):\n'
                "        part.load_state_dict(state)\n",
            ),
        ),
        (),
        "a warm-up that counts steps, saved together with the optimizer; clipped values",
    ),
)

CORRECT = SPAWN_STYLES + TORCHRUN_STYLES + METRICS_STYLES + SINGLE_STYLES
