"""Properties of a run that the rules read, and rules that public programs have corrected."""

import dataclasses
from types import SimpleNamespace

import pytest

from workshop.check.command import _one_for_each_line
from workshop.check.evidence.events import (
    Backward,
    BatchLoaded,
    CheckpointCalled,
    Collective,
    DeviceChosen,
    Drawn,
    Ended,
    EngineCalled,
    EpochSet,
    Evaluated,
    Exited,
    FileRenamed,
    FileWritten,
    Forward,
    GpuNoted,
    Joined,
    Loaded,
    LoaderStarted,
    ModelEvaluated,
    Raised,
    Saved,
    Started,
    StepBegun,
    StepTaken,
    Wrapped,
)
from workshop.check.evidence.misuses import DataHeld, OtherSamplerSet, PassEnded, PythonStarted
from workshop.check.evidence.process import Process, Step
from workshop.check.evidence.run import Asked, Run
from workshop.check.foreign import _first_save, _latest
from workshop.check.program_text import start_of_its_own
from workshop.check.rules.accumulation import accumulation_traffic, accumulation_uneven
from workshop.check.rules.alike import has_resumed
from workshop.check.rules.carried import _counted_elsewhere
from workshop.check.rules.collectives import collectives_differ
from workshop.check.rules.deepspeed import engine_steps_missing
from workshop.check.rules.ending import crash, ended_early, endless, no_training
from workshop.check.rules.evaluation import evaluation_repeated, metric_of_one_rank
from workshop.check.rules.files import renamed_before_written, several_print, two_writers
from workshop.check.rules.gpus import step_waits
from workshop.check.rules.gradients import _equal_weights, _evaluated_together, gradients_differ
from workshop.check.rules.learning import loss_not_finite
from workshop.check.rules.processes import device_index, no_group
from workshop.check.rules.restart import WRAPPER, _not_restored, _with_fix
from workshop.check.rules.rule import RULES, NotJudged, Seen
from workshop.check.rules.samples import OWN_DRAWS, OWN_SAMPLER, same_order, same_samples
from workshop.check.rules.shares import plays, unequal_split, unused_batches
from workshop.check.rules.unequal import _added
from workshop.check.verdict import Finding

BEGUN = StepBegun(gradients=[], weights=[], names=[], rates=[], state=0, of_model=True, fitting=False)


def process(pid, *events):
    """A process with these events, one in each second."""
    return Process(pid, [(float(second), event) for second, event in enumerate(events)])


def run(*processes, launch="torchrun"):
    return Run(len(processes), list(processes), 0, "", False, 9.0, launch)


def forward(*keys, loader=None, where="t.py:9"):
    named = [("set", 40, key) for key in keys]
    return Forward(wrapped=False, sync=None, keys=named, rows=named, shape=(2,), loader=loader, where=where)


def passed(*keys, loader=(1, 1)):
    return Backward(forward=forward(*keys, loader=loader), loss=1.0, sync=None, leftover=False, random=1)


def joined(rank, *events):
    return process(rank + 10, Joined(rank=rank, world_size=2), *events)


def test_files_that_several_ranks_write_are_named_once_for_each_line():
    events = "/r/events.out.tfevents.17.node"
    written = [("/r/a", "t.py:3"), ("/r/b", "t.py:3"), (events, "t.py:5"), ("/r/d.lock", "t.py:7")]
    ranks = [joined(rank, *(FileWritten(path=path, where=where) for path, where in written)) for rank in (0, 1)]
    both = run(*ranks)
    assert [(path, where) for path, _, where in both.shared_files()] == [("/r/a", "t.py:3"), (events, "t.py:5")]
    found = two_writers.detectors[0].function(both)
    assert [(seen.where, seen.mild) for seen in found] == [("t.py:3", False), ("t.py:5", True)]


def test_of_a_program_that_starts_its_processes_twice_those_count_that_trained():
    step = StepTaken(weights=[])
    first, second = ([joined(rank, *steps) for rank in (0, 1)] for steps in ([step, step], []))
    assert run(*first, *second, launch="spawn").ranks == first
    assert run(*second, launch="spawn").ranks == second
    assert len(run(*first, *second).ranks) == 4


@pytest.mark.parametrize(
    ("collectives", "names", "divided"),
    [
        (("all_gather", "all_reduce"), ["a", "head"], "parts"),
        (("all_gather", "all_reduce"), ["module.a", "head"], "parts"),
        (("all_gather", "all_reduce"), ["head", "a"], ""),  # DDP should average what differs
        (("all_gather",), ["a", "head"], ""),
    ],
)
def test_a_layer_beside_ddp_whose_gradients_differ_may_be_divided(collectives, names, divided):
    calls = [Collective(name=name, shape=(8, 4), dtype="float32", inside=True) for name in collectives]
    ranks = []
    for rank in (0, 1):
        gradients = [(1.0, [1.0]), (1.0 + rank, [1.0])]
        begun = dataclasses.replace(BEGUN, gradients=gradients, weights=[(1.0, [1.0])] * 2, names=names)
        ranks.append(joined(rank, Wrapped(names=("a",)), *calls, passed(rank), begun, StepTaken(weights=[])))
    assert run(*ranks).divided == divided


def test_a_count_since_the_start_is_not_lost_if_another_count_is_restored():
    initial, expected, now = {"step": 0, "local": 0}, {"step": 10, "local": 10}, {"step": 10, "local": 0}
    assert _counted_elsewhere("local", initial, expected, now | {"found": 3})
    assert not _counted_elsewhere("local", initial, expected, {"step": 0, "local": 0})
    assert not _counted_elsewhere("local", initial, {"step": 2, "local": 2}, {"step": 2, "local": 0})  # by chance


@pytest.mark.parametrize(("steps", "missing"), [(4, 0), (1, 1)])
def test_an_engine_may_get_two_losses_before_a_step_that_updates_the_parameters(steps, missing):
    names = ["backward", "backward", "step"] * 4
    calls = [EngineCalled(name=name, tag="") for name in names]
    updates = [event for _ in range(steps) for event in (BEGUN, StepTaken(weights=[]))]
    assert len(list(engine_steps_missing.detectors[0].function(run(joined(0, *calls, *updates))))) == missing


def test_evaluations_after_different_numbers_of_steps_are_not_compared():
    def evaluated(steps):
        return ModelEvaluated(model="Net", weights=[(1.0, [1.0])], names=["a"], steps=steps)

    together = list(
        _evaluated_together([process(1, evaluated(4), evaluated(8)), process(2, evaluated(4), evaluated(6))])
    )
    assert [[each.steps for each in pair] for pair in together] == [[4, 4]]


def test_evaluations_before_ddp_makes_the_parameters_equal_are_not_compared():
    def evaluated(norm):
        return ModelEvaluated(model="Net", weights=[(norm, [norm])], names=["a"])

    ranks = [joined(rank, evaluated(rank), Wrapped(names=("a",)), evaluated(2.0)) for rank in (0, 1)]
    ((first, second),) = _evaluated_together(ranks)
    assert first.weights == second.weights == [(2.0, [2.0])]


def test_the_fix_for_a_plain_checkpoint_that_a_wrapped_model_loads_is_about_the_wrapper():
    error = 'Error(s) in loading state_dict for DistributedDataParallel: Missing key(s) in state_dict: "module.weight"'
    assert _with_fix(Seen(error, "t.py:3")).fix == WRAPPER
    assert not _with_fix(Seen(error.replace("module.weight", "weight"), "t.py:3")).fix


def test_samples_that_a_rank_evaluates_in_two_ways_count_once():
    looks = [Evaluated(forward=forward(*range(30, 38), loader=(loader, 1))) for loader in (2, 3)]
    (seen,) = evaluation_repeated.detectors[0].function(run(joined(0, *looks), joined(1, *looks)))
    assert seen.text == "2 ranks evaluate each of the 8 test samples"
    other = [Evaluated(forward=forward(*range(20, 28), loader=(loader, 1))) for loader in (2, 3)]
    assert not list(evaluation_repeated.detectors[0].function(run(joined(0, *looks), joined(1, *other))))


@pytest.mark.parametrize(("second", "found"), [((1, 2), 0), ((3, 4), 1)])
def test_two_passes_over_the_same_batch_do_not_accumulate(second, found):
    """An adversarial step changes the parameters with the averaged gradient of its first pass."""
    both = [dataclasses.replace(passed(*keys), sync=True, leftover=keys is second) for keys in ((1, 2), second)]
    steps = [event for _ in range(4) for event in (*both, BEGUN, StepTaken(weights=[]))]
    ranks = [joined(rank, Wrapped(names=("a",)), *steps) for rank in (0, 1)]
    assert len(list(accumulation_traffic.detectors[0].function(run(*ranks)))) == found


@pytest.mark.parametrize(("apart", "found"), [(0.0, 0), (0.5, 1)])
def test_an_optimizer_may_exchange_the_gradients_in_its_step(apart, found):
    def rank(number):
        events = []
        for step in range(4):
            own = step + number * apart
            begun = dataclasses.replace(BEGUN, weights=[(own, [own])], gradients=[(1.0 + number, [1.0])], names=["a"])
            events += [passed(2 * step + 8 * number), begun, StepTaken(weights=[(own + 1, [own + 1])])]
        return joined(number, *events)

    assert len(list(gradients_differ.detectors[0].function(run(rank(0), rank(1))))) == found


@pytest.mark.parametrize(("inside", "found"), [(True, 0), (False, 1)])
def test_an_evaluation_of_one_batch_that_exchanges_as_each_step_does_is_one_call_more(inside, found):
    reduces, loaded = Collective(name="all_reduce", shape=(), dtype="float32", where="t.py:3"), BatchLoaded(seconds=0.0)

    def rank(number):
        steps = [
            event
            for key in range(4)
            for event in (loaded, reduces, passed(2 * key, loader=(1, 1)), BEGUN, StepTaken(weights=[]))
        ]
        samples = range(100 * number + 100, 100 * number + 112)
        looks = [loaded, Evaluated(forward=forward(*samples, loader=(2, 1))), *([reduces] if inside else [])]
        return joined(number, *steps, *looks, *steps)

    assert len(list(metric_of_one_rank.detectors[0].function(run(rank(0), rank(1))))) == found


@pytest.mark.parametrize(("targets", "uneven"), [((59, 64), False), ((100, 120), True)])
def test_a_random_mask_explains_small_differences_of_the_numbers_of_targets(targets, uneven):
    step = [(SimpleNamespace(where="t.py:9", targets=number), 1.0) for number in targets]
    assert _equal_weights(step) == uneven


def test_other_numbers_in_the_same_lines_are_told_from_the_same_lines():
    ranks = [joined(rank) for rank in (0, 1)]
    ranks[0].stdout, ranks[1].stdout = "loss 0.25\n", "loss 0.5\n"
    (seen,) = several_print.detectors[0].function(run(*ranks))
    assert seen.text == 'rank 1 prints other numbers in the same lines as rank 0: "loss 0.5"'


@pytest.mark.parametrize(("where", "found"), [("t.py:4", 1), ("", 0)])
def test_a_device_that_only_a_library_chooses_is_not_named(where, found):
    started = Started(parent=1, rank="1", local_rank="1")
    chosen = DeviceChosen(index=0, where=where)
    ranks = [process(1, dataclasses.replace(started, rank="0", local_rank="0"), chosen), process(2, started, chosen)]
    assert len(list(device_index.detectors[0].function(run(*ranks)))) == found


@pytest.mark.parametrize(
    ("inside", "before", "found"),
    [
        ("in repeat_interleave()", [], True),
        ("in _broadcast_signal()", [], False),  # the program does not call it
        ("", [], False),  # an optimizer, with a step count that no file has brought to the GPU
        ("", [Loaded(path="/r/a.pt")], True),
    ],
)
def test_a_library_waits_because_of_the_program(inside, before, found):
    waits = [GpuNoted(kind="wait-inside", detail=inside, where="t.py:9")] * 12
    steps = [event for _ in range(6) for event in (passed(1), BEGUN, *waits, StepTaken(weights=[]))]
    assert bool(list(step_waits.detectors[0].function(run(joined(0, *before, *steps))))) == found


OF_DEEPSPEED = "[2026-11-29 20:41:00,686] [WARNING] [lr_schedules.py:759:get_lr] no value yet"


@pytest.mark.parametrize(
    ("lines", "found"), [(["on GPU 0", "on GPU 1"], 0), (["loss 0.5"] * 2, 1), ([OF_DEEPSPEED] * 2, 0)]
)
def test_lines_that_name_the_rank_are_not_the_same(lines, found):
    ranks = [joined(rank) for rank in (0, 1)]
    for rank, line in zip(ranks, lines, strict=True):
        rank.stdout = line + "\n"
    assert len(list(several_print.detectors[0].function(run(*ranks)))) == found


def test_batches_of_a_loader_that_no_model_sees_are_not_wasted():
    loaded = BatchLoaded(seconds=0.0)
    preparation = [loaded, loaded, loaded, PassEnded(loader=7, iteration=1, batches=3, order=None)]
    assert unused_batches(process(1, *preparation, loaded, passed(1))) == 0
    assert unused_batches(process(1, loaded, loaded, loaded, loaded, passed(1))) == 3


def test_the_first_checkpoint_that_counts_follows_a_step_with_a_learning_rate():
    saved = Saved(path="/r/a.pt", keys=[])
    steps = [dataclasses.replace(BEGUN, rates=[rate]) for rate in (0.0, 0.1, 0.2)]
    events = [event for step in steps for event in (passed(1), step, StepTaken(weights=[]), saved)]
    assert _first_save(run(joined(0, *events[:-1]))) == 2


@pytest.mark.parametrize(("shape", "found"), [((1,), 0), ((2,), 1)])
def test_a_number_and_a_list_of_one_number_are_the_same_call(shape, found):
    step = passed(1), BEGUN, StepTaken(weights=[])
    calls = [Collective(name="all_reduce", shape=each, dtype="float", where="t.py:2") for each in ((), shape)]
    ranks = run(*(joined(rank, *step, call, *step) for rank, call in enumerate(calls)), launch="torchrun")
    assert len(list(collectives_differ.detectors[0].function(ranks))) == found


def test_the_newest_checkpoint_is_the_most_complete_one(tmp_path):
    for name in ("model.pt", "best.pt", "results.pt"):
        (tmp_path / name).touch()
    renamed = FileRenamed(source=f"{tmp_path}/model.tmp"), FileWritten(path=f"{tmp_path}/model.pt")
    saves = [Saved(path=f"{tmp_path}/model.tmp", keys=["weight"], moments=2), *renamed]
    saves += [Saved(path=f"{tmp_path}/best.pt", keys=["weight"]), Saved(path=f"{tmp_path}/results.pt", keys=[])]
    for left, newest in ((saves, "model.pt"), (saves[3:], "best.pt"), (saves[4:], "results.pt")):
        assert _latest(run(joined(0, passed(1), BEGUN, StepTaken(weights=[]), *left)), tmp_path) == newest


def test_parameters_without_gradients_do_not_tell_whether_a_run_resumed():
    def step(trained, average, gradient):
        begun = dataclasses.replace(
            BEGUN, weights=[(trained, [trained]), (average, [average])], gradients=[gradient, None]
        )
        return Step(0.0, begun, [], after=StepTaken(weights=[(trained + 1, [trained + 1]), (average, [average])]))

    done = [step(1.0, 5.0, (1.0, [1.0]))]
    assert has_resumed(done, step(2.0, 7.0, (1.0, [1.0])))
    assert not has_resumed(done, step(3.0, 5.0, (1.0, [1.0])))
    assert has_resumed(
        done, step(3.0, 5.0, (1.0, [1.0])), [[(3.0, [3.0]), (5.0, [5.0])]]
    )  # changed before an evaluation


@pytest.mark.parametrize(("contents", "kind"), [(10, "random-lost"), (0, "resume-differs")])
def test_samples_that_are_augmented_differently_after_a_restart_are_a_hint(contents, kind):
    def step(weight, gradient, key, shift=0):
        values = {"weights": [(weight, [weight])], "gradients": [(gradient, [gradient])], "state": 1}
        seen = dataclasses.replace(forward(key, loader=(1, 1)), rows=[("content", key + shift, 1)])
        backward = dataclasses.replace(passed(key), forward=seen)
        after = StepTaken(weights=[(weight + gradient, [weight + gradient])])
        return Step(0.0, dataclasses.replace(BEGUN, **values), [backward], after=after)

    base = [step(float(number), 1.0, number) for number in range(1, 5)]
    rest = [step(3.0, 2.0, 3, contents), step(5.0, 2.0, 4, contents)]
    assert [rule.name for rule, _ in _not_restored(base, base[:2], rest, draws=False, bound=1e-3)] == [kind]


def test_set_epoch_of_a_different_sampler_is_named():
    steps = [
        event
        for epoch in (1, 2)
        for key in range(0, 12, 2)
        for event in (passed(key, key + 1, loader=(1, epoch)), BEGUN)
    ]
    told = [EpochSet(epoch=0), OtherSamplerSet(loader=1), EpochSet(epoch=1)]
    (seen,) = same_order.detectors[0].function(run(joined(0, *told, *steps), joined(1, *told, *steps)))
    assert seen.text.endswith("set_epoch was called with [0, 1] on the DistributedSampler of a different loader")
    assert seen.fix == OWN_SAMPLER


def test_the_fix_for_equal_samples_without_a_loader_is_about_seeds():
    def said(*before):
        steps = [
            event
            for key in range(0, 80, 2)
            for event in (passed(key, key + 1, loader=None), BEGUN, StepTaken(weights=[]))
        ]
        return [
            seen.fix
            for seen in same_samples.detectors[0].function(run(*(joined(rank, *before, *steps) for rank in (0, 1))))
        ]

    assert said() == [OWN_DRAWS]
    assert said(LoaderStarted(loader=1, iteration=1, length=None)) == [""]


@pytest.mark.parametrize(
    ("message", "kinds"), [("needs at least 4 CUDA GPUs", [1, 0]), ("no file for 4 ranks", [0, 1])]
)
def test_a_program_that_wants_more_gpus_has_not_crashed(message, kinds):
    alone = run(
        process(1, Raised(type="AssertionError", message=message, traceback="", where="t.py:3")), launch="spawn"
    )
    alone.status = 1
    assert [len(list(rule.detectors[0].function(alone))) for rule in (no_training, ended_early)] == kinds


def test_a_program_whose_workers_are_further_programs_cannot_be_judged():
    alone = run(process(1, PythonStarted(where="t.py:5"), Exited(status=1)), launch="spawn")
    found = [[seen.where for seen in rule.detectors[0].function(alone)] for rule in (no_training, crash)]
    assert found == [["t.py:5"], []]
    ranks = run(*(process(number, PythonStarted(where="t.py:5")) for number in (1, 2)), launch="torchrun")
    found = [[seen.where for seen in rule.detectors[0].function(ranks)] for rule in (no_training, no_group)]
    assert found == [["t.py:5"], []]


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ('add("--start_epoch")\nfor i in range(args.start_epoch, 9):', "--start_epoch"),
        ('add("--start-epoch")\nargs.start_epoch = checkpoint["epoch"]', ""),
        ('add("--epochs")', ""),
    ],
)
def test_an_option_for_the_first_epoch_counts_unless_the_checkpoint_has_that(text, option):
    assert start_of_its_own(text, ["--epochs", "9"]) == option


def test_layers_that_are_added_after_wrapping_are_named():
    wraps = Wrapped(names=("embedding.weight", "head.weight"))
    assert _added(joined(0, wraps), ["head.weight", "head.1.weight", "module.embedding.weight"]) == ["head.1.weight"]


def test_a_split_that_differs_between_the_ranks_is_named():
    def ranks(*results):
        split = Drawn(name="random_split", size=9, of=1, result=0, where="t.py:8")
        draws = [dataclasses.replace(split, result=result) for result in results]
        return [joined(rank, draw, passed(1), BEGUN) for rank, draw in enumerate(draws)]

    assert unequal_split(run(*ranks(1, 2))) == "t.py:8"
    assert unequal_split(run(*ranks(1, 1))) == ""


def test_a_rank_that_renames_a_folder_waits_for_those_that_write_into_it():
    barrier = Collective(name="barrier", shape=None, dtype="")
    renames = FileRenamed(source="/r/unfinished", where="t.py:5")
    writes = FileWritten(path="/r/unfinished/random_states_1.pkl")

    def said(first, second):
        return [seen.where for seen in renamed_before_written.detectors[0].function(run(first, second))]

    assert said(joined(0, barrier, BEGUN, renames), joined(1, barrier, writes)) == ["t.py:5"]
    assert said(joined(0, BEGUN, barrier, renames), joined(1, writes, barrier)) == []
    together, writes = (
        CheckpointCalled(name="save", writer="", where="t.py:4"),
        dataclasses.replace(writes, where="t.py:4"),
    )
    assert (
        said(joined(0, barrier, together, BEGUN, renames), joined(1, barrier, together, writes)) == []
    )  # dcp.save() waits


def test_parameters_that_are_not_finite_are_named_although_the_loss_is():
    steps = [event for norm in (1.0, float("nan")) for event in (passed(1), BEGUN, StepTaken(weights=[(norm, [norm])]))]
    (seen,) = loss_not_finite.detectors[0].function(run(joined(0, *steps)))
    assert "the parameters of" in seen.text
    assert "after step 2" in seen.text


def test_a_line_gets_one_finding_of_a_kind():
    rules = RULES["two-writers"], RULES["leak"]
    found = [
        Finding(rule, f"{rule.name} {number}", where) for rule in rules for number, where in ((1, "a:1"), (2, "a:1"))
    ]
    found += [Finding(rules[0], "one", ""), Finding(rules[0], "two", "")]
    assert [finding.seen for finding in _one_for_each_line(found)] == ["two-writers 1", "leak 1", "one", "two"]


def test_a_game_is_recognized_by_the_inputs_of_the_whole_model():
    looks = [Evaluated(forward=forward(number)) for number in range(10)]
    heads = forward(90, 91, where="t.py:5")  # on features, which change with each step
    step = Backward(forward=heads, others=[forward(0, 1)], loss=1.0, sync=None, leftover=False, random=1)
    assert plays(process(1, *looks, step))
    assert not plays(process(1, *looks[5:], step))
    frozen = Evaluated(forward=step.forward)  # a teacher, which gets the same batch
    assert not plays(process(1, frozen, step))


@pytest.mark.parametrize(("asked", "said"), [(None, NotJudged), (Asked(), Seen)])
def test_a_slow_step_of_a_program_that_trains_is_no_endless_loop(asked, said):
    stack = '  File "/lib/site-packages/torch/x.py", line 2 in backward\n  File "/home/me/train.py", line 9 in main\n'
    events = [(0.0, BEGUN), (0.0, StepTaken(weights=[])), (0.0, Ended())]
    process = Process(pid=1, events=events, stack=stack)
    run = Run(nproc=1, processes=[process], status=None, hung="busy", flooded=False, seconds=61.0, launch="torchrun")
    (found,) = endless.detectors[0].function(dataclasses.replace(run, asked=asked))
    assert isinstance(found, said)
    assert not list(no_training.detectors[0].function(run))


@pytest.mark.parametrize(("states", "draws"), [([1, 1, 2, 2, 3, 3], False), ([1, 2, 3, 4, 5, 6], True)])
def test_only_random_numbers_within_an_iteration_over_a_loader_count_as_drawn_by_steps(states, draws):
    passes = [passed(0, 2, loader=(1, number)) for number in (1, 1, 2, 2, 3, 3)]
    events = [dataclasses.replace(each, random=state) for each, state in zip(passes, states, strict=True)]
    assert process(1, *events).draws is draws


@pytest.mark.parametrize(("contents", "identity"), [((1, 2), "rows"), ((1, 1), "keys")])
def test_numbers_of_ranks_with_data_sets_of_their_own_are_not_the_same_samples(contents, identity):
    used = passed(0, 1)
    used = dataclasses.replace(
        used, forward=dataclasses.replace(used.forward, rows=[])
    )  # the number of a user is no sample
    ranks = [
        joined(rank, DataHeld(name="set", length=40, contents={".x": each}), used) for rank, each in enumerate(contents)
    ]
    run = Run(nproc=2, processes=ranks, status=0, hung="", flooded=False, seconds=1.0, launch="torchrun")
    run.settle_identity()
    assert [each.identity for each in ranks] == [identity] * 2


def test_steps_of_other_parameters_without_a_backward_pass_are_parts_of_a_step():
    def step(value, *passes):
        begun = dataclasses.replace(BEGUN, weights=[(value, [value])])
        return (*passes, begun, StepTaken(weights=[(1.01 * value, [1.01 * value])]))

    two = passed(0), dataclasses.replace(passed(1), leftover=True)
    groups = [event for _ in range(4) for event in (*step(1.0, *two), *step(9.0))]
    again = [event for _ in range(4) for event in (*step(1.0, *two), *step(1.01))]
    for events, found in ((groups, 0), (again, 1)):
        run = Run(
            nproc=1, processes=[joined(0, *events)], status=0, hung="", flooded=False, seconds=1.0, launch="torchrun"
        )
        assert len(list(accumulation_uneven.detectors[0].function(run))) == found


@pytest.mark.parametrize(("sizes", "found"), [((1, 1, 1, 2, 2, 2), 0), ((1, 1, 2, 2, 1, 1), 1), ((1, 2, 2, 2, 2), 1)])
def test_a_schedule_of_the_number_of_batches_is_no_mistake(sizes, found):
    step = dataclasses.replace(BEGUN, weights=[(1.0, [1.0])]), StepTaken(weights=[(1.01, [1.01])])
    steps = [(passed(0), *[dataclasses.replace(passed(1), leftover=True)] * (size - 1), *step) for size in sizes]
    alone = run(joined(0, *(event for each in steps for event in each)), launch="torchrun")
    assert len(list(accumulation_uneven.detectors[0].function(alone))) == found


def test_backward_passes_that_try_batches_before_the_first_step_are_no_batches_of_it():
    step = dataclasses.replace(BEGUN, weights=[(1.0, [1.0])]), StepTaken(weights=[(1.01, [1.01])])
    steps = [event for _ in range(3) for event in (passed(0), dataclasses.replace(passed(1), leftover=True), *step)]
    alone = run(joined(0, passed(0), passed(0), passed(0), *steps), launch="torchrun")
    assert not list(accumulation_uneven.detectors[0].function(alone))
