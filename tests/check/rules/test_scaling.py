"""The rules about GradScaler: mistakes that they must name, and correct styles that must pass."""

from check.bank import gpus
from check.bank.case import mistake, style
from check.bank.cases import bank_tests

CLIP = "nn.utils.clip_grad_norm_(ddp_model.parameters(), 1.0)"
RESTORED = (gpus.SCALER_SAVED, gpus.SCALER_LOADED)
SCHEDULE = "    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)\n"

MISTAKES = (
    mistake(
        "float16-without-a-scaler",
        gpus.GPUS,
        "half-unscaled",
        "Small gradients become zero, because nothing scales the loss.",
        gpus.HALF,
    ),
    mistake(
        "clipped-before-unscale",
        gpus.GPUS,
        "clipped-while-scaled",
        "The gradients are clipped before the scaler has divided them by its scale.",
        gpus.HALF, gpus.SCALER, gpus.scaled(CLIP), *RESTORED,
    ),
    mistake(
        "values-clipped-before-unscale",
        gpus.GPUS,
        "clipped-while-scaled",
        "The same with clip_grad_value_(), and unscale_() after it.",
        gpus.HALF, gpus.SCALER, gpus.scaled(CLIP.replace("norm", "value"), "scaler.unscale_(optimizer)"), *RESTORED,
    ),
)  # fmt: skip

STYLES = (
    style(
        "clipped-after-unscale",
        gpus.GPUS,
        "The scaler skips its first steps; clipping follows unscale_(), and a schedule takes a step after skipped ones too.",
        gpus.HALF, (gpus.SCALER[0], gpus.SCALER[1] + SCHEDULE),
        (gpus.scaled()[0], gpus.scaled("scaler.unscale_(optimizer)", CLIP)[1] + "            schedule.step()\n"),
        (gpus.SAVED, gpus.SCALER_SAVED[1].replace("}", ', "schedule": schedule.state_dict()}')),
        (gpus.LOADED, gpus.SCALER_LOADED[1] + '        schedule.load_state_dict(saved["schedule"])\n'),
    ),
    style(
        "clipped-with-a-scaled-limit",
        gpus.GPUS,
        "The limit of the norm is multiplied by the scale.",
        gpus.HALF, gpus.SCALER, gpus.scaled(CLIP.replace("1.0", "scaler.get_scale()")), *RESTORED,
    ),
)  # fmt: skip

test_replay, test_for_real = bank_tests(__file__, MISTAKES, STYLES)
