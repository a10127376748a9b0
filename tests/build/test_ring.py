"""Exercise 6 of stage 06: ring attention equals the attention of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from build.processes import in_processes, solution
from workshop.training.decoder import Config, Transformer

exercise = solution("exercise6_ring")  # before the processes are forked, because it imports much of PyTorch
CLOSE = 1e-12
PIECE = 3  # tokens
HEAD_SIZE = 5


def largest(a, b):
    return (a - b).abs().max().item()


def random_inputs(heads, key_heads, length, dtype=torch.float64):
    """Return query, key, value and a gradient of the output, equal on all ranks."""
    torch.manual_seed(0)
    # In the memory layout of a model, in which the heads of a token come after each other.
    shapes = [(2, length, count, HEAD_SIZE) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, dtype=torch.float64).transpose(1, 2).to(dtype) for shape in shapes]


def of_one_process(query, key, value, gradient, causal):
    inputs = [each.detach().requires_grad_() for each in (query, key, value)]
    output = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=key.shape[1] < query.shape[1])
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def of_this_rank(query, key, value, gradient, causal, group=None):
    inputs = [exercise.shard_sequence(each, 2, group).requires_grad_() for each in (query, key, value)]
    output = exercise.ring_attention(*inputs, group=group, causal=causal)
    output.backward(exercise.shard_sequence(gradient, 2, group))
    return [output.detach(), *(each.grad for each in inputs)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_output_and_gradients_equal_one_process(world_size):
    def run():
        errors = []
        for causal in (True, False):
            for heads, key_heads in ((2, 2), (4, 2), (3, 1)):
                tensors = random_inputs(heads, key_heads, 2 * world_size * PIECE)
                expected, found = of_one_process(*tensors, causal), of_this_rank(*tensors, causal)
                for whole, own in zip(expected, found, strict=True):
                    assert own.dtype == whole.dtype
                    errors += [largest(exercise.shard_sequence(whole, 2), own)]
                    errors += [largest(exercise.gather_sequence(own, 2), whole)]
        return max(errors)

    assert max(in_processes(world_size, run)) < CLOSE


def test_large_scores_do_not_overflow():
    def run():
        query, key, value, gradient = random_inputs(2, 2, 4 * PIECE)
        tensors = [query * 300, key * 300, value, gradient]
        return max(
            largest(exercise.shard_sequence(whole, 2), own)
            for whole, own in zip(of_one_process(*tensors, True), of_this_rank(*tensors, True), strict=True)
        )

    assert max(in_processes(2, run)) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    def run():
        tensors = random_inputs(2, 2, 4 * PIECE, dtype)
        found = of_this_rank(*tensors, True)
        assert all(each.dtype == dtype for each in found)
        expected = of_one_process(*(each.double() for each in tensors), True)
        return max(
            largest(exercise.shard_sequence(whole, 2), own.double()) / whole.abs().max().item()
            for whole, own in zip(expected, found, strict=True)
        )

    assert max(in_processes(2, run)) < torch.finfo(dtype).eps


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_transformer_equals_one_process(world_size):
    config = Config(layers=2, width=16, heads=2, length=16, vocabulary=30)

    def train(model, part):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        losses = []
        for _ in range(3):
            batch = torch.randint(30, (2, 17))
            inputs, targets, positions = part(batch[:, :-1], 1), part(batch[:, 1:], 1), part(torch.arange(16), 0)
            loss = F.cross_entropy(model(inputs, positions).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def run():
        torch.manual_seed(0)
        model = Transformer(config).double()
        for block in model.blocks:
            block.attention.attend = exercise.ring_attention
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        losses = train(wrapped, exercise.shard_sequence)
        return losses, {name: value.numpy() for name, value in model.state_dict().items()}

    torch.manual_seed(0)
    model = Transformer(config).double()
    expected = torch.tensor(train(model, lambda tensor, dim: tensor), dtype=torch.float64)
    results = in_processes(world_size, run)
    losses = torch.tensor([losses for losses, _ in results], dtype=torch.float64).mean(0)
    assert largest(losses, expected) < CLOSE
    for _, state in results:
        for name, value in model.state_dict().items():
            assert largest(torch.from_numpy(state[name]), value) < CLOSE, name


def test_the_tokens_of_a_rank():
    def run():
        return exercise.shard_sequence(torch.arange(12), 0).tolist()

    assert in_processes(2, run) == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_computes_the_same_number_of_scores(world_size):
    def run():
        tensors = random_inputs(1, 1, 2 * world_size * PIECE)
        with FlopCounterMode(display=False) as forward:
            inputs = [exercise.shard_sequence(each, 2).requires_grad_() for each in tensors[:3]]
            output = exercise.ring_attention(*inputs)
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
        unit = 2 * 2 * PIECE * PIECE * HEAD_SIZE  # of one product for a piece of queries and a piece of keys, batch 2
        return forward.get_total_flops() / unit, backward.get_total_flops() / unit

    pieces = 3 + 2 * (world_size - 1)  # on each rank; without skipping, 4 per rank
    assert in_processes(world_size, run) == [(2 * pieces, 5 * pieces)] * world_size


class Events(TorchDispatchMode):
    """Record the products that a process computes, and the sizes of the tensors that it creates."""

    def __init__(self, events):
        super().__init__()
        self.events, self.longest = events, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation.overloadpacket is torch.ops.aten.bmm:
            self.events.append("product")
        if torch.is_tensor(result):
            self.longest = max(self.longest, *result.shape, 0)
        return result


@pytest.mark.parametrize("world_size", [2, 4])
def test_blocks_pass_while_the_rank_computes(world_size):
    length = 2 * world_size * 20

    def run():
        inputs = [exercise.shard_sequence(each, 2).requires_grad_() for each in random_inputs(2, 2, length)[:3]]
        events, sent, original = [], [], dist.batch_isend_irecv

        class Waited:
            def __init__(self, job):
                self.job = job

            def wait(self):
                events.append("wait")
                return self.job.wait()

        def counted(jobs):
            events.append("start")
            sent.extend((each.tensor.nbytes, each.group_peer) for each in jobs if each.op is dist.isend)
            return [Waited(job) for job in original(jobs)]

        dist.batch_isend_irecv = counted
        for name in ("all_gather", "all_reduce", "all_gather_into_tensor", "broadcast", "all_to_all", "reduce_scatter"):
            setattr(dist, name, None)
        with Events(events) as mode:
            output = exercise.ring_attention(*inputs)
            forward, sent_forward = list(events), list(sent)
            events.clear()
            output.sum().backward()
        return forward, list(events), sent_forward, sent[len(sent_forward) :], mode.longest

    block = 2 * 2 * 2 * 40 * HEAD_SIZE * 8  # keys and values of two sequences, two heads
    for rank, (forward, backward, sent_forward, sent_backward, longest) in enumerate(in_processes(world_size, run)):
        neighbor = (rank + 1) % world_size
        assert sent_forward == [(block, neighbor)] * (world_size - 1)
        assert sent_backward == [(block, neighbor)] * (2 * world_size - 1)
        assert longest == 40  # the tokens of this rank, never the whole sequence
        for events in (forward, backward):
            assert events[0] == "start"
            assert events[1] == "product"
            waits = [number for number, event in enumerate(events) if event == "wait"]
            assert "product" in events[events.index("start") : waits[0]]
        starts = [number for number, event in enumerate(forward) if event == "start"]
        for number in starts:  # in the forward pass, every message has a product between its start and its end
            assert forward[number + 1] == "product"
        assert forward[-1] == "product"


def test_what_cannot_work_is_an_error_on_all_ranks():
    def message(function):
        try:
            function()
        except ValueError as error:
            return str(error)
        return "no error"

    def run():
        dist.batch_isend_irecv = None
        query, other = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 8, 4)
        return [
            message(lambda: exercise.shard_sequence(torch.zeros(3, 10))),
            message(lambda: exercise.ring_attention(query, query, other)),
            message(lambda: exercise.ring_attention(query, other, other)),
            message(lambda: exercise.ring_attention(query, *[torch.randn(1, 3, 6, 4)] * 2)),
            message(lambda: exercise.ring_attention(query[0], query[0], query[0])),
            message(lambda: exercise.ring_attention(*[torch.randn(1, 2, 5, 4)] * 3)),
        ]

    for length, value, tokens, heads, dimensions, odd in in_processes(2, run):
        assert "a sequence of 10 tokens cannot be divided into 2 equal pieces for each of 2 ranks" in length
        assert "(1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 8, 4)" in value
        assert "(1, 2, 6, 4), (1, 2, 8, 4), (1, 2, 8, 4)" in tokens
        assert "(1, 2, 6, 4), (1, 3, 6, 4), (1, 3, 6, 4)" in heads
        assert "must have 4 dimensions" in dimensions
        assert "this rank has 5 tokens" in odd


def test_a_group_of_some_ranks():
    def run():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = groups[dist.get_rank() // 2]
        tensors = random_inputs(2, 2, 4 * PIECE)
        expected, found = of_one_process(*tensors, True), of_this_rank(*tensors, True, group)
        errors = [
            largest(exercise.gather_sequence(own, 2, group), whole) for whole, own in zip(expected, found, strict=True)
        ]
        return max(errors)

    assert max(in_processes(4, run)) < CLOSE


def test_autocast_does_not_change_the_sums():
    def run():
        tensors = random_inputs(2, 2, 4 * PIECE, torch.bfloat16)
        expected = of_this_rank(*tensors, True)[0]
        with torch.autocast("cpu", torch.bfloat16):
            return largest(of_this_rank(*tensors, True)[0], expected)

    assert in_processes(2, run) == [0.0, 0.0]
