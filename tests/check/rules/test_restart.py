"""The rules about restart: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, elastic, gpus, lightning, resumed, second, sharded, zero
from check.bank.case import mistake, part, style
from check.bank.cases import bank_tests

DCP_SAVE = """\
def save_checkpoint(path, model, optimizer, epoch):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{path}.dcp{epoch}")  # all ranks, a file each
    if dist.get_rank() == 0:
        # It names the folder to carry on from, and appears once that is complete.
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(checkpoint, path + ".tmp")
        os.replace(path + ".tmp", path)
        for earlier in range(epoch):
            shutil.rmtree(f"{path}.dcp{earlier}", ignore_errors=True)
"""

DCP_LOAD = """\
def load_checkpoint(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    epoch = torch.load(path, map_location="cpu", weights_only=True)["epoch"]
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{path}.dcp{epoch}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return epoch + 1
"""

RANDOM_STATE_SAVED = """\
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            log.write(epoch, losses, accuracy, samples_per_second)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:
            # Each rank has a file of its own for its random state. All lie there before the checkpoint that needs them.
            own = f"{args.checkpoint}.rank{rank}"
            os.makedirs(os.path.dirname(own) or ".", exist_ok=True)
            torch.save(torch.get_rng_state(), f"{own}.tmp")
            os.replace(f"{own}.tmp", f"{own}.epoch{epoch}")
            dist.barrier()
            if rank == 0:
                save_checkpoint(args.checkpoint, model, optimizer, epoch)
            dist.barrier()
            for earlier in range(epoch):
                if os.path.exists(f"{own}.epoch{earlier}"):
                    os.remove(f"{own}.epoch{earlier}")
"""

RANDOM_STATE_LOADED = """
    torch.manual_seed(SEED + rank)
    if os.path.exists(own := f"{args.checkpoint}.rank{rank}.epoch{first_epoch - 1}"):
        torch.set_rng_state(torch.load(own, weights_only=True))
    for epoch in range(first_epoch, args.epochs):
        # The rest of the random state comes from the file of this rank.
"""

MISTAKES = (
    # ---- resume-fails
    mistake(
        "options-in-the-checkpoint",
        ddp.TORCHRUN,
        "resume-fails",
        "The checkpoint contains a Namespace, which torch.load(weights_only=True) refuses.",
        (ddp.SAVE_CALL, ddp.SAVE_CALL.replace("epoch)", "epoch, args)")),
        (
            "def save_checkpoint(path, model, optimizer, epoch):",
            "def save_checkpoint(path, model, optimizer, epoch, args):",
        ),
        ('"epoch": epoch}', '"epoch": epoch, "args": args}'),
    ),
    mistake(
        "lightning-weights-only",
        lightning.MNIST,
        "resume-fails",
        "Lightning cannot resume without the optimizer's state.",
        (lightning.CHECKPOINT, lightning.CHECKPOINT.replace("name,", "name, save_weights_only=True,")),
    ),
    # ---- never-resumes
    mistake(
        "never-loaded",
        ddp.TORCHRUN,
        "never-resumes",
        "Checkpoints are written, but the second start begins with new parameters and the first epoch.",
        (ddp.LOAD_CALL, "first_epoch = 0"),
    ),
    mistake(
        "lightning-never-loads",
        lightning.MNIST,
        "never-resumes",
        "The checkpoint exists but is not loaded.",
        (lightning.RESUME, "    checkpoint = None\n"),
    ),
    mistake(
        "lightning-nothing-fits-strict-off",
        lightning.MNIST,
        "never-resumes",
        "All names begin with 'model.', and strict=False ignores that none fits.",
        (
            lightning.FIT,
            "    model = Classifier()\n    if checkpoint:\n        weights = torch.load(checkpoint, weights_only=True)\n"
            '        model.model.load_state_dict(weights["state_dict"], strict=False)\n    trainer.fit(model, data)\n',
        ),
    ),
    mistake(
        "sharded-step-not-restored",
        sharded.CHECKPOINT,
        ("never-resumes", "resume-fails"),
        "The parameters are loaded, but all steps are taken again.",
        (sharded.STEP, ""),
    ),
    mistake(
        "zero-never-loads",
        zero.DEEPSPEED,
        "never-resumes",
        "The checkpoint is never loaded.",
        ("        return 0\n    _, state", "        return 0\n    return 0\n    _, state"),
    ),
    mistake(
        "accelerate-never-loads",
        zero.ACCELERATE,
        ("never-resumes", "resume-fails"),
        "No checkpoint is loaded, and the new epoch 0 finds that its folder exists.",
        ("    if not epochs:\n", "    if True:\n"),
    ),
    # ---- epoch-repeated
    mistake(
        "last-epoch-again",
        ddp.TORCHRUN,
        "epoch-repeated",
        "The saved epoch is complete, but the program trains it once more.",
        (ddp.NEXT_EPOCH, '    return checkpoint["epoch"]\n'),
    ),
    mistake(
        "second-step-repeated",
        second.PROGRAM,
        ("epoch-repeated", "resume-differs"),
        "The checkpoint says one step too few, so a resumed run takes its last step again.",
        ("model, optimizer, schedule, step)\n\n", "model, optimizer, schedule, step - 1)\n\n"),
    ),
    mistake(
        "lightning-weights-without-the-rest",
        lightning.MNIST,
        ("epoch-repeated", "optimizer-lost", "resume-differs"),
        "load_from_checkpoint() loads only the parameters: epochs and optimizer start again.",
        (
            lightning.FIT,
            "    model = Classifier.load_from_checkpoint(checkpoint) if checkpoint else Classifier()\n"
            "    trainer.fit(model, data)\n",
        ),
    ),
    mistake(
        "zero-epoch-again",
        zero.DEEPSPEED,
        "epoch-repeated",
        "The epoch of the checkpoint is trained again.",
        ('    return state["epoch"] + 1\n', '    return state["epoch"]\n'),
    ),
    # ---- epoch-skipped
    mistake(
        "next-epoch-skipped",
        ddp.TORCHRUN,
        "epoch-skipped",
        "The saved number is already that of the next epoch: adding 1 skips an epoch.",
        (
            ddp.NEXT_EPOCH,
            '    epochs_done = checkpoint["epoch"] + 1\n    return epochs_done + 1  # carry on with the next one\n',
        ),
    ),
    mistake(
        "held-out-saved-before-training",
        ddp.SPAWN,
        ("epoch-skipped", "resume-differs"),
        "The checkpoint of an epoch is written before the epoch, so a resumed run skips it.",
        (ddp.SAVE_BLOCK, ""),
        ("        sampler.set_epoch(epoch)\n", "        sampler.set_epoch(epoch)\n" + ddp.SAVE_BLOCK),
        held_out=True,
    ),
    # ---- optimizer-lost
    mistake(
        "optimizer-not-saved",
        ddp.TORCHRUN,
        ("optimizer-lost", "resume-fails"),
        "The checkpoint has only the parameters, and the check of the options refuses to resume from it.",
        (' "optimizer": optimizer.state_dict(),', ""),
        (ddp.LOAD_OPTIMIZER, ""),
    ),
    mistake(
        "optimizer-not-loaded",
        ddp.TORCHRUN,
        "optimizer-lost",
        "The optimizer's state is in the checkpoint but is not loaded.",
        (ddp.LOAD_OPTIMIZER, ""),
    ),
    mistake(
        "optimizer-made-again",
        ddp.TORCHRUN,
        "optimizer-lost",
        "The state is loaded into one optimizer, and another takes the steps.",
        (ddp.WRAPPED, ddp.WRAPPED + "\n    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=1e-3)"),
    ),
    mistake(
        "held-out-checkpoint-made-once",
        ddp.SINGLE,
        ("optimizer-lost", "resume-differs"),
        "The state dicts are taken before the first step: the parameters stay current, the optimizer's state is empty.",
        (
            "    for epoch in range(first_epoch, args.epochs):\n",
            "    # These refer to the live tensors, so once is enough.\n"
            '    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}\n'
            "    for epoch in range(first_epoch, args.epochs):\n",
        ),
        ("(args.checkpoint, model, optimizer, epoch)\n", "(args.checkpoint, checkpoint, epoch)\n"),
        ("def save_checkpoint(path, model, optimizer, epoch):\n", "def save_checkpoint(path, checkpoint, epoch):\n"),
        (
            '    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}\n',
            '    checkpoint = {**checkpoint, "epoch": epoch}\n',
        ),
        held_out=True,
    ),
    mistake(
        "second-optimizer-lost",
        second.PROGRAM,
        ("optimizer-lost", "resume-differs"),
        "The optimizer is saved but not restored: a resumed run has lost AdamW's averages.",
        ('    optimizer.load_state_dict(checkpoint["optimizer"])\n', ""),
    ),
    mistake(
        "sharded-without-the-optimizer",
        sharded.CHECKPOINT,
        ("optimizer-lost", "resume-fails"),
        "The optimizer's state is not saved.",
        (sharded.STATE, sharded.STATE.replace('"optimizer": optimizer, ', "")),
        (', optim_state_dict=state["optimizer"]', ", optim_state_dict={}"),
    ),
    # ---- schedule-lost
    mistake(
        "schedule-not-saved",
        ddp.TORCHRUN,
        "schedule-lost",
        "The learning rate halves each epoch, and starts from its initial value after a restart.",
        (
            ddp.LOAD_CALL,
            ddp.LOAD_CALL + "\n    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)",
        ),
        (ddp.EVALUATE, "        scheduler.step()\n" + ddp.EVALUATE),
    ),
    mistake(
        "second-schedule-lost",
        second.PROGRAM,
        ("schedule-lost", "resume-differs"),
        "The schedule is saved but not restored: a resumed run warms up again.",
        ('    schedule.load_state_dict(checkpoint["schedule"])\n', ""),
    ),
    mistake(
        "sharded-without-the-schedule",
        sharded.CHECKPOINT,
        "schedule-lost",
        "The schedule starts again.",
        (sharded.SCHEDULE, ""),
    ),
    # ---- resume-differs
    mistake(
        "order-counted-from-the-restart",
        ddp.TORCHRUN,
        "resume-differs",
        "The order depends on the epochs since the last start, so a restart repeats the first order.",
        (ddp.SET_EPOCH, "        sampler.set_epoch(epoch - first_epoch)\n"),
    ),
    mistake(
        "weights-not-loaded",
        ddp.SINGLE,
        "resume-differs",
        "The second start takes the optimizer and the epoch from the checkpoint, but not the parameters.",
        ('    model.load_state_dict(checkpoint["model"])\n', ""),
    ),
    mistake(
        "sharded-loads-into-nothing",
        sharded.CHECKPOINT,
        ("resume-differs", "optimizer-lost", "schedule-lost"),
        "What DCP loads is not given to model and optimizer; it fills tensors in place, but not the learning rate.",
        (
            '        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], '
            'optim_state_dict=state["optimizer"])\n',
            "",
        ),
    ),
    mistake(
        "zero-weights-only",
        zero.DEEPSPEED,
        "resume-differs",
        "The optimizer's state is not loaded.",
        (zero.LOAD, "    _, state = engine.load_checkpoint(folder, load_optimizer_states=False)\n"),
    ),
    # ---- orphans
    mistake(
        "outlives-torchrun",
        ddp.TORCHRUN,
        "orphans",
        "After kill -9 of torchrun its workers continue training, and write to the checkpoint of the next start.",
        (
            "from workshop.training.launcher import exit_with_launcher\n\n"
            "exit_with_launcher()  # this process must end if torchrun is killed (kill -9); "
            "before the slow imports\n\n",
            "",
        ),
        real=True,
    ),
    # ---- traceback-hidden
    mistake(
        "traceback-not-recorded",
        ddp.TORCHRUN,
        "traceback-hidden",
        "Without @record torchrun's summary says which rank failed, but not why.",
        ("@record  # torchrun then shows the traceback of the rank that failed first\n", ""),
        real=True,
    ),
    # ---- kept-after-error
    mistake(
        "group-kept-after-an-error",
        ddp.SPAWN,
        "kept-after-error",
        "The group is destroyed only if the training ends well.",
        (
            "    try:\n        train(rank, world_size, device, args)\n    finally:\n        dist.destroy_process_group()\n",
            "    train(rank, world_size, device, args)\n    dist.destroy_process_group()\n",
        ),
    ),
    # ---- random-lost
    mistake(
        "seeded-in-the-first-epoch-only",
        ddp.TORCHRUN,
        "random-lost",
        "The random state of a resumed run is that of the first epoch, which is a hint.",
        (ddp.LOSS, ddp.WITH_DROPOUT),
        (ddp.SEED, f"if epoch == 0:\n            {ddp.SEED}"),
    ),
    # ---- not-restarted
    mistake(
        "no-restarts",
        ddp.TORCHRUN,
        "not-restarted",
        "torchrun does not start the processes again when one of them dies.",
        real=True,
        runner=(("max_restarts=3", "max_restarts=0"),),
    ),
    # ---- store-shared
    mistake(
        "store-of-torchrun-shared",
        ddp.TORCHRUN,
        ("store-shared", "not-restarted"),
        "Restarted workers find the addresses of dead ones in the store: some restarts fail.",
        real=True,
        runner=(("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n", ""),),
    ),
    *elastic.RESTARTS,
    *resumed.MISTAKES,
)

MISTAKES += (
    mistake(
        "average-not-restored",
        gpus.GPUS,
        "resume-differs",
        "The second start copies the loaded model, and the moving average of the parameters is lost.",
        ("import os\n", "import copy\nimport os\n"),
        (gpus.WRAPPED, "    average = copy.deepcopy(model)\n" + gpus.WRAPPED),
        (gpus.STEP, gpus.STEP + gpus.AVERAGED),
        ("evaluate(model, test_set", "evaluate(average, test_set"),
    ),
    mistake(
        "scale-not-restored",
        gpus.GPUS,
        "resume-differs",
        "The second start begins with the first scale of the GradScaler, and skips steps again.",
        gpus.HALF, gpus.SCALER, gpus.scaled(), gpus.SCALER_SAVED,
    ),
    mistake(
        "buffer-of-the-model-not-saved", second.TAGGER, "resume-differs",
        "The checkpoint has the parameters only, and the running mean, which is a buffer, begins again.",
        ("TAGS)\n\n    def forward", 'TAGS)\n        self.register_buffer("mean", torch.zeros(16))\n\n    def forward'),
        ("self.embedding(tokens))", "self.embedding(tokens) - self.mean.lerp_(self.embedding.weight.detach().mean(0), 0.1))"),
        ('"model": model.state_dict()', '"model": dict(model.named_parameters())'),
        ('load_state_dict(checkpoint["model"])', 'load_state_dict(checkpoint["model"], strict=False)'),
    ),
)  # fmt: skip

STYLES = (
    *resumed.STYLES,
    style(
        "momentum-clipping-and-schedule",
        ddp.TORCHRUN,
        "SGD with momentum, clipped gradients, and a schedule that is saved and restored.",
        (
            ddp.OPTIMIZER,
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)\n"
            "    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)\n",
        ),
        (ddp.LOAD, ddp.LOAD.replace("optimizer)", "optimizer, schedule)")),
        (ddp.TRAIN_EPOCH, ddp.TRAIN_EPOCH + "        schedule.step()\n"),
        (ddp.STEP, "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n" + ddp.STEP),
        (
            "save_checkpoint(args.checkpoint, model, optimizer, epoch)",
            "save_checkpoint(args.checkpoint, model, optimizer, schedule, epoch)",
        ),
        (
            "def save_checkpoint(path, model, optimizer, epoch):",
            "def save_checkpoint(path, model, optimizer, schedule, epoch):",
        ),
        (
            ddp.SAVED,
            ddp.SAVED + '    checkpoint["schedule"] = schedule.state_dict()\n',
        ),
        (
            "def load_checkpoint(path, model, optimizer):",
            "def load_checkpoint(path, model, optimizer, schedule):",
        ),
        (ddp.LOAD_OPTIMIZER, ddp.LOAD_OPTIMIZER + '    schedule.load_state_dict(checkpoint["schedule"])\n'),
    ),
    style(
        "loaded-on-the-cpu-as-any-object",
        ddp.TORCHRUN,
        "weights_only=False, a lambda as map_location, and an extra entry in the checkpoint.",
        (
            'torch.load(path, map_location="cpu", weights_only=True)',
            "torch.load(path, map_location=lambda storage, location: storage, weights_only=False)",
        ),
        (ddp.SAVED, ddp.SAVED.replace('"epoch": epoch}', '"epoch": epoch, "seed": SEED}')),
    ),
    style(
        "random-state-in-a-file-of-each-rank",
        ddp.TORCHRUN,
        "Each rank writes its random state to its own file; the checkpoint follows after a barrier.",
        (
            part(ddp.TORCHRUN, "\n    for epoch in range(first_epoch", "        sampler.set_epoch(epoch)"),
            RANDOM_STATE_LOADED,
        ),
        (ddp.REPORT, RANDOM_STATE_SAVED),
    ),
    style(
        "distributed-checkpoint",
        ddp.TORCHRUN,
        "All ranks save and load with torch.distributed.checkpoint; the checkpoint names the folder to load from.",
        ("import os\nimport time\n", "import os\nimport shutil\nimport time\n"),
        (
            "import torch.distributed as dist\n",
            "import torch.distributed as dist\nimport torch.distributed.checkpoint as dcp\n"
            "from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict\n",
        ),
        (
            "        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs):\n",
            "        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:\n",
        ),
        (ddp.SAVE_FUNCTION, DCP_SAVE),
        (ddp.LOAD_CHECKPOINT, DCP_LOAD),
    ),
    style(
        "single-warm-up-in-steps",
        ddp.SINGLE,
        "A warm-up that counts steps is saved together with the optimizer; gradient values are clipped.",
        (
            ddp.OPTIMIZER,
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)\n"
            "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 30))\n",
        ),
        (ddp.LOAD, ddp.LOAD.replace("optimizer)", "(optimizer, schedule))")),
        (
            "train_one_epoch(model, train_loader, optimizer, device)\n",
            "train_one_epoch(model, train_loader, optimizer, schedule, device)\n",
        ),
        (
            "def train_one_epoch(model, loader, optimizer, device):\n",
            "def train_one_epoch(model, loader, optimizer, schedule, device):\n",
        ),
        (
            ddp.STEP,
            "        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)\n"
            + ddp.STEP
            + "        schedule.step()\n",
        ),
        (
            "save_checkpoint(args.checkpoint, model, optimizer, epoch)",
            "save_checkpoint(args.checkpoint, model, (optimizer, schedule), epoch)",
        ),
        (
            ddp.SAVED,
            '"optimizer": [part.state_dict() for part in optimizer], "epoch": epoch}\n',
        ),
        (
            ddp.LOAD_OPTIMIZER,
            '    for part, state in zip(optimizer, checkpoint["optimizer"], strict=True):\n'
            "        part.load_state_dict(state)\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
