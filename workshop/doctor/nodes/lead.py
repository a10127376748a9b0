"""Give orders to the agents on all nodes, collect their measurements, and repeat them while a node seems slow."""

import json
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workshop.doctor.nodes.agent import STARTING
from workshop.doctor.nodes.compare import slow_nodes
from workshop.files import write_atomically

PASSES = 3  # of all measurements
MOST = 12  # passes while a node seems slow: see slow_nodes
PATIENCE = 30  # seconds for an answer


class Member:
    """A node that takes part.

    Attributes:
        about: what it says about itself: see ``Agent.describe``.
        values: its measurements so far, one per pass: see ``compare.slow_nodes``.
        clock: the difference of its clock, and the error of this difference, in seconds.
        silent: the order that it did not answer; "": it answers.
    """

    def __init__(self, connection: socket.socket):
        self.connection, self.lines = connection, connection.makefile("rw")
        self.about, self.values, self.clock, self.silent = {}, {}, {}, ""

    @property
    def name(self) -> str:
        """The name of the node."""
        return self.about["node"]

    def ask(self, order: str, **options) -> dict:
        """Send an order and return the answer; {}: the node does not answer."""
        if self.silent:
            return {}
        try:
            self.connection.settimeout(PATIENCE)
            self.lines.write(json.dumps({"do": order, **options}) + "\n")
            self.lines.flush()
            line = self.lines.readline()
            if line:
                return json.loads(line)
        except OSError:
            pass
        self.silent = order
        return {}

    def keep(self, values: dict) -> None:
        """Keep the measurements of a pass; of several GPUs, the slowest."""
        for key, value in values.items():
            value = min(value, default=0.0) if isinstance(value, list) else value
            if key != "error" and value:
                self.values.setdefault(key, []).append(value)


class Lead:
    """Measures all nodes.

    Args:
        port: the port at which the agents connect; 0: any.
        names: the names of the nodes.
    """

    def __init__(self, port: int, names: Sequence[str]):
        self.names = list(names)
        self.server = socket.create_server(("", port), backlog=len(self.names))
        self.port = self.server.getsockname()[1]
        self.members: list[Member] = []
        self.directions: dict[tuple[str, str], dict] = {}
        self.unreachable: dict[tuple[str, str], str] = {}
        self.passes = 0

    def run(self, result: Path) -> None:
        """Measure, and write the result."""
        begin = time.monotonic()
        self.gather()
        self.measure()
        for member in self.members:
            if not member.silent:
                member.lines.write('{"do": "end"}\n')
                member.lines.flush()
        content = {
            "nodes": self.nodes,
            "missing": [name for name in self.names if name not in self.nodes],
            "silent": {member.name: member.silent for member in self.members if member.silent},
            "pairs": [{"from": a, "to": b, **values} for (a, b), values in self.directions.items()],
            "unreachable": [{"from": a, "to": b, "error": error} for (a, b), error in self.unreachable.items()],
            "passes": self.passes,
            "seconds": round(time.monotonic() - begin, 1),
        }
        write_atomically(result, json.dumps(content, indent=1) + "\n")

    def gather(self) -> None:
        """Wait for all agents, at most two minutes."""
        end = time.monotonic() + STARTING
        self.server.settimeout(1)
        while len(self.members) < len(self.names) and time.monotonic() < end:
            try:
                member = Member(self.server.accept()[0])
            except TimeoutError:
                continue
            member.about = member.ask("describe")
            if not member.silent:
                self.members.append(member)
        self.members.sort(key=lambda member: self.names.index(member.name) if member.name in self.names else 0)

    @property
    def nodes(self) -> dict[str, dict]:
        """The measurements of each node, for ``compare.slow_nodes``."""
        found = {}
        for member in self.members:
            about = {key: member.about[key] for key in ("cores", "gpus")}
            found[member.name] = about | member.values | member.clock
        return found

    def _keep_network(self, seen: dict[tuple[str, str], dict]) -> None:
        """Keep the best connections of each node in a pass: slow only if it is slow with all others, in a direction or both."""
        for member in self.members:
            out = [values for (a, _), values in seen.items() if a == member.name]
            into = [values for (_, b), values in seen.items() if b == member.name]
            if out and into:
                rate = min(max(values["rate"] for values in way) for way in (out, into))
                member.keep({"network": rate, "latency": min(values["latency"] for values in out + into)})

    def measure(self) -> None:
        """Take passes, and more of them while a node seems slow."""
        while self.members and (self.passes < PASSES or (self.passes < MOST and slow_nodes(self.nodes))):
            self.take_pass()
            self.passes += 1

    def take_pass(self) -> None:
        """Measure once: the clocks, the speed of each node, its connection with itself, and all pairs."""
        for member in self.members:
            self._clock(member)
        for order in (
            "speed",
            "loopback",
            *(["gpu_speed"] if any(each.about["gpus"] for each in self.members) else []),
        ):
            self._together([lambda each=each, order=order: each.keep(each.ask(order)) for each in self.members])
        seen = {}
        for pairs in rounds(self.members):
            for turned in (False, True):
                ways = [(b, a) if turned else (a, b) for a, b in pairs]
                self._together([lambda way=way: self._pair(*way, seen) for way in ways])
        self._keep_network(seen)

    def _together(self, works: Iterable[Callable[[], None]]) -> None:
        """Do this on all nodes at the same time; in turn if nodes share a machine, because they would slow each other down."""
        works = list(works)
        machines = [member.about["machine"] for member in self.members]
        with ThreadPoolExecutor(1 if len(set(machines)) < len(machines) else max(1, len(works))) as pool:
            list(pool.map(lambda work: work(), works))

    def _clock(self, member: Member) -> None:
        for _ in range(5):
            sent = time.time()
            answer = member.ask("time")
            error = (time.time() - sent) / 2
            if answer and error < member.clock.get("clock_error", 1e9):
                member.clock = {"clock": answer["time"] - sent - error, "clock_error": error}

    def _pair(self, a: Member, b: Member, seen: dict[tuple[str, str], dict]) -> None:
        """Measure the connection from one node to a different one."""
        if a.silent or b.silent:
            return
        with ThreadPoolExecutor(1) as pool:
            answering = pool.submit(b.ask, "answer")
            values = a.ask("call", host=b.about["host"], port=b.about["port"])
            answering.result()
        way = (a.name, b.name)
        if "rate" not in values:
            self.unreachable[way] = values.get("error", "no answer")
            return
        self.unreachable.pop(way, None)
        known = self.directions.get(way, values)
        seen[way] = values
        self.directions[way] = {
            "rate": max(values["rate"], known["rate"]),
            "latency": min(values["latency"], known["latency"]),
        }


def rounds(members: Sequence) -> list[list[tuple]]:
    """Return all pairs in rounds, in each of which a member is at most once: n - 1 rounds for an even number of n members."""
    circle = [*members, *([None] * (len(members) % 2))]
    found = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        found.append([pair for pair in pairs if None not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found
