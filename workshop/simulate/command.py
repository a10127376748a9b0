"""``workshop simulate``: what one rank of many holds, computes and communicates in a training step."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from workshop.errors import UserError
from workshop.plan.sizes import find_model
from workshop.repository import open_folder, require_stages
from workshop.simulate.layout import check_model, read_layout


def run(words: Sequence[str], ranks: int, rank: int, mesh: str, **options) -> int:
    """Simulate a known model, or a script if the first word is a program of Python; return the exit status.

    Raises:
        UserError: there is no such model or script, or the options do not fit.
    """
    check_rank(rank, ranks)
    if not words:
        raise UserError("name a model, such as codellama-7b, or write a training script after --")
    if any(word.endswith(".py") for word in words):
        if mesh:
            raise UserError("--mesh is only for a MODEL, because a script creates its own mesh; leave out --mesh")
        return run_program(words, ranks, rank, options["output"])
    if len(words) > 1:
        raise UserError(f"name one model, not {len(words)}: {' '.join(words)}")
    return run_simulate(words[0], ranks, mesh or f"fsdp={ranks}", rank, **options)


def run_simulate(
    model: str,
    ranks: int,
    mesh: str,
    rank: int,
    *,
    sequence_length: int | None,
    batch_size: int,
    micro_batches: int | None,
    schedule: str,
    recompute: bool,
    dtype: str,
    output: str,
) -> int:
    """Simulate a step of training a known model, print what happened, and write it; return the exit status, 0.

    Args:
        model: a name, a folder or a configuration file for ``find_model``.
        ranks, rank: how many ranks there are, and which one to be.
        mesh: the sizes of the axes, for ``read_layout``.
        sequence_length: tokens per sequence; None: 2,048, or the maximum of the model if that is less.
        batch_size, schedule, recompute: as in ``Settings``.
        micro_batches: per step; None: twice the stages of a pipeline, or 1.
        dtype: "bf16" or "float32".
        output: the folder for simulate.json and simulate.png; "": runs/simulate in the repository.

    Raises:
        UserError: the model, the mesh and the options do not fit together.
    """
    sizes, layout = find_model(model), read_layout(mesh, ranks)
    length = sequence_length or min(2048, sizes.context)
    if length > sizes.context:
        raise UserError(f"{model} takes sequences of up to {sizes.context:,} tokens, not {length:,}")
    micro_batches = micro_batches or (2 * layout.pp if layout.pp > 1 else 1)

    from workshop.simulate.step import Settings, simulate
    from workshop.simulate.world import world

    settings = Settings(length, batch_size, micro_batches, schedule, recompute, dtype == "bf16")
    check_model(layout, sizes, length, settings.stages(layout), micro_batches, batch_size)
    folder = open_folder(output or require_stages() / "runs" / "simulate")
    console, name = Console(highlight=False), Path(model).name
    console.print(
        f"{name}: {sizes.parameters:,} parameters. Rank {rank} of {ranks:,}, mesh: {layout}.\n"
        f"Per step, {micro_batches} x {batch_size} x {length:,} tokens (micro-batches x sequences x tokens) for each rank of "
        f"dp and fsdp, {layout.dp * layout.fsdp * micro_batches * batch_size * length:,} in total; {dtype}, AdamW"
        f"{', recomputing each layer' if recompute else ''}.\n",
        soft_wrap=True,
    )
    with world(rank, ranks):
        recorder = simulate(sizes, layout, settings)
        names = layout.group_names()

        def name_of(group):
            return (names.get(group.group_name, group.group_desc), group.size()) if group else ("all", ranks)

        title = f"{name}, rank {rank} of {ranks:,}, {layout}"
        described = {"model": name, "parameters": sizes.parameters, "ranks": ranks, "rank": rank, "mesh": layout.sizes}
        write(console, folder, recorder, name_of, described | asdict(settings), title)
    return 0


def run_program(words: Sequence[str], ranks: int, rank: int, output: str) -> int:
    """Simulate a training script, print what happened in its last step, and write it; return 0 if a step was complete, or 1."""
    from workshop.simulate.script import MADE_UP, run_script

    outcome = run_script(words, ranks, rank)
    console, name = Console(highlight=False), next(word for word in words if word.endswith(".py"))
    console.print(f"\n{name}: rank {rank} of {ranks:,}; optimizer steps: {outcome.steps}", soft_wrap=True)
    for line in outcome.read:
        console.print(
            f"{line} reads a value. It got {MADE_UP}, because simulated tensors have no values.", soft_wrap=True
        )
    if outcome.stopped:
        console.print(outcome.stopped, soft_wrap=True)
    if outcome.step is None:
        raise UserError(f"{name}: the program did not call any module with parameters, so there is no step to show")
    what = (
        f"optimizer step {outcome.steps}" if outcome.steps else "until the program stopped, without an optimizer step"
    )
    console.print(f"What happened {'in ' if outcome.steps else ''}{what}:\n", soft_wrap=True)

    def name_of(group: dist.ProcessGroup | None) -> tuple[str, int]:
        if group is None or group.group_desc == "default_pg":
            return "all", ranks
        return group.group_desc.removeprefix("mesh_"), group.size()

    described = {"program": name, "ranks": ranks, "rank": rank, "steps": outcome.steps, "stopped": outcome.stopped}
    folder = open_folder(output or require_stages() / "runs" / "simulate")
    write(
        console,
        folder,
        outcome.step,
        name_of,
        described | {"made_up": outcome.read},
        f"{name}, rank {rank} of {ranks:,}",
    )
    return 0 if outcome.steps else 1


def check_rank(rank: int, ranks: int) -> None:
    """Check that there is such a rank.

    Raises:
        UserError: there is not.
    """
    if rank >= ranks:
        raise UserError(f"--rank {rank}: the {ranks} ranks are 0 to {ranks - 1}")


def write(console: Console, folder: Path, recorder, name_of, described: dict, title: str) -> None:
    """Print the summary of a step, and write it and its picture into a folder."""
    import resource

    import torch

    from workshop.simulate.report import draw, show, size
    from workshop.simulate.summary import summary

    found = summary(recorder, name_of)
    show(console, found)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    described |= {"torch": torch.__version__, "process": {"memory": memory}}
    console.print(f"\nThe simulation itself took {size(memory)} of memory at its peak.", soft_wrap=True)
    (folder / "simulate.json").write_text(json.dumps(described | found) + "\n")
    draw(folder / "simulate.png", title, recorder, found, name_of)
    shown = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else folder
    console.print(f"figures and timeline: {shown}/simulate.json and simulate.png", soft_wrap=True)
