"""Automatic mixed precision with a GradScaler."""

from workshop.check.evidence.events import ScaledClipped
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
