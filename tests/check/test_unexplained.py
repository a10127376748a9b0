"""What fails in all ranks alike, or differs for an unknown reason, is no error of a program that nobody here knows."""

from types import SimpleNamespace

import pytest

from workshop.check.evidence.events import Ended, FileWritten, Joined, Raised, StepBegun, StepTaken
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Asked, Run
from workshop.check.judge import ask
from workshop.check.rules.ending import crash, ended_early, endless, hang
from workshop.check.rules.files import missing_until_written
from workshop.check.rules.gpus import gpu_refused
from workshop.check.rules.gradients import weights_differ
from workshop.check.rules.restart import resume_differs
from workshop.check.rules.rule import RULES, Detector, Seen
from workshop.check.rules.shares import shuffled_below
from workshop.check.scenarios import WHOLE
from workshop.check.subject import Goal, Subject
from workshop.check.verdict import Verdict

WRAPPER = "'DistributedDataParallel' object has no attribute 'config'"
LOST = "Connection closed by peer [127.0.0.1]:2"

UNUSED = "It looks like your LightningModule has parameters that were not used in producing the loss"


def raised(message="no", kind="KeyError"):
    return Raised(type=kind, message=message, traceback="", where="train.py:9")


def ended(*events, stacks=("", ""), hung="", asked=None):
    """Return a run of two ranks that end with these events, or stand at the lines of these stacks."""
    ranks = [
        Process(rank, [(0.0, Joined(rank=rank, world_size=2)), *((1.0 + rank, each) for each in own)], stack=stack)
        for rank, (own, stack) in enumerate(zip(events or [(), ()], stacks, strict=True))
    ]
    return Run(2, ranks, None if hung else 1, hung, False, 9.0, "torchrun", asked)


def standing(line):
    return (
        f'  File "/lib/site-packages/torch/x.py", line 2 in __next__\n  File "/home/me/train.py", line {line} in main\n'
    )


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (ended([raised()], [raised()]), ended_early),
        (ended([raised()], []), ended_early),  # the check ended the other one
        (ended([raised()], [], asked=Asked()), crash),
        (ended([Ended()], [raised()]), crash),
        (ended([raised()], [raised(LOST, "RuntimeError")]), crash),
        (ended([raised(WRAPPER)], [raised(WRAPPER)]), crash),
        (ended([raised(UNUSED)], [raised(UNUSED)]), crash),
        (ended([raised("Found no NVIDIA driver")], [raised("Found no NVIDIA driver")]), ended_early),
        (ended(stacks=[standing(9), standing(9)], hung="idle"), ended_early),
        (ended(stacks=[standing(9), standing(12)], hung="idle"), hang),
        (ended(stacks=[standing(9), standing(9)], hung="idle", asked=Asked()), hang),
        (
            ended(stacks=[f'  File "/home/me/train.py", line {line} in main\n' for line in (9, 9)], hung="busy"),
            ended_early,
        ),
    ],
)
def test_an_end_counts_as_an_error_if_the_ranks_or_the_message_show_its_cause(run, found):
    said = {rule: list(rule.detectors[0].function(run)) for rule in (crash, hang, endless, ended_early)}
    assert [rule for rule, seen in said.items() if seen] == [found]
    assert said[found][0].where == "train.py:9"


@pytest.mark.parametrize(
    ("path", "written", "named"),
    [
        ("data/part.npz", "/r/data/part.npz", True),
        ("data/part.npz", "/r/data/other.npz", False),
        ("images/train", "/r/images/train/disc/1.png", True),
        ("images/train", "/r/images.tmp/train/disc/1.png", True),
        ("images/train", "/r/images", True),  # the folder was renamed
        ("images/train", "/r/images.txt", False),
    ],
)
def test_a_file_that_another_rank_has_not_written_yet_is_named(path, written, named):
    missing = raised(f"[Errno 2] No such file or directory: '{path}'", "FileNotFoundError")
    found = list(missing_until_written(ended([FileWritten(path=written, where="train.py:3")], [missing])))
    name = path.rpartition("/")[2]
    assert [seen.text for seen in found] == (
        [f"rank 1 does not find {name}, which rank 0 writes in the same run"] if named else []
    )


def test_a_random_state_on_a_gpu_is_refused():
    message = "RNG state must be a torch.ByteTensor"
    (seen,) = gpu_refused.detectors[0].function(ended([raised(message, "TypeError")], [raised(message, "TypeError")]))
    assert seen.where == "train.py:9"
    assert 'map_location="cpu"' in seen.fix


@pytest.mark.parametrize(("message", "told"), [("the product does not match the world size (4)", 0), ("no file", 1)])
def test_what_only_two_nodes_refuse_hides_nothing_that_one_node_shows(message, told):
    run = ended([raised(message)], [raised(message)])
    assert len(list(gpu_refused.detectors[0].function(run))) == told


@pytest.mark.parametrize(("goals", "level"), [((), False), ((Goal(1, "it resumes", (resume_differs,)),), True)])
def test_a_mild_finding_is_a_hint_unless_the_program_is_an_exercise(goals, level, tmp_path):
    verdict = Verdict(Subject(tmp_path / "train.py", "", goals, (resume_differs,), ()))
    ask(verdict, [Detector(resume_differs, lambda run: [Seen("it differs", mild=True)], (WHOLE,))], {WHOLE: None})
    assert [finding.is_error for finding in verdict.findings] == [level]


@pytest.mark.parametrize(("names", "found"), [((["a", "b"], ["c", "d"]), 0), ((["a", "b"], ["a", "b"]), 1)])
def test_each_rank_may_optimize_a_part_of_the_parameters(names, found):
    ranks = []
    for rank, own in enumerate(names):
        weights = [(1.0 + rank, [1.0 + rank, 2.0])] * 2
        begun = StepBegun(gradients=[], weights=weights, names=own, rates=[], state=0, of_model=True, fitting=False)
        events = [Joined(rank=rank, world_size=2), begun, StepTaken(weights=weights)]
        ranks.append(Process(rank, [(float(number), each) for number, each in enumerate(events)]))
    run = Run(2, ranks, 0, "", False, 9.0, "torchrun")
    assert len(list(weights_differ.detectors[0].function(run))) == found


def test_what_explains_a_crash_explains_an_early_end_too():
    explaining = [each for rule in RULES.values() for each in rule.detectors if crash in each.instead_of]
    assert len(explaining) > 5
    assert all(ended_early in each.instead_of for each in explaining)


@pytest.mark.parametrize(
    ("second", "loader", "shuffled"),
    [
        ((1, 2, 3), 1, False), ((3, 1, 2), 1, True), ((7, 8, 9), 1, False), ((7, 8, 9), 2, True), ((1, 2, 3), 2, False),
    ],
)  # fmt: skip
def test_a_data_set_that_isshuffled_below_its_sampler_has_a_new_order(second, loader, shuffled):
    """The contents of epoch 2: the same in the same order; the same in a different order; others, as after augmentation."""
    backwards = [
        SimpleNamespace(forward=SimpleNamespace(loader=place, rows=[("content", each, 0) for each in contents]))
        for place, contents in (((1, 1), (1, 2, 3)), ((loader, 3 - loader + 1), second))
    ]
    assert shuffled_below(SimpleNamespace(trained=[SimpleNamespace(backwards=backwards)])) == shuffled
