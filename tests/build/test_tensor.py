"""Exercise 4 of stage 06: the divided layers and the divided transformer equal one process."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from build.processes import in_processes, solution
from workshop.training.decoder import Config, Transformer

exercise = solution("exercise4_tensor")  # before the processes are forked, because it imports much of PyTorch
CLOSE = 1e-12
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
)


def config_for(world_size, layers=2):
    return Config(layers=layers, width=24, heads=3 if world_size == 3 else 4, length=12, vocabulary=30)


def largest(a, b):
    return (a - b).abs().max().item()


def part(tensor, dimension):
    return tensor.chunk(dist.get_world_size(), dimension)[dist.get_rank()]


def count_calls():
    """Record the name and the bytes of each collective that this process calls from now on."""
    calls = []

    def counted(name, original, *args, **options):
        size = max(each.nbytes if torch.is_tensor(each) else sum(part.nbytes for part in each) for each in args)
        calls.append((name, size))
        return original(*args, **options)

    for name in COLLECTIVES:
        setattr(dist, name, functools.partial(counted, name, getattr(dist, name)))
    return calls


class Gated(nn.Module):
    """A feed-forward layer as in a different model: two layers share an input, and each rank has a part between."""

    def __init__(self, bias):
        super().__init__()
        self.gate, self.up = nn.Linear(5, 12, bias=bias), nn.Linear(5, 12, bias=False)
        self.down = nn.Linear(12, 7, bias=bias)

    def forward(self, x):
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_layers_alone_equal_one_process(world_size):
    def compare(bias, shape):
        torch.manual_seed(0)
        model = Gated(bias).double()
        model.up.requires_grad_(not bias)
        x, weights = torch.randn(*shape, 5, dtype=torch.float64), torch.randn(*shape, 7, dtype=torch.float64)
        whole = [x.clone().requires_grad_(), *model.parameters()]
        expected = model(whole[0])
        (expected * weights).sum().backward()
        gradients = [each.grad for each in whole]
        column, row = exercise.ColumnParallelLinear, exercise.RowParallelLinear
        model.gate, model.up, model.down = column(model.gate), column(model.up), row(model.down)
        own = x.clone().requires_grad_()
        model.zero_grad()
        found = model(own)
        (found * weights).sum().backward()
        errors = [largest(found, expected), largest(own.grad, gradients[0])]
        dimensions = {"gate.weight": 0, "gate.bias": 0, "up.weight": 0, "down.weight": 1, "down.bias": None}
        names = [name for name, _ in Gated(bias).named_parameters()]
        for name, gradient in zip(names, gradients[1:], strict=True):
            parameter = model.get_parameter(name)
            if gradient is None:
                assert parameter.grad is None
                assert not parameter.requires_grad
                continue
            if dimensions[name] is not None:
                gradient = part(gradient, dimensions[name])
            assert parameter.grad.shape == gradient.shape
            errors.append(largest(parameter.grad, gradient))
        return max(errors)

    def run():
        return max(compare(bias, shape) for bias in (False, True) for shape in ((), (3,), (2, 3), (2, 1, 3)))

    assert max(in_processes(world_size, run)) < CLOSE


def test_second_derivatives_equal_one_process():
    def penalty(model, x):
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), x)
        return second

    def run():
        torch.manual_seed(0)
        model, x = Gated(True).double(), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        expected = penalty(model, x)
        model.gate, model.up = exercise.ColumnParallelLinear(model.gate), exercise.ColumnParallelLinear(model.up)
        model.down = exercise.RowParallelLinear(model.down)
        return largest(penalty(model, x), expected)

    assert max(in_processes(3, run)) < 1e-11


def test_communication_does_not_change_tensors_that_others_use():
    def run():
        x = torch.ones(2, 4, requires_grad=True)
        (x + exercise.communicate(x, None, exercise.COPY)).backward(torch.ones(2, 4))
        total = exercise.communicate(x.detach(), None, exercise.SUM)
        return x.grad.tolist(), x.tolist(), total.tolist()

    for gradient, x, total in in_processes(2, run):
        assert gradient == [[3] * 4] * 2
        assert x == [[1] * 4] * 2
        assert total == [[2] * 4] * 2


def train(model, steps=2, accumulate=1):
    """Train for some steps, and return the losses and the gradients of the last step."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            batch = torch.randint(30, (2, 13))
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_transformer_equals_one_process(world_size, sequence_parallel):
    def start():
        torch.manual_seed(0)
        model = Transformer(config_for(world_size)).double()
        model.blocks[0].norm1.weight.requires_grad_(False)
        model.blocks[1].mlp.down.weight.requires_grad_(False)
        return model

    def run():
        model = exercise.parallelize(start(), sequence_parallel=sequence_parallel)
        losses, gradients = train(model, accumulate=2)
        state = exercise.full_state_dict(model)
        return losses, {k: v if v is None else v.numpy() for k, v in gradients.items()}, {
            name: value.numpy() for name, value in state.items()
        }  # fmt: skip

    model = start()
    expected_losses, expected_gradients = train(model, accumulate=2)
    results = in_processes(world_size, run)
    for rank, (losses, gradients, state) in enumerate(results):
        assert losses == results[0][0], "the losses differ between the ranks"
        assert largest(torch.tensor(losses), torch.tensor(expected_losses)) < CLOSE
        assert list(state) == list(model.state_dict())
        for name, value in model.state_dict().items():
            assert state[name].shape == value.shape
            assert largest(torch.from_numpy(state[name]), value) < CLOSE, name
        for name, expected in expected_gradients.items():
            if expected is None:
                assert gradients[name] is None
                continue
            own = torch.from_numpy(gradients[name])
            dimension = next((d for d in range(own.dim()) if own.shape[d] < expected.shape[d]), None)
            if dimension is not None:
                expected = expected.chunk(world_size, dimension)[rank]
            assert own.shape == expected.shape
            assert largest(own, expected) < CLOSE, name


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_each_block_communicates_four_times_in_a_step(sequence_parallel):
    def run():
        calls, counts = count_calls(), []
        for layers in (1, 3):
            model = exercise.parallelize(Transformer(config_for(2, layers)), sequence_parallel=sequence_parallel)
            logits = model(torch.zeros(2, 12, dtype=torch.int64))
            forward, calls[:] = list(calls), []
            logits.sum().backward()
            counts.append((forward, list(calls)))
            calls.clear()
        return counts

    whole = 2 * 12 * 24 * 4  # bytes of the activations of two sequences
    for (forward1, backward1), (forward3, backward3) in in_processes(2, run):
        for one, three in ((forward1, forward3), (backward1, backward3)):
            large = {name: sum(size == whole and name == each for each, size in three) for name in COLLECTIVES}
            few = {name: sum(size == whole and name == each for each, size in one) for name in COLLECTIVES}
            per_block = {name: (large[name] - few[name]) / 2 for name in COLLECTIVES if large[name]}
            assert per_block == (
                {"all_gather": 2, "reduce_scatter": 2} if sequence_parallel else {"all_reduce": 2}
            )  # fmt: skip
        assert all(size == whole for _, size in forward3)
        small = [size for _, size in backward3 if size != whole]
        assert sum(small) <= (3 * 5 + 2) * 24 * 4 * sequence_parallel  # gradients of norms and biases


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_keeps_its_part(world_size):
    def kept(model, inputs):
        sizes = {}

        def pack(tensor):
            if not isinstance(tensor, nn.Parameter):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(inputs)
        del logits
        return sum(size for pointer, size in sizes.items() if pointer not in parameters)

    def run():
        inputs = torch.zeros(2, 12, dtype=torch.int64)
        model = Transformer(config_for(world_size))
        matrices = sum(each.nbytes for each in model.blocks.parameters() if each.dim() == 2)
        activations = kept(model, inputs)
        found = []
        for sequence_parallel in (False, True):
            divided = exercise.parallelize(Transformer(config_for(world_size)), sequence_parallel=sequence_parallel)
            stored = sum(each.untyped_storage().nbytes() for each in divided.blocks.parameters() if each.dim() == 2)
            assert stored * world_size == matrices
            found.append(kept(divided, inputs))
        return activations, found

    for whole, (tensor, sequence) in in_processes(world_size, run):
        if world_size == 1:
            continue
        assert sequence < tensor < whole
        saved = 2 * 12 * 24 * 4 * (1 - 1 / world_size)  # of one activation
        assert tensor - sequence >= 4 * saved  # the inputs of the norms in two blocks


def test_what_does_not_divide_is_an_error_on_all_ranks():
    def message(function):
        try:
            function()
        except ValueError as error:
            return str(error)
        return "no error"

    def run():
        column, row, parallelize = exercise.ColumnParallelLinear, exercise.RowParallelLinear, exercise.parallelize
        calls = count_calls()
        found = [
            message(lambda: column(nn.Linear(4, 7))),
            message(lambda: row(nn.Linear(7, 4))),
            message(lambda: parallelize(Transformer(Config(layers=1, width=24, heads=3, length=8)))),
        ]
        model = parallelize(Transformer(Config(layers=1, width=8, heads=2, length=8)))
        found.append(message(lambda: model(torch.zeros(1, 7, dtype=torch.int64))))
        assert calls == []
        return found

    for column, row, heads, sequence in in_processes(2, run):
        assert "2 ranks cannot share the 7 elements of dimension 0" in column
        assert "2 ranks cannot share the 7 elements of dimension 1" in row
        assert "2 ranks cannot share the 3 heads" in heads
        assert "2 ranks cannot share the 7 elements of dimension 1" in sequence


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    def run():
        torch.manual_seed(0)
        model = Transformer(config_for(2))
        expected = model(torch.arange(24).view(2, 12)).detach()
        divided = exercise.parallelize(model.to(dtype))
        logits = divided(torch.arange(24).view(2, 12))
        logits.float().logsumexp(-1).sum().backward()
        assert all(each.grad.dtype == dtype for each in divided.parameters())
        return largest(logits.float(), expected), [
            each.grad.float().numpy() for each in divided.blocks[0].norm1.parameters()
        ]

    (error, first), (_, second) = in_processes(2, run)
    assert error < 0.05
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def test_a_group_of_some_ranks():
    def run():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        errors = []
        for sequence_parallel in (False, True):
            torch.manual_seed(dist.get_rank() // 2)
            model = Transformer(config_for(2)).double()
            expected, expected_gradients = train(model, 1)
            torch.manual_seed(dist.get_rank() // 2)
            model = Transformer(config_for(2)).double()
            model = exercise.parallelize(model, groups[dist.get_rank() // 2], sequence_parallel)
            losses, gradients = train(model, 1)
            name = "blocks.0.norm1.weight"
            errors += [abs(losses[0] - expected[0]), largest(gradients[name], expected_gradients[name])]
        return max(errors)

    assert max(in_processes(4, run)) < CLOSE
