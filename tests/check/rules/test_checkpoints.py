"""The rules about checkpoints: mistakes that they must name, and correct styles that must pass."""

from check.bank import second, sharded, zero
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

MISTAKES = (
    # ---- not-saved
    mistake(
        "zero-torch-saves",
        zero.DEEPSPEED,
        "not-saved",
        "torch.save() of the module loses the optimizer's shards.",
        (
            zero.SAVE,
            "    os.makedirs(folder, exist_ok=True)\n    if dist.get_rank() == 0:\n"
            '        torch.save(engine.module.state_dict(), f"{folder}/epoch-{epoch}.pt")\n',
        ),
        (zero.LOAD, "    state = None\n"),
        (zero.EXPORT, "        weights = engine.module.state_dict()"),
        (
            "            shutil.rmtree(os.path.join(folder, other))\n",
            "            os.remove(os.path.join(folder, other))\n",
        ),
        ('other != f"epoch-{epoch}":', 'other != f"epoch-{epoch}.pt":'),
    ),
    # ---- whole-saved
    mistake(
        "sharded-rank-0-gathers",
        sharded.CHECKPOINT,
        "whole-saved",
        "Rank 0 gathers the whole state and writes one file.",
        (
            sharded.SAVE,
            "    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
            "    full = get_model_state_dict(state.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))\n"
            "    if dist.get_rank() == 0:\n"
            "        os.makedirs(run, exist_ok=True)\n"
            "        torch.save(full, f'{run}/model.pt')\n",
        ),
    ),
    # ---- saves-waiting
    mistake(
        "sharded-waits-for-the-disk",
        sharded.CHECKPOINT,
        "saves-waiting",
        "dcp.save() blocks the training until the files are written.",
        (sharded.SAVE, '    dcp.save({"state": state}, checkpoint_id=f"{run}/step-{state.step}")\n'),
    ),
    # ---- data-repeated
    mistake(
        "sharded-batches-from-the-start",
        sharded.CHECKPOINT,
        "data-repeated",
        "The resumed run begins with the first batches again.",
        ("islice(batches(train_loader, sampler), state.step, None)", "batches(train_loader, sampler)"),
    ),
    # ---- not-exported
    mistake(
        "sharded-export-without-config",
        sharded.EXPORT,
        "not-exported",
        "The exported folder has no configuration.",
        ("    model.config.save_pretrained(folder)\n", ""),
    ),
    mistake(
        "sharded-export-without-index",
        sharded.EXPORT,
        "not-exported",
        "The index does not say which parameter is in which file.",
        ('        json.dump({"metadata": {}, "weight_map": files}, index)\n', '        index.write("{}")\n'),
    ),
    mistake(
        "sharded-asks-for-other-names",
        sharded.EXPORT,
        "not-exported",
        "The export asks the checkpoint for names other than those that were saved.",
        ('{"state": {"model": weights}}', '{"model": weights}'),
    ),
    mistake(
        "zero-exports-nothing",
        zero.DEEPSPEED,
        "not-exported",
        "No file is exported.",
        ("    if args.export and rank == 0:\n", "    if False:\n"),
    ),
    mistake(
        "zero-exports-a-part",
        zero.DEEPSPEED,
        "not-exported",
        "The state of the optimizer is exported as if it were the parameters.",
        (zero.EXPORT, "        weights = engine.optimizer.state_dict()"),
    ),
    # ---- export-differs
    mistake(
        "sharded-exports-nothing-read",
        sharded.EXPORT,
        "export-differs",
        "The exported parameters are uninitialized memory, because the checkpoint is not read.",
        (sharded.READ, ""),
    ),
    mistake(
        "sharded-exports-the-beginning",
        sharded.EXPORT,
        "export-differs",
        "The export has the parameters from before the training.",
        (
            '    with torch.device("meta"):  # names and shapes, but no memory\n' + sharded.MAKE,
            "    model = AutoModelForCausalLM.from_pretrained(args.model)\n",
        ),
        ("torch.empty(shapes[name].shape)", "shapes[name].contiguous()"),
        (sharded.READ, ""),
    ),
    mistake(
        "zero-exports-the-beginning",
        zero.DEEPSPEED,
        "export-differs",
        "The export has the parameters from before the training.",
        (
            zero.ENGINE,
            zero.ENGINE
            + "    first = {name: weights.clone() for name, weights in engine.module.state_dict().items()}\n",
        ),
        (zero.EXPORT, "        weights = first"),
    ),
    # ---- reshard-fails
    mistake(
        "sharded-state-under-the-rank",
        sharded.CHECKPOINT,
        "reshard-fails",
        "Each rank saves its random state under its number, so more ranks find none of theirs.",
        (sharded.STATE, sharded.STATE.replace("}", ', f"random-{dist.get_rank()}": torch.get_rng_state()}')),
    ),
)

STYLES = (
    style(
        "parameters-changed-after-the-step",
        second.TAGGER,
        "Without a seed, and the program changes a bias after each step; the checkpoint has the changed one.",
        ("    torch.manual_seed(SEED)\n", ""),
        (
            "            optimizer.step()\n",
            "            optimizer.step()\n            with torch.no_grad():\n                model.head.bias.mul_(0.5)\n",
        ),
    ),
    style(
        "sharded-style-app-state-as-dict",
        sharded.CHECKPOINT,
        "The step is saved as a tensor in DCP's own state_dict().",
        (sharded.STATE, sharded.STATE.replace('"step": self.step', '"step": torch.tensor(self.step)')),
        (sharded.STEP, '        self.step = int(state["step"])\n'),
    ),
    style(
        "sharded-style-waits-at-the-end-of-each",
        sharded.CHECKPOINT,
        "The program waits for the saving thread before the next report.",
        (
            "            state.step = step\n            save(state, args.folder)\n",
            "            state.step = int(step)\n            save(state, args.folder)\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
