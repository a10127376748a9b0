"""Cases of exercise 2 of stage 06: a sharded optimizer."""

from check.bank import built, built_styles
from check.bank.built import ZERO1
from check.bank.case import mistake, style

MISTAKES = (
    # ---- state-whole
    mistake(
        "zero1-all-ranks-update-all",
        ZERO1,
        "state-whole",
        "Each rank updates all parameters, and sends a part of them that the others have already.",
        (built.INNER_GROUPS, "self.param_groups, **options)\n"),
    ),
    mistake(
        "zero1-rank-0-updates-all",
        ZERO1,
        "state-uneven",
        "The first rank has the whole state.",
        ("self.owners[parameter] = sizes.index(min(sizes))", "self.owners[parameter] = 0"),
    ),
    mistake(
        "zero1-exchanges-the-state",
        ZERO1,
        "state-whole",
        "After each step all ranks get the state of the others and keep it.",
        (
            built.STEP,
            built.STEP
            + "        everyone = [None] * self.world_size\n"
            + "        numbers = {each: number for number, each in enumerate(self.owners)}\n"
            + "        own = {numbers[each]: state for each, state in self.state.items() if self.owners[each] == self.rank}\n"
            + "        dist.all_gather_object(everyone, own, self.group)\n"
            + "        parameters = list(self.owners)\n"
            + "        for states in everyone:\n"
            + "            self.state.update({parameters[number]: state for number, state in states.items()})\n",
        ),
    ),
    # ---- state-uneven
    mistake(
        "zero1-round-robin",
        ZERO1,
        "state-uneven",
        "In turn, each rank gets a parameter: one rank gets all matrices, the other all biases.",
        (built.ASSIGN, built_styles.ROUND_ROBIN),
    ),
    mistake(
        "zero1-round-robin-by-size",
        ZERO1,
        "state-uneven",
        "In turn, each rank gets the largest parameter that is left, which does not make up for a very large one.",
        (built.ASSIGN, built_styles.ROUND_ROBIN_BY_SIZE),
    ),
    mistake(
        "zero1-large-and-small",
        ZERO1,
        "state-uneven",
        "One rank gets the large parameters, and the other the small ones.",
        ("sizes.index(min(sizes))", "int(parameter.numel() < 1000) % self.world_size"),
    ),
    # ---- many-messages
    mistake(
        "zero1-a-message-per-parameter",
        ZERO1,
        "many-messages",
        "Each parameter is sent in its own call.",
        (
            built.SHARE,
            "        for each, owner in self.owners.items():\n"
            "            if each.requires_grad:\n"
            "                dist.broadcast(each, group_src=owner, group=self.group)\n",
        ),
    ),
    mistake(
        "zero1-each-rank-sends-all",
        ZERO1,
        "many-messages",
        "Each rank sends the parameters of all ranks, and the others keep only its own.",
        (
            built.SHARE,
            "        for rank in range(self.world_size):\n"
            "            trained = [each for each in self.owners if each.requires_grad]\n"
            "            together = torch.cat([each.flatten() for each in trained])\n"
            "            dist.broadcast(together, group_src=rank, group=self.group)\n"
            "            for each, values in zip(trained, together.split([each.numel() for each in trained]), strict=True):\n"
            "                if self.owners[each] == rank:\n"
            "                    each.copy_(values.view_as(each))\n",
        ),
    ),
    mistake(
        "zero1-sends-twice",
        ZERO1,
        "many-messages",
        "step() sends the parameters two times.",
        (built.STEP, built.STEP + "        self.share_parameters()\n        self.share_parameters()\n"),
    ),
    # ---- state-partial
    mistake(
        "zero1-saves-its-own-state",
        ZERO1,
        "state-partial",
        "state_dict() has the state of one rank.",
        (built.STATE, "        return super().state_dict()\n"),
    ),
    mistake(
        "zero1-numbers-of-the-inner",
        ZERO1,
        "state-partial",
        "Each rank numbers its own parameters, so the states of the ranks replace each other.",
        ("        full = super().state_dict()  # with", "        full = self.inner.state_dict()  # with"),
    ),
    mistake(
        "zero1-loads-everything",
        ZERO1,
        "state-partial",
        "After loading, each rank keeps the whole state.",
        (
            "for parameter, state in self.state.items() if self.owners[parameter] == self.rank}",
            "for parameter, state in self.state.items()}",
        ),
    ),
    mistake(
        "zero1-loads-nothing",
        ZERO1,
        "state-partial",
        "The loaded state does not reach the inner optimizer.",
        ("        self.inner.state.update(own)\n", ""),
    ),
    # ---- optimizer-case-fails
    mistake(
        "zero1-schedule-ignored",
        ZERO1,
        "optimizer-case-fails",
        "The inner optimizer keeps the first learning rate.",
        (built.RATES, "            pass\n"),
    ),
    mistake(
        "zero1-only-the-learning-rate",
        ZERO1,
        "optimizer-case-fails",
        "The inner optimizer gets the new learning rate, but not the other options that a schedule can change.",
        (built.RATES, '            inner["lr"] = ours["lr"]\n'),
    ),
    mistake(
        "zero1-always-adamw",
        ZERO1,
        "optimizer-case-fails",
        "The inner optimizer is AdamW, whatever the class.",
        ("        self.inner = optimizer_class([", "        self.inner = torch.optim.AdamW(["),
    ),
    # ---- zero-of-pytorch
    mistake(
        "zero1-uses-that-of-pytorch",
        ZERO1,
        "zero-of-pytorch",
        "train() uses PyTorch's class without --pytorch.",
        (built.CHOOSE, "    sharded = ZeroRedundancyOptimizer\n"),
    ),
    mistake(
        "zero1-inherits",
        ZERO1,
        "zero-of-pytorch",
        "The class inherits everything.",
        (built.ZERO1_CLASS, built_styles.INHERITED_ZERO1),
    ),
    # ---- built-differs
    mistake(
        "zero1-shares-nothing",
        ZERO1,
        "built-differs",
        "The parameters of the other ranks stay old.",
        (built.STEP, built.STEP.replace("        self.share_parameters()\n", "")),
    ),
    mistake(
        "zero1-shares-before-the-step",
        ZERO1,
        "built-differs",
        "The ranks send the parameters before they update them.",
        (built.STEP, "        self.share_parameters()\n        loss = self.inner.step(closure)\n"),
    ),
    mistake(
        "zero1-options-lost",
        ZERO1,
        "optimizer-case-fails",
        "The inner optimizer gets no options. (With one process it gets none either, so the losses are equal.)",
        (built.INNER_GROUPS, "[{'params': self.own_part(each)['params']} for each in self.param_groups])\n"),
        (built.RATES, "            pass\n"),
    ),
)

STYLES = (
    style(
        "zero1-style-all-gather",
        ZERO1,
        "One all-gather of parts with the same length.",
        (built.SHARE, built_styles.SHARE_BY_ALL_GATHER),
    ),
    style(
        "zero1-style-ranges",
        ZERO1,
        "Each rank gets a range of the list of parameters.",
        (built.ASSIGN, built_styles.RANGES),
    ),
    style(
        "zero1-style-elements",
        ZERO1,
        "Each rank updates a range of the elements of all parameters.",
        (built.ZERO1_CLASS, built_styles.ZERO1_ELEMENTS),
    ),
    style(
        "zero1-style-rank-0-saves",
        ZERO1,
        "Only the first rank gets the whole state.",
        (
            built.COLLECT,
            "        everyone = [None] * self.world_size if self.rank == 0 else None\n"
            '        own = tree_map_only(torch.Tensor, torch.Tensor.cpu, full["state"])\n'
            "        dist.gather_object(own, everyone, group=self.group, group_dst=0)\n"
            '        everyone = everyone or [full["state"]]\n',
        ),
    ),
)
