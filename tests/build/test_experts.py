"""Exercise 7 of stage 06: the solution equals one process, for any experts."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from build.processes import in_processes, solution
from workshop.training.building import loss_of
from workshop.training.decoder import MLP, Config, Transformer
from workshop.training.experts import pytorch_all_to_all, report_experts

CLOSE = 1e-12
WIDTH, EXPERTS = 6, 12
CASES = [(1, None), (2, None), (3, 0.8), (1, 0.3)]  # top_k and capacity factor


def mixture(*args, **options):
    return solution("exercise7_experts").MixtureOfExperts(*args, **options)


def average_gradients(*args):
    solution("exercise7_experts").average_gradients(*args)


def make_expert():
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, WIDTH))


class Reference(nn.Module):
    """The layer in one process, without any distribution: a loop over tokens, one after the other."""

    def __init__(self, top_k, capacity_factor):
        super().__init__()
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(make_expert() for _ in range(EXPERTS))

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        chosen, dropped, results = Counter(), 0, torch.zeros_like(x)
        for sequence, tokens in enumerate(x):
            taken = Counter()
            for place, token in enumerate(tokens):
                gates = probabilities[sequence, place]
                for expert in gates.topk(self.top_k).indices.tolist():
                    chosen[expert] += 1
                    if (
                        self.capacity_factor is None
                        or taken[expert] < self.capacity_factor * self.top_k * len(tokens) / EXPERTS
                    ):
                        taken[expert] += 1
                        results[sequence, place] += gates[expert] * self.experts[expert](token)
                    else:
                        dropped += 1
        shares = torch.tensor([chosen[expert] / chosen.total() for expert in range(EXPERTS)], dtype=x.dtype)
        balance = EXPERTS * (shares * probabilities.flatten(0, 1).mean(0)).sum()
        return results, balance, [chosen[expert] for expert in range(EXPERTS)], dropped


def data(layer):
    """Return tokens for which the router chooses the experts 0 and 1 never, and others often."""
    torch.manual_seed(1)
    with torch.no_grad():
        layer.router.weight[:2], layer.router.weight[4:6] = -9, 0.3
    return torch.rand(12, 7, WIDTH, dtype=torch.float64), torch.randn(12, 7, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_layer_equals_one_process(ranks):
    def run(top_k, capacity_factor, exchange=None):
        torch.manual_seed(0)
        layer = mixture(WIDTH, make_expert, EXPERTS, top_k, capacity_factor, all_to_all=exchange).double()
        x, factor = (each[dist.get_rank() :: ranks].contiguous() for each in data(layer))
        x.requires_grad_()
        output = layer(x)
        balance = layer.balance_loss()
        ((output * factor).mean() + 0.3 * balance).backward()
        average_gradients(layer)
        gradients = {name: each.grad for name, each in layer.named_parameters()}
        return output.detach(), x.grad / ranks, balance.item(), gradients, layer.chosen, layer.computed

    results = in_processes(ranks, lambda: [*(run(*case) for case in CASES), run(*CASES[2], pytorch_all_to_all)])
    for number, case in enumerate([*CASES, CASES[2]]):
        torch.manual_seed(0)
        layer = Reference(*case).double()
        x, factor = data(layer)
        x.requires_grad_()
        output, balance, chosen, dropped = layer(x)
        ((output * factor).mean() + 0.3 * balance).backward()
        found = [result[number] for result in results]
        for rank, (own_output, own_gradient, own_balance, *_) in enumerate(found):
            assert abs(own_output - output[rank::ranks]).max() < CLOSE
            assert abs(own_gradient - x.grad[rank::ranks]).max() < CLOSE
            assert abs(own_balance - balance) < CLOSE
        gradients = {name: each for rank in found for name, each in rank[3].items()}
        assert gradients.keys() == {name for name, _ in layer.named_parameters()}
        for name, parameter in layer.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert abs(gradients[name] - expected).max() < CLOSE, name
            assert all(torch.equal(rank[3][name], gradients[name]) for rank in found if name in rank[3])
        assert sum(rank[4] for rank in found).tolist() == chosen
        assert chosen[:2] == [0, 0]
        assert sum(chosen) - sum(rank[5].sum() for rank in found) == dropped
        assert (dropped > 0) == (case[1] is not None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_transformer_equals_one_process(ranks):
    config = Config(layers=2, width=16, heads=2, length=8)

    def train():
        torch.manual_seed(0)
        model = Transformer(config)
        for block in model.blocks:
            block.mlp = mixture(16, lambda: MLP(config), 4, 2, 0.9)
        model.double()
        torch.manual_seed(1)
        losses = []
        for batch in torch.randint(256, (4, 8, 9)):
            batch = batch[dist.get_rank() :: dist.get_world_size()]
            loss = loss_of(model(batch[:, :-1]), batch[:, 1:]) + 0.1 * sum(
                each.mlp.balance_loss() for each in model.blocks
            )
            loss.backward()
            average_gradients(model)
            for each in model.parameters():  # an optimizer would import much in each process
                each.data -= 0.5 * each.grad
            model.zero_grad()
            losses.append(loss.item())
        return losses, sum(each.numel() for name, each in model.named_parameters() if "experts" in name)

    ((expected, all_parameters),) = in_processes(1, train)
    results = in_processes(ranks, train)
    found = torch.tensor([losses for losses, _ in results], dtype=torch.float64).mean(0)
    assert abs(found - torch.tensor(expected, dtype=torch.float64)).max() < CLOSE
    assert [parameters for _, parameters in results] == [all_parameters // ranks] * ranks


def test_each_token_is_sent_once_and_comes_back():
    def run():
        calls, original = [], dist.all_to_all_single

        def counted(output, tensor, *args, **options):
            calls.append((tuple(tensor.shape), tuple(output.shape)))
            return original(output, tensor, *args, **options)

        dist.all_to_all_single = counted
        torch.manual_seed(0)
        layer = mixture(WIDTH, make_expert, EXPERTS, 2, 0.8).double()
        x, _ = data(layer)
        reduced, dist.all_reduce = [], lambda *args, **options: reduced.append(args)
        output = layer(x[dist.get_rank() :: 3])
        output.sum().backward()
        return calls, layer.computed.sum().item(), len(reduced)

    results = in_processes(3, run)
    for calls, computed, reduced in results:
        counts, there, back, gradients_there, gradients_back = calls
        assert counts == ((EXPERTS,), (EXPERTS,))
        assert there[0] == back[1] == gradients_there[0] == gradients_back[1] == (computed, WIDTH)
        assert there[1] == back[0] == gradients_there[1] == gradients_back[0]
        assert reduced == 0
    sent, received = (sum(calls[1][side][0] for calls, *_ in results) for side in (0, 1))
    assert sent == received


def test_ranks_and_experts_without_tokens():
    """Rank 0 has no tokens, the tokens of rank 1 all go to one expert, and the tokens of both need no gradient."""

    def run():
        rank = dist.get_rank()
        torch.manual_seed(0)
        layer = mixture(WIDTH, make_expert, 4)
        if rank == 1:
            layer.experts.requires_grad_(False)
        with torch.no_grad():
            layer.router.weight.copy_(torch.tensor([-1.0, 1, -1, -1])[:, None].expand(4, WIDTH))
        output = layer(torch.ones(0 if rank == 0 else 2, 3, WIDTH))
        output.sum().backward()
        average_gradients(layer)
        largest = {
            name: float(abs(each.grad).max()) for name, each in layer.experts.named_parameters() if each.requires_grad
        }
        return output.shape, largest, layer.router.weight.grad.abs().sum()

    (shape, largest, router), (_, frozen, other) = in_processes(2, run)
    assert shape == (0, 3, WIDTH)
    assert {name[0] for name, size in largest.items() if size > 0} == {"1"}
    assert all(size == 0 for name, size in largest.items() if name[0] == "0")
    assert frozen == {}
    assert router == other > 0


def test_all_to_all_with_gradients():
    """Rank r sends s + 1 rows to rank s, and nothing to itself. Rows and gradients are not contiguous."""

    def run():
        rank, found = dist.get_rank(), []
        send = [0 if other == rank else other + 1 for other in range(3)]
        receive = [0 if other == rank else rank + 1 for other in range(3)]
        for exchange in (solution("exercise7_experts").AllToAll.apply, pytorch_all_to_all):
            rows = torch.full((2, sum(send)), float(rank)).t().requires_grad_()
            received = exchange(rows, send, receive, None)
            (received.sum(1) * (torch.arange(len(received)) * 10 + rank)).sum().backward()
            found.append((received[:, 0].tolist(), rows.grad[:, 0].tolist()))
        return found

    expected = [
        ([1, 2], [1, 11, 2, 12, 22]),
        ([0, 0, 2, 2], [0, 32, 42, 52]),
        ([0, 0, 0, 1, 1, 1], [10, 21, 31]),
    ]
    assert in_processes(3, run) == [[each] * 2 for each in expected]


def test_a_parameter_that_only_one_rank_uses():
    def run():
        module = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        module[1].requires_grad_(False)
        if dist.get_rank() == 1:
            module[0](torch.ones(1, 1)).sum().backward()
        average_gradients(module)
        return module[0].weight.grad.item(), module[1].weight.grad

    assert in_processes(2, run) == [(0.5, None)] * 2


def test_the_result_of_a_token_depends_only_on_earlier_tokens_of_its_sequence():
    def run():
        torch.manual_seed(0)
        layer = mixture(WIDTH, make_expert, EXPERTS, 3, 0.8).double()
        x, _ = data(layer)
        with torch.no_grad():
            whole = layer(x)
            assert abs(whole[3:5] - layer(x[3:5])).max() < CLOSE
            assert abs(whole[3] - layer(x[3])).max() < CLOSE
            changed = x.clone()
            changed[:, 4:] = torch.rand(12, 3, WIDTH)
            assert abs(whole[:, :4] - layer(changed)[:, :4]).max() < CLOSE
            assert abs(whole[:, 4:] - layer(changed)[:, 4:]).max() > 0.01
        return True

    assert in_processes(1, run) == [True]


def test_low_precision():
    def run(dtype, ranks_tokens=2):
        torch.manual_seed(0)
        layer = mixture(WIDTH, make_expert, 4, 2, 1.0)
        x = torch.randn(4, 5, WIDTH)[dist.get_rank() :: 2]
        expected = layer(x)
        output = layer.to(dtype)(x.to(dtype))
        (output.float().mean() + layer.balance_loss()).backward()
        average_gradients(layer)
        assert output.dtype == dtype
        assert layer.probabilities.dtype == torch.float32
        assert all(each.grad.dtype == dtype and each.grad.isfinite().all() for each in layer.parameters())
        with torch.autocast("cpu", torch.bfloat16):
            layer.float()(x).sum().backward()
        return (abs(output.float() - expected) > 0.05).float().mean()  # a rounded input may have a different expert

    for errors in in_processes(2, lambda: (run(torch.float16), run(torch.bfloat16))):
        assert max(errors) < 0.1


def test_a_group_of_some_ranks():
    def run():
        rank = dist.get_rank()
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        torch.manual_seed(rank % 2)
        layer = mixture(WIDTH, make_expert, 4, group=groups[rank % 2])
        output = layer(torch.ones(2, 3, WIDTH))
        balance = layer.balance_loss()
        expected = 4 * (layer.chosen / layer.chosen.sum() * layer.probabilities.mean((0, 1))).sum()
        assert abs(balance - expected) < 1e-5  # both ranks of a group have the same tokens
        (output.sum() + balance).backward()
        average_gradients(layer, groups[rank % 2])
        return output.detach(), layer.router.weight.grad, sorted(layer.experts)

    results = in_processes(4, run)
    assert [experts for *_, experts in results] == [["0", "1"], ["0", "1"], ["2", "3"], ["2", "3"]]
    for first, second in [(0, 2), (1, 3)]:
        assert torch.equal(results[first][0], results[second][0])
        assert torch.equal(results[first][1], results[second][1])
    assert not torch.equal(results[0][0], results[1][0])


def test_errors_are_raised_on_all_ranks():
    cases = [
        ({"experts": 5}, (2, 3, WIDTH), "2 ranks do not divide the 5 experts"),
        ({"experts": 4, "top_k": 5}, (2, 3, WIDTH), "at most 4 of the 4 experts, not 5"),
        ({"experts": 4, "top_k": 0}, (2, 3, WIDTH), "at least 1 and at most 4"),
        ({"experts": 4, "capacity_factor": 0}, (2, 3, WIDTH), "the capacity factor must be larger than 0, not 0"),
        ({"experts": 4, "capacity_factor": -1.5}, (2, 3, WIDTH), "larger than 0, not -1.5"),
        ({"experts": 4}, (2, 3, 5), r"the input has the shape \[2, 3, 5\]"),
        ({"experts": 4}, (WIDTH,), r"the input has the shape \[6\]"),
    ]

    def run():
        for options, shape, message in cases:
            with pytest.raises(ValueError, match=message):
                mixture(WIDTH, make_expert, **options)(torch.zeros(shape))
        return True

    assert all(in_processes(2, run))


def test_the_report_adds_up_the_ranks(tmp_path):
    def run():
        chosen = [torch.tensor([3, 1]), torch.tensor([0, 4])][dist.get_rank()]
        return report_experts(SimpleNamespace(folder=tmp_path), [[(chosen, torch.tensor([1, 1]))] * 3] * 5)

    data, other = in_processes(2, run)
    assert other == {}
    assert data == {"shares": [[[3 / 8, 5 / 8]] * 5] * 3, "dropped": [0.5] * 3}
    assert (tmp_path / "experts.json").is_file()
