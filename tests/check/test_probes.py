"""The events that the probes must record for tiny programs."""

import json
import os
import sys

import pytest

from check.made import Made
from workshop.check.evidence.events import (
    ActivationsKept,
    Backward,
    BatchLoaded,
    CheckpointCalled,
    Collective,
    Compiled,
    DeviceChosen,
    DeviceSeen,
    Drawn,
    Ended,
    EpochSet,
    Evaluated,
    Exited,
    FileRenamed,
    FileWritten,
    FullySharded,
    GradientsClipped,
    GraphMeasured,
    GroupDestroyed,
    InnerCollective,
    Joined,
    Joining,
    LayersSeen,
    LayoutSeen,
    Loaded,
    LoaderStarted,
    LossWeighted,
    ModelCopied,
    ModelUpdated,
    NotAwaited,
    Raised,
    Saved,
    Started,
    StateLoaded,
    StoreOpened,
    UnevenJoined,
    ValuesAsked,
    VariablesSeen,
    WeightsRead,
    Wrapped,
    WroteOutside,
)
from workshop.check.evidence.run import Asked

# ---------------------------------------------------------------- two ranks that train

TRAINING = """
    import json, os, random
    import numpy, torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

    rank = int(os.environ["RANK"])
    drawn = [torch.rand(1).item(), float(numpy.random.rand()), random.random()]
    with open(f"drawn-{rank}.json", "w") as file:
        json.dump(drawn, file)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    ddp = DistributedDataParallel(model)
    data = TensorDataset(torch.randn(20, 1, 4, 4), torch.randint(2, (20,)))
    train, test = Subset(data, range(2, 18)), Subset(data, range(18, 20))
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 4, sampler=sampler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(ddp(images), labels)  # training
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.item()
    ddp.eval()
    with torch.no_grad():
        for images, labels in DataLoader(test, 2):
            model(images)  # evaluation
    counts = torch.tensor([1.0, 2.0])
    dist.all_reduce(counts)
    with Join([ddp]):
        pass
    torch.save({"model": model.state_dict()}, "shared.tmp")
    if rank == 0:
        os.replace("shared.tmp", "shared.pt")
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def training(place):
    return Made(place("training"), TRAINING, "torchrun", 2, asked=Asked(epochs=2)).well()


def test_a_process_and_its_group_are_recorded(training):
    assert [rank.rank for rank in training.ranks] == [0, 1]
    assert training.run.asked == Asked(epochs=2)
    for number, rank in enumerate(training.ranks):
        (started,), (joining,), (joined,) = rank.of(Started), rank.of(Joining), rank.of(Joined)
        assert (started.rank, started.local_rank) == (str(number), str(number))
        assert (joined.rank, joined.world_size) == (number, 2)
        assert joining.where == training.line("init_process_group")
        assert (joining.init_method, joining.world_size) == ("None", "2")
        assert joining.address == joining.given_address == "127.0.0.1"
        assert joining.port == joining.given_port
        assert rank.first(GroupDestroyed).where == training.line("destroy_process_group")
        assert isinstance(rank.events[-1][1], Ended)


def test_collectives_are_recorded(training):
    for rank in training.ranks:
        (reduced,) = (each for each in rank.of(Collective) if each.where == training.line("dist.all_reduce"))
        assert (reduced.name, reduced.shape, reduced.dtype) == ("all_reduce", (2,), "torch.float32")
        assert len(rank.of(UnevenJoined)) == 1


def test_forward_and_backward_passes_are_recorded(training):
    rank = training.ranks[0]
    assert rank.first(Wrapped).where == training.line("ddp = Dist")
    backwards = rank.of(Backward)
    assert len(backwards) == 4
    for backward in backwards:
        assert backward.forward.where == training.line("# training")
        assert backward.where == training.line("loss.backward()")
        assert backward.loss > 0
        assert backward.forward.wrapped
        assert backward.sync is backward.forward.sync is True
        assert backward.forward.shape == (1, 4, 4)
        assert not backward.leftover
        assert len(backward.forward.keys) == len(backward.forward.rows) == 4
    trained = {key for each in training.ranks for epoch in each.epochs[:1] for key in epoch}
    assert trained == {("TensorDataset", 20, index) for index in range(2, 18)}  # indices without the Subset
    assert rank.evaluations == [[("TensorDataset", 20, 18), ("TensorDataset", 20, 19)]]
    assert rank.first(Evaluated).where == training.line("# evaluation")


def test_loaders_are_recorded(training):
    rank = training.ranks[0]
    started = rank.of(LoaderStarted)
    assert [(each.iteration, each.length) for each in started] == [(1, 2), (2, 2), (1, 1)]
    assert started[0].loader == started[1].loader != started[2].loader
    assert started[0].where == training.line("in loader:")
    assert [each.epoch for each in rank.of(EpochSet)] == [0, 1]
    assert len(rank.of(BatchLoaded)) == 5
    assert rank.of(Backward)[2].forward.loader == (started[1].loader, 2)


def test_steps_are_recorded(training):
    one, other = training.ranks
    assert len(one.steps) == 4
    before, after = one.steps[0].before, one.steps[0].after
    assert before.where == training.line("optimizer.step()")
    assert before.names == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert before.rates == [0.1]
    assert before.of_model
    assert not before.fitting
    assert before.gradients == other.steps[0].before.gradients  # DDP has averaged them
    assert before.weights != after.weights == one.steps[1].before.weights
    (measured,) = one.of(GraphMeasured)
    assert 0 < measured.nodes < 30


def test_layers_and_values_are_recorded(training):
    rank = training.ranks[0]
    seen = rank.of(LayersSeen)
    assert len(seen) == 4
    assert (seen[-1].dtypes, seen[-1].convolved, seen[-1].batchnorm) == (["torch.float32"], [(2, 2)], True)
    assert len(rank.of(DeviceSeen)) == 1
    values = rank.of(ValuesAsked)
    assert [each.count for each in values] == [1, 2, 3, 4]  # the first value is drawn before the training
    assert values[-1].where == training.line("loss.item()")


def test_each_rank_that_saves_to_the_same_path_is_recorded(training):
    """torch.save opens the file in C++, for which Python has no audit event."""
    for rank in training.ranks:
        (written,) = (each for each in rank.of(FileWritten) if each.path == training.path("shared.tmp"))
        assert written.where == training.line("torch.save")
    moved = [each.path for each in training.ranks[0].of(FileWritten)][-1]
    assert moved == training.path("shared.pt")
    assert training.ranks[0].first(FileRenamed).source == training.path("shared.tmp")
    saved = training.ranks[0].first(Saved)
    assert saved.path == training.path("shared.tmp")
    assert "3.weight" in saved.keys
    assert not saved.whole


def test_each_rank_has_its_own_random_state(training):
    one, other = (json.loads((training.scratch / f"drawn-{rank}.json").read_text()) for rank in range(2))
    assert all(here != there for here, there in zip(one, other, strict=True))


# ---------------------------------------------------------------- random splits and orders

DRAWING = """
    import random
    import numpy, torch
    from torch.utils.data import DataLoader, random_split

    values = list(range(50))
    for seed in (1, 1, 2):
        parts = random_split(values, [30, 20], generator=torch.Generator().manual_seed(seed))  # split
    torch.randperm(50)
    random.shuffle(values)  # by the module
    random.Random(1).shuffle(x=values)
    random.sample(values, 10)
    numpy.random.permutation(50)
    numpy.random.default_rng(1).shuffle(values)  # by NumPy
    for batch in DataLoader(values, shuffle=True):  # drawn by a library
        pass
"""


def test_random_splits_and_orders_of_the_program_are_recorded(place):
    drawing = Made(place("drawing"), DRAWING).well()
    (process,) = drawing.run.processes
    first, again, different, *others = process.of(Drawn)
    assert first == again
    assert (first.name, first.size, first.where) == ("random_split", 50, drawing.line("# split"))
    assert different.of == first.of
    assert different.result != first.result
    functions = ["torch.randperm", "random.shuffle", "shuffle", "random.sample", "numpy.random.permutation", "shuffle"]
    assert [each.name for each in others] == functions
    assert others[1].where == drawing.line("# by the module")
    assert others[-1].where == drawing.line("# by NumPy")


# ---------------------------------------------------------------- streams

STREAMING = """
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(4)

    for workers in (0, 2):
        for batch in DataLoader(Stream(), num_workers=workers):
            pass
"""


def test_the_workers_of_a_stream_are_recorded(place):
    streaming = Made(place("streaming"), STREAMING).well()
    started = [each for process in streaming.run.processes for each in process.of(LoaderStarted)]
    assert [each.workers for each in started] == [0, 2]
    assert {each.source for each in started} == {streaming.line("def __iter__")}


# ---------------------------------------------------------------- copies of models

COPYING = """
    import copy
    import torch

    @torch.no_grad()
    def follow(average, model):
        for old, new in zip(average.parameters(), model.parameters()):
            old.lerp_(new, 0.1)

    model = torch.nn.Linear(2, 1)
    average = copy.deepcopy(model)
    copy.deepcopy([1, [2]])
    layer = torch.nn.TransformerEncoderLayer(4, 1, 4)
    torch.nn.TransformerEncoder(layer, 2)  # copied by a library
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(4, 2)).mean().backward()
        optimizer.step()
        follow(average, model)  # on every rank
"""


def test_copies_of_a_model_and_their_updates_are_recorded(place):
    copying = Made(place("copying"), COPYING).well()
    (process,) = copying.run.processes
    (copied,) = process.of(ModelCopied)
    assert (copied.model, copied.names) == ("Linear", ["weight", "bias"])
    assert copied.where == copying.line("average = copy")
    first, _ = process.of(ModelUpdated)
    assert [where for _, where, *_ in first.calls] == [
        copying.line("old.lerp_"),
        copying.line("# on every rank"),
    ]


# ---------------------------------------------------------------- losses

WEIGHTING = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    model, weights = nn.Linear(4, 3), torch.tensor([0.5, 1.0, 2.0])
    labels = torch.tensor([0, 1, 2, 2, 0, 1, 2, 2])

    def weighted(logits):
        return (nn.functional.cross_entropy(logits, labels, reduction="none") * weights[labels]).mean()

    nn.functional.cross_entropy(model(torch.randn(8, 4)), labels, weight=weights).backward()  # argument
    weighted(model(torch.randn(8, 4))).backward()
    checkpoint(weighted, model(torch.randn(8, 4)), use_reentrant=False).backward()  # its tensors are not there
"""


def test_the_constants_that_weight_a_loss_are_recorded(place):
    weighting = Made(place("weighting"), WEIGHTING).well()
    argument, factors = weighting.run.processes[0].of(LossWeighted)
    assert argument.values == factors.values == [0.5, 1.0, 2.0]
    assert argument.argument
    assert not factors.argument
    assert argument.where == weighting.line("# argument")
    assert factors.where == weighting.line('reduction="none"')


# ---------------------------------------------------------------- processes that a program starts

STARTING = """
    import json, multiprocessing, os, random
    import numpy, torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def draw(*name):
        with open("-".join(map(str, ("drawn", *name))) + ".json", "w") as file:
            json.dump([torch.initial_seed(), int(numpy.random.randint(2**31)), random.random()], file)

    def worker(rank, port):
        draw("spawned", rank)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        assert isinstance(store, dist.TCPStore)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        dist.barrier()  # otherwise one rank may leave the group while the other still connects to it
        dist.destroy_process_group()

    def fail():
        raise ValueError("a child  fails")

    if __name__ == "__main__":
        draw("main")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(worker, args=(store.port,), nprocs=2)
        processes = []
        for method in ("spawn", "forkserver", "fork"):
            processes.append(mp.get_context(method).Process(target=draw, args=(method,)))
        processes.append(mp.get_context("spawn").Process(target=fail))
        assert multiprocessing.get_start_method() == "fork"
        multiprocessing.set_start_method("spawn", force=True)
        processes.append(multiprocessing.Process(target=draw, args=("chosen",)))
        for process in processes:
            process.start()
            process.join()
        raise SystemExit(3)
"""


@pytest.fixture(scope="module")
def starting(place):
    return Made(place("starting"), STARTING, "spawn", 2)


def test_exceptions_of_children_and_the_exit_status_are_recorded(starting):
    assert starting.run.status == 3
    (exited,) = starting.run.all(Exited)
    assert exited.status == 3
    (raised,) = starting.run.all(Raised)
    assert (raised.type, raised.message, raised.where) == (
        "ValueError",
        "a child fails",
        starting.line('raise ValueError("'),
    )
    assert "in fail" in raised.traceback
    assert all(process.first(Ended) for process in starting.run.processes)
    main = starting.run.processes[0]
    assert all(process.first(Started).parent == main.pid for process in starting.run.processes[1:])


def test_stores_are_recorded(starting):
    opened = list(starting.run.all(StoreOpened))
    assert [(each.port == 0, each.master) for each in opened] == [(True, True), (False, False), (False, False)]
    assert [rank.rank for rank in starting.ranks] == [0, 1]


@pytest.mark.skipif(sys.platform == "darwin", reason="the start method is not fork")
def test_only_launched_processes_have_their_own_random_state(starting):
    """Processes that the program forks, such as DataLoader workers, inherit the state of torch and NumPy, as in a real run."""
    names = ["main", "spawned-0", "spawned-1", "spawn", "forkserver", "fork", "chosen"]
    seeds, numbers, others = zip(
        *(json.loads((starting.scratch / f"drawn-{name}.json").read_text()) for name in names), strict=True
    )
    assert len(set(seeds)) == len(names) - 1
    assert seeds[names.index("fork")] == seeds[0]
    assert len(set(numbers)) == len(set(others)) == len(names)


# ---------------------------------------------------------------- files, and the rest of what one process does

ALONE = """
    import os, shutil, sys
    import torch
    from pathlib import Path
    from safetensors.torch import save_file
    import safetensors.torch
    from torch import nn

    try:
        torch.accelerator.set_device_index(torch.device("cuda:3"))
    except Exception:
        pass
    model = torch.compile(nn.Linear(2, 1))
    model.compile()
    model(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    optimizer.step(lambda: model(torch.ones(3, 2)).sum().backward())  # closure
    with open("text.txt", "w") as file:
        file.write("1")
    os.truncate("text.txt", 0)
    with open("binary.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    torch.load("binary.pt")
    save_file(model.state_dict(), "weights.safetensors")
    safetensors.torch.load_file("weights.safetensors")
    Path("folder").mkdir()
    Path("folder", "inner").write_text("1")
    shutil.rmtree("folder")
    try:
        open(OUTSIDE, "w")
    except PermissionError:
        pass
    print("it was refused")
"""


@pytest.fixture(scope="module")
def alone(place):
    folder = place("alone")
    outside = str(folder / "outside")
    made = Made(folder, ALONE.replace("OUTSIDE", repr(outside))).well()
    made.outside = outside
    return made


def test_files_inside_and_outside_of_the_run_are_recorded(alone):
    (process,) = alone.run.processes
    assert not os.path.exists(alone.outside)
    assert [event.path for event in process.of(WroteOutside)] == [os.path.realpath(alone.outside)]
    assert process.stdout == "it was refused\n"
    written = [os.path.relpath(event.path, alone.path("")) for event in process.of(FileWritten)]
    assert written == ["text.txt", "text.txt", "binary.pt", "folder/inner"]
    (saved,) = process.of(Saved)
    assert (saved.path, saved.keys) == (alone.path("binary.pt"), ["weight", "bias"])
    assert process.first(Loaded).where == alone.line('torch.load("')


def test_devices_weights_clipping_and_compilation_are_recorded(alone):
    (process,) = alone.run.processes
    (chosen,) = process.of(DeviceChosen)
    assert (chosen.index, chosen.where) == (3, alone.line("set_device_index"))
    (read,) = process.of(WeightsRead)
    assert (read.bytes, read.where) == (12, alone.line("torch.load_file"))
    (clipped,) = process.of(GradientsClipped)
    assert clipped.norms == [pytest.approx(2**0.5), 1.0]
    assert len(process.of(Compiled)) == 2


def test_a_step_with_a_closure_has_the_gradients_of_the_closure(alone):
    (process,) = alone.run.processes
    (step,) = process.steps
    assert step.before.gradients[1] == (pytest.approx(3 + 3**-0.5), [pytest.approx(3 + 3**-0.5)])  # the closure adds 3
    assert step.before.rates == [0.5]
    assert [backward.leftover for backward in process.of(Backward)] == [False, True]
    (first, second) = (event.bytes for event in process.of(ActivationsKept))
    assert (first, second) == (8, 24)


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
    dcp.save({"model": model.state_dict()}, checkpoint_id="checkpoint")
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
        assert len(rank.of(ActivationsKept)) == 1


LOOSE = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def main():
        dist.init_process_group("gloo")
        model = nn.Linear(2, 2)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(ddp.parameters())
        draws = torch.Generator().manual_seed(dist.get_rank())
        for number in range(2):
            with ddp.no_sync():  # local
                ddp(torch.rand(3, 2, generator=draws)).sum().backward()
            waited, lost = torch.ones(2), torch.ones(2)
            dist.all_reduce(waited, async_op=True).wait()
            handle = dist.all_reduce(lost, async_op=True)  # lost
            optimizer.step()
            handle.wait()
        optimizer.load_state_dict(optimizer.state_dict())
        torch.save({"optimizer": optimizer.state_dict()}, f"{dist.get_rank()}.pt")
        dist.destroy_process_group()

    main()
"""


def test_handles_variables_and_optimizer_states_are_recorded(place):
    loose = Made(place("loose"), LOOSE, "torchrun", 2).well()
    for rank in loose.ranks:
        assert [event.where for event in rank.of(NotAwaited)] == [loose.line("# lost")]
        assert {event.unsynced for event in rank.of(Backward)} == {loose.line("# local")}
        assert rank.first(Wrapped).names == ("weight", "bias")
        assert [event.numbers["number"] for event in rank.of(VariablesSeen)] == [0, 1]
        assert rank.first(StateLoaded).where == loose.line("optimizer.load_state_dict")
        assert rank.first(Saved).moments == rank.first(Saved).own == 12  # two moments of six parameters
    states = [[event.states["draws"] for event in rank.of(VariablesSeen)] for rank in loose.ranks]
    assert len({state for rank in states for state in rank}) == 4
