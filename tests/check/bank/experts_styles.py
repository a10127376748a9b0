"""Longer pieces of text for the cases of exercise 7 of stage 06: tokens that are sent in a different way."""

from check.bank.built import EXPERTS
from check.bank.case import part

KEEP_OWN = "            if str(number) in self.own:\n                self.experts[str(number)] = expert\n"
COMPUTE = part(EXPERTS, "        # A rank whose tokens need no gradient", "\n    def balance_loss(")
EXCHANGE = "        arrived = self.all_to_all(tokens, send, receive, self.group)\n"
SEND_BACK = "        return self.all_to_all(outputs[order.argsort()], receive, send, self.group)\n"
AVERAGE = part(EXPERTS, "    for parameter in module.parameters():\n", "\n\ndef options(parser)")
DEFAULT = "        self.all_to_all = all_to_all or AllToAll.apply\n"
CLASS = "class AllToAll(torch.autograd.Function):\n"

LOCAL = """        parts = zip(self.experts, tokens.split(counts.tolist()), strict=True)
        return torch.cat([self.experts[name](part) for name, part in parts])
"""

ALL_IN_DOUBLE = """    model.to(device, args.dtype)
    for block in model.blocks:
        for (each,) in block.mlp.all_experts:
            each.to(device, args.dtype)
"""

GATHER_ALL = '''class GatherAll(torch.autograd.Function):
    """The tensors of all ranks, which have the same shape, and the sum of their gradients."""

    @staticmethod
    def forward(ctx, own, group):
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


class SumAll(torch.autograd.Function):
    """The sum over the ranks, of which each rank gets its row, and the gradients of all rows."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        rows = rows.clone()
        dist.all_reduce(rows, group=group)
        return rows[dist.get_rank(group)]

    @staticmethod
    def backward(ctx, gradient):
        return GatherAll.apply(gradient, ctx.group), None


'''

GATHERED = """        tokens.requires_grad_(torch.is_grad_enabled())
        everyone = [torch.empty_like(counts) for _ in range(self.ranks)]
        dist.all_gather(everyone, counts, group=self.group)
        longest = max(int(each.sum()) for each in everyone)
        whole = GatherAll.apply(F.pad(tokens, (0, 0, 0, longest - len(tokens))), self.group)
        numbers = torch.arange(len(counts), device=tokens.device)
        labels = [numbers.repeat_interleave(each) for each in everyone]
        labels = torch.stack([F.pad(each, (0, longest - len(each)), value=-1) for each in labels]).flatten()
        rows, results = whole.flatten(0, 1), torch.zeros_like(whole).flatten(0, 1)
        for name in self.own:
            places = (labels == int(name)).nonzero().squeeze(1)
            results = results.index_copy(0, places, self.experts[name](rows[places]))
        return SumAll.apply(results.view_as(whole), self.group)[: len(tokens)]
"""

PARAMETERS = """        template = self.experts[self.own[0]]
        shapes = {name: each.shape for name, each in template.named_parameters()}
        flat = [torch.cat([each.flatten() for each in self.experts[name].parameters()]) for name in self.own]
        outputs = []
        gathered = GatherAll.apply(torch.stack(flat), self.group).flatten(0, 1)
        for row, part in zip(gathered, tokens.split(counts.tolist()), strict=True):
            values = row.split([shape.numel() for shape in shapes.values()])
            named = {name: value.view(shape) for (name, shape), value in zip(shapes.items(), values, strict=True)}
            outputs.append(torch.func.functional_call(template, named, (part,)))
        return torch.cat(outputs)
"""

PADDED = """        most = len(tokens)
        padded = torch.cat([F.pad(part, (0, 0, 0, most - len(part))) for part in tokens.split(send)])
        arrived = self.all_to_all(padded, [most] * self.ranks, [most] * self.ranks, self.group)
        arrived = torch.cat([part[:count] for part, count in zip(arrived.split(most), receive, strict=True)])
"""

PADDED_BACK = """        parts = outputs[order.argsort()].split(receive)
        padded = torch.cat([F.pad(part, (0, 0, 0, most - len(part))) for part in parts])
        arrived = self.all_to_all(padded, [most] * self.ranks, [most] * self.ranks, self.group)
        return torch.cat([part[:count] for part, count in zip(arrived.split(most), send, strict=True)])
"""

DENSE = """        sizes = arriving.sum(0).tolist()
        outputs = [self.experts[name](arrived[order]).split(sizes)[place] for place, name in enumerate(self.own)]
        outputs = torch.cat(outputs)
"""

OF_BATCH = """        number = self.router.out_features
        capacity = math.ceil(self.capacity_factor * experts.numel() / number)
        chosen = F.one_hot(experts.flatten(), number)
        return (chosen.cumsum(0) * chosen).sum(-1) <= capacity
"""

FIRST_CHOICES = """        number = self.router.out_features
        capacity = math.ceil(self.capacity_factor * self.top_k * experts.shape[-2] / number)
        chosen = F.one_hot(experts.transpose(-1, -2).flatten(-2), number)
        kept = (chosen.cumsum(-2) * chosen).sum(-1) <= capacity
        return kept.unflatten(-1, (self.top_k, experts.shape[-2])).transpose(-1, -2)
"""

LARGEST = """        number = self.router.out_features
        capacity = math.ceil(self.capacity_factor * self.top_k * experts.shape[-2] / number)
        order = gates.detach().flatten(-2).argsort(dim=-1, descending=True, stable=True)
        chosen = F.one_hot(experts.flatten(-2).gather(-1, order), number)
        kept = (chosen.cumsum(-2) * chosen).sum(-1) <= capacity
        return torch.zeros_like(kept).scatter(-1, order, kept)
"""

DROPS_LATE = (
    (
        "            order = order[self.has_place(experts).flatten()[order]]\n",
        "            kept = self.has_place(experts).flatten()[order]\n",
    ),
    (
        "        results = outputs.new_zeros(",
        "        if self.capacity_factor is not None:\n"
        "            outputs = outputs * kept.unsqueeze(-1)\n"
        "        results = outputs.new_zeros(",
    ),
)

FUNCTION_OF_PYTORCH = (
    (
        "import torch.distributed as dist\n",
        "import torch.distributed as dist\nimport torch.distributed.nn.functional\n",
    ),
    (DEFAULT, DEFAULT.replace("AllToAll.apply", "exchange")),
    (
        CLASS,
        """def exchange(rows, send, receive, group):
    received = rows.new_empty(sum(receive), *rows.shape[1:])
    return torch.distributed.nn.functional.all_to_all_single(received, rows.contiguous(), receive, send, group)


"""
        + CLASS,
    ),
)

# ---------------------------------------------------------------- styles

PAIRWISE = """        rank, works = dist.get_rank(group), []
        parts, places = rows.contiguous().split(send), received.split(receive)
        places[rank].copy_(parts[rank])
        for other in range(len(parts)):
            if other != rank and send[other]:
                works.append(dist.isend(parts[other], group_dst=other, group=group))
            if other != rank and receive[other]:
                works.append(dist.irecv(places[other], group_src=other, group=group))
        for work in works:
            work.wait()
"""

NUMBERED = """        tokens.requires_grad_(torch.is_grad_enabled())
        numbers = torch.arange(len(counts), device=tokens.device).repeat_interleave(counts)
        leaving = counts.view(self.ranks, -1).sum(1)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self.group)
        send, receive = leaving.tolist(), coming.tolist()
        rows = torch.cat([tokens, numbers.to(tokens.dtype).unsqueeze(-1)], dim=1)
        arrived, numbers = self.all_to_all(rows, send, receive, self.group).split([self.width, 1], dim=1)
        outputs, numbers = torch.zeros_like(arrived), numbers.detach().round().long().squeeze(1)
        for name in self.own:
            places = (numbers == int(name)).nonzero().squeeze(1)
            outputs = outputs.index_copy(0, places, self.experts[name](arrived[places]))
        return self.all_to_all(outputs, receive, send, self.group)
"""

JOINED = (
    (
        AVERAGE,
        """    trained = [each for each in module.parameters() if each.requires_grad]
    for each in trained:
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad / dist.get_world_size(group)
    shared = [each.grad for each in trained if each not in summed]
    joined = torch.cat([each.flatten() for each in shared])
    dist.all_reduce(joined, group=group)
    for each, piece in zip(shared, joined.split([each.numel() for each in shared]), strict=True):
        each.copy_(piece.view_as(each))
""",
    ),
)

LOOP = """        number, length = self.router.out_features, experts.shape[-2]
        capacity = -(-self.capacity_factor * self.top_k * length // number)
        rows = experts.view(-1, length, self.top_k)
        kept, taken = torch.zeros_like(rows, dtype=torch.bool), rows.new_zeros(len(rows), number)
        for place in range(length):
            for choice in range(self.top_k):
                chosen = rows[:, place, choice].unsqueeze(1)
                free = taken.gather(1, chosen) < capacity
                kept[:, place, choice] = free.squeeze(1)
                taken.scatter_add_(1, chosen, free.long())
        return kept.view_as(experts)
"""

BALANCE_LOOP = """        own, number = self.probabilities.flatten(0, -2), self.router.out_features
        sums = torch.cat([own.detach().sum(0), self.chosen.to(own.dtype), own.new_tensor([len(own)])])
        dist.all_reduce(sums, group=self.group)
        probabilities, chosen, tokens = sums.split([number, number, 1])
        loss = 0
        for expert in range(number):
            value = own[:, expert].sum() * self.ranks
            mean = (probabilities[expert] + value - value.detach()) / tokens
            loss = loss + chosen[expert] / chosen.sum() * mean
        return number * loss.squeeze()
"""

GATHERED_COUNTS = """        everyone = [torch.empty_like(counts) for _ in range(self.ranks)]
        dist.all_gather(everyone, counts, group=self.group)
        rank = dist.get_rank(self.group)
        arriving = torch.cat([each.view(self.ranks, -1)[rank] for each in everyone])
"""
