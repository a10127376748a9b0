"""What a job asks for, and the queue that takes it."""

import re

from workshop.errors import UserError
from workshop.slurm.script import Script
from workshop.slurm.shape import Shape, clock
from workshop.slurm.sites import Queue, Site

# Options that count for the whole job or for a task, and the option per node to use instead, which fits nodes of other sizes.
INSTEAD = {
    "--ntasks": "--ntasks-per-node",
    "--gpus": "--gpus-per-node",
    "--gpus-per-task": "--gpus-per-node",
    "--gpus-per-socket": "--gpus-per-node",
}


def seconds(text: str, scheduler: str = "slurm") -> int:
    """A time limit in seconds. A bare number is minutes to Slurm and seconds to PBS.

    Raises:
        UserError: the text is not a time limit.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match or (match[1] and scheduler == "pbs"):
        raise UserError(f"'{text}' is no time limit; write hours:minutes:seconds, such as 00:10:00")
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
    """The nodes, tasks per node, GPUs per node and time limit in a Slurm script; "" for what it does not say."""
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
    """The same for a PBS script."""
    select = script.options.get("select", "")
    if "+" in select:
        raise UserError(f"{script.path.name}: its nodes have to be alike: one chunk in select=, without +")
    count, *resources = select.split(":")
    chunk = dict(each.partition("=")[::2] for each in resources)
    return count, chunk.get("mpiprocs", ""), chunk.get("ngpus", ""), script.options.get("walltime", "")


def find_shape(script: Script, site: Site, nodes: int | None, gpus_per_node: int | None, time: str | None) -> Shape:
    """What the job asks for: the options of the command first, then those of the script.

    Raises:
        UserError: a number is missing or malformed, or the site has no nodes of that size, or not so many.
    """
    read = _slurm_shape if site.scheduler == "slurm" else _pbs_shape
    said_nodes, said_tasks, said_gpus, said_time = read(script)
    if not (gpus_per_node or said_gpus):
        raise UserError(f"{script.path.name} asks for no GPUs; say how many on each node with --gpus-per-node")
    if not (time or said_time):
        raise UserError(f"{script.path.name} has no time limit; add --time, such as --time 00:10:00")
    tasks, gpus = _whole(said_tasks or "1", "tasks a node"), gpus_per_node or _whole(said_gpus, "GPUs a node")
    if (tasks > 1 or site.scheduler == "pbs") and str(tasks) == said_gpus:
        tasks = gpus  # the script starts one process per GPU, so it does the same with fewer or more GPUs
    limit = seconds(time) if time else seconds(said_time, site.scheduler)
    shape = Shape(nodes or _whole(said_nodes or "1", "nodes"), gpus, tasks, seconds=limit)
    if shape.seconds == 0:
        raise UserError("a time limit of 0 is none; write hours:minutes:seconds, such as 00:10:00")
    if gpus > site.gpus_per_node:
        raise UserError(f"a node of {site.name} has {site.gpus_per_node} GPUs, not {gpus}; ask for more nodes instead")
    if site.max_nodes and shape.nodes > site.max_nodes:
        raise UserError(f"a job at {site.name} cannot have {shape.nodes} nodes; the most is {site.max_nodes}")
    return shape


def misfit(queue: Queue, shape: Shape) -> str:
    """Why a queue does not accept such a job; "": it does."""
    if queue.time and shape.seconds > seconds(queue.time):
        return f"at most {clock(seconds(queue.time))}"
    if queue.max_nodes and shape.nodes > queue.max_nodes:
        return f"at most {queue.max_nodes} node{'s' * (queue.max_nodes > 1)}"
    if queue.max_gpus and shape.all_gpus > queue.max_gpus:
        return f"at most {queue.max_gpus} GPUs a job"
    return ""


def find_queue(site: Site, shape: Shape, named: str | None) -> Queue:
    """The queue that is named, or else the first that accepts the job.

    Raises:
        UserError: there is no such queue, or it does not accept the job.
    """
    if named:
        queue = next((queue for queue in site.queues if queue.name == named), None)
        if queue is None:
            raise UserError(f"{site.name} has no queue '{named}'; known are {', '.join(q.name for q in site.queues)}")
        if reason := misfit(queue, shape):
            raise UserError(f"{queue.name} at {site.name} does not take {shape}: {reason}")
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
    choice = "".join(f"; with --queue, {condition}: {', '.join(names)}" for condition, names in by_name.items())
    raise UserError(f"no queue at {site.name} takes {shape} ({'; '.join(reasons)}){choice}")
