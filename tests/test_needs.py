"""The report on skipped tests at the end of a run, and the second run of .ci/run that takes only these tests."""

import os
import re
import sys

import pytest

import needs
import runs


def test_the_table_counts_tests_and_names_the_packages(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reasons = [
        "needs slurmctld, slurmd, ip",
        "needs slurmctld",
        "needs ruby",
        "needs a GPU",
        "needs uv",
        "no network here",
    ]
    counted, command = "\n".join(needs.table(reasons)).split("\n\n")
    assert sorted(line.rsplit(maxsplit=1)[0].split("  ")[0] for line in counted.splitlines()) == sorted(
        ["Slurm", "a GPU", "ip", "no network here", "ruby", "uv"]
    )
    assert "Slurm               2 tests" in counted
    assert "ruby                1 test\n" in counted + "\n"
    assert command.endswith("sudo apt-get install -y --no-install-recommends iproute2 ruby slurmctld slurmd")


def test_the_table_has_no_install_command_for_gpus():
    assert needs.table(["needs a GPU"] * 6) == ["a GPU     6 tests"]
    assert needs.table([]) == []


def test_a_program_beside_this_python_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "PATH", str(tmp_path))
    assert needs.missing("ruby", "git") == ["ruby", "git"]
    (tmp_path / "git").symlink_to("/bin/true")
    assert needs.reason("ruby", "git") == "needs ruby"
    with pytest.raises(pytest.skip.Exception, match="needs ruby"):
        needs.require("git", "ruby")


# For an environment without packages that many machines with PyTorch do not have.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

MISSING = "deepspeed grimp importlinter IPython ipykernel nbclient nbformat playwright pydantic requests xdist".split()


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def test_the_tests_for_gpus_need_few_packages(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    arguments = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "-m", "gpu", "tests"]
    path = os.pathsep.join(map(str, (tmp_path, runs.ROOT)))
    done = runs.run(arguments, runs.ROOT, PYTHONPATH=path, PYTEST_DISABLE_PLUGIN_AUTOLOAD=1)
    assert done.returncode == 0, done.stdout
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    files = {path.relative_to(runs.ROOT).as_posix(): path.read_text() for path in runs.ROOT.glob("tests/**/test_*.py")}
    assert collected == {name for name, text in files.items() if re.search(r"pytest\.mark\.gpu", text)}
    assert "pydantic is not installed" in done.stdout


TWO = """
import pytest

@pytest.mark.parametrize("case", ["a b", "[c]"])
def test_ruby(case):
    {}

def test_other():
    pass

@pytest.mark.machine
def test_machine():
    pass
"""


def test_a_second_run_takes_only_what_the_first_skipped(tmp_path):
    """The second run takes the tests that the first run skipped and those marked "machine"."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "needs.py", "runs.py"):
        (tmp_path / "tests" / name).symlink_to(runs.ROOT / "tests" / name)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\nmarkers = machine\njunit_family = xunit1\n")
    script = tmp_path / "tests" / "test_two.py"
    command = [sys.executable, "-m", "pytest", "-v", "-n0", "-p", "no:cacheprovider"]
    script.write_text(TWO.format('pytest.skip("needs ruby")'))
    first = runs.run([*command, "--junit-xml=first.xml"], tmp_path)
    assert "2 passed, 2 skipped" in first.stdout, first.stdout
    *_, counted, empty, how, _ = first.stdout.splitlines()
    assert (counted, empty) == ("ruby     2 tests", "")
    assert how.endswith("apt-get install -y --no-install-recommends ruby")
    script.write_text(TWO.format("pass"))
    second = runs.run([*command, "--skipped-in=first.xml"], tmp_path)
    assert "3 passed" in second.stdout, second.stdout
    assert "test_other" not in second.stdout
