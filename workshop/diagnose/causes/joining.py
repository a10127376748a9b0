"""Causes in which the ranks have not found each other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from workshop.diagnose.causes.words import moves, names, verb
from workshop.diagnose.evidence import Diagnosis, Rank, Scene


def interface(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if a variable names a network interface that the node of a rank does not have."""
    for rank in scene.ranks:
        there = scene.interfaces.get(rank.node)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            wanted = rank.settings.get(variable, "")
            plain = [name.lstrip("^=") for name in wanted.split(",") if name and not wanted.startswith("^")]
            if there and plain and not any(name.startswith(each) for name in there for each in plain):
                return Diagnosis(
                    "interface",
                    f"{variable}={wanted} names a network interface that {rank.node} ({rank.name}) does not have.",
                    f"Its interfaces are {', '.join(sorted(there))}. The ranks cannot connect to each other.",
                    f"Set {variable} to one of them (`ip addr` shows their addresses), or unset it.",
                )
    return None


def rendezvous(scene: Scene) -> Diagnosis | None:
    """Return the diagnosis if ranks wait in init_process_group for others."""
    joining = [rank for rank in scene.alive if rank.doing.kind == "joins"]
    if not joining:
        return None
    if different := _different_settings(scene.alive):
        return different
    first = joining[0]
    where = ":".join(first.settings[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in first.settings)
    late = [rank for rank in scene.alive if rank.doing.kind != "joins" and rank.rank >= 0]
    if late:
        rank = late[0]
        return Diagnosis(
            "slow" if moves(rank) else "rendezvous",
            f"{rank.name.capitalize()} has not called init_process_group: it is {rank.doing.words()}.",
            f"{names(joining).capitalize()} {verb(joining, 'waits', 'wait')} for it.",
            "All ranks must call init_process_group. Do long preparations afterwards, or give it a longer timeout.",
            rank.doing.place,
        )
    if first.rank < 0:
        return _agent(first)
    absent = sorted(set(range(first.world)) - {rank.rank for rank in scene.ranks})
    if absent:
        return Diagnosis(
            "rendezvous",
            f"{names(absent).capitalize()} of {first.world} {verb(absent, 'has', 'have')} not started, or not here.",
            f"{names(joining).capitalize()} {verb(joining, 'waits', 'wait')} in init_process_group"
            + (f" at {where}." if where else "."),
            "Start WORLD_SIZE processes, and give all of them the same MASTER_ADDR and MASTER_PORT.",
            first.doing.place,
        )
    return Diagnosis(
        "rendezvous",
        f"All {first.world or len(joining)} ranks wait in init_process_group, and cannot connect to each other.",
        f"They try to connect at {where}." if where else "",
        "Check that MASTER_ADDR is an address of the node of rank 0 that the other nodes can reach, and that no firewall blocks "
        "the ports. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the network interface.",
        first.doing.place,
    )


def _different_settings(ranks: Sequence[Rank]) -> Diagnosis | None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        values: dict[str, list[int]] = {}
        for rank in ranks:
            if name in rank.settings:
                values.setdefault(rank.settings[name], []).append(rank.rank)
        if len(values) > 1:
            said = "; ".join(f"{names(them)}: {value}" for value, them in sorted(values.items()))
            return Diagnosis(
                "rendezvous",
                f"The ranks have different values of {name} ({said}).",
                "So they wait in init_process_group for ranks that never join, or at different addresses.",
                f"Give all ranks the same {name}. On several nodes, give each torchrun the same --nnodes and --rdzv-endpoint.",
            )
    return None


def _agent(launcher: Rank) -> Diagnosis:
    command = launcher.settings.get("COMMAND", "torchrun")
    nodes = re.search(r"--nnodes[= ](\S+)", command)
    endpoint = re.search(r"--rdzv[-_]endpoint[= ](\S+)", command) or re.search(r"--master[-_]addr[= ](\S+)", command)
    if not endpoint and (not nodes or nodes[1] in ("1", "1:1")):
        return Diagnosis(  # as with --standalone: no other node can be missing
            "slow",
            f"torchrun on {launcher.node} has not started the ranks yet.",
            "It runs on one node, so it waits for no other torchrun: a busy machine needs longer to start.",
            "Wait, and look at what else runs on this node (`top`).",
        )
    place = f" at {endpoint[1]}" if endpoint else ""
    return Diagnosis(
        "rendezvous",
        f"torchrun on {launcher.node} waits for the other nodes{place}" + (f": --nnodes={nodes[1]}." if nodes else "."),
        "It starts the ranks only when torchrun runs on enough nodes, with the same --rdzv-endpoint and --rdzv-id.",
        "Start torchrun on each node (`srun --ntasks-per-node=1`), with the same --nnodes, --rdzv-endpoint and --rdzv-id, and "
        "check that the first node can be reached under this name and port.",
    )
