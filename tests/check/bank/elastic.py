"""The program of exercise 4 of slurm-multinode: parts that mistakes change, and mistakes that rules about restarts must name."""

from check.bank.case import mistake

ELASTIC = "solutions/slurm-multinode/exercise4_elastic.py"

# Parts of the program.
REST = "batches[first_step:]]\n"
STEP = '    first_step = checkpoint["step"]\n'
AGAIN = "        first_step = 0\n"
LOSS = 'labels.to(device), reduction="sum")\n            loss = loss * world_size / args.batch_size\n'
MEAN = "labels.to(device))\n"
BATCHES = "    return order.split(batch_size)[: samples // batch_size]\n"
ALONE = "    if dist.get_rank() > 0:\n        return\n"
FOUND = "    if not os.path.exists(path):\n"
LOADED = "    return checkpoint\n\n\nif __name__"
OPTIMIZER = '    optimizer.load_state_dict(checkpoint["optimizer"])\n'
SAVING = "            if (step + 1) % args.save_every == 0 or step + 1 == len(batches):\n"
# Parts of the runner.
RANGE, OWN = "--nnodes=1:3", "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n"
ID, ENDPOINT = "--rdzv-id=elastic", '--rdzv-endpoint="${ENDPOINT:-127.0.0.1:29400}"'

# The rules that name them belong to the family "restart".
RESTARTS = (
    mistake(
        "elastic-no-restart",
        ELASTIC,
        "not-restarted",
        "When a node leaves, the ranks of the others fail, and torchrun gives up.",
        runner=((" --max-restarts=100", ""),),
    ),
    mistake(
        "elastic-store-of-an-earlier-rank-0",
        ELASTIC,
        "store-shared",
        "The ranks look for the store of a node that has left.",
        runner=((OWN, ""),),
    ),
    mistake(
        "elastic-checkpoint-per-rank",
        ELASTIC,
        "resume-fails",
        "A third rank finds no file.",
        (ALONE, '    path = f"{path}-rank{dist.get_rank()}"\n'),
        (
            FOUND,
            '    path, first = f"{path}-rank{dist.get_rank()}", f"{path}-rank0"\n    if not os.path.exists(first):\n',
        ),
    ),
    mistake(
        "elastic-checkpoint-of-the-last-size",
        ELASTIC,
        "never-resumes",
        "Another number of ranks looks for a file of its own, and begins anew.",
        (ALONE, ALONE + '    path = f"{path}-{dist.get_world_size()}"\n'),
        (FOUND, '    path = f"{path}-{dist.get_world_size()}"\n' + FOUND),
    ),
    mistake(
        "elastic-other-size-refused",
        ELASTIC,
        "resume-fails",
        "The program insists on the number of ranks that saved.",
        ('"epoch": epoch, "step": step}', '"epoch": epoch, "step": step, "ranks": dist.get_world_size()}'),
        (LOADED, '    assert checkpoint["ranks"] == dist.get_world_size()\n' + LOADED),
    ),
    mistake(
        "elastic-optimizer-forgotten",
        ELASTIC,
        "optimizer-lost",
        "The moments of AdamW are not loaded.",
        (OPTIMIZER, ""),
    ),
    mistake(
        "elastic-saves-only-at-the-end",
        ELASTIC,
        "never-resumes",
        "A node that leaves costs the whole training.",
        (SAVING, "            if epoch + 1 == args.epochs and step + 1 == len(batches):\n"),
    ),
)
