"""Longer pieces of text for the cases of exercise 6 of stage 06: ring attention that is built in a different way."""

OF_AUTOGRAD = """
class Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return rotate(tensor, group)()

    @staticmethod
    def backward(ctx, gradient):
        rank, ranks, received = dist.get_rank(ctx.group), dist.get_world_size(ctx.group), torch.empty_like(gradient)
        jobs = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, gradient.contiguous(), group=ctx.group, group_peer=(rank - 1) % ranks),
            dist.P2POp(dist.irecv, received, group=ctx.group, group_peer=(rank + 1) % ranks),
        ])
        for job in jobs:
            job.wait()
        return received, None


class RingAttention:
    @staticmethod
    def apply(query, key, value, group, causal):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        query, block, size = wide(query), torch.stack([key, value]), query.shape[-2] // 2
        outputs, totals = [[], []], [[], []]
        for hop in range(ranks):
            for rows, columns, shift in visible(query, rank, (rank - hop) % ranks, ranks, causal):
                keys, values = wide(block[..., columns, :])
                scores = scores_of(query[..., rows, :], keys, shift)
                totals[rows.start // size].append(scores.logsumexp(-1))
                outputs[rows.start // size].append(scores.softmax(-1) @ values)
            block = Rotated.apply(block, group) if hop < ranks - 1 else None
        result = []
        for out, total in zip(outputs, totals, strict=True):
            parts = torch.stack(total).softmax(0)[..., None]
            result.append((torch.stack(out) * parts).sum(0))
        return torch.cat(result, -2).to(key.dtype)
"""

LARGEST_SCORE = '''
class RingAttention(torch.autograd.Function):
    """The online softmax of the first paper: a running maximum and a running sum for each query."""

    @staticmethod
    def forward(ctx, query, key, value, group, causal):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        q = wide(query)
        numerator = torch.zeros_like(q)
        maximum, denominator = q.new_full((*q.shape[:-1], 1), -1e300 if q.dtype == torch.float64 else -1e38), 0
        denominator = torch.zeros_like(maximum)
        k, v = key.contiguous(), value.contiguous()
        for hop in range(ranks):
            last = hop == ranks - 1
            pending = [] if last else [rotate(k, group), rotate(v, group)]
            for rows, columns, shift in visible(q, rank, (rank - hop) % ranks, ranks, causal):
                scores = scores_of(q[..., rows, :], wide(k[..., columns, :]), shift)
                largest = torch.maximum(maximum[..., rows, :], scores.amax(-1, keepdim=True))
                old, weights = (maximum[..., rows, :] - largest).exp(), (scores - largest).exp()
                numerator[..., rows, :] = numerator[..., rows, :] * old + weights @ wide(v[..., columns, :])
                denominator[..., rows, :] = denominator[..., rows, :] * old + weights.sum(-1, keepdim=True)
                maximum[..., rows, :] = largest
            k, v = (each() for each in pending) if pending else (None, None)
        output = (numerator / denominator).to(query.dtype)
        ctx.settings = group, causal
        ctx.save_for_backward(query, key, value, output, maximum.squeeze(-1) + denominator.squeeze(-1).log())
        return output

    @staticmethod
    def backward(ctx, gradient):
        (group, causal), (query, key, value, output, total) = ctx.settings, ctx.saved_tensors
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        q, g = wide(query), wide(gradient)
        mean, d_query = (g * wide(output)).sum(-1, keepdim=True), torch.zeros_like(q)
        k, v, own, coming = key.contiguous(), value.contiguous(), None, None
        for hop in range(ranks):
            pending = [] if hop == ranks - 1 else [rotate(k, group), rotate(v, group)]
            terms = [torch.zeros(each.shape, dtype=q.dtype, device=q.device) for each in (k, v)]
            for rows, columns, shift in visible(q, rank, (rank - hop) % ranks, ranks, causal):
                kk, vv = wide(k[..., columns, :]), wide(v[..., columns, :])
                p = (scores_of(q[..., rows, :], kk, shift) - total[..., rows, None]).exp()
                ds = p * (g[..., rows, :] @ vv.mT - mean[..., rows, :]) * query.shape[-1] ** -0.5
                d_query[..., rows, :] += ds @ kk
                terms[0][..., columns, :] += (ds.mT @ q[..., rows, :]).sum(2, keepdim=True)
                terms[1][..., columns, :] += (p.mT @ g[..., rows, :]).sum(2, keepdim=True)
            if hop == 0:
                own = terms  # they stay here, and the other ranks send the sum of theirs
            else:
                sums = [a + b() for a, b in zip(terms, coming)] if coming else terms
                coming = [rotate(each, group) for each in sums]
            if pending:
                k, v = (each() for each in pending)
        if coming:
            own = [a + b() for a, b in zip(own, coming)]
        return d_query.to(query.dtype), own[0].to(key.dtype), own[1].to(value.dtype), None, None
'''

KERNEL = '''
class RingAttention(torch.autograd.Function):
    """Each pair of pieces is a call of the kernel that scaled_dot_product_attention uses."""

    @staticmethod
    def forward(ctx, query, key, value, group, causal):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        ctx.group, ctx.causal, heads = group, causal, query.shape[2]
        q, half = wide(query).flatten(1, 2), query.shape[-2] // 2
        results = [None, None]
        block = torch.stack([key.squeeze(2), value.squeeze(2)])
        for hop in range(ranks):
            arriving = None if hop == ranks - 1 else rotate(block, group)
            for rows, columns, shift in visible(query, rank, (rank - hop) % ranks, ranks, causal):
                k, v = wide(block[..., columns, :]).repeat_interleave(heads, 2)
                out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q[..., rows, :].contiguous(), k.contiguous(), v.contiguous(), is_causal=shift == 0)
                number = rows.start // half
                if results[number]:
                    old, old_lse = results[number]
                    new = torch.logaddexp(old_lse, lse)
                    out = old * (old_lse - new).exp()[..., None] + out * (lse - new).exp()[..., None]
                    lse = new
                results[number] = out, lse
            if arriving:
                block = arriving()
        output, total = torch.cat([each for each, _ in results], -2), torch.cat([each for _, each in results], -1)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        return output.unflatten(1, (-1, heads))

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, total = ctx.saved_tensors
        group, heads = ctx.group, query.shape[2]
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        q, out, g = wide(query).flatten(1, 2), wide(output), wide(gradient).flatten(1, 2)
        d_query, block, handed = torch.zeros_like(q), torch.stack([key.squeeze(2), value.squeeze(2)]), None
        for hop in range(ranks):
            arriving = None if hop == ranks - 1 else rotate(block, group)
            terms = torch.zeros_like(block, dtype=q.dtype)
            for rows, columns, shift in visible(query, rank, (rank - hop) % ranks, ranks, ctx.causal):
                k, v = wide(block[..., columns, :]).repeat_interleave(heads, 2)
                grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    g[..., rows, :].contiguous(), q[..., rows, :].contiguous(), k.contiguous(), v.contiguous(),
                    out[..., rows, :].contiguous(), total[..., rows].contiguous(), 0.0, shift == 0)
                d_query[..., rows, :] += grads[0]
                for number in (0, 1):
                    terms[number][..., columns, :] += grads[1 + number].unflatten(1, (-1, heads)).sum(2)
            handed = rotate(terms + handed() if handed else terms, group)
            block = arriving() if arriving else None
        d_key, d_value = handed().unsqueeze(3).to(key.dtype)
        return d_query.unflatten(1, (-1, heads)).to(query.dtype), d_key, d_value, None, None
'''

RECOMPUTED = '''
class RingAttention(torch.autograd.Function):
    """The backward pass makes the graph of each block again and asks autograd for its gradients."""

    @staticmethod
    def forward(ctx, query, key, value, group, causal):
        ctx.args = group, causal
        output, total = None, None
        for q, block, rows, columns, shift in hops(query, key, value, group, causal):
            if output is None:
                output, total = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
            keys, values = wide(block[..., columns, :])
            scores = scores_of(q[..., rows, :], keys, shift)
            lse = scores.logsumexp(-1)
            share = torch.sigmoid(lse - total[..., rows])[..., None]  # of this block in the output
            output[..., rows, :] = torch.lerp(output[..., rows, :], scores.softmax(-1) @ values, share)
            total[..., rows] = torch.logaddexp(total[..., rows], lse)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, total = ctx.saved_tensors
        gradient, d_query, sums = wide(gradient), torch.zeros_like(wide(query)), {}
        mean = (gradient * output).sum(-1)
        current, moving = None, None
        for q, block, rows, columns, shift in hops(query, key, value, *ctx.args):
            if block is not current:
                if current is not None:
                    moving = rotate(terms if moving is None else terms + moving(), ctx.args[0])
                current, terms = block, torch.zeros_like(block, dtype=d_query.dtype)
            with torch.enable_grad():
                leaves = [each.detach().requires_grad_() for each in (q[..., rows, :], *wide(block[..., columns, :]))]
                weights = (scores_of(leaves[0], leaves[1], shift) - total[..., rows, None]).exp()
                out = weights @ leaves[2]
                # d(out) with the total as a constant, and what the total adds
                value_of = (out * gradient[..., rows, :]).sum() - (weights.sum(-1) * mean[..., rows]).sum()
            d_q, d_k, d_v = torch.autograd.grad(value_of, leaves)
            d_query[..., rows, :] += d_q
            terms[0][..., columns, :] += d_k
            terms[1][..., columns, :] += d_v
        moving = rotate(terms if moving is None else terms + moving(), ctx.args[0])
        d_key, d_value = moving()
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


def hops(query, key, value, group, causal):
    """Yield the queries, each block of keys and values, and what to compute with it, while the next block arrives."""
    rank, ranks, query = dist.get_rank(group), dist.get_world_size(group), wide(query)
    block = torch.stack([key, value])
    for hop in range(ranks):
        arriving = rotate(block, group) if hop + 1 < ranks else None
        for pair in visible(query, rank, (rank - hop) % ranks, ranks, causal):
            yield query, block, *pair
        block = arriving() if arriving else None
'''

ALL_TO_ALL = """    sizes = [[tensor.numel() * (each == (rank + step) % ranks) for each in range(ranks)] for step in (1, -1)]
    flat, received = tensor.contiguous().view(-1), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    job = dist.all_to_all_single(received.view(-1), flat, sizes[1], sizes[0], group=group, async_op=True)

    def wait():
        job.wait()
        return received

    return wait
"""

SINGLE_MESSAGES = """    received, tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format), tensor.contiguous()
    send = lambda: dist.isend(tensor, group_dst=(rank + 1) % ranks, group=group)  # noqa: E731
    receive = lambda: dist.irecv(received, group_src=(rank - 1) % ranks, group=group)  # noqa: E731
    jobs = [function() for function in ((send, receive) if rank % 2 else (receive, send))]
    return lambda: ([job.wait() for job in jobs], received)[1]
"""
