"""Supporting code of the exercise about experts: PyTorch's all-to-all with gradients, and the report about the experts."""

import argparse
import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single

from workshop.files import write_atomically

EXPERTS = "experts.json"


def pytorch_all_to_all(
    rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Send rows to the other ranks and return those that come, like ``AllToAll.apply`` of the exercise, with PyTorch's function.

    Args:
        rows: first the rows for rank 0 of the group, then those for rank 1, and so on.
        send, receive: how many rows go to each rank and come from each rank.
        group: the ranks; None: all.
    """
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    with warnings.catch_warnings():
        # torch 2.15 advises torch.distributed._functional_collectives instead, which is not public.
        warnings.simplefilter("ignore", FutureWarning)
        return all_to_all_single(received, rows.contiguous(), receive, send, group)


def report_experts(args: argparse.Namespace, steps: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> dict:
    """Print how many tokens chose each expert in the last quarter of a run, and write the numbers. Call it on all ranks.

    Args:
        args: the options, with the ``folder`` for the file.
        steps: for each step and each layer, how many tokens of this rank chose each expert, and how many the experts computed.

    Returns:
        The written data on rank 0, with a list for each layer: the share of the tokens that chose each expert in each step
        ("shares"), and the share of all tokens that no expert computed ("dropped"). An empty dictionary elsewhere.
    """
    counts = torch.stack([torch.stack([torch.stack(pair) for pair in layers]) for layers in steps])
    dist.all_reduce(counts)  # steps x layers x (chosen, computed) x experts
    if dist.get_rank():
        return {}
    chosen, computed = counts.cpu().double().unbind(2)
    shares = (chosen / chosen.sum(-1, keepdim=True)).transpose(0, 1)
    dropped = 1 - computed.sum((0, 2)) / chosen.sum((0, 2))
    data = {"shares": shares.tolist(), "dropped": dropped.tolist()}
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / EXPERTS, json.dumps(data))
    last = shares[:, -max(1, len(steps) // 4) :].mean(1)
    for number, (experts, lost) in enumerate(zip(last.tolist(), dropped.tolist(), strict=True)):
        percent = " ".join(f"{share:4.0%}" for share in experts)
        print(f"layer {number}: share of the tokens of each expert {percent}; dropped {lost:.1%}", flush=True)
    return data
