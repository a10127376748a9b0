"""The lighthouse of tolerate.py: it knows which replicas are connected, and decides after each step whether the step is valid.

All replicas connect to it. Once per step, each replica sends its vote and waits for the answer, both as one line of JSON.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist


def launch(args, log):
    """Start the replicas and be their lighthouse. Return the exit status."""
    server = socket.create_server(("127.0.0.1", 0))
    # The members of each quorum find each other in this store.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, *sys.argv, "--join", str(server.getsockname()[1]), str(store.port)]
    replicas = [subprocess.Popen(command) for _ in range(args.replicas)]
    print(f"replicas: {' '.join(str(each.pid) for each in replicas)}", flush=True)
    ended = threading.Event()
    threading.Thread(target=replace_killed, args=(replicas, command, ended), daemon=True).start()
    decide(server, args, log)
    ended.set()
    return max(replica.wait() for replica in replicas)


def replace_killed(replicas, command, ended):
    """Start a new replica for each one that is killed."""
    while not ended.wait(0.05):
        for place, replica in enumerate(replicas):
            status = replica.poll() or 0
            if status > 0:  # it failed with an error, and a new replica would fail too
                os._exit(status)
            if status < 0:  # it was killed by a signal
                replicas[place] = subprocess.Popen(command)
                print(f"replica {replica.pid} was killed; replica {replicas[place].pid} starts", flush=True)


def decide(server, args, log):
    """Collect the votes of all connected replicas. Answer: is the step valid, and who are the members of the next quorum?"""
    connections, members, votes, pids, quorum, step = [], [], {}, {}, 0, 0
    while step < args.steps:
        patience = args.patience if votes and members else None
        readable, _, _ = select.select([server, *connections], [], [], patience)
        for each in readable:
            if each is server:
                connections.append(server.accept()[0].makefile("rwb", buffering=0))
            elif vote := receive(each):
                votes[each] = vote
            else:  # the connection is closed: this replica is dead
                connections.remove(each)
                votes.pop(each, None)
        if not readable:  # a replica that hangs must not come back later with old parameters, so kill it
            for each in set(members) & set(connections) - set(votes):
                with suppress(ProcessLookupError):
                    os.kill(pids[each], signal.SIGKILL)
        if not votes or len(votes) < (len(connections) if members else args.replicas):
            continue

        survivors = [each for each in members if each in votes]
        joined = [each for each in votes if each not in members]
        valid = len(survivors) == len(members) > 0 and all(votes[each]["ok"] for each in members)
        first = (survivors + joined)[0]
        step = votes[first]["step"] + valid
        if valid:
            loss = sum(votes[each]["loss"] for each in members)
            log.write(json.dumps({"step": step, "loss": loss, "replicas": len(members), "time": time.time()}) + "\n")
        elif members:
            print(f"step {step + 1} is not valid: {len(survivors)} of {len(members)} replicas are left", flush=True)
        if joined or not valid:  # the members form a new process group
            quorum += 1
            print(f"quorum {quorum}, from step {step + 1}: {len(votes)} replicas", flush=True)
        members = survivors + joined  # the first survivor becomes rank 0, which sends its state to the others
        pids = {each: votes[each]["pid"] for each in members}
        votes = {}
        for rank, each in enumerate(members):
            old = each in survivors  # a new replica has no gradients
            answer = {"valid": valid and old, "quorum": quorum, "rank": rank, "size": len(members)}
            send(each, answer | {"end": step == args.steps})
    server.close()


def send(connection, message):
    with suppress(OSError):  # if the other side is dead, receive() notices it
        connection.write(json.dumps(message).encode() + b"\n")


def receive(connection):
    """Return the next message; None: the connection is closed."""
    with suppress(OSError):
        return json.loads(connection.readline() or "null")
