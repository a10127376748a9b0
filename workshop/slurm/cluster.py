"""``workshop cluster``: a real Slurm of several nodes on this machine, to practise on.

Each node is a set of Linux namespaces: a host name, a network address, processes and shared memory of its own, on this machine's
files. ``workshop/slurm/node.py`` runs inside. All of it hangs on one process, the login node's first; when that ends, the kernel
clears everything away, so nothing can be left behind.
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
# The states in which a job is over.
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"}
# The programs a cluster needs, and the packages that bring them.
PROGRAMS = {
    "slurmctld": ("slurmctld", "slurm-slurmctld"),
    "slurmd": ("slurmd", "slurm-slurmd"),
    "sbatch": ("slurm-client", "slurm"),
    "munged": ("munge", "munge"),
    "ip": ("iproute2", "iproute"),
    "unshare": ("util-linux", "util-linux"),
    "nsenter": ("util-linux", "util-linux"),
}
# An ordinary user does not have /usr/sbin, where the daemons lie, on the path.
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up.

    Attributes:
        name: several can be up side by side.
        folder: its files; ``folder / "run"`` can only be seen from inside.
        first: the process, as this machine counts, on which all of it hangs.
        nodes: the number of compute nodes, node1 to nodeN.
        gpus: how many GPUs each node says it has.
        cores: how many cores each node says it has.
        tie: what it hangs on if it belongs to this process: when this is closed, at the latest with this process, it ends.
    """

    name: str
    folder: Path
    first: int
    nodes: int
    gpus: int
    cores: int
    tie: IO | None = None

    def inside(self, command: Sequence[str], node: str = "", folder: Path | None = None) -> list[str]:
        """The command line that runs ``command`` on a node ("": the login node), in a folder (None: the current one)."""
        target = self.first if not node else self._first_of(node)
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        enter = ["nsenter", f"--target={target}", *user, "--mount", "--net", "--uts", "--pid", "--ipc"]
        settings = [
            f"SLURM_CONF={self.folder}/run/slurm.conf",
            f"PATH={Path(sys.executable).parent}{os.pathsep}{SEARCH_PATH}",
            "OMP_WAIT_POLICY=passive",  # there are fewer cores than the nodes say: a thread that waits must not take one
        ]
        return [*enter, "env", f"--chdir={folder or Path.cwd()}", *settings, *command]

    def run(self, *command: str, node: str = "", check: bool = True) -> str:
        """Run a command on a node and return its output.

        Raises:
            UserError: it failed, with what it said.
        """
        done = subprocess.run(
            self.inside(command, node), env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if check and done.returncode != 0:
            raise UserError((done.stderr or done.stdout).strip() or f"{command[0]} ended with status {done.returncode}")
        return done.stdout

    def _first_of(self, node: str) -> int:
        """The first process of a compute node, as this machine counts.

        Raises:
            UserError: there is no such node, or it has been killed.
        """
        self.require_node(node)
        mark = ["node", str(self.folder), node]
        for process in psutil.Process(self.first).children():  # the unshare that holds the node
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
            self._first_of(node)  # a killed node can neither be killed nor cut
        with socket.socket(socket.AF_UNIX) as order:
            order.connect(str(self.folder / "orders"))
            order.sendall(f"{action}\n{self.folder}\n{node}".encode())
            answer = order.recv(4096).decode()
        if answer != "done":
            raise UserError(f"{node}: {answer}")

    def version(self) -> str:
        """Slurm's version."""
        return self.run("sinfo", "--version").split()[-1]

    def end(self) -> None:
        """End it: every process of every node, its network and its files."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.first)
            holder = first.parent()  # unshare; a child of this process, perhaps, that wants to be waited for
            first.kill()
            psutil.wait_procs([first, holder] if holder else [first], timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


def environment() -> dict[str, str]:
    """The environment of what runs on a cluster: no job of another scheduler, such as a notebook's own, shines through."""
    return without_launcher(os.environ)


def _folder(name: str) -> Path:
    """Where a cluster's files lie. On this machine's own disk: a home folder may be on a network that knows no sockets."""
    return Path(tempfile.gettempdir()) / f"workshop-{os.geteuid()}" / name


def find_cluster(name: str = "local") -> Cluster | None:
    """The cluster of this name, if it is up."""
    folder = _folder(name)
    try:
        known = json.loads((folder / "cluster.json").read_text())
        first = psutil.Process(known["first"])
        if first.create_time() != known.pop("created") or first.status() == psutil.STATUS_ZOMBIE:
            return None  # it has ended; another process may have the number now
    except (OSError, ValueError, psutil.Error):
        return None
    return Cluster(name, folder, **known)


def require_cluster(name: str = "local") -> Cluster:
    """The cluster of this name.

    Raises:
        UserError: it is not up.
    """
    cluster = find_cluster(name)
    if cluster is None:
        raise UserError(f"no practice cluster is up; start one with: {workshop_command()} cluster up 4{_named(name)}")
    return cluster


def missing_packages() -> list[str]:
    """The packages that a cluster still needs here, by the names of Fedora where there is dnf, else of Debian and Ubuntu."""
    fedora = bool(shutil.which("dnf"))
    missing = [names[fedora] for program, names in PROGRAMS.items() if not shutil.which(program, path=SEARCH_PATH)]
    return list(dict.fromkeys(missing))


def require_machine() -> None:
    """Raise a UserError that says what to do if no cluster can be started here."""
    if sys.platform != "linux":
        raise UserError("a practice cluster needs Linux; on this machine run it in a Linux virtual machine")
    if packages := missing_packages():
        install = "dnf install" if shutil.which("dnf") else "apt-get install --no-install-recommends"
        raise UserError(f"a practice cluster needs programs that are not here: sudo {install} {' '.join(packages)}")
    done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, env={"PATH": SEARCH_PATH})
    if done.returncode != 0:
        if os.geteuid() == 0:
            what = "this container may not make namespaces; start it with --privileged, or use a virtual machine"
        else:
            what = "this system lets only root make namespaces (on Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
        raise UserError(f"{what}; unshare says: {done.stderr.strip()}")


def _unshare() -> list[str]:
    """The command line that makes a node's namespaces; an ordinary user becomes the owner of them in a user namespace."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    kinds = ["--mount", "--net", "--uts", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *user, *kinds]


def up(nodes: int, gpus: int = 4, cores: int = 8, name: str = "local", mine: bool = False) -> Cluster:
    """Start a cluster and return it when all its nodes are idle.

    Args:
        nodes: the number of compute nodes; the login node comes on top.
        gpus: how many GPUs each node says it has. They are for counting: programs find none, and train on the CPU.
        cores: how many cores each node says it has; in truth they all share this machine's.
        name: several clusters can be up side by side.
        mine: it belongs to this process, and ends with it, however this process ends.

    Raises:
        UserError: it cannot be started here, or a cluster of this name is up.
    """
    if not name.isidentifier():
        raise UserError(f"a cluster's name is letters and digits, not {name!r}")
    require_machine()
    folder = _folder(name)
    if len(str(folder)) > 60:  # Slurm's sockets lie 45 characters further down, and a socket's path ends at 107
        raise UserError(f"the path of {folder} is too long for sockets; set TMPDIR to a shorter one, such as /tmp")
    with suppress(FileExistsError):
        folder.parent.mkdir(mode=0o700)
    if folder.parent.is_symlink() or folder.parent.stat().st_uid != os.geteuid():
        raise UserError(f"{folder.parent} belongs to somebody else; set TMPDIR to a folder of your own")
    held = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)  # one starts after the other
        if find_cluster(name):
            raise UserError(f"it is up already; end it with: {workshop_command()} cluster down{_named(name)}")
        shutil.rmtree(folder, ignore_errors=True)  # of one that has crashed
        (folder / "run").mkdir(parents=True, mode=0o700)
        try:
            return _start(Cluster(name, folder, 0, nodes, gpus, cores), mine)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(held)


def _start(cluster: Cluster, mine: bool) -> Cluster:
    """Start the login node, which starts the rest; when it says that it is ready, write down what it is."""
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
            start_new_session=True,  # Ctrl-C in the terminal that it was started from does not reach it
        )
    try:
        readable, _, _ = select.select([process.stdout], [], [], 60)
        if not readable or process.stdout.readline() != "ready\n":
            said = (cluster.folder / "up.log").read_text(errors="replace").strip().splitlines()
            raise UserError(f"the cluster did not start: {said[-1] if said else 'it says nothing'}")
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
    """``workshop cluster up``."""
    start = time.monotonic()
    cluster = up(nodes, gpus, cores, name)
    command = f"{workshop_command()} cluster exec{_named(name)}"
    print(
        f"{nodes} nodes of {cores} cores and {gpus} GPUs are up after {time.monotonic() - start:.1f} s: Slurm {cluster.version()}"
    )
    print("The cores are this machine's, and the GPUs are for counting only: programs train on the CPU.")
    for line, what in (
        (command, "a shell on its login node: sinfo, sbatch, squeue, scancel, srun"),
        (f"{command} sinfo", "one command there"),
        (f"{workshop_command()} cluster down{_named(name)}", "the end of it"),
    ):
        print(f"  {line:{len(command) + 8}}{what}")


def run_status(name: str) -> None:
    """``workshop cluster status``: nodes and jobs, as Slurm shows them."""
    cluster = require_cluster(name)
    print(cluster.run("sinfo", "--Node", "--format=%8N %10T %5c %12G %E"))
    print(cluster.run("squeue", "--format=%.6i %24j %10T %8M %6D %R"), end="")


def run_exec(command: Sequence[str], node: str, name: str) -> None:
    """``workshop cluster exec``: becomes the command, on the login node or on another."""
    inside = require_cluster(name).inside(command or ["bash"], node)
    os.execvpe(inside[0], inside, environment())


def run_fault(action: str, node: str, name: str) -> None:
    """``workshop cluster kill``, ``cut`` and ``heal``."""
    require_cluster(name).fault(action, node)
    print(
        {
            "kill": f"{node} is dead. Slurm notices within half a minute; its jobs end then, or start again (--requeue).",
            "cut": f"{node} runs on and hears nobody. Slurm notices within half a minute.",
            "heal": f"{node} is back; Slurm takes it into service within seconds.",
        }[action]
    )


def run_down(name: str) -> None:
    """``workshop cluster down``."""
    require_cluster(name).end()
    print("The cluster is gone, with all that ran on it.")
