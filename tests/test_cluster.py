"""The practice cluster: a real Slurm whose nodes behave like separate machines, and which leaves nothing behind."""

import json
import multiprocessing
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import runs
from workshop.errors import UserError
from workshop.slurm import cluster as practice

COMMAND = [sys.executable, "-m", "workshop", "cluster"]


@pytest.fixture(scope="module")
def cluster():
    yield from runs.practice_cluster(4, "test")


@pytest.fixture
def name():
    """A name for a cluster; the cluster must leave nothing behind after the test."""
    if runs.NO_CLUSTER:
        pytest.skip(runs.NO_CLUSTER)
    name = f"other{os.getpid()}"
    yield name
    if up := practice.find_cluster(name):
        up.end()
    assert traces(name) == []


def traces(name: str) -> list[str]:
    """Return what exists of a cluster on this machine: processes, files, mounts, network devices."""
    folder = str(practice._folder(name))
    found = []
    for process in psutil.process_iter():
        try:
            if folder in " ".join(process.cmdline()) and process.pid != os.getpid():
                found.append(f"process {process.cmdline()}")
        except psutil.Error:
            continue
    found += [f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if folder in line]
    found += [
        f"device {device}" for device in os.listdir("/sys/class/net") if device.startswith(("to-node", "bridge0"))
    ]
    return found + ([f"folder {folder}"] if Path(folder).exists() else [])


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition was not met within {seconds} s"
        time.sleep(0.1)


def states(cluster) -> dict[str, str]:
    lines = cluster.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
    return dict(line.split() for line in lines)


def test_each_node_behaves_like_a_separate_machine(cluster):
    script = (
        'echo $(hostname) $(hostname -i) $CUDA_VISIBLE_DEVICES $(ls /proc | grep -c "^[0-9]") $(ls -A /dev/shm | wc -l)'
    )
    lines = cluster.run("srun", "--nodes=4", "--gpus-per-node=2", "bash", "-c", script).splitlines()
    hosts, addresses, gpus, processes, shared = zip(*(line.split() for line in sorted(lines)), strict=True)
    assert hosts == ("node1", "node2", "node3", "node4")
    assert len(set(addresses)) == 4
    assert set(gpus) == {"0,1"}
    assert all(int(count) < 20 for count in processes)
    assert set(shared) == {"0"}
    assert cluster.run("hostname").strip() == "login"
    assert cluster.run("hostname", node="node3").strip() == "node3"


def test_slurm_counts_gpus_and_cores(cluster):
    assert cluster.run("sinfo", "--noheader", "--format=%D %c %G").split() == ["4", "8", "gpu:4"]
    with pytest.raises(UserError, match="Requested node configuration is not available"):
        cluster.run("srun", "--gpus-per-node=5", "true")


def test_a_program_finds_the_other_nodes_by_name(cluster):
    code = "import socket, os; print(socket.gethostbyname('node2'), os.path.exists('/dev/nvidia0'))"
    assert cluster.run("srun", "--nodes=1", sys.executable, "-c", code).split()[0] == "10.77.0.3"


def test_a_killed_node_runs_nothing_until_it_is_healed(cluster):
    cluster.fault("kill", "node4")
    with pytest.raises(UserError, match="node4 has been killed; bring it back with"):
        cluster.run("hostname", node="node4")
    with pytest.raises(UserError, match="node4 has been killed"):
        cluster.fault("cut", "node4")
    cluster.fault("heal", "node4")
    wait_until(lambda: states(cluster)["node4"] == "idle")
    assert cluster.run("srun", "--nodelist=node4", "hostname").strip() == "node4"


def test_a_node_that_is_cut_off_keeps_running_until_it_is_healed(cluster):
    cluster.fault("cut", "node3")
    assert cluster.run("hostname", node="node3").strip() == "node3"
    ping = ["bash", "-c", "exec 3<>/dev/tcp/node3/6818"]
    done = subprocess.run(["timeout", "2", *cluster.inside(ping)], capture_output=True)
    assert done.returncode != 0
    cluster.fault("heal", "node3")
    wait_until(lambda: subprocess.run(["timeout", "2", *cluster.inside(ping)], capture_output=True).returncode == 0)
    assert cluster.run("srun", "--nodelist=node3", "hostname").strip() == "node3"


@pytest.mark.full  # takes half a minute for an idle node; exercise 3 tests a node at work
def test_slurm_notices_a_dead_node(cluster):
    cluster.fault("kill", "node4")
    wait_until(lambda: states(cluster)["node4"].startswith("down"), 60)
    cluster.fault("heal", "node4")
    wait_until(lambda: states(cluster)["node4"] == "idle")


@pytest.mark.parametrize("action", ["kill", "cut", "heal"])
def test_a_node_that_does_not_exist_is_refused(cluster, action):
    with pytest.raises(UserError, match="there is no node5; this cluster has node1 to node4"):
        cluster.fault(action, "node5")


def test_two_clusters_run_side_by_side_and_leave_nothing_behind(cluster, name):
    other = practice.up(2, gpus=1, cores=2, name=name)
    assert other.run("sinfo", "--noheader", "--format=%D %c %G").split() == ["2", "2", "gpu:1"]
    assert sorted(other.run("srun", "--nodes=2", "hostname").split()) == ["node1", "node2"]
    with pytest.raises(UserError, match="the cluster is up already; end it with"):
        practice.up(1, name=name)
    assert traces(name)
    children = set(psutil.Process().children())
    other.end()
    assert traces(name) == []
    assert len(children - set(psutil.Process().children())) == 1, "the process of the ended cluster is a zombie"
    assert cluster.run("srun", "--nodes=4", "hostname").split()


def test_a_crashed_cluster_leaves_no_process_and_can_be_started_again(name):
    first = practice.up(2, name=name)
    members = psutil.Process(first.first).children(recursive=True)
    assert len(members) > 6
    subprocess.run(
        first.inside(["sbatch", "--wrap", "sleep 100"], folder=Path("/")), env=practice.environment(), check=True
    )
    psutil.Process(first.first).kill()
    assert psutil.wait_procs(members, timeout=10)[1] == []
    wait_until(lambda: practice.find_cluster(name) is None)
    again = practice.up(1, name=name)
    assert again.run("squeue", "--noheader") == ""


def test_a_cluster_ends_with_the_program_that_owns_it(name):
    code = f"from workshop.slurm.cluster import up; up(2, name={name!r}, mine=True); print('up', flush=True); input()"
    keep = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], env=runs.environment(), **keep)
    assert process.stdout.readline() == "up\n"
    assert practice.find_cluster(name)
    process.kill()
    process.wait()
    wait_until(lambda: traces(name) == [], 5)


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL], ids=lambda blow: blow.name)
@pytest.mark.parametrize("delay", [0.25, 0.4])
def test_an_interrupted_start_of_a_cluster_leaves_nothing_running(name, blow, delay):
    process = subprocess.Popen(
        [*COMMAND, "up", "16", "--name", name], env=runs.environment(), stderr=subprocess.DEVNULL
    )
    wait_until(lambda: any("process" in trace and "node.py" in trace for trace in traces(name)), 10)
    time.sleep(delay - 0.2)
    process.send_signal(blow)
    process.wait(10)
    if blow == signal.SIGKILL:  # the folder stays; the next start removes it
        wait_until(lambda: not any(trace.startswith(("process", "mount")) for trace in traces(name)), 10)
        shutil.rmtree(practice._folder(name), ignore_errors=True)
    else:
        assert process.returncode in (0, 130)


@runs.needs_cluster
def test_an_ordinary_user_can_start_a_cluster(tmp_path, monkeypatch):
    """Start it in a process that became a different user; put the program for the nodes where every user can read it."""
    tmp_path.chmod(0o755)
    place = Path("/tmp") / f"workshop-test-{os.getpid()}"
    place.mkdir(mode=0o755)
    try:
        (place / "node.py").write_bytes(practice.NODE.read_bytes())
        (place / "node.py").chmod(0o644)
        monkeypatch.setattr(practice, "NODE", place / "node.py")
        monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=as_an_ordinary_user, args=(sender,))
        process.start()
        sender.close()
        result = receiver.recv() if receiver.poll(60) else "no answer"
        process.join(10)
    finally:
        shutil.rmtree(place)
    user = pwd.getpwnam("daemon").pw_uid
    assert result == [f"{user} node1", f"{user} node2", "back", "gone"]


def as_an_ordinary_user(sender):
    user = pwd.getpwnam("daemon")  # not the user "nobody": Slurm 26.05 refuses to run as nobody
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    os.chdir("/")
    try:
        up = practice.up(2, name="unprivileged")
        said = sorted(up.run("srun", "--nodes=2", "bash", "-c", "echo $(id -u) $(hostname)").splitlines())
        up.fault("kill", "node2")
        up.fault("heal", "node2")
        said.append("back" if up.run("hostname", node="node2").strip() == "node2" else "lost")
        up.end()
        said.append("gone" if not up.folder.exists() and practice.find_cluster("unprivileged") is None else "there")
        sender.send(said)
    except BaseException as error:
        sender.send(repr(error))
    finally:
        if left := practice.find_cluster("unprivileged"):
            left.end()


def test_the_error_says_why_slurm_did_not_start(name, tmp_path, monkeypatch):
    broken = tmp_path / "node.py"
    broken.write_text(practice.NODE.read_text().replace("SelectType=select/cons_tres", "SelectType=select/nothing"))
    monkeypatch.setattr(practice, "NODE", broken)
    with pytest.raises(
        UserError, match=r"^the cluster did not start: slurmctld did not start: (?=.*select/nothing).*fatal: "
    ):
        practice.up(1, name=name)
    assert not traces(name)


def test_the_commands_start_show_and_end_a_cluster(name):
    def workshop(*arguments):
        return subprocess.run(
            [*COMMAND, *arguments, "--name", name], env=runs.environment(), capture_output=True, text=True
        )

    done = workshop("down")
    assert done.returncode == 2
    assert done.stderr.startswith("workshop: no practice cluster is up; start one with: ")
    done = workshop("up", "2")
    assert done.returncode == 0, done.stderr
    assert "2 nodes with 8 cores and 4 GPUs each are up" in done.stdout
    done = workshop("status")
    assert "node2    idle" in done.stdout
    assert "JOBID" in done.stdout
    run = [*COMMAND, "exec", "--name", name]
    environment = runs.environment(SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="1", PMI_RANK="0")
    done = subprocess.run([*run, "env"], env=environment, capture_output=True, text=True)
    assert not [line for line in done.stdout.splitlines() if line.startswith(("SLURM_JOB", "SLURM_CPUS", "PMI_"))]
    assert "SLURM_CONF=" in done.stdout
    assert subprocess.run([*run, "bash", "-c", "exit 7"], env=environment).returncode == 7
    done = subprocess.run([*run, "--node", "node2", "hostname"], env=environment, capture_output=True, text=True)
    assert done.stdout == "node2\n"
    done = workshop("kill", "node2")
    assert done.stdout.startswith("node2 is dead.")
    done = workshop("heal", "node2")
    assert done.stdout.startswith("node2 is back")
    assert workshop("down").stdout == "The cluster and all its processes have ended.\n"


def test_missing_programs_are_named_with_the_command_that_installs_them(monkeypatch, tmp_path):
    monkeypatch.setattr(practice, "SEARCH_PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"needs programs .*: sudo apt-get install .*slurmctld slurmd slurm-client munge"
    ):
        practice.up(2, name="missing")
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="needs Linux"):
        practice.up(2, name="missing")


@pytest.mark.parametrize(("user", "words"), [(0, "start it with --privileged"), (1000, "only root create namespaces")])
def test_a_kernel_that_forbids_namespaces_is_reported_with_the_remedy(monkeypatch, tmp_path, user, words):
    for program in practice.PROGRAMS:
        (tmp_path / program).write_text(
            "#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n"
        )
        (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(practice, "SEARCH_PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with pytest.raises(UserError, match=words):
        practice.require_machine()


@runs.needs_cluster
def test_a_path_that_is_too_long_for_sockets_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(practice.tempfile, "gettempdir", lambda: str(tmp_path / ("long" * 10)))
    with pytest.raises(UserError, match="too long for sockets; set TMPDIR"):
        practice.up(1, name="long")


@runs.needs_cluster
def test_a_folder_of_a_different_user_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "t").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t" / f"workshop-{os.geteuid()}").symlink_to(tmp_path)
    monkeypatch.setattr(practice.tempfile, "gettempdir", lambda: "t")
    with pytest.raises(UserError, match="belongs to a different user"):
        practice.up(1, name="stranger")


def test_a_stale_record_is_not_taken_for_a_cluster(monkeypatch, tmp_path):
    monkeypatch.setattr(practice.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"workshop-{os.geteuid()}" / "old"
    folder.mkdir(parents=True)
    known = {"first": os.getpid(), "created": 1.0, "nodes": 1, "gpus": 1, "cores": 1}
    (folder / "cluster.json").write_text(json.dumps(known))
    assert practice.find_cluster("old") is None
    (folder / "cluster.json").write_text("{")
    assert practice.find_cluster("old") is None
