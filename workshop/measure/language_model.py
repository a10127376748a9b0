"""Measure what training a language model with DDP or FSDP costs: memory, tokens per second, and the time for communication.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 -m workshop.measure.language_model --batch-sizes 1 2 4 8

The model has the shapes of a known model and random parameters, so nothing is downloaded. The sizes of parameters, gradients and
optimizer state are those of the tensors in one process. Activations are the tensors that autograd keeps for the backward pass. On
a GPU, the allocator reports the peak. GPUs compute in bfloat16 (DDP with autocast, FSDP with its policy), CPUs in float32.
"""

import gc
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from workshop.errors import UserError
from workshop.measure.memory import known_sizes
from workshop.run.machine import machine
from workshop.tensors import kept_for_backward, own_part
from workshop.training.arguments import ArgumentParser, positive_int
from workshop.training.device import local_device, synchronized_time
from workshop.training.transformer import GIB, Sizes, peak_flops

STRATEGIES, OPTIONS = ("ddp", "fsdp"), ("checkpointing", "compile", "gathered", "float8")
TRACED = 2  # steps


def main() -> None:
    args = parse_arguments()
    # Otherwise the profiler reports at each start that it finds no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    device = local_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        rows = []
        for batch_size in args.batch_sizes:
            for way in args.ways:
                settings = {"batch_size": batch_size, "sequence_length": args.sequence_length}
                rows.append(measured(args.sizes, way, device, args.steps, **settings))
                if dist.get_rank() == 0 and args.steps:
                    print(line(rows[-1]), flush=True)
        if dist.get_rank() == 0:
            write(args, device, rows)
    finally:
        gc.collect()
        dist.destroy_process_group()


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-codellama", help="as for workshop memory: codellama-7b, a folder, ...")
    ways = "ddp or fsdp, each with any of +" + ", +".join(OPTIONS)
    parser.add_argument("--ways", nargs="+", default=["ddp", "fsdp", "fsdp+checkpointing"], help=ways)
    parser.add_argument(
        "--batch-sizes", nargs="+", type=positive_int, default=[4], help="sequences per step and process"
    )
    parser.add_argument("--sequence-length", type=positive_int, default=128, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=10, help="steps to time; 0: only count the memory")
    parser.add_argument("--output", default="runs/language_model", help="the folder for figures and picture")
    args = parser.parse_args()
    try:
        for way in args.ways:
            strategy, *options = way.split("+")
            if strategy not in STRATEGIES or not set(options) <= set(OPTIONS):
                raise UserError(f"--ways {way}: write {ways}")
            if "float8" in options and find_spec("torchao") is None:
                raise UserError(f"--ways {way}: float8 needs torchao: pip install torchao")
        args.sizes = known_sizes(args.model)
        if args.sequence_length > args.sizes.context:
            raise UserError(
                f"{args.model} takes sequences of up to {args.sizes.context:,} tokens, not {args.sequence_length:,}"
            )
    except UserError as error:
        parser.error(error)
    return args


def measured(sizes: Sizes, way: str, device, steps: int, **settings) -> dict:
    """Call ``measure``; if it needs more memory than the only GPU has, return a row that says so.

    With several processes, an out-of-memory error ends all of them, because the others would wait for the rank that failed.
    """
    row = {"way": way, "processes": dist.get_world_size(), **settings}
    try:
        row |= measure(sizes, way, device, steps, **settings)
    except torch.OutOfMemoryError:
        if dist.get_world_size() > 1:
            raise
        row["out_of_memory"] = True
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    return row


def measure(sizes: Sizes, way: str, device, steps: int, batch_size: int, sequence_length: int) -> dict:
    """Train for some steps, and return the memory of this process, and the throughput of all processes together.

    Args:
        sizes: the sizes of the model.
        way: "ddp" or "fsdp", optionally with "+checkpointing" (keep only the input of each layer), "+compile" (each layer),
            "+gathered" (FSDP keeps the gathered parameters between forward and backward pass) and "+float8" (see ``use_float8``).
        device: the device that trains.
        steps: the number of steps to time; 0: none.
        batch_size: sequences per step and process.
        sequence_length: tokens per sequence.

    Returns:
        Bytes: ``parameters``, ``gradients``, ``optimizer``, ``activations`` (None with compilation) and, on a GPU, ``peak``. With
        steps also ``tokens_per_second`` of all processes; ``mfu``, if the peak of the device is known; and two fractions of a
        step: ``communication``, the time of communication, including waiting for other processes, and ``exposed``, the part of it
        during which the GPU computes nothing (None on the CPU, where a trace does not show it).
    """
    strategy, *options = way.split("+")
    model = prepare(sizes, strategy, options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type != "cpu")
    wrapped = model if strategy == "fsdp" else DDP(model)
    batch = torch.randint(sizes.vocabulary, (batch_size, sequence_length), device=device)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type != "cpu" and strategy == "ddp")

    def step():
        with autocast():
            loss = wrapped(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats()
    with autocast(), nullcontext() if "compile" in options else kept_for_backward() as kept:
        loss = wrapped(input_ids=batch, labels=batch, use_cache=False).loss
    activations = kept and kept.bytes
    del kept
    loss.backward()
    gradients = sum(own_part(parameter.grad).nbytes for parameter in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    step()  # the first step in which the optimizer state exists
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    found = {
        "parameters": sum(own_part(parameter).nbytes for parameter in model.parameters()),
        "gradients": gradients,
        "optimizer": sum(own_part(value).nbytes for value in state),
        "activations": activations,
    }
    if device.type != "cpu":
        found["peak"] = torch.get_device_module(device).max_memory_allocated()
    if steps:
        rate, found["communication"], found["exposed"] = speed(step, steps, device)
        found["tokens_per_second"] = dist.get_world_size() * batch_size * sequence_length * rate
        if peak := peak_flops(device):
            each = found["tokens_per_second"] / dist.get_world_size()
            found["mfu"] = each * sizes.flops_per_token(sequence_length) / peak[0]
    return found


def prepare(sizes: Sizes, strategy: str, options: Sequence[str], device) -> LlamaForCausalLM:
    """Return the model with random parameters, sharded over the ranks if ``strategy`` is "fsdp"."""
    model = make_model(sizes)
    for layer in model.model.layers:
        if "float8" in options:
            use_float8(layer, device)
        if "checkpointing" in options:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if "compile" in options:
            layer.compile()
    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16 if device.type != "cpu" else None, reduce_dtype=torch.float32)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward="gathered" not in options)
    fill(model, device)
    return model


def use_float8(layer: torch.nn.Module, device) -> None:
    """Let the linear layers of a layer multiply in float8, which needs a GPU like H100 or MI300X; the CPU emulates it.

    Each matrix is scaled by its largest element just before the product. Compile the layer, because otherwise the scaling takes
    more time than the faster product saves.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(layer, config=Float8LinearConfig(emulate=device.type == "cpu"))


def make_model(sizes: Sizes) -> LlamaForCausalLM:
    """Return the model on the meta device, without memory for its parameters."""
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config(sizes))


def llama_config(sizes: Sizes, attention: str = "sdpa") -> LlamaConfig:
    """Return the configuration for transformers.

    Args:
        sizes: the sizes of the model.
        attention: the implementation of the attention, as transformers names it.
    """
    return LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head,
        tie_word_embeddings=sizes.tied,
        attn_implementation=attention,
    )


@torch.no_grad()
def fill(model: LlamaForCausalLM, device) -> None:
    """Allocate memory for the model, and fill the parameters, or the shard of this rank, with random values."""
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    for parameter in model.parameters():
        own_part(parameter).normal_(std=0.02)


def speed(step, steps: int, device) -> tuple[float, float, float | None]:
    """Time steps, then trace a few (slower) ones; return steps per second and the fractions ``communication`` and ``exposed``."""
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = synchronized_time(device)
        step()
        seconds.append(synchronized_time(device) - start)
    with profile() as trace:
        start = synchronized_time(device)
        for _ in range(TRACED):
            step()
        traced = (synchronized_time(device) - start) * 1e6  # in microseconds, as the trace counts
    return 1 / statistics.median(seconds), *shares(trace.events(), traced)


def shares(events: Iterable, traced: float) -> tuple[float, float | None]:
    """Return the fractions ``communication`` and ``exposed`` of the traced microseconds, given the events of the profiler."""
    communicating, computing = [], []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.device_type != DeviceType.CPU:
            # An annotation of the GPU, such as FSDP's "FSDP::all_gather", contains kernels and the gaps between them.
            if not event.is_user_annotation:  # a kernel or a copy
                (communicating if event.name.startswith("nccl") else computing).append(span)
        elif event.name.startswith("gloo:"):
            communicating.append(span)
    # The time of communication or computation, minus the time of computation.
    exposed = (covered([*communicating, *computing]) - covered(computing)) / traced
    return covered(communicating) / traced, exposed if computing else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that spans (start, end) cover together; where several overlap, it counts once."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def line(row: dict) -> str:
    """Return the line that is printed for a row."""
    text = f"{row['way']:28} batch {row['batch_size']:3}: "
    if row.get("out_of_memory"):
        return text + "out of memory"
    text += f"{row['tokens_per_second']:12,.0f} tokens/s"
    text += f", MFU {row['mfu']:5.1%}" if "mfu" in row else ""
    if "peak" in row:
        text += f", peak {row['peak'] / GIB:6.1f} GiB"
    text += f", communication {row['communication']:4.0%} of a step"
    return text + ("" if row["exposed"] is None else f", {row['exposed']:4.0%} without overlap")


def write(args, device, rows: list[dict]) -> None:
    """Write the figures, and with steps the picture."""
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    peak = peak_flops(device)
    result = {
        "machine": machine(),
        "command": f"torchrun --standalone --nproc-per-node={dist.get_world_size()} -m workshop.measure.language_model "
        + " ".join(sys.argv[1:]),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "model": args.model,
        "parameters": args.sizes.parameters,
        "device": device.type,
        "peak": peak and {"flops": peak[0], "device": peak[1]},
        "rows": rows,
    }
    (folder / "language_model.json").write_text(json.dumps(result, indent=1) + "\n")
    if args.steps:
        plot(folder / "language_model.png", result, args.sequence_length)


def plot(path: Path, result: dict, sequence_length: int) -> None:
    """Draw tokens per second against the batch size, and the memory of each way with the largest batch that fits for all."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files; needs no screen
    import matplotlib.pyplot as plt

    from workshop.measure.plots import COLOURS

    rows = [row for row in result["rows"] if not row.get("out_of_memory")]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), facecolor="white", layout="constrained")
    count = result["rows"][0]["processes"]
    figure.suptitle(
        f"{result['model']}, {result['parameters'] / 1e6:,.0f} million parameters, sequences of {sequence_length:,} tokens, "
        f"{count} process{'es' * (count > 1)} ({result['device']})"
    )
    for way, colour in zip(ways, COLOURS, strict=False):
        series = {row["batch_size"]: row["tokens_per_second"] for row in rows if row["way"] == way}
        left.plot(list(series), list(series.values()), marker="o", label=way, color=colour)
    left.set(xlabel="sequences per step and process", ylabel="tokens/s, all processes together", ylim=(0, None))
    left.set_xscale("log", base=2)
    left.set_xticks(sizes := sorted({row["batch_size"] for row in rows}), [str(size) for size in sizes])
    left.legend()
    common = max(size for size in sizes if len([row for row in rows if row["batch_size"] == size]) == len(ways))
    bottom = [0.0] * len(ways)
    for part, colour in zip(("parameters", "gradients", "optimizer", "activations"), COLOURS, strict=False):
        held = {row["way"]: (row[part] or 0) / 1e6 for row in rows if row["batch_size"] == common}
        right.bar(range(len(ways)), [held[way] for way in ways], 0.7, bottom=bottom, label=part, color=colour)
        bottom = [low + held[way] for low, way in zip(bottom, ways, strict=True)]
    right.set_xticks(range(len(ways)), [way.replace("+", "\n+") for way in ways], fontsize=8)
    right.set(ylabel="MB in each process", title=f"Memory with {common} sequences (compiled: without activations)")
    right.legend()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
