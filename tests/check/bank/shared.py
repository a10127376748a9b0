"""Programs that pass a tensor to mp.spawn, which shares its memory between the processes."""

from check.bank import ddp
from check.bank.case import mistake, style

PASSED = ("args=(args.nproc, store.port, args)", "args=(args.nproc, store.port, args, torch.ones(1))")
TAKEN = ("def worker(rank, world_size, port, args):", "def worker(rank, world_size, port, args, scale):")
OPENED = '    store = dist.TCPStore("127.0.0.1", port, is_master=False)\n'

MISTAKES = (
    mistake(
        "argument-of-spawn-changed-in-place",
        ddp.SPAWN,
        "shared-changed",
        "Each process doubles the same tensor, which is in shared memory.",
        PASSED,
        TAKEN,
        (OPENED, f"{OPENED}    scale *= 2\n"),
    ),
)

STYLES = (
    style(
        "argument-of-spawn-is-only-read",
        ddp.SPAWN,
        "Each process computes a tensor of its own from the shared one.",
        PASSED,
        TAKEN,
        (OPENED, f"{OPENED}    scale = scale * 2\n"),
    ),
)
