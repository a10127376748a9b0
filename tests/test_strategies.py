"""One training under every strategy: the same losses and weights, costs that are what theory says, and the page on them."""

import importlib.util
import json
import sys

import pytest
import torch
from PIL import Image

import runs
from test_bad_input import refused_as_rank_0
from workshop.demo.strategies import FOLDER, STRATEGIES, draw, page, run_one
from workshop.demo.tour import run_tour

NAMES = [strategy.name for strategy in STRATEGIES]
# Nats, and weights: over 50 steps where all is computed in float64; over 20 where it is not.
IN_FLOAT64, IN_FLOAT32 = 1e-6, 1e-4
WEIGHTS_IN_FLOAT64, WEIGHTS_IN_FLOAT32 = 1e-6, 1e-3


@pytest.fixture(scope="module")
def train(tmp_path_factory, data):
    """Runs a strategy, once with each type, and returns its row."""
    folders, rows = {}, {}

    def row(name, dtype):
        if dtype not in folders:
            folders[dtype] = tmp_path_factory.mktemp(dtype)
        if name != "one process":
            row("one process", dtype)
        if (name, dtype) not in rows:
            strategy = next(each for each in STRATEGIES if each.name == name)
            steps = 50 if dtype == "float64" else 20
            rows[name, dtype] = run_one(strategy, folders[dtype], steps, dtype, 2, lambda line: None)
        return rows[name, dtype]

    with pytest.MonkeyPatch.context() as patch:
        for key, value in runs.environment(WORKSHOP_DATA=data).items():
            patch.setenv(key, value)
        yield row


@pytest.mark.full  # every day .ci/run starts the tour, of which these are the last part
@pytest.mark.parametrize("name", NAMES)
def test_in_float32(name, train):
    row = train(name, "float32")
    assert row["failure"] == row["missing"] == ""
    assert len(row["losses"]) == 20
    assert row["losses"][-1] < row["losses"][0] - 0.5
    assert row["tokens_per_second"] > 0
    if name != "one process":
        assert row["loss_difference"] < IN_FLOAT32
        assert row["weight_difference"] < WEIGHTS_IN_FLOAT32


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_in_float64(name, train, record_property):
    """(ZeRO keeps the weights that it changes in float32, whatever the model computes in.)"""
    strategy = next(each for each in STRATEGIES if each.name == name)
    row = train(name, "float64")
    assert row["failure"] == row["missing"] == ""
    assert len(row["losses"]) == 50
    if name != "one process":
        record_property("difference", json.dumps({key: row[key] for key in ("name", "loss_difference")}))
        assert row["loss_difference"] < (IN_FLOAT64 if strategy.in_float64 else IN_FLOAT32)
        assert row["weight_difference"] < (WEIGHTS_IN_FLOAT64 if strategy.in_float64 else WEIGHTS_IN_FLOAT32)


@pytest.mark.full
def test_what_they_hold_and_send_is_what_theory_says(train, data):
    """On two processes, in bytes of float32; the formulas for messages are those of nccl-tests."""
    from transformers import AutoModelForCausalLM

    from workshop.data.codellama import TINY

    model = AutoModelForCausalLM.from_pretrained(data / "models" / TINY, dtype=torch.float32)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    layers = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    rows = {name: train(name, "float32") for name in NAMES}
    # Weights, gradients and two moments; DDP's buckets beside them; FSDP has half of all.
    assert rows["one process"]["memory"] == pytest.approx(4 * whole, rel=0.05)
    for name in ("DDP, mp.spawn", "DDP, torchrun", "Lightning (DDP)", "Accelerate (DDP)"):
        assert rows[name]["memory"] == pytest.approx(5 * whole, rel=0.05)
        assert rows[name]["sent"] == pytest.approx(whole, rel=0.02)  # each gradient: 2 (N-1)/N
    assert rows["FSDP2"]["memory"] == pytest.approx(2 * whole, rel=0.1)
    # Half of each layer is gathered twice, of what is around them once; and half of the gradients goes out.
    assert rows["FSDP2"]["sent"] == pytest.approx((2 * layers + (whole - layers) + whole) / 2, rel=0.02)
    # Weights whole; of the moments, of the gradients and of DeepSpeed's own copy of the weights a half.
    assert rows["ZeRO-1"]["memory"] == pytest.approx(3 * whole, rel=0.1)
    assert rows["one process"]["sent"] == 0
    # Two sums over the batch's activations in each layer's forward; in the backward one for each matrix cut by columns.
    activations = 8 * 64 * model.config.hidden_size * 4
    assert rows["tensor parallel"]["sent"] == pytest.approx(7 * len(model.model.layers) * activations, rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["DDP, torchrun", "Accelerate (DDP)", "ZeRO-3", "FSDP2"])
def test_on_one_gpu_each_is_one_process(name, data, tmp_path, monkeypatch):
    """One process on a GPU by each strategy; memory is the allocator's, and nobody sends anything."""
    for key, value in runs.environment(WORKSHOP_DATA=data, **runs.with_gpus()).items():
        monkeypatch.setenv(key, value)
    strategy = next(each for each in STRATEGIES if each.name == name)
    if not importlib.util.find_spec(strategy.package):
        pytest.skip(f"needs {strategy.package}")
    alone = run_one(STRATEGIES[0], tmp_path, 20, "float32", 1, lambda line: None)
    found = run_one(strategy, tmp_path, 20, "float32", 1, lambda line: None)
    assert alone["failure"] == found["failure"] == ""
    assert alone["device"] == found["device"] == "cuda"
    assert found["loss_difference"] < 1e-3  # a GPU sums in another order each time
    assert found["sent"] == 0


def row(name, **figures):
    return {"name": name, "missing": "", "failure": "", "lines": 12, "before": "one_process.py", **figures}


def trained(name, rate, held, sent, **more):
    figures = {"tokens_per_second": rate, "memory": held * 2**20, "sent": sent * 2**20, "processes": 2, "device": "cpu"}
    return row(name, losses=[7.0, 6.5], **figures, **more)


@pytest.fixture
def summary():
    apart = {"loss_difference": 3e-7, "weight_difference": 2e-5}
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


def test_the_page_says_what_was_measured(summary):
    text = page(summary)
    assert "| FSDP2 | 900 | 32 | 24 | 12 | 3e-07 | 2e-05 |" in text
    assert "| ZeRO-3 | deepspeed is not installed |" in text
    assert "DDP with 2 processes is 1.80 times as fast" in text
    assert "FSDP2 holds 0.50 times as much, sends 1.50 times what DDP sends, and is 0.50 times as fast" in text
    assert "## The questions, in this order" in text
    assert "](../" not in text  # links of RULES.md lead nowhere from the page's folder


def test_the_picture_is_drawn_without_those_that_failed(summary, tmp_path):
    summary["runs"].append(row("broken", failure="rank 1 failed first"))
    draw(tmp_path / "all.png", summary)
    with Image.open(tmp_path / "all.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 20, "the picture is empty"


def test_a_package_that_is_missing_is_said_and_a_failure_shown(tmp_path, monkeypatch):
    from dataclasses import replace

    from workshop.demo import strategies

    monkeypatch.setattr(strategies, "torchrun", lambda count: [sys.executable, "-c", "print(1 / 0)"])
    strategy = replace(STRATEGIES[2], package="no_such_package")
    assert run_one(strategy, tmp_path, 4, "float32", 2, print)["missing"] == "no_such_package is not installed"
    assert "ZeroDivisionError" in run_one(STRATEGIES[2], tmp_path, 4, "float32", 2, lambda line: None)["failure"]


def test_a_tour_of_stage_05_is_this(tmp_path, monkeypatch):
    from workshop.demo import tour

    calls = []
    monkeypatch.setattr(tour, "run_strategies", lambda **options: calls.append(options) or 1)
    assert run_tour("05", output=str(tmp_path)) == 1
    assert calls == [{"processes": 2, "output": str(tmp_path / "strategies")}]


def test_mistakes_are_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "3")
    (tmp_path / "file").touch()
    script = runs.ROOT / FOLDER / "ddp_torchrun.py"
    said = refused_as_rank_0(script, ["--output", "file/run"], tmp_path, monkeypatch, capfd)
    assert "nothing can be written beneath it" in said
    said = refused_as_rank_0(script.with_name("ddp_spawn.py"), ["--nproc", "3"], tmp_path, monkeypatch, capfd)
    assert "3 processes do not divide the 8 sequences" in said
    assert said.count("\n") == 1
