"""``workshop gpu-day``, rehearsed on pretended GPUs: the table and the JSON, limits, and what cannot run."""

import dataclasses
import json
import os
import sys
import time

import psutil
import pytest

import runs
from workshop.data import load_dataset
from workshop.measure import gpu_runs
from workshop.measure.gpu_data import write_mnist
from workshop.measure.gpu_day import SUMMARY, run_day
from workshop.measure.gpu_items import Item, all_items, group_size
from workshop.measure.gpu_runs import slug

MEMORY = 80 << 30
# Programs that are not for GPUs, or that an item of a different name runs.
NOT_RUN = {"first_failure.py", "image_formats.py", "numerics.py"}  # they use no GPU


def gpu_day(folder, *options, **changes):
    command = [sys.executable, "-P", "-m", "workshop", "gpu-day", "--output", "day", *options]
    return runs.run(command, folder, **changes)


def rehearse(items, folder, seconds=60):
    """Run items as the command does, and return their rows by name."""
    end = time.monotonic() + seconds
    status = run_day(items, folder, end, {"machine": {"gpus": ["a GPU"]}}, seconds / 60)
    rows = json.loads((folder / SUMMARY).read_text())["rows"]
    assert status == any(row["state"] == "failed" for row in rows)
    return {row["item"]: row for row in rows}


def program(text: str, name: str, **options) -> Item:
    return Item(name, ([sys.executable, "-c", text],), options.pop("shows", ""), **options)


def states(rows) -> dict:
    return {name: row["state"] for name, row in rows.items()}


# ---------------------------------------------------------------- the command


def test_it_trains_on_pretended_gpus_and_writes_table_and_json(tmp_path):
    done = gpu_day(tmp_path, "--only", "02 SPAWN", **runs.pretended(2))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ok, 0 failed, 0 not run" in done.stdout
    summary = json.loads((tmp_path / "day" / SUMMARY).read_text())
    assert summary["machine"]["gpus"] == ["Pretended GPU"] * 2
    assert summary["gpu_memory"] == MEMORY
    assert summary["command"] == "workshop gpu-day --output day --only '02 SPAWN'"
    assert "torch" in summary["versions"]
    assert [row["item"] for row in summary["rows"]] == ["02 spawn", "02 spawn, 2 processes"]
    for row in summary["rows"]:
        assert (row["state"], row["reason"]) == ("ok", "")
        assert row["seconds"] > 1
        assert row["command"].startswith("python solutions/02_pytorch_ddp/exercise1_multigpu.py --nproc=")
        assert row["figures"][-1].endswith("samples/s")
        assert row["figures"][-1] in done.stdout
        log = (tmp_path / "day" / f"{slug(row['item'])}.log").read_text()
        assert "training on cuda from epoch 1" in log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day"]


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = gpu_day(tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "gpu-day needs a GPU, and PyTorch sees none here" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "0"], "--minutes 0: give a number above 0"),
        (["--minutes", "nan"], "--minutes nan: give a number above 0"),
        (["--output", "file/day"], "cannot write into"),
    ],
)
def test_mistakes_are_reported_in_one_line(options, message, tmp_path):
    (tmp_path / "file").touch()
    done = gpu_day(tmp_path, *options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr


# ---------------------------------------------------------------- limits

HANG = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
"""


def child_of(folder, name: str) -> int:
    return int((folder / f"{slug(name)}.log").read_text().split()[0])


def test_an_item_that_hangs_is_ended_and_the_rest_goes_on(tmp_path, capsys):
    items = [
        program(HANG + "time.sleep(600)", "hangs", seconds=2),
        program(HANG, "leaves a process behind"),
        program("print('1,234 samples/s')", "measures", alone=True, shows="samples/s"),
    ]
    rows = rehearse(items, tmp_path)
    assert states(rows) == {"hangs": "failed", "leaves a process behind": "ok", "measures": "ok"}
    assert rows["hangs"]["reason"].startswith("it still ran after 2 s and was ended")
    assert rows["measures"]["figures"] == ["1,234 samples/s"]
    for name in ("hangs", "leaves a process behind"):
        assert not psutil.pid_exists(child_of(tmp_path, name))
    printed = capsys.readouterr().out
    assert "it still ran after 2 s" in printed
    assert "2 ok, 1 failed, 0 not run" in printed


def test_items_are_not_run_when_the_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_runs, "SHORTEST", 1)
    items = [
        program("import time; time.sleep(600)", "long", alone=True),
        program("", "late", alone=True),
        program("", "too large", alone=True, obstacle="it needs 120 GiB"),
        program("", "without a package", package="no_such_package"),
    ]
    start = time.monotonic()
    rows = rehearse(items, tmp_path, seconds=4)
    assert time.monotonic() - start < 6
    assert set(states(rows).values()) == {"not run"}
    assert rows["long"]["reason"].startswith("the time was over after")
    assert [row["reason"] for row in rows.values()][1:] == [
        "the time was over",
        "it needs 120 GiB",
        "no_such_package is not installed",
    ]


def test_a_failure_is_reported_with_its_reason(tmp_path):
    items = [program("import sys; sys.exit('no memory')", "fails"), program("", "says nothing", shows="on cuda")]
    rows = rehearse(items, tmp_path)
    assert rows["fails"]["reason"] == "exit status 1: no memory"
    assert rows["says nothing"]["reason"] == "its output has no line with: on cuda"


def test_the_second_command_starts_when_the_first_was_ended(tmp_path):
    text = "import os, time; new = not os.path.exists('file'); open('file', 'w'); print(new); time.sleep(600 * new)"
    command = [sys.executable, "-c", text]
    rows = rehearse([Item("resumed", (command, command), "True\nFalse", until="fil*")], tmp_path)
    assert states(rows) == {"resumed": "ok"}


# ---------------------------------------------------------------- the items


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_items_have_names_of_their_own_and_programs_that_exist(gpus):
    items = all_items(gpus, MEMORY)
    names = [slug(item.name) for item in items]
    assert sorted(set(names)) == sorted(names)
    words = [word for item in items for command in item.commands for word in command]
    assert [word for word in words if word.endswith(".py") and not os.path.isfile(word)] == []
    assert [item.name for item in items if "processes" in item.name and gpus == 1] == []
    codellama = next(item for item in items if "codellama-7b" in item.name)
    assert bool(codellama.obstacle) == (gpus == 1)
    assert items[0].name == "tests -m gpu"


def test_float8_needs_a_gpu_that_has_it_and_torchao():
    for float8, obstacle in ((True, ""), (False, "this GPU does not multiply in float8")):
        item = next(
            item for item in all_items(8, MEMORY, float8) if item.name.startswith("speed of codellama-7b float8")
        )
        assert (item.obstacle, item.package) == (obstacle, "torchao")
        assert item.commands[0][-1] == "fsdp+checkpointing+compile+float8"


def test_the_number_of_processes_divides_all_batches():
    assert [group_size(gpus) for gpus in (1, 2, 3, 4, 6, 8, 16)] == [1, 2, 2, 4, 4, 8, 8]


def test_every_program_of_the_stages_is_an_item():
    words = {word for item in all_items(2, MEMORY) for command in item.commands for word in command}
    stages = [path for path in runs.ROOT.glob("[0s]*/*.py") if not path.name.startswith("exercise")]
    found = [*stages, *(runs.ROOT / "solutions").glob("*/*.py")]
    assert len(found) > 30
    assert [str(path) for path in found if str(path) not in words and path.name not in NOT_RUN] == []


def test_files_like_those_of_mnist_are_written(tmp_path, monkeypatch):
    write_mnist(tmp_path / "nowhere", tmp_path / "made")
    write_mnist(tmp_path / "made", tmp_path / "linked")  # it finds complete files, and links to them
    assert (tmp_path / "linked" / "MNIST" / "raw").is_symlink()
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path / "linked"))
    train, test = load_dataset("mnist")
    digits, _ = load_dataset("digits")
    assert (len(train), len(test)) == (60_000, 10_000)
    for index in (0, 1, len(digits)):
        image, label = train[index]
        assert image.equal(digits[index % len(digits)][0])
        assert label == digits[index % len(digits)][1]


@pytest.mark.full
@pytest.mark.parametrize("gpus", [1, 2])
def test_every_item_that_measures_no_time_succeeds_on_pretended_gpus(gpus, tmp_path, monkeypatch):
    """DeepSpeed does not run on pretended GPUs, and the tests for GPUs choose between pretended and real ones themselves."""
    for name, value in runs.environment(**runs.pretended(gpus)).items():
        monkeypatch.setenv(name, value)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    items = [
        dataclasses.replace(item, seconds=900)
        for item in all_items(gpus, MEMORY)
        if not item.alone and item.package not in ("deepspeed", "pytest") and (gpus == 1 or "processes" in item.name)
    ]
    assert len(items) > 20
    rows = rehearse(items, tmp_path, seconds=3600)
    assert {name: row["reason"] for name, row in rows.items() if row["state"] != "ok"} == {}
