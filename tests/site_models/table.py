"""Compare the profiles of the sites with models of the sites: which jobs they accept, which they refuse, and with what message.

python tests/site_models/table.py prints the table. A model is a real Slurm controller whose nodes and limits were written from
what is known about the site, not from its profile (the .conf and .lua files here, which also say what they do not cover).
"""

import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from workshop.errors import UserError
from workshop.slurm.model import SEARCH_PATH, Model, model
from workshop.slurm.sites import find_site
from workshop.slurm.submission import Submission, submission

MODELS = Path(__file__).parent
SITES = ("roihu", "lumi", "marenostrum5", "hipergator")
BODY = 'source "${WORKSHOP_SITE:-/dev/null}"\nsrun ${PYTHON:-python} -m torch.distributed.run train.py "$@"\n'


@dataclass(frozen=True)
class Variant:
    """A way to submit a job of two whole nodes for ten minutes.

    Attributes:
        site: the name of a profile.
        title: what is special about it.
        asked: options of ``submission`` that produce it; None if no options can.
        directives: additional directives of the script.
        line: changes to the correct sbatch line, made without ``submission``; None as a value removes an option.
    """

    site: str
    title: str
    asked: dict | None = field(default_factory=dict)
    directives: tuple[str, ...] = ()
    line: dict | None = None


RIGHT = [
    *[
        Variant(site, title, {"nodes": nodes})
        for site in SITES
        for nodes, title in ((1, "1 whole node"), (2, "2 whole nodes"))
    ],
    *[Variant(site, "4 nodes with 1 GPU each", {"nodes": 4, "gpus_per_node": 1}) for site in SITES],
    Variant("roihu", "2 nodes with 2 GPUs each, 20 hours", {"gpus_per_node": 2, "time": "20:00:00"}),
    Variant("roihu", "2 whole nodes in gpularge, by name", {"queue": "gpularge", "time": "20:00:00"}),
    Variant("lumi", "4 whole nodes, 3 days", {"nodes": 4, "time": "3-00"}),
    Variant("lumi", "100 whole nodes, 2 days", {"nodes": 100, "time": "2-00"}),
    Variant(
        "marenostrum5", "4 whole nodes in acc_training, 2 days", {"nodes": 4, "queue": "acc_training", "time": "2-00"}
    ),
    Variant("hipergator", "2 nodes with 1 GPU each, 14 days", {"gpus_per_node": 1, "time": "14-00"}),
]
WRONG = [
    Variant("roihu", "20 minutes in gputest", {"queue": "gputest", "time": "20"}, line={"--time": "20"}),
    Variant("roihu", "3 nodes in gputest", {"queue": "gputest", "nodes": 3}, line={"--nodes": 3}),
    Variant("roihu", "8 GPUs in gpumedium", {"queue": "gpumedium"}, line={"--partition": "gpumedium"}),
    Variant("roihu", "2 whole nodes, 1 hour", {"time": "1:00:00"}, line={"--partition": "gpumedium", "--time": "60"}),
    Variant("roihu", "5 GPUs on a node", {"gpus_per_node": 5}, line={"--gpus-per-node": "gh200:5"}),
    Variant("roihu", "V100", None, line={"--gpus-per-node": "v100:4"}),
    Variant("roihu", "partition gpu, as at Puhti", {"queue": "gpu"}, line={"--partition": "gpu"}),
    Variant("roihu", "289 cores", None, line={"--cpus-per-task": 289}),
    Variant(
        "roihu",
        "11 nodes in gpularge",
        {"queue": "gpularge", "nodes": 11},
        line={"--partition": "gpularge", "--nodes": 11},
    ),
    Variant("roihu", "no account", {"account": None}, line={"--account": None}),
    Variant("lumi", "4 hours in dev-g", {"queue": "dev-g", "time": "4:00:00"}, line={"--time": "4:00:00"}),
    Variant("lumi", "33 nodes in dev-g", {"queue": "dev-g", "nodes": 33}, line={"--nodes": 33}),
    Variant(
        "lumi", "5 nodes in small-g", {"queue": "small-g", "nodes": 5}, line={"--partition": "small-g", "--nodes": 5}
    ),
    Variant(
        "lumi",
        "3 days in standard-g",
        {"queue": "standard-g", "time": "3-00"},
        line={"--partition": "standard-g", "--time": "3-0"},
    ),
    Variant("lumi", "9 GPUs on a node", {"gpus_per_node": 9}, line={"--gpus-per-node": 9}),
    Variant("lumi", "A100", None, line={"--gpus-per-node": "a100:8"}),
    Variant("lumi", "all 64 cores, 8 of which the system keeps", None, line={"--cpus-per-task": 64}),
    Variant("lumi", "70 GB for each of 8 GPUs", None, line={"--mem-per-gpu": "70G"}),
    Variant("lumi", "partition gputest", {"queue": "gputest"}, line={"--partition": "gputest"}),
    Variant("lumi", "no account", {"account": None}, line={"--account": None}),
    Variant("marenostrum5", "--mem", directives=("--mem=100G",), line={"--mem": "100G"}),
    Variant("marenostrum5", "--mem-per-gpu", directives=("--mem-per-gpu=50G",), line={"--mem-per-gpu": "50G"}),
    Variant("marenostrum5", "8 cores a GPU", None, line={"--cpus-per-task": 32}),
    Variant(
        "marenostrum5", "5 GPUs on a node", {"gpus_per_node": 5}, line={"--gpus-per-node": 5, "--cpus-per-task": 100}
    ),
    Variant("marenostrum5", "9 nodes in acc_debug", {"queue": "acc_debug", "nodes": 9}, line={"--nodes": 9}),
    Variant(
        "marenostrum5", "3 hours in acc_debug", {"queue": "acc_debug", "time": "3:00:00"}, line={"--time": "3:00:00"}
    ),
    Variant("marenostrum5", "3 hours, no queue named", {"time": "3:00:00"}, line={"--qos": None, "--time": "3:00:00"}),
    Variant("marenostrum5", "A100", None, line={"--gpus-per-node": "a100:4"}),
    Variant("marenostrum5", "partition gpu", {"queue": "gpu"}, line={"--partition": "gpu"}),
    Variant("marenostrum5", "no account", {"account": None}, line={"--account": None}),
    Variant("hipergator", "15 days", {"time": "15-00"}, line={"--time": "15-0"}),
    Variant("hipergator", "64 nodes", {"nodes": 64}, line={"--nodes": 64}),
    Variant("hipergator", "9 GPUs on a node", {"gpus_per_node": 9}, line={"--gpus-per-node": "b200:9"}),
    Variant("hipergator", "A100", None, line={"--gpus-per-node": "a100:8"}),
    Variant("hipergator", "partition hpg-ai, which is gone", {"queue": "hpg-ai"}, line={"--partition": "hpg-ai"}),
    Variant("hipergator", "B200 in the partition of the L4", None, line={"--partition": "hpg-turin"}),
    Variant("hipergator", "113 cores", None, line={"--cpus-per-task": 113}),
    Variant("hipergator", "2100 GB of memory", None, line={"--mem": "2100G"}),
]


def script(folder: Path, *directives: str) -> Path:
    """Write a job script with additional directives."""
    path = folder / "launch.sh"
    lines = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=8", "--time=00:10:00"]
    path.write_text("\n".join(["#!/bin/bash", *(f"#SBATCH {each}" for each in (*lines, *directives)), "", BODY]))
    return path


def build(site: str, folder: Path, directives: tuple[str, ...] = (), **asked) -> Submission:
    """Return the submission that ``workshop submit`` builds, by default for whole nodes of the site."""
    profile = find_site(site)
    options = {"account": "project_1", "gpus_per_node": profile.gpus_per_node} | asked
    environment = {"WORKSHOP_IMAGE": "/images/torch.sif"}
    return submission(script(folder, *directives), site, profile, environment=environment, **options)


def changed(command: list[str], changes: dict) -> list[str]:
    """Return a command with changed options; new values come first, and None removes an option."""
    rest = [word for word in command[1:] if word.partition("=")[0] not in changes]
    return [command[0], *(f"{name}={value}" for name, value in changes.items() if value is not None), *rest]


def ask_model(running: Model, variant: Variant, folder: Path) -> tuple[bool, str]:
    """Return whether the model accepts a variant, and its message."""
    if variant.line is None:
        return running.test(build(variant.site, folder, variant.directives, **variant.asked).command)
    return running.test(changed(build(variant.site, folder).command, variant.line))


def ask_submit(variant: Variant, folder: Path) -> str:
    """Return the message with which ``workshop submit`` refuses a variant, or "" if it accepts it."""
    try:
        build(variant.site, folder, variant.directives, **variant.asked)
    except UserError as refusal:
        return str(refusal)
    return ""


def main() -> None:
    """Print the table."""
    version = subprocess.run(["slurmctld", "-V"], env={"PATH": SEARCH_PATH}, capture_output=True, text=True).stdout
    print(f"python tests/site_models/table.py, with {version}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for site in SITES:
            with model(MODELS / f"{site}.conf") as running:
                print(f"{find_site(site).name}\n")
                for variant in [each for each in RIGHT + WRONG if each.site == site]:
                    accepted, words = ask_model(running, variant, folder)
                    print(f"  {'accepted' if accepted else 'refused':8}  {variant.title}")
                    print(f"            Slurm:  {words}")
                    if variant in WRONG and variant.asked is None:
                        print("            submit: never asks for this")
                    elif variant in WRONG:
                        print(f"            submit: {ask_submit(variant, folder)}")
                    else:
                        words = build(site, folder, variant.directives, **variant.asked).command[1:-2]
                        print(f"            submit: {' '.join(words)}")
                print()


if __name__ == "__main__":
    main()
