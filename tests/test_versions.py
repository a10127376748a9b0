"""The oldest versions that pyproject.toml admits: the stages train and restart with them too."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import runs

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv, to find the oldest versions"),
]


@pytest.fixture(scope="module")
def oldest(tmp_path_factory) -> Path:
    """The Python of an environment with the lower bound of every direct dependency."""
    folder = tmp_path_factory.mktemp("oldest")
    python = folder / "venv" / "bin" / "python"
    subprocess.run(["uv", "venv", "--quiet", "--no-project", "--python", "3.11", folder / "venv"], check=True)
    install = ["uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
    subprocess.run([*install, "--resolution", "lowest-direct", "-r", runs.ROOT / "pyproject.toml"], check=True)
    subprocess.run([*install, "pytest", "pyyaml", "packaging"], check=True)
    yield python
    shutil.rmtree(folder)  # 6 GB


def passed(python, *arguments) -> int:
    """Run pytest with another Python and return how many tests passed; none may fail, and none be skipped but GPU tests."""
    environment = runs.environment(WORKSHOP_PYTHON=python, COLUMNS=200)
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=runs.ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all("needs a GPU" in line for line in done.stdout.splitlines() if line.startswith("SKIPPED"))
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def test_versions_are_the_lower_bounds(oldest):
    listed = subprocess.run(
        ["uv", "pip", "list", "--python", oldest], capture_output=True, text=True, check=True
    ).stdout
    versions = dict(line.split()[:2] for line in listed.splitlines()[2:])
    text = (runs.ROOT / "pyproject.toml").read_text()
    for name in ("torch", "torchvision", "numpy"):
        bound = re.search(rf'"{name}>=([\d.]+)"', text)[1]
        assert versions[name].startswith(bound), (name, versions[name])


def test_training_data_bad_input_and_tour(oldest):
    files = ["tests/test_training.py", "tests/test_bad_input.py", "tests/test_data.py", "tests/test_tour.py"]
    assert passed(oldest, *files, "-m", "not full") > 80


def test_restarts(oldest):
    assert passed(oldest, "tests/test_restart.py", "-m", "not full") >= 6


def test_exercises_and_check(oldest):
    assert passed(oldest, "tests/test_exercises.py", "tests/test_check.py", "-m", "not full") > 100


def test_lightning_and_fine_tuning(oldest):
    assert passed(oldest, "tests/test_lightning.py", "tests/test_finetuning.py", "-m", "not full") > 60


def test_20_kills_in_a_row(oldest):
    assert passed(oldest, "tests/test_restart.py", "-k", "20_kills", "-s") == 1
