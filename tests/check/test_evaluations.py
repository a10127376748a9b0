"""What counts as an evaluation, as its exchange, and as a text about all its samples."""

import dataclasses

import pytest

from check.test_run import BEGUN, forward, joined, passed, process, run
from workshop.check.evidence.events import (
    Collective,
    Evaluated,
    FileWritten,
    Printed,
    Saved,
    Sketch,
    StepTaken,
    Wrapped,
)
from workshop.check.evidence.misuses import (
    EvaluationGraph,
    LossCounted,
    LossScaled,
    NothingDropped,
    PassEnded,
    StatisticsSeen,
)
from workshop.check.rules.accumulation import accumulation_uneven, own_counts, wrapped_twice
from workshop.check.rules.evaluation import evaluation_missed, last_batch_dropped
from workshop.check.rules.exchanges import exchanged
from workshop.check.rules.files import two_writers
from workshop.check.rules.learning import graph_kept_in_evaluation
from workshop.check.rules.metrics import _shown
from workshop.check.rules.modes import statistics_differ
from workshop.check.rules.own_state import saved_apart
from workshop.check.rules.stages import batches_of_a_layer_differ
from workshop.check.scenarios import Split

STEP = (passed(1, 2), BEGUN, StepTaken(weights=[]))
OF_LOADER = [Evaluated(forward=forward(*range(first, first + 8), loader=(2, 1))) for first in (0, 8, 16, 24)]
ENDED = PassEnded(loader=2, iteration=1, batches=4, order=None)


def found(rule, *ranks):
    return [seen.text for seen in rule.detectors[0].function(run(*ranks))]


def trained_on_others(*events):
    """A rank that trains on samples whose names are not known."""
    step = dataclasses.replace(passed(), forward=None)
    return [
        each for event in events for each in ((step, BEGUN, StepTaken(weights=[])) if event == "step" else (event,))
    ]


@pytest.mark.parametrize("backwards", [1, 2])  # 2: that of a discriminator, then that of the generator
def test_a_pass_over_a_batch_before_each_step_is_no_evaluation(backwards):
    looks, batches = (
        Evaluated(forward=forward(30, 31, loader=(2, 1))),
        [passed(2 * each, 2 * each + 1) for each in range(5)],
    )
    steps = [each for batch in batches for each in (looks, *(batch, BEGUN, StepTaken(weights=[])) * backwards)]
    evaluation = [Evaluated(forward=forward(number, loader=(3, 1))) for number in range(32, 39)]
    assert process(1, *steps, *evaluation).evaluations == [[("set", 40, number) for number in range(32, 39)]]
    # An evaluation that is larger than a batch may come before each step.
    often = [each for batch in batches for each in (*evaluation, batch, BEGUN, StepTaken(weights=[]))]
    assert len(process(1, *often).evaluations) == 5


def test_batches_that_a_frozen_encoder_gets_before_each_step_are_no_evaluation():
    encoded = trained_on_others(*(each for event in OF_LOADER for each in (event, "step")), ENDED)
    evaluated = trained_on_others("step", *OF_LOADER, ENDED, "step")
    for rule, text in (
        (last_batch_dropped, "no rank evaluates 8 of the 40 samples, because the last batch is dropped"),
        (evaluation_missed, "no rank evaluates 8 of the 40 test samples"),
    ):
        assert found(rule, joined(0, *encoded)) == []
        assert found(rule, joined(0, *evaluated))[:1] == ([] if rule is last_batch_dropped else [text])
    # Eight samples are a whole batch, so something else has left them out; fewer are a last batch.
    part = [Evaluated(forward=forward(*range(first, first + 12), loader=(2, 1))) for first in (0, 12, 24)]
    ended = dataclasses.replace(ENDED, batches=3)
    dropped = "no rank evaluates 4 of the 40 samples, because the last batch is dropped"
    assert found(last_batch_dropped, joined(0, *trained_on_others("step", *part, ended, "step"))) == [dropped]
    kept = NothingDropped(loader=2)  # a library may have fetched the last batch in advance
    assert found(last_batch_dropped, joined(0, *trained_on_others("step", kept, *part, ended, "step"))) == []


def test_a_text_that_is_printed_after_each_batch_is_not_about_the_whole_evaluation():
    texts = [Printed(text=f"batch {number} acc {number / 7:.2f}", given=True) for number in range(4)]
    summary = Printed(text="accuracy 0.25 in all", given=True)
    events = [each for pair in zip(OF_LOADER, texts, strict=True) for each in pair]
    assert [shown.text for shown in _shown(joined(0, *STEP, *events, summary))] == [summary.text]
    assert len(list(_shown(joined(0, *STEP, OF_LOADER[0], texts[0], summary)))) == 2  # there may be only one batch


STATE = Collective(name="broadcast", shape=(5056,), dtype="torch.uint8")
TOTAL = Collective(name="all_reduce", shape=(2,), dtype="torch.float32")


@pytest.mark.parametrize(("collective", "exchanges"), [(STATE, False), (TOTAL, True)])
def test_the_state_of_a_generator_is_no_exchange_of_an_evaluation(collective, exchanges):
    rank = joined(0, *STEP, *OF_LOADER, collective, *STEP)
    assert exchanged(rank) == exchanges


@pytest.mark.parametrize(("collective", "mild"), [(STATE, True), (TOTAL, False)])
def test_different_statistics_matter_if_the_ranks_exchange_the_results(collective, mild):
    def rank(number):
        own: Sketch = (1.0 + number, [1.0 + number])
        seen = StatisticsSeen(model="Net", statistics=[own], steps=1)
        return joined(number, *STEP, seen, *OF_LOADER, collective, *STEP)

    (each,) = statistics_differ.detectors[0].function(run(rank(0), rank(1)))
    assert each.mild == mild


def test_batches_whose_gradients_are_cleared_belong_to_no_step():
    added = dataclasses.replace(passed(3, 4), leftover=True)
    step = (passed(1, 2), added, BEGUN, StepTaken(weights=[]))
    hessian = (passed(5, 6), added)  # zero_grad() follows
    assert found(accumulation_uneven, joined(0, *step, *step, *hessian, *step, *step)) == []
    assert found(accumulation_uneven, joined(0, *step, *step, added, *step, *step)) == []
    longer = (passed(1, 2), added, added, BEGUN, StepTaken(weights=[]))
    assert found(accumulation_uneven, joined(0, *step, *step, *longer, *step, *step)) == [
        "batches per step: 2, 2, 3, 2, 2"
    ]


@pytest.mark.parametrize(("name", "mild"), [("config.json", True), ("run-1.yaml", True), ("metrics.json", False)])
def test_settings_that_all_ranks_write_are_a_hint(name, mild):
    ranks = [joined(rank, FileWritten(path=f"/r/{name}", where="t.py:3")) for rank in (0, 1)]
    (seen,) = two_writers.detectors[0].function(run(*ranks))
    assert seen.mild == mild


@pytest.mark.parametrize(("opened", "mild"), [((1, 3), True), ((1, 1), True), ((3, 3), False)])
def test_a_heading_that_all_ranks_write_is_a_hint(opened, mild):
    """Give how often each rank opens a text file before its step; one that does so three times also opens it after the step."""
    written = FileWritten(path="/r/losses.txt", where="t.py:3")
    ranks = [joined(rank, *[written] * times, *STEP, *[written] * (times > 2)) for rank, times in enumerate(opened)]
    (seen,) = two_writers.detectors[0].function(run(*ranks))
    assert seen.mild == mild


@pytest.mark.parametrize(("nodes", "grows"), [([8, 16, 24], True), ([8, 8, 8], False), ([8, 40, 48], False)])
def test_a_graph_that_grows_from_batch_to_batch_of_an_evaluation_is_named(nodes, grows):
    graph = EvaluationGraph(nodes=nodes, batches=[2, 3, 4], where="t.py:7")
    seen = list(graph_kept_in_evaluation(run(joined(0, *STEP, graph, *STEP))))
    assert [each.where for each in seen] == ["t.py:7"] * grows


@pytest.mark.parametrize(("value", "found"), [(1.0, False), (1.5, True)])
def test_a_file_with_other_values_after_the_second_start_is_named(value, found):
    def ends(*saved):
        files = [Saved(path="/r/out/ema.pt.tmp", keys=[], tensors=[(4 * each, [each] * 4)]) for each in saved]
        return run(joined(0, *STEP, *STEP, *files))

    split = Split(
        run(joined(0, *STEP)),
        run(joined(0, *STEP, Saved(path="/s/out/ema.pt.tmp", keys=[], tensors=[(4 * value, [value] * 4)]))),
    )
    cause = saved_apart(ends(1.5, 1.0), split, 1)  # the last file after a step counts
    assert bool(cause) == found
    assert cause is None or "ema.pt is saved with other values" in cause[0]


@pytest.mark.parametrize(
    ("counts", "weights", "found"),
    [
        ([[60], [50]], [1.0, 1.0], True),
        ([[50], [50]], [1.0, 1.0], False),  # of all ranks
        ([[52], [50]], [1.0, 1.0], False),  # nearly as many
        ([[60], [50]], [1.09, 0.91], False),  # the program weights the means by the counts
        ([[60, 2], [50, 2]], [1.0, 1.0], False),  # two samples, each of which may have its own count
    ],
)
def test_losses_divided_by_own_counts_are_named(counts, weights, found):
    ranks = [
        joined(rank, Wrapped(), *([LossScaled(factors=[weight]), LossCounted(counts=count), *step] * 3))
        for rank, (count, weight) in enumerate(zip(counts, weights, strict=True))
        for step in [(passed(4 * rank, 4 * rank + 1), BEGUN, StepTaken(weights=[]))]
    ]
    seen = [each.text for each in own_counts(run(*ranks))]
    assert seen == ["in a step the losses are divided by counts from 50 to 60, and all have the same weight"] * found


@pytest.mark.parametrize(("ranks", "writers"), [((0, 1), 1), ((0, 0), 0)])
def test_a_rank_that_is_started_again_does_not_write_together_with_itself(ranks, writers):
    written = FileWritten(path="/r/metrics.json", where="t.py:3")
    processes = [joined(rank, *STEP, written) for rank in ranks]
    for number, each in enumerate(processes):
        each.pid = number + 1
    assert len(list(two_writers.detectors[0].function(run(*processes)))) == writers


@pytest.mark.parametrize(
    ("second", "found"), [(("module.weight",), ["t.py:9"]), (("module.bias",), []), (("weight",), [])]
)
def test_a_model_that_is_wrapped_twice_is_named(second, found):
    ranks = [joined(rank, Wrapped(names=("weight",)), Wrapped(names=second, where="t.py:9"), *STEP) for rank in (0, 1)]
    assert [each.where for each in wrapped_twice(run(*ranks))] == found


@pytest.mark.parametrize(("wrapped", "found"), [((), 1), ((Wrapped(),), 0)])
def test_only_ranks_that_share_the_whole_model_must_see_the_same_samples(wrapped, found):
    """A wrapped model learns from different samples, and only its last layer, for example, is divided."""
    call = Collective(name="all_reduce", shape=(2, 4), dtype="float32", where="t.py:5", inside=True, group=(0, 1))
    ranks = []
    for rank in (0, 1):
        steps = [(call, passed(rank, rank + 2), BEGUN, StepTaken(weights=[])) for _ in range(3)]
        ranks.append(joined(rank, *wrapped, *(event for step in steps for event in step)))
    whole = run(*ranks)
    vars(whole)["divided"] = "layers"
    assert len(list(batches_of_a_layer_differ.detectors[0].function(whole))) == found
