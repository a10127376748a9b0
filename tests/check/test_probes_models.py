"""What the probes record of unusual and sharded models, and of what a program keeps in its variables."""

import torch

from check.made import Made
from workshop.check.evidence.events import (
    ActivationsKept,
    Backward,
    BuffersSeen,
    CheckpointCalled,
    Collective,
    EntriesSaved,
    Evaluated,
    FullySharded,
    InnerCollective,
    LayoutSeen,
    NotAwaited,
    Saved,
    StateLoaded,
    StepBegun,
    VariablesSeen,
    Wrapped,
)
from workshop.check.evidence.misuses import (
    BuffersKept,
    BuffersReplaced,
    GradientsIgnored,
    NeverAwaited,
    NeverFilled,
    ShardsLeft,
    TotalsSummed,
)
from workshop.check.probes.contents import chosen_rows, rows

# ---------------------------------------------------------------- two ranks that train


META = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    with torch.device("meta"):
        model = nn.Linear(2, 1)
        data = torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(data, 2):
        loss = model(batch).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    strange = nn.Linear(2, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(strange.parameters(), lr=0.1)
    strange(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
    optimizer.step()
    torch.save({"weight": torch.empty(2, device="meta")}, "meta.pt")
"""


def test_tensors_without_data_cause_no_error_in_the_program(place):
    made = Made(place("meta"), META).well()
    (process,) = made.run.processes
    assert process.stderr == ""
    first, second, third = process.steps
    assert first.before.gradients == first.after.weights == [None, None]
    assert [event.loss for event in process.of(Backward)][:2] == [None, None]
    assert not any(event.leftover for event in process.of(Backward)[:2])
    assert second.keys == [("Tensor", 4, 2), ("Tensor", 4, 3)]
    assert second.rows == []
    assert third.before.weights[0][0] > 0


# ---------------------------------------------------------------- memory that to_empty() allocates

EMPTIED = """
    import torch
    from torch import nn

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model.to_empty(device="cpu")  # here
    model[0].reset_parameters()
    model[1].weight.data.fill_(1)
    model[1].bias.data.zero_()
    model[2].load_state_dict({"weight": torch.zeros(1, 3)}, strict=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


def test_parameters_that_nothing_has_set_after_to_empty_are_recorded(place):
    made = Made(place("emptied"), EMPTIED).well()
    (process,) = made.run.processes
    (event,) = process.of(NeverFilled)
    assert (event.names, event.of, event.where) == (["2.bias"], 6, made.line("# here"))


# ---------------------------------------------------------------- the profiler

PROFILED = """
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, with_stack=True) as profiler:
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            profiler.step()
    print(len(profiler.key_averages()) > 3)
"""


def test_a_profiler_that_looks_at_the_stack_does_not_end_the_program(place):
    (process,) = Made(place("profiled"), PROFILED).well().run.processes
    assert process.stdout == "True\n"


# ---------------------------------------------------------------- a new loader in each epoch

ANEW = """
    import builtins
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    identity = id
    builtins.id = lambda thing: 1 if isinstance(thing, DataLoader) else identity(thing)  # by chance, without this line
    data = TensorDataset(torch.arange(8.0).unsqueeze(1))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for half in ([0, 1, 2, 3], [4, 5, 6, 7], [3, 2, 1, 0]):
        for (inputs,) in DataLoader(data, batch_size=2, sampler=half):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
"""


def test_epochs_are_told_apart_when_each_has_a_new_loader(place):
    """Python may give a new loader the id() of an earlier loader that no longer exists."""
    (process,) = Made(place("anew"), ANEW).well().run.processes
    assert [[number for *_, number in epoch] for epoch in process.epochs] == [[0, 1, 2, 3], [4, 5, 6, 7], [3, 2, 1, 0]]


# ---------------------------------------------------------------- sharded models

SHARDED = """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.head = nn.Linear(4, 2, bias=False)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)  # the rest
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    own = {"rank": dist.get_rank(), "random": torch.arange(3) + dist.get_rank(), "loss": 0.5 + dist.get_rank()}
    dcp.save({"model": model.state_dict(), "own": own, "epoch": 3}, checkpoint_id="checkpoint")
    dist.destroy_process_group()
"""


def test_sharded_models_are_recorded(place):
    made = Made(place("sharded"), SHARDED, "torchrun", 2).well()
    for rank in made.ranks:
        *layers, rest = rank.of(FullySharded)
        assert [event.held for event in layers] == [4 * 20] * 3
        assert (rest.held, rest.offload, rest.where) == (4 * 8, "NoneType", made.line("# the rest"))
        (layout,) = rank.of(LayoutSeen)
        assert (layout.own, layout.whole) == (136, 272)
        assert (layout.groups, layout.layers, layout.layer_groups) == (4, 3, 3)
        assert layout.dtypes == ["torch.float32"]
        assert layout.buffers == []
        assert any(event.name.startswith("reduce_scatter") for event in rank.of(InnerCollective))
        (saved,) = rank.of(CheckpointCalled)
        assert (saved.name, saved.writer, saved.where) == ("save", "", made.line("dcp.save"))
        assert not [event for event in rank.of(Collective) if event.where == saved.where]  # calls of the library itself
        (entries,) = rank.of(EntriesSaved)
        assert (sorted(entries.entries), entries.where) == (["epoch", "own.random"], saved.where)
        assert len(rank.of(ActivationsKept)) == 1
        (left,) = rank.of(ShardsLeft)
        (begun,) = rank.of(StepBegun)
        assert left.norms == {name: sketch[0] for name, sketch in zip(begun.names, begun.gradients, strict=True)}
    one, other = (rank.first(EntriesSaved).entries for rank in made.ranks)
    assert [key for key in one if one[key] != other[key]] == ["own.random"]


LOOSE = """
    import copy

    import numpy
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Queue:
        def __init__(self):
            self.rows = torch.zeros(4)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.center = torch.zeros(1)

        def forward(self, outputs):
            self.center = self.center + 1
            return outputs.sum()

    def main():
        dist.init_process_group("gloo")
        model, criterion = nn.Linear(2, 2), nn.Sequential(Loss())
        ddp = DistributedDataParallel(model)
        part = nn.Linear(2, 2)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(part, ["bias"])
        DistributedDataParallel(part)  # without a bias
        optimizer = torch.optim.Adam(ddp.parameters())
        draws = torch.Generator().manual_seed(dist.get_rank())
        fixed = torch.Generator().manual_seed(3)
        rng = numpy.random.default_rng(dist.get_rank())
        average = copy.deepcopy(model)
        queue = Queue()
        for number in range(2):
            queue.rows = queue.rows + 1
            rng.permutation(3)
            with ddp.no_sync():  # local
                criterion(ddp(torch.rand(3, 2, generator=draws))).backward()
            waited, lost = torch.ones(2), torch.ones(2)
            dist.all_reduce(waited, async_op=True).wait()
            handle = dist.all_reduce(lost, async_op=True)  # lost
            optimizer.step()
            handle.wait()
        total, own = torch.zeros(2), torch.zeros(2)
        for number in range(6):
            dist.all_reduce(torch.ones(2), async_op=True)  # never
            total += torch.tensor([3.0, number])
            dist.all_reduce(total)  # again
            own += 3
            dist.all_reduce(own.clone())
            dist.all_reduce(torch.full((1,), (1 - dist.get_rank()) * (1.0 + 1e-7 * number)))  # hardly more than before
        optimizer.load_state_dict(state_dict=optimizer.state_dict())
        torch.save({"optimizer": optimizer.state_dict(), "average": average.state_dict()}, f"{dist.get_rank()}.pt")
        dist.destroy_process_group()

    main()
"""


def test_handles_variables_and_optimizer_states_are_recorded(place):
    loose = Made(place("loose"), LOOSE, "torchrun", 2).well()
    for rank in loose.ranks:
        assert [event.where for event in rank.of(NotAwaited)] == [loose.line("# lost"), loose.line("# never")]
        assert [event.where for event in rank.of(NeverAwaited)] == [loose.line("# never")]
        (again,) = rank.of(TotalsSummed)
        assert (again.calls, again.first, again.last) == (4, 42, 45)
        assert again.where == loose.line("# again")
        assert {event.unsynced for event in rank.of(Backward)} == {loose.line("# local")}
        assert rank.first(Wrapped).names == ("weight", "bias")
        (ignored,) = rank.of(GradientsIgnored)
        assert (ignored.names, ignored.where) == (["bias"], loose.line("# without a bias"))
        numbers = [
            event.numbers for event in rank.of(VariablesSeen)
        ]  # before the first forward pass, and before the steps
        assert [each["number"] for each in numbers] == [0, 0, 1]
        assert [each["queue.rows"] for each in numbers] == [2, 2, 4]
        assert [each["criterion.0.center"] for each in numbers] == [0, 1, 2]
        assert rank.first(StateLoaded).where == loose.line("optimizer.load_state_dict")
        assert rank.first(Saved).moments == rank.first(Saved).own == 12  # two moments of six parameters
        saved = rank.first(Saved)
        assert saved.copies == ["Linear"]
        assert len(saved.tensors) == 2 * 3 + 2  # the moments and the step of each parameter, and the copy
    for name in ("draws", "rng"):
        states = [[event.states[name] for event in rank.of(VariablesSeen)[1:]] for rank in loose.ranks]
        assert len({state for rank in states for state in rank}) == 4
    assert len({event.states["fixed"] for rank in loose.ranks for event in rank.of(VariablesSeen)}) == 1


DERIVATIVES = """
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    points = torch.ones(4, 1, requires_grad=True)
    (slope,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)
    net(torch.zeros(2, 1)).sum().backward()
    slope.square().sum().backward()  # not of the output of the model, but of its derivative
    optimizer.step()
"""


def test_a_loss_of_derivatives_is_matched_with_its_forward_pass(place):
    (process,) = Made(place("derivatives"), DERIVATIVES).well().run.processes
    assert [len(event.forward.rows) for event in process.of(Backward)] == [2, 4]


SCALING = """
    import torch
    from torch import nn

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x):
            return x - self.mean

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.layers = nn.Sequential(Scale(), nn.BatchNorm1d(2), nn.Linear(2, 1))

        def forward(self, x):
            return self.layers(x)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.rand(4, 2)).sum().backward()  # trains
        optimizer.step()
"""


def test_buffers_that_change_the_inputs_are_recorded_without_ddp(place):
    scaling = Made(place("scaling"), SCALING).well()
    events = scaling.run.processes[0].of(BuffersSeen)
    assert [each.names for each in events] == [["layers.0.mean"]] * 2  # before each step but the first
    assert events[0].where == scaling.line("# trains")


# ---------------------------------------------------------------- a part that the model calls itself, and a library

PARTS = """
    import sys, types
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Simulator(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = nn.Linear(2, 1)

        def forward(self, x):
            return self.network(x)

        def predict(self, x):
            return self.network(x) + 1

    library = types.ModuleType("torchinfo")
    exec(compile("def summary(model, x): return model(x)", "/elsewhere/torchinfo.py", "exec"), vars(library))

    def main():
        dist.init_process_group("gloo")
        model = Simulator()
        with torch.no_grad():
            library.summary(model, torch.rand(1, 2))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.module.predict(torch.rand(3, 2)).sum().backward()  # around the wrapper
        optimizer.step()
        dist.destroy_process_group()

    main()
"""


def test_the_call_of_a_method_of_the_model_and_no_call_of_a_describing_library_are_recorded(place):
    made = Made(place("parts"), PARTS, "torchrun", 2).well()
    for rank in made.ranks:
        (backward,) = rank.backwards
        assert backward.forward.where == made.line("# around the wrapper")
        assert rank.of(Evaluated) == []


SERVING = """
    import copy
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x):
            return self.linear(x)

    encoder = nn.Embedding(4, 2).requires_grad_(False)
    model = Net()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        inputs = encoder(torch.tensor([0, 1]))  # the encoder
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average(inputs)  # the copy
"""


def test_a_frozen_model_that_is_no_copy_of_the_trained_one_is_not_evaluated(place):
    made = Made(place("serving"), SERVING).well()
    (process,) = made.run.processes
    assert [each.where for each in process.of(Evaluated)] == [made.line("# the copy")] * 2


REPLACED = """
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    model = nn.Linear(2, 1)
    model.register_buffer("scale", torch.ones(()))
    nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    nn.parallel.DistributedDataParallel(model)  # it sends them
    dist.destroy_process_group()
"""


def test_buffers_are_recorded_if_a_wrapper_is_about_to_send_them(place):
    made = Made(place("replaced"), REPLACED).well()
    (process,) = made.run.processes
    assert [(each.names, each.where) for each in process.of(BuffersReplaced)] == [(["scale"], made.line("# it sends"))]


KEPT = """
    import torch
    import torch.distributed as dist
    from torch import nn

    class Scaled(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * self.scale

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    model = Scaled(2, 1)
    model.register_buffer("scale", torch.ones(()))
    model.register_buffer("noise", torch.randn(3))  # for an option that is not used
    ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        ddp(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""


def test_only_buffers_that_are_read_are_recorded(place):
    (process,) = Made(place("kept"), KEPT).well().run.processes
    assert [each.names for each in process.of(BuffersKept)] == [["scale"]] * 2


def test_a_model_learns_from_the_nodes_of_a_graph_that_its_numbers_choose():
    graph = torch.arange(40.0).reshape(20, 2)
    nodes, labels = torch.tensor([3, 1]), torch.tensor([1, 0, 1, 1])
    assert chosen_rows(graph, [graph, nodes]).tolist() == [[6, 7, 3], [2, 3, 1]]
    for others in ([graph], [graph, labels], [graph, torch.arange(20)], [torch.tensor([1, 30])]):
        assert chosen_rows(graph, others) is graph


def test_an_empty_tensor_has_no_rows():
    assert rows(torch.zeros(2, 0, 4)) == rows(torch.zeros(0, 4)) == []
