"""The rule that compares the numbers after an evaluation with those of one process."""

import pytest

from check.bank.case import mistake, style
from check.bank.cases import bank_tests
from workshop.check.rules.metrics import _differ, _numbers

KNN = "tests/check/referee/byol_knn/train.py"
SEGMENTATION = "tests/check/referee/segmentation/train.py"
FEATURES = """\
    feats, labels = extract(backbone, bank_loader, device)
    bank, bank_labels = all_gather_cat(feats), all_gather_cat(labels)
"""
RETURNED = "    return (intersection / union.clamp(min=1)).mean().item()\n"

MISTAKES = (
    mistake(
        "labels-in-the-order-of-the-data-set",
        KNN,
        "metric-depends-on-processes",
        "The features are gathered rank by rank, but their labels are in the order of the data set.",
        (
            FEATURES,
            FEATURES.replace("labels = extract", "_ = extract").replace(
                "all_gather_cat(labels)", "bank_loader.dataset.tensors[1].to(device)"
            ),
        ),
    ),
    mistake(
        "result-of-the-reduction-not-used",
        SEGMENTATION,
        "metric-depends-on-processes",
        "The function that adds up the counts returns the sums, but the program goes on with the counts of rank 0.",
        ("    confusion = reduce_sum(confusion)\n", "    reduce_sum(confusion)\n"),
    ),
)
STYLES = (
    style("labels-gathered-like-the-features", KNN, "Features and labels are gathered in the same order."),
    style(
        "counts-gathered-as-objects",
        SEGMENTATION,
        "The counts of the ranks are gathered as objects, and then added.",
        (
            "    confusion = reduce_sum(confusion)\n",
            "    matrices = [None] * dist.get_world_size()\n"
            "    dist.all_gather_object(matrices, confusion.cpu())\n"
            "    confusion = torch.stack(matrices).sum(0)\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)


@pytest.mark.parametrize(
    ("text", "trained", "judged"),
    [
        ("epoch 3: loss 0.52 accuracy 0.81", False, [("accuracy", "0.81")]),
        ("epoch 3 | train acc 0.70 | val loss 0.41, acc 0.66", False, [("val loss", "0.41"), ("acc", "0.66")]),
        ("{'eval_loss': 0.41, 'lr': 0.001}", False, [("eval_loss", "0.41")]),
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
    assert _differ(one, other, processes=2, rounding=1e-3) is differ
