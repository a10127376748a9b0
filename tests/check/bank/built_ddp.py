"""Cases of exercise 1 of stage 06: data parallelism."""

from check.bank import built, built_styles
from check.bank.built import DDP
from check.bank.case import mistake, style

MISTAKES = (
    # ---- start-unequal
    mistake("ddp-no-broadcast", DDP, "start-unequal", "Each rank keeps its own parameters.", (built.SEND_START, "")),
    mistake(
        "ddp-starts-from-the-seed",
        DDP,
        "start-unequal",
        "The ranks are equal only because train() gives all of them the same seed; the losses are those of one process.",
        (built.SEND_START, ""),
        ("SEED + rank)", "SEED)"),
    ),
    mistake(
        "ddp-buffers-forgotten",
        DDP,
        "start-unequal",
        "Only parameters are sent.",
        ("(*module.parameters(), *module.buffers()):", "module.parameters():"),
    ),
    mistake(
        "ddp-starts-with-the-mean",
        DDP,
        "start-unequal",
        "The parameters of all ranks are averaged.",
        (
            "            dist.broadcast(tensor.detach(), group_src=0, group=group)\n",
            "            dist.all_reduce(tensor.detach(), group=group)\n"
            "            tensor.detach().div_(dist.get_world_size(group))\n",
        ),
    ),
    # ---- average-late
    mistake(
        "ddp-starts-at-the-end",
        DDP,
        "average-late",
        "The hooks only count: all buckets start when the backward pass is over.",
        (built.READY + "        self.start_buckets()\n", built.READY),
    ),
    mistake(
        "ddp-averages-in-train",
        DDP,
        "average-late",
        "There are no hooks.",
        (built.HOOKS, ""),
        (built.DDP_BACKWARD, built.DDP_BACKWARD + "        model.average_gradients()\n"),
        (
            '    def finish(self):\n        """At the end of',
            "    def average_gradients(self):\n        self.started = 0\n        self.finish()\n\n"
            '    def finish(self):\n        """At the end of',
        ),
    ),
    mistake(
        "ddp-one-bucket",
        DDP,
        "average-late",
        "The only bucket is complete when the backward pass is over.",
        ("divide(reversed(trained), bucket_bytes)", "divide(reversed(trained), 1 << 40)"),
    ),
    # ---- average-waits
    mistake(
        "ddp-waits-at-once",
        DDP,
        "average-waits",
        "Each call is asynchronous, but the next line waits for it.",
        (built.SEND_BUCKET, built.SEND_BUCKET + "        self.work.wait()\n"),
    ),
    mistake(
        "ddp-blocking-calls",
        DDP,
        "average-waits",
        "async_op=True is missing.",
        (built.SEND_BUCKET, "        dist.all_reduce(self.buffer, group=self.group)\n"),
        (built.WAIT_BUCKET, "        *pieces, flags"),
        ("        del self.buffer, self.work\n", "        del self.buffer\n"),
    ),
    mistake(
        "ddp-polls",
        DDP,
        "average-waits",
        "A loop asks whether the call is complete, and nothing is computed meanwhile.",
        (
            built.SEND_BUCKET,
            built.SEND_BUCKET + "        while not self.work.is_completed():\n            pass\n",
        ),
    ),
    mistake(
        "ddp-waits-for-the-future",
        DDP,
        "average-waits",
        "The next line waits for the future of the call.",
        (built.SEND_BUCKET, built.SEND_BUCKET + "        self.work.get_future().wait()\n"),
    ),
    mistake(
        "ddp-barrier-after-each-bucket",
        DDP,
        "average-waits",
        "A barrier makes all ranks wait for each other in the middle of the backward pass.",
        (built.SEND_BUCKET, built.SEND_BUCKET + "        dist.barrier(self.group)\n"),
    ),
    # ---- many-calls
    mistake(
        "ddp-one-bucket-per-parameter",
        DDP,
        "many-calls",
        "Each parameter has its own bucket.",
        ("divide(reversed(trained), bucket_bytes)", "divide(reversed(trained), 1)"),
    ),
    mistake(
        "ddp-flags-one-by-one",
        DDP,
        "many-calls",
        "Whether a rank has a gradient is sent in a separate call for each parameter.",
        (
            built.SEND_BUCKET,
            "        for flag in flags.split(1):\n"
            "            dist.all_reduce(flag.clone(), group=self.group)\n" + built.SEND_BUCKET,
        ),
    ),
    # ---- sends-twice
    mistake(
        "ddp-averages-again",
        DDP,
        "sends-twice",
        "train() averages the averages; the losses are those of one process.",
        (
            built.DDP_BACKWARD,
            built.DDP_BACKWARD
            + "        together = torch.cat([each.grad.flatten() for each in model.parameters()])\n"
            + "        dist.all_reduce(together)\n"
            + "        together /= world_size\n"
            + "        for each, piece in zip(model.parameters(), together.split([p.numel() for p in model.parameters()])):\n"
            + "            each.grad.copy_(piece.view_as(each))\n",
        ),
    ),
    mistake(
        "ddp-sends-the-parameters-too",
        DDP,
        "sends-twice",
        "Before each forward pass the first rank sends its parameters, which all ranks have already.",
        (
            built.CHANGED,
            built.CHANGED
            + "        together = torch.cat([each.detach().flatten() for each in self.module.parameters()])\n"
            + "        dist.broadcast(together, group_src=0, group=self.group)\n",
        ),
    ),
    mistake(
        "ddp-full-buckets",
        DDP,
        "sends-twice",
        "A fixed number of zeros is sent with each bucket.",
        ("for each in gradients), flags])", "for each in gradients), flags, flags.new_zeros(1 << 15)])"),
        ("        *pieces, flags = self", "        *pieces, flags, _ = self"),
        ("len(self.parameters)])\n        for", "len(self.parameters), 1 << 15])\n        for"),
    ),
    # ---- change-unnoticed
    mistake("ddp-changes-unnoticed", DDP, "change-unnoticed", "forward() checks nothing.", (built.CHANGED, "")),
    mistake(
        "ddp-compares-names-only",
        DDP,
        "change-unnoticed",
        "A parameter with the same name and shape can be a different one.",
        (
            "self.wrapped ^ describe(self.module)",
            "{(each[0],) for each in self.wrapped} ^ {(name,) for name, _ in self.module.named_parameters()}",
        ),
    ),
    mistake(
        "ddp-error-without-a-name",
        DDP,
        "change-unnoticed",
        "The error does not say which parameter.",
        ('(f"{name} was replaced, moved, frozen or unfrozen after', '("a parameter was replaced after'),
    ),
    # ---- ddp-of-pytorch
    mistake(
        "ddp-uses-that-of-pytorch",
        DDP,
        "ddp-of-pytorch",
        "train() uses PyTorch's class without --pytorch.",
        ("(model) if args.pytorch else DDP(model)", "(model)"),
    ),
    mistake(
        "ddp-inherits", DDP, "ddp-of-pytorch", "The class inherits everything.", built.ddp(built_styles.INHERITED_DDP)
    ),
    # ---- built-differs
    mistake(
        "ddp-sums",
        DDP,
        "built-differs",
        "The gradients are added up, but not divided by the number of ranks.",
        (
            "        self.buffer /= dist.get_world_size(self.group)  # before the sum, which could be too large for float16\n",
            "",
        ),
    ),
    mistake(
        "ddp-last-bucket-not-awaited",
        DDP,
        "built-differs",
        "The last bucket is sent, but its averages are not used.",
        (
            "        for bucket in self.buckets:\n            bucket.finish()\n",
            "        for bucket in self.buckets[:-1]:\n            bucket.finish()\n",
        ),
    ),
    mistake(
        "ddp-never-resets",
        DDP,
        "case-fails",
        "From the second step on, all buckets start with the first gradient, before the others are ready. (With one process "
        "too, so the losses are equal.)",
        ("        self.missing = set(self.parameters)\n        del", "        del"),
    ),
    # ---- case-fails
    mistake(
        "ddp-skips-incomplete-buckets",
        DDP,
        "case-fails",
        "A bucket with a parameter that the backward pass did not use is never sent.",
        ("        self.start_buckets(all_of_them=True)\n", ""),
        (
            "        for bucket in self.buckets:\n            bucket.finish()\n",
            "        for bucket in self.buckets[: self.started]:\n            bucket.finish()\n",
        ),
    ),
    mistake(
        "ddp-unused-become-zero",
        DDP,
        "case-fails",
        "A parameter that no rank has used gets the gradient zero, so AdamW changes it.",
        ("            if parameter.grad is not None or flag > 0:", "            if True:"),
    ),
    mistake(
        "ddp-order-of-readiness",
        DDP,
        "case-fails",
        "A bucket starts when it is complete, so ranks with different gradients send them in different orders.",
        (
            "        self.start_buckets()\n\n",
            "        bucket = self.bucket_of[parameter]\n"
            "        if not bucket.missing:\n"
            "            bucket.start()\n"
            "            self.started += 1\n\n",
        ),
        (
            "        self.start_buckets(all_of_them=True)\n",
            "        for bucket in self.buckets:\n            if bucket.missing:\n                bucket.start()\n",
        ),
    ),
    mistake(
        "ddp-averages-over-users",
        DDP,
        "case-fails",
        "The sum is divided by the number of ranks that have used the parameter.",
        ("parameter.grad = piece.view_as(parameter)", "parameter.grad = piece.view_as(parameter) / flag"),
    ),
)

STYLES = (
    style("ddp-style-closures", DDP, "The hooks are closures in one class.", built.ddp(built_styles.DDP_CLOSURES)),
    style(
        "ddp-style-function",
        DDP,
        "DDP is a function that adds hooks to the nodes that accumulate gradients.",
        built.ddp(built_styles.DDP_FUNCTION),
    ),
    style(
        "ddp-style-views",
        DDP,
        "Gradients are views of the buckets, whose memory is never freed.",
        (built.BUCKET_CLASS, built_styles.BUCKET_OF_VIEWS),
    ),
    style(
        "ddp-style-tensor-hooks",
        DDP,
        "Tensor.register_hook gets each gradient before it is added.",
        built.ddp(built_styles.DDP_TENSOR_HOOKS),
    ),
    style(
        "ddp-style-reduce-scatter",
        DDP,
        "Each bucket is averaged by a reduce-scatter and an all-gather.",
        (built.BUCKET_CLASS, built_styles.BUCKET_IN_TWO_CALLS),
    ),
    style(
        "ddp-style-futures",
        DDP,
        "The end of the backward pass waits for the futures of the calls.",
        (built.SEND_BUCKET, built.SEND_BUCKET.replace("async_op=True)", "async_op=True).get_future()")),
    ),
    style(
        "ddp-style-waits-in-train",
        DDP,
        "The hooks start the calls, and average_gradients() waits for them.",
        (built.FIRST_GRADIENT, "        self.started = self.started or 0\n"),
        (built.DDP_BACKWARD, built.DDP_BACKWARD + "        model.average_gradients()\n"),
        (
            '    def finish(self):\n        """At the end of',
            "    def average_gradients(self):\n        self.started = self.started or 0\n        self.finish()\n\n"
            '    def finish(self):\n        """At the end of',
        ),
    ),
)
