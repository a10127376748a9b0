"""The rules about processes: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, gpus, lightning, zero
from check.bank.case import mistake, part, style
from check.bank.cases import bank_tests

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

MISTAKES = (
    # ---- no-group
    mistake(
        "each-process-alone",
        ddp.SPAWN,
        "no-group",
        "mp.spawn only starts the processes: each trains a model of its own on its share.",
        ("    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)\n", ""),
        ("        dist.destroy_process_group()\n", "        pass\n"),
        (ddp.WRAPPED, "ddp_model = model"),
        (ddp.SAMPLER, "    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)\n"),
        ("disable=dist.get_rank() > 0 or None", "disable=None"),
        (ddp.REDUCE_LOSSES, ""),
        ("    dist.all_reduce(correct_and_total)\n", ""),
    ),
    mistake(
        "accelerate-one-process-each",
        zero.ACCELERATE,
        ("no-group", "several-print", "two-writers"),
        "Without an Accelerator each process trains a model of its own.",
        (
            "accelerator = Accelerator(",
            "os.environ.pop('WORLD_SIZE'); os.environ.pop('LOCAL_RANK'); accelerator = Accelerator(",
        ),
    ),
    # ---- wrong-group
    mistake(
        "each-a-group-of-one",
        ddp.SPAWN,
        "wrong-group",
        "rank=0, world_size=1 is left from a test with one process, so each process is a group by itself.",
        (
            "init_process_group(backend, store=store, rank=rank, world_size=world_size)",
            "init_process_group(backend, store=store, rank=0, world_size=1)",
        ),
    ),
    mistake(
        "world-size-literal",
        ddp.TORCHRUN,
        ("wrong-group", "hang"),
        "The number of processes is that of another machine: two processes wait for four.",
        ("dist.init_process_group(backend)", "dist.init_process_group(backend, rank=rank, world_size=4)"),
    ),
    mistake(
        "lightning-one-device",
        lightning.MNIST,
        "wrong-group",
        "The Trainer takes one device, however many processes were started.",
        (lightning.DEVICES, "        devices=1,\n"),
    ),
    mistake(
        "lightning-processes-always-by-lightning",
        lightning.CIFAR10,
        "wrong-group",
        "Each of srun's tasks starts another process and trains with it; torchrun's do not, because LOCAL_RANK is set.",
        (lightning.PLUGINS, "        plugins=[LightningEnvironment()],\n"),
        real=True,
    ),
    # ---- address-overwritten
    mistake(
        "address-overwritten",
        ddp.TORCHRUN,
        ("address-overwritten", "port-fixed"),
        "Two lines of an mp.spawn tutorial set a port where no store listens.",
        (
            "    dist.init_process_group(backend)\n",
            '    os.environ["MASTER_ADDR"] = "localhost"\n'
            '    os.environ["MASTER_PORT"] = "12355"\n'
            "    dist.init_process_group(backend)\n",
        ),
        real=True,
    ),
    # ---- device-index
    mistake(
        "rank-as-device-index",
        ddp.TORCHRUN,
        "device-index",
        "The global rank picks the device: right on the first machine, out of range on the second.",
        ('int(os.environ["LOCAL_RANK"])', 'int(os.environ["RANK"])'),
        ("set_device_index(local_rank % torch.accelerator.device_count())", "set_device_index(local_rank)"),
    ),
    # ---- device-shared
    mistake(
        "all-ranks-use-device-0",
        ddp.SPAWN,
        "device-shared",
        "The index is that of the only device of stage 01.",
        ("set_device_index(local_rank)", "set_device_index(0)"),
    ),
    mistake(
        "no-rank-chooses-a-device",
        ddp.SPAWN,
        "device-shared",
        "Without an index, each process uses the first device.",
        ("    torch.accelerator.set_device_index(local_rank)\n", ""),
    ),
    # ---- backend-fixed
    mistake(
        "gloo-for-gpus",
        ddp.SPAWN,
        "backend-fixed",
        "The backend of the machine without a GPU is written into the program.",
        ("backend = dist.get_default_backend_for_device(device)", 'backend = "gloo"'),
    ),
    # ---- port-fixed
    mistake(
        "fixed-port",
        ddp.SPAWN,
        "port-fixed",
        "With the address and port of the PyTorch tutorial a second run on the machine fails with EADDRINUSE.",
        (
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
    # ---- not-destroyed
    mistake(
        "group-never-destroyed",
        ddp.TORCHRUN,
        "not-destroyed",
        "The program ends without destroying its group, which is a hint.",
        ("        dist.destroy_process_group()\n", "        pass\n"),
    ),
    # ---- what only the runner shows
    mistake(
        "runner-of-one-process",
        ddp.TORCHRUN,
        "no-group",
        "The runner starts one process.",
        real=True,
        runner=(('--nproc-per-node="$nproc"', "--nproc-per-node=1"),),
    ),
    # ---- rank-of-node
    mistake(
        "local-rank-as-rank",
        gpus.GPUS,
        "rank-of-node",
        "On a second machine, two processes are rank 0, and none is rank 2.",
        (gpus.GROUP, '    dist.init_process_group("nccl", rank=local_rank, world_size=world_size)\n'),
    ),
    # ---- device-index, in a program for GPUs
    mistake(
        "set-device-by-rank",
        gpus.GPUS,
        "device-index",
        "On a second node the ranks begin at 2, but the GPUs at 0.",
        (gpus.SET_DEVICE, "    torch.cuda.set_device(rank)\n"),
        (gpus.DEVICE, '    device = torch.device("cuda", rank)\n'),
        (gpus.WRAP, "DistributedDataParallel(model, device_ids=[rank])"),
    ),
    mistake(
        "gpu-numbers-begin-at-1",
        gpus.GPUS,
        "device-index",
        "The number of a GPU begins at 0, so the last process asks for a GPU that does not exist.",
        (gpus.SET_DEVICE, "    torch.cuda.set_device(local_rank + 1)\n"),
        (gpus.DEVICE, '    device = torch.device("cuda", local_rank + 1)\n'),
        (gpus.WRAP, "DistributedDataParallel(model, device_ids=[local_rank + 1])"),
    ),
)

STYLES = (
    style(
        "devices-in-reverse",
        ddp.SPAWN,
        "Each rank uses a device of its own, but not the one with its own number.",
        ("set_device_index(local_rank)", "set_device_index(torch.accelerator.device_count() - 1 - local_rank)"),
    ),
    style(
        "context-process-instead-of-spawn",
        ddp.SPAWN,
        "mp.get_context('spawn').Process starts the processes, and the program watches them.",
        (ddp.MAIN, CONTEXT_PROCESS),
    ),
    style(
        "spawn-joined-later",
        ddp.SPAWN,
        "spawn(join=False) and context.join() start and end the processes.",
        (
            ddp.SPAWN_CALL,
            "    context = mp.spawn(worker, args=(args.nproc, store.port, args), nprocs=args.nproc, join=False)\n"
            "    while not context.join(timeout=1):\n"
            "        pass\n",
        ),
    ),
    style(
        "start-processes-forkserver",
        ddp.SPAWN,
        "A fork server starts the processes, so their parent is not the script.",
        (
            ddp.SPAWN_CALL,
            "    mp.start_processes(\n"
            "        worker, args=(args.nproc, store.port, args), nprocs=args.nproc, start_method='forkserver'\n"
            "    )\n",
        ),
    ),
    style(
        "file-store",
        ddp.SPAWN,
        "init_method='file://...' in a temporary folder needs no port.",
        (ddp.IMPORTS, ddp.IMPORTS.replace("import time", "import tempfile\nimport time")),
        (
            ddp.MAIN,
            "    with tempfile.TemporaryDirectory() as folder:\n"
            '        mp.spawn(worker, args=(args.nproc, f"file://{folder}/store", args), nprocs=args.nproc)\n',
        ),
        ("def worker(rank, world_size, port, args):\n", "def worker(rank, world_size, address, args):\n"),
        (ddp.STORE, ""),
        (ddp.SPAWN_INIT, ddp.SPAWN_INIT.replace("store=store", "init_method=address")),
    ),
    style(
        "address-in-the-environment",
        ddp.SPAWN,
        "MASTER_ADDR and MASTER_PORT are set as in the tutorial, with a free port from the system.",
        (ddp.IMPORTS, ddp.IMPORTS.replace("import time", "import socket\nimport time")),
        (ddp.MAIN, FREE_PORT),
        ("def worker(rank, world_size, port, args):\n", "def worker(rank, world_size, args):\n"),
        (ddp.STORE, ""),
        (ddp.SPAWN_INIT, ddp.SPAWN_INIT.replace("store=store", 'init_method="env://"')),
    ),
    style(
        "ranks-from-the-group",
        ddp.TORCHRUN,
        "Rank, world size and local rank come from torch, and no backend is named.",
        (
            ddp.RANKS,
            '    dist.init_process_group(init_method="env://")  # no backend: the one of each device\n'
            "    rank, world_size = dist.get_rank(), dist.get_world_size()\n"
            "    device = choose_device(dist.get_node_local_rank())\n",
        ),
        (part(ddp.TORCHRUN, "    backend = dist.get_default", "    try:\n"), ""),
    ),
    style(
        "device-by-remainder",
        ddp.TORCHRUN,
        "choose_device() takes rank % device_count(), which is right where each machine runs one process per device.",
        (
            '    device = choose_device(int(os.environ["LOCAL_RANK"]))\n',
            "    device = choose_device(rank)\n",
        ),
    ),
    style(
        "group-left-at-exit",
        ddp.TORCHRUN,
        "atexit destroys the group.",
        (ddp.IMPORTS.replace("time\n", ""), "import atexit\n" + ddp.IMPORTS.replace("time\n", "")),
        (
            part(ddp.TORCHRUN, "    dist.init_process_group(backend)", "\n\ndef parse_arguments"),
            "    dist.init_process_group(backend)\n"
            "    atexit.register(leave_group)\n"
            "    train(rank, world_size, device, args)\n"
            "\n\n"
            "def leave_group():\n"
            "    dist.destroy_process_group()\n",
        ),
    ),
    style(
        "group-as-context-manager",
        ddp.TORCHRUN,
        "A context manager joins and destroys the group, without a backend and with a timeout.",
        ("import time\n", "import time\nfrom contextlib import contextmanager\nfrom datetime import timedelta\n"),
        (ddp.GROUP, GROUP_AS_CONTEXT),
    ),
    style(
        "lightning-style-strategy-auto",
        lightning.MNIST,
        "Lightning chooses the strategy.",
        (lightning.STRATEGY, '        strategy="auto",\n'),
    ),
    style(
        "lightning-style-strategy-object",
        lightning.MNIST,
        "The strategy is a DDPStrategy object.",
        (lightning.STRATEGY, '        strategy=DDPStrategy(process_group_backend="gloo"),\n'),
        ("import torch\n", "import torch\nfrom lightning.pytorch.strategies import DDPStrategy\n"),
    ),
    style(
        "lightning-style-launcher-by-rank",
        lightning.CIFAR10,
        "TorchElasticEnvironment.detect() recognizes torchrun.",
        ('if "TORCHELASTIC_RUN_ID" in os.environ:', "if TorchElasticEnvironment.detect():"),
    ),
    style(
        "runner-without-exec",
        ddp.TORCHRUN,
        "The shell of the runner stays, and waits for torchrun.",
        real=True,
        runner=(('exec "$PYTHON" -P', '"$PYTHON" -P'),),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
