"""The rules about memory: mistakes that they must name, and correct styles that must pass."""

from check.bank import sharded
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

MISTAKES = (
    # ---- activations-kept
    mistake(
        "sharded-checkpoints-nothing",
        sharded.FIT,
        "activations-kept",
        "The option --activation-checkpointing changes nothing.",
        (sharded.RECOMPUTE, "            layer.requires_grad_(True)\n"),
    ),
    # ---- gathers-again
    mistake(
        "sharded-frees-anyway",
        sharded.FIT,
        "gathers-again",
        "The option --keep-gathered has no effect.",
        ("reshard_after_forward=not args.keep_gathered", "reshard_after_forward=True"),
    ),
    # ---- not-offloaded
    mistake(
        "sharded-offloads-the-root-only",
        sharded.FIT,
        "not-offloaded",
        "Only the root is offloaded; the layers stay on the device.",
        ("fully_shard(layer, **options, ", "fully_shard(layer, mesh=mesh, mp_policy=precision(device), "),
    ),
    # ---- not-compiled
    mistake(
        "sharded-compiles-nothing",
        sharded.FIT,
        "not-compiled",
        "The option --compile has no effect.",
        ("            layer.compile()\n", "            pass\n"),
    ),
)

STYLES = (
    style(
        "sharded-style-checkpoint-wrapper",
        sharded.FIT,
        "The layers use the activation checkpointing of transformers.",
        (
            sharded.RECOMPUTE,
            "            layer.gradient_checkpointing = True\n"
            "            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)\n",
        ),
    ),
    style(
        "sharded-style-compiles-forward",
        sharded.FIT,
        "torch.compile() compiles the layer's forward.",
        ("            layer.compile()\n", "            layer.forward = torch.compile(layer.forward)\n"),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
