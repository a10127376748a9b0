"""One training with every strategy: equal losses and parameters, costs as predicted, and the page about them."""

import importlib
import importlib.util
import json
import os
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import runs
from test_bad_input import refused_as_rank_0
from workshop.data.codellama import TINY
from workshop.demo.strategies import FOLDER, STRATEGIES, draw, page, run_one, with_round
from workshop.training.traffic import Messages

NAMES = [strategy.name for strategy in STRATEGIES]
# Largest differences of losses (in nats) and of parameters: over 50 steps in float64, or over 20 steps in float32.
IN_FLOAT64, IN_FLOAT32 = 1e-6, 1e-4
WEIGHTS_IN_FLOAT64, WEIGHTS_IN_FLOAT32 = 1e-6, 1e-3


@pytest.fixture(scope="module")
def train(tmp_path_factory, data):
    """A function that runs a strategy, once per type, and returns its row."""
    folders, rows = {}, {}

    def row(name, dtype):
        if dtype not in folders:
            folders[dtype] = tmp_path_factory.mktemp(dtype)
        strategy = next(each for each in STRATEGIES if each.name == name)
        if strategy.reference:
            row(strategy.reference, dtype)
        if (name, dtype) not in rows:
            steps = 50 if dtype == "float64" else 20
            rows[name, dtype] = run_one(strategy, folders[dtype], steps, dtype, 2, lambda line: None)
        return rows[name, dtype]

    with pytest.MonkeyPatch.context() as patch:
        for key, value in runs.environment(WORKSHOP_DATA=data).items():
            patch.setenv(key, value)
        yield row


@pytest.mark.full  # .ci/run starts the tour daily, and its last part runs the strategies
@pytest.mark.parametrize("name", NAMES)
def test_each_strategy_has_the_losses_of_one_process_in_float32(name, train):
    row = train(name, "float32")
    assert row["failure"] == row["missing"] == ""
    assert len(row["losses"]) == 20
    assert row["losses"][-1] < row["losses"][0] - 0.5
    assert row["tokens_per_second"] > 0
    if row["reference"]:
        assert row["loss_difference"] < IN_FLOAT32
        assert row["parameter_difference"] < WEIGHTS_IN_FLOAT32


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_each_strategy_has_the_losses_of_one_process_in_float64(name, train, record_property):
    """ZeRO is compared with the tolerance of float32, because it keeps the parameters that it updates in float32."""
    strategy = next(each for each in STRATEGIES if each.name == name)
    row = train(name, "float64")
    if strategy.refuses_float64:
        assert row["missing"] == "does not accept float64"
        return
    assert row["failure"] == row["missing"] == ""
    assert len(row["losses"]) == 50
    if row["reference"]:
        record_property("difference", json.dumps({key: row[key] for key in ("name", "loss_difference")}))
        assert row["loss_difference"] < (IN_FLOAT64 if strategy.in_float64 else IN_FLOAT32)
        assert row["parameter_difference"] < (WEIGHTS_IN_FLOAT64 if strategy.in_float64 else WEIGHTS_IN_FLOAT32)


@pytest.mark.full
def test_memory_and_communication_are_as_predicted(train, data):
    """Compare the bytes of float32 values on two processes; the formulas for communication are those of nccl-tests."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(data / "models" / TINY, dtype=torch.float32)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    layers = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    rows = {name: train(name, "float32") for name in NAMES}
    # Parameters, gradients and two moments; DDP also has buckets, and FSDP has half of everything.
    assert rows["one process"]["memory"] == pytest.approx(4 * whole, rel=0.05)
    for name in ("DDP, mp.spawn", "DDP, torchrun", "Lightning (DDP)", "Accelerate (DDP)"):
        assert rows[name]["memory"] == pytest.approx(5 * whole, rel=0.05)
        assert rows[name]["sent"] == pytest.approx(whole, rel=0.02)  # each gradient: 2 (N-1)/N
    assert rows["FSDP2"]["memory"] == pytest.approx(2 * whole, rel=0.1)
    # Each rank gathers half of each layer twice and half of the other parameters once, and sends half of the gradients.
    assert rows["FSDP2"]["sent"] == pytest.approx((2 * layers + (whole - layers) + whole) / 2, rel=0.02)
    # The whole parameters, and half of the moments, of the gradients and of the copy of the parameters in DeepSpeed.
    assert rows["ZeRO-1"]["memory"] == pytest.approx(3 * whole, rel=0.1)
    assert rows["one process"]["sent"] == 0
    # Attention and the MLP of each layer sum activations once in the forward pass and once in the backward pass.
    activations = 8 * 64 * model.config.hidden_size * 4
    assert rows["tensor parallel"]["sent"] == pytest.approx(4 * len(model.model.layers) * activations, rel=0.02)
    # Each of the two stages sends each activation or its gradient once, and has half of the layers and one large matrix.
    assert rows["pipeline parallel"]["sent"] == pytest.approx(activations, rel=0.02)
    stage = 4 * (layers / 2 + model.lm_head.weight.nbytes)
    logits = 8 * 64 * model.config.vocab_size * 4  # PyTorch keeps the outputs of the step, and some activations
    assert stage < rows["pipeline parallel"]["memory"] < stage + logits + 3 * activations
    # Half of the experts, which have most of the parameters.
    experts = rows["8 experts, parallel"]["memory"] / rows["8 experts, one process"]["memory"]
    assert 0.5 < experts < 0.65


@pytest.fixture
def group():
    """A process group in which this process is rank 0 of 2; its collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("folder", ["strategies", "04_model_parallel_with_fsdp"])
def test_tensor_parallel_sums_activations_four_times_per_layer(folder, group):
    """Attention and the MLP each call all-reduce once in the forward pass and once in the backward pass."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 50}
    mesh, batch = init_device_mesh("cpu", (2,)), torch.arange(8).view(2, 4)
    for script in (runs.ROOT / folder).glob("*tensor_parallel.py"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **sizes))
        for layer in model.model.layers:
            parallelize_module(layer, mesh, runpy.run_path(str(script))["PLAN"])
        with Messages() as messages:
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        assert messages.calls == {"all_reduce": 4 * 3}, script


def test_tensor_parallel_trains_with_the_optimizer_of_a_gpu(group, data, tmp_path, monkeypatch):
    """On a GPU, AdamW chooses foreach, which does not accept DTensors together with other tensors."""
    optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim does not show its module
    monkeypatch.setattr(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    monkeypatch.setenv("WORKSHOP_DATA", str(data))
    args = SimpleNamespace(steps=4, dtype="float32", output=tmp_path)
    runpy.run_path(str(runs.ROOT / FOLDER / "tensor_parallel.py"))["train"](torch.device("cpu"), args)
    assert len(json.loads((tmp_path / "report.json").read_text())["losses"]) == 4


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


ALONE = ["DDP, torchrun", "Accelerate (DDP)", "FSDP2", "tensor parallel", "ZeRO-3"]
DEVICES = {"cpu": [pytest.mark.full], "cuda": needs_gpu, "pretended": []}


@pytest.mark.parametrize(
    ("device", "name"),
    [
        pytest.param(device, name, marks=marks, id=f"{device}-{name}")
        for device, marks in DEVICES.items()
        for name in (ALONE[:-1] if device == "pretended" else ALONE)  # DeepSpeed does not run on pretended GPUs
    ],
)
def test_each_strategy_trains_with_one_process(device, name, data, tmp_path, monkeypatch):
    """A single process has nobody to communicate with, but DDP still calls broadcast for the buffers of the model."""
    from transformers import AutoModelForCausalLM

    gpus = {"cpu": {}, "cuda": runs.with_gpus(), "pretended": runs.pretended(1)}[device]
    variables = runs.environment(WORKSHOP_DATA=data, **gpus)
    for key in os.environ.keys() - variables.keys():  # ``train`` may have hidden the GPUs until the end of this module
        monkeypatch.delenv(key)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    strategy = next(each for each in STRATEGIES if each.name == name)
    if not importlib.util.find_spec(strategy.package):
        pytest.skip(f"needs {strategy.package}")
    alone = run_one(STRATEGIES[0], tmp_path, 20, "float32", 1, lambda line: None)
    found = run_one(strategy, tmp_path, 20, "float32", 1, lambda line: None)
    assert alone["failure"] == found["failure"] == ""
    assert alone["device"] == found["device"] == ("cpu" if device == "cpu" else "cuda")
    assert found["loss_difference"] < 1e-3  # a GPU sums in a different order each time
    model = AutoModelForCausalLM.from_pretrained(data / "models" / TINY)
    # Accelerate wraps a model in DDP on a GPU only if there are several processes.
    wrapped = name == "DDP, torchrun" or (name == "Accelerate (DDP)" and device == "cpu")
    assert found["sent"] == (sum(buffer.nbytes for buffer in model.buffers()) if wrapped else 0)


def row(name, **figures):
    reference = "" if name == "one process" else "one process"
    found = {
        "name": name,
        "missing": "",
        "failure": "",
        "lines": 12,
        "before": "one_process.py",
        "reference": reference,
    }
    return found | figures


def trained(name, rate, held, sent, **more):
    figures = {
        "tokens_per_second": rate,
        "rounds": [rate],
        "memory": held * 2**20,
        "sent": sent * 2**20,
        "processes": 2,
        "device": "cpu",
    }
    return row(name, losses=[7.0, 6.5], **figures, **more)


@pytest.fixture
def summary():
    apart = {"loss_difference": 3e-7, "parameter_difference": 2e-5}
    machine = {"processor": "a processor", "cores": 2, "gpus": [], "torch": "2.15.0"}
    rows = [
        trained("one process", 1000, 64, 0),
        trained("DDP, torchrun", 1800, 80, 16, **apart),
        row("ZeRO-3", missing="deepspeed is not installed"),
        trained("FSDP2", 900, 32, 24, **apart),
        trained("tensor parallel", 800, 40, 14, **apart),
    ]
    command = "workshop strategies"
    return {"machine": machine, "command": command, "steps": 2, "dtype": "float32", "processes": 2, "runs": rows}


def test_the_page_shows_what_was_measured(summary):
    text = page(summary)
    assert "| FSDP2 | 900 | 32 | 24 | 12 | 3e-07 | 2e-05 |" in text
    assert "| ZeRO-3 | deepspeed is not installed |" in text
    assert "DDP with 2 processes is 1.80 times as fast" in text
    assert "holds 0.50 times as much as one process alone, and sends 1.50 times as much as with DDP" in text
    assert "FSDP2 is 0.50 times as fast as DDP" in text
    assert "## The questions, in this order" in text
    assert "](../" not in text  # relative links of RULES.md would be wrong in the folder of the page


def test_several_rounds_are_shown_as_their_median_and_their_spread(summary):
    speeds = {"one process": (1000, 1100, 800), "DDP, torchrun": (1800, 1760, 1840)}
    merged = []
    for each in summary["runs"]:
        total = None
        for speed in speeds.get(each["name"], (900, 900, 900)):
            total = with_round(total, each if each["missing"] else each | {"tokens_per_second": speed})
        merged.append(total)
    text = page(summary | {"runs": merged})
    assert "| one process | 1,000 (800 to 1,100) |" in text
    assert "DDP with 2 processes is 1.80 (1.60 to 2.30) times as fast as one process" in text
    assert "medians of 3 rounds" in text


def test_the_picture_leaves_out_runs_that_failed(summary, tmp_path):
    summary["runs"].append(row("broken", failure="rank 1 failed first"))
    draw(tmp_path / "all.png", summary)
    with Image.open(tmp_path / "all.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 20, "the picture is empty"


def test_a_missing_package_and_a_failure_are_reported(tmp_path, monkeypatch):
    from dataclasses import replace

    from workshop.demo import strategies

    monkeypatch.setattr(strategies, "torchrun", lambda count: [sys.executable, "-c", "print(1 / 0)"])
    strategy = replace(STRATEGIES[2], package="no_such_package")
    assert run_one(strategy, tmp_path, 4, "float32", 2, print)["missing"] == "no_such_package is not installed"
    assert "ZeroDivisionError" in run_one(STRATEGIES[2], tmp_path, 4, "float32", 2, lambda line: None)["failure"]


def test_a_tour_of_stage_05_runs_the_strategies(tmp_path, monkeypatch):
    from workshop.demo import tour

    calls = []
    monkeypatch.setattr(tour, "run_strategies", lambda **options: calls.append(options) or 1)
    assert tour.run_tour("05", output=str(tmp_path)) == 1
    assert calls == [{"processes": 2, "output": str(tmp_path / "strategies")}]


def test_mistakes_are_reported_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "3")
    (tmp_path / "file").touch()
    script = runs.ROOT / FOLDER / "ddp_torchrun.py"
    said = refused_as_rank_0(script, ["--output", "file/run"], tmp_path, monkeypatch, capfd)
    assert "nothing can be written beneath it" in said
    said = refused_as_rank_0(script.with_name("ddp_spawn.py"), ["--nproc", "3"], tmp_path, monkeypatch, capfd)
    assert "3 processes do not divide the 8 sequences" in said
    assert said.count("\n") == 1
