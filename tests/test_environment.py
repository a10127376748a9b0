"""workshop.sh, the lock, and the other files that describe the environment."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import zipfile
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import runs
from workshop.slurm import cluster

ROOT = runs.ROOT
LOCK = (ROOT / "requirements.lock").read_text()
PINS = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", LOCK, re.MULTILINE)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def direct() -> list[Requirement]:
    extras = [line for lines in project()["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in project()["dependencies"] + extras]


def test_the_lock_pins_everything_with_hashes_and_names_no_index():
    entries = re.split(
        r"\n(?=[a-z])", "\n" + "\n".join(line for line in LOCK.splitlines() if not line.startswith("#"))
    )[1:]
    assert len(entries) > 100
    assert all(re.match(r"[a-z0-9._-]+==\S+", entry) and "--hash=sha256:" in entry for entry in entries)
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links", LOCK)


@pytest.mark.parametrize("requirement", direct(), ids=lambda requirement: requirement.name)
def test_the_lock_has_a_version_that_pyproject_allows(requirement):
    versions = [version for name, version in PINS if name == canonicalize_name(requirement.name)]
    assert versions, f"{requirement.name} is not in requirements.lock"
    assert all(requirement.specifier.contains(version) for version in versions)


def test_this_environment_has_the_versions_of_the_lock():
    """CI and learners use the same versions: this environment has those of the lock, unless WORKSHOP_PYTHON names another."""
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("not the environment that workshop.sh creates")
    import torch
    import torchvision

    assert ("torch", torch.__version__.split("+")[0]) in PINS
    assert ("torchvision", torchvision.__version__.split("+")[0]) in PINS
    assert torch.__version__.partition("+")[2] == torchvision.__version__.partition("+")[2], (
        "torch and torchvision are built for different CUDA versions"
    )


def test_the_cpu_lock_has_the_versions_of_the_lock():
    lines = [line for line in (ROOT / "requirements-cpu.lock").read_text().splitlines() if not line.startswith("#")]
    pins = {line.split()[0] for line in lines if not line.startswith(" ")}
    assert pins == {f"{name}=={version}+cpu" for name, version in PINS if name in ("torch", "torchvision")}


def test_the_conda_environment_installs_the_lock():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    python = next(line for line in conda["dependencies"] if isinstance(line, str) and line.startswith("python="))
    assert Requirement("python" + project()["requires-python"]).specifier.contains(python.removeprefix("python="))
    pip = next(entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict))
    assert pip == ["--require-hashes", "-r requirements.lock"]
    others = [
        line for line in conda["dependencies"] if isinstance(line, str) and not line.startswith(("python=", "pip"))
    ]
    assert others == [], "a package from conda may not have the version of the lock"


# A stand-in for uv: it "installs" an interpreter that prints its arguments, slowly enough for a test to interrupt it.

FAKE_UV = """#!/bin/bash
if [ "$1" = venv ]; then echo venv; else echo "$*"; fi >> "$UV_CALLS"
if [ "$1" = venv ]; then
    mkdir -p "${@: -1}/bin"
elif [ "$2" = install ] && [[ "$*" == *--require-hashes* ]]; then
    sleep "${UV_SLEEP:-0}"
    [ -z "${UV_FAILS:-}" ] || { echo "no such package" >&2; exit 1; }
    for last in "$@"; do [ "$previous" = --python ] && python=$last; previous=$last; done
    printf '#!/bin/bash\\necho "workshop $*"\\n' > "$python"
    chmod +x "$python"
fi
"""


@pytest.fixture
def clone(tmp_path):
    """A function that starts workshop.sh in a copy of the files that it needs, with the stand-in for uv."""
    folder = tmp_path / "clone with a space"
    folder.mkdir()
    for name in ("workshop.sh", "requirements.lock", "requirements-cpu.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "uv").write_text(FAKE_UV)
    (programs / "uv").chmod(0o755)
    calls = tmp_path / "calls.txt"

    def start(*arguments, stderr=subprocess.PIPE, **environment) -> subprocess.Popen:
        path = f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
        env = {"PATH": path, "HOME": str(tmp_path), "UV_CALLS": str(calls), **environment}
        return subprocess.Popen(
            [str(folder / "workshop.sh"), *arguments],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )

    start.folder, start.calls = folder, calls
    return start


def wheel_of(name: str, folder: Path) -> Path:
    """Make a wheel of an installed package, so that a test needs no index."""
    found = distribution(name)
    wheel = folder / f"{name}-{found.version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in found.files:
            if file.suffix != ".pyc" and file.name not in ("INSTALLER", "REQUESTED"):
                archive.write(found.locate_file(file), str(file))
    return wheel


def installs(clone) -> int:
    """Return how often the environment was created."""
    return clone.calls.read_text().splitlines().count("venv") if clone.calls.exists() else 0


def test_the_environment_is_created_once(clone):
    for _ in range(2):
        out, err = clone("tour", "--stages", "01").communicate(timeout=20)
        assert out == "workshop -P -m workshop tour --stages 01\n"
    assert installs(clone) == 1
    assert err == ""


def test_the_environment_is_created_again_when_the_lock_changes(clone):
    clone("doctor").communicate(timeout=20)
    with open(clone.folder / "requirements.lock", "a") as lock:
        lock.write("# one line more\n")
    clone("doctor").communicate(timeout=20)
    assert installs(clone) == 2


def test_the_environment_is_created_again_after_an_interrupted_install(clone):
    first = clone("doctor", UV_SLEEP="30")
    while installs(clone) == 0:
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert not (clone.folder / ".venv" / "complete").exists()
    out, _ = clone("doctor").communicate(timeout=20)
    assert out == "workshop -P -m workshop doctor\n"
    assert installs(clone) == 2


def test_two_commands_at_once_create_the_environment_once(clone):
    both = [clone("tour", UV_SLEEP="1.5") for _ in range(2)]
    results = [process.communicate(timeout=30) for process in both]
    assert [out for out, _ in results] == ["workshop -P -m workshop tour\n"] * 2
    assert installs(clone) == 1
    assert sum("another process is creating the environment" in err for _, err in results) == 1


def test_an_install_that_fails_is_reported_and_tried_again(clone):
    failed = clone("doctor", UV_FAILS="1")
    _, err = failed.communicate(timeout=20)
    assert failed.returncode == 2
    assert err.splitlines()[-1].startswith("workshop.sh: the environment could not be created")
    out, _ = clone("doctor").communicate(timeout=20)
    assert out == "workshop -P -m workshop doctor\n"


def test_workshop_torch_cpu_installs_torch_without_cuda(clone):
    """WORKSHOP_TORCH=cpu takes torch from the second lock and the rest, without CUDA, from the first; later calls keep it."""
    clone("doctor", WORKSHOP_TORCH="cpu", WORKSHOP_TORCH_INDEX="some-index").communicate(timeout=20)
    first, second, _ = (line for line in clone.calls.read_text().splitlines() if "install" in line)
    assert "--index-url some-index" in first
    assert first.endswith("requirements-cpu.lock")
    assert "--no-deps --require-hashes" in second
    installed = (clone.folder / ".venv" / "requirements.txt").read_text()
    names = re.findall(r"^([a-z0-9._-]+)==", installed, re.MULTILINE)
    left_out = {name for name, _ in PINS} - set(names)
    assert {"torch", "torchvision", "triton", "nvidia-nccl-cu13", "cuda-toolkit"} <= left_out
    assert {re.sub("^(nvidia|cuda)-.*", "cuda", name) for name in left_out} == {
        "torch",
        "torchvision",
        "triton",
        "cuda",
    }
    assert installed.count("--hash") > len(names), "an entry lost its hashes"
    clone("doctor").communicate(timeout=20)
    assert installs(clone) == 1, "the choice was not remembered"
    clone("doctor", WORKSHOP_TORCH="cuda").communicate(timeout=20)
    clone("doctor").communicate(timeout=20)
    assert installs(clone) == 2
    assert "requirements.lock" in clone.calls.read_text().splitlines()[-2]


def test_an_unknown_workshop_torch_is_refused_in_one_line(clone):
    wrong = clone("doctor", WORKSHOP_TORCH="rocm")
    _, err = wrong.communicate(timeout=20)
    assert (wrong.returncode, err) == (2, "workshop.sh: WORKSHOP_TORCH=rocm: choose cpu or cuda\n")


def test_help_installs_only_click(clone, tmp_path):
    shutil.copytree(ROOT / "workshop", clone.folder / "workshop", ignore=shutil.ignore_patterns("__pycache__"))
    wheel = wheel_of("click", tmp_path)
    lock = clone.folder / "requirements.lock"
    lock.write_text(
        f"{wheel.stem.split('-py3')[0].replace('-', '==')} \\\n    --hash=sha256:{sha256(wheel.read_bytes()).hexdigest()}\n"
    )
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    for arguments, usage in (([], "workshop "), (["--help"], "workshop "), (["check", "--help"], "workshop check ")):
        out, err = clone(*arguments, **index).communicate(timeout=60)
        assert out.startswith(f"Usage: {usage}[OPTIONS]"), out + err
        assert (err, installs(clone)) == ("", 0)


def test_help_without_an_index_describes_workshop_sh(clone):
    out, err = clone("--help", PIP_NO_INDEX="1").communicate(timeout=60)
    assert "./workshop.sh tour" in out
    assert "WORKSHOP_TORCH=cpu" in out
    assert (err, installs(clone)) == ("", 0)


def test_a_terminal_shows_a_progress_bar_and_a_pipe_does_not(clone):
    import pty

    parent, child = pty.openpty()
    started = clone("doctor", UV_SLEEP="2", stderr=child)
    os.close(child)
    started.communicate(timeout=30)
    shown = b""
    with suppress(OSError):  # the terminal is closed
        while part := os.read(parent, 4096):
            shown += part
    os.close(parent)
    first, *bars, last = shown.decode().replace("\r\n", "\n").strip().split("\r")
    assert first.startswith("workshop.sh: creating the environment in .venv (once; ")
    assert any(re.match(r"\[ {40}\]  0 %  packages, 1 s ", bar) for bar in bars), shown
    assert re.fullmatch(r"\x1b\[Kworkshop.sh: the environment is ready after \d s", last)
    (clone.folder / ".venv" / "complete").unlink()
    _, err = clone("doctor").communicate(timeout=20)
    first, last = err.splitlines()
    assert first.startswith("workshop.sh: creating the environment in .venv (once; ")
    assert re.fullmatch(r"workshop.sh: the environment is ready after \d s", last)


def run_script(path: str, tmp_path, *command: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["/bin/bash", ROOT / "workshop.sh", *command, "--help"],
        env={"PATH": path, "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_missing_python_is_reported_in_one_line(clone, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "cat", "cksum", "env"):
        (tools / name).symlink_to(shutil.which(name))
    (tools / "python3").write_text("#!/bin/bash\nexit 1\n")  # what a too old Python returns
    (tools / "python3").chmod(0o755)
    done = subprocess.run([clone.folder / "workshop.sh"], env={"PATH": str(tools)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Python 3.11 or newer is needed" in done.stderr
    assert "python3-venv" in done.stderr


def test_an_existing_environment_is_used(tmp_path):
    done = run_script("/usr/bin:/bin", tmp_path, WORKSHOP_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "Usage: workshop" in done.stdout


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("/nowhere/python", "there is no such program"),
        ("/bin/false", "Python 3.11 or newer is needed"),
    ],
)
def test_an_unsuitable_existing_environment_is_refused(program, message, tmp_path):
    done = run_script("/usr/bin:/bin", tmp_path, WORKSHOP_PYTHON=program)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr


def test_the_packages_missing_in_an_existing_environment_are_named(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    done = run_script("/usr/bin:/bin", tmp_path, WORKSHOP_PYTHON=str(tmp_path / "bare" / "bin" / "python"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    needed = [re.match(r"[\w-]+", line)[0] for line in project()["dependencies"]]
    needed.remove("py-spy")  # a program without a module
    assert f"lacks: {' '.join(needed)} (add them: " in done.stderr.replace("PIL", "pillow").replace(
        "sklearn", "scikit-learn"
    )


def test_gpu_day_asks_only_for_the_packages_that_all_its_items_need(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    done = run_script("/usr/bin:/bin", tmp_path, "gpu-day", WORKSHOP_PYTHON=str(tmp_path / "bare" / "bin" / "python"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "lacks: torch torchvision numpy pillow scikit-learn tqdm click rich psutil (add them: " in done.stderr


SITE_RUNS = ["runner", pytest.param("job", marks=[pytest.mark.full, runs.needs_cluster])]


def trains_with(python: Path, what: str, tmp_path: Path, monkeypatch) -> None:
    """Fail unless all ranks of a runner, or of a job of ``workshop submit``, use the Python that WORKSHOP_PYTHON names."""
    # Each process of this Python, and only of this Python, records its process ID and its command line.
    packages = runs.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).stdout
    witness, seen = Path(packages.strip()) / "witness.pth", tmp_path / "seen"
    witness.write_text(
        "import os, sys; 'WITNESS' in os.environ and "
        "open(os.environ['WITNESS'], 'a').write(f'{os.getpid()} {sys.orig_argv}\\n')\n"
    )
    site = {"WORKSHOP_PYTHON": python, "PYTHONPATH": None, "WITNESS": seen}
    if what == "runner":
        script, expected = runs.TORCHRUN.name, 2
        done = runs.run([runs.TORCHRUN_RUNNER, "--epochs", 1], tmp_path, **site)
        assert "epoch 1/1" in done.stdout, done.stdout + done.stderr
    else:
        script, expected = "multigpu_torchrun.py", 4
        _submit_and_wait(monkeypatch, site)
    witness.unlink()
    # A start is recorded twice if lib64 of the venv is a link to lib.
    workers = [line for line in set(seen.read_text().splitlines()) if f"{script}'" in line and "'-m'" not in line]
    assert len(workers) == expected, seen.read_text()


def _submit_and_wait(monkeypatch, site: dict) -> None:
    place = Path(
        tempfile.mkdtemp(prefix="site-", dir="/tmp")
    )  # a short path, because the sockets of the cluster are in it
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    for name in ("launch_ddp_1N4G.sh", "multigpu_torchrun.py", "first_failure.py"):
        shutil.copy(ROOT / "slurm-multinode" / name, place)
    up = cluster.up(1, mine=True)
    try:
        command = [ROOT / "workshop.sh", "submit", "launch_ddp_1N4G.sh", "--site", "local", "--", "--epochs", 1]
        done = runs.run(command, place, TMPDIR=place, **site)
        assert done.returncode == 0, done.stderr
        log = place / f"launch_ddp_1N4G-{re.match(r'job ([0-9]+):', done.stdout)[1]}.log"
        end = time.monotonic() + 120
        while (not log.exists() or "epoch 1/1" not in log.read_text()) and time.monotonic() < end:
            time.sleep(0.2)
        assert "epoch 1/1" in log.read_text(), log.read_text()
    finally:
        up.end()
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize("what", SITE_RUNS)
def test_training_runs_in_the_environment_of_a_site(what, tmp_path, monkeypatch):
    """Use a new environment other than .venv, which borrows the packages of this environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "site"], check=True)
    (packages,) = (tmp_path / "site").glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    trains_with(tmp_path / "site" / "bin" / "python", what, tmp_path, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_the_environment_is_created_where_uv_is_not_installed(installer, tmp_path):
    """Pip really installs uv, or installs everything if the index has no uv; then the training works."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    if installer == "pip":
        lock = clone / "requirements.lock"
        lock.write_text(re.sub(r"^uv==.*\n( .*\n)+", "", lock.read_text(), flags=re.MULTILINE))
    path = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "uv").exists()
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    environment = {**os.environ, "PATH": f"{programs}:{path}", "HOME": str(tmp_path / "home")}
    environment.pop("WORKSHOP_PYTHON", None)
    (tmp_path / "home").mkdir()
    done = subprocess.run(
        [clone / "workshop.sh", "tour", "--stages", "01", "--epochs", "1"],
        env=environment,
        text=True,
        capture_output=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("pip takes several minutes" in done.stderr) == (installer == "pip")
    assert all(line.startswith("workshop.sh: ") for line in done.stderr.splitlines()[:2]), done.stderr
    # A site with its own environment installs the package into it.
    done = subprocess.run(
        [clone / ".venv" / "bin" / "python", "-m", "pip", "install", "-e", "."],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [clone / ".venv" / "bin" / "workshop", "doctor"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    shutil.rmtree(clone)  # 6 GB


@pytest.mark.full
def test_the_locked_frameworks_work_together(tmp_path):
    """Lightning and transformers train in one process with this torch and torchvision."""
    program = """
import torch, torchvision, transformers
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
Trainer(accelerator="cpu", fast_dev_run=True, logger=False).fit(BoringModel())
shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
tokens = torch.arange(8)[None]
model(input_ids=tokens, labels=tokens).loss.backward()
print(torchvision.ops.nms(torch.tensor([[0.0, 0, 1, 1]]), torch.ones(1), 0.5).tolist())
"""
    done = runs.run([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0]"
