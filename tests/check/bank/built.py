"""The programs of stage 06, and parts of their text that several mistakes and styles edit."""

from check.bank.case import Edit, part

STAGE = "solutions/06_build_your_own"
DDP = f"{STAGE}/exercise1_ddp.py"
ZERO1 = f"{STAGE}/exercise2_zero1.py"
FSDP = f"{STAGE}/exercise3_fsdp.py"
TENSOR = f"{STAGE}/exercise4_tensor.py"
EXPERTS = f"{STAGE}/exercise7_experts.py"

# ---------------------------------------------------------------- exercise 1

SEND_START = part(DDP, "        for tensor in (*module.parameters()", "        self.wrapped")
HOOKS = part(DDP, "        for parameter in trained:\n", "\n    def forward")
FIRST_GRADIENT = part(DDP, "        if self.started is None:", "        self.bucket_of[parameter]")
READY = "        self.bucket_of[parameter].missing.discard(parameter)\n"
SEND_BUCKET = "        self.work = dist.all_reduce(self.buffer, group=self.group, async_op=True)\n"
WAIT_BUCKET = "        self.work.wait()\n        *pieces, flags"
CHANGED = part(DDP, "        if changed :=", "        return self.module(*args")
DDP_BACKWARD = "        loss.backward()\n"
DDP_CLASSES = part(DDP, "class DDP(nn.Module):\n", "def options(parser)")
BUCKET_CLASS = part(DDP, "class Bucket:\n", "def divide(")


def ddp(*lines: str) -> Edit:
    """Return the edit that replaces the classes of exercise 1."""
    return DDP_CLASSES, "".join(lines) + "\n\n"


# ---------------------------------------------------------------- exercise 2

ASSIGN = part(
    ZERO1, "        for parameter in sorted(self.param_groups[-1]", "        if self.inner:\n            self.inner.add"
)
INNER_GROUPS = "[self.own_part(each) for each in self.param_groups], **options)\n"
RATES = part(ZERO1, "            # A schedule of the learning rate", "        loss = self.inner.step(closure)")
STEP = "        loss = self.inner.step(closure)\n        self.share_parameters()\n"
SHARE = part(ZERO1, "        trained = [parameter for parameter in self.owners", "\n    def state_dict(self)")
STATE = part(ZERO1, "        full = super().state_dict()", "\n    def load_state_dict")
COLLECT = part(
    ZERO1,
    "        everyone = [None] * self.world_size\n        dist.all_gather_object(everyone, tree",
    '        full["state"] = {',
)
LOAD = part(ZERO1, "        super().load_state_dict(state_dict)", "\n\ndef options(parser)")
ZERO1_CLASS = part(ZERO1, "class ShardedOptimizer(", "def options(parser)")
CHOOSE = "    sharded = ZeroRedundancyOptimizer if args.pytorch else ShardedOptimizer\n"

# ---------------------------------------------------------------- exercise 3

UNITS = "        self.units = [Unit(self, part, parameters) for part, parameters in parts_of(module, layers)]\n"
RETURN = "        return self.module(*args, **kwargs)\n\n    def full_state_dict"
FREE_OLD = part(FSDP, "        for unit in self.units:\n            unit.free()", "        if changed :=")
SHARDS = part(FSDP, "        rows = [self.divide(", "        self.shards = [")
DIVIDED = "F.pad(tensor.flatten(), (0, -tensor.numel() % self.world_size)).view(self.world_size, -1)"
SAVING = part(FSDP, "        self.saving = torch.autograd", "        if self.fsdp.dtype:")
SAVED = "        self.saving.__exit__(None, None, None)\n"
FREE_LAYER = "        self.free()\n        for each in tree_leaves(output):\n"
NEXT = part(FSDP, "            if 0 <= place < len(self.fsdp.order):\n", "        return self.full")
START_GATHER = part(FSDP, "            self.work = dist.all_gather_into_tensor(", "\n    def free(")
WAIT_GATHER = part(FSDP, "            self.work.wait()\n            pairs = zip", "            self.full = [")
SUMS = part(FSDP, "        sums = sent.new_empty(", "        uses, *pieces")
USES = "        uses, *pieces = sums.split([len(trained), *(unit.sizes[number] for number in trained)])\n"
SEND_SUMS = "        dist.reduce_scatter_tensor(sums, sent.view(-1), group=unit.fsdp.group)\n"
MEAN = part(FSDP, "        mean = dict(zip(trained", "\n\ndef options(parser)")
BUILD_CLASSES = part(FSDP, "class FSDP(nn.Module):\n", "def options(parser)")
WRAP = part(FSDP, "        model = FSDP(model, layers=", "    optimizer = torch")
