"""The distribution ``workshop-check``: what it contains, what it needs, and how it works in environments of other people."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import needs
import runs
from workshop.check import __version__, borrowed
from workshop.check.command import NEEDED, use_interpreter_of

grimp = pytest.importorskip("grimp")  # import-linter requires it
pytestmark = needs.needs("uv")

# A program in a package: it learns to add numbers, and each rank draws its own part of the data.
MAIN = """
import argparse

import torch
from torch import distributed, nn

from .data import Sums

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=6)
options = parser.parse_args()
distributed.init_process_group("gloo")
torch.manual_seed(3)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
descent = torch.optim.Adam(net.parameters(), 0.01)
stream = torch.utils.data.DataLoader(Sums(distributed.get_rank(), distributed.get_world_size()), batch_size=4)
for _, (numbers, total) in zip(range(options.rounds), stream):
    descent.zero_grad()
    nn.functional.smooth_l1_loss(net(numbers), total).backward()
    descent.step()
distributed.destroy_process_group()
"""
DATA = """
import itertools

import torch


class Sums(torch.utils.data.IterableDataset):
    def __init__(self, part, parts):
        self.part, self.parts = part, parts

    def __iter__(self):
        for seed in itertools.count(self.part, self.parts):
            numbers = torch.randn(3, generator=torch.Generator().manual_seed(seed))
            yield numbers, numbers.sum(0, keepdim=True)
"""
WRONG = ("itertools.count(self.part, self.parts)", "itertools.count()")
TORCHRUN = "#!{}\nfrom torch.distributed.run import main\nmain()\n"


def done(*command: object, cwd: Path, **variables: object) -> str:
    """Run a command that must succeed, and return its output."""
    ended = runs.run(command, cwd, PYTHONPATH=None, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def uv(*arguments: object, cwd: Path) -> None:
    done(shutil.which("uv", path=needs.PATH), *arguments, "--offline", "--no-cache", cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the files from which both distributions are built."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(runs.ROOT / name, folder)
    for name in ("workshop", "distribution"):
        unwanted = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(runs.ROOT / name, folder / name, symlinks=True, ignore=unwanted)
    return folder


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    """The wheel, built from the source distribution, which is beside it."""
    uv("build", "--no-build-isolation", "--python", sys.executable, "distribution", "-o", source / "dist", cwd=source)
    return next((source / "dist").glob("*.whl"))


def with_requirements(*names: str) -> dict[str, importlib.metadata.Distribution]:
    """Return distributions of this environment with all that they require."""
    found, pending = {}, list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            lines = map(Requirement, found[name].requires or ())
            pending += [line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    return found


def environment(folder: Path, *names: str) -> Path:
    """Create a Python environment in which only these packages, and those that they require, can be imported."""
    links = folder / "links"
    links.mkdir(parents=True)
    for distribution in with_requirements(*names).values():
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (links / top).exists():
                (links / top).symlink_to(distribution.locate_file(top))
    venv.create(folder / "env", symlinks=True)
    (packages(folder) / "links.pth").write_text(str(links))
    torchrun = folder / "env" / "bin" / "torchrun"
    torchrun.write_text(TORCHRUN.format(torchrun.with_name("python")))
    torchrun.chmod(0o755)
    return folder / "env" / "bin"


def packages(folder: Path) -> Path:
    return next((folder / "env" / "lib").glob("python*/site-packages"))


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """The programs of an environment with the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("bare")
    programs = environment(folder, "torch", *NEEDED)
    uv("pip", "install", "--no-deps", "--python", programs / "python", wheel, cwd=folder)
    return programs


@pytest.fixture
def program(tmp_path) -> Path:
    """The folder of the program; beside it is an empty home folder."""
    (tmp_path / "home").mkdir()
    (tmp_path / "project" / "adding").mkdir(parents=True)
    (tmp_path / "project" / "adding" / "__main__.py").write_text(MAIN)
    (tmp_path / "project" / "adding" / "data.py").write_text(DATA)
    return tmp_path / "project"


def check(programs: Path, torchrun: Path, program: Path) -> subprocess.CompletedProcess:
    words = [programs / "workshop-check", "--json", "--", torchrun, "--nproc-per-node=2", "-m", "adding", "--rounds", 5]
    return runs.run(words, program, PYTHONPATH=None, HOME=program.parent / "home", PATH="/usr/bin:/bin")


def test_the_wheel_contains_the_check_and_what_it_imports(wheel):
    graph = grimp.build_graph("workshop", exclude_type_checking_imports=True, cache_dir=None)
    check_alone = {"workshop.check", *graph.find_descendants("workshop.check")}
    needed = check_alone | graph.find_upstream_modules("workshop.check", as_package=True)
    files = {str(path.relative_to(runs.ROOT)) for path in (runs.ROOT / "workshop").rglob("*.py")}
    expected = {file for file in files if re.sub("(/__init__)?.py$", "", file).replace("/", ".") in needed}
    assert len(expected) > 50
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        assert inside <= {name.partition("/")[2] for name in archive.getnames()}
    assert expected - {"workshop/__init__.py"} <= inside
    packages = (
        "workshop/run/",
        "workshop/pretend/__init__.py",
    )  # Python needs the second one, but no module imports it
    others = {name for name in inside - expected if not name.startswith(packages)}
    assert not others, "the wheel contains files that the check does not import"


def test_the_wheel_requires_four_packages(wheel):
    (distribution,) = importlib.metadata.distributions(path=[str(wheel)])
    assert {Requirement(line).name for line in distribution.requires} == {"torch", *NEEDED}
    assert distribution.version == __version__
    assert f"\nversion: {__version__}\n" in (runs.ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("mistake", [False, True], ids=["correct", "wrong"])
def test_a_program_is_checked_with_only_the_packages_that_the_wheel_requires(mistake, bare, program):
    if mistake:
        (program / "adding" / "data.py").write_text(DATA.replace(*WRONG))
    ended = check(bare, bare / "torchrun", program)
    assert ended.returncode == mistake, ended.stdout + ended.stderr
    assert [finding["kind"] for finding in json.loads(ended.stdout)["findings"]] == ["same-samples"] * mistake
    assert not list((program.parent / "home").iterdir())


def test_the_texts_of_the_wheel_do_not_name_the_course(bare, tmp_path):
    code = (
        "from workshop.check.command import subject_of\n"
        "for rule in subject_of(None).rules: print(rule.why, rule.fix, rule.read or 'http', sep='\\n')"
    )
    texts = done(bare / "python", "-c", code, cwd=tmp_path).splitlines()
    assert len(texts) > 100
    assert all(read.startswith("http") for read in texts[2::3])
    assert not [text for text in texts if re.search(r"workshop|exercise|\bsolution|\bgoals?\b", text)]
    help_ = done(bare / "workshop-check", "--help", cwd=tmp_path)
    assert not re.search(r"workshop\.sh|exercise|FILE", help_)


def test_the_program_gets_nothing_from_the_environment_of_the_tool_but_the_check(bare, program, tmp_path):
    """The check is installed in its own environment, and the environment of the program has only torch."""
    own = environment(tmp_path / "own", "torch")
    (packages(tmp_path / "own") / "colleague.py").touch()
    for name in ("stranger.py", "colleague.py"):
        (packages(bare.parent.parent) / name).write_text(f"raise RuntimeError('{name} of the tool')")
    test = f"import sys, colleague\nassert sys.prefix == {str(own.parent)!r}, sys.prefix\n"
    test += f"assert not any({str(bare.parent.parent)!r} in place for place in sys.path), sys.path\n"
    test += "from importlib.util import find_spec\nassert find_spec('stranger') is None\n"
    (program / "adding" / "__main__.py").write_text(test + MAIN)
    ended = check(bare, own / "torchrun", program)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (packages(tmp_path / "own") / "psutil.py").write_text("raise ImportError")
    unchecked = use_interpreter_of([str(own / "torchrun"), "--of-a-newer-torch", "-m", "adding"], "workshop.check")
    assert unchecked.startswith("the program in its own environment")
    assert "lacks psutil;" in unchecked


def test_the_course_and_the_check_can_be_installed_together(source, wheel, tmp_path):
    programs = environment(tmp_path, "click")
    build = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    name = done(sys.executable, "-c", build, tmp_path, cwd=source).splitlines()[-1]

    def pip(action: str, *what: object) -> str:
        uv("pip", action, "--python", programs / "python", *what, cwd=tmp_path)
        code = "import workshop.check.cli as cli; print(cli.__file__)"
        return done(programs / "python", "-c", code, cwd=tmp_path).strip()

    of_course, of_wheel = (str(folder / "workshop/check/cli.py") for folder in (source, packages(tmp_path)))
    assert pip("install", "--no-deps", wheel) == of_wheel
    assert pip("install", "--no-deps", tmp_path / name) == of_course
    done(programs / "workshop", "--help", cwd=tmp_path)
    done(programs / "workshop-check", "--help", cwd=tmp_path)
    assert pip("uninstall", "workshop-check") == of_course
    assert pip("install", "--no-deps", wheel) == of_course
    assert pip("uninstall", "distributed-pytorch-workshop") == of_wheel


def test_an_old_python_is_named_as_missing(monkeypatch):
    assert borrowed.missing(["json"]) == []
    monkeypatch.setattr(borrowed, "OLDEST", (99, 0))
    assert borrowed.missing(["no_such_package"]) == ["Python 99.0", "no_such_package"]
