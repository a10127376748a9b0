"""The rules about models that ranks have together: mistakes that they must name, and correct styles that must pass."""

from check.bank import divided
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

OWN_FILE = (
    (divided.GATHERED, ""),
    (
        divided.SAVED,
        '            state = {"stage": stage.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}\n'
        '            torch.save(state, CHECKPOINT + ".part")\n',
    ),
)

TIED = "tests/check/referee/gpipe_tied_lm/train.py"
SHORT = ('"--epochs", type=int, default=4', '"--epochs", type=int, default=1')
SUMMED = (
    "            if stages > 1 and (module.first or module.last):\n"
    "                dist.all_reduce(module.table.grad, group=tied)\n"
)

MISTAKES = (
    mistake(
        "tied-table-not-summed",
        TIED,
        "tied-apart",
        "The first and the last stage have the table of the tokens, and each trains its own copy.",
        (SUMMED, ""),
        SHORT,
    ),
    mistake(
        "one-stage-in-the-checkpoint",
        divided.PIPELINE,
        "one-stage-saved",
        "Rank 0 saves its own layers only.",
        *OWN_FILE,
        (
            divided.LOADED,
            '        if rank == 0:\n            stage.load_state_dict(saved["stage"])\n'
            '            optimizer.load_state_dict(saved["optimizer"])\n',
        ),
    ),
    mistake(
        "other-batches-for-parts-of-a-layer",
        divided.LAYERS,
        "batches-of-a-layer-differ",
        "The sampler divides the samples among the ranks that have parts of the same layers.",
        (divided.SAMPLER, "DistributedSampler(train_set, seed=4)"),
    ),
)

STYLES = (
    style(
        "tied-table-from-one-stage",
        TIED,
        "The last stage gets the gradient of the first one, adds its own, and sends the sum back.",
        (
            SUMMED,
            "            if stages > 1 and (module.first or module.last):\n"
            "                dist.reduce(module.table.grad, 0, group=tied)\n"
            "                dist.broadcast(module.table.grad, 0, group=tied)\n",
        ),
        SHORT,
    ),
    style("pipeline-by-hand", divided.PIPELINE, "A pipeline of two stages; rank 0 gathers and saves both."),
    style(
        "pipeline-with-a-file-for-each-stage",
        divided.PIPELINE,
        "Each rank saves and loads its own stage.",
        (divided.GATHERED, ""),
        (
            '        if rank == 0:\n            print(f"epoch',
            '        if True:\n            print(f"rank {rank}, epoch',
        ),
        (
            divided.SAVED,
            '            state = {"stage": stage.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}\n'
            '            torch.save(state, f"{rank}.part")\n',
        ),
        ('os.replace(CHECKPOINT + ".part", CHECKPOINT)', 'os.replace(f"{rank}.part", f"{rank}-{CHECKPOINT}")'),
        ("os.path.exists(CHECKPOINT)", 'os.path.exists(f"{rank}-{CHECKPOINT}")'),
        ("torch.load(CHECKPOINT)", 'torch.load(f"{rank}-{CHECKPOINT}")'),
        (
            divided.LOADED,
            '        stage.load_state_dict(saved["stage"])\n        optimizer.load_state_dict(saved["optimizer"])\n',
        ),
    ),
    style("layers-divided-by-hand", divided.LAYERS, "Two ranks have parts of each layer, and see the same batches."),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
