"""What single rules say: about gradients that differ or have the wrong scale, samples of two sets, and unsteady speeds."""

import math
from types import SimpleNamespace

import pytest

from check.bank.replay import replayed
from check.bank.whole import case_of
from workshop.check.evidence.events import (
    Backward,
    CallbacksSeen,
    Collective,
    GradientsClipped,
    Joined,
    LossComputed,
    Raised,
    StepBegun,
    StepTaken,
    Wrapped,
)
from workshop.check.evidence.misuses import BuffersReplaced, PlateauSeen
from workshop.check.evidence.process import Process
from workshop.check.evidence.real import Speeds
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import ratio
from workshop.check.rules.accumulation import batches_of_equal_weight
from workshop.check.rules.collectives import collectives_differ
from workshop.check.rules.comparison import in_two_views
from workshop.check.rules.inputs import buffer_of_rank_0
from workshop.check.rules.learning import loss_not_finite
from workshop.check.rules.rule import NotJudged, Seen
from workshop.check.rules.samples import _halves, same_random
from workshop.check.rules.schedules import _rises_again, mode_reversed
from workshop.check.rules.speed import slower
from workshop.check.rules.unequal import _of_another_model, unclipped

BEGUN = StepBegun(gradients=[], weights=[], names=[], rates=[], state=0, of_model=True, fitting=False)


def test_the_finding_names_the_parameters_outside_ddp():
    finding, *_ = replayed(case_of("held-out-head-outside-ddp"), "gradients").errors
    assert (
        "for 1.weight, 1.bias; these parameters are not in the module that DistributedDataParallel wraps"
        in finding.seen
    )


@pytest.mark.parametrize(("name", "other"), [("pos_embed", False), ("head.weight", True)])
def test_a_part_of_the_wrapped_model_that_is_called_alone_is_no_other_model(name, other):
    wrapped = Process(1, [(0.0, Wrapped(names=("image_encoder.pos_embed", "decoder.weight")))])
    assert _of_another_model(wrapped, [name]) == other


def test_the_finding_names_the_sum_after_local_steps():
    for name, seen in (
        ("local-steps-then-the-sum-of-the-parameters", "add up their parameters: the result is 2.00 times the average"),
        (
            "outer-optimizer-with-the-sum-of-the-changes",
            "add up the changes of their parameters: the outer optimizer gets 2.00",
        ),
    ):
        finding, *_ = replayed(case_of(name), "gradients").errors
        assert seen in finding.seen
        assert "Divide the sum by the number of processes" in finding.fix


def test_gradients_are_compared_before_they_are_clipped():
    clipped = GradientsClipped(norms=[3.0, 4.0], total=5.0)
    begun = StepBegun(
        gradients=[(0.6, [0.6]), None, (0.8, [0.8])],
        weights=[],
        names=[],
        rates=[],
        state=0,
        of_model=True,
        fitting=False,
    )
    process = Process(1, [(0.0, clipped), (1.0, begun)])
    first, none, last = unclipped(process, begun)
    assert none is None
    assert first[0] == pytest.approx(3.0)
    assert last[1] == pytest.approx([4.0])
    # The norms of other parameters, or none: the gradients stay as they are.
    for events in ([(0.0, GradientsClipped(norms=[3.0, 5.0], total=5.8))], []):
        assert unclipped(Process(1, [*events, (1.0, begun)]), begun) == begun.gradients


@pytest.mark.parametrize("sharded", [True, False])
def test_the_padding_of_a_part_may_be_nan(sharded):
    begun = StepBegun(
        gradients=[], weights=[], names=[], rates=[], state=0, of_model=True, fitting=False, sharded=sharded
    )
    events = [(0.0, begun), (0.1, StepTaken(weights=[(math.nan, [math.nan])]))]
    found = list(loss_not_finite.detectors[0].function(SimpleNamespace(trained=[Process(1, events)])))
    assert bool(found) != sharded


def step_of_two_batches(rank, counts, factors):
    """The events of a rank that computes the sums of the losses of two batches, and multiplies their means by factors."""
    events = [Joined(rank=rank, world_size=2)]
    for count, factor in zip(counts, factors, strict=True):
        events.append(LossComputed(targets=count, mean=2.0, summed=True, where="train.py:5"))
        events.append(
            Backward(forward=None, loss=2.0 * factor, sync=None, leftover=False, random=1, where="train.py:7")
        )
    return Process(rank, [(float(number), event) for number, event in enumerate([*events, BEGUN])])


@pytest.mark.parametrize("of_step", [True, False])
def test_batches_that_divide_by_their_own_targets_weigh_alike(of_step):
    counts = [(30, 50), (40, 60)]
    batches = [sum(each) for each in zip(*counts, strict=True)]
    ranks = []
    for rank, own in enumerate(counts):
        divisors = [sum(batches)] * 2 if of_step else [2 * each for each in batches]
        ranks.append(step_of_two_batches(rank, own, [count / each for count, each in zip(own, divisors, strict=True)]))
    found = list(batches_of_equal_weight(Run(2, ranks, 0, "", False, 9.0, "torchrun")))
    assert [seen.where for seen in found] == ([] if of_step else ["train.py:7"])
    assert of_step or "have 70 to 110 targets" in found[0].text


def test_a_common_factor_does_not_depend_on_rounding_errors():
    one = [(2.0, [1.0, -1.0]), (1e-9, [1e-9, 0.0])]
    other = [(4.0, [2.0, -2.0]), (3e-9, [0.0, 3e-9])]
    assert ratio(one, other) == 0.5
    assert ratio([(2.0, [1.0]), (1.0, [0.5])], [(4.0, [2.0]), (1.0, [0.5])]) is None


@pytest.mark.parametrize(
    ("name", "family", "seen", "where", "origin"),
    [
        # The losses differ too, so the labels are wrong.
        (
            "labels-from-zero-on-each-rank",
            "comparison",
            "and the loss of one process is 4.829",
            "train.py:114",
            "holds:arange",
        ),
        # The losses are equal, so the backward pass of the gather is wrong.
        (
            "gather-without-gradients",
            "comparison",
            "what the ranks gather are not complete",
            "train.py:49",
            "gathering",
        ),
        ("world-size-forgotten", "gradients", "all_reduce at tagger.py:76 sums a number", "tagger.py:76", "reduced"),
    ],
)
def test_the_finding_says_where_a_loss_goes_wrong(name, family, seen, where, origin):
    finding, *_ = replayed(case_of(name), family).errors
    assert seen in finding.seen
    assert finding.where == where
    assert finding.origin.startswith(origin)


def test_the_finding_names_the_reduce_that_gives_its_result_to_one_rank():
    finding, *_ = replayed(case_of("rate-from-a-sum-of-rank-0"), "gradients").errors
    assert "their learning rates are" in finding.seen
    assert finding.where == "tagger.py:98"
    assert "all_reduce instead of reduce" in finding.fix


def test_the_finding_names_the_loss_that_is_not_detached():
    finding, *_ = replayed(case_of("fakes-that-are-not-detached"), "gradients").errors
    assert "also goes through the forward pass at train.py:92" in finding.seen
    assert finding.where == "train.py:98"
    assert "detach()" in finding.fix


def test_the_finding_names_why_a_second_model_differs():
    for name, seen, where in (
        ("average-that-only-rank-0-updates", "only rank 0 updates the copy, at tagger.py:84", "tagger.py:84"),
        ("average-copied-before-the-broadcast", "they differed already when deepcopy() made the copy", "tagger.py:62"),
    ):
        finding, *_ = replayed(case_of(name), "gradients").errors
        assert seen in finding.seen
        assert finding.where == where


def test_an_evaluation_of_the_training_and_the_validation_set_has_two_parts():
    """A real leak is spread over the evaluation, and stays in one part."""
    trained, held_out = (
        [("content", number, 4) for number in range(8)],
        [("content", number, 4) for number in range(8, 16)],
    )
    assert _halves(trained + held_out, set(trained)) == [trained, held_out]
    mixed = [key for pair in zip(trained, held_out, strict=True) for key in pair]
    assert _halves(mixed, set(trained)) == [mixed]


@pytest.mark.parametrize(("own", "kind"), [((240.0, 245.0, 243.0), Seen), ((1000.0, 240.0, 310.0), NotJudged)])
def test_a_program_is_slower_only_if_most_rounds_agree(own, kind):
    """In the second case, load slows the one or the other in each round."""
    solution = (900.0, 1160.0, 300.0) if kind is NotJudged else (1000.0, 1070.0, 1040.0)
    (said,) = slower.detectors[0].function(Speeds(own, solution))
    assert isinstance(said, kind), said


@pytest.mark.parametrize(
    ("samples", "views"),
    [([1, 2, 3, 1, 2, 3], True), ([1, 1, 2, 2], False), ([1, 2, 3, 4], False), ([1, 1], False), ([], False)],
)
def test_batches_with_two_views_of_their_samples_are_not_joined(samples, views):
    assert in_two_views(samples) is views


@pytest.mark.parametrize(
    ("metric", "mode", "found"),
    [
        ("val_acc", "min", True),
        ("val/accuracy", "max", False),
        ("metrics['mIoU']", "min", True),
        ("self.val_loss", "max", True),
        ("val_loss", "min", False),
        ("-accuracy", "min", True),  # a name in a callback has no minus
        ("neg_accuracy", "min", False),
        ("score", "min", False),
        ("", "min", False),
    ],
)
def test_the_mode_must_fit_the_metric(metric, mode, found):
    for events in (
        [PlateauSeen(mode=mode, metric=metric)],
        [CallbacksSeen(stop=[(metric, mode)], best=[])],
        [CallbacksSeen(stop=[], best=[(metric, mode)])],
    ):
        rank = Process(1, [(0.0, Joined(rank=0, world_size=1)), *((1.0, each) for each in events)])
        run = Run(1, [rank], 0, "", False, 9.0, "torchrun")
        assert len(list(mode_reversed.detectors[0].function(run))) == found


def test_random_numbers_are_the_same_also_if_one_rank_draws_more_after_some_steps():
    taken = StepTaken(weights=[])
    for alike, found in ((20, 1), (12, 1), (4, 0)):
        ranks = []
        for rank in (0, 1):
            events = [Joined(rank=rank, world_size=2)]
            for number in range(20):
                random = number if number < alike else 100 * (rank + 1) + number
                events += [Backward(forward=None, loss=1.0, sync=None, leftover=False, random=random), BEGUN, taken]
            ranks.append(Process(rank + 1, [(float(second), each) for second, each in enumerate(events)]))
        run = Run(2, ranks, 0, "", False, 99.0, "torchrun")
        assert len(list(same_random.detectors[0].function(run))) == found


def test_ranks_without_steps_may_have_a_role_of_their_own():
    step = (BEGUN, StepTaken(weights=[]))
    sent = Collective(name="broadcast", shape=(2,), dtype="float32")
    for group, found in (((1,), 0), ((), 1)):
        own = Collective(name="all_reduce", shape=(2,), dtype="float32", group=group)
        ranks = []
        for rank, events in ((0, [sent, sent]), (1, [sent, own, *step, sent, own, *step])):
            events = [Joined(rank=rank, world_size=2), *events]
            ranks.append(Process(rank + 1, [(float(second), each) for second, each in enumerate(events)]))
        run = Run(2, ranks, 0, "", False, 99.0, "torchrun")
        assert len(list(collectives_differ.detectors[0].function(run))) == found


@pytest.mark.parametrize(("shapes", "found"), [(((4, 9), (4, 10)), 1), (((4, 9), (4, 9)), 0)])
def test_tensors_of_different_shapes_in_a_gather_are_named_if_the_run_fails(shapes, found):
    ranks = []
    for rank, shape in enumerate(shapes):
        lost = Raised(type="RuntimeError", message="Connection closed by peer", traceback="", where="t.py:9")
        gather = Collective(name="all_gather", shape=shape, dtype="int64", where="t.py:9")
        events = [Joined(rank=rank, world_size=2), gather, lost]
        ranks.append(Process(rank + 1, [(float(second), each) for second, each in enumerate(events)]))
    failed = Run(2, ranks, 1, "", False, 99.0, "torchrun")
    seen = list(collectives_differ.detectors[0].function(failed))
    assert [(each.where, "[4, 9] on rank 0 and [4, 10] on rank 1" in each.text) for each in seen] == [
        ("t.py:9", True)
    ] * found


@pytest.mark.parametrize(
    ("cosine", "steps", "low"),
    [(20, 40, 21), (40, 40, 0), (13, 40, 0), (20, 21, 0), (20, 30, 0)],  # the length of the schedule, and of the run
)
def test_a_cosine_that_is_too_short_rises_again(cosine, steps, low):
    rates = [0.5 * min(1, (step + 1) / 4) * (1 + math.cos(math.pi * step / cosine)) for step in range(steps)]
    assert _rises_again(rates) == low
    assert _rises_again([max(0.0, 1 - step / cosine) for step in range(steps)]) == 0  # a line stays at 0


@pytest.mark.parametrize(("name", "found"), [("front.mean", 1), ("queue", 0)])
def test_a_queue_may_begin_with_other_values_on_each_rank(name, found):
    ranks = []
    for rank in (0, 1):
        replaced = BuffersReplaced(weights=[(1.0, [1.0])], buffers=[(1.0 + rank, [1.0])], names=[name], where="t.py:9")
        ranks.append(Process(rank + 1, [(0.0, Joined(rank=rank, world_size=2)), (1.0, replaced)]))
        ranks[-1].events += [(2.0, BEGUN), (3.0, StepTaken(weights=[]))]
    run = Run(2, ranks, 0, "", False, 9.0, "torchrun")
    assert len(list(buffer_of_rank_0.detectors[0].function(run))) == found
