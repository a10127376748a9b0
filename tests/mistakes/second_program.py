"""Mistakes in a program of another shape than the course's: steps instead of epochs, no data loader, no sampler."""

from mistakes.bank import Mistake

PROGRAM = "tests/mistakes/language_model.py"

MODEL = "    model = NextCharacter(vocabulary_size).to(device)\n"
OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
WRAP = "    ddp_model = nn.parallel.DistributedDataParallel(model)\n"
ZERO = "        optimizer.zero_grad()\n"
FORWARD = "        logits = ddp_model(inputs.to(device))\n"
LOSS = "        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())\n"
BACKWARD = "        loss.backward()\n"
REDUCE = "            dist.all_reduce(mean_loss := loss.detach(), dist.ReduceOp.AVG)\n"
PRINT = '                print(f"step {step} | loss {mean_loss.item():.2f}", flush=True)\n'
DEAL = "    mine = order[: batch_size * world_size][rank::world_size]\n"

SECOND = (
    Mistake(
        "second-same-windows",
        PROGRAM,
        ((DEAL, "    mine = order[:batch_size]\n"),),
        ("same-samples",),
        "Every rank takes the first windows of the same order.",
    ),
    Mistake(
        "second-overlapping-windows",
        PROGRAM,
        ((DEAL, "    mine = order[rank * batch_size // 2 :][:batch_size]\n"),),
        ("shares-overlap",),
        "The second rank's windows begin half a batch after the first one's: half of each batch is on both.",
    ),
    Mistake(
        "second-not-wrapped",
        PROGRAM,
        ((WRAP, "    ddp_model = model\n"),),
        ("gradients-differ", "weights-differ"),
        "The model is not wrapped: each process trains its own.",
    ),
    Mistake(
        "second-forward-through-module",
        PROGRAM,
        ((FORWARD, "        logits = ddp_model.module(inputs.to(device))\n"),),
        ("gradients-differ", "weights-differ"),
        "The forward pass goes around DDP, which then averages nothing.",
    ),
    Mistake(
        "second-never-in-step",
        PROGRAM,
        (
            (
                FORWARD + LOSS + BACKWARD,
                "        with ddp_model.no_sync():\n"
                + "".join(" " * 4 + line for line in (FORWARD + LOSS + BACKWARD).splitlines(keepends=True)),
            ),
        ),
        ("gradients-differ", "weights-differ"),
        "no_sync() surrounds every forward and backward pass, so the gradients are never averaged.",
    ),
    Mistake(
        "second-gradients-not-zeroed",
        PROGRAM,
        ((ZERO, ""),),
        ("gradients-pile-up",),
        "The gradients are never set to zero: each step goes along the clipped ones of the steps before as well.",
    ),
    Mistake(
        "second-optimizer-of-another-model",
        PROGRAM,
        ((MODEL + OPTIMIZER, OPTIMIZER.replace("model.", "NextCharacter(vocabulary_size).to(device).") + MODEL),),
        ("wrong-parameters", "no-learning"),
        "The optimizer holds the parameters of another model than the one that is trained.",
    ),
    Mistake(
        "second-schedule-lost",
        PROGRAM,
        (('    schedule.load_state_dict(snapshot["schedule"])\n', ""),),
        ("schedule-lost", "resume-differs"),
        "The schedule is saved but not restored: a resumed run warms up again.",
    ),
    Mistake(
        "second-optimizer-lost",
        PROGRAM,
        (('    optimizer.load_state_dict(snapshot["optimizer"])\n', ""),),
        ("optimizer-lost", "resume-differs"),
        "The optimizer is saved but not restored: a resumed run has lost AdamW's averages.",
    ),
    Mistake(
        "second-step-repeated",
        PROGRAM,
        (("model, optimizer, schedule, step)\n\n", "model, optimizer, schedule, step - 1)\n\n"),),
        ("epoch-repeated", "resume-differs"),
        "The snapshot says one step too few, so a resumed run takes its last step again.",
    ),
    Mistake(
        "second-all-save",
        PROGRAM,
        (("        if rank == 0 and (step % args.save_every == 0", "        if (step % args.save_every == 0"),),
        ("two-writers",),
        "Both ranks write the snapshot, and its temporary file, at the same time.",
    ),
    Mistake(
        "second-all-print",
        PROGRAM,
        (("            if rank == 0:\n" + PRINT, PRINT.removeprefix(" " * 4)),),
        ("several-print",),
        "Both ranks print the line with the loss.",
    ),
    Mistake(
        "second-rank-skips-a-step",
        PROGRAM,
        ((ZERO, "        if rank == 1 and step % 7 == 0:  # a bad window\n            continue\n" + ZERO),),
        ("collectives-differ", "hang"),
        "Rank 1 leaves out every seventh step without a word to rank 0: their collectives no longer pair.",
    ),
    Mistake(
        "second-loss-reduced-on-rank-0",
        PROGRAM,
        (
            (
                REDUCE + "            if rank == 0:\n",
                "            if rank == 0:\n" + " " * 4 + REDUCE,
            ),
        ),
        ("collectives-differ", "hang"),
        "The loss is reduced where it is printed, on rank 0 alone: rank 1 is in the next step's backward pass.",
    ),
)
