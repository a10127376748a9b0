"""The sbatch or qsub line of a job at a site, the environment in which it runs, and the settings that the job reads first."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError
from workshop.repository import ROOT
from workshop.run.environment import for_scheduler
from workshop.slurm.image import find_image, settings_name, with_image
from workshop.slurm.request import find_queue, find_shape
from workshop.slurm.script import Script, read_script
from workshop.slurm.shape import Shape, clock
from workshop.slurm.sites import Queue, Site

MEMORY = ("--mem", "--mem-per-cpu", "--mem-per-gpu")


@dataclass(frozen=True)
class Submission:
    """A job and how it is submitted.

    Attributes:
        command: the sbatch or qsub line.
        folder: the working folder of the command and of the job.
        environment: the whole environment of that command.
        settings: the text of the file that the script sources.
        settings_path: the path of that file.
        shape: nodes, GPUs, tasks and time that the job asks for.
        queue: the name of the queue.
        log: the path of the job's output, with %j for the job's number.
        sources_site: whether the script sources the settings.
    """

    command: list[str]
    folder: Path
    environment: dict[str, str]
    settings: str
    settings_path: Path
    shape: Shape
    queue: str
    log: str
    sources_site: bool


def submission(
    script: Path,
    name: str,
    site: Site,
    *,
    account: str | None = None,
    queue: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    time: str | None = None,
    reservation: str | None = None,
    container: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> Submission:
    """Build a submission; nothing is written or run.

    Args:
        script: the job script.
        name: the name of the site's profile.
        site: the profile.
        account: the account of the project that pays.
        queue: by the name that the profile gives it; None: the first that accepts the job.
        nodes, gpus_per_node: replace the script's numbers.
        time: replaces the script's time limit, as Slurm writes it.
        reservation: the name of a reservation; on PBS it is a queue.
        container: an image of Apptainer in which Python runs; None: as the profile says.
        arguments: the arguments of the script.
        environment: the environment of the session that submits.

    Raises:
        UserError: the site would reject the job, ignore a part of it, or leave it pending forever.
    """
    read = _read_accepted(script.resolve(), site)
    account = account or read.options.get("--account") or read.options.get("-A") or environment.get("SBATCH_ACCOUNT")
    if site.account_required and not account:
        raise UserError(f"{site.name} needs to know which account pays; add --account ACCOUNT")
    shape = find_shape(read, site, nodes, gpus_per_node, time)
    chosen = find_queue(site, shape, queue or _queue_of_script(read, site))
    ours = _own_folder(read.path)
    folder = ours or Path.cwd()
    site, settings_path = _with_container(site, name, container, folder, environment)
    if site.scheduler == "slurm":
        command = _sbatch(read, site, shape, chosen, account, reservation)
        command += [f"--chdir={folder}"] * bool(ours) + [str(read.path), *arguments]
        queue = chosen.name
    else:
        queue = reservation or chosen.name
        command = [*_qsub(site, shape, queue, account), "-v", _qsub_variables(settings_path, arguments), str(read.path)]
    return Submission(
        command=command,
        folder=folder,
        environment=for_scheduler(environment) | {"WORKSHOP_SITE": str(settings_path)},
        settings=settings_text(name, site, environment),
        settings_path=settings_path,
        shape=shape,
        queue=queue,
        log=str(folder / _log(read, site.scheduler)),
        sources_site=read.sources_site,
    )


def _read_accepted(script: Path, site: Site) -> Script:
    """Read the job script.

    Raises:
        UserError: the site takes no jobs, the script is not for its scheduler, or has an option that the site refuses.
    """
    if site.status == "retired":
        raise UserError(f"{site.name} is retired: its compute nodes are switched off; choose a different site")
    read = read_script(script, site.scheduler)
    for option, reason in site.forbidden.items():
        if option in read.options:
            raise UserError(f"{site.name} refuses {option}, which {script.name} has: {reason}; remove it")
    return read


def _queue_of_script(read: Script, site: Site) -> str | None:
    """Return the queue of the site that the script itself names, or None."""
    named = {read.options.get(option) for option in ("--qos", "--partition", "-q")}
    return next((queue.name for queue in site.queues if queue.name in named), None)


def _own_folder(script: Path) -> Path | None:
    """Return the folder of the program that one of our job scripts starts: its own, or slurm-multinode for all scripts in it."""
    parts = script.relative_to(ROOT).parts if script.is_relative_to(ROOT) else ()
    if "slurm-multinode" in parts:
        return ROOT / "slurm-multinode"
    return script.parent if any(re.match(r"\d\d_", part) for part in parts[:2]) else None


def _with_container(
    site: Site, name: str, container: str | None, folder: Path, environment: Mapping[str, str]
) -> tuple[Site, Path]:
    """Return the profile (for jobs in the container, if one is named), and the path of the settings file.

    Raises:
        UserError: the image cannot be used there, or sbatch and qsub would split the path at a comma or a quote.
    """
    settings_path = ROOT / "runs" / "sites" / f"{name}.sh"
    if container:
        data = [Path(environment["WORKSHOP_DATA"])] if environment.get("WORKSHOP_DATA") else []
        image = find_image(container, site, [ROOT, folder, *data])
        site = with_image(site, name, image)
        settings_path = settings_path.with_name(settings_name(name, image))
    if re.search(r"[,'\"\\]", str(settings_path)):
        raise UserError(
            f"{ROOT}: sbatch and qsub read this name as a list; move the workshop to a folder without , ' \" \\"
        )
    return site, settings_path


def _sbatch(
    read: Script, site: Site, shape: Shape, queue: Queue, account: str | None, reservation: str | None
) -> list[str]:
    """Return the sbatch command up to the script."""
    cores = max(1, site.cores_per_gpu * shape.gpus // shape.tasks)
    options = {
        "--account": account,
        "--partition": queue.partition,
        "--qos": queue.qos.replace("{account}", account or ""),
        "--reservation": reservation,
        "--nodes": shape.nodes,
        "--ntasks-per-node": shape.tasks,
        **_gpu_option(read, site, shape.gpus),
        "--cpus-per-task": cores,
    }
    if not set(MEMORY) & set(read.options):  # these options exclude each other, so the script's own stays
        if site.memory == "per_node":
            options["--mem"] = f"{site.memory_per_gpu * shape.gpus}G"
        elif site.memory == "per_gpu":
            options["--mem-per-gpu"] = f"{site.memory_per_gpu}G"
    options["--time"] = clock(shape.seconds)
    line = [f"{name}={value}" for name, value in options.items() if value]
    # WORKSHOP_SITE is in sbatch's environment: if --export named it, Slurm would start the job with a login shell.
    return ["sbatch", *line, *site.options, "--export=ALL"]


def _gpu_option(read: Script, site: Site, gpus: int) -> dict[str, str]:
    """Return the request for GPUs with the option that the script uses: --gpus-per-node=gh200:2, or --gres=gpu:gh200:2.

    Both mean the same to Slurm. However, a --gres on the command line does not replace a script's --gpus-per-node: Slurm keeps
    both, and rejects the job if only one of them names a type (seen with Slurm 22.05). The same option replaces it.
    """
    option, _, request = (site.gpu_option % gpus).partition("=")
    request = request.removeprefix("gpu:")
    gres = read.options.get("--gres", "")
    if "--gpus-per-node" in read.options:
        option = "--gpus-per-node"
    elif gres:
        option = "--gres"
    if option == "--gpus-per-node":
        return {option: request}
    others = [part for part in gres.split(",") if part and part.split(":")[0] != "gpu"]
    return {"--gres": ",".join([f"gpu:{request}", *others])}


def _qsub(site: Site, shape: Shape, queue: str, account: str | None) -> list[str]:
    """Return the qsub command up to the variables."""
    chunk = [
        f"select={shape.nodes}",
        f"ncpus={site.cores_per_gpu * shape.gpus}",
        f"mpiprocs={shape.tasks}",
        site.gpu_option % shape.gpus,
    ]
    if site.memory == "per_node":
        chunk.append(f"mem={site.memory_per_gpu * shape.gpus}GB")
    line = ["qsub", *(["-A", account] if account else []), "-q", queue, "-l", ":".join(chunk)]
    # One chunk on each host: otherwise PBS may put several small chunks on one host.
    line += ["-l", f"walltime={clock(shape.seconds)}", "-l", "place=scatter"]
    return [*line, *site.options]


def _qsub_variables(settings_path: Path, arguments: Sequence[str]) -> str:
    """Return the value of qsub's -v: the settings file, and the arguments as one variable that the script splits at spaces.

    Raises:
        UserError: qsub would change an argument.
    """
    for argument in arguments:
        if not re.fullmatch(r"[\w@%+=:,./-]+", argument):
            raise UserError(
                f"qsub cannot pass on the argument '{argument}': use no spaces, quotes or special characters of the shell"
            )
    return f"WORKSHOP_SITE={settings_path}" + (f",ARGUMENTS='{' '.join(arguments)}'" if arguments else "")


def _log(read: Script, scheduler: str) -> str:
    """Return the name of the job's output, with %j for the job's number."""
    if scheduler == "pbs":
        return read.options.get("-o") or f"{read.options.get('-N', read.path.name)}.o%j"
    pattern = read.options.get("--output", "slurm-%j.out").replace("%A", "%j").replace("%a", "*")
    return pattern.replace("%x", read.options.get("--job-name", read.path.name))


def settings_text(name: str, site: Site, environment: Mapping[str, str]) -> str:
    """Return the shell file that a job sources first: everything in the profile that a job needs.

    Raises:
        UserError: a variable that the profile needs is not set.
    """
    where = site.environment
    for variable, meaning in where.needs.items():
        if not environment.get(variable):
            raise UserError(f"{site.name} needs {variable}, {meaning}: export it, then submit again")
    carried = [variable for variable in (*where.needs, "WORKSHOP_DATA") if environment.get(variable)]
    parts = [
        f"# shellcheck shell=bash\n"
        f"# The settings for jobs at {site.name}. `workshop submit` writes this file from\n"
        f"# slurm-multinode/sites/{name}.toml (checked on {site.checked_on}): make changes there."
    ]
    if site.internet is False:
        parts[0] += "\n# Compute nodes have no internet: copy data and packages to the site beforehand."
    if site.scratch:
        parts[0] += f"\n# Large files go to {site.scratch}"
    if carried:
        lines = [f"export {variable}={shlex.quote(environment[variable])}" for variable in carried]
        parts.append("\n".join(["# from the session that submitted the job", *lines]))
    if where.prologue:
        # These lines of the site may fail under `set -e` or `set -u`, which the script may have set.
        restored = [f'[[ "$before" != *{flag}* ]] || set -{flag}' for flag in "eu"]
        loose = ["before=$-", "set +eu", *where.prologue, *restored]
        parts.append("\n".join(["# [environment] prologue", *loose]))
    if where.kind == "venv":
        python = Path(sys.executable)
        lines = [f'export PATH={shlex.quote(str(python.parent))}:"$PATH"', f"export PYTHON={python.name}"]
        parts.append("\n".join(["# the Python that ran `workshop submit`", *lines]))
    else:
        parts.append(f'# [environment] python\nexport PYTHON="{where.python}"')
    parts.append(f'# this workshop\nexport PYTHONPATH={shlex.quote(str(ROOT))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    for table in ("network", "offline", "caches"):
        if variables := getattr(site, table):
            parts.append("\n".join([f"# [{table}]", *(f'export {key}="{value}"' for key, value in variables.items())]))
    if site.caches:
        folders = " ".join(f'"{folder}"' for folder in dict.fromkeys(site.caches.values()))
        everywhere = 'srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 '
        parts.append(f"{everywhere if site.launcher == 'srun' else ''}mkdir -p {folders}")
    return "\n\n".join(parts) + "\n"
