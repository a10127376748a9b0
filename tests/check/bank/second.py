"""Two programs unlike those of the course: one counts steps and has no data loader, the other has sequences as samples."""

PROGRAM = "tests/check/programs/language_model.py"

TAGGER = "tests/check/programs/tagger.py"
ENGINE = "tests/check/referee/deepspeed_engine/train.py"
FSDP1 = "tests/check/referee/fsdp1_lm/train.py"
GAN = "tests/check/referee/gan/train.py"
MOCO = "tests/check/referee/moco/train.py"
REINFORCE = "tests/check/referee/reinforce_2/train.py"
SHORT = (  # the evidence of the whole program of REINFORCE takes more than a megabyte
    ('"--iterations", type=int, default=40', '"--iterations", type=int, default=8'),
    ('"--num-envs", type=int, default=32', '"--num-envs", type=int, default=4'),
    ('"--horizon", type=int, default=32', '"--horizon", type=int, default=8'),
)
TOKEN_MEAN = ', reduction="sum") * world_size / count'  # of the tagger
TOKENS = f"F.cross_entropy(logits.flatten(0, 1), tags.flatten(){TOKEN_MEAN}"
SQUARES = "(logits.softmax(2) - F.one_hot(tags.clamp(min=0), logits.shape[2])).square()"
OWN_SQUARES = TOKENS, f"{SQUARES}[tags != IGNORED].mean()"
ALL_SQUARES = TOKENS, f"({SQUARES} * (tags != IGNORED)[:, :, None]).sum() * world_size / count"
COUNTS = "    dist.all_reduce(counts)\n"
COUNTS_TO_ONE = "    dist.reduce(counts, 0)\n"
EVALUATE = "        accuracy = evaluate(model, test_loader)\n"
RATE = '        optimizer.param_groups[0]["lr"] = 0.3 * accuracy\n'
SETS = "    train_set, test_set = Sequences(96, seed=1), Sequences(31, seed=2)\n"
SAMPLED = (  # its loader of training samples
    "    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)\n"
    "    loader = DataLoader(train_set, args.batch_size, sampler=sampler, collate_fn=padded, drop_last=True)\n"
)
SAVED = (  # its checkpoint
    '            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}\n'
    '            torch.save(state, args.checkpoint + ".tmp")\n'
    '            os.replace(args.checkpoint + ".tmp", args.checkpoint)\n'
)
ENDLESS = """\
class Stream(IterableDataset):
    def __init__(self, dataset, seed):
        self.dataset, self.random = dataset, random.Random(seed)

    def __iter__(self):
        order = list(range(len(self.dataset)))
        while True:
            self.random.shuffle(order)
            for index in order:
                yield self.dataset[index]
"""
OF_STREAM = "    loader = DataLoader(Stream(train_set, seed=rank), args.batch_size, collate_fn=padded)\n"
SETS_SPLIT = (
    "    from torch.utils.data import random_split\n"
    "    generator = torch.Generator().manual_seed(rank)\n"
    "    train_set, test_set = random_split(Sequences(127, seed=1), [96, 31], generator=generator)\n"
)

# Parts of the text of PROGRAM.
MODEL = "    model = NextCharacter(vocabulary_size).to(device)\n"
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
WRAP = "    ddp_model = nn.parallel.DistributedDataParallel(model)\n"
ZERO = "        optimizer.zero_grad()\n"
FORWARD = "        logits = ddp_model(inputs.to(device))\n"
LOSS = "        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())\n"
BACKWARD = "        loss.backward()\n"
REDUCE = "            dist.all_reduce(mean_loss := loss.detach(), dist.ReduceOp.AVG)\n"
PRINT = '                print(f"step {step} | loss {mean_loss.item():.2f}", flush=True)\n'
ORDER = (
    "    order = torch.randperm((len(tokens) - 1) // CONTEXT, generator=torch.Generator().manual_seed(SEED + step))\n"
)
DEAL = "    mine = order[: batch_size * world_size][rank::world_size]\n"

ORDER_OF_AN_EPOCH = (
    "    windows = 320\n"
    "    epoch, place = divmod((step - 1) * batch_size * world_size, windows)\n"
    "    order = torch.randperm(windows, generator=torch.Generator().manual_seed(SEED + epoch))\n"
)
NEXT_WINDOWS = "    mine = order[place : place + batch_size * world_size][rank::world_size]\n"

# The tagger with local steps.
LOCAL_STEPS = (  # each rank takes three steps of its own, and then they average their parameters
    (OPTIMIZER, "    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)\n"),
    (WRAP, ""),
    (
        "        for tokens, tags in loader:\n            optimizer",
        "        for step, (tokens, tags) in enumerate(loader):\n            optimizer",
    ),
    ("ddp_model(tokens)", "model(tokens)"),
    ("            dist.all_reduce(count)\n", ""),
    (" * world_size / count", " / count"),
    (
        "            optimizer.step()\n",
        "            optimizer.step()\n            if step % 3 == 2:\n                for parameter in model.parameters():\n"
        "                    dist.all_reduce(parameter.data)\n                    parameter.data /= world_size\n",
    ),
)

DIVIDED = "                    dist.all_reduce(parameter.data)\n                    parameter.data /= world_size\n"
SUMMED = "                    dist.all_reduce(parameter.data)\n"


def outer_steps(divided: bool) -> tuple[tuple[str, str], ...]:
    """The tagger with local steps, after which an outer optimizer gets the changes of the parameters as gradients."""
    *others, (last, _) = LOCAL_STEPS
    begin = "            if step % 3 == 0:\n"
    begin += "                outer = [each.detach().clone().requires_grad_() for each in model.parameters()]\n"
    begin += "                outer_optimizer = torch.optim.SGD(outer, lr=0.7)\n"
    step = "            if step % 3 == 2:\n                for parameter, kept in zip(model.parameters(), outer, strict=True):\n"
    step += (
        "                    kept.grad = kept.data - parameter.data\n                    dist.all_reduce(kept.grad)\n"
    )
    step += "                    kept.grad /= world_size\n" * divided
    step += "                outer_optimizer.step()\n"
    step += "                for parameter, kept in zip(model.parameters(), outer, strict=True):\n"
    step += "                    parameter.data.copy_(kept)\n"
    loops = [(old, new.replace(":\n            optimizer", f":\n{begin}            optimizer")) for old, new in others]
    return *loops, (last, last + step)


FOLLOW = """\
@torch.no_grad()
def follow(average, model):
    for old, new in zip(average.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 0.1)


"""
REPEATED = """\
    class Repeated(DistributedSampler):
        def __iter__(self):
            order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.epoch)).tolist()
            return iter([index for index in order for _ in range(3)][rank : 2 * len(order) : world_size])

        def __len__(self):
            return len(self.dataset)

    sampler = Repeated(train_set, drop_last=True)
"""
SCORED = """\
        with torch.no_grad():
            for tokens, _ in DataLoader(train_set, args.batch_size, collate_fn=padded):
                model(tokens)
"""


def centered(mean: str) -> tuple[tuple[str, str], ...]:
    """The tagger with a buffer that is subtracted from its activations: a running average of an expression for their ``mean``."""
    return (
        (
            "        self.head = nn.Linear(32, TAGS)\n",
            '        self.head = nn.Linear(32, TAGS)\n        self.register_buffer("offset", torch.zeros(32))\n',
        ),
        (
            "        return self.head(self.memory(self.embedding(tokens))[0])\n",
            "        found = self.memory(self.embedding(tokens))[0]\n"
            "        if self.training:\n"
            "            mean = found.detach().mean((0, 1))\n"
            f"            self.offset.lerp_({mean}, 0.1)\n"
            "        return self.head(found - self.offset)\n\n\n"
            "def average(mean):\n"
            "    dist.all_reduce(mean)\n"
            "    return mean / dist.get_world_size()\n",
        ),
        ("DistributedDataParallel(model)", "DistributedDataParallel(model, broadcast_buffers=False)"),
    )
