"""The recipes of the images, and the message in a container that hides the GPUs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import runs
from needs import needs
from workshop.doctor import machine as doctor
from workshop.training import arguments, container

CONTAINERS = runs.ROOT / "containers"
RECIPES = {"cuda": "pytorch-cuda.def", "rocm": "pytorch-rocm.def", "jax": "jax.def"}


def recipe(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the header and the sections of a definition file."""
    lines = [line for line in (CONTAINERS / name).read_text().splitlines() if not line.startswith("#")]
    head, *parts = re.split(r"^%(\w+)\n", "\n".join(lines) + "\n", flags=re.MULTILINE)
    header = dict(line.split(": ", 1) for line in head.split("\n") if line)
    return header, dict(zip(parts[::2], parts[1::2], strict=True))


def copied(name: str) -> dict[str, str]:
    """Return what a definition file copies, such as {"requirements.lock": "/opt/workshop/requirements.lock"}."""
    return dict(line.split() for line in recipe(name)[1]["files"].splitlines() if line.strip())


def entries(lock: str) -> dict[str, set[str]]:
    """Return the hashes for each line of a lock (name, version and Python marker)."""
    blocks = re.split(r"\n(?=\w)", "\n".join(line for line in lock.splitlines() if not line.startswith("#")))
    return {block.split("\\")[0].strip(): set(re.findall("sha256:[0-9a-f]{64}", block)) for block in blocks if block}


LOCK = entries((runs.ROOT / "requirements.lock").read_text())


# ---------------------------------------------------------------- the recipes


@pytest.mark.parametrize(("kind", "name"), RECIPES.items())
def test_a_recipe_is_well_formed(kind, name):
    header, sections = recipe(name)
    assert header.keys() == {"Bootstrap", "From"}
    assert header["Bootstrap"] == "docker"
    assert re.fullmatch(r"[\w./-]+:(?!latest)[\w.-]+", header["From"]), "From must name an image and its tag"
    assert list(sections) == ["labels", "files", "post", "environment", "test", "runscript"]
    for source, target in copied(name).items():
        assert (runs.ROOT / source).exists()
        assert target == f"/opt/workshop/{source}"
    for section in ("post", "environment", "test", "runscript"):
        subprocess.run(["sh", "-n", "-c", sections[section]], check=True)
    assert f"bash /opt/workshop/containers/install.sh {kind}\n" in sections["post"]
    assert "pip" not in sections["post"], "the installation belongs in install.sh"
    assert "versions.py /opt/workshop/image.lock" in sections["test"]


def test_the_dockerfile_builds_the_same_image_as_the_recipe():
    text = (CONTAINERS / "Dockerfile").read_text()
    header, sections = recipe("pytorch-cuda.def")
    assert re.findall("^FROM (.*)", text, re.MULTILINE) == [header["From"]]
    sources = [word for line in re.findall("^COPY (.*) ", text, re.MULTILINE) for word in line.split()]
    assert sources == list(copied("pytorch-cuda.def"))
    ignored = (CONTAINERS / "Dockerfile.dockerignore").read_text().split()
    assert [word[1:] for word in ignored if word.startswith("!")] == sources
    for command in (sections["post"], sections["test"].replace("/opt/workshop/venv/bin/", "")):
        assert f"RUN {command.strip()}\n" in text
    assert 'PATH="/opt/workshop/venv/bin:$PATH"' in text
    assert 'PATH="/opt/workshop/venv/bin:$PATH"' in sections["environment"]


@pytest.mark.parametrize(
    ("programs", "target", "says"),
    [
        (["apptainer"], "build_pytorch", "apptainer build --force  containers/pytorch-cuda.sif containers/pytorch-cuda.def"),
        (["apptainer", "singularity"], "build_pytorch_rocm", "apptainer build --force  containers/pytorch-rocm.sif"),
        (["singularity"], "build_jax", "singularity build --force  containers/jax.sif containers/jax.def"),
        (["docker"], "build_docker", "docker build --file containers/Dockerfile"),
        (["podman"], "build_docker", "podman build --file containers/Dockerfile"),
        ([], "help", "make build_pytorch_rocm"),
        ([], "build_jax", "neither apptainer nor singularity here; build on a machine that has one of them, and copy the"),
        ([], "build_docker", "neither docker nor podman here"),
    ],
)  # fmt: skip
@needs("make")
def test_make_prefers_apptainer_to_singularity(programs, target, says, tmp_path):
    for name in (*programs, "sh", "make"):
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    command = ["make", "-n", target]
    done = subprocess.run(command, cwd=CONTAINERS, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert says in done.stdout + done.stderr
    if not programs and target != "help":
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    else:
        assert done.returncode == 0, done.stderr


@pytest.fixture
def installed(tmp_path):
    """A function that runs install.sh in a copy with programs that only record their calls, and returns these calls."""

    def install(kind: str) -> list[str]:
        (tmp_path / "containers").mkdir()
        for name in ("install.sh", "jax-cuda.lock"):
            shutil.copy(CONTAINERS / name, tmp_path / "containers")
        shutil.copy(runs.ROOT / "requirements.lock", tmp_path)
        for program in ("bin/apt-get", "bin/rm", "bin/python3", "venv/bin/python"):
            path = tmp_path / program
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f'#!/bin/sh\necho "{path.name} $*" >>{tmp_path}/calls\n')
            path.chmod(0o755)
        environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
        subprocess.run(["bash", tmp_path / "containers/install.sh", kind], env=environment, check=True)
        return (tmp_path / "calls").read_text().splitlines()

    install.folder = tmp_path
    return install


def test_the_cuda_image_installs_the_whole_lock(installed):
    calls = installed("cuda")
    assert (installed.folder / "image.lock").read_text() == (runs.ROOT / "requirements.lock").read_text()
    assert "python3 -m venv venv" in calls
    assert "python -m pip install --no-cache-dir --require-hashes -r image.lock" in calls


def test_the_rocm_image_keeps_its_own_torch(installed):
    calls = installed("rocm")
    assert "python3 -m pip install --no-cache-dir --require-hashes --no-deps -r image.lock" in calls
    kept = entries((installed.folder / "image.lock").read_text())
    left_out = {line.split("==")[0] for line in LOCK.keys() - kept.keys()}
    assert {"torch", "torchvision", "triton"} <= left_out
    assert all(name in ("torch", "torchvision", "triton") or name.startswith(("nvidia-", "cuda-")) for name in left_out)
    assert kept.items() <= LOCK.items()


def test_the_jax_image_adds_jax_for_cuda_to_the_lock(installed):
    calls = installed("jax")
    assert "python -m pip install --no-cache-dir --require-hashes -r image.lock" in calls
    kept = entries((installed.folder / "image.lock").read_text())
    extra = entries((CONTAINERS / "jax-cuda.lock").read_text())
    assert all(extra.values()), "an entry has no hashes"
    assert not {line.split("==")[0] for line in extra} & {line.split("==")[0] for line in LOCK}
    assert kept == LOCK | extra
    assert "python -m pip install --no-cache-dir --no-deps --no-build-isolation ." in calls, (
        "the package workshop is not installed"
    )
    pins = [
        pin
        for pin in map(Requirement, kept)
        if not pin.marker or pin.marker.evaluate({"python_full_version": "3.11.9"})
    ]
    versions = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    assert versions["jax"] == versions["jaxlib"] == versions["jax-cuda13-plugin"] == versions["jax-cuda13-pjrt"]


def test_install_names_the_images_that_it_knows(tmp_path):
    done = subprocess.run(["bash", CONTAINERS / "install.sh", "tpu"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "install.sh: name an image: cuda, rocm or jax\n")


@pytest.mark.parametrize(
    ("lock", "status", "says"),
    [
        (f"pytest=={pytest.__version__} \\\n    --hash=sha256:0\nnone==1 ; sys_platform == 'win32'\n", 0, "and 1 packages"),
        ("pytest==1.0 \\\n    --hash=sha256:0\n", 1, "pytest==1.0: " + pytest.__version__),
        ("nowhere==1.0\n", 1, "nowhere==1.0: none"),
        ("", 1, "the lock is empty"),
    ],
)  # fmt: skip
def test_versions_that_differ_from_the_lock_are_named(lock, status, says, tmp_path):
    (tmp_path / "image.lock").write_text(lock)
    done = runs.run([sys.executable, CONTAINERS / "versions.py", "image.lock", "pytest"], tmp_path)
    assert done.returncode == status
    assert says in done.stdout + done.stderr


# ---------------------------------------------------------------- containers that hide the GPUs


@pytest.fixture
def inside(monkeypatch):
    """A container of Apptainer on a node with NVIDIA GPUs but without their driver; ``change`` sets other circumstances."""
    null = Path("/dev/null")
    for name in (*container.HIDDEN_BY, "SLURM_GPUS_ON_NODE", "SLURM_CLUSTER_NAME", "SINGULARITY_CONTAINER"):
        monkeypatch.delenv(name, raising=False)

    def change(device=True, driver=False, cuda="13.0", hip=None, available=False, **environment):
        # Any device file works except /dev/null, which hides a GPU on the practice cluster.
        devices = {
            "cuda": Path("/dev/zero") if device and cuda else null,
            "rocm": Path("/dev/zero") if device and hip else null,
        }
        monkeypatch.setattr(container, "DEVICES", devices)
        monkeypatch.setattr(container, "_has_driver", lambda: driver)
        accelerator = SimpleNamespace(is_available=lambda: available)
        fake = SimpleNamespace(
            version=SimpleNamespace(cuda=cuda, hip=hip), accelerator=accelerator, __version__="2.15.0"
        )
        monkeypatch.setitem(sys.modules, "torch", fake)
        for name, value in ({"APPTAINER_CONTAINER": "/images/torch.sif"} | environment).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    change()
    return change


def test_a_container_started_without_nv_is_refused_with_the_remedy(inside, capsys):
    words = "this container was started without --nv, so it cannot use the GPUs of the node; start it with apptainer exec --nv"
    assert container.closed_to_gpus().startswith(words)
    with pytest.raises(SystemExit) as end:
        arguments.ArgumentParser(prog="train.py").parse_args([])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"train.py: {container.closed_to_gpus()}\n"
    finding = doctor.check_devices()
    assert (finding.status, finding.advice[:31]) == (doctor.PROBLEM, "start it with apptainer exec --")


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"APPTAINER_CONTAINER": None, "SINGULARITY_CONTAINER": "x.sif"}, "singularity exec --nv "),
        ({"cuda": None, "hip": "7.2"}, "apptainer exec --rocm "),
        ({"device": False, "SLURM_GPUS_ON_NODE": "2"}, "apptainer exec --nv "),
        ({"device": False, "CUDA_VISIBLE_DEVICES": "0"}, "apptainer exec --nv "),
    ],
)
def test_the_remedy_names_the_program_and_the_flag(changes, flag, inside):
    inside(**changes)
    assert f"start it with {flag}" in container.closed_to_gpus()


@pytest.mark.parametrize(
    "changes",
    [
        {"APPTAINER_CONTAINER": None},
        {"driver": True},
        {"device": False},
        {"device": False, "SLURM_GPUS_ON_NODE": "0"},
        {"device": False, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_CLUSTER_NAME": "practice"},
        {"CUDA_VISIBLE_DEVICES": ""},
        {"HIP_VISIBLE_DEVICES": ""},
        {"cuda": None},
        {"cuda": None, "hip": "7.2", "available": True},
    ],
)
def test_a_process_without_hidden_gpus_is_not_refused(changes, inside, monkeypatch):
    monkeypatch.setattr(container.Path, "exists", lambda path: False)  # these tests may run in a Docker container
    inside(**changes)
    assert container.closed_to_gpus() == ""
    arguments.ArgumentParser().parse_args([])


def test_the_check_for_hidden_gpus_imports_nothing_heavy():
    program = "import sys; from workshop.training.arguments import ArgumentParser; ArgumentParser().parse_args([])\n"
    program += "print({'torch', 'ctypes'} & set(sys.modules))"
    done = runs.run([sys.executable, "-c", program], runs.ROOT, APPTAINER_CONTAINER="x.sif")
    assert done.stdout == "set()\n", done.stderr
