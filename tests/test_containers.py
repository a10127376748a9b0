"""The recipes of images, jobs that run in one, and what is said in a container that hides the GPUs.

containers/apptainer stands for Apptainer, which is not everywhere. The full test installs an image as %post does, in a Debian of
its own; where Apptainer has built containers/pytorch-cuda.sif (make build_pytorch), the same jobs run in that, too.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import runs
from site_models.table import script
from workshop.check.jobs import Job, Trial
from workshop.doctor import machine as doctor
from workshop.errors import UserError
from workshop.slurm import cluster as practice
from workshop.slurm.image import settings_name
from workshop.slurm.sites import find_site
from workshop.slurm.submission import submission
from workshop.slurm.submit import run_submit
from workshop.training import arguments, container

CONTAINERS = runs.ROOT / "containers"
RECIPES = {"cuda": "pytorch-cuda.def", "rocm": "pytorch-rocm.def", "jax": "jax.def"}
STAND_IN = runs.ROOT / "tests" / "containers" / "apptainer"
SOLUTIONS = runs.ROOT / "solutions"


def recipe(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """The header and the sections of a definition file."""
    lines = [line for line in (CONTAINERS / name).read_text().splitlines() if not line.startswith("#")]
    head, *parts = re.split(r"^%(\w+)\n", "\n".join(lines) + "\n", flags=re.MULTILINE)
    header = dict(line.split(": ", 1) for line in head.split("\n") if line)
    return header, dict(zip(parts[::2], parts[1::2], strict=True))


def copied(name: str) -> dict[str, str]:
    """What a definition file copies: {"requirements.lock": "/opt/workshop/requirements.lock"}."""
    return dict(line.split() for line in recipe(name)[1]["files"].splitlines() if line.strip())


def entries(lock: str) -> dict[str, set[str]]:
    """The lines of a lock with name, version and for which Python, and the hashes of each."""
    blocks = re.split(r"\n(?=\w)", "\n".join(line for line in lock.splitlines() if not line.startswith("#")))
    return {block.split("\\")[0].strip(): set(re.findall("sha256:[0-9a-f]{64}", block)) for block in blocks if block}


LOCK = entries((runs.ROOT / "requirements.lock").read_text())


def image(path: Path, root="", architecture="02") -> Path:
    """A file that begins like an image, and ends with what the stand-in looks for."""
    header = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\0" + architecture.encode() + b"\0"
    path.write_bytes(header + f"\n{root}\n".encode())
    return path


# ---------------------------------------------------------------- the recipes


@pytest.mark.parametrize(("kind", "name"), RECIPES.items())
def test_a_recipe_is_well_formed(kind, name):
    header, sections = recipe(name)
    assert header.keys() == {"Bootstrap", "From"}
    assert header["Bootstrap"] == "docker"
    assert re.fullmatch(r"[\w./-]+:(?!latest)[\w.-]+", header["From"]), "an image and its tag"
    assert list(sections) == ["labels", "files", "post", "environment", "test", "runscript"]
    for source, target in copied(name).items():
        assert (runs.ROOT / source).exists()
        assert target == f"/opt/workshop/{source}"
    for section in ("post", "environment", "test", "runscript"):
        subprocess.run(["sh", "-n", "-c", sections[section]], check=True)
    assert f"bash /opt/workshop/containers/install.sh {kind}\n" in sections["post"]
    assert "pip" not in sections["post"], "the steps are those of install.sh"
    assert "versions.py /opt/workshop/image.lock" in sections["test"]


def test_the_dockerfile_makes_the_image_of_the_recipe():
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


def test_the_shell_is_clean():
    subprocess.run(["shellcheck", CONTAINERS / "install.sh", STAND_IN], check=True)


@pytest.mark.parametrize(
    ("programs", "target", "says"),
    [
        (["apptainer"], "build_pytorch", "apptainer build --force  containers/pytorch-cuda.sif containers/pytorch-cuda.def"),
        (["apptainer", "singularity"], "build_pytorch_rocm", "apptainer build --force  containers/pytorch-rocm.sif"),
        (["singularity"], "build_jax", "singularity build --force  containers/jax.sif containers/jax.def"),
        (["docker"], "build_docker", "docker build --file containers/Dockerfile"),
        (["podman"], "build_docker", "podman build --file containers/Dockerfile"),
        ([], "help", "make build_pytorch_rocm"),
        ([], "build_jax", "neither apptainer nor singularity here; build where one of them is, and copy the .sif file"),
        ([], "build_docker", "neither docker nor podman here"),
    ],
)  # fmt: skip
def test_make(programs, target, says, tmp_path):
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
    """A function that runs install.sh in a copy, with programs that only write down how they are called, and returns that."""

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


def test_what_is_installed_for_cuda(installed):
    calls = installed("cuda")
    assert (installed.folder / "image.lock").read_text() == (runs.ROOT / "requirements.lock").read_text()
    assert "python3 -m venv venv" in calls
    assert "python -m pip install --no-cache-dir --require-hashes -r image.lock" in calls


def test_for_rocm_the_torch_of_the_image_stays(installed):
    calls = installed("rocm")
    assert "python3 -m pip install --no-cache-dir --require-hashes --no-deps -r image.lock" in calls
    kept = entries((installed.folder / "image.lock").read_text())
    left_out = {line.split("==")[0] for line in LOCK.keys() - kept.keys()}
    assert {"torch", "torchvision", "triton"} <= left_out
    assert all(name in ("torch", "torchvision", "triton") or name.startswith(("nvidia-", "cuda-")) for name in left_out)
    assert kept.items() <= LOCK.items()


def test_for_jax_there_is_all_of_the_lock_and_jax_s_part_for_cuda(installed):
    calls = installed("jax")
    assert "python -m pip install --no-cache-dir --require-hashes -r image.lock" in calls
    kept = entries((installed.folder / "image.lock").read_text())
    extra = entries((CONTAINERS / "jax-cuda.lock").read_text())
    assert all(extra.values()), "each has its hashes"
    assert not {line.split("==")[0] for line in extra} & {line.split("==")[0] for line in LOCK}
    assert kept == LOCK | extra
    assert "python -m pip install --no-cache-dir --no-deps --no-build-isolation ." in calls, "the package workshop"
    pins = [
        pin
        for pin in map(Requirement, kept)
        if not pin.marker or pin.marker.evaluate({"python_full_version": "3.11.9"})
    ]
    versions = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    assert versions["jax"] == versions["jaxlib"] == versions["jax-cuda13-plugin"] == versions["jax-cuda13-pjrt"]


def test_install_asks_for_an_image(tmp_path):
    done = subprocess.run(["bash", CONTAINERS / "install.sh", "tpu"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "install.sh: say which image: cuda, rocm or jax\n")


@pytest.mark.parametrize(
    ("lock", "status", "says"),
    [
        (f"pytest=={pytest.__version__} \\\n    --hash=sha256:0\nnone==1 ; sys_platform == 'win32'\n", 0, "and 1 packages"),
        ("pytest==1.0 \\\n    --hash=sha256:0\n", 1, "pytest==1.0: " + pytest.__version__),
        ("nowhere==1.0\n", 1, "nowhere==1.0: none"),
        ("", 1, "it says nothing"),
    ],
)  # fmt: skip
def test_an_image_that_does_not_hold_what_its_lock_says(lock, status, says, tmp_path):
    (tmp_path / "image.lock").write_text(lock)
    done = runs.run([sys.executable, CONTAINERS / "versions.py", "image.lock", "pytest"], tmp_path)
    assert done.returncode == status
    assert says in done.stdout + done.stderr


# ---------------------------------------------------------------- workshop submit --container


def settings_with(site, folder, name="torch.sif", **environment):
    """What a job in an image of its own sources."""
    options = {"account": "a", "container": str(image(folder / name, architecture="04" if site == "roihu" else "02"))}
    path = script(folder)
    if find_site(site).scheduler == "pbs":
        path.write_text("#PBS -l select=2:ngpus=2\n#PBS -l walltime=00:10:00\n")
    job = submission(path, site, find_site(site), environment=environment, gpus_per_node=1, **options)
    assert job.environment["WORKSHOP_SITE"] == str(job.settings_path)
    assert job.settings_path.name == settings_name(site, folder / name)
    return job.settings


def sourced(settings, folder, path, expression='echo "$PYTHON"', **environment):
    """What a job script that sources these settings says, where there are the programs of ``path`` and the system's, but neither
    Apptainer nor Singularity of the machine that tests this."""
    (folder / "settings.sh").write_text(settings)
    (folder / "system").mkdir(exist_ok=True)
    for name in ("bash", "hostname", "mkdir"):
        if not (folder / "system" / name).exists():
            (folder / "system" / name).symlink_to(shutil.which(name))
    program = f"set -euo pipefail; source {folder}/settings.sh; {expression}"
    environment |= {"PATH": f"{path}:{folder}/system", "HOME": "/root", "USER": "me", "PYTHONPATH": "/modules"}
    # `module` and `srun` of a site
    program = 'module() { echo "module $*" >&2; }; srun() { "${@: -2}"; }; ' + program
    return subprocess.run(["bash", "-c", program], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("site", "flag"),
    [("local", ""), ("roihu", "--nv "), ("della", "--nv "), ("marenostrum5", "--nv ")],
)
def test_a_job_s_python_is_the_one_in_the_image(site, flag, tmp_path):
    text = settings_with(site, tmp_path)
    done = sourced(text, tmp_path, STAND_IN.parent)
    assert done.returncode == 0, done.stderr
    binds = f"{runs.ROOT},{tmp_path}"
    assert done.stdout == f"{STAND_IN} exec {flag}--bind {binds} {tmp_path}/torch.sif python\n"
    loaded = [line for line in done.stderr.splitlines() if line.startswith("module")]
    assert loaded == ["module load singularity"] * (site == "marenostrum5"), "nothing that brings a Python"
    (tmp_path / "settings.sh").write_text(text)
    subprocess.run(["shellcheck", tmp_path / "settings.sh"], check=True)


def test_amd_gpus_and_folders_of_the_site(tmp_path, monkeypatch):
    """No site that is known has AMD GPUs and no image of its own: LUMI's profile without its image stands for one."""
    own = find_site("lumi")
    site = own.model_copy(
        update={
            "environment": own.environment.model_copy(update={"kind": "module"}),
            "scratch": "/tmp/PROJECT",
        }
    )
    monkeypatch.setattr(sys.modules[__name__], "find_site", lambda _: site)
    text = settings_with("lumi", tmp_path, WORKSHOP_DATA=str(tmp_path))
    caches = "/tmp/me-miopen-cache,/scratch/a/torch-cache,/scratch/a/hf-cache"
    done = sourced(text.replace("srun --", ": --"), tmp_path, STAND_IN.parent, SLURM_JOB_ACCOUNT="a", SLURM_NNODES="1")
    assert done.stdout == (
        f"{STAND_IN} exec --rocm --bind {runs.ROOT},{caches},{tmp_path},{tmp_path},/tmp {tmp_path}/torch.sif python\n"
    ), done.stderr


def test_what_the_environment_is_in_the_job(tmp_path):
    show = 'echo "$PYTHONPATH $PYTHONNOUSERSITE"; bash -c "echo \\"\\$PYTHON\\""'
    done = sourced(settings_with("local", tmp_path), tmp_path, STAND_IN.parent, show)
    path, python = done.stdout.splitlines()
    assert path == f"{runs.ROOT} 1", "nothing of the host's modules"
    assert python.endswith("torch.sif python"), "the shells that srun starts have it, too"


def test_on_pbs_a_container_needs_its_own_modules(tmp_path):
    done = sourced(settings_with("derecho", tmp_path), tmp_path, STAND_IN.parent)
    assert " exec --nv --bind " in done.stdout
    assert "module load cuda apptainer" in done.stderr


def test_singularity_where_there_is_no_apptainer_and_a_sentence_where_there_is_neither(tmp_path):
    text = settings_with("della", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "singularity").symlink_to("/bin/true")
    assert sourced(text, tmp_path, tmp_path / "bin").stdout.startswith(f"{tmp_path}/bin/singularity exec --nv")
    done = sourced(text, tmp_path, tmp_path / "nowhere")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert (
        "neither apptainer nor singularity is here; see container_prologue in slurm-multinode/sites/della"
        in done.stderr
    )
    (tmp_path / "torch.sif").unlink()
    done = sourced(text, tmp_path, STAND_IN.parent)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "torch.sif cannot be seen from here" in done.stderr


def test_jobs_in_two_images_have_settings_of_their_own():
    names = {settings_name("della", Path(place)) for place in ("/a/torch.sif", "/b/torch.sif", "/a/jax.sif")}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("site", "name", "words"),
    [
        ("della", "nowhere.sif", "nowhere.sif: No such file or directory"),
        ("della", "notes.txt", "notes.txt is no image of Apptainer; containers/README.md says how to make one"),
        ("della", "empty.sif", "empty.sif is no image of Apptainer"),
        ("della", "folder", "folder is a folder, and no sandbox of Apptainer"),
        ("della", "two words.sif", "two words.sif: no spaces, commas or signs of the shell"),
        ("della", "arm.sif", "arm.sif is for aarch64, and the nodes of Della (Princeton) are x86_64: build it there"),
        ("roihu", "good.sif", "good.sif is for x86_64, and the nodes of Roihu-GPU (CSC) are aarch64: build it there"),
        ("lumi", "good.sif", "LUMI-G has a container of its own, which fits its network: leave out --container"),
    ],
)
def test_refusals(site, name, words, tmp_path):
    for each in ("good.sif", "two words.sif"):
        image(tmp_path / each)
    image(tmp_path / "arm.sif", architecture="04")
    (tmp_path / "notes.txt").write_text("an image, I hope, and long enough to be one for sure\n")
    (tmp_path / "empty.sif").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError) as refusal:
        run_submit(
            str(script(tmp_path)), site, account="a", gpus_per_node=1, container=str(tmp_path / name), dry_run=True
        )
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_sandbox_and_any_machine_on_the_practice_cluster(tmp_path):
    (tmp_path / "sandbox" / ".singularity.d").mkdir(parents=True)
    for name in ("sandbox", "arm.sif"):
        image(tmp_path / "arm.sif", architecture="04")
        job = submission(script(tmp_path), "local", find_site("local"), container=str(tmp_path / name), environment={})
        assert f"{tmp_path / name} python" in job.settings


# ---------------------------------------------------------------- closed to the GPUs


@pytest.fixture
def inside(monkeypatch):
    """A container of Apptainer on a node with NVIDIA's GPUs, without their driver; the arguments of ``change`` say otherwise."""
    null = Path("/dev/null")
    for name in (*container.HIDDEN_BY, "SLURM_GPUS_ON_NODE", "SLURM_CLUSTER_NAME", "SINGULARITY_CONTAINER"):
        monkeypatch.delenv(name, raising=False)

    def change(device=True, driver=False, cuda="13.0", hip=None, available=False, **environment):
        # Any device does, but for /dev/null, which hides one on the practice cluster.
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


def test_a_container_without_the_door_to_its_gpus(inside, capsys):
    words = "this container was started without --nv, so the node's GPUs are closed to it; start it with apptainer exec --nv ..."
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
def test_which_flag(changes, flag, inside):
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
def test_where_nothing_is_wrong(changes, inside, monkeypatch):
    monkeypatch.setattr(container.Path, "exists", lambda path: False)  # these tests may run in a container of Docker's
    inside(**changes)
    assert container.closed_to_gpus() == ""
    arguments.ArgumentParser().parse_args([])


def test_it_costs_nothing():
    program = "import sys; from workshop.training.arguments import ArgumentParser; ArgumentParser().parse_args([])\n"
    program += "print({'torch', 'ctypes'} & set(sys.modules))"
    done = runs.run([sys.executable, "-c", program], runs.ROOT, APPTAINER_CONTAINER="x.sif")
    assert done.stdout == "set()\n", done.stderr


# ---------------------------------------------------------------- the stand-in


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the stand-in needs root")


def stand_in(*words, **environment):
    command, environment = [str(word) for word in (STAND_IN, *words)], dict(os.environ) | environment
    return subprocess.run(command, env=environment, cwd=runs.ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["build", "x.sif", "x.def"], 255, 'unknown command "build"'),
        (["exec", "--gpus", "IMAGE", "true"], 1, 'Error for command "exec": unknown flag: --gpus'),
        (["exec", "--nv"], 255, "could not open image"),
        (["exec", "--bind"], 255, "flag needs an argument: --bind"),
        (["exec", "nowhere.sif", "true"], 255, "could not open image nowhere.sif"),
        (["exec", "/etc/hostname", "true"], 255, "image format not recognized"),
        (["exec", "IMAGE"], 255, "exec needs a command"),
        (["exec", "--bind", "/no/such/folder", "IMAGE", "true"], 255, "mount source /no/such/folder doesn't exist"),
        (["exec", "IMAGE", "nosuchprogram"], 255, '"nosuchprogram": executable file not found in $PATH'),
    ],
)
@needs_root
def test_the_stand_in_is_strict(words, status, says, small_image):
    done = stand_in(*[small_image if word == "IMAGE" else word for word in words])
    assert (done.returncode, says in done.stderr) == (status, True), done.stderr


@pytest.fixture
def small_image(tmp_path):
    """An image with nothing but this machine's /bin and libraries, by links into folders that have to be bound."""
    root = tmp_path / "root"
    (root / ".singularity.d" / "env").mkdir(parents=True)
    (root / ".singularity.d" / "env" / "90-environment.sh").write_text('export PATH="/opt/x:$PATH" MADE_BY=image\n')
    (root / ".singularity.d" / "runscript").write_text('#!/bin/sh\necho ran "$@"\n')
    (root / ".singularity.d" / "runscript").chmod(0o755)
    (root / "bin").mkdir()
    for folder in ("/usr", "/lib", "/lib64"):
        if Path(folder).exists():
            (root / folder[1:]).mkdir()
    for program in ("sh", "cat", "touch", "true"):
        shutil.copy(f"/bin/{program}", root / "bin")
    libraries = subprocess.run(["ldd", "/bin/sh", "/bin/cat"], capture_output=True, text=True).stdout
    for library in set(re.findall(r"(/\S+\.so\S*)", libraries)):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library[1:])
    return image(tmp_path / "small.sif", root)


@needs_root
def test_what_the_stand_in_lets_in(small_image, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "here").write_text("read")
    see = 'echo "$PATH $MADE_BY $APPTAINER_NAME ${LD_LIBRARY_PATH-none} $GREETING"; cat /data/here; touch /data/there /bin/x'
    done = stand_in(
        *("exec", "--nv", "--bind", f"{tmp_path}/data:/data", small_image, "sh", "-c", see),
        LD_LIBRARY_PATH="/host/lib", GREETING="hello",
    )  # fmt: skip
    path, read = done.stdout.splitlines()
    assert path == "/opt/x:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin image small.sif none hello"
    assert read == "read"
    assert (tmp_path / "data" / "there").exists()
    assert "Read-only file system" in done.stderr
    assert stand_in("run", small_image, "a", "b").stdout == "ran a b\n"
    mounts = Path("/proc/self/mounts").read_text()
    assert str(tmp_path) not in mounts, "nothing of it is left"


# ---------------------------------------------------------------- an image, for real


def in_folder(root: Path, command: str, **environment) -> subprocess.CompletedProcess:
    """Run a section of a recipe in a folder as if that were the machine, as apptainer build does."""
    mounts = " && ".join(f"mount --rbind {folder} {root}{folder}" for folder in ("/proc", "/dev"))
    enter = f"{mounts} && exec chroot {root} /bin/sh -ec {shlex.quote(command)}"
    environment |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    words = ["nice", "unshare", "--mount", "sh", "-c", enter]
    return subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def to_reach_the_indexes(root: Path) -> dict[str, str]:
    """Let apt and pip in a folder reach what they reach here; the variables that are needed for it."""
    (root / "etc/apt/sources.list").unlink(missing_ok=True)
    shutil.copytree("/etc/apt", root / "etc/apt", dirs_exist_ok=True)
    for name in ("resolv.conf", "hosts", "ssl/certs/ca-certificates.crt"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = re.findall(r"^\S*\.(\S+)='(.*)'$", listed, re.MULTILINE)
    pip = {f"PIP_{key.upper().replace('-', '_')}": value for key, value in found}
    return pip | {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """pytorch-cuda.def on a Debian 12 of its own, whose Python is 3.11 as well; it has 6 GB and is gone afterwards."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("needs root and debootstrap")
    place = tmp_path_factory.mktemp("image")
    root = place / "root"
    targets = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(targets, capture_output=True, text=True).stdout
    mirror = re.search(r"^bookworm (\S+)", listed, re.MULTILINE)
    if not mirror:
        pytest.skip("apt knows no mirror of Debian 12")
    try:
        packages = "--include=python3-dev,python3-venv,ca-certificates"  # the recipe's Python brings its headers, too
        # It mounts /proc and /sys in there: in a namespace they are gone with it, however it ends.
        command = [
            "nice",
            "unshare",
            "--mount",
            "debootstrap",
            "--variant=minbase",
            packages,
            "bookworm",
            root,
            mirror[1],
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        for source, target in copied("pytorch-cuda.def").items():
            copy = shutil.copytree if (runs.ROOT / source).is_dir() else shutil.copy
            (root / target[1:]).parent.mkdir(parents=True, exist_ok=True)
            copy(runs.ROOT / source, root / target[1:])
        sections = recipe("pytorch-cuda.def")[1]
        done = in_folder(root, sections["post"], DEBIAN_FRONTEND="noninteractive", **to_reach_the_indexes(root))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        # As apptainer keeps them in an image.
        (root / ".singularity.d" / "env").mkdir(parents=True)
        (root / ".singularity.d" / "env" / "90-environment.sh").write_text(sections["environment"])
        (root / ".singularity.d" / "runscript").write_text("#!/bin/sh\n" + sections["runscript"])
        (root / ".singularity.d" / "runscript").chmod(0o755)
        yield SimpleNamespace(root=root, sections=sections, file=image(place / "torch.sif", root))
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.full
def test_the_image_holds_what_its_lock_says(built):
    done = in_folder(built.root, built.sections["test"])
    assert done.returncode == 0, done.stderr
    locked = {line.split(" ")[0] for line in LOCK}
    torch = next(line.removeprefix("torch==") for line in locked if line.startswith("torch=="))
    assert done.stdout.startswith(f"torch {torch}")
    see = "import sys, os, torch; print(sys.prefix, torch.__version__.split('+')[0], os.environ['HF_HUB_OFFLINE'])"
    assert stand_in("run", built.file, "-c", see).stdout == f"/opt/workshop/venv {torch} 1\n"
    done = stand_in("exec", built.file, "workshop", "doctor", CUDA_VISIBLE_DEVICES="")
    assert "Training can run here" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def short():
    """A folder with a short name: a practice cluster's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as folder:
        yield folder


@pytest.fixture(params=["stand-in", "apptainer"])
def file(request, monkeypatch):
    """An image, and what runs it: the stand-in, or Apptainer with the file that it has built."""
    if request.param == "stand-in":
        monkeypatch.setattr(practice, "SEARCH_PATH", f"{STAND_IN.parent}{os.pathsep}{practice.SEARCH_PATH}")
        return request.getfixturevalue("built").file
    file = CONTAINERS / "pytorch-cuda.sif"
    if not shutil.which("apptainer") or not file.exists():
        pytest.skip("needs Apptainer, and the image that `make build_pytorch` makes with it")
    return file


@pytest.mark.full
@runs.needs_cluster
def test_jobs_train_in_the_image(file, short, monkeypatch, capsys):
    """Slurm and the job script are outside, Python inside: on one node, on two by torchrun, on two by srun alone; then on two
    DeepSpeed, which compiles a part of itself in there, and FSDP."""
    monkeypatch.setattr(tempfile, "tempdir", short)
    # Each Python of the image says so when it starts: in place of a file that setuptools puts into each environment.
    (Path(short) / "say_so.pth").write_text("import sys; print('a Python in', sys.prefix, file=sys.stderr)\n")
    packages = "/opt/workshop/venv/lib/python3.11/site-packages"
    monkeypatch.setenv("APPTAINER_BIND", f"{short}/say_so.pth:{packages}/distutils-precedence.pth")
    up, last_epochs = practice.up(2, mine=True), set()

    def done(script, *arguments, beside=()):
        trial = Trial(script, Path(short), up, None)
        for path in beside:
            shutil.copy(path, trial.folder)
        trial.limit = 900  # nothing of the image has been read before
        monkeypatch.chdir(trial.folder)
        run_submit(script.name, "local", container=str(file), arguments=list(arguments))
        job = Job(re.match(r"job (\d+):", capsys.readouterr().out)[1])
        trial.follow(job, stall=200)  # what compiles for DeepSpeed is no Python
        return job, trial.folder / "runs" / f"{script.stem}-{job.number}"

    def trained(script, *arguments, **settings):
        job, folder = done(script, *arguments, **settings)
        assert job.state == "COMPLETED", job.output
        assert re.search("^training .*on cpu from (epoch|step) 1: 4 processes", job.output, re.MULTILINE), job.output
        assert set(re.findall("a Python in (.*)", job.output)) == {"/opt/workshop/venv"}
        return job, folder

    digits = ["--epochs", "2", "--batch-size", "32"]
    try:
        for script in (
            runs.ROOT / "slurm-multinode" / "launch_ddp_1N4G.sh",
            SOLUTIONS / "slurm-multinode" / "launch_ddp_2N4G.sh",
            SOLUTIONS / "slurm-multinode" / "exercise2_srun.sh",
        ):
            job, _ = trained(script, *digits)
            last_epochs.add(re.search(r"^epoch 2/2 .* accuracy \S+", job.output, re.MULTILINE)[0])
        assert len(last_epochs) == 1, "the same global batches: the same loss"

        zero = SOLUTIONS / "05_deepspeed"
        beside = [zero / "exercise1_deepspeed.py", zero / "ds_config.json"]
        job, folder = trained(zero / "launch_deepspeed_2N4G.sh", *digits, beside=beside)
        losses = [
            re.search(r"^epoch 2/2 .*loss (\d\.\d+)", text, re.MULTILINE)[1] for text in (job.output, *last_epochs)
        ]
        assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-3)
        assert len(list((folder / "epoch-1").glob("zero_pp_rank_*_optim_states.pt"))) == 4

        fsdp = SOLUTIONS / "04_model_parallel_with_fsdp"
        beside = [fsdp / "exercise2_sharded_checkpoint.py"]
        options = ["--steps", "4", "--batch-size", "2", "--sequence-length", "64"]
        job, folder = trained(fsdp / "launch_fsdp_2N4G.sh", *options, beside=beside)
        assert len(list((folder / "step-4").glob("*.distcp"))) == 4

        script = SOLUTIONS / "slurm-multinode" / "exercise2_srun.sh"
        failing = Path(short) / script.name
        failing.write_text(script.read_text().replace('--snapshot "$run.pt"', "--no-such-option"))
        job, _ = done(failing, *digits)
        assert job.state == "FAILED", "an exit status comes out of the container"
    finally:
        up.end()
