"""Pretended GPUs: they behave as CUDA's, count what a program does, and train as the CPU does."""

import json
import re
import sys
import textwrap

import pytest
import torch

import runs
from test_cli import workshop
from workshop.measure.pretended_table import KINDS, NOT_SHOWN
from workshop.repository import ROOT

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
MINIMAL = ROOT / "02_pytorch_ddp" / "minimal_ddp.py"


def pretended(code, tmp_path, gpus=2, **variables):
    """Run code in a process with pretended GPUs; return what it prints, and fail if it fails."""
    file = tmp_path / "program.py"
    file.write_text("import torch\n" + textwrap.dedent(code))
    done = runs.run([sys.executable, file], tmp_path, **(runs.pretended(gpus) | variables))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pretend(tmp_path, *command, gpus=2, nodes=1):
    """Run ``workshop pretend``."""
    return workshop("pretend", f"--gpus={gpus}", f"--nodes={nodes}", "--", *map(str, command), cwd=tmp_path)


def test_tensors_are_on_the_gpu_that_the_program_names(tmp_path):
    pretended(
        """
        cuda, first, second = torch.device("cuda"), torch.device("cuda:0"), torch.device("cuda:1")
        assert torch.cuda.is_available() and torch.cuda.device_count() == torch.accelerator.device_count() == 2
        assert torch.zeros(2, device="cuda").device == first
        assert torch.zeros(2, device=1).device == torch.zeros(2).to(1).device == torch.zeros(2).cuda(1).device == second
        torch.cuda.set_device(1)
        assert torch.zeros(2, device=cuda).device == torch.zeros(2).cuda().device == second
        assert torch.accelerator.current_device_index() == 1
        with torch.cuda.device(0):
            assert torch.ones(2).to("cuda").device == first
        with torch.device("cuda:0"):
            assert torch.ones(2).device == first
        x = torch.arange(6.0, device="cuda").reshape(2, 3)
        assert x.is_cuda and not x.cpu().is_cuda and (x @ x.T).device == second
        pair = torch.tensor([x.sum(), 2, x[0, 1]], device="cuda")
        assert pair.device == second and pair.tolist() == [15, 2, 1]
        assert torch.tensor([[x[0, 1]], [3]]).tolist() == [[1], [3]] and x.new_tensor([x.max()]).device == second
        assert torch.empty(2, pin_memory=True).is_pinned() and not torch.empty(2).is_pinned()
        half = (0.5 * torch.ones(2, device="cuda", requires_grad=True)).grad_fn._saved_other
        assert half.detach().item() == half.item() == 0.5
        assert x.to("cuda") is x and x.to(torch.float64).device == second
        model = torch.nn.Linear(3, 1)
        parameter = model.weight
        assert model.to("cuda").weight is parameter and parameter.device == second  # an optimizer may hold it
        """,
        tmp_path,
    )


LAYERS = """
    import copy
    from torch import nn
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    torch.manual_seed(0)
    x, lengths = torch.randn(3, 6, 4), torch.tensor([4, 6, 2])

    def packed(layer, x):
        sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        assert not sequence.batch_sizes.is_cuda
        return pad_packed_sequence(layer(sequence)[0], batch_first=True)[0]

    def whole(layer, x):
        return layer(x)[0]

    def turned(layer, x):
        return torch.polar(torch.ones_like(x), layer(x)).conj().imag

    def in_place(layer, x):
        return (layer(x) * 1).unsqueeze_(0).transpose_(1, 2).squeeze_(0)

    def ctc(layer, x):
        rest = torch.tensor([[1, 2], [2, 3], [1, 3]], device=x.device), lengths, torch.tensor([2, 2, 1])
        return nn.functional.ctc_loss(layer(x).transpose(0, 1).log_softmax(-1), *rest)

    cases = [
        (nn.Linear(4, 4), ctc),
        *((nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), each) for each in (whole, packed)),
        *((nn.GRU(4, 5, 2, batch_first=True, bidirectional=True), each) for each in (whole, packed)),
        (nn.RNN(4, 5, batch_first=True), packed),
        (nn.LSTM(4, 5, bias=False, proj_size=2), whole),
        (nn.GRU(4, 5, bias=False), whole),
        (nn.LSTMCell(4, 5), lambda layer, x: layer(x[0])[0]),
        (nn.GRUCell(4, 5), lambda layer, x: layer(x[0])),
        (nn.Linear(4, 4), turned),
        (nn.Linear(4, 4), in_place),
    ]
    for layer, call in cases:
        results = []
        for device in ("cpu", "cuda"):
            moved = copy.deepcopy(layer).to(device)
            y = call(moved, x.to(device))
            assert y.device.type == device
            y.pow(2).sum().backward()
            results.append([y.detach().cpu(), *(each.grad.cpu() for each in moved.parameters())])
        torch.testing.assert_close(*results)
    print("alike")
"""


def test_recurrent_layers_complex_numbers_and_shapes_in_place_are_those_of_the_cpu(tmp_path):
    """PyTorch computes an LSTM and a GRU on a GPU with operations that it does not have for the CPU."""
    assert pretended(LAYERS, tmp_path).endswith("alike\n")


def test_fully_shard_moves_a_model_to_the_gpu(tmp_path):
    """It moves the parameters of a model that is on the CPU. An integer buffer, as in BatchNorm, needs no gradient."""
    pretended(
        """
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        torch.cuda.set_device(1)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        for device in ("cpu", "cuda"):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(device)
            fully_shard(model)
            model(torch.ones(2, 4, device="cuda")).sum().backward()
            found = [*model.parameters(), *model.buffers(), *(each.grad for each in model.parameters())]
            assert {str(each.device) for each in found} == {"cuda:1"}, found
        dist.destroy_process_group()
        """,
        tmp_path,
    )


REFUSED = {
    "torch.ones(2, device='cuda') + torch.ones(2)": "two devices, cuda:0 and cpu",
    "torch.ones(2, device='cuda:0') + torch.ones(2, device='cuda:1')": "two devices, cuda:0 and cuda:1",
    "torch.ones(2, device='cuda:7')": "CUDA error: invalid device ordinal",
    "torch.ones(2, device='cuda').numpy()": "can't convert cuda:0 device type tensor to numpy",
    "torch.rand(2, device='cuda', generator=torch.Generator())": "Expected a 'cuda' device type for generator but found 'cpu'",
    "torch.cuda.CUDAGraph()": "Pretended GPUs cannot record kernels",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cuda_refuses_is_refused_in_its_words(line, tmp_path):
    out = pretended(
        f"""
        try:
            {line}
        except (RuntimeError, TypeError) as error:
            print(error)
        """,
        tmp_path,
    )
    assert REFUSED[line] in out


def test_a_forked_process_cannot_use_a_gpu_that_its_parent_has_used(tmp_path):
    out = pretended(
        """
        import os
        torch.zeros(1, device="cuda")
        if not os.fork():
            try:
                torch.zeros(1, device="cuda")
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
        """,
        tmp_path,
    )
    assert "Cannot re-initialize CUDA in forked subprocess" in out


def test_each_gpu_has_its_own_random_numbers(tmp_path):
    pretended(
        """
        draw = lambda gpu: torch.rand(3, device=f"cuda:{gpu}").tolist()
        torch.manual_seed(0)
        on_cpu, first, second = torch.rand(3).tolist(), draw(0), draw(1)
        torch.manual_seed(0)
        assert (torch.rand(3).tolist(), draw(0), draw(1)) == (on_cpu, first, second)
        torch.cuda.manual_seed(0)  # only of the current GPU
        assert draw(0) == first and draw(1) != second
        state = torch.cuda.get_rng_state()
        drawn = draw(0)
        torch.cuda.set_rng_state(state)
        assert draw(0) == drawn
        dropped = torch.nn.functional.dropout(torch.ones(100, device="cuda"))
        assert 0 < dropped.count_nonzero() < 100
        """,
        tmp_path,
    )


def test_copies_and_waits_are_noted_with_their_lines(tmp_path):
    out = pretended(
        """
        from workshop.pretend import devices
        x = torch.ones(4)
        x.to("cuda")                              # 5
        x.to("cuda", non_blocking=True)
        pinned = x.pin_memory()
        pinned.to("cuda")                         # 8
        on_gpu = pinned.to("cuda", non_blocking=True)
        on_gpu.sum().item()                       # 10
        on_gpu.cpu()
        on_gpu.to("cpu", non_blocking=True)       # 12
        torch.cuda.synchronize()
        assert (on_gpu > 0).all()                 # 14
        library = {"torch": torch, "pinned": pinned, "__name__": "a_library"}
        exec(compile("pinned.to('cuda', non_blocking=True)", torch.__file__, "exec"), library)  # 16, for the library
        for (kind, _), places in devices.notes.items():
            print(kind, *(place.rpartition(":")[2] for place in places))
        """,
        tmp_path,
    )
    assert out.splitlines() == [
        "pageable 5", "pageable-non-blocking 6", "pinned 8", "pinned-non-blocking 9 16", "wait 10 11 14", "to-cpu 12",
        "synchronize 13",
    ]  # fmt: skip


def test_a_library_that_waits_in_a_generator_is_named_by_its_function(tmp_path):
    out = pretended(
        """
        from workshop.pretend import devices
        text = "def total(values): return sum(float(each) for each in values)"
        library = {"__name__": "a_library"}
        exec(compile(text, torch.__file__, "exec"), library)
        library["total"](torch.ones(3).cuda())
        print([detail for kind, detail in devices.notes if kind == "wait-inside"])
        """,
        tmp_path,
    )
    assert out.strip() == "['in total()']"


def test_each_note_has_a_text_in_the_table():
    source = "".join(file.read_text() for file in (ROOT / "workshop" / "pretend").glob("*.py"))
    noted = set(re.findall(r'note\(\s*"([\w-]+)"', source))
    assert len(noted) > 10
    assert noted < set(KINDS)


def test_a_checkpoint_knows_the_gpu_of_each_tensor(tmp_path):
    pretended(
        """
        model = torch.nn.Linear(3, 1).to("cuda:1")
        torch.save(model.state_dict(), "model.pt")
        assert torch.load("model.pt")["weight"].device == torch.device("cuda:1")
        assert torch.load("model.pt", map_location="cpu")["weight"].device.type == "cpu"
        assert torch.load("model.pt", map_location={"cuda:1": "cuda:0"})["weight"].device == torch.device("cuda:0")
        assert torch.load("model.pt", map_location=lambda storage, _: storage.cuda(0))["weight"].device == torch.device("cuda:0")
        assert torch.equal(torch.load("model.pt")["weight"], model.weight)
        """,
        tmp_path,
    )
    there = "torch.load('model.pt')"
    code = f"""
        try:
            {there}
        except RuntimeError as error:
            print(error)
        """
    assert "Attempting to deserialize object on CUDA device 1" in pretended(code, tmp_path, gpus=1)


def test_autocast_and_scaler(tmp_path):
    pretended(
        """
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).to("cuda")
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
        x = torch.ones(2, 4, device="cuda")
        with torch.autocast("cuda"):
            assert model[0](x).dtype == torch.float16 and model(x).dtype == torch.float32
            loss = model(x).sum()
        before = model[0].weight.detach().clone()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(before, model[0].weight)
        with torch.autocast("cpu"):
            assert model[0](x).dtype == torch.float32  # not for this device
        """,
        tmp_path,
    )


def test_a_gather_compares_only_the_number_of_elements(tmp_path):
    """Accelerate gathers a tensor of shape (1, 2) into one of shape (2,), which NCCL can do."""
    pretended(
        """
        import torch.distributed as dist

        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        gathered, part = torch.zeros(2, device="cuda"), torch.zeros(1, 2, device="cuda")
        dist.all_gather_into_tensor(gathered, torch.tensor([[1.0, 2.0]], device="cuda"))
        dist.reduce_scatter_tensor(part, gathered)
        assert gathered.tolist() == [1, 2] and part.tolist() == [[1, 2]]
        dist.destroy_process_group()
        """,
        tmp_path,
    )


def test_ddp_finds_unused_parameters_and_sums_of_integers_are_averaged(tmp_path):
    """In C++, DDP copies a list from pinned memory, and NCCL averages integers, which gloo refuses."""
    pretended(
        """
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP

        class TwoHeads(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.heads = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])

            def forward(self, x, head):
                return self.heads[head](x)

        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        for options in ({"find_unused_parameters": True}, {"static_graph": True}):
            model = DDP(TwoHeads().cuda(), **options)
            for step in range(3):
                model(torch.randn(2, 3, device="cuda"), 0).sum().backward()
            assert model.module.heads[0].weight.grad.is_cuda and model.module.heads[1].weight.grad is None
        dist.all_reduce(number := torch.tensor([-3], device="cuda"), dist.ReduceOp.AVG)
        assert number.tolist() == [-3]
        dist.destroy_process_group()
        """,
        tmp_path,
    )


def test_what_an_operation_creates_is_on_the_gpu_of_its_tensors(tmp_path):
    """GPU 0 is the current one in the main thread, and in each new thread."""
    pretended(
        """
        import threading
        images = torch.randn(2, 3, 4, 5, device="cuda:1", requires_grad=True)

        def use():
            numbers = torch.tensor([1, 2], device="cuda:1")
            found = [images.to(memory_format=torch.channels_last), torch.nn.functional.one_hot(numbers, 4), numbers.unique()]
            lstm = torch.nn.LSTM(5, 6).to("cuda:1")
            output, _ = lstm(images[0])
            output.sum().backward()
            found += [output, lstm.weight_ih_l0.grad, images.grad, torch.where(images > 0)[0]]
            assert {str(each.device) for each in found} == {"cuda:1"}, [each.device for each in found]
            assert torch.ones(1, device="cuda").device == torch.device("cuda:0")
            done.append(True)

        done = []
        use()
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert len(done) == 2
        """,
        tmp_path,
    )


def test_operations_that_only_cuda_has_for_a_type(tmp_path):
    pretended(
        """
        counts = torch.histc(torch.tensor([1, 2, 2, 5], device="cuda"), bins=6, min=0, max=5)
        assert counts.dtype == torch.int64 and counts.is_cuda and counts.tolist() == [0, 1, 2, 0, 0, 1]
        """,
        tmp_path,
    )


def test_hidden_gpus_are_not_there(tmp_path):
    assert pretended("print(torch.cuda.device_count())", tmp_path, gpus=4, CUDA_VISIBLE_DEVICES="2,3") == "2\n"
    hidden = "print(torch.cuda.is_available(), torch.accelerator.is_available())"
    assert pretended(hidden, tmp_path, CUDA_VISIBLE_DEVICES="") == "False False\n"


def test_torchrun_on_four_gpus_trains_and_ends_with_the_table(tmp_path):
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=4", MINIMAL, gpus=4)
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"rank (\d) of 4 on cuda\S*: weight (\S+),", done.stdout)
    assert {rank for rank, _ in weights} == set("0123")
    (weight,) = {weight for _, weight in weights}
    assert float(weight) == pytest.approx(3, abs=0.1)
    assert re.findall(r"cuda:(\d)\s+0\.\d\d MiB  rank (\d)", done.stdout) == [(n, n) for n in "0123"]
    assert " ".join(NOT_SHOWN.split()) in " ".join(done.stdout.split())


def test_numbers_name_gpus_and_numpy_can_be_forced(tmp_path):
    program = tmp_path / "places.py"
    places = "torch.nn.Linear(2, 2).to(1).weight.device, torch.ones(1).to(1).device"
    program.write_text(f"import torch\nprint({places}, torch.ones(2, device='cuda').numpy(force=True).sum())\n")
    assert pretend(tmp_path, "python", program).stdout.startswith("cuda:1 cuda:1 2.0\n")


def test_two_nodes_of_two_gpus_train_one_model(tmp_path):
    done = pretend(tmp_path, "torchrun", "--nproc-per-node=2", MINIMAL, nodes=2)
    assert done.returncode == 0, done.stderr
    (weight,) = set(re.findall(r"rank \d of 4 on cuda\S*: weight (\S+),", done.stdout))
    assert float(weight) == pytest.approx(3, abs=0.1)
    used = re.findall(r"(\d)\s+cuda:(\d)\s+0\.\d\d MiB  rank (\d)", done.stdout)
    assert used == [("0", "0", "0"), ("0", "1", "1"), ("1", "0", "2"), ("1", "1", "3")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes=2", "--", "python", "train.py"], "--nodes needs the command of torchrun"),
        (["--nodes=2", "--", "torchrun", "--nnodes=2", "train.py"], "leave out --nnodes=2: --nodes sets it"),
        (["--gpus=0", "--", "python", "train.py"], "--gpus"),
        (["--", "no-such-program"], "no-such-program: No such file or directory"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, message, tmp_path):
    done = workshop("pretend", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_torch_without_the_interfaces_is_named_in_one_sentence(tmp_path):
    code = """
import torch
import torch.utils.backend_registration as registration
from workshop.pretend.installation import install
del MODULE.NAME
install(2)
"""
    for module, name, message in (
        ("registration", "_setup_privateuseone_for_python_backend", "need torch 2.10 or newer, and this is torch"),
        ("torch._C", "_ensureCUDADeviceGuardSet", "do not work with torch"),
    ):
        done = runs.run([sys.executable, "-c", code.replace("MODULE", module).replace("NAME", name)], tmp_path)
        assert f"UserError: pretended GPUs {message} {torch.__version__}" in done.stderr


def test_deepspeed_is_refused_in_one_sentence(tmp_path):
    pytest.importorskip("deepspeed")
    program = ROOT / "solutions" / "05_deepspeed" / "exercise1_deepspeed.py"
    done = pretend(tmp_path, "python", *TORCHRUN, "--nproc-per-node=1", program, "--epochs=1")
    assert done.returncode != 0
    assert "DeepSpeed has CUDA code of its own, which pretended GPUs cannot run" in done.stderr


def test_the_reports_are_json_with_the_figures_of_each_process(tmp_path):
    (tmp_path / "reports").mkdir()
    pretended("torch.zeros(2, device='cuda').sum().item()", tmp_path, **runs.pretended(2, tmp_path / "reports"))
    (report,) = (json.loads(file.read_text()) for file in (tmp_path / "reports").iterdir())
    assert report["peak"] == {"0": 2 * 512}
    assert report["visible"] == [0, 1]
