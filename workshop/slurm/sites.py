"""Read the profiles of sites in slurm-multinode/sites, one TOML file per site."""

import fnmatch
import socket
import tomllib
from datetime import date
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workshop.errors import UserError
from workshop.repository import ROOT

SITES = ROOT / "slurm-multinode" / "sites"


class Table(BaseModel):
    """A table of a profile: an unknown key, or a value of the wrong type, is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Queue(Table):
    """A partition or QOS of Slurm, or a queue of PBS, with its limits; a limit that is left out is unknown and not checked.

    Attributes:
        name: its name for ``--queue``; on PBS the name of the queue itself.
        partition: Slurm's ``--partition``; "": left out.
        qos: Slurm's ``--qos``; ``{account}`` stands for the account; "": left out.
        time: the maximum time limit, as Slurm writes it: "HH:MM:SS", "D-HH" or "D-HH:MM:SS"; "": unknown.
        max_nodes: the maximum number of nodes per job.
        max_gpus: the maximum number of GPUs per job, over all its nodes.
        test: whether it is for short trials.
        condition: why submit uses it only if ``--queue`` names it; "": submit also chooses it by itself.
    """

    name: str
    partition: str = ""
    qos: str = ""
    time: str = ""
    max_nodes: int | None = None
    max_gpus: int | None = None
    test: bool = False
    condition: str = ""


class Environment(Table):
    """Where torch comes from in a job.

    Attributes:
        kind: how the site provides it; "venv": the Python that runs ``workshop submit``.
        prologue: shell lines that run before everything else.
        python: the command that starts Python on a node, possibly in a container (``$PYTHON``); "": the Python of the venv.
        container_prologue: the same lines for a job in an image of the user (``--container``).
        needs: variables that must be set when a job is submitted, each with its meaning.
    """

    kind: Literal["module", "container", "conda", "venv"]
    prologue: list[str] = []
    python: str = ""
    container_prologue: list[str] = []
    needs: dict[str, str] = {}


class OnDemand(Table):
    """A site's Open OnDemand.

    Attributes:
        address: the address of its dashboard.
        cluster: the name of a file in /etc/ood/config/clusters.d; "": unknown.
        partition: the partition for a small session without a GPU; "": unknown.
        courses: the site has "Jupyter for courses", which reads the folder www_COURSES_modules; "": it does not.
    """

    address: str
    cluster: str = ""
    partition: str = ""
    courses: str = ""


class Site(Table):
    """A site's profile. Sizes are in GB as the site counts them.

    Attributes:
        name: its full name.
        status: "retired": its compute nodes have been switched off.
        scheduler: "slurm" or "pbs".
        launcher: the command that starts processes on all nodes of a job.
        hosts: patterns for the names of the hosts from which GPU jobs are submitted.
        account_required: whether a job must name an account.
        gpu_option: the option that requests GPUs; ``%d`` is the number per node. On PBS: the resource in a chunk.
        gpus_per_node: GPUs of a whole node.
        card, card_network: the GPU and the network between nodes for ``workshop plan``: a file, and a table of networks.toml, in
            workshop/plan/cards; "": a GPU that has no such file, and the usual network of the GPU.
        max_nodes: the maximum number of nodes of any job; None: only the limits of the queues apply.
        cores_per_gpu: CPU cores per GPU.
        usable_cores_per_node: the cores of a whole node that jobs can use.
        memory: how a job requests memory: "per_node" (on PBS in the chunk), "per_gpu", or "none" (the site sets it by itself).
        memory_per_gpu: GB per GPU.
        options: further options for every job.
        forbidden: options that the site refuses, each with the reason.
        arch: the architecture of the nodes with GPUs.
        vendor: "cuda" or "rocm".
        network: variables for NCCL, RCCL and libfabric.
        offline: variables that keep libraries from using the internet.
        caches: variables with folders, which the job creates on each node.
        scratch: the place for large files.
        internet: whether jobs can reach the internet; None: unknown.
        utilisation: the command that shows whether the GPUs are busy; replace JOB and NODE in it.
        queues: in the order in which submit tries them: short ones first.
        checked_on: the date when this profile was last compared with the sources.
        source: the sources.
        uncertain: the fields that are second-hand, old, or on which sources disagree.
    """

    name: str
    status: Literal["live", "retired"]
    scheduler: Literal["slurm", "pbs"]
    launcher: Literal["srun", "mpiexec"]
    hosts: list[str]
    account_required: bool
    gpu_option: str = Field(pattern="%d")
    gpus_per_node: int
    card: str = ""
    card_network: str = ""
    max_nodes: int | None = None
    cores_per_gpu: int
    usable_cores_per_node: int
    memory: Literal["per_node", "per_gpu", "none"]
    memory_per_gpu: int = 0
    options: list[str] = []
    forbidden: dict[str, str] = {}
    arch: Literal["x86_64", "aarch64"]
    vendor: Literal["cuda", "rocm"]
    network: dict[str, str] = {}
    offline: dict[str, str] = {}
    caches: dict[str, str] = {}
    scratch: str = ""
    internet: bool | None = None
    utilisation: str = ""
    environment: Environment
    queues: list[Queue] = Field(min_length=1)
    ondemand: OnDemand | None = None
    checked_on: date
    source: list[str]
    uncertain: list[str] = []


def read_site(path: Path) -> Site:
    """Read a profile.

    Raises:
        UserError: it cannot be read, a key is missing or unknown, or a value is wrong.
    """
    try:
        site = Site.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path.name} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = {"missing": "is missing", "extra_forbidden": "is not a key of a profile; template.toml lists all keys"}
        raise UserError(f"{path.name}: {key} {known.get(first['type'], 'is wrong: ' + first['msg'])}") from None
    for field in site.uncertain:
        if field.split(".")[0] not in Site.model_fields:
            raise UserError(f"{path.name}: uncertain names {field}, which is not a key of a profile")
    return site


def known_sites() -> dict[str, Path]:
    """Return the profiles by the name that ``--site`` accepts."""
    return {path.stem: path for path in sorted(SITES.glob("*.toml")) if path.stem != "template"}


def find_site(name: str) -> Site:
    """Return the profile of this name.

    Raises:
        UserError: there is no such profile.
    """
    sites = known_sites()
    if name not in sites:
        raise UserError(
            f"there is no site '{name}'; choose from {', '.join(sites)}, or fill in template.toml for a different site"
        )
    return read_site(sites[name])


def detect_site(host: str = "") -> str:
    """Return the name of the site with a pattern that matches the name of this host, or "" if there is none."""
    host = host or socket.gethostname()
    for name, path in known_sites().items():
        if any(fnmatch.fnmatch(host, pattern) for pattern in read_site(path).hosts):
            return name
    return ""
