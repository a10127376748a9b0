"""The rules, one module per family. Importing this package declares them all: those that explain others come first."""

import importlib
from pathlib import Path

# Within a goal, findings are shown in this order.
FAMILIES = ("lightning", "accelerate", "processes", "gpus", "collectives", "ending", "files",
            "learning", "modes", "solved", "scaling", "stages", "inputs",
            "gradients", "schedules", "comparison", "parts", "samples", "loaders", "seeds", "accumulation", "evaluation",
            "metrics", "speed", "loading", "restart",
            "sharding", "checkpoints", "memory", "deepspeed", "built", "tensor", "pipeline", "ring", "experts", "mesh",
            "elastic", "jobs")  # fmt: skip

for _family in FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")

_files = {path.stem for path in Path(__file__).parent.glob("*.py")} - {
    "__init__",
    "alike",
    "by_hand",
    "carried",
    "divergence",
    "exchanges",
    "replicas",
    "rounds",
    "unequal",
    "own_state",
    "walk",
    "pages",
    "parting",
    "rule",
    "shares",
    "starts",
    "traced",
    "tried",
    "words",
}
assert _files == set(FAMILIES), f"FAMILIES and the modules of this package differ: {sorted(_files ^ set(FAMILIES))}"
