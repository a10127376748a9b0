"""``workshop cluster``: run a real Slurm cluster of several nodes on this machine, for practice.

Each node is a set of Linux namespaces: it has its own host name, network address, processes and shared memory, and uses the files
of this machine. ``workshop/slurm/node.py`` runs inside. All nodes depend on process 1 of the login node: when it ends, the kernel
kills all other processes and removes the network, so no process is left behind.
"""

import fcntl
import json
import os
import pwd
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import psutil

from workshop.errors import UserError
from workshop.repository import workshop_command
from workshop.run.environment import without_launcher
from workshop.run.processes import end_family

NODE = Path(__file__).with_name("node.py")
# The states of a job that has ended.
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}
# The programs that a cluster needs, each with its package on Debian and Ubuntu, and on Fedora.
PROGRAMS = {
    "slurmctld": ("slurmctld", "slurm-slurmctld"),
    "slurmd": ("slurmd", "slurm-slurmd"),
    "sbatch": ("slurm-client", "slurm"),
    "munged": ("munge", "munge"),
    "ip": ("iproute2", "iproute"),
    "unshare": ("util-linux", "util-linux"),
    "nsenter": ("util-linux", "util-linux"),
}
# The daemons are in /usr/sbin, which is not on the PATH of an ordinary user.
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        name: its name; several clusters can run side by side.
        folder: the folder of its files; ``folder / "run"`` is visible only inside the cluster.
        first: the process ID, outside the cluster, of process 1 of the login node. All nodes depend on it.
        nodes: the number of compute nodes, node1 to nodeN.
        gpus: the number of GPUs that each node reports.
        cores: the number of cores that each node reports.
        tie: a pipe, if the cluster belongs to this process: when it closes, at the latest with this process, the cluster ends.
    """

    name: str
    folder: Path
    first: int
    nodes: int
    gpus: int
    cores: int
    tie: IO | None = None

    def inside(self, command: Sequence[str], node: str = "", folder: Path | None = None) -> list[str]:
        """Return the command line that runs ``command`` on a node ("": the login node), in a folder (None: the current one)."""
        target = self.first if not node else self._first_of(node)
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        enter = ["nsenter", f"--target={target}", *user, "--mount", "--net", "--uts", "--pid", "--ipc"]
        settings = [
            f"SLURM_CONF={self.folder}/run/slurm.conf",
            f"PATH={Path(sys.executable).parent}{os.pathsep}{SEARCH_PATH}",
            "OMP_WAIT_POLICY=passive",  # the nodes report more cores than exist: a waiting thread must not occupy one
        ]
        return [*enter, "env", f"--chdir={folder or Path.cwd()}", *settings, *command]

    def run(self, *command: str, node: str = "", check: bool = True) -> str:
        """Run a command on a node and return its output.

        Raises:
            UserError: the command failed; the message is its output.
        """
        done = subprocess.run(
            self.inside(command, node), env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if check and done.returncode != 0:
            raise UserError((done.stderr or done.stdout).strip() or f"{command[0]} ended with status {done.returncode}")
        return done.stdout

    def _first_of(self, node: str) -> int:
        """Return the process ID, outside the cluster, of process 1 of a compute node.

        Raises:
            UserError: there is no such node, or it has been killed.
        """
        self.require_node(node)
        mark = ["node", str(self.folder), node]
        for process in psutil.Process(self.first).children():  # the unshare that started the node
            with suppress(psutil.Error):
                if process.cmdline()[-3:] == mark and (inside := process.children()):
                    return inside[0].pid
        raise UserError(f"{node} has been killed; bring it back with: {workshop_command()} cluster heal {node}")

    def require_node(self, node: str) -> None:
        """Raise a UserError if there is no such node."""
        if node not in self.names:
            raise UserError(f"there is no {node}; this cluster has {self.names[0]} to {self.names[-1]}")

    @property
    def names(self) -> list[str]:
        """The names of its compute nodes."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    def fault(self, action: str, node: str) -> None:
        """``kill``, ``cut`` or ``heal`` a node."""
        self.require_node(node)
        if action != "heal":
            self._first_of(node)  # raises an error if the node has been killed already
        with socket.socket(socket.AF_UNIX) as order:
            order.connect(str(self.folder / "orders"))
            order.sendall(f"{action}\n{self.folder}\n{node}".encode())
            answer = order.recv(4096).decode()
        if answer != "done":
            raise UserError(f"{node}: {answer}")

    def version(self) -> str:
        """Return the version of Slurm."""
        return self.run("sinfo", "--version").split()[-1]

    def end(self) -> None:
        """End the cluster: all processes of all nodes, its network and its files."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.first)
            holder = first.parent()  # unshare; if it is a child of this process, it must be waited for
            first.kill()
            psutil.wait_procs([first, holder] if holder else [first], timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


def environment() -> dict[str, str]:
    """Return the environment for commands on a cluster, without the variables of a job in which this process itself may run."""
    return without_launcher(os.environ)


def _folder(name: str) -> Path:
    """Return the folder of a cluster. It is not in the home folder, whose file system may not support sockets."""
    return Path(tempfile.gettempdir()) / f"workshop-{os.geteuid()}" / name


def find_cluster(name: str = "local") -> Cluster | None:
    """Return the cluster of this name, or None if it is not running."""
    folder = _folder(name)
    try:
        known = json.loads((folder / "cluster.json").read_text())
        first = psutil.Process(known["first"])
        if first.create_time() != known.pop("created") or first.status() == psutil.STATUS_ZOMBIE:
            return None  # the cluster has ended; a different process may have its process ID now
    except (OSError, ValueError, psutil.Error):
        return None
    return Cluster(name, folder, **known)


def require_cluster(name: str = "local") -> Cluster:
    """Return the cluster of this name.

    Raises:
        UserError: it is not running.
    """
    cluster = find_cluster(name)
    if cluster is None:
        raise UserError(f"no practice cluster is up; start one with: {workshop_command()} cluster up 4{_named(name)}")
    return cluster


def missing_packages() -> list[str]:
    """Return the packages that a cluster still needs, by their names on Fedora if dnf exists, else on Debian and Ubuntu."""
    fedora = bool(shutil.which("dnf"))
    missing = [names[fedora] for program, names in PROGRAMS.items() if not shutil.which(program, path=SEARCH_PATH)]
    return list(dict.fromkeys(missing))


def require_machine() -> None:
    """Raise a UserError that says what to do if no cluster can be started here."""
    if sys.platform != "linux":
        raise UserError("a practice cluster needs Linux; on this machine run it in a Linux virtual machine")
    if packages := missing_packages():
        install = "dnf install" if shutil.which("dnf") else "apt-get install --no-install-recommends"
        raise UserError(
            f"a practice cluster needs programs that are not installed: sudo {install} {' '.join(packages)}"
        )
    done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, env={"PATH": SEARCH_PATH})
    if done.returncode != 0:
        if os.geteuid() == 0:
            what = "this container may not create namespaces; start it with --privileged, or use a virtual machine"
        else:
            what = "this system lets only root create namespaces (Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
        raise UserError(f"{what}; unshare says: {done.stderr.strip()}")


def _unshare() -> list[str]:
    """Return the command line that creates the namespaces of a node; an ordinary user needs a user namespace for this."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    kinds = ["--mount", "--net", "--uts", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *user, *kinds]


def up(nodes: int, gpus: int = 4, cores: int = 8, name: str = "local", mine: bool = False) -> Cluster:
    """Start a cluster, and return it when all its nodes are idle.

    Args:
        nodes: the number of compute nodes, without the login node.
        gpus: the number of GPUs that each node reports. Only Slurm sees them: programs find none, and train on the CPU.
        cores: the number of cores that each node reports; all nodes share the cores of this machine.
        name: its name; several clusters can run side by side.
        mine: whether the cluster belongs to this process, and ends with it, however this process ends.

    Raises:
        UserError: no cluster can run here, or a cluster of this name is running already.
    """
    if not name.isidentifier():
        raise UserError(f"--name {name!r}: use only letters, digits and _, and begin with a letter")
    require_machine()
    folder = _folder(name)
    if len(str(folder)) > 60:  # Slurm appends 45 characters, and the path of a socket has at most 107
        raise UserError(f"the path {folder} is too long for sockets; set TMPDIR to a shorter one, such as /tmp")
    with suppress(FileExistsError):
        folder.parent.mkdir(mode=0o700)
    if folder.parent.is_symlink() or folder.parent.stat().st_uid != os.geteuid():
        raise UserError(f"{folder.parent} belongs to a different user; set TMPDIR to a folder of your own")
    held = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)  # clusters start one after the other
        if find_cluster(name):
            raise UserError(f"the cluster is up already; end it with: {workshop_command()} cluster down{_named(name)}")
        shutil.rmtree(folder, ignore_errors=True)  # left by a cluster that crashed
        (folder / "run").mkdir(parents=True, mode=0o700)
        try:
            return _start(Cluster(name, folder, 0, nodes, gpus, cores), mine)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(held)


def _start(cluster: Cluster, mine: bool) -> Cluster:
    """Start the login node, which starts the other nodes; when it is ready, write cluster.json."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    specification = {"nodes": cluster.nodes, "gpus": cluster.gpus, "cores": cluster.cores, "user": user, "tied": mine}
    python = [sys.executable, "-I", "-S", str(NODE)]
    with open(cluster.folder / "up.log", "w") as log:
        process = subprocess.Popen(
            [*_unshare(), *python, "login", str(cluster.folder), json.dumps(specification)],
            env=environment() | {"PATH": SEARCH_PATH},
            stdin=subprocess.PIPE if mine else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # so that Ctrl-C in this terminal does not end the cluster
        )
    try:
        readable, _, _ = select.select([process.stdout], [], [], 60)
        if not readable or process.stdout.readline() != "ready\n":
            said = (cluster.folder / "up.log").read_text(errors="replace").strip().splitlines()
            raise UserError(f"the cluster did not start: {said[-1] if said else 'it printed nothing'}")
        first = psutil.Process(process.pid).children()[0]
        known = {"first": first.pid, "nodes": cluster.nodes, "gpus": cluster.gpus, "cores": cluster.cores}
        (cluster.folder / "cluster.json").write_text(json.dumps(known | {"created": first.create_time()}))
    except BaseException:
        end_family(process, grace=0)
        raise
    return replace(cluster, first=first.pid, tie=process.stdin)


def _named(name: str) -> str:
    return "" if name == "local" else f" --name {name}"


# -- the commands ---------------------------------------------------------------------------------------------------------


def run_up(nodes: int, gpus: int, cores: int, name: str) -> None:
    """Run ``workshop cluster up``."""
    start = time.monotonic()
    cluster = up(nodes, gpus, cores, name)
    command = f"{workshop_command()} cluster exec{_named(name)}"
    print(
        f"{nodes} nodes with {cores} cores and {gpus} GPUs each are up after {time.monotonic() - start:.1f} s: "
        f"Slurm {cluster.version()}"
    )
    print("The nodes share the cores of this machine. Only Slurm sees the GPUs: programs train on the CPU.")
    for line, what in (
        (command, "a shell on its login node: sinfo, sbatch, squeue, scancel, srun"),
        (f"{command} sinfo", "a single command there"),
        (f"{workshop_command()} cluster down{_named(name)}", "ends the cluster"),
    ):
        print(f"  {line:{len(command) + 8}}{what}")


def run_status(name: str) -> None:
    """Run ``workshop cluster status``: print nodes and jobs, as Slurm shows them."""
    cluster = require_cluster(name)
    print(cluster.run("sinfo", "--Node", "--format=%8N %10T %5c %12G %E"))
    print(cluster.run("squeue", "--format=%.6i %24j %10T %8M %6D %R"), end="")


def run_exec(command: Sequence[str], node: str, name: str) -> None:
    """Run ``workshop cluster exec``: replace this process with the command, on the login node or on a compute node."""
    inside = require_cluster(name).inside(command or ["bash"], node)
    os.execvpe(inside[0], inside, environment())


def run_fault(action: str, node: str, name: str) -> None:
    """Run ``workshop cluster kill``, ``cut`` or ``heal``."""
    require_cluster(name).fault(action, node)
    print(
        {
            "kill": f"{node} is dead. Slurm notices within half a minute, then ends its jobs, or restarts them (--requeue).",
            "cut": f"{node} still runs, but its network is cut. Slurm notices within half a minute.",
            "heal": f"{node} is back; Slurm uses it again within seconds.",
        }[action]
    )


def run_down(name: str) -> None:
    """Run ``workshop cluster down``."""
    require_cluster(name).end()
    print("The cluster and all its processes have ended.")
