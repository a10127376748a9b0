"""Run as process 1 of the login node and of each compute node of a practice cluster.

``workshop.slurm.cluster`` starts this file with ``unshare``, so that each node has its own network, host name, processes, mounts
and shared memory. It uses only Python's standard library, because a node must start within a quarter of a second.

The login node is the parent of all compute nodes: when its process 1 ends, for any reason, the kernel kills every process
of every node, and removes the network and the mounts of the cluster.
"""

import contextlib
import functools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SLURMCTLD_PORT, SLURMD_PORT = 6817, 6818
ADDRESS = "10.77.0.{}"  # a network inside the cluster; the login node is 10.77.0.1

SLURM_CONF = """\
ClusterName=practice
SlurmctldHost=login
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={run}/munge.socket
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool-%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd-%n.pid
# Without cgroups and accounting, which a container and an ordinary user do not have.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1000
# The nodes claim more cores and memory than this machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
# As at many sites, Slurm restarts a job only if the job requests it (--requeue).
JobRequeue=0
ReturnToService=2
SlurmdTimeout=5
# Shorter than SlurmdTimeout, as by default (30 s and 300 s): srun gives up on a node before Slurm knows that it is dead.
KillWait=2
MinJobAge=86400
# The names of logs contain the job number, so a new cluster must not repeat the numbers of an earlier one.
FirstJobId={first_job}
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PropagateResourceLimits=NONE
NodeName=DEFAULT CPUs={cores} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
NodeName=node[1-{nodes}]
PartitionName=normal Nodes=ALL Default=YES DefaultTime=10 MaxTime=1440 State=UP
"""


def run(*command) -> str:
    """Run a command and return its output; if it fails, raise a RuntimeError with its message."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def wait_until(condition, seconds: float, what: str, why=None) -> None:
    """Wait until ``condition()`` holds; after ``seconds``, raise a RuntimeError with ``what`` and the result of ``why()``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} within {seconds:g} s" + (f": {why()}" if why else ""))
        time.sleep(0.02)


def login(folder: Path, specification: dict) -> None:
    """Become the login node, and start the controller and the compute nodes."""
    inside = folder / "run"
    run("mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", inside)
    become("login", inside, specification["nodes"])
    (inside / "specification.json").write_text(json.dumps(specification))
    run("ip", "link", "add", "bridge0", "type", "bridge")
    run("ip", "addr", "add", ADDRESS.format(1) + "/24", "dev", "bridge0")
    run("ip", "link", "set", "bridge0", "up")

    configure(inside, specification)
    start((inside / "munge.socket").exists, 10, inside / "munged.log", "munged", "--foreground", "--force",
          f"--socket={inside}/munge.socket", f"--key-file={inside}/munge.key", f"--pid-file={inside}/munged.pid",
          f"--seed-file={inside}/munged.seed", "--num-threads=4")  # fmt: skip
    serves = functools.partial(listens, SLURMCTLD_PORT)
    start(serves, 10, inside / "slurmctld.log", "slurmctld", "-D", "-f", inside / "slurm.conf")
    names = [f"node{number}" for number in range(1, specification["nodes"] + 1)]
    starting = [start_node(inside, name) for name in names]
    for name, node in zip(names, starting, strict=True):
        connect_node(inside, name, node)
    os.environ["SLURM_CONF"] = str(inside / "slurm.conf")
    wait_until(lambda: states() == ["idle"] * len(names), 20, "not all nodes came up", lambda: ", ".join(states()))


def become(name: str, inside: Path, nodes: int) -> None:
    """Give this node its host name, its own table of hosts, and its own shared memory."""
    run("hostname", name)
    run("ip", "link", "set", "lo", "up")
    hosts = ["127.0.0.1 localhost", f"{ADDRESS.format(1)} login"]
    hosts += [f"{ADDRESS.format(number + 1)} node{number}" for number in range(1, nodes + 1)]
    # Look up hosts only in this file: the network has no name server, so a query to one would wait for its timeout.
    switch = Path("/etc/nsswitch.conf")
    others = [line for line in switch.read_text().splitlines() if not line.startswith("hosts:")]
    for target, lines in ((Path("/etc/hosts"), hosts), (switch, [*others, "hosts: files"])):
        file = inside / f"{name}-{target.name}"
        file.write_text("\n".join(lines) + "\n")
        run("mount", "--bind", file, target)
    with contextlib.suppress(OSError):  # IPv6 may be off already
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    # Only Slurm sees the GPUs of the nodes. Hide the real GPUs, which every process of every node would find.
    for device in [*Path("/dev").glob("nvidia*"), Path("/dev/kfd"), Path("/dev/dxg")]:
        if device.is_char_device():
            run("mount", "--bind", "/dev/null", device)


def configure(inside: Path, specification: dict) -> None:
    """Write the configuration of munge and Slurm."""
    (inside / "munge.key").touch(mode=0o600)
    (inside / "munge.key").write_bytes(secrets.token_bytes(128))
    (inside / "state").mkdir()
    (inside / "nodes").mkdir()
    (inside / "slurm.conf").write_text(
        SLURM_CONF.format(
            **specification, run=inside, memory=64000 * specification["cores"], first_job=int(time.time()) % 1_000_000
        )
    )
    # Slurm needs one device file per GPU, with a number at the end of its name.
    for number in range(specification["gpus"]):
        (inside / f"gpu{number}").symlink_to("/dev/null")
    (inside / "gres.conf").write_text(f"Name=gpu File={inside}/gpu[0-{specification['gpus'] - 1}]\n")


def start(serves, seconds: float, log: Path, *command) -> None:
    """Start a daemon that writes its messages to a log, and wait until ``serves()`` holds."""
    # Not with Slurm's own option for a log: Slurm opens it only after it has read the configuration, and would lose those errors.
    with log.open("a") as said:
        program = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    wait_until(
        lambda: program.poll() is not None or serves(), seconds, f"{command[0]} does not reply", lambda: last_lines(log)
    )
    if program.poll() is not None:
        raise RuntimeError(f"{command[0]} did not start: {last_lines(log)}")


def start_node(inside: Path, name: str) -> subprocess.Popen:
    """Start process 1 of a compute node, which waits for its network."""
    return subprocess.Popen(
        ["unshare", "--mount", "--net", "--uts", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc",
         sys.executable, "-I", "-S", __file__, "node", str(inside.parent), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=open(inside / f"{name}.log", "w"),
        text=True,
        start_new_session=True,
    )  # fmt: skip


def connect_node(inside: Path, name: str, node: subprocess.Popen) -> None:
    """Connect a node that has just started to the bridge of the login node, and let it continue."""
    if node.stdout.readline() != "here\n":
        raise RuntimeError(f"{name} did not start: {last_lines(inside / f'{name}.log')}")
    first = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()[0]
    # A node that comes back keeps its hardware address, because the other nodes have cached it.
    hardware = f"02:00:00:00:00:{int(name.removeprefix('node')):02x}"
    run("ip", "link", "add", cable(name), "type", "veth", "peer", "name", "eth0", "address", hardware, "netns", first)
    run("ip", "link", "set", cable(name), "master", "bridge0", "up")
    (inside / "nodes" / name).write_text(first)
    node.stdin.write("connected\n")
    node.stdin.close()
    if node.stdout.readline() != "up\n":
        raise RuntimeError(f"{name} did not come up: {last_lines(inside / f'{name}.log')}")


def cable(name: str) -> str:
    """Return the name of the network interface on the login node that is connected to a node."""
    return f"to-{name}"


def node(folder: Path, name: str) -> None:
    """Become a compute node."""
    inside = folder / "run"
    specification = json.loads((inside / "specification.json").read_text())
    become(name, inside, specification["nodes"])
    print("here", flush=True)
    sys.stdin.readline()
    run("ip", "addr", "add", ADDRESS.format(int(name.removeprefix("node")) + 1) + "/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    serves = functools.partial(listens, SLURMD_PORT)
    start(serves, 20, inside / f"slurmd-{name}.log", "slurmd", "-D", "-f", inside / "slurm.conf", "-N", name)
    print("up", flush=True)


def listens(port: int) -> bool:
    """Return whether a program listens on a port of this node."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def states() -> list[str]:
    """Return the state of each node, as sinfo names it."""
    done = subprocess.run(["sinfo", "--noheader", "--Node", "--format=%T"], capture_output=True, text=True)
    return done.stdout.split()


def last_lines(log: Path) -> str:
    """Return the last two lines of a log for an error message: Slurm first logs why it ends, and then that it ends."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return "; ".join(lines[-2:]) or "it printed nothing"


def kill(folder: Path, name: str) -> None:
    """Kill a node: all its processes end at once, as in a power failure."""
    first = folder / "run" / "nodes" / name
    process = int(first.read_text())
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{process}").exists(), 10, f"{name} did not die")
    # The kernel removes the network interface too, but perhaps only after the node has come back.
    with contextlib.suppress(RuntimeError):
        run("ip", "link", "delete", cable(name))
    first.unlink()


def cut(folder: Path, name: str) -> None:
    """Cut the network of a node: its processes continue, but no other node can reach them."""
    run("ip", "link", "set", cable(name), "down")


def heal(folder: Path, name: str) -> None:
    """Reconnect the network of a node, and start the node again if it was killed."""
    inside = folder / "run"
    if (inside / "nodes" / name).exists():
        run("ip", "link", "set", cable(name), "up")
    else:
        connect_node(inside, name, start_node(inside, name))


def stay(orders: socket.socket | None = None, tied: Path | None = None) -> None:
    """Act as process 1: reap the processes whose parents have ended, and carry out orders, until told to end.

    ``tied``: the folder of a cluster that belongs to a program; the cluster ends when that program closes our standard input.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    heard = ([orders] if orders else []) + ([sys.stdin] if tied else [])
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        ready, _, _ = select.select(heard, [], [], 0.5)
        if sys.stdin in ready:
            run("umount", "--lazy", tied / "run")
            shutil.rmtree(tied, ignore_errors=True)
            os._exit(0)
        if orders in ready:
            carry_out(orders)


def carry_out(orders: socket.socket) -> None:
    """Carry out an order, and answer "done" or the reason why it failed."""
    customer, _ = orders.accept()
    with customer:
        customer.settimeout(5)  # a client that sends nothing must not block this process
        try:
            action, folder, name = customer.recv(4096).decode().split("\n")
            {"kill": kill, "cut": cut, "heal": heal}[action](Path(folder), name)
            answer = "done"
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            answer = str(error) or type(error).__name__
        with contextlib.suppress(OSError):  # the client may have ended
            customer.sendall(answer.encode())


def take_orders(folder: Path) -> socket.socket:
    """Open the socket for orders to kill, cut or heal a node; without root, only this process has the rights to do that."""
    orders = socket.socket(socket.AF_UNIX)
    orders.bind(str(folder / "orders"))
    orders.listen()
    return orders


def main() -> None:
    """Become the node of ``node.py login FOLDER SPECIFICATION`` or ``node.py node FOLDER NAME``, and run until it ends."""
    kind, folder, argument = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    orders, tied = None, None
    try:
        if kind == "login":
            specification = json.loads(argument)
            tied = folder if specification.pop("tied") else None
            login(folder, specification)
            orders = take_orders(folder)
            print("ready", flush=True)  # fails, and so ends the cluster, if the process that started it has ended
        else:
            node(folder, argument)
    except (RuntimeError, OSError) as error:
        sys.exit(" ".join(str(error).split()))
    os.close(1)  # the process that reads our output then sees its end
    stay(orders, tied)


if __name__ == "__main__":
    main()
