"""Run ``workshop strategies``: train one model with every strategy, compare the costs, and say which strategy to use.

The programs in ``strategies/`` train the same model on the same global batches. Each reports its losses, its time, the memory
of the tensors in each process and the bytes that a process sends. The results are a picture, a table and a page with rules.
"""

import ast
import difflib
import importlib.util
import itertools
import json
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workshop.files import write_atomically
from workshop.repository import ROOT, open_folder, require_stages
from workshop.run.environment import environment, torchrun, why_hidden
from workshop.run.failures import first_failure
from workshop.run.machine import gpus, machine
from workshop.run.processes import launch

FOLDER = "strategies"
MIB = 2**20


@dataclass(frozen=True)
class Strategy:
    """A way to train.

    Attributes:
        name: its name in tables.
        script: its script in ``strategies/``.
        options: the options of the script.
        before: the script that it is compared with; "" for the first strategy.
        package: the package that it needs.
        refuses_float64: whether it fails with float64 (deepspeed.zero.Init accepts float32, float16 and bfloat16).
        reference: the strategy whose losses it must have; "" for one that is a reference itself, and runs in one process.
        in_float64: whether ``--dtype float64`` applies to everything. (ZeRO always updates a float32 copy of the parameters.)
    """

    name: str
    script: str
    options: tuple[str, ...] = ()
    before: str = "one_process.py"
    package: str = "torch"
    reference: str = "one process"
    in_float64: bool = True
    refuses_float64: bool = False

    def command(self, processes: int) -> list[str]:
        path = str(Path(FOLDER) / self.script)
        if not self.reference:
            return [sys.executable, path, *self.options]
        if self.script == "ddp_spawn.py":
            return [sys.executable, path, f"--nproc={processes}"]
        return [*torchrun(processes), path, *self.options]


STRATEGIES = (
    Strategy("one process", "one_process.py", before="", reference=""),
    Strategy("DDP, mp.spawn", "ddp_spawn.py"),
    Strategy("DDP, torchrun", "ddp_torchrun.py"),
    Strategy("Lightning (DDP)", "ddp_lightning.py", package="lightning"),
    Strategy("Accelerate (DDP)", "ddp_accelerate.py", package="accelerate"),
    Strategy("ZeRO-1", "zero.py", ("--stage=1",), package="deepspeed", in_float64=False),
    Strategy("ZeRO-2", "zero.py", ("--stage=2",), package="deepspeed", in_float64=False),
    Strategy("ZeRO-3", "zero.py", ("--stage=3",), package="deepspeed", in_float64=False, refuses_float64=True),
    Strategy("FSDP2", "fsdp.py"),
    Strategy("tensor parallel", "tensor_parallel.py"),
    Strategy("pipeline parallel", "pipeline.py"),
    Strategy("context parallel", "context_parallel.py"),
    Strategy("8 experts, one process", "expert_parallel.py", reference=""),
    Strategy("8 experts, parallel", "expert_parallel.py", reference="8 experts, one process"),
)


def run_strategies(
    steps: int = 20, dtype: str = "float32", processes: int = 2, output: str | None = None, rounds: int = 1
) -> int:
    """Run all strategies, print the table, and write the results; return 1 if a strategy failed, else 0.

    Args:
        steps: the number of steps per training.
        dtype: "float32" or "float64".
        processes: 2, 4 or 8; the first strategy always uses one process.
        output: the folder for strategies.json, strategies.png, which.md and the runs; None for runs/strategies in the repository.
        rounds: how often to run each strategy, to know how much the speed of the same program varies.

    Raises:
        UserError: the folder cannot be written.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    folder = open_folder(output or require_stages() / "runs" / "strategies", without="strategies.json")
    console = Console()
    console.print(
        f"Training a tiny CodeLlama for {steps} steps in {dtype}: {len(STRATEGIES)} strategies, {processes} processes",
        highlight=False,
    )
    if hidden := why_hidden(processes, gpus()):
        console.print(hidden, highlight=False)
    rows: dict[str, dict] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        bars = {each: progress.add_task(each.name, total=steps * rounds, start=False, note="") for each in STRATEGIES}
        for number, strategy in itertools.product(range(rounds), STRATEGIES):
            bar = bars[strategy]
            progress.start_task(bar)

            def on_line(line, bar=bar, before=number * steps):
                if line.startswith("step "):
                    progress.update(bar, completed=before + int(line[5:].partition("/")[0]))

            row = run_one(strategy, folder, steps, dtype, processes, on_line)
            row = rows[strategy.name] = with_round(rows.get(strategy.name), row)
            if number == rounds - 1:
                progress.stop_task(bar)
            progress.update(bar, note="[bold red]failed" if row["failure"] else row["missing"])
    summary = {
        "machine": machine(),
        "command": "workshop " + " ".join(sys.argv[1:]),
        "steps": steps,
        "dtype": dtype,
        "processes": processes,
        "runs": [*rows.values()],
    }
    draw(folder / "strategies.png", summary)
    (folder / "which.md").write_text(page(summary))
    write_atomically(folder / "strategies.json", json.dumps(summary, indent=1))
    _show(console, folder, summary)
    return 1 if any(row["failure"] for row in rows.values()) else 0


def with_round(earlier: dict | None, row: dict) -> dict:
    """Return the row of a strategy after one more round: its ``rounds`` are speeds, and its speed is their median."""
    rates = [
        *(earlier["rounds"] if earlier else []),
        *([row["tokens_per_second"]] if "tokens_per_second" in row else []),
    ]
    row = row | {"rounds": rates, "failure": (earlier or row)["failure"] or row["failure"]}
    return row | ({"tokens_per_second": statistics.median(rates)} if rates else {})


def run_one(
    strategy: Strategy, folder: Path, steps: int, dtype: str, processes: int, on_line: Callable[[str], None]
) -> dict:
    """Run a strategy, and return its row.

    Args:
        strategy: the strategy.
        folder: the parent of the run's folder; for the comparison, it must already contain the run of the reference.
        steps, dtype, processes: as for ``run_strategies``.
        on_line: called with each line of the output.

    Returns:
        Its ``name``; ``missing``: the package that is not installed, or ""; ``failure``: why it failed, or ""; ``lines``: how
        many lines differ from ``before``. If it trained, also what ``workshop.training.strategies.Report`` writes, and how far
        its losses (``loss_difference``) and final parameters (``parameter_difference``) are from those of its reference.
    """
    lines = changed_lines(ROOT / FOLDER / strategy.before, ROOT / FOLDER / strategy.script) if strategy.before else 0
    row = {"name": strategy.name, "missing": "", "failure": "", "lines": lines, "before": strategy.before}
    row["reference"] = strategy.reference
    if importlib.util.find_spec(strategy.package) is None:
        return row | {"missing": f"{strategy.package} is not installed"}
    if dtype == "float64" and strategy.refuses_float64:
        return row | {"missing": "does not accept float64"}
    place = folder / _folder_name(strategy.name)
    shutil.rmtree(place, ignore_errors=True)  # so that the report of an earlier run is not read
    place.mkdir()
    # One thread per process, so that on a CPU a process stands for a device. The run with one process uses the same device as the
    # others, so that their speeds can be compared.
    visible = not why_hidden(processes, gpus())
    variables = environment(gpus=visible, OMP_NUM_THREADS=1, PET_LOG_DIR=place / "torchrun")
    command = [*strategy.command(processes), f"--steps={steps}", f"--dtype={dtype}", f"--output={place}"]
    outcome = launch(command, variables, ROOT, on_line)
    (place / "output.txt").write_text(outcome.output)
    if outcome.status != 0:
        return row | {"failure": first_failure(outcome, place / "torchrun")}
    row |= json.loads((place / "report.json").read_text()) | {"seconds": outcome.seconds}
    if strategy.reference:
        row |= _differences(row, place, folder / _folder_name(strategy.reference))
    return row


def _folder_name(name: str) -> str:
    return name.lower().replace(" ", "-").replace(",", "").replace("(", "").replace(")", "")


def _differences(row: dict, place: Path, reference: Path) -> dict:
    import torch

    if not (reference / "report.json").is_file():
        return {"loss_difference": None, "parameter_difference": None}
    losses = json.loads((reference / "report.json").read_text())["losses"]
    own, theirs = (torch.load(path / "weights.pt", weights_only=True) for path in (place, reference))
    if own.keys() != theirs.keys():
        return {"failure": "its parameters have different names than those of one process, so they cannot be compared"}
    return {
        "loss_difference": max(abs(one - other) for one, other in zip(row["losses"], losses, strict=True)),
        "parameter_difference": max((own[name] - theirs[name]).abs().max().item() for name in own),
    }


def code(path: Path) -> list[str]:
    """Return the lines of a script without blank lines and without its docstring, which always differs."""
    text = path.read_text()
    body = text.splitlines()[ast.parse(text).body[0].end_lineno :]
    return [line for line in body if line.strip()]


def changed_lines(before: Path, after: Path) -> int:
    """Count the lines that change: for each hunk, the larger number of removed and added lines."""
    blocks = difflib.SequenceMatcher(None, code(before), code(after), autojunk=False).get_opcodes()
    return sum(max(old_end - old, new_end - new) for kind, old, old_end, new, new_end in blocks if kind != "equal")


def trained(summary: dict) -> list[dict]:
    """Return the rows of the strategies that trained."""
    return [row for row in summary["runs"] if not row["failure"] and not row["missing"]]


def cells(row: dict) -> list[str]:
    """Return the cells of a row of the table, in the order of ``COLUMNS``."""
    if row["missing"] or row["failure"]:
        return [row["name"], row["missing"] or "failed", "", "", "", "", ""]
    differences = [f"{row[name]:.0e}" if name in row else "" for name in ("loss_difference", "parameter_difference")]
    return [
        row["name"],
        spread(row["tokens_per_second"], row.get("rounds", []), ",.0f"),
        f"{row['memory'] / MIB:.0f}",
        f"{row['sent'] / MIB:.{int(0 < row['sent'] < MIB)}f}",
        str(row["lines"]),
        *differences,
    ]


def spread(median: float, values: list[float], form: str) -> str:
    """Return a median, and the lowest and the highest value if there are several."""
    return f"{median:{form}}" + (f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else "")


COLUMNS = ("strategy", "tokens/s", "MiB held", "MiB sent", "lines", "losses", "parameters")
LEGEND = (
    "MiB held: the tensors of each process after the optimizer step (on a GPU: the peak of the allocator). MiB sent: per "
    "process and step, by the formulas of nccl-tests. Lines: the number of lines that differ from one_process.py. Losses, "
    "parameters: the largest difference from one process (for experts, from one process with experts)."
)


def _show(console, folder: Path, summary: dict) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in summary["runs"]:
        table.add_row(*cells(row))
    console.print()
    console.print(table)
    console.print(LEGEND, highlight=False)
    for row in summary["runs"]:
        if row["failure"]:
            console.print(f"\n[bold red]{row['name']} failed:", highlight=False)
            console.print(row["failure"], markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Which should I use? {folder / 'which.md'}; picture: strategies.png", highlight=False, soft_wrap=True
    )


def draw(path: Path, summary: dict) -> None:
    """Draw the loss curves, their differences from one process, and the costs."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files without a screen
    import matplotlib.pyplot as plt

    from workshop.measure.plots import COLOURS

    rows = trained(summary)
    figure, ((curves, speed), (apart, cost)) = plt.subplots(
        2, 2, figsize=(13, 9), facecolor="white", layout="constrained"
    )
    where = " and ".join(sorted({row["device"] for row in rows})) or "no run succeeded"
    setting = f"{where}, {summary['processes']} processes, {summary['dtype']}, torch {summary['machine']['torch']}"
    figure.suptitle(f"One training with every strategy ({setting})")
    styles = ("-", "--", ":")
    for index, row in enumerate(rows):
        look = {
            "color": COLOURS[index % len(COLOURS)],
            "linestyle": styles[index // len(COLOURS)],
            "label": row["name"],
        }
        steps = range(1, len(row["losses"]) + 1)
        # The curves coincide, so each one is narrower than the one before, which remains visible at the edges.
        curves.plot(steps, row["losses"], linewidth=1.5 + 1.2 * (len(rows) - 1 - index), **look)
        reference = next((each for each in rows if each["name"] == row["reference"]), None)
        if reference and "loss_difference" in row:
            differences = [abs(a - b) for a, b in zip(row["losses"], reference["losses"], strict=True)]
            # A difference of 0 has no place on a logarithmic scale.
            apart.plot(steps, [each or float("nan") for each in differences], linewidth=1.5, marker=".", **look)
    curves.set(
        xlabel="step",
        ylabel="loss (mean over the global batch)",
        title="Same global batches: one loss curve for each model",
    )
    curves.legend(fontsize=8)
    apart.set(xlabel="step", ylabel="difference from one process", title="Difference: the order of sums", yscale="log")
    names, places = [row["name"] for row in rows], range(len(rows))
    bars = speed.barh(places, [row["tokens_per_second"] for row in rows], color=COLOURS[0])
    speed.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    speed.set(xlabel="tokens/s, all processes together", title="Speed")
    held = cost.barh([place - 0.2 for place in places], [row["memory"] / MIB for row in rows], 0.4, color=COLOURS[2])
    sent = cost.barh([place + 0.2 for place in places], [row["sent"] / MIB for row in rows], 0.4, color=COLOURS[1])
    for bars, label in ((held, "held by each process"), (sent, "sent per process and step")):
        bars.set_label(label)
        cost.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    cost.set(xlabel="MiB", title="Memory and communication")
    cost.legend(loc="lower right", fontsize=8)
    for axes in (speed, cost):
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.margins(x=0.15)
    for axes in (curves, apart, speed, cost):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def page(summary: dict) -> str:
    """Return the page "Which should I use?" in Markdown: the measurements and the rules."""
    rows = {row["name"]: row for row in trained(summary)}
    found = summary["machine"]
    devices = (
        ", ".join(sorted(set(found["gpus"]))) if any(row["device"] != "cpu" for row in rows.values()) else "the CPU"
    )
    lines = [
        "# Which should I use?",
        "",
        f"Measured on {devices} ({found['processor']}, {found['cores']} cores, torch {found['torch']}): the tiny CodeLlama, "
        f"{summary['steps']} steps in {summary['dtype']}, {summary['processes']} processes, with `{summary['command']}`.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * (len(COLUMNS) - 1),
        *("| " + " | ".join(cells(row)) + " |" for row in summary["runs"]),
        "",
        LEGEND,
        "",
    ]
    if {"one process", "DDP, torchrun", "FSDP2", "tensor parallel"} <= rows.keys():
        lines += [*_readings(rows), ""]
    _title, _, rules = (ROOT / FOLDER / "RULES.md").read_text().partition("\n\n")
    return "\n".join(lines) + "\n" + re.sub(r"\[([^]]+)\]\(\.\./[^)]+\)", r"\1", rules)  # its links work only there


def _readings(rows: dict) -> list[str]:
    """Describe the measurements in sentences, which hold for the machine of the measurements."""
    one, ddp, fsdp, tensor = (rows[name] for name in ("one process", "DDP, torchrun", "FSDP2", "tensor parallel"))

    def times(what: str, row: dict, other: dict) -> str:
        return f"{row[what] / other[what]:.2f} times"

    def speed(row: dict, other: dict) -> str:
        ratios = [own / theirs for own, theirs in zip(row["rounds"], other["rounds"], strict=True)]
        return spread(statistics.median(ratios), ratios, ".2f") + " times"

    zero = f" (ZeRO-3: {speed(rows['ZeRO-3'], ddp)})" if "ZeRO-3" in rows else ""
    count = len(one["rounds"])
    largest = max(row["loss_difference"] for row in rows.values() if "loss_difference" in row)
    return [
        "## What these figures say",
        "",
        f"- DDP with {ddp['processes']} processes is {speed(ddp, one)} as fast as one process, and each of "
        f"its processes holds {times('memory', ddp, one)} as much.",
        f"- With FSDP2, each process holds {times('memory', fsdp, one)} as much as one process alone, and sends "
        f"{times('sent', fsdp, ddp)} as much as with DDP. FSDP2 is {speed(fsdp, ddp)} as fast as DDP{zero}.",
        f"- Tensor parallelism sends {tensor['sent'] / MIB:.0f} MiB per step with 512 tokens. This amount grows with the batch; "
        "the amount that DDP, FSDP and ZeRO send does not.",
        *_newer_readings(rows),
        "- DDP with mp.spawn, torchrun, Lightning and Accelerate is the same algorithm, so these four speeds differ mostly by "
        "noise. If the speeds of two strategies differ by less than these four, do not rank them.",
        f"- Speeds and their ratios are {'medians of ' if count > 1 else 'from '}{count} round{'s' * (count > 1)}"
        f"{', with the lowest and the highest value in brackets' if count > 1 else ''}.",
        f"- All losses differ from those of one process by at most {largest:.0e}; only the costs differ.",
    ]


def _newer_readings(rows: dict) -> list[str]:
    """Describe pipeline, context and expert parallelism, if they were measured."""
    lines = []
    if "pipeline parallel" in rows:
        pipeline = rows["pipeline parallel"]
        lines.append(
            f"- A process of the pipeline sends at most {pipeline['sent'] / MIB:.1f} MiB per step: one activation, or its "
            "gradient, for each micro-batch. It holds only the parameters, gradients and moments of its own layers."
        )
    if "context parallel" in rows:
        context = rows["context parallel"]
        lines.append(
            f"- Context parallelism holds about as much as DDP and sends {context['sent'] / MIB:.0f} MiB per step. It divides "
            "the activations of each sequence, which saves memory only if sequences are long; here they have 64 tokens."
        )
    if {"8 experts, one process", "8 experts, parallel"} <= rows.keys():
        alone, experts = rows["8 experts, one process"], rows["8 experts, parallel"]
        lines.append(
            f"- A process with half of the experts holds {experts['memory'] / alone['memory']:.2f} times as much as one process "
            "with all of them. The model with experts is larger, so its losses differ from those of the other rows."
        )
    return lines
