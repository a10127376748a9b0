"""The lighthouse of tolerate.py: it knows which replicas are connected, and decides after each step whether the step is valid.

All replicas connect to it. Once per step, each replica sends its vote and waits for the answer, both as one line of JSON. On each
node, a launcher starts the replicas of this node. It starts a new one for each that is killed, and kills those that hang.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist


def serve(args, log):
    """Be the lighthouse, and the launcher of the replicas of this node. Return the exit status."""
    # The members of each quorum find each other in this store.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = socket.create_server(("" if args.address else "127.0.0.1", 0))
    port, statuses = server.getsockname()[1], []
    if args.address:
        with open(args.address + ".tmp", "w") as file:
            file.write(f"{socket.gethostname()}:{port}\n")
        os.replace(args.address + ".tmp", args.address)  # a reader never finds half an address
    launcher = threading.Thread(target=lambda: statuses.append(launch(args, ("127.0.0.1", port))), daemon=True)
    launcher.start()
    Lighthouse(server, store.port).decide(args, log)
    server.close()  # a replica that is just connecting ends
    launcher.join()
    return statuses[0]


def launch(args, address):
    """Start the replicas of this node, and a new one for each that is killed, until the training ends. Return the exit status."""
    lighthouse = open_connection(address)
    send(lighthouse, {"launcher": f"{socket.gethostname()}:{os.getpid()}"})
    answer = receive(lighthouse)
    if not answer:
        return 0  # the training has just ended
    command = [sys.executable, *sys.argv, "--join", *map(str, address), str(answer["store"])]
    replicas = [subprocess.Popen(command) for _ in range(args.replicas)]
    print(f"replicas: {' '.join(str(each.pid) for each in replicas)}", flush=True)
    message = {}
    while message is not None:  # None: the lighthouse has closed the connection
        for place, replica in enumerate(replicas):
            if replica.pid == message.get("kill"):
                replica.kill()
            status = replica.poll() or 0
            if status > 0:  # it failed with an error, and a new replica would fail too
                os._exit(status)
            if status < 0:  # it was killed by a signal
                replicas[place] = subprocess.Popen(command)
                print(f"replica {replica.pid} was killed; replica {replicas[place].pid} starts", flush=True)
        message = receive(lighthouse) if select.select([lighthouse], [], [], 0.05)[0] else {}
    return max(replica.wait() for replica in replicas)


class Lighthouse:
    """The connections to the replicas and the launchers, and the votes of the current step."""

    def __init__(self, server, store_port):
        self.server, self.store_port = server, store_port
        self.connections, self.launchers, self.votes, self.senders = [], {}, {}, {}

    def decide(self, args, log):
        """Collect the votes of all connected replicas. Answer: is the step valid, and who are the members of the next quorum?"""
        members, quorum, step = [], 0, 0
        while step < args.steps:
            self.listen(args.patience if self.votes and members else None)
            votes = self.votes
            if not votes or len(votes) < (len(self.connections) if members else args.replicas):
                continue
            survivors = [each for each in members if each in votes]
            joined = [each for each in votes if each not in members]
            valid = len(survivors) == len(members) > 0 and all(votes[each]["ok"] for each in members)
            first = (survivors + joined)[0]
            step = votes[first]["step"] + valid
            if valid:
                loss = sum(votes[each]["loss"] for each in members)
                line = {"step": step, "loss": loss, "replicas": len(members), "time": time.time()}
                log.write(json.dumps(line) + "\n")
            elif members:
                print(f"step {step + 1} is not valid: {len(survivors)} of {len(members)} replicas are left", flush=True)
            if joined or not valid:  # the members form a new process group
                quorum += 1
                print(f"quorum {quorum}, from step {step + 1}: {len(votes)} replicas", flush=True)
            members = survivors + joined  # the first survivor becomes rank 0, which sends its state to the others
            self.votes = {}
            for rank, each in enumerate(members):
                old = each in survivors  # a new replica has no gradients
                answer = {"valid": valid and old, "quorum": quorum, "rank": rank, "size": len(members)}
                send(each, answer | {"end": step == args.steps})

    def listen(self, patience):
        """Wait until somebody sends a message, connects, or dies; or until ``patience`` seconds have passed."""
        readable, _, _ = select.select([self.server, *self.connections, *self.launchers], [], [], patience)
        for each in readable:
            if each is self.server:
                self.connections.append(lines_of(self.server.accept()[0]))
            elif not (message := receive(each)):  # the connection is closed: this replica or launcher is dead
                self.forget(each)
            elif "launcher" in message:
                self.connections.remove(each)
                self.launchers[each] = message["launcher"]
                send(each, {"store": self.store_port})
            else:
                self.votes[each] = self.senders[each] = message
        if not readable:
            for each in set(self.connections) - set(self.votes):  # it hangs, or its node is dead
                self.kill(each)

    def kill(self, replica):
        """Let the launcher kill a replica, which must not come back later with old parameters."""
        sender = self.senders.get(replica, {})
        for connection, name in self.launchers.items():
            if name == sender.get("parent"):
                send(connection, {"kill": sender["pid"]})
        self.forget(replica)

    def forget(self, connection):
        """Close a connection to a replica or a launcher."""
        connection.close()
        self.connections = [each for each in self.connections if each is not connection]
        for known in (self.launchers, self.votes, self.senders):
            known.pop(connection, None)


def open_connection(address):
    """Connect to the lighthouse at an address (host and port)."""
    return lines_of(socket.create_connection(address))


def lines_of(connection):
    """Return a connection as a file of lines. If the node at the other end dies, its operations fail after 20 seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}.items():
        if hasattr(socket, name):  # not all systems have all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection.makefile("rwb", buffering=0)


def send(connection, message):
    with suppress(OSError):  # if the other side is dead, receive() notices it
        connection.write(json.dumps(message).encode() + b"\n")


def receive(connection):
    """Return the next message; None: the connection is closed."""
    with suppress(OSError):
        return json.loads(connection.readline() or "null")
