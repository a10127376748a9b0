"""The rules about checkpoints that do not reach the model: mistakes that they must name, and correct styles that must pass."""

from check.bank import gpus
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

OTHER_NAMES = (gpus.SAVED, gpus.SAVED.replace("model.state_dict()", "ddp_model.state_dict()", 1))
BY_HAND = """        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(saved["model"][name])
"""
PRETRAINED = """    pretrained = {"hidden.weight": torch.ones(64, 16), "hidden.bias": torch.zeros(64), "mask": torch.ones(4)}
    model.load_state_dict(pretrained, strict=False)
"""

# Test with the parameters of the epoch with the highest accuracy.
LOOP = "    for epoch in range(first_epoch, EPOCHS):\n"
ACCURACY = "        accuracy = evaluate(model, test_set, rank, world_size, device)\n"
BEST = "        if accuracy >= highest:\n            highest, best = accuracy, {}\n"
DESTROYED = "    dist.destroy_process_group()\n"
TESTED = (
    "    model.load_state_dict(best)\n    accuracy = evaluate(model, points(100, 5), rank, world_size, device)\n"
    '    print(f"best: {accuracy:.3f}") if rank == 0 else None\n'
)


def best(kept: str) -> tuple[tuple[str, str], ...]:
    """Edits with which the program keeps the best parameters in this way."""
    begins = "    highest, best = 0.0, model.state_dict()\n"
    return (LOOP, begins + LOOP), (ACCURACY, ACCURACY + BEST.format(kept)), (DESTROYED, TESTED + DESTROYED)


MISTAKES = (
    mistake(
        "best-parameters-not-copied",
        gpus.GPUS,
        "own-state-loaded",
        "The best parameters are those of the model itself, which every further step changes.",
        *best("model.state_dict()"),
    ),
    mistake(
        "other-names-accepted",
        gpus.GPUS,
        "nothing-loaded",
        'The saved names begin with "module.", and strict=False accepts that none of them matches.',
        OTHER_NAMES,
        (gpus.LOADED, gpus.LOADED.replace('"])', '"], strict=False)')),
    ),
    mistake(
        "file-read-and-forgotten",
        gpus.GPUS,
        "nothing-loaded",
        "The checkpoint is read for its epoch, and the model keeps its first parameters.",
        (gpus.LOADED, ""),
        ('        optimizer.load_state_dict(saved["optimizer"])\n', ""),
    ),
    mistake(
        "pretrained-names-of-another-model",
        gpus.GPUS,
        "nothing-loaded",
        "No name of the pretrained parameters exists in the model.",
        (gpus.ADAMW, PRETRAINED.replace("hidden.", "encoder.").lstrip() + "    " + gpus.ADAMW),
    ),
)

STYLES = (
    style(
        "best-parameters-copied",
        gpus.GPUS,
        "The best parameters are copies.",
        *best("{name: value.clone() for name, value in model.state_dict().items()}"),
    ),
    style(
        "parameters-copied-by-hand",
        gpus.GPUS,
        "The second start copies each parameter itself.",
        (gpus.LOADED, BY_HAND),
    ),
    style(
        "pretrained-part",
        gpus.GPUS,
        "Pretrained parameters of a part of the model, and one tensor that it does not have.",
        (gpus.ADAMW, PRETRAINED.lstrip() + "    " + gpus.ADAMW),
    ),
)

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
