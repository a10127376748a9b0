"""What each site needs: the profiles in slurm-multinode/sites, one TOML file each."""

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
    """A table of a profile: a key that it does not know, or a value of another type, is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Queue(Table):
    """A partition or QOS of Slurm, or a queue of PBS, and its limits; what is left out is not known, and not checked.

    Attributes:
        name: what ``--queue`` takes; on PBS the queue itself.
        partition: Slurm's ``--partition``; "": left out.
        qos: Slurm's ``--qos``; ``{account}`` stands for the account; "": left out.
        time: the longest job, as Slurm writes it: "HH:MM:SS", "D-HH" or "D-HH:MM:SS"; "": not known.
        max_nodes: the most nodes of a job.
        max_gpus: the most GPUs of a job, over all its nodes.
        test: for short trials.
        condition: why it is taken only where ``--queue`` names it; "": also taken where none is named.
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
        kind: how it is provided; "venv": by the Python that runs ``workshop submit``.
        prologue: lines of shell before anything else.
        python: what starts Python on a node, maybe in a container: the value of ``$PYTHON``. "": that of the venv.
        container_prologue: the same lines for a job in an image that its owner brings (``--container``).
        needs: variables that have to be set when a job is submitted, and what each of them is.
    """

    kind: Literal["module", "container", "conda", "venv"]
    prologue: list[str] = []
    python: str = ""
    container_prologue: list[str] = []
    needs: dict[str, str] = {}


class OnDemand(Table):
    """A site's Open OnDemand.

    Attributes:
        address: of its dashboard.
        cluster: the name of a file in /etc/ood/config/clusters.d; "": not known.
        partition: for a small session without a GPU; "": not known.
        courses: the site has "Jupyter for courses", which reads the folder www_COURSES_modules; "": it has not.
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
        launcher: what starts processes on all nodes of a job.
        hosts: patterns of the names of hosts from which GPU jobs are submitted there.
        account_required: whether a job has to name an account.
        gpu_option: how GPUs are asked for; ``%d`` is their number on each node. On PBS: the resource in a chunk.
        gpus_per_node: GPUs of a whole node.
        max_nodes: the most nodes of any job; None: the queues say.
        cores_per_gpu: a GPU's share of the cores.
        usable_cores_per_node: the cores of a whole node that a job can have.
        memory: how memory is asked for: "per_node" (on PBS in the chunk), "per_gpu", or "none" (it comes with something else).
        memory_per_gpu: GB.
        options: further options for every job.
        forbidden: options that the site refuses, each with the reason.
        arch: of the nodes with GPUs.
        vendor: "cuda" or "rocm".
        network: variables for NCCL, RCCL and libfabric.
        offline: variables that keep libraries from reaching out.
        caches: variables with folders, which are made on each node.
        scratch: where large files go.
        internet: whether jobs reach it; None: not known.
        utilisation: how to see whether the GPUs are busy; JOB and NODE stand for themselves.
        queues: in the order in which they are tried: short ones first.
        checked_on: when somebody compared this profile with the source.
        source: where it comes from.
        uncertain: the fields that are second-hand, old, or that sources disagree on.
    """

    name: str
    status: Literal["live", "retired"]
    scheduler: Literal["slurm", "pbs"]
    launcher: Literal["srun", "mpiexec"]
    hosts: list[str]
    account_required: bool
    gpu_option: str = Field(pattern="%d")
    gpus_per_node: int
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
        known = {"missing": "is missing", "extra_forbidden": "is no key of a profile; template.toml names them all"}
        raise UserError(f"{path.name}: {key} {known.get(first['type'], 'is wrong: ' + first['msg'])}") from None
    for field in site.uncertain:
        if field.split(".")[0] not in Site.model_fields:
            raise UserError(f"{path.name}: uncertain names {field}, which is no key of a profile")
    return site


def known_sites() -> dict[str, Path]:
    """The profiles by the name that ``--site`` takes."""
    return {path.stem: path for path in sorted(SITES.glob("*.toml")) if path.stem != "template"}


def find_site(name: str) -> Site:
    """The profile of this name.

    Raises:
        UserError: there is none.
    """
    sites = known_sites()
    if name not in sites:
        raise UserError(
            f"there is no site '{name}'; known are {', '.join(sites)}; for another one fill in template.toml"
        )
    return read_site(sites[name])


def detect_site(host: str = "") -> str:
    """The name of the site whose pattern fits this host's name; "": none does."""
    host = host or socket.gethostname()
    for name, path in known_sites().items():
        if any(fnmatch.fnmatch(host, pattern) for pattern in read_site(path).hosts):
            return name
    return ""
