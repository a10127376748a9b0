"""Evidence: the comparison of sketches of tensors, and files that are written and read."""

import lzma
import math
import pickle

import pytest

from workshop.check.evidence import recorded
from workshop.check.evidence.events import (
    Backward,
    Ended,
    FileWritten,
    Forward,
    Joined,
    Loaded,
    Raised,
    StepBegun,
    StepTaken,
)
from workshop.check.evidence.misuses import BuffersKept
from workshop.check.evidence.process import Process
from workshop.check.evidence.recorded import LONGEST, Recorded, read, write
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import difference, different_names
from workshop.check.rules.restart import second_start
from workshop.check.rules.rule import RULES
from workshop.check.scenarios import Split
from workshop.errors import UserError


def test_sketches_are_compared():
    one = [(1.0, [0.5, -0.5]), (2.0, [1.0])]
    assert difference(one, one) == 0
    assert difference(one, [(2.0, [1.0, -1.0]), (4.0, [2.0])]) == pytest.approx(0.5)
    assert difference(one, [None, (2.0, [1.0])]) == float("inf")
    assert different_names(one, [(1.0, [0.5, -0.5]), (2.0, [1.1])], ["a", "b"]) == ["b"]


def run(text="", steps=4, seed=1.0):
    """A run of two processes."""
    weights = [[(step / seed, [step / seed + part / 7 for part in range(12)])] * 2 for step in range(steps)]
    begun = [
        StepBegun(gradients=each, weights=each, names=["a", "b"], rates=[0.1], state=2, of_model=True, fitting=False)
        for each in weights
    ]
    processes = [
        Process(
            100 + rank,
            [(0.1, Joined(rank=rank, world_size=2)), *((1 / 3, each) for each in begun), (2.0, Ended())],
            stdout=text,
        )
        for rank in range(2)
    ]
    return Run(2, processes, 0, "", False, 3.0, "torchrun", error_files={1})


def test_evidence_is_read_back_unchanged(tmp_path):
    made = run("/secret/folder/program.py\n" + "x" * 100_000 + "\nthe end")
    assert len(made.trained) == 2  # fills the cached properties
    failed = Raised(type="ValueError", message="no", traceback="", where="program.py:3")
    split = Split(made, Run(2, [Process(7, [(0.0, failed)])], 1, "", False, 1.0, "torchrun"))
    first = Recorded("first", ("whole", "split"), {"whole": made}, {"split": "it saves nothing"})
    path = tmp_path / "folder" / "family.xz"
    write(path, [first, Recorded("second", ("split",), {"split": split})], lambda text: text.replace("/secret", "/x"))
    again = read(path, "")
    assert list(again) == ["first", "second"]
    whole = again["first"].made["whole"]
    assert (again["first"].offers, again["first"].unavailable) == (first.offers, first.unavailable)
    assert "trained" not in vars(whole)
    assert [process.rank for process in whole.trained] == [0, 1]
    assert [type(event) for _, event in whole.processes[0].events] == [
        type(event) for _, event in made.processes[0].events
    ]
    assert whole.processes[0].events[1][0] == pytest.approx(1 / 3, abs=1e-3)
    assert difference(whole.trained[0].steps[3].before.weights, whole.trained[1].steps[3].before.weights) == 0
    assert whole.trained[0].steps[3].before.weights[0][0] == pytest.approx(3.0)
    assert whole.error_files == {1}
    assert again["second"].made["split"].second.first_exception()[1] == failed
    text = whole.processes[0].stdout
    assert text.startswith("/x/folder")
    assert text.endswith("the end")
    assert len(text) < 2.1 * LONGEST


def test_rewriting_evidence_changes_nothing(tmp_path):
    write(tmp_path / "one.xz", [Recorded("a", ("whole",), {"whole": run("y" * 50_000)})])
    write(tmp_path / "two.xz", read(tmp_path / "one.xz", "").values())
    assert (tmp_path / "two.xz").read_bytes() == (tmp_path / "one.xz").read_bytes()


def test_equal_parts_are_stored_once(tmp_path):
    """100 versions with equal numbers take less than 6 times the space of one; 100 different ones more than 20 times."""
    sizes = []
    for seeds in ([1.0], [1.0] * 100, range(1, 101)):
        cases = [
            Recorded(f"case-{index}", ("whole",), {"whole": run(steps=50, seed=seed)})
            for index, seed in enumerate(seeds)
        ]
        write(tmp_path / "family.xz", cases)
        sizes.append((tmp_path / "family.xz").stat().st_size)
    assert sizes[1] < 6 * sizes[0]
    assert sizes[2] > 20 * sizes[0]


def test_evidence_with_different_fields_must_be_recorded_again(tmp_path, monkeypatch):
    """This concerns only the files that contain such evidence."""
    with_steps, without = tmp_path / "steps.xz", tmp_path / "none.xz"
    write(with_steps, [Recorded("a", ("whole",), {"whole": run(steps=1)})])
    write(without, [Recorded("a")])
    fields = recorded._fields_now
    monkeypatch.setattr(recorded, "_fields_now", lambda name: 1 if name.endswith(".StepBegun") else fields(name))
    assert list(read(without, "")) == ["a"]
    with pytest.raises(UserError, match=r"a different version of the check; record again: ./workshop.sh test"):
        read(with_steps, "./workshop.sh test")


def test_a_missing_or_damaged_file_is_reported(tmp_path):
    with pytest.raises(UserError, match="no evidence was recorded; record it: this"):
        read(tmp_path / "family.xz", "this")
    path = tmp_path / "family.xz"
    write(path, [Recorded("a")])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"is damaged .*record again: this"):
        read(path, "this")


def test_only_evidence_is_read(tmp_path):
    path = tmp_path / "family.xz"
    path.write_bytes(lzma.compress(pickle.dumps(print)))
    with pytest.raises(UserError, match="print is no evidence"):
        read(path, "")
    with pytest.raises(TypeError, match="evidence cannot hold a complex"):
        write(path, [Recorded("a", (), {"whole": 1j})])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_says_why_and_what_to_do(rule):
    assert rule.why.endswith(".")
    assert rule.fix.endswith(".")


def test_a_restart_that_fails_with_a_file_of_two_writers_is_no_second_error():
    def process(pid, *events):
        return Process(pid, [(float(number), event) for number, event in enumerate(events)])

    step = StepBegun(gradients=[], weights=[], names=[], rates=[0.1], state=0, of_model=True, fitting=False)
    ranks = [
        process(rank, Joined(rank=rank, world_size=2), step, FileWritten(path="/run/last.pt", where="train.py:9"))
        for rank in range(2)
    ]
    error = Raised(type="RuntimeError", message="PytorchStreamReader failed reading zip archive", traceback="")
    again = [process(rank, Joined(rank=rank, world_size=2), Loaded(path="/run/last.pt"), error) for rank in range(2)]
    first, second = (
        Run(nproc=2, processes=each, status=status, hung="", flooded=False, seconds=1.0, launch="torchrun")
        for each, status in ((ranks, 0), (again, 1))
    )
    assert [rule.name for rule, _ in second_start(first, Split(first, second))] == []
    alone = Run(nproc=2, processes=ranks[:1], status=0, hung="", flooded=False, seconds=1.0, launch="torchrun")
    assert [rule.name for rule, _ in second_start(alone, Split(alone, second))] == ["resume-fails"]


@pytest.mark.parametrize(("changes", "errors"), [("at a step", ["Centered.center"]), ("before", []), ("never", [])])
def test_buffers_that_the_ranks_change_apart_are_named_beside_those_of_other_modules(changes, errors):
    step = StepBegun(gradients=[], weights=[], names=[], rates=[0.1], state=0, of_model=True, fitting=False)

    def process(rank):
        events = [Joined(rank=rank, world_size=2)]
        for number in range(4):
            value = rank + 1.0 if changes == "before" or (changes == "at a step" and number) else 1.0
            loss = BuffersKept(buffers=[(value, [value])], names=["Centered.center"], where="train.py:3")
            weight = BuffersKept(buffers=[(2.0, [2.0])], names=["BCELoss.weight"], where="train.py:4")
            events += [loss, weight, step, StepTaken(weights=[])]
        return Process(rank, [(float(number), event) for number, event in enumerate(events)])

    made = Run(2, [process(0), process(1)], 0, "", False, 1.0, "torchrun")
    found = [*RULES["buffers-differ"].detectors[0].function(made)]
    assert [seen.text.partition(" in ")[2][:15] for seen in found] == errors


def test_nan_is_equal_to_nan():
    nan, one = (math.nan, [math.nan]), (1.0, [1.0])
    assert difference([nan, one], [nan, one]) == 0
    assert difference([nan], [one]) == difference([one], [nan]) == math.inf
    assert difference([(math.inf, [math.inf])], [(math.inf, [math.inf])]) == 0


@pytest.mark.parametrize(("state", "names"), [(0, ["epoch-repeated", "optimizer-lost"]), (1, ["epoch-repeated"])])
def test_a_repeated_epoch_does_not_hide_an_empty_optimizer(state, names):
    def run(*steps):
        ranks = []
        for rank in range(2):
            events = [Joined(rank=rank, world_size=2)]
            for weight, full in steps:
                sketch = [(weight, [weight])]
                begun = StepBegun(
                    gradients=sketch, weights=sketch, names=["a"], rates=[0.1], state=full, of_model=True, fitting=False
                )
                events += [begun, StepTaken(weights=[(weight + 1, [weight + 1])])]
            ranks.append(Process(rank, [(float(number), event) for number, event in enumerate(events)]))
        return Run(nproc=2, processes=ranks, status=0, hung="", flooded=False, seconds=1.0, launch="torchrun")

    whole, first = run((1.0, 0), (2.0, 1), (3.0, 1), (4.0, 1)), run((1.0, 0), (2.0, 1))
    second = run((3.0, state), (4.0, 1), (5.0, 1))
    assert [rule.name for rule, _ in second_start(whole, Split(first, second))] == names


@pytest.mark.parametrize(("samples", "names"), [((2, 3, 4, 5), []), ((0, 1, 2, 3), ["epoch-repeated"])])
def test_a_second_start_that_trains_further_epochs_repeats_nothing(samples, names):
    def run(*steps):
        ranks = []
        for rank in range(2):
            events = [Joined(rank=rank, world_size=2)]
            for weight, sample in steps:
                seen = [("content", 10 * sample + rank)]
                forward = Forward(wrapped=True, sync=True, keys=seen, rows=seen, shape=None, loader=None)
                sketch = [(weight, [weight])]
                events += [
                    Backward(forward=forward, loss=1.0, sync=True, leftover=False, random=sample),
                    StepBegun(
                        gradients=sketch,
                        weights=sketch,
                        names=["a"],
                        rates=[0.1],
                        state=1,
                        of_model=True,
                        fitting=False,
                    ),
                    StepTaken(weights=[(weight + 1, [weight + 1])]),
                ]
            ranks.append(Process(rank, [(float(number), event) for number, event in enumerate(events)]))
        return Run(nproc=2, processes=ranks, status=0, hung="", flooded=False, seconds=1.0, launch="torchrun")

    whole, first = run((1.0, 0), (2.0, 1), (3.0, 2), (4.0, 3)), run((1.0, 0), (2.0, 1))
    second = run(*((3.0 + number, sample) for number, sample in enumerate(samples)))
    assert [rule.name for rule, _ in second_start(whole, Split(first, second))] == names
