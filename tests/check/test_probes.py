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
    Collective,
    Compiled,
    DeviceChosen,
    DeviceSeen,
    Ended,
    EpochSet,
    Evaluated,
    Exited,
    FileRenamed,
    FileWritten,
    GradientsClipped,
    GraphMeasured,
    GroupDestroyed,
    Joined,
    Joining,
    LayersSeen,
    Loaded,
    LoaderStarted,
    Raised,
    Saved,
    Started,
    StoreOpened,
    UnevenJoined,
    ValuesAsked,
    WeightsRead,
    Wrapped,
    WroteOutside,
)
from workshop.check.evidence.misuses import ClipLimit
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
    received = torch.empty(2)
    messages = [dist.P2POp(dist.isend, counts, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for message in dist.batch_isend_irecv(messages):
        message.wait()
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
        sent = [each.name for each in rank.of(Collective) if each.where == training.line("dist.batch_isend_irecv")]
        assert sent == ["isend", "irecv"]


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
    Path("folder", "inner").open("r+").close()  # as np.memmap opens it, to read
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
    saved = [(each.path, sorted(each.keys)) for each in process.of(Saved)]
    assert saved == [(alone.path(name), ["bias", "weight"]) for name in ("binary.pt", "weights.safetensors")]
    assert process.first(Loaded).where == alone.line('torch.load("')


def test_devices_weights_clipping_and_compilation_are_recorded(alone):
    (process,) = alone.run.processes
    (chosen,) = process.of(DeviceChosen)
    assert (chosen.index, chosen.where) == (3, alone.line("set_device_index"))
    (read,) = process.of(WeightsRead)
    assert (read.bytes, read.where) == (12, alone.line("torch.load_file"))
    (clipped,) = process.of(GradientsClipped)
    assert clipped.norms == [pytest.approx(2**0.5), 1.0]
    assert [each.limit for each in process.of(ClipLimit)] == [1.0]
    assert len(process.of(Compiled)) == 2


def test_a_step_with_a_closure_has_the_gradients_of_the_closure(alone):
    (process,) = alone.run.processes
    (step,) = process.steps
    assert step.before.gradients[1] == (pytest.approx(3 + 3**-0.5), [pytest.approx(3 + 3**-0.5)])  # the closure adds 3
    assert step.before.rates == [0.5]
    assert [backward.leftover for backward in process.of(Backward)] == [False, True]
    (first, second) = (event.bytes for event in process.of(ActivationsKept))
    assert (first, second) == (8, 24)
