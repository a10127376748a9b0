"""``workshop versions``: daily with small packages that break a test; with --full, the stages with the oldest versions."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import runs
from needs import needs
from test_environment import SITE_RUNS, trains_with
from test_restart import gone_within
from workshop.errors import UserError
from workshop.ship import version_sets, versions

needs_uv = needs("uv")

# ---------------------------------------------------------------- a repository of three small packages


def wheel(folder: Path, name: str, version: str, files: dict[str, str], *requires: str) -> str:
    """Make a wheel and return its line for a lock."""
    about = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {each}" for each in requires),
    ]
    info = f"{name}-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": "\n".join(about) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            archive.writestr(path, text)
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one stage, "01", whose lock has hammer, its dependency handle, and saw, all 1.0; each has a 2.0."""
    place, root = tmp_path / "wheels", tmp_path / "repository"
    place.mkdir()
    (root / "tests").mkdir(parents=True)
    # Links to the pytest of this environment, without the other packages.
    (tmp_path / "pytest").mkdir()
    for module in ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"):
        file = Path(importlib.util.find_spec(module).origin)
        source = file.parent if file.name == "__init__.py" else file
        (tmp_path / "pytest" / source.name).symlink_to(source)
    below = ("pluggy", "iniconfig", "packaging", "pygments")
    lock = wheel(place, "pytest", pytest.__version__, {"links.pth": f"{tmp_path / 'pytest'}\n"}, *below)
    lock += "".join(wheel(place, name, importlib.metadata.version(name), {}) for name in below)
    for version in ("2.0", "1.0"):  # the lines of the last version go into the lock
        code = f"def work(expected):\n    if {version[0]} not in expected:\n        raise ValueError('{version}')\n"
        lines = wheel(place, "handle", version, {"handle.py": code})
        lines += wheel(place, "hammer", version, {"hammer.py": code}, f"handle=={version}")
        lines += wheel(place, "saw", version, {"saw.py": code})
        (tmp_path / f"{version}.txt").write_text(lines)
    (root / "requirements.lock").write_text(lock + lines)
    (root / "pyproject.toml").write_text(
        "[project]\nname = 'shed'\nversion = '1.0'\n"
        f"requires-python = '>={sys.version_info.major}.{sys.version_info.minor}'\n"
        "dependencies = ['saw>=1.0', 'hammer>=1.0', 'handle>=1.0']\n"
        f"optional-dependencies = {{ development = ['pytest>={pytest.__version__}'] }}\n"
        "[tool.pytest.ini_options]\njunit_family = 'xunit1'\nmarkers = ['full', 'gpu']\n"
    )
    (tmp_path / "tmp").mkdir()
    for name, value in {"UV_NO_INDEX": "1", "UV_FIND_LINKS": place, "UV_CACHE_DIR": tmp_path / "cache"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(versions, "require_stages", lambda: root)
    monkeypatch.setattr(versions, "STAGES", {"01": ("tests/test_shed.py",)})
    monkeypatch.setattr(versions, "SHOWN", ("hammer", "saw"))
    monkeypatch.setattr(versions, "EACH", 1e6)  # few bytes, because pytest is linked and torch is missing
    return root


def run(repository, program: str, *sets, **options) -> tuple[int, dict]:
    """Run the command with ``program`` as the test of the stage; return its exit status and its results."""
    (repository / "tests" / "test_shed.py").write_text(
        f"import hammer, handle, os, saw\n\n\ndef test_shed():\n{program}"
    )
    status = versions.run_versions(sets, output=str(repository / "out"), **options)
    assert list((repository.parent / "tmp").iterdir()) == [], "a temporary folder was left behind"
    return status, json.loads((repository / "out" / "versions.json").read_text())["sets"]


@needs_uv
def test_each_set_installs_its_versions(repository, capsys):
    status, sets = run(repository, "    saw.work([1, 2])\n", "newest", "oldest", "lock")
    assert status == 0
    assert {name: result["versions"]["saw"] for name, result in sets.items()} == {
        "oldest": "1.0",
        "lock": "1.0",
        "newest": "2.0",
    }
    assert [result["stages"]["01"]["passed"] for result in sets.values()] == [1, 1, 1]
    page = (repository / "out" / "versions.md").read_text()
    assert "| stage | oldest | lock | newest |" in page
    assert "| saw | 1.0 | 1.0 | 2.0 |" in page
    assert re.search(r"\| 01 \| 1 passed, \d+ s \|", page)
    assert re.search(r"hammer +1\.0 +1\.0 +2\.0", capsys.readouterr().out)


FINDINGS = {
    "one package": ("    saw.work([1])\n", "saw 2.0 broke stage 01 (with 1.0 it passes)"),
    "a package with its dependency": (
        "    hammer.work([1])\n",
        "hammer 2.0 broke stage 01 (with 1.0, and handle 1.0 with it, it passes)",
    ),
    "two packages": (
        "    hammer.work([1])\n    saw.work([1])\n",
        "stage 01: no single package breaks it (tried: hammer, saw, handle)",
    ),
    "lock fails too": ("    saw.work([3])\n", "stage 01 fails with the lock too"),
    "flaky test": (
        "    first = not os.path.exists('seen')\n    open('seen', 'w').close()\n    assert not first\n",
        "stage 01 passed when it was repeated: its tests are flaky",
    ),
}


def in_the_cache_since_the_same_second(repository: Path) -> None:
    """Let uv unpack both versions of all packages, and give their files the same modification time."""
    folder = repository.parent
    for version in ("1.0", "2.0"):
        target = ["--require-hashes", "--target", folder / version, "-r", folder / f"{version}.txt"]
        subprocess.run(["uv", "pip", "install", "--quiet", *target], check=True)
    sources = [*(folder / "cache").rglob("saw.py"), *(folder / "cache").rglob("hammer.py")]
    assert len(sources) == 4
    for source in sources:
        os.utime(source, (1e9, 1e9))


@needs_uv
@pytest.mark.parametrize("case", FINDINGS)
def test_the_package_that_broke_a_stage_is_named(case, repository):
    program, sentence = FINDINGS[case]
    in_the_cache_since_the_same_second(repository)
    status, sets = run(repository, program)  # creates the environment of the lock when needed
    assert status == 1
    (finding,) = sets["newest"]["findings"]
    assert finding["sentence"] == sentence
    assert sentence in (repository / "out" / "versions.md").read_text()
    assert list(sets["newest"]["stages"]["01"]["failed"]) == ["tests/test_shed.py::test_shed"]


@needs_uv
def test_a_package_that_breaks_the_import_of_a_test_is_named(repository, monkeypatch):
    (repository / "tests" / "conftest.py").write_text("import saw\n")
    (repository / "tests" / "test_early.py").write_text("import saw\nsaw.work([1])\n\n\ndef test_it():\n    pass\n")
    monkeypatch.setattr(versions, "STAGES", {"01": ("tests/test_shed.py",), "02": ("tests/test_early.py",)})
    status, sets = run(repository, "    pass\n", "lock", "newest")
    assert status == 1
    assert sets["newest"]["stages"]["01"]["failure"] == ""
    assert [finding["package"] for finding in sets["newest"]["findings"]] == ["saw"]


@needs_uv
def test_a_stage_that_hangs_or_runs_nothing_fails(repository, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(versions, "STAGE", 3)
        status, sets = run(repository, "    __import__('time').sleep(300)\n", "lock")
    assert (status, sets["lock"]["stages"]["01"]["failure"]) == (1, "not finished after 3 s")
    program = (
        "    import subprocess\n    stray = subprocess.Popen(['sleep', '303'], start_new_session=True)\n"
        "    open('pid', 'w').write(str(stray.pid))\n"
    )
    status, sets = run(repository, f"{program}    import pytest; pytest.skip('no shed here')\n", "lock")
    with suppress(psutil.NoSuchProcess):
        assert gone_within([psutil.Process(int((repository / "pid").read_text()))], 5)
    assert (status, sets["lock"]["stages"]["01"]["failure"]) == (1, "nothing ran: no shed here")


@needs_uv
def test_an_environment_that_cannot_be_created_is_reported(repository, monkeypatch):
    project = (repository / "pyproject.toml").read_text()
    (repository / "pyproject.toml").write_text(project.replace("saw>=1.0", "saw>=3.0"))
    status, sets = run(repository, "    saw.work([1])\n", "newest", "lock")
    assert (status, sets["lock"]["failure"], sets["lock"]["stages"]["01"]["passed"]) == (1, "", 1)
    assert sets["newest"]["failure"].startswith("uv cannot create the environment of newest: ")
    assert "saw>=3.0" in sets["newest"]["failure"]


@needs_uv
def test_ctrl_c_leaves_no_process_and_no_folder(repository):
    (repository / "tests" / "test_shed.py").write_text(
        "import subprocess, time\n\n\ndef test_shed():\n"
        "    started = subprocess.Popen(['sleep', '301'], start_new_session=True)\n"
        "    open('pid', 'w').write(str(started.pid))\n    time.sleep(300)\n"
    )
    program = (
        "import sys; from pathlib import Path; from workshop.ship import versions\n"
        f"versions.require_stages = lambda: Path({str(repository)!r})\n"
        "versions.STAGES, versions.EACH = {'01': ('tests/test_shed.py',)}, 1e6\n"
        "sys.argv = ['workshop', 'versions', 'lock']; from workshop.cli import main; main()"
    )
    temporary, pid = repository.parent / "tmp", repository / "pid"
    command = runs.Running([sys.executable, "-c", program], repository.parent, TMPDIR=temporary)
    end = time.monotonic() + 120
    try:
        while not (pid.exists() and pid.read_text()) and command.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert pid.exists(), command.text()
        for _ in range(2):  # an impatient user presses Ctrl-C twice
            os.kill(command.process.pid, signal.SIGINT)
            time.sleep(0.2)
        assert command.wait(30) == 130, command.text()
    finally:
        command.end()
    assert command.text().splitlines()[-1] == "workshop: stopped"
    assert list(temporary.iterdir()) == []
    with suppress(psutil.NoSuchProcess):
        assert gone_within([psutil.Process(int(pid.read_text()))], 5)


# ---------------------------------------------------------------- mistakes


def test_unknown_sets_and_stages_are_refused():
    with pytest.raises(UserError, match=r"the set 'latest' is unknown; choose from: oldest, lock, newest$"):
        versions.run_versions(["latest"])
    with pytest.raises(UserError, match=r"--stage '99' is unknown; choose from: 01, 02, slurm-multinode, 03, 04, 05, "):
        versions.run_versions(stages="01,99")


def test_missing_disk_space_and_a_missing_uv_are_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**12, 10**12 - 10**10, 10**10))
    with pytest.raises(UserError, match=r"needs 12 GB, 6 for each environment, but only 10.0 GB are free"):
        versions.run_versions(["newest"])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write into"):
        versions.run_versions(["lock"], output=str(tmp_path / "file" / "out"))
    monkeypatch.setattr(shutil, "which", lambda program, path=None: None)
    with pytest.raises(UserError, match=r"uv, which creates the environments, is not installed: .* -m pip install uv"):
        versions.run_versions()


@needs_uv
def test_an_environment_without_pytest_is_reported(repository):
    lock = (repository / "requirements.lock").read_text()
    (repository / "requirements.lock").write_text(
        "".join(line for line in lock.splitlines(True) if "pytest" not in line)
    )
    status, sets = run(repository, "    pass\n", "lock")
    assert (status, sets["lock"]["failure"].partition(":")[0]) == (1, "lock has no pytest")


def test_every_stage_has_its_tests():
    for stage, arguments in versions.STAGES.items():
        if stage.startswith("bonus") and not (runs.ROOT / stage).is_dir():
            continue
        files = [argument for argument in arguments if argument.startswith("tests/")]
        assert files, stage
        assert all((runs.ROOT / file).is_file() for file in files), stage
    assert set(versions.SHOWN) - {"python"} <= set(version_sets.direct_dependencies(runs.ROOT))


# ---------------------------------------------------------------- the oldest versions in real environments


@pytest.fixture(scope="module")
def oldest():
    """An environment with the lower bound of every direct dependency."""
    with version_sets.made("oldest", runs.ROOT) as environment:
        yield environment


@needs_uv
@pytest.mark.full
def test_versions_are_the_lower_bounds(oldest):
    text = (runs.ROOT / "pyproject.toml").read_text()
    for name in ("torch", "torchvision", "numpy", "lightning", "transformers", "deepspeed", "accelerate", "peft"):
        bound = re.search(rf'"{name}>=([\d.]+)', text)[1]
        assert oldest.versions[name].startswith(bound), (name, oldest.versions[name])


OTHERS = {
    "bad input, data, tour": ("tests/test_bad_input.py", "tests/test_data.py", "tests/test_tour.py"),
    "the whole check": ("tests/test_exercises.py", "tests/check"),
    "20 kills in a row": ("tests/test_checkpoint_steps.py", "-m", "full", "-k", "20_kills"),
}


@needs_uv
@pytest.mark.full
@pytest.mark.parametrize("stage", [*(stage for stage in versions.STAGES if stage != "check"), *OTHERS])
def test_a_stage_passes_with_the_oldest_versions(stage, oldest):
    row = versions.run_tests(oldest, (versions.STAGES | OTHERS)[stage], seconds=3600)
    assert row["failure"] == "", "\n".join(row["failed"].values())
    assert set(row["skipped"].values()) <= {"needs a GPU"}


@needs_uv
@pytest.mark.full
@pytest.mark.parametrize("what", SITE_RUNS)
def test_training_at_a_site_works_with_the_oldest_versions(what, oldest, tmp_path, monkeypatch):
    trains_with(oldest.python, what, tmp_path, monkeypatch)


# ---------------------------------------------------------------- torch 2.8, which sites still have


@pytest.fixture(scope="module")
def torch_2_8():
    """The oldest versions but with torch 2.8, which pyproject.toml does not allow but modules at sites still have."""
    with version_sets.made("oldest", runs.ROOT) as environment:
        packages = ["torch==2.8.0", "torchvision==0.23.0"]
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", environment.python, *packages], check=True)
        yield version_sets.look(environment.root, environment.folder)


REFUSED = {"04": 1}  # the number of daily tests that use FSDP


@needs_uv
@pytest.mark.full
@pytest.mark.parametrize("stage", [stage for stage in versions.STAGES if stage != "check"])
def test_a_stage_passes_with_torch_2_8(stage, torch_2_8):
    """Everything trains except FSDP on CPUs, which is refused because torch 2.8 sums gradients instead of averaging them."""
    assert torch_2_8.versions["torch"].startswith("2.8.0")
    row = versions.run_tests(torch_2_8, versions.STAGES[stage], seconds=3600)
    refused = [test for test, report in row["failed"].items() if "on CPUs, FSDP adds up the gradients" in report]
    assert [*row["failed"]] == refused, "\n".join(row["failed"].values())
    assert len(refused) == REFUSED.get(stage, 0)
    assert row["passed"] > len(refused)
    assert row["failure"] == (f"{len(refused)} of {len(refused) + row['passed']} failed" if refused else "")
    assert set(row["skipped"].values()) <= {"needs a GPU"}
