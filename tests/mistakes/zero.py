"""Mistaken versions of stage 05's solutions, and correct ones in other styles, as in bank.py and correct.py."""

from mistakes.bank import Mistake
from workshop.repository import ROOT

STAGE = "solutions/05_deepspeed"
ZERO_SOLUTION = f"{STAGE}/exercise1_deepspeed.py"
ACCELERATE_SOLUTION = f"{STAGE}/exercise2_accelerate.py"

# Lines of the solutions, or their beginnings, that several versions edit.
CONFIG = "    args.config = check_zero(parser, args)  # what the file says, with this --batch-size\n"
FILE = 'os.path.join(os.path.dirname(os.path.abspath(__file__)), "ds_config.json")'
ENGINE = "    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.config)\n"
BACKWARD, STEP = "        engine.backward(loss)", "        engine.step()"
SAVE = '    engine.save_checkpoint(folder, tag=f"epoch-{epoch}", client_state={"epoch": epoch})\n'
LOAD = "    _, state = engine.load_checkpoint(folder)\n"
EXPORT = "        weights = get_fp32_state_dict_from_zero_checkpoint(args.folder)"
PREPARE = "    model, optimizer = accelerator.prepare(model, optimizer)"
GATHER = "        right.append(accelerator.gather_for_metrics(hits))"
STATE = '    accelerator.save_state(f"{folder}/unfinished")\n'
TRAIN = "    train_loader = accelerator.prepare(DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True))\n"
TEST = "    test_loader = accelerator.prepare(DataLoader(test_set, args.batch_size))\n"


def _zero(name: str, kinds: str, note: str, *edits: tuple[str, str]) -> Mistake:
    return Mistake(f"zero-{name}", ZERO_SOLUTION, edits, tuple(kinds.split()), note)


def _accelerate(name: str, kinds: str, note: str, *edits: tuple[str, str]) -> Mistake:
    return Mistake(f"accelerate-{name}", ACCELERATE_SOLUTION, edits, tuple(kinds.split()), note)


def _config(key: str, value: str) -> tuple[str, str]:
    return CONFIG, f"{CONFIG}    args.config[{key!r}] = {value}\n"


ZERO = (
    _zero(
        "clips-by-default",
        "differs-from-ddp",
        "no word of clipping: DeepSpeed clips at 1",
        (CONFIG, CONFIG + '    del args.config["gradient_clipping"]\n'),
    ),
    _zero(
        "stage-0",
        "optimizer-whole",
        "ZeRO is off: each process keeps the whole optimizer",
        _config("zero_optimization", '{"stage": 0}'),
    ),
    _zero(
        "loss-backward",
        "engine-idle crash",
        "backward() of the loss, not of the engine",
        (BACKWARD, "        loss.backward()"),
    ),
    _zero(
        "optimizer-step",
        "engine-idle crash no-learning",
        "the optimizer's step, not the engine's",
        (ENGINE, ENGINE.replace("engine, *_", "engine, optimizer, *_") + "    engine.steps = optimizer\n"),
        (STEP, "        engine.steps.step()\n        engine.steps.zero_grad()"),
    ),
    _zero("no-step", "engine-idle no-training", "backward() without step()", (STEP, "        pass")),
    _zero(
        "scaled-twice",
        "scaled-twice",
        "the loss is divided by the number of processes, which the engine does too",
        (BACKWARD, BACKWARD.replace("(loss)", "(loss / dist.get_world_size())")),
    ),
    _zero(
        "accumulates",
        "differs-from-ddp",
        "the engine steps after two batches, the loop counts each",
        _config("gradient_accumulation_steps", "2"),
    ),
    _zero(
        "another-batch",
        "batch-differs",
        "the loader has another batch size than the configuration",
        (CONFIG, CONFIG + '    args.config["train_micro_batch_size_per_gpu"] = 2 * args.batch_size\n'),
    ),
    _zero(
        "same-samples",
        "same-samples",
        "no sampler: all processes see the same samples",
        (
            "DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)",
            "DataLoader(train_set, args.batch_size, drop_last=True)",
        ),
    ),
    _zero("same-order", "same-order differs-from-ddp", "no set_epoch", ("        sampler.set_epoch(epoch)\n", "")),
    _zero(
        "rank-0-saves",
        "hang collectives-differ crash",
        "only rank 0 calls save_checkpoint, and waits for the others there",
        (SAVE, "    if dist.get_rank() == 0:\n    " + SAVE),
    ),
    _zero(
        "torch-saves",
        "not-saved",
        "torch.save of the module: the optimizer's parts are lost",
        (
            SAVE,
            "    os.makedirs(folder, exist_ok=True)\n    if dist.get_rank() == 0:\n"
            '        torch.save(engine.module.state_dict(), f"{folder}/epoch-{epoch}.pt")\n',
        ),
        (LOAD, "    state = None\n"),
        (EXPORT, "        weights = engine.module.state_dict()"),
        (
            "            shutil.rmtree(os.path.join(folder, other))\n",
            "            os.remove(os.path.join(folder, other))\n",
        ),
        ('other != f"epoch-{epoch}":', 'other != f"epoch-{epoch}.pt":'),
    ),
    _zero(
        "never-loads",
        "never-resumes",
        "the checkpoint is never loaded",
        ("        return 0\n    _, state", "        return 0\n    return 0\n    _, state"),
    ),
    _zero(
        "epoch-again",
        "epoch-repeated",
        "the epoch of the checkpoint is trained again",
        ('    return state["epoch"] + 1\n', '    return state["epoch"]\n'),
    ),
    _zero(
        "weights-only",
        "resume-differs",
        "the optimizer is not loaded",
        (LOAD, "    _, state = engine.load_checkpoint(folder, load_optimizer_states=False)\n"),
    ),
    _zero(
        "uneven-evaluation",
        "evaluation-uneven",
        "with ZeRO-3 some processes have a forward more",
        ("    as_many = [*own, 0][: -(-len(test_set) // world_size)]\n", "    as_many = own\n"),
    ),
    _zero(
        "rank-0-evaluates",
        "evaluation-uneven",
        "only rank 0 evaluates, on everything",
        (
            "        accuracy = evaluate(engine, test_loader, len(own), device)\n",
            "        accuracy = evaluate(engine, test_loader, len(test_set), device) if rank == 0 else 0\n",
        ),
        (
            "    test_loader = DataLoader(Subset(test_set, as_many), args.batch_size)\n",
            "    test_loader = DataLoader(test_set, args.batch_size)\n",
        ),
        ("    dist.all_reduce(correct_and_total)\n", ""),
    ),
    _zero("exports-nothing", "not-exported", "no file", ("    if args.export and rank == 0:\n", "    if False:\n")),
    _zero(
        "exports-a-part",
        "not-exported",
        "the state of the optimizer, as if it were the weights",
        (EXPORT, "        weights = engine.optimizer.state_dict()"),
    ),
    _zero(
        "exports-the-beginning",
        "export-differs",
        "weights as they were before the training",
        (
            ENGINE,
            ENGINE + "    first = {name: weights.clone() for name, weights in engine.module.state_dict().items()}\n",
        ),
        (EXPORT, "        weights = first"),
    ),
    # ---- Accelerate
    _accelerate(
        "one-process-each",
        "no-group several-print two-writers",
        "no Accelerator knows of the others: a model each",
        (
            "accelerator = Accelerator(",
            "os.environ.pop('WORLD_SIZE'); os.environ.pop('LOCAL_RANK'); accelerator = Accelerator(",
        ),
    ),
    _accelerate(
        "optimizer-unprepared",
        "accelerator-idle",
        "the optimizer is left out",
        (PREPARE, "    model = accelerator.prepare(model)"),
    ),
    _accelerate(
        "model-unprepared",
        "gradients-differ weights-differ",
        "the model is not prepared: no gradients are averaged",
        (PREPARE, "    model, optimizer = model.to(device), accelerator.prepare(optimizer)"),
    ),
    _accelerate(
        "loss-backward",
        "accelerator-idle",
        "backward() of the loss",
        ("        accelerator.backward(loss)", "        loss.backward()"),
    ),
    _accelerate(
        "shared-out-twice",
        "samples-missed loader-by-hand shares-overlap same-order differs-from-one-process",
        "a DistributedSampler, and the Accelerator shares out again",
        (
            TRAIN,
            "    from torch.utils.data import DistributedSampler\n"
            "    sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)\n"
            "    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)\n"
            "    train_loader = accelerator.prepare(train_loader)\n",
        ),
    ),
    _accelerate(
        "loader-unprepared",
        "same-samples loader-by-hand",
        "the loader is not prepared: all see the same samples",
        (TRAIN, "    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)\n"),
        ("        torch.manual_seed(SEED + 1000 * epoch + rank)\n", "        torch.manual_seed(SEED + 1000 * epoch)\n"),
        ("        train_loader.set_epoch(epoch)\n", ""),
    ),
    _accelerate(
        "same-order",
        "same-order",
        "no set_epoch, and a seed that is the same in each epoch",
        ("        train_loader.set_epoch(epoch)\n", "        train_loader.set_epoch(0)\n"),
    ),
    _accelerate(
        "gathers-all",
        "gathered-by-hand metric-wrong evaluation-repeated",
        "gather() keeps the samples that came twice",
        (GATHER, GATHER.replace("gather_for_metrics", "gather")),
    ),
    _accelerate(
        "own-accuracy",
        "metric-wrong gathered-by-hand",
        "the accuracy of rank 0's share",
        (GATHER, "        right.append(hits)"),
    ),
    _accelerate(
        "rank-0-saves",
        "saved-by-some",
        "only rank 0 calls save_state: the others' random states are lost",
        (STATE, "    if accelerator.is_main_process:\n    " + STATE),
    ),
    _accelerate(
        "rank-0-waits",
        "hang collectives-differ",
        "rank 0 waits for everyone, and nobody else does",
        (
            "    accelerator.wait_for_everyone()\n    if accelerator.is_main_process:\n",
            "    if accelerator.is_main_process:\n        accelerator.wait_for_everyone()\n",
        ),
    ),
    _accelerate(
        "never-loads",
        "never-resumes resume-fails",
        "not loaded: the next epoch 0 finds its folder taken",
        ("    if not epochs:\n", "    if True:\n"),
    ),
    _accelerate(
        "in-place",
        "snapshot-torn",
        "the checkpoint is written over the last one",
        (STATE, '    accelerator.save_state(f"{folder}/epoch-0")\n'),
        ('        os.rename(f"{folder}/unfinished", f"{folder}/epoch-{epoch}")\n', ""),
        ("    return epochs[-1] + 1\n", "    return 1 + epochs[-1]\n"),
    ),
)

ZERO_CORRECT = (
    _zero("zero-2", "", "more is spread", (FILE, f'"{ROOT}/05_deepspeed/zero2.json"')),
    _zero("zero-3", "", "all is spread", (FILE, f'"{ROOT}/05_deepspeed/zero3.json"')),
    _zero(
        "two-names",
        "",
        "engine and optimizer by name",
        (
            ENGINE,
            "    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.config)\n",
        ),
    ),
    _zero(
        "optimizer-by-configuration",
        "",
        "DeepSpeed makes the optimizer",
        (
            ENGINE,
            "    args.config['optimizer'] = {'type': 'AdamW', 'params': {'lr': 1e-3, 'torch_adam': True, 'weight_decay': 0.01}}\n"
            "    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config)\n",
        ),
    ),
    _zero(
        "whole-test-set-each",
        "",
        "each process evaluates everything, as often as the others",
        ("Subset(test_set, as_many)", "test_set"),
        ("len(own), device)", "len(test_set), device)"),
    ),
    _accelerate(
        "all-at-once",
        "",
        "everything is prepared in one call",
        (PREPARE, "    model = model.to(device)"),
        (TRAIN, "    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)\n"),
        (
            TEST,
            "    test_loader = DataLoader(test_set, args.batch_size)\n"
            "    model, optimizer, train_loader, test_loader = accelerator.prepare(\n"
            "        model, optimizer, train_loader, test_loader\n"
            "    )\n",
        ),
    ),
    _accelerate(
        "pairs-gathered",
        "",
        "guesses and labels are gathered, and compared afterwards",
        (
            "        hits = model(images.to(device)).argmax(dim=1) == labels.to(device)\n",
            "        guesses, labels = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))\n",
        ),
        (GATHER, "        right.append(guesses == labels)"),
    ),
    _accelerate(
        "keeps-two", "", "two checkpoints are kept", ("saved_epochs(folder)[:-1]", "saved_epochs(folder)[:-2]")
    ),
)
