"""Automatic mixed precision with a GradScaler."""

from workshop.check.evidence.events import ScaledClipped
from workshop.check.evidence.misuses import HalfUnscaled
from workshop.check.evidence.run import Run
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import plural


@rule(
    why="The scale makes all gradients thousands of times larger. Clipping then always reduces them to the limit, and after the "
    "scale is removed, the step is thousands of times too small.",
    fix="Call unscale_(optimizer) of the GradScaler once before clip_grad_norm_, after the last backward() of the step.",
    anywhere=True,
)
def clipped_while_scaled(run: Run) -> Said:
    """Gradients are clipped while they contain the scale of a GradScaler."""
    for process in run.trained[:1] or run.ranks[:1]:
        clipped = process.of(ScaledClipped)
        for event in clipped[:1]:
            times = plural(len(clipped), "time")
            yield Seen(f"gradients are clipped {times} while they contain the scale {event.scale:g}", event.where)


@rule(
    why="Gradients below 3e-8 become 0 in float16, so parts of the model stop learning, and values above 65504 become infinite.",
    fix="Use dtype=torch.bfloat16, which has the range of float32; or keep float16 and use GradScaler: "
    "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update().",
    needs=(HalfUnscaled,),
    anywhere=True,
)
def half_unscaled(run: Run) -> Said:
    """Autocast computes the forward pass in float16, and no GradScaler scales the loss."""
    for process in run.trained[:1]:
        for event in process.of(HalfUnscaled)[:1]:
            yield Seen("autocast computes in float16, and no GradScaler scales the loss", event.where)
