"""Exercises 1 to 3 of stage 06 with models, optimizers and habits of other people: the solutions equal one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from build.processes import in_processes, solution

CLOSE = 1e-10  # of parameters after several steps of AdamW
WORLD_SIZES = [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 3, 4))]
WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.down(torch.tanh(self.up(self.norm(x))))


class Convolutions(nn.Module):
    """In channels_last, and with buffers of two types. The statistics of BatchNorm stay on a rank, so it is in eval mode."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm, self.last = nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4).eval(), nn.Linear(8, 3)
        self.norm.train = lambda mode=True: self.norm
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.convolution(x.view(-1, 1, 2, 3)))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(WIDTH, 4, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(1))[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.unsqueeze(1))


class Shared(nn.Module):
    """Two blocks have the same submodule, and one of them is used twice; the parameters of another have several shapes."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.scale = Block(), Block(), nn.Parameter(torch.tensor(2.0))
        self.second.up = self.first.up
        self.list = nn.ParameterList([torch.ones(WIDTH), torch.empty(0)])

    def forward(self, x):
        return self.second(self.first(self.first(x))) * self.scale + self.list[0] ** 2 + self.list[1].sum()


class Frozen(nn.Module):
    """The first block is frozen, the second in part, and the third has no part in the result."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = Block(), Block(), Block()
        self.first.requires_grad_(False)
        self.second.up.weight.requires_grad_(False)
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(self.before(x)))


class Structured(nn.Module):
    """The layers get keyword arguments, and the result is nested. The parameters of one layer are computed from others."""

    def __init__(self):
        super().__init__()
        self.block, self.normed = Block(), nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 2))

    def forward(self, x):
        hidden = self.block(x, scale=0.5)
        return {"hidden": hidden, "results": [self.normed(hidden), None, "text"]}


class Checkpointed(nn.Module):
    """The reentrant kind runs a backward pass inside of the backward pass."""

    def __init__(self):
        super().__init__()
        self.before, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.before(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number > 1)
        return x


class Sparse(nn.Module):
    """The gradient of the embedding is a sparse tensor."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.embedding((10 * x[:, 0].sigmoid()).long()))


def ddp(model):
    return solution("exercise1_ddp").DDP(model, bucket_bytes=300)


def fsdp(model):
    return solution("exercise3_fsdp").FSDP(model, [Block, nn.Conv2d, nn.LSTM, nn.TransformerEncoderLayer])


MODELS = [Convolutions, Recurrent, Encoder, Shared, Frozen, Structured, Checkpointed]


def loss_of(output):
    return sum(each.square().mean() for each in tree_leaves(output) if isinstance(each, torch.Tensor))


def created(kind, seed=0):
    torch.manual_seed(seed)
    return kind().double()


def train(model, part):
    """Train with two backward passes in each step, and two forward passes before the first of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for first, second, third in torch.randn(3, 3, 12, WIDTH, dtype=torch.float64):
        (loss_of(model(part(first))) + loss_of(model(part(second)))).backward()
        loss_of(model(part(third))).backward()
        with torch.inference_mode():
            model(part(first))
        for each in model.parameters():
            if each.grad is not None and each.grad.is_sparse:
                each.grad = each.grad.to_dense()  # AdamW does not accept it
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("wrap", [ddp, fsdp])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_models_of_other_people_equal_one_process(world_size, wrap):
    def run():
        rank, errors = dist.get_rank(), {}
        for kind in [*MODELS, Sparse] if wrap is ddp else MODELS:
            whole, model = created(kind), created(kind, seed=rank)
            train(whole, lambda batch: batch)
            wrapped = wrap(model)
            train(wrapped, lambda batch: batch.chunk(world_size)[rank])
            found = model.state_dict() if wrap is ddp else wrapped.full_state_dict()
            assert list(found) == list(whole.state_dict())
            differences = [abs(found[name] - value) for name, value in whole.state_dict().items() if value.numel()]
            errors[kind.__name__] = max(float(each.max()) for each in differences)
        return errors

    for errors in in_processes(world_size, run):
        assert {case: error for case, error in errors.items() if error > CLOSE} == {}


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise OSError("out of order")


@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_training_continues_after_an_exception_in_the_backward_pass(wrap):
    def run():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()
        broken = torch.ones(1, WIDTH, dtype=torch.float64)
        fails, wrapped = [True], wrap(model)
        whole = copy.deepcopy(model) if wrap is ddp else None
        model[0].register_forward_hook(lambda _, __, output: Fails.apply(output) if fails else output)
        with pytest.raises(OSError, match="out of order"):
            wrapped(broken).sum().backward()
        fails.clear()
        wrapped.zero_grad()
        x = torch.full((1, WIDTH), dist.get_rank() + 1.0, dtype=torch.float64)
        wrapped(x).square().sum().backward()
        if whole is None:
            return all(each.grad is not None and len(each.grad) == len(each) for each in wrapped.parameters())
        for number in (1.0, 2.0):
            (whole(torch.full_like(x, number)).square().sum() / 2).backward()
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        return all(torch.allclose(one.grad, other.grad) for one, other in pairs)

    assert in_processes(2, run) == [True, True]


def test_what_ranks_cannot_share_is_one_sentence_on_all_ranks():
    modules = {
        "differ from those of rank 0": lambda rank: nn.Linear(4, 4 + rank),
        "meta device": lambda rank: nn.Linear(4, 4, device="meta"),
        "a lazy parameter|uninitialized parameter": lambda rank: nn.LazyLinear(4),
    }

    def run():
        for wrap in (
            ddp,
            fsdp,
            lambda model: solution("exercise2_zero1").ShardedOptimizer(model.parameters(), torch.optim.SGD),
        ):
            for message, make in modules.items():
                with pytest.raises(ValueError, match=message) as caught:
                    wrap(make(dist.get_rank()))
                assert "\n" not in str(caught.value)
        return True

    assert in_processes(2, run) == [True, True]


class Averaging(torch.optim.Optimizer):
    """An optimizer class that is not of PyTorch, with a state of its own."""

    def __init__(self, parameters, rate):
        super().__init__(parameters, {"rate": rate})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    state["count"] = state.get("count", 0) + 1
                    state.setdefault("sum", torch.zeros_like(each)).add_(each.grad)
                    each.sub_(group["rate"] * state["sum"] / state["count"])
        return loss


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)


OPTIMIZERS = [
    (Averaging, {"rate": 0.1}, None),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "foreach": True}, None),
    (torch.optim.Adam, {"lr": torch.tensor(0.1), "fused": True}, None),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, one_cycle),
    (torch.optim.AdamW, {"lr": 0.1}, one_cycle),
    *((getattr(torch.optim, name), {}, None) for name in ("Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop")),
]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_optimizers_of_other_people_equal_one_process(world_size):
    def stepped(make, schedule):
        model = created(Block)
        model.up.requires_grad_(False)
        optimizer = make(model.named_parameters())
        scheduler = schedule(optimizer) if schedule else None
        torch.manual_seed(1)
        for number, batch in enumerate(torch.randn(4, 5, WIDTH, dtype=torch.float64)):
            model.up.requires_grad_(number > 1)  # unfrozen later

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = model(batch).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            if scheduler:
                scheduler.step()
        return model

    def run():
        errors, sharded = {}, solution("exercise2_zero1").ShardedOptimizer
        for kind, options, schedule in OPTIMIZERS:
            found = stepped(lambda each, kind=kind, options=options: sharded(each, kind, **options), schedule)
            expected = stepped(lambda each, kind=kind, options=options: kind(each, **options), schedule)
            pairs = zip(found.parameters(), expected.parameters(), strict=True)
            errors[kind.__name__, str(options)] = max(float(abs(a - b).max()) for a, b in pairs)
        return errors

    for errors in in_processes(world_size, run):
        assert {case: error for case, error in errors.items() if error > CLOSE} == {}
