"""Training at scale, the report on the network, and scaling studies."""

import csv
import json
import math
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

import runs
from workshop.errors import UserError
from workshop.measure import bench, scaling
from workshop.run.environment import loopback, torchrun
from workshop.run.processes import family

SCRIPT = runs.ROOT / "slurm-multinode" / "train_at_scale.py"
RUNNER = SCRIPT.with_name("run_train_at_scale.sh")


@pytest.fixture(scope="module")
def float32(tmp_path_factory) -> dict:
    """Changes to the environment: train in float32 even on CPUs with bfloat16, and measure the exchange in 1 round."""
    folder = tmp_path_factory.mktemp("float32")
    (folder / "sitecustomize.py").write_text(
        "from workshop import tensors\nfrom workshop.measure import exchange\n"
        "exchange.ROUNDS = 1\n"
        "tensors.bf16_is_fast = lambda device: False\n"
    )
    return {"PYTHONPATH": f"{folder}:{runs.ROOT}"}


def train(nproc, folder, *options, **environment) -> tuple[dict, str]:
    """Run the script; return its figures and its output."""
    command = torchrun(nproc, SCRIPT, "--image-size", 64, "--output", "figures/run.json", *options)
    done = runs.run(command, folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "figures" / "run.json").read_text()), done.stdout


@pytest.mark.full
def test_resnet_trains_on_two_processes(tmp_path):
    figures, output = train(2, tmp_path, "--model", "resnet50", "--steps", 10, "--batch-size", 4)
    assert figures["losses"][0] == pytest.approx(math.log(1000), abs=1)  # a thousand classes before any training
    assert figures["losses"][-1] < figures["losses"][0] - 1
    assert (figures["processes"], figures["nodes"], figures["device"]) == (2, 1, "cpu")
    assert figures["peak_memory"] > 100e6  # 25.6 million parameters in float32
    assert 0 < figures["efficiency"] < 1.5
    assert figures["communication"] == pytest.approx(1 - figures["efficiency"])
    # Gloo in torch 2.9 prints how it connected, and the lines of the ranks mix.
    lines = [line for line in output.splitlines() if line and "[Gloo]" not in line and "peer ranks" not in line]
    assert lines[0].startswith("training resnet50 on cpu: ")
    assert lines[0].endswith("channels_last, compiled: False, 2 processes, 0 GPUs here")
    assert "sockets, interface" in lines[1]
    assert sum(line.startswith("step ") for line in lines) == 10
    assert "with the exchange of gradients" in lines[-1]


@pytest.mark.full
def test_vit_has_the_same_losses_on_one_process_and_on_two(float32, tmp_path):
    """Without BatchNorm the losses depend only on the global batches."""
    common = ["--model", "vit_b_16", "--steps", 5]
    one, output = train(1, tmp_path, *common, "--batch-size", 4, **float32)
    two, _ = train(2, tmp_path, *common, "--batch-size", 1, "--accumulate", 2, **float32)
    assert one["losses"][0] == pytest.approx(math.log(1000), abs=0.01)
    assert one["losses"][-1] < one["losses"][0] - 0.2
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert not two["bf16"]
    assert "efficiency" not in one
    assert "exchange" not in output


@pytest.mark.full
@pytest.mark.parametrize("options", [[], ["--batch-size", 1, "--accumulate", 2]], ids=["whole", "accumulated"])
def test_fsdp_has_the_losses_of_ddp(options, float32, tmp_path):
    common = ["--model", "vit_b_16", "--steps", 4, "--batch-size", 2]
    ddp, _ = train(2, tmp_path, *common, **float32)
    fsdp, output = train(2, tmp_path, *common, "--strategy", "fsdp", *options, **float32)
    assert fsdp["losses"] == pytest.approx(ddp["losses"], abs=1e-4)
    assert "exchange" not in output


@pytest.mark.full
def test_resnet_trains_with_fsdp(tmp_path):
    figures, output = train(2, tmp_path, "--strategy", "fsdp", "--steps", 4, "--batch-size", 2)
    assert figures["strategy"] == "fsdp"
    assert figures["losses"][-1] < figures["losses"][0]
    assert "images/s" in output


def image_folder(folder, classes=2, images=4):
    for number in range(classes):
        place = folder / "images" / "train" / f"class{number}"
        place.mkdir(parents=True)
        for index in range(images):
            Image.new("RGB", (80, 70), (200 * number, 20 * index, 90)).save(place / f"{index}.png")


@pytest.mark.full
def test_training_reads_a_folder_of_images(tmp_path):
    image_folder(tmp_path)
    figures, _ = train(1, tmp_path, "--data", "images", "--batch-size", 4, "--steps", 3)  # 2 steps per epoch
    assert len(figures["losses"]) == 3
    assert all(math.isfinite(loss) for loss in figures["losses"])
    assert figures["data"] == "images"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "alexnet"], "invalid choice: 'alexnet'"),
        (["--image-size", "50"], "argument --image-size: invalid choice"),
        (["--steps", "0"], "'0' is not a whole number of at least 1"),
        (["--data", "nowhere"], "--data nowhere needs images in train/CLASS/ (No such file or directory)"),
        (["--data", "."], "--data . needs images in train/CLASS/"),
        (["--output", "images/train/class0/0.png/x.json"], "x.json: File exists"),
        (["--data", "images", "--batch-size", "64"], "--data images has 8 images to train on, but one step needs 128"),
    ],
)
def test_mistakes_are_reported_in_one_line(options, message, tmp_path, monkeypatch, capfd):
    image_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    seen = capfd.readouterr()
    assert (end.value.code, seen.out, seen.err.count("\n")) == (2, "", 1), seen.err
    assert message in seen.err
    assert not (tmp_path / "runs").exists()


def test_the_runner_reports_mistakes_before_it_launches(tmp_path):
    done = runs.run([RUNNER, "--data", "nowhere"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "--data nowhere needs images" in done.stderr


# Shortened logs of NCCL 2.30 and RCCL with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET.
LOGS = {
    "InfiniBand": """
node1:71:71 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.1.0.1<0>
node1:71:71 [0] NCCL INFO Using network IB
node1:71:80 [0] NCCL INFO Channel 00/0 : 3[3] -> 0[0] [receive] via NET/IB/0/GDRDMA
node1:71:80 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
""",
    "Slingshot": """
node1:71:71 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.14.0
node1:71:71 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)
node1:71:71 [0] NCCL INFO Using network AWS Libfabric
node1:71:80 [0] NCCL INFO Channel 00/0 : 7[7] -> 0[0] [receive] via NET/AWS Libfabric/0
node1:71:80 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC
""",
    "libfabric over TCP": """
node1:71:71 [0] NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm (found 1 nics)
node1:71:71 [0] NCCL INFO Using network AWS Libfabric
node1:71:80 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/AWS Libfabric/0
""",
    "sockets": """
node1:71:71 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
node1:71:71 [0] NCCL INFO NET/IB : No device found.
node1:71:71 [0] NCCL INFO NET/Socket : Using [0]eth0:10.1.0.1<0>
node1:71:71 [0] NCCL INFO Using network Socket
node1:71:80 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
""",
    "host memory": """
node1:71:71 [0] NCCL INFO Using network Socket
node1:71:80 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
""",
}


def test_the_network_is_read_from_the_log_of_nccl():
    from workshop.measure.collectives import Network, nccl_network

    networks = {name: nccl_network(text) for name, text in LOGS.items()}
    assert networks["InfiniBand"] == Network("IB", "", frozenset({"NET/IB", "P2P/CUMEM"}))
    assert networks["Slingshot"] == Network("AWS Libfabric", "cxi", frozenset({"NET/AWS Libfabric", "P2P/IPC"}))
    assert networks["sockets"] == Network("Socket", "", frozenset({"NET/Socket"}))
    assert networks["host memory"].paths == {"SHM/direct"}
    assert [name for name, network in networks.items() if network.is_sockets] == [
        "libfabric over TCP",
        "sockets",
        "host memory",
    ]
    assert nccl_network("") == Network("", "", frozenset())


@pytest.mark.parametrize(
    ("name", "nodes", "expected"),
    [
        ("InfiniBand", 2, "NCCL between 2 nodes: IB; within a node P2P/CUMEM. This is the fast network"),
        ("Slingshot", 2, "AWS Libfabric with provider cxi; within a node P2P/IPC. This is the fast network"),
        ("libfabric over TCP", 2, "FELL BACK TO SOCKETS"),
        ("sockets", 4, "NCCL between 4 nodes: Socket. It FELL BACK TO SOCKETS"),
        ("host memory", 1, "NCCL on one node: within a node SHM/direct (through CPU memory"),
    ],
)
def test_the_report_says_whether_nccl_uses_the_fast_network(name, nodes, expected):
    from workshop.measure.collectives import nccl_network, network_sentence

    assert expected in network_sentence([nccl_network(LOGS[name])] * nodes, nodes)


def test_a_log_without_a_network_is_reported():
    from workshop.measure.collectives import nccl_network, network_sentence

    assert "NCCL did not report" in network_sentence([nccl_network("")], 2)


def test_the_log_of_nccl_goes_to_a_file_unless_the_user_wants_it(monkeypatch, tmp_path):
    from workshop.measure.collectives import enable_network_report

    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    enable_network_report()
    assert os.environ["NCCL_DEBUG_FILE"] == ""  # the user wants the lines on the terminal
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    enable_network_report()
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET")
    assert Path(os.environ["NCCL_DEBUG_FILE"]).is_file()


def test_the_network_interface_of_gloo_is_named(monkeypatch):
    from workshop.measure.collectives import gloo_interface

    assert gloo_interface({"GLOO_SOCKET_IFNAME": "hsn0"}) == "hsn0"
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    assert gloo_interface({}) == loopback()


@pytest.mark.full
def test_collectives_are_measured(tmp_path):
    program = tmp_path / "short.py"
    program.write_text(
        "from workshop.measure import collectives\ncollectives.SIZES = [1024, 2**20]\ncollectives.main()\n"
    )
    environment = {"PYTHONPATH": runs.ROOT, "GLOO_SOCKET_IFNAME": "lo"}
    done = runs.run(torchrun(2, program, "--output", "found.json"), tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert "gloo on one node: sockets, interface lo" in done.stdout
    assert done.stdout.count(" 1 KiB ") == done.stdout.count(" 1 MiB ") == 4
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(row["collective"], row["bytes"]) for row in found["rows"]] == [
        (name, size) for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast") for size in (1024, 2**20)
    ]
    for row, factor in zip(found["rows"], (1, 1, 0.5, 0.5, 0.5, 0.5, 1, 1), strict=True):
        assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["bus_bandwidth"] == pytest.approx(factor * row["algorithm_bandwidth"])
    done = runs.run(torchrun(1, program), tmp_path, **environment)
    assert "this program needs at least 2 processes" in done.stderr


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An empty current folder, and the environment of a run."""
    for name, value in runs.environment(COLUMNS=80).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.full
def test_bench_measures_an_exercise(here, capfd):
    assert bench.run_bench(str(runs.TORCHRUN), ["--epochs", "1"], "1,2", "both", 1, "found") == 0
    found = json.loads((here / "found" / "bench.json").read_text())
    assert list(found["series"]) == ["strong", "weak"]
    assert [row["batch_size"] for row in found["series"]["strong"]] == [128, 64]
    assert [row["batch_size"] for row in found["series"]["weak"]] == [128, 128]
    for one, two in found["series"].values():
        assert one["efficiency"] == 1
        assert one["samples_per_second"] > 0
        assert two["efficiency"] == pytest.approx(two["samples_per_second"] / (2 * one["samples_per_second"]))
        assert two["speedup"] == pytest.approx(2 * two["efficiency"])
    assert "exercise2_multigpu_torchrun.py --processes 1,2 --mode both" in found["command"]
    assert "strong, the global batch stays: 1: " in found["alt_text"]
    with open(here / "found" / "bench.csv") as file:
        assert [(row["scaling"], row["processes"]) for row in csv.DictReader(file)] == [
            ("strong", "1"),
            ("strong", "2"),
            ("weak", "1"),
            ("weak", "2"),
        ]
    with Image.open(here / "found" / "bench.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 20, "the picture is empty"
    assert {path.name for path in (here / "found").iterdir()} == {"bench.csv", "bench.json", "bench.png"}
    header = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("scaling"))
    assert "efficiency" in header


def test_bench_measures_the_collectives(here, monkeypatch, capfd):
    program = "import os, sys; print(sys.argv[1:], os.environ['OMP_NUM_THREADS']); sys.exit(3)"
    monkeypatch.setattr(bench, "torchrun", lambda count: [sys.executable, "-c", program, str(count)])
    monkeypatch.setattr(bench, "gpus", lambda: 4)
    assert bench.run_collectives("", "found") == 3
    expected = ["4", "-m", "workshop.measure.collectives", f"--output={here / 'found' / 'collectives.json'}"]
    assert capfd.readouterr().out == f"{expected} 1\n"
    with pytest.raises(UserError, match="--collectives needs at least two processes"):
        bench.run_collectives("1")


# A stand-in for a training: N processes have 80 % of N times the throughput of one. It records the order of the runs.
STAND_IN = """
import json, os, sys
world_size = int(os.environ["WORLD_SIZE"])
options = dict(option.split("=") for option in sys.argv[1:])
with open("order.txt", "a") as file:
    print(world_size, options["--batch-size"], os.environ["OMP_NUM_THREADS"], file=file)
rate = 100.0 if world_size == 1 else 80.0 * world_size
figures = {"processes": world_size, "device": "cpu", "samples_per_second": rate}
json.dump(figures, open(options["--output"], "w"))  # "--output"
"""


@pytest.fixture
def stand_in(here, monkeypatch):
    """A script that ends at once and is started without torchrun."""
    (here / "fast.py").write_text(STAND_IN)
    monkeypatch.setattr(bench, "torchrun", lambda count: ["env", f"WORLD_SIZE={count}", sys.executable])
    monkeypatch.setattr(bench, "cores", lambda: 8)
    return here


def test_bench_runs_all_counts_in_each_round_with_the_same_threads(stand_in, monkeypatch, capfd):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    bench.run_bench("fast.py", ["--batch-size", "64"], "4,1,2", "both", 2, "found")
    order = (stand_in / "order.txt").read_text().splitlines()
    assert order == ["1 64 2", "2 32 2", "4 16 2", "2 64 2", "4 64 2"] * 2
    rows = json.loads((stand_in / "found" / "bench.json").read_text())["series"]["weak"]
    assert [(row["processes"], row["efficiency"]) for row in rows] == [(1, 1), (2, 0.8), (4, 0.8)]
    assert "This measures only one node." in capfd.readouterr().out


def test_bench_draws_the_logs_of_jobs(here, capfd):
    for processes, rate in ((4, 400.0), (8, 600.0), (16, 1200.0)):
        log = {
            "model": "resnet50",
            "device": "cuda",
            "batch_size": 64,
            "processes": processes,
            "samples_per_second": rate,
        }
        (here / f"scale-{processes}.json").write_text(json.dumps(log))
    files = [f"scale-{processes}.json" for processes in (16, 4, 8)]
    assert scaling.run_logs(files, "found") == 0
    rows = json.loads((here / "found" / "bench.json").read_text())["series"]["weak"]
    assert [(row["processes"], row["efficiency"]) for row in rows] == [(4, 1), (8, 0.75), (16, 0.75)]
    assert "The rounds differ" not in capfd.readouterr().out
    (here / "scale-4.json").write_text(json.dumps({**log, "processes": 4, "samples_per_second": 300.0}))
    (here / "again.json").write_text(json.dumps({**log, "processes": 4, "samples_per_second": 600.0}))
    (here / "scale-8b.json").write_text(json.dumps({**log, "processes": 8, "samples_per_second": 600.0}))
    scaling.run_logs([*files, "again.json", "scale-8b.json"], "noisy")
    assert "The rounds differ" in capfd.readouterr().out
    (here / "scale-8.json").write_text(json.dumps({**log, "model": "vit_b_16"}))
    with pytest.raises(UserError, match="model is resnet50 and vit_b_16"):
        scaling.run_logs(files, "found")


BAD = {
    "no script": ([None, []], "name a training script"),
    "unknown script": (["nowhere.py", []], "nowhere.py: no such file"),
    "no processes": (["fast.py", [], "0,1"], "give whole numbers of at least 1"),
    "no numbers": (["fast.py", [], "two"], "give whole numbers of at least 1"),
    "one number": (["fast.py", [], "2"], "a study needs at least two numbers of processes"),
    "does not divide": (["fast.py", ["--batch-size=10"], "1,4"], "divides a global batch of 10 among 4 processes"),
    "batch size": (["fast.py", ["--batch-size", "x"], "1,2"], "'x' is not a whole number of at least 1"),
    "takes no --output": (["plain.py", [], "1,2"], "plain.py takes neither --checkpoint nor --output"),
    "fails": (["fails.py", [], "1,2"], "fails.py failed with 1 processes: ValueError: nothing works"),
    "not distributed": (["alone.py", [], "1,2"], "alone.py trained with 1 processes, although torchrun started 2"),
    "leaves nothing": (["silent.py", [], "1,2"], "run.json: No such file or directory"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_mistakes_with_bench_are_reported_in_one_sentence(mistake, stand_in):
    (stand_in / "plain.py").touch()
    (stand_in / "silent.py").write_text("# takes '--output' and '--batch-size'\n".replace("'", '"'))
    (stand_in / "fails.py").write_text(STAND_IN + "raise ValueError('nothing works')\n")
    (stand_in / "alone.py").write_text(STAND_IN.replace('"processes": world_size', '"processes": 1'))
    arguments, message = BAD[mistake]
    with pytest.raises(UserError, match=message):
        bench.run_bench(*arguments, output="found")
    assert not (stand_in / "found" / "bench.json").exists()


def test_bench_lets_the_script_check_its_options_first(here):
    with pytest.raises(UserError, match=r"with 2048 processes: .*2,048 processes are more than the 360 samples"):
        bench.run_bench(str(runs.TORCHRUN), ["--batch-size", "2048"], "1,2048", "strong", output="found")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("{", "contains no samples/s"),
        ('{"processes": 1}', "contains no samples/s"),
    ],
)
def test_a_file_that_is_not_a_log_is_refused(text, message, here):
    if text is not None:
        (here / "log.json").write_text(text)
    with pytest.raises(UserError, match=message):
        scaling.run_logs(["log.json"])


def test_the_default_process_counts_follow_the_machine(monkeypatch):
    monkeypatch.setattr(bench, "gpus", lambda: 0)
    for cores, counts in ((1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])):
        monkeypatch.setattr(bench, "cores", lambda cores=cores: cores)
        assert bench.process_counts("") == counts
    monkeypatch.setattr(bench, "gpus", lambda: 4)
    assert bench.process_counts("") == [1, 2, 4]
    with pytest.raises(UserError, match="8 processes do not fit on 4 GPUs"):
        bench.process_counts("4,8")


def test_ctrl_c_leaves_no_process(here):
    (here / "slow.py").write_text(STAND_IN + "import time; print('started'); time.sleep(600)\n")
    program = (
        "from workshop.measure.bench import run_bench\n"
        "try: run_bench('slow.py', [], '1,2', 'weak', 1, 'found')\n"
        "except KeyboardInterrupt: print('stopped')\n"
    )
    running = runs.Running([sys.executable, "-c", program], here)
    end = time.monotonic() + 60
    while not (here / "order.txt").exists():
        assert time.monotonic() < end, running.text()
        time.sleep(0.1)
    everybody = family(running.process.pid)
    assert len(everybody) >= 3  # the program, torchrun, a worker
    running.process.send_signal(signal.SIGINT)
    assert running.wait(30) == 0
    assert "stopped" in running.text()
    assert not [process for process in everybody if process.is_running()]
