"""The rules about deepspeed: mistakes that they must name, and correct styles that must pass."""

from check.bank import second, zero
from check.bank.case import mistake, style
from check.bank.cases import bank_tests
from workshop.repository import ROOT

# Parts of the text of second.ENGINE.
SAVED = '        engine.save_checkpoint(args.out, tag=tag, client_state={"epoch": epoch + 1})\n'
READ = "        config = json.load(file)\n"
ZERO_3 = READ + '    config["zero_optimization"] |= {"stage": 3, "stage3_param_persistence_threshold": 0}\n'
SMALL = ("draw_pictures(768", "draw_pictures(128")
LOCAL = """\
    if dist.get_rank() == 0:
        torch.save(engine.module.state_dict(), "final.pt")
"""
GATHERED = """\
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        if dist.get_rank() == 0:
            torch.save(engine.module.state_dict(), "final.pt")
"""

MISTAKES = (
    # ---- engine-steps-missing
    mistake(
        "engine-step-at-own-boundary",
        second.ENGINE,
        "engine-steps-missing",
        "The engine counts the batches in step(); called for every other batch only, it takes half of the updates.",
        (
            "            engine.step()\n",
            "            if (i + 1) % engine.gradient_accumulation_steps() == 0:\n                engine.step()\n",
        ),
    ),
    # ---- saved-without-values
    mistake(
        "zero-3-saved-by-rank-0",
        second.ENGINE,
        "saved-without-values",
        "With ZeRO stage 3, rank 0 has only empty tensors in place of the parameters, and saves them.",
        (READ, ZERO_3),
        SMALL,
        (SAVED, SAVED + LOCAL),
    ),
    # ---- tags-differ
    mistake(
        "tag-with-the-loss-of-the-rank",
        second.ENGINE,
        "tags-differ",
        "Each rank names the checkpoint after its own loss.",
        ("-loss{val_loss:.3f}", "-loss{loss.item():.3f}"),
    ),
    # ---- engine-idle
    mistake(
        "zero-loss-backward",
        zero.DEEPSPEED,
        ("engine-idle", "crash"),
        "The program calls loss.backward() instead of engine.backward(loss).",
        (zero.BACKWARD, "        loss.backward()"),
    ),
    mistake(
        "zero-optimizer-step",
        zero.DEEPSPEED,
        ("engine-idle", "crash", "no-learning"),
        "The program calls the optimizer's step instead of the engine's.",
        (zero.ENGINE, zero.ENGINE.replace("engine, *_", "engine, optimizer, *_") + "    engine.steps = optimizer\n"),
        (zero.STEP, "        engine.steps.step()\n        engine.steps.zero_grad()"),
    ),
    mistake(
        "zero-no-step",
        zero.DEEPSPEED,
        ("engine-idle", "no-training"),
        "The program calls backward() but never step().",
        (zero.STEP, "        pass"),
    ),
    # ---- scaled-twice
    mistake(
        "zero-scaled-twice",
        zero.DEEPSPEED,
        "scaled-twice",
        "The program divides the loss by the number of processes, which the engine does too.",
        (zero.BACKWARD, zero.BACKWARD.replace("(loss)", "(loss / dist.get_world_size())")),
    ),
    # ---- batch-differs
    mistake(
        "zero-another-batch",
        zero.DEEPSPEED,
        "batch-differs",
        "The loader has a batch size other than the configuration's.",
        (zero.CONFIG, zero.CONFIG + '    args.config["train_micro_batch_size_per_gpu"] = 2 * args.batch_size\n'),
    ),
    # ---- optimizer-whole
    mistake(
        "zero-stage-0",
        zero.DEEPSPEED,
        "optimizer-whole",
        "With ZeRO stage 0 each process keeps the whole optimizer.",
        zero.config("zero_optimization", '{"stage": 0}'),
    ),
    # ---- differs-from-ddp
    mistake(
        "zero-clips-by-default",
        zero.DEEPSPEED,
        "differs-from-ddp",
        "Without gradient_clipping in its configuration DeepSpeed clips at 1.",
        (zero.CONFIG, zero.CONFIG + '    del args.config["gradient_clipping"]\n'),
    ),
    mistake(
        "zero-accumulates",
        zero.DEEPSPEED,
        "differs-from-ddp",
        "The engine steps after two batches, while the loop counts each batch as a step.",
        zero.config("gradient_accumulation_steps", "2"),
    ),
    # ---- evaluation-uneven
    mistake(
        "zero-uneven-evaluation",
        zero.DEEPSPEED,
        "evaluation-uneven",
        "With ZeRO-3 some processes call forward once more than the others.",
        ("    as_many = [*own, 0][: -(-len(test_set) // world_size)]\n", "    as_many = own\n"),
    ),
    mistake(
        "zero-rank-0-evaluates",
        zero.DEEPSPEED,
        "evaluation-uneven",
        "Only rank 0 evaluates, on the whole test set.",
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
)

STYLES = (
    style(
        "zero-zero-2",
        zero.DEEPSPEED,
        "ZeRO-2 shards the gradients as well.",
        (zero.FILE, f'"{ROOT}/05_deepspeed/zero2.json"'),
    ),
    style(
        "zero-zero-3",
        zero.DEEPSPEED,
        "ZeRO-3 shards the parameters as well.",
        (zero.FILE, f'"{ROOT}/05_deepspeed/zero3.json"'),
    ),
    style(
        "zero-3-gathered-and-saved-by-rank-0",
        second.ENGINE,
        "With ZeRO stage 3, all ranks gather the parameters, and rank 0 saves them.",
        (READ, ZERO_3),
        SMALL,
        (SAVED, SAVED + GATHERED),
    ),
    style(
        "zero-two-names",
        zero.DEEPSPEED,
        "Engine and optimizer are both taken from initialize().",
        (
            zero.ENGINE,
            "    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.config)\n",
        ),
    ),
    style(
        "zero-optimizer-by-configuration",
        zero.DEEPSPEED,
        "DeepSpeed makes the optimizer from its configuration.",
        (
            zero.ENGINE,
            "    args.config['optimizer'] = {'type': 'AdamW', 'params': {'lr': 1e-3, 'torch_adam': True, 'weight_decay': 0.01}}\n"
            "    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config)\n",
        ),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
