"""Supporting code of the exercise about a mesh: saving its checkpoint, and which of its axes stay inside of a node."""

import argparse
import shutil
import socket
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh


def mesh_sizes(args: argparse.Namespace, processes: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes pp, dp, cp and tp, in this order. Without the option --dp, dp has the ranks that are left.

    Args:
        args: the options, with the sizes; None: 1.
        processes: their number; None: that of the process group.
    """
    processes = processes or dist.get_world_size()
    sizes = {axis: getattr(args, axis) or 1 for axis in ("pp", "dp", "cp", "tp")}
    if not args.dp:
        sizes["dp"] = max(processes // (sizes["pp"] * sizes["cp"] * sizes["tp"]), 1)
    return sizes


def report_mesh(mesh: DeviceMesh) -> dict[str, bool]:
    """Print the groups of each axis and whether they stay inside of a node. Call it on all ranks.

    Args:
        mesh: with a name for each axis. Axes with one place are not printed.

    Returns:
        On rank 0, whether the groups of each axis stay inside of a node. An empty dictionary elsewhere.
    """
    hosts: list = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if dist.get_rank():
        return {}
    inside = {}
    for number, axis in enumerate(mesh.mesh_dim_names or ()):
        groups = mesh.mesh.movedim(number, -1).flatten(0, -2).tolist()
        if len(groups[0]) > 1:
            inside[axis] = all(len({hosts[rank] for rank in group}) == 1 for group in groups)
            where = "inside of a node" if inside[axis] else "between nodes"
            print(f"{axis}: {where}, groups of ranks {' '.join(map(str, groups))}", flush=True)
    return inside


def save(state: dict, folder: str) -> None:
    """Write a sharded checkpoint beside the last one, and then replace that one. Call it on all ranks.

    Args:
        state: what this rank has, tensors or DTensors by their names. Ranks may have the same ones.
        folder: on a file system that all nodes share.
    """
    new = Path(f"{folder}.new")
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)  # of a run that was killed while it saved
    dist.barrier()
    dcp.save(state, checkpoint_id=new)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    dist.barrier()
