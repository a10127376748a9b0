"""Exercise 3 of stage 06: the solution equals one process, for any module, and stores a part of each parameter."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from build.processes import in_processes, solution
from build.test_ddp import Odd
from workshop.training.decoder import Block, Config, Transformer
from workshop.training.traffic import Messages

CLOSE = 1e-12
CONFIG = Config(layers=3, width=16, heads=2, length=8)


def shard(module, layers=(), **options):
    return solution("exercise3_fsdp").FSDP(module, layers, **options)


def train_odd(world_size, rank=None):
    """Train with the part of one rank, or in one process with those of all ranks."""
    torch.manual_seed(0)
    data = torch.randn(3, 12, 6, dtype=torch.float64)
    torch.manual_seed(rank or 0)
    model = Odd().double()
    model = model if rank is None else shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for batch in data:
        for number, part in enumerate(batch.chunk(world_size)):
            if rank in (None, number):
                loss = model(part, use=number == 0).square().mean()
                (loss / world_size if rank is None else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if rank is None else model.full_state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_an_odd_model_equals_one_process(world_size):
    def train():
        return {name: value.numpy() for name, value in train_odd(world_size, dist.get_rank()).items()}

    expected = train_odd(world_size)
    for found in in_processes(world_size, train):
        assert list(found) == list(expected)
        for name, value in found.items():
            assert abs(torch.from_numpy(value) - expected[name]).max() < CLOSE, name


def tokens():
    torch.manual_seed(1)
    return torch.randint(256, (3, 12, 9))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train_transformer(model, part, passes=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch in tokens():
        for piece in part(batch).chunk(passes):
            loss = loss_of(model, piece) / passes
            loss.backward()
            losses.append(loss.item())
        model.eval()
        with torch.inference_mode():  # an evaluation between the steps changes nothing
            loss_of(model, batch[:2])
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def with_checkpointing(model):
    for block in model.blocks:
        original = block.forward
        block.forward = lambda x, original=original: checkpoint(original, x, use_reentrant=False)
    return model


@pytest.mark.parametrize("layers", [(), (Block,), (Block, nn.Linear)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_transformer_equals_one_process(world_size, layers):
    def train(case):
        torch.manual_seed(0)
        model = Transformer(CONFIG).double()
        model = shard(with_checkpointing(model) if case == "checkpointing" else model, layers)
        part = lambda batch: batch[dist.get_rank() :: world_size]  # noqa: E731
        return train_transformer(model, part, 2 if case == "accumulate" and world_size != 4 else 1)

    torch.manual_seed(0)
    expected = torch.tensor(train_transformer(Transformer(CONFIG).double(), lambda batch: batch), dtype=torch.float64)
    for case in ("plain", "checkpointing", "accumulate"):
        found = torch.tensor(in_processes(world_size, train, case), dtype=torch.float64).mean(0)
        found = found.view(len(expected), -1).sum(1)
        assert abs(found - expected).max() < CLOSE, case


def test_each_layer_is_gathered_twice_and_the_next_one_in_advance():
    def record():
        torch.manual_seed(0)
        model = shard(Transformer(CONFIG), [Block])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorded = []
        for unit in model.units[1:]:
            number = model.units.index(unit)
            start, unit.start_gather = unit.start_gather, None

            def started(unit=unit, number=number, start=start):
                if unit.full is None and unit.work is None:
                    recorded.append(("gather", number))
                start()

            unit.start_gather = started
        for number, block in enumerate(model.module.blocks, 1):
            block.mlp.register_forward_hook(lambda *_, number=number: recorded.append(("computed", number)))
        for step in range(2):
            if step == 1:
                recorded.clear()
            loss_of(model, tokens()[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        events = list(recorded)
        with Messages() as messages:
            loss_of(model, tokens()[0]).backward()
        return events, messages.calls, [unit.full is None for unit in model.units]

    for events, calls, freed in in_processes(2, record):
        assert calls == {"all_gather": 8, "reduce_scatter": 4}
        assert [each for each in events if each[0] == "gather"] == [("gather", n) for n in (1, 2, 3, 3, 2, 1)]
        assert events.index(("gather", 2)) < events.index(("computed", 1))
        assert all(freed)


def test_a_rank_holds_its_shards_and_one_or_two_layers():
    def measure():
        model = shard(Transformer(CONFIG), [Block])
        most = 0

        def look(*_):
            nonlocal most
            most = max(most, sum(unit.full is not None or unit.work is not None for unit in model.units[1:]))

        for each in model.module.modules():
            each.register_forward_hook(look)
        for each in model.parameters():
            each.register_hook(look)
        for _ in range(2):  # the order of the layers is known after the first step
            loss_of(model, tokens()[0]).backward()
        return (
            most,
            sum(each.numel() for each in model.parameters()),
            {each.grad.shape == each.shape for each in model.parameters()},
        )

    whole = sum(each.numel() for each in Transformer(CONFIG).parameters())
    for world_size in (2, 4):
        for most, own, shapes in in_processes(world_size, measure):
            assert most == 2
            assert shapes == {True}
            assert whole / world_size <= own <= whole / world_size + 60


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_it_computes_in_low_precision_and_keeps_float32(name):
    dtype = getattr(torch, name)

    def run():
        torch.manual_seed(0)
        model = shard(Transformer(CONFIG), [Block], compute_dtype=dtype)
        seen = set()
        for each in model.modules():
            each.register_forward_hook(lambda _, __, out: seen.add(out.dtype))
        with Messages() as messages:
            loss_of(model, tokens()[0]).backward()
        return (
            seen,
            {each.grad.dtype for each in model.parameters()},
            {v.dtype for v in model.full_state_dict().values()},
            messages.bytes,
        )

    whole = sum(each.nbytes for each in Transformer(CONFIG).parameters())
    for seen, gradients, saved, sent in in_processes(2, run):
        assert (seen, gradients, saved) == ({dtype}, {torch.float32}, {torch.float32})
        assert sent == pytest.approx(
            (0.5 + 0.5 + 1) * whole / 2, rel=0.02
        )  # two gathers in 2 bytes, a reduce-scatter in 4


def test_a_forward_pass_after_the_step_uses_the_new_parameters():
    def run():
        torch.manual_seed(0)
        model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), [nn.Linear])
        x = torch.ones(1, 4, dtype=torch.float64)
        model(x)  # without a backward pass
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
        return model(x).abs().sum().item()

    assert in_processes(2, run) == [0, 0]


@pytest.mark.parametrize("change", ["replaced", "moved", "meta", "mixed"])
def test_what_cannot_work_is_one_sentence_on_all_ranks(change):
    def run():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        try:
            if change == "meta":
                return shard(model.to("meta"))
            if change == "mixed":
                model[1].double()
            wrapped = shard(model)
            if change == "replaced":
                model[1] = nn.Linear(4, 4)
            elif change == "moved":
                wrapped.double()
            wrapped(torch.zeros(1, 4))
        except ValueError as error:
            return str(error)

    for message in in_processes(2, run):
        assert ("meta device" if change == "meta" else "FSDP") in message
        assert "\n" not in message
