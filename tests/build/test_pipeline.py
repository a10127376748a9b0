"""Exercise 5 of stage 06: the solution equals one process, for any stages."""

import copy
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from build.processes import in_processes, solution
from workshop.training.building import loss_of
from workshop.training.decoder import Config, Transformer
from workshop.training.pipeline import bubble, most_kept, report_timeline, split

CLOSE = 1e-12


def pipeline(*args, **options):
    return solution("exercise5_pipeline").Pipeline(*args, **options)


def gradients(module):
    return {name: each.grad for name, each in module.named_parameters()}


def assert_equal(found, expected, close=CLOSE):
    """Compare dictionaries of gradients; None is the gradient of a parameter that is frozen or has no part in the loss."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        if gradient is None or expected[name] is None:
            assert gradient is expected[name], name
        else:
            assert abs(gradient - expected[name]).max() < close, name


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (3, 6), (4, 4)])
def test_the_transformer_equals_one_process(stages, microbatches):
    config = Config(layers=3 if stages == 3 else 4, width=16, heads=2, length=8, tied=False)

    def model_and_batches():
        torch.manual_seed(0)
        model = Transformer(config).double()
        # The last batch has a different shape.
        return model, [
            torch.randint(256, (12, 9)),
            torch.randint(256, (12, 9)),
            torch.randint(256, (2 * microbatches, 6)),
        ]

    def train(schedule):
        model, batches = model_and_batches()
        stage = split(model, stages)[dist.get_rank()]
        running = pipeline(stage, loss_of, microbatches, schedule)
        losses = [running.step(batch[:, :-1], batch[:, 1:]) for batch in batches]
        assert all((loss is None) == (dist.get_rank() < stages - 1) for loss in losses)
        return losses, gradients(stage)

    model, batches = model_and_batches()
    expected = [loss_of(model(batch[:, :-1]), batch[:, 1:]) for batch in batches]
    sum(expected).backward()
    for results in zip(*in_processes(stages, lambda: (train("gpipe"), train("1f1b"))), strict=True):
        assert abs(torch.stack(results[-1][0]) - torch.stack(expected)).max() < CLOSE
        assert_equal({name: each for _, found in results for name, each in found.items()}, gradients(model))


class Turn(nn.Module):
    """A stage without parameters, whose output is not contiguous."""

    def forward(self, x):
        return x.transpose(1, 2).tanh()


def foreign_stages():
    """Return four stages whose outputs have different shapes and data types. Some parameters are frozen or not used."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv1d(3, 5, 2), nn.Linear(6, 4)).double()
    second, last = Turn(), nn.Sequential(nn.Flatten(), nn.Linear(20, 2)).double()
    third = nn.ModuleDict({"used": nn.Linear(5, 5), "frozen": nn.Linear(5, 5), "unused": nn.Linear(5, 5)})
    third["frozen"].requires_grad_(False)
    third.forward = lambda x: third["frozen"](third["used"](x.float()).sin()).double()
    return [first, second, third, last]


def foreign_loss(output, target):
    return F.mse_loss(output, target)


def test_foreign_stages_equal_one_process():
    cases = [(schedule, frozen) for schedule in ("gpipe", "1f1b") for frozen in ((), (0, 1), (0, 1, 2, 3))]

    def data():
        torch.manual_seed(1)
        return torch.randn(8, 3, 7, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)

    def stages(frozen):
        found = foreign_stages()
        for number in frozen:
            found[number].requires_grad_(False)
        return found

    def train(schedule, frozen):
        rank, (inputs, targets) = dist.get_rank(), data()
        stage = stages(frozen)[rank]
        running = pipeline(stage, F.mse_loss, 8, schedule)
        for _ in range(2):  # a rank needs only what it computes with
            loss = running.step(inputs if rank == 0 else None, targets if rank == 3 else None)
        return loss, gradients(stage)

    results = in_processes(4, lambda: [train(*case) for case in cases])
    for number, (_, frozen) in enumerate(cases):
        model, (inputs, targets) = nn.Sequential(*stages(frozen)), data()
        for _ in range(2):
            expected = F.mse_loss(model(inputs), targets)
            if len(frozen) < 4:
                expected.backward()
        assert abs(results[3][number][0] - expected) < 1e-7  # the third stage computes in float32
        for rank, stage in enumerate(model):
            assert_equal(results[rank][number][1], gradients(stage), close=1e-6)


def test_the_first_stage_may_send_whole_numbers():
    """They have no gradient, so neither has the first stage."""

    def train():
        torch.manual_seed(0)
        stage = [nn.Identity(), nn.Embedding(9, 4)][dist.get_rank()]
        tokens, targets = torch.arange(8), torch.randn(8, 4)
        loss = pipeline(stage, F.mse_loss, 4).step(tokens, targets)
        return loss is None or float(loss - F.mse_loss(stage(tokens), targets))

    first, last = in_processes(2, train)
    assert first is True
    assert abs(last) < 1e-6


def test_low_precision():
    def train(dtype):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4).to(dtype) for _ in range(2)]
        inputs, targets = torch.randn(4, 4).to(dtype), torch.randn(4, 4).to(dtype)
        whole = copy.deepcopy(nn.Sequential(*layers))
        stage, part = layers[dist.get_rank()], whole[dist.get_rank()]
        loss = pipeline(stage, F.mse_loss, 2).step(inputs, targets)
        F.mse_loss(whole(inputs), targets).backward()
        assert loss is None or loss.dtype == dtype
        return max(
            float(abs(a.grad - b.grad).max()) for a, b in zip(stage.parameters(), part.parameters(), strict=True)
        )

    for errors in in_processes(2, lambda: (train(torch.float16), train(torch.bfloat16))):
        assert max(errors) < 0.02


def test_the_group_decides_the_order_of_the_stages():
    """Two pipelines run beside each other: ranks 0 and 2, and ranks 1 and 3."""

    def train():
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rank = dist.get_rank()
        torch.manual_seed(rank % 2)
        layers, inputs, targets = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4), torch.randn(4, 4)
        loss = pipeline(layers[rank // 2], F.mse_loss, 2, group=groups[rank % 2]).step(inputs, targets)
        return loss, F.mse_loss(layers(inputs), targets).detach()

    results = in_processes(4, train)
    assert [loss is None for loss, _ in results] == [True, True, False, False]
    assert all(abs(loss - expected) < 1e-6 for loss, expected in results[2:])


def test_1f1b_keeps_few_micro_batches():
    def kept(schedule):
        running = pipeline(nn.Linear(2, 2), F.mse_loss, 8, schedule)
        sizes, forward = [], running.stage.forward
        running.stage.forward = lambda x: (sizes.append(len(running.kept) + 1), forward(x))[1]
        running.step(torch.zeros(8, 2), torch.zeros(8, 2))
        assert not running.kept
        assert most_kept(running.timeline) == max(sizes)
        return max(sizes), [event[1:3] for event in running.timeline]

    results = in_processes(4, lambda: (kept("gpipe"), kept("1f1b")))
    assert [gpipe[0] for gpipe, _ in results] == [8] * 4
    assert [one[0] for _, one in results] == [4, 3, 2, 1]
    for gpipe, one in results:
        assert gpipe[1] == [(kind, number) for kind in ("forward", "backward") for number in range(8)]
        assert sorted(one[1]) == sorted(gpipe[1])


def test_a_micro_batch_costs_one_message_in_each_direction():
    def count():
        sent, batch, announce = [], dist.batch_isend_irecv, dist.send_object_list

        def counted(operations):
            sent[-1] += [each.tensor.nbytes for each in operations if each.op is dist.isend]
            return batch(operations)

        def announced(*args, **options):
            sent[-1].append("shape")
            return announce(*args, **options)

        dist.batch_isend_irecv, dist.send_object_list = counted, announced
        running = pipeline(nn.Linear(6, 6), F.mse_loss, 4)
        for samples in (8, 8, 16, 16):
            sent.append([])
            running.step(torch.zeros(samples, 6), torch.zeros(samples, 6))
        return sent

    for rank, sent in enumerate(in_processes(3, count)):
        messages = 8 if rank == 1 else 4
        for step, samples in enumerate((8, 8, 16, 16)):
            assert sent[step].count("shape") == (rank < 2 and step % 2 == 0)
            assert sent[step].count(samples // 4 * 6 * 4) == messages
            assert len(sent[step]) == messages + sent[step].count("shape")


class Slow(nn.Module):
    """A stage whose forward and backward pass need a certain time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        time.sleep(0.02)
        output = self.linear(x)
        output.register_hook(lambda gradient: time.sleep(0.02))
        return output


def test_the_stages_work_at_the_same_time(tmp_path):
    def run(schedule):
        running = pipeline(Slow(), F.mse_loss, 6, schedule)
        timelines = []
        for _ in range(3):
            running.step(torch.zeros(6, 2), torch.zeros(6, 2))
            timelines.append(running.timeline)
        return report_timeline(SimpleNamespace(microbatches=6, folder=tmp_path), timelines)

    for data in in_processes(3, lambda: (run("gpipe"), run("1f1b")))[0]:
        assert data["expected"] == 0.25  # with one micro-batch at a time, it would be 0.67
        assert 0.15 < data["bubble"] < 0.5
        assert len(data["timeline"]) == 3 * 12
        assert data["bubble"] == pytest.approx(bubble(data["timeline"]))
        assert (tmp_path / "timeline.json").is_file()


def test_errors_are_raised_on_all_ranks():
    cases = [
        ({"microbatches": 2}, 6, 6, "2 micro-batches are fewer than the 3 stages"),
        ({"microbatches": 4}, 6, 6, "4 micro-batches do not divide a batch of 6 samples"),
        ({"microbatches": 3}, 6, 9, "3 micro-batches do not divide a batch of 9 samples"),
        ({"microbatches": 3, "schedule": "2f2b"}, 6, 6, "the schedule '2f2b' is unknown"),
    ]

    def run():
        for options, inputs, targets, message in cases:
            with pytest.raises(ValueError, match=message):
                pipeline(nn.Linear(2, 2), F.mse_loss, **options).step(torch.zeros(inputs, 2), torch.zeros(targets, 2))
        return True

    assert all(in_processes(3, run))


def test_an_output_with_a_different_shape_is_an_error():
    """The next rank could not receive it."""

    class Shrinking(nn.Linear):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x)[: 3 - self.calls]

    def run():
        stage = [Shrinking(2, 2), nn.Identity()][dist.get_rank()]
        running = pipeline(stage, F.mse_loss, 2)
        try:
            running.step(torch.zeros(4, 2), torch.zeros(4, 2))
        except (ValueError, RuntimeError) as error:  # on rank 1, the connection to rank 0 has ended
            return str(error)

    assert "an output has the shape [1, 2], not [2, 2] as before" in in_processes(2, run)[0]


@pytest.mark.parametrize(
    ("tied", "stages", "message"),
    [
        (False, 3, "3 stages do not divide the 4 layers"),
        (False, 8, "8 stages are more than the 4 layers"),
        (True, 2, "tied=False"),
    ],
)
def test_a_model_that_cannot_be_split(tied, stages, message):
    model = Transformer(Config(width=16, heads=2, length=8, tied=tied))
    with pytest.raises(ValueError, match=message):
        split(model, stages)


def test_one_stage_may_be_tied():
    model = Transformer(Config(layers=2, width=16, heads=2, length=8))
    (stage,) = split(model, 1)
    tokens = torch.randint(256, (2, 8))
    assert torch.equal(stage(tokens), model(tokens))
