"""What belongs to one rank alone, if a second start gives it to all ranks: a place in the data, a part of the optimizer."""

import dataclasses

import pytest

from check.test_run import BEGUN, joined, passed, run
from workshop.check.evidence.events import (
    DATA_SET,
    SUBSET,
    AcceleratorCalled,
    Drawn,
    FileWritten,
    Loaded,
    ModelCopied,
    Raised,
    Saved,
    StepTaken,
    VariablesSeen,
)
from workshop.check.evidence.process import Step
from workshop.check.rules.carried import _copied_later, _held_lost, _reordered
from workshop.check.rules.own_state import one_for_all
from workshop.check.rules.restart import _not_restored
from workshop.check.rules.samples import different_subsets, shares_overlap
from workshop.check.scenarios import Split

TAKEN = StepTaken(weights=[])


def trained(*samples, saves=False, begun=BEGUN):
    """Two ranks that train on these samples: for each rank, one in each step."""
    saved = [Saved(path="/r/last.pt", keys=[], where="t.py:30")]
    events = ([each for key in keys for each in (passed(key), begun, TAKEN)] for keys in samples)
    return run(*(joined(rank, *own, *(saved if saves and rank == 0 else [])) for rank, own in enumerate(events)))


def test_the_place_in_the_data_of_rank_0_is_that_of_all_ranks_after_a_second_start():
    whole = trained((0, 1, 2, 3), (10, 11, 12, 13))
    first = trained((0, 1), (10, 11), saves=True)
    seen, _, where, _ = one_for_all(whole, Split(first, trained((2, 3), (14, 15))))
    assert "rank 1 trains on other samples" in seen
    assert where == "t.py:30"
    assert one_for_all(whole, Split(first, trained((2, 3), (12, 13)))) is None
    # In a run that is different each time, other samples prove nothing.
    assert one_for_all(whole, Split(trained((0, 1), (16, 11)), trained((2, 3), (14, 15)))) is None


@pytest.mark.parametrize(("loaded", "of"), [((1.0, 1.0), "rank 0"), ((1.0, 2.0), "")])
@pytest.mark.parametrize("of_model", [False, True])
def test_all_ranks_get_the_part_of_the_optimizer_of_one_rank(loaded, of, of_model):
    """A model that differs between the ranks may be a copy that is averaged only from time to time."""
    parts = [dataclasses.replace(BEGUN, weights=[(norm, [norm])], names=[""], of_model=of_model) for norm in (1.0, 2.0)]
    own = [[passed(0), part, TAKEN] * 3 for part in parts]
    whole = run(*(joined(rank, *events) for rank, events in enumerate(own)))
    first = run(*(joined(rank, *events[:3]) for rank, events in enumerate(own)))
    second = run(*(joined(rank, passed(0), parts[int(norm) - 1], TAKEN) for rank, norm in enumerate(loaded)))
    found = one_for_all(whole, Split(first, second))
    assert (f"the part of {of}" in found[0]) if of and not of_model else found is None


def test_the_stages_of_a_pipeline_have_no_parameter_in_a_different_order():
    stages = [dataclasses.replace(BEGUN, weights=[(1.0, [1.0])], names=[name]) for name in ("first", "last")]
    whole, first, second = (run(*(joined(0, *(passed(0), stage, TAKEN) * n) for stage in stages)) for n in (3, 1, 2))
    assert _reordered(whole, Split(first, second), 1) is None


def test_an_attribute_that_each_step_computes_anew_is_not_lost():
    """Before the first forward pass it is zero in each start; before a step it is a sum of gradients."""

    def process(*values):
        seen = [VariablesSeen(numbers={"optimizer.sum": value}, states={}) for value in values]
        return run(joined(0, seen[0], *(each for one in seen[1:] for each in (one, dataclasses.replace(BEGUN), TAKEN))))

    whole, first = process(0.0, 0.5, 0.4, 0.45), process(0.0, 0.5, 0.4)
    assert _held_lost(whole, Split(first, process(0.0, 0.44))) is None
    # A running mean that begins again is far from its value in an uninterrupted run.
    mean = process(0.0, 0.1, 0.2, 0.3), process(0.0, 0.1, 0.2)
    assert "`optimizer.sum` begins again with 0" in _held_lost(mean[0], Split(mean[1], process(0.0, 0.1)))[0]


@pytest.mark.parametrize(("indices", "parts", "found"), [((1, 2), 2, True), ((1, 1), 2, False), ((1, 2), 1, False)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_sampler_that_divides_different_subsets_is_named_also_if_the_run_fails(indices, parts, found, fails):
    """With one part, each rank goes through a data set of its own."""
    error = [Raised(type="RuntimeError", message="sizes", traceback="", where="t.py:9")] if fails else []
    ranks = []
    for rank, chosen in enumerate(indices):
        divided = Drawn(name=DATA_SET, size=40, of=parts, result=parts, where="t.py:5")
        subset = Drawn(name=SUBSET, size=40, of=40, result=chosen, where="t.py:5")
        ranks.append(joined(rank, divided, subset, passed(rank), BEGUN, TAKEN, *error))
    rule = different_subsets if fails else shares_overlap.detectors[0].function
    said = [seen.text for seen in rule(run(*ranks))]
    assert [("divides a Subset whose indices differ" in text) for text in said] == ([True] if found else [])


@pytest.mark.parametrize(
    ("drawn", "same_samples", "seeded", "found"),
    [
        ((1, 2, 3, 4), False, True, True),  # each step draws its samples with it
        ((1, 2, 3, 4), True, True, False),  # what it draws has no effect on the training
        ((1, 2, 3, 4), False, False, True),
        ((1, 1, 1, 2), False, False, False),  # it draws only now and then, and no run can be repeated
    ],
)
def test_a_generator_of_one_rank_matters_if_the_training_uses_it(drawn, same_samples, seeded, found):
    def started(steps, states, samples):
        ranks = []
        for rank, own in enumerate(samples):
            variables = [VariablesSeen(numbers={}, states={"g": states(rank, step)}) for step in steps]
            events = [
                (seen, passed(key), dataclasses.replace(BEGUN), TAKEN) for seen, key in zip(variables, own, strict=True)
            ]
            ranks.append(joined(rank, *(each for one in events for each in one)))
        return run(*ranks)

    def own(rank, step):
        return 100 * rank + drawn[step]

    whole = started(range(4), own, ((0, 1, 2, 3), (10, 11, 12, 13)))
    first = started(range(2), own, ((0, 1), (10, 11)) if seeded else ((5, 6), (15, 16)))
    second = started((2, 3), lambda rank, step: own(0, step), ((2, 3), (12, 13) if same_samples else (2, 3)))
    seen = one_for_all(whole, Split(first, second))
    assert (seen is not None and "generator `g`" in seen[0]) == found


@pytest.mark.parametrize("by_accelerate", [True, False])
def test_the_file_that_accelerate_writes_on_all_ranks_is_no_finding(by_accelerate):
    called = [AcceleratorCalled(name="save_state", where="t.py:9")] if by_accelerate else []
    ranks = [joined(rank, *called, FileWritten(path="/r/last/scaler.pt", where="t.py:9")) for rank in range(2)]
    assert len(run(*ranks).shared_files()) == (not by_accelerate)


@pytest.mark.parametrize(
    ("rate", "planned", "kinds"), [(0.1, True, ["schedule-lost"]), (0.01, True, []), (0.1, False, [])]
)
def test_the_planned_learning_rates_of_a_program_without_a_seed_are_compared(rate, planned, kinds):
    def step(weight, own):
        begun = dataclasses.replace(BEGUN, weights=[(weight, [weight])], gradients=[(1.0, [1.0])], rates=[own], state=1)
        return Step(0.0, begun, [passed(1)], after=StepTaken(weights=[(weight + 1, [weight + 1])]))

    base = [step(float(number), own) for number, own in enumerate((0.1, 0.1, 0.01, 0.01))]
    done, rest = [step(11.0, 0.1), step(12.0, 0.1)], [step(13.0, rate), step(14.0, 0.01)]
    found = _not_restored(base, done, rest, draws=False, bound=1e-3, planned=planned)
    assert [rule.name for rule, _ in found] == kinds


@pytest.mark.parametrize(("late", "found"), [(True, True), (False, False)])
def test_only_a_copy_that_is_made_after_the_loading_has_trained_parameters(late, found):
    def started(value, *events):
        copied = ModelCopied(model="Net", weights=[(value, [value])], names=["weight"], where="t.py:9")
        return run(joined(0, *(each or copied for each in events), passed(1), BEGUN, TAKEN))

    loaded = Loaded(path="/r/last.pt", where="t.py:20")
    second = started(2.0, *((loaded, None) if late else (None, loaded)))
    assert bool(_copied_later(started(1.0, None), second)) == found
