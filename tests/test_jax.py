"""The bonus in JAX: its processes find each other, have the losses of PyTorch, and end together."""

import importlib.util
import json
import re
import runpy
import shutil
import signal
import socket
import sys
import time

import pytest

import runs
from test_training import GOLDEN
from workshop.course.trial import Trial
from workshop.run.processes import family
from workshop.training.logs import read_log

STAGE = runs.ROOT / "bonus_jax"
RUNNER, PSUM, TRAIN = STAGE / "run_jax.sh", STAGE / "psum.py", STAGE / "train_digits.py"
# Over 33 steps in float32, the losses differ from those of PyTorch by 1.4e-4, and between numbers of JAX processes by 2e-5.
DISTANCE = 5e-4

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="needs JAX, an extra")


def train(nproc, folder, *options, timeout=600, **environment) -> list[float]:
    """Train with one process without a launcher, or with several, and return the losses."""
    command = [sys.executable, TRAIN] if nproc == 1 else [RUNNER, TRAIN.name]
    done = runs.run([*command, *options, "--output", "log.jsonl"], folder, timeout, NPROC=nproc, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"training on cpu: {nproc} processes" in done.stdout
    return runs.losses(read_log(folder / "log.jsonl"))


@pytest.mark.full
def test_two_processes_compute_their_sum(tmp_path):
    done = runs.run([RUNNER, "psum.py"], tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    said = re.findall(
        r"process .*? the sum is \d", done.stdout
    )  # the lines of the processes may be printed without a line break between them
    assert sorted(said) == ["process 0 of 2 had [1], the sum is 3", "process 1 of 2 had [2], the sum is 3"]


@pytest.mark.full
def test_two_processes_have_the_losses_of_pytorch(tmp_path):
    losses = train(2, tmp_path, "--epochs", 1)
    assert losses == pytest.approx(json.loads(GOLDEN.read_text())[: 1437 // 128], abs=DISTANCE)
    (epoch,) = read_log(tmp_path / "log.jsonl")
    assert epoch["accuracy"] == pytest.approx(0.85, abs=0.02)


@pytest.mark.full
def test_losses_are_the_same_for_any_number_of_processes_and_devices(single, tmp_path):
    one = train(1, tmp_path, "--epochs", 3, "--batch-size", 128)
    assert one == pytest.approx(runs.losses(single.epochs), abs=DISTANCE)
    accuracy = [epoch["accuracy"] for epoch in read_log(tmp_path / "log.jsonl")]
    assert accuracy == pytest.approx([epoch["accuracy"] for epoch in single.epochs], abs=0.003)  # one of 360 samples
    for nproc in (2, 4):
        assert train(nproc, tmp_path, "--epochs", 3, "--batch-size", 128 // nproc) == pytest.approx(one, abs=1e-4)
    devices = {"JAX_NUM_CPU_DEVICES": 4}
    assert train(1, tmp_path, "--epochs", 1, "--batch-size", 128, **devices) == pytest.approx(one[:11], abs=1e-4)


@pytest.mark.full
def test_in_float64_the_losses_of_jax_and_pytorch_coincide(tmp_path):
    common = ["--epochs", 1, "--batch-size"]
    torchs = runs.losses(runs.train("single", 1, tmp_path, *common, 16, timeout=600, TEST_PATCH="float64"))
    ours = train(2, tmp_path, *common, 8, TEST_PATCH="float64", JAX_ENABLE_X64=1)
    assert len(ours) == 89
    assert ours[-1] < 0.5 * ours[0], "the training does not learn"
    assert ours == pytest.approx(torchs, abs=1e-10)


@pytest.mark.full
def test_the_compiler_adds_the_all_reduce(tmp_path):
    """The step itself never calls an all-reduce; on one device, none is compiled."""
    program = tmp_path / "step.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(STAGE)!r}); import train_digits\n"
        "step = train_digits.train_step\n"
        "def show(*arguments):\n"
        "    print(step.lower(*arguments).compile().as_text().count(' all-reduce'), 'all-reduces'); sys.exit()\n"
        "train_digits.train_step = show\ntrain_digits.main()\n"
    )
    counts = []
    for devices in (1, 2):
        done = runs.run([sys.executable, program], tmp_path, timeout=600, JAX_NUM_CPU_DEVICES=devices)
        counts.append(int(re.search(r"(\d+) all-reduces", done.stdout)[1]))
    assert counts[0] == 0
    assert counts[1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "0"], "'0' is not a whole number of at least 1"),
        (["--batch-size", "2000"], "--batch-size 2,000 on 1 process needs 2,000 samples per step; digits has 1,437"),
        (["--dataset", "cifar10"], "its images do not fit this program's model"),
        (["--output", "losses.txt"], "--output losses.txt: its name has to end in .jsonl"),
        (["--output", "file/log.jsonl"], "file is a file, so nothing can be written beneath it"),
        (None, "JAX is not installed here; run pip install -e '.[jax]'"),
    ],
)
def test_mistakes_are_reported_in_one_line(options, message, tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(STAGE)  # Python puts the folder of a script first on the path
    monkeypatch.delitem(sys.modules, "meeting", raising=False)
    if options is None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", [str(TRAIN), *(options or [])])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(TRAIN), run_name="__main__")
    seen = capfd.readouterr()
    assert (end.value.code, seen.out, seen.err.count("\n")) == (2, "", 1), seen.err
    assert message in seen.err
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["train_digits.py", "--epochs", "none"], "'none' is not a whole number"), ([], "which program?")],
)
def test_the_runner_reports_mistakes_before_it_launches(arguments, message, tmp_path):
    done = runs.run([RUNNER, *arguments], tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr


@pytest.mark.parametrize("case", ["alone", "taken"])
def test_processes_that_cannot_meet_are_reported_in_one_line(case, tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        if case == "alone":
            server.close()
        place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MEETING_SECONDS": 2}
        done = runs.run([sys.executable, PSUM], tmp_path, **place, **meeting)
    status, message = {
        "alone": (1, "not all processes have connected within 2 s"),
        "taken": (2, f"port {port} is in use"),
    }[case]
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done.stderr
    assert message in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1, "launcher"])
def test_all_processes_end_when_one_is_killed(victim, tmp_path):
    running = runs.Running([RUNNER, TRAIN.name, "--epochs", 1000, "--output", "log.jsonl"], tmp_path)
    try:
        running.wait_for("epoch 1/1000", timeout=600)
        everybody = family(running.process.pid)
        (running.process if victim == "launcher" else running.workers()[victim]).send_signal(signal.SIGKILL)
        start = time.monotonic()
        assert running.wait(60) != 0
        while [process for process in everybody if process.is_running()]:
            assert time.monotonic() - start < 60, "a process is still running"
            time.sleep(0.1)
    finally:
        running.end()


@pytest.mark.full
def test_all_processes_end_when_one_fails_and_its_error_is_shown(tmp_path):
    program = tmp_path / "fail.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(STAGE)!r}); import train_digits, jax\n"
        "evaluate = train_digits.evaluate\n"
        "def failing(*arguments):\n"
        "    if jax.process_index() == 1: raise ZeroDivisionError('on purpose')\n"
        "    return evaluate(*arguments)\n"
        "train_digits.evaluate = failing\ntrain_digits.main()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += ["--nproc-per-node=2", program, "--output", "log.jsonl"]
    done = runs.run(command, tmp_path, timeout=600, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    assert done.returncode == 1
    assert "ZeroDivisionError: on purpose" in done.stderr
    assert "Check failure stack trace" not in done.stderr, "at its end JAX waited for the other process"


@pytest.fixture(scope="module")
def cluster():
    yield from runs.practice_cluster(2, "jax")


@pytest.mark.full
def test_a_job_trains_on_two_nodes(cluster, tmp_path):
    trial = Trial(STAGE / "launch_jax_2N4G.sh", tmp_path, cluster, None)
    for path in STAGE.glob("*.py"):
        shutil.copy(path, trial.folder)
    job = trial.submit([], ["--epochs", "1", "--batch-size", "32"])
    trial.follow(job, stall=200)
    assert job.state == "COMPLETED", job.output
    assert "training on cpu: 4 processes, 4 devices" in job.output
    losses = runs.losses(read_log(trial.folder / f"runs/launch_jax_2N4G-{job.number}.jsonl"))
    assert losses == pytest.approx(json.loads(GOLDEN.read_text())[: 1437 // 128], abs=DISTANCE)


@pytest.mark.full
def test_a_killed_process_ends_the_job(cluster, tmp_path):
    trial = Trial(STAGE / "launch_jax_2N4G.sh", tmp_path, cluster, None)
    for path in STAGE.glob("*.py"):
        shutil.copy(path, trial.folder)
    text = (trial.folder / TRAIN.name).read_text()
    dies = "        accuracy = evaluate(params, test_loader)\n"
    assert dies in text
    (trial.folder / TRAIN.name).write_text(text.replace(dies, "        if rank == 3: os.kill(os.getpid(), 9)\n" + dies))
    job = trial.submit([], ["--batch-size", "32"])
    trial.follow(job, stall=200)
    assert job.state == "FAILED", job.output
    assert "Killed" in job.output
