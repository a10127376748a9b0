"""Jobs that run in an image: what ``submit --container`` writes, and real training in an image.

containers/apptainer stands in for Apptainer, which is not installed everywhere. The full test installs an image as %post does, in
a separate Debian. If Apptainer has built containers/pytorch-cuda.sif (make build_pytorch), the same jobs also run in that image.
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

import runs
from needs import needs, require
from site_models.table import script
from test_containers import CONTAINERS, LOCK, copied, recipe
from workshop.check.evidence.job import Job
from workshop.course.trial import Trial
from workshop.errors import UserError
from workshop.slurm import cluster as practice
from workshop.slurm.image import settings_name
from workshop.slurm.sites import find_site
from workshop.slurm.submission import submission
from workshop.slurm.submit import run_submit

STAND_IN = runs.ROOT / "tests" / "containers" / "apptainer"
SOLUTIONS = runs.ROOT / "solutions"


def image(path: Path, root="", architecture="02") -> Path:
    """Write a file that begins like an image and ends with what the stand-in looks for."""
    header = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\0" + architecture.encode() + b"\0"
    path.write_bytes(header + f"\n{root}\n".encode())
    return path


# ---------------------------------------------------------------- workshop submit --container


def settings_with(site, folder, name="torch.sif", **environment):
    """Return the settings that a job in an image sources."""
    options = {"account": "a", "container": str(image(folder / name, architecture="04" if site == "roihu" else "02"))}
    path = script(folder)
    if find_site(site).scheduler == "pbs":
        path.write_text("#PBS -l select=2:ngpus=2\n#PBS -l walltime=00:10:00\n")
    job = submission(path, site, find_site(site), environment=environment, gpus_per_node=1, **options)
    assert job.environment["WORKSHOP_SITE"] == str(job.settings_path)
    assert job.settings_path.name == settings_name(site, folder / name)
    return job.settings


def sourced(settings, folder, path, expression='echo "$PYTHON"', **environment):
    """Run a job script that sources these settings, with the programs of ``path`` and of the system, but without
    the Apptainer or Singularity of this machine."""
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


@needs("shellcheck")
@pytest.mark.parametrize(
    ("site", "flag"),
    [("local", ""), ("roihu", "--nv "), ("della", "--nv "), ("marenostrum5", "--nv ")],
)
def test_the_python_of_a_job_runs_in_the_image(site, flag, tmp_path):
    text = settings_with(site, tmp_path)
    done = sourced(text, tmp_path, STAND_IN.parent)
    assert done.returncode == 0, done.stderr
    binds = f"{runs.ROOT},{tmp_path}"
    assert done.stdout == f"{STAND_IN} exec {flag}--bind {binds} {tmp_path}/torch.sif python\n"
    loaded = [line for line in done.stderr.splitlines() if line.startswith("module")]
    assert loaded == ["module load singularity"] * (site == "marenostrum5"), "the job must load no module with a Python"
    (tmp_path / "settings.sh").write_text(text)
    subprocess.run(["shellcheck", tmp_path / "settings.sh"], check=True)


def test_a_container_gets_amd_gpus_and_the_folders_of_the_site(tmp_path, monkeypatch):
    """Use the profile of LUMI without its own image, because no known site has AMD GPUs and lacks an image."""
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


def test_a_job_in_a_container_imports_no_modules_of_the_host(tmp_path):
    show = 'echo "$PYTHONPATH $PYTHONNOUSERSITE"; bash -c "echo \\"\\$PYTHON\\""'
    done = sourced(settings_with("local", tmp_path), tmp_path, STAND_IN.parent, show)
    path, python = done.stdout.splitlines()
    assert path == f"{runs.ROOT} 1", "the job sees Python modules of the host"
    assert python.endswith("torch.sif python"), "PYTHON is not set in the shells that srun starts"


def test_a_job_on_pbs_loads_the_modules_that_the_container_needs(tmp_path):
    done = sourced(settings_with("derecho", tmp_path), tmp_path, STAND_IN.parent)
    assert " exec --nv --bind " in done.stdout
    assert "module load cuda apptainer" in done.stderr


def test_a_job_uses_singularity_without_apptainer_and_says_if_both_are_missing(tmp_path):
    text = settings_with("della", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "singularity").symlink_to("/bin/true")
    assert sourced(text, tmp_path, tmp_path / "bin").stdout.startswith(f"{tmp_path}/bin/singularity exec --nv")
    done = sourced(text, tmp_path, tmp_path / "nowhere")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert (
        "there is neither apptainer nor singularity; see container_prologue in slurm-multinode/sites/della"
        in done.stderr
    )
    (tmp_path / "torch.sif").unlink()
    done = sourced(text, tmp_path, STAND_IN.parent)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "torch.sif is not visible on this node" in done.stderr


def test_each_image_has_its_own_settings_file():
    names = {settings_name("della", Path(place)) for place in ("/a/torch.sif", "/b/torch.sif", "/a/jax.sif")}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("site", "name", "words"),
    [
        ("della", "nowhere.sif", "nowhere.sif: No such file or directory"),
        ("della", "notes.txt", "notes.txt is not an Apptainer image; containers/README.md says how to build one"),
        ("della", "empty.sif", "empty.sif is not an Apptainer image"),
        ("della", "folder", "folder is a folder, but not an Apptainer sandbox"),
        ("della", "two words.sif", "two words.sif: a path in a container must not have spaces"),
        ("della", "arm.sif", "arm.sif is for aarch64, but the nodes of Della (Princeton) are x86_64: build it there"),
        ("roihu", "good.sif", "good.sif is for x86_64, but the nodes of Roihu-GPU (CSC) are aarch64: build it there"),
        ("lumi", "good.sif", "LUMI-G has its own container, which is built for its network: leave out --container"),
    ],
)
def test_a_wrong_image_is_refused_in_one_sentence(site, name, words, tmp_path):
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


def test_the_practice_cluster_accepts_sandboxes_and_images_of_any_architecture(tmp_path):
    (tmp_path / "sandbox" / ".singularity.d").mkdir(parents=True)
    for name in ("sandbox", "arm.sif"):
        image(tmp_path / "arm.sif", architecture="04")
        job = submission(script(tmp_path), "local", find_site("local"), container=str(tmp_path / name), environment={})
        assert f"{tmp_path / name} python" in job.settings


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
def test_the_stand_in_for_apptainer_refuses_wrong_arguments(words, status, says, small_image):
    done = stand_in(*[small_image if word == "IMAGE" else word for word in words])
    assert (done.returncode, says in done.stderr) == (status, True), done.stderr


@pytest.fixture
def small_image(tmp_path):
    """An image with only links to /bin and the libraries of this machine, whose folders must be bound."""
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
def test_the_stand_in_for_apptainer_isolates_the_container(small_image, tmp_path):
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
    assert str(tmp_path) not in mounts, "the stand-in left something behind"


# ---------------------------------------------------------------- training in an image


def in_folder(root: Path, command: str, **environment) -> subprocess.CompletedProcess:
    """Run a section of a recipe with this folder as its root, as apptainer build does."""
    mounts = " && ".join(f"mount --rbind {folder} {root}{folder}" for folder in ("/proc", "/dev"))
    enter = f"{mounts} && exec chroot {root} /bin/sh -ec {shlex.quote(command)}"
    environment |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    words = ["nice", "unshare", "--mount", "sh", "-c", enter]
    return subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def to_reach_the_indexes(root: Path) -> dict[str, str]:
    """Let apt and pip in a folder reach the same indexes as on this machine; return the variables that they need."""
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
    """Build pytorch-cuda.def in a separate Debian 12 with Python 3.11; it takes 6 GB and is deleted afterwards."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    require("debootstrap", "unshare")
    place = tmp_path_factory.mktemp("image")
    root = place / "root"
    targets = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(targets, capture_output=True, text=True).stdout
    mirror = re.search(r"^bookworm (\S+)", listed, re.MULTILINE)
    if not mirror:
        pytest.skip("apt has no mirror of Debian 12")
    try:
        packages = "--include=python3-dev,python3-venv,ca-certificates"  # the Python of the recipe includes its headers
        # debootstrap mounts /proc and /sys in the folder; in a namespace the mounts end with the process.
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
        # Store them as apptainer stores them in an image.
        (root / ".singularity.d" / "env").mkdir(parents=True)
        (root / ".singularity.d" / "env" / "90-environment.sh").write_text(sections["environment"])
        (root / ".singularity.d" / "runscript").write_text("#!/bin/sh\n" + sections["runscript"])
        (root / ".singularity.d" / "runscript").chmod(0o755)
        yield SimpleNamespace(root=root, sections=sections, file=image(place / "torch.sif", root))
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.full
def test_the_image_has_the_versions_of_its_lock(built):
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
    """A folder with a short path, because the sockets of a practice cluster are in it."""
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as folder:
        yield folder


@pytest.fixture(params=["stand-in", "apptainer"])
def file(request, monkeypatch):
    """An image and the program that runs it: the stand-in, or Apptainer with an image that it built."""
    if request.param == "stand-in":
        monkeypatch.setattr(practice, "SEARCH_PATH", f"{STAND_IN.parent}{os.pathsep}{practice.SEARCH_PATH}")
        return request.getfixturevalue("built").file
    file = CONTAINERS / "pytorch-cuda.sif"
    if not shutil.which("apptainer") or not file.exists():
        pytest.skip("needs Apptainer and the image that `make build_pytorch` builds")
    return file


@pytest.fixture
def run_job(file, short, monkeypatch, capsys):
    """A function that runs a job script to its end on a practice cluster and returns the job and the path of its results."""
    monkeypatch.setattr(tempfile, "tempdir", short)
    # Let each Python of the image record its start, through a file that setuptools puts into every environment.
    (Path(short) / "say_so.pth").write_text("import sys; print('a Python in', sys.prefix, file=sys.stderr)\n")
    packages = "/opt/workshop/venv/lib/python3.11/site-packages"
    monkeypatch.setenv("APPTAINER_BIND", f"{short}/say_so.pth:{packages}/distutils-precedence.pth")
    up = practice.up(2, mine=True)

    def run_job(script: Path, *arguments: str, beside=()) -> tuple[Job, Path]:
        trial = Trial(script, Path(short), up, None)
        for path in beside:
            shutil.copy(path, trial.folder)
        trial.limit = 900  # the first read of the image is slow
        monkeypatch.chdir(trial.folder)
        run_submit(script.name, "local", container=str(file), arguments=list(arguments))
        job = Job(re.match(r"job (\d+):", capsys.readouterr().out)[1])
        trial.follow(job, stall=200)  # the compiler of DeepSpeed is not a Python process
        return job, trial.folder / "runs" / f"{script.stem}-{job.number}"

    yield run_job
    up.end()


@pytest.fixture
def train(run_job):
    """Like ``run_job``, but fail unless the job trains with four processes that all run in the image."""

    def train(script: Path, *arguments: str, beside=()) -> tuple[Job, Path]:
        job, folder = run_job(script, *arguments, beside=beside)
        assert job.state == "COMPLETED", job.output
        assert re.search("^training .*on cpu from (epoch|step) 1: 4 processes", job.output, re.MULTILINE), job.output
        assert set(re.findall("a Python in (.*)", job.output)) == {"/opt/workshop/venv"}
        return job, folder

    return train


@pytest.mark.full
@runs.needs_cluster
def test_jobs_train_in_the_image(train, run_job, short):
    """Slurm and the job script run outside, Python inside: on one node, on two with torchrun, on two with only srun; then on two
    DeepSpeed, which compiles an extension in the image, and FSDP."""
    digits = ["--epochs", "2", "--batch-size", "32"]
    by_srun = SOLUTIONS / "slurm-multinode" / "exercise2_srun.sh"
    last_epochs = set()
    for each in (
        runs.ROOT / "slurm-multinode" / "launch_ddp_1N4G.sh",
        SOLUTIONS / "slurm-multinode" / "launch_ddp_2N4G.sh",
        by_srun,
    ):
        job, _ = train(each, *digits)
        last_epochs.add(re.search(r"^epoch 2/2 .* accuracy \S+", job.output, re.MULTILINE)[0])
    assert len(last_epochs) == 1, "the same global batches must give the same loss"

    zero = SOLUTIONS / "05_deepspeed"
    beside = [zero / "exercise1_deepspeed.py", zero / "ds_config.json"]
    job, folder = train(zero / "launch_deepspeed_2N4G.sh", *digits, beside=beside)
    losses = [re.search(r"^epoch 2/2 .*loss (\d\.\d+)", text, re.MULTILINE)[1] for text in (job.output, *last_epochs)]
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-3)
    assert len(list((folder / "epoch-1").glob("zero_pp_rank_*_optim_states.pt"))) == 4

    fsdp = SOLUTIONS / "04_model_parallel_with_fsdp"
    beside = [fsdp / "exercise2_sharded_checkpoint.py"]
    options = ["--steps", "4", "--batch-size", "2", "--sequence-length", "64"]
    job, folder = train(fsdp / "launch_fsdp_2N4G.sh", *options, beside=beside)
    assert len(list((folder / "step-4").glob("*.distcp"))) == 4

    failing = Path(short) / by_srun.name
    failing.write_text(by_srun.read_text().replace('--checkpoint "$run.pt"', "--no-such-option"))
    job, _ = run_job(failing, *digits)
    assert job.state == "FAILED", "the exit status is lost in the container"
