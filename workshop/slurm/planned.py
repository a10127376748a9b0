"""Read the file that ``workshop plan --output`` writes, for the shape of a job."""

import json
from dataclasses import dataclass
from pathlib import Path

from workshop.errors import UserError


@dataclass(frozen=True)
class Planned:
    """What a plan says about a job.

    Attributes:
        nodes, gpus_per_node: the shape of the job.
        site: the site that was planned for; "": none.
        mesh: the layout in words.
    """

    nodes: int
    gpus_per_node: int
    site: str
    mesh: str


def read_plan(path: Path) -> Planned:
    """Read a plan.

    Raises:
        UserError: the file cannot be read, or is not a plan.
    """
    try:
        content = json.loads(path.read_text())
        layout = content["layout"]
        mesh = " x ".join(f"{name}={layout[name]}" for name in ("pp", "dp", "cp", "tp") if layout[name] > 1) or "1 GPU"
        mesh += f"; {content['mesh']}; {layout['microbatches']} micro-batches of {layout['mbs']}"
        mesh += f"; recomputation: {layout['recompute']}"
        return Planned(int(content["nodes"]), int(content["gpus_per_node"]), content.get("site") or "", mesh)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a file of workshop plan --output ({type(error).__name__}: {error})") from None
