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

MISTAKES = (
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
