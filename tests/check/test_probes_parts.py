"""What the probes record of GradScaler, of states given to models, of divided models, and of what encodes the data."""

import math
import os
import zlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from check.made import Made
from workshop.check import cuda_on_cpu
from workshop.check.evidence.events import (
    BY_HASH,
    Collective,
    EncodersSeen,
    Evaluated,
    GradientsClipped,
    InputSharded,
    Loaded,
    ModelDivided,
    ModelLoaded,
    Saved,
    ScaledClipped,
    ScheduleSeen,
    StepSkipped,
)
from workshop.check.evidence.misuses import (
    BuffersKept,
    NormsSeen,
    OptimizerSeen,
    OthersSeen,
    OutputsShared,
    OwnStateLoaded,
    ResultDiscarded,
    ScheduleStepped,
)
from workshop.check.probes.divided import _together

SCALER = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for number in range(5):
        optimizer.zero_grad()
        loss = model(torch.full((1, 2), float("inf") if number == 2 else 1.0)).sum()
        scaler.scale(loss).backward()
        if number == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # scaled
        elif number == 3:
            nn.utils.clip_grad_value_(list(model.parameters()), scaler.get_scale())
        elif number == 4:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # skips
        scaler.update()
        schedule.step()
"""


def test_skipped_steps_and_clipping_with_the_scale_are_recorded(place):
    made = Made(place("scaler"), SCALER).well()
    (process,) = made.run.processes
    assert [(event.scale, event.where) for event in process.of(StepSkipped)] == [(4.0, made.line("# skips"))]
    assert [(event.scale, event.where) for event in process.of(ScaledClipped)] == [(4.0, made.line("# scaled"))]
    assert (len(process.steps), process.attempts, len(process.backwards)) == (4, 5, 5)
    assert [len(step.backwards) for step in process.steps] == [1, 1, 1, 1]
    first, second, *_ = process.backwards
    assert first.loss - second.loss > 0.1  # without the scale, one step changes the loss by lr * 3
    assert abs(first.loss - second.loss) < 1


ON_CPU = """
    import torch

    scaler = torch.cuda.amp.GradScaler(init_scale=8.0)
    off = torch.amp.GradScaler("cuda", enabled=False)
    print(scaler.is_enabled(), scaler.get_scale(), off.is_enabled(), float(scaler.scale(torch.ones(1))))
"""


def test_a_scaler_for_gpus_scales_on_the_cpu(place):
    made = Made(place("on-cpu"), ON_CPU, gpus=1, on_cpu=True).well()
    assert made.run.processes[0].stdout.split() == ["True", "8.0", "False", "8.0"]
    assert cuda_on_cpu.is_gpu("cuda:0")


STATES = """
    import torch
    from torch import nn

    model = nn.Linear(2, 1)
    model.load_state_dict({f"module.{name}": each for name, each in model.state_dict().items()}, strict=False)
    model.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best, copies = model.state_dict(), {name: each.clone() for name, each in model.state_dict().items()}
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.load_state_dict(copies)
    model.load_state_dict(best)  # its own
"""


def test_what_a_model_accepts_of_a_state_is_recorded(place):
    made = Made(place("states"), STATES).well()
    (process,) = made.run.processes
    assert [(event.given, event.matched) for event in process.of(ModelLoaded)] == [(2, 0), *[(2, 2)] * 3]
    assert [event.where for event in process.of(OwnStateLoaded)] == [made.line("# its own")]


DIVIDED = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    split = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    parallelize_module(split, mesh, {"0": ColwiseParallel(input_layouts=Shard(0)), "1": RowwiseParallel()})
    split(torch.ones(3, 4))  # a part of six samples
    dist.destroy_process_group()
"""


def test_the_ranks_that_divide_layers_are_recorded(place):
    made = Made(place("divided"), DIVIDED, "torchrun", 2).well()
    assert [[event.ranks for event in rank.of(ModelDivided)] for rank in made.ranks] == [[[0, 1]]] * 2
    assert [[event.where for event in rank.of(InputSharded)] for rank in made.ranks] == [[made.line("# a part of")]] * 2
    assert made.run.divided == "layers"
    assert [rank.rank for rank in made.ranks] == [0, 1]  # init_device_mesh() has made the group
    assert made.run.parts_of(made.ranks[0]) == {0, 1}


@pytest.mark.parametrize(("first", "together"), [(Replicate(), set()), (Shard(0), {2, 3})])
def test_hybrid_sharding_divides_no_layer(first, together):
    mesh = SimpleNamespace(ndim=2, mesh=torch.tensor([[0, 1], [2, 3]]), get_coordinate=lambda: [1, 0])
    sharded = nn.Linear(2, 2)
    sharded.unshard = lambda: None  # fully_shard adds this method
    assert _together(SimpleNamespace(device_mesh=mesh, placements=(first, Shard(0))), sharded) == together


INSIDE = """
    import torch
    import torch.distributed as dist
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            dist.all_reduce(x)  # inside
            return self.norm(x)

    dist.init_process_group("gloo")
    model = Model()
    with torch.no_grad():
        model(torch.rand(4, 2))
        dist.barrier()  # outside
        model.eval()(torch.rand(4, 2))
    dist.destroy_process_group()
"""


def test_collectives_of_a_forward_pass_and_renewed_statistics_are_told_apart(place):
    made = Made(place("inside"), INSIDE, "torchrun", 2).well()
    for rank in made.ranks:
        calls = {event.where: event.inside for event in rank.of(Collective)}
        assert calls == {made.line("# inside"): True, made.line("# outside"): False}
        assert [event.forward.refreshes for event in rank.of(Evaluated)] == [True, False]


ENCODERS = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Texts(Dataset):
        def __init__(self):
            self.vocab = {letter: number for number, letter in enumerate("abcdefghij")}
            self.mean, self.std = torch.ones(2), 2.0
            self.counts = {letter: 7 for letter in self.vocab}

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.ones(2)

    loader = DataLoader(Texts(), batch_size=2)
    scaler = {"mean": torch.zeros(1), "std": torch.ones(1)}

    class Front(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(1))
            self.std = 3.0

    front = Front()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
"""


ORDERS = """
    import json
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = [f"word {number}" for number in range(40)]
    sorted_words = {word: number for number, word in enumerate(sorted(words))}
    own = {word: number for number, word in enumerate(set(words))}
    optimizer.step()
    dist.destroy_process_group()
"""
SENT = """
    if dist.get_rank() == 0:
        with open("words.json", "w") as file:
            json.dump(own, file)
    dist.barrier()
    with open("words.json") as file:
        own = json.load(file)
    optimizer.step()
"""


@pytest.mark.parametrize("sent", [False, True])
def test_the_order_of_a_set_is_told_apart_unless_it_may_come_from_another_rank(place, sent):
    text = ORDERS.replace("\n    optimizer.step()\n", SENT) if sent else ORDERS
    for rank in Made(place("orders"), text, "torchrun", 2).well().ranks:
        (seen,) = rank.of(EncodersSeen)
        assert seen.vocabularies["sorted_words"][1] < BY_HASH
        assert (seen.vocabularies["own"] == (40, BY_HASH + rank.rank)) is not sent


def test_vocabularies_and_statistics_are_recorded(place):
    (process,) = Made(place("encoders"), ENCODERS).well().run.processes
    first, second = process.of(EncodersSeen)
    words = zlib.crc32(repr([(letter, number) for number, letter in enumerate("abcdefghij")]).encode())
    assert first.vocabularies == {"loader.vocab": (10, words)}
    of_loader = {"loader.mean": [1.0, 1.0], "loader.std": [2.0]}
    of_others = {"scaler.mean": [0.0], "scaler.std": [1.0], "front.mean": [1.0], "front.std": [3.0]}
    assert first.statistics == second.statistics == of_loader | of_others


DISCARDED = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen += x.detach().sum(0)
            return super().forward(x)

    def main():
        dist.init_process_group("gloo")
        values = torch.arange(2.0) + dist.get_rank()
        dist.all_reduce(values.clone())  # lost
        dist.all_reduce(values.detach())  # into the memory of values
        copy = values.clone()
        dist.all_reduce(copy)
        array = values.numpy().copy()
        dist.all_reduce(torch.from_numpy(array))
        dist.broadcast(values * dist.get_rank(), src=0)  # also lost
        dist.all_gather([torch.empty(4)[:2]] * 2, values)  # into one tensor
        dist.all_gather(list(torch.empty(2, 2)), values)  # into two parts of a tensor
        model = Counting()
        ddp = DistributedDataParallel(model, broadcast_buffers=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5, nesterov=True, foreach=True)  # once
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2])  # both
        for number in range(5):
            ddp(torch.rand(3, 2)).sum().backward()
            dist.all_reduce(model.weight.grad)
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(5.0 + dist.get_rank()))
            optimizer.step()
            schedule.step()
        dist.destroy_process_group()

    main()
"""


def test_lost_results_kept_buffers_given_norms_and_settings_are_recorded(place):
    made = Made(place("discarded"), DISCARDED, "torchrun", 2).well()
    for rank in made.ranks:
        found = [(each.name, each.where) for each in rank.of(ResultDiscarded)]
        assert found == [("all_reduce", made.line("# lost")), ("broadcast", made.line("# also lost"))]
        assert [each.where for each in rank.of(OutputsShared)] == [made.line("# into one tensor")]
        assert [each.names for each in rank.of(BuffersKept)] == [["seen"]] * 4  # after 1 to 4 steps
        assert [each.total for each in rank.of(GradientsClipped)] == [5.0 + rank.rank] * 5
        seen = [(each.taken, each.length, each.where) for each in rank.of(ScheduleSeen)]
        assert seen == [(5, 2 + 6, made.line("# both"))]
        called = Counter(each.kind for each in rank.of(ScheduleStepped))
        assert called == {
            "LinearLR": 1,
            "CosineAnnealingLR": 3,
        }  # none by their __init__, none where one follows the other
        (optimizer,) = rank.of(OptimizerSeen)
        assert (optimizer.kind, optimizer.rate, optimizer.where) == ("SGD", 0.1, made.line("# once"))
        assert optimizer.settings["nesterov"] == "True"
        assert not optimizer.settings.keys() & {"momentum", "foreach", "lr", "params"}  # a schedule may change momenta
    one, other = (rank.of(ResultDiscarded)[0].value for rank in made.ranks)
    assert one != other


LOSS_WITH_A_BUFFER = """
    import torch
    from torch import nn

    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(1))

        def forward(self, x):
            self.center = 0.9 * self.center + 0.1 * x.detach().mean()
            return (x - self.center).square().mean()

    model, criterion = nn.Linear(2, 1), Centered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        for _ in range(2):
            criterion(model(torch.rand(3, 2))).backward()
        optimizer.step()
    with torch.no_grad():
        criterion(model(torch.rand(3, 2)))
"""


def test_the_buffers_of_a_loss_are_recorded_once_after_some_steps(place):
    made = Made(place("loss"), LOSS_WITH_A_BUFFER).well()
    assert [each.names for each in made.ranks[0].of(BuffersKept)] == [["Centered.center"]] * 4  # after 0, 1, 2, 4 steps


SAFE = """
    import torch
    from safetensors.torch import load_file, save_file
    from torch import nn

    class Keys(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
            self.register_buffer("queue", torch.zeros(3))

        def forward(self, x):
            return self.query(x) + self.key(x) + self.queue.sum()

    model = Keys()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    for number in range(5):
        model(torch.ones(1, 2)).sum().backward()
        grad_norm = nn.utils.get_total_norm([each.grad for each in model.query.parameters()])
        norms = "no number"
        optimizer.step()
        model.queue += 1
        if number == 2:
            save_file(model.state_dict(), "model.safetensors")
    load_file("model.safetensors")  # reads
"""


def test_safetensors_norms_and_untrained_tensors_are_recorded(place):
    made = Made(place("safe"), SAFE).well()
    (process,) = made.run.processes
    (saved,) = process.of(Saved)
    assert os.path.basename(saved.path) == "model.safetensors"
    assert (len(saved.keys), len(saved.tensors), saved.where) == (5, 5, made.line("save_file(model"))
    assert {(event.path, event.where) for event in process.of(Loaded)} == {(saved.path, made.line("# reads"))}
    seen = process.of(OthersSeen)
    assert [each.names for each in seen] == [["key.weight", "key.bias", "queue"]] * 2  # at first, and after the save
    assert [each.values[-1][0] for each in seen] == [0.0, pytest.approx(27**0.5)]
    norms = [each.norms for each in process.of(NormsSeen)]
    assert [list(each) for each in norms] == [["grad_norm"]] * 5
    own = [math.hypot(*(sketch[0] for sketch in step.before.gradients)) for step in process.steps]
    assert [each["grad_norm"] for each in norms] == pytest.approx(own)


def test_a_step_that_only_creates_the_state_of_the_optimizer_does_not_count(tmp_path):
    """torch.distributed.checkpoint takes it before it loads a checkpoint; a run of eight steps still takes eight others."""
    text = """
        import torch
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        get_optimizer_state_dict(model, optimizer)
        for _ in range(30):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    """
    made = Made(tmp_path, text, steps=8, at_once=True)
    assert made.run.cut
    assert len(made.ranks[0].steps) == 8
