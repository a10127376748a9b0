"""Other numbers of processes, unseeded programs, speeds that vary, and a machine that is busy with other work."""

import subprocess
import sys

import pytest

import runs
from check.bank import ddp
from check.bank.cases import assert_right
from check.bank.replay import check_for_real
from check.bank.whole import all_mistakes, all_styles
from workshop.check.command import check_command
from workshop.course.checking import check_file
from workshop.course.exercises import find_exercise
from workshop.course.real import LATE, settled, undecided


@pytest.mark.parametrize("base", [pytest.param(ddp.SPAWN, marks=pytest.mark.full), ddp.METRICS])
@pytest.mark.parametrize("nproc", [1, 3, pytest.param(8, marks=pytest.mark.full)])
def test_solutions_pass_with_other_numbers_of_processes(nproc, base):
    """Test also numbers that do not divide the samples evenly, and several batches per step."""
    *_, verdict = check_file(find_exercise(runs.ROOT / base).solution, nproc=nproc, quick=True)
    assert verdict.errors == []
    assert set(verdict.states().values()) <= {"met", "waiting"}


@pytest.mark.full
def test_an_unseeded_program_may_differ_at_every_start(tmp_path):
    edits = [
        ("torch.manual_seed(SEED)  # the same initial parameters in every run", "torch.seed()"),
        ("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch + 100 * int(agreed(device)))"),
        (
            "def train_one_epoch(",
            "def agreed(device):\n    number = torch.randint(1000, (1,), device=device)\n"
            "    dist.broadcast(number, 0)\n    return number\n\n\ndef train_one_epoch(",
        ),
        (ddp.SEED, "pass"),
    ]
    text = (runs.ROOT / ddp.TORCHRUN).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = tmp_path / "mine.py"
    for forgotten, kinds in (("", []), (ddp.LOAD_OPTIMIZER, ["optimizer-lost"])):
        script.write_text(text.replace(forgotten, "") if forgotten else text)
        *_, verdict = check_command(
            ["torchrun", "--nproc-per-node=2", script.name, "--epochs", "2", "--checkpoint", "run.pt"], folder=tmp_path
        )
        assert [finding.kind for finding in verdict.errors] == kinds, verdict.findings


@pytest.mark.parametrize(
    ("speeds", "enough"),
    [
        ([100.0], False),
        ([100.0, 95.0], True),
        ([100.0, 60.0], False),
        ([100.0, 60.0, 97.0], True),
        ([1, 2, 4, 8, 16], True),
    ],
)
def test_a_speed_counts_once_two_runs_agree(speeds, enough):
    assert settled(speeds) == enough


@pytest.mark.parametrize(
    ("own", "other", "seconds", "again"),
    [
        ([], [], 0, True),
        ([100, 101], [100, 101], 0, False),
        ([100, 50], [100, 101], 0, True),
        ([100, 50], [100, 101], LATE, False),  # as fast as the other one, on a machine with other work
        ([80, 80], [100, 101], LATE, True),  # it is not yet called slower
        ([80] * 4, [100] * 4, LATE, False),
    ],
)
def test_a_program_gets_turns_until_its_speed_is_known_or_it_is_late(own, other, seconds, again):
    assert undecided(own, other, seconds) == again


@pytest.fixture
def four_busy_loops():
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name)
        for case in [*all_mistakes()[::9], *all_styles()[::9]]
        if not case.base.endswith(".sh")
    ],
)
def test_other_work_on_the_machine_does_not_change_a_verdict(case, tmp_path, four_busy_loops):
    """Check every ninth case of the bank while four processes that never pause share the cores with it."""
    verdict, _ = check_for_real(case, tmp_path)
    assert_right(case, verdict)
