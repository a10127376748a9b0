"""The inside of a practice cluster: what runs as process 1 of its login node and of each compute node.

``workshop.slurm.cluster`` starts this file with ``unshare``, so that each node has its own network, host name, processes, mounts
and shared memory. It needs nothing but Python's own library, because a node has to be there within a quarter of a second.

The login node is the parent of all: when its process 1 ends, however it ends, the kernel ends every process of every node, and
with them go the network, the mounts and the files of the cluster.
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
ADDRESS = "10.77.0.{}"  # a network that only the cluster sees; the login node is 1

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
# Neither cgroups nor accounting: a container and an ordinary user have none.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1000
# The nodes claim more cores and memory than this machine has.
SlurmdParameters=config_overrides
GresTypes=gpu
# As on many sites, a job is started again only if it asks for that (--requeue).
JobRequeue=0
ReturnToService=2
SlurmdTimeout=5
# Shorter than SlurmdTimeout, as everywhere (30 s and 300 s): srun gives a node up before Slurm knows that it is dead.
KillWait=2
MinJobAge=86400
# Files carry the job's number in their names: no number of an earlier cluster comes again.
FirstJobId={first_job}
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PropagateResourceLimits=NONE
NodeName=DEFAULT CPUs={cores} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
NodeName=node[1-{nodes}]
PartitionName=normal Nodes=ALL Default=YES DefaultTime=10 MaxTime=1440 State=UP
"""


def run(*command) -> str:
    """Run a command to its end and return its output; what it says when it fails is the error."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def wait_until(condition, seconds: float, what: str, why=None) -> None:
    """Wait until ``condition()`` holds; if it does not, the error is ``what``, and what ``why()`` says by then."""
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
    """Give this node its host name, its own view of the network's names, and shared memory of its own."""
    run("hostname", name)
    run("ip", "link", "set", "lo", "up")
    hosts = ["127.0.0.1 localhost", f"{ADDRESS.format(1)} login"]
    hosts += [f"{ADDRESS.format(number + 1)} node{number}" for number in range(1, nodes + 1)]
    # Hosts come from this file alone: a look-up that goes to a name server would wait for one in a network that has none.
    switch = Path("/etc/nsswitch.conf")
    others = [line for line in switch.read_text().splitlines() if not line.startswith("hosts:")]
    for target, lines in ((Path("/etc/hosts"), hosts), (switch, [*others, "hosts: files"])):
        file = inside / f"{name}-{target.name}"
        file.write_text("\n".join(lines) + "\n")
        run("mount", "--bind", file, target)
    with contextlib.suppress(OSError):  # where IPv6 is off already
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    # The nodes' GPUs are for counting only. A real one would be seen by every process of every node: hide it.
    for device in [*Path("/dev").glob("nvidia*"), Path("/dev/kfd"), Path("/dev/dxg")]:
        if device.is_char_device():
            run("mount", "--bind", "/dev/null", device)


def configure(inside: Path, specification: dict) -> None:
    """Write the settings of munge and Slurm."""
    (inside / "munge.key").touch(mode=0o600)
    (inside / "munge.key").write_bytes(secrets.token_bytes(128))
    (inside / "state").mkdir()
    (inside / "nodes").mkdir()
    (inside / "slurm.conf").write_text(
        SLURM_CONF.format(
            **specification, run=inside, memory=64000 * specification["cores"], first_job=int(time.time()) % 1_000_000
        )
    )
    # A GPU is a device file with a number at its end: Slurm wants one for each.
    for number in range(specification["gpus"]):
        (inside / f"gpu{number}").symlink_to("/dev/null")
    (inside / "gres.conf").write_text(f"Name=gpu File={inside}/gpu[0-{specification['gpus'] - 1}]\n")


def start(serves, seconds: float, log: Path, *command) -> None:
    """Start a program that stays, which writes what it says to a log, and wait until ``serves()`` holds."""
    # Not by an option of its own: Slurm opens that file only after it has read the configuration, whose errors would be lost.
    with log.open("a") as said:
        program = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    wait_until(
        lambda: program.poll() is not None or serves(), seconds, f"{command[0]} does not serve", lambda: last_lines(log)
    )
    if program.poll() is not None:
        raise RuntimeError(f"{command[0]} did not start: {last_lines(log)}")


def start_node(inside: Path, name: str) -> subprocess.Popen:
    """Start a compute node's process 1, which waits for its network."""
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
    """Lay the cable from the login node's bridge to a node that has just started, and let it go on."""
    if node.stdout.readline() != "here\n":
        raise RuntimeError(f"{name} did not start: {last_lines(inside / f'{name}.log')}")
    first = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()[0]
    # A node keeps its hardware address when it comes back: the others still know it by the old one.
    hardware = f"02:00:00:00:00:{int(name.removeprefix('node')):02x}"
    run("ip", "link", "add", cable(name), "type", "veth", "peer", "name", "eth0", "address", hardware, "netns", first)
    run("ip", "link", "set", cable(name), "master", "bridge0", "up")
    (inside / "nodes" / name).write_text(first)
    node.stdin.write("connected\n")
    node.stdin.close()
    if node.stdout.readline() != "up\n":
        raise RuntimeError(f"{name} did not come up: {last_lines(inside / f'{name}.log')}")


def cable(name: str) -> str:
    """The login node's end of a node's cable."""
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
    """Whether something listens at a port of this node."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def states() -> list[str]:
    """The state of each node, as sinfo names it."""
    done = subprocess.run(["sinfo", "--noheader", "--Node", "--format=%T"], capture_output=True, text=True)
    return done.stdout.split()


def last_lines(log: Path) -> str:
    """The last two lines of a log, for an error's sentence: Slurm says why it ends, and then that it does."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return "; ".join(lines[-2:]) or "it says nothing"


def kill(folder: Path, name: str) -> None:
    """Pull a node's plug: all its processes are gone at once."""
    first = folder / "run" / "nodes" / name
    process = int(first.read_text())
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{process}").exists(), 10, f"{name} did not die")
    # The kernel takes the cable away as well, now or some time later; the node may be back before that.
    with contextlib.suppress(RuntimeError):
        run("ip", "link", "delete", cable(name))
    first.unlink()


def cut(folder: Path, name: str) -> None:
    """Cut a node's network: its processes go on, and nobody hears of them."""
    run("ip", "link", "set", cable(name), "down")


def heal(folder: Path, name: str) -> None:
    """Plug a node in again: its network, and the node itself if it was killed."""
    inside = folder / "run"
    if (inside / "nodes" / name).exists():
        run("ip", "link", "set", cable(name), "up")
    else:
        connect_node(inside, name, start_node(inside, name))


def stay(orders: socket.socket | None = None, tied: Path | None = None) -> None:
    """Be process 1: clear away the processes whose parents have died, and carry out orders, until told to end.

    ``tied``: the folder of a cluster that belongs to a program, which holds standard input open as long as it lives.
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
    """Do what somebody orders, and answer "done", or why it could not be done."""
    customer, _ = orders.accept()
    with customer:
        customer.settimeout(5)  # one that says nothing does not stop this process
        try:
            action, folder, name = customer.recv(4096).decode().split("\n")
            {"kill": kill, "cut": cut, "heal": heal}[action](Path(folder), name)
            answer = "done"
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            answer = str(error) or type(error).__name__
        with contextlib.suppress(OSError):  # whoever asked may have gone
            customer.sendall(answer.encode())


def take_orders(folder: Path) -> socket.socket:
    """The socket at which this process hears what shall happen to a node: it alone has the rights, where the user is not root."""
    orders = socket.socket(socket.AF_UNIX)
    orders.bind(str(folder / "orders"))
    orders.listen()
    return orders


def main() -> None:
    """``node.py login FOLDER SPECIFICATION`` and ``node.py node FOLDER NAME``: become that node, and stay."""
    kind, folder, argument = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    orders, tied = None, None
    try:
        if kind == "login":
            specification = json.loads(argument)
            tied = folder if specification.pop("tied") else None
            login(folder, specification)
            orders = take_orders(folder)
            print("ready", flush=True)  # fails, and so ends the cluster, when whoever started it has gone
        else:
            node(folder, argument)
    except (RuntimeError, OSError) as error:
        sys.exit(" ".join(str(error).split()))
    os.close(1)  # whoever waits for our output has read all there is
    stay(orders, tied)


if __name__ == "__main__":
    main()
