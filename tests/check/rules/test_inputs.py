"""The rules about what turns the data into inputs: mistakes that they must name, and correct styles that must pass."""

from check.bank import gpus, second
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

SETS = "    train_set, test_set = Sequences(96, seed=1), Sequences(31, seed=2)\n"
WORDS = (
    SETS
    + """\
    words = [f"w{number}" for sequence in train_set.sequences[rank::world_size] for number in sequence.tolist()]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words), 1)}
    for part in (train_set, test_set):
        known = [[vocabulary.get(f"w{number}", 0) for number in sequence.tolist()] for sequence in part.sequences]
        part.sequences = [torch.tensor(numbers) for numbers in known]
"""
)
ALL_WORDS = WORDS.replace("[rank::world_size]", "")
BY_SET = ALL_WORDS.replace("dict.fromkeys(words)", "set(words)")
SENT = BY_SET.replace(
    "    for part in",
    "    sent = [vocabulary]\n    dist.broadcast_object_list(sent)\n    vocabulary = sent[0]\n    for part in",
)
OWN = (
    gpus.SETS
    + """\
    own = train_set.tensors[0][rank::world_size]
    mean, std = own.mean(0), own.std(0)
"""
)
NORMALIZED = """\
    train_set, test_set = (TensorDataset((x - mean) / std, y) for x, y in (train_set.tensors, test_set.tensors))
"""
SUMS = (
    gpus.SETS
    + """\
    own = train_set.tensors[0][rank::world_size]
    sums = torch.stack([own.sum(0), own.square().sum(0)])
    sums = sums.to(device)
    dist.all_reduce(sums)
    sums = sums.cpu()
    mean = sums[0] / len(train_set)
    std = (sums[1] / len(train_set) - mean**2).sqrt()
"""
)
DROPOUT = "        self.dropout = nn.Dropout(0.1)\n"
NORM = (
    (DROPOUT, DROPOUT + "        self.norm = nn.BatchNorm1d(64)\n"),
    ("self.dropout(self.hidden(x).relu())", "self.dropout(self.norm(self.hidden(x)).relu())"),
)
REFRESH = """        with torch.no_grad():
            for x, _ in loader:
                model(x.to(device))
"""
AVERAGE = """        for buffer in model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= world_size
"""
EVALUATION = "        accuracy = evaluate(model, test_set, rank, world_size, device)\n"

SCALED = (
    (
        "self.embedding = nn.Embedding(TOKENS, 16)",
        'self.embedding = nn.Embedding(TOKENS, 16)\n        self.register_buffer("scale", torch.ones(()))',
    ),
    ("self.memory(self.embedding(tokens))", "self.memory(self.embedding(tokens) * self.scale)"),
)
COUNTED = """\
    own = Sequences(96, seed=1).sequences[rank::world_size]
    model.scale.fill_(sum(map(len, own)) / 600)
    ddp_model = """

MISTAKES = (
    mistake(
        "buffer-from-the-own-part",
        second.TAGGER,
        "buffer-of-rank-0",
        "Each rank computes a buffer of the model from its part, and DistributedDataParallel sends that of rank 0.",
        *SCALED,
        ("    ddp_model = ", COUNTED),
    ),
    mistake(
        "vocabulary-of-each-rank",
        second.TAGGER,
        "encoded-differently",
        "Each rank numbers the words of its own part of the texts.",
        (SETS, WORDS),
    ),
    mistake(
        "vocabulary-in-the-order-of-a-set",
        second.TAGGER,
        "encoded-differently",
        "The numbers of the words follow the order of a set, which is a different one in each process.",
        (SETS, BY_SET),
    ),
    mistake(
        "mean-and-deviation-of-each-rank",
        gpus.GPUS,
        "encoded-differently",
        "Each rank normalizes with the mean and the deviation of its own part.",
        (gpus.SETS, OWN + NORMALIZED),
    ),
    mistake(
        "batchnorm-renewed-on-each-rank",
        gpus.GPUS,
        "statistics-of-one-rank",
        "At the end of each epoch, each rank renews the statistics of BatchNorm with its own samples.",
        *NORM,
        (EVALUATION, REFRESH + EVALUATION),
    ),
)

STYLES = (
    style(
        "buffer-from-the-whole-data-set",
        second.TAGGER,
        "Each rank computes the buffer from the whole data set.",
        *SCALED,
        ("    ddp_model = ", COUNTED.replace("[rank::world_size]", "")),
    ),
    style(
        "vocabulary-of-all-texts",
        second.TAGGER,
        "All ranks number the words of all texts.",
        (SETS, ALL_WORDS),
    ),
    style(
        "vocabulary-of-rank-0",
        second.TAGGER,
        "Rank 0 numbers the words in the order of a set, and sends the result to the other ranks.",
        (SETS, SENT),
    ),
    style(
        "statistics-added-up",
        gpus.GPUS,
        "The mean and the deviation are computed from sums over all ranks.",
        (gpus.SETS, SUMS + NORMALIZED),
    ),
    style(
        "batchnorm-renewed-and-averaged",
        gpus.GPUS,
        "The renewed statistics are averaged over the ranks.",
        *NORM,
        (EVALUATION, REFRESH + AVERAGE + EVALUATION),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
