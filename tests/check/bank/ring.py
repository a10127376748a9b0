"""Cases of exercise 6 of stage 06: ring attention."""

from check.bank import ring_styles
from check.bank.built import STAGE
from check.bank.case import Edit, mistake, part, style

RING = f"{STAGE}/exercise6_ring.py"
CLASS = part(RING, "class RingAttention(torch.autograd.Function):", "def visible(")
FORWARD = part(RING, "        rank, ranks = dist.get_rank(group), dist.get_world_size(group)\n        output, total",
               "        output = output.to(query.dtype)")  # fmt: skip
FORWARD_HOPS = part(RING, "            arriving = rotate(block, group) if hop < ranks - 1 else None  # during",
                    "            for rows")  # fmt: skip
BACKWARD = part(RING, "        rank, ranks, scale = dist.get_rank(group)", "        return d_query.to(")
BACKWARD_HOPS = "            arriving = rotate(block, group) if hop < ranks - 1 else None\n            d_block"
HOPS = "        for hop in range(ranks):\n"
SEND_ON = part(
    RING,
    "            d_arriving = rotate(d_block",
    "            block = arriving() if arriving else None\n        d_key",
)
CORRECTION = part(RING, "                shrink = (total", "                output[..., rows, :] += (scores")
ADD_ARRIVED = part(RING, "            if d_arriving:", "            d_arriving = rotate(d_block")
LAST_GRADIENTS = "        d_key, d_value = d_arriving()\n"
SKIP = part(RING, "            if shift >= 0:", "\n\ndef scores_of")
PIECES = part(RING, "    return [rank, 2 * ranks - 1 - rank]", "\n\ndef shard_sequence")
ROTATE = part(RING, "    received = torch.empty_like(tensor)", "\n\ndef wide(")
ATTENTION = part(RING, "    query = query.unflatten(1, (key.shape[1], -1))", "\n\nclass RingAttention")
OWN = "                tensors = [shard_sequence(tensor, dim) for tensor, dim in zip(tensors, dims, strict=True)]\n"
GATHERED = """        keys, values = wide(gather_sequence(torch.stack([key, value]), -2, group))
        positions = torch.arange(keys.shape[-2], device=query.device)
        future = positions > shard_sequence(positions, 0, group)[:, None]
        scores = wide_query @ keys.mT * query.shape[-1] ** -0.5
        scores = scores.masked_fill(future, -math.inf) if causal else scores
        total = scores.logsumexp(-1)
        output = (scores - total[..., None]).exp() @ values
"""
COLLECTED = """        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        output, total = torch.zeros_like(wide_query), wide_query.new_full(query.shape[:-1], -math.inf)
        blocks = [torch.stack([key, value])]
        for _ in range(ranks - 1):
            blocks.append(rotate(blocks[-1], group)())
        for hop, block in enumerate(blocks):
"""
LOOP = part(RING, "            for rows, columns, shift in visible(query, rank, (rank - hop) % ranks, ranks, causal):\n"
            "                keys, values = wide(block[..., columns, :])\n                scores",
            "            block = arriving() if arriving else None")  # fmt: skip


def ring(text: str) -> Edit:
    """Return the edit that replaces the class."""
    return CLASS, text.lstrip("\n") + "\n\n"


MISTAKES = (
    # ---- keys-gathered
    mistake(
        "ring-gathers-the-keys",
        RING,
        "keys-gathered",
        "The forward pass gathers the keys and values of all ranks; the losses are equal.",
        (FORWARD, GATHERED),
    ),
    mistake(
        "ring-rotates-by-gathering",
        RING,
        "keys-gathered",
        "rotate() gathers the tensors of all ranks and returns that of the previous one.",
        (ROTATE,
         "    tensors = [torch.empty_like(tensor) for _ in range(ranks)]\n"
         "    job = dist.all_gather(tensors, tensor, group=group, async_op=True)\n\n"
         "    def wait():\n        job.wait()\n        return tensors[rank - 1]\n\n    return wait\n"),
    ),
    mistake(
        "ring-broadcasts-each-block",
        RING,
        "keys-gathered",
        "In each hop, one rank sends its keys and values to all others.",
        (FORWARD, FORWARD.replace("        block = torch.stack([key, value])  # one message instead of two\n",
                                  "        own = torch.stack([key, value])\n")
         .replace(FORWARD_HOPS, "            block = own.clone()\n"
                  "            dist.broadcast(block, group_src=hop, group=group)\n")
         .replace("(rank - hop) % ranks", "hop").replace("            block = arriving() if arriving else None\n", "")),
    ),
    # ---- rotation-waits
    mistake(
        "ring-rotate-waits",
        RING,
        "rotation-waits",
        "rotate() waits before it returns, so that nothing is computed meanwhile.",
        ("    def wait():\n        for job in jobs:\n            job.wait()\n        return received\n\n    return wait\n",
         "    for job in jobs:\n        job.wait()\n    return lambda: received\n"),
    ),
    mistake(
        "ring-collects-the-blocks",
        RING,
        "rotation-waits",
        "The blocks rotate into a list, and the attention is computed at the end; the losses are equal.",
        (FORWARD, COLLECTED + LOOP),
    ),
    # ---- keys-kept
    mistake(
        "ring-saves-all-blocks",
        RING,
        "keys-kept",
        "The forward pass saves the keys and values of all ranks for the backward pass; the losses are equal.",
        (FORWARD, FORWARD.replace(HOPS, "        ctx.blocks = []\n" + HOPS + "            ctx.blocks.append(block)\n")),
        (BACKWARD, BACKWARD.replace("            arriving = rotate(block, group) if hop < ranks - 1 else None\n",
                                    "            block = ctx.blocks[hop]\n")
         .replace("            block = arriving() if arriving else None\n", "")),
    ),
    mistake(
        "ring-of-autograd",
        RING,
        ("keys-kept", "rotation-waits"),
        "Only rotate() is a Function. Autograd keeps the keys, values and weights of each hop.",
        ring(ring_styles.OF_AUTOGRAD),
    ),
    # ---- sends-more-blocks
    mistake(
        "ring-sends-the-last-block",
        RING,
        "sends-more-blocks",
        "After N - 1 hops, each block returns to its rank, which has it.",
        (FORWARD_HOPS, "            arriving = rotate(block, group)\n"),
    ),
    mistake(
        "ring-expands-the-keys-first",
        RING,
        "sends-more-blocks",
        "Keys and values are expanded to the heads of the query before they are sent.",
        (ATTENTION,
         "    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))\n" + ATTENTION),
    ),
    # ---- gradients-reduced
    mistake(
        "ring-reduces-gradients-at-the-end",
        RING,
        "gradients-reduced",
        "Each rank collects its terms for all keys and values, and a reduce-scatter sums them; the losses are equal.",
        (BACKWARD, BACKWARD.replace(ADD_ARRIVED, "            terms[(rank - hop) % ranks] = d_block\n")
         .replace(SEND_ON, "")
         .replace(HOPS, "        terms = [None] * ranks\n" + HOPS)
         .replace(LAST_GRADIENTS, "        d_own = torch.empty_like(d_block)\n"
                  "        dist.reduce_scatter(d_own, terms, group=group)\n        d_key, d_value = d_own\n")),
    ),
    mistake(
        "ring-all-reduces-the-gradients",
        RING,
        "gradients-reduced",
        "All ranks get the gradients of all keys and values.",
        (BACKWARD, BACKWARD.replace(ADD_ARRIVED, "            terms[(rank - hop) % ranks] += d_block\n")
         .replace(SEND_ON, "")
         .replace(HOPS, "        terms = torch.zeros(ranks, *block.shape, dtype=wide_query.dtype)\n" + HOPS)
         .replace(LAST_GRADIENTS, "        dist.all_reduce(terms, group=group)\n        d_key, d_value = terms[rank]\n")),
    ),
    # ---- backward-waits
    mistake(
        "ring-backward-pass-waits",
        RING,
        "backward-waits",
        "In the backward pass, each message is waited for at once.",
        (BACKWARD, BACKWARD.replace("            arriving = rotate(block, group) if hop < ranks - 1 else None\n",
                                    "            arriving = rotate(block, group)() if hop < ranks - 1 else None\n")
         .replace("block = arriving() if arriving else None", "block = arriving")
         .replace("            if d_arriving:\n", "            if d_arriving is not None:\n")
         .replace("d_block += d_arriving()", "d_block += d_arriving")
         .replace("rotate(d_block, group)", "rotate(d_block, group)()")
         .replace(LAST_GRADIENTS, "        d_key, d_value = d_arriving\n")),
    ),
    # ---- sends-more-gradients
    mistake(
        "ring-backward-pass-sends-the-last-block",
        RING,
        "sends-more-gradients",
        "In the backward pass, each block of keys and values returns to its rank, which has it.",
        (BACKWARD_HOPS, BACKWARD_HOPS.replace(" if hop < ranks - 1 else None", "")),
    ),
    # ---- future-computed
    mistake(
        "ring-skips-nothing",
        RING,
        "future-computed",
        "The order is zig-zag, but all products are computed and masked; the losses are equal.",
        (SKIP, SKIP.replace("shift >= 0", "True")),
    ),
    mistake(
        "ring-backward-pass-skips-nothing",
        RING,
        "future-computed",
        "The forward pass skips keys in the future, and the backward pass computes their weights, which are zero.",
        (BACKWARD, BACKWARD.replace("in visible(", "in everything(")),
        ("def visible(",
         "def everything(query, rank, source, ranks, causal):\n"
         "    size = query.shape[-2] // 2\n"
         "    for row, query_piece in enumerate(pieces_of(rank, ranks)):\n"
         "        for column, key_piece in enumerate(pieces_of(source, ranks)):\n"
         "            shift = (query_piece - key_piece) * size if causal else math.inf\n"
         "            yield slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size), shift\n\n\n"
         "def visible("),
    ),
    # ---- work-uneven
    mistake(
        "ring-consecutive-pieces",
        RING,
        "work-uneven",
        "Each rank has two consecutive pieces, so the last one computes most; the losses are equal.",
        (PIECES, "    return [2 * rank, 2 * rank + 1]\n"),
    ),
    mistake(
        "ring-strided-pieces",
        RING,
        "work-uneven",
        "Rank r has the pieces r and r + N.",
        (PIECES, "    return [rank, ranks + rank]\n"),
    ),
    # ---- attention-fails
    mistake(
        "ring-output-not-corrected",
        RING,
        ("attention-fails", "built-differs"),
        "What was added before stays too large when the sum of the exponentials grows.",
        (CORRECTION, ""),
    ),
    mistake(
        "ring-overflows",
        RING,
        "attention-fails",
        "The exponentials of large scores are infinite.",
        ("                new = torch.logaddexp(total[..., rows], scores.logsumexp(-1))\n",
         "                new = torch.log(total[..., rows].exp() + scores.exp().sum(-1))\n"),
    ),
    mistake(
        "ring-sums-in-low-precision",
        RING,
        "attention-fails",
        "Everything is computed in the type of the inputs.",
        ("    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))\n", "    return tensor\n"),
    ),
    mistake(
        "ring-gradients-not-returned",
        RING,
        ("attention-fails", "built-differs"),
        "Each rank uses the gradients of the keys of the next rank, which it sends, and not those that arrive.",
        (LAST_GRADIENTS, "        d_arriving()\n        d_key, d_value = d_block\n"),
    ),
    mistake(
        "ring-gradients-replaced",
        RING,
        ("attention-fails", "built-differs"),
        "What arrives replaces the terms of this rank.",
        ("                d_block += d_arriving()", "                d_block = d_arriving()"),
    ),
    mistake(
        "ring-scale-forgotten",
        RING,
        "attention-fails",
        "The gradient of the scores has no scale, with one process neither.",
        ("- mean[..., rows, :]) * scale\n", "- mean[..., rows, :])\n"),
    ),
    mistake(
        "ring-heads-not-summed",
        RING,
        ("attention-fails", "built-differs"),
        "Heads of the query that share a key give it the mean of their gradients instead of the sum.",
        ("(d_scores.mT @ queries).sum(2, keepdim=True)", "(d_scores.mT @ queries).mean(2, keepdim=True)"),
    ),
    mistake(
        "ring-gathers-in-the-order-of-ranks",
        RING,
        "attention-fails",
        "gather_sequence joins the parts of the ranks one after the other.",
        ("    return torch.cat([pieces[number] for number in range(2 * ranks)], dim)\n", "    return torch.cat(parts, dim)\n"),
    ),
    mistake(
        "ring-any-length",
        RING,
        "attention-fails",
        "A sequence that cannot be divided is no error.",
        ("    if length % (2 * ranks):\n", "    if length < 2 * ranks:\n"),
    ),
    mistake(
        "ring-mask-of-the-own-tokens",
        RING,
        ("attention-fails", "built-differs"),
        "The mask compares the positions inside of the two ranks, and not those in the sequence.",
        (SKIP, SKIP.replace("shift >= 0", "shift := math.inf if not causal else (row - column) * size, shift >= 0)[1]")
         .replace("if shift :=", "if (shift :=")),
    ),
    mistake(
        "ring-without-positions",
        RING,
        ("attention-fails", "built-differs"),
        "Each rank counts the positions of its tokens from zero.",
        ("model(inputs, positions)", "model(inputs)"),
    ),
)  # fmt: skip

STYLES = (
    style(
        "ring-style-largest-score",
        RING,
        "The largest score and the sum are kept apart, keys and values are two messages, and own terms are added locally.",
        ring(ring_styles.LARGEST_SCORE),
    ),
    style(
        "ring-style-kernel",
        RING,
        "PyTorch's fused kernel computes each block and its gradients.",
        ring(ring_styles.KERNEL),
    ),
    style(
        "ring-style-all-to-all",
        RING,
        "all_to_all sends everything to the next rank and nothing to the others.",
        (ROTATE, ring_styles.ALL_TO_ALL),
    ),
    style(
        "ring-style-single-messages",
        RING,
        "isend and irecv are called one after the other, in different orders on even and odd ranks.",
        (ROTATE, ring_styles.SINGLE_MESSAGES),
    ),
    style(
        "ring-style-hooks",
        RING,
        "The attention of each block is an autograd graph that is made again in the backward pass.",
        ring(ring_styles.RECOMPUTED),
    ),
)
