"""Do what PBS does for a job script, without PBS: set variables, write the node file, start on the first node, return the status.

The nodes are those of a practice cluster, and mpiexec is real. ``enter.sh``, ``qsub.sh`` and ``qstat.sh`` beside
this file replace the commands of PBS. A script gets the variables that OpenPBS 23.06 was observed to set.
"""

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from workshop.run.processes import end_family
from workshop.slurm.cluster import Cluster
from workshop.slurm.script import read_script

HERE = Path(__file__).parent
MPIEXEC = {"openmpi": "/usr/bin/mpiexec.openmpi", "mpich": "/usr/bin/mpiexec.mpich"}
# Sites build MPI with support for PBS, which starts processes through the daemons of PBS. These variables replace it.
BUILT_FOR_PBS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_plm_rsh_agent": str(HERE / "enter.sh"),  # Open MPI 4
    "PRTE_MCA_plm_ssh_agent": str(HERE / "enter.sh"),  # Open MPI 5
    "HYDRA_LAUNCHER": "rsh",
    "HYDRA_LAUNCHER_EXEC": str(HERE / "enter.sh"),
}


@dataclass(frozen=True)
class Job:
    """A job that qsub has accepted: its number, a copy of its script, its name, its request and the variables of -v."""

    number: int
    script: Path
    name: str
    select: str
    walltime: str
    variables: dict[str, str]


class StandIn:
    """A stand-in for PBS whose jobs run one at a time, when a test starts them.

    Args:
        cluster: the nodes.
        folder: the folder in which qsub is called and in which the logs of the jobs are written.
        mpiexec: "openmpi" or "mpich".
    """

    def __init__(self, cluster: Cluster, folder: Path, mpiexec: str):
        self.cluster, self.folder = cluster, folder
        self.spool = folder / "spool"
        for name in ("bin", "jobs", "home"):
            (self.spool / name).mkdir(parents=True)
        (self.spool / "nodes").symlink_to(cluster.folder / "run" / "nodes")
        for name in ("qsub", "qstat"):
            (self.spool / "bin" / name).symlink_to(HERE / f"{name}.sh")
        program = self.spool / "bin" / "mpiexec"
        program.write_text(f'#!/bin/sh\nexec {MPIEXEC[mpiexec]} "$@"\n')
        program.chmod(0o755)
        self.last = 16

    def qsub(self, *words: str) -> Job:
        """Accept a job: the options -l and -v, options that have no effect here, then a script."""
        *options, script = words
        read = read_script(self.folder / script, "pbs").options
        variables = {}
        for option, value in zip(options[::2], options[1::2], strict=True):
            if option == "-l":
                read |= dict([value.split("=", 1)])
            elif option == "-v":
                variables |= dict(each.split("=", 1) for each in split_at_commas(value))
        self.last += 1
        copy = self.spool / "jobs" / f"{self.last}.server.SC"
        copy.write_bytes((self.folder / script).read_bytes())
        copy.chmod(0o700)
        job = Job(self.last, copy, read["-N"], read["select"], read["walltime"], variables)
        (self.spool / "jobs" / f"{job.number}.server.dsv").write_text(
            f"Job Id: {job.number}.server|Job_Name={job.name}|Resource_List.place=scatter|"
            f"Resource_List.select={job.select}|Resource_List.walltime={job.walltime}|Submit_arguments={script}\n"
        )
        return job

    def submitted_by(self, job: Job) -> Job | None:
        """Return the job that this job has submitted, or None."""
        request = self.spool / "jobs" / f"{job.number + 1}.options"
        if not request.exists():
            return None
        return self.qsub(*request.read_text().split("\0")[:-1], str(request.with_suffix(".again")))

    def start(self, job: Job, nodes: list[str]) -> subprocess.Popen:
        """Start a job on the nodes with these names; its output goes to ``log(job)``."""
        count, *resources = job.select.split(":")
        chunk = {name: int(value) for name, value in (each.split("=") for each in resources)}
        node_file = self.spool / "jobs" / f"{job.number}.server.nodes"
        node_file.write_text("".join(f"{node}\n" * chunk["mpiprocs"] for node in nodes[: int(count)]))
        home = self.spool / "home"
        variables = {
            "HOME": home, "USER": "learner", "LOGNAME": "learner", "SHELL": "/bin/bash", "LANG": "C.UTF-8",
            "PATH": f"{self.spool / 'bin'}:/usr/bin:/bin",
            "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": f"{job.number}.server", "PBS_JOBNAME": job.name,
            "PBS_NODEFILE": node_file, "PBS_O_WORKDIR": self.folder, "PBS_O_QUEUE": "workq", "PBS_QUEUE": "workq",
            "NCPUS": chunk["ncpus"], "OMP_NUM_THREADS": chunk["ncpus"],
            "STAND_IN": self.spool, "OMPI_MCA_orte_default_hostfile": node_file,
            "OMP_WAIT_POLICY": "passive",
        } | BUILT_FOR_PBS | job.variables  # fmt: skip
        words = [f"{name}={value}" for name, value in variables.items()]
        # Start on the first node but with the processes of the login node, so that enter.sh can reach the other nodes.
        on_first = (
            'exec nsenter --target="$(cat "$0")" --net --uts --ipc env --ignore-environment --chdir="$1" "${@:2}"'
        )
        first = self.cluster.folder / "run" / "nodes" / nodes[0]
        command = ["bash", "-c", on_first, str(first), str(home), *words, str(job.script)]
        with open(self.log(job), "w") as log:
            return subprocess.Popen(
                self.cluster.inside(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(os.environ)
            )

    def run(self, job: Job, nodes: list[str], seconds: float = 120) -> int:
        """Run a job to its end and return its exit status, or end it and raise after ``seconds``."""
        process = self.start(job, nodes)
        try:
            return process.wait(seconds)
        finally:
            end_family(process, grace=0)

    def log(self, job: Job) -> Path:
        """Return the path of the output of a job."""
        return self.folder / f"{job.name}.o{job.number}"


def split_at_commas(text: str) -> list[str]:
    """Split the value of -v at commas that are not within '', and remove the quotes."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = ",", True, ""
    return list(lexer)
