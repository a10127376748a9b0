"""Stage 04: the training learns, has the same losses in every variant, resumes exactly, and exports to plain transformers."""

import json
import os
import re
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import runs
from needs import require
from test_bad_input import refused_as_rank_0
from workshop.course.trial import Trial
from workshop.data import codellama
from workshop.data.code import load_blocks
from workshop.run.environment import torchrun
from workshop.training.finetuning import explain_out_of_memory

STAGE, SOLUTIONS = runs.ROOT / "04_model_parallel_with_fsdp", runs.ROOT / "solutions" / "04_model_parallel_with_fsdp"
DDP, LORA = STAGE / "finetune_ddp.py", STAGE / "lora.py"
FSDP = SOLUTIONS / "exercise1_fsdp_codellama.py"
CHECKPOINT = SOLUTIONS / "exercise2_sharded_checkpoint.py"
EXPORT = SOLUTIONS / "exercise2_export.py"
FIT = SOLUTIONS / "exercise3_fit_the_model.py"
SHORT = ["--steps", 12, "--sequence-length", 64, "--learning-rate", 3e-3]


def finetune(script, nproc, folder, data, *options, patch="float32", run="run") -> dict:
    """Run a script of this stage in ``folder`` and return its log. Fail unless it succeeds and trains at least one step."""
    env = {"WORKSHOP_DATA": data, "TEST_PATCH": patch or None}
    done = runs.run([*torchrun(nproc, script), *options, "--folder", run], folder, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    log = json.loads((folder / run / "log.json").read_text())
    assert losses(log), "the run trained nothing"
    return log


def losses(log) -> list[float]:
    return [loss for entry in log["entries"] for loss in entry.get("losses", [])]


def validation(log) -> list[float]:
    return [entry["validation_loss"] for entry in log["entries"]]


# ---------------------------------------------------------------- equal losses


@pytest.fixture(scope="module")
def ddp(data, tmp_path_factory):
    """The log of finetune_ddp.py with two processes."""
    return finetune(DDP, 2, tmp_path_factory.mktemp("ddp"), data, *SHORT)


SPREADS = {
    "FSDP": (FSDP, 2, ["--batch-size", 4]),
    "one process": (DDP, 1, ["--batch-size", 8]),
    "FSDP on one": (FSDP, 1, ["--batch-size", 8]),
    "FSDP on four": (FSDP, 4, ["--batch-size", 2]),
    "accumulated, activations computed again": (
        FIT,
        2,
        ["--batch-size", 2, "--accumulate", 2, "--activation-checkpointing", "--keep-gathered"],
    ),
    "offloaded": (FIT, 2, ["--batch-size", 4, "--offload"]),
    "compiled": (FIT, 2, ["--batch-size", 4, "--compile"]),
}


@pytest.mark.full
@pytest.mark.parametrize("spread", SPREADS)
def test_every_variant_has_the_losses_of_ddp(spread, ddp, data, tmp_path, record_property):
    script, nproc, options = SPREADS[spread]
    if "--compile" in options:
        require("g++", "Python.h")
    log = finetune(script, nproc, tmp_path, data, *SHORT, *options)
    difference = max(abs(a - b) for a, b in zip(losses(log), losses(ddp), strict=True))
    record_property("difference", json.dumps({"spread": spread, "processes": nproc, "difference": difference}))
    assert difference < 1e-4
    assert validation(log) == pytest.approx(validation(ddp), abs=1e-4)
    assert log["completions"][0]["text"] == ddp["completions"][0]["text"]


@pytest.mark.full
def test_bfloat16_changes_the_losses_only_by_rounding(ddp, data, tmp_path):
    log = finetune(FSDP, 2, tmp_path, data, *SHORT, patch="")
    assert losses(log) == pytest.approx(losses(ddp), abs=0.03)


@pytest.mark.parametrize(
    ("script", "nproc"),
    [
        ("tensor_parallel.py", 2),
        pytest.param("hsdp.py", 4, marks=pytest.mark.full),
        pytest.param("fsdp_tensor_parallel.py", 4, marks=pytest.mark.full),
    ],
)
def test_the_extra_programs_have_the_losses_of_one_process(script, nproc, data, tmp_path, record_property):
    done = runs.run(torchrun(nproc, STAGE / script), tmp_path, WORKSHOP_DATA=data)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 2][1:]
    together, alone = ([float(row[column]) for row in rows] for column in (1, 2))
    assert len(together) == 10
    assert alone[-1] < alone[0] - 0.05, "it learns"
    record_property(
        "difference", json.dumps({"spread": script, "processes": nproc, "difference": float(done.stdout.split()[-1])})
    )
    assert together == pytest.approx(alone, abs=2e-5)


@pytest.mark.full
def test_the_tiny_model_learns_and_then_completes_text_differently(tmp_path):
    """Train the real tiny model; on two cores this takes less than a minute."""
    log = finetune(DDP, 2, tmp_path, tmp_path / "data", "--steps", 200, "--batch-size", 8, patch="")
    assert validation(log)[-1] < validation(log)[0] - 1.5
    before, after = (entry["text"] for entry in log["completions"])
    assert before != after


@pytest.mark.full
def test_lora_trains_few_parameters_and_leaves_the_model_unchanged(data, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    log = finetune(LORA, 2, tmp_path, data, "--steps", 20, "--sequence-length", 64, "--learning-rate", 1e-2)
    assert validation(log)[-1] < validation(log)[0] - 0.05
    adapter = tmp_path / "run" / "adapter"
    whole = data / "models" / codellama.TINY / "model.safetensors"
    assert (adapter / "adapter_model.safetensors").stat().st_size < whole.stat().st_size / 2
    plain = AutoModelForCausalLM.from_pretrained(whole.parent)
    names = {name.replace("base_model.model.", "").replace(".base_layer", "") for name, _ in
             PeftModel.from_pretrained(plain, adapter).named_parameters() if "lora_" not in name}  # fmt: skip
    assert names == set(codellama.weight_files(whole.parent))


def test_the_schedule_accepts_any_number_of_steps():
    """OneCycleLR divides by pct_start * steps - 1, which is zero for ten steps if pct_start is 0.1."""
    (options,) = re.findall(r"OneCycleLR\(optimizer, args.learning_rate, args.steps, (.*)\)", DDP.read_text())
    for steps in range(1, 60):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        schedule = eval(f"torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, {options})")
        rates = []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert 0 < max(rates) <= 3e-3 * 1.001


# ---------------------------------------------------------------- checkpoints

SAVING = [*SHORT, "--save-every", 3]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder and the log of an uninterrupted run of the solution of exercise 2."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, finetune(CHECKPOINT, 2, folder, data, *SAVING)


def killed(folder, data):
    """Start the same run and kill all its processes when the checkpoint of step 6 exists."""
    env = {"WORKSHOP_DATA": data, "TEST_PATCH": "float32"}
    running = runs.Running([*torchrun(2, CHECKPOINT), *SAVING, "--folder", "run"], folder, **env)
    deadline = time.monotonic() + 120
    while not list((folder / "run").glob("step-[69]/.metadata")):
        assert running.process.poll() is None, running.text()
        assert time.monotonic() < deadline, running.text()
        time.sleep(0.01)
    os.killpg(running.process.pid, signal.SIGKILL)
    running.wait()


@pytest.mark.full  # the daily check kills the solution and starts it again
@pytest.mark.parametrize(("nproc", "batch_size"), [(2, 4), (1, 8), (4, 2)])
def test_a_killed_run_resumes_on_any_number_of_processes(nproc, batch_size, whole, data, tmp_path):
    killed(tmp_path, data)
    log = finetune(CHECKPOINT, nproc, tmp_path, data, *SAVING, "--batch-size", batch_size)
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-12"]
    again, uninterrupted = losses(log), losses(whole[1])
    tolerance = 0.0 if nproc == 2 else 1e-4
    assert validation(log)[-1] == pytest.approx(validation(whole[1])[-1], abs=tolerance)
    assert again[-3:] == pytest.approx(uninterrupted[-3:], abs=tolerance)


@pytest.mark.full
def test_plain_transformers_loads_the_export(whole, data):
    """The exported model has the validation loss of the sharded model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, log = whole
    done = runs.run([sys.executable, EXPORT, "--folder", "run", "--export", "export"], folder, WORKSHOP_DATA=data)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "run/step-12 is now a model for transformers: export\n"
    assert sorted(path.name for path in (folder / "export").iterdir()) == [
        "config.json", "generation_config.json",
        "lm_head.weight.safetensors", "model.embed_tokens.weight.safetensors", "model.layers.0.safetensors",
        "model.layers.1.safetensors", "model.norm.weight.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    os.environ["WORKSHOP_DATA"], before = str(data), os.environ.get("WORKSHOP_DATA")
    try:
        _, validation_set = load_blocks("stdlib", tokenizer, 64)
    finally:
        os.environ.pop("WORKSHOP_DATA") if before is None else os.environ.update(WORKSHOP_DATA=before)
    batch = torch.stack([validation_set[index] for index in range(64)])
    with torch.inference_mode():
        loss = model(input_ids=batch, labels=batch).loss.item()
    assert loss == pytest.approx(validation(log)[-1], abs=1e-5)
    prompt = tokenizer("class Reader:\n    def __init__(self, path):\n", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert tokenizer.decode(tokens[0]) == log["completions"][-1]["text"]


# ---------------------------------------------------------------- jobs


@pytest.fixture(scope="module")
def cluster():
    yield from runs.practice_cluster(2, "fsdp")


@pytest.fixture
def trial(cluster, tmp_path):
    """A folder with the job script and the solution of exercise 2, from which a test submits jobs."""
    trial = Trial(SOLUTIONS / "launch_fsdp_2N4G.sh", tmp_path, cluster, None)
    shutil.copy(CHECKPOINT, trial.folder)
    return trial


@pytest.mark.full
def test_a_job_trains_on_two_nodes(trial, data):
    settings = f"--export=ALL,WORKSHOP_DATA={data}"
    job = trial.submit([settings], ["--steps", "4", "--batch-size", "2", "--sequence-length", "64"])
    trial.follow(job, stall=60)
    assert job.state == "COMPLETED", job.output
    assert "4 processes, validation loss" in job.output
    folder = trial.folder / f"runs/launch_fsdp_2N4G-{job.number}"
    assert len(losses(json.loads((folder / "log.json").read_text()))) == 4
    assert len(list((folder / "step-4").glob("*.distcp"))) == 4


@pytest.mark.full
def test_a_job_near_its_time_limit_is_requeued_and_resumes(trial, data):
    settings = f"--export=ALL,WORKSHOP_DATA={data}"
    job = trial.submit(
        [settings], ["--steps", "60", "--save-every", "5", "--batch-size", "2", "--sequence-length", "64"]
    )
    folder = trial.folder / f"runs/launch_fsdp_2N4G-{job.number}"
    assert trial.follow(job, until=lambda job: list(folder.glob("step-*/.metadata")), stall=60), job.output
    trial.on_login("scancel", "--batch", "--signal=USR1", job.number)  # as --signal=B:USR1@60 does
    assert trial.follow(job, until=lambda job: job.restarts > 0, stall=60), job.output
    trial.start_again(job)
    trial.follow(job, stall=60)
    assert job.state == "COMPLETED", job.output
    steps = [entry["step"] for entry in json.loads((folder / "log.json").read_text())["entries"]]
    assert steps == sorted(set(steps))
    assert steps[-1] == 60


@pytest.mark.parametrize("name", ["launch_fsdp_2N4G.sh", "launch_fsdp_2N4G_pbs.sh"])
def test_the_stage_and_the_solutions_have_the_same_job_script(name):
    assert (STAGE / name).read_text() == (SOLUTIONS / name).read_text()


# ---------------------------------------------------------------- bad input


def no_weights(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")


def no_tokenizer(folder):
    no_weights(folder)
    (folder / "model" / "model.safetensors").touch()


def part_missing(folder):
    no_weights(folder)
    (folder / "model" / "tokenizer.json").write_text("{}")
    (folder / "model" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'
    )


def no_safetensors(folder):
    no_tokenizer(folder)
    (folder / "model" / "tokenizer.json").write_text("{}")


def broken_lines(folder):
    (folder / "text.jsonl").write_text('{"text": "a"}\nnot json\n')


def short_text(folder):
    (folder / "text.jsonl").write_text('{"text": "a"}\n')


def twenty_documents(folder):
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": "x = 1\n" * 300}) + "\n" for _ in range(20)))


def log_is_a_file(folder):
    (folder / "file").touch()


MISTAKES = {
    "no such model": (
        None,
        ["--model", "gpt-17"],
        "there is no model gpt-17: name a folder, or one of: tiny-codellama",
    ),
    "codellama not fetched": (None, ["--model", "codellama"], "fetch it once with: ./workshop.sh fetch codellama"),
    "no weights": (
        no_weights,
        ["--model", "model"],
        "has no weights (model.safetensors or model.safetensors.index.json)",
    ),
    "no tokenizer": (no_tokenizer, ["--model", "model"], "has no tokenizer (tokenizer.json or tokenizer.model)"),
    "missing part": (
        part_missing,
        ["--model", "model"],
        "lacks a part of its weights (model-00002-of-00002.safetensors)",
    ),
    "no safetensors": (no_safetensors, ["--model", "model"], "the weights in model cannot be read"),
    "long sequences": (None, ["--sequence-length", "4096"], "takes sequences of up to 512 tokens"),
    "sequences of 1": (None, ["--sequence-length", "1"], "nothing after the first token to predict"),
    "no such data": (None, ["--data", "chess.jsonl"], "--data chess.jsonl: No such file or directory"),
    "broken lines": (broken_lines, ["--data", "text.jsonl"], 'no JSON object with a "text" in line 2 (1 of 2)'),
    "short text": (short_text, ["--data", "text.jsonl"], "too short for a block of 128 tokens to train on"),
    "too much memory": (
        None,
        ["--batch-size", "3000", "--sequence-length", "512"],
        "for parameters, gradients and optimizer state",
    ),
    "huge batch": (
        twenty_documents,
        ["--data", "text.jsonl", "--batch-size", "900"],
        "needs 1,800 sequences per step; text.jsonl has",
    ),
    "steps 0": (None, ["--steps", "0"], "--steps: '0' is not a whole number of at least 1"),
    "learning rate 0": (None, ["--learning-rate", "0"], "--learning-rate: '0' is not a number above 0"),
    "folder beneath a file": (
        log_is_a_file,
        ["--folder", "file/run"],
        "file is a file, so nothing can be written beneath it",
    ),
}


def refused(script, options, message, folder, data, monkeypatch, capfd):
    monkeypatch.setenv("WORKSHOP_DATA", str(data))
    said = refused_as_rank_0(script, options, folder, monkeypatch, capfd)
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("case", MISTAKES)
def test_a_script_reports_a_mistake_in_one_line(case, data, tmp_path, monkeypatch, capfd):
    prepare, options, message = MISTAKES[case]
    if prepare:
        prepare(tmp_path)
    refused(DDP, options, message, tmp_path, data, monkeypatch, capfd)


def test_an_out_of_memory_error_is_reported_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    explain_out_of_memory(SimpleNamespace(model="codellama", batch_size=8, sequence_length=2048))
    message = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB is free."
    sys.excepthook(torch.OutOfMemoryError, torch.OutOfMemoryError(message), None)
    seen = capsys.readouterr().err
    assert seen.startswith("out of memory when allocating 2.50 GiB more, with --batch-size 8 of 2,048 tokens.")
    assert seen.count("\n") == 1
    sys.excepthook(ValueError, ValueError("another"), None)
    assert "ValueError: another" in capsys.readouterr().err


@pytest.mark.full
def test_checkpoints_that_do_not_fit_are_reported_in_one_line(whole, data, tmp_path, monkeypatch, capfd):
    run = str(whole[0] / "run")
    refused(
        CHECKPOINT,
        ["--folder", run, "--steps", "12"],
        "already holds 12 steps of the 12 asked for",
        tmp_path,
        data,
        monkeypatch,
        capfd,
    )
    other = codellama.make_tiny(tmp_path / "other", layers=3, width=64, vocabulary=512)
    message = "has 12 steps, and its learning rate reaches its final value there"
    refused(CHECKPOINT, ["--folder", run, "--steps", "20"], message, tmp_path, data, monkeypatch, capfd)
    options = ["--folder", run, "--steps", "20", "--model", str(other)]
    refused(CHECKPOINT, options, "belongs to a model of a different size", tmp_path, data, monkeypatch, capfd)
    refused(
        EXPORT, [*options[:2], *options[4:]], f"a different size than {other}; name", tmp_path, data, monkeypatch, capfd
    )
    message = "--folder none: there is no complete checkpoint; train first"
    refused(EXPORT, ["--folder", "none"], message, tmp_path, data, monkeypatch, capfd)
    (tmp_path / "file").touch()
    message = "file is a file, so nothing can be written beneath it"
    refused(EXPORT, ["--folder", run, "--export", "file/model"], message, tmp_path, data, monkeypatch, capfd)


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("hsdp.py", ["--shards", "3"], "--shards 3: 2 processes do not divide into groups of 3"),
        ("hsdp.py", ["--steps", "no"], "--steps: 'no' is not a whole number of at least 1"),
        ("tensor_parallel.py", ["--steps", "2000"], "--steps 2,000: at most 1,000"),
    ],
)
def test_the_extra_programs_report_a_mistake_in_one_line(script, options, message, data, tmp_path, monkeypatch, capfd):
    refused(STAGE / script, options, message, tmp_path, data, monkeypatch, capfd)
