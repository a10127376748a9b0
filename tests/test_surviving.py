"""Per-step tolerance: replicas die, hang and join; and the measurements of what a kill costs and of the goodput."""

import json
import os
import random
import re
import signal
import sys
import time

import psutil
import pytest

import runs
import tolerate_nodes
from needs import SLURM, needs
from workshop.measure import goodput, surviving
from workshop.measure.step_log import Step, read_steps
from workshop.plan.failures import daly, young

TOLERATE = runs.ROOT / "slurm-multinode" / "surviving" / "tolerate.py"
STEPS = 60


class Training(runs.Running):
    """tolerate.py with three replicas."""

    def __init__(self, folder, *options, steps=STEPS):
        command = [sys.executable, TOLERATE, "--replicas", 3, "--steps", steps, "--log", "log.jsonl", *options]
        super().__init__(command, folder)
        self.log = folder / "log.jsonl"

    def steps(self) -> list[dict]:
        """Return the lines of its log."""
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_until(self, step: int) -> None:
        end = time.monotonic() + 240
        while len(self.steps()) < step:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.01)

    def replicas(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a training without kills."""
    training = Training(tmp_path_factory.mktemp("undisturbed"))
    assert training.wait(400) == 0, training.text()
    assert "is not valid" not in training.text()
    return [step["loss"] for step in training.steps()]


def assert_complete(training, undisturbed, kills):
    """Fail unless each step was done once, with the losses of an undisturbed training, and each kill cost at most one step."""
    assert training.wait(400) == 0, training.text()
    steps = training.steps()
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert [step["loss"] for step in steps[: len(undisturbed)]] == pytest.approx(undisturbed, abs=0.02)
    assert training.text().count("is not valid") <= kills
    assert training.text().count("was killed; replica") == kills
    assert re.search(r"accuracy 0\.\d+ on \d replicas", training.text())


def test_the_others_continue_when_a_replica_is_killed(tmp_path, undisturbed):
    assert undisturbed[0] > 2.2
    assert sum(undisturbed[-10:]) / 10 < 1.2  # it learns
    training = Training(tmp_path)
    training.wait_until(20)
    pids = [replica.pid for replica in training.replicas()]
    training.replicas()[0].kill()  # rank 0 or any other: the order in which they connect is random
    assert_complete(training, undisturbed, kills=1)
    counts = [step["replicas"] for step in training.steps()]
    assert 2 in counts
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.full
def test_two_of_three_replicas_die_at_once(tmp_path, undisturbed):
    training = Training(tmp_path)
    training.wait_until(20)
    for replica in training.replicas()[:2]:
        replica.kill()
    assert_complete(training, undisturbed, kills=2)
    assert 1 in [step["replicas"] for step in training.steps()]


def test_a_new_replica_joins_and_trains(tmp_path, undisturbed):
    training = Training(tmp_path, steps=800)
    training.wait_until(10)
    training.replicas()[2].kill()
    while 2 not in [step["replicas"] for step in training.steps()[10:]] or training.steps()[-1]["replicas"] != 3:
        assert training.process.poll() is None, training.text()
        time.sleep(0.05)
    joined = len(training.steps())
    training.wait_until(max(joined + 5, STEPS))
    assert all(step["replicas"] == 3 for step in training.steps()[joined:])
    assert [step["loss"] for step in training.steps()[:STEPS]] == pytest.approx(undisturbed, abs=0.02)
    training.end()


def test_a_replica_that_hangs_is_killed(tmp_path, undisturbed):
    training = Training(tmp_path, "--patience", 5)
    training.wait_until(20)
    training.replicas()[1].send_signal(signal.SIGSTOP)
    assert_complete(training, undisturbed, kills=1)


@pytest.mark.full
def test_a_second_launcher_kills_and_replaces_its_replica_that_hangs(tmp_path, undisturbed):
    """The launchers may be on different nodes: the lighthouse tells the second one which replica to kill."""
    # More steps than undisturbed: a slow machine may train 60 of them before the second launcher has imported torch.
    training = Training(tmp_path, "--replicas", 1, "--patience", 3, "--address", "lighthouse", steps=300)
    address = tmp_path / "lighthouse"
    while not address.exists():
        assert training.process.poll() is None, training.text()
        time.sleep(0.05)
    port = address.read_text().strip().rpartition(":")[2]
    other = runs.Running(
        [sys.executable, TOLERATE, "--replicas", 1, "--patience", 3, "--lighthouse", f"127.0.0.1:{port}"], tmp_path
    )
    while 2 not in [step["replicas"] for step in training.steps()]:
        assert training.process.poll() is None, training.text()
        time.sleep(0.01)
    (replica,) = psutil.Process(other.process.pid).children()
    replica.send_signal(signal.SIGSTOP)
    assert training.wait(400) == 0, training.text()
    assert other.wait(60) == 0, other.text()
    assert f"replica {replica.pid} was killed; replica " in other.text()
    assert training.text().count("is not valid") == 1
    assert [step["loss"] for step in training.steps()[:STEPS]] == pytest.approx(undisturbed, abs=0.02)


def test_the_committed_result_of_five_events_on_nodes():
    """Each event costs at most one step, and rounding changes the losses as much as if only the number of replicas differs."""
    result = json.loads((runs.ROOT / "results" / "tolerate-cluster-2-cores.json").read_text())
    assert [event["steps_repeated"] for event in result["events"]] == [1, 1, 1, 0, 1]
    assert result["state"] == "COMPLETED"
    difference = result["largest_difference_from_three_undisturbed_replicas"]
    assert difference["50"]["disturbed"] < 1e-5
    assert difference["800"]["disturbed"] < 1.1 * difference["800"]["two replicas"]


@pytest.mark.full
@needs(*SLURM)
def test_five_events_on_the_nodes_of_a_practice_cluster(tmp_path):
    result = tolerate_nodes.measure(tmp_path)
    assert [event["steps_repeated"] for event in result["events"]] == [1, 1, 1, 0, 1]
    assert result["state"] == "COMPLETED"


def test_the_replicas_end_with_their_launcher(tmp_path):
    training = Training(tmp_path, steps=100_000)
    training.wait_until(3)
    replicas = training.replicas()
    os.kill(training.process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(replicas, timeout=60)
    assert alive == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replicas", "0"), "'0' is not a whole number of at least 1"),
        (("--replicas", "13"), "--replicas 13: a global batch has 12 parts, so use at most 12 replicas"),
        (("--steps", "none"), "'none' is not a whole number of at least 1"),
        (("--log", "."), "cannot write .: Is a directory"),
        (("--address", "no/such/folder"), "cannot write no/such/folder.tmp: No such file or directory"),
        (("--lighthouse", "127.0.0.1:1"), "--lighthouse 127.0.0.1:1: Connection refused"),
        (("--lighthouse", "nonsense"), "--lighthouse nonsense: not HOST:PORT"),
    ],
)
def test_bad_options(options, message, tmp_path):
    done = runs.run([sys.executable, TOLERATE, *options], tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().endswith(message)
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.full
def test_20_kills_at_random_moments(tmp_path, undisturbed):
    """Each kill comes at a random time after the previous one, also while a new replica starts or copies the state."""
    numbers, training = random.Random(0), Training(tmp_path, steps=3000)
    done = 5
    for _ in range(20):
        training.wait_until(done)
        time.sleep(numbers.uniform(0, 6))
        while training.steps()[-1]["replicas"] == 1:  # one of them must live
            time.sleep(0.05)
        done = len(training.steps()) + 1
        numbers.choice(training.replicas()).kill()
    assert_complete(training, undisturbed, kills=20)


# ---------------------------------------------------------------- the measurements


@pytest.mark.full
def test_the_measurement_of_a_kill_counts_steps_and_seconds():
    loss = surviving.measure("restart from the epoch", 70)
    assert loss.killed >= 70
    assert loss.steps == loss.killed - surviving.EPOCH  # since the end of the first epoch
    assert loss.seconds > 0.5
    loss = surviving.measure("per-step tolerance", 20)
    assert loss.steps <= 1


def test_the_seconds_of_a_step_are_the_median_before_the_kill():
    steps = [Step(float(number), 1, number) for number in range(1, 8)] + [Step(90.0, 2, 3), Step(100.0, 2, 4)]
    assert surviving.seconds_per_step(steps, until=8) == 1


def test_a_line_that_is_being_written_is_not_read(tmp_path):
    (tmp_path / "steps.txt").write_text("2.5 7 2\n1.5 7 1\n3.5 7")
    assert read_steps(tmp_path / "steps.txt") == [Step(1.5, 7, 1), Step(2.5, 7, 2)]
    assert read_steps(tmp_path / "nothing.txt") == []


def test_the_report_of_the_goodput_compares_with_the_model(capsys):
    measured = goodput.Costs(training=10.0, steps=1000, checkpoint=0.05, restart=0.5)
    runs_of = {20: [{"goodput": 0.5}, {"goodput": 0.7}]}
    found = goodput.report(goodput.Console(width=130), measured, runs_of, between=4.0)
    row = found["every"][20]
    assert row["goodput"] == pytest.approx(0.6)
    assert row["predicted"] == pytest.approx(goodput.goodput(0.2, checkpoint=0.05, restart=0.5, between=4.0))
    assert row["error"] == pytest.approx(row["predicted"] / 0.6 - 1)
    assert found["best"] == {"young": young(0.05, 4) / 0.01, "daly": daly(0.05, 4) / 0.01}
    assert "error of the model: median" in capsys.readouterr().out


@pytest.mark.full
def test_the_goodput_is_measured(tmp_path):
    command = [sys.executable, "-P", "-m", "workshop.measure.goodput", "--every", 20, "--seeds", 1, "--epochs", 1]
    done = runs.run([*map(str, command), "--output", "out"], tmp_path, timeout=500, OMP_NUM_THREADS=1)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "goodput-2-cores.json").read_text())
    assert 0 < found["every"]["20"]["goodput"] < 1.1
    assert found["costs"]["steps"] == 179
    assert (tmp_path / "out" / "goodput-2-cores.png").stat().st_size > 10_000
