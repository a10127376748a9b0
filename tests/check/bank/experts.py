"""Cases of exercise 7 of stage 06: expert parallelism."""

from check.bank import experts_styles
from check.bank.built import EXPERTS
from check.bank.case import mistake, part, style
from check.bank.experts_styles import COMPUTE, EXCHANGE, KEEP_OWN, SEND_BACK

COUNTS = "        dist.all_to_all_single(arriving, counts, group=self.group)\n"
PLACE = part(EXPERTS, "        number = self.router.out_features\n", "\n    def compute(")
BALANCE = part(EXPERTS, "        own = self.probabilities.flatten", "\n\nclass AllToAll(")
GRADIENT = "        probabilities = probabilities + self.ranks * (own - own.detach())  # adds 0, and the gradient\n"
BACK = "ctx.receive, ctx.send, ctx.group), None"
DIVIDE = "            parameter.grad /= dist.get_world_size(group)\n"
SUMMED = "            if parameter not in summed:\n"
NO_GRADIENT = part(EXPERTS, "            if parameter.grad is None:", "            parameter.grad /=")
COMPUTED = "        outputs = torch.cat([self.experts[name](part) for name, part in parts])\n"
BACKWARD = part(EXPERTS, "    @staticmethod\n    def backward", "\n\ndef average_gradients(")
CAPACITY = "capacity = math.ceil(self.capacity_factor * self.top_k * experts.shape[-2] / number)"
RANDOM = "    torch.manual_seed(SEED)\n"

MISTAKES = (
    # ---- experts-everywhere
    mistake(
        "experts-on-all-ranks",
        EXPERTS,
        "experts-everywhere",
        "All ranks store all experts, and sum their gradients; tokens stay where they are.",
        (KEEP_OWN, "            self.experts[str(number)] = expert\n"),
        (COMPUTE, experts_styles.LOCAL),
        (SUMMED, "            if True:\n"),
    ),
    mistake(
        "experts-kept-in-a-list",
        EXPERTS,
        "experts-everywhere",
        "The experts of other ranks are no parameters of the model, but a list keeps them.",
        (KEEP_OWN, '            self.all_experts = [*getattr(self, "all_experts", ()), (expert,)]\n' + KEEP_OWN),
        ("    model.to(device, args.dtype)\n", experts_styles.ALL_IN_DOUBLE),
    ),
    mistake(
        "experts-not-removed",
        EXPERTS,
        "experts-everywhere",
        "Tokens are sent to the rank of their expert, but all ranks store and update all experts.",
        (KEEP_OWN, "            self.experts[str(number)] = expert\n"),
    ),
    # ---- experts-computed-twice
    mistake(
        "experts-whole-batch-on-all-ranks",
        EXPERTS,
        "experts-computed-twice",
        "Each rank trains on the global batch, so the experts compute each token once per rank; the losses are the same.",
        (
            "inputs[rank::world_size].to(device), targets[rank::world_size].to(device)",
            "inputs.to(device), targets.to(device)",
        ),
    ),
    # ---- tokens-to-all
    mistake(
        "experts-gather-all-tokens",
        EXPERTS,
        "tokens-to-all",
        "All ranks gather all tokens, compute those of their experts, and a sum adds up the results.",
        (COMPUTE, experts_styles.GATHERED),
        (experts_styles.CLASS, experts_styles.GATHER_ALL + experts_styles.CLASS),
    ),
    mistake(
        "experts-fixed-splits",
        EXPERTS,
        "tokens-to-all",
        "Each rank sends the same number of rows to each rank, most of which are zeros.",
        (EXCHANGE, experts_styles.PADDED),
        (SEND_BACK, experts_styles.PADDED_BACK),
    ),
    mistake(
        "experts-gather-parameters",
        EXPERTS,
        "tokens-to-all",
        "The parameters of all experts are gathered before use, and the tokens stay where they are.",
        (COMPUTE, experts_styles.PARAMETERS),
        (experts_styles.CLASS, experts_styles.GATHER_ALL + experts_styles.CLASS),
    ),
    # ---- experts-case-fails
    mistake(
        "experts-exchange-without-gradient",
        EXPERTS,
        "experts-case-fails",
        "The layers before the experts get no gradient through them.",
        (BACKWARD, BACKWARD.replace("AllToAll.apply(gradient, ctx.receive, ctx.send, ctx.group), None", "None, None")),
    ),
    mistake(
        "experts-backward-in-the-same-order",
        EXPERTS,
        ("experts-case-fails", "crash", "hang", "collectives-differ"),
        "The backward pass sends with the lists of the forward pass.",
        (BACK, "ctx.send, ctx.receive, ctx.group), None"),
    ),
    mistake(
        "experts-outputs-not-sorted-back",
        EXPERTS,
        ("experts-case-fails", "built-differs"),
        "The outputs are sent back in the order of the experts.",
        ("outputs[order.argsort()]", "outputs"),
    ),
    mistake(
        "experts-gradients-not-divided",
        EXPERTS,
        "experts-case-fails",
        "The gradients of experts are N times too large, which AdamW hides.",
        (DIVIDE, DIVIDE.replace("/= dist", "/= 1 if parameter in summed else dist")),
    ),
    mistake(
        "experts-without-the-group",
        EXPERTS,
        ("experts-case-fails", "crash"),
        "average_gradients() sums over all ranks, whatever the group.",
        (
            "                dist.all_reduce(parameter.grad, group=group)\n",
            "                dist.all_reduce(parameter.grad)\n",
        ),
    ),
    mistake(
        "experts-no-call-without-tokens",
        EXPERTS,
        "experts-case-fails",
        "A rank without tokens returns early, and the others wait for it.",
        (
            "        # A rank whose tokens need no gradient must",
            "        if len(tokens) == 0:\n            return tokens\n        # A rank whose tokens need no gradient must",
        ),
    ),
    mistake(
        "experts-backward-without-some-ranks",
        EXPERTS,
        "experts-case-fails",
        "A rank whose tokens need no gradient takes no part in the backward pass, and the others wait for it.",
        ("        tokens.requires_grad_(torch.is_grad_enabled())\n", ""),
    ),
    mistake(
        "experts-compute-all-rows",
        EXPERTS,
        "experts-case-fails",
        "Each expert computes all rows that arrive at its rank, and takes its part of the results.",
        (COMPUTED, experts_styles.DENSE),
    ),
    # ---- capacity-case-fails
    mistake(
        "experts-no-capacity",
        EXPERTS,
        "capacity-case-fails",
        "All choices have a place.",
        (PLACE, "        return torch.ones_like(experts, dtype=torch.bool)\n"),
    ),
    mistake(
        "experts-capacity-of-the-batch",
        EXPERTS,
        "capacity-case-fails",
        "The sequences of a rank share the places.",
        (PLACE, experts_styles.OF_BATCH),
    ),
    mistake(
        "experts-capacity-rounded-down",
        EXPERTS,
        "capacity-case-fails",
        "A short sequence has no place at all.",
        (CAPACITY, CAPACITY.replace("math.ceil", "math.floor")),
    ),
    mistake(
        "experts-capacity-without-top-k",
        EXPERTS,
        "capacity-case-fails",
        "With several experts per token, most choices are dropped.",
        (CAPACITY, CAPACITY.replace(" * self.top_k", "")),
    ),
    mistake(
        "experts-first-choices-first",
        EXPERTS,
        "capacity-case-fails",
        "The first choices of later tokens come before the second choice of a token.",
        (PLACE, experts_styles.FIRST_CHOICES),
    ),
    mistake(
        "experts-largest-gates-first",
        EXPERTS,
        "capacity-case-fails",
        "The tokens with the largest probabilities get the places, so later tokens change earlier ones.",
        (PLACE, experts_styles.LARGEST),
        ("self.has_place(experts)", "self.has_place(experts, gates)"),
        ("def has_place(self, experts):", "def has_place(self, experts, gates):"),
    ),
    mistake(
        "experts-drop-after-computing",
        EXPERTS,
        "capacity-case-fails",
        "The dropped tokens are sent and computed, and their results multiplied by 0.",
        *experts_styles.DROPS_LATE,
    ),
    # ---- balance-case-fails
    mistake(
        "experts-no-balance",
        EXPERTS,
        "balance-case-fails",
        "The loss is 0.",
        (BALANCE, "        return self.probabilities.new_zeros(())\n"),
    ),
    mistake(
        "experts-balance-of-one-rank",
        EXPERTS,
        "balance-case-fails",
        "Each rank computes the loss of its own tokens.",
        ("        dist.all_reduce(sums, group=self.group)\n", ""),
        (GRADIENT, "        probabilities = own\n"),
    ),
    mistake(
        "experts-balance-without-gradient",
        EXPERTS,
        "balance-case-fails",
        "The value is right, but nothing is trained with it.",
        (GRADIENT, ""),
    ),
    mistake(
        "experts-balance-gradient-too-small",
        EXPERTS,
        "balance-case-fails",
        "average_gradients() divides the gradient, and nothing multiplies it.",
        (GRADIENT, GRADIENT.replace("self.ranks * ", "")),
    ),
    mistake(
        "experts-balance-after-the-capacity",
        EXPERTS,
        "balance-case-fails",
        "The shares are those of the computed tokens, so an expert that is full looks balanced.",
        ("self.chosen.to(own.dtype)", "self.computed.to(own.dtype)"),
    ),
    mistake(
        "experts-balance-not-multiplied",
        EXPERTS,
        "balance-case-fails",
        "The loss is not multiplied by the number of experts.",
        ("return len(chosen) * (share", "return 1 * (share"),
    ),
    # ---- experts-impossible
    mistake(
        "experts-errors-removed",
        EXPERTS,
        "experts-impossible",
        "A capacity factor of 0 is accepted.",
        (
            "if capacity_factor is not None and not capacity_factor > 0:",
            "if capacity_factor is not None and capacity_factor < 0:",
        ),
    ),
    # ---- exchange-of-pytorch
    mistake(
        "experts-use-that-of-pytorch",
        EXPERTS,
        "exchange-of-pytorch",
        "train() uses PyTorch's function without --pytorch.",
        ("pytorch_all_to_all if args.pytorch else None", "pytorch_all_to_all"),
    ),
    mistake(
        "experts-call-that-of-pytorch",
        EXPERTS,
        "exchange-of-pytorch",
        "The class calls a function that has a backward pass.",
        *experts_styles.FUNCTION_OF_PYTORCH,
    ),
)

STYLES = (
    style(
        "experts-style-send-and-receive",
        EXPERTS,
        "The rows are exchanged with isend and irecv.",
        (
            "        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)\n",
            experts_styles.PAIRWISE,
        ),
    ),
    style(
        "experts-style-numbers-sent",
        EXPERTS,
        "Each row is sent together with the number of its expert, so no sorting of counts is needed.",
        (COMPUTE, experts_styles.NUMBERED),
    ),
    style(
        "experts-style-averaged-in-few-calls",
        EXPERTS,
        "The gradients of all shared parameters are joined to one tensor.",
        *experts_styles.JOINED,
    ),
    style(
        "experts-style-places-in-a-loop",
        EXPERTS,
        "A loop over the tokens counts, and the loss is a sum over the experts.",
        (PLACE, experts_styles.LOOP),
        (BALANCE, experts_styles.BALANCE_LOOP),
    ),
    style(
        "experts-style-counts-gathered",
        EXPERTS,
        "All ranks gather the counts of all ranks.",
        (COUNTS, experts_styles.GATHERED_COUNTS),
    ),
)
