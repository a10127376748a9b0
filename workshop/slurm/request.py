"""Find what a job requests, and the queue that accepts it."""

import re

from workshop.errors import UserError
from workshop.slurm.script import Script
from workshop.slurm.shape import Shape, clock
from workshop.slurm.sites import Queue, Site

# Options that count per job, task or socket, and the option per node to use instead, because nodes differ in size.
INSTEAD = {
    "--ntasks": "--ntasks-per-node",
    "--gpus": "--gpus-per-node",
    "--gpus-per-task": "--gpus-per-node",
    "--gpus-per-socket": "--gpus-per-node",
}


def seconds(text: str, scheduler: str = "slurm") -> int:
    """Return a time limit in seconds. Slurm reads a bare number as minutes, PBS as seconds.

    Raises:
        UserError: the text is not a time limit.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match or (match[1] and scheduler == "pbs"):
        raise UserError(f"'{text}' is not a time limit; write hours:minutes:seconds, such as 00:10:00")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part]
    if days or len(numbers) == 3:
        units = [3600, 60, 1]
    elif scheduler == "pbs" and len(numbers) == 1:
        units = [1]
    else:
        units = [60, 1]
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def _whole(text: str, name: str) -> int:
    """Return a whole number of at least 1, or raise a UserError."""
    if not re.fullmatch(r"[1-9]\d*", text):
        raise UserError(f"{name}={text}: write a whole number of at least 1")
    return int(text)


def _gpus_of_gres(gres: str) -> str:
    """Return "4" for "gpu:gh200:4,nvme:100", or "" without GPUs."""
    for part in gres.split(","):
        kind, *rest = part.split(":")
        if kind == "gpu":
            return rest[-1] if rest and rest[-1].isdigit() else "1"
    return ""


def _slurm_shape(script: Script) -> tuple[str, str, str, str]:
    """Return nodes, tasks per node, GPUs per node and time limit of a Slurm script; "" for what it does not say."""
    options = script.options
    for name, better in INSTEAD.items():
        if name in options:
            raise UserError(f"{script.path.name}: write {better} instead of {name}; sites count per node")
    of_gres = _gpus_of_gres(options.get("--gres", ""))
    if of_gres and "--gpus-per-node" in options:
        raise UserError(f"{script.path.name} requests GPUs twice, with --gres and --gpus-per-node; remove one")
    gpus = options.get("--gpus-per-node", "").rpartition(":")[2] or of_gres
    return options.get("--nodes", ""), options.get("--ntasks-per-node", ""), gpus, options.get("--time", "")


def _pbs_shape(script: Script) -> tuple[str, str, str, str]:
    """Return the same values of a PBS script."""
    select = script.options.get("select", "")
    if "+" in select:
        raise UserError(f"{script.path.name}: all nodes must be equal; write one chunk in select=, without +")
    count, *resources = select.split(":")
    chunk = dict(each.partition("=")[::2] for each in resources)
    return count, chunk.get("mpiprocs", ""), chunk.get("ngpus", ""), script.options.get("walltime", "")


def find_shape(script: Script, site: Site, nodes: int | None, gpus_per_node: int | None, time: str | None) -> Shape:
    """Return what the job requests; options of the command replace those of the script.

    Raises:
        UserError: a number is missing or malformed, or the site does not have nodes of that size or that number of nodes.
    """
    read = _slurm_shape if site.scheduler == "slurm" else _pbs_shape
    said_nodes, said_tasks, said_gpus, said_time = read(script)
    if not (gpus_per_node or said_gpus):
        raise UserError(f"{script.path.name} requests no GPUs; give the number per node with --gpus-per-node")
    if not (time or said_time):
        raise UserError(f"{script.path.name} has no time limit; add --time, such as --time 00:10:00")
    tasks, gpus = _whole(said_tasks or "1", "tasks per node"), gpus_per_node or _whole(said_gpus, "GPUs per node")
    if (tasks > 1 or site.scheduler == "pbs") and str(tasks) == said_gpus:
        tasks = gpus  # the script starts one process per GPU; keep that with fewer or more GPUs
    limit = seconds(time) if time else seconds(said_time, site.scheduler)
    shape = Shape(nodes or _whole(said_nodes or "1", "nodes"), gpus, tasks, seconds=limit)
    if shape.seconds == 0:
        raise UserError("a job cannot have a time limit of 0; write hours:minutes:seconds, such as 00:10:00")
    if gpus > site.gpus_per_node:
        raise UserError(f"a node of {site.name} has {site.gpus_per_node} GPUs, not {gpus}; ask for more nodes instead")
    if site.max_nodes and shape.nodes > site.max_nodes:
        raise UserError(f"a job at {site.name} cannot have {shape.nodes} nodes; the most is {site.max_nodes}")
    return shape


def misfit(queue: Queue, shape: Shape) -> str:
    """Return why a queue does not accept such a job; "": it accepts it."""
    if queue.time and shape.seconds > seconds(queue.time):
        return f"at most {clock(seconds(queue.time))}"
    if queue.max_nodes and shape.nodes > queue.max_nodes:
        return f"at most {queue.max_nodes} node{'s' * (queue.max_nodes > 1)}"
    if queue.max_gpus and shape.all_gpus > queue.max_gpus:
        return f"at most {queue.max_gpus} GPUs per job"
    return ""


def find_queue(site: Site, shape: Shape, named: str | None) -> Queue:
    """Return the named queue, or else the first one that accepts the job.

    Raises:
        UserError: there is no such queue, or it does not accept the job.
    """
    if named:
        queue = next((queue for queue in site.queues if queue.name == named), None)
        if queue is None:
            raise UserError(f"{site.name} has no queue '{named}'; choose from {', '.join(q.name for q in site.queues)}")
        if reason := misfit(queue, shape):
            raise UserError(f"{queue.name} at {site.name} does not accept {shape}: {reason}")
        return queue
    reasons: list[str] = []
    by_name: dict[str, list[str]] = {}  # the names of the queues with each condition
    for queue in site.queues:
        reason = misfit(queue, shape)
        if not reason and not queue.condition:
            return queue
        if reason:
            reasons.append(f"{queue.name}: {reason}")
        else:
            by_name.setdefault(queue.condition, []).append(queue.name)
    choice = "".join(f"; only with --queue, {condition}: {', '.join(names)}" for condition, names in by_name.items())
    raise UserError(f"no queue at {site.name} accepts {shape} ({'; '.join(reasons)}){choice}")
