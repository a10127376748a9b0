"""``workshop bench --card``: measure this machine as a card that ``workshop plan --gpu here`` can plan for."""

import json
import statistics
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.measure.bench import run_collectives
from workshop.plan.cards import HERE
from workshop.run.machine import cores, gpus, machine
from workshop.training.device import gpu_memory, local_device, synchronized_time

ROUNDS = 5


def run_card(processes: str = "", output: str = "") -> int:
    """Measure products by shape, memory bandwidth and collectives, and write a card; returns the exit status.

    A plan counts two bytes for each number. The CPU computes in float32, so its bandwidths count half.

    Args:
        processes: the number of processes that communicate; "": one per GPU, or 2 on the CPU.
        output: the file, as TOML; "": the one that ``workshop plan --gpu here`` reads.

    Raises:
        UserError: the measurement of the collectives failed, or the file cannot be written.
    """
    device = local_device()
    on_gpu = device.type != "cpu"
    count = int(processes) if processes else max(2, gpus())
    if not on_gpu:
        torch.set_num_threads(max(1, cores() // count))
    shapes = rates(device, [256, 512, 1024, 2048, *([4096, 8192] if on_gpu else [])])
    for (rows, inner, columns), rate in shapes.items():
        print(f"product of {rows:,} x {inner:,} and {inner:,} x {columns:,}: {rate / 1e9:,.0f} GFLOP/s")
    best = max(shapes.values())
    attention = attention_rate(device, 4096 if on_gpu else 1024)
    bandwidth = copy_rate(device, 2**30 if on_gpu else 2**27) * (1 if on_gpu else 0.5)
    print(f"attention: {attention / best:.0%} of the best product; memory: {bandwidth / 1e9:,.1f} GB/s")
    rate, latency = link(count)
    rate *= 1 if on_gpu else 0.5
    print(f"link: {rate / 1e9:,.2f} GB/s, {latency * 1e6:,.0f} microseconds")
    import psutil

    name = torch.cuda.get_device_name(device) if on_gpu else f"one of {count} processes on {machine()['processor']}"
    memory = gpu_memory(0) if on_gpu else psutil.virtual_memory().total / count
    values = {
        "name": json.dumps(name),
        "bf16": best,
        "fp8": 0.0,
        "memory": float(memory),
        "memory_bandwidth": bandwidth,
        "power": 0,
        "link": rate,
        "gpus_per_node": count,
        "network": '"here"',
        "rate": rate,
        "latency": latency,
        "matmul": 1.0,
        "attention": min(1.0, attention / best),
        "source": f"[{json.dumps('workshop bench --card, torch ' + torch.__version__)}]",
        "date": date.today().isoformat(),
    }
    path = Path(output) if output else HERE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(f"{key} = {value}\n" for key, value in values.items()))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    print(f"written: {path}" + ("" if output else "; now use workshop plan --gpu here"))
    return 0


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call, after one that is not counted."""
    found = []
    for _ in range(ROUNDS + 1):
        begin = synchronized_time(device)
        call()
        found.append(synchronized_time(device) - begin)
    return statistics.median(found[1:])


def rates(device: torch.device, sizes: list[int]) -> dict[tuple[int, int, int], float]:
    """Return the operations per second of products by shape: square, and with few rows or a short inner dimension."""
    found = {}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for size in sizes:
        for shape in ((size, size, size), (size // 4, size, size), (size, size // 4, size)):
            left = torch.randn(shape[0], shape[1], device=device, dtype=dtype)
            right = torch.randn(shape[1], shape[2], device=device, dtype=dtype)
            found[shape] = 2 * shape[0] * shape[1] * shape[2] / seconds(lambda a=left, b=right: a @ b, device)
    return found


def attention_rate(device: torch.device, tokens: int) -> float:
    """Return the operations per second of causal attention, forward and backward, with 8 heads of size 64."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    parts = [torch.randn(1, 8, tokens, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]

    def step() -> None:
        torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()

    return 3.5 * 2 * tokens * tokens * 8 * 64 / seconds(step, device)


def copy_rate(device: torch.device, size: int) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def link(processes: int) -> tuple[float, float]:
    """Return bytes per second and seconds of latency between processes: the alpha-beta model of an all-reduce.

    Raises:
        UserError: measuring failed.
    """
    if processes < 2:
        return 1e12, 0.0
    with tempfile.TemporaryDirectory(prefix="workshop-card-") as scratch:
        if run_collectives(str(processes), scratch) != 0:
            raise UserError("measuring the collectives failed; the lines above say why")
        rows = json.loads((Path(scratch) / "collectives.json").read_text())["rows"]
    rows = [row for row in rows if row["collective"] == "all_reduce"]
    largest, smallest = max(rows, key=lambda row: row["bytes"]), min(rows, key=lambda row: row["bytes"])
    # A ring of n processes has 2 (n - 1) steps.
    return largest["bus_bandwidth"], smallest["seconds"] / (2 * (processes - 1))
