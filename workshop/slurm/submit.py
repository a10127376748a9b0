"""``workshop submit``: the exact sbatch or qsub line for a site, run in an environment without this session's own job."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError
from workshop.files import write_atomically
from workshop.repository import ROOT, workshop_command
from workshop.run.environment import without_launcher
from workshop.slurm.image import find_image, settings_name, with_image
from workshop.slurm.shape import Shape, clock
from workshop.slurm.sites import Queue, Site, detect_site, find_site, known_sites

MARKS = {"slurm": "#SBATCH", "pbs": "#PBS"}
LONG = {
    "-A": "--account",
    "-c": "--cpus-per-task",
    "-C": "--constraint",
    "-D": "--chdir",
    "-G": "--gpus",
    "-J": "--job-name",
    "-n": "--ntasks",
    "-N": "--nodes",
    "-o": "--output",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
}
# Options that give a number for the whole job, or for a task, and what to say in their place: it stays right on other nodes.
INSTEAD = {
    "--ntasks": "--ntasks-per-node",
    "--gpus": "--gpus-per-node",
    "--gpus-per-task": "--gpus-per-node",
    "--gpus-per-socket": "--gpus-per-node",
}
MEMORY = ("--mem", "--mem-per-cpu", "--mem-per-gpu")


@dataclass(frozen=True)
class Script:
    """A job script.

    Attributes:
        path: where it lies.
        options: what its directives ask for: on Slurm by long name, "--nodes"; on PBS "-q", and from -l "select", "walltime".
        sources_site: whether it takes the site's settings from ``$WORKSHOP_SITE``.
    """

    path: Path
    options: dict[str, str]
    sources_site: bool


@dataclass(frozen=True)
class Submission:
    """A job as it goes to the scheduler.

    Attributes:
        command: the sbatch or qsub line.
        folder: where that is run, and the job begins.
        environment: the whole environment of that command.
        settings: the text of the file that the script sources, and its path.
        shape: what is asked for.
        queue: the name of the queue.
        log: the path of the job's output, with %j for the job's number.
        sources_site: whether the script makes use of the settings.
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


# ---------------------------------------------------------------- the script


def script_text(path: Path) -> str:
    """The text of a job script.

    Raises:
        UserError: there is no such file, or its lines end as on Windows.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if b"\r\n" in data:
        raise UserError(f"{path.name} has the line ends of Windows; repair it with: sed -i 's/\\r$//' {path}")
    return data.decode(errors="replace")


def ignored_directives(text: str) -> list[tuple[int, str]]:
    """The lines that look like directives, and that the scheduler passes over without a word: their numbers, and why."""
    found, header = [], True
    for number, line in enumerate(text.splitlines(), 1):
        header = header and (not line.strip() or line.lstrip().startswith("#"))
        if spaced := re.match(r"#[ \t]+(SBATCH|PBS)[ \t]+-", line):
            found.append((number, f"a space after # makes it a comment; write #{spaced[1]}"))
        elif not header and (mark := re.match(r"#(?:SBATCH|PBS)(?=\s+-)", line)):
            found.append((number, f"{mark[0]} after the first command is ignored; move it up"))
    return found


def read_script(path: Path, scheduler: str) -> Script:
    """Read the directives of a job script.

    Raises:
        UserError: there is no such file, it is for another scheduler, or a directive would be ignored.
    """
    text = script_text(path)
    for number, what in ignored_directives(text):
        raise UserError(f"line {number} of {path.name}: {what}")
    words, other = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"#(?:SBATCH|PBS)(?=\s+-)", line)
        if mark and mark[0] == MARKS[scheduler]:
            try:
                words += shlex.split(line.removeprefix(mark[0]), comments=True)
            except ValueError as error:
                raise UserError(f"line {number} of {path.name}: {error}") from None
        elif mark:
            other = mark[0]
    if not words and other:
        places = {"slurm": "slurm-multinode", "pbs": "slurm-multinode/pbs"}
        raise UserError(
            f"the site reads {MARKS[scheduler]} lines, {path.name} has {other}; take one of {places[scheduler]}"
        )
    if not words:
        raise UserError(f"{path.name} has no {MARKS[scheduler]} lines, which say what the job needs")
    options = _slurm_options(words) if scheduler == "slurm" else _pbs_options(words)
    return Script(path, options, bool(re.search(r"^[^#\n]*\b(source|\.)\s.*WORKSHOP_SITE", text, re.MULTILINE)))


def _slurm_options(words: Sequence[str]) -> dict[str, str]:
    """{"--nodes": "2"} from ["-N", "2"], ["-N2"], ["--nodes", "2"] or ["--nodes=2"]."""
    options, waiting = {}, ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            options[name] = value
            waiting = "" if equals else name
        elif word.startswith("-"):
            name = LONG.get(word[:2], word[:2])
            options[name] = word[2:]
            waiting = "" if word[2:] else name
        elif waiting:
            options[waiting], waiting = word, ""
    return options


def _pbs_options(words: Sequence[str]) -> dict[str, str]:
    """{"-q": "main", "select": "1:ngpus=4"} from ["-q", "main", "-l", "select=1:ngpus=4"]."""
    options, waiting = {}, ""
    for word in words:
        if word.startswith("-"):
            waiting, word = word[:2], word[2:]
        if waiting == "-l":
            options |= {name: value for name, _, value in (each.partition("=") for each in word.split(",") if each)}
        elif waiting:
            options[waiting] = word
    return options


# ---------------------------------------------------------------- what is asked for


def seconds(text: str, scheduler: str = "slurm") -> int:
    """A time limit in seconds. A bare number is minutes to Slurm and seconds to PBS.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match or (match[1] and scheduler == "pbs"):
        raise UserError(f"'{text}' is no time limit; write hours:minutes:seconds, such as 00:10:00")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part]
    if days or len(numbers) == 3:
        units = (3600, 60, 1)
    elif scheduler == "pbs" and len(numbers) == 1:
        units = (1,)
    else:
        units = (60, 1)
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def _whole(text: str, name: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"[1-9]\d*", text):
        raise UserError(f"{name}={text}: one whole number is needed here")
    return int(text)


def _gpus_of_gres(gres: str) -> str:
    """ "4" from "gpu:gh200:4,nvme:100"; "": it has no GPUs."""
    for part in gres.split(","):
        kind, *rest = part.split(":")
        if kind == "gpu":
            return rest[-1] if rest and rest[-1].isdigit() else "1"
    return ""


def _slurm_shape(script: Script) -> tuple[str, str, str, str]:
    """Nodes, tasks a node, GPUs a node and time as a Slurm script says them; "" where it does not."""
    options = script.options
    for name, better in INSTEAD.items():
        if name in options:
            raise UserError(f"{script.path.name}: write {better} in place of {name}; sites count by node")
    of_gres = _gpus_of_gres(options.get("--gres", ""))
    if of_gres and "--gpus-per-node" in options:
        raise UserError(f"{script.path.name} asks for GPUs twice, with --gres and --gpus-per-node; remove one")
    gpus = options.get("--gpus-per-node", "").rpartition(":")[2] or of_gres
    return options.get("--nodes", ""), options.get("--ntasks-per-node", ""), gpus, options.get("--time", "")


def _pbs_shape(script: Script) -> tuple[str, str, str, str]:
    """The same of a PBS script."""
    select = script.options.get("select", "")
    if "+" in select:
        raise UserError(f"{script.path.name}: its nodes have to be alike: one chunk in select=, without +")
    count, *resources = select.split(":")
    chunk = dict(each.partition("=")[::2] for each in resources)
    return count, chunk.get("mpiprocs", ""), chunk.get("ngpus", ""), script.options.get("walltime", "")


def find_shape(script: Script, site: Site, nodes: int | None, gpus_per_node: int | None, time: str | None) -> Shape:
    """What the job asks for: the learner's options, then the script's.

    Raises:
        UserError: a number is missing or is none, or no node of the site is so large.
    """
    read = _slurm_shape if site.scheduler == "slurm" else _pbs_shape
    said_nodes, said_tasks, said_gpus, said_time = read(script)
    if not (gpus_per_node or said_gpus):
        raise UserError(f"{script.path.name} asks for no GPUs; say how many on each node with --gpus-per-node")
    if not (time or said_time):
        raise UserError(f"{script.path.name} has no time limit; add --time, such as --time 00:10:00")
    tasks, gpus = _whole(said_tasks or "1", "tasks a node"), gpus_per_node or _whole(said_gpus, "GPUs a node")
    if (tasks > 1 or site.scheduler == "pbs") and str(tasks) == said_gpus:
        tasks = gpus  # the script starts one process a GPU, so it does on fewer or more of them
    limit = seconds(time) if time else seconds(said_time, site.scheduler)
    shape = Shape(nodes or _whole(said_nodes or "1", "nodes"), gpus, tasks, seconds=limit)
    if shape.seconds == 0:
        raise UserError("a time limit of 0 is none; write hours:minutes:seconds, such as 00:10:00")
    if gpus > site.gpus_per_node:
        raise UserError(f"a node of {site.name} has {site.gpus_per_node} GPUs, not {gpus}; ask for more nodes instead")
    if site.max_nodes and shape.nodes > site.max_nodes:
        raise UserError(f"a job at {site.name} cannot have {shape.nodes} nodes; the most is {site.max_nodes}")
    return shape


# ---------------------------------------------------------------- the queue


def misfit(queue: Queue, shape: Shape) -> str:
    """Why a queue does not take such a job; "": it does."""
    if queue.time and shape.seconds > seconds(queue.time):
        return f"at most {clock(seconds(queue.time))}"
    if queue.max_nodes and shape.nodes > queue.max_nodes:
        return f"at most {queue.max_nodes} node{'s' * (queue.max_nodes > 1)}"
    if queue.max_gpus and shape.all_gpus > queue.max_gpus:
        return f"at most {queue.max_gpus} GPUs a job"
    return ""


def find_queue(site: Site, shape: Shape, named: str | None) -> Queue:
    """The queue that is named, or else the first that takes the job.

    Raises:
        UserError: there is none.
    """
    if named:
        queue = next((queue for queue in site.queues if queue.name == named), None)
        if queue is None:
            raise UserError(f"{site.name} has no queue '{named}'; known are {', '.join(q.name for q in site.queues)}")
        if reason := misfit(queue, shape):
            raise UserError(f"{queue.name} at {site.name} does not take {shape}: {reason}")
        return queue
    reasons, by_name = [], {}
    for queue in site.queues:
        reason = misfit(queue, shape)
        if not reason and not queue.condition:
            return queue
        if reason:
            reasons.append(f"{queue.name}: {reason}")
        else:
            by_name.setdefault(queue.condition, []).append(queue.name)
    choice = "".join(f"; with --queue, {condition}: {', '.join(names)}" for condition, names in by_name.items())
    raise UserError(f"no queue at {site.name} takes {shape} ({'; '.join(reasons)}){choice}")


# ---------------------------------------------------------------- the line and the settings


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
        account: of the project that pays.
        queue: by the name that the profile gives it; None: the first that takes the job.
        nodes: in place of the script's number.
        gpus_per_node: in place of the script's number.
        time: in place of the script's time limit, as Slurm writes it.
        reservation: on PBS it is a queue.
        container: an image of Apptainer in which Python runs; None: where the profile says.
        arguments: for the script.
        environment: of the session that submits.

    Raises:
        UserError: the site would refuse the job, or ignore a part of it, or let it wait for ever.
    """
    if site.status == "retired":
        raise UserError(f"{site.name} is retired: its compute nodes are switched off; choose another site")
    script = script.resolve()
    read = read_script(script, site.scheduler)
    for option, reason in site.forbidden.items():
        if option in read.options:
            raise UserError(f"{site.name} refuses {option}, which {script.name} has: {reason}; remove it")
    account = account or read.options.get("--account") or read.options.get("-A") or environment.get("SBATCH_ACCOUNT")
    if site.account_required and not account:
        raise UserError(f"{site.name} needs to know which account pays; add --account ACCOUNT")
    shape = find_shape(read, site, nodes, gpus_per_node, time)
    said = {read.options.get(option) for option in ("--qos", "--partition", "-q")}
    queue = queue or next((known.name for known in site.queues if known.name in said), None)
    chosen = find_queue(site, shape, queue)
    ours = _own_folder(script)
    folder = ours or Path.cwd()
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
    build = _sbatch if site.scheduler == "slurm" else _qsub
    line = build(read, site, shape, chosen, account, reservation, settings_path)
    if site.scheduler == "slurm":
        line += [f"--chdir={folder}"] * bool(ours) + [str(script), *arguments]
    else:
        if arguments:
            line[-1] += f",ARGUMENTS='{_pbs_arguments(arguments)}'"
        line += [str(script)]
    return Submission(
        command=line,
        folder=folder,
        environment=clean(environment) | {"WORKSHOP_SITE": str(settings_path)},
        settings=settings_text(name, site, environment),
        settings_path=settings_path,
        shape=shape,
        queue=reservation if reservation and site.scheduler == "pbs" else chosen.name,
        log=str(folder / _log(read, site.scheduler)),
        sources_site=read.sources_site,
    )


def _own_folder(script: Path) -> Path | None:
    """Where the program of a job script of ours lies: beside it; for slurm-multinode, the solutions too, in that folder."""
    parts = script.relative_to(ROOT).parts if script.is_relative_to(ROOT) else ()
    if "slurm-multinode" in parts:
        return ROOT / "slurm-multinode"
    return script.parent if any(re.match(r"\d\d_", part) for part in parts[:2]) else None


def _sbatch(read, site, shape, queue, account, reservation, settings_path) -> list[str]:
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
    if not set(MEMORY) & set(read.options):  # they exclude one another: a script's own stays
        if site.memory == "per_node":
            options["--mem"] = f"{site.memory_per_gpu * shape.gpus}G"
        elif site.memory == "per_gpu":
            options["--mem-per-gpu"] = f"{site.memory_per_gpu}G"
    options["--time"] = clock(shape.seconds)
    line = [f"{name}={value}" for name, value in options.items() if value]
    # WORKSHOP_SITE comes from sbatch's environment: named in --export it would make Slurm begin the job with a login shell.
    return ["sbatch", *line, *site.options, "--export=ALL"]


def _gpu_option(read: Script, site: Site, gpus: int) -> dict[str, str]:
    """The request for GPUs, by the option that the script uses: --gpus-per-node=gh200:2, or --gres=gpu:gh200:2.

    Both mean the same to Slurm. But it keeps a script's --gpus-per-node beside a --gres of the command line, and refuses the job
    if only one of them names a type (seen with Slurm 22.05); the same option replaces it.
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


def _qsub(read, site, shape, queue, account, reservation, settings_path) -> list[str]:
    chunk = [
        f"select={shape.nodes}",
        f"ncpus={site.cores_per_gpu * shape.gpus}",
        f"mpiprocs={shape.tasks}",
        site.gpu_option % shape.gpus,
    ]
    if site.memory == "per_node":
        chunk.append(f"mem={site.memory_per_gpu * shape.gpus}GB")
    line = ["qsub", *(["-A", account] if account else []), "-q", reservation or queue.name, "-l", ":".join(chunk)]
    # One chunk on each host: PBS may else put several small ones on one.
    line += ["-l", f"walltime={clock(shape.seconds)}", "-l", "place=scatter"]
    return [*line, *site.options, "-v", f"WORKSHOP_SITE={settings_path}"]


def _pbs_arguments(arguments: Sequence[str]) -> str:
    """The arguments as one value of qsub's -v, which the script splits at spaces.

    Raises:
        UserError: one would not arrive as it is.
    """
    for argument in arguments:
        if not re.fullmatch(r"[\w@%+=:,./-]+", argument):
            raise UserError(
                f"qsub cannot hand over the argument '{argument}': no spaces, quotes or signs of the shell, please"
            )
    return " ".join(arguments)


def _log(read: Script, scheduler: str) -> str:
    """The name of the job's output, with %j for the job's number."""
    if scheduler == "pbs":
        return read.options.get("-o") or f"{read.options.get('-N', read.path.name)}.o%j"
    pattern = read.options.get("--output", "slurm-%j.out").replace("%A", "%j").replace("%a", "*")
    return pattern.replace("%x", read.options.get("--job-name", read.path.name))


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for sbatch without the job that this session may itself be, and without the Python of its kernel.

    A Jupyter session on a cluster is a small job: its variables would give the new job that size, and SLURM_EXPORT_ENV=NONE.
    """
    kept = {name: environment[name] for name in ("SBATCH_ACCOUNT", "SLURM_CONF") if name in environment}
    names = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "WORKSHOP_SITE"}
    names |= {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
    prefixes = ("SRUN_", "SALLOC_", "SLURMD_")
    rest = without_launcher(environment).items()
    return {name: value for name, value in rest if name not in names and not name.startswith(prefixes)} | kept


def settings_text(name: str, site: Site, environment: Mapping[str, str]) -> str:
    """The shell file that a job sources first: everything in the profile that a job needs inside.

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
        f"# What a job needs first at {site.name}. `workshop submit` writes this file from\n"
        f"# slurm-multinode/sites/{name}.toml (checked on {site.checked_on}): make changes there."
    ]
    if site.internet is False:
        parts[0] += "\n# Compute nodes have no internet: data and packages have to be there before."
    if site.scratch:
        parts[0] += f"\n# Large files go to {site.scratch}"
    if carried:
        lines = [f"export {variable}={shlex.quote(environment[variable])}" for variable in carried]
        parts.append("\n".join(["# from the session that submitted", *lines]))
    if where.prologue:
        # They are not written for `set -e` and `set -u`, which a script may have set.
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


def shell_line(command: Sequence[str], width: int = 100) -> str:
    """A command for copying into a shell, broken into lines."""
    lines = [""]
    for word in map(shlex.quote, command):
        if len(lines[-1]) + len(word) > width:
            lines.append("   ")
        lines[-1] += (" " if lines[-1] else "") + word
    return " \\\n".join(lines)


# ---------------------------------------------------------------- the command


def choose_site(name: str | None) -> str:
    """The site that is named, else the one that this host belongs to, else the practice cluster.

    Raises:
        UserError: neither is there.
    """
    from workshop.slurm.cluster import find_cluster

    if name := name or detect_site() or ("local" if on_practice_cluster() or find_cluster() else ""):
        return name
    sites = ", ".join(known_sites())
    raise UserError(f"this host belongs to no site that is known; say which with --site, one of: {sites}")


def on_practice_cluster() -> bool:
    """Whether this is a shell on the practice cluster itself: its slurm.conf lies in a folder of that name."""
    return f"/workshop-{os.geteuid()}/" in os.environ.get("SLURM_CONF", "")


def run_submit(
    script: str, site: str | None = None, *, dry_run: bool = False, arguments: Sequence[str] = (), **options
) -> int:
    """``workshop submit``: show or submit a job; returns the exit status.

    Args:
        script: the job script.
        site: the name of its profile; None: the one that this host belongs to.
        dry_run: show the line, and what the script sources; submit nothing.
        arguments: for the script.
        **options: those of ``submission``.

    Raises:
        UserError: it cannot be submitted, or the scheduler refuses it.
    """
    name = choose_site(site)
    profile = find_site(name)
    job = submission(Path(script), name, profile, arguments=arguments, **options)
    if not job.sources_site:
        line = 'source "${WORKSHOP_SITE:-/dev/null}"'
        print(f"workshop: {Path(script).name} does not use the site's settings: begin it with {line}", file=sys.stderr)
    _write(job.settings_path, job.settings)
    if dry_run:
        if profile.scheduler == "pbs":  # qsub has no --chdir
            print(f"cd {shlex.quote(str(job.folder))}")
        else:
            print(f"export WORKSHOP_SITE={shlex.quote(str(job.settings_path))}")
        print(f"{shell_line(job.command)}\n")
        print(f"{job.settings_path}, which the script sources, says:\n\n{job.settings}", end="")
        return 0
    number = _submit(job, name)
    watch = {"slurm": f"squeue --job={number}", "pbs": f"qstat {number}"}[profile.scheduler]
    if name == "local" and not on_practice_cluster():
        watch = f"{workshop_command()} cluster exec {watch}"
    print(f"job {number}: {job.shape}, in {job.queue} at {profile.name}")
    print(f"its output, once it has begun: {job.log.replace('%j', number.split('.')[0])}")
    print(f"how it stands: {watch}")
    if profile.utilisation:
        print(f"whether its GPUs are busy: {profile.utilisation.replace('JOB', number)}")
    return 0


def _write(path: Path, text: str) -> None:
    """Write a file so that a job which begins meanwhile sees the old text or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _submit(job: Submission, name: str) -> str:
    """Hand a job to the scheduler; returns its number.

    Raises:
        UserError: there is no scheduler, or it refuses the job.
    """
    program, command = job.command[0], job.command
    if name == "local" and not on_practice_cluster():
        from workshop.slurm.cluster import require_cluster

        command = require_cluster().inside(command, folder=job.folder)
    elif not shutil.which(program, path=job.environment.get("PATH")):
        raise UserError(f"there is no {program} on this machine; submit from a login node, or look with --dry-run")
    Path(job.log).parent.mkdir(parents=True, exist_ok=True)  # without the folder a job fails, and leaves no word
    try:
        done = subprocess.run(
            command, cwd=job.folder, env=job.environment, capture_output=True, text=True, errors="replace", timeout=120
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{program} has not answered in two minutes; the scheduler may be down") from None
    said = " ".join((done.stderr or done.stdout).replace("sbatch: error:", "").replace("qsub:", "").split())
    if done.returncode != 0:
        raise UserError(f"{program} refused the job: {said or f'exit status {done.returncode}'}")
    pattern = r"job (\d+)" if program == "sbatch" else r"(\d+(?:\[\])?[.\w-]*)"
    number = re.search(pattern, done.stdout)
    if number is None:
        raise UserError(f"{program} gave no job number: {said}")
    return number[1]
