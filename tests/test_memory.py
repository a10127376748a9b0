"""``workshop memory``: predictions compared with the bytes that PyTorch allocates, the table, and wrong arguments."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import UnsupportedOperatorException

import runs
from workshop.run.environment import torchrun
from workshop.training import transformer
from workshop.training.memory import estimate
from workshop.training.transformer import MODELS, Sizes

SMALL = Sizes(layers=3, hidden=192, intermediate=512, heads=6, kv_heads=6, head=32, vocabulary=1024)
GROUPED = Sizes(layers=2, hidden=256, intermediate=640, heads=8, kv_heads=2, head=32, vocabulary=768)


def workshop(*arguments, cwd, **env):
    return runs.run([sys.executable, "-P", "-m", "workshop", *arguments], cwd, **env)


def test_predicted_parameters_are_those_of_the_models():
    """The formula agrees with the models of transformers, and for CodeLlama-7b with its model card (6,738,546,688)."""
    from workshop.measure.language_model import make_model

    assert MODELS["codellama-7b"].parameters == 6_738_546_688
    for sizes in (SMALL, GROUPED, MODELS["codellama-34b"]):
        assert sizes.parameters == sum(parameter.numel() for parameter in make_model(sizes).parameters())


def test_predicted_operations_are_those_that_torch_counts():
    """Count three matrix products for each parameter matrix, and those of the attention, as torch does."""
    from torch.utils.flop_counter import FlopCounterMode

    from workshop.measure.language_model import fill, make_model

    model = make_model(SMALL)
    fill(model, torch.device("cpu"))
    batch = torch.randint(1024, (2, 128))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    assert SMALL.flops_per_token(128) * 256 == pytest.approx(counter.get_total_flops(), rel=0.06)


@pytest.mark.parametrize("sizes", [SMALL, GROUPED], ids=["multi-head", "grouped-query"])
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_predicted_activations_are_those_that_autograd_keeps(how, sizes):
    """Test parameters in the compute type (as the policy of FSDP gathers them), and autocast (as with DDP)."""
    from workshop.measure.language_model import fill, make_model
    from workshop.tensors import kept_for_backward

    model = make_model(sizes)
    fill(model, torch.device("cpu"))
    model = model.to(torch.bfloat16) if how == "bfloat16" else model
    batch = torch.randint(sizes.vocabulary, (2, 96))
    with kept_for_backward() as kept, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        model(input_ids=batch, labels=batch, use_cache=False)
    strategy = "ddp" if how == "autocast" else "fsdp"
    predicted = estimate(sizes, strategy, 1, batch_size=2, sequence_length=96, bf16=how != "float32")
    assert predicted.activations == pytest.approx(kept.bytes, rel=0.05)


# A moment at which the memory is at its peak, and a training in which it is: layers, vocabulary, strategy, processes, sequences,
# tokens per sequence, and whether it recomputes.
PEAKS = {
    "loss, FSDP": (3, 32000, "fsdp", 4, 8, 256, False),
    "loss, FSDP, recompute": (3, 32000, "fsdp", 4, 8, 256, True),
    "loss, DDP": (3, 32000, "ddp", 1, 8, 256, False),
    "beginning of the backward pass": (6, 1024, "fsdp", 8, 4, 256, False),
    "end of the backward pass": (12, 1024, "fsdp", 16, 1, 128, True),
    "optimizer step, DDP": (6, 1024, "ddp", 1, 1, 128, False),
    "optimizer step, FSDP": (12, 1024, "fsdp", 2, 1, 128, True),
}
DAILY = ("loss, FSDP", "beginning of the backward pass", "optimizer step, DDP")


@pytest.mark.parametrize(
    "moment", [name if name in DAILY else pytest.param(name, marks=pytest.mark.full) for name in PEAKS]
)
def test_the_predicted_peak_is_that_of_a_simulated_step(moment):
    from workshop.plan.sizes import Model
    from workshop.simulate.layout import Layout
    from workshop.simulate.step import Settings, simulate
    from workshop.simulate.world import world

    layers, vocabulary, strategy, processes, batch_size, sequence_length, checkpointing = PEAKS[moment]
    sizes = Sizes(layers, 768, 2048, heads=6, kv_heads=6, head=128, vocabulary=vocabulary)
    settings = {"batch_size": batch_size, "sequence_length": sequence_length, "checkpointing": checkpointing}
    predicted = estimate(sizes, strategy, processes, on_gpu=True, **settings)
    try:
        with world(0, processes):
            layout = Layout(fsdp=processes) if strategy == "fsdp" else Layout()
            found = simulate(
                Model(**vars(sizes)), layout, Settings(sequence_length, batch_size, recompute=checkpointing)
            ).peak
    except UnsupportedOperatorException as error:
        pytest.skip(f"torch {torch.__version__} cannot simulate {error}")
    if strategy == "ddp":  # also one process has buckets
        assert predicted.exchange == predicted.gradients
        found += predicted.exchange
    print(f"{moment}: predicted {predicted.peak / found - 1:+.1%}")
    assert predicted.peak == pytest.approx(found, rel=0.06)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("measured")
    model = data / "models" / "tiny-codellama"
    options = ["--batch-size", 3, "--sequence-length", 96, "--gpus", "1,2", "--measure", "--output", folder]
    done = workshop("memory", model, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "memory.json").read_text()), done.stdout


@pytest.mark.full
def test_predicted_memory_agrees_with_measured_memory(measured):
    """On two CPU processes, the difference is at most 10 % for parameters, gradients and optimizer, and 20 % for activations."""
    summary, _ = measured
    assert [row["strategy"] for row in summary["measured"]] == [
        "DDP", "DDP, recompute", "FSDP", "FSDP, recompute",
    ]  # fmt: skip
    for row in summary["measured"]:
        for part, most in (("parameters", 0.1), ("gradients", 0.1), ("optimizer", 0.1), ("activations", 0.2)):
            assert row["predicted"][part] == pytest.approx(row["measured"][part], rel=most), (row["strategy"], part)
    ddp, _, fsdp, _ = (row["measured"] for row in summary["measured"])
    assert fsdp["parameters"] == pytest.approx(ddp["parameters"] / 2, rel=0.01)


@pytest.mark.full
def test_the_speed_of_each_way_is_measured(tmp_path, data):
    ways = ["ddp", "fsdp+checkpointing+gathered"]
    options = ["--ways", *ways, "--batch-sizes", 1, 2, "--sequence-length", 32, "--steps", 2, "--output", "figures"]
    done = runs.run([*torchrun(2), "-m", "workshop.measure.language_model", *options], tmp_path, WORKSHOP_DATA=data)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "figures" / "language_model.json").read_text())["rows"]
    assert [(row["way"], row["batch_size"]) for row in rows] == [(way, size) for size in (1, 2) for way in ways]
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert 0.01 < row["communication"] < 1  # every trace contains the sends of the threads of gloo
        assert row["exposed"] is None
    assert rows[2]["activations"] > rows[3]["activations"]
    assert done.stdout.count(" tokens/s, communication ") == 4
    assert (tmp_path / "figures" / "language_model.png").stat().st_size > 20_000


def test_annotations_on_a_gpu_are_neither_computation_nor_communication():
    """FSDP annotates its all-gathers, so the annotation covers the kernel of NCCL; only a kernel can overlap with it."""
    from workshop.measure.language_model import DeviceType, shares

    def event(name, start, end, device_type=DeviceType.CUDA, annotation=False):
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=device_type, is_user_annotation=annotation, time_range=span)

    events = [
        event("ncclDevKernel_AllGather_RING_LL", 10, 30),
        event("nccl:all_gather_into_tensor", 5, 30, annotation=True),
        event("FSDP::all_gather", 0, 100, annotation=True),
        event("FSDP::all_gather", 0, 100, DeviceType.CPU, annotation=True),
        event("ampere_sgemm", 20, 60),
    ]
    assert shares(events, 100) == (0.2, 0.1)
    assert shares([event("gloo:all_gather", 0, 25, DeviceType.CPU, annotation=True)], 100) == (0.25, None)


def test_overlapping_events_count_once():
    from workshop.measure.language_model import covered

    assert covered([(0, 2), (5, 6), (1, 3), (1.5, 1.8), (6, 7)]) == 5
    assert covered([]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ways", "zero"], "--ways zero: write ddp or fsdp"),
        (["--ways", "ddp", "fsdp+float8"], "--ways fsdp+float8: float8 needs torchao: pip install torchao"),
        (["--ways", "ddp+fast"], "--ways ddp+fast: write ddp or fsdp"),
        (["--batch-sizes", "0"], "'0' is not a whole number of at least 1"),
        (["--model", "codellama-7b", "--sequence-length", "20000"], "takes sequences of up to 16,384 tokens"),
    ],
)
def test_wrong_options_of_the_speed_measurement_are_refused(options, message, monkeypatch, capsys):
    from workshop.measure import language_model

    monkeypatch.setattr(sys, "argv", ["language_model.py", *options])
    monkeypatch.setattr(language_model, "find_spec", lambda name: None)  # as if torchao were not installed
    with pytest.raises(SystemExit) as end:
        language_model.parse_arguments()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_table_names_the_smallest_gpu(tmp_path):
    done = workshop("memory", "codellama-7b", "--gpus", "1,4", "--output", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {
        tuple(line.split()[:2]): line
        for line in done.stdout.splitlines()
        if line.startswith(("DDP", "FSDP", "ZeRO", "LoRA"))
    }
    assert "(180)" in rows["DDP", "any"]
    assert "(180)" in rows["FSDP", "1"]
    assert rows["FSDP", "4"].split()[-4:-2] == ["37", "(40)"]
    assert (tmp_path / "memory.png").stat().st_size > 20_000
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 90


def test_lora_needs_little_memory_beyond_the_parameters():
    whole = estimate(MODELS["codellama-7b"], "lora", 1, batch_size=1, sequence_length=2048)
    assert whole.parameters == pytest.approx(2 * MODELS["codellama-7b"].parameters, rel=0.02)
    assert whole.gradients + whole.optimizer < 0.02 * whole.parameters


def test_mfu_is_computed_only_for_known_gpus(monkeypatch):
    assert transformer.peak_flops(torch.device("cpu")) is None
    for name, peak in {
        "NVIDIA H200": 989e12,
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA GH200 120GB": 989e12,
        "NVIDIA RTX A4000": None,
        "a new one": None,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = transformer.peak_flops(torch.device("cuda"))
        assert (found and found[0]) == peak


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-17"], "there is no model gpt-17: name a folder, or one of: tinyllama-1.1b, codellama-7b"),
        (["codellama-7b", "--gpus", "one"], "--gpus one: give whole numbers of at least 1"),
        (["codellama-7b", "--gpus", "0"], "--gpus 0: give whole numbers of at least 1"),
        (["codellama-7b", "--sequence-length", "100000"], "takes sequences of up to 16,384 tokens, not 100,000"),
        (["codellama-7b", "--batch-size", "0"], "--batch-size"),
        (["."], "config.json: No such file or directory"),
        (["bert"], "only the Llama architecture is supported"),
    ],
)
def test_mistakes_are_reported_in_one_line(arguments, message, tmp_path):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    done = workshop("memory", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
def test_predicted_memory_agrees_with_the_allocator_of_a_gpu(tmp_path):
    """Measure a model of about 300 million parameters with DDP and FSDP, with and without activation checkpointing."""
    sizes = {"model_type": "llama", "num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 2816,
             "num_attention_heads": 16, "vocab_size": 32016, "max_position_embeddings": 4096}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    options = ["--batch-size", 4, "--sequence-length", 1024, "--measure", "--output", tmp_path]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "workshop", "memory", str(tmp_path), *map(str, options)],
        env=runs.environment(**runs.with_gpus()), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for row in json.loads((tmp_path / "memory.json").read_text())["measured"]:
        assert row["predicted"]["peak"] == pytest.approx(row["measured"]["peak"], rel=0.2), row["strategy"]


def test_memory_is_measured_on_pretended_gpus(tmp_path):
    """Parameters, gradients and optimizer state are exact; temporary tensors of the CPU are not those of a GPU."""
    sizes = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 192, "intermediate_size": 512,
             "num_attention_heads": 6, "vocab_size": 1024, "max_position_embeddings": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    options = ["--batch-size", 4, "--sequence-length", 96, "--measure", "--output", tmp_path]
    done = workshop("memory", tmp_path, *options, cwd=tmp_path, **runs.pretended(1))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "memory.json").read_text())["measured"]
    assert len(rows) == 4
    for row in rows:
        for part, most in (("parameters", 0.01), ("gradients", 0.01), ("optimizer", 0.01), ("peak", 0.5)):
            assert row["measured"][part] == pytest.approx(row["predicted"][part], rel=most), (row["strategy"], part)
