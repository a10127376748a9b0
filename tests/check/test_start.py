"""Any program as its owner starts it: the command, the copy of the folder, programs for GPUs, and what cannot be judged."""

import os
import shlex
import shutil
import sys
import sysconfig
import textwrap
import venv
from importlib.util import find_spec

import pytest

import runs
from workshop.check.command import check_command
from workshop.check.folder import LARGE, copy_folder, make_own, own_caches
from workshop.check.program_text import RESUME, resized, resume_arguments, sources
from workshop.check.start import read_start
from workshop.errors import UserError

COMMANDS = {
    "torchrun --nproc-per-node=2 train.py --lr 1": ("torchrun", 2, "train.py", ("--lr", "1")),
    "torchrun --nnodes=2 --nproc_per_node 4 -m a.b x": ("torchrun", 8, "a.b", ("x",)),
    "torchrun --nproc-per-node=gpu train.py": ("torchrun", 2, "train.py", ()),
    "python -m torch.distributed.run --nproc-per-node=3 t.py": ("torchrun", 3, "t.py", ()),
    "python -m torch.distributed.launch --nproc_per_node=2 t.py x": (
        "torchrun",
        2,
        "t.py",
        ("--local-rank={local_rank}", "x"),
    ),
    "python -m torch.distributed.launch --nproc_per_node=2 --use_env t.py": ("torchrun", 2, "t.py", ()),
    "python -u train.py": ("python", 1, "train.py", ()),
    "python3 -m package.train -x": ("python", 1, "package.train", ("-x",)),
    "accelerate launch --num_processes=2 --cpu t.py --a": ("torchrun", 2, "t.py", ("--a",)),
    "accelerate-launch --num_processes=2 t.py --a": ("torchrun", 2, "t.py", ("--a",)),
    "deepspeed --num_gpus 4 --master_port 1 t.py --deepspeed": ("deepspeed", 4, "t.py", ("--deepspeed",)),
    "srun -n4 --cpu-bind=cores python t.py": ("srun", 4, "t.py", ()),
    "srun -n2 --gpus-per-task=1 python t.py": ("srun", 2, "t.py", ()),
    "bash -c 'export C=1; exec python t.py -x 3 2>&1 | tee log'": ("python", 1, "t.py", ("-x", "3")),
    "bash -c 'cd . && torchrun --nproc-per-node=2 t.py \"a;b\"'": ("torchrun", 2, "t.py", ("a;b",)),
    "mpirun -np 2 --oversubscribe python t.py": ("mpirun", 2, "t.py", ()),
    "A=1 B=x python t.py": ("python", 1, "t.py", ()),
    "env A=1 B=x python t.py": ("python", 1, "t.py", ()),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_how_the_program_is_started(command):
    start = read_start(shlex.split(command))
    assert (start.launch, start.nproc, start.target, start.arguments) == COMMANDS[command]
    assert start.bound == ("--gpus-per-task" in command)
    if "A=1" in command:
        assert start.variables == {"A": "1", "B": "x"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("A=1", "no command"),
        ("jsrun train.py", "does not know how jsrun"),
        ("python -c print()", "without a file"),
        ("torchrun --nproc-per-node=99 t.py", "too many"),
        ("bash train.sh", "only this form of bash"),
        ("torchrun --no-such-option t.py", "no-such-option"),
        ("accelerate config", "only accelerate launch"),
        ("torchrun missing.py", "no such file"),
    ],
)
def test_a_command_that_is_not_understood_is_refused(command, words, tmp_path):
    with pytest.raises(UserError, match=words):
        list(check_command(command.split(), folder=tmp_path))


def test_accelerate_uses_the_cpu_only_in_runs_without_pretended_gpus():
    start = read_start(["accelerate", "launch", "--num_processes=2", "t.py"])
    assert "ACCELERATE_USE_CPU" in start.on_cpu
    assert "ACCELERATE_USE_CPU" not in start.variables
    assert "ACCELERATE_USE_CPU" in read_start(["accelerate", "launch", "--num_processes=2", "--cpu", "t.py"]).variables


FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 4}
num_machines: 1
num_processes: 2
"""
PREPARED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
samples = torch.utils.data.TensorDataset(torch.randn(16, 4))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(samples, batch_size=2))
for (batch,) in loader:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
assert accelerator.distributed_type == KIND, accelerator.distributed_type
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("options", "kind"), [(["--config_file=fsdp.yaml"], "FSDP"), (["--num_processes=2"], "MULTI_CPU")]
)
def test_accelerate_launch_trains_as_its_configuration_says(options, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Accelerate reads the file when the check reads the command
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    (tmp_path / "train.py").write_text(PREPARED.replace("KIND", repr(kind)))
    *_, verdict = check_command(["accelerate", "launch", *options, "train.py"])
    assert (verdict.status, verdict.errors) == (0, []), [finding.seen for finding in verdict.findings]


def test_accelerate_launch_passes_the_configuration_of_deepspeed():
    start = read_start(["accelerate", "launch", "--use_deepspeed", "--zero_stage", "2", "--num_processes=3", "t.py"])
    assert start.nproc == 3
    assert start.variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "2"
    assert not start.on_cpu


PARTITIONED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
from deepspeed import comm

assert comm.get_world_size() == 2  # Init() of ZeRO-3 divides the parameters by it before the engine is made
layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(3):
    layer(torch.rand(4, 2)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed")
def test_deepspeed_has_a_group_before_its_engine_is_made(tmp_path):
    from workshop.course.engine import load_extension
    from workshop.training.deepspeed import missing_tools

    if missing_tools():
        pytest.skip("needs a compiler and ninja")
    load_extension()
    (tmp_path / "train.py").write_text(PARTITIONED)
    start = ["accelerate", "launch", "--use_deepspeed", "--zero_stage=3", "--num_processes=2", "train.py"]
    *_, verdict = check_command(start, folder=tmp_path)
    assert not {finding.kind for finding in verdict.findings} & {"crash", "ended-early"}


def test_a_copy_has_links_for_large_files_and_its_own_file_once_it_is_written(tmp_path):
    original, copy = tmp_path / "mine", tmp_path / "copy"
    (original / "data").mkdir(parents=True)
    (original / "env").mkdir()
    (original / "env" / "pyvenv.cfg").touch()
    (original / "train.py").write_text("x = 1")
    (original / "data" / "large.bin").write_bytes(bytes(LARGE + 1))
    copy_folder(original, copy)
    large = copy / "data" / "large.bin"
    assert sorted(os.listdir(copy)) == ["data", "train.py"]
    assert large.is_symlink()
    make_own(str(large), str(copy), str(tmp_path / "lock"))
    assert not large.is_symlink()
    large.write_bytes(b"new")
    assert (original / "data" / "large.bin").stat().st_size == LARGE + 1


def test_the_caches_of_the_owner_are_folders_with_links_to_files(tmp_path, monkeypatch):
    cache = tmp_path / "owner"
    (cache / "hub" / "blobs").mkdir(parents=True)
    (cache / "hub" / "blobs" / "weights").write_text("1")
    (cache / "hub" / "model").symlink_to(cache / "hub" / "blobs" / "weights")
    monkeypatch.setenv("HF_HOME", str(cache))
    (tmp_path / "run").mkdir()
    copy = own_caches(tmp_path / "run")["HF_HOME"]
    assert own_caches(tmp_path / "run")["HF_HOME"] == copy  # a second start in the same folder
    lock = os.path.realpath(os.path.join(copy, "hub", "model.lock"))  # a library may resolve links before it writes
    assert lock.startswith(str(tmp_path / "run"))
    assert os.path.realpath(os.path.join(copy, "hub", "model")) == str(cache / "hub" / "blobs" / "weights")


@pytest.mark.parametrize(
    ("arguments", "other", "expected"),
    [
        (["--world_size=2", "--lr", "2"], 1, ["--world_size=1", "--lr", "2"]),
        (["--num-gpus", "2", "--layers=2"], 4, ["--num-gpus", "4", "--layers=2"]),
        (["--ngpus", "8"], 1, ["--ngpus", "8"]),
    ],
)
def test_options_with_the_number_of_processes_follow_it(arguments, other, expected):
    assert resized(arguments, 2, other) == expected


GPU_PROGRAM = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from trainer.data import samples

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
device = torch.device("cuda", rank)
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt", map_location=device, weights_only=True)
    model.module.load_state_dict(state["model"])
    start = state["step"]
for step in range(start, 8):
    inputs, targets = samples(step, rank)
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        loss = (model(inputs.to(device)) - targets.to("cuda")).pow(2).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "step": step + 1}, "new.pt")
        os.replace("new.pt", "last.pt")
torch.cuda.synchronize()
dist.barrier(device_ids=[rank])
dist.destroy_process_group()
"""
DATA = """
import torch


def samples(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(8, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)
"""


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "project"
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "__init__.py").touch()
    (folder / "trainer" / "train.py").write_text(GPU_PROGRAM)
    (folder / "trainer" / "data.py").write_text(DATA)
    return folder


MODULE = ["torchrun", "--nproc-per-node=2", "-m", "trainer.train"]


def test_a_package_for_gpus_is_checked_without_changes(package):
    before = sorted(str(path) for path in package.rglob("*"))
    *_, verdict = check_command(MODULE, folder=package)
    assert [finding.seen for finding in verdict.errors] == []
    assert verdict.status == 0
    assert sorted(str(path) for path in package.rglob("*")) == before


def test_options_that_resume_are_known_by_their_name_or_their_help():
    text = """
        parser.add_argument("-p", "--checkpoint_path", default=None, help="path of a checkpoint, to resume the training")
        parser.add_argument("--ckpt", help="where to save")
        parser.add_argument("--load", help="weights")
    """
    assert [option for option, _ in RESUME.findall(text)] == ["--checkpoint_path", "--load"]


@pytest.mark.parametrize("condition", ['os.path.exists("last.pt")', '"--resume" in sys.argv'])
def test_a_program_that_resumes_is_judged_on_pretended_gpus(package, condition):
    """A rank that stopped before the others would look as if the program failed on GPUs."""
    train = package / "trainer" / "train.py"
    text = GPU_PROGRAM.replace("import os\n", "import os\nimport sys\n").replace('os.path.exists("last.pt")', condition)
    # Only rank 0 saves, so only it knows when a run is to be stopped.
    train.write_text(text.replace("    if rank == 0:", "    if dist.get_rank() == 0 and step > 4:"))
    *_, verdict = check_command(MODULE, folder=package, resume=["--resume"] if "argv" in condition else ())
    assert [finding.seen for finding in verdict.errors] == []
    assert not any("resumes" in each or "GPUs show" in each for each in verdict.unchecked), verdict.unchecked


def test_devices_and_backends_can_be_named_in_other_forms(package):
    train = package / "trainer" / "train.py"
    forms = {
        "set_device(rank)": 'set_device(f"cuda:{rank}")\nassert torch.cuda.is_available()',
        '"nccl"': '"NCCL"',
        "torch.manual_seed(0)": "torch.manual_seed(0)\nnoise = torch.Generator(device=device)",
    }
    text = GPU_PROGRAM
    for one, other in forms.items():
        assert one in text
        text = text.replace(one, other)
    train.write_text(text)
    *_, verdict = check_command(MODULE, folder=package)
    assert [finding.seen for finding in verdict.errors] == []
    assert verdict.status == 0


LIGHTNING_PROGRAM = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.model(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    L.seed_everything(1)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), 8, shuffle=True)
    trainer = L.Trainer(accelerator="gpu", devices=[0, 1], strategy="ddp", max_epochs=2, precision="16-mixed", logger=False)
    trainer.fit(Module(), loader)
    assert trainer.world_size == 2
"""


def test_lightning_for_gpus_is_checked_with_as_many_processes(tmp_path):
    (tmp_path / "train.py").write_text(LIGHTNING_PROGRAM)
    *_, verdict = check_command(["python", "train.py"], folder=tmp_path)
    assert [finding.seen for finding in verdict.errors] == []
    assert verdict.status == 0


OF_OTHERS = """
import os, sys
from lightning_utilities.core.rank_zero import rank_zero_only

if "RANK" in os.environ:  # a program with hydra.main: Lightning starts all processes but the first with further arguments
    rank = int(os.environ["RANK"])
    assert ("hydra.output_subdir=null" in sys.argv) == (rank > 0), sys.argv
    assert rank_zero_only.rank == rank
"""


def test_lightning_starts_other_ranks_of_hydra_with_its_arguments(tmp_path):
    (tmp_path / "train.py").write_text(LIGHTNING_PROGRAM.replace("import lightning", OF_OTHERS + "import lightning", 1))
    *_, verdict = check_command(["python", "train.py"], folder=tmp_path)
    assert [finding.seen for finding in verdict.errors] == []
    assert verdict.status == 0


def test_lightning_is_compared_with_one_process(tmp_path):
    (tmp_path / "train.py").write_text(LIGHTNING_PROGRAM.replace("    assert trainer.world_size == 2\n", ""))
    *_, verdict = check_command(["python", "train.py"], folder=tmp_path)
    assert verdict.errors == []
    assert [text for text in verdict.unchecked if "one process" in text and "evaluation" not in text] == []


@pytest.mark.parametrize("exists", [False, True])
def test_a_program_may_write_beside_its_folder(package, exists):
    beside = package.parent / "out"
    if exists:
        beside.mkdir()
        (beside / "other.pt").write_bytes(b"three weeks")
    train = package / "trainer" / "train.py"
    text = GPU_PROGRAM.replace("last.pt", "../out/last.pt").replace("new.pt", "../out/new.pt")
    train.write_text(text.replace("start = 0\n", 'start = 0\nos.makedirs("../out", exist_ok=True)\n'))
    *_, verdict = check_command(MODULE, folder=package)
    assert [finding.seen for finding in verdict.errors] == []
    assert verdict.status == 0
    assert not any("resumes" in each for each in verdict.unchecked)
    assert [path.name for path in package.parent.glob("out/*")] == (["other.pt"] if exists else [])


def test_a_finding_names_the_file_of_the_package(package):
    data = package / "trainer" / "data.py"
    data.write_text(DATA.replace(" + rank", ""))
    *_, verdict = check_command(MODULE, folder=package)
    assert [finding.kind for finding in verdict.errors] == ["same-samples"]
    assert verdict.errors[0].where.startswith("trainer/train.py:")


def test_an_existing_checkpoint_is_not_changed(package):
    (package / "last.pt").write_bytes(b"three weeks")
    *_, verdict = check_command(MODULE, folder=package)
    assert (package / "last.pt").read_bytes() == b"three weeks"
    assert verdict.errors  # the program cannot load it


def test_a_long_run_is_stopped_on_all_ranks_at_the_same_step(package):
    train = package / "trainer" / "train.py"
    train.write_text(GPU_PROGRAM.replace("range(start, 8)", "range(start, 100_000)"))
    *_, verdict = check_command(MODULE, folder=package, steps=5)
    assert [finding.seen for finding in verdict.errors] == []
    (ended,) = [text for text in verdict.unchecked if "where the check ended it" in text]
    assert int(ended.split("after step ")[1].split(",")[0]) >= 5


def test_a_program_without_a_step_cannot_be_judged(package):
    (package / "idle.py").write_text("print('hello')")
    *_, verdict = check_command(["python", "idle.py"], folder=package)
    assert verdict.status == 2


DIVERGENT = textwrap.dedent(
    """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step == 3:
            dist.barrier()
    """
)


def test_a_hang_names_the_first_call_that_only_one_rank_makes(tmp_path):
    (tmp_path / "train.py").write_text(DIVERGENT)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert {finding.kind for finding in verdict.errors} <= {"hang", "crash", "collectives-differ"}
    assert verdict.errors[0].where == "train.py:11"
    assert "rank 0 calls barrier" in verdict.errors[0].seen


def test_only_the_modules_that_the_program_imports_are_read(package):
    (package / "other.py").write_text("import lightning")
    assert sources(package / "trainer" / "train.py", package) == GPU_PROGRAM + "\n" + DATA
    (package / "src").mkdir()
    shutil.move(package / "trainer", package / "src" / "trainer")
    (package / "go.py").write_text("import trainer.train\n")
    assert GPU_PROGRAM in sources(package / "go.py", package)


def test_training_only_the_head_is_no_mistake(package):
    train = package / "trainer" / "train.py"
    model = "model = DDP(torch.nn.Linear(4, 1).cuda(), device_ids=[rank])\n"
    head = "net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).cuda()\nmodel = DDP(net, device_ids=[rank])\n"
    assert GPU_PROGRAM.count(model) == GPU_PROGRAM.count("SGD(model.parameters()") == 1
    train.write_text(GPU_PROGRAM.replace(model, head).replace("SGD(model.parameters()", "SGD(net[1].parameters()"))
    *_, verdict = check_command(MODULE, folder=package)
    assert [finding.seen for finding in verdict.errors] == []


def test_the_program_runs_in_the_environment_of_its_command(tmp_path):
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    packages = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    (packages / "same.pth").write_text(sysconfig.get_path("purelib"))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("import sys\nraise RuntimeError(sys.prefix)")
    check = [sys.executable, "-P", "-m", "workshop", "check", "--", python, "train.py"]
    done = runs.run(check, folder, COLUMNS=300)
    assert f"RuntimeError: {tmp_path / 'env'}" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "tried"),
    [
        ('parser.add_argument("--resume", action="store_true")', [["--resume"]]),
        ('parser.add_argument("--resume-step", type=int, default=0)', [["--resume-step", "30"]]),
        (
            'parser.add_argument("--resume")',
            [["--resume", "out/step-0030.pt"], ["--resume", "out"], ["--resume", "step-0030.pt"]],
        ),
        ("class Options:\n    resume: bool = False", [["--resume"]]),
        ('parser.add_argument("--ckpt")\nmodel.load_state_dict(torch.load(args.ckpt))', []),  # a model to start from
        ('add_argument("--ckpt-path", type=int)\nopt.load_state_dict(saved["opt"])', [["--ckpt-path", "30"]]),
        ('init_from = "scratch"\nif init_from == "resume":', [["--init_from=resume"]]),
        ("config = OmegaConf.from_cli()\nresume = config.get('resume', 'resume: null')", [["resume=out/step-0030.pt"]]),
    ],
)
def test_the_arguments_with_which_a_program_may_resume(text, tried):
    assert list(resume_arguments(text, (), "out/step-0030.pt")) == tried
    assert list(resume_arguments(text, ("--resume", "--resume-step", "--ckpt-path"), "out/step-0030.pt")) in ([], tried)
