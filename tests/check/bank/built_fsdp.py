"""Cases of exercise 3 of stage 06: sharded parameters."""

from check.bank import built, built_units
from check.bank.built import FSDP
from check.bank.case import mistake, style

MISTAKES = (
    # ---- layers-together
    mistake(
        "fsdp-one-unit",
        FSDP,
        "layers-together",
        "The whole model is one unit.",
        (built.UNITS, built.UNITS.replace("layers)]", "())]")),
    ),
    mistake(
        "fsdp-gathers-all-at-the-start",
        FSDP,
        "layers-together",
        "There are units, but the forward pass begins by gathering all of them.",
        (
            built.RETURN,
            "        for unit in self.units:\n            unit.start_gather()\n" + built.RETURN,
        ),
    ),
    # ---- many-gathers
    mistake(
        "fsdp-a-gather-per-parameter",
        FSDP,
        "many-gathers",
        "Each parameter is gathered in its own call.",
        (built.START_GATHER, built_units.GATHER_EACH),
        (built.WAIT_GATHER, built_units.WAIT_EACH),
    ),
    # ---- layers-kept
    mistake(
        "fsdp-never-frees",
        FSDP,
        "layers-kept",
        "A layer stays in full until its backward pass.",
        (built.FREE_LAYER, built.FREE_LAYER.replace("        self.free()\n", "")),
    ),
    mistake(
        "fsdp-autograd-keeps",
        FSDP,
        "layers-kept",
        "The unit frees its layer and gathers it again, but autograd keeps the first one.",
        (built.SAVING, ""),
        (built.SAVED, ""),
    ),
    mistake(
        "fsdp-packs-a-copy",
        FSDP,
        "layers-kept",
        "In place of a gathered parameter, a copy of it is kept.",
        (
            "        return tensor if number is None else (number,",
            "        return tensor.clone() if True else (number,",
        ),
    ),
    mistake(
        "fsdp-gathers-all-for-backward",
        FSDP,
        "layers-kept",
        "The backward pass begins by gathering all layers.",
        (
            "                place = len(self.fsdp.order) - 1\n",
            "                place = len(self.fsdp.order) - 1\n"
            "                [unit.start_gather() for unit in self.fsdp.units]\n",
        ),
    ),
    # ---- not-prefetched
    mistake("fsdp-no-prefetch", FSDP, "not-prefetched", "Each layer is gathered when it begins.", (built.NEXT, "")),
    mistake(
        "fsdp-prefetches-forward-only",
        FSDP,
        "not-prefetched",
        "The backward pass gathers each layer when it begins.",
        ("            if 0 <= place < len", "            if step > 0 and place < len"),
    ),
    mistake(
        "fsdp-prefetches-backward-only",
        FSDP,
        "not-prefetched",
        "The forward pass gathers each layer when it begins.",
        ("            if 0 <= place < len", "            if step < 0 <= place < len"),
    ),
    mistake(
        "fsdp-prefetch-waits",
        FSDP,
        "not-prefetched",
        "The next layer is gathered early, but the line after that waits for it.",
        (built.START_GATHER, built.START_GATHER + "            self.work.wait()\n"),
    ),
    mistake(
        "fsdp-prefetch-polls",
        FSDP,
        "not-prefetched",
        "A loop waits until the next layer is gathered.",
        (
            built.START_GATHER,
            built.START_GATHER + "            while not self.work.is_completed():\n                pass\n",
        ),
    ),
    # ---- reduces-whole
    mistake(
        "fsdp-all-reduce",
        FSDP,
        "reduces-whole",
        "Each rank gets the sums of all gradients, and throws most of them away.",
        (
            built.SUMS,
            "        dist.all_reduce(sent, group=unit.fsdp.group)\n"
            "        sums = sent[dist.get_rank(unit.fsdp.group)].clone()\n",
        ),
    ),
    mistake(
        "fsdp-gathers-gradients",
        FSDP,
        "reduces-whole",
        "Each rank gets all gradients of all ranks, and adds up those of its shards.",
        (
            built.SUMS,
            "        all_gradients = sent.new_empty(unit.world_size, *sent.shape)\n"
            "        dist.all_gather_into_tensor(all_gradients.view(-1), sent.view(-1), group=unit.fsdp.group)\n"
            "        sums = all_gradients[:, dist.get_rank(unit.fsdp.group)].sum(0)\n",
        ),
    ),
    mistake(
        "fsdp-a-sum-per-parameter",
        FSDP,
        "reduces-whole",
        "The gradient of each parameter is summed in its own call.",
        (
            built.SUMS,
            "        sums = sent.new_empty(sent.shape[1])\n"
            "        sizes = [len(trained), *(unit.sizes[number] for number in trained)]\n"
            "        for part, piece in zip(sums.split(sizes), sent.split(sizes, dim=1), strict=True):\n"
            "            dist.reduce_scatter_tensor(part, piece.flatten(), group=unit.fsdp.group)\n",
        ),
    ),
    # ---- reduces-late
    mistake(
        "fsdp-sums-at-the-end",
        FSDP,
        "reduces-late",
        "The gradients of all layers stay in full until the backward pass is over.",
        (built.USES, ""),
        (built.SUMS, built_units.SUMS_AT_THE_END),
        (built.MEAN, built_units.MEAN_AT_THE_END),
    ),
    # ---- held-whole
    mistake(
        "fsdp-view-of-the-whole",
        FSDP,
        "held-whole",
        "A shard is a view, so the memory of the whole parameter stays in use.",
        (built.SHARDS, built.SHARDS.replace("[rank].clone()", "[rank]")),
    ),
    mistake(
        "fsdp-keeps-the-original",
        FSDP,
        "held-whole",
        "Each unit keeps the parameters from which it has made the shards.",
        (built.SHARDS, built.SHARDS + "        self.original = parameters\n"),
    ),
    # ---- shards-fail
    mistake(
        "fsdp-no-padding",
        FSDP,
        "shards-fail",
        "A parameter whose size the ranks do not divide is an error.",
        (built.DIVIDED, "tensor.reshape(self.world_size, -1)"),
    ),
    mistake(
        "fsdp-old-parameters",
        FSDP,
        "shards-fail",
        "A forward pass without a backward pass leaves a layer that the next one uses.",
        (built.FREE_OLD, ""),
        *built_units.KEEPS_LAST,
    ),
    mistake(
        "fsdp-sums-in-bfloat16",
        FSDP,
        "shards-fail",
        "The gradients are summed in compute_dtype.",
        (
            "        sent = torch.cat(rows, dim=1) / unit.world_size\n",
            "        sent = (torch.cat(rows, dim=1) / unit.world_size).to(unit.fsdp.dtype or unit.shards[0].dtype)\n",
        ),
    ),
    mistake(
        "fsdp-unused-become-zero",
        FSDP,
        "shards-fail",
        "A parameter that no rank has used gets the gradient zero, so AdamW changes it.",
        ("            if gradients[number] is None and use == 0:", "            if False:"),
    ),
    mistake(
        "fsdp-sums",
        FSDP,
        ("shards-fail", "built-differs"),
        "The gradients are added up, but not divided by the number of ranks; AdamW hardly notices.",
        ("        sent = torch.cat(rows, dim=1) / unit.world_size\n", "        sent = torch.cat(rows, dim=1)\n"),
    ),
    # ---- fsdp-of-pytorch
    mistake(
        "fsdp-uses-that-of-pytorch",
        FSDP,
        "fsdp-of-pytorch",
        "train() uses fully_shard without --pytorch.",
        ("    if args.pytorch:\n", "    if True:\n"),
    ),
    mistake(
        "fsdp-calls-that-of-pytorch",
        FSDP,
        "fsdp-of-pytorch",
        "The class calls fully_shard.",
        (built.BUILD_CLASSES, built_units.FSDP_AROUND),
    ),
    # ---- built-differs
    mistake(
        "fsdp-all-have-row-0",
        FSDP,
        "built-differs",
        "All ranks have the first shard.",
        (built.SHARDS, built.SHARDS.replace("[rank]", "[0]")),
    ),
    mistake(
        "fsdp-gradients-of-rank-0",
        FSDP,
        "built-differs",
        "The gradients of the first rank are sent to all, and those of the others are lost.",
        (
            built.SUMS,
            built.SUMS + "        own = sent[dist.get_rank(unit.fsdp.group)].clone()\n"
            "        sums = own * unit.world_size\n",
        ),
    ),
)

STYLES = (
    style(
        "fsdp-style-storage-resized",
        FSDP,
        "The memory of the gathered parameters is resized to zero, so autograd may keep them.",
        (built.BUILD_CLASSES, built_units.FSDP_RESIZED),
    ),
    style(
        "fsdp-style-context-manager",
        FSDP,
        "A context manager around forward() gathers and frees the layer.",
        (
            "        part.register_forward_pre_hook(self.before_forward, with_kwargs=True, prepend=True)\n"
            "        part.register_forward_hook(self.after_forward, always_call=True)\n",
            built_units.AROUND_FORWARD,
        ),
        ("import torch\nimport torch.dist", "import contextlib\n\nimport torch\nimport torch.dist"),
    ),
    style(
        "fsdp-style-all-to-all",
        FSDP,
        "The ranks exchange gradients and add them up themselves.",
        (
            built.SUMS,
            "        received = torch.empty_like(sent)\n"
            "        dist.all_to_all_single(received.view(-1), sent.view(-1), group=unit.fsdp.group)\n"
            "        sums = received.sum(0)\n",
        ),
    ),
    style(
        "fsdp-style-lists",
        FSDP,
        "all_gather and reduce_scatter take lists of tensors.",
        (
            built.START_GATHER,
            built.START_GATHER.replace("all_gather_into_tensor(self.buffer.view(-1)", "all_gather(list(self.buffer)"),
        ),
        (
            built.SEND_SUMS,
            "        dist.reduce_scatter(sums, list(sent), group=unit.fsdp.group)\n",
        ),
    ),
    style(
        "fsdp-style-sums-meanwhile",
        FSDP,
        "The sums of a layer are communicated while the next one is computed.",
        (built.USES, ""),
        (built.SUMS, built_units.SUMS_MEANWHILE),
        (built.MEAN, built_units.MEAN_MEANWHILE),
    ),
    style(
        "fsdp-style-keeps-the-last-layer",
        FSDP,
        "The last layer stays in full, because the backward pass begins with it.",
        *built_units.KEEPS_LAST,
    ),
)
