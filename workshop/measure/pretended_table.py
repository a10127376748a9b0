"""The table of ``workshop pretend``: the GPUs and their bytes, the copies and waits of each line, and what was refused."""

import os
from collections import defaultdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workshop.repository import ROOT

NOT_SHOWN = (
    "Pretended GPUs compute on the CPU. They do not show speed, overlap, races, memory that runs out, or kernels, and "
    "torch.compile does nothing."
)
# What a program can do with its GPUs, the most important first: kind of note -> what happened, and what to do about it.
KINDS = {
    "two-devices": ("refused: an operation with tensors on", "Move the model and each batch to the same device."),
    "same-gpu": ("refused: two ranks on one GPU:", "Call torch.accelerator.set_device_index(local_rank) first."),
    "cpu-tensor": (
        "refused: NCCL got a tensor on the CPU in",
        "Move it to the GPU of this rank before the collective.",
    ),
    "no-such-gpu": (
        "refused: the program asks for",
        "Choose the GPU by the local rank, which begins at 0 on each node.",
    ),
    "forked": (
        "refused: a forked process uses a GPU",
        "Use the start method spawn; use no GPU in workers of a DataLoader.",
    ),
    "numpy": ("refused: numpy() of a tensor on a GPU", "Copy it first: tensor.cpu().numpy()."),
    "generator": ("refused: a generator of the CPU for a tensor on a GPU", 'Create it with torch.Generator("cuda").'),
    "loaded-elsewhere": ("torch.load puts tensors on the GPU of another rank,", 'torch.load(..., map_location="cpu").'),
    "barrier": ("a barrier before the process has chosen its GPU", "NCCL has to guess the GPU: choose it first."),
    "not-seeded": ("random numbers of a GPU that has no seed,", "torch.manual_seed() seeds all GPUs of the process."),
    "wait": (
        "the CPU waits for the GPU",
        "Avoid this in each step: keep sums on the GPU, and read them once per epoch.",
    ),
    "wait-inside": (
        "a library waits for the GPU",
        'Harmless at the start. In each step of an optimizer: load it with torch.load(..., map_location="cpu").',
    ),
    "synchronize": ("the CPU waits for all work of the GPU", "Avoid this in each step. Time measurements need it."),
    "empty-cache": (
        "torch.cuda.empty_cache()",
        "Avoid this in each step: PyTorch then asks the driver for memory again.",
    ),
    "pageable-non-blocking": (
        "non_blocking copy to the GPU from memory that is not pinned",
        "It waits all the same: DataLoader(..., pin_memory=True).",
    ),
    "pageable": (
        "copy to the GPU from memory that is not pinned",
        "If it happens in each step: DataLoader(..., pin_memory=True), then .to(device, non_blocking=True).",
    ),
    "pinned": ("copy to the GPU from pinned memory", "The CPU waits. With .to(device, non_blocking=True) it does not."),
    "pinned-non-blocking": ("non_blocking copy to the GPU from pinned memory", "The CPU does not wait."),
    "to-cpu": (
        "non_blocking copy to the CPU",
        "Wait for it before you read the copy: torch.accelerator.synchronize().",
    ),
    "scaled": ("GradScaler.scale", "Only float16 needs it. It waits for the GPU in each step."),
    "loaded": ("torch.load puts tensors on", ""),
}


def print_table(reports: list[dict], gpus: int, nodes: int) -> None:
    """Print what the processes of a run did with their GPUs.

    Args:
        reports: what each process has reported; see ``pretended_processes.py``.
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
    kinds: defaultdict[tuple, defaultdict[str, dict]] = defaultdict(lambda: defaultdict(dict))
    for report in reports:
        for kind, detail, places in report["notes"]:
            for place, times in places.items():
                kinds[kind, detail][place][report["rank"]] = times
    for kind, detail in sorted(kinds, key=lambda each: (list(KINDS).index(each[0]), each[1])):
        what, advice = KINDS[kind]
        style = "bold red" if what.startswith("refused") else "bold"
        console.print(Text(f"\n{what} {detail}".rstrip(), style=style), soft_wrap=True)
        if advice:
            console.print(f"  {advice}", soft_wrap=True)
        for place, ranks in sorted(kinds[kind, detail].items(), key=lambda each: -sum(each[1].values())):
            console.print(f"  {_short(place)}: {_times(ranks, len(reports))}", soft_wrap=True)


def _times(ranks: dict[int, int], processes: int) -> str:
    """Return how often a line did something, and in which ranks."""
    times = "once" if (total := sum(ranks.values())) == 1 else f"{total} times"
    if processes == 1:
        return times
    if len(ranks) == processes:
        return f"{times}, all {processes} processes together"
    return f"{times}, rank {', '.join(map(str, sorted(ranks)))}"


def _short(place: str) -> str:
    """Return a line with the path of its file from the working folder or from the folder of the course, if it is in one."""
    for folder in (os.getcwd(), str(ROOT)):
        place = place.removeprefix(folder + os.sep)
    return place
