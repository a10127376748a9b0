"""The rules about the mode of a model: mistakes that they must name, and correct styles that must pass."""

from check.bank import second
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

HEAD = "self.head(self.memory(self.embedding(tokens))[0])"
TRAIN, EVAL = "        model.train()\n", "    model.eval()\n"
LINEAR = "self.head = nn.Linear(32, TAGS)"
EPOCH = "        sampler.set_epoch(epoch)\n"
DROPOUT = (
    (LINEAR, "self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, TAGS))"),
    (EPOCH, f"{EPOCH}        torch.manual_seed(100 * epoch + rank)\n"),
)
SUMMED = "    dist.all_reduce(counts)\n"
NORMALIZED = (
    (LINEAR, "self.head, self.norm = nn.Linear(32, TAGS), nn.BatchNorm1d(32)"),
    (HEAD, "self.head(self.norm(self.memory(self.embedding(tokens))[0].transpose(1, 2)).transpose(1, 2))"),
)

COPIED = (
    ("import argparse\n", "import argparse\nimport copy\n"),
    ("    model = Tagger()\n", "    model = Tagger()\n    average = copy.deepcopy(model).requires_grad_(False)\n"),
    ("            optimizer.step()\n", "            optimizer.step()\n            follow(average, model)\n"),
    ("evaluate(model, test_loader)", "evaluate(average, test_loader)"),
)
AVERAGED = (
    ("    model = Tagger()\n", "    model = Tagger()\n    average = torch.optim.swa_utils.AveragedModel(model)\n"),
    ("            optimizer.step()\n", "            optimizer.step()\n            average.update_parameters(model)\n"),
)
RESUMED = (
    ('state = {"model": ', 'state = {"average": average.state_dict(), "model": '),
    (
        "    ddp_model = nn",
        '    if first_epoch:\n        average.load_state_dict(torch.load(args.checkpoint)["average"])\n    ddp_model = nn',
    ),
)
WITH_BUFFERS = second.FOLLOW.replace(
    "0.1)\n",
    "0.1)\n    for old, new in zip(average.buffers(), model.buffers(), strict=True):\n        old.copy_(new)\n",
)

MISTAKES = (
    mistake(
        "evaluation-mode-for-good",
        second.TAGGER,
        "left-in-evaluation",
        "The evaluation after the first epoch switches dropout off, and nothing switches it on again.",
        *DROPOUT,
        (TRAIN, ""),
    ),
    mistake(
        "evaluation-mode-that-the-model-asks-for",
        second.TAGGER,
        "left-in-evaluation",
        "The model has no dropout, but looks at its mode itself.",
        (HEAD, f"{HEAD} * (2 if self.training else 1)"),
        (TRAIN, ""),
    ),
    mistake(
        "evaluated-with-dropout",
        second.TAGGER,
        "evaluated-in-training",
        "The accuracy is that of a model with dropout.",
        *DROPOUT,
        (EVAL, ""),
    ),
    mistake(
        "teacher-with-dropout",
        second.TAGGER,
        "frozen-in-training",
        "The teacher is frozen, but nothing switches its dropout off, so its answers are different each time.",
        *DROPOUT,
        ("import argparse\n", "import argparse\nimport copy\n"),
        ("    model = Tagger()\n", "    model = Tagger()\n    teacher = copy.deepcopy(model).requires_grad_(False)\n"),
        ("            logits = ", "            teacher(tokens)\n            logits = "),
    ),
    mistake(
        "running-statistics-drift-apart",
        second.TAGGER,
        "statistics-differ",
        "Each rank has running statistics of its own sequences, and evaluates with them.",
        *NORMALIZED,
        ("DistributedDataParallel(model)", "DistributedDataParallel(model, broadcast_buffers=False)"),
    ),
    mistake(
        "moving-average-without-the-running-statistics",
        second.TAGGER,
        "statistics-stale",
        "The moving average follows the parameters, but its running statistics stay those of the first step.",
        *NORMALIZED,
        *COPIED,
        ("@torch.no_grad()\n", second.FOLLOW + "@torch.no_grad()\n"),
    ),
    mistake(
        "averaged-model-without-update-bn",
        second.TAGGER,
        "statistics-stale",
        "The mean of the parameters is evaluated with the running statistics of the model itself.",
        *NORMALIZED,
        *AVERAGED,
        ("evaluate(model, test_loader)", "evaluate(average, test_loader)"),
    ),
)

STYLES = (
    style(
        "train-after-the-evaluation",
        second.TAGGER,
        "The evaluation itself switches back to training mode.",
        *DROPOUT,
        (TRAIN, ""),
        (SUMMED, f"    model.train()\n{SUMMED}"),
    ),
    style(
        "teacher-in-both-modes",
        second.TAGGER,
        "A teacher without trained parameters is called with gradients enabled, and in evaluation mode from the second epoch on.",
        *DROPOUT,
        ("import argparse\n", "import argparse\nimport copy\n"),
        ("    model = Tagger()\n", "    model = Tagger()\n    teacher = copy.deepcopy(model).requires_grad_(False)\n"),
        (
            "            logits = ",
            "            (teacher.eval if epoch else teacher.train)()\n            teacher(tokens)\n            logits = ",
        ),
    ),
    style(
        "moving-average-with-the-running-statistics",
        second.TAGGER,
        "The moving average copies the buffers of the model.",
        *NORMALIZED,
        *COPIED,
        *RESUMED,
        ("@torch.no_grad()\n", WITH_BUFFERS + "@torch.no_grad()\n"),
    ),
    style(
        "averaged-model-with-update-bn",
        second.TAGGER,
        "The statistics of the averaged model are computed before each evaluation, on all ranks from the same samples.",
        *NORMALIZED,
        *AVERAGED,
        *RESUMED,
        (
            "        accuracy = evaluate(model, test_loader)\n",
            "        torch.optim.swa_utils.update_bn(DataLoader(train_set, 32, collate_fn=padded), average)\n"
            "        accuracy = evaluate(average, test_loader)\n",
        ),
    ),
    style(
        "batchnorm-with-buffers-of-rank-0",
        second.TAGGER,
        "DistributedDataParallel sends the running statistics of rank 0 before each forward pass.",
        *NORMALIZED,
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
