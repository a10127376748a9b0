"""Jobs that run in an image: what ``submit --container`` writes, and training in an image for real.

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
    """A file that begins like an image, and ends with what the stand-in looks for."""
    header = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\0" + architecture.encode() + b"\0"
    path.write_bytes(header + f"\n{root}\n".encode())
    return path


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


@needs("shellcheck")
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
    if os.geteuid() != 0:
        pytest.skip("needs root")
    require("debootstrap", "unshare")
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


@pytest.fixture
def run_job(file, short, monkeypatch, capsys):
    """A function that runs a job script to its end on a practice cluster; it returns the job and the folder of its results."""
    monkeypatch.setattr(tempfile, "tempdir", short)
    # Each Python of the image says so when it starts: in place of a file that setuptools puts into each environment.
    (Path(short) / "say_so.pth").write_text("import sys; print('a Python in', sys.prefix, file=sys.stderr)\n")
    packages = "/opt/workshop/venv/lib/python3.11/site-packages"
    monkeypatch.setenv("APPTAINER_BIND", f"{short}/say_so.pth:{packages}/distutils-precedence.pth")
    up = practice.up(2, mine=True)

    def run_job(script: Path, *arguments: str, beside=()) -> tuple[Job, Path]:
        trial = Trial(script, Path(short), up, None)
        for path in beside:
            shutil.copy(path, trial.folder)
        trial.limit = 900  # nothing of the image has been read before
        monkeypatch.chdir(trial.folder)
        run_submit(script.name, "local", container=str(file), arguments=list(arguments))
        job = Job(re.match(r"job (\d+):", capsys.readouterr().out)[1])
        trial.follow(job, stall=200)  # what compiles for DeepSpeed is no Python
        return job, trial.folder / "runs" / f"{script.stem}-{job.number}"

    yield run_job
    up.end()


@pytest.fixture
def train(run_job):
    """``run_job`` for a job that has to train with four processes, all of them in the image."""

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
    """Slurm and the job script are outside, Python inside: on one node, on two by torchrun, on two by srun alone; then on two
    DeepSpeed, which compiles a part of itself in there, and FSDP."""
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
    assert len(last_epochs) == 1, "the same global batches: the same loss"

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
    assert job.state == "FAILED", "an exit status comes out of the container"
