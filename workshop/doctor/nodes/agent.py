"""Measure one node, by the orders of ``lead.py``, which runs on the first node.

Orders and answers are lines of JSON on one connection per node.
"""

import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil

from workshop.run.machine import cores, gpus

STARTING = 120  # seconds in which the programs on all nodes must have started
CALLING = 10  # seconds to wait for a different node
WINDOW = 0.5  # seconds of one measurement of speed: some periods (0.1 s) with which Linux limits the time of a job
SENDING = 0.2  # the same for a connection
CHUNK = 2**20  # bytes
PINGS = 100


class Agent:
    """The measurements of one node.

    Args:
        clock: returns the time of the node.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self.clock = clock
        self.door = socket.create_server(("", 0))
        self.door.settimeout(CALLING)
        self._tensors = {}

    def work(self, connection: socket.socket) -> None:
        """Follow orders until the connection ends, or until the order "end"."""
        with connection.makefile("rw") as lines:
            for line in lines:
                order = json.loads(line)
                if order["do"] == "end":
                    return
                try:
                    answer = getattr(self, order.pop("do"))(**order)
                except (OSError, RuntimeError) as error:
                    answer = {"error": str(error) or type(error).__name__}
                lines.write(json.dumps(answer) + "\n")
                lines.flush()

    def describe(self) -> dict:
        """Return the name, the cores, the GPUs and the address of this node."""
        import torch

        torch.set_num_threads(cores())
        return {
            "node": node_name(),
            "cores": cores(),
            "gpus": gpus(),
            "machine": boot(),
            "host": address(),
            "port": self.door.getsockname()[1],
        }

    def time(self) -> dict:
        """Return the time of the clock in seconds."""
        return {"time": self.clock()}

    def speed(self) -> dict:
        """Return the speed of a product and of a copy in memory (operations and bytes per second), and the share of the cores."""
        import torch

        size = 1024
        a, b = self._kept("a", size, size), self._kept("b", size, size)
        source, target = self._kept("source", 2**24), self._kept("target", 2**24)
        begin, used = time.perf_counter(), time.process_time()
        product = 2 * size**3 * rate(lambda: torch.mm(a, b))
        share = (time.process_time() - used) / (time.perf_counter() - begin) / cores()
        return {
            "product": product,
            "share": min(1.0, share),
            "memory": 8 * 2**24 * rate(lambda: target.copy_(source)),  # reads and writes 4 bytes per number
        }

    def gpu_speed(self) -> dict:
        """Return the same for each GPU of this node, as lists."""
        import torch

        products, copies = [], []
        for index in range(gpus()):
            device = torch.device(torch.accelerator.current_accelerator().type, index)
            size = 4096
            a = self._kept(f"gpu{index}", size, size, device=device, dtype=torch.bfloat16)
            source = self._kept(f"source{index}", 2**27, device=device)
            target = self._kept(f"target{index}", 2**27, device=device)

            def done(device=device) -> None:
                torch.accelerator.synchronize(device)

            products.append(2 * size**3 * rate(lambda a=a: torch.mm(a, a), done, 20))
            copies.append(8 * 2**27 * rate(lambda source=source, target=target: target.copy_(source), done, 20))
        return {"gpu_product": products, "gpu_memory": copies}

    def loopback(self) -> dict:
        """Return the speed of a connection of this node with itself, in bytes per second."""
        other = Thread(target=self.answer)
        other.start()
        try:
            return {"loopback": self.call("127.0.0.1", self.door.getsockname()[1])["rate"]}
        finally:
            other.join()

    def answer(self) -> dict:
        """Accept the connection of a node: return its pings, then count what it sends."""
        with self.door.accept()[0] as peer:
            peer.settimeout(CALLING)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                peer.sendall(_exactly(peer, 8))
            buffer, count = bytearray(CHUNK), 0
            while size := peer.recv_into(buffer):
                count += size
            peer.sendall(count.to_bytes(8))
        return {}

    def call(self, host: str, port: int) -> dict:
        """Connect to a node, and return the seconds of a message to it, and the bytes per second of data that it receives."""
        with socket.create_connection((host, port), timeout=CALLING) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(PINGS):
                begin = time.perf_counter()
                peer.sendall(b"pingpong")
                _exactly(peer, 8)
                times.append(time.perf_counter() - begin)
            data, begin = bytes(CHUNK), time.perf_counter()
            while time.perf_counter() - begin < SENDING:
                peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            count = int.from_bytes(_exactly(peer, 8))
            return {"latency": statistics.median(times) / 2, "rate": count / (time.perf_counter() - begin)}

    def _kept(self, name: str, *shape: int, **options):
        """Return a tensor of ones, which is created at the first call."""
        import torch

        if name not in self._tensors:
            self._tensors[name] = torch.ones(*shape, **options)
        return self._tensors[name]


def rate(call: Callable[[], object], done: Callable[[], object] = lambda: None, at_once: int = 1) -> float:
    """Return how often per second a call can run, over about ``WINDOW`` seconds.

    Args:
        call: starts the work.
        done: waits until the work is done.
        at_once: calls between two times that ``done`` is called.
    """
    call()
    done()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < WINDOW:
        for _ in range(at_once):
            call()
        done()
        count += at_once
    return count / (time.perf_counter() - begin)


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionError("the other node has closed the connection")
        data += part
    return data


def node_name() -> str:
    """Return the name that Slurm gives this node, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def boot() -> str:
    """Return a name of the running kernel. Nodes of a practice cluster have the same, because they share one machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def address() -> str:
    """Return the address of the interface that gloo uses: of GLOO_SOCKET_IFNAME, else the one of the host name."""
    from workshop.measure.collectives import gloo_interface

    for entry in psutil.net_if_addrs().get(gloo_interface(), []):
        if entry.family == socket.AF_INET:
            return entry.address
    return socket.gethostname()


def connect(host: str, port: int) -> socket.socket:
    """Connect to the program on the first node, which may start later.

    Raises:
        OSError: it did not answer within two minutes.
    """
    end = time.monotonic() + STARTING
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5)
            connection.settimeout(None)
            return connection
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
