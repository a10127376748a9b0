"""Every command in the READMEs is tested: here in a copy of the repository, or at the place in the table below."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import runs
from test_data import archives, server  # noqa: F401 - fixtures

OTHERS = [runs.ROOT / folder / "README.md" for folder in ("slurm-multinode", "bonus_jax")]
STAGE_READMES = [*sorted(runs.ROOT.glob("0*/README.md")), *OTHERS]
READMES = [runs.ROOT / "README.md", runs.ROOT / "docs" / "your-script.md", *STAGE_READMES]

# Commands that are tested elsewhere, with a file and a text that this file must contain.
ELSEWHERE = {
    "git clone ADDRESS-OF-THIS-REPOSITORY workshop && cd workshop": (".ci/run", "git clone"),
    "./workshop.sh tour": (".ci/run", "./workshop.sh tour"),
    "./workshop.sh test": (".ci/run", "./workshop.sh test"),
    "./workshop.sh test --full": ("tests/test_readme.py", "def test_workshop_test_passes_on_the_option_full"),
    "./workshop.sh fetch mnist": ("tests/test_readme.py", "def test_the_fetch_command_of_the_readme_works"),
    "./workshop.sh fetch cifar10": ("tests/test_data.py", "def test_cifar10_is_fetched_and_verified"),
    "./workshop.sh pack /tmp/workshop-pack --data mnist --model tiny-codellama": (
        "tests/test_pack.py",
        "def test_the_whole_workshop_without_network",
    ),
    "./workshop.sh submit slurm-multinode/launch_ddp_1N4G.sh --site della --container pytorch-cuda.sif --dry-run": (
        "tests/test_container_jobs.py",
        "def test_the_python_of_a_job_runs_in_the_image",
    ),
    "./workshop.sh versions oldest lock newest": ("tests/test_versions.py", "def test_each_set_installs_its_versions"),
    "./workshop.sh lab": ("tests/test_jupyter.py", "def test_notebook_01_runs_in_a_browser"),
    "./workshop.sh doctor --class 30": ("tests/test_classroom.py", '"--class", 30'),
    "./run_single_gpu.sh --epochs 4": ("01_single_gpu/01_single_gpu.ipynb", "run_single_gpu.sh --epochs 4"),
    "./run_single_gpu.sh --epochs 6": ("01_single_gpu/01_single_gpu.ipynb", "run_single_gpu.sh --epochs 6"),
    # pip is tested without the extra, whose packages are in the lock
    "python -m pip install -e '.[notebooks]'": ("tests/test_environment.py", '"-m", "pip", "install", "-e", "."'),
}


def commands(readme: Path) -> list[str]:
    """Return the commands in the bash blocks of a README, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", readme.read_text(), re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    ignored = shutil.ignore_patterns("runs", ".venv*", ".git", "__pycache__", "data", "*.egg-info")
    shutil.copytree(
        runs.ROOT,
        folder / "copy",
        ignore=lambda place, names: ignored(place, names) - ({"data"} if "workshop" in place else set()),
    )
    return folder / "copy"


@pytest.fixture
def short():
    """A folder with a short path, because the sockets of a practice cluster are in it."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        yield folder


# A command that starts a practice cluster, or needs the one that an earlier command started.
ON_CLUSTER = re.compile(r"workshop\.sh (cluster |check \S+\.sh|submit (?!.*--dry-run))")


def parts() -> list:
    """Return two cases for each README: the commands for any machine, and those that need a practice cluster."""
    cases = []
    for readme in READMES:
        for cluster in (False, True):
            marks = [runs.needs_cluster] if cluster else []
            if any(bool(ON_CLUSTER.search(command)) == cluster for command in commands(readme)):
                name = readme.stem if readme in READMES[:2] else readme.parent.name
                cases.append(pytest.param(readme, cluster, marks=marks, id=f"{name}-cluster" if cluster else name))
    return cases


@pytest.mark.full  # .ci/run runs the first commands of the README daily
@pytest.mark.parametrize(("readme", "cluster"), parts())
def test_the_commands_of_the_readmes_work(readme, cluster, copy, short):
    found = [command for command in commands(readme) if bool(ON_CLUSTER.search(command)) == cluster]
    folder = copy if readme in READMES[:2] else copy / readme.parent.relative_to(runs.ROOT)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in found:
        if command in ELSEWHERE:
            file, proof = ELSEWHERE[command]
            assert proof in (runs.ROOT / file).read_text(), f"{command} is not run by {file}"
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=runs.environment(PATH=path, PYTHONPATH=copy, TMPDIR=short),  # for the sockets of its practice cluster
            capture_output=True,
            text=True,
        )
        # 1 from diff: the files differ; from check: a delivered exercise has open goals
        expected = 1 if command.startswith("diff ") or re.search(r"workshop\.sh check .*exercise", command) else 0
        assert done.returncode == expected, f"{command}\n{done.stdout}{done.stderr}"
        if re.search("--(epochs|steps)", command) and not re.search("submit|check", command):
            assert re.search(r"(epoch|step) (\d+)/\2 ", done.stdout), done.stdout


def test_workshop_test_passes_on_the_option_full(copy):
    done = subprocess.run(
        [copy / "workshop.sh", "test", "--full", "--collect-only", "-q", "tests/test_restart.py"],
        capture_output=True,
        text=True,
        env=runs.environment(PYTHONPATH=copy),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_torchrun_restarts_a_worker_that_dies_while_saving" in done.stdout
    done = subprocess.run(
        [copy / "workshop.sh", "test", "--collect-only", "-q", "tests/test_restart.py"],
        capture_output=True,
        text=True,
        env=runs.environment(PYTHONPATH=copy),
    )
    assert "test_torchrun_restarts_a_worker_that_dies_while_saving" not in done.stdout


@pytest.mark.full
def test_the_fetch_command_of_the_readme_works(copy, archives, server, tmp_path):  # noqa: F811
    from workshop.data import mnist

    url, _ = server(archives)
    table = ";".join(f"{archive.name},{archive.sha256},{archive.size}" for archive in mnist.ARCHIVES)
    environment = runs.environment(
        TEST_PATCH="small_mnist", TEST_MNIST=table, TEST_MNIST_URL=url, WORKSHOP_DATA=tmp_path
    )
    command = [copy / "workshop.sh", "fetch", "mnist"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4 files fetched" in done.stdout
    assert mnist.missing_files(tmp_path) == []
