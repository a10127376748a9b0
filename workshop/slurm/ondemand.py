"""Write a site's settings for the Open OnDemand app, and the files for "Jupyter for courses" of CSC and LUMI, from its profile.

python -m workshop.slurm.ondemand SITE FOLDER [--account ACCOUNT] [--repository URL]
"""

import argparse
import json
import re
import sys
from pathlib import Path

from workshop.errors import UserError
from workshop.repository import ROOT
from workshop.slurm.sites import Site, find_site

SETTINGS = ROOT / "ondemand" / "settings.yml"
COURSE = "distributed-pytorch-workshop"


def settings(site: Site, account: str = "") -> str:
    """Return ondemand/settings.yml with the values of the profile; keys, comments and all other values stay.

    Raises:
        UserError: the profile has no Open OnDemand.
    """
    if site.ondemand is None:
        raise UserError(f"the profile of {site.name} has no Open OnDemand; learners work in a terminal there")
    qos = {queue.qos.replace("{account}", account) for queue in site.queues if "{account}" in queue.qos and account}
    values = {
        "cluster": site.ondemand.cluster or "my_cluster",
        "scheduler": site.scheduler,
        "account": account,
        "partition": site.ondemand.partition,
        "options": [f"--qos={name}" for name in sorted(qos)],
    }
    # A session needs no GPU. If the site has torch only in a container, the session uses the workshop's own .venv.
    if site.environment.kind in ("module", "conda"):
        values |= {"modules": "; ".join(site.environment.prologue), "python": site.environment.python}
    if site.memory == "none":
        values["memory"] = ""
    if site.scheduler == "slurm":
        values["gpu_option"] = site.gpu_option
    lines = []
    for line in SETTINGS.read_text().splitlines():
        key, _, rest = line.partition(": ")
        if key in values:
            comment = re.search(r"#.*", rest)
            line = f"{f'{key}: {json.dumps(values[key])}':36} {comment[0] if comment else ''}".rstrip()
        lines.append(line)
    return "\n".join(lines) + "\n"


def course_files(site: Site, account: str, repository: str) -> dict[str, str]:
    """Return the two files of "Jupyter for courses" by path in the project folder; none if the site has no such service.

    The module file names the notebooks and puts the course's Python first on the path; the other file has the size of a session
    (the CSC user guide of August 2026 lists the keys).

    Raises:
        UserError: the account or the repository is missing.
    """
    if not (site.ondemand and site.ondemand.courses):
        return {}
    if not (account and repository):
        raise UserError(
            f"Jupyter for courses at {site.name} needs --account PROJECT and --repository URL of your clone"
        )
    if not re.fullmatch(r"[\w@:/.~+-]+", account + repository):
        raise UserError("--account and --repository: use only letters, digits and @ : / . ~ + -")
    module = f"""\
-- Jupyter for courses: {COURSE}. Copy this file and the one beside it to
-- /projappl/{account}/www_{site.ondemand.courses}_modules, and the workshop to /projappl/{account}/{COURSE};
-- run ./workshop.sh doctor in it once, and choose "Restart Web Server" in the help menu of the dashboard.
whatis("Jupyter with the environment of the workshop")
setenv("_COURSE_BASE_NAME", "{COURSE}")
setenv("_COURSE_GIT_REPO", "{repository}")
setenv("_COURSE_GIT_REF", "main")
setenv("_COURSE_NOTEBOOK", "01_single_gpu/01_single_gpu.ipynb")
setenv("_COURSE_NOTEBOOK_TYPE", "lab")
-- The course pays for jobs that learners submit from a notebook.
setenv("SBATCH_ACCOUNT", "{account}")
prepend_path("PATH", "/projappl/{account}/{COURSE}/.venv/bin")
"""
    resources = f"""\
# The size of a session. It needs no GPU, because learners submit jobs from it. Name a reservation only while it exists.
cores: 2
time: "04:00:00"
partition: {json.dumps(site.ondemand.partition)}
local_disk: 0
mem: 8
reservation: ""
"""
    folder = f"www_{site.ondemand.courses}_modules"
    return {f"{folder}/{COURSE}.lua": module, f"{folder}/{COURSE}-resources.yml": resources}


def main() -> None:
    """Write the files, and print where each one belongs."""
    parser = argparse.ArgumentParser(prog="python -m workshop.slurm.ondemand", description=__doc__.splitlines()[0])
    parser.add_argument("site", help="the name of a profile in slurm-multinode/sites")
    parser.add_argument("folder", type=Path, help="the folder for the files")
    parser.add_argument("--account", default="", help="the course's account or project")
    parser.add_argument("--repository", default="", help="the address that learners clone (Jupyter for courses)")
    args = parser.parse_args()
    try:
        site = find_site(args.site)
        files = {"settings.yml": settings(site, args.account)} | course_files(site, args.account, args.repository)
        for name, text in files.items():
            path = args.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except (UserError, OSError) as error:
        print(f"workshop: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.folder / 'settings.yml'}: copy it to ondemand/settings.yml, and set workshop: in it")
    for name in list(files)[1:]:
        print(f"{args.folder / name}: copy it to /projappl/{args.account}/{name}")
    unsure = [field for field in site.uncertain if field.startswith("ondemand")]
    if unsure:
        print(f"uncertain in the profile: {', '.join(unsure)}")


if __name__ == "__main__":
    main()
