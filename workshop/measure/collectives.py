"""Measure how fast the processes of this job communicate, and report over which network.

    torchrun --standalone --nproc-per-node=4 -m workshop.measure.collectives

Times and bandwidths are defined as in NVIDIA's nccl-tests, so you can compare them with the figures of your site. The algorithm
bandwidth is the size divided by the time. The bus bandwidth is the bandwidth that each link reached: you can compare it with the
bandwidth of the hardware, for any number of processes.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

import atexit
import json
import os
import re
import socket
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist

from workshop.run.machine import machine
from workshop.training.arguments import ArgumentParser
from workshop.training.device import BUS_FACTOR, local_device, synchronized_time

SIZES = [1024 * 8**power for power in range(7)]  # 1 KiB to 256 MiB
ROUNDS = 5
LONGEST = 1.0  # seconds per call; after a longer call, larger sizes are left out


class Network(NamedTuple):
    """What NCCL or RCCL reported about its connections.

    Attributes:
        name: the network that it chose between nodes: "Socket", "IB" (InfiniBand or RoCE), "AWS Libfabric" or "OFI" (Slingshot,
            EFA), or the name of a different plugin; "" if it reported none.
        provider: the libfabric provider of the OFI plugin: "cxi" (Slingshot), "efa", "tcp" (sockets); "" without the plugin.
        paths: the connections between pairs of GPUs: "P2P/CUMEM", "P2P/IPC", "SHM/direct", "NET/IB", "NET/Socket", ...
    """

    name: str
    provider: str
    paths: frozenset[str]

    @property
    def is_sockets(self) -> bool:
        """Whether data between nodes goes through sockets instead of the fast network."""
        return self.name == "Socket" or "NET/Socket" in self.paths or self.provider in ("tcp", "tcp;ofi_rxm", "sockets")


def nccl_network(text: str) -> Network:
    """Read the messages of NCCL (those of RCCL are the same) with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, and the messages of NCCL 2.30.
    """
    names = re.findall(r"NCCL INFO Using network (.+?)\s*$", text, re.MULTILINE)
    providers = re.findall(r"NET/OFI Selected [Pp]rovider is ([^\s,]+)", text)
    paths = re.findall(r" via ((?:P2P|SHM|NET|COLLNET)(?:/[^/\n(]+)?)", text)
    return Network(
        names[-1] if names else "", providers[-1] if providers else "", frozenset(path.strip() for path in paths)
    )


def network_sentence(networks: list[Network], nodes: int) -> str:
    """Say over which network the GPUs of all processes communicate, and what to do if it is a slow one.

    Args:
        networks: what NCCL reported in each process.
        nodes: the number of nodes.
    """
    paths = sorted(set().union(*(network.paths for network in networks)))
    inside = ", ".join(path for path in paths if not path.startswith(("NET", "COLLNET")))
    within = f"within a node {inside}" if inside else ""
    if "SHM" in inside and "P2P" not in inside:
        within += " (through CPU memory: the GPUs have no NVLink and no PCIe peer access, or it is switched off)"
    names = sorted({network.name for network in networks if network.name})
    if not names and not paths:
        return "NCCL did not report its network: set NCCL_DEBUG=INFO, and look for NET/ in its messages"
    if nodes == 1:
        return f"NCCL on one node: {within or 'one GPU, nothing to communicate'}"
    provider = next((f" with provider {network.provider}" for network in networks if network.provider), "")
    between = f"NCCL between {nodes} nodes: {' and '.join(names)}{provider}" + (f"; {within}" if within else "")
    if any(network.is_sockets for network in networks):
        return (
            f"{between}. It FELL BACK TO SOCKETS, many times slower than InfiniBand or Slingshot: set the NCCL variables of the "
            "site's profile; on Slingshot and EFA the OFI plugin (aws-ofi-nccl, aws-ofi-rccl) must be in LD_LIBRARY_PATH"
        )
    return f"{between}. This is the fast network"


def gloo_interface(environment: Mapping[str, str] = os.environ) -> str:
    """Return the network interface that gloo uses: GLOO_SOCKET_IFNAME, else the one with the address of this machine's host name.

    If the host name has no address of this machine, gloo uses the loopback interface and cannot reach other nodes.
    """
    if environment.get("GLOO_SOCKET_IFNAME"):
        return environment["GLOO_SOCKET_IFNAME"]
    addresses = {address.address: name for name, several in psutil.net_if_addrs().items() for address in several}
    try:
        mine = [entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        mine = []
    return next((addresses[address] for address in mine if address in addresses), addresses.get("127.0.0.1", "lo"))


def enable_network_report() -> None:
    """Let NCCL write its connections to one file per process; call this before ``init_process_group``.

    If NCCL_DEBUG is already INFO or TRACE, nothing changes, because the user wants to see the messages.
    """
    if os.environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        return
    handle, path = tempfile.mkstemp(prefix="workshop-nccl-")
    os.close(handle)
    atexit.register(Path(path).unlink, missing_ok=True)
    os.environ.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": path})


def network_report() -> str:
    """Say in one sentence over which network the process group communicates. All ranks must call it, and get the same sentence.

    NCCL chooses the network when it first communicates, so this function starts with an all-reduce of 4 MiB.
    """
    device = torch.device("cpu")
    if dist.get_backend() != "gloo":
        device = torch.accelerator.current_accelerator()
    dist.all_reduce(torch.zeros(2**20, device=device))
    seen = gloo_interface()
    if dist.get_backend() != "gloo":
        file = Path(os.environ.get("NCCL_DEBUG_FILE", ""))
        seen = nccl_network(file.read_text(errors="replace") if file.is_file() else "")
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (socket.gethostname(), seen))
    nodes = len({host for host, _ in everybody})
    if dist.get_backend() != "gloo":
        return network_sentence([network for _, network in everybody], nodes)
    interfaces = " and ".join(sorted({interface for _, interface in everybody}))
    where = "one node" if nodes == 1 else f"{nodes} nodes"
    return f"gloo on {where}: sockets, interface {interfaces} (gloo uses only sockets; GLOO_SOCKET_IFNAME sets the interface)"


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 0)) < 2:
        parser.error(
            "this program needs at least 2 processes: torchrun --nproc-per-node=2 -m workshop.measure.collectives"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    device = local_device()
    enable_network_report()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        network = network_report()
        if rank == 0:
            print(f"{world_size} processes on {device.type}\n{network}\n")
            print(f"{'':14} {'size':>8} {'time':>12} {'algorithm bandwidth':>21} {'bus bandwidth':>15}", flush=True)
        rows = []
        for name in BUS_FACTOR:
            for size in SIZES:
                row = measure(name, size, world_size, device)
                rows.append(row)
                if rank == 0:
                    show(row)
                if row["seconds"] > LONGEST:
                    break
    finally:
        dist.destroy_process_group()
    if rank == 0 and args.output:
        result = {
            "machine": machine(),
            "command": f"torchrun --nnodes={world_size // local_world_size} --nproc-per-node={local_world_size} "
            "-m workshop.measure.collectives",
            "processes": world_size,
            "nodes": world_size // local_world_size,
            "device": device.type,
            "network": network,
            "rows": rows,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(name: str, size: int, world_size: int, device: torch.device) -> dict:
    """Time one collective.

    Args:
        name: a key of ``BUS_FACTOR``.
        size: the bytes as nccl-tests counts them: of the whole buffer, which all_gather fills and reduce_scatter divides.
        world_size: the number of processes.
        device: the device of the buffers.

    Returns:
        The row of the table: seconds per call (median of the rounds, slowest process), bandwidths in bytes/s.
    """
    part = max(size // 4 // world_size, 1)  # float32: 4 bytes
    whole, piece = torch.zeros(part * world_size, device=device), torch.zeros(part, device=device)
    call = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, piece),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }[name]

    def seconds_a_call(calls: int) -> float:
        dist.barrier()
        start = synchronized_time(device)
        for _ in range(calls):
            call()
        slowest = torch.tensor((synchronized_time(device) - start) / calls, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    seconds_a_call(1)  # the first call opens the connections
    calls = max(1, min(100, int(0.05 / seconds_a_call(1))))  # about 0.05 s per round
    seconds = statistics.median(seconds_a_call(calls) for _ in range(ROUNDS))
    size = whole.numel() * 4
    return {
        "collective": name,
        "bytes": size,
        "seconds": seconds,
        "algorithm_bandwidth": size / seconds,
        "bus_bandwidth": size / seconds * BUS_FACTOR[name](world_size),
    }


def show(row: dict) -> None:
    """Print a row of the table; bandwidths in GB/s (10^9 bytes), as nccl-tests does."""
    size = f"{row['bytes'] / 1024:,.0f} KiB" if row["bytes"] < 2**20 else f"{row['bytes'] / 2**20:,.0f} MiB"
    print(
        f"{row['collective']:14} {size:>8} {row['seconds'] * 1e6:9,.0f} us {row['algorithm_bandwidth'] / 1e9:16.3f} GB/s "
        f"{row['bus_bandwidth'] / 1e9:10.3f} GB/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
