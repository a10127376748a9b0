"""``workshop doctor --nodes``: what counts as slow, one measurement on real sockets, and jobs on the practice cluster."""

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress

import psutil
import pytest

import doctor_nodes
import runs
from workshop.doctor.nodes import command, lead
from workshop.doctor.nodes.agent import Agent, connect
from workshop.doctor.nodes.compare import METRICS, busy, slow_nodes
from workshop.errors import UserError

GOOD = {"cores": 8, "gpus": 4, "product": 4e11, "share": 0.99, "memory": 4e10, "loopback": 5e9, "network": 2e9}
GOOD |= {"latency": 2e-5, "clock": 0.0, "clock_error": 1e-4}


def nodes(**changes) -> dict:
    """Return four nodes, of which node3 has changes."""
    listed = {name: [value] * 3 if name in (*METRICS, "share") else value for name, value in (GOOD | changes).items()}
    usual = {name: [value] * 3 if name in (*METRICS, "share") else value for name, value in GOOD.items()}
    return {f"node{number}": listed if number == 3 else usual for number in range(1, 5)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"product": 2e11, "share": 0.5},
            "50% of the median of the others (400 GFLOP/s); it got 50% of the time of its cores",
        ),
        ({"product": 3e11}, "the cores themselves are slow or fewer"),
        ({"memory": 3e10}, "copy in memory: 30 GB/s, 75% of"),
        ({"network": 1e8}, "best connection with a different node: 0.1 GB/s, 5% of"),
        ({"latency": 9e-4}, "shortest time of a message to a different node: 900 us, 45.0 times"),
        ({"cores": 1}, "it has 1 core, and the others have 8"),
        ({"gpus": 3}, "it has 3 GPUs, and the others have 4"),
        ({"clock": 3.2}, "its clock is 3.2 s ahead"),
        ({"clock": -3.2}, "its clock is 3.2 s behind"),
    ],
)
def test_a_node_that_differs_is_named_with_the_reason(changes, words):
    (slow,) = slow_nodes(nodes(**changes))
    assert slow.node == "node3"
    assert len(slow.reasons) == 1
    assert words in slow.reasons[0]


@pytest.mark.parametrize(
    "changes", [{}, {"product": 3.4e11}, {"product": 9e11}, {"network": 1.2e9}, {"clock": 3.2, "clock_error": 4.0}]
)
def test_small_differences_are_not_named(changes):
    assert slow_nodes(nodes(**changes)) == []


def test_one_node_and_missing_values_are_compared_with_nothing():
    assert slow_nodes({"node1": nodes()["node1"]}) == []
    assert slow_nodes({"node1": nodes()["node1"], "node2": {"cores": 8, "gpus": 4}}) == []


def test_other_work_on_the_machine_is_no_slow_node_and_is_reported():
    noisy = nodes()
    for number, node in enumerate(noisy.values()):
        node["product"] = [4e11 * factor for factor in (0.2, 0.3, 0.9 - 0.2 * number, 0.2)]
    assert slow_nodes(noisy) == []
    assert busy(noisy) is None
    assert busy(nodes() | {f"node{number}": {"share": [0.1, 0.3]} for number in range(4, 9)}) == pytest.approx(0.2)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_all_pairs_meet_once_and_a_member_is_in_one_pair_per_round(count):
    plan = lead.rounds(range(count))
    assert sorted(tuple(sorted(pair)) for pairs in plan for pair in pairs) == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    assert len(plan) <= max(1, count - 1 + count % 2)
    assert all(len({member for pair in pairs for member in pair}) == 2 * len(pairs) for pairs in plan)


def test_agents_are_measured_over_sockets_and_a_wrong_clock_and_an_absent_node_are_found(monkeypatch, tmp_path):
    monkeypatch.setattr(lead, "STARTING", 8)
    monkeypatch.setattr(lead, "MOST", lead.PASSES)
    names = ["a", "b", "c", "absent"]
    leader = lead.Lead(0, names)
    threads = [threading.Thread(target=leader.run, args=(tmp_path / "result.json",))]
    for name in names[:3]:
        agent = Agent(clock=lambda name=name: time.time() + (50 if name == "b" else 0))
        about = agent.describe() | {"node": name, "host": "127.0.0.1"}
        monkeypatch.setattr(agent, "describe", lambda about=about: about)
        connection = connect("127.0.0.1", leader.port)
        threads.append(threading.Thread(target=agent.work, args=(connection,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["missing"] == ["absent"]
    assert result["silent"] == {}
    assert result["unreachable"] == []
    assert len(result["pairs"]) == 6
    assert all(min(values["product"] + values["loopback"]) > 0 for values in result["nodes"].values())
    clocks = [reason for slow in slow_nodes(result["nodes"]) for reason in slow.reasons if "clock" in reason]
    assert clocks == ["its clock is 50.0 s ahead"]
    said = command.sentences(result, slow_nodes(result["nodes"]))
    assert said[0].startswith("absent did not start the program")
    assert "absent" in said[-1]


def work_while_connected(agent, connection):
    """Run an agent as its program does."""
    with suppress(ConnectionError):
        agent.work(connection)


def test_an_agent_that_dies_is_silent_and_the_others_go_on(monkeypatch, tmp_path):
    monkeypatch.setattr(lead, "PASSES", 1)
    monkeypatch.setattr(lead, "MOST", 1)
    leader = lead.Lead(0, ["a", "b"])
    for name in leader.names:
        agent = Agent()
        about = agent.describe() | {"node": name, "host": "127.0.0.1"}
        monkeypatch.setattr(agent, "describe", lambda about=about: about)
        connection = connect("127.0.0.1", leader.port)
        if name == "b":
            monkeypatch.setattr(agent, "speed", lambda connection=connection: connection.shutdown(2))
        threading.Thread(target=work_while_connected, args=(agent, connection)).start()
    leader.run(tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["silent"] == {"b": "speed"}
    assert "product" in result["nodes"]["a"]


def run(tmp_path, *words):
    done = runs.run([sys.executable, "-P", "-m", "workshop", "doctor", *words], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "two"], "--nodes two: write nodes, or nodes x GPUs per node, such as 2 or 2x4"),
        (["--nodes", "0"], "--nodes 0: write nodes"),
        (["--account", "a"], "--account needs --nodes"),
        (["--nodes", "2", "--class", "9"], "use one of them"),
        (["--nodes", "2", "--site", "lumi"], "needs to know which account pays"),
        (["--nodes", "2x2", "--site", "derecho", "--account", "a"], "has no Slurm"),
        (["--nodes", "2x9", "--site", "local"], "has 4 GPUs, not 9"),
        (["--nodes", "2x2", "--site", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, words, sentence):
    assert sentence in run(tmp_path, *words)


def test_a_failed_job_is_explained_by_its_first_error():
    log = "srun: error: Task launch for StepId=7.0 failed on node node4: Communication connection failure\nsrun: Killed"
    assert command.failure(log).startswith(
        "node4 did not start the program (Communication connection failure). Exclude it"
    )
    assert command.failure("x\nPermission error: no\ny") == "Permission error: no"
    assert command.failure("") == "it printed nothing"
    with pytest.raises(UserError):
        command.parse_shape("2x")


def test_this_machine_alone_is_measured_without_slurm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = runs.run(
        [sys.executable, "-P", "-m", "workshop.doctor.nodes.program", tmp_path / "r.json", 0, "here"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    (node,) = json.loads((tmp_path / "r.json").read_text())["nodes"].values()
    assert min(node["product"]) > 0
    assert "network" not in node


@pytest.fixture(scope="module")
def cluster():
    yield from runs.practice_cluster(3, "doctor")


def test_a_job_that_cannot_start_is_cancelled_and_so_is_one_that_is_stopped(cluster, tmp_path):
    done = doctor_nodes.doctor(cluster, tmp_path, "--nodes", "9x1")
    assert done.returncode == 2
    assert "would wait forever (Partition" in done.stderr
    cluster.run("sbatch", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300")
    done = doctor_nodes.doctor(cluster, tmp_path, "--nodes", "2x1", "--wait", "0.1")
    assert done.returncode == 2
    assert "did not start within 0.1 minutes (Resources), and was cancelled" in done.stderr
    words = [sys.executable, "-P", "-m", "workshop", "doctor", "--nodes", "2x1"]
    inside = cluster.inside(["env", f"PYTHONPATH={runs.ROOT}", *words], folder=tmp_path)
    process = subprocess.Popen(inside, env=doctor_nodes.practice.environment(), stderr=subprocess.PIPE, text=True)
    assert "waits in the queue (Resources)" in process.stderr.readline()
    (child,) = psutil.Process(process.pid).children()
    child.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert cluster.run("squeue", "--noheader", "--format=%j").split() == ["wrap"]
    cluster.run("scancel", "--name=wrap")


@pytest.mark.full
@pytest.mark.parametrize("slow", ["", "node2"])
def test_three_nodes_are_alike_until_one_has_a_slow_network(cluster, tmp_path, slow):
    with doctor_nodes.slow_network(cluster, slow) if slow else nullcontext():
        done = doctor_nodes.doctor(cluster, tmp_path, "--nodes", "3x2", "--output", "result.json")
    assert done.stderr == ""
    result = json.loads((tmp_path / "result.json").read_text())
    assert [each["node"] for each in result["slow"]] == [slow] * bool(slow), done.stdout
    assert done.returncode == bool(slow)
    assert (f"#SBATCH --exclude={slow}" if slow else "The 3 nodes are alike.") in done.stdout
