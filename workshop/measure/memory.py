"""``workshop memory``: predict the memory per GPU for training a model from its sizes, and measure it if this machine can."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from workshop.errors import UserError
from workshop.plan.report import memory_error_line
from workshop.plan.strategies import PARTS, SAME_ON_ANY_NUMBER, predictions
from workshop.training.memory import estimate
from workshop.training.transformer import GIB, MODELS, Sizes, read_sizes

# The memory of GPUs in GB, with examples for each size.
CARDS = {40: "A100-40", 64: "A100-64, MI250X", 80: "A100-80, H100", 96: "GH200", 141: "H200", 180: "B200"}


def known_sizes(model: str) -> Sizes:
    """Return the sizes of a model, given its name ("codellama-7b", ..., "tiny-codellama"), its folder or its ``config.json``.

    Raises:
        UserError: there is no such model.
    """
    if model in MODELS:
        return MODELS[model]
    from workshop.data.codellama import TINY, model_folder

    if model == TINY:
        return read_sizes(model_folder(TINY))
    if not Path(model).is_dir() and Path(model).suffix != ".json":
        raise UserError(f"there is no model {model}: name a folder, or one of: {', '.join(MODELS)}, {TINY}")
    return read_sizes(model)


def run_memory(
    model: str, batch_size: int, sequence_length: int | None, gpus: str, measure: bool = False, output: str = ""
) -> int:
    """Print the predicted memory of each strategy, draw it beside the memory of common GPUs, and measure it if requested.

    Args:
        model: a name or folder for ``known_sizes``.
        batch_size: sequences per step and GPU.
        sequence_length: tokens per sequence; None: 2,048, or the maximum of the model if that is less.
        gpus: the numbers of GPUs, separated by commas.
        measure: whether to train two steps with this model on this machine, and compare.
        output: the folder for memory.json and memory.png; "": runs/memory-MODEL in the repository.

    Returns:
        The exit status, 0.

    Raises:
        UserError: the model is unknown or does not accept such long sequences, or measuring failed.
    """
    from rich.console import Console

    from workshop.repository import open_folder, require_stages

    sizes = known_sizes(model)
    sequence_length = sequence_length or min(2048, sizes.context)
    if sequence_length > sizes.context:
        raise UserError(f"{model} takes sequences of up to {sizes.context:,} tokens, not {sequence_length:,}")
    try:
        counts = sorted({int(count) for count in gpus.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise UserError(f"--gpus {gpus}: give whole numbers of at least 1, separated by commas")
    name = Path(model).name
    folder = open_folder(output or require_stages() / "runs" / f"memory-{name}")
    settings = {"batch_size": batch_size, "sequence_length": sequence_length}
    console = Console(highlight=False)
    rows = predictions(sizes, counts, settings)
    show(console, name, sizes, rows, settings)
    summary = {"model": name, "parameters": sizes.parameters, **settings, "predicted": rows}
    if measure:
        summary["measured"] = measure_here(console, model, sizes, settings)
    (folder / "memory.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(folder / "memory.png", f"{name}: a step with {batch_size} x {sequence_length:,} tokens on each GPU", rows)
    shown = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else folder
    console.print(f"figures and picture: {shown}/memory.json and memory.png")
    return 0


def smallest_card(total: float) -> str:
    """Return the memory in GB of the smallest GPU with room for ``total`` bytes, or "-"."""
    return next((str(size) for size in CARDS if total <= size * 1e9), "-")


def show(console, name: str, sizes: Sizes, rows: list[dict], settings: dict) -> None:
    """Print the table of ``predictions``."""
    unit, divisor = ("GB", 1e9) if sizes.parameters > 1e8 else ("MB", 1e6)
    console.print(f"{name}: {sizes.parameters:,} parameters, trained with AdamW")
    console.print(
        f"with {settings['batch_size']} x {settings['sequence_length']:,} tokens per step, predicted {unit} on each GPU:\n"
    )
    line = "{:7}{:>5}{:>9}{:>7}{:>7}{:>8}{:>7}{:>11}{:>11}{:>9}"
    console.print(
        line.format("", "GPUs", "params", "grads", "AdamW", "activ.", "other", "total", "recompute", "offload"),
        soft_wrap=True,
    )
    for row in rows:
        parts = [row[part] for part in ("parameters", "gradients", "optimizer", "activations")]
        parts.append(row["exchange"] + row["temporary"] + row["allocator"])
        totals = [row[key] for key in ("total", "with_checkpointing", "with_checkpointing_and_offload")]
        cells = [f"{total / divisor:,.0f} ({smallest_card(total)})" for total in totals]
        count = row["gpus"]
        if row["strategy"] in SAME_ON_ANY_NUMBER:
            count, cells[2] = "any", ""
        figures = (f"{part / divisor:,.1f}" for part in parts)
        console.print(line.format(row["strategy"], count, *figures, *cells), soft_wrap=True)
    console.print(
        "\nIn brackets: the memory of the smallest GPU that is large enough, in GB.\n"
        "other: DDP's buckets, the layers that FSDP and ZeRO-3 gather, temporary tensors,\n"
        "  and an assumed 5 % and 1.5 GiB for allocator and libraries.\n"
        "total: the most at one time. This is less than the sum of the parts, because\n"
        "  gradients are complete only when the backward pass has freed the activations.\n"
        "recompute: with activation checkpointing. offload: also with parameters,\n"
        "  gradients and optimizer state in CPU memory (ZeRO-1 and 2: optimizer state)." + memory_error_line()
    )


def plot(path: Path, title: str, rows: list[dict]) -> None:
    """Draw a bar of stacked parts for each row, marks for the most at one time, and a line for each size of GPU."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files; needs no screen
    import matplotlib.pyplot as plt

    from workshop.measure.plots import COLOURS

    figure, axes = plt.subplots(figsize=(max(7, 0.62 * len(rows) + 2), 5.2), facecolor="white", layout="constrained")
    figure.suptitle(title)
    names = [f"{row['strategy']}\n{'any' if row['strategy'] in SAME_ON_ANY_NUMBER else row['gpus']}" for row in rows]
    bottom = [0.0] * len(rows)
    for part, colour in zip(PARTS, COLOURS, strict=False):
        values = [row[part] / 1e9 for row in rows]
        axes.bar(range(len(rows)), values, 0.8, bottom=bottom, label=part, color=colour)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    totals = [row["total"] / 1e9 for row in rows]
    axes.scatter(
        range(len(rows)), totals, marker="_", color="black", s=220, zorder=3, label="total: the most at one time"
    )
    less = [row["with_checkpointing"] / 1e9 for row in rows]
    axes.scatter(
        range(len(rows)), less, marker="D", color="black", s=22, zorder=3, label="total with activation checkpointing"
    )
    top = max(bottom) * 1.12
    for size, card in CARDS.items():
        if size <= top:
            axes.axhline(size, color="grey", linewidth=0.8, linestyle="dashed", zorder=0)
            axes.text(len(rows) - 0.45, size, f"{size} GB ({card})", va="center", fontsize=8)
    axes.set_xticks(range(len(rows)), names, fontsize=8)
    axes.set(ylabel="GB on each GPU", xlabel="strategy, and number of GPUs", ylim=(0, top))
    axes.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def measure_here(console, model: str, sizes: Sizes, settings: dict) -> list[dict]:
    """Train two steps with DDP and with FSDP on the GPUs of this machine, or with two processes on the CPU, and compare.

    Raises:
        UserError: a run failed. Runs for which this machine has too little memory are skipped.
    """
    import psutil
    from rich.table import Table

    from workshop.run.machine import gpus
    from workshop.training.device import gpu_memory

    available = gpus()
    count = available or 2
    here = gpu_memory(0) if available else psutil.virtual_memory().available / count
    rows, skipped = {}, []
    for name, strategy in (("DDP", "ddp"), ("FSDP", "fsdp")):
        for checkpointing in (False, True):
            predicted = estimate(
                sizes,
                strategy,
                count,
                bf16=bool(available),
                checkpointing=checkpointing,
                on_gpu=bool(available),
                **settings,
            )
            label = name + (", recompute" if checkpointing else "")
            if predicted.total > here:
                skipped.append(f"{label} ({predicted.total / GIB:,.1f} GiB)")
                continue
            way = strategy + ("+checkpointing" if checkpointing else "")
            rows[way] = {"strategy": label, "processes": count, "predicted": asdict(predicted)}
    found = _measured(model, list(rows), settings, count)
    skipped += [rows[way]["strategy"] for way, row in found.items() if row.get("out_of_memory")]
    rows = [rows[way] | {"measured": row} for way, row in found.items() if not row.get("out_of_memory")]
    table = Table(title=f"MB in each of {count} processes, predicted / measured")
    for column in ("", "parameters", "gradients", "optimizer", "activations", "peak"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        cells = [
            f"{row['predicted'][part] / 1e6:,.1f} / {row['measured'][part] / 1e6:,.1f}"
            for part in ("parameters", "gradients", "optimizer", "activations")
        ]
        peak = row["measured"].get("peak")
        predicted = row["predicted"]["peak"]
        table.add_row(row["strategy"], *cells, f"{predicted / 1e6:,.1f} / {peak / 1e6:,.1f}" if peak else "-")
    console.print(table)
    for line in skipped:
        console.print(f"not measured, because this machine has too little memory: {line}")
    return rows


def _measured(model: str, ways: list[str], settings: dict, count: int) -> dict[str, dict]:
    """Return the memory that language_model.py measures with ``count`` processes, for each of the ways."""
    from workshop.plan.here import train

    if not ways:
        return {}
    model = os.path.abspath(model) if os.path.isdir(model) else model
    options = [f"--model={model}", "--steps=0", f"--sequence-length={settings['sequence_length']}"]
    options += ["--batch-sizes", str(settings["batch_size"]), "--ways", *ways]
    return {row["way"]: row for row in train(count, options)}
