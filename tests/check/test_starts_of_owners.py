"""How programs start their processes, when they count GPUs or expect variables of their owner, and where they make loaders."""

import os
import time
from contextlib import suppress

import pytest

from workshop.check.command import check_command
from workshop.check.folder import make_own
from workshop.check.foreign import OwnersBench
from workshop.check.scenarios import WHOLE
from workshop.check.start import read_start
from workshop.check.subject import Subject

COUNTED = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")

def work(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29477")
    dist.init_process_group("gloo", rank=rank, world_size=len(GPUS))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)
    for step in range(6):
        inputs = torch.randn(8, 4)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, nprocs=len(GPUS))
"""


def test_the_owner_may_set_the_address_of_the_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody can use it
    text = COUNTED.replace('    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29477")\n', "")
    (tmp_path / "train.py").write_text(text.replace("len(GPUS)", "2"))
    *_, verdict = check_command(["python", "train.py"], folder=tmp_path)
    assert (verdict.status, [each.seen for each in verdict.findings if not each.advice]) == (0, [])


def test_a_program_may_make_the_folder_for_temporary_files_again(tmp_path):
    made = "def work(rank):\n    os.makedirs(tempfile.gettempdir(), exist_ok=True)\n"
    text = COUNTED.replace("import os\n", "import os\nimport tempfile\n").replace("def work(rank):\n", made)
    (tmp_path / "train.py").write_text(text.replace("len(GPUS)", "2"))
    *_, verdict = check_command(["python", "train.py"], folder=tmp_path)
    assert (verdict.status, [each.seen for each in verdict.findings if not each.advice]) == (0, [])


@pytest.mark.parametrize(("variable", "processes"), [("0,1,2,3", 2), (None, 1)])
def test_a_program_may_start_one_process_for_each_gpu_of_the_variable(variable, processes, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    (tmp_path / "train.py").write_text(COUNTED)
    (tmp_path / "place").mkdir()
    start = read_start(["python", str(tmp_path / "train.py")])
    subject = Subject(tmp_path / "train.py", "", (), ())
    bench = OwnersBench(subject, start, on_cpu=True, place=tmp_path / "place", original=tmp_path)
    assert len(bench.make(WHOLE, {}).trained) == processes


FABRIC = """
import lightning as L
import torch

fabric = L.Fabric(devices="auto", num_nodes=1)
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
torch.manual_seed(1 + fabric.global_rank)
for step in range(6):
    inputs = torch.randn(8, 4, device=fabric.device)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
"""


def test_lightning_counts_the_gpus_of_the_node_also_with_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(FABRIC)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert (verdict.status, [each.seen for each in verdict.findings if not each.advice]) == (0, [])


LOOP = """
import torch
import torch.distributed as dist
from data import loader_of

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    for inputs, targets in loader_of(distributed=False):
        optimizer.zero_grad()
        (model(inputs) - targets).pow(2).mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""
DATA = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

class Loader(DataLoader):
    def __init__(self, data, **options):
        super().__init__(data, batch_size=8, **options)

def loader_of(distributed):
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    if distributed:
        return Loader(data, sampler=DistributedSampler(data))
    return Loader(data, shuffle=True)
"""


def test_the_line_that_made_the_loader_is_named_also_in_another_file(tmp_path):
    (tmp_path / "train.py").write_text(LOOP)
    (tmp_path / "data.py").write_text(DATA)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    line = DATA.splitlines().index("    return Loader(data, shuffle=True)") + 1
    assert [(each.rule.name, each.where) for each in verdict.errors] == [("same-samples", f"data.py:{line}")]


WORKERS = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
data = [torch.full((4,), float(index)) for index in range(32)]
for batch in DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=1):
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_workers_of_loaders_send_batches_also_in_a_folder_with_a_long_name(tmp_path):
    here = tmp_path / f"a-{'very-' * 14}long-name"
    here.mkdir()
    (here / "train.py").write_text(WORKERS)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=here)
    assert [each.seen for each in verdict.errors] == []
    assert verdict.status == 0


def test_a_line_in_a_folder_beside_that_of_the_program_is_named(tmp_path):
    here, package = tmp_path / "repository" / "recipes" / "train", tmp_path / "repository" / "package"
    here.mkdir(parents=True)
    package.mkdir()
    (here / "train.py").write_text(f'import sys\nsys.path.append("../../package")\n{LOOP}')
    (package / "data.py").write_text(DATA)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=here)
    line = DATA.splitlines().index("    return Loader(data, shuffle=True)") + 1
    assert [(each.rule.name, each.where) for each in verdict.errors] == [
        ("same-samples", f"../../package/data.py:{line}")
    ]


def test_a_program_reads_and_writes_beside_the_folders_around_it(tmp_path):
    here = tmp_path / "repository" / "backend" / "train"
    here.mkdir(parents=True)
    models = tmp_path / "repository" / "models"
    models.mkdir()
    (models / "width.txt").write_text("4")
    text = LOOP.replace(
        "from data import loader_of", 'from data import loader_of\nwidth = int(open("../../models/width.txt").read())'
    )
    text = text.replace("Linear(4, 1)", "Linear(width, 1)").replace("distributed=False", "distributed=True")
    text += 'open(f"../../models/of-{width}.txt", "a").write("trained")\n'
    (here / "train.py").write_text(text)
    (here / "data.py").write_text(DATA)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=here)
    assert [each.rule.name for each in verdict.errors] == ["same-order"]  # it trained
    assert [each.name for each in models.iterdir()] == ["width.txt"]


def test_processes_that_write_into_a_linked_folder_at_the_same_time_both_find_it(tmp_path):
    (tmp_path / "original").mkdir()
    for number in range(60):
        copy = tmp_path / f"run-{number}"
        copy.mkdir()
        (copy / "models").symlink_to(tmp_path / "original")
        start = time.monotonic() + 0.02
        children = []
        for name in ("one", "two"):
            if (child := os.fork()) == 0:
                status = 1
                with suppress(BaseException):
                    while time.monotonic() < start:
                        pass
                    make_own(f"{copy}/models/{name}", str(copy), f"{copy}/lock")
                    open(copy / "models" / name, "a").close()
                    status = 0
                os._exit(status)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert list((tmp_path / "original").iterdir()) == []


SAVES = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

class Save(L.Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(f"{trainer.current_epoch}.ckpt")

inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(inputs), batch_size=8, shuffle=True)
L.seed_everything(1)
L.Trainer(accelerator="cpu", devices=2, max_epochs=2, callbacks=[Save()], logger=False).fit(Model(), loader)
"""


def test_recording_what_lightning_saves_calls_no_collective(tmp_path):
    (tmp_path / "train.py").write_text(SAVES)
    *_, verdict = check_command(["python", "train.py"], folder=tmp_path)
    assert [each.seen for each in verdict.errors] == []
    assert verdict.status == 0


SLURM = """
import os, subprocess
import torch
import torch.distributed as dist

names = subprocess.check_output(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], text=True)
os.environ |= {"MASTER_ADDR": names.split()[0], "RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_NTASKS"]}
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    optimizer.zero_grad()
    model(inputs).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_program_of_srun_may_ask_for_the_names_of_its_nodes(tmp_path):
    asks = 'assert os.environ["SLURM_STEP_TASKS_PER_NODE"] == "2" and os.environ["SLURM_STEP_NUM_NODES"] == "1"\n'
    (tmp_path / "train.py").write_text(SLURM.replace("names =", f"{asks}names ="))
    *_, verdict = check_command(["srun", "--ntasks=2", "python", "train.py"], folder=tmp_path)
    assert [finding.seen for finding in verdict.errors] == []
    assert verdict.status == 0


@pytest.mark.parametrize(("device", "errors"), [('"cuda", 0', 0), ('"cuda", int(os.environ["SLURM_LOCALID"])', 1)])
def test_srun_can_give_each_task_one_gpu(device, errors, tmp_path):
    text = SLURM.replace('init_process_group("gloo")', f'init_process_group("nccl")\ndevice = torch.device({device})')
    text = text.replace("torch.nn.Linear(4, 1)", "torch.nn.Linear(4, 1).to(device)")
    text = text.replace("dist.get_rank()))", "dist.get_rank())).to(device)")
    (tmp_path / "train.py").write_text(text)
    *_, verdict = check_command(["srun", "--ntasks=2", "--gpus-per-task=1", "python", "train.py"], folder=tmp_path)
    assert len(verdict.errors) == errors, [finding.seen for finding in verdict.errors]


def test_a_shell_can_set_variables_in_each_task(tmp_path):
    (tmp_path / "variables.sh").write_text(
        "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS\nexport MASTER_ADDR=nowhere\n"
    )
    checks = 'import sys\nassert sys.argv[1:] == ["--rank", os.environ["RANK"]]\n'
    own = SLURM[SLURM.index("names =") : SLURM.index("dist.init")]
    (tmp_path / "train.py").write_text(SLURM.replace(own, checks))
    commands = "echo starting; source variables.sh; python train.py --rank $RANK"
    *_, verdict = check_command(["srun", "--ntasks=2", "bash", "-c", commands], folder=tmp_path)
    assert [finding.seen for finding in verdict.errors] == []
    assert verdict.status == 0


SAVING = """
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(96, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model, optimizer, loader = accelerator.prepare(
    model := torch.nn.Linear(4, 1), torch.optim.AdamW(model.parameters(), lr=0.05), torch.utils.data.DataLoader(data, 4)
)
start = 0
if "--from" in sys.argv:
    accelerator.load_state(sys.argv[-1])
    start = int(sys.argv[-1].rpartition("_")[2]) + 1
for epoch in range(start, 3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward((model(inputs) - targets).pow(2).mean())
        optimizer.step()
    accelerator.save_state(f"epoch_{epoch}")
accelerator.END
accelerator.wait_for_everyone()
"""


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        ("wait_for_everyone()", ""),
        ("end_training()", "a collective is called after the process group has been destroyed at"),
    ],
)
def test_a_state_of_accelerate_is_a_folder_and_what_follows_the_end_is_named(end, seen, tmp_path):
    (tmp_path / "train.py").write_text(SAVING.replace("END", end))
    command = ["accelerate", "launch", "--cpu", "--num_processes=2", "train.py"]
    *_, verdict = check_command(command, folder=tmp_path, resume=["--from", "{latest}"])
    told = [each.seen for each in verdict.findings if each.kind in ("crash", "resume-fails", "resume-differs")]
    assert len(told) == bool(seen), told
    assert not any("resume" in each for each in verdict.unchecked), verdict.unchecked
    assert all(seen in each for each in told), told


def test_a_program_for_gpus_may_read_the_variable_that_its_owner_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    text = LOOP.replace(
        "from data import loader_of\n", 'import os\n\ntorch.cuda.init()\nos.environ["CUDA_VISIBLE_DEVICES"]\n'
    )
    loop = "    for inputs, targets in [(torch.ones(2, 4).cuda(), torch.ones(2, 1).cuda())]:\n"
    text = text.replace("    for inputs, targets in loader_of(distributed=False):\n", loop).replace("gloo", "nccl")
    text = text.replace("torch.manual_seed(0)", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')
    text = text.replace("torch.nn.Linear(4, 1)", "torch.nn.Linear(4, 1).cuda()")
    (tmp_path / "train.py").write_text(text)
    *_, verdict = check_command(["torchrun", "--nproc-per-node=2", "train.py"], folder=tmp_path)
    assert not [each for each in verdict.findings if each.kind in ("ended-early", "crash")], verdict.findings
    assert not any("GPU" in each for each in verdict.unchecked), verdict.unchecked
