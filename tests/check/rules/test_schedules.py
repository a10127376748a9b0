"""The rules about schedules of the learning rate: mistakes that they must name, and correct styles that must pass."""

from check.bank import second
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

PLATEAU = (
    (
        "    first_epoch = ",
        "    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)\n    first_epoch = ",
    ),
    ("model, optimizer)\n    ddp", "model, optimizer, plateau)\n    ddp"),
    ('"epoch": epoch}', '"plateau": plateau.state_dict(), "epoch": epoch}'),
    ("def load(path, model, optimizer):", "def load(path, model, optimizer, plateau):"),
    (
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n',
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n    plateau.load_state_dict(checkpoint["plateau"])\n',
    ),
)
ACCURACY = "        accuracy = evaluate(model, test_loader)\n"

MISTAKES = (
    mistake(
        "schedule-of-steps-advanced-once-per-epoch",
        second.TAGGER,
        "schedule-length",
        "The schedule counts steps of the optimizer, but takes one step per epoch, so the learning rate hardly falls.",
        (
            "    ddp_model = ",
            "    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=args.epochs * 6)\n"
            "    ddp_model = ",
        ),
        (
            "        accuracy = evaluate(model, test_loader)\n",
            "        schedule.step()\n        accuracy = evaluate(model, test_loader)\n",
        ),
    ),
    mistake(
        "cycle-ends-early",
        "tests/check/referee/accelerate_onecycle/train.py",
        "schedule-length",
        "A prepared schedule takes one step for each process, so it ends after half of the run, which then stops early.",
        ("total_steps=updates * accelerator.num_processes", "total_steps=updates"),
    ),
    mistake(
        "schedule-of-all-processes",
        second.PROGRAM,
        "schedule-length",
        "The schedule is made for the steps of all processes together, so it ends at half of the rate.",
        ("lambda step: min(1, (step + 1) / WARM_UP)", "lambda step: max(0, 1 - step / (args.steps * world_size))"),
    ),
    mistake(
        "cosine-of-the-steps-of-one-process",
        second.PROGRAM,
        "schedule-length",
        "The cosine is too short by the number of processes, so the learning rate rises again in the second half of the run.",
        (
            "lambda step: min(1, (step + 1) / WARM_UP)",
            "lambda step: 0.5 + 0.5 * math.cos(math.pi * step / (args.steps // world_size))",
        ),
        ("import argparse\n", "import argparse\nimport math\n"),
    ),
    mistake(
        "plateau-on-rank-0-only",
        second.TAGGER,
        "schedules-differ",
        "Only rank 0 calls step(), so at the first plateau it alone lowers its learning rate.",
        *PLATEAU,
        (ACCURACY, f"{ACCURACY}        if rank == 0:\n            plateau.step(1 - accuracy)\n"),
    ),
    mistake(
        "plateau-waits-for-a-lower-accuracy",
        second.TAGGER,
        "mode-reversed",
        "ReduceLROnPlateau takes the accuracy for a loss, and reduces the learning rate while it rises.",
        *PLATEAU,
        (ACCURACY, f"{ACCURACY}        plateau.step(accuracy)\n"),
    ),
    mistake(
        "plateau-of-a-part",
        second.TAGGER,
        "schedules-differ",
        "Each rank gives ReduceLROnPlateau the loss of its own last batch.",
        *PLATEAU,
        (ACCURACY, f"{ACCURACY}        plateau.step(loss.item())\n"),
    ),
)

STYLES = (
    style(
        "plateau-of-the-whole",
        second.TAGGER,
        "All ranks give ReduceLROnPlateau the accuracy over all samples.",
        *PLATEAU,
        (ACCURACY, f"{ACCURACY}        plateau.step(1 - accuracy)\n"),
    ),
    style(
        "plateau-of-an-accuracy",
        second.TAGGER,
        "ReduceLROnPlateau waits until the accuracy no longer rises.",
        *PLATEAU,
        ("(optimizer, patience=5)", '(optimizer, "max", patience=5)'),
        (ACCURACY, f"{ACCURACY}        plateau.step(float(accuracy))\n"),
    ),
    style(
        "plateau-of-rank-0-sent-to-all",
        second.TAGGER,
        "Rank 0 decides, and all ranks get its learning rate.",
        *PLATEAU,
        (
            ACCURACY,
            f"{ACCURACY}        if rank == 0:\n            plateau.step(1 - accuracy)\n"
            '        rate = torch.tensor(optimizer.param_groups[0]["lr"])\n'
            "        dist.broadcast(rate, src=0)\n"
            '        optimizer.param_groups[0]["lr"] = rate.item()\n',
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
