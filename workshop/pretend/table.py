"""The table of ``workshop pretend``: the GPUs and their bytes, the copies and waits of each line, and what was refused."""

import os
from collections import defaultdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

NOT_SHOWN = (
    "Pretended GPUs compute on the CPU. They do not show speed, overlap, races, memory that runs out, or kernels, and "
    "torch.compile does nothing."
)
# What a program can do with its GPUs, the most important first: the start of a note -> what to do about it.
ADVICE = {
    "refused: tensors": "Move the model and each batch to the same device.",
    "refused: ranks": "Call torch.accelerator.set_device_index(local_rank) before the first use of a GPU.",
    "refused: NCCL got": "Move the tensor to the GPU of this rank before the collective.",
    "loaded to GPU": 'Load with torch.load(..., map_location="cpu"): each process then copies to its own GPU.',
    "barrier before": "Call torch.accelerator.set_device_index(local_rank) first. NCCL has to guess the GPU otherwise.",
    "the CPU waits for the GPU": "Avoid this in each step: keep sums on the GPU, and read them once per epoch.",
    "the CPU waits for all": "Avoid this in each step. Time measurements need it.",
    "torch.cuda.empty_cache()": "Avoid this in each step: PyTorch then asks the driver for the same memory again.",
    "copy to the GPU from pageable memory, non_blocking": "It waits all the same: DataLoader(..., pin_memory=True).",
    "copy to the GPU from pageable": "If it happens in each step: DataLoader(..., pin_memory=True), then "
    ".to(device, non_blocking=True).",
    "copy to the GPU from pinned memory, non_blocking": "The CPU does not wait.",
    "copy to the GPU from pinned": "The CPU waits. With .to(device, non_blocking=True) it does not.",
    "copy to the CPU, asynchronous": "Wait for it before you read the copy: torch.accelerator.synchronize().",
}


def print_table(reports: list[dict], gpus: int, nodes: int) -> None:
    """Print what the processes of a run did with their GPUs.

    Args:
        reports: what each process has reported; see ``processes.py``.
        gpus: pretended GPUs per node.
        nodes: simulated nodes.
    """
    console = Console(highlight=False)
    console.print()
    if not reports:
        console.print("No process has used a pretended GPU.")
    else:
        console.print(_gpus(reports, gpus, nodes))
        _print_lines(console, reports)
    console.print(f"\n{NOT_SHOWN}", style="dim")


def _gpus(reports: list[dict], gpus: int, nodes: int) -> Table:
    """Return the table of the GPUs: bytes at the peak, and the ranks that used them."""
    table = Table(box=None, pad_edge=False)
    for name in (["node"] if nodes > 1 else []) + ["pretended GPU", "peak of its tensors", "used by"]:
        table.add_column(name, justify="left" if name == "used by" else "right")
    used: defaultdict[tuple, list] = defaultdict(list)
    for report in reports:
        for index, size in report["peak"].items():
            used[report["node"], report["visible"][int(index)]].append((report["rank"], size))
    for node in range(nodes):
        for gpu in range(gpus):
            sizes = sorted(used[node, gpu])
            total = f"{sum(size for _, size in sizes) / 2**20:,.2f} MiB" if sizes else "0"
            ranks = ", ".join(f"rank {rank}" for rank, _ in sizes) or "no process"
            table.add_row(*([str(node)] if nodes > 1 else []), f"cuda:{gpu}", total, ranks)
    return table


def _print_lines(console: Console, reports: list[dict]) -> None:
    """Print what the lines of the program did: the most important kind first."""
    kinds: defaultdict[str, defaultdict[str, dict]] = defaultdict(lambda: defaultdict(dict))
    for report in reports:
        for what, places in report["notes"].items():
            for place, times in places.items():
                kinds[what][place][report["rank"]] = times
    order = list(ADVICE)
    for what in sorted(kinds, key=lambda what: (order.index(_key(what)), what)):
        console.print(Text(f"\n{what}", style="bold red" if what.startswith("refused") else "bold"), soft_wrap=True)
        console.print(f"  {ADVICE[_key(what)]}", soft_wrap=True)
        for place, ranks in sorted(kinds[what].items(), key=lambda each: -sum(each[1].values())):
            times = sum(ranks.values())
            if len(reports) == 1:
                who = ""
            elif len(ranks) == len(reports):
                who = f", all {len(reports)} processes together"
            else:
                who = ", rank " + ", ".join(map(str, sorted(ranks)))
            console.print(f"  {_short(place)}: {'once' if times == 1 else f'{times} times'}{who}", soft_wrap=True)


def _key(what: str) -> str:
    return next(start for start in ADVICE if what.startswith(start))


def _short(place: str) -> str:
    """Return FILE:LINE with the path from the working folder, if the file is below it."""
    file, _, line = place.rpartition(":")
    return f"{os.path.relpath(file)}:{line}" if file.startswith(os.getcwd() + os.sep) else place
