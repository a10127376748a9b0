"""The rule that compares the numbers after an evaluation with those of one process."""

import pytest

from check.bank import second
from check.bank.case import mistake, style
from check.bank.cases import bank_tests
from workshop.check.rules.metrics import Shown, _differ, _different, _numbers

REDUCED = "    dist.all_reduce(counts)\n    return (counts[0] / counts[1]).item()\n"
TEXTS = "tests/check/referee/accelerate_text/train.py"
GATHERED = "accelerator.gather_for_metrics((loss, correct))"
GATHERS_ALL = (GATHERED, GATHERED.replace("gather_for_metrics", "gather"))
REMOVES_REPEATED = (
    "        loss_sum, hits, seen =",
    "        left = 150 - int(seen)  # samples that the loader has not returned before\n"
    "        loss, correct = loss[:left], correct[:left]\n"
    "        loss_sum, hits, seen =",
)

LOOP = "    for epoch in range(first_epoch, args.epochs):\n"
STEP = "            optimizer.step()\n"
SEEN = "            seen += torch.tensor([len(tokens), float(count)])\n"

MISTAKES = (
    mistake(
        "sum-of-the-losses-compared-with-the-target",
        "solutions/02_pytorch_ddp/exercise4_find_the_bug_hang.py",
        "loss-summed",
        "The ranks add up their losses and do not divide the sum, so the program stops later on more GPUs.",
        ("all_reduce(loss, dist.ReduceOp.AVG)", "all_reduce(loss)"),
        held_out=True,
    ),
    mistake(
        "running-totals-reduced-at-each-step",
        second.TAGGER,
        "totals-summed-again",
        "The sum of all ranks stays in the running total, so the next step adds it up over the ranks again.",
        (LOOP, "    seen = torch.zeros(2)\n" + LOOP),
        (STEP, STEP + SEEN + "            dist.all_reduce(seen)\n"),
    ),
    mistake(
        "accuracy-of-the-best-rank",
        second.TAGGER,
        "metric-depends-on-processes",
        "The program prints the largest accuracy of all ranks.",
        (
            REDUCED,
            "    accuracy = counts[0] / counts[1]\n"
            "    dist.all_reduce(accuracy, dist.ReduceOp.MAX)\n"
            "    return accuracy.item()\n",
        ),
    ),
    mistake(
        "result-of-the-reduction-not-used",
        second.TAGGER,
        "result-discarded",
        "The sums are in a copy of the counts, but the accuracy is that of the counts of rank 0.",
        (REDUCED, REDUCED.replace("all_reduce(counts)", "all_reduce(counts.clone())")),
    ),
    mistake(
        "counts-gathered-into-one-tensor",
        second.TAGGER,
        "outputs-shared",
        "The list for the counts of all ranks is one tensor, several times, so the counts of the last rank are left.",
        (
            REDUCED,
            "    parts = [torch.empty_like(counts)] * dist.get_world_size()\n"
            "    dist.all_gather(parts, counts)\n"
            "    counts = torch.stack(parts).sum(0)\n"
            "    return (counts[0] / counts[1]).item()\n",
        ),
    ),
    mistake(
        "accelerate-gathers-repeated-samples",
        TEXTS,
        "repeated-samples-gathered",
        "gather() keeps the samples that the loader repeats to fill the last batch.",
        GATHERS_ALL,
    ),
)
STYLES = (
    style(
        "evaluated-by-a-method-of-the-model",
        second.TAGGER,
        "The evaluation uses the weights of the last layer without calling it; the learning rate is for all processes.",
        ("lr=1e-2", "lr=5e-3 * world_size"),
        (
            "    def forward(self, tokens):",
            "    def predict(self, tokens):\n"
            "        return F.linear(self.memory(self.embedding(tokens))[0], self.head.weight, self.head.bias)\n\n"
            "    def forward(self, tokens):",
        ),
        ("(model(tokens).argmax", "(model.predict(tokens).argmax"),
    ),
    style(
        "barrier-and-array-in-temporary-tensors",
        second.TAGGER,
        "A first exchange tests the connections, one of equal numbers is a barrier, and from_numpy() shares its memory.",
        ("    torch.manual_seed(SEED)\n", "    torch.manual_seed(SEED)\n    dist.all_reduce(torch.ones(1) + rank)\n"),
        (
            REDUCED,
            "    dist.all_reduce(torch.zeros(1))\n"
            "    sums = counts.numpy()\n"
            "    dist.all_reduce(torch.from_numpy(sums))\n"
            "    return (sums[0] / sums[1]).item()\n",
        ),
    ),
    style(
        "running-totals-of-what-is-new",
        second.TAGGER,
        "At each step, the ranks add up what is new, and each rank adds the result to the total.",
        (LOOP, "    total = torch.zeros(2)\n" + LOOP),
        (
            STEP,
            STEP + SEEN.replace("seen +=", "seen =") + "            dist.all_reduce(seen)\n            total += seen\n",
        ),
    ),
    style(
        "own-totals-reduced-as-a-copy",
        second.TAGGER,
        "Each rank keeps a total of its own, and at each step the ranks add up copies of these totals.",
        (LOOP, "    seen = torch.zeros(2)\n" + LOOP),
        (STEP, STEP + SEEN + "            dist.all_reduce(seen.clone())\n"),
    ),
    style(
        "accelerate-repeated-samples-removed-by-hand",
        TEXTS,
        "The program gathers all samples with gather(), and leaves out those that the loader has repeated.",
        GATHERS_ALL,
        REMOVES_REPEATED,
    ),
    style(
        "counts-gathered-as-objects",
        second.TAGGER,
        "The counts of the ranks are gathered as objects, and then added.",
        (
            REDUCED,
            "    gathered = [None] * dist.get_world_size()\n    dist.all_gather_object(gathered, counts)\n"
            "    counts = torch.stack(gathered).sum(0)\n    return (counts[0] / counts[1]).item()\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)


@pytest.mark.parametrize(
    ("text", "trained", "judged"),
    [
        ("epoch 3: loss 0.52 accuracy 0.81", False, [("accuracy", "0.81")]),
        ("epoch 3 | train acc 0.70 | val loss 0.41, acc 0.66", False, [("val loss", "0.41"), ("acc", "0.66")]),
        ("{'eval_loss': 0.41, 'eval_f1': 0.7, 'lr': 0.001}", False, [("eval_f1", "0.7")]),  # see OF_TRAINER
        ("D 1.13, distance 0.20", False, []),  # perhaps losses of the steps
        ("D 1.13, distance 0.20", True, [("D", "1.13"), ("distance", "0.20")]),
        ("val acc 0.81 in 12:03.25", True, [("val acc", "0.81")]),
        ("samples 750", True, []),
    ],
)
def test_only_numbers_of_an_evaluation_are_compared(text, trained, judged):
    assert [(label, one) for label, one, _ in _numbers(text, text, trained)] == judged


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("0.7391", "0.7369", True),
        ("0.7391", "0.7392", False),  # rounded in the last digit
        ("1.0e-3", "2.5e-3", True),
        ("1.24071", "1.24089", False),
        ("0.25", "0.50", False),  # twice as large with two processes: a count of samples in one rank's part
        ("0.25", "nan", False),
    ],
)
def test_numbers_differ_by_more_than_rounding(one, other, differ):
    assert _differ(one, other, processes=2, rounding=(1e-3, 1e-3)) is differ


@pytest.mark.parametrize(
    ("label", "one", "other", "differ"),
    [("loss", 1.0489, 2.0944, True), ("loss", 2.0944, 1.0489, False), ("perplexity", 1.0489, 2.0944, False)],
)
def test_repeated_samples_add_more_to_a_mean_than_they_take_from_it(label, one, other, differ):
    ours, alone = (Shown(f"val {label} {number}", "t.py:9", "", 10, 0, "", True, []) for number in (one, other))
    assert bool(_different(ours, alone, 2, (1.5, 0.3))) is differ
