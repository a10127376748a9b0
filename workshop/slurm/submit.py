"""``workshop submit``: show the sbatch or qsub command for a job at a site, or run it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import workshop_command
from workshop.slurm.planned import read_plan
from workshop.slurm.sites import detect_site, find_site, known_sites
from workshop.slurm.submission import Submission, submission


def choose_site(name: str | None) -> str:
    """Return the named site, else the site of this host, else the practice cluster.

    Raises:
        UserError: there is none of these.
    """
    from workshop.slurm.cluster import find_cluster

    if name := name or detect_site() or ("local" if on_practice_cluster() or find_cluster() else ""):
        return name
    sites = ", ".join(known_sites())
    raise UserError(f"this host belongs to no known site; name one with --site: {sites}")


def on_practice_cluster() -> bool:
    """Return whether this process runs on the practice cluster, whose slurm.conf is in a folder of this name."""
    return f"/workshop-{os.geteuid()}/" in os.environ.get("SLURM_CONF", "")


def run_submit(
    script: str,
    site: str | None = None,
    *,
    dry_run: bool = False,
    arguments: Sequence[str] = (),
    plan: str | None = None,
    **options,
) -> int:
    """``workshop submit``: show or submit a job; returns the exit status.

    Args:
        script: the job script.
        site: the name of the site's profile; None: the site of this host.
        dry_run: show the command, and the file that the script sources; submit nothing.
        arguments: the arguments of the script.
        plan: a file of ``workshop plan --output``, which gives nodes, GPUs per node, and the site if none is named.
        **options: the options of ``submission``.

    Raises:
        UserError: the job cannot be submitted, or the scheduler refuses it.
    """
    if plan:
        planned = read_plan(Path(plan))
        if options.get("nodes") or options.get("gpus_per_node"):
            raise UserError("--plan gives nodes and GPUs per node; leave out --nodes and --gpus-per-node")
        options |= {"nodes": planned.nodes, "gpus_per_node": planned.gpus_per_node}
        site = site or planned.site or None
        print(f"mesh of the plan: {planned.mesh}")
    name = choose_site(site)
    profile = find_site(name)
    job = submission(Path(script), name, profile, arguments=arguments, **options)
    if not job.sources_site:
        line = 'source "${WORKSHOP_SITE:-/dev/null}"'
        print(f"workshop: {Path(script).name} does not use the site's settings: begin it with {line}", file=sys.stderr)
    write_settings(job.settings_path, job.settings)
    if dry_run:
        if profile.scheduler == "pbs":  # qsub has no --chdir
            print(f"cd {shlex.quote(str(job.folder))}")
        else:
            print(f"export WORKSHOP_SITE={shlex.quote(str(job.settings_path))}")
        print(f"{shell_line(job.command)}\n")
        print(f"{job.settings_path}, which the script sources, contains:\n\n{job.settings}", end="")
        return 0
    number = submit_job(job, name)
    watch = {"slurm": f"squeue --job={number}", "pbs": f"qstat {number}"}[profile.scheduler]
    if name == "local" and not on_practice_cluster():
        watch = f"{workshop_command()} cluster exec {watch}"
    print(f"job {number}: {job.shape}, in {job.queue} at {profile.name}")
    print(f"output, after the job has started: {job.log.replace('%j', number.split('.')[0])}")
    print(f"state of the job: {watch}")
    if profile.utilisation:
        print(f"use of its GPUs: {profile.utilisation.replace('JOB', number)}")
    return 0


def write_settings(path: Path, text: str) -> None:
    """Write a file atomically, so that a job that starts meanwhile reads all of the old text or all of the new text."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def submit_job(job: Submission, name: str) -> str:
    """Submit a job to the scheduler, and return its number.

    Raises:
        UserError: there is no scheduler, or it refuses the job.
    """
    program, command = job.command[0], job.command
    if name == "local" and not on_practice_cluster():
        from workshop.slurm.cluster import require_cluster

        command = require_cluster().inside(command, folder=job.folder)
    elif not shutil.which(program, path=job.environment.get("PATH")):
        raise UserError(f"there is no {program} on this machine; submit from a login node, or use --dry-run")
    Path(job.log).parent.mkdir(parents=True, exist_ok=True)  # without this folder a job fails, and leaves no message
    try:
        done = subprocess.run(
            command, cwd=job.folder, env=job.environment, capture_output=True, text=True, errors="replace", timeout=120
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{program} did not answer within two minutes; the scheduler may be down") from None
    said = " ".join((done.stderr or done.stdout).replace("sbatch: error:", "").replace("qsub:", "").split())
    if done.returncode != 0:
        raise UserError(f"{program} refused the job: {said or f'exit status {done.returncode}'}")
    pattern = r"job (\d+)" if program == "sbatch" else r"(\d+(?:\[\])?[.\w-]*)"
    number = re.search(pattern, done.stdout)
    if number is None:
        raise UserError(f"{program} gave no job number: {said}")
    return number[1]


def shell_line(command: Sequence[str], width: int = 100) -> str:
    """Return a command to copy into a shell, split into lines."""
    lines = [""]
    for word in map(shlex.quote, command):
        if len(lines[-1]) + len(word) > width:
            lines.append("   ")
        lines[-1] += (" " if lines[-1] else "") + word
    return " \\\n".join(lines)
