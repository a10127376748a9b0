"""The rules about files: mistakes that they must name, and correct styles that must pass."""

from check.bank import ddp, lightning, second, sharded, zero
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

MOVED = """\
def save_checkpoint(path, model, optimizer, epoch):
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="saving-", delete=False) as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, file)
        file.flush()
        os.fsync(file.fileno())
    shutil.move(file.name, path)  # in the same folder this is os.rename, which is atomic
"""

KEPT = """\
def save_checkpoint(path, model, optimizer, epoch):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, temporary)
    shutil.copyfile(temporary, path.with_name(f"{path.stem}-epoch{epoch}{path.suffix}"))
    temporary.replace(path)
    path.with_name(f"{path.stem}-epoch{epoch - 2}{path.suffix}").unlink(missing_ok=True)  # the last two are enough
"""

READ_AGAIN = """\
    load_checkpoint(args.checkpoint, model, optimizer)
    evaluate(model, test_loader, device)
"""

MISTAKES = (
    # ---- two-writers
    mistake(
        "every-rank-saves",
        ddp.SPAWN,
        "two-writers",
        "All ranks write the same checkpoint through the same temporary file.",
        (ddp.SAVE_IF, "        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.epochs:\n"),
    ),
    mistake(
        "first-rank-of-each-node-saves",
        ddp.TORCHRUN,
        "two-writers",
        "On two machines, rank 0 and the first rank of the other machine write the checkpoint at the same time.",
        ("        if rank == 0 and ((epoch + 1)", '        if os.environ["LOCAL_RANK"] == "0" and ((epoch + 1)'),
    ),
    mistake(
        "folder-made-by-all-ranks",
        second.TAGGER,
        "folder-made-twice",
        "All ranks find that the folder does not exist, and then all create it.",
        (
            "    torch.manual_seed(SEED)\n",
            '    torch.manual_seed(SEED)\n    if not os.path.exists("out"):\n'
            '        dist.barrier()\n        os.makedirs("out")\n',
        ),
    ),
    mistake(
        "file-removed-by-all-ranks",
        second.TAGGER,
        "removed-twice",
        "Rank 0 has made the file, and then all ranks remove it.",
        (
            "    torch.manual_seed(SEED)\n",
            '    torch.manual_seed(SEED)\n    if rank == 0:\n        open("old.pt", "w").close()\n'
            '    dist.barrier()\n    os.remove("old.pt")\n',
        ),
    ),
    mistake(
        "second-all-save",
        second.PROGRAM,
        "two-writers",
        "Both ranks write the checkpoint and its temporary file at the same time.",
        ("        if rank == 0 and (step % args.save_every == 0", "        if (step % args.save_every == 0"),
    ),
    mistake(
        "lightning-every-rank-saves",
        lightning.MNIST,
        ("two-writers", "checkpoint-torn"),
        "on_train_epoch_end() runs on each process.",
        (
            lightning.FORWARD,
            "    def on_train_epoch_end(self):\n"
            '        torch.save(self.model.state_dict(), "weights.pt")\n\n' + lightning.FORWARD,
        ),
    ),
    mistake(
        "sharded-everybody-saves-the-same-file",
        sharded.CHECKPOINT,
        ("two-writers", "whole-saved", "not-saved"),
        "Every process writes its shard to the same file.",
        (
            sharded.SAVE,
            "    os.makedirs(run, exist_ok=True)\n    torch.save(state.model.state_dict(), f'{run}/model.pt')\n",
        ),
    ),
    # ---- read-before-written
    mistake(
        "last-checkpoint-read-at-once",
        ddp.TORCHRUN,
        "read-before-written",
        "At the end, all ranks load the last checkpoint, while rank 0 may still write it.",
        (ddp.SAVE_CALL, ddp.SAVE_CALL + READ_AGAIN),
    ),
    mistake(
        "each-checkpoint-read-at-once",
        ddp.SPAWN,
        "read-before-written",
        "After each epoch, all ranks continue with what rank 0 saves, and may load the checkpoint before this one.",
        (ddp.SAVE_CALL, ddp.SAVE_CALL + "        load_checkpoint(args.checkpoint, model, optimizer)\n"),
    ),
    # ---- several-print
    mistake(
        "every-rank-prints",
        ddp.SPAWN,
        "several-print",
        "Every process prints the same line each epoch.",
        (ddp.EVALUATE, ddp.EVALUATE + '        print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}", flush=True)\n'),
    ),
    mistake(
        "second-all-print",
        second.PROGRAM,
        "several-print",
        "Both ranks print the line with the loss.",
        ("            if rank == 0:\n" + second.PRINT, second.PRINT.removeprefix(" " * 4)),
    ),
    mistake(
        "lightning-every-rank-prints",
        lightning.MNIST,
        "several-print",
        "Hooks run on each process.",
        (
            lightning.FORWARD,
            '    def on_train_epoch_end(self):\n        print("this epoch is done")\n\n' + lightning.FORWARD,
        ),
    ),
    # ---- no-checkpoint
    mistake(
        "rank-as-a-string",
        ddp.TORCHRUN,
        "no-checkpoint",
        'The rank is "0", which never equals 0, so no rank prints or saves.',
        (
            'rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])',
            'rank, world_size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])',
        ),
        (ddp.TEST_LOADER, ddp.TEST_LOADER.replace("range(rank,", "range(dist.get_rank(),")),
        ("SEED + 1000 * epoch + rank", "SEED + 1000 * epoch + dist.get_rank()"),
    ),
    mistake(
        "checkpoint-only-at-the-end",
        ddp.TORCHRUN,
        "no-checkpoint",
        "The only checkpoint comes at the end of the run, so there is nothing to resume from after a crash.",
        (ddp.SAVE_IF, "        if rank == 0 and epoch + 1 == args.epochs:\n"),
    ),
    mistake(
        "checkpoint-path-per-rank",
        ddp.TORCHRUN,
        ("no-checkpoint", "collectives-differ", "hang"),
        "The name of the checkpoint has the rank in it: the other ranks find no file and start again.",
        (
            ddp.LOAD_CALL,
            'path = f"{args.checkpoint}.rank{rank}"\n    ' + ddp.LOAD_CALL.replace("args.checkpoint", "path"),
        ),
        (ddp.SAVE_CALL, ddp.SAVE_CALL.replace("args.checkpoint", "path")),
    ),
    mistake(
        "held-out-nobody-saves",
        ddp.SPAWN,
        "no-checkpoint",
        "Only the main process saves, but it trains nothing: all workers have a parent.",
        (ddp.SAVE_BLOCK, ddp.SAVE_BLOCK.replace("rank == 0", "mp.parent_process() is None")),
        held_out=True,
    ),
    mistake(
        "lightning-checkpoint-at-the-end-only",
        lightning.MNIST,
        "no-checkpoint",
        "An interrupted run has no checkpoint.",
        (lightning.CHECKPOINT, lightning.CHECKPOINT.replace("name,", "name, every_n_epochs=args.epochs,")),
    ),
    # ---- checkpoint-torn
    mistake(
        "checkpoint-written-in-place",
        ddp.TORCHRUN,
        "checkpoint-torn",
        "A process that dies while it saves leaves half a checkpoint in place of the last good one.",
        (
            '    torch.save(checkpoint, path + ".tmp")\n    os.replace(path + ".tmp", path)\n',
            "    torch.save(checkpoint, path)\n",
        ),
    ),
    mistake(
        "held-out-checkpoint-copied",
        ddp.TORCHRUN,
        "checkpoint-torn",
        "The temporary file is copied over the checkpoint, which is incomplete during the copy.",
        ("import os\nimport time\n", "import os\nimport shutil\nimport time\n"),
        ('    os.replace(path + ".tmp", path)\n', '    shutil.copyfile(path + ".tmp", path)\n'),
        held_out=True,
    ),
    mistake(
        "accelerate-in-place",
        zero.ACCELERATE,
        "checkpoint-torn",
        "The new checkpoint overwrites the last good one in place.",
        (zero.STATE, '    accelerator.save_state(f"{folder}/epoch-0")\n'),
        ('        os.rename(f"{folder}/unfinished", f"{folder}/epoch-{epoch}")\n', ""),
        ("    return epochs[-1] + 1\n", "    return 1 + epochs[-1]\n"),
    ),
    # ---- renamed-before-written
    mistake(
        "accelerate-renamed-without-waiting",
        zero.ACCELERATE,
        "renamed-before-written",
        "Rank 0 renames the folder while the other ranks may still write their random states.",
        (zero.STATE + "    accelerator.wait_for_everyone()\n", zero.STATE),
    ),
    # ---- checkpoint-keys
    mistake(
        "saves-the-wrapped-model",
        ddp.SPAWN,
        "checkpoint-keys",
        'The keys of the saved parameters start with "module.", so the plain model cannot load them.',
        (ddp.SAVE_CALL, ddp.SAVE_CALL.replace("model", "ddp_model")),
    ),
)

STYLES = (
    style(
        "checkpoint-read-after-a-barrier",
        ddp.TORCHRUN,
        "All ranks load the last checkpoint when rank 0 has written it.",
        (ddp.SAVE_CALL, ddp.SAVE_CALL + "    dist.barrier()\n" + READ_AGAIN),
    ),
    style(
        "checkpoint-read-after-an-all-reduce",
        ddp.SPAWN,
        "After each epoch, all ranks load the checkpoint; an all_reduce of the number of saved epochs makes them wait.",
        (
            ddp.SAVE_CALL,
            ddp.SAVE_CALL + "        saved = torch.tensor(epoch if rank == 0 else 0, device=device)\n"
            "        dist.all_reduce(saved)\n        load_checkpoint(args.checkpoint, model, optimizer)\n",
        ),
    ),
    style(
        "module-keys-both-ways",
        ddp.SPAWN,
        "The wrapped model is saved and loaded: each key has the prefix 'module.', which is a hint at most.",
        (ddp.CHECK + "args.nproc)\n", "    check_arguments(parser, args, world_size=args.nproc)\n"),
        (ddp.LOAD, "    ddp_model = DDP(model)\n" + ddp.LOAD.replace(" model,", " ddp_model,")),
        (ddp.WRAP, ""),
        (
            "save_checkpoint(args.checkpoint, model, optimizer, epoch)",
            "save_checkpoint(args.checkpoint, ddp_model, optimizer, epoch)",
        ),
    ),
    style(
        "module-keys-stripped",
        ddp.SPAWN,
        "The prefix 'module.' of the wrapped model's keys is removed, so the file fits the plain model.",
        (
            "save_checkpoint(args.checkpoint, model, optimizer, epoch)",
            "save_checkpoint(args.checkpoint, ddp_model, optimizer, epoch)",
        ),
        (
            '    checkpoint = {"model": model.state_dict(), ',
            '    weights = {name.removeprefix("module."): weight for name, weight in model.state_dict().items()}\n'
            '    checkpoint = {"model": weights, ',
        ),
    ),
    style(
        "print-taken-from-other-ranks",
        ddp.SPAWN,
        "As in DETR's setup_for_distributed(): all ranks call print, and only rank 0 prints.",
        ("import os\n", "import builtins\nimport os\n"),
        (ddp.SPAWN_INIT, ddp.SPAWN_INIT + "    if rank > 0:\n        builtins.print = lambda *args, **kwargs: None\n"),
        (ddp.GREETING, ddp.GREETING.replace("    if rank == 0:\n", "").replace("        ", "    ")),
    ),
    style(
        "logging-instead-of-print",
        ddp.TORCHRUN,
        "The logging level keeps the other ranks silent.",
        ("import os\n", "import logging\nimport os\nimport sys\n"),
        (
            "    dist.init_process_group(backend)\n",
            "    dist.init_process_group(backend)\n"
            "    logging.basicConfig(stream=sys.stdout, level=logging.INFO if rank == 0 else logging.WARNING)\n",
        ),
        (
            ddp.GREETING,
            '    logging.info("training on %s from epoch %d: %d processes", device, first_epoch + 1, world_size)\n',
        ),
    ),
    style(
        "temporary-file-moved",
        ddp.TORCHRUN,
        "NamedTemporaryFile, fsync and shutil.move write the checkpoint.",
        ("import os\nimport time\n", "import os\nimport shutil\nimport tempfile\nimport time\n"),
        (ddp.SAVE_FUNCTION, MOVED),
    ),
    style(
        "last-two-checkpoints-kept",
        ddp.TORCHRUN,
        "Path.replace writes the checkpoint, and those of the last two epochs are kept beside it.",
        ("import os\nimport time\n", "import os\nimport shutil\nimport time\nfrom pathlib import Path\n"),
        (ddp.SAVE_FUNCTION, KEPT),
    ),
    style(
        "lightning-style-saves-in-a-hook",
        lightning.MNIST,
        "A hook saves the checkpoint.",
        (f", {lightning.CHECKPOINT}]", "]"),
        (
            lightning.FORWARD,
            "    def on_train_epoch_end(self):\n        self.trainer.save_checkpoint(self.checkpoint)\n\n"
            + lightning.FORWARD,
        ),
        (
            lightning.FIT,
            lightning.FIT.replace("    trainer", "    Classifier.checkpoint = args.checkpoint\n    trainer"),
        ),
    ),
    style(
        "accelerate-keeps-two",
        zero.ACCELERATE,
        "The program keeps two checkpoints.",
        ("saved_epochs(folder)[:-1]", "saved_epochs(folder)[:-2]"),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
