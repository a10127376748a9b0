"""Model a site: run only Slurm's controller, with the partitions and limits of the site, to see which jobs it would accept.

No job ever starts in a model. It needs slurmctld, sbatch and munged (Debian: slurmctld slurm-client munge), but not root.
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from workshop.errors import UserError
from workshop.run.environment import free_port, without_launcher
from workshop.run.processes import end_family
from workshop.slurm.cluster import SEARCH_PATH

PROGRAMS = ("slurmctld", "munged", "sbatch", "scontrol")
# CLOUD nodes need no slurmd; with FUTURE, UNKNOWN or DOWN nodes Slurm would reject every job.
COMMON = """\
ClusterName=model
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
EnforcePartLimits=ALL
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=600
GresTypes=gpu
NodeName=DEFAULT State=CLOUD
{plugin}
{fragment}
"""


class Model:
    """A running controller; ``model`` starts it."""

    def __init__(self, folder: Path):
        self.environment = without_launcher(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess:
        """Run sbatch or scontrol with this controller, for at most 20 s."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20
        )

    def test(self, command: Sequence[str]) -> tuple[bool, str]:
        """Return whether the controller would accept an sbatch line, and its message."""
        done = self.run([command[0], "--test-only", *command[1:]])
        return done.returncode == 0, " ".join(done.stderr.replace("sbatch:", "").replace("error:", "").split())

    def request(self, command: Sequence[str]) -> dict[str, str]:
        """Submit a job on hold, and return what it requests after all options were read: the fields of ``scontrol show job``."""
        done = self.run([command[0], "--parsable", "--hold", *command[1:]])
        if done.returncode != 0:
            raise UserError(done.stderr.strip())
        shown = self.run(["scontrol", "--oneliner", "show", "job", done.stdout.split(";")[0].strip()]).stdout
        return dict(word.partition("=")[::2] for word in shown.split())


@contextmanager
def model(fragment: Path) -> Iterator[Model]:
    """Start a controller with a fragment of slurm.conf (nodes and partitions), and remove all its files afterwards.

    A file with the same name and the ending .lua becomes job_submit.lua of the controller.

    Raises:
        UserError: a program is missing, or the controller does not start.
    """
    missing = [program for program in PROGRAMS if not shutil.which(program, path=SEARCH_PATH)]
    if missing:
        raise UserError(f"a model of a site needs {', '.join(missing)}: apt install slurmctld slurm-client munge")
    # In /tmp, because TMPDIR may be long and the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-model-", dir="/tmp"))
    started = []
    try:
        _start(folder, fragment, started)
        yield Model(folder)
    finally:
        for process in reversed(started):
            end_family(process)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, fragment: Path, started: list[subprocess.Popen]) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    (folder / "state").mkdir()
    lua = fragment.with_suffix(".lua")
    if lua.exists():
        shutil.copy(lua, folder / "job_submit.lua")
    port = free_port()
    settings = COMMON.format(
        host=socket.gethostname().split(".")[0],
        port=port,
        user=pwd.getpwuid(os.geteuid()).pw_name,
        folder=folder,
        plugin="JobSubmitPlugins=lua" if lua.exists() else "",
        fragment=fragment.read_text(),
    )
    (folder / "slurm.conf").write_text(settings)
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"]
    commands = [munge, ["slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf")]]
    ready = [lambda: (folder / "munge.socket").exists(), lambda: _listens(port)]
    for command, is_ready in zip(commands, ready, strict=True):
        log = folder / f"{command[0]}.output"
        with open(log, "w") as output:
            started.append(
                subprocess.Popen(
                    # The kernel kills it when this process ends, even if this process is killed.
                    ["setpriv", "--pdeathsig", "KILL", *command],
                    env=without_launcher(os.environ) | {"PATH": SEARCH_PATH},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        end = time.monotonic() + 20
        while not is_ready():
            if started[-1].poll() is not None or time.monotonic() > end:
                raise UserError(
                    f"{command[0]} does not start: {' '.join(log.read_text().split()) or 'it printed nothing'}"
                )
            time.sleep(0.01)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
