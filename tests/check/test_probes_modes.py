"""What the probes record of modes, statistics, the gradients of optimizers, workers, and passes over loaders."""

import pytest

from check.made import Made
from workshop.check.evidence.events import Backward, Evaluated
from workshop.check.evidence.misuses import (
    EvaluationGraph,
    GradientsMixed,
    InHalfPrecision,
    ModeEvaluated,
    ModeSeen,
    PassEnded,
    RecomputedAtRandom,
    StatisticsSeen,
    StatisticsStale,
    WorkerBegun,
)

MODES = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    plain = nn.Linear(4, 4)  # it has no mode
    for step in range(4):
        if step == 2:
            model.eval()  # switched
            with torch.no_grad():
                model(torch.randn(8, 4))  # evaluated
                plain.eval()(torch.randn(8, 4))
        model(torch.randn(8, 4)).sum().backward()
        plain(torch.randn(8, 4)).sum().backward()
    for kept in (True, False, False):
        checkpoint(nn.Dropout(0.5), torch.ones(4, requires_grad=True), use_reentrant=False, preserve_rng_state=kept)  # dropout
    checkpoint(plain, torch.ones(4, requires_grad=True), use_reentrant=False, preserve_rng_state=False)
"""


def test_the_modes_of_models_are_recorded(place):
    modes = Made(place("modes"), MODES).well()
    (process,) = modes.run.processes
    first, plain, second = process.of(ModeSeen)
    assert (first.model, first.training, second.training) == ("Sequential", True, False)
    assert (plain.model, plain.training) == ("Linear", True)  # its mode changes nothing, so a change is not recorded
    assert second.called != modes.line("# switched")  # that of the other model came later
    (evaluated,) = process.of(ModeEvaluated)
    assert (evaluated.model, evaluated.training, evaluated.where) == ("Sequential", False, modes.line("# evaluated"))
    (statistics,) = process.of(StatisticsSeen)
    assert len(statistics.statistics) == 2
    assert statistics.where == modes.line("# evaluated")
    assert [each.where for each in process.of(RecomputedAtRandom)] == [modes.line("# dropout")]


STALE = """
    import copy
    import torch
    from torch import nn
    from torch.optim.swa_utils import AveragedModel, update_bn

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain, whole = copy.deepcopy(model), copy.deepcopy(model)  # without and with the buffers
    average, renewed = AveragedModel(model), AveragedModel(model)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        renewed.update_parameters(model)
        update_bn([torch.randn(8, 4)], renewed)
        with torch.no_grad():
            for copied in (plain, whole):
                for old, new in zip(copied.parameters(), model.parameters()):
                    old.lerp_(new, 0.5)
            for old, new in zip(whole.buffers(), model.buffers()):
                old.copy_(new)
            whole.eval()(torch.randn(8, 4))
            renewed.eval()(torch.randn(8, 4))
            plain.eval()(torch.randn(8, 4))  # plain
            average.eval()(torch.randn(8, 4))  # average
"""


def test_copies_whose_statistics_do_not_fit_their_parameters_are_recorded_once(place):
    stale = Made(place("stale"), STALE).well()
    (process,) = stale.run.processes
    found = {(each.averaged, each.where) for each in process.of(StatisticsStale)}
    assert found == {(False, stale.line("# plain")), (True, stale.line("# average"))}
    assert len(process.of(StatisticsStale)) == 2


READ = """
    import torch
    from torch import nn

    class Learner(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def loss(self, x):
            return self.net(x).sum() * (2 if self.training else 1)

    learner = Learner()
    for step in range(3):
        learner.loss(torch.randn(8, 4)).backward()
        learner.eval()  # switched
"""


def test_a_change_counts_if_the_program_looks_at_the_mode(place):
    made = Made(place("read"), READ).well()
    seen = [(each.model, each.training, each.called) for each in made.run.processes[0].of(ModeSeen)]
    assert seen == [("Linear", True, ""), ("Linear", False, made.line("# switched"))]


WORKERS = """
    import numpy, torch
    from torch.utils.data import DataLoader, Dataset

    class Noise(Dataset):
        def __init__(self):
            self.rng = numpy.random.default_rng(0)

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.tensor(self.rng.normal()) + torch.randn(())

    for epoch in range(2):
        for batch in DataLoader(Noise(), 2, num_workers=2):  # workers
            pass
    shuffled = DataLoader(range(20), 5, shuffle=True)
    for order in (shuffled, shuffled, DataLoader(range(20), 5), DataLoader(range(20), 5)):
        next(iter(order))  # no pass
        for batch in order:
            pass
"""


def test_random_states_of_workers_and_the_order_of_passes_are_recorded(place):
    workers = Made(place("workers"), WORKERS).well()
    begun = list(workers.run.all(WorkerBegun))
    assert sorted(each.worker for each in begun) == [0, 0, 1, 1]
    assert {each.where for each in begun} == {workers.line("# workers")}
    assert {tuple(sorted(each.states)) for each in begun} == {("self.rng", "torch")}
    assert len({each.states["self.rng"] for each in begun}) == 1
    assert len({each.states["torch"] for each in begun}) == 4
    passes = [each for each in workers.run.all(PassEnded) if each.batches == 4][2:]
    assert [each.iteration for each in passes] == [2, 4, 2, 2]
    one, other, *sequential = (each.order for each in passes)
    assert one != other
    assert sequential[0] == sequential[1] not in (one, other, None)


TWO_LOSSES = """
    import torch

    one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other)]
    for step in range(4):
        made = one(torch.randn(8, 4))
        if CLEARED:
            optimizers[1].zero_grad()
        other(made.detach()).mean().backward()  # mixed
        optimizers[1].step()
        optimizers[1].zero_grad()
        optimizers[0].zero_grad()
        (-other(made)).mean().backward()  # left
        optimizers[0].step()
"""


@pytest.mark.parametrize("cleared", [True, False])
def test_gradients_of_two_losses_are_recorded(place, cleared):
    program = Made(place(f"two-{cleared}"), TWO_LOSSES.replace("CLEARED", str(cleared))).well()
    found = program.run.processes[0].of(GradientsMixed)
    expected = [(program.line("# mixed"), program.line("# left"))]
    assert [(each.where, each.other) for each in found] == ([] if cleared else expected)


HALF = """
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())  # made
    for step in range(2):
        model[1](model[0](torch.randn(8, 4)).to(torch.bfloat16)).mean().backward()
        optimizer.step()
"""


def test_parameters_in_half_precision_are_recorded(place):
    program = Made(place("half"), HALF).well()
    (event,) = program.run.processes[0].of(InHalfPrecision)
    assert (event.dtype, event.places, event.where) == ("bfloat16", [2, 3], program.line("# made"))


KEPT = """
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        model.train()(torch.randn(8, 4)).mean().backward()
        optimizer.step()
        model.eval()
        total = 0
        with torch.set_grad_enabled(KEEPS):
            for batch in range(5):
                total = total + model(torch.randn(8, 4)).square().mean()  # evaluated
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_the_graph_of_an_evaluation_is_recorded(place, keeps):
    program = Made(place(f"keeps-{keeps}"), KEPT.replace("KEEPS", str(keeps))).well()
    found = program.run.processes[0].of(EvaluationGraph)
    assert len(found) == keeps
    for event in found:
        first, second, third = event.nodes
        assert second - first == third - second >= 6
        assert (event.batches, event.where) == ([2, 3, 4], program.line("# evaluated"))


CLICKS = """
    import torch
    from torch import nn

    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 1)
    for training in (True, False, True):
        if training:
            code = encoder(torch.ones(2, 4))  # encodes
            sum(decoder(code + click) for click in range(20)).sum().backward()
        else:
            for batch in range(20):
                decoder(encoder(torch.ones(2, 4)))  # without no_grad()
"""


def test_a_pass_whose_graph_is_no_longer_kept_is_no_evaluation(place):
    made = Made(place("clicks"), CLICKS).well()
    (process,) = made.run.processes
    assert {each.where for each in process.of(Evaluated)} == {made.line("# without no_grad()")}
    first, second = process.of(Backward)
    assert [each.where for each in (first.forward, *first.others)].count(made.line("# encodes")) == 1
    assert [each.where for each in (second.forward, *second.others)].count(made.line("# encodes")) == 1
